"""`scaled_grouped_gemm` and `scaled_grouped_gemm_act` into buffers of the caller's, planned workspaces: what experts
run without gradients and outside compiled graphs. On the path of a token where `ops/scaled_gemm.py` stands.

Letters: L local experts, I expert intermediate size, N columns of an output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epmoe.ops._triton import cdiv, use_triton
from epmoe.ops.activation import is_gated
from epmoe.ops.quantize import SCALE_BLOCK
from epmoe.ops.scaled_gemm import (
    _check,
    _check_act,
    _launch,
    scaled_grouped_gemm_act_reference,
    scaled_grouped_gemm_reference,
)


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
) -> None:
    """`scaled_grouped_gemm`, written into `out`.

    Args:
        out: `[max_rows, N]`, contiguous, bfloat16 or float16. The rest as there.

    Raises:
        ValueError: as there, or `out` does not fit.
    """
    rows = (row_start, row_end, row_index, index_divisor)
    _check(a, a_scale, w, w_scale, bias, *rows, scheme, out.dtype)
    _check_into("out", out, a, (out.shape[0], w.shape[1]), out.dtype)
    if use_triton(a):
        _launch(a, a_scale, w, w_scale, bias, *rows, None, out, None, scheme, expected_m)
    else:
        out.copy_(scaled_grouped_gemm_reference(a, a_scale, w, w_scale, bias, *rows, out.shape[0], scheme, out.dtype))


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
) -> None:
    """`scaled_grouped_gemm_act`, written into `act` and, where that is to be quantized, `act_scale`.

    Args:
        act: `[max_rows, I]`, contiguous, in `out_dtype`; with `act_scale` float8_e4m3fn.
        act_scale: `[max_rows, ceil(I / 128)]` float32, contiguous, or None: not quantized. The rest as there.

    Raises:
        ValueError: as there, or a buffer does not fit.
    """
    rows, activated = (row_start, row_end, row_index, index_divisor), (activation, alpha, limit)
    requantize = act_scale is not None
    _check(x, x_scale, w1, w1_scale, bias1, *rows, scheme, out_dtype)
    _check_act(w1, row_scale, *activated, scheme, requantize)
    width = w1.shape[1] // (2 if is_gated(*activated) else 1)
    _check_into("act", act, x, (act.shape[0], width), torch.float8_e4m3fn if requantize else out_dtype)
    if act_scale is not None:
        _check_into("act_scale", act_scale, x, (act.shape[0], cdiv(width, SCALE_BLOCK)), torch.float32)
    if use_triton(x):
        _launch(x, x_scale, w1, w1_scale, bias1, *rows, row_scale, act, act_scale, scheme, expected_m, *activated)
        return
    values, scale = scaled_grouped_gemm_act_reference(
        x, x_scale, w1, w1_scale, bias1, *rows, act.shape[0], row_scale, *activated, scheme, out_dtype, requantize
    )
    act.copy_(values)
    if act_scale is not None:
        act_scale.copy_(scale)


def _check_into(name: str, t: Tensor, beside: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(t.shape) != shape or t.dtype != dtype or t.device != beside.device or not t.is_contiguous():
        raise ValueError(
            f"{name} is {t.dtype} {tuple(t.shape)} on {t.device} with strides {t.stride()}: must be contiguous {dtype} "
            f"{shape} on {beside.device}"
        )
