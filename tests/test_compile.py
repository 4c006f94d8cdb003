"""`torch.compile` of a model around the layer: one graph, same outputs and gradients, on one rank and on two."""

from __future__ import annotations

import pytest
import torch

from epmoe import EPGroup, MoEConfig, MoELayer
from epmoe.testing import run_ranks
from tests.test_kernel import batch_of, make_kernel


class Model(torch.nn.Module):
    def __init__(self, config: MoEConfig, ep: EPGroup | None, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.before = torch.nn.Linear(16, 16, device=device, dtype=dtype)
        self.moe = MoELayer(config, ep, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(self.moe(self.before(x)) + x)


def compare(rank: int, world: int, seed: int, dispatcher: str, backend: str, device: str, fullgraph: bool) -> None:
    torch.manual_seed(seed)
    ep = EPGroup() if dispatcher != "local" else None
    config = MoEConfig(
        hidden_size=16,
        intermediate_size=24,
        num_experts=6,
        top_k=2,
        experts="grouped",
        num_shared_experts=1,
        dispatcher=dispatcher,
    )
    model = Model(config, ep, device, torch.float32)
    compiled = torch.compile(model, backend=backend, fullgraph=fullgraph)
    for tokens in (5 + rank, 8):  # another number of tokens: recompiles or generalises, but works
        x = torch.randn(tokens, 16, generator=torch.Generator().manual_seed(seed + rank)).to(device)
        results = []
        for f in (model, compiled):
            model.zero_grad()
            inputs = x.clone().requires_grad_()
            y = f(inputs)
            y.square().sum().backward()
            results.append([y.detach(), inputs.grad, *(p.grad.clone() for p in model.parameters())])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_one_rank_compiles_to_one_graph_with_inductor(seed: int) -> None:
    compare(0, 1, seed, "local", "inductor", "cpu", True)


def compiled_arguments(rank: int, world: int, seed: int) -> None:
    """A compiled kernel with a destination and rows quantized on the way, against an eager one."""
    kernel, weights = make_kernel(
        rank, world, "all_to_all", "grouped", "standard", EPGroup(), dispatch_scheme="fp8_row"
    )
    x, ids, p = batch_of(rank, world, "uneven", seed)

    def into(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return kernel(x, ids, p, weights, out=out).routed

    with torch.no_grad():
        want, out = kernel(x, ids, p, weights).routed, torch.full_like(x, float("nan"))
        given = torch.compile(into, backend="aot_eager", fullgraph=True)(x, out)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(given, want, rtol=1e-4, atol=1e-5)


def everything_compiled(rank: int, world: int, seed: int) -> None:
    for dispatcher in ("all_to_all", "all_gather", "hierarchical"):
        torch._dynamo.reset()
        try:
            compare(rank, world, seed, dispatcher, "aot_eager", "cpu", True)
        except Exception as error:
            error.add_note(f"dispatcher={dispatcher!r}")
            raise
    torch._dynamo.reset()
    compiled_arguments(rank, world, seed)


def test_two_ranks_compile_to_one_graph_whose_kernel_writes_where_it_is_told_and_sends_quantized_rows(
    seed: int,
) -> None:
    # In one set of processes: a first compilation costs a rank as much as the next two.
    run_ranks(everything_compiled, 2, args=(seed,), timeout=170)


@pytest.mark.gpu
def test_one_gpu_compiles_to_one_graph_with_inductor(seed: int) -> None:
    compare(0, 1, seed, "local", "inductor", "cuda", True)


@pytest.mark.gpu2
def test_two_gpus_compile_to_one_graph_with_inductor(seed: int) -> None:
    run_ranks(compare, 2, args=(seed, "all_to_all", "inductor", "cuda", True), backend="nccl", timeout=240)
