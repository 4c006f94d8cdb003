"""Rows copied into expert order: every (row, expert) pair gets its row where the sort put the pair.

Stands at the beginning of the experts' backward. The forward gathers rows where they lie; weight gradients reduce over
rows, so that each of their steps would gather anew: on an H200 that costs more than a copy that reads each row once.

Letters: T rows, H row width, K experts per row, N rows of the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epmoe.ops._rows import check_terms, dense_rows, row_grid
from epmoe.ops._triton import INTERPRET, cast_from_float32, jit, on_device_of, op, tl, use_triton


@jit(do_not_specialize=["num_rows"])
def _permute_rows_kernel(
    x,
    slot,
    weight,
    out,
    num_rows,
    x_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """A program reads BLOCK columns of one row and writes them to each of its places; -1 is no place."""
    t = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(x + t * x_stride + cols, mask=cols < H, other=0.0)
    for k in tl.static_range(K):
        n = tl.load(slot + t * K + k)
        copy = row
        if weight is not None:
            w = tl.load(weight + t * K + k)
            copy = cast_from_float32(row.to(tl.float32) * w, out.dtype.element_ty, INTERPRETED)
        width = tl.where((n >= 0) & (n < num_rows), H, 0)
        tl.store(out + n.to(tl.int64) * H + cols, copy, mask=cols < width)


@op("permute_rows", "(Tensor x, Tensor slot, Tensor? weight, SymInt num_rows) -> Tensor")
def _permute_rows(x: Tensor, slot: Tensor, weight: Tensor | None, num_rows: int) -> Tensor:
    if not use_triton(x):
        return permute_rows_reference(x, slot, weight, num_rows)
    x, slot = dense_rows(x), slot.contiguous()
    weight = None if weight is None else weight.contiguous()
    out = x.new_empty(num_rows, x.shape[1])
    if out.numel() > 0 and slot.numel() > 0:
        grid, blocks = row_grid(x.shape[0], x.shape[1])
        with on_device_of(x):
            _permute_rows_kernel[grid](
                x,
                slot,
                weight,
                out,
                num_rows,
                x.stride(0),
                H=x.shape[1],
                K=slot.shape[1],
                INTERPRETED=INTERPRET,
                **blocks,
            )
    return out


@_permute_rows.register_fake
def _(x, slot, weight, num_rows):
    return x.new_empty(num_rows, x.shape[1])


def permute_rows_reference(x: Tensor, slot: Tensor, weight: Tensor | None, num_rows: int) -> Tensor:
    """The torch twin of `permute_rows`, one column of `slot` after the other."""
    out = x.new_empty(num_rows, x.shape[1])
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    for k in range(slot.shape[1]):
        n = slot[:, k].long()
        named = (n >= 0) & (n < num_rows)
        rows = x[named]
        if weight is not None:
            rows = (rows.to(wide) * weight[named, k, None].to(wide)).to(x.dtype)
        out[n[named]] = rows
    return out


def permute_rows(x: Tensor, slot: Tensor, weight: Tensor | None, num_rows: int) -> Tensor:
    """`out[slot[t, k]] = weight[t, k] · x[t]`; rows that no slot names are left as allocated.

    `scatter_rows` is the same with zeros elsewhere, for results that others read whole.

    Args:
        x: `[T, H]`; a row stride is fine, rows that are not dense are copied.
        slot: `[T, K]` int32 as `align_rows` gives it, each row of the result named at most once; outside
            `[0, num_rows)` is no place.
        weight: `[T, K]` float32 (float64 with a float64 `x`), or None for ones.
        num_rows: N.

    Returns:
        `[N, H]` in x's dtype. Not differentiable.

    Raises:
        ValueError: wrong shape or dtype.
    """
    check_terms(x, "x", slot, weight)
    if x.shape[0] != slot.shape[0]:
        raise ValueError(f"x has {x.shape[0]} rows: must have one per row of slot, {slot.shape[0]}")
    return _permute_rows(x, slot, weight, num_rows)
