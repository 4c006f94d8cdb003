"""Microbatches inside DDP and FSDP2, with gradient accumulation: the bits of one part after another."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from epmoe import EPGroup, MoEConfig, MoELayer, run_microbatched
from epmoe.testing import run_ranks

H = 16


class Block(nn.Module):
    def __init__(self, ep: EPGroup) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(H, H), nn.Linear(H, H)
        self.moe = MoELayer(MoEConfig(H, 24, 6, 2, num_shared_experts=1), ep)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.after(self.moe(self.before(x)))


def steps(rank: int, ranks: int, stack: str, seed: int) -> bool:
    ep = EPGroup(timeout=60)
    torch.manual_seed(seed)
    model = nn.Sequential(Block(ep), Block(ep))
    experts = {p for block in model for p in block.moe.expert_parameters().values()}  # type: ignore[union-attr,operator]
    wrapped: nn.Module = model
    if stack == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (ranks,))
        for block in model:
            fully_shard(block, mesh=mesh, ignored_params=experts, reshard_after_forward=False)
        fully_shard(model, mesh=mesh, ignored_params=experts, reshard_after_forward=False)
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
            outputs.append(y.detach())
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        whole = [g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for g in grads]
        results.append([*outputs, *whole])
    return len(results[0]) > 10 and all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("stack", ["ddp", "fsdp"])
def test_interleaved_steps_equal_serial_ones_to_the_bit(stack: str, seed: int) -> None:
    assert run_ranks(steps, 2, args=(stack, seed), timeout=90) == [True, True]
