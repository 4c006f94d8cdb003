"""Block sizes of `ops/routed_mlp.py`, chosen on the host from dtype and shapes: they decide speed and never results,
except that sums over another block width round differently. Stands beside the path of a token.

Figures behind the choices: one H200, triton 3.6.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from epmoe.ops._configs import _has_roomy_sms, most_programs
from epmoe.ops._triton import INTERPRET, cdiv, next_power_of_2

MAX_TOKENS = 4  # from 8 on sorting them and grouped GEMMs are faster
UNIT = 64  # rows that the matrix unit multiplies at a time
STEP_BYTES = 512  # of each of those rows of weights in one step


@dataclasses.dataclass(frozen=True)
class RoutedMLPConfig:
    """One configuration; all but `piece`, `num_stages` and `programs` are powers of two.

    Args:
        columns: tokens, padded: columns of a dot for each piece or expert.
        split: pieces of GEMM1's reduction that share a dot, each `piece` wide; of w1 it takes 64 / split rows then.
        block_h: of a piece in one step.
        group: experts that share a dot of GEMM2; it takes 64 / group rows of each one's w2 then.
        block_i: of GEMM2's reduction in one step.
        route_rows: rows of the routing tile: one for each warp, so that no reduction leaves a warp.
        programs: of the grid, at most one per SM.
    """

    columns: int
    split: int
    piece: int
    block_h: int
    group: int
    block_i: int
    num_warps: int
    num_stages: int
    route_rows: int
    programs: int


@functools.lru_cache(maxsize=1024)
def routed_mlp_config(
    device: torch.device,
    itemsize: int,
    tokens: int,
    top_k: int,
    h: int,
    i: int,
    gated: bool,
    interpret: bool = INTERPRET,
) -> RoutedMLPConfig:
    """The configuration for `tokens` tokens of `top_k` experts each, whose weights are `[2i, h]` (`[i, h]` not gated)
    and `[h, i]`."""
    programs = most_programs(device, 1, max(h, i))
    padded, warps = next_power_of_2(tokens), 4
    # GEMM1's tiles are finer with more pieces: only where that spreads them more evenly
    parts, tiles = 2 if gated else 1, tokens * top_k

    def busiest(split: int) -> int:
        cols = UNIT // (split * parts)
        return cdiv(cdiv(i, cols) * tiles, programs) * cols

    split = min((2, 4) if gated else (4, 8), key=busiest)
    piece = cdiv(cdiv(h, split), 8) * 8  # rows of weights stay aligned
    # ieee dots of fp32 run on CUDA cores, from registers; the interpreter wants more than one step of small problems
    block = STEP_BYTES // itemsize if itemsize == 2 and not interpret else 32
    return RoutedMLPConfig(
        columns=max(4, padded),  # two pieces or experts are 8 then: fewer no matrix unit takes
        split=split,
        piece=piece,
        block_h=max(16, min(block, next_power_of_2(piece))),
        group=4 if tiles > 2 else 2,
        block_i=max(16, min(block, next_power_of_2(i))),
        num_warps=warps,
        num_stages=4 if _has_roomy_sms(device) else 3,  # 160 KiB, or 80
        route_rows=padded if interpret else max(padded, warps),
        programs=programs,
    )
