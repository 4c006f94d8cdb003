"""Grouped GEMM over each expert's rows: GEMM1 with router weight, bias and activation in its epilogue, GEMM2, and both
dgrads. On the path of a token: after `ops/align.py` sorted the assignments, reading their rows in place by index, or on
batched experts where dispatch put them.

Letters: L local experts, H hidden size, I expert intermediate size, K experts per token, T rows of the expert input;
N columns of an output, D the reduction width. Expert e owns rows row_start[e]:row_end[e] (`ops/_segments.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from epmoe.ops._gemm_few_rows import launch_few_rows
from epmoe.ops._gemm_gluon import launch_gluon
from epmoe.ops._gemm_triton import launch_triton
from epmoe.ops._segments import RowMap, check_segments, segment_slices
from epmoe.ops._triton import KERNEL_DTYPES, check_buffer, check_flat, op, scale_dtypes, unit_stride, use_triton
from epmoe.ops.activation import Epilogue, apply_activation, is_gated


def _launch(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    rows: RowMap,
    out: Tensor,
    preact: Tensor | None,
    transpose: bool,
    expected_m: int | None,
    epilogue: Epilogue,
) -> None:
    """By the kernel that is made for so many rows per expert, this dtype and this device."""
    if out.numel() == 0 or a.shape[0] == 0 or w.shape[0] == 0:
        return
    arguments = (a, w, bias, rows, out, preact, transpose, expected_m, epilogue)
    if not (launch_few_rows(*arguments) or launch_gluon(*arguments)):
        launch_triton(*arguments)


def check_gemm(a: Tensor, w: Tensor, bias: Tensor | None, rows: RowMap, transpose: bool) -> None:
    """Raises `ValueError` unless `grouped_gemm` can take these."""
    unit_stride(a, "a")
    dtype, shape = a.dtype, w.shape
    if (dtype not in KERNEL_DTYPES and dtype != torch.float64) or w.dtype != dtype:
        raise ValueError(f"w has dtype {w.dtype}, a {dtype}: both must be the same floating dtype")
    if len(shape) != 3 or (w.stride(2) != 1 and shape[2] > 1) or shape[1 if transpose else 2] != a.shape[1]:
        raise ValueError(
            f"w has shape {tuple(shape)}, strides {w.stride()}: must be 3-D, dense along its last dimension and "
            f"have {a.shape[1]} (the width of a) in dimension {1 if transpose else 2}"
        )
    check_segments(rows.row_start, rows.row_end, shape[0])
    check_flat(rows.row_index, "row_index", torch.int32)
    if bias is not None and (bias.shape != (shape[0], shape[2 if transpose else 1]) or not bias.is_contiguous()):
        raise ValueError(f"bias has shape {tuple(bias.shape)}: must be contiguous, one entry per expert and column")
    if rows.divisor < 1:
        raise ValueError(f"index_divisor={rows.divisor}: must be at least 1")


@op("grouped_gemm")
def grouped_gemm(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    row_start: Tensor,
    row_end: Tensor,
    row_index: Tensor | None,
    index_divisor: int,
    max_rows: int,
    transpose_w: bool,
    expected_m: int | None = None,
) -> Tensor:
    """out[n] = a[row] @ w[e].T + bias[e], or a[row] @ w[e] when `transpose_w` (dgrad), for each row n of each expert e.

    Args:
        a: `[*, D]`; rows may be strided. row = n, or row_index[n] // index_divisor.
        w: `[L, N, D]`, or `[L, D, N]` when `transpose_w`; the dtype of a.
        bias: `[L, N]` or None.
        row_start, row_end: `[L]` int32 on the device, the rows n of each expert, none past max_rows. An empty expert
            costs nothing.
        row_index: `[max_rows]` int32 or None; entries outside the segments are not read.
        expected_m: the rows an expert should expect, (M·R·K + E) // E; picks the configuration and never what is
            computed. None: max_rows / L.

    Returns:
        `[max_rows, N]` in a's dtype, accumulated in fp32; rows of no expert are left as allocated.

    Raises:
        ValueError: shapes, dtypes or inner strides do not fit together.
    """
    rows = RowMap(row_start, row_end, row_index, index_divisor)
    check_gemm(a, w, bias, rows, transpose_w)
    out = torch.empty(max_rows, w.shape[2 if transpose_w else 1], dtype=a.dtype, device=a.device)
    _gemm(out, a, w, bias, rows, transpose_w, expected_m)
    return out


def grouped_gemm_into(
    out: Tensor,
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    row_start: Tensor,
    row_end: Tensor,
    row_index: Tensor | None,
    index_divisor: int,
    transpose_w: bool,
    expected_m: int | None = None,
) -> None:
    """`grouped_gemm` into a buffer of the caller's, a planned workspace; not differentiable and no torch op.

    Args:
        out: `[max_rows, N]`, contiguous, in a's dtype; rows of no expert are left as they are. The rest as there.

    Raises:
        ValueError: as `grouped_gemm`, or `out` does not fit.
    """
    rows = RowMap(row_start, row_end, row_index, index_divisor)
    check_gemm(a, w, bias, rows, transpose_w)
    check_buffer(out, "out", (out.shape[0], w.shape[2 if transpose_w else 1]), a.dtype, a)
    _gemm(out, a, w, bias, rows, transpose_w, expected_m)


def _gemm(
    out: Tensor, a: Tensor, w: Tensor, bias: Tensor | None, rows: RowMap, transpose: bool, expected_m: int | None
) -> None:
    if use_triton(a):
        _launch(a, w, bias, rows, out, None, transpose, expected_m, Epilogue())
    else:
        _gemm_twin(out, a, w, bias, rows, transpose)


@grouped_gemm.register_fake
def _(a, w, bias, row_start, row_end, row_index, index_divisor, max_rows, transpose_w, expected_m=None):
    return a.new_empty(max_rows, w.shape[2 if transpose_w else 1])


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def grouped_gemm_reference(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    row_start: Tensor,
    row_end: Tensor,
    row_index: Tensor | None,
    index_divisor: int,
    max_rows: int,
    transpose_w: bool,
) -> Tensor:
    """The torch twin of `grouped_gemm`, one matmul per expert."""
    out = torch.empty(max_rows, w.shape[2 if transpose_w else 1], dtype=a.dtype, device=a.device)
    _gemm_twin(out, a, w, bias, RowMap(row_start, row_end, row_index, index_divisor), transpose_w)
    return out


def _gemm_twin(out: Tensor, a: Tensor, w: Tensor, bias: Tensor | None, rows: RowMap, transpose: bool) -> None:
    wide = _wide(a.dtype)
    for e, own in segment_slices(rows.row_start, rows.row_end):
        y = a[rows.at(own)].to(wide) @ (w[e] if transpose else w[e].T).to(wide)
        out[own] = (y if bias is None else y + bias[e].to(wide)).to(a.dtype)


@op("grouped_gemm_act")
def grouped_gemm_act(
    x: Tensor,
    w1: Tensor,
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
    save_preact: bool,
    expected_m: int | None = None,
) -> tuple[Tensor, Tensor]:
    """GEMM1: act(scale · (x[row] @ w1[e].T) + bias1[e]) for each row n, the activation on the fp32 accumulator.

    Args:
        x: `[T, H]`; rows may be strided. row = n, or row_index[n] // index_divisor.
        w1: `[L, 2I, H]`, gate rows then up rows (`[L, I, H]` not gated); the dtype of x.
        bias1: `[L, 2I]` (`[L, I]`) or None.
        row_start, row_end, row_index, index_divisor, max_rows, expected_m: as in `grouped_gemm`.
        row_scale: flat float32 or None, the router weight on the input, read at row_index[n] (n when None).
        activation, alpha, limit: fields of `Activation`.
        save_preact: also return what the activation saw, for the backward.

    Returns:
        `act [max_rows, I]` and `preact [max_rows, 2I]` (`[max_rows, I]`; `[0]` unless `save_preact`), in x's dtype.

    Raises:
        ValueError: as `grouped_gemm`, an unknown activation, or a `row_scale` that is not flat.
    """
    rows = RowMap(row_start, row_end, row_index, index_divisor, row_scale)
    epilogue = Epilogue(activation, alpha, limit)
    gated = check_gemm_act(x, w1, bias1, rows, epilogue)
    act, preact = _empty_act(x, w1, max_rows, gated, save_preact)
    _gemm_act(act, preact if save_preact else None, x, w1, bias1, rows, epilogue, expected_m)
    return act, preact


def grouped_gemm_act_into(
    act: Tensor,
    preact: Tensor | None,
    x: Tensor,
    w1: Tensor,
    bias1: Tensor | None,
    row_start: Tensor,
    row_end: Tensor,
    row_index: Tensor | None,
    index_divisor: int,
    row_scale: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
    expected_m: int | None = None,
) -> None:
    """`grouped_gemm_act` into buffers of the caller's, planned workspaces; not differentiable and no torch op.

    Args:
        act: `[max_rows, I]`, contiguous, in x's dtype; rows of no expert are left as they are.
        preact: likewise `[max_rows, 2I]` (`[max_rows, I]` not gated), or None: not saved. The rest as there.

    Raises:
        ValueError: as `grouped_gemm_act`, or a buffer does not fit.
    """
    rows = RowMap(row_start, row_end, row_index, index_divisor, row_scale)
    epilogue = Epilogue(activation, alpha, limit)
    gated = check_gemm_act(x, w1, bias1, rows, epilogue)
    check_buffer(act, "act", (act.shape[0], w1.shape[1] // (2 if gated else 1)), x.dtype, x)
    if preact is not None:
        check_buffer(preact, "preact", (act.shape[0], w1.shape[1]), x.dtype, x)
    _gemm_act(act, preact, x, w1, bias1, rows, epilogue, expected_m)


def check_gemm_act(x: Tensor, w1: Tensor, bias1: Tensor | None, rows: RowMap, epilogue: Epilogue) -> bool:
    """Whether the activation is gated, after all arguments were found to fit `grouped_gemm_act`.

    Raises:
        ValueError: they do not.
    """
    check_gemm(x, w1, bias1, rows, False)
    check_flat(rows.row_scale, "row_scale", *scale_dtypes(x))
    gated = is_gated(*epilogue)
    if gated and w1.shape[1] % 2:
        raise ValueError(
            f"w1 has shape {tuple(w1.shape)}: {epilogue.activation!r} is gated and needs an even number of rows"
        )
    return gated


def _gemm_act(
    act: Tensor,
    preact: Tensor | None,
    x: Tensor,
    w1: Tensor,
    bias1: Tensor | None,
    rows: RowMap,
    epilogue: Epilogue,
    expected_m: int | None,
) -> None:
    if use_triton(x):
        _launch(x, w1, bias1, rows, act, preact, False, expected_m, epilogue)
    else:
        _gemm_act_twin(act, preact, x, w1, bias1, rows, epilogue)


def _empty_act(x: Tensor, w1: Tensor, max_rows: int, gated: bool, save_preact: bool) -> tuple[Tensor, Tensor]:
    act = torch.empty(max_rows, w1.shape[1] // (2 if gated else 1), dtype=x.dtype, device=x.device)
    preact = torch.empty((max_rows, w1.shape[1]) if save_preact else (0,), dtype=x.dtype, device=x.device)
    return act, preact


@grouped_gemm_act.register_fake
def _(
    x,
    w1,
    bias1,
    row_start,
    row_end,
    row_index,
    index_divisor,
    max_rows,
    row_scale,
    activation,
    alpha,
    limit,
    save_preact,
    expected_m=None,
):
    return _empty_act(x, w1, max_rows, is_gated(activation, alpha, limit), save_preact)


def grouped_gemm_act_reference(
    x: Tensor,
    w1: Tensor,
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
    save_preact: bool,
) -> tuple[Tensor, Tensor]:
    """The torch twin of `grouped_gemm_act`, one matmul per expert."""
    rows = RowMap(row_start, row_end, row_index, index_divisor, row_scale)
    act, preact = _empty_act(x, w1, max_rows, is_gated(activation, alpha, limit), save_preact)
    _gemm_act_twin(act, preact if save_preact else None, x, w1, bias1, rows, Epilogue(activation, alpha, limit))
    return act, preact


def _gemm_act_twin(
    act: Tensor,
    preact: Tensor | None,
    x: Tensor,
    w1: Tensor,
    bias1: Tensor | None,
    rows: RowMap,
    epilogue: Epilogue,
) -> None:
    wide = _wide(x.dtype)
    for e, own in segment_slices(rows.row_start, rows.row_end):
        y = x[rows.at(own)].to(wide) @ w1[e].T.to(wide)
        if (scales := rows.scales(own)) is not None:
            y = y * scales.to(wide)
        y = y if bias1 is None else y + bias1[e].to(wide)
        if preact is not None:
            preact[own] = y.to(x.dtype)
        act[own] = apply_activation(y, *epilogue).to(x.dtype)
