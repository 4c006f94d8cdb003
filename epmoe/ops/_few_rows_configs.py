"""Block sizes of `ops/_gemm_few_rows.py` by expected rows and shapes: they decide speed and never results, except that
a split reduction adds its parts in another order than an unsplit one. Stands beside the path of a token.

Figures behind the choices: one H200, triton 3.6.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import torch

from epmoe.ops._configs import (
    _has_gluon,
    _has_roomy_sms,
    _has_tma,
    _num_sms,
    expected_rows,
    most_programs,
    most_row_tiles,
)
from epmoe.ops._dependent_launch import dependent_launch
from epmoe.ops._triton import INTERPRET, cdiv, next_power_of_2
from epmoe.tuning.store import lookup

MAX_ROWS = 64  # expected rows per expert up to which weights are read no faster than their rows are multiplied
SPLIT_ROWS = 64  # rows of the buffer up to which parts of sums are worth their fp32 copies
JOIN_BLOCK = 256


@dataclasses.dataclass(frozen=True)
class FewRowsConfig:
    """One configuration; all blocks are powers of two.

    Args:
        block_t: rows of an expert that read a tile of weights together, at least 16.
        block_w: weight rows of a tile, at least 64 for wgmma. A gated GEMM1 spends half of them on gates.
        block_k: reduction steps of a stage.
        split: parts of the reduction, each a work item.
        programs_per_sm: programs that loop over work items; 0 starts one for each that could be.
        paired: gates and up projections of a gated GEMM1 in two dots; `block_w` is then at least 128.
    """

    block_t: int
    block_w: int
    block_k: int
    num_warps: int
    num_stages: int
    split: int = 1
    programs_per_sm: int = 0
    paired: bool = False


class FewRowsPlan(NamedTuple):
    """What a launch takes from shapes alone: found once for each, so that a call costs the host little."""

    programs: int
    split: int
    descriptor: tuple[list[int], list[int], list[int]] | None  # shape, strides and block of the weights' tiles
    constants: dict[str, Any]
    join: dict[str, Any]

    @property
    def column_tiles(self) -> int:
        """Tiles of each `block_t` rows."""
        parts = 2 if self.constants["GATED"] else 1
        return cdiv(self.constants["N"] // parts, self.constants["BLOCK_W"] // parts)


@functools.lru_cache(maxsize=4096)
def few_rows_config(
    device: torch.device,
    rows_per_expert: int,
    max_tiles: int,
    n: int,
    k: int,
    gated: bool,
    transpose: bool = False,
    interpret: bool = INTERPRET,
) -> FewRowsConfig | None:
    """The configuration for `n` weight rows (2I for a gated GEMM1) of width `k`, or None: not by this kernel.

    Args:
        max_tiles: experts and row tiles that can be active at most.
        transpose: weights are read along `n`, as the gradient of rows does.
    """
    if interpret or rows_per_expert > MAX_ROWS or not _has_roomy_sms(device):
        return None
    if rows_per_expert > 16:
        if gated and rows_per_expert <= 48:
            return FewRowsConfig(64, 128, 128, num_warps=4, num_stages=3)
        # 128 experts, 4096 × 1536, µs: 64 rows each 516, by Gluon 436; 32 rows each with 5 stages and 4: 424 and 399
        if rows_per_expert > 48 and not (gated or transpose) and n >= 2560 and k <= 4096 and _has_gluon(device):
            return None
        if k > 1024:
            stages = 5 if gated or k > 4096 else 4
        else:
            stages = 3 if rows_per_expert > 48 else 4
        return FewRowsConfig(64, 128, 64, num_warps=4, num_stages=stages)
    if rows_per_expert > 8:
        if k > 1024:
            return FewRowsConfig(32, 128, 128, num_warps=4, num_stages=3)
        return FewRowsConfig(32, 128, 64, num_warps=4, num_stages=4)

    # So few rows that nearly all of an expert's are in one tile: what counts is that enough of them are in flight.
    narrow, wide = max_tiles * cdiv(n, 64), max_tiles * cdiv(n, 128)
    sms = _num_sms(device)
    if 2 * narrow <= sms and k >= 2048:
        return FewRowsConfig(16, 64, 128, num_warps=4, num_stages=4, split=4 if 4 * narrow <= sms else 2)
    if wide < 2 * sms and k > 8192:
        return FewRowsConfig(16, 64, 256, num_warps=4, num_stages=3)
    if wide < (3 if gated else 2) * sms and k <= 4096:
        return FewRowsConfig(16, 64, 128, num_warps=4, num_stages=4)
    return FewRowsConfig(16, 128, 128, num_warps=4, num_stages=3, paired=gated)


@functools.lru_cache(maxsize=4096)
def few_rows_plan(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int],  # of the weights
    strides: tuple[int, int, int],
    aligned: bool,  # the weights begin at a multiple of 16 bytes
    max_rows: int,
    expected_m: int | None,
    transpose: bool,
    gated: bool,
) -> FewRowsPlan | None:
    """The plan for weights of this shape, or None: not by this kernel; cached."""
    L, w_rows, inner = shape
    n, d = (inner, w_rows) if transpose else (w_rows, inner)
    size = dtype.itemsize
    if size != 2 or L == 0 or max_rows == 0 or n == 0:
        return None
    expected = expected_rows(max_rows, L, expected_m)
    entry = None
    if max_rows >= L:  # entries are of rows for every expert
        entry = lookup("grouped_gemm_act" if gated else "grouped_gemm", device, L, n, d, dtype, "none", expected)
    if entry is not None:
        config = entry.of(FewRowsConfig)
    else:
        config = few_rows_config(device, expected, min(L, max_rows), n, d, gated, transpose)
    if config is None:
        return None
    if max_rows > SPLIT_ROWS or expected_m is not None:  # parts of a batch are summed as the whole would be
        config = dataclasses.replace(config, split=1)
    gated = gated and config.split == 1  # parts of sums have no activation
    parts = 2 if gated else 1
    aligned = aligned and strides[0] * size % 16 == 0 and strides[1] * size % 16 == 0
    dense = parts == 1 or (strides[0] == w_rows * strides[1] and w_rows // parts * strides[1] * size % 16 == 0)
    descriptor, paired = None, False
    if aligned and dense and _has_tma(device):
        paired = gated and config.paired
        block = [config.block_k, config.block_w] if transpose else [config.block_w // parts, config.block_k]
        descriptor = (
            [L * parts, w_rows // parts, inner],
            [strides[0] if parts == 1 else w_rows // parts * strides[1], strides[1], 1],
            [1 if transpose or paired else parts, *block],
        )
    row_tiles = most_row_tiles(max_rows, L, config.block_t, expected_m)
    items = row_tiles * cdiv(n // parts, config.block_w // parts) * config.split
    launch = dependent_launch(device)
    block_l = max(32, next_power_of_2(L))
    constants = {
        "L": L,
        "L_BLOCK": block_l,
        "N": n,
        "D": d,
        "GATED": gated,
        "TRANSPOSE": transpose,
        "BLOCK_T": config.block_t,
        "BLOCK_W": config.block_w,
        "BLOCK_K": config.block_k,
        "SPLIT": config.split,
        "PAIRED": paired,
        "TMA": descriptor is not None,
        "INTERPRETED": INTERPRET,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        **launch,
    }
    join = {"L": L, "L_BLOCK": block_l, "BLOCK": JOIN_BLOCK, "INTERPRETED": INTERPRET, "num_warps": 2, **launch}
    return FewRowsPlan(
        programs=most_programs(device, config.programs_per_sm, items),
        split=config.split,
        descriptor=descriptor,
        constants=constants,
        join=join,
    )
