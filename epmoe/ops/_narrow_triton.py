"""The Triton kernel of `ops/narrow_gemm.py`: grouped GEMM that reads narrow weights and widens them in registers, for
few rows and for many. How the numbers lie: `ops/narrow_formats.py`.

Weights are the M side of the dot and come from registers, where they were widened; tokens are its N side and come from
shared memory. So no weight is written anywhere in its wide form, and a tile is widened once for all of its tokens.

Letters: L local experts, N weight rows of an expert (2I for a gated GEMM1), D the reduction width, S groups along D.
"""

from __future__ import annotations

from epmoe.ops._dependent_launch import let_next_start, wait_for_previous
from epmoe.ops._gemm_few_rows import _locate
from epmoe.ops._narrow_widen import halves, quarters, whole
from epmoe.ops._triton import cast_from_float32, dot_accumulate, jit, tl
from epmoe.ops.activation import activate_and_slopes


@jit
def _as_fp32(v):
    """Scales or zero points as fp32; bytes are powers of two, 255 is NaN."""
    if v.dtype == tl.uint8:
        byte = v.to(tl.int32)  # 0 is half of the smallest normal number
        wide = (tl.maximum(byte << 23, 0x00400000) + ((byte + 1) >> 8)).to(tl.float32, bitcast=True)
    else:
        wide = v.to(tl.float32)
    return wide


@jit
def _read_groups(at, k, N: tl.constexpr, S: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr, ALL: tl.constexpr):
    """What the groups of the run of columns from k on have at `at[row] + group · N`, as it lies: `[rows]`, or `[rows,
    RUN / GROUP]` where they are several.

    Past the last group it is the last one's where ALL runs of weights end with it, or it can't be inf, else 0: weights
    and tokens are 0 there. A mask later, between scales and weights, would make the compiler bring these to the tensor
    cores by way of shared memory.
    """
    LAST: tl.constexpr = ALL or at.dtype.element_ty == tl.float8e4nv
    if GROUP == 0:
        v = tl.load(at)
    elif GROUP >= RUN:
        g = k // GROUP
        if LAST:
            v = tl.load(at + tl.minimum(g, S - 1) * N)
        else:
            v = tl.load(at + g * N, mask=tl.arange(0, at.shape[0]) < (S - g) * at.shape[0], other=0)
    else:
        g = k // GROUP + tl.arange(0, RUN // GROUP)
        if LAST:
            v = tl.load(at[:, None] + (tl.minimum(g, S - 1) * N)[None, :])
        else:
            v = tl.load(at[:, None] + (g * N)[None, :], mask=(g < S)[None, :], other=0)
    return v


@jit
def _along_run(v, GROUP: tl.constexpr, RUN: tl.constexpr):
    """What `_read_groups` read as fp32 `[rows, 1]`, or `[rows, RUN]` where groups are several."""
    v = _as_fp32(v)
    if GROUP == 0 or GROUP >= RUN:
        v = v[:, None]
    else:
        v = v[:, :, None].broadcast_to(v.shape[0], RUN // GROUP, GROUP).reshape(v.shape[0], RUN)
    return v


@jit
def _less_zero(w, z, GROUP: tl.constexpr, RUN: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr,
               INTERPRETED: tl.constexpr):  # fmt: skip
    """The run `w` less the zero points z that `_read_groups` read for it (None: 0) and, of 4-bit integers, less what
    makes codes of them: the 8 that they are stored with and the 128 or 1024 of `halves`. Exact: all are integers below
    2**8 (fp16: 2**11)."""
    LIFT: tl.constexpr = 0.0 if INTERPRETED else (128.0 if DTYPE == tl.bfloat16 else 1024.0)
    OFFSET: tl.constexpr = LIFT + 8.0 if KIND == "int4" else 0.0
    if z is not None:
        z = _along_run(z, GROUP, RUN) + OFFSET
        w = w - (z if INTERPRETED else z.to(DTYPE))
    elif OFFSET != 0.0:
        w = w - (OFFSET if INTERPRETED else tl.full((1, 1), OFFSET, DTYPE))
    return w


@jit
def _times(w, s, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """w · s rounded to bf16, s rounded to it first; interpreted: in fp32, with the same roundings."""
    if INTERPRETED:
        w = _round_to_bf16(w * _round_to_bf16(s))
    else:
        w = w * s.to(DTYPE)
    return w


@jit
def _round_to_bf16(x):
    """fp32 as the nearest number that bf16 has, in fp32: the interpreter's own cast loses subnormal numbers."""
    bits = x.to(tl.int32, bitcast=True)
    even = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return tl.where(x == x, even, x)


@jit
def _weights(w, part, col, at, ROW: tl.constexpr, BLOCK_W: tl.constexpr, COUNT: tl.constexpr, TMA: tl.constexpr,
             WITHIN: tl.constexpr):  # fmt: skip
    """`[BLOCK_W, COUNT]` bytes or words of weight rows from the one at `at` on, 0 past the end of a row, which lies in
    the tile unless WITHIN. `w`: a descriptor, or pointers to the rows."""
    if TMA:
        p = w.load([part, col, at]).reshape(BLOCK_W, COUNT)
    else:
        entries = at + tl.arange(0, COUNT)
        if WITHIN:
            p = tl.load(w[:, None] + entries[None, :])
        else:
            p = tl.load(w[:, None] + entries[None, :], mask=(entries < ROW)[None, :], other=0)
    return p


@jit
def _sixes(w, part, col, span, ROW: tl.constexpr, BLOCK_W: tl.constexpr, TMA: tl.constexpr, KIND: tl.constexpr,
           DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):  # fmt: skip
    """The four quarters `[BLOCK_W, 32]`, widened, of the span of 6-bit numbers that begins with column `span`."""
    at = span // 128 * 96
    a = _weights(w, part, col, at, ROW, BLOCK_W, 32, TMA, True)
    b = _weights(w, part, col, at + 32, ROW, BLOCK_W, 32, TMA, True)
    c = _weights(w, part, col, at + 64, ROW, BLOCK_W, 32, TMA, True)
    return quarters(a, b, c, KIND, DTYPE, INTERPRETED)


@jit
def _span(w, part, col, k, ROW: tl.constexpr, BLOCK_W: tl.constexpr, TMA: tl.constexpr, KIND: tl.constexpr,
          EVEN: tl.constexpr, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):  # fmt: skip
    """The 128 numbers `[BLOCK_W, 128]` from column k on, widened."""
    if KIND == "int4" or KIND == "fp4":
        p = _weights(w, part, col, k // 8, ROW // 4, BLOCK_W, 16, TMA, True)
        both = halves(p, KIND, DTYPE, INTERPRETED)
    else:
        if KIND == "int8":
            lo = whole(_weights(w, part, col, k, ROW, BLOCK_W, 64, TMA, EVEN), DTYPE, INTERPRETED)
            hi = whole(_weights(w, part, col, k + 64, ROW, BLOCK_W, 64, TMA, EVEN), DTYPE, INTERPRETED)
        else:
            q0, q1, q2, q3 = _sixes(w, part, col, k, ROW, BLOCK_W, TMA, KIND, DTYPE, INTERPRETED)
            lo = tl.join(q0, q1).permute(0, 2, 1).reshape(BLOCK_W, 64)
            hi = tl.join(q2, q3).permute(0, 2, 1).reshape(BLOCK_W, 64)
        both = tl.join(lo, hi).permute(0, 2, 1).reshape(BLOCK_W, 128)
    return both


@jit
def _halved(v):
    """The first and the second half of v's columns."""
    return v.reshape(v.shape[0], 2, v.shape[1] // 2).permute(0, 2, 1).split()


@jit
def _run_of(v, i: tl.constexpr, COUNT: tl.constexpr):
    """The i-th of COUNT (2, 4 or 8) equal runs of v's columns."""
    for level in tl.static_range(3):
        if COUNT >> level >= 2:
            first, second = _halved(v)
            v = first if i % (COUNT >> level) < COUNT >> level + 1 else second
    return v


@jit
def _rows(a_tile, k, is_row, D: tl.constexpr, RUN: tl.constexpr, EVEN: tl.constexpr):
    """Columns k .. k + RUN of the rows at `a_tile`; 0 past D and where there is no row."""
    ks = k + tl.arange(0, RUN)
    mask = is_row[:, None]
    if not EVEN:
        mask = mask & (ks < D)[None, :]
    return tl.load(a_tile[:, None] + ks[None, :], mask=mask, other=0.0)


@jit(do_not_specialize_on_alignment=["row_start", "row_end"])
def narrow_gemm_kernel(
    a,
    w,  # a pointer, or a tensor descriptor when TMA; to words of four bytes where numbers have 4 bits
    scale,
    zero,
    outer,
    bias,
    row_start,
    row_end,
    row_index,
    row_scale,
    out,
    alpha,
    limit,
    a_stride,
    L: tl.constexpr,
    L_BLOCK: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    ROW: tl.constexpr,  # bytes of a weight row
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    S: tl.constexpr,
    DIVISOR: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    RUN: tl.constexpr,
    ON_TILE: tl.constexpr,
    TMA: tl.constexpr,
    DEPENDENT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Programs walk work items, BLOCK_W weight rows of one expert × up to BLOCK_T of its rows, as in
    `ops/_gemm_few_rows.py`. A step takes 128 columns.

    Where ON_TILE, scales multiply the widened weights, which rounds the product to the rows' dtype: not for e2m1, whose
    scales leave it exact. Else they multiply, in fp32, the sums over a group: runs of a span have dots of their own
    then, of at most a group's columns. A scale for whole rows waits for the end. With few rows a step is one dot, which
    leaves more programs room on an SM; with many it is one for numbers of 4 bits and else a chain of two or four.
    """
    PARTS: tl.constexpr = 2 if GATED else 1
    COLS: tl.constexpr = BLOCK_W // PARTS
    WIDTH: tl.constexpr = N // PARTS  # columns of the result
    TILES_N: tl.constexpr = (WIDTH + COLS - 1) // COLS
    EVEN: tl.constexpr = D % 128 == 0
    ALL: tl.constexpr = EVEN or GROUP >= 128
    DTYPE: tl.constexpr = out.dtype.element_ty
    SIXES: tl.constexpr = KIND == "e2m3" or KIND == "e3m2"
    WORDS: tl.constexpr = KIND == "int4" or KIND == "fp4"
    FEW: tl.constexpr = BLOCK_T <= 64
    SHARED: tl.constexpr = GROUP >= 128 or GROUP == 0  # both halves of a span have the same scale
    # a span has one dot
    JOINED: tl.constexpr = FEW and (ON_TILE or SHARED) or WORDS and (ON_TILE or GROUP == 0)
    AHEAD: tl.constexpr = GROUP > 0 and not (ON_TILE and (SHARED or not FEW))

    experts = tl.arange(0, L_BLOCK)
    wait_for_previous(DEPENDENT)
    let_next_start(DEPENDENT)
    begins = tl.load(row_start + experts, mask=experts < L, other=0)
    counts = tl.load(row_end + experts, mask=experts < L, other=0) - begins
    item_ends = tl.cumsum((counts + BLOCK_T - 1) // BLOCK_T) * TILES_N

    for item in tl.range(tl.program_id(0), tl.max(item_ends), tl.num_programs(0)):
        e, begin, count, within = _locate(item, item_ends, begins, counts, experts)
        row_tiles = (count + BLOCK_T - 1) // BLOCK_T
        row0 = within % row_tiles * BLOCK_T
        col0 = within // row_tiles * COLS

        spread_t = tl.arange(0, BLOCK_T)
        is_row = row0 + spread_t < count
        rows = begin + row0 + spread_t
        safe_rows = begin + tl.minimum(row0 + spread_t, count - 1)
        position = safe_rows
        if row_index is not None:
            position = tl.load(row_index + safe_rows)
        source = position // DIVISOR

        spread = tl.arange(0, BLOCK_W)
        w_rows = spread // COLS * WIDTH + tl.minimum(col0 + spread % COLS, WIDTH - 1)
        a_tile = a + source.to(tl.int64) * a_stride
        w_tile = w
        if not TMA:
            w_tile = w + (e.to(tl.int64) * N + w_rows) * (ROW // 4 if WORDS else ROW)
        scale_at = scale + (e.to(tl.int64) * (S * N) + w_rows)
        zero_at = None
        if zero is not None:
            zero_at = zero + (e.to(tl.int64) * (S * N) + w_rows)

        acc = tl.zeros((BLOCK_W, BLOCK_T), tl.float32)
        # 1, which the compiler does not know: a chain of dots it would cut into short ones that wait for each other.
        unit = tl.minimum(count, 1).to(tl.float32)
        if JOINED:
            # Loads that feed no dot as they come are not pipelined: scales of sums are read a step ahead.
            s = _read_groups(scale_at, 0, N, S, GROUP, 128, ALL)
            for k in tl.range(0, D, 128):
                if not AHEAD:
                    s = _read_groups(scale_at, k, N, S, GROUP, 128, ALL)
                both = _span(w_tile, e * PARTS, col0, k, ROW, BLOCK_W, TMA, KIND, EVEN, DTYPE, INTERPRETED)
                z = None if zero_at is None else _read_groups(zero_at, k, N, S, GROUP, 128, ALL)
                both = _less_zero(both, z, GROUP, 128, KIND, DTYPE, INTERPRETED)
                x = _rows(a_tile, k, is_row, D, 128, EVEN)
                if ON_TILE:
                    both = _times(both, _along_run(s, GROUP, 128), DTYPE, INTERPRETED)
                if not FEW:
                    acc = dot_accumulate(both, x.T, acc, INTERPRETED)
                elif ON_TILE or GROUP == 0:
                    acc += dot_accumulate(both, x.T, tl.zeros_like(acc), INTERPRETED) * unit
                else:
                    sums = dot_accumulate(both, x.T, tl.zeros_like(acc), INTERPRETED)
                    acc += sums * _along_run(s, GROUP, 128)
                if AHEAD:
                    s = _read_groups(scale_at, k + 128, N, S, GROUP, 128, ALL)
        else:
            for span in tl.range(0, D, 128):
                if SIXES:
                    q0, q1, q2, q3 = _sixes(w_tile, e * PARTS, col0, span, ROW, BLOCK_W, TMA, KIND, DTYPE, INTERPRETED)
                elif WORDS:
                    both = _span(w_tile, e * PARTS, col0, span, ROW, BLOCK_W, TMA, KIND, EVEN, DTYPE, INTERPRETED)
                for run in tl.static_range(128 // RUN):
                    k = span + run * RUN
                    if SIXES:
                        part = (q0 if run == 0 else q1) if run < 2 else (q2 if run == 2 else q3)
                    elif WORDS:
                        part = _run_of(both, run, 128 // RUN)
                    else:
                        p = _weights(w_tile, e * PARTS, col0, k, ROW, BLOCK_W, RUN, TMA, EVEN)
                        part = whole(p, DTYPE, INTERPRETED)
                    z = None if zero_at is None else _read_groups(zero_at, k, N, S, GROUP, RUN, ALL)
                    part = _less_zero(part, z, GROUP, RUN, KIND, DTYPE, INTERPRETED)
                    x = _rows(a_tile, k, is_row, D, RUN, EVEN)
                    if GROUP == 0:
                        acc = dot_accumulate(part, x.T, acc, INTERPRETED)
                    else:
                        s = _along_run(_read_groups(scale_at, k, N, S, GROUP, RUN, ALL), GROUP, RUN)
                        if ON_TILE:
                            acc = dot_accumulate(_times(part, s, DTYPE, INTERPRETED), x.T, acc, INTERPRETED)
                        else:
                            acc += dot_accumulate(part, x.T, tl.zeros_like(acc), INTERPRETED) * s

        if GROUP == 0:
            acc *= tl.load(scale_at).to(tl.float32)[:, None]
        if outer is not None:
            acc *= tl.load(outer + e.to(tl.int64) * N + w_rows)[:, None]
        if row_scale is not None:
            acc *= tl.load(row_scale + position)[None, :]
        if bias is not None:
            acc += tl.load(bias + e.to(tl.int64) * N + w_rows).to(tl.float32)[:, None]
        if GATED:
            g, u = acc.reshape(2, COLS, BLOCK_T).permute(1, 2, 0).split()
            acc, _, _ = activate_and_slopes(g, u, alpha, limit, ACTIVATION)
        elif ACTIVATION != "none":
            acc, _, _ = activate_and_slopes(acc, 1.0, alpha, limit, ACTIVATION)
        cols = col0 + tl.arange(0, COLS)
        inside = is_row[None, :] & (cols < WIDTH)[:, None]
        to = out + rows.to(tl.int64)[None, :] * WIDTH + cols[:, None]
        tl.store(to, cast_from_float32(acc, DTYPE, INTERPRETED), mask=inside)
