"""Between the layouts: received rows [T,H] spread into [L,C,H] for batched experts, and their rows summed back to
[T,H].

Works behind any dispatcher, on the device alone: counts never reach the host. An expert with more than C rows
overflows; `Batch.overflow` counts what found no place, and `MoEKernel` decides what follows.

T rows, K experts per token, L local experts, C places per expert, H width.

Example, L = 2, C = 2, local experts of three rows [[0, 1], [0, -], [0, -]] (K = 2):
    slot = [[0, 2], [1, -1], [-1, -1]]     expert_num_tokens = [2, 1]     overflow = [1, 0]
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from epmoe.dispatch.inputs import BatchedInput, ExpertInput
from epmoe.ops.align import align_rows
from epmoe.ops.gather_sum import gather_sum
from epmoe.ops.scatter_rows import scatter_rows


@dataclasses.dataclass(frozen=True)
class Batch:
    """Attributes: `rows` for the experts; `overflow [L]` int32, how many rows of each expert found no place."""

    rows: BatchedInput
    overflow: Tensor


class _Spread(torch.autograd.Function):
    """out[slot[t, k]] = x[t]; backward sums a row's gradients in the order of K. Places without a row are zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slot: Tensor, places: int) -> Tensor:
        ctx.save_for_backward(slot)
        return scatter_rows(x, slot, None, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slot,) = ctx.saved_tensors
        return gather_sum(grad.contiguous(), slot, None, grad.dtype), None, None


def _spread_quantized(rows: ExpertInput, slot: Tensor, places: int) -> tuple[Tensor, Tensor]:
    """Values `[places, H]` and scales `[places, S]` as they arrived; without a gradient. Places without a row hold that
    of any other."""
    assert rows.x_scale is not None and rows.source is None, "rows with a gradient are dequantized first"
    if rows.x.shape[0] == 0:
        return rows.x.new_zeros(places, rows.x.shape[1]), rows.x_scale.new_zeros(places, rows.x_scale.shape[1])
    tokens = torch.arange(slot.shape[0], device=slot.device)[:, None].expand_as(slot)
    source = tokens.new_zeros(places + 1)  # the last place is nobody's
    source[torch.where(slot >= 0, slot, places).long()] = tokens
    values = rows.x.view(torch.uint8)[source[:-1]].view(rows.x.dtype)  # there are kernels for bytes everywhere
    return values, rows.x_scale[source[:-1]]


def batch(rows: ExpertInput, capacity: int, *, with_weights: bool = False) -> Batch:
    """The rows of each local expert, side by side, in the order they came.

    Args:
        rows: in the standard layout; quantized ones, which no gradient may flow to, are spread as they are.
        capacity: C, places per expert. T can't overflow.
        with_weights: spread the router weights, for experts that apply them to their input; combine applies none then.
    """
    expected_m = rows.expected_m
    if expected_m is None:
        expected_m = -(-rows.max_assignments // rows.num_local)
    places = rows.num_local * capacity
    _, offsets, sorted_slot = align_rows(rows.topk_ids, rows.expert_map, rows.num_local, rows.max_assignments)
    counts = offsets.diff()
    expert = torch.searchsorted(offsets[1:], sorted_slot, right=True, out_int32=True)  # of each pair; of -1: any
    column = sorted_slot - offsets[expert.clamp_max(rows.num_local - 1)]
    slot = torch.where((sorted_slot >= 0) & (column < capacity), expert * capacity + column, -1)
    scales = None
    if rows.x_scale is None:
        x = _Spread.apply(rows.x, slot, places)
    else:
        x, scales = _spread_quantized(rows, slot, places)
        scales = scales.view(rows.num_local, capacity, scales.shape[1])
    x = x.view(rows.num_local, capacity, rows.x.shape[1])
    weights = None
    if with_weights:
        # each pair is a row of one weight: spread as such
        flat = rows.topk_weights.reshape(-1, 1)
        weights = _Spread.apply(flat, slot.view(-1, 1), places).view(rows.num_local, capacity)
    adapter_ids = None
    if rows.adapter_ids is not None:
        of_pair = rows.adapter_ids[:, None].expand(-1, slot.shape[1]).reshape(-1)
        adapter_ids = slot.new_full((places + 1,), -1)
        adapter_ids[torch.where(slot >= 0, slot, places).view(-1).long()] = of_pair  # the last place is nobody's
        adapter_ids = adapter_ids[:-1].view(rows.num_local, capacity)
    batched = BatchedInput(
        x,
        counts.clamp_max(capacity),
        rows.handle,
        weights,
        expected_m,
        slot,
        None if with_weights else rows.topk_weights,
        adapter_ids,
        scales,
        rows.scheme,
    )
    return Batch(batched, (counts - capacity).clamp_min(0))
