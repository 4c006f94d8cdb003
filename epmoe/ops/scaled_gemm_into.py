"""`scaled_grouped_gemm` and `scaled_grouped_gemm_act` into buffers of the caller's, planned workspaces: what experts
run without gradients and outside compiled graphs. On the path of a token where `ops/scaled_gemm.py` stands.

Letters: L local experts, I expert intermediate size, N columns of an output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epmoe.ops._segments import RowMap
from epmoe.ops._triton import cdiv, check_buffer, use_triton
from epmoe.ops.activation import Epilogue
from epmoe.ops.quantize import SCALE_BLOCK
from epmoe.ops.quantize_blocks import BLOCK
from epmoe.ops.scaled_gemm import check_scaled, check_scaled_act, launch_scaled
from epmoe.ops.scaled_gemm_reference import scaled_grouped_gemm_act_reference, scaled_grouped_gemm_reference


def scaled_grouped_gemm_into(
    out: Tensor,
    a: Tensor,
    a_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    row_start: Tensor,
    row_end: Tensor,
    row_index: Tensor | None,
    index_divisor: int,
    scheme: str,
    expected_m: int | None = None,
    block: tuple[int, int] = BLOCK,
) -> None:
    """`scaled_grouped_gemm`, written into `out`.

    Args:
        out: `[max_rows, N]`, contiguous, bfloat16 or float16.
        block: its `block_rows` and `block_columns`. The rest as there.

    Raises:
        ValueError: as there, or `out` does not fit.
    """
    rows = RowMap(row_start, row_end, row_index, index_divisor)
    check_scaled(a, a_scale, w, w_scale, bias, rows, scheme, out.dtype, block)
    check_buffer(out, "out", (out.shape[0], w.shape[1]), out.dtype, a)
    operands = (a, a_scale, w, w_scale, bias, rows)
    if use_triton(a):
        launch_scaled(*operands, out, None, scheme, expected_m, Epilogue(), block)
    else:
        out.copy_(scaled_grouped_gemm_reference(*operands, out.shape[0], scheme, out.dtype, block=block))


def scaled_grouped_gemm_act_into(
    act: Tensor,
    act_scale: Tensor | None,
    x: Tensor,
    x_scale: Tensor,
    w1: Tensor,
    w1_scale: Tensor,
    bias1: Tensor | None,
    row_start: Tensor,
    row_end: Tensor,
    row_index: Tensor | None,
    index_divisor: int,
    row_scale: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
    scheme: str,
    out_dtype: torch.dtype,
    expected_m: int | None = None,
    block: tuple[int, int] = BLOCK,
) -> None:
    """`scaled_grouped_gemm_act`, written into `act` and, where that is to be quantized, `act_scale`.

    Args:
        act: `[max_rows, I]`, contiguous, in `out_dtype`; with `act_scale` float8_e4m3fn.
        act_scale: `[max_rows, ceil(I / 128)]` float32, contiguous, or None: not quantized.
        block: its `block_rows` and `block_columns`. The rest as there.

    Raises:
        ValueError: as there, or a buffer does not fit.
    """
    rows = RowMap(row_start, row_end, row_index, index_divisor, row_scale)
    epilogue, requantize = Epilogue(activation, alpha, limit), act_scale is not None
    check_scaled(x, x_scale, w1, w1_scale, bias1, rows, scheme, out_dtype, block)
    gated = check_scaled_act(w1, rows, epilogue, scheme, requantize)
    max_rows, width = act.shape[0], w1.shape[1] // (2 if gated else 1)
    check_buffer(act, "act", (max_rows, width), torch.float8_e4m3fn if requantize else out_dtype, x)
    if act_scale is not None:
        check_buffer(act_scale, "act_scale", (max_rows, cdiv(width, SCALE_BLOCK)), torch.float32, x)
    operands = (x, x_scale, w1, w1_scale, bias1, rows)
    if use_triton(x):
        launch_scaled(*operands, act, act_scale, scheme, expected_m, epilogue, block)
        return
    how = (epilogue, scheme, out_dtype, requantize)
    values, scale = scaled_grouped_gemm_act_reference(*operands, max_rows, *how, block=block)
    act.copy_(values)
    if act_scale is not None:
        act_scale.copy_(scale)
