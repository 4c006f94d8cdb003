"""Nodes: what is said about them, where rows enter one, and the communicator inside."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from epmoe import EPGroup, PeerError
from epmoe.comm.nodes import Nodes, declared_labels
from epmoe.comm.symmetric import unreachable
from epmoe.testing import RankFailed, run_ranks


def test_rows_enter_a_node_at_the_sender_s_own_index_and_stay_with_it_at_home() -> None:
    even = Nodes.of([0, 0, 0, 1, 1, 1])
    assert even.ranks == ((0, 1, 2), (3, 4, 5)) and even.two_levels
    assert even.entrances == ((0, 3), (1, 4), (2, 5), (0, 3), (1, 4), (2, 5))
    uneven = Nodes.of("abaab")  # labels may come in any order
    assert uneven.ranks == ((0, 2, 3), (1, 4)) and uneven.beside(4) == (1, 4)
    assert uneven.places == ((0, 0), (1, 0), (0, 1), (0, 2), (1, 1))
    assert uneven.entrances == ((0, 1), (0, 1), (2, 4), (3, 1), (2, 4))
    for rank, (node, _) in enumerate(uneven.places):
        assert uneven.entrances[rank][node] == rank


@pytest.mark.parametrize("labels", [[0, 0, 0], [0, 1, 2], [0]])
def test_one_node_and_one_rank_on_each_have_one_level(labels: list[int]) -> None:
    assert not Nodes.of(labels).two_levels


def test_nodes_are_said_by_number_by_label_or_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert declared_labels(2, 5) == (0, 0, 1, 1, 2)
    assert declared_labels(["a", "b", "a"], 3) == ("a", "b", "a")
    assert declared_labels(None, 3) is None
    monkeypatch.setenv("EPMOE_RANKS_PER_NODE", "3")
    assert declared_labels(None, 4) == (0, 0, 0, 1)
    assert declared_labels(1, 2) == (0, 1), "an argument says more than the environment"
    for value in ("0", "two", "-1"):
        monkeypatch.setenv("EPMOE_RANKS_PER_NODE", value)
        with pytest.raises(ValueError, match=f"EPMOE_RANKS_PER_NODE='{value}': must be an int > 0"):
            declared_labels(None, 4)
    with pytest.raises(ValueError, match="nodes=0: must be an int > 0"):
        declared_labels(0, 4)
    with pytest.raises(ValueError, match=r"nodes=\[0, 1\]: must be .* one label for each of the 3 ranks"):
        declared_labels([0, 1], 3)


def communicators(rank: int, ranks: int) -> list[object]:
    """By host, then declared: the same group inside is given each time, and moves this node's rows only."""
    assert EPGroup().nodes.ranks == ((0, 1, 2),), "the ranks of a test share a host"
    ep = EPGroup(nodes=[0, 1, 0])
    inside = ep.node_group()
    assert ep.node_group() is inside and inside.nodes.ranks == (tuple(range(inside.num_ranks)),)
    got, work = inside.all_gather_async(torch.tensor([rank]))
    inside.wait(work, "a test")
    whole = EPGroup(nodes=3)
    return [inside.rank, got.tolist(), whole.node_group() is whole]


def test_a_node_has_a_communicator_of_its_own_and_a_group_on_one_node_is_it_already() -> None:
    assert run_ranks(communicators, 3) == [[0, [0, 2], True], [0, [1], True], [1, [0, 2], True]]


def disagree(rank: int, ranks: int) -> None:
    _ = EPGroup(nodes=rank + 1).nodes


def test_ranks_that_declare_different_nodes_are_told_so() -> None:
    with pytest.raises(RankFailed, match=r"rank . declares nodes .*, rank . declares .*: make nodes= or EPMOE_RANKS"):
        run_ranks(disagree, 2)


def leaves(rank: int, ranks: int) -> list[str]:
    """Rank 1 takes no part; the process group's own deadline is that of run_ranks."""
    said = []
    for _ in range(2 if rank == 0 else 0):
        ep = EPGroup(dist.group.WORLD, device="cpu", timeout=1)
        started = time.monotonic()
        with pytest.raises(PeerError) as late:
            _ = ep.nodes if not said else unreachable(ep)
        assert time.monotonic() - started < 15, "not at the deadline"
        said.append(str(late.value))
    return said


def test_a_rank_that_does_not_say_where_it_is_is_missed_within_the_deadline() -> None:
    (nodes, memory), _ = run_ranks(leaves, 2, timeout=60)
    assert "rank 0 of 2" in nodes and "which ranks share a node" in nodes
    assert "whether ranks reach each other's memory" in memory


def gathered(rank: int, ranks: int) -> object:
    return EPGroup().gather({"rank": rank, "text": "x" * 1000 * rank}, "a test")


def test_what_ranks_tell_each_other_may_be_of_any_size() -> None:
    want = [{"rank": rank, "text": "x" * 1000 * rank} for rank in range(3)]
    assert run_ranks(gathered, 3) == [want] * 3
