"""EP × DP under FSDP2 and DDP takes the steps of one process: losses, norms, parameters; accumulated and clipped.

Four ranks train by every case in one set of processes; the same steps of a single process are what they must equal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import epmoe
from epmoe import EPGroup, MoEConfig, MoELayer, RouterConfig
from epmoe.integrations.gradients import (
    clip_grad_norm_,
    expert_parameters,
    grad_norm,
    reduce_expert_gradients,
    reduce_gradients,
)
from epmoe.integrations.parallel import MoEMesh, data_parallel, ddp_ignore_experts, fully_shard_moe, make_mesh
from epmoe.testing import run_ranks

H, I, E, K, ROWS, RANKS = 8, 6, 6, 2, 12, 4
UNEVEN = (5, 0, 3, 4)


class Block(nn.Module):
    def __init__(
        self, ep: EPGroup | None, name: str, dtype: torch.dtype, experts: int = E, kind: str | None = None
    ) -> None:
        super().__init__()
        self.recompute: bool | str = False
        self.norm, self.inward = nn.RMSNorm(H, dtype=dtype), nn.Linear(H, H, dtype=dtype)
        router = RouterConfig(dtype=torch.promote_types(dtype, torch.float32))
        config = MoEConfig(H, I, experts, K, router=router, num_shared_experts=1, placement="strided", expert_bias=True)
        config = dataclasses.replace(config, experts=kind or config.experts)
        self.moe = MoELayer(config, ep, device="cpu", dtype=dtype, name=name)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.recompute and torch.is_grad_enabled():
            if self.recompute == "by torch":
                return torch.utils.checkpoint.checkpoint(self.compute, x, use_reentrant=False)
            return epmoe.checkpoint(self.compute, x)
        return self.compute(x)

    def compute(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, routing = self.moe(self.inward(self.norm(x)), return_routing=True)
        return x + y, routing.scores.detach()


class Model(nn.Module):
    def __init__(
        self,
        ep: EPGroup | None,
        seed: int,
        dtype: torch.dtype,
        blocks: int = 1,
        experts: int = E,
        kind: str | None = None,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Block(ep, f"moe{n}", dtype, experts, kind) for n in range(blocks))
        self.outward = nn.Linear(H, 3, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [M, H] -> logits [M, 3], and the least distance of a chosen expert's score to the best one not chosen."""
        margins = [x.new_ones(())]
        for block in self.blocks:
            x, scores = block(x)
            best = scores.topk(K + 1).values
            margins += [(best[:, K - 1] - best[:, K]).amin()] if len(best) else []
        return self.outward(x), torch.stack(margins).amin()


class Case(NamedTuple):
    """One way to train. On one process only the first seven matter."""

    steps: int = 2
    blocks: int = 1
    experts: int = E
    dtype: torch.dtype = torch.float64
    optimizer: str = "adamw"
    accumulate: int = 2
    max_norm: float = 0.5

    stack: str = "fsdp"
    ep_ranks: int = 2
    shard_ranks: int | None = None
    uneven: bool = False
    recompute: bool | str = False  # "by torch": with its own checkpoint
    compiled: bool = False
    sync_each: bool = False
    reshard: bool | None = None


class Result(NamedTuple):
    losses: list[float]
    norms: list[float]
    others: list[float]  # the last step's norms by p = 1 and inf
    margin: float
    parameters: dict[str, Tensor]  # an expert's row is `name[id]`


def make_optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), fused=kind == "fused")


def by_expert(model: nn.Module) -> dict[str, Tensor]:
    experts, out = expert_parameters(model), {}
    for name, parameter in model.named_parameters():
        value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        value = value.detach().clone()
        if name in experts:
            ids = model.get_submodule(name.rpartition(".")[0]).local_experts
            out |= {f"{name}[{expert}]": value[row] for row, expert in enumerate(ids)}
        else:
            out[name] = value
    return out


def wrap(model: Model, mesh: MoEMesh | None, case: Case) -> nn.Module:
    for block in model.blocks:
        block.recompute = case.recompute
        if case.compiled:
            block.compile(backend="eager")
    if mesh is None:
        return model
    if case.stack == "ddp":
        with torch.no_grad():  # it makes the copies of experts equal, as DDP does with the rest
            for parameter in expert_parameters(model).values():
                parameter.add_(dist.get_rank() // case.ep_ranks)
        return data_parallel(model, mesh)
    return fully_shard_moe(model, mesh, blocks=model.blocks, reshard_after_forward=case.reshard)


@contextlib.contextmanager
def without_reduction(wrapped: nn.Module, case: Case, skip: bool):
    if case.stack == "ddp" and skip:
        with wrapped.no_sync():
            yield
    elif case.stack == "fsdp" and not case.sync_each:
        wrapped.set_requires_gradient_sync(not skip)
        yield
    else:
        yield


def train(case: Case, seed: int, mesh: MoEMesh | None = None) -> Result:
    kind = "grouped" if case.compiled else None  # those of one process are plain: the reference
    model = Model(mesh and mesh.ep, seed, case.dtype, case.blocks, case.experts, kind)
    ep, replicas = (mesh.ep, mesh.replicas) if mesh else (None, None)
    wrapped = wrap(model, mesh, case)
    optimizer = make_optimizer(model, case.optimizer)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if mesh else (0, 1)
    rows = UNEVEN if case.uneven else (ROWS // ranks,) * ranks
    mine = slice(sum(rows[:rank]), sum(rows[: rank + 1])) if mesh else slice(ROWS)
    generator = torch.Generator().manual_seed(seed + 1)
    teacher = torch.randn(H, 3, dtype=torch.float64, generator=generator)
    losses, norms, others, margin = [], [], [], 1.0
    for step in range(case.steps):
        total = torch.zeros((), dtype=torch.float64)
        for part in range(case.accumulate):
            x = torch.randn(ROWS, H, dtype=torch.float64, generator=generator)
            labels = (x @ teacher).argmax(-1)[mine]
            with without_reduction(wrapped, case, part + 1 < case.accumulate) if mesh else contextlib.nullcontext():
                logits, found = wrapped(x[mine].to(case.dtype))
                # D · (this rank's sum) / (all tokens): the mean over its tokens where all ranks have as many
                loss = ranks * nn.functional.cross_entropy(logits, labels, reduction="sum") / ROWS / case.accumulate
                loss.backward()
            total += loss.detach() / ranks
            margin = min(margin, found.item())
        if mesh:
            dist.all_reduce(total)
            if case.stack == "ddp":
                reduce_expert_gradients(model, ep, replicas=replicas)
        if step + 1 == case.steps:
            others = [grad_norm(model, ep, p).item() for p in (1.0, math.inf)]
        norms.append(clip_grad_norm_(model, ep, case.max_norm).item())
        losses.append(total.item())
        optimizer.step()
        optimizer.zero_grad()
    return Result(losses, norms, others, margin, by_expert(model))


def train_all(rank: int, ranks: int, cases: list[Case], seed: int) -> list[Result]:
    sizes = {(case.ep_ranks, case.shard_ranks) for case in cases}
    meshes = {size: make_mesh(size[0], shard_ranks=size[1], timeout=60) for size in sorted(sizes, key=str)}
    return [train(case, seed, meshes[case.ep_ranks, case.shard_ranks]) for case in cases]


@functools.cache
def by_one_process(first: tuple, seed: int) -> Result:
    return train(Case(*first), seed)


def alone(case: Case, seed: int) -> Result:
    return by_one_process(case[: Case._fields.index("stack")], seed)


def error(found: Tensor, expected: Tensor) -> float:
    """Relative; absolute where zeros are expected, as of the bias of an expert that nobody chose."""
    difference, size = (found.double() - expected.double()).norm(), expected.double().norm()
    return float(difference / size if size > 0 else difference)


def check(cases: dict[str, Case], seed: int, ranks: int, tolerance: float, of_parameters: float) -> None:
    """Every rank of every case against one process; relative errors of losses and norms, and of parameters."""
    results = run_ranks(train_all, ranks, args=(list(cases.values()), seed), timeout=150)
    for number, (name, case) in enumerate(cases.items()):
        expected = alone(case, seed)
        assert max(expected.norms) > case.max_norm, "clipping must act"
        seen: set[str] = set()
        for found in (rank[number] for rank in results):
            assert found.losses == pytest.approx(expected.losses, rel=tolerance), name
            assert found.norms == pytest.approx(expected.norms, rel=tolerance), name
            assert found.others == pytest.approx(expected.others, rel=tolerance), name
            for key, value in found.parameters.items():
                assert error(value, expected.parameters[key]) < of_parameters, (name, key)
            seen |= found.parameters.keys()
        assert seen == expected.parameters.keys()


FLOAT64 = {
    "fsdp, uneven": Case(uneven=True, optimizer="sgd", blocks=2),
    "fsdp, a column of one, recomputed": Case(ep_ranks=4, optimizer="fused", recompute=True, reshard=True),
    "fsdp, fewer experts than ranks, reduced every time": Case(ep_ranks=1, shard_ranks=2, experts=3, sync_each=True),
    "fsdp, a rank without a part of the experts, recomputed by torch": Case(ep_ranks=1, recompute="by torch"),
    "ddp, uneven": Case(stack="ddp", uneven=True, optimizer="sgd", blocks=2),
    "ddp, a column of one, recomputed": Case(stack="ddp", ep_ranks=4, recompute=True),
    "ddp, a row of one": Case(stack="ddp", ep_ranks=1, accumulate=3),
    "ddp, recomputed by torch": Case(stack="ddp", recompute="by torch"),
}


def test_float64_steps_of_every_stack_are_those_of_one_process(seed):
    check(FLOAT64, seed, RANKS, tolerance=1e-9, of_parameters=1e-7)


# Fused: torch's plain AdamW on DTensors takes longer than the forward and the backward.
FIFTY = {
    stack: Case(steps=50, optimizer="fused", max_norm=0.3, reshard=False, stack=stack) for stack in ("fsdp", "ddp")
}


def test_fifty_steps_are_those_of_one_process(seed):
    check(FIFTY, seed, RANKS, tolerance=1e-9, of_parameters=1e-7)


def test_float32_steps_are_those_of_one_process(seed):
    # AdamW divides a small gradient by its own size: what rounding does to it would be seen as it is nowhere else
    float32 = {"steps": 3, "dtype": torch.float32, "optimizer": "sgd"}
    cases = {stack: case._replace(**float32) for stack, case in FIFTY.items()}
    # a choice of experts that rounding could turn makes another run of it: seeds are drawn until all are clear
    clear = next(s for s in itertools.count(seed) if alone(cases["ddp"], s).margin > 1e-4)
    check(cases, clear, RANKS, tolerance=1e-5, of_parameters=1e-4)


def test_compiled_blocks_take_the_same_steps(seed):
    cases = {stack: Case(steps=1, accumulate=1, compiled=True, stack=stack) for stack in ("fsdp", "ddp")}
    check(cases, seed, 2, tolerance=1e-9, of_parameters=1e-7)


def mixed_precision(rank: int, ranks: int, seed: int) -> tuple[set[str], list[float]]:
    """Dtypes in which each kind of parameter computes, and two losses of bf16 experts and shared experts."""
    mesh = make_mesh(2, timeout=60)
    model = Model(mesh.ep, seed, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard_moe(model, mesh, mp_policy=policy)
    moe, seen = model.blocks[0].moe, set()
    for name, module in {"router": moe.router, "shared": moe.shared_experts, "experts": moe}.items():
        module.register_forward_pre_hook(lambda m, _, n=name: seen.add(f"{n} {next(m.parameters()).dtype}"))
    optimizer = make_optimizer(model, "adamw")
    x = torch.randn(ROWS, H, generator=torch.Generator().manual_seed(seed))
    losses = []
    for _ in range(2):
        loss = model(x)[0].float().square().mean()
        loss.backward()
        clip_grad_norm_(model, mesh.ep, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    return seen, losses


def test_mixed_precision_casts_experts_and_leaves_the_router_as_it_is(seed):
    for seen, losses in run_ranks(mixed_precision, 2, args=(seed,), timeout=90):
        assert seen == {"router torch.float32", "shared torch.bfloat16", "experts torch.bfloat16"}
        assert losses[1] < losses[0]


def refusals(rank: int, ranks: int, seed: int) -> list[str]:
    mesh, other = make_mesh(2, timeout=60), make_mesh(1, timeout=60)
    model = Model(mesh.ep, seed, torch.float32)
    sharded = fully_shard_moe(Model(mesh.ep, seed, torch.float32), mesh)
    messages = []
    for call in (
        lambda: make_mesh(3),
        lambda: make_mesh(2, shard_ranks=0),
        lambda: data_parallel(model, other),
        lambda: fully_shard_moe(model, other),
        lambda: reduce_gradients(sharded, mesh.ep),
        lambda: reduce_expert_gradients(sharded, mesh.ep),
    ):
        try:
            call()
            messages.append("no error")
        except ValueError as error:
            messages.append(str(error))
    model._ddp_params_and_buffers_to_ignore = ["outward.weight"]
    ddp_ignore_experts(model)
    messages.append(" ".join(sorted(model._ddp_params_and_buffers_to_ignore)))
    return messages


def test_what_does_not_fit_is_refused_by_name(seed):
    experts = [f"blocks.0.moe.{n}" for n in ("down_bias", "down_proj", "gate_up_bias", "gate_up_proj")]
    expected = [
        "ep_ranks=3: must divide the 2 ranks",
        "shard_ranks=0: must divide the 2 ranks",
        "pass that group",
        "pass that group",
        "is a DTensor",
        "is a DTensor",
        " ".join([*experts, "outward.weight"]),
    ]
    for messages in run_ranks(refusals, 2, args=(seed,), timeout=90):
        for message, part in zip(messages, expected, strict=True):
            assert part in message
    with pytest.raises(ValueError, match="make_mesh needs torch.distributed"):
        make_mesh(1)
