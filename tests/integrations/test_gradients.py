"""One global batch, split over any number of ranks, gives one set of gradients, norms and updates."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from epmoe import EPGroup, MoEConfig, MoELayer, RouterConfig
from epmoe.integrations import gradients
from epmoe.integrations.gradients import (
    broadcast_parameters,
    clip_grad_norm_,
    expert_parameters,
    reduce_gradients,
    replicated_parameters,
)
from epmoe.testing import run_ranks

H, I, E, K = 12, 8, 6, 2


class Model(nn.Module):
    """Two MoE layers with everything that has parameters, among plain ones."""

    def __init__(self, ep: EPGroup | None, seed: int, dispatcher: str = "auto") -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inward = nn.Linear(H, H)
        config = {"hidden_size": H, "intermediate_size": I, "num_experts": E, "top_k": K, "dispatcher": dispatcher}
        self.first = MoELayer(
            MoEConfig(**config, expert_bias=True, num_shared_experts=1, router=RouterConfig(dtype=torch.float64)),
            ep,
            device="cpu",
            dtype=torch.float64,
            name="a",
        )
        self.second = MoELayer(
            MoEConfig(
                **config, latent_size=6, placement="strided", router=RouterConfig(bias=True, dtype=torch.float64)
            ),
            ep,
            device="cpu",
            dtype=torch.float64,
            name="b",
        )
        self.double()
        self.register_buffer("offset", torch.randn(H, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inward(x) + self.offset
        return self.second(x + self.first(x))


def share(rows: list[int], rank: int) -> slice:
    return slice(sum(rows[:rank]), sum(rows[: rank + 1]))


def full(model: nn.Module, name: str, local: Tensor) -> tuple[list[int], Tensor]:
    """Which rows of the undivided tensor `local` is."""
    if name not in expert_parameters(model):
        return [], local
    return list(model.get_submodule(name.rpartition(".")[0]).local_experts), local


def step(
    rank: int, ranks: int, seed: int, rows: list[int], average: bool, dispatcher: str, max_norm: float, copies: int
) -> tuple[dict[str, tuple[list[int], Tensor]], list[float]]:
    """This rank's gradients after reduction and clipping, and the norms found (p = 1, inf, 2)."""
    ep, replicas = None, None
    if ranks > 1:
        size = ranks // copies
        grids = [dist.new_group(list(range(c * size, (c + 1) * size))) for c in range(copies)]
        columns = [dist.new_group(list(range(r, ranks, size))) for r in range(size)]
        ep = EPGroup(grids[rank // size], device="cpu", timeout=30)
        replicas = columns[rank % size] if copies > 1 else None
    model = Model(ep, seed, dispatcher)
    generator = torch.Generator().manual_seed(seed + 1)
    x, target = (torch.randn(sum(rows), H, generator=generator, dtype=torch.float64) for _ in range(2))
    mine = share(rows, rank)
    loss = (model(x[mine]) - target[mine]).square().sum(1)
    (loss.mean() if average else loss.sum() / sum(rows)).backward()
    reduce_gradients(model, ep, replicas=replicas, average=average)
    norms = [clip_grad_norm_(model, ep, 1e9, p).item() for p in (1.0, float("inf"))]
    norms.append(clip_grad_norm_(model, ep, max_norm).item())
    return {n: full(model, n, p.grad) for n, p in model.named_parameters() if p.grad is not None}, norms


@pytest.mark.parametrize(
    ("rows", "average", "dispatcher", "copies"),
    [
        ([6, 6], True, "all_to_all", 1),
        ([3, 3, 3, 3], True, "all_gather", 1),
        ([3, 3, 3, 3], True, "all_to_all", 2),
        ([7, 0, 1, 4], False, "all_to_all", 1),
        ([12, 0], False, "all_gather", 1),
        ([5, 0, 0, 7], False, "all_to_all", 2),
    ],
)
def test_any_split_of_the_batch_gives_the_gradients_and_norm_of_one_process(rows, average, dispatcher, copies, seed):
    whole, norms = step(0, 1, seed, [sum(rows)], average, "auto", 1e9, 1)
    everything = torch.cat([g.reshape(-1) for _, g in whole.values()])
    expected_norms = [everything.norm(p).item() for p in (1.0, float("inf"), 2.0)]
    assert norms == pytest.approx(expected_norms, rel=1e-12)
    clipped_to = 0.05 / (expected_norms[2] + 1e-6)
    assert clipped_to < 1
    for found, found_norms in run_ranks(step, len(rows), args=(seed, rows, average, dispatcher, 0.05, copies)):
        assert found_norms == pytest.approx(norms, rel=1e-9)
        assert found.keys() == whole.keys()
        for name, (ids, gradient) in found.items():
            expected = clipped_to * (whole[name][1][ids] if ids else whole[name][1])
            assert (gradient - expected).norm() <= 1e-9 * expected.norm(), name


def no_gradient_here(rank: int, ranks: int, seed: int) -> list[Tensor | None]:
    ep = EPGroup(device="cpu")
    model = Model(ep, seed)
    model.inward.bias.requires_grad_(False)
    weight = model.inward.weight
    if rank == 1:
        weight.grad = torch.full_like(weight, 3.0)
    reduce_gradients(model, ep, average=True)
    return [weight.grad, model.inward.bias.grad, model.first.down_proj.grad]


def test_a_missing_gradient_counts_as_zeros_and_a_frozen_parameter_gets_none(seed):
    for weight, bias, expert in run_ranks(no_gradient_here, 2, args=(seed,)):
        assert torch.equal(weight, torch.full((H, H), 1.5, dtype=torch.float64))
        assert bias is None
        assert expert is None


def in_main_grad(rank: int, ranks: int, seed: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Experts' gradients after reduction and clipping, held in `.grad` and in `.main_grad`, and the norms."""
    copies = [dist.new_group([r]) for r in range(ranks)]
    results = []
    for replicas in (None, dist.group.WORLD):  # one EP group of all ranks, or a group of its own for each
        ep = EPGroup(device="cpu") if replicas is None else EPGroup(copies[rank], device="cpu")
        found = []
        for main in (False, True):
            model = Model(ep, seed)
            x = torch.randn(6, H, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + rank))
            model(x).square().mean().backward()
            experts = list(expert_parameters(model).values())
            if main:
                for parameter in experts:
                    parameter.main_grad, parameter.grad = parameter.grad, None
            reduce_gradients(model, ep, replicas=replicas)
            norm = clip_grad_norm_(model, ep, 0.05)
            gradients = [p.main_grad if main else p.grad for p in experts]
            assert not main or all(p.grad is None for p in experts)
            found.append((torch.cat([g.reshape(-1) for g in gradients]), norm))
        results.append((found[0][0] - found[1][0], found[0][1] - found[1][1], found[0][0].norm()))
    return results


def test_a_main_grad_is_reduced_and_clipped_like_a_grad(seed):
    for rank in run_ranks(in_main_grad, 2, args=(seed,)):
        for difference, norms, size in rank:
            assert not difference.any() and not norms.any() and size > 0


def bf16_sum(rank: int, ranks: int) -> Tensor:
    ep = EPGroup(device="cpu")
    gradients.BUCKET_BYTES = 8  # several buckets, one parameter larger than any
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(2, 1, dtype=torch.float64), nn.Linear(2, 2)).bfloat16()
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 256.0 if rank == 0 else 1.0 + number)
    reduce_gradients(model, ep, average=False)
    return torch.cat([p.grad.unique() for p in model.parameters()])


def test_bf16_gradients_are_summed_in_fp32_and_rounded_once_in_any_bucketing():
    # 256 + (1 + n) three times: in bf16, where 257 rounds to 256, adding ones one by one would lose them
    expected = torch.tensor([256.0 + 3 * (1 + n) for n in range(6)]).bfloat16()
    for found in run_ranks(bf16_sum, 4):
        assert torch.equal(found, expected)


def broadcast(rank: int, ranks: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    ep = EPGroup(device="cpu")
    model = Model(ep, seed + rank)
    before = copy.deepcopy(model.first.down_proj.detach())
    broadcast_parameters(model, ep)
    replicated = torch.cat([p.detach().reshape(-1) for p in replicated_parameters(model).values()])
    return replicated, model.offset, before - model.first.down_proj.detach()


def test_broadcast_gives_every_rank_the_replicated_tensors_of_rank_0_and_leaves_experts(seed):
    model = Model(None, seed)
    expected = torch.cat([p.detach().reshape(-1) for p in replicated_parameters(model).values()])
    for replicated, offset, moved in run_ranks(broadcast, 2, args=(seed,)):
        assert torch.equal(replicated, expected)
        assert torch.equal(offset, model.offset)
        assert not moved.any()


def test_experts_are_told_from_the_rest_by_their_full_names(seed):
    model = nn.ModuleDict({"inner": Model(None, seed)})
    experts = {f"inner.first.{n}" for n in ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias")}
    experts |= {f"inner.second.{n}" for n in ("gate_up_proj", "down_proj")}
    assert set(expert_parameters(model)) == experts
    assert set(replicated_parameters(model)) == {n for n, _ in model.named_parameters()} - experts
    assert set(expert_parameters(model["inner"].second)) == {"gate_up_proj", "down_proj"}


def wrong_group(rank: int, ranks: int, seed: int) -> str:
    model = Model(EPGroup(device="cpu"), seed)
    try:
        reduce_gradients(model, EPGroup(device="cpu"))
    except ValueError as error:
        return str(error)
    return "no error"


def test_another_group_than_the_layers_is_refused_by_the_layers_name(seed):
    for message in run_ranks(wrong_group, 2, args=(seed,)):
        assert "layer 'first'" in message and "pass that group" in message


@pytest.mark.parametrize("arguments", [{"max_norm": 0.0}, {"max_norm": 1.0, "norm_type": -2.0}])
def test_a_norm_that_is_not_positive_is_refused(arguments):
    with pytest.raises(ValueError, match=f"{list(arguments)[-1]}=.*must be a number > 0"):
        clip_grad_norm_(nn.Linear(1, 1), None, **arguments)


def test_arguments_of_other_kinds_are_refused_by_name(seed):
    model = nn.Linear(2, 2)
    for call, said in (
        (lambda: reduce_gradients(model, 3), "ep=3: must be the EPGroup of its layers"),
        (lambda: reduce_gradients(3, None), "model=3: must be a module"),
        (lambda: reduce_gradients(model, None, average="no"), "average='no': must be True or False"),
        (lambda: clip_grad_norm_(model, None, "x"), "max_norm='x': must be a number > 0"),
        (lambda: clip_grad_norm_(model, None, 1.0, norm_type="2"), "norm_type='2': must be a number > 0, or inf"),
    ):
        with pytest.raises(ValueError, match=said):
            call()
