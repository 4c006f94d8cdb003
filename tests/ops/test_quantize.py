"""Rows to eight bits: the twin against float64 by table look-up, the kernel against the twin bit by bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from epmoe.ops.quantize import ROW_FORMATS, quantize, quantize_reference, row_format
from epmoe.quant.reference import quantize_group
from epmoe.testing import poisoned_empty

WIDTHS = [1, 80, 128, 192, 320]
SCHEMES = list(ROW_FORMATS)


def rows_of_every_kind(width: int, seed: int) -> Tensor:
    """Rows over twelve decades, and zeros, an inf, a NaN, subnormals, the smallest and the largest numbers."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(16, width, generator=g) * 10.0 ** torch.randint(-6, 7, (16, 1), generator=g)
    x[1] = 0
    x[2, width // 2] = math.nan
    x[3, -1] = -math.inf
    x[4] *= 1e-38 / x[4].abs().max()  # numbers and scales below the normal ones
    x[5] = 1e-45
    x[6] = -3e38
    x[7, 0] = 0.0
    x[7, 1:] = -0.0
    return x


def same_bits(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> None:
    for got, want in zip(a, b, strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        differ = (got.cpu().view(torch.uint8) != want.cpu().view(torch.uint8)).view(got.shape[0], -1).any(1)
        assert not differ.any(), f"rows {differ.nonzero().flatten().tolist()}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_kernel_and_twin_give_the_same_bits(scheme, width, dtype, device, seed):
    x = rows_of_every_kind(width, seed).to(dtype)
    with poisoned_empty():
        same_bits(quantize(x.to(device), scheme), quantize_reference(x, scheme))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_wider_than_a_step_are_walked_twice(scheme, device, seed):
    x = torch.randn(3, 9000, generator=torch.Generator().manual_seed(seed))
    x[1, 8999] = 1e4  # what decides the scale is in the last step
    same_bits(quantize(x.to(device), scheme), quantize_reference(x, scheme))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_twin_takes_the_nearest_number_of_each_group(scheme, width, seed):
    x = rows_of_every_kind(width, seed)
    values, scales = quantize_reference(x, scheme)
    group = row_format(scheme).group or width
    for row in range(len(x)):
        for s, part in enumerate(x[row].split(group)):
            want, scale = quantize_group(part, scheme)
            got, got_scale = values[row, s * group : (s + 1) * group].double(), scales[row, s].item()
            if math.isnan(scale):
                assert math.isnan(got_scale) and not got.any()
                continue
            assert got_scale == pytest.approx(scale, rel=1e-6)
            exact = part.double() / scale
            # a rounded scale may turn a number next to a tie, where both neighbours are as near
            assert ((got - exact).abs() <= (want - exact).abs() + 1e-5 * exact.abs()).all()


def test_ties_go_to_the_even_mantissa_and_what_is_too_large_to_the_largest():
    x = torch.tensor([[448.0, 17.0, 19.0, -17.0, 2**-10, 3 * 2**-10, 0.0146484375, 1.0625, 1.1875] + [0.0] * 119])
    values, scales = quantize_reference(x, "fp8_block")
    assert scales.item() == 1.0
    assert values[0, :9].tolist() == [448.0, 16.0, 20.0, -16.0, 0.0, 2**-8, 0.015625, 1.0, 1.25]
    values, scales = quantize_reference(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]]), "int8_row")
    assert scales.item() == 1.0 and values.tolist() == [[127, 0, 2, 2, 0, -2]]


def test_scales_of_ue8m0_are_the_next_powers_of_two(device, seed):
    x = torch.randn(9, 300, generator=torch.Generator().manual_seed(seed)) * 10.0 ** torch.arange(-4, 5)[:, None]
    x[0, 128:256], x[0, 128] = 0, 448.0 * 2**-20  # a power of two already
    scales, plain = (quantize(x.to(device), scheme)[1].cpu() for scheme in ("fp8_block_ue8m0", "fp8_block"))
    assert torch.equal(scales, torch.exp2(plain.double().log2().ceil()).float()) and scales[0, 1] == 2**-20
    assert ((scales >= plain) & (scales < 2 * plain)).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_zeros_have_scale_one_and_an_inf_or_nan_spoils_its_group_alone(scheme, device, seed):
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(seed))
    x[1] = 0
    values, scales = (t.cpu() for t in quantize(x.to(device), scheme))
    assert (scales[1] == 1).all() and not values[1].float().any()
    spoiled = x.clone()
    spoiled[2, 3], spoiled[3, 200] = math.nan, math.inf
    got, got_scales = (t.cpu() for t in quantize(spoiled.to(device), scheme))
    hit = torch.zeros_like(scales, dtype=torch.bool)
    hit[2, 0] = hit[3, -1] = True
    assert got_scales[hit].isnan().all() and torch.equal(got_scales[~hit], scales[~hit])
    for row in range(5):
        for s, part in enumerate(got[row].split(row_format(scheme).group or 256)):
            if hit[row, s]:
                assert not part.float().any()
            else:
                first = s * len(part)
                assert torch.equal(part.float(), values[row, first : first + len(part)].float())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_row_depends_on_no_other_row(scheme, device, seed):
    x = rows_of_every_kind(320, seed).to(device)
    values, scales = quantize(x, scheme)
    for row in (0, 4, 9):
        same_bits(quantize(x[row : row + 1], scheme), (values[row : row + 1], scales[row : row + 1]))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(device)
    shuffled = quantize(x[order], scheme)
    bits = values.view(torch.uint8)[order].view(values.dtype)
    same_bits(shuffled, (bits, scales[order]))


@pytest.mark.parametrize("width", [80, 192, 512])
@pytest.mark.parametrize(("scheme", "most"), [(s, 0.02 if s == "int8_row" else 0.04) for s in SCHEMES])
def test_each_row_keeps_its_precision_whatever_its_magnitude(scheme, most, width, device, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(13, width, generator=g) * 10.0 ** torch.arange(-6, 7)[:, None]
    values, scales = (t.cpu().double() for t in quantize(x.to(device), scheme))
    back = values * scales.repeat_interleave(row_format(scheme).group or width, 1)[:, :width]
    assert ((back - x).norm(dim=1) / x.double().norm(dim=1)).max() < most


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_past_the_end_of_their_span_are_neither_read_nor_written(scheme, device, seed):
    x = torch.randn(12, 200, generator=torch.Generator().manual_seed(seed))
    ends = torch.tensor([3, 4, 12], dtype=torch.int32, device=device)
    owned = torch.tensor([0, 1, 2, 8, 9, 10, 11])
    padding = torch.tensor([3, 4, 5, 6, 7])
    x[padding] = math.nan
    with poisoned_empty():
        values, scales = quantize(x.to(device), scheme, ends, 4)
    assert scales[padding.to(device)].isnan().all(), "a scale of padding was written"
    want = quantize_reference(x[owned], scheme)
    bits = values.cpu().view(torch.uint8)[owned].view(values.dtype)
    same_bits((bits, scales.cpu()[owned]), want)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_may_lie_apart_and_there_may_be_none(scheme, device, seed):
    wide = torch.randn(6, 100, generator=torch.Generator().manual_seed(seed)).to(device)
    same_bits(quantize(wide[:, 3:83], scheme), quantize(wide[:, 3:83].contiguous(), scheme))
    values, scales = quantize(wide[:0], scheme)
    assert values.shape == (0, 100) and scales.shape == (0, row_format(scheme).scales(100))


def test_what_does_not_fit_is_named():
    x = torch.randn(4, 8)
    for args, message in [
        ((x, "fp4"), "scheme='fp4': must be fp8_block"),
        ((x.int(), "fp8_row"), "x is torch.int32"),
        ((x.T, "fp8_row"), "x has shape"),
        ((x, "fp8_row", torch.tensor([4]), 4), "ends is torch.int64"),
        ((x, "fp8_row", torch.tensor([4], dtype=torch.int32), 3), "their product must be 4"),
    ]:
        with pytest.raises(ValueError, match=message.replace("(", r"\(")):
            quantize(*args)
