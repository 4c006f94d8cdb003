"""Quantized rows back to wide ones, one by one and summed: kernel and twin against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from epmoe.ops._triton import INTERPRET
from epmoe.ops.dequantize import dequantize_sum, dequantize_sum_reference
from epmoe.ops.quantize import ROW_FORMATS, quantize_reference
from epmoe.testing import poisoned_empty


@pytest.fixture(params=["twin", "cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """Where the op runs: its twin, or the kernel, compiled on a GPU and through the interpreter on CPU."""
    if request.param == "twin":
        return "cpu"
    if INTERPRET == (request.param == "cuda"):
        pytest.skip("Triton was imported " + ("with TRITON_INTERPRET=1" if INTERPRET else "without its interpreter"))
    monkeypatch.setenv("EPMOE_CPU_KERNELS", "triton")
    return request.param


def rows_in_messages(scheme: str, width: int, seed: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Rows over six decades as views into wider buffers of NaN, and what they are in float64."""
    g = torch.Generator().manual_seed(seed)
    values, scales = quantize_reference(
        torch.randn(7, width, generator=g) * 10.0 ** torch.arange(-3, 4)[:, None], scheme
    )
    exact = values.double() * scales.double().repeat_interleave(ROW_FORMATS[scheme].group or width, 1)[:, :width]
    wide = torch.full((7, width + 24), 0x7F, dtype=torch.uint8)
    wide[:, 8 : 8 + width] = values.view(torch.uint8)
    beside = torch.full((7, scales.shape[1] + 2), math.nan)
    beside[:, 1:-1] = scales
    return wide.to(device).view(values.dtype)[:, 8 : 8 + width], beside.to(device)[:, 1:-1], exact


@pytest.mark.parametrize("width", [1, 80, 192, 2500])
@pytest.mark.parametrize("scheme", ROW_FORMATS)
def test_each_row_is_values_times_scale_rounded_once(scheme, width, device, seed):
    values, scales, exact = rows_in_messages(scheme, width, seed, device)
    for dtype in (torch.float32, torch.bfloat16):
        with poisoned_empty():
            got = dequantize_sum(values, scales, None, scheme, dtype)
        assert torch.equal(got.cpu(), exact.float().to(dtype))
    assert torch.equal(dequantize_sum(values, scales, None, scheme, torch.float64).cpu(), exact)


@pytest.mark.parametrize("terms", [1, 3])
@pytest.mark.parametrize("scheme", ["fp8_block", "int8_row"])
def test_sums_take_the_rows_that_are_named_and_read_no_other(scheme, terms, device, seed):
    values, scales, exact = rows_in_messages(scheme, 192, seed, device)
    scales[6] = math.nan  # nobody's
    g = torch.Generator().manual_seed(seed)
    index = torch.randint(-1, 6, (9, terms), generator=g, dtype=torch.int32)
    index[0], index[1, 0] = -1, 2**31 - 1
    known = (index >= 0) & (index < 7)
    want = torch.where(known[..., None], exact[torch.where(known, index, 0).long()], 0).sum(1)
    with poisoned_empty():
        got = dequantize_sum(values, scales, index.to(device), scheme, torch.float32).cpu().double()
    assert not got[0].any() and (got - want).norm() <= 1e-6 * want.norm()
    twin = dequantize_sum_reference(values.cpu(), scales.cpu(), index, scheme, torch.float64)
    assert torch.allclose(twin, want, rtol=1e-12, atol=0)


def test_a_group_that_is_not_finite_stays_so_and_spoils_no_other(device):
    x = torch.ones(2, 300)
    x[0, 140], x[1, 0] = math.nan, math.inf
    values, scales = (t.to(device) for t in quantize_reference(x, "fp8_block"))
    got = dequantize_sum(values, scales, None, "fp8_block", torch.float32).cpu()
    spoiled = torch.zeros(2, 300, dtype=torch.bool)
    spoiled[0, 128:256] = spoiled[1, :128] = True
    assert got[spoiled].isnan().all() and got[~spoiled].isfinite().all()


def test_no_rows_are_fine_and_what_does_not_fit_is_named(device):
    values, scales, _ = rows_in_messages("fp8_block", 192, 1, device)
    assert dequantize_sum(values[:0], scales[:0], None, "fp8_block", torch.bfloat16).shape == (0, 192)
    nobody = torch.zeros(3, 2, dtype=torch.int32, device=device)
    assert not dequantize_sum(values[:0], scales[:0], nobody, "fp8_block", torch.bfloat16).any()
    by_column = scales.t().contiguous().t()
    for args, message in [
        ((values, scales[:, :1], None, "fp8_block"), r"scales torch.float32 \(7, 1\): must be"),
        ((values, scales, None, "int8_row"), "values are torch.float8_e4m3fn"),
        ((values, by_column, None, "fp8_block"), "scales has shape"),
        ((values, scales, nobody.long(), "fp8_block"), "index is torch.int64"),
        ((values, scales, None, "fp9"), "scheme='fp9'"),
    ]:
        with pytest.raises(ValueError, match=message):
            dequantize_sum(*args, torch.float32)
