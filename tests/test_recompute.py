"""Activation checkpointing: same gradients; with `epmoe.checkpoint` the routing and the layout of the first forward."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint

import epmoe
from epmoe import EPGroup, MoEConfig, MoELayer
from epmoe.testing import run_ranks

CONFIG = MoEConfig(hidden_size=16, intermediate_size=24, num_experts=6, top_k=2)
PLAIN = {"use_reentrant": False}


class Block(torch.nn.Module):
    def __init__(self, ep: EPGroup | None) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(MoELayer(CONFIG, ep, name=f"layers.{i}") for i in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def count_exchanges(block: Block) -> list[str]:
    """Names of the layers that made a layout, as they make it."""
    made: list[str] = []
    for layer in block.layers:
        dispatcher = layer.kernel(layer.down_proj.device, layer.down_proj.dtype).dispatcher
        original = dispatcher.make_layout
        dispatcher.make_layout = lambda ids, o=original, n=layer.name: made.append(n) or o(ids)
    return made


def gradients(rank: int, world: int, seed: int, how: str) -> tuple[list[torch.Tensor], list[str]]:
    torch.manual_seed(seed)
    block = Block(EPGroup() if world > 1 else None)
    made = count_exchanges(block)
    outputs = []
    for micro in range(2):  # two microbatches in flight
        x = torch.randn(
            4 + rank, 16, generator=torch.Generator().manual_seed(seed + 7 * rank + micro), requires_grad=True
        )
        if how == "none":
            outputs.append(block(x))
        elif how == "plain":
            outputs.append(torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False))
        else:
            outputs.append(epmoe.checkpoint(block, x))
    sum(y.square().sum() for y in outputs).backward()
    return [p.grad for p in block.parameters()], made


@pytest.mark.parametrize("ranks", [1, 2])
def test_checkpointing_changes_no_gradient_and_ours_exchanges_no_counts_again(ranks: int, seed: int) -> None:
    want = run_ranks(gradients, ranks, args=(seed, "none"))
    for how, exchanges in (("plain", 8), ("ours", 4)):
        for (grads, made), (reference, _) in zip(run_ranks(gradients, ranks, args=(seed, how)), want, strict=True):
            assert len(made) == exchanges, (how, made)
            for a, b in zip(grads, reference, strict=True):
                torch.testing.assert_close(a, b)


class Wobbly(torch.nn.Module):
    """Routes differently each time it is called, as a router does whose logits change in the last bit."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = MoELayer(CONFIG, name="moe")
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        with torch.no_grad():
            self.layer.router.weight.neg_() if self.calls == 2 else None
        return self.layer(x * 1.0)


def test_recomputation_uses_the_first_routing_when_the_router_would_choose_otherwise() -> None:
    model = Wobbly()
    x = torch.randn(5, 16, requires_grad=True)
    seen: list[torch.Tensor] = []
    model.layer.router.register_forward_hook(lambda m, args, routing: seen.append(routing.topk_ids))
    epmoe.checkpoint(model, x).sum().backward()
    assert len(seen) == 2 and torch.equal(seen[0], seen[1])
    assert not torch.equal(model.layer(x, return_routing=True)[1].topk_ids, seen[0])


def test_a_recomputation_that_calls_other_layers_is_an_error() -> None:
    block = Block(None)
    calls = []

    def crooked(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return block.layers[0 if len(calls) == 1 else 1](x)

    y = epmoe.checkpoint(crooked, torch.randn(3, 16, requires_grad=True))
    with pytest.raises(RuntimeError, match="called layer 'layers.1' as MoE layer number 0"):
        y.sum().backward()
