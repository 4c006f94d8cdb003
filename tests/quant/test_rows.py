"""Quantized rows: what they hold, what they refuse, and what comes back."""

from __future__ import annotations

import pytest
import torch

from epmoe.quant import (
    ROW_SCHEMES,
    QuantizedRows,
    dequantize_rows,
    quantize_rows,
    quantize_rows_by,
    row_dtype,
    scales_per_row,
)
from epmoe.quant.reference import e4m3_numbers, round_to_e4m3, round_to_int8

MOST = {"fp8_block": 0.04, "fp8_block_ue8m0": 0.04, "fp8_row": 0.04, "int8_row": 0.02}  # relative L2 of a row


def test_the_table_of_e4m3_numbers_is_the_dtypes_own():
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert torch.equal(codes.double(), e4m3_numbers())


def test_rounding_by_the_table_is_the_dtypes_own_and_saturates(seed):
    x = torch.randn(5000, generator=torch.Generator().manual_seed(seed)) * 30
    x = torch.cat([x, x * 1e-4, (e4m3_numbers()[1:] + e4m3_numbers()[:-1]).float() / 2])  # ties too
    assert torch.equal(round_to_e4m3(x), x.to(torch.float8_e4m3fn).double())
    assert round_to_e4m3(torch.tensor([500.0, -1e9])).tolist() == [448.0, -448.0]
    assert round_to_int8(torch.tensor([0.5, 1.5, -2.5, 300.0])).tolist() == [0, 2, -2, 127]


@pytest.mark.parametrize("shape", [(5, 192), (2, 3, 80), (320,), (0, 64), (2, 0, 64)], ids=str)
@pytest.mark.parametrize("scheme", ROW_SCHEMES)
def test_rows_of_any_leading_shape_come_back(scheme, shape, seed):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    q = quantize_rows(x, scheme)
    assert q.shape == x.shape and q.values.dtype == row_dtype(scheme) and q.scheme == scheme
    assert q.scales.shape == (*shape[:-1], scales_per_row(shape[-1], scheme))
    back = dequantize_rows(q, torch.float64)
    assert back.dtype == torch.float64 and back.shape == x.shape
    error = (back - x).norm(dim=-1) / x.norm(dim=-1)
    assert (error < MOST[scheme]).all()
    assert dequantize_rows(q, torch.bfloat16).dtype == torch.bfloat16


def test_blocks_of_128_share_a_scale_and_the_last_one_may_be_partial():
    x = torch.ones(1, 300)
    x[0, 128:256], x[0, 256:] = 1e3, 1e-3
    q = quantize_rows(x, "fp8_block")
    assert q.scales[0].tolist() == pytest.approx([1 / 448, 1e3 / 448, 1e-3 / 448], rel=1e-6)
    scales = q.scales.repeat_interleave(128, 1)[:, :300]
    assert torch.equal(dequantize_rows(q, torch.float32), q.values.float() * scales)
    assert [scales_per_row(w, "fp8_block") for w in (1, 128, 129, 7168)] == [1, 1, 2, 56]
    assert scales_per_row(7168, "fp8_row") == scales_per_row(7168, "int8_row") == 1


def test_gradients_stop_where_rows_are_quantized():
    q = quantize_rows(torch.randn(2, 8, requires_grad=True), "fp8_row")
    assert not q.values.requires_grad and not q.scales.requires_grad


@pytest.mark.parametrize("scheme", ROW_SCHEMES)
def test_parts_that_do_not_fit_are_refused_by_name(scheme):
    q = quantize_rows(torch.randn(3, 200), scheme)
    for values, scales, name, message in [
        (q.values, q.scales, "fp4", "scheme='fp4'"),
        (q.values.float(), q.scales, scheme, "values is torch.float32"),
        (q.values[0, 0], q.scales, scheme, "values is"),
        (q.values, q.scales[:2], scheme, "scales is torch.float32"),
        (q.values, q.scales.repeat(1, 2), scheme, "scales is torch.float32"),
        (q.values, q.scales.half(), scheme, "scales is torch.float16"),
        (q.values, q.scales.to("meta"), scheme, "scales is on meta"),
    ]:
        with pytest.raises(ValueError, match=f"QuantizedRows.{message}"):
            QuantizedRows(values, scales, name)
    with pytest.raises(ValueError, match="x has shape"):
        quantize_rows(torch.randn(3, 0), scheme)
    with pytest.raises(ValueError, match="width=0"):
        scales_per_row(0, scheme)


@pytest.mark.parametrize(("scheme", "largest"), [("fp8_row", 448.0), ("int8_row", 127.0)])
def test_a_fixed_scale_rounds_to_the_nearest_saturates_and_hides_no_nan(scheme, largest, seed):
    x = torch.randn(6, 80, generator=torch.Generator().manual_seed(seed))
    scale = torch.tensor([2.0 / largest])
    x[0, 0], x[1, 0], x[2, 1], x[3, 2] = 50.0, -50.0, float("nan"), float("inf")
    q = quantize_rows_by(x, scale, scheme)
    spoiled = q.scales.isnan()[:, 0]
    assert spoiled.tolist() == [False, False, True, True, False, False] and (q.scales[~spoiled] == scale).all()
    assert q.values[:2, 0].float().tolist() == [largest, -largest] and not q.values[spoiled].float().any()
    exact = (x[~spoiled] / scale).clamp(-largest, largest)
    near = round_to_int8(exact) if scheme == "int8_row" else round_to_e4m3(exact)
    assert torch.equal(q.values[~spoiled].double(), near)
    for wrong, message in [((x, scale, "fp8_block"), "a fixed scale is one for the row, must be fp8_row, int8_row"),
                           ((x, scale.double(), scheme), "scale is torch.float64")]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            quantize_rows_by(*wrong)
