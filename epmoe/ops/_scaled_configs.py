"""Block sizes of the kernels behind `ops/scaled_gemm.py`, chosen on the host from shapes: they decide speed and never
which numbers are multiplied. Stands beside the path of a token.

Figures behind the choices: one H200, triton 3.6. The interpreter runs each block operation as one numpy call, so there
it gets few, small blocks.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epmoe.ops._configs import _has_roomy_sms, _has_tma
from epmoe.ops._dependent_launch import dependent_launch
from epmoe.ops._triton import INTERPRET, TensorDescriptor, cdiv, next_power_of_2, tl, triton
from epmoe.ops.quantize_blocks import BLOCK, fitted
from epmoe.tuning.store import tuned

FP8 = torch.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class ScaledConfig:
    """One configuration of `scaled_gemm_kernel`, or the choice of the Gluon kernel, which reads 256 weight rows a tile.

    Args:
        block_m: rows of a tile.
        block_n: weight rows of a tile: 128 or 256; a gated one has `block_n / 2` gates and as many up projections.
        group_m: row tiles that are walked together through all column tiles, so that both operands stay in L2.
        split: multiply the tile's weight rows in two dots. With scales per block a dot has 128 weight rows.
        swap_ab: weights are the M side of the dot and tokens its N side: wgmma needs 64 rows on the M side, which few
            tokens cannot fill.
        flatten: let Triton load the next tile's first blocks during this tile's last steps.
        tma_rows: read rows that no index finds through a tensor descriptor where their alignment allows.
        tma_out: write results through a tensor descriptor where their alignment allows.
        programs_per_sm: programs that loop over tiles; 0 starts one program per tile.
        unroll: dots that a step has, of 128 columns each or of a block of scales that has fewer, side by side in
            memory: few rows are read faster in larger pieces.
        gluon: run the Gluon kernel instead, where it can; of these it takes `block_m` (64 or 128) and `group_m`.
        skip_idle: in the Gluon kernel, 64 rows of a tile that have no row of the expert leave the tensor cores to the
            others: it pays where many tiles are half empty, and costs where few are.
    """

    block_m: int
    block_n: int
    group_m: int
    num_warps: int
    num_stages: int
    split: bool = False
    swap_ab: bool = False
    flatten: bool = False
    tma_rows: bool = True
    tma_out: bool = True
    programs_per_sm: int = 1
    unroll: int = 1
    gluon: bool = False
    skip_idle: bool = False


@functools.lru_cache(maxsize=4096)
def scaled_config(
    device: torch.device,
    per_block: bool,
    rows_per_expert: int,
    n: int,
    d: int,
    gated: bool,
    gathered: bool,
    block: tuple[int, int] = BLOCK,
    interpret: bool = INTERPRET,
) -> ScaledConfig:
    """The configuration for `n` weight rows (2I for a gated GEMM1) of width `d`.

    Args:
        per_block: scales per block, not per row and channel.
        gathered: rows are found through an index.
        block: rows and columns of w that share a scale, where scales are per block.
    """
    if min(block) < 128:
        # A scale for each weight row, or sums promoted more often, take registers that the largest tiles have not.
        rows_per_expert = min(rows_per_expert, 64)
    plain = _for_large_blocks(device, per_block, rows_per_expert, gated, gathered, interpret)
    if block == BLOCK:
        return plain
    narrower = 128 // block_k(block)  # as many bytes ahead as with 128 columns a step
    if plain.unroll > 1:
        return dataclasses.replace(plain, unroll=plain.unroll * narrower, gluon=False)
    return dataclasses.replace(plain, num_stages=plain.num_stages * narrower, gluon=False)


def _for_large_blocks(
    device: torch.device, per_block: bool, rows_per_expert: int, gated: bool, gathered: bool, interpret: bool
) -> ScaledConfig:
    """`scaled_config` where the weights of a dot have one scale."""
    split = per_block and gated
    if interpret:
        return ScaledConfig(32, 256 if gated else 128, group_m=2, num_warps=4, num_stages=2, split=split)
    if not _has_roomy_sms(device):
        block_m = 32 if rows_per_expert <= 32 else 64
        return ScaledConfig(block_m, 256 if gated else 128, 8, 4, num_stages=2, split=split, programs_per_sm=0)
    # routing fills experts unevenly: tiles are for more rows than the mean
    if rows_per_expert <= 12:
        return ScaledConfig(
            16, 256 if gated else 128, 8, 4, num_stages=3, split=gated, swap_ab=True, programs_per_sm=0, unroll=2
        )
    if rows_per_expert <= 24:
        return ScaledConfig(32, 256 if gated else 128, 8, 4, num_stages=5, split=gated, swap_ab=True, programs_per_sm=0)
    if rows_per_expert <= 64:
        if gated:
            return ScaledConfig(64, 256, 8, num_warps=8, num_stages=5, split=True, swap_ab=True, gluon=per_block)
        return ScaledConfig(64, 128, 8, 4, num_stages=4, swap_ab=True, programs_per_sm=0, gluon=per_block)
    if per_block:
        return ScaledConfig(
            128, 256, 8, 8, num_stages=4, split=True, tma_rows=False, gluon=True, skip_idle=rows_per_expert <= 192
        )
    return ScaledConfig(128, 256, 8, num_warps=8, num_stages=4, flatten=not gathered)


@functools.cache
def runs_gluon(device: torch.device) -> bool:
    """Whether the Gluon kernel runs on `device`: compiled, capability 9.0, and a Triton that it compiles with."""
    if INTERPRET or device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return triton.__version__.startswith(("3.6.", "3.7."))


def block_k(block: tuple[int, int]) -> int:
    """Columns that a dot multiplies with weights whose `block` has one scale."""
    return min(128, block[1])


class ScaledPlan(NamedTuple):
    """What a launch takes from shapes alone: found once for each, so that a call costs the host little."""

    config: ScaledConfig
    column_tiles: int
    a_tma: bool
    w_descriptor: tuple[list[int], list[int], list[int]] | None  # shape, strides and block
    out_block: list[int] | None
    constants: dict[str, Any]


@functools.lru_cache(maxsize=4096)
def scaled_plan(
    device: torch.device,
    scheme: str,
    shape: tuple[int, int, int],  # of the weights
    strides: tuple[int, int, int],
    w_aligned: bool,  # begins at a multiple of 16 bytes
    a_aligned: bool,  # begins, and each row too, at a multiple of 16 bytes
    rows_per_expert: int,
    gathered: bool,
    divisor: int,
    activation: str,
    gated: bool,
    out_dtype: torch.dtype,
    block: tuple[int, int] = BLOCK,
) -> ScaledPlan:
    """The plan of `scaled_grouped_gemm` (`..._act`) on weights of this shape; cached."""
    L, n, d = shape
    parts = 2 if gated else 1
    width = n // parts
    name = "scaled_grouped_gemm_act" if gated else "scaled_grouped_gemm"
    per_block, integer = scheme == "fp8_block", scheme == "int8_row"
    dtype, columns = torch.int8 if integer else FP8, block_k(block)
    config = None
    if block == BLOCK:  # of others nothing is tuned
        config = tuned(ScaledConfig, name, device, L, n, d, dtype, scheme, rows_per_expert)
    config = config or scaled_config(device, per_block, rows_per_expert, n, d, gated, gathered, block)
    if not per_block:  # the Gluon kernel reads scales per block and no others
        config = dataclasses.replace(config, gluon=False)
    has_tma = _has_tma(device)
    dense = parts == 1 or (strides[0] == n * strides[1] and width * strides[1] % 16 == 0)
    descriptor = None
    if has_tma and w_aligned and strides[0] % 16 == 0 and strides[1] % 16 == 0 and dense:
        descriptor = (
            [L * parts, width, d],
            [strides[0] if parts == 1 else width * strides[1], strides[1], 1],
            [1, config.block_n // 2, columns] if config.split else [parts, config.block_n // parts, columns],
        )
    a_tma = has_tma and config.tma_rows and a_aligned and not gathered
    halves = gated or config.block_n > 128  # as in the kernel: columns that leave together
    stored = config.block_n // 2 if halves else config.block_n
    assert out_dtype != FP8 or stored == 128, "a block of 128 columns is quantized by one program"
    out_block = None
    if has_tma and config.tma_out and width * out_dtype.itemsize % 16 == 0:
        out_block = [config.block_m, stored]
    scale_rows, scale_columns = fitted(block, n, d)
    constants = {
        "L": L,
        "L_BLOCK": next_power_of_2(L),
        "N": n,
        "D": d,
        "DIVISOR": divisor,
        "PER_BLOCK": per_block,
        "SCALE_N": scale_rows,
        "SCALE_K": scale_columns,
        "INTEGER": integer,
        "ACTIVATION": activation,
        "GATED": gated,
        "OUT_DTYPE": _tl_dtype(out_dtype),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": columns,
        "GROUP_M": config.group_m,
        "OWN_GROUPS": config.block_m >= 128,
        "SPLIT": config.split,
        "UNROLL": config.unroll,
        "SWAP_AB": config.swap_ab,
        "FLATTEN": config.flatten,
        "A_TMA": a_tma,
        "W_TMA": descriptor is not None,
        "OUT_TMA": out_block is not None,
        "INTERPRETED": INTERPRET,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        **dependent_launch(device),
    }
    return ScaledPlan(config, cdiv(width, config.block_n // parts), a_tma, descriptor, out_block, constants)


def _tl_dtype(dtype: torch.dtype) -> Any:
    return {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, FP8: tl.float8e4nv}[dtype]


def row_descriptor(a: Tensor, block_m: int, columns: int = 128) -> Any:
    """Tiles of `block_m` rows and `columns` columns of `a [*, D]`."""
    return TensorDescriptor(a, list(a.shape), [a.stride(0), 1], [block_m, columns])
