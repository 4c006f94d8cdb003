"""Quantized checkpoint tensors as numbers: FP8 with a scale per tile, channel or tensor, MXFP4 with one per 32 values.

Host tensors of one expert or one linear layer at a time; a strip of rows is widened at once, never the whole.

N rows, C columns, G = C / 32 groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""E2M1 by its low three bits; the fourth is the sign."""
_STRIP = 128  # rows widened at once


def dequantize_fp8(weight: Tensor, scale: Tensor, dtype: torch.dtype, block: tuple[int, int] | None) -> Tensor:
    """weight · scale, `[N, C]` in `dtype`, multiplied in fp32.

    Args:
        weight: `[N, C]`, float8.
        scale: of each tile of `block`: `[⌈N / rows⌉, ⌈C / columns⌉]`; or one number for the whole tensor, `[N]` or
            `[N, 1]` for each row, `[1, C]` for each column.
        block: (rows, columns) of a tile, such as (128, 128); None: there are no tiles.

    Raises:
        ValueError: scales of another shape.
    """
    rows, columns = weight.shape
    tiles = None if block is None else (-(-rows // block[0]), -(-columns // block[1]))
    given = tuple(scale.shape)
    if scale.numel() == 1 and len(given) <= 2:
        block = (rows, columns)
    elif given in ((rows,), (rows, 1)) and given != tiles:
        block = (1, columns)
    elif given == (1, columns) and given != tiles:
        block = (rows, 1)
    elif block is None or given != tiles:
        wanted = "" if tiles is None else f"{tiles} for tiles of {block}, or "
        raise ValueError(
            f"scales have shape {given}: must be {wanted}one number, [{rows}], [{rows}, 1] or [1, {columns}] for a "
            f"weight {(rows, columns)}"
        )
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    by_tile = scale.float().reshape(grid)
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    for first in range(0, rows, _STRIP):
        lines = torch.arange(first, min(first + _STRIP, rows), device=weight.device)
        by_column = by_tile[lines // block[0]].repeat_interleave(block[1], 1)[:, :columns]
        out[lines] = (weight[first : first + _STRIP].float() * by_column).to(dtype)
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
    table = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)], device=blocks.device)
    rows, groups = scales.shape
    out = torch.empty(rows, groups * 32, dtype=dtype, device=blocks.device)
    for first in range(0, rows, _STRIP):
        strip = blocks[first : first + _STRIP].int()
        values = table[torch.stack((strip & 15, strip >> 4), dim=-1)].flatten(-2)
        exponents = scales[first : first + _STRIP].int() - 127
        out[first : first + _STRIP] = torch.ldexp(values, exponents[..., None]).flatten(1).to(dtype)
    return out
