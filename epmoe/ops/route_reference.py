"""The torch twin of `ops.route`: what its kernels must compute, on any device, in float32 or float64, at any width.

Stands beside the first step on the path of a token; `epmoe.router` also takes scores from here when they are asked for.

Letters: M tokens, E experts, K experts per token; z logits, s scores.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

RENORM_EPS = 1e-20  # DeepSeek-V3's
_NEG_INF = -math.inf


def clean_logits(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Finite logits (0 where unusable, so that no later gradient meets an infinity) and which are usable."""
    usable = logits > _NEG_INF  # false for NaN
    return torch.where(usable, logits, 0.0).clamp(max=torch.finfo(logits.dtype).max), usable


def score_logits(z: Tensor, usable: Tensor, scoring: str) -> Tensor:
    """Scores `[M, E]` of clean logits, before any bias; 0 where unusable; differentiable."""
    if scoring in ("softmax", "topk_softmax"):
        return _masked_softmax(z, usable)
    return torch.where(usable, _sigmoid(z) if scoring == "sigmoid" else _sqrt_softplus(z), 0.0)


def _masked_softmax(z: Tensor, usable: Tensor) -> Tensor:
    """Softmax over the usable entries of each row, 0 elsewhere; a row with none is all 0."""
    some = usable.any(-1, keepdim=True)
    return torch.where(usable, torch.where(usable | ~some, z, _NEG_INF).softmax(-1), 0.0)


# Equal logits must get equal scores or the lower id would not win. On CPU torch.sigmoid and softplus differ by a
# rounding between the vectorized body of a tensor and its tail; exp and log1p don't. Below -40 both functions are their
# asymptote, to the last bit of fp64, where the formulas above it would underflow into gradients of 0 * inf.
_TAIL = 40.0


def _sigmoid(z: Tensor) -> Tensor:
    low = z < -_TAIL
    return torch.where(low, torch.where(low, z, 0.0).exp(), 1 / (1 + (-z.clamp(min=-_TAIL)).exp()))


def _sqrt_softplus(z: Tensor) -> Tensor:
    low = z < -_TAIL
    softplus = torch.where(z > _TAIL, z, z.clamp(-_TAIL, _TAIL).exp().log1p())
    return torch.where(low, torch.where(low, z / 2, 0.0).exp(), torch.where(low, 1.0, softplus).sqrt())


def route_reference(
    logits: Tensor,
    selection_bias: Tensor | None,
    topk_ids: Tensor | None,
    token_mask: Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scaling_factor: float,
    num_groups: int,
    topk_groups: int,
    group_score: str,
) -> tuple[Tensor, Tensor]:
    """The torch twin of `route_topk`, differentiable by autograd: (topk_ids, topk_weights)."""
    z, usable = clean_logits(logits)
    if token_mask is not None:
        usable = usable & token_mask[:, None]
    scores = None if scoring == "topk_softmax" else score_logits(z, usable, scoring)
    if topk_ids is None:
        base = (z if scores is None else scores).detach()
        topk_ids = _choose(base, usable, selection_bias, top_k, num_groups, topk_groups, group_score)
    elif token_mask is not None:
        topk_ids = torch.where(token_mask[:, None], topk_ids, -1)
    index = topk_ids.clamp(min=0).long()
    chosen = (topk_ids >= 0) & usable.gather(1, index)  # a forced id may name an expert that is unusable now
    if scores is None:
        weights = _masked_softmax(z.gather(1, index), chosen)
    else:
        weights = torch.where(chosen, scores.gather(1, index), 0.0)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + RENORM_EPS)
    return topk_ids, weights * scaling_factor


@torch.no_grad()
def _choose(
    base: Tensor,
    usable: Tensor,
    bias: Tensor | None,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    group_score: str,
) -> Tensor:
    """int32 `[M, K]`: the best of `base + bias`, within the best groups; -1 where no usable expert is left."""
    if bias is not None:
        base = base + bias.to(base.dtype)
    value = torch.where(usable & ~base.isnan(), base, _NEG_INF)
    num_tokens, num_experts = value.shape
    if topk_groups < num_groups:
        grouped = value.view(num_tokens, num_groups, num_experts // num_groups)
        best = grouped.amax(-1)
        group = best
        if group_score == "top2_sum":
            top2 = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values
            total = torch.where(top2 > _NEG_INF, top2, 0.0).sum(-1).clamp(min=torch.finfo(value.dtype).min)
            group = torch.where(best > _NEG_INF, total, _NEG_INF)
        kept = torch.zeros_like(group, dtype=torch.bool).scatter_(1, _best(group, topk_groups), True)
        value = torch.where(kept[:, :, None], grouped, _NEG_INF).view(num_tokens, num_experts)
    index = _best(value, top_k)
    return torch.where(value.gather(1, index) > _NEG_INF, index, -1).to(torch.int32)


def _best(value: Tensor, k: int) -> Tensor:
    """Indices of the k largest of each row of `value [M, N]` without NaN, in order; of equals the lowest index first.

    torch.topk promises no order among equals, so fp32 values become distinct int64 keys that sort the same way: the
    float's bits, flipped where negative, above N-1-index.
    """
    if value.dtype != torch.float32:
        return value.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    bits = torch.where(value == 0, 0.0, value).view(torch.int32).long()  # -0.0 equals 0.0
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    tie_break = torch.arange(value.shape[-1] - 1, -1, -1, device=value.device)
    return (order * 2**32 + tie_break).topk(k, dim=-1).indices


def route_backward_reference(
    dweights: Tensor, logits: Tensor, topk_ids: Tensor, scoring: str, renormalize: bool, scaling_factor: float
) -> Tensor:
    """Gradient of logits `[M, E]` from that of topk_weights `[M, K]`, of the ids that `route_topk` returned.

    With v the weights before renormalisation, D = Σ v + 1e-20 and g = scaling · dweights:
    renormalize: g <- (g - Σ g·v / D) / D. Then, with d_e the sum of g over the slots that hold e,
    softmax: dz = s · (d - Σ g·v); topk_softmax: d of v · (g - Σ g·v); else: d of g · s'(z).
    0 for logits that are NaN or infinite, whatever dweights holds for slots without an expert.
    """
    z, usable = clean_logits(logits)
    index = topk_ids.clamp(min=0).long()
    chosen = (topk_ids >= 0) & usable.gather(1, index)
    zk = z.gather(1, index)
    scores = score_logits(z, usable, scoring)
    v = _masked_softmax(zk, chosen) if scoring == "topk_softmax" else torch.where(chosen, scores.gather(1, index), 0.0)
    g = torch.where(chosen, dweights * scaling_factor, 0.0)
    if renormalize:
        divisor = v.sum(-1, keepdim=True) + RENORM_EPS
        g = torch.where(chosen, (g - (g * v / divisor).sum(-1, keepdim=True)) / divisor, 0.0)
    dot = (g * v).sum(-1, keepdim=True)
    if scoring == "topk_softmax":
        g = v * (g - dot)
    elif scoring != "softmax":
        e = (-zk.abs()).exp()
        slope = e / (1 + e).square()
        if scoring == "sqrt_softplus":
            low = zk < -_TAIL
            sigmoid = torch.where(zk < 0, e, 1.0) / (1 + e)
            slope = torch.where(low, v / 2, sigmoid / (2 * torch.where(low | ~chosen, 1.0, v)))
        g = g * slope
    grad = torch.zeros_like(z).scatter_add_(1, index, torch.where(chosen, g, 0.0))
    if scoring == "softmax":
        grad = scores * (grad - dot)
    return torch.where(logits.isfinite(), grad, 0.0)
