"""The Gluon kernel of `ops/_gemm_gluon.py`, which alone imports this file, and only where Gluon is known to work.

A tile is 128 weight rows by up to 288 rows of one expert: 256 and as many as 32 more, since an expert hardly ever has
a multiple of 256. Weights are the M side of wgmma and rows its N side, which comes in steps of 8 where M comes in steps
of 64. A gated tile holds 64 gates and the up projections of the same columns, in turns of 8: one thread then has both.

One producer partition fills a ring of stages, two consumer warpgroups multiply 64 weight rows each:

    producer      | fill 0 | fill 1 | fill 2 | fill 3 | next tile: fill 0 | ...       a stage: 128 × 64 weights,
    consumers              | wgmma 0 | wgmma 1 | wgmma 2 | wgmma 3 | store | ...      256 × 64 and 32 × 64 rows

The first stage of a tile carries a message, which tile it is. A tile leaves through its last stage, which is handed
back when the stores have read it.

Letters: L local experts, D reduction width (`depth`), WIDTH columns of out (`width`).
"""

from __future__ import annotations

from typing import Any

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

from epmoe.ops._launch import quick_jit
from epmoe.ops.activation import activate_and_slopes

jit: Any = quick_jit(gluon.jit)


@jit
def _add(a, b):
    return a + b


@jit
def _next(stage, phase, STAGES: gl.constexpr):
    wrap = stage + 1 == STAGES
    return gl.where(wrap, 0, stage + 1), gl.where(wrap, phase ^ 1, phase)


@jit
def _before(stage, STAGES: gl.constexpr):
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@jit
def _row_tiles(rows):
    """Tiles of an expert that has so many rows: 288 rows are one, 289 are two, 1 is one."""
    return gl.maximum((rows + 223) // 256, gl.minimum(rows, 1))


@jit
def _word(message, words, index):
    return gl.sum(gl.where(words == index, message, 0))


@jit
def _produce(
    x,
    x_rows,
    x_rest,
    w,
    w_s,
    x_s,
    rest_s,
    messages,
    full,
    empty,
    row_start,
    row_end,
    row_index,
    divisor,
    x_chunks,  # a row's stride in 16 bytes: in these a row's place fits int32
    L,
    width,
    depth,
    panel_n,
    L_BLOCK: gl.constexpr,
    GATED: gl.constexpr,
    TRANSPOSE: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Walks the tiles of all experts and fills stages: an expert's in panels of `panel_n` column tiles, row tile after
    row tile, and experts with a tile of more than 256 rows first, so that all programs get as many of the long ones."""
    COLS: gl.constexpr = 64 if GATED else 128
    GATHER: gl.constexpr = row_index is not None
    BOX: gl.constexpr = 256 if GATHER else x_rows.block_type.shape[0]
    EXPERTS: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    WORDS: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    W_BYTES: gl.constexpr = 128 * 64 * 2
    experts = gl.arange(0, L_BLOCK, EXPERTS)
    words = gl.arange(0, 4, WORDS)
    begins = gl.load(row_start + experts, mask=experts < L, other=0)
    counts = gl.load(row_end + experts, mask=experts < L, other=0) - begins
    tiles_n = (width + COLS - 1) // COLS
    is_long = counts > _row_tiles(counts) * 256
    tiles = _row_tiles(counts) * tiles_n
    long_tiles = gl.where(is_long, tiles, 0)
    others_end = gl.sum(long_tiles) + gl.associative_scan(tiles - long_tiles, 0, _add)
    tile_ends = gl.where(is_long, gl.associative_scan(long_tiles, 0, _add), others_end)
    tile_starts = tile_ends - tiles
    stage = 0
    phase = 1  # nothing is in the stages yet: the first wait for each returns at once
    for tile in range(gl.program_id(0), gl.sum(tiles), gl.num_programs(0)):
        is_own = (tile_starts <= tile) & (tile < tile_ends)
        e = gl.sum(gl.where(is_own, experts, 0))
        at = tile - gl.sum(gl.where(is_own, tile_starts, 0))
        begin = gl.load(row_start + e)
        count = gl.load(row_end + e) - begin
        tiles_m = _row_tiles(count)
        first_n = at // (tiles_m * panel_n) * panel_n
        at -= first_n * tiles_m
        panel = gl.minimum(tiles_n - first_n, panel_n)
        tile_m = at // panel
        col0 = (first_n + at % panel) * COLS
        row0 = begin + tile_m * 256
        rows = gl.where(tile_m == tiles_m - 1, count - tile_m * 256, 256)
        message = gl.where(words == 0, e, gl.where(words == 1, row0, gl.where(words == 2, rows, col0)))
        boxes = (gl.minimum(rows, 256) + BOX - 1) // BOX
        has_rest = rows > 256
        if GATHER:
            ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
            ks = gl.arange(0, 64, gl.SliceLayout(0, ROWS))
            row = gl.arange(0, 256, gl.SliceLayout(1, ROWS))
            at_main = gl.load(row_index + row0 + gl.minimum(row, rows - 1)) // divisor * x_chunks
            row = gl.arange(256, 288, gl.SliceLayout(1, ROWS))
            at_rest = gl.load(row_index + row0 + gl.minimum(row, rows - 1)) // divisor * x_chunks
        for k in range(0, depth, 64):
            mbarrier.wait(empty.index(stage), phase)
            ready = full.index(stage)
            if k == 0:
                messages.index(stage).store(message)
            if GATHER:
                mbarrier.expect(ready, W_BYTES)
            else:
                for i in gl.static_range(256 // BOX):
                    mbarrier.expect(ready, W_BYTES + (i + 1) * BOX * 128, pred=(boxes == i + 1) & (rows <= 256))
                mbarrier.expect(ready, W_BYTES + 288 * 128, pred=has_rest)
            for half in gl.static_range(2):
                to = w_s.index(2 * stage + half)._reinterpret(w.dtype, w.block_type.shape, w.layout)
                if TRANSPOSE:
                    tma.async_copy_global_to_shared(w, [e, k, col0 + 64 * half], ready, to)
                elif GATED:
                    tma.async_copy_global_to_shared(w, [e, col0 // 8 + 4 * half, 0, 0, k], ready, to)
                else:
                    tma.async_copy_global_to_shared(w, [e, col0 + 64 * half, k], ready, to)
            if GATHER:
                inside = (k // 8 + ks // 8 < depth // 8)[None, :]  # all 8 elements of a copy or none
                main = x + ((at_main + k // 8).to(gl.int64) * 8)[:, None] + ks[None, :]
                async_copy.async_copy_global_to_shared(x_s.index(stage), main, mask=inside)
                if has_rest:
                    rest = x + ((at_rest + k // 8).to(gl.int64) * 8)[:, None] + ks[None, :]
                    async_copy.async_copy_global_to_shared(rest_s.index(stage), rest, mask=inside)
                async_copy.mbarrier_arrive(ready, increment_count=False)
            else:
                for i in gl.static_range(256 // BOX):
                    to_rows = x_s.index(stage).slice(i * BOX, BOX, 0)
                    tma.async_copy_global_to_shared(x_rows, [row0 + i * BOX, k], ready, to_rows, pred=i < boxes)
                tma.async_copy_global_to_shared(x_rest, [row0 + 256, k], ready, rest_s.index(stage), pred=has_rest)
            stage, phase = _next(stage, phase, STAGES)
    mbarrier.wait(empty.index(stage), phase)
    messages.index(stage).store(gl.full([4], -1, gl.int32, WORDS))
    mbarrier.arrive(full.index(stage), count=1)
    if GATHER:
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@jit
def _halves(x):
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute(0, 2, 1).split()


@jit
def _buffer(i: gl.constexpr, WHO: gl.constexpr, out, o_s, w_s, x_s, stage, GATED: gl.constexpr):
    """The i-th block of memory, [64 rows, columns], for what a warpgroup stores: its own, then the last stage's."""
    NUMBER: gl.constexpr = i // 2 if GATED else i  # of 8 KiB
    if NUMBER == 0:
        memory = o_s.index(WHO)
    elif NUMBER == 1:
        memory = w_s.index(2 * stage + WHO)
    else:
        memory = x_s.index(stage).slice(128 * WHO + 64 * (NUMBER - 2), 64, 0)
    if GATED:
        LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 32], out.dtype)
        memory = memory._reinterpret(out.dtype, [2, 64, 32], LAYOUT).index(i % 2)
    return memory


@jit
def _store(
    i: gl.constexpr, WHO: gl.constexpr, GATED: gl.constexpr, BUFFERS: gl.constexpr, block, out, part: gl.constexpr, row,
    end, col, o_s, w_s, x_s, stage, drained, drains,
):  # fmt: skip
    """The i-th store of a tile: `block [columns, rows]` to rows row.. of out, none at or past `end`."""
    if i >= BUFFERS:
        tma.store_wait(pendings=BUFFERS - 1)
    if i == (4 if GATED else 2) and i < BUFFERS:  # from here on in memory that the other warpgroup reads too
        mbarrier.wait(drained, drains)
    memory = _buffer(i % BUFFERS, WHO, out, o_s, w_s, x_s, stage, GATED)
    memory.slice(0, block.shape[1], 0).permute((1, 0)).store(block.to(out.dtype))
    fence_async_shared()
    whole = memory._reinterpret(out.dtype, out.block_type.shape, out.layout)
    TOP: gl.constexpr = 0x40000000
    if len(out.block_type.shape) == 5:
        tma.async_copy_shared_to_global(out, [TOP, end, TOP - end + row, part, col], whole)
    else:
        tma.async_copy_shared_to_global(out, [TOP, end, TOP - end + row, col], whole)


@jit
def _finish(
    i: gl.constexpr, WHO: gl.constexpr, GATED: gl.constexpr, BUFFERS: gl.constexpr, ACTIVATION: gl.constexpr, acc, row,
    out, preact, alpha, limit, end, col, o_s, w_s, x_s, stage, drained, drains,
):  # fmt: skip
    """Activates and stores `acc [64, rows]`, after i stores of the same tile."""
    SAVED: gl.constexpr = 0 if preact is None else 1
    at = (end, col, o_s, w_s, x_s, stage, drained, drains)
    if GATED:
        g, u = acc.reshape([4, 2, 8, acc.shape[1]]).permute(0, 2, 3, 1).split()
        g = g.reshape([32, acc.shape[1]])
        u = u.reshape([32, acc.shape[1]])
        if SAVED:
            _store(i, WHO, GATED, BUFFERS, g, preact, 0, row, *at)
            _store(i + 1, WHO, GATED, BUFFERS, u, preact, 1, row, *at)
        act, _, _ = activate_and_slopes(g, u, alpha, limit, ACTIVATION)
        _store(i + 2 * SAVED, WHO, GATED, BUFFERS, act, out, 0, row, *at)
    elif ACTIVATION == "none":
        _store(i, WHO, GATED, BUFFERS, acc, out, 0, row, *at)
    else:
        if SAVED:
            _store(i, WHO, GATED, BUFFERS, acc, preact, 0, row, *at)
        act, _, _ = activate_and_slopes(acc, 1.0, alpha, limit, ACTIVATION)
        _store(i + SAVED, WHO, GATED, BUFFERS, act, out, 0, row, *at)


@jit
def _scale_and_bias(
    WHO: gl.constexpr, GATED: gl.constexpr, acc, row, e, end, col0, bias, row_index, row_scale, width
):  # fmt: skip
    LAYOUT: gl.constexpr = acc.type.layout
    if row_scale is not None:
        at = gl.minimum(row + gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT)), end - 1)
        if row_index is not None:
            at = gl.load(row_index + at)
        acc = acc * gl.load(row_scale + at)[None, :]
    if bias is not None:
        m = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
        if GATED:
            col = col0 + 32 * WHO + m // 16 * 8 + m % 8
            at = e.to(gl.int64) * 2 * width + m // 8 % 2 * width + col
        else:
            col = col0 + 64 * WHO + m
            at = e.to(gl.int64) * width + col
        acc = acc + gl.load(bias + at, mask=col < width, other=0.0).to(gl.float32)[:, None]
    return acc


@jit
def _multiply(
    MAIN: gl.constexpr, REST: gl.constexpr, WHO: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr,
    TRANSPOSE: gl.constexpr, STAGES: gl.constexpr, stage, phase, drains, e, row0, rows, col0, out, preact, w_s, x_s,
    rest_s, o_s, full, empty, drained, bias, row_index, row_scale, alpha, limit, width, depth,
):  # fmt: skip
    """One tile of at most MAIN + REST rows: a warpgroup's 64 weight rows times all rows."""
    STORES: gl.constexpr = 1 if preact is None else 3 if GATED else 2  # of 64 rows
    BUFFERS: gl.constexpr = 4 if preact is None or not GATED else 8
    OWN: gl.constexpr = 4 if GATED else 2  # of these buffers
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, MAIN, 16])
    acc = gl.zeros([64, MAIN], gl.float32, MMA)
    if REST > 0:
        REST_MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST, 16])
        acc_rest = gl.zeros([64, REST], gl.float32, REST_MMA)
    for k in range((depth + 63) // 64):
        mbarrier.wait(full.index(stage), phase)
        if row_index is not None:
            fence_async_shared()
        w = w_s.index(2 * stage + WHO)
        if TRANSPOSE:
            w = w.permute((1, 0))
        x = x_s.index(stage).slice(0, MAIN, 0).permute((1, 0))
        acc = warpgroup_mma(w, x, acc, use_acc=k > 0, is_async=True)
        if REST > 0:
            acc_rest = warpgroup_mma(w, rest_s.index(stage).permute((1, 0)), acc_rest, use_acc=k > 0, is_async=True)
            acc, acc_rest = warpgroup_mma_wait(num_outstanding=2, deps=(acc, acc_rest))
        else:
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        mbarrier.arrive(empty.index(_before(stage, STAGES)), count=1, pred=k > 0)
        stage, phase = _next(stage, phase, STAGES)
    last = _before(stage, STAGES)
    if REST > 0:
        acc, acc_rest = warpgroup_mma_wait(num_outstanding=0, deps=(acc, acc_rest))
    else:
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))

    DRAIN: gl.constexpr = MAIN // 64 * STORES > OWN and BUFFERS > OWN
    if DRAIN:
        mbarrier.arrive(drained, count=1)
    end = row0 + rows
    add = (e, end, col0, bias, row_index, row_scale, width)
    col = col0 + (32 if GATED else 64) * WHO
    to = (out, preact, alpha, limit, end, col, o_s, w_s, x_s, last, drained, drains)
    acc = _scale_and_bias(WHO, GATED, acc, row0, *add)
    if MAIN == 64:
        _finish(0, WHO, GATED, BUFFERS, ACTIVATION, acc, row0, *to)
    elif MAIN == 128:
        a0, a1 = _halves(acc)
        _finish(0, WHO, GATED, BUFFERS, ACTIVATION, a0, row0, *to)
        _finish(STORES, WHO, GATED, BUFFERS, ACTIVATION, a1, row0 + 64, *to)
    else:
        low, high = _halves(acc)
        a0, a1 = _halves(low)
        a2, a3 = _halves(high)
        _finish(0, WHO, GATED, BUFFERS, ACTIVATION, a0, row0, *to)
        _finish(STORES, WHO, GATED, BUFFERS, ACTIVATION, a1, row0 + 64, *to)
        _finish(2 * STORES, WHO, GATED, BUFFERS, ACTIVATION, a2, row0 + 128, *to)
        _finish(3 * STORES, WHO, GATED, BUFFERS, ACTIVATION, a3, row0 + 192, *to)
        if REST > 0:
            acc_rest = _scale_and_bias(WHO, GATED, acc_rest, row0 + 256, *add)
            _finish(4 * STORES, WHO, GATED, BUFFERS, ACTIVATION, acc_rest, row0 + 256, *to)
    if DRAIN:
        drains ^= 1
    tma.store_wait(pendings=0)
    mbarrier.arrive(empty.index(last), count=1)
    return stage, phase, drains


@jit
def _consume(
    WHO: gl.constexpr, out, preact, w_s, x_s, rest_s, o_s, messages, full, empty, drained, bias, row_index, row_scale,
    alpha, limit, width, depth, ACTIVATION: gl.constexpr, GATED: gl.constexpr, TRANSPOSE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    WORDS: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    words = gl.arange(0, 4, WORDS)
    fixed = (
        out, preact, w_s, x_s, rest_s, o_s, full, empty, drained, bias, row_index, row_scale, alpha, limit, width, depth
    )  # fmt: skip
    stage = 0
    phase = 0
    drains = 0
    mbarrier.wait(full.index(0), 0)
    message = messages.index(0).load(WORDS)
    e = _word(message, words, 0)
    while e >= 0:
        row0 = _word(message, words, 1)
        rows = _word(message, words, 2)
        col0 = _word(message, words, 3)
        tile = (stage, phase, drains, e, row0, rows, col0)
        if rows > 256:
            stage, phase, drains = _multiply(256, 32, WHO, ACTIVATION, GATED, TRANSPOSE, STAGES, *tile, *fixed)
        elif rows > 128:
            stage, phase, drains = _multiply(256, 0, WHO, ACTIVATION, GATED, TRANSPOSE, STAGES, *tile, *fixed)
        elif rows > 64:
            stage, phase, drains = _multiply(128, 0, WHO, ACTIVATION, GATED, TRANSPOSE, STAGES, *tile, *fixed)
        else:
            stage, phase, drains = _multiply(64, 0, WHO, ACTIVATION, GATED, TRANSPOSE, STAGES, *tile, *fixed)
        mbarrier.wait(full.index(stage), phase)
        message = messages.index(stage).load(WORDS)
        e = _word(message, words, 0)


@jit(
    do_not_specialize=["divisor", "x_chunks", "L", "width", "depth", "panel_n"],
    do_not_specialize_on_alignment=["row_start", "row_end"],
)
def grouped_gemm_gluon_kernel(
    x,
    x_rows,  # descriptors of x: of the rows of a tile's boxes, and of its last 32; None when row_index finds the rows
    x_rest,
    w,
    bias,
    row_start,
    row_end,
    row_index,
    row_scale,
    out,  # a ragged descriptor
    preact,
    alpha,
    limit,
    divisor,
    x_chunks,
    L,
    width,
    depth,
    panel_n,
    L_BLOCK: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    TRANSPOSE: gl.constexpr,
    STAGES: gl.constexpr,
    PRODUCER_WARPS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
):
    DTYPE: gl.constexpr = x.dtype.element_ty
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], DTYPE)
    w_s = gl.allocate_shared_memory(DTYPE, [2 * STAGES, 64, 64], TILE)
    x_s = gl.allocate_shared_memory(DTYPE, [STAGES, 256, 64], TILE)
    rest_s = gl.allocate_shared_memory(DTYPE, [STAGES, 32, 64], TILE)
    o_s = gl.allocate_shared_memory(DTYPE, [2, 64, 64], TILE)
    messages = gl.allocate_shared_memory(gl.int32, [STAGES, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    drained = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1 if row_index is None else 1 + 32 * PRODUCER_WARPS)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(drained, count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (0, out, preact, w_s, x_s, rest_s, o_s, messages, full, empty, drained, bias, row_index,
                        row_scale, alpha, limit, width, depth, ACTIVATION, GATED, TRANSPOSE, STAGES)),
            (_consume, (1, out, preact, w_s, x_s, rest_s, o_s, messages, full, empty, drained, bias, row_index,
                        row_scale, alpha, limit, width, depth, ACTIVATION, GATED, TRANSPOSE, STAGES)),
            (_produce, (x, x_rows, x_rest, w, w_s, x_s, rest_s, messages, full, empty, row_start, row_end, row_index,
                        divisor, x_chunks, L, width, depth, panel_n, L_BLOCK, GATED, TRANSPOSE, STAGES,
                        PRODUCER_WARPS)),
        ],
        [4, PRODUCER_WARPS],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
