"""The producer of `ops/_scaled_gluon_kernel.py`: what the stages of its ring are filled with, tile after tile.

Letters: L local experts, D reduction width, N weight rows (2I for a gated GEMM1).
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from epmoe.ops._launch import quick_jit
from epmoe.ops._scaled_gluon_tiles import find_tile, next_stage, rounds_of, turn

jit: Any = quick_jit(gluon.jit)


@jit
def produce(
    a, a_scale, w, w_scale, row_start, row_end, row_index, a_stride, a_scale_stride, a_tiles, w_tiles, a_scales,
    w_scales, full, empty, tile_ends, num_tiles,
    N: gl.constexpr, D: gl.constexpr, DIVISOR: gl.constexpr, GATED: gl.constexpr, BLOCK_M: gl.constexpr,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr, AT_ONCE: gl.constexpr, WARPS: gl.constexpr,
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
    for round_ in range(rounds_of(num_tiles)):
        tile = round_ * gl.num_programs(0) + turn(round_)
        e, row, end, column = find_tile(tile, tile_ends, row_start, row_end, BLOCK_M, TILES_N, GROUP_M, WARPS)
        col = column * COLS
        source = gl.minimum(row + gl.arange(0, BLOCK_M, LINE), end - 1)
        if GATHER:
            source = gl.load(row_index + source) // DIVISOR
            rows = gl.minimum(row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, TILE)), end - 1)
            rows = (gl.load(row_index + rows) // DIVISOR).to(gl.int64) * a_stride
            at = a + gl.expand_dims(rows, 1) + gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, TILE)), 0)
        scales = a_scale + source.to(gl.int64) * a_scale_stride
        # two blocks of 128 weight rows, each with one scale a step
        half = gl.arange(0, 2, LINE)
        block = col // 128 + half * (WIDTH // 128 if GATED else 1)
        block = gl.minimum(block, SCALES_N - 1)
        weight_scales = w_scale + (e.to(gl.int64) * SCALES_N + block) * STEPS
        for first in range(0, STEPS, AT_ONCE):
            if AT_ONCE == 2:  # a piece of memory is read faster with its neighbour
                after, after_phase = next_stage(stage, phase, STAGES)
                mbarrier.wait(empty.index(after), after_phase)
            for part in gl.static_range(AT_ONCE):
                step = first + part
                k = step * 128
                mbarrier.wait(empty.index(stage), phase)
                weights = w_tiles.index(stage)
                if GATHER:
                    mbarrier.expect(full.index(stage), 256 * 128)
                else:
                    mbarrier.expect(full.index(stage), (BLOCK_M + 256) * 128)
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
                stage, phase = next_stage(stage, phase, STAGES)
