"""Grouped GEMM on Hopper by a Gluon kernel, for 16-bit operands and more than a few rows per expert: where plain Triton
(`ops/_gemm_triton.py`, which does all that this does) leaves speed. Stands where `ops/grouped_gemm.py` says.

Gluon ships inside Triton and is experimental. The kernel (`ops/_gemm_gluon_kernel.py`) is imported only when it first
runs, and runs only where `ops/_configs.py` has found a Triton version and a device that it is known to work on.

Letters: L local experts, D reduction width, WIDTH columns of out.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epmoe.ops._configs import chosen_gemm_config, expected_rows, most_row_tiles, num_programs, ragged_rows
from epmoe.ops._descriptors import unchecked_descriptor
from epmoe.ops._segments import RowMap
from epmoe.ops._triton import cdiv, next_power_of_2, on_device_of
from epmoe.ops.activation import Epilogue

STAGES = 4
BOX = 64  # rows of one TMA load
REGISTERS = 168  # of a thread at launch, which three warpgroups then share out: so many stay with the producer's, ...
PRODUCER_REGISTERS = 40
GATHER_REGISTERS = 56  # ... or so many where it finds rows by index
NOT_HERE = ("gelu", "geglu")  # erf, for every variant of a tile and every register of its sums, compiles for a minute


class GluonPlan(NamedTuple):
    """What a launch takes from shapes alone."""

    width: int
    depth: int
    column_tiles: int
    panel: int
    w: tuple[list[int], list[int], list[int], Any]  # shape, strides, block and layout of a descriptor
    out: tuple[list[int], list[int], list[int], Any]
    preact: tuple[list[int], list[int], list[int], Any]
    box: Any  # layouts of the blocks of rows
    rest: Any
    constants: dict[str, Any]


@functools.lru_cache(maxsize=4096)
def gluon_plan(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int],  # of the weights
    strides: tuple[int, int, int],
    rows_per_expert: int,
    transpose: bool,
    gated: bool,
    gathered: bool,
) -> GluonPlan | None:
    """The plan for weights of this shape, or None: not by this kernel; cached."""
    L, w_rows, inner = shape
    n, depth = (inner, w_rows) if transpose else (w_rows, inner)
    width = n // 2 if gated else n
    config = chosen_gemm_config(device, dtype, L, rows_per_expert, n, depth, gated)
    if not config.gluon or depth % 8 or width % 8 or strides[0] % 8 or strides[1] % 8 or min(strides) < 1:
        return None
    columns = 32 if gated else 64  # that a warpgroup stores
    block = [64, columns]
    if gated:  # 8 gates, 8 up projections, 8 gates, ...
        step = strides[1]
        w = [L, width // 8, 2, 8, depth], [strides[0], 8 * step, width * step, step, 1], [1, 4, 2, 8, 64]
        rows, columns_apart, _ = ragged_rows(n, block)
        preact = [*rows[:3], 2, width], [*columns_apart[:3], width, 1], [1, 1, 64, 1, columns]
    else:
        w = [L, w_rows, inner], list(strides), [1, 64, 64]
        preact = ragged_rows(width, block)
    out = ragged_rows(width, block)
    registers = GATHER_REGISTERS if gathered else PRODUCER_REGISTERS
    constants = {
        "L_BLOCK": max(128, next_power_of_2(L)),  # so that few values are compiled for
        "GATED": gated,
        "TRANSPOSE": transpose,
        "STAGES": STAGES,
        "PRODUCER_WARPS": 4 if gathered else 1,
        "PRODUCER_REGISTERS": registers,
        "CONSUMER_REGISTERS": (3 * REGISTERS - registers) // 2,
        "num_warps": 4,
        "maxnreg": REGISTERS,
    }
    layout = functools.partial(_layout, dtype)
    return GluonPlan(
        width,
        depth,
        column_tiles=cdiv(width, 2 * columns),
        panel=config.panel,
        w=(*w, layout(w[2])),
        out=(*out, layout(out[2])),
        preact=(*preact, layout(preact[2])),
        box=layout([BOX, 64]),
        rest=layout([32, 64]),
        constants=constants,
    )


def _layout(dtype: torch.dtype, block: list[int]) -> Any:
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)


@functools.cache
def _kernel() -> Any:
    from epmoe.ops._gemm_gluon_kernel import grouped_gemm_gluon_kernel

    return grouped_gemm_gluon_kernel


@functools.cache
def _descriptor_type() -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor


def launch_gluon(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    rows: RowMap,
    out: Tensor,
    preact: Tensor | None,
    transpose: bool,
    expected_m: int | None,
    epilogue: Epilogue,
) -> bool:
    """Writes what `grouped_gemm` (`grouped_gemm_act`, with an activation) promises for checked arguments into `out`
    `[max_rows, N]` or `[max_rows, I]` and, unless it is None, `preact`; or returns False where this kernel should not:
    another device, few rows per expert, a dtype or an alignment that it is not made for.
    """
    L, max_rows = w.shape[0], out.shape[0]
    gated = epilogue.gated
    expected = expected_rows(max_rows, L, expected_m)
    gathered = rows.row_index is not None
    plan = gluon_plan(a.device, a.dtype, w.shape, w.stride(), expected, transpose, gated, gathered)
    if plan is None or epilogue.activation in NOT_HERE:
        return False
    stride = a.stride(0)
    at = a.data_ptr() | w.data_ptr() | out.data_ptr() | (0 if preact is None else preact.data_ptr())
    if at % 16 or stride % 8 or stride < plan.depth or a.shape[0] * stride >= 1 << 34 or max_rows >= 1 << 30:
        return False
    kind = _descriptor_type()
    boxes = rest = None
    if not gathered:
        shape, strides = [a.shape[0], plan.depth], [stride, 1]
        boxes = unchecked_descriptor(kind, a, shape, strides, [BOX, 64], layout=plan.box)
        rest = unchecked_descriptor(kind, a, shape, strides, [32, 64], layout=plan.rest)
    saved = None
    if preact is not None:
        saved = unchecked_descriptor(kind, preact, *plan.preact[:3], layout=plan.preact[3])
    row_tiles = most_row_tiles(max_rows, L, 256, expected_m)
    with on_device_of(a):
        _kernel()[(num_programs(a.device, 1, row_tiles * plan.column_tiles),)](
            a,
            boxes,
            rest,
            unchecked_descriptor(kind, w, *plan.w[:3], layout=plan.w[3]),
            bias,
            rows.row_start,
            rows.row_end,
            rows.row_index,
            rows.row_scale,
            unchecked_descriptor(kind, out, *plan.out[:3], layout=plan.out[3]),
            saved,
            epilogue.alpha,
            epilogue.limit,
            rows.divisor,
            stride // 8,
            L,
            plan.width,
            plan.depth,
            plan.panel,
            ACTIVATION=epilogue.activation,
            **plan.constants,
        )
    return True
