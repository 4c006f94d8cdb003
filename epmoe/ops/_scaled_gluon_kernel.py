"""The Gluon kernel of `ops/_scaled_gluon.py`, which alone imports this file, and only where Gluon is known to work.

One producer partition fills a ring of stages: tiles by TMA (rows found through an index by cp.async), scales by
cp.async. Consumer warpgroups each multiply 64 rows with the stage's 256 weight rows in quarters of 64, two quarters in
flight, so that one quarter's products are promoted to scaled fp32 sums while the tensor cores are at the next.

Tiles have 128 rows and two consumers, or 64 and one where reading the weights is what costs.

Letters: L local experts, D reduction width, N weight rows (2I for a gated GEMM1).
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from epmoe.ops._dependent_launch import let_next_start, wait_for_previous
from epmoe.ops._launch import quick_jit
from epmoe.ops._scaled_gluon_produce import produce
from epmoe.ops._scaled_gluon_tiles import count_tiles, find_tile, next_stage, rounds_of, turn
from epmoe.ops.activation import activate_and_slopes
from epmoe.ops.quantize import magnitude_bits, round_scaled, scale_of

jit: Any = quick_jit(gluon.jit)

PRODUCER_WARPS = gl.constexpr(4)


@jit
def _finish(x, row_scale, bias, position, entries):
    if row_scale is not None:
        x *= gl.expand_dims(gl.load(row_scale + position), 1)
    if bias is not None:
        x += gl.expand_dims(gl.load(bias + entries).to(gl.float32), 0)
    return x


@jit
def _store_quarter(x, buffer, out, row, end, col, DTYPE: gl.constexpr):
    tma.store_wait(pendings=0)
    buffer.store(x.to(DTYPE).reshape([1, 1, 64, 64]))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [1073741824, end, 1073741824 - end + row, col], buffer)


@jit
def _store_block(
    x, y, buffer, out, out_scale, row, end, col,
    WIDTH: gl.constexpr, DTYPE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Columns col .. col + 63 of out from `x`, the next 64 from `y`, quantized together where there is a scale."""
    if out_scale is not None:
        rows = row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
        largest = gl.maximum(gl.max(magnitude_bits(x), 1), gl.max(magnitude_bits(y), 1))
        scale, inverse = scale_of(largest, 448.0)
        at = out_scale + rows.to(gl.int64) * ((WIDTH + 127) // 128) + col // 128
        gl.store(at, scale, mask=(rows < end) & (col < WIDTH))
        x = round_scaled(x, gl.expand_dims(inverse, 1), DTYPE, False)
        y = round_scaled(y, gl.expand_dims(inverse, 1), DTYPE, False)
    _store_quarter(x, buffer, out, row, end, col, DTYPE)
    _store_quarter(y, buffer, out, row, end, col + 64, DTYPE)


@jit
def _consumer(
    WHICH: gl.constexpr, row_start, row_end, row_index, row_scale, bias, out, out_scale, alpha, limit, a_tiles, w_tiles,
    a_scales, w_scales, buffers, full, empty, tile_ends, num_tiles,
    N: gl.constexpr, D: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr, BLOCK_M: gl.constexpr,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr, SKIP_IDLE: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    WIDTH: gl.constexpr = N // 2 if GATED else N
    COLS: gl.constexpr = 128 if GATED else 256
    TILES_N: gl.constexpr = (WIDTH + COLS - 1) // COLS
    STEPS: gl.constexpr = (D + 127) // 128
    ROW: gl.constexpr = WHICH * 64
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 32])
    FRAGMENT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=4)
    ROWS: gl.constexpr = gl.SliceLayout(1, MMA)
    HI: gl.constexpr = WIDTH if GATED else 128  # from the first 128 weight rows of a tile to the others
    LAST: gl.constexpr = N - 1
    stage = 0
    phase = 0
    for round_ in range(rounds_of(num_tiles)):
        tile = round_ * gl.num_programs(0) + turn(round_)
        e, row, end, column = find_tile(tile, tile_ends, row_start, row_end, BLOCK_M, TILES_N, GROUP_M, 4)
        row += ROW
        col = column * COLS
        active = row < end if SKIP_IDLE else True
        if active:
            p = gl.zeros([64, 64], gl.float32, MMA)
            q = p
            c0 = p
            c1 = p
            c2 = p
            c3 = p
            for _step in range(STEPS):
                mbarrier.wait(full.index(stage), phase)
                s = a_scales.index(stage).slice(ROW, 64, 0).load(ROWS)
                lo = gl.expand_dims(s * w_scales.index(stage).slice(0, 1, 0).load(ROWS), 1)
                hi = gl.expand_dims(s * w_scales.index(stage).slice(1, 1, 0).load(ROWS), 1)
                x = a_tiles.index(stage).slice(ROW, 64, 0).load(FRAGMENT)
                w = w_tiles.index(stage)
                g = warpgroup_mma(x, w.slice(0, 64, 0).permute((1, 0)), p, use_acc=False, is_async=True)
                h = warpgroup_mma(x, w.slice(64, 64, 0).permute((1, 0)), q, use_acc=False, is_async=True)
                p = warpgroup_mma_wait(num_outstanding=1, deps=(g,))
                c0 += p * lo
                # waiting with the sum as a dependency keeps it ahead of the next product in program order
                p, c0 = warpgroup_mma_wait(num_outstanding=1, deps=(p, c0))
                g = warpgroup_mma(x, w.slice(128, 64, 0).permute((1, 0)), p, use_acc=False, is_async=True)
                q = warpgroup_mma_wait(num_outstanding=1, deps=(h,))
                c1 += q * lo
                q, c1 = warpgroup_mma_wait(num_outstanding=1, deps=(q, c1))
                h = warpgroup_mma(x, w.slice(192, 64, 0).permute((1, 0)), q, use_acc=False, is_async=True)
                p = warpgroup_mma_wait(num_outstanding=1, deps=(g,))
                c2 += p * hi
                q = warpgroup_mma_wait(num_outstanding=0, deps=(h,))
                mbarrier.arrive(empty.index(stage), count=1)
                c3 += q * hi
                stage, phase = next_stage(stage, phase, STAGES)

            position = gl.minimum(row + gl.arange(0, 64, ROWS), end - 1)
            if row_scale is not None:
                if row_index is not None:
                    position = gl.load(row_index + position)
            cols = col + gl.arange(0, 64, gl.SliceLayout(0, MMA))
            at = e.to(gl.int64) * N
            c0 = _finish(c0, row_scale, bias, position, at + gl.minimum(cols, LAST))
            c1 = _finish(c1, row_scale, bias, position, at + gl.minimum(cols + 64, LAST))
            c2 = _finish(c2, row_scale, bias, position, at + gl.minimum(cols + HI, LAST))
            c3 = _finish(c3, row_scale, bias, position, at + gl.minimum(cols + HI + 64, LAST))
            if GATED:
                c0, _, _ = activate_and_slopes(c0, c2, alpha, limit, ACTIVATION)
                c1, _, _ = activate_and_slopes(c1, c3, alpha, limit, ACTIVATION)
                _store_block(c0, c1, buffers.index(WHICH), out, out_scale, row, end, col, WIDTH, DTYPE, MMA)
            else:
                if ACTIVATION != "none":
                    c0, _, _ = activate_and_slopes(c0, 1.0, alpha, limit, ACTIVATION)
                    c1, _, _ = activate_and_slopes(c1, 1.0, alpha, limit, ACTIVATION)
                    c2, _, _ = activate_and_slopes(c2, 1.0, alpha, limit, ACTIVATION)
                    c3, _, _ = activate_and_slopes(c3, 1.0, alpha, limit, ACTIVATION)
                _store_block(c0, c1, buffers.index(WHICH), out, out_scale, row, end, col, WIDTH, DTYPE, MMA)
                _store_block(c2, c3, buffers.index(WHICH), out, out_scale, row, end, col + 128, WIDTH, DTYPE, MMA)
        else:  # no row of this expert is left for this warpgroup: leave the tensor cores to the other one
            for _step in range(STEPS):
                mbarrier.wait(full.index(stage), phase)
                mbarrier.arrive(empty.index(stage), count=1)
                stage, phase = next_stage(stage, phase, STAGES)
    tma.store_wait(pendings=0)


@jit(do_not_specialize_on_alignment=["row_start", "row_end"])
def scaled_gemm_gluon_kernel(
    a,  # a descriptor of [*, D], or a pointer where row_index finds the rows
    a_scale,
    w,  # a descriptor of [L · N, D]
    w_scale,
    bias,
    row_start,
    row_end,
    row_index,
    row_scale,
    out,  # a descriptor by `ragged_rows`
    out_scale,
    alpha,
    limit,
    a_stride,
    a_scale_stride,
    L: gl.constexpr,
    L_BLOCK: gl.constexpr,
    N: gl.constexpr,
    D: gl.constexpr,
    DIVISOR: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    BLOCK_M: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    AT_ONCE: gl.constexpr,
    SKIP_IDLE: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """The tiles and results of `scaled_gemm_kernel`, with rows in tiles of 128 and 256 weight rows."""
    FP8: gl.constexpr = w.dtype
    CONSUMERS: gl.constexpr = BLOCK_M // 64
    DTYPE: gl.constexpr = out.dtype
    COLS: gl.constexpr = 128 if GATED else 256
    TILES_N: gl.constexpr = (N // (2 if GATED else 1) + COLS - 1) // COLS
    wait_for_previous(DEPENDENT)
    let_next_start(DEPENDENT)
    A_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, 128], FP8)
    W_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([256, 128], FP8)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    a_tiles = gl.allocate_shared_memory(FP8, [STAGES, BLOCK_M, 128], A_LAYOUT)
    w_tiles = gl.allocate_shared_memory(FP8, [STAGES, 256, 128], W_LAYOUT)
    a_scales = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], FLAT)
    w_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 2], FLAT)
    buffers = gl.allocate_shared_memory(DTYPE, [CONSUMERS, 1, 1, 64, 64], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1 + 32 * PRODUCER_WARPS)
        mbarrier.init(empty.index(i), count=CONSUMERS)

    tile_ends = gl.allocate_shared_memory(gl.int32, [L_BLOCK], FLAT)
    num_tiles = count_tiles(tile_ends, row_start, row_end, L, L_BLOCK, BLOCK_M) * TILES_N
    fence_async_shared()

    if BLOCK_M == 128:
        gl.warp_specialize(
            [
                (_consumer, (0, row_start, row_end, row_index, row_scale, bias, out, out_scale, alpha, limit, a_tiles,
                             w_tiles, a_scales, w_scales, buffers, full, empty, tile_ends, num_tiles, N, D, ACTIVATION,
                             GATED, BLOCK_M, GROUP_M, STAGES, SKIP_IDLE, DTYPE)),
                (_consumer, (1, row_start, row_end, row_index, row_scale, bias, out, out_scale, alpha, limit, a_tiles,
                             w_tiles, a_scales, w_scales, buffers, full, empty, tile_ends, num_tiles, N, D, ACTIVATION,
                             GATED, BLOCK_M, GROUP_M, STAGES, SKIP_IDLE, DTYPE)),
                (produce, (a, a_scale, w, w_scale, row_start, row_end, row_index, a_stride, a_scale_stride, a_tiles,
                             w_tiles, a_scales, w_scales, full, empty, tile_ends, num_tiles, N, D, DIVISOR, GATED,
                             BLOCK_M, GROUP_M, STAGES, AT_ONCE, PRODUCER_WARPS)),
            ],
            [4, PRODUCER_WARPS],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (0, row_start, row_end, row_index, row_scale, bias, out, out_scale, alpha, limit, a_tiles,
                             w_tiles, a_scales, w_scales, buffers, full, empty, tile_ends, num_tiles, N, D, ACTIVATION,
                             GATED, BLOCK_M, GROUP_M, STAGES, SKIP_IDLE, DTYPE)),
                (produce, (a, a_scale, w, w_scale, row_start, row_end, row_index, a_stride, a_scale_stride, a_tiles,
                             w_tiles, a_scales, w_scales, full, empty, tile_ends, num_tiles, N, D, DIVISOR, GATED,
                             BLOCK_M, GROUP_M, STAGES, AT_ONCE, PRODUCER_WARPS)),
            ],
            [PRODUCER_WARPS],
            [PRODUCER_REGISTERS],
        )  # fmt: skip
