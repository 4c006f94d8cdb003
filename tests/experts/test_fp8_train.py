"""Training with fp8 products: outputs and gradients against float64 on the same rounded numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from epmoe import MoEConfig, MoELayer
from epmoe.ops._triton import INTERPRET
from epmoe.quant import dequantize_rows, dequantize_weights, quantize_rows, quantize_weights
from epmoe.testing import poisoned_empty
from tests import naive

H, I, E, K = 192, 80, 5, 2  # noqa: E741  (neither is a multiple of a scale block)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if INTERPRET == (request.param == "cuda"):
        pytest.skip("Triton was imported " + ("with TRITON_INTERPRET=1" if INTERPRET else "without its interpreter"))
    return str(request.param)


def make(
    seed: int,
    device: str,
    experts: str = "grouped_fp8_train",
    scales: tuple[float, ...] = (1.0, 3e-2, 3.0, 1.0, 1.0),
    **options: Any,
) -> tuple[MoELayer, Tensor, Tensor]:
    """A layer whose experts differ by decades, and its routing, which leaves one expert without tokens."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(30, E - 1, generator=g).argsort(1)[:, :K].int().to(device)
    ids[3], ids[4, 0] = -1, -1
    p = (torch.rand(30, K, generator=g) + 0.5).to(device).requires_grad_()
    torch.manual_seed(seed)
    layer = MoELayer(
        MoEConfig(H, I, E, K, experts=experts, **options),
        device=device,
        dtype=torch.bfloat16,
        router=lambda x: (ids, p),
    )
    with torch.no_grad():
        layer.gate_up_proj.mul_(torch.tensor(scales, device=device)[:, None, None])
        if layer.down_bias is not None and layer.gate_up_bias is not None:
            layer.down_bias.normal_()
            layer.gate_up_bias.normal_()
    return layer, ids, p


def trained(
    layer: MoELayer, p: Tensor, seed: int, device: str, decades: int = 2
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Output and gradients, x, and the gradient given. Over two decades large rows saturate gates."""
    g = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(30, H, generator=g) * 10.0 ** (decades / 2 - torch.arange(30) % (decades + 1))[:, None]
    x = x.bfloat16().to(device).requires_grad_()
    dy = torch.randn(30, H, generator=g).bfloat16().to(device)
    p.grad = None
    with poisoned_empty():
        y = layer(x)
        y.backward(dy)
    gradients = [x.grad, p.grad, *(w.grad for w in layer.parameters())]
    return [y.detach(), *(g for g in gradients if g is not None)], x.detach(), dy


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dispatch", ["fp8_block", None])
def test_outputs_and_gradients_are_those_of_the_rounded_numbers(dispatch, bias, device, seed) -> None:
    layer, ids, p = make(seed, device, dispatch_scheme=dispatch, expert_bias=bias)
    got, x, dy = trained(layer, p, seed, device)
    seen = dequantize_rows(quantize_rows(x, "fp8_block"), torch.float64).cpu().requires_grad_()
    weights = {name: t.detach().double().cpu() for name, t in layer.named_parameters()}
    for name in ("gate_up_proj", "down_proj"):
        q = quantize_weights(getattr(layer, name).detach(), "fp8_block")
        weights[name] = dequantize_weights(q, torch.float64).cpu()
    weights = {name: w.requires_grad_() for name, w in weights.items()}
    weight = p.detach().double().cpu().requires_grad_()
    want = naive.routed(seen, ids.cpu(), weight, weights, ("swiglu", 1.0, 1.0), False)
    want.backward(dy.double().cpu())
    wanted = [want.detach(), seen.grad, weight.grad, *weights.values()]
    for n, (a, b) in enumerate(zip(got, wanted, strict=True)):
        b = b.grad if n > 2 else b
        # the activation is rounded for GEMM2, and the reference's is not
        assert (a.double().cpu() - b).norm() <= (0.04 if n == 0 else 0.02) * b.norm(), n
    assert not layer.gate_up_proj.grad[E - 1].any()  # type: ignore[index]


def test_rows_that_dispatch_quantized_give_the_same_bits_as_those_quantized_here(device, seed) -> None:
    layer, _, p = make(seed, device, dispatch_scheme="fp8_block")
    deferred, _, q = make(seed, device)
    for a, b in zip(trained(layer, p, seed, device)[0], trained(deferred, q, seed, device)[0], strict=True):
        assert torch.equal(a, b)


def test_it_is_near_training_with_wide_products(device, seed) -> None:
    """e4m3 rounds a number by 2.6 % (rms), and an output has met six roundings: of the row and of w1 under each half of
    the gate, of the activation and of w2: sqrt(6) x 2.6 % = 6.4 %; a gradient meets no more of them. A norm's ratio is
    within 4 % of that (one sigma) where thousands of numbers of like magnitude are compared, so rows and experts are of
    one magnitude here; of the router weights' gradient, a number per pair, within 15 %."""
    layers = [
        make(seed, device, scales=(1.0,) * E, dispatch_scheme="fp8_block", chunk_tokens=8),
        make(seed, device, "reference", scales=(1.0,) * E),
    ]
    fp8, wide = (trained(layer, p, seed, device, decades=0)[0] for layer, _, p in layers)
    for n, (a, b) in enumerate(zip(fp8, wide, strict=True)):
        error = (a.double() - b.double()).norm() / b.double().norm()
        assert 0 < error < (0.12 if n == 2 else 0.075), n


def test_no_rows_and_no_local_pairs_are_fine(device, seed) -> None:
    layer, ids, p = make(seed, device, dispatch_scheme="fp8_block", expert_bias=True)
    ids.fill_(-1)
    (y, *gradients), *_ = trained(layer, p, seed, device)
    assert not y.any() and not any(g.any() for g in gradients)
    empty = MoELayer(MoEConfig(H, I, E, K, experts="grouped_fp8_train"), device=device, dtype=torch.bfloat16)
    empty(torch.zeros(0, H, device=device).bfloat16().requires_grad_()).sum().backward()
    assert empty.gate_up_proj.grad is not None and not empty.gate_up_proj.grad.any()


def test_what_it_cannot_do_is_refused_with_another_way() -> None:
    for wrong, message in [
        ({"dtype": torch.float32}, "dtype=torch.float32: must be bfloat16 or float16.*'grouped'"),
        ({"router_weight_on_input": True}, "router_weight_on_input.*experts='grouped'"),
        ({"expert_capacity": 4}, "grouped_fp8_train' takes standard rows and these are batched"),
    ]:
        dtype = wrong.pop("dtype", torch.bfloat16)
        with pytest.raises(ValueError, match=message):
            MoELayer(MoEConfig(H, I, E, K, experts="grouped_fp8_train", **wrong), dtype=dtype)
