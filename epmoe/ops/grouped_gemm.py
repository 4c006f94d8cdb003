"""Grouped GEMM over rows sorted by expert: GEMM1 with router weight, bias and activation in its epilogue, GEMM2, and
both dgrads. On the path of a token: after `ops/align.py` sorted the assignments, reading their rows in place by index.

Letters: L local experts, H hidden size, I expert intermediate size, K experts per token, T rows of the expert input;
N columns of an output, D the reduction width. Expert e owns sorted rows offsets[e]:offsets[e + 1].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epmoe.config import Activation
from epmoe.ops._configs import GemmConfig, gemm_config, num_programs
from epmoe.ops._triton import (
    INTERPRET,
    KERNEL_DTYPES,
    cast_from_float32,
    dot_accumulate,
    jit,
    tl,
    triton,
    unit_stride,
    use_triton,
)
from epmoe.ops.activation import activate_and_slopes, apply_activation

LINEAR = "none"  # the activation of a plain grouped_gemm


@jit
def _grouped_gemm_kernel(
    a,
    w,  # a pointer, or a tensor descriptor when TMA
    bias,
    offsets,
    row_index,
    row_scale,
    out,
    preact,
    alpha,
    limit,
    a_stride,
    w_stride_expert,
    w_stride_row,
    L: tl.constexpr,
    L_BLOCK: tl.constexpr,
    N: tl.constexpr,  # weight rows: 2I when GATED
    D: tl.constexpr,
    DIVISOR: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SWAP_AB: tl.constexpr,
    TMA: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Programs walk the tiles of all experts, counted from offsets on the device.

    offsets = [0, 5, 5, 9], BLOCK_M = 4: experts have 2, 0, 1 row tiles; tile 1 is row 4 of expert 0, tile 2 rows 5..8
    of expert 2. Rows of a tile past its expert's end repeat the expert's last row and are not stored. A gated tile
    holds BLOCK_N / 2 gates, then the up projections of the same columns.
    """
    PARTS: tl.constexpr = 2 if GATED else 1
    COLS: tl.constexpr = BLOCK_N // PARTS
    WIDTH: tl.constexpr = N // PARTS  # columns of out
    TILES_N: tl.constexpr = (WIDTH + COLS - 1) // COLS

    experts = tl.arange(0, L_BLOCK)
    begins = tl.load(offsets + experts, mask=experts < L, other=0)
    ends = tl.load(offsets + experts + 1, mask=experts < L, other=0)
    tiles = (ends - begins + BLOCK_M - 1) // BLOCK_M
    tile_ends = tl.cumsum(tiles)
    tiles_m = tl.sum(tiles)

    for tile in tl.range(tl.program_id(0), tiles_m * TILES_N, tl.num_programs(0)):
        first_m = tile // (GROUP_M * TILES_N) * GROUP_M
        group = tl.minimum(tiles_m - first_m, GROUP_M)
        within = tile - first_m * TILES_N
        tile_m = first_m + within % group
        col0 = within // group * COLS

        passed = tile_ends <= tile_m
        e = tl.sum(passed.to(tl.int32))
        row_end = tl.load(offsets + e + 1)
        rows = tl.load(offsets + e) + (tile_m - tl.max(tl.where(passed, tile_ends, 0))) * BLOCK_M
        rows += tl.arange(0, BLOCK_M)
        safe_rows = tl.minimum(rows, row_end - 1)
        source = safe_rows
        if row_index is not None:
            source = tl.load(row_index + safe_rows) // DIVISOR

        ks = tl.arange(0, BLOCK_K)
        spread = tl.arange(0, BLOCK_N)
        cols = col0 + spread % COLS
        w_rows = spread // COLS * WIDTH + tl.minimum(cols, WIDTH - 1)
        a_tile = a + source.to(tl.int64)[:, None] * a_stride + ks[None, :]
        if not TMA:
            if TRANSPOSE:
                w_tile = w + e.to(tl.int64) * w_stride_expert + ks.to(tl.int64)[:, None] * w_stride_row + cols[None, :]
            else:
                w_tile = (
                    w + e.to(tl.int64) * w_stride_expert + w_rows.to(tl.int64)[:, None] * w_stride_row + ks[None, :]
                )

        if SWAP_AB:
            acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        else:
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(0, D, BLOCK_K):
            if D % BLOCK_K == 0:
                x = tl.load(a_tile + k)
            else:
                x = tl.load(a_tile + k, mask=(k + ks < D)[None, :], other=0.0)
            if TRANSPOSE:
                if TMA:
                    b = w.load([e, k, col0]).reshape(BLOCK_K, BLOCK_N)
                else:
                    inside = (k + ks < D)[:, None] & (cols < WIDTH)[None, :]
                    b = tl.load(w_tile + tl.cast(k, tl.int64) * w_stride_row, mask=inside, other=0.0)
            else:
                if TMA:
                    b = w.load([e * PARTS, col0, k]).reshape(BLOCK_N, BLOCK_K)
                elif D % BLOCK_K == 0:
                    b = tl.load(w_tile + k)
                else:
                    b = tl.load(w_tile + k, mask=(k + ks < D)[None, :], other=0.0)
                b = b.T  # [BLOCK_K, BLOCK_N] from here on
            if SWAP_AB:
                acc = dot_accumulate(b.T, x.T, acc, INTERPRETED)
            else:
                acc = dot_accumulate(x, b, acc, INTERPRETED)

        if SWAP_AB:
            acc = acc.T
        if row_scale is not None:
            acc *= tl.load(row_scale + tl.load(row_index + safe_rows))[:, None]
        if bias is not None:
            acc += tl.load(bias + e.to(tl.int64) * N + w_rows).to(tl.float32)[None, :]

        out_cols = col0 + tl.arange(0, COLS)
        inside = (rows < row_end)[:, None] & (out_cols < WIDTH)[None, :]
        row_starts = rows.to(tl.int64)[:, None]
        if GATED:
            g, u = acc.reshape(BLOCK_M, 2, COLS).permute(0, 2, 1).split()
            if preact is not None:
                at = preact + row_starts * N + out_cols[None, :]
                tl.store(at, cast_from_float32(g, preact.dtype.element_ty, INTERPRETED), mask=inside)
                tl.store(at + WIDTH, cast_from_float32(u, preact.dtype.element_ty, INTERPRETED), mask=inside)
            acc, _, _ = activate_and_slopes(g, u, alpha, limit, ACTIVATION)
        elif ACTIVATION != "none":
            if preact is not None:
                tl.store(
                    preact + row_starts * N + out_cols[None, :],
                    cast_from_float32(acc, preact.dtype.element_ty, INTERPRETED),
                    mask=inside,
                )
            acc, _, _ = activate_and_slopes(acc, 1.0, alpha, limit, ACTIVATION)
        tl.store(
            out + row_starts * WIDTH + out_cols[None, :],
            cast_from_float32(acc, out.dtype.element_ty, INTERPRETED),
            mask=inside,
        )


def _weight_operand(w: Tensor, parts: int, transpose: bool, config: GemmConfig) -> tuple[Any, bool]:
    """`w` as the kernel takes it: a descriptor of its tiles where TMA can address them, else the tensor itself."""
    size, (L, rows, inner) = w.element_size(), w.shape
    aligned = w.data_ptr() % 16 == 0 and w.stride(0) * size % 16 == 0 and w.stride(1) * size % 16 == 0
    dense = parts == 1 or (w.stride(0) == rows * w.stride(1) and rows // parts * w.stride(1) * size % 16 == 0)
    hopper = w.device.type == "cpu" or torch.cuda.get_device_capability(w.device) >= (9, 0)
    if not (config.tma and aligned and dense and hopper):
        return w, False
    from triton.tools.tensor_descriptor import TensorDescriptor

    if transpose:
        block = [1, config.block_k, config.block_n]
    else:
        block = [parts, config.block_n // parts, config.block_k]
    strides = [w.stride(0) if parts == 1 else rows // parts * w.stride(1), w.stride(1), 1]
    return TensorDescriptor(w, [L * parts, rows // parts, inner], strides, block), True


def _launch(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    row_index: Tensor | None,
    index_divisor: int,
    row_scale: Tensor | None,
    out: Tensor,
    preact: Tensor | None,
    transpose: bool,
    activation: str = LINEAR,
    alpha: float = 1.0,
    limit: float = float("inf"),
) -> None:
    L, n, d = w.shape if not transpose else (w.shape[0], w.shape[2], w.shape[1])
    max_rows = out.shape[0]
    if out.numel() == 0 or L == 0:
        return
    gated = activation != LINEAR and Activation(activation, alpha, limit).gated
    config = gemm_config(a.device, a.dtype, triton.cdiv(max_rows, L), n, d, gated)
    operand, tma = _weight_operand(w, 2 if gated else 1, transpose, config)
    columns = triton.cdiv(out.shape[1], config.block_n // (2 if gated else 1))
    tiles = (max_rows // config.block_m + min(L, max_rows)) * columns
    _grouped_gemm_kernel[(num_programs(a.device, config.programs_per_sm, tiles),)](
        a,
        operand,
        bias,
        offsets,
        row_index,
        row_scale,
        out,
        preact,
        alpha,
        limit,
        unit_stride(a, "a"),
        w.stride(0),
        w.stride(1),
        L=L,
        L_BLOCK=triton.next_power_of_2(L),
        N=n,
        D=d,
        DIVISOR=index_divisor,
        ACTIVATION=activation,
        GATED=gated,
        TRANSPOSE=transpose,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP_M=config.group_m,
        SWAP_AB=config.swap_ab,
        TMA=tma,
        INTERPRETED=INTERPRET,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _check(a: Tensor, w: Tensor, bias: Tensor | None, offsets: Tensor, divisor: int, transpose: bool) -> None:
    unit_stride(a, "a")
    if a.dtype not in (*KERNEL_DTYPES, torch.float64) or w.dtype != a.dtype:
        raise ValueError(f"w has dtype {w.dtype}, a {a.dtype}: both must be the same floating dtype")
    if w.dim() != 3 or (w.stride(2) != 1 and w.shape[2] > 1) or w.shape[1 if transpose else 2] != a.shape[1]:
        raise ValueError(
            f"w has shape {tuple(w.shape)}, strides {w.stride()}: must be 3-D, dense along its last dimension and "
            f"have {a.shape[1]} (the width of a) in dimension {1 if transpose else 2}"
        )
    if offsets.shape != (w.shape[0] + 1,) or offsets.dtype != torch.int32:
        raise ValueError(f"offsets is {tuple(offsets.shape)} {offsets.dtype}: must be ({w.shape[0] + 1},) torch.int32")
    if bias is not None and (bias.shape != (w.shape[0], w.shape[2 if transpose else 1]) or not bias.is_contiguous()):
        raise ValueError(f"bias has shape {tuple(bias.shape)}: must be contiguous, one entry per expert and column")
    if divisor < 1:
        raise ValueError(f"index_divisor={divisor}: must be at least 1")


@torch.library.custom_op("epmoe::grouped_gemm", mutates_args=())
def grouped_gemm(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    row_index: Tensor | None,
    index_divisor: int,
    max_rows: int,
    transpose_w: bool,
) -> Tensor:
    """out[n] = a[row] @ w[e].T + bias[e], or a[row] @ w[e] when `transpose_w` (dgrad), for each sorted row n.

    Args:
        a: `[*, D]`; rows may be strided. row = n, or row_index[n] // index_divisor.
        w: `[L, N, D]`, or `[L, D, N]` when `transpose_w`; the dtype of a.
        bias: `[L, N]` or None.
        offsets: `[L + 1]` int32 on the device, offsets[L] <= max_rows.
        row_index: `[max_rows]` int32 or None; entries past offsets[L] are not read.

    Returns:
        `[max_rows, N]` in a's dtype, accumulated in fp32; rows past offsets[L] are left as allocated.

    Raises:
        ValueError: shapes, dtypes or inner strides do not fit together.
    """
    _check(a, w, bias, offsets, index_divisor, transpose_w)
    if not use_triton(a):
        return grouped_gemm_reference(a, w, bias, offsets, row_index, index_divisor, max_rows, transpose_w)
    out = torch.empty(max_rows, w.shape[2 if transpose_w else 1], dtype=a.dtype, device=a.device)
    _launch(a, w, bias, offsets, row_index, index_divisor, None, out, None, transpose_w)
    return out


@grouped_gemm.register_fake
def _(a, w, bias, offsets, row_index, index_divisor, max_rows, transpose_w):
    return a.new_empty(max_rows, w.shape[2 if transpose_w else 1])


def _expert_slices(offsets: Tensor) -> list[tuple[int, slice]]:
    bounds = offsets.tolist()
    return [(e, slice(bounds[e], bounds[e + 1])) for e in range(len(bounds) - 1) if bounds[e + 1] > bounds[e]]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def grouped_gemm_reference(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    row_index: Tensor | None,
    index_divisor: int,
    max_rows: int,
    transpose_w: bool,
) -> Tensor:
    """The torch twin of `grouped_gemm`, one matmul per expert."""
    out = torch.empty(max_rows, w.shape[2 if transpose_w else 1], dtype=a.dtype, device=a.device)
    wide = _wide(a.dtype)
    for e, own in _expert_slices(offsets):
        x = a[own] if row_index is None else a[row_index[own].long() // index_divisor]
        y = x.to(wide) @ (w[e] if transpose_w else w[e].T).to(wide)
        out[own] = (y if bias is None else y + bias[e].to(wide)).to(a.dtype)
    return out


@torch.library.custom_op("epmoe::grouped_gemm_act", mutates_args=())
def grouped_gemm_act(
    x: Tensor,
    w1: Tensor,
    bias1: Tensor | None,
    offsets: Tensor,
    row_index: Tensor | None,
    index_divisor: int,
    max_rows: int,
    row_scale: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
    save_preact: bool,
) -> tuple[Tensor, Tensor]:
    """GEMM1: act(scale · (x[row] @ w1[e].T) + bias1[e]) for each sorted row, the activation on the fp32 accumulator.

    Args:
        x: `[T, H]`; rows may be strided. row = n, or row_index[n] // index_divisor.
        w1: `[L, 2I, H]`, gate rows then up rows (`[L, I, H]` not gated); the dtype of x.
        bias1: `[L, 2I]` (`[L, I]`) or None.
        offsets, row_index, index_divisor, max_rows: as in `grouped_gemm`.
        row_scale: `[T * K]` float32 or None, the router weight on the input, read at row_index[n].
        activation, alpha, limit: fields of `Activation`.
        save_preact: also return what the activation saw, for the backward.

    Returns:
        `act [max_rows, I]` and `preact [max_rows, 2I]` (`[max_rows, I]`; `[0]` unless `save_preact`), in x's dtype.

    Raises:
        ValueError: as `grouped_gemm`, an unknown activation, or a `row_scale` without `row_index`.
    """
    _check(x, w1, bias1, offsets, index_divisor, False)
    gated = Activation(activation, alpha, limit).gated
    if gated and w1.shape[1] % 2:
        raise ValueError(f"w1 has shape {tuple(w1.shape)}: {activation!r} is gated and needs an even number of rows")
    if row_scale is not None and row_index is None:
        raise ValueError("row_index=None: must say which entry of row_scale each row has")
    if not use_triton(x):
        return grouped_gemm_act_reference(
            x, w1, bias1, offsets, row_index, index_divisor, max_rows, row_scale, activation, alpha, limit, save_preact
        )
    act, preact = _empty_act(x, w1, max_rows, gated, save_preact)
    saved = preact if save_preact else None
    _launch(x, w1, bias1, offsets, row_index, index_divisor, row_scale, act, saved, False, activation, alpha, limit)
    return act, preact


def _empty_act(x: Tensor, w1: Tensor, max_rows: int, gated: bool, save_preact: bool) -> tuple[Tensor, Tensor]:
    act = torch.empty(max_rows, w1.shape[1] // (2 if gated else 1), dtype=x.dtype, device=x.device)
    preact = torch.empty((max_rows, w1.shape[1]) if save_preact else (0,), dtype=x.dtype, device=x.device)
    return act, preact


@grouped_gemm_act.register_fake
def _(x, w1, bias1, offsets, row_index, index_divisor, max_rows, row_scale, activation, alpha, limit, save_preact):
    return _empty_act(x, w1, max_rows, Activation(activation, alpha, limit).gated, save_preact)


def grouped_gemm_act_reference(
    x: Tensor,
    w1: Tensor,
    bias1: Tensor | None,
    offsets: Tensor,
    row_index: Tensor | None,
    index_divisor: int,
    max_rows: int,
    row_scale: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
    save_preact: bool,
) -> tuple[Tensor, Tensor]:
    """The torch twin of `grouped_gemm_act`, one matmul per expert."""
    gated = Activation(activation, alpha, limit).gated
    act, preact = _empty_act(x, w1, max_rows, gated, save_preact)
    wide = _wide(x.dtype)
    for e, own in _expert_slices(offsets):
        a = x[own] if row_index is None else x[row_index[own].long() // index_divisor]
        y = a.to(wide) @ w1[e].T.to(wide)
        if row_scale is not None:
            assert row_index is not None
            y = y * row_scale[row_index[own].long()].to(wide)[:, None]
        y = y if bias1 is None else y + bias1[e].to(wide)
        if save_preact:
            preact[own] = y.to(x.dtype)
        act[own] = apply_activation(y, activation, alpha, limit).to(x.dtype)
    return act, preact
