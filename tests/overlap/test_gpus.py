"""Microbatches on two GPUs: the bits of one after another through every stream, as one CUDA graph, and side by side."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import epmoe
from epmoe import DISPATCHERS, EPGroup, MoEConfig, MoELayer, run_microbatched
from epmoe.dispatch.symmetric import SymmetricDispatcher
from epmoe.overlap import Timeline
from epmoe.testing import poisoned_empty, run_ranks

pytestmark = pytest.mark.gpu2
H, I, E, K = 512, 256, 16, 4


class Stack(nn.Module):
    """MoE layers with a dense map before each."""

    def __init__(self, ep: EPGroup, dispatcher: str, tokens: int, h: int = H, i: int = I, shared: int = 1) -> None:
        super().__init__()
        DISPATCHERS.setdefault("symmetric", SymmetricDispatcher)
        config = MoEConfig(h, i, E, K, dispatcher=dispatcher, num_shared_experts=shared, max_tokens_per_rank=tokens)
        factory: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.maps = nn.ModuleList([nn.Linear(h, h, **factory) for _ in range(3)])
        self.moes = nn.ModuleList([MoELayer(config, ep, name=f"{n}", **factory) for n in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear, moe in zip(self.maps, self.moes, strict=True):
            x = x + moe(linear(x))
        return x


def step(stack: nn.Module, x: torch.Tensor, interleave: bool) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    y = run_microbatched(stack, x, interleave=interleave)
    y.float().square().sum().backward()
    got = [y.detach(), x.grad, *(p.grad for p in stack.parameters() if p.grad is not None)]
    stack.zero_grad()
    return got


def both_ways(rank: int, ranks: int, dispatcher: str, copies: bool, seed: int) -> list[bool]:
    ep, equal = EPGroup(timeout=60), []
    ep.beside.copies = copies
    torch.manual_seed(seed)
    stack = Stack(ep, dispatcher, 4096)
    generator = torch.Generator("cuda").manual_seed(seed + rank)
    for tokens in (700, 3000 + rank, 1):
        for _ in range(3):
            x = torch.randn(tokens, H, generator=generator, device="cuda").bfloat16()
            with poisoned_empty():
                want, got = step(stack, x, False), step(stack, x, True)
                with torch.no_grad():
                    plain = run_microbatched(stack, x)
            assert bool(torch.isfinite(want[0]).all())
            equal.append(all(torch.equal(a, b) for a, b in zip(want, got, strict=True)) and torch.equal(plain, want[0]))
    return equal


@pytest.mark.parametrize(
    ("dispatcher", "copies"),
    [
        ("all_to_all", True),
        ("all_to_all", False),
        ("all_to_all_fixed", True),
        ("all_gather", False),
        ("symmetric", False),
    ],
)
def test_streams_change_no_bit(dispatcher: str, copies: bool, seed: int) -> None:
    assert run_ranks(both_ways, 2, args=(dispatcher, copies, seed), backend="nccl", timeout=150) == [[True] * 9] * 2


def captured(rank: int, ranks: int, dispatcher: str, copies: bool, seed: int) -> list[bool]:
    """Captures a microbatched forward once, then replays with other inputs between eager calls."""
    ep, equal, tokens = EPGroup(timeout=60), [], 64
    ep.beside.copies = copies
    torch.manual_seed(seed)
    stack = Stack(ep, dispatcher, tokens)
    generator = torch.Generator("cuda").manual_seed(seed + rank)
    static = torch.randn(tokens, H, generator=generator, device="cuda").bfloat16()
    with torch.no_grad():
        for _ in range(3):
            run_microbatched(stack, static)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run_microbatched(stack, static)
        for _ in range(6):
            fresh = torch.randn(tokens, H, generator=generator, device="cuda").bfloat16()
            want = run_microbatched(stack, fresh)
            static.copy_(fresh)
            out.fill_(float("nan"))
            graph.replay()
            equal.append(torch.equal(out, want))
    torch.cuda.synchronize()
    return equal


@pytest.mark.parametrize(
    ("dispatcher", "copies"), [("all_to_all_fixed", False), ("all_to_all_fixed", True), ("symmetric", False)]
)
def test_a_microbatched_forward_is_one_graph(dispatcher: str, copies: bool, seed: int) -> None:
    assert run_ranks(captured, 2, args=(dispatcher, copies, seed), backend="nccl", timeout=150) == [[True] * 6] * 2


def captured_step(rank: int, ranks: int, dispatcher: str, copies: bool, seed: int) -> list[bool]:
    """Captures a microbatched step of training once, then replays with other inputs between eager steps."""
    ep, equal, tokens = EPGroup(timeout=60), [], 64
    ep.beside.copies = copies
    torch.manual_seed(seed)
    stack = Stack(ep, dispatcher, tokens)
    generator = torch.Generator("cuda").manual_seed(seed + rank)
    static = torch.randn(tokens, H, generator=generator, device="cuda").bfloat16().requires_grad_()
    for _ in range(3):
        step(stack, static.detach(), True)
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match="randomness=True while a CUDA graph is captured"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            run_microbatched(stack, static, randomness=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run_microbatched(stack, static)
        y.float().square().sum().backward()
    leaves = [static, *(p for p in stack.parameters() if p.grad is not None)]
    got = [y.detach(), *(leaf.grad for leaf in leaves)]
    for leaf in leaves:
        leaf.grad = None
    for _ in range(6):
        fresh = torch.randn(tokens, H, generator=generator, device="cuda").bfloat16()
        want = step(stack, fresh, True)
        with torch.no_grad():
            static.copy_(fresh)
        for tensor in got:
            tensor.fill_(float("nan"))
        graph.replay()
        equal.append(len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True)))
    torch.cuda.synchronize()
    return equal


@pytest.mark.parametrize(
    ("dispatcher", "copies"), [("all_to_all_fixed", False), ("all_to_all_fixed", True), ("symmetric", False)]
)
def test_a_microbatched_step_of_training_is_one_graph(dispatcher: str, copies: bool, seed: int) -> None:
    assert run_ranks(captured_step, 2, args=(dispatcher, copies, seed), backend="nccl", timeout=150) == [[True] * 6] * 2


def side_by_side(rank: int, ranks: int, dispatcher: str, copies: bool, seed: int) -> list[dict[str, float]]:
    """Timelines of a graph of one part after the other and of both in turn: there the host can't be what is late."""
    ep, made, tokens = EPGroup(timeout=60), [], 8192
    ep.beside.copies = copies
    torch.manual_seed(seed)
    stack = Stack(ep, dispatcher, tokens // 2, h=2048, i=2048, shared=0)
    x = torch.randn(tokens, 2048, device="cuda").bfloat16()
    meet = torch.zeros(1, device="cuda")
    with torch.no_grad():
        for interleave in (False, True):
            for _ in range(3):
                run_microbatched(stack, x, interleave=interleave)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run_microbatched(stack, x, interleave=interleave)
            graph.replay()
            with epmoe.trace() as traced:
                torch.distributed.all_reduce(meet, group=ep.process_group)
                graph.replay()
            spans = traced.timeline.spans
            met = max(span.end_us for span in spans if "AllReduce" in span.name)
            made.append(Timeline(tuple(span for span in spans if span.start_us >= met)).summary())
    torch.cuda.synchronize()
    return made


@pytest.mark.parametrize(
    ("dispatcher", "copies"), [("all_to_all_fixed", False), ("all_to_all_fixed", True), ("symmetric", False)]
)
def test_rows_of_one_microbatch_move_while_the_other_computes(dispatcher: str, copies: bool, seed: int) -> None:
    lines = run_ranks(side_by_side, 2, args=(dispatcher, copies, seed), backend="nccl", timeout=150)
    print(dispatcher, copies, lines)
    for serial, interleaved in lines:
        assert serial["exposed_us"] > 0.8 * serial["communication_us"] > 0, lines
        assert interleaved["exposed_us"] < 0.75 * serial["exposed_us"], lines
