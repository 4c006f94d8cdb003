"""Quantized checkpoint tensors as numbers: FP8 with a scale per tile, MXFP4 with a scale per 32 values.

Host tensors of one expert or one linear layer at a time; a strip of rows is widened at once, never the whole.

N rows, C columns, G = C / 32 groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""E2M1 by its low three bits; the fourth is the sign."""
_STRIP = 128  # rows widened at once where the scales don't say


def dequantize_fp8(weight: Tensor, scale: Tensor, dtype: torch.dtype, block: tuple[int, int] | None) -> Tensor:
    """weight · scale, `[N, C]` in `dtype`, multiplied in fp32.

    Args:
        weight: `[N, C]`, float8.
        scale: of each tile of `block`: `[⌈N / rows⌉, ⌈C / columns⌉]`, or one for the whole tensor.
        block: (rows, columns) of a tile, such as (128, 128); None: one scale.

    Raises:
        ValueError: scales of another shape.
    """
    rows, columns = weight.shape
    block = (rows, columns) if block is None or scale.numel() == 1 else block
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    if scale.numel() != grid[0] * grid[1] or scale.dim() > 2:
        raise ValueError(
            f"scales have shape {tuple(scale.shape)}: must be {grid} for tiles of {block} of a weight "
            f"{tuple(weight.shape)}"
        )
    by_tile = scale.float().reshape(grid)
    out = torch.empty(weight.shape, dtype=dtype)
    for strip in range(grid[0]):
        lines = slice(strip * block[0], (strip + 1) * block[0])
        by_column = by_tile[strip].repeat_interleave(block[1])[:columns]
        out[lines] = (weight[lines].float() * by_column).to(dtype)
    return out


def dequantize_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`[N, C]` in `dtype`: each value times 2^(scale - 127) of its group of 32.

    Args:
        blocks: `[N, G, 16]` uint8, two values per byte, the first in the low four bits.
        scales: `[N, G]` uint8.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8 or blocks.shape != (*scales.shape, 16):
        raise ValueError(
            f"MXFP4 blocks {blocks.dtype} {tuple(blocks.shape)} with scales {scales.dtype} {tuple(scales.shape)}: must "
            "be uint8 [N, G, 16] and uint8 [N, G]"
        )
    table = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)])
    rows, groups = scales.shape
    out = torch.empty(rows, groups * 32, dtype=dtype)
    for first in range(0, rows, _STRIP):
        strip = blocks[first : first + _STRIP].int()
        values = table[torch.stack((strip & 15, strip >> 4), dim=-1)].flatten(-2)
        exponents = scales[first : first + _STRIP].int() - 127
        out[first : first + _STRIP] = torch.ldexp(values, exponents[..., None]).flatten(1).to(dtype)
    return out
