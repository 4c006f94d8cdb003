"""torchtitan's MoE block with its rows moved by epmoe: its router, its experts and its forward stay.

    torchrun --nproc-per-node=2 examples/titan_block.py --check

The seam is `block.routed_experts.token_dispatcher`: an `epmoe.integrations.torchtitan.TokenDispatcher` takes the place
of torchtitan's own, and each rank keeps its share of the experts' tensors, as `Shard(0)` over an EP mesh gives it.
Needs torchtitan (tried with 0.3.0).

B sequences of L tokens on this rank, D width, E experts, K per token.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

try:
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
except ModuleNotFoundError as error:
    sys.exit(f"examples/titan_block.py needs {error.name}: pip install torchtitan")

import torch
import torch.distributed as dist
import typer
from model import join_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from epmoe.integrations.torchtitan import TokenDispatcher

D, HIDDEN, E, K = 64, 32, 8, 2
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def make_block(device: torch.device, seed: int) -> Any:
    """torchtitan's block with all experts, the same on every rank."""
    experts = GroupedExperts.Config(dim=D, hidden_dim=HIDDEN, num_experts=E)
    local = LocalTokenDispatcher.Config(num_experts=E, top_k=K)
    gate = Linear.Config(in_features=D, out_features=E)
    config = MoE.Config(
        num_experts=E,
        routed_experts=RoutedExperts.Config(inner_experts=experts, token_dispatcher=local),
        router=TokenChoiceTopKRouter.Config(num_experts=E, gate=gate, top_k=K, route_norm=True),
        load_balance_coeff=None,
    )
    with device:
        block = config.build()
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
    return block


def share_experts(block: Any, rank: int, ranks: int, device: torch.device) -> list[nn.Parameter]:
    """Leaves this rank its run of the experts and lets epmoe move the rows; gives the experts' parameters."""
    experts, own = block.routed_experts.inner_experts, slice(rank * E // ranks, (rank + 1) * E // ranks)
    for name, parameter in list(experts.named_parameters()):
        setattr(experts, name, nn.Parameter(parameter.detach()[own].clone()))
    dispatcher = TokenDispatcher(E, K)
    dispatcher.wire_meshes(ep_mesh=init_device_mesh(device.type, (ranks,)) if ranks > 1 else None)
    block.routed_experts.token_dispatcher = dispatcher
    return list(experts.parameters())


def off(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@app.command()
def train(
    steps: Annotated[int, typer.Option(min=1)] = 30,
    tokens: Annotated[int, typer.Option(min=1, help="Of each of this rank's two sequences.")] = 64,
    check: Annotated[bool, typer.Option(help="Compare with the untouched block, and ask for a lower loss.")] = False,
    seed: int = 0,
) -> None:
    """Fit a random map."""
    ep, device = join_ranks()
    rank, ranks = (0, 1) if ep is None else (ep.rank, ep.num_ranks)
    whole, block = make_block(device, seed), make_block(device, seed)
    experts = share_experts(block, rank, ranks, device)
    generator = torch.Generator(device).manual_seed(seed + 1 + rank)
    goal = torch.randn(D, D, generator=torch.Generator(device).manual_seed(seed), device=device) * D**-0.5

    x = torch.randn(2, tokens, D, generator=generator, device=device)
    if check:
        error = torch.tensor(off(block(x), whole(x)), device=device)
        print(f"rank {rank}: output differs from the untouched block's by {float(error):.1e}", flush=True)
        if ranks > 1:
            dist.all_reduce(error, dist.ReduceOp.MAX)  # all ranks end, or none
        if not float(error) < 1e-2:  # the experts compute in bf16
            sys.exit("the block gives something else")
    optimizer, losses = torch.optim.AdamW(block.parameters(), lr=1e-2), []
    for step in range(steps):
        x = torch.randn(2, tokens, D, generator=generator, device=device)
        loss = (block(x) - x @ goal).square().mean() / ranks  # the mean over all ranks' tokens
        loss.backward()
        if ranks > 1:
            dist.all_reduce(loss := loss.detach())
            for parameter in block.parameters():  # of the experts, the sum over all tokens came by itself
                if not any(parameter is expert for expert in experts):
                    dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if rank == 0 and (step % max(1, steps // 5) == 0 or step == steps - 1):
            print(f"step {step + 1}/{steps}  loss {losses[-1]:.4f}", flush=True)
    if ep is not None:
        dist.destroy_process_group()
    if check and not losses[-1] < 0.95 * losses[0]:
        sys.exit(f"--check: the loss went from {losses[0]:.4f} to {losses[-1]:.4f}")


if __name__ == "__main__":
    app()
