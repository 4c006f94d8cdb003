"""Weight and bias gradients of a grouped GEMM: per expert, the sum of its rows' outer products.

On the path of a token backwards: dW2 from (dout, w · act), dW1 from (dpre, x), both read in place by row index.

Letters: L local experts, K experts per token, T rows; the weight is `[L, N, D]`: N columns of dy, D columns of x.
Expert e owns rows row_start[e]:row_end[e] (`ops/_segments.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from epmoe.ops._configs import expected_rows, num_programs, wgrad_config
from epmoe.ops._segments import check_segments
from epmoe.ops._triton import (
    INTERPRET,
    KERNEL_DTYPES,
    cast_from_float32,
    cdiv,
    check_flat,
    dot_accumulate,
    jit,
    on_device_of,
    op,
    scale_dtypes,
    tl,
    unit_stride,
    use_triton,
)


@jit(do_not_specialize_on_alignment=["row_start", "row_end"])
def _grouped_wgrad_kernel(
    dy,
    x,
    row_start,
    row_end,
    dy_index,
    x_index,
    row_scale,
    scale_index,
    dw,
    dy_stride,
    x_stride,
    L: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    DY_DIVISOR: tl.constexpr,
    X_DIVISOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """dw[e, n, d] in tiles of BLOCK_M n by BLOCK_N d, in steps of BLOCK_K rows.

    row_start = [0, 5, 5], row_end = [5, 5, 9], BLOCK_K = 4: a tile of expert 0 adds rows 0..3 and then row 4, one of
    expert 1 stores zeros.
    A tile has one owner and its rows come in order: the same inputs give the same bits.
    """
    TILES_M: tl.constexpr = (N + BLOCK_M - 1) // BLOCK_M
    TILES_N: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    for tile in tl.range(tl.program_id(0), L * TILES_M * TILES_N, tl.num_programs(0)):
        e = tile // (TILES_M * TILES_N)
        of_expert = tile % (TILES_M * TILES_N)
        first_m = of_expert // (GROUP_M * TILES_N) * GROUP_M
        group = tl.minimum(TILES_M - first_m, GROUP_M)
        within = of_expert - first_m * TILES_N
        ns = (first_m + within % group) * BLOCK_M + tl.arange(0, BLOCK_M)
        ds = within // group * BLOCK_N + tl.arange(0, BLOCK_N)

        begin = tl.load(row_start + e)
        end = tl.load(row_end + e)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in tl.range(begin, end, BLOCK_K):
            rows = step + tl.arange(0, BLOCK_K)
            real = rows < end  # both operands are masked: a row of padding may be NaN, and NaN * 0 is NaN
            dy_rows = rows
            if dy_index is not None:
                dy_rows = tl.load(dy_index + rows, mask=real, other=0) // DY_DIVISOR
            x_rows = rows
            if x_index is not None:
                x_rows = tl.load(x_index + rows, mask=real, other=0) // X_DIVISOR
            dy_at = dy + dy_rows.to(tl.int64)[:, None] * dy_stride + ns[None, :]
            x_at = x + x_rows.to(tl.int64)[:, None] * x_stride + ds[None, :]
            if N % BLOCK_M == 0:
                g = tl.load(dy_at, mask=real[:, None], other=0.0)
            else:
                g = tl.load(dy_at, mask=real[:, None] & (ns < N)[None, :], other=0.0)
            if D % BLOCK_N == 0:
                h = tl.load(x_at, mask=real[:, None], other=0.0)
            else:
                h = tl.load(x_at, mask=real[:, None] & (ds < D)[None, :], other=0.0)
            if row_scale is not None:
                position = rows
                if scale_index is not None:
                    position = tl.load(scale_index + rows, mask=real, other=0)
                scale = tl.load(row_scale + position, mask=real, other=0.0)
                g = cast_from_float32(g.to(tl.float32) * scale[:, None], dy.dtype.element_ty, INTERPRETED)
            acc = dot_accumulate(g.T, h, acc, INTERPRETED)

        at = dw + tl.cast(e, tl.int64) * (N * D) + ns.to(tl.int64)[:, None] * D + ds[None, :]
        inside = (ns < N)[:, None] & (ds < D)[None, :]
        tl.store(at, cast_from_float32(acc, dw.dtype.element_ty, INTERPRETED), mask=inside)


@jit(do_not_specialize_on_alignment=["row_start", "row_end"])
def _grouped_bias_kernel(
    dy,
    row_start,
    row_end,
    dy_index,
    dbias,
    dy_stride,
    N: tl.constexpr,
    DY_DIVISOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """dbias[e, n]: one program sums the rows of one expert over BLOCK_M columns, BLOCK_K rows at a time."""
    TILES_M: tl.constexpr = (N + BLOCK_M - 1) // BLOCK_M
    e = tl.program_id(0) // TILES_M
    ns = tl.program_id(0) % TILES_M * BLOCK_M + tl.arange(0, BLOCK_M)
    begin = tl.load(row_start + e)
    end = tl.load(row_end + e)
    acc = tl.zeros((BLOCK_K, BLOCK_M), tl.float32)
    for step in tl.range(begin, end, BLOCK_K):
        rows = step + tl.arange(0, BLOCK_K)
        real = rows < end
        dy_rows = rows
        if dy_index is not None:
            dy_rows = tl.load(dy_index + rows, mask=real, other=0) // DY_DIVISOR
        at = dy + dy_rows.to(tl.int64)[:, None] * dy_stride + ns[None, :]
        acc += tl.load(at, mask=real[:, None] & (ns < N)[None, :], other=0.0).to(tl.float32)
    total = cast_from_float32(tl.sum(acc, axis=0), dbias.dtype.element_ty, INTERPRETED)
    tl.store(dbias + e.to(tl.int64) * N + ns, total, mask=ns < N)


@op("grouped_wgrad")
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

    Returns:
        `dw [L, N, D]` and `dbias [L, N]` (`[0]` unless `with_bias`); experts without rows get exact zeros.

    Raises:
        ValueError: dtypes, strides, segments or divisors are not as above.
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
        )
    dw, dbias = _empty_gradients(dy, x, row_start, with_bias, out_dtype)
    L, n, d = dw.shape
    if L == 0 or n == 0:
        return dw, dbias
    max_rows = next((t.shape[0] for t in (dy_index, x_index) if t is not None), dy.shape[0])
    gathered = dy_index is not None or x_index is not None
    config = wgrad_config(dy.device, dy.dtype, expected_rows(max_rows, L, expected_m), n, d, gathered)
    with on_device_of(dy):
        if d > 0:
            tiles = L * cdiv(n, config.block_m) * cdiv(d, config.block_n)
            _grouped_wgrad_kernel[(num_programs(dy.device, config.programs_per_sm, tiles),)](
                dy,
                x,
                row_start,
                row_end,
                dy_index,
                x_index,
                row_scale,
                scale_index,
                dw,
                dy_stride,
                x_stride,
                L=L,
                N=n,
                D=d,
                DY_DIVISOR=dy_divisor,
                X_DIVISOR=x_divisor,
                BLOCK_M=config.block_m,
                BLOCK_N=config.block_n,
                BLOCK_K=config.block_k,
                GROUP_M=config.group_m,
                INTERPRETED=INTERPRET,
                num_warps=config.num_warps,
                num_stages=config.num_stages,
            )
        if with_bias:
            _grouped_bias_kernel[(L * cdiv(n, config.block_m),)](
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


def _empty_gradients(
    dy: Tensor, x: Tensor, row_start: Tensor, with_bias: bool, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    L, n, d = row_start.shape[0], dy.shape[1], x.shape[1]
    dw = torch.empty(L, n, d, dtype=out_dtype, device=dy.device)
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
):
    return _empty_gradients(dy, x, row_start, with_bias, out_dtype)


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
) -> tuple[Tensor, Tensor]:
    """The torch twin of `grouped_wgrad`, one matmul per expert."""
    dw, dbias = _empty_gradients(dy, x, row_start, with_bias, out_dtype)
    wide = torch.float64 if dy.dtype == torch.float64 else torch.float32
    for e, (start, end) in enumerate(zip(row_start.tolist(), row_end.tolist(), strict=True)):
        own = slice(start, end)
        g = (dy[own] if dy_index is None else dy[dy_index[own].long() // dy_divisor]).to(wide)
        h = (x[own] if x_index is None else x[x_index[own].long() // x_divisor]).to(wide)
        if with_bias:
            dbias[e] = g.sum(0).to(out_dtype)
        if row_scale is not None:
            g = g * (row_scale[own] if scale_index is None else row_scale[scale_index[own].long()]).to(wide)[:, None]
        dw[e] = (g.T @ h).to(out_dtype)
    return dw, dbias
