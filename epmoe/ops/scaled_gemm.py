"""Grouped GEMM on eight-bit rows and weights with scales, fp8 or int8: GEMM1 with router weight, bias, activation and
the activation's own quantization in its epilogue, and GEMM2. On the path of a token where `ops/grouped_gemm.py` stands
without quantization; forward only.

    scheme      scales of rows a [*, D]     scales of weights w [L, N, D]             products are summed
    fp8_block   [*, ceil(D / 128)]          [L, ceil(N / R), ceil(D / C)]             in fp32 after min(C, 128) terms
    fp8_row     [*, 1]                      [L, N]                                    as the tensor cores do it
    int8_row    [*, 1]                      [L, N]                                    in int32, exactly

Weights in `fp8_block` have a scale for each block of R rows and C columns, 128 × 128 unless a call says otherwise: R is
1, 2, 4, .. 128 or a multiple of 128, C is 32, 64 or a multiple of 128. A row's scales are always of 128 columns.

Hopper's fp8 tensor cores keep about 14 bits of a sum: what that costs `fp8_row` grows with D, and is less than rounding
the result to bf16 for the sums of random signs that models make.

Letters: L local experts, H hidden size, I expert intermediate size, T rows of the expert input; N columns of an output,
D the reduction width. Expert e owns rows row_start[e]:row_end[e] (`ops/_segments.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epmoe.ops._configs import expected_rows, most_row_tiles, num_programs, ragged_rows
from epmoe.ops._scaled_configs import row_descriptor, runs_gluon, scaled_plan
from epmoe.ops._scaled_triton import scaled_gemm_kernel
from epmoe.ops._segments import RowMap, check_segments
from epmoe.ops._triton import TensorDescriptor, cdiv, check_flat, on_device_of, op, unit_stride, use_triton
from epmoe.ops.activation import Epilogue, is_gated
from epmoe.ops.quantize import SCALE_BLOCK, row_format
from epmoe.ops.quantize_blocks import BLOCK, block_mismatch
from epmoe.ops.scaled_gemm_reference import (
    empty_act,
    scaled_grouped_gemm_act_reference,
    scaled_grouped_gemm_reference,
)

SCALED_SCHEMES = ("fp8_block", "fp8_row", "int8_row")


def launch_scaled(
    a: Tensor,
    a_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    rows: RowMap,
    out: Tensor,
    out_scale: Tensor | None,
    scheme: str,
    expected_m: int | None,
    epilogue: Epilogue,
    block: tuple[int, int] = BLOCK,
) -> None:
    shape, strides, max_rows = w.shape, w.stride(), out.shape[0]
    L = shape[0]
    if out.numel() == 0 or L == 0:
        return
    gated = epilogue.gated
    expected = expected_rows(max_rows, L, expected_m)
    plan = scaled_plan(
        a.device,
        scheme,
        shape,
        strides,
        w.data_ptr() % 16 == 0,
        a.data_ptr() % 16 == 0 and a.stride(0) % 16 == 0,
        expected,
        rows.row_index is not None,
        rows.divisor,
        epilogue.activation,
        gated,
        out.dtype,
        block,
    )
    config = plan.config
    with on_device_of(a):
        if config.gluon and runs_gluon(a.device):
            from epmoe.ops import _scaled_gluon as gluon

            if gluon.can_take(a, w, out, gated, out_scale is not None, config, block):
                gluon.launch(a, a_scale, w, w_scale, bias, rows, out, out_scale, epilogue, config, expected)
                return
        row_tiles = most_row_tiles(max_rows, L, config.block_m, expected_m)
        target: Any = out
        if plan.out_block is not None:
            target = TensorDescriptor(out, *ragged_rows(out.shape[1], plan.out_block))
        scaled_gemm_kernel[(num_programs(a.device, config.programs_per_sm, row_tiles * plan.column_tiles),)](
            row_descriptor(a, config.block_m, plan.constants["BLOCK_K"]) if plan.a_tma else a,
            a_scale,
            w if plan.w_descriptor is None else TensorDescriptor(w, *plan.w_descriptor),
            w_scale,
            bias,
            rows.row_start,
            rows.row_end,
            rows.row_index,
            rows.row_scale,
            target,
            out_scale,
            epilogue.alpha,
            epilogue.limit,
            a.stride(0),
            a_scale.stride(0),
            strides[0],
            strides[1],
            **plan.constants,
        )


def check_scaled(
    a: Tensor,
    a_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    rows: RowMap,
    scheme: str,
    out_dtype: torch.dtype,
    block: tuple[int, int] = BLOCK,
) -> None:
    """Raises `ValueError` unless `scaled_grouped_gemm` can take these."""
    if scheme not in SCALED_SCHEMES:
        raise ValueError(f"scheme={scheme!r}: must be " + " or ".join(SCALED_SCHEMES))
    dtype = row_format(scheme).dtype
    unit_stride(a, "a")
    if a.dtype != dtype or w.dtype != dtype:
        raise ValueError(f"a is {a.dtype} and w {w.dtype}: both must be {dtype} for scheme={scheme!r}")
    if w.dim() != 3 or (w.stride(2) != 1 and w.shape[2] > 1) or w.shape[2] != a.shape[1]:
        raise ValueError(
            f"w has shape {tuple(w.shape)}, strides {w.stride()}: must be [L, N, {a.shape[1]}] (the width of a) and "
            "dense along its last dimension"
        )
    L, n, d = w.shape
    per_block = scheme == "fp8_block"
    if (reason := block_mismatch(block) if per_block or block == BLOCK else f"must be {BLOCK}") is not None:
        raise ValueError(f"block_rows, block_columns={block} with scheme={scheme!r}: {reason}")
    right: tuple[int, ...] = (a.shape[0], cdiv(d, SCALE_BLOCK) if per_block else 1)
    unit_stride(a_scale, "a_scale")
    if a_scale.dtype != torch.float32 or tuple(a_scale.shape) != right:
        raise ValueError(f"a_scale is {a_scale.dtype} {tuple(a_scale.shape)}: must be float32 {right} for {scheme!r}")
    right = (L, cdiv(n, block[0]), cdiv(d, block[1])) if per_block else (L, n)
    if w_scale.dtype != torch.float32 or tuple(w_scale.shape) != right or not w_scale.is_contiguous():
        raise ValueError(
            f"w_scale is {w_scale.dtype} {tuple(w_scale.shape)} with strides {w_scale.stride()}: must be contiguous "
            f"float32 {right} for {scheme!r}"
        )
    check_segments(rows.row_start, rows.row_end, L)
    check_flat(rows.row_index, "row_index", torch.int32)
    if bias is not None and (bias.shape != (L, n) or not bias.is_contiguous() or not bias.is_floating_point()):
        raise ValueError(f"bias is {bias.dtype} {tuple(bias.shape)}: must be contiguous, floating and {(L, n)}")
    if rows.divisor < 1:
        raise ValueError(f"index_divisor={rows.divisor}: must be at least 1")
    if out_dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"out_dtype={out_dtype}: must be torch.bfloat16 or torch.float16")


@op("scaled_grouped_gemm")
def scaled_grouped_gemm(
    a: Tensor,
    a_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    row_start: Tensor,
    row_end: Tensor,
    row_index: Tensor | None,
    index_divisor: int,
    max_rows: int,
    scheme: str,
    out_dtype: torch.dtype,
    expected_m: int | None = None,
    block_rows: int = SCALE_BLOCK,
    block_columns: int = SCALE_BLOCK,
) -> Tensor:
    """out[n] = (a·a_scale)[row] @ (w·w_scale)[e].T + bias[e] for each row n of each expert e.

    Args:
        a: `[*, D]` float8_e4m3fn, or int8; rows may be strided. row = n, or row_index[n] // index_divisor.
        a_scale: `[*, S]` float32, S and the shape of w_scale as the scheme says (top of this file); may be strided.
        w: `[L, N, D]` of the same dtype, and `w_scale` float32.
        bias: `[L, N]` floating, or None.
        row_start, row_end: `[L]` int32 on the device, the rows n of each expert, none past max_rows. An empty expert
            costs nothing.
        row_index: `[max_rows]` int32 or None; entries outside the segments are not read.
        scheme: `fp8_block`, `fp8_row` or `int8_row`.
        out_dtype: bfloat16 or float16.
        expected_m: the rows an expert should expect, (M·R·K + E) // E; picks the configuration and never what is
            computed. None: max_rows / L.
        block_rows, block_columns: R and C of `fp8_block` (top of this file).

    Returns:
        `[max_rows, N]`; rows of no expert are left as allocated. Not differentiable.

    Raises:
        ValueError: shapes, dtypes or inner strides do not fit together.
    """
    rows, block = RowMap(row_start, row_end, row_index, index_divisor), (block_rows, block_columns)
    check_scaled(a, a_scale, w, w_scale, bias, rows, scheme, out_dtype, block)
    if not use_triton(a):
        operands = (a, a_scale, w, w_scale, bias, rows)
        return scaled_grouped_gemm_reference(*operands, max_rows, scheme, out_dtype, block=block)
    out = a.new_empty(max_rows, w.shape[1], dtype=out_dtype)
    launch_scaled(a, a_scale, w, w_scale, bias, rows, out, None, scheme, expected_m, Epilogue(), block)
    return out


@scaled_grouped_gemm.register_fake
def _(
    a, a_scale, w, w_scale, bias, row_start, row_end, row_index, index_divisor, max_rows, scheme, out_dtype, *_, **__
):
    return a.new_empty(max_rows, w.shape[1], dtype=out_dtype)


@op("scaled_grouped_gemm_act")
def scaled_grouped_gemm_act(
    x: Tensor,
    x_scale: Tensor,
    w1: Tensor,
    w1_scale: Tensor,
    bias1: Tensor | None,
    row_start: Tensor,
    row_end: Tensor,
    row_index: Tensor | None,
    index_divisor: int,
    max_rows: int,
    row_scale: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
    scheme: str,
    out_dtype: torch.dtype,
    requantize: bool,
    expected_m: int | None = None,
    block_rows: int = SCALE_BLOCK,
    block_columns: int = SCALE_BLOCK,
) -> tuple[Tensor, Tensor]:
    """GEMM1: act(scale · (x·x_scale)[row] @ (w1·w1_scale)[e].T + bias1[e]) for each row n, on the fp32 accumulator.

    Args:
        x, x_scale, row_start, row_end, row_index, index_divisor, max_rows, scheme, out_dtype, expected_m, block_rows,
            block_columns: as in `scaled_grouped_gemm`.
        w1, w1_scale: `[L, 2I, H]`, gate rows then up rows (`[L, I, H]` not gated), and its scales. With scales per
            block and I not a multiple of R, the block that holds the last gates also holds the first up projections.
        bias1: `[L, 2I]` (`[L, I]`) floating, or None.
        row_scale: flat float32 or None, the router weight on the input, read at row_index[n] (n when None).
        activation, alpha, limit: fields of `Activation`.
        requantize: return the activation as `fp8_block`, from the fp32 accumulator. Only with scheme `fp8_block`: a
            scale per row needs the whole row, of which a tile sees 128 columns.

    Returns:
        act `[max_rows, I]` in `out_dtype` and an empty `[0]`; with `requantize` float8_e4m3fn and its scales
        `[max_rows, ceil(I / 128)]`. Rows of no expert are left as allocated.

    Raises:
        ValueError: as `scaled_grouped_gemm`, an unknown activation, a `row_scale` that is not flat, or `requantize`
            with another scheme.
    """
    rows = RowMap(row_start, row_end, row_index, index_divisor, row_scale)
    epilogue, block = Epilogue(activation, alpha, limit), (block_rows, block_columns)
    check_scaled(x, x_scale, w1, w1_scale, bias1, rows, scheme, out_dtype, block)
    gated = check_scaled_act(w1, rows, epilogue, scheme, requantize)
    operands = (x, x_scale, w1, w1_scale, bias1, rows)
    if not use_triton(x):
        how = (epilogue, scheme, out_dtype, requantize)
        return scaled_grouped_gemm_act_reference(*operands, max_rows, *how, block=block)
    out, scale = empty_act(x, w1, max_rows, gated, out_dtype, requantize)
    launch_scaled(*operands, out, scale if requantize else None, scheme, expected_m, epilogue, block)
    return out, scale


def check_scaled_act(w1: Tensor, rows: RowMap, epilogue: Epilogue, scheme: str, requantize: bool) -> bool:
    """Whether the activation is gated, after what `check_scaled` leaves was found to fit.

    Raises:
        ValueError: it does not.
    """
    check_flat(rows.row_scale, "row_scale", torch.float32)
    gated = is_gated(*epilogue)
    if gated and w1.shape[1] % 2:
        raise ValueError(
            f"w1 has shape {tuple(w1.shape)}: {epilogue.activation!r} is gated and needs an even number of rows"
        )
    if requantize and scheme != "fp8_block":
        raise ValueError(
            f"requantize=True with scheme={scheme!r}: must be 'fp8_block', or quantize the result in a pass of its own"
        )
    return gated


@scaled_grouped_gemm_act.register_fake
def _(
    x, x_scale, w1, w1_scale, bias1, row_start, row_end, row_index, index_divisor, max_rows, row_scale, activation,
    alpha, limit, scheme, out_dtype, requantize, *_, **__,
):  # fmt: skip
    return empty_act(x, w1, max_rows, is_gated(activation, alpha, limit), out_dtype, requantize)
