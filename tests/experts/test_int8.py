"""int8 experts: against float64 with the same quantized numbers and against numbers never quantized, row by row."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from epmoe.config import Activation
from epmoe.experts import ExpertsSpec, GroupedInt8Experts, select_experts
from epmoe.quant import quantize_rows
from epmoe.testing import poisoned_empty
from tests.experts.quantized_cases import H, I, median_row_error, row_error
from tests.experts.test_fp8 import expected, make, weighted

SCHEME = "int8_row"
SAME_NUMBERS = 1e-2  # one activation in bf16 may be rounded to the integer beside it
# The scheme's own error, in both GEMMs, of most rows: 0.025 to 0.033. Small gates make the activation a product of two
# normal numbers, whose largest entry now and then is far from all others, and with it the step of that row.
UNQUANTIZED = 0.04


@pytest.mark.parametrize("on_input, act", [(False, "swiglu"), (True, "relu2")], ids=str)
def test_standard_rows_match_float64_of_the_same_quantized_numbers(on_input, act, device, seed):
    c = make(SCHEME, device, seed, act=act, on_input=on_input)
    with poisoned_empty():
        y = GroupedInt8Experts(c.spec)(c.rows, c.weights)
    assert y.dtype == torch.bfloat16
    assert row_error(y, weighted(c, expected(c, quantized=True))) < SAME_NUMBERS


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rows_are_near_what_nothing_quantized_gives(device, seed):
    c = make(SCHEME, device, seed, bias=False, h=1024, i=4096)
    y = GroupedInt8Experts(c.spec)(c.rows, c.weights)
    assert row_error(y, weighted(c, expected(c, quantized=True))) < SAME_NUMBERS
    assert median_row_error(y, weighted(c, expected(c, quantized=False))) < UNQUANTIZED


def test_batched_rows_give_what_standard_rows_give_whatever_the_padding_holds(device, seed):
    c = make(SCHEME, device, seed)
    rows, experts = c.batched(), GroupedInt8Experts(c.spec)
    with poisoned_empty():
        y = experts(rows, c.weights)
        standard = experts.output(c.rows, c.weights)
    assert rows.slot is not None and standard.slot is not None
    for place, row in zip(rows.slot.view(-1).tolist(), standard.slot.view(-1).tolist(), strict=True):
        assert (place < 0) == (row < 0)
        if place >= 0:
            assert torch.equal(y.view(-1, H)[place], standard.rows[row])


def test_rows_quantized_by_dispatch_give_the_same_bits(device, seed):
    c = make(SCHEME, device, seed)
    experts = GroupedInt8Experts(c.spec)
    q = quantize_rows(c.rows.x, SCHEME)
    rows = dataclasses.replace(c.rows, x=q.values, x_scale=q.scales, scheme=SCHEME)
    assert torch.equal(experts(rows, c.weights), experts(c.rows, c.weights))


def test_a_row_with_a_nan_touches_no_other_row(device, seed):
    c = make(SCHEME, device, seed)
    experts = GroupedInt8Experts(c.spec)
    want = experts(c.rows, c.weights)
    c.rows.x[4, 100] = math.nan
    got = experts(c.rows, c.weights)
    others = [t for t in range(7) if t != 4]
    assert torch.equal(got[others], want[others])


def test_selection_names_them_for_int8_weights_and_nobody_else():
    spec = ExpertsSpec(Activation(), H, I, torch.bfloat16, torch.device("cpu"), scheme=SCHEME)
    for layout in ("standard", "batched"):
        assert select_experts(spec, "grouped_int8", layout).experts.name == "grouped_int8"
        with pytest.raises(ValueError, match="experts='grouped_fp8': the weights are of scheme='int8_row'"):
            select_experts(spec, "grouped_fp8", layout)
    with pytest.raises(ValueError, match="experts='grouped_int8': the weights are of scheme='fp8_row'"):
        select_experts(dataclasses.replace(spec, scheme="fp8_row"), "grouped_int8")


def test_gradients_are_refused_and_not_dropped(seed):
    c = make(SCHEME, "cpu", seed)
    rows = dataclasses.replace(c.rows, x=c.rows.x.clone().requires_grad_())
    with pytest.raises(ValueError, match="x needs a gradient and int8 experts have no backward"):
        GroupedInt8Experts(c.spec)(rows, c.weights)
