"""Quantized checkpoint tensors as numbers: FP8 and INT8 with a scale per tile, channel or tensor, MXFP4 with one per 32
values, NVFP4 with one per 16 and one for all, integers of four and eight bits with scales and zero points of groups.

Host tensors of one expert or one linear layer at a time; a strip of rows is widened at once, never the whole.

N rows, C columns, G = C / 32 groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epmoe.quant.checkpoint_formats import Integers

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""E2M1 by its low three bits; the fourth is the sign."""
_STRIP = 128  # rows widened at once


def dequantize_scaled(weight: Tensor, scale: Tensor, dtype: torch.dtype, block: tuple[int, int] | None) -> Tensor:
    """weight · scale, `[N, C]` in `dtype`, multiplied in fp32.

    Args:
        weight: `[N, C]`, float8 or int8.
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
    rows, groups = scales.shape
    out = torch.empty(rows, groups * 32, dtype=dtype, device=blocks.device)
    for first in range(0, rows, _STRIP):
        values = _fp4_numbers(blocks[first : first + _STRIP])
        exponents = scales[first : first + _STRIP].int() - 127
        out[first : first + _STRIP] = torch.ldexp(values, exponents[..., None]).flatten(1).to(dtype)
    return out


def dequantize_nvfp4(packed: Tensor, scales: Tensor, outer: Tensor, dtype: torch.dtype) -> Tensor:
    """`[N, C]` in `dtype`: each value times its group's scale times `outer`, multiplied in fp32.

    Args:
        packed: `[N, C / 2]` uint8, two values per byte, the first in the low four bits.
        scales: `[N, C / 16]` float8_e4m3fn.
        outer: one number.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    right = scales.dtype == torch.float8_e4m3fn and packed.dtype == torch.uint8
    if not right or packed.dim() != 2 or (packed.shape[0], packed.shape[1] / 8) != tuple(scales.shape):
        raise ValueError(
            f"NVFP4 values {packed.dtype} {tuple(packed.shape)} with scales {scales.dtype} {tuple(scales.shape)}: must "
            "be uint8 [N, C / 2] and float8_e4m3fn [N, C / 16]"
        )
    out = torch.empty(packed.shape[0], packed.shape[1] * 2, dtype=dtype, device=packed.device)
    for first in range(0, len(out), _STRIP):
        values = _fp4_numbers(packed[first : first + _STRIP]).unflatten(1, (-1, 16))
        by_group = scales[first : first + _STRIP].float() * outer.float()
        out[first : first + _STRIP] = (values * by_group[..., None]).flatten(1).to(dtype)
    return out


def dequantize_integers(integers: Integers, dtype: torch.dtype) -> Tensor:
    """`[N, C]` in `dtype`: (code - zero point) · scale of each column's group, computed in fp32."""
    codes, points, scales, group = integers[:4]
    out = torch.empty(codes.shape[1], codes.shape[0], dtype=dtype, device=codes.device)
    for first in range(0, len(codes), _STRIP):
        own = group[first : first + _STRIP]
        values = codes[first : first + _STRIP].float() - points[own].float()
        out[:, first : first + _STRIP] = (values * scales[own].float()).T.to(dtype)
    return out


def _fp4_numbers(packed: Tensor) -> Tensor:
    """uint8 `[..., B]` as float32 `[..., 2·B]`."""
    table = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)], device=packed.device)
    codes = packed.int()
    return table[torch.stack((codes & 15, codes >> 4), dim=-1)].flatten(-2)
