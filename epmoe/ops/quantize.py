"""Rows to eight bits: fp8 (e4m3) or int8 values beside fp32 scales. On the path of a token before dispatch, so that
half the bytes travel, before GEMM1 where nobody quantized yet, and between the GEMMs.

    group ── amax ── scale = amax / largest ── values = round(x / scale), to nearest even
    H = 320, `fp8_block`: groups are columns 0..127, 128..255, 256..319; `fp8_row`, `int8_row`: the row is one group

A group of zeros has scale 1. A group with an inf or a NaN has scale NaN and values 0, so that it stays NaN in whatever
is computed from it and touches no other group. Scales are at least 2**-126, which rounds what is far below to 0. In
`fp8_block_ue8m0` they are rounded up to powers of two, held in float32 all the same.

Letters: T rows, H their width, S scales per row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from epmoe.ops._dependent_launch import dependent_launch, let_next_start, wait_for_previous
from epmoe.ops._quant_configs import quantize_config
from epmoe.ops._triton import (
    INTERPRET,
    cdiv,
    check_flat,
    jit,
    on_device_of,
    op,
    tl,
    unit_stride,
    use_triton,
)

SCALE_BLOCK = 128  # columns that share a scale in the block schemes
SMALLEST_SCALE = 2.0**-126  # its reciprocal is finite


class RowFormat(NamedTuple):
    """What a scheme's values are: their dtype, the largest of them, the columns of a scale (0: all of the row), and
    whether scales are powers of two."""

    dtype: torch.dtype
    largest: float
    group: int
    power_of_two: bool = False

    def scales(self, width: int) -> int:
        """S for rows of `width`."""
        return cdiv(width, self.group) if self.group else 1


ROW_FORMATS = {
    "fp8_block": RowFormat(torch.float8_e4m3fn, 448.0, SCALE_BLOCK),
    "fp8_block_ue8m0": RowFormat(torch.float8_e4m3fn, 448.0, SCALE_BLOCK, True),
    "fp8_row": RowFormat(torch.float8_e4m3fn, 448.0, 0),
    "int8_row": RowFormat(torch.int8, 127.0, 0),
}


def row_format(scheme: str) -> RowFormat:
    """The format of `scheme`; `ValueError` for one that is not."""
    if scheme not in ROW_FORMATS:
        raise ValueError(f"scheme={scheme!r}: must be " + ", ".join(ROW_FORMATS))
    return ROW_FORMATS[scheme]


@jit
def magnitude_bits(x):
    """|x| of fp32 as int32, which orders as the numbers do, with inf and then NaN above them."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def _widen(x, INTERPRETED: tl.constexpr):
    """`x` as fp32; the interpreter's own cast loses bf16's subnormal numbers."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        wide = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


@jit
def scale_of(amax_bits, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr = False):
    """(scale, its reciprocal) of groups whose largest `magnitude_bits` are given; the reciprocal is 0 where one is not
    finite, which leaves `saturate` NaNs alone to deal with."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    finite = amax_bits < 0x7F800000
    scale = tl.maximum(tl.div_rn(tl.where(finite, amax, 0.0), LARGEST), 1.1754943508222875e-38)
    if POWER_OF_TWO:  # up to the next one: a carry out of the mantissa raises the exponent
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & -8388608).to(tl.float32, bitcast=True)
    scale = tl.where(amax_bits == 0, 1.0, scale)
    inverse = tl.div_rn(1.0, scale)
    return tl.where(finite, scale, float("nan")), tl.where(finite, inverse, 0.0)


@jit
def round_scaled(x, inverse, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """x · inverse as `dtype`, saturated and rounded to nearest even; 0 where inverse is 0."""
    LARGEST: tl.constexpr = 127.0 if dtype == tl.int8 else 448.0
    # saturating first also keeps the product from fusing with the sum that rounds
    v = tl.minimum(tl.maximum(tl.where(inverse == 0.0, 0.0, x) * inverse, -LARGEST), LARGEST)
    if dtype == tl.int8:
        v = (v + 12582912.0) - 12582912.0  # 1.5 · 2**23, beside which only integers are left
    elif INTERPRETED:  # its own cast drops the carry of a mantissa that rounds up: leave it nothing to round
        bits = v.to(tl.int32, bitcast=True)
        even = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -1048576).to(tl.float32, bitcast=True)
        small = (tl.abs(v) + 24576.0) - 24576.0  # below 2**-6 the steps are 2**-9
        small = tl.where(bits < 0, -small, small)
        v = tl.where(tl.abs(v) < 0.015625, small, even)
    return v.to(dtype)


@jit
def _owned(rows, ends, span):
    """Which of `rows` lie before the end of their span; all where `ends` is None."""
    if ends is None:
        owned = rows >= 0
    else:
        owned = rows < tl.load(ends + rows // span)
    return owned


@jit(do_not_specialize=["num_groups"], do_not_specialize_on_alignment=["ends"])
def _quantize_groups_kernel(
    x,
    values,
    scales,
    ends,
    span,
    num_groups,
    x_stride,
    H: tl.constexpr,
    S: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    GROUPS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    DEPENDENT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Program p quantizes groups p·GROUPS .. of all rows' groups in one count: H = 320 has S = 3, group 7 is columns
    128..255 of row 2."""
    wait_for_previous(DEPENDENT)
    let_next_start(DEPENDENT)
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    real = group < num_groups
    row = tl.where(real, group // S, 0)
    real = real & _owned(row, ends, span)
    cols = (group % S * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    mask = real[:, None]
    if H % GROUP != 0:
        mask = mask & (cols < H)
    v = _widen(tl.load(x + row[:, None] * x_stride + cols, mask=mask, other=0.0), INTERPRETED)
    scale, inverse = scale_of(tl.max(magnitude_bits(v), axis=1), LARGEST, POWER_OF_TWO)
    tl.store(scales + group, scale, mask=real)
    q = round_scaled(v, inverse[:, None], values.dtype.element_ty, INTERPRETED)
    tl.store(values + row[:, None] * H + cols, q, mask=mask)


@jit(do_not_specialize_on_alignment=["ends"])
def _quantize_rows_kernel(
    x,
    values,
    scales,
    ends,
    span,
    x_stride,
    H: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Program p quantizes row p, in two walks over steps of BLOCK columns, or one where a step holds the row."""
    wait_for_previous(DEPENDENT)
    let_next_start(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    if _owned(row, ends, span):
        cols = tl.arange(0, BLOCK)
        at = x + row * x_stride
        v = _widen(tl.load(at + cols, mask=cols < H, other=0.0), INTERPRETED)
        amax = tl.max(magnitude_bits(v), axis=0)
        for first in range(BLOCK, H, BLOCK):
            v = _widen(tl.load(at + first + cols, mask=first + cols < H, other=0.0), INTERPRETED)
            amax = tl.maximum(amax, tl.max(magnitude_bits(v), axis=0))
        scale, inverse = scale_of(amax, LARGEST)
        tl.store(scales + row, scale)
        for first in tl.static_range(0, H, BLOCK):
            if H > BLOCK:
                v = _widen(tl.load(at + first + cols, mask=first + cols < H, other=0.0), INTERPRETED)
            q = round_scaled(v, inverse, values.dtype.element_ty, INTERPRETED)
            tl.store(values + row * H + first + cols, q, mask=first + cols < H)


def _empty_quantized(x: Tensor, scheme: str) -> tuple[Tensor, Tensor]:
    form = row_format(scheme)
    T, H = x.shape
    return x.new_empty(T, H, dtype=form.dtype), x.new_empty(T, form.scales(H), dtype=torch.float32)


@op("quantize")
def quantize(x: Tensor, scheme: str, ends: Tensor | None = None, span: int = 0) -> tuple[Tensor, Tensor]:
    """Rows as eight-bit values and scales, value ≈ values · scale; each row's from that row alone.

    Args:
        x: `[T, H]`, floating; rows may be strided. Read as float32.
        scheme: `fp8_block`, `fp8_block_ue8m0`, `fp8_row` or `int8_row`.
        ends: `[T / span]` int32 on the device, or None for all rows. Rows come in spans of `span`; of span s only those
            before row ends[s] are read and written. Sorted rows are one span: (offsets[-1:], T); batched experts are
            spans of C: (row_end, C).

    Returns:
        values `[T, H]` float8_e4m3fn or int8, and scales `[T, S]` float32. Not differentiable.

    Raises:
        ValueError: an unknown scheme, `x` of a wrong shape or dtype, `ends` that do not cover T rows.
    """
    _check(x, ends, span)
    if not use_triton(x):
        return quantize_reference(x, scheme, ends, span)
    values, scales = _empty_quantized(x, scheme)
    _launch(x, scheme, ends, span, values, scales)
    return values, scales


def quantize_into(
    values: Tensor, scales: Tensor, x: Tensor, scheme: str, ends: Tensor | None = None, span: int = 0
) -> None:
    """`quantize` into buffers of the caller's, planned workspaces; no torch op.

    Args:
        values, scales: contiguous, of the shapes and dtypes that `quantize` returns. The rest as there.

    Raises:
        ValueError: as `quantize`, or a buffer does not fit.
    """
    _check(x, ends, span)
    form, (T, H) = row_format(scheme), x.shape
    for name, t, right, dtype in (
        ("values", values, (T, H), form.dtype),
        ("scales", scales, (T, form.scales(H)), torch.float32),
    ):
        if tuple(t.shape) != right or t.dtype != dtype or not t.is_contiguous():
            raise ValueError(f"{name} is {t.dtype} {tuple(t.shape)}: must be contiguous {dtype} {right} for {scheme!r}")
    if use_triton(x):
        _launch(x, scheme, ends, span, values, scales)
    else:
        for t, made in zip((values, scales), quantize_reference(x, scheme, ends, span), strict=True):
            t.copy_(made)


def _check(x: Tensor, ends: Tensor | None, span: int) -> None:
    unit_stride(x, "x")
    if not x.is_floating_point() or x.dtype.itemsize < 2:
        raise ValueError(f"x is {x.dtype}: must be float16, bfloat16, float32 or float64")
    check_flat(ends, "ends", torch.int32)
    T = x.shape[0]
    if ends is not None and ends.shape[0] * span != T:
        raise ValueError(f"ends has {ends.shape[0]} entries with span={span}: their product must be {T}, the rows of x")


def _launch(x: Tensor, scheme: str, ends: Tensor | None, span: int, values: Tensor, scales: Tensor) -> None:
    if values.numel() == 0:
        return
    form, (T, H) = row_format(scheme), x.shape
    config = quantize_config(T, H)
    constants = {"LARGEST": form.largest, "INTERPRETED": INTERPRET, "num_warps": config.num_warps}
    constants |= dependent_launch(x.device)
    with on_device_of(x):
        if form.group:
            groups = scales.numel()
            _quantize_groups_kernel[(cdiv(groups, config.groups),)](
                x, values, scales, ends, span, groups, x.stride(0),
                H=H, S=form.scales(H), GROUP=form.group, GROUPS=config.groups, POWER_OF_TWO=form.power_of_two,
                **constants,
            )  # fmt: skip
        else:
            _quantize_rows_kernel[(T,)](
                x, values, scales, ends, span, x.stride(0), H=H, BLOCK=config.block, **constants
            )


@quantize.register_fake
def _(x, scheme, ends=None, span=0):
    return _empty_quantized(x, scheme)


def scale_of_reference(amax: Tensor, form: RowFormat) -> Tensor:
    """The torch twin of `scale_of`, for largest magnitudes in float32; where one is not finite, any finite number."""
    largest = amax.new_full((), form.largest)  # by a Python number CUDA would multiply with the reciprocal
    scale = (torch.where(amax.isfinite(), amax, 0) / largest).clamp_min(SMALLEST_SCALE)
    if form.power_of_two:
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & -0x800000).view(torch.float32)
    return torch.where(amax == 0, 1.0, scale)


def quantize_reference(x: Tensor, scheme: str, ends: Tensor | None = None, span: int = 0) -> tuple[Tensor, Tensor]:
    """The torch twin of `quantize`: the same bits."""
    form = row_format(scheme)
    values, scales = _empty_quantized(x, scheme)
    T, H = x.shape
    if values.numel() == 0:
        return values, scales
    rows = torch.arange(T, device=x.device)
    rows = rows if ends is None else rows[rows < ends.long().repeat_interleave(span)]
    wide = x[rows].float()
    S = form.scales(H)
    group = form.group or H
    blocks = F.pad(wide, (0, S * group - H)).view(-1, S, group)
    amax = blocks.abs().amax(-1)  # NaN where one is
    finite = amax.isfinite()
    scale = scale_of_reference(amax, form)
    scaled = torch.where(finite[..., None], blocks * (1.0 / scale)[..., None], 0).clamp(-form.largest, form.largest)
    if form.dtype == torch.int8:
        scaled = scaled.round()
    # index_put has no kernel for fp8 everywhere: bytes do
    own = scaled.to(form.dtype).view(-1, S * group)[:, :H].contiguous()
    values.view(torch.uint8)[rows] = own.view(torch.uint8)
    scales[rows] = torch.where(finite, scale, torch.nan)
    return values, scales
