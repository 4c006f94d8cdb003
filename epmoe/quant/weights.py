"""Quantized expert weights: eight-bit values beside their scales.

    scheme      values                     scales
    fp8_block   [L, N, K] float8_e4m3fn    [L, ceil(N / R), ceil(K / C)], one per R × C block, edges partial
    fp8_block_ue8m0                        the same, scales rounded up to powers of two
    fp8_row     [L, N, K] float8_e4m3fn    [L, N], one per output channel
    int8_row    [L, N, K] int8             [L, N]

L local experts, N output channels (2I for gate and up rows together), K what is summed over; R and C are 128 unless a
`block` says otherwise.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from epmoe.ops.quantize import quantize, row_format
from epmoe.ops.quantize_blocks import BLOCK, block_mismatch, quantize_blocks, widen_blocks

FP8_SCHEMES = ("fp8_block", "fp8_block_ue8m0", "fp8_row")
WEIGHT_SCHEMES = (*FP8_SCHEMES, "int8_row")


def scheme_block_mismatch(scheme: str | None, block: tuple[int, ...]) -> str | None:
    """Why weights of `scheme` can't have a scale for each `block` of rows and columns; None: they can. What has no
    blocks takes 128 × 128 alone, which it does not look at."""
    if scheme not in WEIGHT_SCHEMES or not row_format(scheme).group:
        return None if block == BLOCK else f"must be {BLOCK}: only weights in fp8_block and fp8_block_ue8m0 have blocks"
    return block_mismatch(block)


def weight_scale_shape(shape: tuple[int, ...], scheme: str, block: tuple[int, int] = BLOCK) -> tuple[int, ...]:
    """Shape of the scales of weights of `shape` [L, N, K].

    Args:
        block: rows and columns that share a scale, of schemes with blocks.

    Raises:
        ValueError: an unknown scheme, or a block that it does not have.
    """
    if scheme not in WEIGHT_SCHEMES:
        raise ValueError(f"scheme={scheme!r}: must be one of {', '.join(WEIGHT_SCHEMES)}")
    if (reason := scheme_block_mismatch(scheme, block)) is not None:
        raise ValueError(f"block={block!r} with scheme={scheme!r}: {reason}")
    num_local, n, k = shape
    return (num_local, -(-n // block[0]), -(-k // block[1])) if row_format(scheme).group else (num_local, n)


@dataclasses.dataclass(frozen=True)
class QuantizedWeights:
    """Weights whose numbers are values · scale.

    Attributes:
        values: `[L, N, K]` float8_e4m3fn, or int8.
        scales: float32 on the same device, of the shape that `scheme` says.
        scheme: one of `WEIGHT_SCHEMES`.
        block: rows and columns that share a scale, of schemes with blocks: rows 1, 2, 4, .. 128 or a multiple of 128,
            columns 32, 64 or a multiple of 128.

    Raises:
        ValueError: these do not fit each other, naming the one that does not.
    """

    values: Tensor
    scales: Tensor
    scheme: str
    block: tuple[int, int] = BLOCK

    def __post_init__(self) -> None:
        values, scales = self.values, self.scales
        if self.scheme not in WEIGHT_SCHEMES:
            raise ValueError(f"QuantizedWeights.scheme={self.scheme!r}: must be one of {', '.join(WEIGHT_SCHEMES)}")
        dtype = row_format(self.scheme).dtype
        if values.dim() != 3 or values.dtype != dtype:
            raise ValueError(
                f"QuantizedWeights.values is {values.dtype} {tuple(values.shape)}: must be {dtype} [L, N, K] for "
                f"scheme={self.scheme!r}"
            )
        if (reason := scheme_block_mismatch(self.scheme, self.block)) is not None:
            raise ValueError(f"QuantizedWeights.block={self.block!r} with scheme={self.scheme!r}: {reason}")
        right = weight_scale_shape(tuple(values.shape), self.scheme, self.block)
        if tuple(scales.shape) != right or scales.dtype != torch.float32:
            raise ValueError(
                f"QuantizedWeights.scales is {scales.dtype} {tuple(scales.shape)}: must be torch.float32 {right} for "
                f"scheme={self.scheme!r}" + (f" and block={self.block}" if self.block != BLOCK else "")
            )
        if scales.device != values.device:
            raise ValueError(f"QuantizedWeights.scales is on {scales.device}: must be on {values.device}, as values")


def quantize_weights(w: Tensor, scheme: str, block: tuple[int, int] = BLOCK) -> QuantizedWeights:
    """`w [L, N, K]` (floating, dense along K) as values and scales, by the rules of `quantize_rows`; one expert at a
    time, so that it needs little memory beside them. Not differentiable.

    Args:
        block: as in `QuantizedWeights`.

    Raises:
        ValueError: an unknown scheme, a block that it does not have, or a w that is not that.
    """
    if w.dim() != 3 or not w.is_floating_point() or w.dtype.itemsize < 2:
        raise ValueError(f"w is {w.dtype} {tuple(w.shape)}: must be float16, bfloat16, float32 or float64 [L, N, K]")
    shape = weight_scale_shape(tuple(w.shape), scheme, block)
    if row_format(scheme).group:
        return QuantizedWeights(*quantize_blocks(w.detach(), scheme, *block), scheme, block)
    values = w.new_empty(w.shape, dtype=row_format(scheme).dtype)
    scales = w.new_empty(shape, dtype=torch.float32)
    for e in range(w.shape[0]):
        own, scale = quantize(w[e].detach(), scheme)
        values[e].copy_(own)
        scales[e].copy_(scale[:, 0])
    return QuantizedWeights(values, scales, scheme)


def dequantize_weights(q: QuantizedWeights, dtype: torch.dtype) -> Tensor:
    """values · scale as `[L, N, K]` of `dtype`, multiplied in float32 (float64 for float64)."""
    if row_format(q.scheme).group:
        return widen_blocks(q.values, q.scales, dtype, q.block)
    precise = torch.promote_types(dtype, torch.float32)
    return (q.values.to(precise) * q.scales.to(precise)[:, :, None]).to(dtype)
