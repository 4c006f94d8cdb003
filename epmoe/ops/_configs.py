"""Block sizes of the kernels in `ops/`, chosen on the host from dtype and shapes: they decide speed and never results.

Stands beside the path of a token. Figures behind the choices: one H200, triton 3.6. The interpreter runs each block
operation as one numpy call, so there it gets few, small blocks.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import torch

from epmoe.ops._triton import INTERPRET, cdiv, next_power_of_2


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """One grouped GEMM kernel configuration; all blocks are powers of two, at least 16.

    Args:
        block_m, block_n, block_k: output rows, output columns and reduction steps of a tile. A gated GEMM1 spends
            `block_n` weight rows on `block_n / 2` gates and the same number of up projections.
        group_m: row tiles that are walked together through all column tiles, so that both operands stay in L2.
        swap_ab: weights are the M side of the dot and tokens its N side: wgmma needs 64 rows on the M side, which few
            tokens cannot fill.
        tma: read weights through tensor descriptors where their alignment allows.
        programs_per_sm: programs that loop over tiles; 0 starts one program per tile.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int
    swap_ab: bool = False
    tma: bool = True
    programs_per_sm: int = 1


@dataclasses.dataclass(frozen=True)
class RowConfig:
    """A kernel that walks rows, `rows` of one expert at a time, in steps of `block` columns."""

    block: int
    num_warps: int
    programs_per_sm: int
    rows: int = 4  # what spreads the search for a tile's expert without leaving programs idle


def expected_rows(max_rows: int, num_local: int, expected_m: int | None) -> int:
    """Rows that an expert should expect, by which a configuration is chosen; at least 1.

    Args:
        max_rows: rows of the whole buffer, L · C in the batched-experts layout.
        num_local: L.
        expected_m: the caller's (M·R·K + E) // E, or None for max_rows / L. The counts themselves are on the device.
    """
    share = cdiv(max_rows, num_local)
    return max(1, share if expected_m is None else min(expected_m, share))


@functools.lru_cache(maxsize=4096)
def gemm_config(
    device: torch.device,
    dtype: torch.dtype,
    rows_per_expert: int,
    n: int,
    k: int,
    gated: bool,
    interpret: bool = INTERPRET,
) -> GemmConfig:
    """The configuration of `grouped_gemm` and `grouped_gemm_act` for weights that yield `n` columns from `k`.

    `n` counts weight rows: 2I for a gated GEMM1.
    """
    if interpret:
        return GemmConfig(32, 64, 64, group_m=2, num_warps=4, num_stages=2)
    if dtype == torch.float32:  # ieee dots run on CUDA cores: registers bound the tile
        return GemmConfig(32 if rows_per_expert <= 32 else 64, 64, 16, 8, num_warps=4, num_stages=2, programs_per_sm=0)
    if not _has_roomy_sms(device):
        return GemmConfig(32 if rows_per_expert <= 32 else 128, 128, 32, 8, 4, num_stages=3, programs_per_sm=0)
    if rows_per_expert <= 64:
        block_m = 16 if rows_per_expert <= 16 else 32 if rows_per_expert <= 32 else 64
        return GemmConfig(block_m, 128, 64, 1, num_warps=4, num_stages=6 if block_m <= 32 else 5, swap_ab=True)
    if n < 256 or rows_per_expert <= 128:
        return GemmConfig(128, 128, 64, 8, num_warps=8, num_stages=4)
    return GemmConfig(128, 256, 64, 8, num_warps=8, num_stages=3 if gated else 4)


class GemmPlan(NamedTuple):
    """What a launch takes from shapes alone: found once for each, so that a call costs the host little."""

    block_m: int
    column_tiles: int
    programs_per_sm: int
    descriptor: tuple[list[int], list[int], list[int]] | None  # shape, strides and block of the weights' tiles
    constants: dict[str, Any]


@functools.lru_cache(maxsize=4096)
def gemm_plan(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int],  # of the weights
    strides: tuple[int, int, int],
    aligned: bool,  # the weights begin at a multiple of 16 bytes
    rows_per_expert: int,
    transpose: bool,
    gated: bool,
) -> GemmPlan:
    """The plan of `grouped_gemm` (`grouped_gemm_act`) on weights of this shape; cached."""
    L, w_rows, inner = shape
    n, d = (inner, w_rows) if transpose else (w_rows, inner)
    parts, size = 2 if gated else 1, dtype.itemsize
    config = gemm_config(device, dtype, rows_per_expert, n, d, gated)
    aligned = aligned and strides[0] * size % 16 == 0 and strides[1] * size % 16 == 0
    dense = parts == 1 or (strides[0] == w_rows * strides[1] and w_rows // parts * strides[1] * size % 16 == 0)
    descriptor = None
    if config.tma and aligned and dense and _has_tma(device):
        block = [config.block_k, config.block_n] if transpose else [config.block_n // parts, config.block_k]
        descriptor = (
            [L * parts, w_rows // parts, inner],
            [strides[0] if parts == 1 else w_rows // parts * strides[1], strides[1], 1],
            [1 if transpose else parts, *block],
        )
    constants = {
        "L": L,
        "L_BLOCK": next_power_of_2(L),
        "N": n,
        "D": d,
        "GATED": gated,
        "TRANSPOSE": transpose,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "SWAP_AB": config.swap_ab,
        "TMA": descriptor is not None,
        "INTERPRETED": INTERPRET,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    column_tiles = cdiv(n // parts, config.block_n // parts)
    return GemmPlan(config.block_m, column_tiles, config.programs_per_sm, descriptor, constants)


@functools.lru_cache(maxsize=4096)
def wgrad_config(
    device: torch.device,
    dtype: torch.dtype,
    rows_per_expert: int,
    n: int,
    k: int,
    gathered: bool,
    interpret: bool = INTERPRET,
) -> GemmConfig:
    """The configuration of `grouped_wgrad` for `[n, k]` weight gradients: `block_k` counts the rows of a step.

    `gathered`: an operand is read through an index. Triton then spends every other stage on the index, so that 5
    stages are as many buffers as 3.
    """
    if interpret:
        return GemmConfig(32, 64, 64, group_m=2, num_warps=4, num_stages=2)
    if dtype == torch.float32:
        return GemmConfig(64, 64, 32, 8, num_warps=4, num_stages=2, programs_per_sm=0)
    if not _has_roomy_sms(device):
        return GemmConfig(128, 128, 32, 8, num_warps=4, num_stages=3, programs_per_sm=0)
    stages = 5 if gathered else 3
    if k < 256 or n < 128:
        return GemmConfig(64, 128, 64, 8, num_warps=4, num_stages=stages, programs_per_sm=0)
    return GemmConfig(128, 256, 64, 8, num_warps=8, num_stages=stages, programs_per_sm=0)


@functools.lru_cache(maxsize=256)
def row_config(width: int, interpret: bool = INTERPRET) -> RowConfig:
    """The configuration of a pass over rows of `width` columns."""
    block = 16
    while block < width and block < 2048:
        block *= 2
    return RowConfig(block, num_warps=4 if block <= 1024 else 8, programs_per_sm=8)


def num_programs(device: torch.device, programs_per_sm: int, work: int) -> int:
    """How many programs share `work` items: at least 1, at most `programs_per_sm` per SM (0: one for each item)."""
    limit = work if programs_per_sm == 0 else programs_per_sm * _num_sms(device)
    return max(1, min(work, limit))


@functools.cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 3  # the interpreter runs programs one after the other; more than one keeps their loops honest
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _has_tma(device: torch.device) -> bool:
    """Whether kernels may read through tensor descriptors: compute capability 9.0, or the interpreter."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def _has_roomy_sms(device: torch.device) -> bool:
    """Whether a program may have the 200 KiB of shared memory that the large tiles need.

    Compute capabilities 9.0 and 10.x give it 227 KiB, 8.x and 12.x between 99 and 163.
    """
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)
