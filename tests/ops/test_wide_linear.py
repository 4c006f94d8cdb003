"""The router's product: as if everything were raised to fp32 first, on CPU as on a GPU, gradients too."""

from __future__ import annotations

import pytest
import torch

from epmoe.ops import wide_linear as module
from epmoe.ops.wide_linear import wide_linear

HALVES = [torch.bfloat16, torch.float16]


def inputs(tokens: int, experts: int, width: int, dtype: torch.dtype, device: str, seed: int) -> list[torch.Tensor]:
    """x whose rows lie apart in memory and differ by six decades (three in fp16), weight, bias, gradient."""
    g = torch.Generator().manual_seed(seed)
    decades = 3 if dtype == torch.bfloat16 else 1
    x = torch.randn(tokens, 2 * width, generator=g) * 10.0 ** torch.randint(-decades, decades, (tokens, 1), generator=g)
    weight, bias = torch.randn(experts, width, generator=g) * width**-0.5, torch.randn(experts, generator=g)
    made = [t.to(device, dtype) for t in (x, weight, bias)]
    return [made[0][:, :width], made[1], made[2], torch.randn(tokens, experts, generator=g).to(device)]


def check(tokens: int, experts: int, width: int, dtype: torch.dtype, device: str, seed: int) -> None:
    *leaves, dlogits = inputs(tokens, experts, width, dtype, device, seed)
    for t in leaves:
        t.requires_grad_()
    logits = wide_linear(*leaves, torch.float32)
    assert logits.dtype == torch.float32 and logits.shape == (tokens, experts)
    logits.backward(dlogits)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    want = torch.nn.functional.linear(*exact)
    want.backward(dlogits.double())
    terms = exact[0].detach().abs() @ exact[1].detach().abs().t() + exact[2].detach().abs()
    assert ((logits.detach().double() - want).abs() <= 2**-20 * terms).all()
    for leaf, right in zip(leaves, exact, strict=True):
        assert leaf.grad is not None and right.grad is not None and leaf.grad.dtype == dtype
        assert (leaf.grad.double() - right.grad).norm() <= 4e-3 * right.grad.norm()


@pytest.mark.parametrize("dtype", HALVES)
def test_logits_and_gradients_are_those_of_wide_numbers(dtype, seed, monkeypatch):
    check(13, 6, 40, dtype, "cpu", seed)
    # the product that stays narrow, of which only the multiplication itself needs a GPU
    monkeypatch.setattr(module, "_stays_narrow", lambda *args: True)
    monkeypatch.setattr(module, "_product", lambda x, weight: x.float() @ weight.float().t())
    check(13, 6, 40, dtype, "cpu", seed)
    check(0, 6, 40, dtype, "cpu", seed)


def test_only_what_tensor_cores_multiply_exactly_stays_narrow_and_only_on_a_gpu():
    cpu, meta = (torch.empty(2, 8, dtype=torch.bfloat16, device=device) for device in ("cpu", "meta"))
    assert not module._stays_narrow(cpu, cpu, torch.float32) and not module._stays_narrow(meta, meta, torch.float32)
    wide = wide_linear(cpu.zero_(), torch.zeros(3, 8), None, torch.float64)
    assert wide.dtype == torch.float64 and wide.shape == (2, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("tokens", [0, 1, 16, 300, 5000])
def test_on_a_gpu_halves_stay_as_they_are_and_no_bit_of_a_product_is_lost(tokens, dtype, seed):
    for experts, width in ((8, 64), (60, 2048), (128, 2048), (256, 7168), (5, 24)):
        x, weight, *_ = inputs(1, experts, width, dtype, "cuda", seed)
        assert module._stays_narrow(x, weight, torch.float32)
        assert not module._stays_narrow(x, weight.float(), torch.float32)
        check(tokens, experts, width, dtype, "cuda", seed)
