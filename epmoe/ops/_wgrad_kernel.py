"""The kernels of `ops/grouped_wgrad.py`: per expert, the sum of its rows' outer products, and of its rows.

What bounds them on an H200: R rows of an expert make R / BLOCK_K steps of the tensor cores for a tile, which then has
to leave. From 1024 rows on only the steps count; of 256 rows they are four, and rounding the tile and handing it over
takes half as long again.

Letters: L local experts, K experts per token, T rows; the weight is `[L, N, D]`: N columns of dy, D columns of x.
"""

from __future__ import annotations

from epmoe.ops._triton import cast_from_float32, dot_accumulate, jit, tl


@jit
def _rows_of_step(
    a,  # a pointer, or what `_segment_descriptor` in `ops/grouped_wgrad.py` makes, when TMA
    index,
    a_stride,
    row,
    end,
    col0,
    WIDTH: tl.constexpr,
    DIVISOR: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    TMA: tl.constexpr,
):
    """Rows row .. row + BLOCK_K of an operand, zeros from `end` on: what lies there may be NaN, and NaN · 0 is NaN."""
    if TMA:
        tile = a.load([1 << 30, end, (1 << 30) - end + row, col0]).reshape(BLOCK_K, BLOCK)
    else:
        rows = row + tl.arange(0, BLOCK_K)
        real = rows < end
        if index is not None:
            rows = tl.load(index + rows, mask=real, other=0) // DIVISOR
        cols = col0 + tl.arange(0, BLOCK)
        at = a + rows.to(tl.int64)[:, None] * a_stride + cols[None, :]
        if WIDTH % BLOCK == 0:
            tile = tl.load(at, mask=real[:, None], other=0.0)
        else:
            tile = tl.load(at, mask=real[:, None] & (cols < WIDTH)[None, :], other=0.0)
    return tile


@jit
def _halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of a tile of COLUMNS columns; for an accumulator a renaming of registers."""
    return tile.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1).split()


@jit
def _put(dw, part, e, n0, d0, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ADD: tl.constexpr, INTERPRETED: tl.constexpr):
    """Stores a tile of expert e through the descriptor `dw`, or adds it: L2 does that, and nobody else adds there."""
    at = [e, n0, d0]
    part = part.reshape(1, ROWS, COLUMNS)
    if not ADD:
        dw.store(at, cast_from_float32(part, dw.dtype, INTERPRETED))
    elif INTERPRETED:
        dw.store(at, dw.load(at) + part)
    else:
        dw.atomic_add(at, part)


@jit
def _store_tile(
    dw,  # a pointer, or a descriptor when TMA
    acc,
    e,
    n0,
    d0,
    N: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TMA: tl.constexpr,
    PARTS: tl.constexpr,
    ADD: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Stores or adds a finished tile; with TMA in PARTS parts that pass one after the other through one buffer."""
    COLUMNS: tl.constexpr = BLOCK_N // PARTS
    if TMA:
        if PARTS == 1:
            _put(dw, acc, e, n0, d0, BLOCK_M, COLUMNS, ADD, INTERPRETED)
        else:
            left, right = _halves(acc, BLOCK_M, BLOCK_N)
            if PARTS == 2:
                _put(dw, left, e, n0, d0, BLOCK_M, COLUMNS, ADD, INTERPRETED)
                _put(dw, right, e, n0, d0 + COLUMNS, BLOCK_M, COLUMNS, ADD, INTERPRETED)
            else:
                tl.static_assert(PARTS == 4)
                first, second = _halves(left, BLOCK_M, BLOCK_N // 2)
                third, fourth = _halves(right, BLOCK_M, BLOCK_N // 2)
                _put(dw, first, e, n0, d0, BLOCK_M, COLUMNS, ADD, INTERPRETED)
                _put(dw, second, e, n0, d0 + COLUMNS, BLOCK_M, COLUMNS, ADD, INTERPRETED)
                _put(dw, third, e, n0, d0 + 2 * COLUMNS, BLOCK_M, COLUMNS, ADD, INTERPRETED)
                _put(dw, fourth, e, n0, d0 + 3 * COLUMNS, BLOCK_M, COLUMNS, ADD, INTERPRETED)
    else:
        ns = n0 + tl.arange(0, BLOCK_M)
        ds = d0 + tl.arange(0, BLOCK_N)
        inside = (ns < N)[:, None] & (ds < D)[None, :]
        at = dw + tl.cast(e, tl.int64) * (N * D) + ns.to(tl.int64)[:, None] * D + ds[None, :]
        if ADD:
            acc += tl.load(at, mask=inside, other=0.0)
        tl.store(at, cast_from_float32(acc, dw.dtype.element_ty, INTERPRETED), mask=inside)


@jit(do_not_specialize_on_alignment=["row_start", "row_end"])
def grouped_wgrad_kernel(
    dy,
    x,
    row_start,
    row_end,
    dy_index,
    x_index,
    row_scale,
    scale_index,
    dw,
    dy_stride,
    x_stride,
    L: tl.constexpr,
    L_BLOCK: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    DY_DIVISOR: tl.constexpr,
    X_DIVISOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    DY_TMA: tl.constexpr,
    X_TMA: tl.constexpr,
    DW_TMA: tl.constexpr,
    PARTS: tl.constexpr,
    ADD: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """dw[e, n, d] in tiles of BLOCK_M n by BLOCK_N d, in steps of BLOCK_K rows.

    Each program walks the steps of all its tiles in one loop, so that a tile's first rows are on their way while the
    tile before leaves; an expert without rows takes one step of zeros. The tiles of an expert lie side by side:

        row_start = [0, 5, 5], row_end = [5, 5, 9], BLOCK_K = 4, two tiles an expert, one program
        step     0    1    2    3    4    5    6    7
        tile     0    0    1    1    2    3    4    5
        rows   0..3   4  0..3   4    -    -   5..8 5..8

    A tile has one owner and its rows come in order: the same inputs give the same bits.
    """
    TILES_M: tl.constexpr = (N + BLOCK_M - 1) // BLOCK_M
    TILES_N: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    TILES: tl.constexpr = TILES_M * TILES_N
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    experts = tl.arange(0, L_BLOCK)
    begins = tl.load(row_start + experts, mask=experts < L, other=0)
    ends = tl.load(row_end + experts, mask=experts < L, other=0)
    steps = tl.maximum((ends - begins + BLOCK_K - 1) // BLOCK_K, 1)
    # of the tiles below t, (t + programs - 1 - program) // programs are this program's
    below = (experts * TILES + programs - 1 - program) // programs
    own = (experts * TILES + TILES + programs - 1 - program) // programs - below
    total = tl.sum(tl.where(experts < L, own * steps, 0))

    tile = program - programs
    e = 0
    n0 = 0
    d0 = 0
    row = 0
    end = 0
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in tl.range(0, total):
        # The loads run steps ahead of the dot. What they need (this `if`, `row`) must not hang on what the end of a
        # tile needs (`last`), or Triton does not pipeline: hence two ways to count the same rows.
        if row >= end:
            tile += programs
            e = tile // TILES
            of_expert = tile % TILES
            first_m = of_expert // (GROUP_M * TILES_N) * GROUP_M
            group = tl.minimum(TILES_M - first_m, GROUP_M)
            within = of_expert - first_m * TILES_N
            n0 = (first_m + within % group) * BLOCK_M
            d0 = within // group * BLOCK_N
            row = tl.load(row_start + e)
            end = tl.load(row_end + e)
        last = end - row <= BLOCK_K
        g = _rows_of_step(dy, dy_index, dy_stride, row, end, n0, N, DY_DIVISOR, BLOCK_K, BLOCK_M, DY_TMA)
        h = _rows_of_step(x, x_index, x_stride, row, end, d0, D, X_DIVISOR, BLOCK_K, BLOCK_N, X_TMA)
        if row_scale is not None:
            position = row + tl.arange(0, BLOCK_K)
            real = position < end
            if scale_index is not None:
                position = tl.load(scale_index + position, mask=real, other=0)
            scale = tl.load(row_scale + position, mask=real, other=0.0)
            g = cast_from_float32(g.to(tl.float32) * scale[:, None], g.dtype, INTERPRETED)
        row += BLOCK_K
        acc = dot_accumulate(g.T, h, acc, INTERPRETED)
        if last:
            _store_tile(dw, acc, e, n0, d0, N, D, BLOCK_M, BLOCK_N, DW_TMA, PARTS, ADD, INTERPRETED)
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)


@jit(do_not_specialize_on_alignment=["row_start", "row_end"])
def grouped_bias_kernel(
    dy,
    row_start,
    row_end,
    dy_index,
    dbias,
    dy_stride,
    N: tl.constexpr,
    DY_DIVISOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """dbias[e, n]: one program sums the rows of one expert over BLOCK_M columns, BLOCK_K rows at a time."""
    TILES_M: tl.constexpr = (N + BLOCK_M - 1) // BLOCK_M
    e = tl.program_id(0) // TILES_M
    ns = tl.program_id(0) % TILES_M * BLOCK_M + tl.arange(0, BLOCK_M)
    begin = tl.load(row_start + e)
    end = tl.load(row_end + e)
    acc = tl.zeros((BLOCK_K, BLOCK_M), tl.float32)
    for step in tl.range(begin, end, BLOCK_K):
        rows = step + tl.arange(0, BLOCK_K)
        real = rows < end
        dy_rows = rows
        if dy_index is not None:
            dy_rows = tl.load(dy_index + rows, mask=real, other=0) // DY_DIVISOR
        at = dy + dy_rows.to(tl.int64)[:, None] * dy_stride + ns[None, :]
        acc += tl.load(at, mask=real[:, None] & (ns < N)[None, :], other=0.0).to(tl.float32)
    total = cast_from_float32(tl.sum(acc, axis=0), dbias.dtype.element_ty, INTERPRETED)
    tl.store(dbias + e.to(tl.int64) * N + ns, total, mask=ns < N)
