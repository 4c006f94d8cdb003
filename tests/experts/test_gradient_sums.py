"""Gradients of expert weights over many parts or microbatches: added in float32, rounded once, the same bits always."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from epmoe import (
    Activation,
    ExpertPlacement,
    ExpertsSpec,
    ExpertWeights,
    MoEConfig,
    MoEKernel,
    MoELayer,
    make_dispatcher,
    select_experts,
)
from epmoe.ops._triton import INTERPRET, use_triton
from epmoe.testing import poisoned_empty
from tests import naive

E, H, I, K = 2, 32, 256, 2  # of few intermediate numbers, the error of a gradient is that of its largest
PARTS = 10
NAMES = ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias")
KINDS = ["grouped", "batched", "reference", "torch_grouped"]
# Of products of rows that were rounded on their way, rounded once: 6e-3 at most. Rounded for every part, bfloat16 loses
# the small parts of `problem` beside the large one: 1.2e-2 at least.
LIMIT = 8e-3


@pytest.fixture(params=["torch", "triton", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: Any, monkeypatch: Any) -> str:
    """Twins on CPU, kernels in the interpreter, kernels on a GPU."""
    if request.param != "torch" and INTERPRET == (request.param == "cuda"):
        pytest.skip("Triton was imported " + ("with TRITON_INTERPRET=1" if INTERPRET else "without its interpreter"))
    if request.param == "triton":
        monkeypatch.setenv("EPMOE_CPU_KERNELS", "triton")
    return "cuda" if request.param == "cuda" else "cpu"


def problem(device: str, seed: int) -> tuple[ExpertWeights, tuple[Tensor, Tensor, Tensor], Tensor]:
    """Weights, (x, ids, p) and an upstream gradient: large for the last token, whose backward comes first, and a little
    in the same direction for every other."""
    g = torch.Generator().manual_seed(seed)
    shapes = {"gate_up_proj": (E, 2 * I, H), "down_proj": (E, H, I), "gate_up_bias": (E, 2 * I), "down_bias": (E, H)}
    w = {n: torch.randn(s, generator=g) * s[-1] ** -0.5 for n, s in shapes.items()}
    weights = ExpertWeights(**{n: t.bfloat16().to(device).requires_grad_() for n, t in w.items()})
    x = torch.randn(1, H, generator=g) + 0.1 * torch.randn(PARTS, H, generator=g)
    dout = torch.randn(1, H, generator=g) + 0.1 * torch.randn(PARTS, H, generator=g)
    dout[:-1] *= 2**-9
    ids = torch.rand(PARTS, E, generator=g).argsort(1)[:, :K].int()
    p = torch.full((PARTS, K), 0.5)
    return weights, (x.bfloat16().to(device).requires_grad_(), ids.to(device), p.to(device)), dout.bfloat16().to(device)


def kernel(kind: str, device: str, chunk: int | None) -> MoEKernel:
    layout = "batched" if kind == "batched" else "standard"
    spec = ExpertsSpec(Activation(), H, I, torch.bfloat16, torch.device(device))
    moves = make_dispatcher("local", None, ExpertPlacement.contiguous(E, 1), device)
    return MoEKernel(moves, select_experts(spec, kind, layout).experts, layout=layout, chunk_tokens=chunk)


def leaves(weights: ExpertWeights) -> list[Tensor]:
    return [getattr(weights, name) for name in NAMES]


def float64_gradients(weights: ExpertWeights, rows: tuple[Tensor, Tensor, Tensor], dout: Tensor) -> list[Tensor]:
    wide = {n: getattr(weights, n).detach().cpu().double().requires_grad_() for n in NAMES}
    x, ids, p = (t.detach().cpu() for t in rows)
    naive.routed(x.double(), ids, p.double(), wide, ("swiglu", 1.0, float("inf")), False).backward(dout.cpu().double())
    return [wide[n].grad for n in NAMES]  # type: ignore[misc]


def relative(got: Tensor, want: Tensor) -> float:
    return ((got.detach().cpu().double() - want).norm() / want.norm()).item()


def gradients(weights: ExpertWeights) -> list[Tensor]:
    found = [leaf.grad for leaf in leaves(weights)]
    assert all(gradient is not None for gradient in found)
    for leaf in leaves(weights):
        leaf.grad = None
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_many_small_parts_in_bf16_are_rounded_once(kind: str, device: str, seed: int) -> None:
    interpreted = device == "cpu" and use_triton(torch.empty(0))
    if interpreted and kind != "grouped":
        pytest.skip("one kind is enough for the interpreter")
    weights, rows, dout = problem(device, seed)
    with poisoned_empty():
        kernel(kind, device, PARTS // 2 if interpreted else 1)(*rows, weights).routed.backward(dout)
    for name, got, want in zip(NAMES, gradients(weights), float64_gradients(weights, rows, dout), strict=True):
        assert got.dtype == torch.bfloat16
        assert relative(got, want) < LIMIT, name


@pytest.mark.parametrize("kind", ["grouped", "batched", "torch_grouped"])
def test_a_graph_that_is_walked_again_gives_the_same_bits(kind: str, seed: int) -> None:
    weights, rows, dout = problem("cpu", seed)
    y = kernel(kind, "cpu", 4)(*rows, weights).routed
    y.backward(dout, retain_graph=True)
    first = gradients(weights)
    torch.autograd.grad(y, rows[0], dout, retain_graph=True)  # asks for no weight's gradient
    (alone,) = torch.autograd.grad(y, [weights.down_proj], dout, retain_graph=True)
    y.backward(dout)
    assert all(torch.equal(a, b) for a, b in zip(first, gradients(weights), strict=True))
    assert torch.equal(alone, first[1])


def test_a_backward_that_failed_halfway_leaves_nothing_behind(seed: int) -> None:
    weights, rows, dout = problem("cpu", seed)
    y = kernel("grouped", "cpu", 4)(*rows, weights).routed

    def fail(gradient: Tensor) -> None:
        raise RuntimeError("halfway")

    hooks = [leaf.register_hook(fail) for leaf in leaves(weights)]
    with pytest.raises(RuntimeError, match="halfway"):
        y.backward(dout, retain_graph=True)
    for hook in hooks:
        hook.remove()
    for leaf in leaves(weights):
        leaf.grad = None
    y.backward(dout)
    for name, got, want in zip(NAMES, gradients(weights), float64_gradients(weights, rows, dout), strict=True):
        assert relative(got, want) < LIMIT, name


# ---- main_grad


def layer(kind: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> MoELayer:
    config = MoEConfig(H, I, 4, 2, experts=kind, expert_bias=True, main_grad=True, **options)
    made = MoELayer(config, dtype=dtype)
    for parameter in made.expert_parameters().values():
        parameter.main_grad = torch.full(parameter.shape, 1.0)  # type: ignore[attr-defined]
    return made


def main_grads(of: MoELayer) -> dict[str, Tensor]:
    return {name: p.main_grad.clone() for name, p in of.expert_parameters().items()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_main_grad_takes_the_sum_over_microbatches_in_float32(kind: str, chunk: int | None, seed: int) -> None:
    torch.manual_seed(seed)
    of = layer(kind, chunk_tokens=chunk)
    plain = MoELayer(MoEConfig(H, I, 4, 2, experts="reference", expert_bias=True), dtype=torch.float64)
    plain.load_state_dict({name: t.double() for name, t in of.state_dict().items()})
    batches = [(torch.randn(7, H).bfloat16(), torch.randn(7, H).bfloat16()) for _ in range(3)]

    def run() -> dict[str, Tensor]:
        for parameter in of.expert_parameters().values():
            parameter.main_grad.fill_(1.0)  # type: ignore[attr-defined]
        for x, dout in batches:
            of(x).backward(dout)
        return main_grads(of)

    got = run()
    for x, dout in batches:
        y = plain_forward(plain, of, x)
        y.backward(dout.double())
    for name, parameter in plain.expert_parameters().items():
        assert of.expert_parameters()[name].grad is None
        assert relative(got[name] - 1.0, parameter.grad) < 2e-2, name  # type: ignore[arg-type]
    again = run()
    assert all(torch.equal(got[name], again[name]) for name in got)


def plain_forward(plain: MoELayer, of: MoELayer, x: Tensor) -> Tensor:
    """With the experts that the other layer chose."""
    with torch.no_grad():
        _, routing = of(x, return_routing=True)
    c = plain.config
    wide = x.double()
    weights = naive.router_weights(
        wide @ plain.router.weight.T, routing.topk_ids, c.router.scoring, c.router.renormalize, 1.0
    )
    return naive.routed(
        wide, routing.topk_ids, weights, plain.expert_parameters(), ("swiglu", 1.0, float("inf")), False
    )


def test_main_grad_under_autocast_adds_what_was_computed_and_rounds_nothing(seed: int) -> None:
    torch.manual_seed(seed)
    of = layer("grouped", torch.float32)
    x = torch.randn(6, H)
    with torch.autocast("cpu", torch.bfloat16):
        total = of(x).sum()
    total.backward()
    for name, added in main_grads(of).items():
        added -= 1.0
        assert of.expert_parameters()[name].grad is None
        assert added.abs().sum() > 0
        assert not torch.equal(added, added.bfloat16().float()), name


def test_a_backward_that_asks_for_no_weight_adds_nothing(seed: int) -> None:
    torch.manual_seed(seed)
    of = layer("grouped")
    of.down_proj.requires_grad_(False)
    x = torch.randn(6, H).bfloat16().requires_grad_()
    y = of(x)
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert all((grad == 1.0).all() for grad in main_grads(of).values())
    y.sum().backward()
    changed = {name for name, grad in main_grads(of).items() if not (grad == 1.0).all()}
    assert changed == {"gate_up_proj", "gate_up_bias", "down_bias"}


def test_megatrons_hooks_see_that_the_gradient_has_been_added() -> None:
    of = layer("grouped")
    seen = []
    for name, parameter in of.expert_parameters().items():
        parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: seen.append((name, p.grad_added_to_main_grad, p.grad.abs().sum().item()))
        )
    of(torch.randn(5, H).bfloat16()).sum().backward()
    assert sorted(seen) == sorted((name, True, 0.0) for name in NAMES)
    assert all(not (grad == 1.0).all() for grad in main_grads(of).values())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (None, "parameter gate_up_proj has none: set gate_up_proj.main_grad"),
        (torch.zeros(4, 2 * I, H, dtype=torch.bfloat16), "gate_up_proj.main_grad is Tensor torch.bfloat16"),
        (torch.zeros(4, 2 * I, H + 1), "gate_up_proj.main_grad is Tensor torch.float32"),
        (torch.zeros(4, H, 2 * I).transpose(1, 2), "must be a contiguous Tensor torch.float32"),
    ],
)
def test_a_main_grad_that_does_not_fit_is_named(wrong: Tensor | None, message: str) -> None:
    of = layer("grouped")
    of.gate_up_proj.main_grad = wrong  # type: ignore[assignment]
    with pytest.raises(ValueError, match=message):
        of(torch.randn(2, H).bfloat16())
    with torch.no_grad():
        of(torch.randn(2, H).bfloat16())
