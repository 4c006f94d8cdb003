"""Microbatches inside DDP and FSDP2, with gradient accumulation, recomputation and either way of moving rows: the bits
of one part after another."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import epmoe
from epmoe import EPGroup, MoEConfig, MoELayer, run_microbatched
from epmoe.testing import run_ranks

H = 16
# Before torch 2.13 the part whose backward ends first takes away weights that the other's still reads.
KEEPS_WEIGHTS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


class Block(nn.Module):
    def __init__(self, ep: EPGroup, dispatcher: str, recomputes: bool) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(H, H), nn.Linear(H, H)
        config = MoEConfig(H, 24, 6, 2, num_shared_experts=1, dispatcher=dispatcher, max_tokens_per_rank=6)
        self.moe, self.recomputes, self.computed = MoELayer(config, ep), recomputes, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return epmoe.checkpoint(self.compute, x) if self.recomputes else self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        self.computed += 1
        return x + self.after(self.moe(self.before(x)))


def steps(rank: int, ranks: int, stack: str, seed: int) -> list[str]:
    """What came out differently, of every way of moving rows with and without recomputation."""
    ep, wrong = EPGroup(timeout=60), []
    for dispatcher, recomputes in itertools.product(("all_to_all", "symmetric"), (False, True)):
        if not same_bits(rank, ranks, stack, dispatcher, recomputes, ep, seed):
            wrong.append(f"{dispatcher}, {recomputes=}")
    assert ep.channels, "rows went through symmetric memory"
    return wrong


def same_bits(rank: int, ranks: int, stack: str, dispatcher: str, recomputes: bool, ep: EPGroup, seed: int) -> bool:
    torch.manual_seed(seed)
    blocks = [Block(ep, dispatcher, recomputes) for _ in range(2)]
    model = nn.Sequential(*blocks)
    experts = {p for block in model for p in block.moe.expert_parameters().values()}  # type: ignore[union-attr,operator]
    wrapped: nn.Module = model
    kept: list[Any] = []
    if stack == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (ranks,))
        for block in model:
            fully_shard(block, mesh=mesh, ignored_params=experts, reshard_after_forward=False)
        fully_shard(model, mesh=mesh, ignored_params=experts, reshard_after_forward=False)
        if KEEPS_WEIGHTS:
            kept = [model, *model]
            kept[0].set_reshard_after_backward(False)
    else:
        from torch.nn.parallel import DistributedDataParallel

        names = [name for name, p in model.named_parameters() if p in experts]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        wrapped = DistributedDataParallel(model)
    batches = torch.randn(2, 5 + rank, H, generator=torch.Generator().manual_seed(seed + rank))
    results = []
    for interleave in (False, True):
        wrapped.zero_grad()
        outputs = []
        for x in batches:  # accumulated
            y = run_microbatched(wrapped, x, interleave=interleave, ep=ep)
            y.square().sum().backward()
            for module in kept:
                module.reshard()
            outputs.append(y.detach())
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        whole = [g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for g in grads]
        results.append([*outputs, *whole])
    # 2 ways, 2 batches, 2 parts, each computed once more in backward where it is recomputed
    assert [block.computed for block in blocks] == [8 * (1 + recomputes)] * 2
    return len(results[0]) > 10 and all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("stack", ["ddp", "fsdp"])
def test_interleaved_steps_equal_serial_ones_to_the_bit(stack: str, seed: int) -> None:
    assert run_ranks(steps, 2, args=(stack, seed), timeout=90) == [[], []]
