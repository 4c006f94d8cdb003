"""Experts on eight-bit rows in a planned workspace: the bits that they give without one, in bytes known before."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from epmoe import Activation, ExpertPlacement, ExpertsSpec, ExpertWeights, MoEKernel, make_dispatcher, select_experts
from epmoe.comm.workspace import Workspace
from epmoe.ops._triton import INTERPRET
from epmoe.ops.quantize import quantize, quantize_into
from epmoe.ops.quantize_blocks import BLOCK
from epmoe.ops.scaled_gemm_into import scaled_grouped_gemm_act_into, scaled_grouped_gemm_into
from epmoe.quant import quantize_weights
from epmoe.testing import poisoned_empty
from tests.experts.quantized_cases import peaks_on_a_gpu

E, H, I, K = 3, 160, 144, 2
CASES = [
    (scheme, layout, sent)
    for scheme in ("fp8_block", "fp8_row", "fp8_block_ue8m0")
    for layout, sent in (("standard", None), ("batched", None), ("standard", scheme))
]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: Any, monkeypatch: Any) -> str:
    if INTERPRET == (request.param == "cuda"):
        pytest.skip("Triton was imported " + ("with TRITON_INTERPRET=1" if INTERPRET else "without its interpreter"))
    monkeypatch.setenv("EPMOE_CPU_KERNELS", "torch")
    return request.param


def make(
    scheme: str, layout: str, sent: str | None, device: str, seed: int, workspace: Workspace | None,
    block: tuple[int, int] = BLOCK,
) -> tuple[MoEKernel, tuple[Any, ...]]:  # fmt: skip
    spec = ExpertsSpec(Activation(), H, I, torch.bfloat16, torch.device(device), scheme=scheme, block=block)
    moves = make_dispatcher("local", None, ExpertPlacement.contiguous(E, 1), device)
    experts = select_experts(spec, "grouped_fp8", layout).experts
    g = torch.Generator().manual_seed(seed)
    q1, q2 = (
        quantize_weights((torch.randn(E, n, k, generator=g) * k**-0.5).to(device), scheme, block)
        for n, k in ((2 * I, H), (H, I))
    )
    bias = torch.randn(E, H, generator=g).to(device, torch.bfloat16)
    weights = ExpertWeights(q1.values, q2.values, None, bias, gate_up_scale=q1.scales, down_scale=q2.scales)
    x = torch.randn(9, H, generator=g).to(device, torch.bfloat16)
    ids = torch.rand(9, E, generator=g).argsort(1)[:, :K].int()
    ids[2, 1] = -1
    rows = (x, ids.to(device), torch.rand(9, K, generator=g).to(device), weights)
    return MoEKernel(moves, experts, layout=layout, dispatch_scheme=sent, workspace=workspace), rows


@pytest.mark.parametrize(("scheme", "layout", "sent"), CASES)
def test_a_workspace_changes_no_bit_whatever_it_held_and_is_as_large_as_planned(
    scheme: str, layout: str, sent: str | None, device: str, seed: int
) -> None:
    check_workspace(scheme, layout, sent, device, seed)


@pytest.mark.parametrize(("layout", "sent"), [("standard", "fp8_block"), ("batched", None)])
@pytest.mark.parametrize("block", [(64, 64), (1, 128), (256, 256)], ids=str)
def test_nor_does_one_beside_blocks_of_any_size(
    block: tuple[int, int], layout: str, sent: str | None, device: str, seed: int, monkeypatch: Any
) -> None:
    if block == (64, 64) and layout == "standard":  # by the kernels, which find blocks on a way of their own
        monkeypatch.setenv("EPMOE_CPU_KERNELS", "triton")
    check_workspace("fp8_block", layout, sent, device, seed, block)


def check_workspace(
    scheme: str, layout: str, sent: str | None, device: str, seed: int, block: tuple[int, int] = BLOCK
) -> None:
    free, rows = make(scheme, layout, sent, device, seed, None, block)
    space = Workspace(torch.device(device))
    kernel, _ = make(scheme, layout, sent, device, seed, space, block)
    places = E * 9 if layout == "batched" else 9
    with torch.no_grad(), poisoned_empty():
        want = free(*rows).routed
        assert torch.isfinite(want).all()
        assert torch.equal(kernel(*rows).routed, want)
        shapes = kernel.experts.workspace_shapes(places, places if layout == "batched" else 9 * K)
        assert shapes is not None and space.nbytes == shapes.workspace13.nbytes + shapes.workspace2.nbytes
        assert {b.name: b.nbytes for b in kernel.memory_plan(9, K).buffers}[space.name] >= space.nbytes
        space.lock()
        assert space._buffer is not None
        for poison in (0xFF, 0x7F):  # NaN in every dtype, then in eight bits
            space._buffer.fill_(poison)
            assert torch.equal(kernel(*rows).routed, want)
        with pytest.raises(RuntimeError, match="locked"):
            kernel(*[torch.cat([t, t]) for t in rows[:3]], rows[3])


def test_the_activation_shares_memory_with_nothing_that_is_read_beside_it() -> None:
    for scheme in ("fp8_block", "fp8_row", "fp8_block_ue8m0"):
        kernel, _ = make(scheme, "standard", None, "cpu", 0, None)
        first, second, y = kernel.experts._parts(1000, 2000)  # type: ignore[attr-defined]
        shapes = kernel.experts.workspace_shapes(1000, 2000)
        assert shapes is not None
        assert shapes.workspace13.nbytes >= max(y.nbytes, sum(part.nbytes for part in first))
        assert shapes.workspace2.nbytes >= sum(part.nbytes for part in second)


def test_buffers_that_do_not_fit_are_named() -> None:
    x = torch.randn(4, H).bfloat16()
    values, scales = quantize(x, "fp8_block")
    with pytest.raises(ValueError, match=r"values is torch.float8_e4m3fn \(3, 160\): must be contiguous"):
        quantize_into(values[:3], scales, x, "fp8_block")
    with pytest.raises(ValueError, match=r"scales is torch.float32 \(4, 2\).*\(4, 1\) for 'fp8_row'"):
        quantize_into(values, scales, x, "fp8_row")
    _, (_, _, _, w) = make("fp8_block", "standard", None, "cpu", 0, None)
    start = end = torch.zeros(E, dtype=torch.int32)
    act = (None, "swiglu", 1.0, float("inf"), "fp8_block", torch.bfloat16)
    w1 = (values, scales, w.gate_up_proj, w.gate_up_scale, None, start, end, None, 1)
    a, a_scale = torch.empty(5, I, dtype=values.dtype), torch.empty(5, 2)
    with pytest.raises(ValueError, match=r"act is torch.bfloat16 \(5, 144\).*float8_e4m3fn"):
        scaled_grouped_gemm_act_into(a.to(torch.bfloat16), a_scale, *w1, *act)
    with pytest.raises(ValueError, match=r"act_scale is torch.float32 \(5, 1\).*\(5, 2\)"):
        scaled_grouped_gemm_act_into(a, a_scale[:, :1], *w1, *act)
    w2 = (a, a_scale, w.down_proj, w.down_scale, None, start, end, None, 1, "fp8_block")
    with pytest.raises(ValueError, match=r"out is torch.bfloat16 \(5, 161\).*\(5, 160\)"):
        scaled_grouped_gemm_into(torch.empty(5, H + 1, dtype=torch.bfloat16), *w2)


def quantized(scheme: str, w1: Tensor, w2: Tensor) -> ExpertWeights:
    q1, q2 = (quantize_weights(w, scheme) for w in (w1, w2))
    return ExpertWeights(q1.values, q2.values, gate_up_scale=q1.scales, down_scale=q2.scales)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_row"])
def test_the_predicted_peak_is_the_allocators(scheme: str) -> None:
    plan, peak = peaks_on_a_gpu("grouped_fp8", scheme, functools.partial(quantized, scheme))
    assert abs(plan - peak) <= 0.04 * peak, (plan, peak)
