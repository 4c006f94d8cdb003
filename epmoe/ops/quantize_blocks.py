"""Weights to eight bits by blocks of 128 × 128: values beside scales, or at once the wide numbers that they stand for.

Beside the path of a token: where weights are quantized for good, and where training quantizes its wide weights for the
products of a step and its backward needs what those multiplied.

L local experts, N output channels, K what is summed over, B = 128.
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

NUM_WARPS = 8  # a block is 64 fp32 numbers of each of their threads


@jit
def _quantize_blocks_kernel(
    w, values, scales, wide, N, K, expert_stride, row_stride,
    LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr, B: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Program (i, j, e) has block (i, j) of expert e. `values` and `scales`, or `wide`: the other is None."""
    i, j, e = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = i * B + tl.arange(0, B)
    col = j * B + tl.arange(0, B)
    mask = (row < N)[:, None] & (col < K)[None, :]
    at = e * expert_stride + row.to(tl.int64)[:, None] * row_stride + col[None, :]
    v = _widen(tl.load(w + at, mask=mask, other=0.0), INTERPRETED)
    amax = tl.max(tl.max(magnitude_bits(v), axis=1), axis=0)
    scale, inverse = scale_of(amax, LARGEST, POWER_OF_TWO)
    to = (e * N + row.to(tl.int64))[:, None] * K + col[None, :]
    if wide is None:
        tl.store(scales + (e * tl.num_programs(0) + i) * tl.num_programs(1) + j, scale)
        tl.store(values + to, round_scaled(v, inverse, values.dtype.element_ty, INTERPRETED), mask=mask)
    else:
        q = round_scaled(v, inverse, tl.float8e4nv, INTERPRETED).to(tl.float32) * scale
        tl.store(wide + to, cast_from_float32(q, wide.dtype.element_ty, INTERPRETED), mask=mask)


def _check(w: Tensor, scheme: str) -> tuple[int, int]:
    if not row_format(scheme).group:
        raise ValueError(f"scheme={scheme!r}: must be one with scales per block")
    if w.dim() != 3 or not w.is_floating_point() or w.dtype.itemsize < 2 or (w.stride(2) != 1 and w.shape[2] > 1):
        raise ValueError(f"w is {w.dtype} {tuple(w.shape)}: must be floating [L, N, K], dense along K")
    return cdiv(w.shape[1], SCALE_BLOCK), cdiv(w.shape[2], SCALE_BLOCK)


def _launch(w: Tensor, scheme: str, values: Tensor | None, scales: Tensor | None, wide: Tensor | None) -> None:
    if w.numel() == 0:
        return
    form, (tall, across) = row_format(scheme), _check(w, scheme)
    with on_device_of(w):
        _quantize_blocks_kernel[(tall, across, w.shape[0])](
            w, values, scales, wide, w.shape[1], w.shape[2], w.stride(0), w.stride(1), LARGEST=form.largest,
            POWER_OF_TWO=form.power_of_two, B=SCALE_BLOCK, INTERPRETED=INTERPRET, num_warps=NUM_WARPS,
        )  # fmt: skip


@op("quantize_blocks")
def quantize_blocks(w: Tensor, scheme: str) -> tuple[Tensor, Tensor]:
    """Values `[L, N, K]` float8_e4m3fn and scales `[L, ceil(N / 128), ceil(K / 128)]` float32 of `w [L, N, K]`, by the
    rules of `quantize`; not differentiable.

    Args:
        w: floating, dense along K. Read as float32.
        scheme: `fp8_block` or `fp8_block_ue8m0`.

    Raises:
        ValueError: another scheme, or a w that is not that.
    """
    tall, across = _check(w, scheme)
    if not use_triton(w):
        return quantize_blocks_reference(w, scheme)
    values = w.new_empty(w.shape, dtype=row_format(scheme).dtype)
    scales = w.new_empty(w.shape[0], tall, across, dtype=torch.float32)
    _launch(w, scheme, values, scales, None)
    return values, scales


@quantize_blocks.register_fake
def _(w, scheme):
    tall, across = (-(-n // SCALE_BLOCK) for n in w.shape[1:])
    scales = w.new_empty(w.shape[0], tall, across, dtype=torch.float32)
    return w.new_empty(w.shape, dtype=row_format(scheme).dtype), scales


@op("round_blocks")
def round_blocks(w: Tensor, scheme: str) -> Tensor:
    """values · scale of `quantize_blocks(w, scheme)` in the dtype of w, without either; not differentiable."""
    _check(w, scheme)
    if not use_triton(w):
        return _wide(*quantize_blocks_reference(w, scheme), w.dtype)
    wide = w.new_empty(w.shape)
    _launch(w, scheme, None, None, wide)
    return wide


@round_blocks.register_fake
def _(w, scheme):
    return w.new_empty(w.shape)


def quantize_blocks_reference(w: Tensor, scheme: str) -> tuple[Tensor, Tensor]:
    """The torch twin of `quantize_blocks`, one expert at a time so that it needs little memory: the same bits."""
    form, (tall, across) = row_format(scheme), _check(w, scheme)
    values = w.new_empty(w.shape, dtype=form.dtype)
    scales = w.new_empty(w.shape[0], tall, across, dtype=torch.float32)
    n, k = w.shape[1:]
    for e in range(w.shape[0]):
        padded = F.pad(w[e].detach().float(), (0, across * SCALE_BLOCK - k, 0, tall * SCALE_BLOCK - n))
        blocks = padded.view(tall, SCALE_BLOCK, across, SCALE_BLOCK)
        amax = blocks.abs().amax((1, 3))
        finite, scale = amax.isfinite(), scale_of_reference(amax, form)
        scaled = torch.where(finite[:, None, :, None], blocks * (1.0 / scale)[:, None, :, None], 0)
        own = scaled.clamp(-form.largest, form.largest).to(form.dtype)
        values[e].copy_(own.view(padded.shape)[:n, :k])
        scales[e].copy_(torch.where(finite, scale, torch.nan))
    return values, scales


def _wide(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    n, k = values.shape[1:]
    precise = torch.promote_types(dtype, torch.float32)
    scales = scales.to(precise).repeat_interleave(SCALE_BLOCK, 1)[:, :n].repeat_interleave(SCALE_BLOCK, 2)[:, :, :k]
    return (values.to(precise) * scales).to(dtype)
