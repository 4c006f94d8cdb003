"""From one row per (row, expert) pair to one reduced row: router weight and sum, in fp32, in the order of K."""

from __future__ import annotations

import torch
from torch import Tensor

from epmoe.ops.gather_sum import gather_sum


def weight_and_reduce(y: Tensor, slot: Tensor, topk_weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """out[t] = Σ_k topk_weights[t, k] · y[slot[t, k]], skipping slots of -1.

    Args:
        y: `[N, H]`, one row per pair, in expert order; rows that no slot names may hold anything.
        slot: `[T, K]` int32.
        topk_weights: `[T, K]`, or None where the weight is already in the rows: it is never applied twice.
        dtype: of the result `[T, H]`.
    """
    return gather_sum(y, slot, topk_weights, dtype)
