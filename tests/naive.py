"""A second opinion: the whole MoE layer in float64, one token and one expert at a time, sharing no code with epmoe.

x [M,H], weights by logical expert [E,·,·], topk_ids [M,K].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def activation(h: Tensor, name: str, alpha: float, limit: float) -> Tensor:
    """One row `[2I]` (gate, then up) or `[I]`."""
    if name in ("silu", "gelu", "relu2"):
        return {
            "silu": lambda g: g / (1 + torch.exp(-g)),
            "gelu": lambda g: g * 0.5 * (1 + torch.erf(g / math.sqrt(2))),
            "relu2": lambda g: torch.where(g > 0, g, 0) ** 2,
        }[name](h)
    half = h.shape[-1] // 2
    g, u = h[:half], h[half:]
    if name in ("swiglu_oai", "swiglu_clamped"):
        g = torch.minimum(g, torch.full_like(g, limit))
        u = torch.clamp(u, -limit, limit)
        return (u + (1 if name == "swiglu_oai" else 0)) * g / (1 + torch.exp(-alpha * g))
    if name == "geglu_tanh":
        return u * 0.5 * g * (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))
    inner = {"swiglu": "silu", "geglu": "gelu", "reglu2": "relu2"}[name]
    return u * activation(g, inner, alpha, limit)


def widest_gap(h: Tensor, low: float, high: float) -> float:
    """Where to clamp pre-activations `h` between low and high: in the middle of the widest gap between their sizes. The
    slope jumps there, so one that rounding moves across has another gradient."""
    sizes = h.detach().double().abs().flatten()
    ends = torch.tensor([low, high], dtype=torch.float64, device=sizes.device)
    sizes = torch.cat([sizes[(sizes > low) & (sizes < high)], ends]).sort().values
    widest = int(sizes.diff().argmax())
    return float(sizes[widest : widest + 2].mean())


def router_weights(logits: Tensor, ids: Tensor, scoring: str, renormalize: bool, scale: float) -> Tensor:
    """`[M, K]` float64 weights at the chosen `ids`; 0 where an id is -1."""
    rows = []
    for m in range(ids.shape[0]):
        chosen = [int(i) for i in ids[m] if i >= 0]
        if scoring == "softmax":
            scores = torch.softmax(logits[m], 0)[chosen]
        elif scoring == "topk_softmax":
            scores = torch.softmax(logits[m][chosen], 0)
        elif scoring == "sigmoid":
            scores = torch.sigmoid(logits[m][chosen])
        else:
            scores = torch.sqrt(torch.log1p(torch.exp(logits[m][chosen])))
        if renormalize:
            scores = scores / scores.sum()
        padding = scores.new_zeros(ids.shape[1] - len(chosen))
        rows.append(torch.cat([scores * scale, padding]))
    return torch.stack(rows) if rows else logits.new_zeros(ids.shape)


def routed(
    x: Tensor, ids: Tensor, weights: Tensor, experts: dict[str, Tensor], act: tuple[str, float, float], on_input: bool
) -> Tensor:
    """`[M, H]`: the routed experts' output."""
    # apart once: indexing the whole at every use would give it a gradient of its whole size each time
    own = {name: tensor.unbind(0) for name, tensor in experts.items()}
    out = []
    for m in range(x.shape[0]):
        total = torch.zeros_like(x[m])
        for k in range(ids.shape[1]):
            e = int(ids[m, k])
            if e < 0:
                continue
            row = x[m] * weights[m, k] if on_input else x[m]
            h = own["gate_up_proj"][e] @ row
            if "gate_up_bias" in own:
                h = h + own["gate_up_bias"][e]
            y = own["down_proj"][e] @ activation(h, *act)
            if "down_bias" in own:
                y = y + own["down_bias"][e]
            total = total + (y if on_input else y * weights[m, k])
        out.append(total)
    return torch.stack(out) if out else x * 0
