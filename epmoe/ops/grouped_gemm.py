"""Grouped GEMM over each expert's rows: GEMM1 with router weight, bias and activation in its epilogue, GEMM2, and both
dgrads. On the path of a token: after `ops/align.py` sorted the assignments, reading their rows in place by index, or on
batched experts where dispatch put them.

Letters: L local experts, H hidden size, I expert intermediate size, K experts per token, T rows of the expert input;
N columns of an output, D the reduction width. Expert e owns rows row_start[e]:row_end[e] (`ops/_segments.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epmoe.ops._configs import expected_rows, gemm_plan, num_programs
from epmoe.ops._segments import check_segments, segment_slices
from epmoe.ops._triton import (
    KERNEL_DTYPES,
    TensorDescriptor,
    cast_from_float32,
    check_flat,
    dot_accumulate,
    jit,
    on_device_of,
    op,
    scale_dtypes,
    tl,
    unit_stride,
    use_triton,
)
from epmoe.ops.activation import activate_and_slopes, apply_activation, is_gated

LINEAR = "none"  # the activation of a plain grouped_gemm


@jit(do_not_specialize_on_alignment=["row_start", "row_end"])
def _grouped_gemm_kernel(
    a,
    w,  # a pointer, or a tensor descriptor when TMA
    bias,
    row_start,
    row_end,
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
    """Programs walk the tiles of all experts, counted from the segments on the device.

    row_start = [0, 5, 5], row_end = [5, 5, 9], BLOCK_M = 4: experts have 2, 0, 1 row tiles; tile 1 is row 4 of expert
    0, tile 2 rows 5..8 of expert 2. Rows of a tile past its expert's end repeat the expert's last row and are not
    stored. A gated tile holds BLOCK_N / 2 gates, then the up projections of the same columns.
    """
    PARTS: tl.constexpr = 2 if GATED else 1
    COLS: tl.constexpr = BLOCK_N // PARTS
    WIDTH: tl.constexpr = N // PARTS  # columns of out
    TILES_N: tl.constexpr = (WIDTH + COLS - 1) // COLS

    experts = tl.arange(0, L_BLOCK)
    begins = tl.load(row_start + experts, mask=experts < L, other=0)
    ends = tl.load(row_end + experts, mask=experts < L, other=0)
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
        end = tl.load(row_end + e)
        rows = tl.load(row_start + e) + (tile_m - tl.max(tl.where(passed, tile_ends, 0))) * BLOCK_M
        rows += tl.arange(0, BLOCK_M)
        safe_rows = tl.minimum(rows, end - 1)
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
            position = safe_rows
            if row_index is not None:
                position = tl.load(row_index + safe_rows)
            acc *= tl.load(row_scale + position)[:, None]
        if bias is not None:
            acc += tl.load(bias + e.to(tl.int64) * N + w_rows).to(tl.float32)[None, :]

        out_cols = col0 + tl.arange(0, COLS)
        inside = (rows < end)[:, None] & (out_cols < WIDTH)[None, :]
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


def _launch(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    row_start: Tensor,
    row_end: Tensor,
    row_index: Tensor | None,
    index_divisor: int,
    row_scale: Tensor | None,
    out: Tensor,
    preact: Tensor | None,
    transpose: bool,
    expected_m: int | None,
    activation: str = LINEAR,
    alpha: float = 1.0,
    limit: float = float("inf"),
) -> None:
    shape, strides, max_rows = w.shape, w.stride(), out.shape[0]
    L = shape[0]
    if out.numel() == 0 or L == 0:
        return
    gated = activation != LINEAR and is_gated(activation, alpha, limit)
    expected = expected_rows(max_rows, L, expected_m)
    plan = gemm_plan(a.device, a.dtype, shape, strides, w.data_ptr() % 16 == 0, expected, transpose, gated)
    operand: Any = w
    if plan.descriptor is not None:
        operand = TensorDescriptor(w, *plan.descriptor)
    row_tiles = max_rows // plan.block_m + min(L, max_rows)
    if expected_m is not None:  # no program for each tile that could be: they walk on where there are more
        row_tiles = min(row_tiles, L * (2 * expected // plan.block_m + 1))
    with on_device_of(a):
        _grouped_gemm_kernel[(num_programs(a.device, plan.programs_per_sm, row_tiles * plan.column_tiles),)](
            a,
            operand,
            bias,
            row_start,
            row_end,
            row_index,
            row_scale,
            out,
            preact,
            alpha,
            limit,
            a.stride(0),
            strides[0],
            strides[1],
            DIVISOR=index_divisor,
            ACTIVATION=activation,
            **plan.constants,
        )


def _check(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    row_start: Tensor,
    row_end: Tensor,
    row_index: Tensor | None,
    divisor: int,
    transpose: bool,
) -> None:
    unit_stride(a, "a")
    dtype, shape = a.dtype, w.shape
    if (dtype not in KERNEL_DTYPES and dtype != torch.float64) or w.dtype != dtype:
        raise ValueError(f"w has dtype {w.dtype}, a {dtype}: both must be the same floating dtype")
    if len(shape) != 3 or (w.stride(2) != 1 and shape[2] > 1) or shape[1 if transpose else 2] != a.shape[1]:
        raise ValueError(
            f"w has shape {tuple(shape)}, strides {w.stride()}: must be 3-D, dense along its last dimension and "
            f"have {a.shape[1]} (the width of a) in dimension {1 if transpose else 2}"
        )
    check_segments(row_start, row_end, shape[0])
    check_flat(row_index, "row_index", torch.int32)
    if bias is not None and (bias.shape != (shape[0], shape[2 if transpose else 1]) or not bias.is_contiguous()):
        raise ValueError(f"bias has shape {tuple(bias.shape)}: must be contiguous, one entry per expert and column")
    if divisor < 1:
        raise ValueError(f"index_divisor={divisor}: must be at least 1")


@op("grouped_gemm")
def grouped_gemm(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    row_start: Tensor,
    row_end: Tensor,
    row_index: Tensor | None,
    index_divisor: int,
    max_rows: int,
    transpose_w: bool,
    expected_m: int | None = None,
) -> Tensor:
    """out[n] = a[row] @ w[e].T + bias[e], or a[row] @ w[e] when `transpose_w` (dgrad), for each row n of each expert e.

    Args:
        a: `[*, D]`; rows may be strided. row = n, or row_index[n] // index_divisor.
        w: `[L, N, D]`, or `[L, D, N]` when `transpose_w`; the dtype of a.
        bias: `[L, N]` or None.
        row_start, row_end: `[L]` int32 on the device, the rows n of each expert, none past max_rows. An empty expert
            costs nothing.
        row_index: `[max_rows]` int32 or None; entries outside the segments are not read.
        expected_m: the rows an expert should expect, (M·R·K + E) // E; picks the configuration and never what is
            computed. None: max_rows / L.

    Returns:
        `[max_rows, N]` in a's dtype, accumulated in fp32; rows of no expert are left as allocated.

    Raises:
        ValueError: shapes, dtypes or inner strides do not fit together.
    """
    _check(a, w, bias, row_start, row_end, row_index, index_divisor, transpose_w)
    out = torch.empty(max_rows, w.shape[2 if transpose_w else 1], dtype=a.dtype, device=a.device)
    _gemm(out, a, w, bias, row_start, row_end, row_index, index_divisor, transpose_w, expected_m)
    return out


def grouped_gemm_into(
    out: Tensor,
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    row_start: Tensor,
    row_end: Tensor,
    row_index: Tensor | None,
    index_divisor: int,
    transpose_w: bool,
    expected_m: int | None = None,
) -> None:
    """`grouped_gemm` into a buffer of the caller's, a planned workspace; not differentiable and no torch op.

    Args:
        out: `[max_rows, N]`, contiguous, in a's dtype; rows of no expert are left as they are. The rest as there.

    Raises:
        ValueError: as `grouped_gemm`, or `out` does not fit.
    """
    _check(a, w, bias, row_start, row_end, row_index, index_divisor, transpose_w)
    _check_into(out, "out", a, w.shape[2 if transpose_w else 1])
    _gemm(out, a, w, bias, row_start, row_end, row_index, index_divisor, transpose_w, expected_m)


def _gemm(
    out: Tensor,
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    row_start: Tensor,
    row_end: Tensor,
    row_index: Tensor | None,
    index_divisor: int,
    transpose_w: bool,
    expected_m: int | None,
) -> None:
    if use_triton(a):
        _launch(a, w, bias, row_start, row_end, row_index, index_divisor, None, out, None, transpose_w, expected_m)
    else:
        _gemm_twin(out, a, w, bias, row_start, row_end, row_index, index_divisor, transpose_w)


def _check_into(t: Tensor, name: str, a: Tensor, width: int, rows: int | None = None) -> None:
    fits = t.dim() == 2 and t.shape[1] == width and (rows is None or t.shape[0] == rows)
    if not fits or t.dtype != a.dtype or t.device != a.device or not t.is_contiguous():
        raise ValueError(
            f"{name} is {t.dtype} {tuple(t.shape)} on {t.device} with strides {t.stride()}: must be contiguous, "
            f"{a.dtype} [{'max_rows' if rows is None else rows}, {width}] on {a.device}"
        )


@grouped_gemm.register_fake
def _(a, w, bias, row_start, row_end, row_index, index_divisor, max_rows, transpose_w, expected_m=None):
    return a.new_empty(max_rows, w.shape[2 if transpose_w else 1])


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def grouped_gemm_reference(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    row_start: Tensor,
    row_end: Tensor,
    row_index: Tensor | None,
    index_divisor: int,
    max_rows: int,
    transpose_w: bool,
) -> Tensor:
    """The torch twin of `grouped_gemm`, one matmul per expert."""
    out = torch.empty(max_rows, w.shape[2 if transpose_w else 1], dtype=a.dtype, device=a.device)
    _gemm_twin(out, a, w, bias, row_start, row_end, row_index, index_divisor, transpose_w)
    return out


def _gemm_twin(
    out: Tensor,
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    row_start: Tensor,
    row_end: Tensor,
    row_index: Tensor | None,
    index_divisor: int,
    transpose_w: bool,
) -> None:
    wide = _wide(a.dtype)
    for e, own in segment_slices(row_start, row_end):
        x = a[own] if row_index is None else a[row_index[own].long() // index_divisor]
        y = x.to(wide) @ (w[e] if transpose_w else w[e].T).to(wide)
        out[own] = (y if bias is None else y + bias[e].to(wide)).to(a.dtype)


@op("grouped_gemm_act")
def grouped_gemm_act(
    x: Tensor,
    w1: Tensor,
    bias1: Tensor | None,
    row_start: Tensor,
    row_end: Tensor,
    row_index: Tensor | None,
    index_divisor: int,
    max_rows: int,
    row_scale: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
    save_preact: bool,
    expected_m: int | None = None,
) -> tuple[Tensor, Tensor]:
    """GEMM1: act(scale · (x[row] @ w1[e].T) + bias1[e]) for each row n, the activation on the fp32 accumulator.

    Args:
        x: `[T, H]`; rows may be strided. row = n, or row_index[n] // index_divisor.
        w1: `[L, 2I, H]`, gate rows then up rows (`[L, I, H]` not gated); the dtype of x.
        bias1: `[L, 2I]` (`[L, I]`) or None.
        row_start, row_end, row_index, index_divisor, max_rows, expected_m: as in `grouped_gemm`.
        row_scale: flat float32 or None, the router weight on the input, read at row_index[n] (n when None).
        activation, alpha, limit: fields of `Activation`.
        save_preact: also return what the activation saw, for the backward.

    Returns:
        `act [max_rows, I]` and `preact [max_rows, 2I]` (`[max_rows, I]`; `[0]` unless `save_preact`), in x's dtype.

    Raises:
        ValueError: as `grouped_gemm`, an unknown activation, or a `row_scale` that is not flat.
    """
    gated = _check_act(x, w1, bias1, row_start, row_end, row_index, index_divisor, row_scale, activation, alpha, limit)
    act, preact = _empty_act(x, w1, max_rows, gated, save_preact)
    saved = preact if save_preact else None
    rows = (row_start, row_end, row_index, index_divisor)
    _gemm_act(act, saved, x, w1, bias1, *rows, row_scale, activation, alpha, limit, expected_m)
    return act, preact


def grouped_gemm_act_into(
    act: Tensor,
    preact: Tensor | None,
    x: Tensor,
    w1: Tensor,
    bias1: Tensor | None,
    row_start: Tensor,
    row_end: Tensor,
    row_index: Tensor | None,
    index_divisor: int,
    row_scale: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
    expected_m: int | None = None,
) -> None:
    """`grouped_gemm_act` into buffers of the caller's, planned workspaces; not differentiable and no torch op.

    Args:
        act: `[max_rows, I]`, contiguous, in x's dtype; rows of no expert are left as they are.
        preact: likewise `[max_rows, 2I]` (`[max_rows, I]` not gated), or None: not saved. The rest as there.

    Raises:
        ValueError: as `grouped_gemm_act`, or a buffer does not fit.
    """
    gated = _check_act(x, w1, bias1, row_start, row_end, row_index, index_divisor, row_scale, activation, alpha, limit)
    _check_into(act, "act", x, w1.shape[1] // (2 if gated else 1))
    if preact is not None:
        _check_into(preact, "preact", x, w1.shape[1], act.shape[0])
    rows = (row_start, row_end, row_index, index_divisor)
    _gemm_act(act, preact, x, w1, bias1, *rows, row_scale, activation, alpha, limit, expected_m)


def _check_act(
    x: Tensor,
    w1: Tensor,
    bias1: Tensor | None,
    row_start: Tensor,
    row_end: Tensor,
    row_index: Tensor | None,
    index_divisor: int,
    row_scale: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
) -> bool:
    """Whether the activation is gated, after all arguments were found to fit."""
    _check(x, w1, bias1, row_start, row_end, row_index, index_divisor, False)
    check_flat(row_scale, "row_scale", *scale_dtypes(x))
    gated = is_gated(activation, alpha, limit)
    if gated and w1.shape[1] % 2:
        raise ValueError(f"w1 has shape {tuple(w1.shape)}: {activation!r} is gated and needs an even number of rows")
    return gated


def _gemm_act(
    act: Tensor,
    preact: Tensor | None,
    x: Tensor,
    w1: Tensor,
    bias1: Tensor | None,
    row_start: Tensor,
    row_end: Tensor,
    row_index: Tensor | None,
    index_divisor: int,
    row_scale: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
    expected_m: int | None,
) -> None:
    rows = (row_start, row_end, row_index, index_divisor)
    if use_triton(x):
        _launch(x, w1, bias1, *rows, row_scale, act, preact, False, expected_m, activation, alpha, limit)
    else:
        _gemm_act_twin(act, preact, x, w1, bias1, *rows, row_scale, activation, alpha, limit)


def _empty_act(x: Tensor, w1: Tensor, max_rows: int, gated: bool, save_preact: bool) -> tuple[Tensor, Tensor]:
    act = torch.empty(max_rows, w1.shape[1] // (2 if gated else 1), dtype=x.dtype, device=x.device)
    preact = torch.empty((max_rows, w1.shape[1]) if save_preact else (0,), dtype=x.dtype, device=x.device)
    return act, preact


@grouped_gemm_act.register_fake
def _(
    x,
    w1,
    bias1,
    row_start,
    row_end,
    row_index,
    index_divisor,
    max_rows,
    row_scale,
    activation,
    alpha,
    limit,
    save_preact,
    expected_m=None,
):
    return _empty_act(x, w1, max_rows, is_gated(activation, alpha, limit), save_preact)


def grouped_gemm_act_reference(
    x: Tensor,
    w1: Tensor,
    bias1: Tensor | None,
    row_start: Tensor,
    row_end: Tensor,
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
    gated = is_gated(activation, alpha, limit)
    act, preact = _empty_act(x, w1, max_rows, gated, save_preact)
    saved = preact if save_preact else None
    rows = (row_start, row_end, row_index, index_divisor)
    _gemm_act_twin(act, saved, x, w1, bias1, *rows, row_scale, activation, alpha, limit)
    return act, preact


def _gemm_act_twin(
    act: Tensor,
    preact: Tensor | None,
    x: Tensor,
    w1: Tensor,
    bias1: Tensor | None,
    row_start: Tensor,
    row_end: Tensor,
    row_index: Tensor | None,
    index_divisor: int,
    row_scale: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
) -> None:
    wide = _wide(x.dtype)
    for e, own in segment_slices(row_start, row_end):
        a = x[own] if row_index is None else x[row_index[own].long() // index_divisor]
        y = a.to(wide) @ w1[e].T.to(wide)
        if row_scale is not None:
            y = y * row_scale[own if row_index is None else row_index[own].long()].to(wide)[:, None]
        y = y if bias1 is None else y + bias1[e].to(wide)
        if preact is not None:
            preact[own] = y.to(x.dtype)
        act[own] = apply_activation(y, activation, alpha, limit).to(x.dtype)
