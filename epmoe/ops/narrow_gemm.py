"""Grouped GEMM on rows that are not quantized and narrow weights (`ops/narrow_formats.py`): GEMM1 with router weight,
bias and activation in its epilogue, and GEMM2. On the path of a token where `ops/grouped_gemm.py` stands without
quantization; forward only. Weights are widened tile by tile in registers; sums are in fp32.

Letters: L local experts, H hidden size, I expert intermediate size, T rows of the expert input; N columns of an output,
D the reduction width, S groups along D. Expert e owns rows row_start[e]:row_end[e] (`ops/_segments.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epmoe.ops._configs import expected_rows
from epmoe.ops._narrow_configs import narrow_plan
from epmoe.ops._narrow_triton import narrow_gemm_kernel
from epmoe.ops._segments import RowMap, check_segments, segment_slices
from epmoe.ops._triton import TensorDescriptor, check_buffer, check_flat, on_device_of, op, unit_stride, use_triton
from epmoe.ops.activation import LINEAR, Epilogue, apply_activation, is_gated
from epmoe.ops.narrow_formats import narrow_format, widen

ROW_DTYPES = (torch.bfloat16, torch.float16)


def _launch(
    a: Tensor,
    w: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    outer: Tensor | None,
    bias: Tensor | None,
    rows: RowMap,
    out: Tensor,
    scheme: str,
    expected_m: int | None,
    epilogue: Epilogue,
) -> None:
    num_local, max_rows = w.shape[0], out.shape[0]
    if out.numel() == 0 or num_local == 0 or a.shape[0] == 0:
        return
    expected = expected_rows(max_rows, num_local, expected_m)
    plan = narrow_plan(
        a.device, a.dtype, scheme, num_local, w.shape[1], a.shape[1], w.data_ptr() % 16 == 0, max_rows, expected,
        expected_m, epilogue.gated,
    )  # fmt: skip
    values = w.view(torch.int32) if narrow_format(scheme).bits == 4 else w
    weights: Any = values if plan.descriptor is None else TensorDescriptor(values, *plan.descriptor)
    with on_device_of(a):
        narrow_gemm_kernel[(plan.programs,)](
            a,
            weights,
            scale,
            zero,
            outer,
            bias,
            rows.row_start,
            rows.row_end,
            rows.row_index,
            rows.row_scale,
            out,
            epilogue.alpha,
            epilogue.limit,
            a.stride(0),
            DIVISOR=rows.divisor,
            ACTIVATION=epilogue.activation,
            **plan.constants,
        )


def _check(
    a: Tensor,
    w: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    outer: Tensor | None,
    bias: Tensor | None,
    row_start: Tensor,
    row_end: Tensor,
    row_index: Tensor | None,
    divisor: int,
    scheme: str,
) -> None:
    form = narrow_format(scheme)
    unit_stride(a, "a")
    if a.dtype not in ROW_DTYPES:
        raise ValueError(f"a is {a.dtype}: must be " + " or ".join(map(str, ROW_DTYPES)))
    width = a.shape[1]
    row = form.bytes_per_row(width)
    if w.dim() != 3 or w.dtype != form.dtype or w.shape[2] != row or not w.is_contiguous():
        raise ValueError(
            f"w is {w.dtype} {tuple(w.shape)} with strides {w.stride()}: must be contiguous {form.dtype} [L, N, {row}] "
            f"for scheme={scheme!r} and rows a of {width}"
        )
    if form.bits == 4 and w.data_ptr() % 4:
        raise ValueError(
            f"w begins {w.data_ptr() % 4} bytes past a multiple of 4, and 4-bit numbers are read in words of 4"
        )
    num_local, n, _ = w.shape
    per_group = (num_local, form.groups(width), n)
    for name, t, dtypes, shape in (
        ("w_scale", scale, form.scale_dtypes, per_group),
        ("w_zero", zero, (torch.int8,) if form.zeros else (), per_group),
        ("w_outer", outer, (torch.float32,) if form.outer else (), (num_local, n)),
    ):
        if t is None and not (name == "w_outer" and form.outer):
            continue
        if t is None or not dtypes or t.dtype not in dtypes or tuple(t.shape) != shape or not t.is_contiguous():
            what = "None" if t is None else f"{t.dtype} {tuple(t.shape)} with strides {t.stride()}"
            right = f"contiguous {' or '.join(map(str, dtypes))} {shape}" if dtypes else "None"
            raise ValueError(f"{name} is {what}: must be {right} for scheme={scheme!r}")
    check_segments(row_start, row_end, num_local)
    check_flat(row_index, "row_index", torch.int32)
    if bias is not None and (bias.shape != (num_local, n) or not bias.is_contiguous() or not bias.is_floating_point()):
        raise ValueError(f"bias is {bias.dtype} {tuple(bias.shape)}: must be contiguous, floating and {(num_local, n)}")
    if divisor < 1:
        raise ValueError(f"index_divisor={divisor}: must be at least 1")


@op("narrow_grouped_gemm")
def narrow_grouped_gemm(
    a: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_zero: Tensor | None,
    w_outer: Tensor | None,
    bias: Tensor | None,
    row_start: Tensor,
    row_end: Tensor,
    row_index: Tensor | None,
    index_divisor: int,
    max_rows: int,
    scheme: str,
    expected_m: int | None = None,
) -> Tensor:
    """out[n] = a[row] @ w[e].T + bias[e] for each row n of each expert e, w being what the narrow numbers mean.

    Args:
        a: `[*, D]` bfloat16 or float16; rows may be strided. row = n, or row_index[n] // index_divisor.
        w, w_scale, w_zero, w_outer: values, scales, zeros and outer as in `NarrowWeights`, of width D.
        bias: `[L, N]` floating, or None.
        row_start, row_end: `[L]` int32 on the device, the rows n of each expert, none past max_rows. An empty expert
            costs nothing.
        row_index: `[max_rows]` int32 or None; entries outside the segments are not read.
        scheme: one of `NARROW_SCHEMES`.
        expected_m: the rows an expert should expect, (M·R·K + E) // E; picks the configuration. None: max_rows / L.

    Returns:
        `[max_rows, N]` in a's dtype; rows of no expert are left as allocated. Not differentiable.

    Raises:
        ValueError: shapes, dtypes or strides do not fit together.
    """
    _check(a, w, w_scale, w_zero, w_outer, bias, row_start, row_end, row_index, index_divisor, scheme)
    out = a.new_empty(max_rows, w.shape[1])
    rows = RowMap(row_start, row_end, row_index, index_divisor)
    _gemm(out, a, (w, w_scale, w_zero, w_outer), bias, rows, scheme, expected_m, Epilogue())
    return out


def narrow_grouped_gemm_into(
    out: Tensor,
    a: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_zero: Tensor | None,
    w_outer: Tensor | None,
    bias: Tensor | None,
    row_start: Tensor,
    row_end: Tensor,
    row_index: Tensor | None,
    index_divisor: int,
    scheme: str,
    expected_m: int | None = None,
) -> None:
    """`narrow_grouped_gemm` into a buffer of the caller's, a planned workspace; no torch op.

    Args:
        out: `[max_rows, N]`, contiguous, in a's dtype; rows of no expert are left as they are. The rest as there.

    Raises:
        ValueError: as `narrow_grouped_gemm`, or `out` does not fit.
    """
    _check(a, w, w_scale, w_zero, w_outer, bias, row_start, row_end, row_index, index_divisor, scheme)
    check_buffer(out, "out", (out.shape[0], w.shape[1]), a.dtype, a)
    rows = RowMap(row_start, row_end, row_index, index_divisor)
    _gemm(out, a, (w, w_scale, w_zero, w_outer), bias, rows, scheme, expected_m, Epilogue())


def _gemm(
    out: Tensor,
    a: Tensor,
    narrow: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    bias: Tensor | None,
    rows: RowMap,
    scheme: str,
    expected_m: int | None,
    epilogue: Epilogue,
) -> None:
    if use_triton(a):
        _launch(a, *narrow, bias, rows, out, scheme, expected_m, epilogue)
    else:
        _twin(out, a, *narrow, bias, rows, scheme, epilogue, torch.float32)


@narrow_grouped_gemm.register_fake
def _(a, w, w_scale, w_zero, w_outer, bias, row_start, row_end, row_index, index_divisor, max_rows, *_, **__):
    return a.new_empty(max_rows, w.shape[1])


def narrow_grouped_gemm_reference(
    a: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_zero: Tensor | None,
    w_outer: Tensor | None,
    bias: Tensor | None,
    row_start: Tensor,
    row_end: Tensor,
    row_index: Tensor | None,
    index_divisor: int,
    max_rows: int,
    scheme: str,
    precise: torch.dtype = torch.float32,
) -> Tensor:
    """The torch twin of `narrow_grouped_gemm`, one matmul per expert in `precise`, as which float64 comes out."""
    out = a.new_empty(max_rows, w.shape[1], dtype=precise if precise == torch.float64 else a.dtype)
    rows = RowMap(row_start, row_end, row_index, index_divisor)
    _twin(out, a, w, w_scale, w_zero, w_outer, bias, rows, scheme, Epilogue(), precise)
    return out


def _twin(
    out: Tensor,
    a: Tensor,
    w: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    outer: Tensor | None,
    bias: Tensor | None,
    rows: RowMap,
    scheme: str,
    epilogue: Epilogue,
    precise: torch.dtype,
) -> None:
    for e, own in segment_slices(rows.row_start, rows.row_end):
        zeros, outers = (None if t is None else t[e] for t in (zero, outer))
        y = a[rows.at(own)].to(precise) @ widen(w[e], scale[e], zeros, outers, scheme, a.shape[1], precise).T
        if (scales := rows.scales(own)) is not None:
            y = y * scales.to(precise)
        y = y if bias is None else y + bias[e].to(precise)
        out[own] = (y if epilogue.activation == LINEAR else apply_activation(y, *epilogue)).to(out.dtype)


@op("narrow_grouped_gemm_act")
def narrow_grouped_gemm_act(
    x: Tensor,
    w1: Tensor,
    w1_scale: Tensor,
    w1_zero: Tensor | None,
    w1_outer: Tensor | None,
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
    expected_m: int | None = None,
) -> Tensor:
    """GEMM1: act(scale · x[row] @ w1[e].T + bias1[e]) for each row n, on the fp32 accumulator.

    Args:
        x, row_start, row_end, row_index, index_divisor, max_rows, scheme, expected_m: as in `narrow_grouped_gemm`.
        w1, w1_scale, w1_zero, w1_outer: `[L, 2I, H]`, gate rows then up rows (`[L, I, H]` not gated), narrow.
        bias1: `[L, 2I]` (`[L, I]`) floating, or None.
        row_scale: flat float32 or None, the router weight on the input, read at row_index[n] (n when None).
        activation, alpha, limit: fields of `Activation`.

    Returns:
        act `[max_rows, I]` in x's dtype; rows of no expert are left as allocated.

    Raises:
        ValueError: as `narrow_grouped_gemm`, an unknown activation, or a `row_scale` that is not flat.
    """
    _check(x, w1, w1_scale, w1_zero, w1_outer, bias1, row_start, row_end, row_index, index_divisor, scheme)
    epilogue = Epilogue(activation, alpha, limit)
    out = x.new_empty(max_rows, _act_width(w1, row_scale, epilogue))
    rows = RowMap(row_start, row_end, row_index, index_divisor, row_scale)
    _gemm(out, x, (w1, w1_scale, w1_zero, w1_outer), bias1, rows, scheme, expected_m, epilogue)
    return out


def _act_width(w1: Tensor, row_scale: Tensor | None, epilogue: Epilogue) -> int:
    """I, after what GEMM1 takes besides was found to fit it."""
    check_flat(row_scale, "row_scale", torch.float32)
    gated = is_gated(*epilogue)
    if gated and w1.shape[1] % 2:
        raise ValueError(
            f"w1 has shape {tuple(w1.shape)}: {epilogue.activation!r} is gated and needs an even number of rows"
        )
    return w1.shape[1] // (2 if gated else 1)


def narrow_grouped_gemm_act_into(
    act: Tensor,
    x: Tensor,
    w1: Tensor,
    w1_scale: Tensor,
    w1_zero: Tensor | None,
    w1_outer: Tensor | None,
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
    expected_m: int | None = None,
) -> None:
    """`narrow_grouped_gemm_act` into a buffer of the caller's, a planned workspace; no torch op.

    Args:
        act: `[max_rows, I]`, contiguous, in x's dtype; rows of no expert are left as they are. The rest as there.

    Raises:
        ValueError: as `narrow_grouped_gemm_act`, or `act` does not fit.
    """
    _check(x, w1, w1_scale, w1_zero, w1_outer, bias1, row_start, row_end, row_index, index_divisor, scheme)
    epilogue = Epilogue(activation, alpha, limit)
    check_buffer(act, "act", (act.shape[0], _act_width(w1, row_scale, epilogue)), x.dtype, x)
    rows = RowMap(row_start, row_end, row_index, index_divisor, row_scale)
    _gemm(act, x, (w1, w1_scale, w1_zero, w1_outer), bias1, rows, scheme, expected_m, epilogue)


@narrow_grouped_gemm_act.register_fake
def _(
    x, w1, w1_scale, w1_zero, w1_outer, bias1, row_start, row_end, row_index, index_divisor, max_rows, row_scale,
    activation, alpha, limit, scheme, expected_m=None,
):  # fmt: skip
    return x.new_empty(max_rows, w1.shape[1] // (2 if is_gated(activation, alpha, limit) else 1))


def narrow_grouped_gemm_act_reference(
    x: Tensor,
    w1: Tensor,
    w1_scale: Tensor,
    w1_zero: Tensor | None,
    w1_outer: Tensor | None,
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
    precise: torch.dtype = torch.float32,
) -> Tensor:
    """The torch twin of `narrow_grouped_gemm_act`, one matmul per expert in `precise`, as which float64 comes out."""
    width = w1.shape[1] // (2 if is_gated(activation, alpha, limit) else 1)
    out = x.new_empty(max_rows, width, dtype=precise if precise == torch.float64 else x.dtype)
    rows, epilogue = RowMap(row_start, row_end, row_index, index_divisor, row_scale), Epilogue(activation, alpha, limit)
    _twin(out, x, w1, w1_scale, w1_zero, w1_outer, bias1, rows, scheme, epilogue, precise)
    return out
