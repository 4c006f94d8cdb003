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


def many_round_trips(rank: int, ranks: int, steps: int, seed: int) -> tuple[int, int]:
    """(wrong words received, wrong sums) of rows that say which step, rank and token they are. Other traffic of the
    group runs beside it, and one rank is now and then late."""
    ep, steps_each = EPGroup(timeout=60), 50
    capacity, width = 24, 256
    d = make(SymmetricDispatcher, ep, capacity=capacity)
    g = torch.Generator("cuda").manual_seed(seed)
    drawn = torch.rand(ranks, capacity, E, generator=g, device="cuda").argsort(2)[..., :K].int()
    step = torch.zeros((), dtype=torch.int32, device="cuda")
    wrong = torch.zeros(2, dtype=torch.int64, device="cuda")
    token = torch.arange(capacity, device="cuda")
    column = torch.arange(width, device="cuda")
    owner = d.owner

    def rows_of(source: int) -> tuple[Tensor, Tensor]:
        """What a rank sends in this step, which any rank can tell: whole numbers that float32 adds exactly."""
        code = ((step * ranks + source) * capacity + token)[:, None] * 7 + column
        return (code % 1_000_003).float(), (drawn[source] + step + source) % (E + 1) - 1  # with holes

    def one() -> None:
        x, ids = rows_of(rank)
        rows = d.dispatch(x, ids, torch.ones(capacity, K, device="cuda"))
        for source in range(ranks):
            sent, theirs = rows_of(source)
            goes = (torch.where(theirs >= 0, owner[theirs.clamp_min(0).long()], -1) == rank).any(1)
            here = slice(source * capacity, (source + 1) * capacity)
            wrong[0] += ((rows.x[here] != sent) & goes[:, None]).sum()
            wrong[0] += (owned(rows)[here].any(1) != goes).sum()
        out = d.combine(rows.x, rows.handle)
        owners = torch.where(ids >= 0, owner[ids.clamp_min(0).long()], -1)
        visited = sum((owners == r).any(1).int() for r in range(ranks))
        wrong[1] += (out != x * visited[:, None]).sum()
        step.add_(1)

    with torch.no_grad():
        one()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(steps_each):
                one()
        aside, flag = torch.cuda.Stream(), torch.ones(1 << 18, device="cuda")
        for n in range(steps // steps_each):
            if n % 97 == rank:
                torch.cuda._sleep(3_000_000)
            graph.replay()
            if n % 40 == 0:
                with torch.cuda.stream(aside):
                    dist.all_reduce(flag)
            if n % 400 == 0:
                one()
                torch.cuda.synchronize()
    torch.cuda.synchronize()
    for channel in ep.channels:
        channel.check()
    return int(wrong[0]), int(wrong[1])


@pytest.mark.gpu2
def test_a_hundred_thousand_round_trips_have_no_wrong_row(seed: int) -> None:
    assert run_ranks(many_round_trips, 2, args=(100_000, seed), backend="nccl", timeout=150) == [(0, 0)] * 2
