"""Losses taken from a `Routing` reach every gradient under FSDP2 and DDP, whoever hands the routing out, and how.

FSDP gathers a module's parameters again when a gradient arrives at a tensor of the module's output; a `Routing` is one
whose tensors wrappers must find. Two ranks, each case's gradients beside those of one process.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import epmoe
from epmoe import EPGroup, MoEConfig, MoELayer, RouterConfig
from epmoe.integrations.gradients import expert_parameters, reduce_expert_gradients
from epmoe.integrations.parallel import MoEMesh, data_parallel, fully_shard_moe, make_mesh, shard_layer
from epmoe.losses import sequence_balancing_loss
from epmoe.router import load_balancing_loss, router_z_loss
from epmoe.routing import Routing
from epmoe.testing import run_ranks

H, I, E, K, ROWS, RANKS = 32, 48, 4, 2, 6, 2


class Case(NamedTuple):
    """One way to train. `losses`: the blocks that a loss on their routing is taken from."""

    losses: tuple[int, ...] = (0, 1)
    main: bool = True
    returned: bool = False  # the routing comes out of the block; else it is left on it as an attribute
    recompute: str = ""
    accumulate: int = 1
    frozen: bool = False
    stack: str = "fsdp"
    ep_ranks: int = 2
    reshard: bool | None = None


CASES = {
    "no loss on routing": Case(losses=()),
    "on every block": Case(ep_ranks=1),
    "on the first block": Case(losses=(0,), reshard=True),
    "on the last block": Case(losses=(1,), reshard=True),
    "nothing resharded": Case(reshard=False),
    "recomputed": Case(recompute="epmoe", reshard=True),
    "recomputed by torch, routing returned": Case(recompute="torch", returned=True, ep_ranks=1),
    "accumulated": Case(accumulate=3, reshard=True),
    "accumulated and recomputed": Case(accumulate=2, recompute="epmoe", losses=(1,)),
    "frozen routers": Case(frozen=True, reshard=True),
    "returned, no other loss": Case(main=False, returned=True, reshard=True),
    "returned, no other loss, recomputed": Case(main=False, returned=True, recompute="epmoe"),
    "ddp, unused parameters sought": Case(stack="ddp", returned=True, losses=(0,)),
}


class Block(nn.Module):
    def __init__(self, ep: EPGroup | None, case: Case, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.case = case
        self.inward = nn.Linear(H, H, device=device, dtype=dtype)
        config = MoEConfig(H, I, E, K, router=RouterConfig(scoring="sigmoid", dtype=dtype), num_shared_experts=1)
        self.moe = MoELayer(config, ep, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> tuple[Tensor, Routing | None]:
        if self.case.recompute == "epmoe":
            y, routing = epmoe.checkpoint(self.compute, x)
        elif self.case.recompute == "torch":
            y, routing = torch.utils.checkpoint.checkpoint(self.compute, x, use_reentrant=False)
        else:
            y, routing = self.compute(x)
        if self.case.returned:
            return y, routing
        self.routing = routing
        return y, None

    def compute(self, x: Tensor) -> tuple[Tensor, Routing]:
        y, routing = self.moe(self.inward(x), return_routing=True)
        return x + y, routing


class Model(nn.Module):
    def __init__(self, ep: EPGroup | None, seed: int, case: Case, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Block(ep, case, device, dtype) for _ in range(2))
        self.outward = nn.Linear(H, 3, device=device, dtype=dtype)
        for block in self.blocks:
            block.moe.router.weight.requires_grad_(not case.frozen)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Routing | None]]:
        routings = []
        for block in self.blocks:
            x, routing = block(x)
            routings.append(routing)
        return self.outward(x), routings


def loss_of(model: nn.Module, blocks: nn.ModuleList, x: Tensor, case: Case) -> Tensor:
    logits, routings = model(x)
    loss = logits.square().mean() if case.main else logits.new_zeros(())
    for number in case.losses:
        routing = routings[number] if case.returned else blocks[number].routing
        loss = loss + 0.3 * load_balancing_loss(routing, E) + 0.1 * router_z_loss(routing)
        loss = loss + 0.2 * sequence_balancing_loss(routing, num_sequences=2)
    return loss / case.accumulate


def by_expert(model: nn.Module) -> dict[str, Tensor]:
    """Gradients, an expert's row as `name[id]`; zeros where there is none."""
    experts, out = expert_parameters(model), {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        if name in experts:
            ids = model.get_submodule(name.rpartition(".")[0]).local_experts
            out |= {f"{name}[{expert}]": gradient[row] for row, expert in enumerate(ids)}
        else:
            out[name] = gradient
    return out


def batches(case: Case, seed: int, like: Tensor) -> list[list[Tensor]]:
    """`[microbatch][rank]` -> x `[ROWS, H]`."""
    generator = torch.Generator().manual_seed(seed + 1)
    drawn = torch.randn(case.accumulate, RANKS, ROWS, H, dtype=torch.float64, generator=generator)
    return [list(part) for part in drawn.to(like)]


def alone(case: Case, seed: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    model = Model(None, seed, case, device, dtype)
    for ranks in batches(case, seed, model.outward.weight):
        for x in ranks:
            (loss_of(model, model.blocks, x, case) / RANKS).backward()
    return by_expert(model)


def among_ranks(case: Case, seed: int, mesh: MoEMesh, dtype: torch.dtype) -> dict[str, Tensor]:
    model = Model(mesh.ep, seed, case, mesh.ep.device, dtype)
    microbatches = batches(case, seed, model.outward.weight)
    if case.stack == "ddp":
        wrapped = data_parallel(model, mesh, find_unused_parameters=True)
    else:
        wrapped = fully_shard_moe(model, mesh, blocks=model.blocks, reshard_after_forward=case.reshard)
    for number, ranks in enumerate(microbatches):
        if case.stack == "fsdp":
            wrapped.set_requires_gradient_sync(number + 1 == case.accumulate)
        loss_of(wrapped, model.blocks, ranks[dist.get_rank()], case).backward()
    if case.stack == "ddp":
        reduce_expert_gradients(model, mesh.ep, replicas=mesh.replicas)
    return by_expert(model)


def errors_of_all_cases(rank: int, ranks: int, seed: int) -> dict[str, dict[str, float | None] | str]:
    """Relative errors of this rank's gradients by name, case by case, None for what is not here; or what was raised."""
    meshes = {size: make_mesh(size, timeout=60) for size in (1, 2)}
    dtype = torch.float64 if meshes[1].ep.device.type == "cpu" else torch.float32
    found: dict[str, dict[str, float | None] | str] = {}
    for name, case in CASES.items():
        expected = alone(case, seed, meshes[1].ep.device, dtype)
        assert (expected["blocks.0.moe.router.weight"].norm() > 0) == (not case.frozen)
        try:
            gradients = among_ranks(case, seed, meshes[case.ep_ranks], dtype)
        except RuntimeError as error:  # the same on all ranks: none waits for another
            found[name] = str(error)
            continue
        # where zeros are expected the absolute one
        sizes = {key: expected[key].norm().item() or 1.0 for key in gradients}
        found[name] = dict.fromkeys(expected) | {
            k: (g - expected[k]).norm().item() / sizes[k] for k, g in gradients.items()
        }
    return found


@pytest.mark.parametrize(
    ("backend", "tolerance"), [("gloo", 1e-10), pytest.param("nccl", 1e-4, marks=pytest.mark.gpu2)]
)
def test_gradients_of_losses_on_routing_are_those_of_one_process(backend, tolerance, seed):
    found = run_ranks(errors_of_all_cases, RANKS, args=(seed,), backend=backend, timeout=150)
    for name in CASES:
        errors = [rank[name] for rank in found]
        assert all(isinstance(e, dict) for e in errors), (name, errors)
        for key in errors[0]:
            held = [e[key] for e in errors if e[key] is not None]
            assert held and all(e <= tolerance for e in held), (name, key, held)


def given_routing(rank: int, ranks: int, seed: int) -> list[tuple[float, float, float]]:
    """A routing decided outside of a sharded layer: errors of output, and of the outer router's and x's gradients."""
    mesh, errors = make_mesh(2, timeout=60), []
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.float32)):
        torch.manual_seed(seed)
        config = MoEConfig(H, I, E, K, router=RouterConfig(scoring="sigmoid"))
        layer = MoELayer(config, mesh.ep, device="cpu", router=nn.Identity())
        outer = epmoe.router.Router(config.router, H, E, K)
        results = []
        for sharded in (False, True):
            if sharded:
                shard_layer(layer, mesh, mp_policy=policy)
            torch.manual_seed(seed + 1 + rank)
            x, outer.weight.grad = torch.randn(ROWS, H, requires_grad=True), None
            y, seen = layer(x, routing=outer(x), return_routing=True)
            (y.square().sum() + router_z_loss(seen) + load_balancing_loss(seen, E)).backward()
            results.append((y.detach(), outer.weight.grad, x.grad))
        errors.append(tuple(float((a - b).norm() / a.norm()) for a, b in zip(*results, strict=True)))
    return errors


def test_a_routing_decided_outside_goes_into_a_sharded_layer(seed):
    for errors in run_ranks(given_routing, 2, args=(seed,), timeout=90):
        assert max(max(e) for e in errors) < 1e-5


@pytest.mark.parametrize("masked", [False, True])
def test_a_routing_is_taken_apart_and_put_together(masked, seed):
    torch.manual_seed(seed)
    router = epmoe.router.Router(RouterConfig(dtype=torch.float64), H, E, K, dtype=torch.float64)
    x = torch.randn(ROWS, H, dtype=torch.float64)
    mask = torch.rand(ROWS) < 0.7 if masked else None
    expected = router(x, token_mask=mask)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        leaves, spec = torch.utils._pytree.tree_flatten(router(x, token_mask=mask))
    assert not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
    leaves, spec = torch.utils._pytree.tree_flatten(router(x, token_mask=mask))
    assert sum(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves) == 2  # weights and raw logits
    copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    replaced = dataclasses.replace(router(x, token_mask=mask), topk_weights=expected.topk_weights.double())
    for found in (torch.utils._pytree.tree_unflatten(copies, spec), replaced):
        assert found.num_experts == E
        for name in ("topk_ids", "topk_weights", "logits", "scores"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
        again = epmoe.routing.as_routing(found, ROWS, K, E)
        again.scores.square().sum().backward()
        assert router.weight.grad.norm() > 0
        router.weight.grad = None
    plain = Routing(expected.topk_ids, expected.topk_weights)
    leaves, spec = torch.utils._pytree.tree_flatten(plain)
    found = torch.utils._pytree.tree_unflatten(leaves, spec)
    assert found.topk_ids is plain.topk_ids and found.logits is None and found.num_experts is None
