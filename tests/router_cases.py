"""Cases of routing and a reference in python floats."""

from __future__ import annotations

import math

import torch

from epmoe.config import RouterConfig

NAN, INF = math.nan, math.inf

SCORINGS = ["softmax", "topk_softmax", "sigmoid", "sqrt_softplus"]

GROUPINGS = {  # E = 12
    "no groups": {},
    "4 groups by max": {"num_groups": 4, "topk_groups": 2, "group_score": "max"},
    "4 groups by top2": {"num_groups": 4, "topk_groups": 2, "group_score": "top2_sum"},
    "groups of one by top2": {"num_groups": 12, "topk_groups": 5, "group_score": "top2_sum"},
}

E, K = 12, 4


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-300)).item()


def reference_row(z: list[float], config: RouterConfig, k: int, bias: list[float]):
    """(ids, weights, scores, gap): one token in python floats; gap = the closest decision that was no exact tie."""
    usable = [e for e, v in enumerate(z) if not math.isnan(v) and v != -INF]
    z = [min(v, torch.finfo(config.dtype).max) for v in z]
    scores = [0.0] * len(z)
    if config.scoring in ("softmax", "topk_softmax"):
        total = sum(math.exp(z[e] - max(z[i] for i in usable)) for e in usable)
        for e in usable:
            scores[e] = math.exp(z[e] - max(z[i] for i in usable)) / total
    for e in usable:
        if config.scoring == "sigmoid":
            scores[e] = 1 / (1 + math.exp(-z[e])) if z[e] > 0 else math.exp(z[e]) / (1 + math.exp(z[e]))
        if config.scoring == "sqrt_softplus":
            scores[e] = math.sqrt(z[e] + math.log1p(math.exp(-z[e])) if z[e] > 0 else math.log1p(math.exp(z[e])))
    value = {e: (z[e] if config.scoring == "topk_softmax" else scores[e]) + bias[e] for e in usable}
    gap = INF

    def best(of: dict[int, float], count: int) -> list[int]:
        nonlocal gap
        order = sorted(of, key=lambda i: (-of[i], i))
        for a, b in zip(order, order[1:], strict=False):
            if of[a] != of[b]:
                gap = min(gap, of[a] - of[b])
        return order[:count]

    if config.num_groups > 1:
        size = len(z) // config.num_groups
        group_value = {}
        for g in range(config.num_groups):
            inside = sorted((value[e] for e in usable if e // size == g), reverse=True)
            if inside:
                group_value[g] = inside[0] if config.group_score == "max" else sum(inside[:2])
        kept = best(group_value, config.topk_groups)
        value = {e: v for e, v in value.items() if e // size in kept}
    ids = best(value, k)
    if config.scoring == "topk_softmax":
        weights = [math.exp(z[e] - max(z[i] for i in ids)) for e in ids]
        weights = [w / sum(weights) for w in weights]
    else:
        weights = [scores[e] for e in ids]
    if config.renormalize:
        weights = [w / (sum(weights) + 1e-20) for w in weights]
    weights = [w * config.scaling_factor for w in weights]
    pad = k - len(ids)
    return ids + [-1] * pad, weights + [0.0] * pad, scores, gap


def odd_logits(num_tokens: int, generator: torch.Generator) -> torch.Tensor:
    """fp64, on a grid of 1/4 so that many tie, one in eight of them NaN, -inf or +inf."""
    z = (torch.randn(num_tokens, E, generator=generator, dtype=torch.float64) * 8).round() / 4
    what = torch.randint(0, 24, z.shape, generator=generator)
    for code, value in enumerate((NAN, -INF, INF)):
        z[what == code] = value
    z[torch.rand(num_tokens, generator=generator) < 0.1] = NAN
    return z
