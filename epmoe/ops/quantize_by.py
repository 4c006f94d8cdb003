"""Rows to eight bits by scales that were fixed before, one for each expert: static scales of checkpoints' projections.
On the path of a token where `ops/quantize.py` stands with scales of the rows' own: between the GEMMs, and before GEMM1
where each expert has a scale of its own for the rows that came.

    row n of expert e ── values = round(x / fixed[e]), saturated; scale fixed[e]

A row with an inf or a NaN has scale NaN and values 0, as there. Expert e owns rows row_start[e]:row_end[e]
(`ops/_segments.py`). Before GEMM1 a row that came belongs to several experts, and is quantized for each: row n is then
made of row row_index[n] // divisor of x.

Letters: L local experts, T rows, H their width, N rows quantized, T where there is no row_index.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from epmoe.ops._dependent_launch import dependent_launch, let_next_start, wait_for_previous
from epmoe.ops._quant_configs import quantize_config
from epmoe.ops._segments import check_segments
from epmoe.ops._triton import INTERPRET, check_flat, jit, next_power_of_2, on_device_of, op, tl, unit_stride, use_triton
from epmoe.ops.quantize import ROW_FORMATS, SMALLEST_SCALE, RowFormat, _widen, magnitude_bits, round_scaled, row_format


@jit(do_not_specialize_on_alignment=["row_start", "row_end"])
def _quantize_by_kernel(
    x,
    values,
    scales,
    fixed,
    row_start,
    row_end,
    row_index,
    weight,
    x_stride,
    DIVISOR: tl.constexpr,
    H: tl.constexpr,
    L: tl.constexpr,
    L_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Program p makes row p, if an expert owns it, in two walks over steps of BLOCK columns, or one where a step holds
    the row."""
    experts = tl.arange(0, L_BLOCK)
    wait_for_previous(DEPENDENT)
    let_next_start(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(row_start + experts, mask=experts < L, other=0)
    owner = (row >= start) & (row < tl.load(row_end + experts, mask=experts < L, other=0))
    if tl.max(owner.to(tl.int32)) > 0:
        scale = tl.sum(tl.where(owner, tl.load(fixed + experts, mask=experts < L, other=0.0), 0.0))
        cols = tl.arange(0, BLOCK)
        at = x + row * x_stride
        stored = scale
        if row_index is not None:
            pair = tl.load(row_index + row)
            at = x + (pair // DIVISOR).to(tl.int64) * x_stride
            if weight is not None:
                stored = scale * tl.load(weight + pair).to(tl.float32)
        v = _widen(tl.load(at + cols, mask=cols < H, other=0.0), INTERPRETED)
        amax = tl.max(magnitude_bits(v), axis=0)
        for first in range(BLOCK, H, BLOCK):
            v = _widen(tl.load(at + first + cols, mask=first + cols < H, other=0.0), INTERPRETED)
            amax = tl.maximum(amax, tl.max(magnitude_bits(v), axis=0))
        finite = amax < 0x7F800000
        inverse = tl.where(finite, tl.div_rn(1.0, tl.maximum(scale, 1.1754943508222875e-38)), 0.0)
        tl.store(scales + row, tl.where(finite, stored, float("nan")))
        for first in tl.static_range(0, H, BLOCK):
            if H > BLOCK:
                v = _widen(tl.load(at + first + cols, mask=first + cols < H, other=0.0), INTERPRETED)
            q = round_scaled(v, inverse, values.dtype.element_ty, INTERPRETED)
            tl.store(values + row * H + first + cols, q, mask=first + cols < H)


class _Call(NamedTuple):
    """What `quantize_by` is given, its scheme read."""

    x: Tensor
    fixed: Tensor
    row_start: Tensor
    row_end: Tensor
    form: RowFormat
    row_index: Tensor | None
    divisor: int
    weight: Tensor | None

    @property
    def num_rows(self) -> int:
        """N."""
        return self.x.shape[0] if self.row_index is None else self.row_index.shape[0]

    def room(self) -> tuple[Tensor, Tensor]:
        """For values and scales of N rows."""
        n, x = self.num_rows, self.x
        return x.new_empty(n, x.shape[1], dtype=self.form.dtype), x.new_empty(n, 1, dtype=torch.float32)


def _checked(
    x: Tensor,
    fixed: Tensor,
    row_start: Tensor,
    row_end: Tensor,
    scheme: str,
    row_index: Tensor | None,
    divisor: int,
    weight: Tensor | None,
) -> _Call:
    unit_stride(x, "x")
    form = row_format(scheme)
    if form.group:
        able = " or ".join(name for name, other in ROW_FORMATS.items() if not other.group)
        raise ValueError(f"scheme={scheme!r}: a fixed scale is one for a row, must be {able}")
    if not x.is_floating_point() or x.dtype.itemsize < 2:
        raise ValueError(f"x is {x.dtype}: must be float16, bfloat16, float32 or float64")
    if fixed.dim() != 1 or fixed.dtype != torch.float32 or not fixed.is_contiguous() or fixed.device != x.device:
        raise ValueError(
            f"fixed is {fixed.dtype} {tuple(fixed.shape)} on {fixed.device}: must be contiguous float32 [L] on "
            f"{x.device}"
        )
    check_segments(row_start, row_end, fixed.shape[0])
    if row_index is not None:
        check_flat(row_index, "row_index", torch.int32)
    elif weight is not None:
        raise ValueError("weight without row_index: must be None, since it is one for each pair")
    if weight is not None:
        check_flat(weight, "weight", torch.float32, torch.float64)
    if divisor < 1:
        raise ValueError(f"divisor={divisor}: must be at least 1")
    return _Call(x, fixed, row_start, row_end, form, row_index, divisor, weight)


def _write(values: Tensor, scales: Tensor, call: _Call) -> None:
    if use_triton(call.x):
        _launch(values, scales, call)
    else:
        _reference_into(values, scales, call)


def _launch(values: Tensor, scales: Tensor, call: _Call) -> None:
    x, fixed, row_start, row_end, _, row_index, divisor, weight = call
    (N, H), L = values.shape, fixed.shape[0]
    if values.numel() == 0 or L == 0:
        return
    config = quantize_config(N, H)
    with on_device_of(x):
        _quantize_by_kernel[(N,)](
            x, values, scales, fixed, row_start, row_end, row_index, weight, x.stride(0), DIVISOR=divisor, H=H, L=L,
            L_BLOCK=next_power_of_2(L), BLOCK=config.block, INTERPRETED=INTERPRET, num_warps=config.num_warps,
            **dependent_launch(x.device),
        )  # fmt: skip


@op("quantize_by")
def quantize_by(
    x: Tensor,
    fixed: Tensor,
    row_start: Tensor,
    row_end: Tensor,
    scheme: str,
    row_index: Tensor | None = None,
    divisor: int = 1,
    weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rows as eight-bit values by their experts' scales; what is past the largest value saturates.

    Args:
        x: `[T, H]`, floating; rows may be strided. Read as float32.
        fixed: `[L]` float32 on the device, > 0.
        row_start, row_end: `[L]` int32 on the device, the rows of each expert. No others are read or written.
        scheme: `fp8_row` or `int8_row`.
        row_index: `[N]` int32, whose row `row_index[n] // divisor` of x becomes row n; None: row n does, N = T.
        divisor: K where `row_index` counts pairs.
        weight: `[pairs]` float32, by which row n is multiplied, `weight[row_index[n]]`: its scale is. None: by nothing.

    Returns:
        values `[N, H]` float8_e4m3fn or int8, and scales `[N, 1]` float32. Not differentiable.

    Raises:
        ValueError: a scheme with scales per block, or arguments that are not that.
    """
    call = _checked(x, fixed, row_start, row_end, scheme, row_index, divisor, weight)
    values, scales = call.room()
    _write(values, scales, call)
    return values, scales


@quantize_by.register_fake
def _(x, fixed, row_start, row_end, scheme, row_index=None, divisor=1, weight=None):
    return _Call(x, fixed, row_start, row_end, row_format(scheme), row_index, divisor, weight).room()


def quantize_by_into(
    values: Tensor,
    scales: Tensor,
    x: Tensor,
    fixed: Tensor,
    row_start: Tensor,
    row_end: Tensor,
    scheme: str,
    row_index: Tensor | None = None,
    divisor: int = 1,
    weight: Tensor | None = None,
) -> None:
    """`quantize_by` into buffers of the caller's, planned workspaces; no torch op.

    Args:
        values, scales: contiguous, of the shapes and dtypes that `quantize_by` returns. The rest as there.

    Raises:
        ValueError: as `quantize_by`, or a buffer does not fit.
    """
    call = _checked(x, fixed, row_start, row_end, scheme, row_index, divisor, weight)
    for name, t, shape, dtype in (
        ("values", values, (call.num_rows, x.shape[1]), call.form.dtype),
        ("scales", scales, (call.num_rows, 1), torch.float32),
    ):
        if tuple(t.shape) != shape or t.dtype != dtype or not t.is_contiguous():
            raise ValueError(f"{name} is {t.dtype} {tuple(t.shape)}: must be contiguous {dtype} {shape} for {scheme!r}")
    _write(values, scales, call)


def quantize_by_reference(
    x: Tensor,
    fixed: Tensor,
    row_start: Tensor,
    row_end: Tensor,
    scheme: str,
    row_index: Tensor | None = None,
    divisor: int = 1,
    weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The torch twin of `quantize_by`: the same bits."""
    call = _Call(x, fixed, row_start, row_end, row_format(scheme), row_index, divisor, weight)
    values, scales = call.room()
    _reference_into(values, scales, call)
    return values, scales


def _reference_into(values: Tensor, scales: Tensor, call: _Call) -> None:
    x, fixed, row_start, row_end, form, row_index, divisor, weight = call
    if fixed.shape[0] == 0:
        return
    n = torch.arange(values.shape[0], device=x.device)[:, None]
    owner = (n >= row_start) & (n < row_end)
    rows = owner.any(1).nonzero()[:, 0]
    scale = fixed[owner[rows].int().argmax(1)][:, None]
    pairs = rows if row_index is None else row_index[rows].long()
    wide = x[pairs // divisor if row_index is not None else rows].float()
    finite = wide.isfinite().all(1, keepdim=True)
    inverse = 1.0 / scale.clamp_min(SMALLEST_SCALE)
    scaled = torch.where(finite, wide * inverse, 0).clamp(-form.largest, form.largest)
    own = (scaled.round() if form.dtype == torch.int8 else scaled).nan_to_num(0).to(form.dtype)
    values.view(torch.uint8)[rows] = own.view(torch.uint8)  # index_put has no kernel for fp8 everywhere
    stored = scale if weight is None else scale * weight[pairs, None].float()
    scales[rows] = torch.where(finite, stored, torch.nan)
