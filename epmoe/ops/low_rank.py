"""Low-rank updates added to rows in place: what LoRA does to the output of a grouped GEMM.

Stands behind GEMM1 (with the activation, which has to see the sum), behind GEMM2 and, transposed, behind both dgrads.
Only rows of a segment are touched: those of other rows, base rows among them, keep their bits.

Letters: N columns, R rank, S segments (one per expert and adapter), I expert intermediate size. Segment s owns rows
row_start[s]:row_end[s] (`ops/_segments.py`); there may be any rows between two segments.

    add_low_rank       out[n]    += c[n] · u[n] @ w[s].T
    add_low_rank_act   preact[n] += c[n] · u[n] @ w[s].T, then act[n] = activation(preact[n])
"""

from __future__ import annotations

import torch
from torch import Tensor

from epmoe.ops._configs import expected_rows, most_row_tiles, num_programs
from epmoe.ops._low_rank_configs import low_rank_config
from epmoe.ops._segments import RowMap, check_segments, segment_slices
from epmoe.ops._triton import (
    INTERPRET,
    KERNEL_DTYPES,
    cast_from_float32,
    cdiv,
    check_flat,
    dot_accumulate,
    jit,
    next_power_of_2,
    on_device_of,
    op,
    scale_dtypes,
    tl,
    unit_stride,
    use_triton,
)
from epmoe.ops.activation import Epilogue, activate_and_slopes, apply_activation, is_gated


@jit
def _product(
    u_rows, w, inside, cols, u_ptr, w_stride_row,
    R: tl.constexpr, LAST: tl.constexpr, TRANSPOSE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """u @ w.T (u @ w transposed) of one tile: rows at offsets `u_rows`, columns `cols` < LAST of a segment's `w`."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for r0 in tl.range(0, R, BLOCK_R):
        rs = r0 + tl.arange(0, BLOCK_R)
        a = tl.load(u_ptr + u_rows[:, None] + rs[None, :], mask=inside[:, None] & (rs < R)[None, :], other=0.0)
        if TRANSPOSE:
            at = w + rs.to(tl.int64)[:, None] * w_stride_row + cols[None, :]
            b = tl.load(at, mask=(rs < R)[:, None] & (cols < LAST)[None, :], other=0.0)
        else:
            at = w + cols.to(tl.int64)[:, None] * w_stride_row + rs[None, :]
            b = tl.load(at, mask=(cols < LAST)[:, None] & (rs < R)[None, :], other=0.0).T
        acc = dot_accumulate(a, b, acc, INTERPRETED)
    return acc


@jit(do_not_specialize_on_alignment=["row_start", "row_end"])
def _add_low_rank_kernel(
    u,
    w,
    row_start,
    row_end,
    row_index,
    row_scale,
    out,
    act,
    alpha,
    limit,
    u_stride,
    w_stride_segment,
    w_stride_row,
    S: tl.constexpr,
    S_BLOCK: tl.constexpr,
    N: tl.constexpr,  # 2I when GATED
    R: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Programs walk the tiles of all segments, counted from the segments on the device.

    row_start = [0, 7], row_end = [5, 7], BLOCK_M = 4: segment 0 has 2 row tiles, segment 1 none; rows 5 and 6 lie
    between them and are not touched. A tile's elements are read and written by one program.
    """
    WIDTH: tl.constexpr = N // 2 if GATED else N
    TILES_N: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    segments = tl.arange(0, S_BLOCK)
    begins = tl.load(row_start + segments, mask=segments < S, other=0)
    ends = tl.load(row_end + segments, mask=segments < S, other=0)
    tiles = (ends - begins + BLOCK_M - 1) // BLOCK_M
    tile_ends = tl.cumsum(tiles)
    for tile in tl.range(tl.program_id(0), tl.sum(tiles) * TILES_N, tl.num_programs(0)):
        tile_m = tile // TILES_N
        cols = tile % TILES_N * BLOCK_N + tl.arange(0, BLOCK_N)
        passed = tile_ends <= tile_m
        s = tl.sum(passed.to(tl.int32))
        rows = tl.load(row_start + s) + (tile_m - tl.max(tl.where(passed, tile_ends, 0))) * BLOCK_M
        rows += tl.arange(0, BLOCK_M)
        real = rows < tl.load(row_end + s)
        scale = tl.full((BLOCK_M,), 1.0, tl.float32)
        if row_scale is not None:
            position = rows
            if row_index is not None:
                position = tl.load(row_index + rows, mask=real, other=0)
            scale = tl.load(row_scale + position, mask=real, other=0.0)

        u_rows = rows.to(tl.int64) * u_stride
        own = w + s.to(tl.int64) * w_stride_segment
        delta = scale[:, None] * _product(
            u_rows, own, real, cols, u, w_stride_row, R, WIDTH, TRANSPOSE, BLOCK_M, BLOCK_N, BLOCK_R, INTERPRETED
        )
        inside = real[:, None] & (cols < WIDTH)[None, :]
        at = out + rows.to(tl.int64)[:, None] * N + cols[None, :]
        g = tl.load(at, mask=inside, other=0.0).to(tl.float32) + delta
        tl.store(at, cast_from_float32(g, out.dtype.element_ty, INTERPRETED), mask=inside)
        if ACTIVATION != "none":
            if GATED:
                delta = scale[:, None] * _product(
                    u_rows, own, real, cols + WIDTH, u, w_stride_row, R, N, TRANSPOSE, BLOCK_M, BLOCK_N, BLOCK_R,
                    INTERPRETED,
                )  # fmt: skip
                up = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32) + delta
                tl.store(at + WIDTH, cast_from_float32(up, out.dtype.element_ty, INTERPRETED), mask=inside)
                result, _, _ = activate_and_slopes(g, up, alpha, limit, ACTIVATION)
            else:
                result, _, _ = activate_and_slopes(g, 1.0, alpha, limit, ACTIVATION)
            tl.store(
                act + rows.to(tl.int64)[:, None] * WIDTH + cols[None, :],
                cast_from_float32(result, act.dtype.element_ty, INTERPRETED),
                mask=inside,
            )


def _launch(
    out: Tensor,
    act: Tensor | None,
    u: Tensor,
    w: Tensor,
    rows: RowMap,
    transpose: bool,
    expected_m: int | None,
    epilogue: Epilogue,
) -> None:
    (num_rows, n), (segments, rank) = out.shape, (w.shape[0], u.shape[1])
    if out.numel() == 0 or segments == 0:
        return
    gated = epilogue.gated
    expected = expected_rows(num_rows, segments, expected_m)
    config = low_rank_config(expected, rank, gated)
    row_tiles = most_row_tiles(num_rows, segments, config.block_m, expected_m)
    tiles = row_tiles * cdiv(n // 2 if gated else n, config.block_n)
    with on_device_of(out):
        _add_low_rank_kernel[(num_programs(out.device, config.programs_per_sm, tiles),)](
            u,
            w,
            rows.row_start,
            rows.row_end,
            rows.row_index,
            rows.row_scale,
            out,
            act,
            epilogue.alpha,
            epilogue.limit,
            u.stride(0),
            w.stride(0),
            w.stride(1),
            S=segments,
            S_BLOCK=next_power_of_2(segments),
            N=n,
            R=rank,
            ACTIVATION=epilogue.activation,
            GATED=gated,
            TRANSPOSE=transpose,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_R=config.block_r,
            INTERPRETED=INTERPRET,
            num_warps=config.num_warps,
        )


def _check(out: Tensor, u: Tensor, w: Tensor, rows: RowMap, transpose: bool) -> None:
    dtype, rank = out.dtype, u.shape[-1]
    if (dtype not in KERNEL_DTYPES and dtype != torch.float64) or u.dtype != dtype or w.dtype != dtype:
        raise ValueError(f"out is {dtype}, u {u.dtype}, w {w.dtype}: all must be the same floating dtype")
    if out.dim() != 2 or not out.is_contiguous():
        raise ValueError(f"out has shape {tuple(out.shape)} and strides {out.stride()}: must be 2-D and contiguous")
    unit_stride(u, "u")
    if u.shape[0] != out.shape[0]:
        raise ValueError(f"u has {u.shape[0]} rows: must have one per row of out, {out.shape[0]}")
    right = (rank, out.shape[1]) if transpose else (out.shape[1], rank)
    if w.dim() != 3 or tuple(w.shape[1:]) != right or (w.stride(2) != 1 and w.shape[2] > 1):
        raise ValueError(
            f"w has shape {tuple(w.shape)}, strides {w.stride()}: must be [S, {right[0]}, {right[1]}] and dense along "
            "its last dimension"
        )
    check_segments(rows.row_start, rows.row_end, w.shape[0])
    check_flat(rows.row_index, "row_index", torch.int32)
    check_flat(rows.row_scale, "row_scale", *scale_dtypes(out))


@op("add_low_rank", mutates_args=("out",))
def add_low_rank(
    out: Tensor,
    u: Tensor,
    w: Tensor,
    row_start: Tensor,
    row_end: Tensor,
    row_index: Tensor | None,
    row_scale: Tensor | None,
    transpose_w: bool,
    expected_m: int | None = None,
) -> None:
    """out[n] += c · u[n] @ w[s].T, or c · u[n] @ w[s] when `transpose_w`, in place for each row n of each segment s.

    Args:
        out: `[*, N]`, contiguous; changed.
        u: `[*, R]`, as many rows, out's dtype; rows may be strided.
        w: `[S, N, R]`, or `[S, R, N]` when `transpose_w`; out's dtype.
        row_start, row_end: `[S]` int32 on the device, ascending; rows of no segment are neither read nor written.
        row_index: `[*]` int32 or None, which entry of `row_scale` each row has; None: entry n.
        row_scale: flat float32 or None, c. The sum is made in fp32 and rounded once.
        expected_m: the rows that a segment should expect; picks the configuration and never what is computed. None: all
            rows / S.

    Raises:
        ValueError: shapes, dtypes or strides are not as above.
    """
    rows = RowMap(row_start, row_end, row_index, row_scale=row_scale)
    _check(out, u, w, rows, transpose_w)
    if use_triton(out):
        _launch(out, None, u, w, rows, transpose_w, expected_m, Epilogue())
    else:
        add_low_rank_reference(out, u, w, row_start, row_end, row_index, row_scale, transpose_w)


@add_low_rank.register_fake
def _(out, u, w, row_start, row_end, row_index, row_scale, transpose_w, expected_m=None):
    return None


def add_low_rank_reference(
    out: Tensor,
    u: Tensor,
    w: Tensor,
    row_start: Tensor,
    row_end: Tensor,
    row_index: Tensor | None,
    row_scale: Tensor | None,
    transpose_w: bool,
) -> None:
    """The torch twin of `add_low_rank`, one matmul per segment."""
    rows = RowMap(row_start, row_end, row_index, row_scale=row_scale)
    for s, own in segment_slices(row_start, row_end):
        out[own] = _sum(out[own], u[own], w[s].t() if transpose_w else w[s], rows.scales(own)).to(out.dtype)


def _sum(base: Tensor, u: Tensor, w: Tensor, scales: Tensor | None) -> Tensor:
    """base + c · u @ w.T of one segment, in float32 or float64."""
    wide = torch.promote_types(base.dtype, torch.float32)
    delta = u.to(wide) @ w.t().to(wide)
    if scales is not None:
        delta *= scales.to(wide)
    return base.to(wide) + delta


@op("add_low_rank_act", mutates_args=("preact", "act"))
def add_low_rank_act(
    preact: Tensor,
    act: Tensor,
    u: Tensor,
    w: Tensor,
    row_start: Tensor,
    row_end: Tensor,
    row_index: Tensor | None,
    row_scale: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
    expected_m: int | None = None,
) -> None:
    """`add_low_rank` on `preact`, and the activation of the sum, still in fp32, into `act`.

    Args:
        preact: `[*, 2I]`, gates then up projections (`[*, I]` not gated), contiguous; changed.
        act: `[*, I]`, contiguous, preact's dtype; rows of segments are overwritten.
        u, w, row_start, row_end, row_index, row_scale, expected_m: as in `add_low_rank`, N the width of preact.
        activation, alpha, limit: fields of `Activation`.

    Raises:
        ValueError: as `add_low_rank`, an unknown activation, or an `act` that does not fit.
    """
    rows, epilogue = RowMap(row_start, row_end, row_index, row_scale=row_scale), Epilogue(activation, alpha, limit)
    _check(preact, u, w, rows, False)
    width = preact.shape[1] // (2 if is_gated(*epilogue) else 1)
    if act.shape != (preact.shape[0], width) or act.dtype != preact.dtype or not act.is_contiguous():
        raise ValueError(
            f"act is {act.dtype} {tuple(act.shape)}: must be contiguous, {preact.dtype} {(preact.shape[0], width)}, "
            f"as preact {tuple(preact.shape)} with {activation!r} asks"
        )
    if use_triton(preact):
        _launch(preact, act, u, w, rows, False, expected_m, epilogue)
    else:
        flat = (row_start, row_end, row_index, row_scale)
        add_low_rank_act_reference(preact, act, u, w, *flat, *epilogue)


@add_low_rank_act.register_fake
def _(preact, act, u, w, row_start, row_end, row_index, row_scale, activation, alpha, limit, expected_m=None):
    return None


def add_low_rank_act_reference(
    preact: Tensor,
    act: Tensor,
    u: Tensor,
    w: Tensor,
    row_start: Tensor,
    row_end: Tensor,
    row_index: Tensor | None,
    row_scale: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
) -> None:
    """The torch twin of `add_low_rank_act`, one matmul per segment."""
    rows = RowMap(row_start, row_end, row_index, row_scale=row_scale)
    for s, own in segment_slices(row_start, row_end):
        total = _sum(preact[own], u[own], w[s], rows.scales(own))
        preact[own] = total.to(preact.dtype)
        act[own] = apply_activation(total, activation, alpha, limit).to(act.dtype)
