"""The routed MLP on more than 2**31 elements: what lies past the reach of 32-bit addresses is right, there and back."""

from __future__ import annotations

import pytest
import torch

from epmoe import Activation, ExpertPlacement, ExpertsSpec, ExpertWeights, MoEKernel, make_dispatcher, select_experts
from tests import naive


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [None, 500_000])
def test_rows_past_two_to_the_31_elements_are_right_forward_and_backward(chunk: int | None, seed: int) -> None:
    e, h, i, tokens, checked = 4, 4096, 64, 2**31 // 4096 + 1000, 50  # x, y and their gradients: 4.3 GB each
    torch.manual_seed(seed)
    spec = ExpertsSpec(Activation(), h, i, torch.bfloat16, torch.device("cuda"))
    moves = make_dispatcher("local", None, ExpertPlacement.contiguous(e, 1), "cuda")
    kernel = MoEKernel(moves, select_experts(spec, "grouped").experts, chunk_tokens=chunk)
    w = {"gate_up_proj": torch.randn(e, 2 * i, h, device="cuda") * h**-0.5}
    w["down_proj"] = torch.randn(e, h, i, device="cuda") * i**-0.5
    w = {name: t.bfloat16().requires_grad_() for name, t in w.items()}
    x = torch.zeros(tokens, h, device="cuda", dtype=torch.bfloat16)
    x[-checked:].normal_()
    x.requires_grad_()
    ids = torch.randint(e, (tokens, 1), device="cuda", dtype=torch.int32)
    p = torch.rand(tokens, 1, device="cuda")
    y = kernel(x, ids, p, ExpertWeights(**w)).routed
    dout = torch.zeros_like(y)
    dout[-checked:].normal_()
    y.backward(dout)
    assert x.grad is not None and not y[:-checked].any() and not x.grad[:-checked].any()

    last = slice(tokens - checked, None)
    wide = {name: t.detach().cpu().double().requires_grad_() for name, t in w.items()}
    rows = x.detach()[last].cpu().double().requires_grad_()
    want = naive.routed(rows, ids[last].cpu(), p[last].cpu().double(), wide, ("swiglu", 1.0, float("inf")), False)
    want.backward(dout[last].cpu().double())
    pairs = [(y[last], want), (x.grad[last], rows.grad), *((w[name].grad, wide[name].grad) for name in w)]
    for got, right in pairs:
        assert got is not None and right is not None
        assert (got.detach().cpu().double() - right).norm() / right.norm() < 1e-2
