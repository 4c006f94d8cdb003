"""Weights to eight bits by blocks: values beside scales, or at once the wide numbers that they stand for.

Beside the path of a token: where weights are quantized for good, and where training quantizes its wide weights for the
products of a step and its backward needs what those multiplied.

L local experts, N output channels, K what is summed over; a block has R rows and C columns, 128 × 128 where nothing
else is said, and those at the end of N and K have what is left.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from epmoe.ops._triton import INTERPRET, cast_from_float32, cdiv, jit, on_device_of, op, tl, use_triton
from epmoe.ops.quantize import (
    SCALE_BLOCK,
    _widen,
    magnitude_bits,
    round_scaled,
    row_format,
    scale_of,
    scale_of_reference,
)

BLOCK = (SCALE_BLOCK, SCALE_BLOCK)
NUMBERS_PER_THREAD = 64  # fp32 ones, of a piece of a block; at most 8 warps, which 128 × 128 takes


def block_mismatch(block: tuple[int, ...]) -> str | None:
    """Why rows and columns of w can't share a scale by `block`; None: they can.

    A dot of fp8 has at least 32 columns, and rows of activations a scale for 128: a block of columns must not begin
    within either. 128 weight rows of a dot have one scale, or each its own.
    """
    if block == BLOCK:
        return None
    if len(block) == 2 and all(type(n) is int and _divides(n) for n in block) and block[1] >= 32:
        return None
    return "must be (rows, columns): rows 1, 2, 4, .. 128 or a multiple of 128, columns 32, 64 or a multiple of 128"


def _divides(n: int) -> bool:
    """Whether n divides 128, or 128 it."""
    return n > 0 and (SCALE_BLOCK % n == 0 or n % SCALE_BLOCK == 0)


def fitted(block: tuple[int, int], n: int, k: int) -> tuple[int, int]:
    """The same blocks of `[n, k]` with no more rows and columns than there are, in whole pieces of 128."""
    rows, columns = (max(1, cdiv(size, SCALE_BLOCK)) * SCALE_BLOCK for size in (n, k))
    return min(block[0], rows), min(block[1], columns)


@jit
def _read(w, e, row, col, N, K, expert_stride, row_stride, INTERPRETED: tl.constexpr):
    mask = (row < N)[:, None] & (col < K)[None, :]
    at = e * expert_stride + row.to(tl.int64)[:, None] * row_stride + col[None, :]
    return _widen(tl.load(w + at, mask=mask, other=0.0), INTERPRETED)


@jit
def _write(v, values, wide, scale, inverse, e, row, col, N, K, INTERPRETED: tl.constexpr):
    mask = (row < N)[:, None] & (col < K)[None, :]
    to = (e * N + row.to(tl.int64))[:, None] * K + col[None, :]
    if wide is None:
        tl.store(values + to, round_scaled(v, inverse, values.dtype.element_ty, INTERPRETED), mask=mask)
    else:
        q = round_scaled(v, inverse, tl.float8e4nv, INTERPRETED).to(tl.float32) * scale
        tl.store(wide + to, cast_from_float32(q, wide.dtype.element_ty, INTERPRETED), mask=mask)


@jit
def _quantize_blocks_kernel(
    w, values, scales, wide, N, K, expert_stride, row_stride,
    R: tl.constexpr, C: tl.constexpr, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Program (i, j, e) has block (i, j) of expert e, in pieces of at most 128 × 128: those of a larger block it reads
    twice. `values` and `scales`, or `wide`: the other is None."""
    i, j, e = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    TALL: tl.constexpr = R if R < 128 else 128
    WIDE: tl.constexpr = C if C < 128 else 128
    row = i * R + tl.arange(0, TALL)
    col = j * C + tl.arange(0, WIDE)
    if TALL == R and WIDE == C:
        v = _read(w, e, row, col, N, K, expert_stride, row_stride, INTERPRETED)
        amax = tl.max(tl.max(magnitude_bits(v), axis=1), axis=0)
    else:
        amax = 0
        for r in range(0, R, TALL):
            for c in range(0, C, WIDE):
                v = _read(w, e, row + r, col + c, N, K, expert_stride, row_stride, INTERPRETED)
                amax = tl.maximum(amax, tl.max(tl.max(magnitude_bits(v), axis=1), axis=0))
    scale, inverse = scale_of(amax, LARGEST, POWER_OF_TWO)
    if wide is None:
        tl.store(scales + (e * tl.num_programs(0) + i) * tl.num_programs(1) + j, scale)
    if TALL == R and WIDE == C:
        _write(v, values, wide, scale, inverse, e, row, col, N, K, INTERPRETED)
    else:
        for r in range(0, R, TALL):
            for c in range(0, C, WIDE):
                v = _read(w, e, row + r, col + c, N, K, expert_stride, row_stride, INTERPRETED)
                _write(v, values, wide, scale, inverse, e, row + r, col + c, N, K, INTERPRETED)


def _check(w: Tensor, scheme: str, block: tuple[int, int]) -> tuple[int, int]:
    """Blocks of w along N and K."""
    if not row_format(scheme).group:
        raise ValueError(f"scheme={scheme!r}: must be one with scales per block")
    if w.dim() != 3 or not w.is_floating_point() or w.dtype.itemsize < 2 or (w.stride(2) != 1 and w.shape[2] > 1):
        raise ValueError(f"w is {w.dtype} {tuple(w.shape)}: must be floating [L, N, K], dense along K")
    if (reason := block_mismatch(block)) is not None:
        raise ValueError(f"block={block!r}: {reason}")
    return cdiv(w.shape[1], block[0]), cdiv(w.shape[2], block[1])


def _launch(
    w: Tensor,
    scheme: str,
    values: Tensor | None,
    scales: Tensor | None,
    wide: Tensor | None,
    block: tuple[int, int] = BLOCK,
) -> None:
    if w.numel() == 0:
        return
    form, (tall, across) = row_format(scheme), _check(w, scheme, block)
    rows, columns = fitted(block, w.shape[1], w.shape[2])
    piece = min(rows, SCALE_BLOCK) * min(columns, SCALE_BLOCK)
    with on_device_of(w):
        _quantize_blocks_kernel[(tall, across, w.shape[0])](
            w, values, scales, wide, w.shape[1], w.shape[2], w.stride(0), w.stride(1), R=rows, C=columns,
            LARGEST=form.largest, POWER_OF_TWO=form.power_of_two, INTERPRETED=INTERPRET,
            num_warps=max(1, piece // (32 * NUMBERS_PER_THREAD)),
        )  # fmt: skip


@op("quantize_blocks")
def quantize_blocks(
    w: Tensor, scheme: str, block_rows: int = SCALE_BLOCK, block_columns: int = SCALE_BLOCK
) -> tuple[Tensor, Tensor]:
    """Values `[L, N, K]` float8_e4m3fn and scales `[L, ceil(N / R), ceil(K / C)]` float32 of `w [L, N, K]`, by the
    rules of `quantize`; not differentiable.

    Args:
        w: floating, dense along K. Read as float32.
        scheme: `fp8_block` or `fp8_block_ue8m0`.
        block_rows, block_columns: R and C, as `block_mismatch` has them.

    Raises:
        ValueError: another scheme, another block, or a w that is not that.
    """
    block = (block_rows, block_columns)
    tall, across = _check(w, scheme, block)
    if not use_triton(w):
        return quantize_blocks_reference(w, scheme, block)
    values = w.new_empty(w.shape, dtype=row_format(scheme).dtype)
    scales = w.new_empty(w.shape[0], tall, across, dtype=torch.float32)
    _launch(w, scheme, values, scales, None, block)
    return values, scales


@quantize_blocks.register_fake
def _(w, scheme, block_rows=SCALE_BLOCK, block_columns=SCALE_BLOCK):
    tall, across = -(-w.shape[1] // block_rows), -(-w.shape[2] // block_columns)
    scales = w.new_empty(w.shape[0], tall, across, dtype=torch.float32)
    return w.new_empty(w.shape, dtype=row_format(scheme).dtype), scales


@op("round_blocks")
def round_blocks(w: Tensor, scheme: str) -> Tensor:
    """values · scale of `quantize_blocks(w, scheme)` in the dtype of w, without either; not differentiable."""
    _check(w, scheme, BLOCK)
    if not use_triton(w):
        return widen_blocks(*quantize_blocks_reference(w, scheme), w.dtype)
    wide = w.new_empty(w.shape)
    _launch(w, scheme, None, None, wide)
    return wide


@round_blocks.register_fake
def _(w, scheme):
    return w.new_empty(w.shape)


def quantize_blocks_reference(w: Tensor, scheme: str, block: tuple[int, int] = BLOCK) -> tuple[Tensor, Tensor]:
    """The torch twin of `quantize_blocks`, one expert at a time so that it needs little memory: the same bits."""
    form, (tall, across) = row_format(scheme), _check(w, scheme, block)
    rows, columns = fitted(block, w.shape[1], w.shape[2])
    values = w.new_empty(w.shape, dtype=form.dtype)
    scales = w.new_empty(w.shape[0], tall, across, dtype=torch.float32)
    n, k = w.shape[1:]
    for e in range(w.shape[0]):
        padded = F.pad(w[e].detach().float(), (0, across * columns - k, 0, tall * rows - n))
        blocks = padded.view(tall, rows, across, columns)
        amax = blocks.abs().amax((1, 3))
        finite, scale = amax.isfinite(), scale_of_reference(amax, form)
        scaled = torch.where(finite[:, None, :, None], blocks * (1.0 / scale)[:, None, :, None], 0)
        own = scaled.clamp(-form.largest, form.largest).to(form.dtype)
        values[e].copy_(own.view(padded.shape)[:n, :k])
        scales[e].copy_(torch.where(finite, scale, torch.nan))
    return values, scales


def spread_blocks(scales: Tensor, n: int, k: int, block: tuple[int, int]) -> Tensor:
    """The scale of each number of `[L, n, k]`."""
    rows, columns = fitted(block, n, k)
    return scales.repeat_interleave(rows, 1)[:, :n].repeat_interleave(columns, 2)[:, :, :k]


def widen_blocks(values: Tensor, scales: Tensor, dtype: torch.dtype, block: tuple[int, int] = BLOCK) -> Tensor:
    """values · scale as `[L, N, K]` of `dtype`, multiplied in float32 (float64 for float64)."""
    precise = torch.promote_types(dtype, torch.float32)
    _, n, k = values.shape
    return (values.to(precise) * spread_blocks(scales.to(precise), n, k, block)).to(dtype)
