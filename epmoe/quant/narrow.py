"""Narrow weights: 4-, 6- and 8-bit numbers that kernels widen tile by tile and multiply by rows that are not quantized.

What the schemes mean and how the numbers lie: `ops/narrow_formats.py`. Beside the path of a token.

L local experts, N output channels (2I for gate and up rows together), K what is summed over, S groups along K.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from epmoe.ops.narrow_formats import FLOATS, NARROW_FORMATS, NarrowFormat, narrow_format, pack_codes, scales_of, widen

NARROW_SCHEMES = tuple(NARROW_FORMATS)
E4M3_LARGEST, E4M3_SMALLEST = 448.0, 2.0**-9


@dataclasses.dataclass(frozen=True)
class NarrowWeights:
    """Weights `[L, N, K]` in few bits.

    Attributes:
        values: int8 `[L, N, K]`, or uint8 `[L, N, B·ceil(K / 128)]`, B = 64 for 4-bit schemes and 96 for 6-bit ones;
            contiguous.
        scales: `[L, S, N]` contiguous, of a dtype that the scheme has.
        scheme: one of `NARROW_SCHEMES`.
        width: K.
        zeros: int8 `[L, S, N]`, or None for zero points of 0; integer schemes only.
        outer: float32 `[L, N]`, the second scale of `nvfp4`.

    Raises:
        ValueError: these do not fit each other, naming the one that does not.
    """

    values: Tensor
    scales: Tensor
    scheme: str
    width: int
    zeros: Tensor | None = None
    outer: Tensor | None = None

    def __post_init__(self) -> None:
        if self.scheme not in NARROW_SCHEMES:
            raise ValueError(f"NarrowWeights.scheme={self.scheme!r}: must be one of {', '.join(NARROW_SCHEMES)}")
        parts = (self.values, self.scales, self.zeros, self.outer)
        if (reason := narrow_mismatch(*parts, self.scheme, self.width)) is not None:
            raise ValueError(f"NarrowWeights.{reason}")

    @property
    def shape(self) -> tuple[int, int, int]:
        """[L, N, K]."""
        return self.values.shape[0], self.values.shape[1], self.width

    @property
    def nbytes(self) -> int:
        """What a forward reads."""
        parts = (self.values, self.scales, self.zeros, self.outer)
        return sum(t.numel() * t.element_size() for t in parts if t is not None)


def narrow_mismatch(
    values: Tensor, scales: Tensor | None, zeros: Tensor | None, outer: Tensor | None, scheme: str, width: int
) -> str | None:
    """Which of the parts of narrow weights of `width` columns does not fit, and what would; None if all do."""
    form = narrow_format(scheme)
    if width < 1:
        return f"width={width}: must be at least 1"
    row = form.bytes_per_row(width)
    right = f"must be contiguous {form.dtype} [L, N, {row}] for scheme={scheme!r} and {width} columns"
    if values.dim() != 3 or values.dtype != form.dtype or values.shape[2] != row or not values.is_contiguous():
        return f"values is {values.dtype} {tuple(values.shape)} with strides {values.stride()}: {right}"
    per_group = (values.shape[0], form.groups(width), values.shape[1])
    for name, t, dtypes, shape in (
        ("scales", scales, form.scale_dtypes, per_group),
        ("zeros", zeros, (torch.int8,), per_group),
        ("outer", outer, (torch.float32,), (values.shape[0], values.shape[1])),
    ):
        wanted = name == "scales" or (name == "outer" and form.outer)
        if t is None:
            if wanted:
                return f"{name} is None: scheme={scheme!r} needs {shape}"
            continue
        if not wanted and not (name == "zeros" and form.zeros):
            return f"{name} is given: scheme={scheme!r} has none"
        if t.dtype not in dtypes or tuple(t.shape) != shape or not t.is_contiguous():
            return (
                f"{name} is {t.dtype} {tuple(t.shape)} with strides {t.stride()}: must be contiguous "
                f"{' or '.join(map(str, dtypes))} {shape} for scheme={scheme!r}"
            )
        if t.device != values.device:
            return f"{name} is on {t.device}: must be on {values.device}, as values"
    return None


def narrow_bytes(shape: tuple[int, int, int], scheme: str, zeros: bool = False) -> int:
    """Bytes that a forward reads of weights of `shape` [L, N, K], scales of the scheme's usual dtype included."""
    form = narrow_format(scheme)
    num_local, n, k = shape
    per_group = form.scale_dtypes[0].itemsize + (1 if zeros else 0)
    return num_local * n * (form.bytes_per_row(k) + form.groups(k) * per_group + (4 if form.outer else 0))


def quantize_narrow(
    w: Tensor, scheme: str, *, zeros: bool = False, scale_dtype: torch.dtype | None = None
) -> NarrowWeights:
    """`w [L, N, K]` (floating) as narrow weights, each number to the nearest; one expert at a time. Not differentiable.

    Integer scales are amax / 7 (amax / 127), with zero points (largest - smallest) / 15 (/ 255) of an interval that
    holds 0, rounded to their dtype before numbers are rounded by them. `mxfp4` takes 2**(floor(log2 amax) - 2) as the
    OCP Microscaling specification says, so that what is past 6 saturates, as do `mxfp6_e2m3` past 7.5, and `mxfp6_e3m2`
    past 28 with 2**(floor(log2 amax) - 4). `nvfp4` takes amax / 6 beside amax / 2688 of the expert. A group of zeros
    has scale 1; an inf or a NaN makes the scale of its group NaN and touches no other group.

    Args:
        zeros: with zero points; integer schemes only.
        scale_dtype: of integer schemes: bfloat16 (also None), float16 or float32. It must hold the scales: float16
            ends at 65504.

    Raises:
        ValueError: an unknown scheme, a w that is not that, or an option that the scheme does not have.
    """
    form = narrow_format(scheme)
    if w.dim() != 3 or not w.is_floating_point() or w.dtype.itemsize < 2 or w.shape[2] < 1:
        raise ValueError(f"w is {w.dtype} {tuple(w.shape)}: must be float16, bfloat16, float32 or float64 [L, N, K]")
    if zeros and not form.zeros:
        raise ValueError(f"zeros=True with scheme={scheme!r}: only integer schemes have zero points")
    dtype = scale_dtype or form.scale_dtypes[0]
    if dtype not in form.scale_dtypes:
        takes = " or ".join(map(str, form.scale_dtypes))
        raise ValueError(f"scale_dtype={scale_dtype} with scheme={scheme!r}: must be {takes}")
    num_local, n, k = w.shape
    per_group = (num_local, form.groups(k), n)
    values = w.new_empty(num_local, n, form.bytes_per_row(k), dtype=form.dtype)
    scales = w.new_empty(per_group, dtype=dtype)
    points = w.new_empty(per_group, dtype=torch.int8) if zeros else None
    outer = w.new_empty(num_local, n, dtype=torch.float32) if form.outer else None
    for e in range(num_local):
        groups = _grouped(w[e].detach(), form)
        if form.kind in FLOATS:
            codes, scale, second = _round_floats(groups, form, dtype)
            if outer is not None:
                outer[e] = second
        else:
            codes, scale, zero = _round_integers(groups, form, dtype, zeros)
            if points is not None:
                points[e] = zero.mT
        scales[e] = scale.mT
        values[e] = pack_codes(codes.flatten(1)[:, :k], form.kind)
    return NarrowWeights(values, scales, scheme, k, points, outer)


def dequantize_narrow(q: NarrowWeights, dtype: torch.dtype) -> Tensor:
    """The weights `[L, N, K]` in `dtype`, computed in float32 (float64 for float64)."""
    precise = torch.promote_types(dtype, torch.float32)
    return widen(q.values, q.scales, q.zeros, q.outer, q.scheme, q.width, precise).to(dtype)


def _grouped(w: Tensor, form: NarrowFormat) -> Tensor:
    """One expert's `[N, K]` as float32 `[N, S, G]`, the last group filled up with zeros."""
    group = form.group or w.shape[1]
    return F.pad(w.float(), (0, -w.shape[1] % group)).unflatten(1, (-1, group))


def _positive(scale: Tensor, amax: Tensor, smallest: float) -> Tensor:
    """`scale`, at least `smallest`; 1 where all is zero, NaN where something is not finite."""
    scale = torch.where(amax == 0, 1.0, scale.clamp_min(smallest))
    return torch.where(amax.isfinite(), scale, torch.nan)


def _round_integers(
    groups: Tensor, form: NarrowFormat, dtype: torch.dtype, with_zeros: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes `[N, S, G]`, scales and zero points `[N, S]`."""
    lowest, highest = (-8, 7) if form.kind == "int4" else (-128, 127)
    smallest = max(torch.finfo(dtype).tiny, 2.0**-126)
    amax = groups.abs().amax(-1)
    if with_zeros:
        bottom, top = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
        scale = (top - bottom) / (highest - lowest)
    else:
        scale = amax / highest
    scale = _positive(scale, amax, smallest).to(dtype)
    wide = scale.float()
    usable = wide.isfinite()
    divisor = torch.where(usable, wide, 1.0)
    zero = torch.zeros_like(divisor)
    if with_zeros:
        zero = torch.where(usable, (lowest - bottom / divisor).round().clamp(lowest, highest), 0.0)
    rounded = torch.where(usable[..., None], (groups / divisor[..., None]).round() + zero[..., None], 0.0)
    rounded = rounded.clamp(lowest, highest)
    codes = (rounded + 8).to(torch.uint8) if form.kind == "int4" else rounded.to(torch.int8)
    return codes, scale, zero.to(torch.int8)


def _round_floats(groups: Tensor, form: NarrowFormat, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes `[N, S, G]`, scales `[N, S]` and the expert's second scale."""
    amax = groups.abs().amax(-1)
    finite = amax.isfinite()
    sizes = FLOATS[form.kind].magnitudes()
    outer = torch.ones((), device=groups.device)
    if form.outer:
        largest = torch.where(finite, amax, 0).max()
        outer = torch.where(largest == 0, 1.0, (largest / (E4M3_LARGEST * sizes[-1])).clamp_min(2.0**-126))
        scale = _positive(amax / (sizes[-1] * outer), amax, E4M3_SMALLEST).clamp_max(E4M3_LARGEST).to(dtype)
    else:
        most = math.frexp(sizes[-1])[1]  # the largest number lies below 2**most, so the scale is 2**(.. + 1 - most)
        exponent = torch.frexp(torch.where(finite & (amax > 0), amax, 2.0 ** (most - 1))).exponent - most
        scale = torch.where(finite, (exponent + 127).clamp(0, 254), 255).to(dtype)
    wide = scales_of(scale, torch.float32) * outer
    divisor = torch.where(finite, wide, 1.0)[..., None]
    return _nearest_codes(torch.where(finite[..., None], groups / divisor, 0.0), form.kind), scale, outer


def _nearest_codes(x: Tensor, kind: str) -> Tensor:
    """Codes of the nearest numbers, ties to the even mantissa, past the largest to it."""
    sizes = torch.tensor(FLOATS[kind].magnitudes(), dtype=torch.float32, device=x.device)
    middles, size = (sizes[1:] + sizes[:-1]) / 2, x.abs()
    below, above = (torch.bucketize(size, middles, out_int32=True, right=right) for right in (False, True))
    code = torch.where(below % 2 == 0, below, above)  # codes ascend, so an even one has an even mantissa
    return (code | torch.signbit(x).int() * FLOATS[kind].sign).to(torch.uint8)
