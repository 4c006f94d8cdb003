"""Nodes that are pretended, a `hierarchical` dispatcher over them, tokens that any rank can rebuild for any other."""

from __future__ import annotations

import torch

from epmoe import EPGroup, ExpertPlacement, make_dispatcher
from epmoe.dispatch import Dispatcher

NODES = {
    "1x2": [0, 0],
    "2x1": [0, 1],
    "2+1": [0, 0, 1],
    "1+2, mixed up": [0, 1, 0],
    "1x4": [0, 0, 0, 0],
    "2x2": [0, 0, 1, 1],
    "2x2, mixed up": [0, 1, 1, 0],
    "3+1": [1, 1, 0, 1],
    "4x1": [0, 1, 2, 3],
}

E, K, H, CAP = 9, 3, 20, 9


def make(name: str, ep: EPGroup, layer: str = "moe") -> Dispatcher:
    placement = ExpertPlacement.strided(E, ep.num_ranks)
    return make_dispatcher(name, ep, placement, "cpu", layer=layer, max_tokens_per_rank=CAP)


def routing_of(rank: int, ranks: int, situation: str, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x with the token's own number in its first column, ids, weights: what any rank can rebuild for any other."""
    tokens = {"a rank without tokens": [7, 0, 3, 1][rank], "one token each": 1}.get(situation, CAP - 2 * rank)
    g = torch.Generator().manual_seed(seed * 10 + rank)
    x = torch.randn(tokens, H, generator=g, dtype=torch.float64)
    x[:, 0] = 100 * rank + torch.arange(tokens)
    ids = torch.rand(tokens, E, generator=g).argsort(1)[:, :K].int()
    if situation == "all to one rank":
        ids = (ids % (-(-E // ranks))) * ranks + ranks - 1  # of a strided placement
        ids[ids >= E] = -1
    elif situation == "all to one expert":
        ids = torch.tensor([[-1, E - 1, -1]], dtype=torch.int32).expand(tokens, K).contiguous()
    elif situation == "no experts at all":
        ids.fill_(-1)
    else:
        ids[torch.rand(ids.shape, generator=g) < 0.2] = -1
        ids[torch.rand(ids.shape, generator=g) < 0.05] = E + 3
    return x, ids, torch.rand(tokens, K, generator=g, dtype=torch.float64)
