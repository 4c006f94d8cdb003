"""The peer of bench `layer`: expert parallelism as one writes it with torch alone, in the manner of a plain all-to-all.

    x [M,H] ─ one row per (token, expert) pair, by expert ─ all-to-all ─ by local expert ─ grouped_mm ─ silu · up ─
    grouped_mm ─ back to source order ─ all-to-all ─ weighted sum over a token's K rows ──► [M,H]

Written to be good at what it is: nothing is padded, counts cross once and the host reads them once, and the gradient of
every reordering is the inverse reordering (autograd's own for an index would sort and add). It runs eagerly.

M tokens on this rank, N = M·K pairs, T pairs received, H width, I expert width, E experts, L = E/R here, K per token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class _Exchange(torch.autograd.Function):
    """`send[sum(sent)]` rows, split by rank, for `[sum(received)]` rows; backward sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grad.contiguous(), ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    out = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(out, rows, received, sent, group=group)
    return out


class _Reorder(torch.autograd.Function):
    """out[n] = rows[order[n] // copies], for a permutation `order` of len(rows)·copies and its inverse."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return rows.index_select(0, order // copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        grad = grad.index_select(0, inverse)
        if ctx.copies > 1:
            grad = grad.view(-1, ctx.copies, grad.shape[1]).sum(1)
        return grad, None, None, None


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    return inverse


def all_to_all_grouped_mm(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w1: Tensor, w2: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """The routed SwiGLU MLP of experts spread over `group` in equal, consecutive runs; differentiable.

    Args:
        x: `[M, H]` contiguous, of a dtype that `torch.nn.functional.grouped_mm` takes.
        topk_ids: `[M, K]` integers, every one in [0, E).
        topk_weights: `[M, K]` float.
        w1: `[L, 2I, H]`, gate rows then up rows; w2: `[L, H, I]`.

    Returns:
        `[M, H]`, in the dtype of x.
    """
    tokens, k = topk_ids.shape
    ranks, local = dist.get_world_size(group), w1.shape[0]

    by_expert, order = topk_ids.reshape(-1).sort(stable=True)  # pairs by expert, and so by rank
    every_expert = torch.arange(ranks * local, dtype=by_expert.dtype, device=x.device)
    bounds = torch.searchsorted(by_expert, every_expert, right=True)
    counts = bounds.diff(prepend=bounds.new_zeros(1))  # [E]
    incoming = torch.empty_like(counts)  # [R·L], by source rank
    dist.all_to_all_single(incoming, counts, group=group)
    sent, received = torch.stack([counts, incoming]).view(2, ranks, local).sum(2).tolist()  # waits for the device

    inverse = _inverse(order)
    rows = _Exchange.apply(_Reorder.apply(x, order, inverse, k), sent, received, group)  # [T, H]

    experts = torch.arange(local, device=x.device).repeat(ranks)
    expert_of_row = experts.repeat_interleave(incoming, output_size=sum(received))
    to_experts = expert_of_row.argsort(stable=True)
    to_sources = _inverse(to_experts)
    ends = incoming.view(ranks, local).sum(0).cumsum(0).to(torch.int32)
    y = _mlp(_Reorder.apply(rows, to_experts, to_sources, 1), w1, w2, ends)
    back = _Exchange.apply(_Reorder.apply(y, to_sources, to_experts, 1), received, sent, group)

    by_token = _Reorder.apply(back, inverse, order, 1).view(tokens, k, -1)
    return torch.bmm(topk_weights.to(x.dtype)[:, None], by_token).squeeze(1)


def _mlp(rows: Tensor, w1: Tensor, w2: Tensor, ends: Tensor) -> Tensor:
    if rows.shape[0] == 0:  # grouped_mm takes no empty operand; the weights get gradients of zero
        return rows + (w1.sum() + w2.sum()) * 0
    gate, up = F.grouped_mm(rows, w1.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    return F.grouped_mm(F.silu(gate) * up, w2.transpose(1, 2), offs=ends)
