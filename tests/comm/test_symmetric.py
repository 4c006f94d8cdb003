"""Symmetric memory: one buffer per rank that all ranks map, channels that are shared, and what is refused."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import epmoe.comm.symmetric as symmetric
from epmoe import EPGroup, PeerError
from epmoe.comm.symmetric import EMPTY, Channel, channel_for, unreachable
from epmoe.testing import RankFailed, run_ranks

SHARED = Path("/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir())


def every_rank_writes_to_every_other(rank: int, ranks: int) -> list[int]:
    channel = channel_for(EPGroup(timeout=30), 1000, words=True)
    assert all(bool((peer == EMPTY).all()) for peer in channel.peers)
    dist.barrier()
    for peer, words in enumerate(channel.peers):
        words[128 + rank] = 10 * rank + peer
    dist.barrier()
    return channel.peers[rank][128 : 128 + ranks].tolist()


def test_what_a_rank_writes_to_a_peers_buffer_the_peer_reads() -> None:
    for rank, read in enumerate(run_ranks(every_rank_writes_to_every_other, 3)):
        assert read == [rank, 10 + rank, 20 + rank]


def names_left(rank: int, ranks: int) -> list[str]:
    before = set(SHARED.iterdir())
    dist.barrier()
    channel_for(EPGroup(timeout=30), 4096, words=False)
    return [path.name for path in set(SHARED.iterdir()) - before if path.name.startswith("epmoe-symmetric-")]


def test_shared_memory_has_no_name_once_all_ranks_have_mapped_it() -> None:
    assert run_ranks(names_left, 2) == [[], []]


def channels_of_two_groups(rank: int, ranks: int) -> None:
    one, other = EPGroup(timeout=30), EPGroup(timeout=30)
    first = channel_for(one, 5000, words=True)
    assert channel_for(one, 4000, words=True) is first, "a smaller need gets the same"
    larger = channel_for(one, 50_000, words=True)
    assert larger is not first and one.channels == [first, larger], "captured graphs hold the first one's addresses"
    assert channel_for(one, 5000, words=False) not in (first, larger), "twins and kernels leave other things in slots"
    assert channel_for(other, 5000, words=True) not in one.channels
    assert first.half_bytes >= 5000 and sum(b.numel() for b in first.buffers[:1]) == Channel.nbytes(one, 5000)


def test_a_group_shares_channels_and_two_groups_share_none() -> None:
    run_ranks(channels_of_two_groups, 2)


def served_then_trained(rank: int, ranks: int) -> None:
    ep = EPGroup(timeout=30)
    ep.beside.copies = ep.beside.by_copies = True
    rows = torch.arange(2.0 * ranks)[:, None] + 10 * rank
    for inference in (True, False):
        with torch.inference_mode(inference):
            channel_for(ep, 512, words=False).half(rank, 1).fill_(0)
            out, work = ep.all_to_all_async(rows.clone(), most_rows=2)
            work.wait()
        assert out[:, 0].tolist() == [10.0 * peer + 2 * rank + n for peer in range(ranks) for n in (0, 1)]


def test_memory_made_in_inference_mode_serves_training_too() -> None:
    run_ranks(served_then_trained, 2)


def on_two_hosts(rank: int, ranks: int) -> str:
    symmetric.host_identity = lambda: f"host {rank // 2}"  # type: ignore[assignment]
    ep = EPGroup(timeout=30)
    why = unreachable(ep)
    assert why is not None and unreachable(ep) is why
    with pytest.raises(ValueError, match="can't use symmetric memory: its 3 ranks are on 2 hosts; use.*'all_to_all'"):
        channel_for(ep, 100, words=True)
    return why


def test_ranks_on_two_hosts_are_refused_with_the_way_out() -> None:
    assert len(set(run_ranks(on_two_hosts, 3))) == 1


def first_operations_differ(rank: int, ranks: int) -> None:
    channel = channel_for(EPGroup(timeout=30), 100, words=True)
    compiled = []
    for _ in range(2):
        channel.meet("send", {"capacity": 8}, lambda: compiled.append(1))
    assert compiled == [1], "once per kind and shape"
    channel.meet("send", {"capacity": 9 + rank, "H": 64}, lambda: None)


def test_ranks_that_disagree_at_the_first_operation_learn_in_what() -> None:
    with pytest.raises(RankFailed, match="send over symmetric memory differs.*capacity: rank 0 has 9, rank 1 has 10"):
        run_ranks(first_operations_differ, 2)


def one_compiles_longer(rank: int, ranks: int) -> str:
    ep = EPGroup(timeout=1)
    channel = channel_for(ep, 100, words=True)
    channel.meet("send", {}, lambda: time.sleep(2.5 * rank))
    symmetric.COMPILING = 1.5
    if rank == 1:
        return ""
    with pytest.raises(PeerError) as failure:
        channel.meet("give back", {}, lambda: None)
    return str(failure.value)


def test_the_first_operation_waits_for_a_peer_that_compiles_beyond_the_deadline() -> None:
    message, _ = run_ranks(one_compiles_longer, 2)
    assert "give back over symmetric memory" in message and "ranks [1] have not come (limit 1.5 s)" in message


def failed_wait(rank: int, ranks: int) -> str:
    channel = channel_for(EPGroup(timeout=30), 100, words=True)
    channel.begin("layer 'a', dispatch")
    code = channel.begin("layer 'b', combine")
    channel.check()
    channel.fault[0] = code << 8 | 2  # what a kernel writes: peer 1 did not come
    with pytest.raises(RuntimeError) as failure:
        channel.begin("layer 'a', dispatch")
    return str(failure.value)


def test_a_failed_wait_names_group_rank_peer_and_operation_at_the_next_call() -> None:
    (message,) = run_ranks(failed_wait, 1)
    assert "layer 'b', combine: rank 1 has not delivered (limit 30 s)" in message
    assert "rank 0 of 1" in message and "group '" in message


def full_disk(rank: int, ranks: int) -> None:
    def no_room(*_: int) -> None:
        raise OSError(28, "No space left on device")

    os.posix_fallocate = no_room  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="no room for .* bytes of shared memory.*lower max_tokens_per_rank"):
        channel_for(EPGroup(timeout=30), 100, words=True)


def test_too_little_shared_memory_is_an_error_and_not_a_crash_later() -> None:
    run_ranks(full_disk, 1)


def wakes_up(rank: int, ranks: int) -> list[int]:
    """Twins: counts announced in many turns, each rank late in turns."""
    channel = channel_for(EPGroup(timeout=30), 100, words=False)
    heard = []
    for n in range(12):
        if n % ranks == rank:
            torch.rand(200, 200).mm(torch.rand(200, 200))
        with channel.one_turn():
            channel.announce(100 * n + rank, 0)
            heard += [channel.announced(peer, 0) for peer in range(ranks) if peer != rank]
    return heard


def test_each_turn_hears_that_turns_counts() -> None:
    for rank, heard in enumerate(run_ranks(wakes_up, 3)):
        assert heard == [100 * n + peer for n in range(12) for peer in range(3) if peer != rank]
