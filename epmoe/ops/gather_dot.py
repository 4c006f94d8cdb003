"""Dot products of rows with the rows an index names: what `gather_sum` needs to give its weights their gradient.

Stands in the backward of combine and of the experts, where the gradient of a router weight is made.

Letters: M rows, H row width, J named rows for each, S source rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epmoe.ops._rows import check_terms, dense_rows
from epmoe.ops._triton import jit, next_power_of_2, op, tl, use_triton

DOT_TILE = 8192  # elements of a [J, columns] tile


@jit(do_not_specialize=["num_src"])
def _gather_dot_kernel(
    a_ptr, src_ptr, index_ptr, out_ptr, num_src, H, a_stride, src_stride,
    J: tl.constexpr, J_TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, J_TILE)
    n = tl.load(index_ptr + m * J + j, mask=j < J, other=-1)
    present = (n >= 0) & (n < num_src)
    rows = src_ptr + n.to(tl.int64)[:, None] * src_stride
    acc = tl.zeros([J_TILE, BLOCK], dtype=tl.float32)
    for start in range(0, H, BLOCK):
        col = start + tl.arange(0, BLOCK)
        a = tl.load(a_ptr + m * a_stride + col, mask=col < H, other=0.0).to(tl.float32)
        row = tl.load(rows + col[None, :], mask=present[:, None] & (col < H)[None, :], other=0.0).to(tl.float32)
        acc += a[None, :] * row
    # An absent row must give 0 even where `a` is inf or NaN.
    tl.store(out_ptr + m * J + j, tl.where(present, tl.sum(acc, axis=1), 0.0), mask=j < J)


def _gather_dot_triton(a: Tensor, src: Tensor, index: Tensor) -> Tensor:
    a, src, index = dense_rows(a), dense_rows(src), index.contiguous()
    (M, J), H = index.shape, src.shape[1]
    out = a.new_empty(M, J, dtype=torch.float32)
    if out.numel() == 0:
        return out
    j_tile = next_power_of_2(J)
    block = max(128, min(DOT_TILE // j_tile, next_power_of_2(H)))
    with torch.cuda.device_of(a):
        _gather_dot_kernel[(M,)](
            a, src, index, out, src.shape[0], H, a.stride(0), src.stride(0),
            J=J, J_TILE=j_tile, BLOCK=block, num_warps=4 if j_tile * block >= 2048 else 1,
        )  # fmt: skip
    return out


def gather_dot_reference(a: Tensor, src: Tensor, index: Tensor) -> Tensor:
    """`gather_dot` in torch."""
    acc_dtype = torch.float64 if src.dtype == torch.float64 else torch.float32
    out = torch.zeros(index.shape, dtype=acc_dtype, device=a.device)
    for j in range(index.shape[1] if src.shape[0] > 0 else 0):
        n = index[:, j].long()
        present = (n >= 0) & (n < src.shape[0])
        dots = (a.to(acc_dtype) * src[n.clamp(0, src.shape[0] - 1)].to(acc_dtype)).sum(dim=1)
        out[:, j] = torch.where(present, dots, 0.0)
    return out


@op("gather_dot", "(Tensor a, Tensor src, Tensor index) -> Tensor")
def _gather_dot(a, src, index):
    kernel = use_triton(src) and a.dtype != torch.float64
    return (_gather_dot_triton if kernel else gather_dot_reference)(a, src, index)


@_gather_dot.register_fake
def _(a, src, index):
    return a.new_empty(index.shape, dtype=torch.float64 if src.dtype == torch.float64 else torch.float32)


def gather_dot(a: Tensor, src: Tensor, index: Tensor) -> Tensor:
    """`out[m, j] = <a[m], src[index[m, j]]>`, 0 where there is no term: adjoint of `gather_sum` in `weight`.

    Args:
        a: `[M, H]`.
        src, index: as in `gather_sum`.

    Returns:
        `[M, J]` float32 (float64 if `src` is). Not differentiable.

    Raises:
        ValueError: wrong shape or dtype.
    """
    check_terms(src, "src", index, None)
    if a.shape != (index.shape[0], src.shape[1]):
        raise ValueError(f"a has shape {tuple(a.shape)}: must be [M, H] = [{index.shape[0]}, {src.shape[1]}]")
    return _gather_dot(a, src, index)
