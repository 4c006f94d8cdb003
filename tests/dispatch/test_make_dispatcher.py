"""`make_dispatcher`: what ranks must agree on is compared when a dispatcher is made, whatever its kind and once for a
layer, and what `auto` takes where rows can't be stored to peers."""

from __future__ import annotations

import re
import time
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from epmoe import EPGroup, ExpertPlacement, MoEConfig, MoELayer, PeerError, QuantConfig
from epmoe.dispatch import RowSpec, _suited, make_dispatcher
from epmoe.testing import run_ranks

E = 6


def made(ep: EPGroup, name: str = "auto", placement: ExpertPlacement | None = None, **options: Any) -> str:
    placement = placement or ExpertPlacement.contiguous(E, ep.num_ranks)
    return make_dispatcher(name, ep, placement, ep.device, layer="blocks.3", **options).name


DIFFERING: list[tuple[list[dict[str, Any]], str]] = [  # what each rank asks for, and what it is told
    ([{"max_tokens_per_rank": 8}, {}], "max_tokens_per_rank: rank 0 has 8, rank 1 has None"),
    ([{"name": "symmetric", "max_tokens_per_rank": n} for n in (4, 5)], "rank 0 has 4, rank 1 has 5"),
    ([{"rows": RowSpec(32, torch.bfloat16)}, {}], "rows.width: rank 0 has 32, rank 1 has (unset)"),
    (
        [{"rows": RowSpec(32, torch.bfloat16, scheme=s)} for s in ("fp8_row", "int8_row")],
        "rows.scheme: rank 0 has fp8_row, rank 1 has int8_row",
    ),
    (
        [{}, {"placement": ExpertPlacement.strided(E, 2)}],
        "placement: rank 0 has contiguous over 2 ranks, rank 1 has strided over 2 ranks",
    ),
    (
        [{"placement": ExpertPlacement(E, ((0, 1), (2, 3, 4, 5)))}, {}],
        "placement: rank 0 has ((0, 1), (2, 3, 4, 5)) over 2 ranks, rank 1 has contiguous over 2 ranks",
    ),
    ([{"placement": ExpertPlacement.contiguous(E, 3)}, {}], "placement: rank 0 has contiguous over 3 ranks, rank 1 "),
]
KINDS = ("auto", "local", "all_gather", "all_to_all", "all_to_all_fixed", "hierarchical", "symmetric", "nonsense")


def differ(rank: int, ranks: int) -> None:
    ep = EPGroup(timeout=30)
    kinds = [({"name": a}, {"name": b}) for a in KINDS for b in KINDS if a != b]
    told = [f"dispatcher: rank 0 has {a['name']}, rank 1 has {b['name']}" for a, b in kinds]
    asked = [[dict(one, max_tokens_per_rank=8) for one in pair] for pair in kinds]
    for arguments, message in (*DIFFERING, *zip(asked, told, strict=True)):
        start = "layer 'blocks.3': make_dispatcher differs between ranks.*"
        with pytest.raises(ValueError, match=start + re.escape(message)):
            made(ep, **arguments[rank])
    assert made(ep, "all_to_all", max_tokens_per_rank=8) == "all_to_all", "the group is as it was"


def test_ranks_that_ask_for_other_kinds_are_told_so_by_value_instead_of_waiting() -> None:
    run_ranks(differ, 2, timeout=60)


@pytest.mark.gpu2
def test_ranks_on_gpus_are_told_too() -> None:
    run_ranks(differ, 2, backend="nccl", timeout=120)


def agree(rank: int, ranks: int) -> list[str]:
    ep, names = EPGroup(timeout=30), []
    for name in KINDS[:-1]:
        if name == "local":
            with pytest.raises(ValueError, match="dispatcher='local' with 3 ranks"):
                made(ep, name)
            continue
        names.append(made(ep, name, max_tokens_per_rank=8))
    one_of_three = "all_gather" if rank == 1 else "all_to_all"
    message = "dispatcher: rank 0 has all_to_all, rank 1 has all_gather, rank 2 has all_to_all"
    with pytest.raises(ValueError, match=message):
        made(ep, one_of_three)
    return names


def test_ranks_that_agree_get_what_they_asked_for_and_one_of_three_is_named() -> None:
    assert run_ranks(agree, 3, timeout=60) == [["all_to_all", *KINDS[2:-1]]] * 3


def comes_late(rank: int, ranks: int, name: str) -> str:
    """In a group of the caller's, whose own deadline is run_ranks' many seconds."""
    ep = EPGroup(dist.group.WORLD, device="cpu", timeout=2)
    if rank == 1:
        return ""
    started = time.monotonic()
    with pytest.raises(PeerError) as late:
        made(ep, name)
    assert 1.9 < time.monotonic() - started < 20, "not at the deadline"
    return str(late.value)


def test_a_rank_that_makes_no_dispatcher_is_missed_within_the_groups_deadline() -> None:
    said, _ = run_ranks(comes_late, 2, args=("all_to_all",), timeout=60)
    for part in ("rank 0 of 2", "layer 'blocks.3': make_dispatcher, compared over the ranks", "limit 2 s"):
        assert part in said


def exchanged(rank: int, ranks: int) -> None:
    """What making dispatchers and layers moves between ranks."""
    ep, honest = EPGroup(timeout=30), EPGroup.all_gather_async
    ep.nodes  # noqa: B018  (found once for all layers)
    moved: list[int] = []

    def gather(self: EPGroup, buffer: torch.Tensor) -> Any:
        moved.append(buffer.numel() * buffer.itemsize)
        return honest(self, buffer)

    def nothing_else(*args: Any, **options: Any) -> None:
        raise AssertionError("another collective")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EPGroup, "all_gather_async", gather)
        for name in ("all_gather_object", "all_gather", "all_reduce", "barrier", "broadcast", "all_to_all_single"):
            patch.setattr(dist, name, nothing_else)
        for name in ("auto", "all_gather", "all_to_all", "all_to_all_fixed"):
            moved.clear()
            made(ep, name, max_tokens_per_rank=8)
            assert moved == [32], "one small agreement for each dispatcher"
            moved.clear()
            layer = MoELayer(MoEConfig(16, 8, E, 2, dispatcher=name, max_tokens_per_rank=8), ep)
            assert moved == [32], "a layer and its dispatcher share one"
            layer.kernel(torch.device("cpu"), torch.bfloat16)
            assert moved == [32], "nor is there another for rows of another dtype"
    alone = EPGroup(dist.new_group([rank], use_local_synchronization=True), device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EPGroup, "all_gather_async", nothing_else)
        made(alone, "all_to_all")


def test_a_dispatcher_costs_one_agreement_and_a_layer_none_more_than_its_own() -> None:
    run_ranks(exchanged, 2, timeout=60)


# ---- auto


def on_gpus(reachability: str = "") -> Any:
    """A group of two GPUs of one node that reach each other, as `_suited` asks it."""
    said: list[str] = []
    nodes = SimpleNamespace(two_levels=False)
    return SimpleNamespace(
        num_ranks=2, nodes=nodes, device=torch.device("cuda"), reachability=reachability, rank=0, said=said,
        warn_once=said.append,
    )  # fmt: skip


def test_auto_stores_rows_to_peers_only_where_they_can_be_and_says_why_not() -> None:
    ep = on_gpus()
    assert [_suited(ep, n, None) for n in (None, 8, 8192)] == ["all_to_all", "symmetric", "all_to_all"]
    plain = MoEConfig(2880, 64, 4, 2, max_tokens_per_rank=8)
    cases: list[tuple[dict[str, Any], torch.dtype, str]] = [
        ({}, torch.bfloat16, ""),
        ({"quant": QuantConfig("fp8_row", scales="static")}, torch.bfloat16, ""),
        ({}, torch.float64, "float64 rows"),
        ({"hidden_size": 72}, torch.bfloat16, ""),
        ({"hidden_size": 68}, torch.bfloat16, "rows of 136 bytes"),
        ({"hidden_size": 72, "dispatch_scheme": "fp8_row"}, torch.bfloat16, "fp8_row rows of 72 bytes"),
        ({"hidden_size": 72, "quant": QuantConfig("int8_row", scales="static")}, torch.bfloat16, "int8_row rows of 72"),
        ({"latent_size": 72, "quant": QuantConfig("fp8_row")}, torch.bfloat16, "fp8_row rows of 72 bytes"),
        ({"quant": QuantConfig(combine="fp8_block")}, torch.bfloat16, r"(combine_scheme='fp8_block')"),
        ({"quant": QuantConfig(gradients="fp8_block")}, torch.bfloat16, r"(grad_scheme='fp8_block')"),
    ]
    for fields, dtype, why in cases:
        config = MoEConfig(**{**vars(plain), **fields})
        ep.said.clear()
        assert _suited(ep, 8, RowSpec.of(config, dtype)) == ("all_to_all" if why else "symmetric"), fields
        assert len(ep.said) == bool(why) and all(why in text for text in ep.said), (fields, ep.said)
    # where something else is in the way, the rows are not to blame
    narrow = RowSpec(72, torch.bfloat16, scheme="fp8_row")
    for group, tokens in ((on_gpus("two hosts"), 8), (on_gpus(), 8192), (on_gpus(), None)):
        assert _suited(group, tokens, narrow) == "all_to_all" and not group.said


def warned(rank: int, ranks: int) -> tuple[int, int]:
    """Of many layers alike, in two groups."""
    counts = []
    for ep in (EPGroup(timeout=30), EPGroup(timeout=30)):
        ep.reachability = "its 2 ranks are on 2 hosts"
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            for _ in range(3):
                assert made(ep, "symmetric", max_tokens_per_rank=8) == "all_to_all"
        counts.append(len(heard))
        assert "symmetric' becomes 'all_to_all': its 2 ranks are on 2 hosts" in str(heard[0].message)
        assert heard[0].filename == __file__
    return counts[0], counts[1]


def test_a_group_says_once_why_it_takes_another_dispatcher() -> None:
    assert run_ranks(warned, 2, timeout=60) == [(1, 1)] * 2
