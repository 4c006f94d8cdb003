"""The Triton kernel of `ops/scaled_gemm.py`: grouped GEMM on fp8 or int8 operands with scales, for few rows and many.

Letters: L local experts, D reduction width, N weight rows (2I for a gated GEMM1).
"""

from __future__ import annotations

from epmoe.ops._dependent_launch import let_next_start, wait_for_previous
from epmoe.ops._triton import cast_from_float32, jit, tl
from epmoe.ops.activation import activate_and_slopes
from epmoe.ops.quantize import magnitude_bits, round_scaled, scale_of


@jit
def _dot(a, b, acc, INTERPRETED: tl.constexpr):
    """acc + a @ b, in fp32 or, of int8, in int32."""
    if INTERPRETED and a.dtype != tl.int8:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, out_dtype=acc.dtype)


@jit
def _scaled_dot(x, b, acc, x_scale, w_scale, SWAP_AB: tl.constexpr, VECTOR: tl.constexpr, INTERPRETED: tl.constexpr):
    """acc + (x @ bᵀ) · x_scale · w_scale, or its transpose when SWAP_AB. `w_scale` is one number, or one per weight row
    when VECTOR. What the tensor cores add up in few bits is promoted to fp32 here, every BLOCK_K terms."""
    if SWAP_AB:
        y = _dot(b, x.T, tl.zeros((b.shape[0], x.shape[0]), tl.float32), INTERPRETED)
        scale = (x_scale * w_scale)[None, :] if not VECTOR else w_scale[:, None] * x_scale[None, :]
    else:
        y = _dot(x, b.T, tl.zeros((x.shape[0], b.shape[0]), tl.float32), INTERPRETED)
        scale = (x_scale * w_scale)[:, None] if not VECTOR else x_scale[:, None] * w_scale[None, :]
    return acc + y * scale


@jit
def _finish(
    y, a_scale, w_scale, row_scale, bias, e, source, position, w_rows, N: tl.constexpr, PER_BLOCK: tl.constexpr
):
    """What stands between an accumulator and its activation: row and channel scales, router weight, bias."""
    if not PER_BLOCK:
        y = y * tl.load(a_scale + source)[:, None] * tl.load(w_scale + e.to(tl.int64) * N + w_rows)[None, :]
    if row_scale is not None:
        y *= tl.load(row_scale + position)[:, None]
    if bias is not None:
        y += tl.load(bias + e.to(tl.int64) * N + w_rows).to(tl.float32)[None, :]
    return y


@jit
def _store(
    y,
    out,
    out_scale,
    row,
    end,
    col,
    M: tl.constexpr,
    COLS: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
    OUT_TMA: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Writes block `y [M, COLS]` at (row, col) of out `[*, WIDTH]`, rows before `end` only; quantized where there is a
    scale."""
    rows = row + tl.arange(0, M)
    cols = col + tl.arange(0, COLS)
    if out_scale is not None:
        if WIDTH % COLS != 0:
            y = tl.where((cols < WIDTH)[None, :], y, 0.0)
        scale, inverse = scale_of(tl.max(magnitude_bits(y), axis=1), 448.0)
        at = out_scale + rows.to(tl.int64) * ((WIDTH + COLS - 1) // COLS) + col // COLS
        tl.store(at, scale, mask=rows < tl.where(col < WIDTH, end, 0))
        z = round_scaled(y, inverse[:, None], OUT_DTYPE, INTERPRETED)
    else:
        z = cast_from_float32(y, OUT_DTYPE, INTERPRETED)
    if OUT_TMA:  # `ragged_rows` in `_scaled_configs.py`: clipped at `end`
        out.store([1073741824, end, 1073741824 - end + row, col], z.reshape(1, 1, M, COLS))
    else:
        inside = (rows < end)[:, None] & (cols < WIDTH)[None, :]
        tl.store(out + rows.to(tl.int64)[:, None] * WIDTH + cols[None, :], z, mask=inside)


@jit(do_not_specialize_on_alignment=["row_start", "row_end"])
def scaled_gemm_kernel(
    a,  # a pointer, or a tensor descriptor when A_TMA
    a_scale,
    w,  # a pointer, or a tensor descriptor when W_TMA
    w_scale,
    bias,
    row_start,
    row_end,
    row_index,
    row_scale,
    out,  # a pointer, or a tensor descriptor when OUT_TMA
    out_scale,
    alpha,
    limit,
    a_stride,
    a_scale_stride,
    w_stride_expert,
    w_stride_row,
    L: tl.constexpr,
    L_BLOCK: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    DIVISOR: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    SCALE_N: tl.constexpr,  # weight rows of a block of scales, which 128 divides or is divided by; read if PER_BLOCK
    SCALE_K: tl.constexpr,  # and its columns, likewise a multiple of BLOCK_K
    INTEGER: tl.constexpr,  # int8 operands, summed in int32
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    OWN_GROUPS: tl.constexpr,
    SPLIT: tl.constexpr,
    UNROLL: tl.constexpr,
    SWAP_AB: tl.constexpr,
    FLATTEN: tl.constexpr,
    A_TMA: tl.constexpr,
    W_TMA: tl.constexpr,
    OUT_TMA: tl.constexpr,
    DEPENDENT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Programs walk the tiles of all experts, counted from the segments on the device, GROUP_M row tiles together: of
    one expert if OWN_GROUPS, since those of two would need the weights of both at once.

    A tile takes BLOCK_N weight rows: when GATED half of them gates and half the up projections of the same columns. It
    is multiplied by one dot, or when SPLIT by two of half the rows each, `lo` and `hi`. With scales per block each dot
    takes 128 weight rows, and of D no more than a block has, at most 128: rows and columns that have one weight scale,
    where blocks have 128 rows or more. Of fewer each row finds its own, and where the up projections begin inside a
    scale block (I % 128 != 0) theirs do.
    """
    PARTS: tl.constexpr = 2 if GATED else 1
    WIDTH: tl.constexpr = N // PARTS  # columns of out
    COLS: tl.constexpr = BLOCK_N // PARTS  # of them in a tile
    TILES_N: tl.constexpr = (WIDTH + COLS - 1) // COLS
    HALVES: tl.constexpr = SPLIT or GATED or BLOCK_N > 128  # whether the epilogue has two blocks of columns
    HALF: tl.constexpr = BLOCK_N // 2 if HALVES else BLOCK_N
    DOT_N: tl.constexpr = HALF if SPLIT else BLOCK_N
    STEPS: tl.constexpr = (D + BLOCK_K - 1) // BLOCK_K
    EVEN: tl.constexpr = D % (BLOCK_K * UNROLL) == 0
    SCALES_N: tl.constexpr = (N + SCALE_N - 1) // SCALE_N
    SCALES_K: tl.constexpr = (D + SCALE_K - 1) // SCALE_K
    VECTOR: tl.constexpr = SCALE_N < 128  # whether rows of a dot differ in scale
    VECTOR_HI: tl.constexpr = VECTOR or (GATED and WIDTH % 128 != 0)  # and those of `hi`
    X_STEPS: tl.constexpr = 128 // BLOCK_K  # steps with one scale of a row
    W_STEPS: tl.constexpr = SCALE_K // BLOCK_K  # and of a weight

    wait_for_previous(DEPENDENT)
    let_next_start(DEPENDENT)
    experts = tl.arange(0, L_BLOCK)
    begins = tl.load(row_start + experts, mask=experts < L, other=0)
    ends = tl.load(row_end + experts, mask=experts < L, other=0)
    tiles = (ends - begins + BLOCK_M - 1) // BLOCK_M
    tile_ends = tl.cumsum(tiles)
    tiles_m = tl.sum(tiles)

    for tile in tl.range(tl.program_id(0), tiles_m * TILES_N, tl.num_programs(0), flatten=FLATTEN):
        if OWN_GROUPS:
            passed = tile_ends <= tile // TILES_N
            e = tl.sum(passed.to(tl.int32))
            begin = tl.load(row_start + e)
            end = tl.load(row_end + e)
            of_expert = tile - tl.max(tl.where(passed, tile_ends, 0)) * TILES_N
            first_m = of_expert // (GROUP_M * TILES_N) * GROUP_M
            group = tl.minimum((end - begin + BLOCK_M - 1) // BLOCK_M - first_m, GROUP_M)
            within = of_expert - first_m * TILES_N
            row = begin + (first_m + within % group) * BLOCK_M
        else:
            first_m = tile // (GROUP_M * TILES_N) * GROUP_M
            group = tl.minimum(tiles_m - first_m, GROUP_M)
            within = tile - first_m * TILES_N
            tile_m = first_m + within % group
            passed = tile_ends <= tile_m
            e = tl.sum(passed.to(tl.int32))
            end = tl.load(row_end + e)
            row = tl.load(row_start + e) + (tile_m - tl.max(tl.where(passed, tile_ends, 0))) * BLOCK_M
        col0 = within // group * COLS
        safe_rows = tl.minimum(row + tl.arange(0, BLOCK_M), end - 1)
        source = safe_rows
        if row_index is not None:
            source = tl.load(row_index + safe_rows) // DIVISOR
        source = source.to(tl.int64)

        ks = tl.arange(0, BLOCK_K)
        if not A_TMA:
            a_tile = a + source[:, None] * a_stride + ks[None, :]
        # weight rows of `lo` and `hi`, or of the only block
        cols = col0 + tl.arange(0, HALF)
        if WIDTH % COLS == 0:  # what a minimum would keep from being read in pairs
            rows_lo = cols
            rows_hi = cols + (WIDTH if GATED else HALF)
        else:
            rows_lo = tl.minimum(cols, WIDTH - 1)
            rows_hi = rows_lo + WIDTH if GATED else tl.minimum(cols + HALF, WIDTH - 1)
        if not W_TMA:
            w_expert = w + e.to(tl.int64) * w_stride_expert
            if SPLIT or not HALVES:
                w_lo = w_expert + rows_lo.to(tl.int64)[:, None] * w_stride_row + ks[None, :]
                w_hi = w_expert + rows_hi.to(tl.int64)[:, None] * w_stride_row + ks[None, :]
            else:
                spread = tl.arange(0, BLOCK_N)
                w_rows = spread // COLS * WIDTH + tl.minimum(col0 + spread % COLS, WIDTH - 1)
                w_lo = w_expert + w_rows.to(tl.int64)[:, None] * w_stride_row + ks[None, :]

        if PER_BLOCK:
            x_scale_at = a_scale + source * a_scale_stride
            expert_scales = w_scale + e.to(tl.int64) * (SCALES_N * SCALES_K)
            if VECTOR:
                lo_scale_at = expert_scales + (rows_lo // SCALE_N).to(tl.int64) * SCALES_K
                hi_scale_at = expert_scales + (rows_hi // SCALE_N).to(tl.int64) * SCALES_K
            else:
                lo_scale_at = expert_scales + col0 // SCALE_N * SCALES_K
                if VECTOR_HI:
                    hi_scale_at = expert_scales + rows_hi // SCALE_N * SCALES_K
                elif SCALE_N > 128:
                    row0_hi = col0 + WIDTH if GATED else tl.minimum(col0 + HALF, N - 1)
                    hi_scale_at = expert_scales + row0_hi // SCALE_N * SCALES_K
                elif GATED:
                    hi_scale_at = lo_scale_at + WIDTH // 128 * SCALES_K
                else:
                    hi_scale_at = expert_scales + tl.minimum(col0 // 128 + 1, SCALES_N - 1) * SCALES_K
            # each step's scales are loaded a step ahead: loads that feed no dot are not pipelined
            x_scale = tl.load(x_scale_at)
            lo_scale = tl.load(lo_scale_at)
            if SPLIT:
                hi_scale = tl.load(hi_scale_at)

        if SWAP_AB:
            lo = tl.zeros((DOT_N, BLOCK_M), tl.int32 if INTEGER else tl.float32)
        else:
            lo = tl.zeros((BLOCK_M, DOT_N), tl.int32 if INTEGER else tl.float32)
        if SPLIT:
            hi = lo
        for first in tl.range(0, STEPS, UNROLL):
            for part in tl.static_range(UNROLL):
                step = first + part
                k = step * BLOCK_K
                if A_TMA:
                    x = a.load([row, k])
                elif EVEN:
                    x = tl.load(a_tile + k)
                else:
                    x = tl.load(a_tile + k, mask=(k + ks < D)[None, :], other=0.0)
                if W_TMA:
                    if SPLIT:
                        b = w.load([e * PARTS, col0, k]).reshape(DOT_N, BLOCK_K)
                        c = w.load([e * PARTS + PARTS - 1, col0 if GATED else col0 + HALF, k]).reshape(DOT_N, BLOCK_K)
                    else:
                        b = w.load([e * PARTS, col0, k]).reshape(DOT_N, BLOCK_K)
                elif EVEN:
                    b = tl.load(w_lo + k)
                    if SPLIT:
                        c = tl.load(w_hi + k)
                else:
                    b = tl.load(w_lo + k, mask=(k + ks < D)[None, :], other=0.0)
                    if SPLIT:
                        c = tl.load(w_hi + k, mask=(k + ks < D)[None, :], other=0.0)
                if PER_BLOCK:
                    lo = _scaled_dot(x, b, lo, x_scale, lo_scale, SWAP_AB, VECTOR, INTERPRETED)
                    if SPLIT:
                        hi = _scaled_dot(x, c, hi, x_scale, hi_scale, SWAP_AB, VECTOR_HI, INTERPRETED)
                    ahead = tl.minimum(step + 1, STEPS - 1)
                    ahead_w = ahead if W_STEPS == 1 else ahead // W_STEPS
                    x_scale = tl.load(x_scale_at + (ahead if X_STEPS == 1 else ahead // X_STEPS))
                    lo_scale = tl.load(lo_scale_at + ahead_w)
                    if SPLIT:
                        hi_scale = tl.load(hi_scale_at + ahead_w)
                elif SWAP_AB:
                    lo = _dot(b, x.T, lo, INTERPRETED)
                    if SPLIT:
                        hi = _dot(c, x.T, hi, INTERPRETED)
                else:
                    lo = _dot(x, b.T, lo, INTERPRETED)
                    if SPLIT:
                        hi = _dot(x, c.T, hi, INTERPRETED)

        if INTEGER:
            lo = lo.to(tl.float32)
            if SPLIT:
                hi = hi.to(tl.float32)
        if SWAP_AB:
            lo = lo.T
            if SPLIT:
                hi = hi.T
        if HALVES and not SPLIT:
            lo, hi = lo.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1).split()
        position = safe_rows
        if row_scale is not None:
            if row_index is not None:
                position = tl.load(row_index + safe_rows)
        at = source * a_scale_stride
        lo = _finish(lo, a_scale, w_scale, row_scale, bias, e, at, position, rows_lo, N, PER_BLOCK)
        if HALVES:
            hi = _finish(hi, a_scale, w_scale, row_scale, bias, e, at, position, rows_hi, N, PER_BLOCK)
        if GATED:
            lo, _, _ = activate_and_slopes(lo, hi, alpha, limit, ACTIVATION)
        elif ACTIVATION != "none":
            lo, _, _ = activate_and_slopes(lo, 1.0, alpha, limit, ACTIVATION)
            if HALVES:
                hi, _, _ = activate_and_slopes(hi, 1.0, alpha, limit, ACTIVATION)
        _store(lo, out, out_scale, row, end, col0, BLOCK_M, HALF, WIDTH, OUT_DTYPE, OUT_TMA, INTERPRETED)
        if HALVES and not GATED:
            _store(hi, out, out_scale, row, end, col0 + HALF, BLOCK_M, HALF, WIDTH, OUT_DTYPE, OUT_TMA, INTERPRETED)
