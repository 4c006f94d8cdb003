"""Which tile a program of `ops/_scaled_gluon.py` is at, and which stage of its ring: what producer and consumers find
out each for itself, by the same functions, so that they never disagree.

Imports only where `runs_gluon` in `ops/_scaled_configs.py` says so.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    wraps = stage + 1 == STAGES
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def find_tile(
    tile, tile_ends, row_start, row_end,
    BLOCK_M: gl.constexpr, TILES_N: gl.constexpr, GROUP_M: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """(expert, first row, its end, column tile): tiles go down groups of at most GROUP_M row tiles of one expert,
    the groups of an expert about equal, and then to the next columns."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([tile_ends.shape[0] // 32], [32], [WARPS], [0])
    ends = tile_ends.load(LAYOUT)
    passed = ends <= tile // TILES_N
    e = gl.sum(passed.to(gl.int32), 0)
    begin = gl.load(row_start + e)
    end = gl.load(row_end + e)
    within = tile - gl.max(gl.where(passed, ends, 0), 0) * TILES_N
    count = (end - begin + BLOCK_M - 1) // BLOCK_M
    groups = (count + GROUP_M - 1) // GROUP_M
    group = (count + groups - 1) // groups
    first = within // (group * TILES_N) * group
    size = gl.minimum(count - first, group)
    within -= first * TILES_N
    return e, begin + (first + within % size) * BLOCK_M, end, within // size


@gluon.jit
def rounds_of(num_tiles):
    """How many tiles this program has. Programs take turns from the first to the last and back: of the row tiles of an
    expert, which are neighbours, the last has fewer rows and is done sooner, and nobody should get only those."""
    programs = gl.num_programs(0)
    whole = num_tiles // programs
    return whole + (turn(whole) < num_tiles - whole * programs).to(gl.int32)


@gluon.jit
def turn(round_):
    return gl.where(round_ % 2 == 0, gl.program_id(0), gl.num_programs(0) - 1 - gl.program_id(0))


@gluon.jit
def count_tiles(tile_ends, row_start, row_end, L: gl.constexpr, L_BLOCK: gl.constexpr, BLOCK_M: gl.constexpr):
    """Writes the number of row tiles up to and with each expert into shared memory for `find_tile`; returns that of
    all."""
    SPREAD: gl.constexpr = gl.BlockedLayout([L_BLOCK // 32], [32], [gl.num_warps()], [0])
    experts = gl.arange(0, L_BLOCK, SPREAD)
    begins = gl.load(row_start + experts, mask=experts < L, other=0)
    ends = gl.load(row_end + experts, mask=experts < L, other=0)
    counts = (ends - begins + BLOCK_M - 1) // BLOCK_M
    tile_ends.store(gl.associative_scan(counts, 0, _add))
    return gl.sum(counts, 0)
