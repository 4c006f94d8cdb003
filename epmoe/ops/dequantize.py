"""Quantized rows back to wide ones, and sums of them: values · scale, added in float32.

Where rows that were sent in eight bits meet arithmetic that wants them wide: the experts' input, the operand of the
weight gradient, and the sum over ranks at the end of combine and of dispatch's backward.

    out[m] = sum_j values[index[m, j]] · scale[index[m, j]]     without index: out[m] = values[m] · scale[m]

Letters: M output rows, H their width, J terms per output row, S source rows, G columns that share a scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epmoe.ops._dependent_launch import dependent_launch, let_next_start, wait_for_previous
from epmoe.ops._rows import row_grid
from epmoe.ops._triton import INTERPRET, cast_from_float32, jit, on_device_of, op, tl, unit_stride, use_triton
from epmoe.ops.quantize import row_format


@jit(do_not_specialize=["num_src"])
def _dequantize_sum_kernel(
    values_ptr, scales_ptr, index_ptr, out_ptr, num_src, values_stride, scales_stride,
    H: tl.constexpr, GROUP: tl.constexpr, J: tl.constexpr, HAS_INDEX: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Program (m, b) gives columns b·BLOCK .. of row m. H = 320 with GROUP = 128: column 300 takes scale 2."""
    wait_for_previous(DEPENDENT)
    let_next_start(DEPENDENT)
    m = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for j in tl.static_range(J):
        n = m
        if HAS_INDEX:
            n = tl.load(index_ptr + m * J + j).to(tl.int64)
        here = col < tl.where((n >= 0) & (n < num_src), H, 0)
        value = tl.load(values_ptr + n * values_stride + col, mask=here, other=0.0).to(tl.float32)
        scale = tl.load(scales_ptr + n * scales_stride + col // GROUP, mask=here, other=0.0)
        acc += value * scale
    tl.store(out_ptr + m * H + col, cast_from_float32(acc, out_ptr.dtype.element_ty, INTERPRETED), mask=col < H)


@op("dequantize_sum")
def _dequantize_sum(
    values: Tensor, scales: Tensor, index: Tensor | None, scheme: str, out_dtype: torch.dtype
) -> Tensor:
    if not use_triton(values) or out_dtype == torch.float64:
        return dequantize_sum_reference(values, scales, index, scheme, out_dtype)
    rows, width = values.shape[0] if index is None else index.shape[0], values.shape[1]
    out = values.new_empty(rows, width, dtype=out_dtype)
    if out.numel() == 0:
        return out
    grid, blocks = row_grid(rows, width)
    with on_device_of(values):
        _dequantize_sum_kernel[grid](
            values, scales, index, out, values.shape[0], values.stride(0), scales.stride(0),
            H=width, GROUP=row_format(scheme).group or width, J=1 if index is None else index.shape[1],
            HAS_INDEX=index is not None, INTERPRETED=INTERPRET, **blocks, **dependent_launch(values.device),
        )  # fmt: skip
    return out


@_dequantize_sum.register_fake
def _(values, scales, index, scheme, out_dtype):
    rows = values.shape[0] if index is None else index.shape[0]
    return values.new_empty(rows, values.shape[1], dtype=out_dtype)


def dequantize_sum_reference(
    values: Tensor, scales: Tensor, index: Tensor | None, scheme: str, out_dtype: torch.dtype
) -> Tensor:
    """`dequantize_sum` in torch: the J terms one after another, in float32, or float64 where that is asked for."""
    precise = torch.promote_types(out_dtype, torch.float32)
    scales = scales.to(precise)
    if group := row_format(scheme).group:
        scales = scales.repeat_interleave(group, dim=-1)[..., : values.shape[-1]]
    wide = values.to(precise) * scales
    if index is None:
        return wide.to(out_dtype)
    out = wide.new_zeros(index.shape[0], wide.shape[1])
    for j in range(index.shape[1] if wide.shape[0] > 0 else 0):
        n = index[:, j].long()
        present = (n >= 0) & (n < wide.shape[0])
        out += torch.where(present[:, None], wide[n.clamp(0, wide.shape[0] - 1)], 0.0)
    return out.to(out_dtype)


def dequantize_sum(values: Tensor, scales: Tensor, index: Tensor | None, scheme: str, out_dtype: torch.dtype) -> Tensor:
    """`out[m] = sum_j values[index[m, j]] · scale[index[m, j]]` in float32 and in the order of j; not differentiable.

    Args:
        values: `[S, H]` of the scheme's dtype; rows may lie apart.
        scales: `[S, ·]` float32 beside them; rows may lie apart.
        index: `[M, J]` int32; outside `[0, S)` is no term and is never read, and a row without terms is exactly 0.
            None: row m is values[m] · scale[m].
        out_dtype: floating.

    Returns:
        `[M, H]`, contiguous.

    Raises:
        ValueError: an unknown scheme, or tensors that do not fit it.
    """
    form = row_format(scheme)
    unit_stride(values, "values")
    unit_stride(scales, "scales")
    right = (values.shape[0], form.scales(values.shape[1]))
    if values.dtype != form.dtype or scales.dtype != torch.float32 or tuple(scales.shape) != right:
        raise ValueError(
            f"values are {values.dtype} and scales {scales.dtype} {tuple(scales.shape)}: must be {form.dtype} and "
            f"torch.float32 {right} for scheme={scheme!r}"
        )
    if index is not None and (index.dtype != torch.int32 or index.dim() != 2 or not index.is_contiguous()):
        raise ValueError(f"index is {index.dtype} {tuple(index.shape)}: must be contiguous int32 [M, J]")
    return _dequantize_sum(values, scales, index, scheme, out_dtype)
