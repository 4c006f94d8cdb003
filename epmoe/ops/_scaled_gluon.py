"""Scaled grouped GEMM on Hopper by a Gluon kernel: fp8 with scales per block, for more than a few rows. Stands where
`ops/scaled_gemm.py` says.

Gluon is experimental: this file imports only where `runs_gluon` in `ops/_scaled_configs.py` says so, and
`ops/_scaled_triton.py` does all that it does.

Letters: L local experts, D reduction width, N weight rows (2I for a gated GEMM1).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from epmoe.ops._configs import most_row_tiles, num_programs, ragged_rows
from epmoe.ops._dependent_launch import dependent_launch
from epmoe.ops._descriptors import unchecked_descriptor
from epmoe.ops._scaled_configs import FP8, ScaledConfig
from epmoe.ops._scaled_gluon_kernel import scaled_gemm_gluon_kernel
from epmoe.ops._segments import RowMap
from epmoe.ops._triton import cdiv, next_power_of_2
from epmoe.ops.activation import Epilogue
from epmoe.ops.quantize_blocks import BLOCK


class Shape(NamedTuple):
    """What goes with the rows of a tile: stages of the ring, how many of them are asked for together, and registers of
    a thread, at launch and then in the producer and in a second consumer; the first takes what is left."""

    stages: int
    at_once: int
    registers: int
    producer: int
    consumer: int


SHAPES = {64: Shape(5, 2, 144, 56, 0), 128: Shape(4, 1, 168, 40, 232)}


def can_take(
    a: Tensor,
    w: Tensor,
    out: Tensor,
    gated: bool,
    requantize: bool,
    config: ScaledConfig,
    block: tuple[int, int] = BLOCK,
) -> bool:
    """Whether the kernel takes these operands: tiles of a size it has, memory aligned for TMA, weights dense, and scale
    blocks of 128 × 128 that end where gates and quantized columns do."""
    width, d = out.shape[1], w.shape[2]
    return (
        config.block_m in SHAPES
        and block == BLOCK
        and (a.data_ptr() | w.data_ptr() | out.data_ptr() | a.stride(0) | d) % 16 == 0
        and w.is_contiguous()
        and width * out.dtype.itemsize % 16 == 0
        and (width % 128 == 0 or not (gated or requantize))
        and w.shape[0] <= 1024
        and w.shape[0] * w.shape[1] < 2**31
    )


def starts_early(config: ScaledConfig, rows_per_expert: int) -> bool:
    """Whether the kernel starts under the one before it, which pays where reading weights is all that costs.

    Of more rows it does not: a layer of 32 experts of 128 rows, 4096 × 7168 and 7168 × 2048, with tiles of 64 rows in
    GEMM1 took 628 µs with it and 527 without.
    """
    return config.block_m == 64 and rows_per_expert <= 64


def _layout(block: list[int], dtype: torch.dtype) -> Any:
    types = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float8_e4m3fn: gl.float8e4nv}
    return gl.NVMMASharedLayout.get_default_for(block, types[dtype])


class Plan(NamedTuple):
    """What a launch takes from shapes alone: found once for each, so that a call costs the host little."""

    column_tiles: int
    rows: tuple[list[int], Any]  # block and layout of descriptors of a
    w: tuple[list[int], list[int], list[int], Any]  # shape, strides, block and layout of a descriptor
    out: tuple[list[int], list[int], list[int], Any]
    constants: dict[str, Any]


@functools.lru_cache(maxsize=4096)
def _plan(
    device: torch.device,
    shape: tuple[int, int, int],  # of the weights
    out_dtype: torch.dtype,
    divisor: int,
    activation: str,
    gated: bool,
    config: ScaledConfig,
    early: bool,
) -> Plan:
    L, n, d = shape
    width = n // 2 if gated else n
    block_m, ring = config.block_m, SHAPES[config.block_m]
    weights, out = [128 if gated else 256, 128], ragged_rows(width, [64, 64])
    constants = {
        "L": L,
        "L_BLOCK": max(32, next_power_of_2(L)),
        "N": n,
        "D": d,
        "DIVISOR": divisor,
        "ACTIVATION": activation,
        "GATED": gated,
        "BLOCK_M": block_m,
        "GROUP_M": config.group_m,
        "STAGES": ring.stages,
        "AT_ONCE": ring.at_once if cdiv(d, 128) % ring.at_once == 0 else 1,
        "SKIP_IDLE": config.skip_idle,
        "PRODUCER_REGISTERS": ring.producer,
        "CONSUMER_REGISTERS": ring.consumer,
        "num_warps": 4,
        "maxnreg": ring.registers,
        **(dependent_launch(device) if early else {"DEPENDENT": False}),
    }
    return Plan(
        column_tiles=cdiv(width, 128 if gated else 256),
        rows=([block_m, 128], _layout([block_m, 128], FP8)),
        w=([L * n, d], [d, 1], weights, _layout(weights, FP8)),
        out=(*out, _layout(out[2], out_dtype)),
        constants=constants,
    )


def launch(
    a: Tensor,
    a_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    rows: RowMap,
    out: Tensor,
    out_scale: Tensor | None,
    epilogue: Epilogue,
    config: ScaledConfig,
    rows_per_expert: int,
) -> None:
    """Launches the kernel on operands that `can_take` allows, on the current device."""
    early = starts_early(config, rows_per_expert)
    plan = _plan(a.device, w.shape, out.dtype, rows.divisor, epilogue.activation, epilogue.gated, config, early)
    kind, stride = TensorDescriptor, a.stride(0)
    tiles: Any = a
    if rows.row_index is None:
        shape, strides = list(a.shape), [stride, 1]
        tiles = unchecked_descriptor(kind, a, shape, strides, plan.rows[0], layout=plan.rows[1])
    row_tiles = most_row_tiles(out.shape[0], w.shape[0], config.block_m, None)
    scaled_gemm_gluon_kernel[(num_programs(a.device, 1, row_tiles * plan.column_tiles),)](
        tiles,
        a_scale,
        unchecked_descriptor(kind, w, *plan.w[:3], layout=plan.w[3]),
        w_scale,
        bias,
        rows.row_start,
        rows.row_end,
        rows.row_index,
        rows.row_scale,
        unchecked_descriptor(kind, out, *plan.out[:3], layout=plan.out[3]),
        out_scale,
        epilogue.alpha,
        epilogue.limit,
        stride,
        a_scale.stride(0),
        **plan.constants,
    )
