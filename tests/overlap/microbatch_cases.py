"""A model with two MoE layers, and what its microbatches give one after another and interleaved."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from epmoe import EPGroup, MoEConfig, MoELayer
from epmoe.overlap import run_microbatched

H = 16


class Block(nn.Module):
    """Two MoE layers with dense maps and dropout between them."""

    def __init__(self, ep: EPGroup | None, dispatcher: str = "auto", dropout: float = 0.0) -> None:
        super().__init__()
        config = MoEConfig(
            H, 24, 6, 2, dispatcher=dispatcher, experts="grouped", num_shared_experts=1, max_tokens_per_rank=16
        )
        self.maps = nn.ModuleList([nn.Linear(H, H) for _ in range(2)])
        self.moes = nn.ModuleList([MoELayer(config, ep, name=f"moe {n}") for n in range(2)])
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear, moe in zip(self.maps, self.moes, strict=True):
            x = x + moe(self.dropout(linear(x)))
        return x


def gradients(module: nn.Module) -> list[torch.Tensor]:
    found = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    return found


def both_ways(block: nn.Module, x: torch.Tensor, seed: int, fn: Any = None, **options: Any) -> list[Any]:
    results = []
    for interleave in (False, True):
        torch.manual_seed(seed)
        x.grad = None
        y = run_microbatched(fn or block, x, interleave=interleave, **options)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, *gradients(block), torch.rand(3)])  # and the generator afterwards
    return results


def same(results: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))
