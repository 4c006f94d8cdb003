"""Where `hierarchical` is chosen, what it plans, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from epmoe import EPGroup, ExpertPlacement, make_dispatcher
from epmoe.testing import RankFailed, run_ranks
from tests.dispatch.hierarchical_cases import CAP, NODES, E, H, make
from tests.test_kernel import K as KERNEL_K
from tests.test_kernel import make_kernel


def chosen(rank: int, ranks: int, labels: list[int]) -> str:
    return make("auto", EPGroup(nodes=labels, timeout=60)).name


def test_auto_goes_by_nodes_only_where_there_are_two_levels() -> None:
    for nodes, name in (("1x2", "all_to_all"), ("2x1", "all_to_all"), ("2+1", "hierarchical")):
        assert set(run_ranks(chosen, len(NODES[nodes]), args=(NODES[nodes],))) == {name}


def planned(rank: int, ranks: int, labels: list[int]) -> dict[str, int]:
    kernel, _ = make_kernel(rank, ranks, "hierarchical", "grouped", "standard", EPGroup(nodes=labels))
    plan = kernel.memory_plan(8, KERNEL_K)
    assert kernel.memory_plan(4, KERNEL_K).peak < plan.peak
    found = {b.name: b.nbytes for b in plan.buffers}
    kernel.dispatcher.one_sided = True  # type: ignore[attr-defined]
    found |= {f"one-sided {b.name}": b.nbytes for b in kernel.memory_plan(8, KERNEL_K).buffers}
    return found


def test_the_memory_plan_holds_what_is_relayed() -> None:
    """8 tokens of width 16 in float32, K = 2: rows of 80 bytes with ids and weights, of 64 on the way back."""
    found = run_ranks(planned, 3, args=(NODES["2+1"],))
    rows = {"rows sent": (16, 80), "rows received": (24, 80), "rows that came back": (16, 64)}
    # rank 0 relays for itself and rank 2, rank 1 for itself
    relayed = {"rows relayed": (1, 80), "rows passed on": (2, 80), "sums of the node": (1, 64)}
    for rank, sources in ((0, 16), (1, 8)):
        wanted = rows | {name: (n * sources, row) for name, (n, row) in relayed.items()}
        for name, (n, row) in wanted.items():
            assert found[rank][name] == -(-n * row // 512) * 512, (rank, name)
        # two ranks with a place for 9 tokens of each of two sources, the most that either relays
        assert found[rank]["one-sided rows received"] == -(-2 * 18 * 80 // 512) * 512
        assert found[rank]["one-sided slots inside the node"] >= 2 * 2 * 18 * 80
    assert not set(relayed) & set(found[2]), "a rank alone on its node passes nothing on"


def refusals(rank: int, ranks: int, labels: list[int]) -> list[str]:
    """What rows can't be stored into peers' memory; nothing has moved inside the node by then."""
    said = []
    for width, tokens, options in ((H, CAP + 1, {}), (3, 1, {}), (32, 1, {"scheme": "fp8_row"})):
        d = make("hierarchical", EPGroup(nodes=labels, timeout=60), "blocks.3.moe")
        d.one_sided = True  # type: ignore[attr-defined]
        try:
            x, ids = torch.ones(tokens, width), torch.arange(ranks, dtype=torch.int32).expand(tokens, ranks)
            rows = d.dispatch(x, ids.contiguous(), torch.ones(tokens, ranks))
            d.combine_async(rows.x, rows.handle, **options).wait()  # type: ignore[arg-type]
        except ValueError as error:
            said.append(str(error))
    return said


def test_one_sided_steps_say_what_they_can_not_store() -> None:
    for few, narrow, quantized in run_ranks(refusals, 4, args=(NODES["2x2"],)):
        assert "10 tokens with max_tokens_per_rank=9" in few and "so raise it" in few
        assert "rows of 12 bytes can't be stored to peers" in narrow and "one_sided to False" in narrow
        assert "scheme='fp8_row') with one_sided=True" in quantized


def test_without_a_group_it_is_refused() -> None:
    with pytest.raises(ValueError, match="dispatcher='hierarchical' needs an EPGroup; pass ep=, or use 'local'"):
        make_dispatcher("hierarchical", None, ExpertPlacement.contiguous(E, 1), "cpu")


def test_a_failure_is_the_one_rank_s() -> None:
    with pytest.raises(RankFailed, match="nodes="):
        run_ranks(chosen, 2, args=([0, 1, 1],))
