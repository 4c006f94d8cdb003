"""Narrow weights: what every number becomes, against float64 and by rules written out anew, and how numbers lie."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from epmoe.ops.narrow_formats import narrow_format, pack_nibbles, pack_sixes, unpack_nibbles, unpack_sixes
from epmoe.quant import NARROW_SCHEMES, NarrowWeights, dequantize_narrow, narrow_bytes, quantize_narrow

INTEGERS = [scheme for scheme in NARROW_SCHEMES if scheme.startswith("int")]
E2M1 = [sign * x for sign in (1, -1) for x in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
# Relative L2 of normal numbers after rounding, each scheme's own: int4 of 128 columns spends 16 steps on about ±2.7 σ.
OWN_ERROR = {"int4": 0.14, "int8": 0.009, "mxfp4": 0.14, "nvfp4": 0.11, "mxfp6_e2m3": 0.035, "mxfp6_e3m2": 0.065}


def weights(n: int, k: int, seed: int) -> Tensor:
    """Three experts whose magnitudes differ by 1e3, with channels that do too."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(3, n, k, generator=g) * torch.tensor([1.0, 1e3, 1e-3])[:, None, None]
    return w * 10.0 ** torch.randint(-2, 3, (3, n, 1), generator=g)


def own_error(scheme: str) -> float:
    return OWN_ERROR.get(scheme, OWN_ERROR.get(scheme.split("_")[0], math.nan))


def six_bit_number(kind: str, code: int) -> float:
    """The magnitude that five bits are, as the OCP Microscaling specification defines them."""
    mantissa_bits, bias = (3, 1) if kind == "e2m3" else (2, 3)
    exponent, mantissa = code >> mantissa_bits, (code & ((1 << mantissa_bits) - 1)) / 2**mantissa_bits
    return 2.0 ** (1 - bias) * mantissa if exponent == 0 else 2.0 ** (exponent - bias) * (1 + mantissa)


def numbers_held(scheme: str) -> Tensor:
    """All that a code of a scheme of floats can be, ascending, before its scale."""
    kind = narrow_format(scheme).kind
    sizes = set(E2M1) if kind == "fp4" else {six_bit_number(kind, code) for code in range(32)}
    return torch.tensor(sorted(sizes | {-x for x in sizes}), dtype=torch.float64)


def column(q: NarrowWeights, e: int, n: int, k: int) -> float:
    """The number that column k of channel n is, found byte by byte as the format says."""
    form, value = narrow_format(q.scheme), q.values
    if form.kind == "int8":
        number = float(value[e, n, k])
    elif form.kind in ("e2m3", "e3m2"):
        span, within = divmod(k, 128)
        three = [int(value[e, n, 96 * span + 32 * p + within % 32]) for p in range(3)]
        code = three[within // 32] // 4 if within < 96 else sum(b % 4 * 4 ** (2 - p) for p, b in enumerate(three))
        number = (-1.0 if code >= 32 else 1.0) * six_bit_number(form.kind, code % 32)
    else:
        span, within = divmod(k, 128)
        u, p, h, lane, i = within // 32, within // 16 % 2, within // 8 % 2, within // 2 % 4, within % 2
        byte = int(value[e, n, 64 * span + 16 * lane + 4 * u + 2 * i + p])
        code = byte >> 4 if h else byte & 15
        number = E2M1[code] if form.kind == "fp4" else code - 8.0
    s = k // form.group if form.group else 0
    if q.zeros is not None:
        number -= float(q.zeros[e, s, n])
    scale = 2.0 ** (int(q.scales[e, s, n]) - 127) if q.scales.dtype == torch.uint8 else float(q.scales[e, s, n])
    return number * scale * (1.0 if q.outer is None else float(q.outer[e, n]))


@pytest.mark.parametrize("scheme", NARROW_SCHEMES)
def test_numbers_lie_where_the_format_says(scheme, seed):
    q = quantize_narrow(weights(5, 200, seed), scheme, zeros=scheme in INTEGERS)
    got = dequantize_narrow(q, torch.float64)
    assert got.shape == q.shape == (3, 5, 200)
    for k in (0, 1, 31, 32, 63, 64, 127, 128, 191, 192, 199):
        for e, n in ((0, 0), (2, 4)):
            assert got[e, n, k].item() == pytest.approx(column(q, e, n, k), rel=1e-12)


@pytest.mark.parametrize("k", [80, 192, 256])
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("scheme", INTEGERS)
def test_integers_are_the_nearest_ones_at_their_groups_scale(scheme, zeros, k, seed):
    w = weights(4, k, seed)
    q = quantize_narrow(w, scheme, zeros=zeros, scale_dtype=torch.float32)
    group = narrow_format(scheme).group or k
    back = dequantize_narrow(q, torch.float64)
    steps = 15 if scheme.startswith("int4") else 255
    for first in range(0, k, group):
        part, got = w[:, :, first : first + group].double(), back[:, :, first : first + group]
        step = q.scales[:, first // group].double()[..., None]
        bottom, top = part.amin(-1).clamp_max(0), part.amax(-1).clamp_min(0)
        want = (top - bottom) / steps if zeros else part.abs().amax(-1) / (steps // 2)
        torch.testing.assert_close(step[..., 0], want, rtol=1e-6, atol=0)
        # zero points are whole too: with them the ends of a group may be half a step further
        assert ((got - part).abs() <= step * (1.001 if zeros else 0.5001)).all()


@pytest.mark.parametrize("scheme", ["mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "nvfp4"])
def test_small_floats_are_the_nearest_ones_at_their_blocks_scale(scheme, seed):
    w = weights(4, 80, seed)
    q = quantize_narrow(w, scheme)
    group = narrow_format(scheme).group
    table = numbers_held(scheme)
    back = dequantize_narrow(q, torch.float64)
    for s, first in enumerate(range(0, 80, group)):
        part = w[:, :, first : first + group].double()
        amax = part.abs().amax(-1)
        if scheme.startswith("mx"):
            assert q.scales.dtype == torch.uint8
            scale = 2.0 ** (q.scales[:, s].double() - 127)
            assert (scale == 2.0 ** (amax.log2().floor() - (4 if scheme.endswith("e3m2") else 2))).all()
        else:
            assert q.outer is not None
            outer = q.outer.double()
            torch.testing.assert_close(outer, (w.abs().amax((1, 2)) / 2688).double()[:, None].expand_as(outer))
            scale = q.scales[:, s].double() * outer
            exact = (amax / 6 / outer).clamp_min(2.0**-9)
            assert ((q.scales[:, s].double() - exact).abs() <= (exact * 2.0**-4).clamp_min(2.0**-10)).all()
        scaled = part / scale[..., None]
        nearest = (scaled[..., None] - table).abs().amin(-1)
        got = (back[:, :, first : first + group] / scale[..., None] - scaled).abs()
        assert (got <= nearest + 1e-6 * scaled.abs()).all()


def test_ties_of_e2m1_go_to_the_even_mantissa():
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    for sign in (1, -1):
        w = torch.zeros(1, 1, 32)
        w[0, 0, :8] = sign * middles  # the largest is 6: the scale is 1
        got = dequantize_narrow(quantize_narrow(w, "mxfp4"), torch.float64)[0, 0, :8]
        assert (sign * got).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]


@pytest.mark.parametrize(("scheme", "largest"), [("mxfp6_e2m3", 7.5), ("mxfp6_e3m2", 28.0)])
def test_every_six_bit_number_and_every_tie_between_two(scheme, largest):
    numbers = numbers_held(scheme)
    numbers = numbers[numbers >= 0]
    assert len(numbers) == 32 and numbers[-1] == largest
    middles, even = (numbers[1:] + numbers[:-1]) / 2, torch.arange(31) // 2 * 2 + torch.arange(31) % 2 * 2
    past = 2.0 ** math.ceil(math.log2(largest)) * 0.99  # of the same power of two as the largest, and past it
    for sign in (1, -1):
        w = torch.zeros(1, 1, 96)
        w[0, 0, :32], w[0, 0, 32:63], w[0, 0, 64:66] = numbers, middles, torch.tensor([past, largest])
        w[0, 0, 63] = largest  # each group's scale is 1 by its largest
        got = sign * dequantize_narrow(quantize_narrow(sign * w, scheme), torch.float64)[0, 0]
        assert torch.equal(got[:32], numbers)
        assert torch.equal(got[32:63], numbers[even])
        assert got[64:66].tolist() == [largest, largest] and not got[66:].any()


@pytest.mark.parametrize("scheme", NARROW_SCHEMES)
def test_the_schemes_own_error_is_what_it_should_be(scheme, seed):
    w = torch.randn(2, 64, 512, generator=torch.Generator().manual_seed(seed))
    w[1] *= 1e3
    for zeros in (False, True) if scheme in INTEGERS else (False,):
        back = dequantize_narrow(quantize_narrow(w, scheme, zeros=zeros), torch.float64)
        for e in range(2):
            assert ((back[e] - w[e]).norm() / w[e].norm()).item() < own_error(scheme)


FORMS = [(scheme, zeros) for scheme in NARROW_SCHEMES for zeros in ((False, True) if scheme in INTEGERS else (False,))]


@pytest.mark.parametrize("scheme, zeros", FORMS, ids=str)
def test_zeros_stay_zero_and_an_inf_or_nan_spoils_its_own_group(scheme, zeros):
    w = torch.zeros(2, 3, 150)
    q = quantize_narrow(w, scheme, zeros=zeros)
    assert not dequantize_narrow(q, torch.float64).any()
    assert (q.scales.float() == (127 if scheme.startswith("mx") else 1)).all()
    for bad in (math.nan, math.inf, -math.inf):
        w[1, 2, 140] = bad
        w[1, 2, 5] = 3.0 if narrow_format(scheme).group else 0.0
        back = dequantize_narrow(quantize_narrow(w, scheme, zeros=zeros), torch.float64)
        group = narrow_format(scheme).group or 150
        first = 140 // group * group
        assert back[1, 2, first : first + group].isnan().all()
        back[1, 2, first : first + group] = 0
        if narrow_format(scheme).group:
            assert back[1, 2, 5].item() == pytest.approx(3.0, rel=0.2)
        back[1, 2, 5] = 0
        assert not back.any()


def test_nibbles_come_back_for_any_width(seed):
    g = torch.Generator().manual_seed(seed)
    for width in (1, 64, 65, 128, 129, 300):
        codes = torch.randint(0, 16, (2, 3, width), generator=g, dtype=torch.uint8)
        packed = pack_nibbles(codes, 8)
        assert packed.shape == (2, 3, 64 * math.ceil(width / 128))
        assert torch.equal(unpack_nibbles(packed, width), codes)
        everything = unpack_nibbles(packed, packed.shape[-1] * 2)
        assert (everything[..., width:] == 8).all()


def test_six_bit_codes_come_back_for_any_width_from_three_quarters_of_a_byte_each(seed):
    g = torch.Generator().manual_seed(seed)
    for width in (1, 32, 33, 96, 97, 128, 129, 300):
        codes = torch.randint(0, 64, (2, 3, width), generator=g, dtype=torch.uint8)
        packed = pack_sixes(codes)
        assert packed.shape == (2, 3, 96 * math.ceil(width / 128))
        assert torch.equal(unpack_sixes(packed, width), codes)
        assert not unpack_sixes(packed, packed.shape[-1] * 4 // 3)[..., width:].any()


@pytest.mark.parametrize("scheme", NARROW_SCHEMES)
def test_bytes_are_counted_as_they_lie(scheme, seed):
    q = quantize_narrow(weights(6, 256, seed), scheme, zeros=scheme in INTEGERS)
    assert q.nbytes == narrow_bytes((3, 6, 256), scheme, zeros=scheme in INTEGERS)


def test_scales_of_every_dtype_are_used_as_rounded(seed):
    w = weights(4, 96, seed).clamp(-1e4, 1e4) * 1e-1
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        q = quantize_narrow(w, "int8_g32", scale_dtype=dtype)
        assert q.scales.dtype == dtype
        step = q.scales.double().mT.repeat_interleave(32, -1)
        # a scale rounded down makes the largest number saturate, by less than the rounding of the scale
        slack = 127 * step * 2.0**-8 if dtype == torch.bfloat16 else 127 * step * 2.0**-11
        assert ((dequantize_narrow(q, torch.float64) - w).abs() <= 0.5001 * step + slack).all()


def test_parts_that_do_not_fit_are_refused_by_name():
    q = quantize_narrow(torch.randn(2, 6, 70), "int4_g32", zeros=True)
    good = {"values": q.values, "scales": q.scales, "scheme": q.scheme, "width": 70, "zeros": q.zeros, "outer": None}
    for change, message in [
        ({"scheme": "int3"}, "scheme='int3'"),
        ({"width": 0}, "width=0"),
        ({"width": 200}, "values is torch.uint8"),
        ({"values": q.values.view(torch.int8)}, "values is torch.int8"),
        ({"values": q.values.transpose(1, 2).contiguous().transpose(1, 2)}, "values is .* with strides"),
        ({"scales": q.scales.mT}, "scales is"),
        ({"scales": q.scales.double()}, "scales is torch.float64"),
        ({"zeros": q.zeros[:1]}, "zeros is"),
        ({"outer": torch.ones(2, 6)}, "outer is given"),
        ({"scales": q.scales.to("meta")}, "scales is on meta"),
    ]:
        with pytest.raises(ValueError, match=f"NarrowWeights.{message}"):
            NarrowWeights(**(good | change))
    with pytest.raises(ValueError, match="outer is None: scheme='nvfp4' needs"):
        NarrowWeights(q.values, q.scales.new_ones(2, 5, 6).to(torch.float8_e4m3fn), "nvfp4", 70)
    with pytest.raises(ValueError, match="scheme='int3'"):
        quantize_narrow(torch.ones(1, 2, 3), "int3")
    with pytest.raises(ValueError, match="w is torch.int32"):
        quantize_narrow(torch.ones(1, 2, 3, dtype=torch.int32), "int4_g32")
    with pytest.raises(ValueError, match="zeros=True with scheme='mxfp4'"):
        quantize_narrow(torch.ones(1, 2, 3), "mxfp4", zeros=True)
    with pytest.raises(ValueError, match="scale_dtype=torch.float16 with scheme='nvfp4'"):
        quantize_narrow(torch.ones(1, 2, 3), "nvfp4", scale_dtype=torch.float16)
