"""`make_dispatcher`: what ranks must agree on is compared when a dispatcher is made, and what can't move is refused
then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from epmoe import EPGroup, ExpertPlacement, MoEConfig, MoELayer
from epmoe.dispatch import make_dispatcher
from epmoe.testing import RankFailed, run_ranks


def made(rank: int, ranks: int, arguments: list[dict[str, Any]]) -> str:
    options = {"name": "auto", **arguments[rank]}
    ep = EPGroup(timeout=30)
    d = make_dispatcher(
        options.pop("name"), ep, ExpertPlacement.contiguous(6, ranks), "cpu", layer="blocks.3", **options
    )
    assert d.experts_per_rank == 3
    return d.name


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([{"max_tokens_per_rank": 8}, {}], "max_tokens_per_rank: rank 0 has 8, rank 1 has None"),
        ([{"name": "symmetric", "max_tokens_per_rank": n} for n in (4, 5)], "rank 0 has 4, rank 1 has 5"),
        ([{"storable": False}, {}], "storable: rank 0 has False, rank 1 has True"),
        ([{}, {"name": "hierarchical"}], "dispatcher: rank 0 has auto, rank 1 has hierarchical"),
    ],
)
def test_ranks_that_differ_are_told_so_by_value_instead_of_waiting(
    arguments: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(RankFailed, match=f"layer 'blocks.3': make_dispatcher differs between ranks.*{message}"):
        run_ranks(made, 2, args=(arguments,), timeout=60)


def test_ranks_that_agree_get_what_they_asked_for() -> None:
    assert run_ranks(made, 2, args=([{"max_tokens_per_rank": 8}] * 2,), timeout=60) == ["all_to_all"] * 2
    assert run_ranks(made, 2, args=([{"name": "symmetric", "max_tokens_per_rank": 8}] * 2,)) == ["symmetric"] * 2


def refused(rank: int, ranks: int) -> None:
    """Of widths and dtypes, when a layer or a dispatcher is made: no row has moved."""
    config = MoEConfig(20, 16, 4, 2, dispatcher="symmetric", max_tokens_per_rank=8)
    with pytest.raises(ValueError, match="layer 'blocks.3': rows of 40 bytes.*multiple of 16; use .*'all_to_all'"):
        MoELayer(config, EPGroup(timeout=30), dtype=torch.bfloat16, name="blocks.3")
    MoELayer(config, EPGroup(timeout=30), dtype=torch.float32, name="blocks.3")  # 80 bytes
    on_cuda: Any = SimpleNamespace(device=torch.device("cuda"))
    placement = ExpertPlacement.contiguous(4, ranks)
    symmetric = make_dispatcher("symmetric", EPGroup(timeout=30), placement, "cpu", max_tokens_per_rank=8)
    nodes = make_dispatcher("hierarchical", EPGroup(timeout=30, nodes=[0, 0, 1]), placement, "cpu", layer="blocks.3")
    assert symmetric.row_refusal(32, torch.float64) is None and nodes.row_refusal(3, torch.float64) is None
    nodes.one_sided = True  # type: ignore[attr-defined]
    alone = rank == 2  # on its node, where nothing is stored
    for d, way_out in ((symmetric, "use dispatcher='all_to_all'"), (nodes, "set the dispatcher's one_sided to False")):
        if alone and d is nodes:
            assert d.row_refusal(3, torch.float32) is None
            continue
        d.owner = on_cuda
        for width, dtype, why in ((32, torch.float64, "float64 rows"), (3, torch.float32, "rows of 12 bytes")):
            said = d.row_refusal(width, dtype)
            assert said is not None and f"layer {d.layer!r}: " in said and why in said and way_out in said
        assert d.row_refusal(32, torch.bfloat16) is None


def test_rows_that_can_not_be_stored_to_peers_are_refused_when_a_layer_is_made() -> None:
    run_ranks(refused, 3, timeout=60)
