"""Block sizes of the kernel behind `ops/narrow_gemm.py`, chosen on the host from shapes: they decide speed, and whether
scales multiply weights or sums, which rounds differently. Stands beside the path of a token.

Figures behind the choices: one H200, triton 3.6. The interpreter runs each block operation as one numpy call, so there
it gets few, small blocks.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import torch

from epmoe.ops._configs import _has_roomy_sms, _has_tma, most_row_tiles, num_programs
from epmoe.ops._dependent_launch import dependent_launch
from epmoe.ops._triton import INTERPRET, cdiv, next_power_of_2
from epmoe.ops.narrow_formats import SPAN, narrow_format
from epmoe.tuning.store import tuned


@dataclasses.dataclass(frozen=True)
class NarrowConfig:
    """One configuration of `narrow_gemm_kernel`; blocks are powers of two.

    Args:
        block_t: rows of an expert that share a widened tile, at least 16.
        block_w: weight rows of a tile, at least 64 for wgmma. A gated GEMM1 spends half of them on gates.
        on_tile: scales multiply weights, else sums over a group. Sums take a second accumulator, and groups shorter
            than 64 columns shorter dots; float16 rows always take sums, since weights times scales may leave its range.
        registers: of a thread at most, so that another program fits on an SM; 0: as many as it takes.
    """

    block_t: int
    block_w: int
    num_warps: int
    num_stages: int
    on_tile: bool = False
    registers: int = 0


@functools.lru_cache(maxsize=4096)
def narrow_config(
    device: torch.device, scheme: str, rows_per_expert: int, n: int, d: int, gated: bool, interpret: bool = INTERPRET
) -> NarrowConfig:
    """The configuration for `n` weight rows (2I for a gated GEMM1) of width `d`."""
    form = narrow_format(scheme)
    short = 0 < form.group < SPAN
    if interpret:
        return NarrowConfig(32, 64, num_warps=4, num_stages=2, on_tile=short)
    if not _has_roomy_sms(device):
        return NarrowConfig(16 if rows_per_expert <= 16 else 64, 64, num_warps=4, num_stages=3, on_tile=True)
    # routing fills experts unevenly: tiles are for more rows than the mean
    # Few rows, int4_g128, 4 of each, µs by weight rows of a tile of four warps, 64 and 128: 86 and 71, 54 and 50
    # (128 experts, 1536 × 2048 and 2048 × 768), 188 and 142, 89 and 80 (32 experts, 4096 × 7168 and 7168 × 2048); with
    # 128 registers, which let a fourth program onto an SM, 66, 41, 137 and 75. bench/results/kernels.md says what else
    # was tried.
    if rows_per_expert <= 24:
        block_t = 16 if rows_per_expert <= 12 else 32
        if form.kind == "int4":
            stages, registers = 4 if d > 2048 else 3, 128 if block_t == 16 else 168
            return NarrowConfig(block_t, 128, 4, stages, on_tile=short, registers=registers)
        if form.kind == "fp4" and rows_per_expert <= 1:  # few experts have rows at all: more and smaller tiles
            return NarrowConfig(block_t, 64, num_warps=4, num_stages=4, on_tile=short)
        return NarrowConfig(block_t, 128, num_warps=4, num_stages=3, on_tile=short)
    if rows_per_expert <= 48:  # int4_g128, 64 experts of 32 rows, tiles of 64 rows and of 32, µs: 94 and 82, 60 and 49
        return NarrowConfig(32 if form.kind == "int4" else 64, 128, num_warps=8, num_stages=4, on_tile=short)
    # three stages beside 256 rows are too large for bytes with scales, and for three quarters of them
    large = (form.bits == 8 and form.group > 0) or form.bits == 6
    if rows_per_expert <= 96 or large:
        return NarrowConfig(128, 128, num_warps=8, num_stages=4, on_tile=True)
    # The same with 1024 rows, TFLOP/s by rows of a tile: 256: 510 (scales on sums: 243), 128: 396.
    return NarrowConfig(256, 128, num_warps=8, num_stages=3, on_tile=True)


class NarrowPlan(NamedTuple):
    """What a launch takes from shapes alone: found once for each, so that a call costs the host little."""

    programs: int
    descriptor: tuple[list[int], list[int], list[int]] | None  # shape, strides and block of the weights' tiles
    constants: dict[str, Any]


@functools.lru_cache(maxsize=4096)
def narrow_plan(
    device: torch.device,
    dtype: torch.dtype,
    scheme: str,
    num_local: int,
    n: int,
    d: int,
    aligned: bool,  # the weights begin at a multiple of 16 bytes
    max_rows: int,
    rows_per_expert: int,
    expected_m: int | None,
    gated: bool,
) -> NarrowPlan:
    """The plan for weights `[num_local, n, d]`; cached."""
    form = narrow_format(scheme)
    name = "narrow_grouped_gemm_act" if gated else "narrow_grouped_gemm"
    config = tuned(NarrowConfig, name, device, num_local, n, d, dtype, scheme, rows_per_expert)
    config = config or narrow_config(device, scheme, rows_per_expert, n, d, gated)
    parts = 2 if gated else 1
    width, row = n // parts, form.bytes_per_row(d)
    on_tile = config.on_tile and dtype == torch.bfloat16 and form.group > 0
    if form.group > 0 and not on_tile:  # what a second accumulator leaves of the registers
        config = dataclasses.replace(config, block_t=min(config.block_t, 128 if form.group >= SPAN else 64))
    run = SPAN // 2 if on_tile or form.group == 0 else min(SPAN // 2, form.group)
    if form.bits == 6:  # what three bytes of a span hold lies 32 columns apart
        run = SPAN // 4
    descriptor = None
    if aligned and row % 16 == 0 and _has_tma(device):
        per, step = (4, SPAN // 8) if form.bits == 4 else (1, run)  # bytes of an entry; entries of a row in a tile
        descriptor = (
            [num_local * parts, width, row // per],
            [width * row // per, row // per, 1],
            [parts, config.block_w // parts, step],
        )
    row_tiles = most_row_tiles(max_rows, num_local, config.block_t, expected_m)
    constants = {
        "L": num_local,
        "L_BLOCK": max(32, next_power_of_2(num_local)),
        "N": n,
        "D": d,
        "ROW": row,
        "KIND": form.kind,
        "GROUP": form.group,
        "S": form.groups(d),
        "GATED": gated,
        "BLOCK_T": config.block_t,
        "BLOCK_W": config.block_w,
        "RUN": run,
        "ON_TILE": on_tile,
        "TMA": descriptor is not None,
        "INTERPRETED": INTERPRET,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        **({"maxnreg": config.registers} if config.registers else {}),
        **dependent_launch(device),
    }
    items = row_tiles * cdiv(width, config.block_w // parts)
    return NarrowPlan(num_programs(device, 0, items), descriptor, constants)
