"""Weight and bias gradients of a grouped GEMM: per expert, the sum of its rows' outer products.

On the path of a token backwards: dW2 from (dout, w · act), dW1 from (dpre, x). Operands whose rows lie in expert order
are read through tensor descriptors; an index is followed row by row, which is slower (`ops/permute_rows.py`).

Letters: L local experts, K experts per token, T rows; the weight is `[L, N, D]`: N columns of dy, D columns of x.
Expert e owns rows row_start[e]:row_end[e] (`ops/_segments.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epmoe.ops._configs import WgradConfig, expected_rows, fits_tma, num_programs, wgrad_config
from epmoe.ops._segments import check_segments
from epmoe.ops._triton import (
    INTERPRET,
    KERNEL_DTYPES,
    TensorDescriptor,
    cdiv,
    check_flat,
    next_power_of_2,
    on_device_of,
    op,
    scale_dtypes,
    unit_stride,
    use_triton,
)
from epmoe.ops._wgrad_kernel import grouped_bias_kernel, grouped_wgrad_kernel
from epmoe.tuning.store import tuned


@op("grouped_wgrad", mutates_args=("accumulate_into",))
def grouped_wgrad(
    dy: Tensor,
    x: Tensor,
    row_start: Tensor,
    row_end: Tensor,
    dy_index: Tensor | None,
    dy_divisor: int,
    x_index: Tensor | None,
    x_divisor: int,
    row_scale: Tensor | None,
    scale_index: Tensor | None,
    with_bias: bool,
    out_dtype: torch.dtype,
    expected_m: int | None = None,
    accumulate_into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """dw[e] = sum over the rows n of expert e of scale · outer(dy[row], x[row]); dbias[e] = sum of dy[row].

    Args:
        dy: `[*, N]`, x: `[*, D]`, of one dtype; rows may be strided.
        row_start, row_end: `[L]` int32 on the device, the rows n of each expert. Nothing is read for other rows.
        dy_index, dy_divisor: row of dy for row n is dy_index[n] // dy_divisor, or n when the index is None.
        x_index, x_divisor: the same for x.
        row_scale: flat float32 or None; its entry scale_index[n] (n when None) multiplies row n's outer product.
        with_bias: compute dbias, which `row_scale` does not touch.
        out_dtype: dtype of both gradients; sums are in fp32.
        expected_m: the rows an expert should expect, (M·R·K + E) // E; picks the configuration and never what is
            computed. None: all rows / L.
        accumulate_into: None, or `[L, N, D]` contiguous float32 (float64 beside float64) to which dw is added without
            being rounded to `out_dtype`.

    Returns:
        `dw [L, N, D]` (`[0]` where `accumulate_into` took it) and `dbias [L, N]` (`[0]` unless `with_bias`); experts
        without rows get exact zeros.

    Raises:
        ValueError: dtypes, shapes, strides, segments or divisors are not as above.
    """
    dtype = dy.dtype
    if dtype != x.dtype or (dtype not in KERNEL_DTYPES and dtype != torch.float64):
        raise ValueError(f"dy has dtype {dtype}, x {x.dtype}: both must be the same floating dtype")
    check_segments(row_start, row_end)
    for name, index in (("dy_index", dy_index), ("x_index", x_index), ("scale_index", scale_index)):
        check_flat(index, name, torch.int32)
    check_flat(row_scale, "row_scale", *scale_dtypes(dy))
    if min(dy_divisor, x_divisor) < 1:
        raise ValueError(f"dy_divisor={dy_divisor}, x_divisor={x_divisor}: both must be at least 1")
    dy_stride, x_stride = unit_stride(dy, "dy"), unit_stride(x, "x")
    L, n, d = row_start.shape[0], dy.shape[1], x.shape[1]
    if accumulate_into is not None:
        _check_accumulator(accumulate_into, (L, n, d), *scale_dtypes(dy))
    if not use_triton(dy):
        return grouped_wgrad_reference(
            dy,
            x,
            row_start,
            row_end,
            dy_index,
            dy_divisor,
            x_index,
            x_divisor,
            row_scale,
            scale_index,
            with_bias,
            out_dtype,
            accumulate_into,
        )
    dw, dbias = _empty_gradients(dy, x, row_start, with_bias, out_dtype, accumulate_into)
    target = dw if accumulate_into is None else accumulate_into
    max_rows = next((t.shape[0] for t in (dy_index, x_index) if t is not None), dy.shape[0])
    # Triton copies 16 bytes at a time, and only then asynchronously, where it sees strides that are multiples of 16
    gathered = scale_index is not None or any(
        index is not None and stride % 16 == 0 for index, stride in ((dy_index, dy_stride), (x_index, x_stride))
    )
    expected = expected_rows(max_rows, max(L, 1), expected_m)
    config = None if gathered else tuned(WgradConfig, "grouped_wgrad", dy.device, L, n, d, dtype, "none", expected)
    config = config or wgrad_config(dy.device, dtype, expected, n, d, gathered)
    with on_device_of(dy):
        if target.numel() > 0:
            operands: list[Any] = [dy, x]
            tma = [False, False]
            for i, (t, index, block) in enumerate(((dy, dy_index, config.block_m), (x, x_index, config.block_n))):
                if index is None and config.tma and fits_tma(t):
                    operands[i], tma[i] = _segment_descriptor(t, config.block_k, block), True
            parts = cdiv(config.block_m * config.block_n * target.element_size(), config.store_bytes)
            out: Any = target
            if config.tma and fits_tma(target):
                out = TensorDescriptor(target, [L, n, d], [n * d, d, 1], [1, config.block_m, config.block_n // parts])
            tiles = L * cdiv(n, config.block_m) * cdiv(d, config.block_n)
            grouped_wgrad_kernel[(num_programs(dy.device, config.programs_per_sm, tiles),)](
                *operands,
                row_start,
                row_end,
                dy_index,
                x_index,
                row_scale,
                scale_index,
                out,
                dy_stride,
                x_stride,
                L=L,
                L_BLOCK=next_power_of_2(L),
                N=n,
                D=d,
                DY_DIVISOR=dy_divisor,
                X_DIVISOR=x_divisor,
                BLOCK_M=config.block_m,
                BLOCK_N=config.block_n,
                BLOCK_K=config.block_k,
                GROUP_M=config.group_m,
                DY_TMA=tma[0],
                X_TMA=tma[1],
                DW_TMA=out is not target,
                PARTS=parts,
                ADD=accumulate_into is not None,
                INTERPRETED=INTERPRET,
                num_warps=config.num_warps,
                num_stages=config.num_stages,
            )
        if dbias.numel() > 0:
            grouped_bias_kernel[(L * cdiv(n, config.block_m),)](
                dy,
                row_start,
                row_end,
                dy_index,
                dbias,
                dy_stride,
                N=n,
                DY_DIVISOR=dy_divisor,
                BLOCK_M=config.block_m,
                BLOCK_K=config.block_k,
                INTERPRETED=INTERPRET,
                num_warps=config.num_warps,
            )
    return dw, dbias


def _segment_descriptor(t: Tensor, rows: int, columns: int) -> Any:
    """A descriptor of `[*, width]` whose boxes end where a segment ends, which only the device knows.

    The hardware puts zeros where a coordinate is past its dimension. Row r of a segment that ends at row `end` has the
    coordinates [2^30, end, 2^30 - end + r]: the last one is past its 2^30 rows exactly from `end` on. As addresses,
    the last two make row 2^30 + r, and the first takes 2^30 rows back: modulo 2^64, 2^30 · (2^34 - stride) elements
    are -2^30 · stride of them.
    """
    stride, most = t.stride(0), 0x7FFF0000
    return TensorDescriptor(
        t, [most, most, 1 << 30, t.shape[1]], [(1 << 34) - stride, stride, stride, 1], [1, 1, rows, columns]
    )


def _check_accumulator(into: Tensor, shape: tuple[int, int, int], *dtypes: torch.dtype) -> None:
    if tuple(into.shape) != shape or into.dtype not in dtypes or not into.is_contiguous():
        raise ValueError(
            f"accumulate_into is {into.dtype} {tuple(into.shape)} with strides {into.stride()}: must be contiguous, "
            f"{shape} and {' or '.join(map(str, dtypes))}"
        )


def _empty_gradients(
    dy: Tensor, x: Tensor, row_start: Tensor, with_bias: bool, out_dtype: torch.dtype, accumulate_into: Tensor | None
) -> tuple[Tensor, Tensor]:
    L, n, d = row_start.shape[0], dy.shape[1], x.shape[1]
    dw = torch.empty((L, n, d) if accumulate_into is None else (0,), dtype=out_dtype, device=dy.device)
    dbias = torch.empty((L, n) if with_bias else (0,), dtype=out_dtype, device=dy.device)
    return dw, dbias


@grouped_wgrad.register_fake
def _(
    dy,
    x,
    row_start,
    row_end,
    dy_index,
    dy_divisor,
    x_index,
    x_divisor,
    row_scale,
    scale_index,
    with_bias,
    out_dtype,
    expected_m=None,
    accumulate_into=None,
):
    return _empty_gradients(dy, x, row_start, with_bias, out_dtype, accumulate_into)


def grouped_wgrad_reference(
    dy: Tensor,
    x: Tensor,
    row_start: Tensor,
    row_end: Tensor,
    dy_index: Tensor | None,
    dy_divisor: int,
    x_index: Tensor | None,
    x_divisor: int,
    row_scale: Tensor | None,
    scale_index: Tensor | None,
    with_bias: bool,
    out_dtype: torch.dtype,
    accumulate_into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The torch twin of `grouped_wgrad`, one matmul per expert."""
    dw, dbias = _empty_gradients(dy, x, row_start, with_bias, out_dtype, accumulate_into)
    wide = torch.float64 if dy.dtype == torch.float64 else torch.float32
    for e, (start, end) in enumerate(zip(row_start.tolist(), row_end.tolist(), strict=True)):
        own = slice(start, end)
        g = (dy[own] if dy_index is None else dy[dy_index[own].long() // dy_divisor]).to(wide)
        h = (x[own] if x_index is None else x[x_index[own].long() // x_divisor]).to(wide)
        if with_bias:
            dbias[e] = g.sum(0).to(out_dtype)
        if row_scale is not None:
            g = g * (row_scale[own] if scale_index is None else row_scale[scale_index[own].long()]).to(wide)[:, None]
        if accumulate_into is None:
            dw[e] = (g.T @ h).to(out_dtype)
        else:
            accumulate_into[e] += g.T @ h
    return dw, dbias
