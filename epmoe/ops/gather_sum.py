"""Weighted sum of gathered rows.

Stands at the end of the experts, where the K rows of a token become one, and at the end of combine, where the at most R
rows that ranks sent back become the token's output. With J = 1 and no weight it is the gather that puts rows in order.

Letters: M output rows, H row width, J terms per output row (K or R), S source rows.

    forward                  out[m] = sum_j weight[m, j] · src[index[m, j]]
    backward (scatter_rows)  d src[index[m, j]] = weight[m, j] · d out[m]
             (gather_dot)    d weight[m, j] = <d out[m], src[index[m, j]]>

An index outside [0, S), -1 or garbage alike, is no term: nothing is read for it, so what lies there may be NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epmoe.ops._dependent_launch import dependent_launch, let_next_start, wait_for_previous
from epmoe.ops._rows import check_terms, dense_rows, row_grid
from epmoe.ops._triton import INTERPRET, cast_from_float32, cdiv, jit, on_device_of, op, tl, use_triton
from epmoe.ops.gather_dot import gather_dot
from epmoe.ops.scatter_rows import scatter_rows

FEW_PROGRAMS = 256  # of 256 columns each: below, all run at once and latency is all that counts
FEW_ROWS = 1024


@jit(do_not_specialize=["num_src"])
def _gather_sum_kernel(
    src_ptr, index_ptr, weight_ptr, out_ptr, num_src, H, src_stride,
    J: tl.constexpr, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    let_next_start(DEPENDENT)
    m = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # All that is loaded is asked for before any of it is needed: for few rows the sum costs three latencies, not 3·J.
    names = ()
    weights = ()
    for j in tl.static_range(J):
        names = names + (tl.load(index_ptr + m * J + j),)  # type: ignore[assignment]
        if HAS_WEIGHT:
            weights = weights + (tl.load(weight_ptr + m * J + j),)  # type: ignore[assignment]
    rows = ()
    for j in tl.static_range(J):
        present = col < tl.where((names[j] >= 0) & (names[j] < num_src), H, 0)
        at = src_ptr + names[j].to(tl.int64) * src_stride + col
        rows = rows + (tl.load(at, mask=present, other=0.0),)  # type: ignore[assignment]
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for j in tl.static_range(J):
        row = rows[j].to(tl.float32)  # type: ignore[var-annotated]
        if HAS_WEIGHT:
            # An absent term's weight may be NaN, and 0 · NaN is not 0. The weight is chosen, not the product, which is
            # added unrounded then, by one instruction: as where `symmetric` adds up rows, whose bits these are.
            row = row * tl.where((names[j] >= 0) & (names[j] < num_src), weights[j], 0.0)
        acc += row
    tl.store(out_ptr + m * H + col, cast_from_float32(acc, out_ptr.dtype.element_ty, INTERPRETED), mask=col < H)


def _grid(num_rows: int, width: int) -> tuple[tuple[int, int], dict[str, int]]:
    """`row_grid`, with narrower blocks where there are too few rows to fill the device."""
    grid, blocks = row_grid(num_rows, width)
    block, num_warps = (256, 1) if num_rows * cdiv(width, 256) <= FEW_PROGRAMS else (1024, 4)
    if blocks["BLOCK"] <= block or num_rows > FEW_ROWS:
        return grid, blocks
    return (num_rows, cdiv(width, block)), {"BLOCK": block, "num_warps": num_warps}


def _gather_sum_triton(
    src: Tensor, index: Tensor, weight: Tensor | None, out_dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    src, index = dense_rows(src), index.contiguous()
    weight = None if weight is None else weight.contiguous()
    (M, J), H = index.shape, src.shape[1]
    out = src.new_empty(M, H, dtype=out_dtype) if out is None else out
    grid, blocks = _grid(M, H)
    if out.numel() > 0:
        with on_device_of(src):
            _gather_sum_kernel[grid](
                src,
                index,
                weight,
                out,
                src.shape[0],
                H,
                src.stride(0),
                J=J,
                HAS_WEIGHT=weight is not None,
                INTERPRETED=INTERPRET,
                **blocks,
                **dependent_launch(src.device),
            )
    return out


def gather_sum_reference(
    src: Tensor, index: Tensor, weight: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """`gather_sum` in torch: the J terms one after another, in float32, or float64 if `src` is."""
    acc_dtype = torch.float64 if src.dtype == torch.float64 else torch.float32
    out_dtype = src.dtype if out_dtype is None else out_dtype
    acc = torch.zeros(index.shape[0], src.shape[1], dtype=acc_dtype, device=src.device)
    for j in range(index.shape[1] if src.shape[0] > 0 else 0):
        n = index[:, j].long()
        present = (n >= 0) & (n < src.shape[0])
        rows = src[n.clamp(0, src.shape[0] - 1)].to(acc_dtype)
        if weight is not None:
            rows = rows * weight[:, j, None].to(acc_dtype)
        acc += torch.where(present[:, None], rows, 0.0)
    return acc.to(out_dtype)


@op("gather_sum", "(Tensor src, Tensor index, Tensor? weight, ScalarType out_dtype) -> Tensor")
def _gather_sum(src, index, weight, out_dtype):
    kernel = use_triton(src) and out_dtype != torch.float64
    return (_gather_sum_triton if kernel else gather_sum_reference)(src, index, weight, out_dtype)


@_gather_sum.register_fake
def _(src, index, weight, out_dtype):
    return src.new_empty(index.shape[0], src.shape[1], dtype=out_dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    src, index, weight, _ = inputs
    ctx.needs_dot = weight is not None and ctx.needs_input_grad[2]
    ctx.save_for_backward(index, weight, src if ctx.needs_dot else None)
    ctx.num_src, ctx.src_dtype = src.shape[0], src.dtype


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
    index, weight, src = ctx.saved_tensors
    dsrc = dweight = None
    if ctx.src_dtype == torch.float64:
        dout = dout.double()
    if ctx.needs_input_grad[0]:
        dsrc = scatter_rows(dout, index, weight, ctx.num_src, ctx.src_dtype)
    if ctx.needs_dot:
        dweight = gather_dot(dout, src, index).to(weight.dtype)
    return dsrc, None, dweight, None


_gather_sum.register_autograd(_backward, setup_context=_setup_context)


def gather_sum(
    src: Tensor,
    index: Tensor,
    weight: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`out[m] = sum_j weight[m, j] · src[index[m, j]]`, in float32 and in the order j = 0 .. J-1: always the same bits.

    Differentiable in `src` and `weight`. The gradient of `src` relies on each source row being named by **at most one**
    (m, j), as sorted expert rows and combine slots are; a row named twice would get only one of the two.

    Args:
        src: `[S, H]`; a row stride is fine, rows that are not dense are copied.
        index: `[M, J]` int32; outside `[0, S)` is no term and is never read. A row without terms is exactly 0.
        weight: `[M, J]` float32 (float64 with a float64 `src`), or None for ones. May be NaN where there is no term.
        out_dtype: of the result, `src.dtype` by default.
        out: `[M, H]`, contiguous, of `out_dtype`, to write into; it must not overlap `src`, and no gradient is recorded
            then.

    Returns:
        `[M, H]`, contiguous. float64 sources are summed in float64, by the torch twin.

    Raises:
        ValueError: wrong shape or dtype.
    """
    check_terms(src, "src", index, weight)
    dtype = src.dtype if out_dtype is None else out_dtype
    if out is None:
        return _gather_sum(src, index, weight, dtype)
    if out.shape != (index.shape[0], src.shape[1]) or out.dtype != dtype or not out.is_contiguous():
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)} with strides {out.stride()}: must be contiguous {dtype} "
            f"({index.shape[0]}, {src.shape[1]})"
        )
    if use_triton(src) and dtype != torch.float64:
        return _gather_sum_triton(src.detach(), index, weight, dtype, out)
    return out.copy_(gather_sum_reference(src.detach(), index, weight, dtype))
