"""Block sizes of the kernels in `ops/`, chosen on the host from dtype and shapes: they decide speed and never results.

Stands beside the path of a token. Figures behind the choices: one H200, triton 3.6. The interpreter runs each block
operation as one numpy call, so there it gets few, small blocks.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import torch

from epmoe.ops._leases import leased_sms
from epmoe.ops._triton import INTERPRET, cdiv, next_power_of_2, triton
from epmoe.tuning.store import tuned


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """One grouped GEMM kernel configuration; all blocks are powers of two, at least 16.

    Args:
        block_m, block_n, block_k: output rows, output columns and reduction steps of a tile. A gated GEMM1 spends
            `block_n` weight rows on `block_n / 2` gates and the same number of up projections.
        group_m: row tiles that are walked together through all column tiles, so that both operands stay in L2.
        tma: read and store through tensor descriptors where alignment allows.
        programs_per_sm: programs that loop over tiles; 0 starts one program per tile.
        flatten: a looping program begins the next tile's loads while it finishes one.
        gluon: run the Gluon kernel instead where it takes the operands; it has blocks of its own.
        panel: column tiles that the Gluon kernel walks for one row tile after the other.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int
    tma: bool = True
    programs_per_sm: int = 1
    flatten: bool = False
    gluon: bool = False
    panel: int = 8


@dataclasses.dataclass(frozen=True)
class WgradConfig:
    """A configuration of `grouped_wgrad`; blocks are powers of two.

    Args:
        block_m, block_n, block_k: rows and columns of a tile of the weight gradient, and token rows of a step.
        group_m: as in `GemmConfig`.
        tma: read and store through tensor descriptors where alignment allows.
        programs_per_sm: programs that loop over tiles; 0 starts one program per tile.
        store_bytes: a tile leaves through a buffer of this size, in 1, 2 or 4 parts; it shares an SM's 227 KiB with
            the stages.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int
    tma: bool = True
    programs_per_sm: int = 1
    store_bytes: int = 32768


@dataclasses.dataclass(frozen=True)
class RowConfig:
    """A kernel that walks `rows` rows of one expert at a time, one per warp, in steps of `block` columns."""

    block: int
    num_warps: int
    programs_per_sm: int
    rows: int = 4


def expected_rows(max_rows: int, num_local: int, expected_m: int | None) -> int:
    """Rows that an expert should expect, by which a configuration is chosen; at least 1.

    Args:
        max_rows: rows of the whole buffer, L · C in the batched-experts layout.
        num_local: L.
        expected_m: the caller's (M·R·K + E) // E, or None for max_rows / L. It counts alone, so that parts of a batch
            are computed as the whole would be. The counts themselves are on the device.
    """
    return max(1, cdiv(max_rows, num_local) if expected_m is None else expected_m)


def most_row_tiles(max_rows: int, num_local: int, block_m: int, expected_m: int | None) -> int:
    """Row tiles that a launch starts programs for: as many as there could be, or twice what `expected_m` says; where
    there are more, programs walk on."""
    tiles = max_rows // block_m + min(num_local, max_rows)
    if expected_m is None:
        return tiles
    return min(tiles, num_local * (2 * expected_rows(max_rows, num_local, expected_m) // block_m + 1))


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
    if n < 256:
        return GemmConfig(128, 128, 64, 8, num_warps=8, num_stages=4)
    # TFLOP/s of Triton and Gluon, equal and uneven experts: 702 and 708, 555 and 653 for 32 x 256 rows, N 4096, K 7168;
    # 653 and 668, 534 and 625 for 128 x 256, 1536, 2048; 768 and 717, 705 and 684 for 32 x 1024, 7168, 2048.
    # From 65 to 128 rows Triton again; tiles of 128 × 128 in programs of their own take longer, µs for 128 experts of
    # 128 rows: 402 and 271 for gated 1536, 2048; 181 and 137 for 2048, 768. Fewer come here from `few_rows_config`.
    few = not gated and 48 < rows_per_expert <= 64
    gluon = (few or 128 < rows_per_expert <= 512) and _has_gluon(device)
    return GemmConfig(128, 256, 64, 8, num_warps=8, num_stages=3 if gated else 4, flatten=True, gluon=gluon)


def chosen_gemm_config(
    device: torch.device, dtype: torch.dtype, num_local: int, rows_per_expert: int, n: int, k: int, gated: bool
) -> GemmConfig:
    """What was tuned for this device and shape, else what `gemm_config` chooses."""
    name = "grouped_gemm_act" if gated else "grouped_gemm"
    config = tuned(GemmConfig, name, device, num_local, n, k, dtype, "none", rows_per_expert)
    return config or gemm_config(device, dtype, rows_per_expert, n, k, gated)


def ragged_rows(width: int, block: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Shape, strides and block of a descriptor of contiguous `[rows, width]` that clips a tile of rows anywhere.

    Two dimensions more, whose strides cancel to 2**64 and so to nothing, move the end of the third: a tile stored at
    (2**30, end, 2**30 - end + row, column) begins at `row` and ends before `end`.
    """
    return [0x7FFF0000, 0x7FFF0000, 1 << 30, width], [(1 << 34) - width, width, width, 1], [1, 1, *block]


class GemmPlan(NamedTuple):
    """What a launch takes from shapes alone: found once for each, so that a call costs the host little."""

    config: GemmConfig
    column_tiles: int
    a_block: list[int] | None  # None: not by descriptor
    w_descriptor: tuple[list[int], list[int], list[int]] | None  # shape, strides and block of the weights' tiles
    out_descriptor: tuple[list[int], list[int], list[int]] | None
    constants: dict[str, Any]


@functools.lru_cache(maxsize=4096)
def gemm_plan(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int],  # of the weights
    strides: tuple[int, int, int],
    a_stride: int,
    aligned: bool,  # all tensors begin at a multiple of 16 bytes
    rows_per_expert: int,
    transpose: bool,
    gated: bool,
    gathered: bool,
) -> GemmPlan:
    """The plan of `ops/_gemm_triton.py` for weights of this shape; cached."""
    L, w_rows, inner = shape
    n, d = (inner, w_rows) if transpose else (w_rows, inner)
    parts, size = 2 if gated else 1, dtype.itemsize
    config = chosen_gemm_config(device, dtype, L, rows_per_expert, n, d, gated)
    tma = config.tma and aligned and _has_tma(device)
    a_tma = tma and not gathered and a_stride * size % 16 == 0 and a_stride >= d
    out_tma = tma and n // parts * size % 16 == 0
    dense = parts == 1 or (strides[0] == w_rows * strides[1] and w_rows // parts * strides[1] * size % 16 == 0)
    descriptor = None
    if tma and dense and strides[0] * size % 16 == 0 and strides[1] * size % 16 == 0 and min(strides) > 0:
        block = [config.block_k, config.block_n] if transpose else [config.block_n // parts, config.block_k]
        descriptor = (
            [L * parts, w_rows // parts, inner],
            [strides[0] if parts == 1 else w_rows // parts * strides[1], strides[1], 1],
            [1 if transpose else parts, *block],
        )
    stores = 2 if config.block_n >= 256 and not gated else 1
    out_block = [config.block_m, config.block_n // parts // stores]
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
        "FLATTEN": config.flatten and not gathered,
        "STORES": stores,
        "A_TMA": a_tma,
        "W_TMA": descriptor is not None,
        "OUT_TMA": out_tma,
        "INTERPRETED": INTERPRET,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    return GemmPlan(
        config,
        column_tiles=cdiv(n // parts, config.block_n // parts),
        a_block=[config.block_m, config.block_k] if a_tma else None,
        w_descriptor=descriptor,
        out_descriptor=ragged_rows(n // parts, out_block) if out_tma else None,
        constants=constants,
    )


@functools.lru_cache(maxsize=4096)
def wgrad_config(
    device: torch.device,
    dtype: torch.dtype,
    rows_per_expert: int,
    n: int,
    k: int,
    gathered: bool,
    interpret: bool = INTERPRET,
) -> WgradConfig:
    """The configuration of `grouped_wgrad` for `[n, k]` weight gradients.

    `gathered`: rows or scales are copied through an index. Triton then spends every other stage on the index, so that
    7 stages are as many buffers as 4.
    """
    if interpret:
        return WgradConfig(32, 128, 64, group_m=2, num_warps=4, num_stages=2, store_bytes=8192)
    if dtype == torch.float32:
        return WgradConfig(64, 64, 32, 8, num_warps=4, num_stages=2, tma=False, programs_per_sm=0)
    if not _has_roomy_sms(device):
        return WgradConfig(128, 128, 32, 8, num_warps=4, num_stages=3, tma=False, programs_per_sm=0)
    if k < 256 or n < 128:
        return WgradConfig(64, 128, 64, 8, num_warps=4, num_stages=7 if gathered else 4, programs_per_sm=2)
    return WgradConfig(128, 256, 64, 8, num_warps=8, num_stages=7 if gathered else 4)


@functools.lru_cache(maxsize=256)
def row_config(width: int) -> RowConfig:
    """The configuration of a pass over rows of `width` columns: a warp takes 8 columns a lane."""
    return RowConfig(min(256, max(16, next_power_of_2(width))), num_warps=4, programs_per_sm=8)


def num_programs(device: torch.device, programs_per_sm: int, work: int) -> int:
    """How many programs share `work` items: at least 1, at most `programs_per_sm` per SM (0: one for each item).

    SMs that are leased to rows on their way do not count. Ask at each launch: the answer must not be kept.
    """
    limit = work if programs_per_sm == 0 else programs_per_sm * max(1, _num_sms(device) - leased_sms(device))
    return max(1, min(work, limit))


def most_programs(device: torch.device, programs_per_sm: int, work: int) -> int:
    """The same with nothing leased: what plans that are kept, and barriers among programs, reckon with."""
    return max(1, min(work, work if programs_per_sm == 0 else programs_per_sm * _num_sms(device)))


@functools.cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 3  # the interpreter runs programs one after the other; more than one keeps their loops honest
    return torch.cuda.get_device_properties(device).multi_processor_count


def fits_tma(t: torch.Tensor) -> bool:
    """Whether a kernel may reach the rows of `t`, dense along the last dimension, through a tensor descriptor."""
    size = t.element_size()
    aligned = t.data_ptr() % 16 == 0 and all(stride * size % 16 == 0 for stride in t.stride()[:-1])
    return aligned and t.numel() > 0 and _has_tma(t.device)


@functools.cache
def _has_tma(device: torch.device) -> bool:
    """Whether kernels may read through tensor descriptors: compute capability 9.0, or the interpreter."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def _has_gluon(device: torch.device) -> bool:
    """Whether the Gluon kernels are known to work: compute capability 9.0, a Triton that they were tried with."""
    if INTERPRET or device.type != "cuda" or triton is None or not triton.__version__.startswith("3.6."):
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def _has_roomy_sms(device: torch.device) -> bool:
    """Whether a program may have the 200 KiB of shared memory that the large tiles need.

    Compute capabilities 9.0 and 10.x give it 227 KiB, 8.x and 12.x between 99 and 163.
    """
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)
