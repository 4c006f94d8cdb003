"""`symmetric` on two GPUs: the bits of all-to-all, CUDA graphs between eager calls, late ranks, and very many round
trips."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from epmoe import EPGroup, PeerError
from epmoe.comm.beside import Manner
from epmoe.dispatch.all_to_all import AllToAllDispatcher
from epmoe.dispatch.symmetric import SymmetricDispatcher
from epmoe.testing import run_ranks
from tests.dispatch.test_symmetric import E, K, batch, make, owned, round_trip


def captured(rank: int, ranks: int, seed: int) -> list[float]:
    """Captures once, then replays with other inputs between eager calls of this layer and another."""
    ep = EPGroup(timeout=60)
    d, other = make(SymmetricDispatcher, ep, capacity=32), make(SymmetricDispatcher, ep, capacity=7, layer="other")
    g = torch.Generator("cuda").manual_seed(seed + rank)

    def draw(tokens: int) -> tuple[Tensor, ...]:
        ids = torch.rand(tokens, E, generator=g, device="cuda").argsort(1)[:, :K].int()
        ids[torch.rand(ids.shape, generator=g, device="cuda") < 0.2] = -1
        x = torch.randn(tokens, 1024, generator=g, device="cuda").bfloat16()
        return x, ids, torch.rand(tokens, K, generator=g, device="cuda")

    def call(d: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        rows = d.dispatch_async(x, ids, weights, scheme="fp8_block").wait().dequantized(torch.bfloat16)
        pairs = torch.where(owned(rows), rows.topk_weights, 0).sum(1, keepdim=True)
        return d.combine((rows.x * pairs).bfloat16(), rows.handle)

    errors = []
    with torch.no_grad():
        static = draw(20)
        for batch in (static, draw(7)):
            call(d, *batch)
            call(other, *(t[:7] for t in batch))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call(d, *static)
        for n in range(8):
            fresh = draw(20)
            want = call(d, *fresh)
            if n % 3 == rank:
                torch.cuda._sleep(10_000_000)
            for place, tensor in zip(static, fresh, strict=True):
                place.copy_(tensor)
            graph.replay()
            call(other, *draw(n))
            if n % 2:
                graph.replay()
            errors.append(float((out - want).abs().max()))
    torch.cuda.synchronize()
    for channel in ep.channels:
        channel.check()
    return errors


@pytest.mark.gpu2
def test_a_captured_round_trip_replays_between_eager_ones(seed: int) -> None:
    assert run_ranks(captured, 2, args=(seed,), backend="nccl", timeout=150) == [[0.0] * 8] * 2


def on_gpus_against_all_to_all(rank: int, ranks: int, seed: int) -> None:
    ep = EPGroup(timeout=60)
    for dtype in (torch.bfloat16, torch.float32):
        results = []
        for kind in (SymmetricDispatcher, AllToAllDispatcher):
            x, ids, weights = (t.cuda() for t in batch(rank, seed, dtype))
            experts = E + (dtype == torch.float32)
            results.append(round_trip(make(kind, ep, experts=experts), x, torch.where(ids < E, ids, -1), weights))
        for part, (a, b) in enumerate(zip(*results, strict=True)):
            assert torch.equal(a, b), (dtype, part)


@pytest.mark.gpu2
def test_on_gpus_rows_sums_and_gradients_are_those_of_all_to_all_to_the_bit(seed: int) -> None:
    run_ranks(on_gpus_against_all_to_all, 2, args=(seed,), backend="nccl", timeout=150)


def late_on_gpus(rank: int, ranks: int) -> str:
    d = make(SymmetricDispatcher, EPGroup(timeout=60))
    x, ids, weights = (t.cuda() for t in batch(0, 1))
    for _ in range(2):
        rows = d.dispatch(x, ids, weights)
        d.combine(rows.x, rows.handle)
    torch.cuda.synchronize()
    dist.barrier()
    d.ep.timeout = 1.0
    if rank == 1:
        time.sleep(4.0)
        return "late"
    started = time.monotonic()
    d.dispatch(x, ids, weights)
    torch.cuda.synchronize()
    assert 0.9 < time.monotonic() - started < 2.5, "not at the deadline"
    started = time.monotonic()
    with pytest.raises(PeerError) as failure:
        d.dispatch(x, ids, weights)
    assert time.monotonic() - started < 0.5
    return str(failure.value)


@pytest.mark.gpu2
def test_on_gpus_a_late_rank_is_an_error_at_the_next_call(seed: int) -> None:
    message, _ = run_ranks(late_on_gpus, 2, backend="nccl", timeout=90)
    assert "rank 1 has not delivered" in message and "blocks.3.moe', dispatch" in message


class RoundTrips:
    """Round trips of one group in the current stream, of rows that say which step, rank and token they are, and what
    was wrong: (words received, sums)."""

    def __init__(self, ep: EPGroup, seed: int, capacity: int = 24, width: int = 256) -> None:
        self.ep, self.ranks, self.capacity = ep, ep.num_ranks, capacity
        self.d = make(SymmetricDispatcher, ep, capacity=capacity)
        g = torch.Generator("cuda").manual_seed(seed)
        self.drawn = torch.rand(ep.num_ranks, capacity, E, generator=g, device="cuda").argsort(2)[..., :K].int()
        self.step = torch.zeros((), dtype=torch.int32, device="cuda")
        self.wrong = torch.zeros(2, dtype=torch.int64, device="cuda")
        self.token = torch.arange(capacity, device="cuda")
        self.column = torch.arange(width, device="cuda")

    def rows_of(self, source: int) -> tuple[Tensor, Tensor]:
        """What a rank sends in this step, which any rank can tell: whole numbers that float32 adds exactly."""
        code = ((self.step * self.ranks + source) * self.capacity + self.token)[:, None] * 7 + self.column
        return (code % 1_000_003).float(), (self.drawn[source] + self.step + source) % (E + 1) - 1  # with holes

    def one(self) -> None:
        rank, owner = self.ep.rank, self.d.owner
        x, ids = self.rows_of(rank)
        rows = self.d.dispatch(x, ids, torch.ones(self.capacity, K, device="cuda"))
        for source in range(self.ranks):
            sent, theirs = self.rows_of(source)
            goes = (torch.where(theirs >= 0, owner[theirs.clamp_min(0).long()], -1) == rank).any(1)
            here = slice(source * self.capacity, (source + 1) * self.capacity)
            self.wrong[0] += ((rows.x[here] != sent) & goes[:, None]).sum()
            self.wrong[0] += (owned(rows)[here].any(1) != goes).sum()
        out = self.d.combine(rows.x, rows.handle)
        owners = torch.where(ids >= 0, owner[ids.clamp_min(0).long()], -1)
        visited = sum((owners == r).any(1).int() for r in range(self.ranks))
        self.wrong[1] += (out != x * visited[:, None]).sum()  # type: ignore[index]
        self.step.add_(1)

    def captured(self, steps: int, stream: torch.cuda.Stream | None = None) -> torch.cuda.CUDAGraph:
        self.one()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(steps):
                self.one()
        return graph

    def result(self) -> tuple[int, int]:
        torch.cuda.synchronize()
        for channel in self.ep.channels:
            channel.check()
        return int(self.wrong[0]), int(self.wrong[1])


@torch.no_grad()
def many_round_trips(rank: int, ranks: int, steps: int, seed: int) -> tuple[int, int]:
    """Other traffic of the group runs beside them, and one rank is now and then late."""
    trips, steps_each = RoundTrips(EPGroup(timeout=60), seed), 50
    graph = trips.captured(steps_each)
    aside, flag = torch.cuda.Stream(), torch.ones(1 << 18, device="cuda")
    for n in range(steps // steps_each):
        if n % 97 == rank:
            torch.cuda._sleep(3_000_000)
        graph.replay()
        if n % 40 == 0:
            with torch.cuda.stream(aside):
                dist.all_reduce(flag)
        if n % 400 == 0:
            trips.one()
            torch.cuda.synchronize()
    return trips.result()


@pytest.mark.gpu2
def test_a_hundred_thousand_round_trips_have_no_wrong_row(seed: int) -> None:
    assert run_ranks(many_round_trips, 2, args=(100_000, seed), backend="nccl", timeout=150) == [(0, 0)] * 2


@torch.no_grad()
def three_groups(rank: int, ranks: int, steps: int, seed: int) -> list[tuple[int, int]]:
    """Each in a stream of its own, of sizes that fill the chip, launched in another order on each rank; now and then a
    computation that fills it too."""
    groups = [RoundTrips(EPGroup(timeout=60), seed + n, *size) for n, size in enumerate(SIZES)]
    for trips in groups:
        trips.one()
    assert [trips.ep.at_once for trips in groups] == [3] * 3
    streams, steps_each = [torch.cuda.Stream() for _ in groups], 10
    graphs = [trips.captured(steps_each, stream) for trips, stream in zip(groups, streams, strict=True)]
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for n in range(steps // steps_each):
        for turn in range(3):
            which = (turn + n + rank * (1 + n % 2)) % 3
            with torch.cuda.stream(streams[which]):
                if (n + turn) % 7 == rank:
                    torch.mm(a, a)
                if (n + turn) % 31 == rank:
                    torch.cuda._sleep(1_000_000)
                graphs[which].replay()
                if n % 5 == which:  # on every rank alike, whatever its order
                    groups[which].one()
    return [trips.result() for trips in groups]


SIZES = ((24, 256), (1024, 2048), (1500, 1024))  # both profiles


@pytest.mark.gpu2
def test_three_groups_at_once_on_streams_of_their_own_do_not_stand_in_each_others_way(seed: int) -> None:
    assert run_ranks(three_groups, 2, args=(600, seed), backend="nccl", timeout=150) == [[(0, 0)] * 3] * 2


@torch.no_grad()
def budgets_in_one_graph(rank: int, ranks: int, seed: int) -> list[float]:
    """Dispatch beside, combine with the whole chip, and the other way round, on one channel within one capture."""
    ep = EPGroup(timeout=60)
    d = make(SymmetricDispatcher, ep, capacity=64)
    x, ids, weights = (t.cuda() for t in batch(rank, seed, torch.float32, tokens=64))

    def call() -> list[Tensor]:
        outs, handle = [], None
        for first, second in ((16, 0), (0, 16), (16, 16), (0, 0)):
            with ep.beside.launching(Manner(first, False, False)):
                rows = d.dispatch(x, ids, weights, layout=handle)
            with ep.beside.launching(Manner(second, False, False)):
                outs.append(d.combine(rows.x, rows.handle))
            handle = rows.handle
        return outs

    want = [out.clone() for out in call()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = call()
    errors = []
    for n in range(20):
        if n % 4 == rank:
            torch.cuda._sleep(1_000_000)
        graph.replay()
        errors.append(max(float((a - b).abs().max()) for a, b in zip(outs, want, strict=True)))
    for channel in ep.channels:
        channel.check()
    return errors


@pytest.mark.gpu2
def test_one_graph_may_hold_operations_beside_others_and_with_the_whole_chip(seed: int) -> None:
    assert run_ranks(budgets_in_one_graph, 2, args=(seed,), backend="nccl", timeout=150) == [[0.0] * 20] * 2
