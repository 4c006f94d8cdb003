"""Rows by fixed scales of their experts: the twin by the definition, the kernel against the twin bit by bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from epmoe.ops._segments import batched_segments, standard_segments
from epmoe.ops.quantize_by import quantize_by, quantize_by_into, quantize_by_reference
from epmoe.quant.reference import round_to_e4m3, round_to_int8
from epmoe.testing import poisoned_empty
from tests.ops.test_quantize import rows_of_every_kind, same_bits

SCHEMES = ["fp8_row", "int8_row"]
FIXED = [0.5, 1e3, 1e-3, 7.0]  # experts' scales differ by 1e6


def segments(layout: str) -> tuple[tuple[Tensor, Tensor], list[int]]:
    """Segments over 16 rows, and each row's expert, -1 for padding."""
    if layout == "standard":
        counts = [3, 0, 6, 5]
        made = standard_segments(torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int())
        owner = [e for e, n in enumerate(counts) for _ in range(n)] + [-1, -1]
    else:
        counts = [2, 0, 4, 3]
        made = batched_segments(torch.tensor(counts, dtype=torch.int32), 4)
        owner = [e if place < n else -1 for e, n in enumerate(counts) for place in range(4)]
    return (made[0].contiguous(), made[1].contiguous()), owner


@pytest.mark.parametrize("layout", ["standard", "batched"])
@pytest.mark.parametrize("width", [1, 80, 192, 320])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_number_is_the_nearest_at_its_experts_scale_and_padding_is_left(scheme, width, layout, device, seed):
    (start, end), owner = segments(layout)
    x, fixed = rows_of_every_kind(width, seed).bfloat16(), torch.tensor(FIXED)
    arguments = (x.to(device), fixed.to(device), start.to(device), end.to(device), scheme)
    with poisoned_empty():
        values, scales = quantize_by(*arguments)
        into = torch.full_like(values.view(torch.uint8), 0).view(values.dtype), torch.zeros_like(scales)
        quantize_by_into(*into, *arguments)
    values, scales = values.cpu(), scales.cpu()
    most, nearest = (127.0, round_to_int8) if scheme == "int8_row" else (448.0, round_to_e4m3)
    for n, e in enumerate(owner):
        if e < 0:
            assert scales[n].isnan(), "a row of nobody was written"
            continue
        assert torch.equal(into[0].cpu().view(torch.uint8)[n], values.view(torch.uint8)[n])
        if not x[n].isfinite().all():
            assert scales[n].isnan() and not values[n].float().any()
            continue
        assert scales[n].item() == fixed[e].item() == into[1][n].item()
        scaled = (x[n].float() * (1.0 / fixed[e])).double().clamp(-most, most)
        assert torch.equal(values[n].double(), nearest(scaled))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_kernel_and_twin_give_the_same_bits(scheme, dtype, device, seed):
    x, fixed = rows_of_every_kind(192, seed).to(dtype), torch.tensor(FIXED)
    start = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    end = torch.tensor([4, 4, 9, 16], dtype=torch.int32)
    got = quantize_by(*(t.to(device) for t in (x, fixed, start, end)), scheme)
    same_bits(got, quantize_by_reference(x, fixed, start, end, scheme))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_row_is_quantized_for_each_of_its_experts(scheme, weighted, device, seed):
    """Pairs of 16 rows and 3 choices, in any order, of which a segment may name any; the others hold -1."""
    g = torch.Generator().manual_seed(seed)
    x, fixed = rows_of_every_kind(192, seed).bfloat16(), torch.tensor(FIXED)
    index = torch.randperm(48, generator=g)[:20].int()
    start, end = torch.tensor([0, 5, 5, 12], dtype=torch.int32), torch.tensor([5, 5, 12, 18], dtype=torch.int32)
    index[18:] = -1
    weight = torch.rand(48, generator=g) + 0.5 if weighted else None
    arguments = (x, fixed, start, end, scheme, index, 3, weight)
    on = [t.to(device) if isinstance(t, Tensor) else t for t in arguments]
    with poisoned_empty():
        values, scales = quantize_by(*on)
        into = torch.zeros(values.shape, dtype=torch.uint8, device=device).view(values.dtype), torch.zeros_like(scales)
        quantize_by_into(*into, *on)
    assert scales[18:].isnan().all(), "a row of nobody was written"
    gathered = x[index[:18] // 3]
    want, own = quantize_by_reference(gathered, fixed, start, end, scheme)
    if weight is not None:
        own = own * weight[index[:18].long(), None]
    for found in ((values[:18], scales[:18]), (into[0][:18], into[1][:18])):
        same_bits(found, (want, own))
    same_bits((values[:18], scales[:18]), tuple(t[:18] for t in quantize_by_reference(*arguments)))


@pytest.mark.parametrize("indexed", [False, True])
def test_what_a_graph_is_told_of_the_result_is_so(indexed):
    x, ends = torch.ones(3, 8), torch.tensor([2], dtype=torch.int32)
    index = (torch.tensor([4, 0], dtype=torch.int32), 2, torch.ones(6)) if indexed else ()
    arguments = (x, torch.ones(1), torch.zeros_like(ends), ends, "fp8_row", *index)
    with FakeTensorMode() as mode:
        told = quantize_by(*(mode.from_tensor(t) if isinstance(t, Tensor) else t for t in arguments))
    for found, told_of in zip(quantize_by(*arguments), told, strict=True):
        assert (found.shape, found.dtype, found.stride()) == (told_of.shape, told_of.dtype, told_of.stride())


def test_nothing_to_do_is_fine(device):
    none = torch.zeros(0, dtype=torch.int32, device=device)
    values, scales = quantize_by(torch.ones(3, 8, device=device), torch.ones(0, device=device), none, none, "fp8_row")
    assert values.shape == (3, 8) and scales.shape == (3, 1)
    one = torch.zeros(1, dtype=torch.int32, device=device)
    assert quantize_by(torch.ones(0, 8, device=device), one.float(), one, one, "fp8_row")[0].shape == (0, 8)


def test_what_does_not_fit_is_named():
    x, fixed, ends = torch.ones(4, 8), torch.ones(2), torch.tensor([2, 4], dtype=torch.int32)
    good = {"x": x, "fixed": fixed, "row_start": ends - 2, "row_end": ends, "scheme": "fp8_row"}
    for change, message in [
        ({"scheme": "fp8_block"}, "scheme='fp8_block': a fixed scale is one for a row, must be fp8_row or int8_row"),
        ({"x": x.int()}, "x is torch.int32"),
        ({"x": x.t()}, "x has shape"),
        ({"fixed": fixed.double()}, "fixed is torch.float64"),
        ({"fixed": fixed[:1]}, "row_start has 2 entries"),
        ({"row_index": ends.long()}, "row_index is torch.int64"),
        ({"row_index": ends, "weight": fixed.half()}, "weight is torch.float16"),
        ({"weight": fixed}, "weight without row_index: must be None"),
        ({"row_index": ends, "divisor": 0}, "divisor=0: must be at least 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            quantize_by(**(good | change))
    with pytest.raises(ValueError, match="scales is torch.float32"):
        quantize_by_into(x.to(torch.int8), fixed, **(good | {"scheme": "int8_row"}))


def test_shapes_are_known_without_running():
    meta = (torch.ones(4, 8), torch.ones(2), *torch.zeros(2, 2, dtype=torch.int32))
    values, scales = torch.ops.epmoe.quantize_by(*(t.to("meta") for t in meta), "int8_row")
    assert (values.shape, values.dtype, scales.shape) == ((4, 8), torch.int8, (4, 1))
