"""Rows sent to the places that an index names: what `gather_sum` needs to give its source rows their gradient.

Stands in the backward of combine and of the experts.

Letters: M rows to send, H row width, J places per row, S = num_rows rows of the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epmoe.ops._rows import check_terms, dense_rows, row_grid
from epmoe.ops._triton import INTERPRET, cast_from_float32, cdiv, jit, op, tl, use_triton

INVERT_BLOCK = 1024


@jit(do_not_specialize=["num_terms", "num_rows"])
def _invert_kernel(index_ptr, term_ptr, num_terms, num_rows, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.load(index_ptr + i, mask=i < num_terms, other=-1)
    tl.store(term_ptr + n, i, mask=(n >= 0) & (n < num_rows))


@jit
def _scatter_rows_kernel(
    dout_ptr, term_ptr, weight_ptr, out_ptr, H, dout_stride,
    J: tl.constexpr, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    # A program per destination row, found through the inverse of `index`: every row is written once, zeros included.
    n = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    i = tl.load(term_ptr + n)
    present = col < tl.where(i >= 0, H, 0)
    row = tl.load(dout_ptr + (i // J).to(tl.int64) * dout_stride + col, mask=present, other=0.0)
    row = row.to(tl.float32)
    if HAS_WEIGHT:
        row = tl.where(present, row * tl.load(weight_ptr + tl.maximum(i, 0)), 0.0)
    tl.store(out_ptr + n * H + col, cast_from_float32(row, out_ptr.dtype.element_ty, INTERPRETED), mask=col < H)


def _scatter_rows_triton(
    dout: Tensor, index: Tensor, weight: Tensor | None, num_rows: int, out_dtype: torch.dtype
) -> Tensor:
    dout, index = dense_rows(dout), index.contiguous()
    weight = None if weight is None else weight.contiguous()
    H, J = dout.shape[1], index.shape[1]
    out = dout.new_empty(num_rows, H, dtype=out_dtype)
    if out.numel() == 0 or index.numel() == 0:
        return out.zero_()
    term = index.new_empty(num_rows).fill_(-1)
    grid, blocks = row_grid(num_rows, H)
    with torch.cuda.device_of(dout):
        _invert_kernel[(cdiv(index.numel(), INVERT_BLOCK),)](
            index, term, index.numel(), num_rows, BLOCK=INVERT_BLOCK, num_warps=4
        )
        _scatter_rows_kernel[grid](
            dout,
            term,
            weight,
            out,
            H,
            dout.stride(0),
            J=J,
            HAS_WEIGHT=weight is not None,
            INTERPRETED=INTERPRET,
            **blocks,
        )
    return out


def scatter_rows_reference(
    dout: Tensor, index: Tensor, weight: Tensor | None, num_rows: int, out_dtype: torch.dtype | None = None
) -> Tensor:
    """`scatter_rows` in torch: terms that are absent land in one row too many, which is cut off."""
    out_dtype = dout.dtype if out_dtype is None else out_dtype
    acc_dtype = torch.float64 if torch.float64 in (dout.dtype, out_dtype) else torch.float32
    out = torch.zeros(num_rows + 1, dout.shape[1], dtype=out_dtype, device=dout.device)
    for j in range(index.shape[1]):
        n = index[:, j].long()
        rows = dout.to(acc_dtype)
        if weight is not None:
            rows = rows * weight[:, j, None].to(acc_dtype)
        out[torch.where((n >= 0) & (n < num_rows), n, num_rows)] = rows.to(out_dtype)
    return out[:num_rows].clone()


@op("scatter_rows", "(Tensor dout, Tensor index, Tensor? weight, SymInt num_rows, ScalarType out_dtype) -> Tensor")
def _scatter_rows(dout, index, weight, num_rows, out_dtype):
    kernel = use_triton(dout) and out_dtype != torch.float64
    return (_scatter_rows_triton if kernel else scatter_rows_reference)(dout, index, weight, num_rows, out_dtype)


@_scatter_rows.register_fake
def _(dout, index, weight, num_rows, out_dtype):
    return dout.new_empty(num_rows, dout.shape[1], dtype=out_dtype)


def scatter_rows(
    dout: Tensor, index: Tensor, weight: Tensor | None, num_rows: int, out_dtype: torch.dtype | None = None
) -> Tensor:
    """`out[index[m, j]] = weight[m, j] · dout[m]` and zeros elsewhere: adjoint of `gather_sum` in `src`.

    Each row of the result must be named by at most one (m, j). Arguments as in `gather_sum`, with `dout [M, H]`.

    Returns:
        `[num_rows, H]` of `out_dtype` (`dout.dtype` by default), contiguous. Not differentiable.

    Raises:
        ValueError: wrong shape or dtype.
    """
    check_terms(dout, "dout", index, weight)
    if dout.shape[0] != index.shape[0]:
        raise ValueError(f"dout has {dout.shape[0]} rows: must have one per row of index, {index.shape[0]}")
    return _scatter_rows(dout, index, weight, num_rows, dout.dtype if out_dtype is None else out_dtype)
