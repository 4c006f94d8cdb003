"""Grouped GEMM in plain Triton, for every dtype, size and device: what `ops/grouped_gemm.py` runs wherever neither
`ops/_gemm_few_rows.py` nor `ops/_gemm_gluon.py` is the faster one. Tiles go through tensor descriptors (TMA) where
alignment allows, else through pointers; block sizes come from `ops/_configs.py`.

Letters: L local experts, N weight rows of an expert (2I for a gated GEMM1), D the reduction width. Expert e owns rows
row_start[e]:row_end[e] (`ops/_segments.py`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from epmoe.ops._configs import expected_rows, gemm_plan, most_row_tiles, num_programs
from epmoe.ops._descriptors import unchecked_descriptor
from epmoe.ops._segments import RowMap
from epmoe.ops._triton import TensorDescriptor, cast_from_float32, dot_accumulate, jit, on_device_of, tl
from epmoe.ops.activation import Epilogue, activate_and_slopes


@jit
def _store(block, to, row0, rows, end, col0, stride, width, TMA: tl.constexpr, INTERPRETED: tl.constexpr):
    """`block` to rows row0.. before `end` and columns col0.. before `width`; to: a pointer, or a ragged descriptor."""
    if TMA:
        top: tl.constexpr = 0x40000000
        block = cast_from_float32(block, to.dtype, INTERPRETED)
        to.store([top, end, top - end + row0, col0], block.reshape(1, 1, block.shape[0], block.shape[1]))
    else:
        cols = col0 + tl.arange(0, block.shape[1])
        block = cast_from_float32(block, to.dtype.element_ty, INTERPRETED)
        inside = (rows < end)[:, None] & (cols < width)[None, :]
        tl.store(to + rows.to(tl.int64)[:, None] * stride + cols[None, :], block, mask=inside)


@jit(do_not_specialize_on_alignment=["row_start", "row_end"])
def _grouped_gemm_kernel(
    a,  # a pointer, or a tensor descriptor when A_TMA
    w,  # likewise when W_TMA
    bias,
    row_start,
    row_end,
    row_index,
    row_scale,
    out,  # a pointer, or a ragged descriptor when OUT_TMA
    preact,
    alpha,
    limit,
    a_stride,
    w_stride_expert,
    w_stride_row,
    L: tl.constexpr,
    L_BLOCK: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    DIVISOR: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    FLATTEN: tl.constexpr,
    STORES: tl.constexpr,
    A_TMA: tl.constexpr,
    W_TMA: tl.constexpr,
    OUT_TMA: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Programs walk the tiles of all experts, counted from the segments on the device.

    row_start = [0, 5, 5], row_end = [5, 5, 9], BLOCK_M = 4: experts have 2, 0, 1 row tiles. With two column tiles,
    tiles 0..3 are rows 0..3 and row 4 of expert 0 with its first weights, then both with the others; tiles 4 and 5 are
    rows 5..8 of expert 2. The GROUP_M row tiles that are walked together are one expert's: two experts' would need the
    weights of both in L2. What a tile computes for rows past its expert's end is not stored. A gated tile holds
    BLOCK_N / 2 gates, then the up projections of the same columns.
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

    for tile in tl.range(tl.program_id(0), tiles_m * TILES_N, tl.num_programs(0), flatten=FLATTEN):
        passed = tile_ends <= tile // TILES_N
        e = tl.sum(passed.to(tl.int32))
        begin = tl.load(row_start + e)
        end = tl.load(row_end + e)
        of_expert = tile - tl.max(tl.where(passed, tile_ends, 0)) * TILES_N
        first_m = of_expert // (GROUP_M * TILES_N) * GROUP_M
        group = tl.minimum((end - begin + BLOCK_M - 1) // BLOCK_M - first_m, GROUP_M)
        within = of_expert - first_m * TILES_N
        row0 = begin + (first_m + within % group) * BLOCK_M
        col0 = within // group * COLS
        rows = row0 + tl.arange(0, BLOCK_M)
        safe_rows = tl.minimum(rows, end - 1)
        ks = tl.arange(0, BLOCK_K)
        if not A_TMA:
            source = safe_rows
            if row_index is not None:
                source = tl.load(row_index + safe_rows) // DIVISOR
            a_tile = a + source.to(tl.int64)[:, None] * a_stride + ks[None, :]
        spread = tl.arange(0, BLOCK_N)
        cols = col0 + spread % COLS
        w_rows = spread // COLS * WIDTH + tl.minimum(cols, WIDTH - 1)
        if not W_TMA:
            if TRANSPOSE:
                w_tile = w + e.to(tl.int64) * w_stride_expert + ks.to(tl.int64)[:, None] * w_stride_row + cols[None, :]
            else:
                w_tile = (
                    w + e.to(tl.int64) * w_stride_expert + w_rows.to(tl.int64)[:, None] * w_stride_row + ks[None, :]
                )

        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(0, D, BLOCK_K):
            if A_TMA:
                x = a.load([row0, k])
            elif D % BLOCK_K == 0:
                x = tl.load(a_tile + k)
            else:
                x = tl.load(a_tile + k, mask=(k + ks < D)[None, :], other=0.0)
            if TRANSPOSE:
                if W_TMA:
                    b = w.load([e, k, col0]).reshape(BLOCK_K, BLOCK_N)
                else:
                    inside = (k + ks < D)[:, None] & (cols < WIDTH)[None, :]
                    b = tl.load(w_tile + tl.cast(k, tl.int64) * w_stride_row, mask=inside, other=0.0)
            else:
                if W_TMA:
                    b = w.load([e * PARTS, col0, k]).reshape(BLOCK_N, BLOCK_K)
                elif D % BLOCK_K == 0:
                    b = tl.load(w_tile + k)
                else:
                    b = tl.load(w_tile + k, mask=(k + ks < D)[None, :], other=0.0)
                b = b.T  # [BLOCK_K, BLOCK_N] from here on
            acc = dot_accumulate(x, b, acc, INTERPRETED)

        if row_scale is not None:
            position = safe_rows
            if row_index is not None:
                position = tl.load(row_index + safe_rows)
            acc *= tl.load(row_scale + position)[:, None]
        if bias is not None:
            acc += tl.load(bias + e.to(tl.int64) * N + w_rows).to(tl.float32)[None, :]

        if GATED:
            g, u = acc.reshape(BLOCK_M, 2, COLS).permute(0, 2, 1).split()
            if preact is not None:
                _store(g, preact, row0, rows, end, col0, N, WIDTH, False, INTERPRETED)
                _store(u, preact + WIDTH, row0, rows, end, col0, N, WIDTH, False, INTERPRETED)
            acc, _, _ = activate_and_slopes(g, u, alpha, limit, ACTIVATION)
        elif ACTIVATION != "none":
            if preact is not None:
                _store(acc, preact, row0, rows, end, col0, N, WIDTH, False, INTERPRETED)
            acc, _, _ = activate_and_slopes(acc, 1.0, alpha, limit, ACTIVATION)
        if STORES == 2:  # each with half of the shared memory
            low, high = acc.reshape(BLOCK_M, 2, COLS // 2).permute(0, 2, 1).split()
            _store(low, out, row0, rows, end, col0, WIDTH, WIDTH, OUT_TMA, INTERPRETED)
            _store(high, out, row0, rows, end, col0 + COLS // 2, WIDTH, WIDTH, OUT_TMA, INTERPRETED)
        else:
            _store(acc, out, row0, rows, end, col0, WIDTH, WIDTH, OUT_TMA, INTERPRETED)


def launch_triton(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    rows: RowMap,
    out: Tensor,
    preact: Tensor | None,
    transpose: bool,
    expected_m: int | None,
    epilogue: Epilogue,
) -> None:
    """Writes what `grouped_gemm` (`grouped_gemm_act`, with an activation) promises for checked arguments into `out`
    `[max_rows, N]` or `[max_rows, I]` and, unless it is None, `preact`."""
    L, max_rows = w.shape[0], out.shape[0]
    gated = epilogue.gated
    expected = expected_rows(max_rows, L, expected_m)
    aligned = (a.data_ptr() | w.data_ptr() | out.data_ptr()) % 16 == 0
    shape, strides, a_stride = w.shape, w.stride(), a.stride(0)
    gathered = rows.row_index is not None
    plan = gemm_plan(a.device, a.dtype, shape, strides, a_stride, aligned, expected, transpose, gated, gathered)
    config = plan.config
    from_rows: Any = a
    weights: Any = w
    to_rows: Any = out
    if plan.a_block is not None:
        from_rows = unchecked_descriptor(TensorDescriptor, a, list(a.shape), [a_stride, 1], plan.a_block)
    if plan.w_descriptor is not None:
        weights = unchecked_descriptor(TensorDescriptor, w, *plan.w_descriptor)
    if plan.out_descriptor is not None:
        to_rows = unchecked_descriptor(TensorDescriptor, out, *plan.out_descriptor)
    row_tiles = most_row_tiles(max_rows, L, config.block_m, expected_m)
    with on_device_of(a):
        _grouped_gemm_kernel[(num_programs(a.device, config.programs_per_sm, row_tiles * plan.column_tiles),)](
            from_rows,
            weights,
            bias,
            rows.row_start,
            rows.row_end,
            rows.row_index,
            rows.row_scale,
            to_rows,
            preact,
            epilogue.alpha,
            epilogue.limit,
            a_stride,
            strides[0],
            strides[1],
            DIVISOR=rows.divisor,
            ACTIVATION=epilogue.activation,
            **plan.constants,
        )
