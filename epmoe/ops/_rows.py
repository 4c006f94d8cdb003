"""What the ops on named rows (`gather_sum`, `scatter_rows`, `gather_dot`) share: their grid, and what they accept.

Letters: M rows on the summed side, J terms per row, S rows on the other side, H row width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epmoe.ops._triton import cdiv, next_power_of_2

ROW_BLOCK = 2048  # columns per program at most: 16 bytes × 128 threads × 2 of a two-byte dtype


def row_grid(num_rows: int, width: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Grid of (row, column block) programs, with the block and the warps that give each thread 16-byte accesses."""
    block = max(128, min(ROW_BLOCK, next_power_of_2(width)))
    return (num_rows, cdiv(width, block)), {"BLOCK": block, "num_warps": 4 if block >= 1024 else 1}


def dense_rows(t: Tensor) -> Tensor:
    """`t` with unit stride along its rows: expanded gradients and transposed views are copied."""
    return t if t.shape[-1] == 0 or t.stride(-1) == 1 else t.contiguous()


def check_terms(rows: Tensor, name: str, index: Tensor, weight: Tensor | None) -> None:
    """Raises `ValueError` unless `rows` is `[_, H]` floating, `index [M, J]` int32 and `weight` float32 like `index`
    (or float64, with float64 rows)."""
    if rows.dim() != 2 or not rows.is_floating_point():
        raise ValueError(f"{name} is {rows.dtype} {tuple(rows.shape)}: must be a floating 2-D tensor of rows")
    if index.dtype != torch.int32 or index.dim() != 2:
        raise ValueError(f"index is {index.dtype} {tuple(index.shape)}: must be int32 [M, J]")
    wide = rows.dtype == torch.float64
    if weight is not None and (
        weight.shape != index.shape or not (weight.dtype == torch.float32 or (wide and weight.dtype == torch.float64))
    ):
        raise ValueError(f"weight is {weight.dtype} {tuple(weight.shape)}: must be float32 {list(index.shape)}")
