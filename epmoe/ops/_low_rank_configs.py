"""Block sizes of `ops/low_rank.py`: they decide speed and never results. Stands beside the path of a token."""

from __future__ import annotations

import functools
from typing import NamedTuple

from epmoe.ops._triton import INTERPRET, next_power_of_2


class LowRankConfig(NamedTuple):
    """Tiles of `block_m` rows by `block_n` columns, in steps of `block_r` of the rank; all powers of two, >= 16."""

    block_m: int
    block_n: int
    block_r: int
    num_warps: int
    programs_per_sm: int


@functools.lru_cache(maxsize=1024)
def low_rank_config(rows_per_segment: int, rank: int, gated: bool, interpret: bool = INTERPRET) -> LowRankConfig:
    """The configuration of an update of rank `rank` where a segment should expect `rows_per_segment` rows.

    The pass is bound by memory: what counts is that few rows do not occupy a large tile. A gated tile has twice
    `block_n` columns, gates and up projections.
    """
    block_r = min(64, max(16, next_power_of_2(rank)))
    if interpret:
        return LowRankConfig(32, 64, block_r, num_warps=4, programs_per_sm=1)
    block_m = 16 if rows_per_segment <= 16 else 32 if rows_per_segment <= 64 else 64
    return LowRankConfig(block_m, 64 if gated else 128, block_r, num_warps=4, programs_per_sm=8)
