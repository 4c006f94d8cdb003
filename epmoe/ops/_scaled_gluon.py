"""The Gluon kernel of `ops/scaled_gemm.py` for Hopper: fp8 with scales per block, many rows.

One producer partition fills a ring of stages: tiles by TMA (rows found through an index by cp.async), scales by cp.async.
Two consumer warpgroups each multiply 64 rows with the stage's 256 weight rows in quarters of 64, two quarters in flight,
so that one quarter's products are promoted to scaled fp32 sums while the tensor cores are at the next. Gluon (part of
Triton) is experimental and known to work here from Triton 3.6: `ops/_scaled_triton.py` does all that this does.

Letters: L local experts, D reduction width, N weight rows (2I for a gated GEMM1).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from epmoe.ops._configs import num_programs
from epmoe.ops._scaled_configs import ragged_rows
from epmoe.ops._triton import INTERPRET, cdiv, next_power_of_2
from epmoe.ops.activation import activate_and_slopes
from epmoe.ops.quantize import magnitude_bits, round_scaled, scale_of

gluon: Any
try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

    HAVE_GLUON = not INTERPRET
except ImportError:  # an older or newer Triton, or none
    HAVE_GLUON = False

STAGES = 4
PRODUCER_WARPS, PRODUCER_REGISTERS, CONSUMER_REGISTERS = 4, 40, 232
REGISTERS = 168  # of a thread at launch: what 12 warps can have, and what the three partitions then share out


if HAVE_GLUON:

    @gluon.jit
    def _next_stage(stage, phase, STAGES: gl.constexpr):
        wraps = stage + 1 == STAGES
        return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)

    @gluon.jit
    def _add(a, b):
        return a + b

    @gluon.jit
    def _find_tile(tile, tile_ends, row_start, row_end, TILES_N: gl.constexpr, GROUP_M: gl.constexpr, WARPS: gl.constexpr):
        """(expert, first row, its end, column tile): tiles go down groups of at most GROUP_M row tiles of one expert,
        the groups of an expert about equal, and then to the next columns."""
        LAYOUT: gl.constexpr = gl.BlockedLayout([tile_ends.shape[0] // 32], [32], [WARPS], [0])
        ends = tile_ends.load(LAYOUT)
        passed = ends <= tile // TILES_N
        e = gl.sum(passed.to(gl.int32), 0)
        begin = gl.load(row_start + e)
        end = gl.load(row_end + e)
        within = tile - gl.max(gl.where(passed, ends, 0), 0) * TILES_N
        count = (end - begin + 127) // 128
        groups = (count + GROUP_M - 1) // GROUP_M
        group = (count + groups - 1) // groups
        first = within // (group * TILES_N) * group
        size = gl.minimum(count - first, group)
        within -= first * TILES_N
        return e, begin + (first + within % size) * 128, end, within // size

    @gluon.jit
    def _producer(
        a, a_scale, w, w_scale, row_start, row_end, row_index, a_stride, a_scale_stride, a_tiles, w_tiles, a_scales,
        w_scales, full, empty, tile_ends, num_tiles,
        N: gl.constexpr, D: gl.constexpr, DIVISOR: gl.constexpr, GATED: gl.constexpr, GROUP_M: gl.constexpr,
        STAGES: gl.constexpr, WARPS: gl.constexpr,
    ):  # fmt: skip
        GATHER: gl.constexpr = row_index is not None
        WIDTH: gl.constexpr = N // 2 if GATED else N
        COLS: gl.constexpr = 128 if GATED else 256
        TILES_N: gl.constexpr = (WIDTH + COLS - 1) // COLS
        SCALES_N: gl.constexpr = (N + 127) // 128
        STEPS: gl.constexpr = (D + 127) // 128
        LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        TILE: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
        stage = 0
        phase = 1
        for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
            e, row, end, column = _find_tile(tile, tile_ends, row_start, row_end, TILES_N, GROUP_M, WARPS)
            col = column * COLS
            source = gl.minimum(row + gl.arange(0, 128, LINE), end - 1)
            if GATHER:
                source = gl.load(row_index + source) // DIVISOR
                rows = gl.minimum(row + gl.arange(0, 128, gl.SliceLayout(1, TILE)), end - 1)
                rows = (gl.load(row_index + rows) // DIVISOR).to(gl.int64) * a_stride
                at = a + gl.expand_dims(rows, 1) + gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, TILE)), 0)
            scales = a_scale + source.to(gl.int64) * a_scale_stride
            # two blocks of 128 weight rows, each with one scale a step
            half = gl.arange(0, 2, LINE)
            block = col // 128 + half * (WIDTH // 128 if GATED else 1)
            block = gl.minimum(block, SCALES_N - 1)
            weight_scales = w_scale + (e.to(gl.int64) * SCALES_N + block) * STEPS
            for step in range(STEPS):
                k = step * 128
                mbarrier.wait(empty.index(stage), phase)
                weights = w_tiles.index(stage)
                if GATHER:
                    mbarrier.expect(full.index(stage), 256 * 128)
                else:
                    mbarrier.expect(full.index(stage), (128 + 256) * 128)
                    tma.async_copy_global_to_shared(a, [row, k], full.index(stage), a_tiles.index(stage))
                w_row = e * N + col
                if GATED:
                    gates, ups = weights.slice(0, 128, 0), weights.slice(128, 128, 0)
                    tma.async_copy_global_to_shared(w, [w_row, k], full.index(stage), gates)
                    tma.async_copy_global_to_shared(w, [w_row + WIDTH, k], full.index(stage), ups)
                else:
                    tma.async_copy_global_to_shared(w, [w_row, k], full.index(stage), weights)
                if GATHER:
                    if D % 128 == 0:
                        async_copy.async_copy_global_to_shared(a_tiles.index(stage), at + k)
                    else:
                        inside = gl.expand_dims(k + gl.arange(0, 128, gl.SliceLayout(0, TILE)) < D, 0)
                        async_copy.async_copy_global_to_shared(a_tiles.index(stage), at + k, mask=inside)
                async_copy.async_copy_global_to_shared(a_scales.index(stage), scales + step)
                async_copy.async_copy_global_to_shared(w_scales.index(stage), weight_scales + step)
                async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
                stage, phase = _next_stage(stage, phase, STAGES)

    @gluon.jit
    def _finish(x, row_scale, bias, position, entries):
        if row_scale is not None:
            x *= gl.expand_dims(gl.load(row_scale + position), 1)
        if bias is not None:
            x += gl.expand_dims(gl.load(bias + entries).to(gl.float32), 0)
        return x

    @gluon.jit
    def _store_quarter(x, buffer, out, row, end, col, DTYPE: gl.constexpr):
        tma.store_wait(pendings=0)
        buffer.store(x.to(DTYPE).reshape([1, 1, 64, 64]))
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [1073741824, end, 1073741824 - end + row, col], buffer)

    @gluon.jit
    def _store_block(
        x, y, buffer, out, out_scale, row, end, col,
        WIDTH: gl.constexpr, DTYPE: gl.constexpr, LAYOUT: gl.constexpr,
    ):  # fmt: skip
        """Columns col .. col + 63 of out from `x`, the next 64 from `y`; quantized together where there is a scale."""
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

    @gluon.jit
    def _consumer(
        WHICH: gl.constexpr, row_start, row_end, row_index, row_scale, bias, out, out_scale, alpha, limit, a_tiles, w_tiles,
        a_scales, w_scales, buffers, full, empty, tile_ends, num_tiles,
        N: gl.constexpr, D: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr, GROUP_M: gl.constexpr,
        STAGES: gl.constexpr, DTYPE: gl.constexpr,
    ):  # fmt: skip
        WIDTH: gl.constexpr = N // 2 if GATED else N
        COLS: gl.constexpr = 128 if GATED else 256
        TILES_N: gl.constexpr = (WIDTH + COLS - 1) // COLS
        STEPS: gl.constexpr = (D + 127) // 128
        ROW: gl.constexpr = WHICH * 64
        MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 32])
        FRAGMENT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=4)
        ROWS: gl.constexpr = gl.SliceLayout(1, MMA)
        stage = 0
        phase = 0
        p = gl.zeros([64, 64], gl.float32, MMA)
        q = gl.zeros([64, 64], gl.float32, MMA)
        for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
            e, row, end, column = _find_tile(tile, tile_ends, row_start, row_end, TILES_N, GROUP_M, 4)
            row += ROW
            col = column * COLS
            c0 = gl.zeros([64, 64], gl.float32, MMA)
            c1 = gl.zeros([64, 64], gl.float32, MMA)
            c2 = gl.zeros([64, 64], gl.float32, MMA)
            c3 = gl.zeros([64, 64], gl.float32, MMA)
            for step in range(STEPS):
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
                stage, phase = _next_stage(stage, phase, STAGES)

            position = gl.minimum(row + gl.arange(0, 64, ROWS), end - 1)
            if row_scale is not None:
                if row_index is not None:
                    position = gl.load(row_index + position)
            cols = col + gl.arange(0, 64, gl.SliceLayout(0, MMA))
            at = e.to(gl.int64) * N
            HI: gl.constexpr = WIDTH if GATED else 128
            LAST: gl.constexpr = N - 1
            c0 = _finish(c0, row_scale, bias, position, at + gl.minimum(cols, LAST))
            c1 = _finish(c1, row_scale, bias, position, at + gl.minimum(cols + 64, LAST))
            c2 = _finish(c2, row_scale, bias, position, at + gl.minimum(cols + HI, LAST))
            c3 = _finish(c3, row_scale, bias, position, at + gl.minimum(cols + HI + 64, LAST))
            buffer = buffers.index(WHICH)
            if GATED:
                c0, _, _ = activate_and_slopes(c0, c2, alpha, limit, ACTIVATION)
                c1, _, _ = activate_and_slopes(c1, c3, alpha, limit, ACTIVATION)
                _store_block(c0, c1, buffer, out, out_scale, row, end, col, WIDTH, DTYPE, MMA)
            else:
                if ACTIVATION != "none":
                    c0, _, _ = activate_and_slopes(c0, 1.0, alpha, limit, ACTIVATION)
                    c1, _, _ = activate_and_slopes(c1, 1.0, alpha, limit, ACTIVATION)
                    c2, _, _ = activate_and_slopes(c2, 1.0, alpha, limit, ACTIVATION)
                    c3, _, _ = activate_and_slopes(c3, 1.0, alpha, limit, ACTIVATION)
                _store_block(c0, c1, buffer, out, out_scale, row, end, col, WIDTH, DTYPE, MMA)
                _store_block(c2, c3, buffer, out, out_scale, row, end, col + 128, WIDTH, DTYPE, MMA)
        tma.store_wait(pendings=0)

    @gluon.jit
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
        GROUP_M: gl.constexpr,
        STAGES: gl.constexpr,
        PRODUCER_WARPS: gl.constexpr,
        PRODUCER_REGISTERS: gl.constexpr,
        CONSUMER_REGISTERS: gl.constexpr,
    ):
        """The tiles and results of `scaled_gemm_kernel`, with rows in tiles of 128 and 256 weight rows."""
        FP8: gl.constexpr = w.dtype
        DTYPE: gl.constexpr = out.dtype
        COLS: gl.constexpr = 128 if GATED else 256
        TILES_N: gl.constexpr = (N // (2 if GATED else 1) + COLS - 1) // COLS
        A_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, 128], FP8)
        W_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([256, 128], FP8)
        FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        a_tiles = gl.allocate_shared_memory(FP8, [STAGES, 128, 128], A_LAYOUT)
        w_tiles = gl.allocate_shared_memory(FP8, [STAGES, 256, 128], W_LAYOUT)
        a_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 128], FLAT)
        w_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 2], FLAT)
        buffers = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 64, 64], out.layout)
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(full.index(i), count=1 + 32 * PRODUCER_WARPS)
            mbarrier.init(empty.index(i), count=2)

        SPREAD: gl.constexpr = gl.BlockedLayout([L_BLOCK // 32], [32], [gl.num_warps()], [0])
        experts = gl.arange(0, L_BLOCK, SPREAD)
        begins = gl.load(row_start + experts, mask=experts < L, other=0)
        ends = gl.load(row_end + experts, mask=experts < L, other=0)
        counts = (ends - begins + 127) // 128
        tile_ends = gl.allocate_shared_memory(gl.int32, [L_BLOCK], FLAT)
        tile_ends.store(gl.associative_scan(counts, 0, _add))
        num_tiles = gl.sum(counts, 0) * TILES_N
        fence_async_shared()

        gl.warp_specialize(
            [
                (_consumer, (0, row_start, row_end, row_index, row_scale, bias, out, out_scale, alpha, limit, a_tiles,
                             w_tiles, a_scales, w_scales, buffers, full, empty, tile_ends, num_tiles, N, D, ACTIVATION,
                             GATED, GROUP_M, STAGES, DTYPE)),
                (_consumer, (1, row_start, row_end, row_index, row_scale, bias, out, out_scale, alpha, limit, a_tiles,
                             w_tiles, a_scales, w_scales, buffers, full, empty, tile_ends, num_tiles, N, D, ACTIVATION,
                             GATED, GROUP_M, STAGES, DTYPE)),
                (_producer, (a, a_scale, w, w_scale, row_start, row_end, row_index, a_stride, a_scale_stride, a_tiles,
                             w_tiles, a_scales, w_scales, full, empty, tile_ends, num_tiles, N, D, DIVISOR, GATED,
                             GROUP_M, STAGES, PRODUCER_WARPS)),
            ],
            [4, PRODUCER_WARPS],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


@functools.cache
def _runs_on(device: torch.device) -> bool:
    return HAVE_GLUON and device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def can_take(a: Tensor, w: Tensor, out: Tensor, gated: bool, requantize: bool) -> bool:
    """Whether the kernel is there for this device and takes these operands: aligned for TMA, weights dense, and scale
    blocks that end where gates and quantized columns do."""
    width, d = out.shape[1], w.shape[2]
    return (
        _runs_on(a.device)
        and (a.data_ptr() | w.data_ptr() | a.stride(0) | d) % 16 == 0
        and w.is_contiguous()
        and width * out.dtype.itemsize % 16 == 0
        and (width % 128 == 0 or not (gated or requantize))
        and w.shape[0] <= 1024
        and w.shape[0] * w.shape[1] < 2**31
    )


@functools.cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    types = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float8_e4m3fn: gl.float8e4nv}
    return gl.NVMMASharedLayout.get_default_for(list(block), types[dtype])


def _descriptor(t: Tensor, shape: list[int], strides: list[int], *block: int) -> Any:
    return GluonDescriptor(t, shape, strides, list(block), _layout(block, t.dtype))


def launch(
    a: Tensor,
    a_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    row_start: Tensor,
    row_end: Tensor,
    row_index: Tensor | None,
    row_scale: Tensor | None,
    out: Tensor,
    out_scale: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
    gated: bool,
    divisor: int,
    group_m: int,
) -> None:
    """Launches the kernel on operands that `can_take` allows, on the current device."""
    L, n, d = w.shape
    shape, strides, block = ragged_rows(out, [64, 64])
    column_tiles = cdiv(out.shape[1], 128 if gated else 256)
    row_tiles = out.shape[0] // 128 + min(L, out.shape[0])
    scaled_gemm_gluon_kernel[(num_programs(a.device, 1, row_tiles * column_tiles),)](
        a if row_index is not None else _descriptor(a, list(a.shape), [a.stride(0), 1], 128, 128),
        a_scale,
        _descriptor(w, [L * n, d], [d, 1], 128 if gated else 256, 128),
        w_scale,
        bias,
        row_start,
        row_end,
        row_index,
        row_scale,
        _descriptor(out, shape, strides, *block),
        out_scale,
        alpha,
        limit,
        a.stride(0),
        a_scale.stride(0),
        L=L,
        L_BLOCK=max(32, next_power_of_2(L)),
        N=n,
        D=d,
        DIVISOR=divisor,
        ACTIVATION=activation,
        GATED=gated,
        GROUP_M=group_m,
        STAGES=STAGES,
        PRODUCER_WARPS=PRODUCER_WARPS,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS,
        num_warps=4,
        maxnreg=REGISTERS,
    )
