"""Cases for the tests of LoRA on experts, and what they must give: float64, one token at a time.

Three of five logical experts are here, in an order of their own; three adapters of different ranks, padded to R; rows
without an adapter, out of range, or with what unwritten memory holds for ids.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from epmoe.config import Activation
from epmoe.dispatch.inputs import ExpertInput, Layout
from epmoe.experts import ExpertWeights
from epmoe.experts.lora import ExpertLora
from tests import naive

H, I, E, K, A, R = 24, 20, 5, 2, 3, 6
RANKS = (2, 6, 1)  # of the three adapters; the tensors are padded to R
ALPHA = (4.0, 3.0, 0.5)
LOCAL = (3, 0, 4)  # the logical experts here, in local order
# Relative L2 of the output and of any gradient. In bf16 a rounding errs by up to 2^-9, and all may point one way: six
# make an output (pre-activation and result before the update and after it, the activation, the sum), ten a gradient.
TOLERANCE = {torch.float32: (1e-5, 2e-5), torch.bfloat16: (6 * 2**-9, 10 * 2**-9)}
BASE = ("w1", "w2", "b1", "b2")
ADAPTERS = ("a1", "lb1", "a2", "lb2")
GARBAGE = -(2**31)  # what poisoned int32 memory holds


def draw(seed: int, tokens: int, experts: int, dtype: torch.dtype, act: Activation, bias: bool) -> dict[str, Tensor]:
    """Everything for `experts` experts, of which a token has K, on CPU."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int, fan_in: int = 1) -> Tensor:
        return (torch.randn(*shape, generator=g, dtype=torch.float64) * fan_in**-0.5).to(dtype)

    width = 2 * I if act.gated else I
    drawn = {
        "x": randn(tokens, H),
        "p": torch.rand(tokens, K, generator=g).to(torch.promote_types(dtype, torch.float32)) + 0.2,
        "w1": randn(experts, width, H, fan_in=H),
        "w2": randn(experts, H, I, fan_in=I),
        "a1": randn(experts, A, R, H, fan_in=H),
        "lb1": randn(experts, A, width, R, fan_in=R),
        "a2": randn(experts, A, R, I, fan_in=I),
        "lb2": randn(experts, A, H, R, fan_in=R),
        "dout": randn(tokens, H),
        "ids": torch.rand(tokens, E, generator=g).argsort(1)[:, :K].int(),
        "adapters": torch.randint(-1, A, (tokens,), generator=g).int(),
    }
    if bias:
        drawn |= {"b1": randn(experts, width), "b2": randn(experts, H)}
    for adapter, rank in enumerate(RANKS):
        drawn["a1"][:, adapter, rank:] = drawn["a2"][:, adapter, rank:] = 0
        drawn["lb1"][:, adapter, :, rank:] = drawn["lb2"][:, adapter, :, rank:] = 0
    if tokens > 3:
        drawn["ids"][0, 1], drawn["ids"][1], drawn["ids"][2, 0] = -1, -1, GARBAGE
        drawn["adapters"][:3] = torch.tensor([0, 1, GARBAGE], dtype=torch.int32)
        drawn["adapters"][3] = A  # out of range: none
    return drawn


def scaling(device: str = "cpu") -> Tensor:
    return torch.tensor([alpha / rank for alpha, rank in zip(ALPHA, RANKS, strict=True)], device=device)


def weights_of(leaves: dict[str, Tensor]) -> ExpertWeights:
    lora = ExpertLora(*(leaves[name] for name in ADAPTERS), scaling(leaves["x"].device.type))
    return ExpertWeights(*(leaves.get(name) for name in BASE), lora=lora)


def _preactivation(own: dict[str, Any], e: int, a: int, row: Tensor) -> Tensor:
    h = own["w1"][e] @ row
    h = h + own["b1"][e] if "b1" in own else h
    if 0 <= a < A:
        h = h + scaling().double()[a] * (own["lb1"][e][a] @ (own["a1"][e][a] @ row))
    return h


def off_its_kinks(drawn: dict[str, Tensor], local: dict[int, int], act: Activation, on_input: bool) -> Activation:
    """`act` with its limit in the widest gap near it of what it will see: a gradient jumps at the limit, so what is
    rounded to the other side of it has another gradient altogether."""
    if math.isinf(act.limit):
        return act
    own = {name: t.double() for name, t in drawn.items() if name in (*BASE, *ADAPTERS)}
    x, p, seen = drawn["x"].double(), drawn["p"].double(), [torch.tensor([0.7, 1.3]) * act.limit]
    for m, choices in enumerate(drawn["ids"].tolist()):
        for k, choice in enumerate(choices):
            if choice in local:
                row = x[m] * p[m, k] if on_input else x[m]
                seen.append(_preactivation(own, local[choice], int(drawn["adapters"][m]), row).abs())
    values = torch.cat(seen).sort().values
    values = values[(values >= 0.7 * act.limit) & (values <= 1.3 * act.limit)]
    widest = int(values.diff().argmax())
    return dataclasses.replace(act, limit=float(values[widest : widest + 2].mean()))


def wanted(drawn: dict[str, Tensor], local: dict[int, int], act: Activation, on_input: bool) -> dict[str, Tensor]:
    """Output and gradients in float64; `local` maps logical experts to rows of the weights."""
    leaf = {name: t.double().clone().requires_grad_() for name, t in drawn.items() if t.is_floating_point()}
    constants, s = (act.name, act.alpha, act.limit), scaling().double()
    # apart once: indexing the whole at every use would give it a gradient of its whole size each time
    own = {name: leaf[name].unbind(0) for name in (*BASE, *ADAPTERS) if name in leaf}
    out = []
    for m in range(drawn["x"].shape[0]):
        total, a = torch.zeros_like(leaf["x"][m]), int(drawn["adapters"][m])
        for k in range(K):
            e = local.get(int(drawn["ids"][m, k]))
            if e is None:
                continue
            row = leaf["x"][m] * leaf["p"][m, k] if on_input else leaf["x"][m]
            h = naive.activation(_preactivation(own, e, a, row), *constants)
            y = own["w2"][e] @ h
            y = y + own["b2"][e] if "b2" in own else y
            if 0 <= a < A:
                y = y + s[a] * (own["lb2"][e][a] @ (own["a2"][e][a] @ h))
            total = total + (y if on_input else y * leaf["p"][m, k])
        out.append(total)
    y = torch.stack(out) if out else leaf["x"] * 0
    (y * leaf["dout"].detach()).sum().backward()
    grads = {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in leaf.items() if n != "dout"}
    return {"out": y.detach(), **grads}


def close(got: Tensor | None, want: Tensor, limit: float, what: Any) -> None:
    assert got is not None, what
    error = (got.detach().double().cpu() - want).norm() / max(float(want.norm()), 1e-30 if want.any() else 1.0)
    assert error <= limit, (what, float(error))


def rows_of(leaves: dict[str, Tensor]) -> ExpertInput:
    """In wider rows, as a message buffer's are."""
    x, tokens = leaves["x"], leaves["x"].shape[0]
    expert_map = torch.tensor([LOCAL.index(e) if e in LOCAL else -1 for e in range(E)], dtype=torch.int32)
    words = torch.cat([leaves["ids"], leaves["adapters"][:, None]], 1)  # views into one message
    layout = Layout(tokens, tokens, tokens * K)
    return ExpertInput(
        x, words[:, :K], leaves["p"], expert_map.to(x.device), len(LOCAL), tokens * K, layout, adapter_ids=words[:, K]
    )
