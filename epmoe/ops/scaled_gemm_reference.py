"""The torch twins of `ops/scaled_gemm.py`: rows and weights scaled back, then one matmul per expert.

Letters: L local experts, I expert intermediate size, N columns of an output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epmoe.ops._scaled_configs import FP8
from epmoe.ops._segments import RowMap, segment_slices
from epmoe.ops._triton import cdiv
from epmoe.ops.activation import Epilogue, apply_activation, is_gated
from epmoe.ops.quantize import SCALE_BLOCK, quantize_reference
from epmoe.ops.quantize_blocks import BLOCK, spread_blocks


def empty_act(
    x: Tensor, w1: Tensor, max_rows: int, gated: bool, out_dtype: torch.dtype, requantize: bool
) -> tuple[Tensor, Tensor]:
    """Buffers for what `scaled_grouped_gemm_act` gives."""
    width = w1.shape[1] // (2 if gated else 1)
    act = x.new_empty(max_rows, width, dtype=FP8 if requantize else out_dtype)
    scale = (max_rows, cdiv(width, SCALE_BLOCK)) if requantize else (0,)
    return act, x.new_empty(scale, dtype=torch.float32)


def _multiply(
    a: Tensor,
    a_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    e: int,
    rows: slice | Tensor,
    scheme: str,
    block: tuple[int, int],
    precise: torch.dtype,
) -> Tensor:
    """Rows `rows` of a times expert e's weights, both scaled back first."""
    # fp8 has no kernel for indexing everywhere: bytes do
    x, xs = a.view(torch.uint8)[rows].view(a.dtype).to(precise), a_scale[rows].to(precise)
    y, ys = w[e].to(precise), w_scale[e].to(precise)
    if scheme == "fp8_block":
        xs = xs.repeat_interleave(SCALE_BLOCK, 1)[:, : x.shape[1]]
        ys = spread_blocks(ys[None], y.shape[0], y.shape[1], block)[0]
    else:
        ys = ys[:, None]
    return (x * xs) @ (y * ys).T


def scaled_grouped_gemm_reference(
    a: Tensor,
    a_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    rows: RowMap,
    max_rows: int,
    scheme: str,
    out_dtype: torch.dtype,
    precise: torch.dtype = torch.float32,
    block: tuple[int, int] = BLOCK,
) -> Tensor:
    """`scaled_grouped_gemm`, one matmul per expert in `precise`; `out_dtype` may be float64 too."""
    out = torch.empty(max_rows, w.shape[1], dtype=out_dtype, device=a.device)
    for e, own in segment_slices(rows.row_start, rows.row_end):
        y = _multiply(a, a_scale, w, w_scale, e, rows.at(own), scheme, block, precise)
        out[own] = (y if bias is None else y + bias[e].to(precise)).to(out_dtype)
    return out


def scaled_grouped_gemm_act_reference(
    x: Tensor,
    x_scale: Tensor,
    w1: Tensor,
    w1_scale: Tensor,
    bias1: Tensor | None,
    rows: RowMap,
    max_rows: int,
    epilogue: Epilogue,
    scheme: str,
    out_dtype: torch.dtype,
    requantize: bool,
    precise: torch.dtype = torch.float32,
    block: tuple[int, int] = BLOCK,
) -> tuple[Tensor, Tensor]:
    """`scaled_grouped_gemm_act`, one matmul per expert in `precise`."""
    out, scale = empty_act(x, w1, max_rows, is_gated(*epilogue), out_dtype, requantize)
    for e, own in segment_slices(rows.row_start, rows.row_end):
        y = _multiply(x, x_scale, w1, w1_scale, e, rows.at(own), scheme, block, precise)
        if (scales := rows.scales(own)) is not None:
            y = y * scales.to(precise)
        y = y if bias1 is None else y + bias1[e].to(precise)
        y = apply_activation(y, *epilogue)
        if requantize:
            values, scale[own] = quantize_reference(y, scheme)
            out.view(torch.uint8)[own] = values.view(torch.uint8)
        else:
            out[own] = y.to(out_dtype)
    return out, scale
