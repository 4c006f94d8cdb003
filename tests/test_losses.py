"""Losses, counts, bias updates and metrics are those of the whole step, however it is split."""

from __future__ import annotations

import math

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import epmoe
from epmoe import EPGroup, MoEConfig, MoELayer, Router, RouterConfig, Routing, route
from epmoe.losses import (
    LoadCounts,
    all_reduce_counts,
    global_balancing_loss,
    load_metrics,
    sequence_balancing_loss,
)
from epmoe.router import load_balancing_loss
from epmoe.testing import run_ranks

H, E, K = 8, 6, 2
EXACT = RouterConfig(dtype=torch.float64)


def routing_of(logits: Tensor, mask: Tensor | None = None) -> Routing:
    return route(logits, EXACT, K, token_mask=mask)


def by_the_formula(logits: Tensor, ids: Tensor, counts: Tensor | None = None) -> Tensor:
    """E · Σ_e f_e · P_e in a loop, tokens whose ids are all -1 left out."""
    counts_here, means, tokens = [0.0] * E, torch.zeros(E, dtype=torch.float64), 0
    for row, chosen in zip(logits.softmax(-1), ids.tolist(), strict=True):
        if all(e < 0 for e in chosen):
            continue
        tokens, means = tokens + 1, means + row
        for e in chosen:
            counts_here[e] += 1
    f = torch.tensor(counts_here, dtype=torch.float64) if counts is None else counts.double()
    return E * (f / f.sum() * means / tokens).sum()


def test_the_sequence_loss_is_the_mean_of_each_sequences_own_loss(seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(12, E, dtype=torch.float64, generator=generator, requires_grad=True)
    mask = torch.ones(12, dtype=torch.bool)
    mask[2] = mask[4:8] = False  # the second of three sequences is all padding
    routing = routing_of(logits, mask)
    parts = [by_the_formula(logits[s], routing.topk_ids[s]) for s in (slice(0, 4), slice(8, 12))]
    expected = (parts[0] + parts[1]) / 2
    found = sequence_balancing_loss(routing, 3)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    g, w = (torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (found, expected))
    torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-14)
    weighted = sequence_balancing_loss(routing, 3, per_token=True)
    torch.testing.assert_close(weighted, (3 * parts[0] + 4 * parts[1]) / 7, rtol=1e-12, atol=0)

    order = torch.randperm(12, generator=generator)
    shuffled = routing_of(logits[order], mask[order])
    packed = sequence_balancing_loss(shuffled, 3, torch.arange(12)[order] // 4)
    torch.testing.assert_close(packed, expected, rtol=1e-12, atol=0)
    alone = sequence_balancing_loss(routing, 1)
    torch.testing.assert_close(alone, load_balancing_loss(routing, E), rtol=1e-12, atol=0)


def test_no_token_at_all_costs_nothing_and_has_a_finite_gradient():
    for rows in (0, 4):
        logits = torch.zeros(rows, E, dtype=torch.float64, requires_grad=True)
        routing = routing_of(logits, torch.zeros(rows, dtype=torch.bool))
        loss = sequence_balancing_loss(routing, 2) + global_balancing_loss(routing)
        assert loss.item() == 0
        assert torch.autograd.grad(loss, logits)[0].abs().sum() == 0


ROWS = (5, 0, 3)


def split_loss(rank: int, ranks: int, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """This rank's share of the global loss (mean and sum convention) and its gradient; the counts of all."""
    ep = EPGroup(device="cpu", timeout=30)
    groups = (ep.process_group, None)
    mine = logits[sum(ROWS[:rank]) : sum(ROWS[: rank + 1])].clone().requires_grad_()
    routing = routing_of(mine)
    loss = global_balancing_loss(routing, groups)
    summed = global_balancing_loss(routing, groups, average=False)
    counts = all_reduce_counts(routing.tokens_per_expert(), groups)
    return loss.detach(), torch.autograd.grad(loss, mine)[0], summed.detach(), counts


def test_the_global_loss_of_uneven_ranks_is_the_loss_of_one_process_with_all_tokens(seed):
    logits = torch.randn(sum(ROWS), E, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    logits.requires_grad_()
    routing = routing_of(logits)
    expected = by_the_formula(logits, routing.topk_ids)
    gradient = torch.autograd.grad(expected, logits)[0]
    found = run_ranks(split_loss, len(ROWS), args=(logits.detach(),))
    losses, gradients, sums, counts = zip(*found, strict=True)
    torch.testing.assert_close(torch.stack(losses).mean(), expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.stack(sums).sum(), expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.cat(gradients) / len(ROWS), gradient, rtol=1e-10, atol=1e-14)
    assert all(torch.equal(c, routing.tokens_per_expert()) for c in counts)
    # it is another loss than the mean of each rank's own
    own = [by_the_formula(logits[:5], routing.topk_ids[:5]), by_the_formula(logits[5:], routing.topk_ids[5:])]
    assert abs((5 * own[0] + 3 * own[1]).item() / 8 - expected.item()) > 1e-6


def test_given_counts_are_what_the_global_loss_compares_with(seed):
    logits = torch.randn(7, E, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    routing = routing_of(logits)
    counts = torch.randint(1, 1000, (E,), generator=torch.Generator().manual_seed(seed))
    expected = by_the_formula(logits, routing.topk_ids, counts)
    torch.testing.assert_close(global_balancing_loss(routing, counts=counts), expected, rtol=1e-12, atol=0)


class Model(nn.Module):
    """Two layers; `how` recomputes them: not at all, by us, or by torch."""

    def __init__(self, ep: EPGroup | None, how: str = "plain") -> None:
        super().__init__()
        self.how = how
        config = MoEConfig(H, 8, E, K, router=RouterConfig(scoring="sigmoid", selection_bias=True))
        self.layers = nn.ModuleList(MoELayer(config, ep, device="cpu", name=f"moe{n}") for n in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.how == "ours":
                x = x + epmoe.checkpoint(layer, x)
            elif self.how in ("torch", "reentrant"):
                reentrant = self.how == "reentrant"
                x = x + torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
            else:
                x = x + layer(x)
        return x


def expected_counts(model: Model, batches: Tensor) -> dict[str, Tensor]:
    total = {f"layers.{n}.router": torch.zeros(E, dtype=torch.int64) for n in range(2)}
    with torch.no_grad():
        for x in batches:
            for n, layer in enumerate(model.layers):
                y, routing = layer(x, return_routing=True)
                total[f"layers.{n}.router"] += routing.tokens_per_expert()
                x = x + y
    return total


@pytest.mark.parametrize("how", ["plain", "ours", "torch", "reentrant"])
def test_each_forward_is_counted_once_however_often_it_is_computed(how, seed):
    torch.manual_seed(seed)
    model = Model(None, how)
    batches = torch.randn(3, 7, H)
    expected = expected_counts(model, batches)
    load = LoadCounts(model)
    assert all(not c.any() for c in load.local().values())
    for x in batches:
        model(x.clone().requires_grad_()).square().sum().backward()
    model.eval()
    model(batches[0])
    found = load.take()
    assert found.keys() == expected.keys()
    for name, counts in found.items():
        assert counts.dtype == torch.int64 and torch.equal(counts, expected[name]), name
        assert counts.sum() == 3 * 7 * K
    assert all(not c.any() for c in load.local().values())
    model.train()
    load.close()
    model(batches[0])
    assert all(not c.any() for c in load.local().values())


def test_forwards_of_a_compiled_router_are_counted(seed):
    torch.manual_seed(seed)
    router, x = Router(RouterConfig(), H, E, K), torch.randn(7, H)
    load = LoadCounts(router)
    compiled = torch.compile(router, backend="eager")
    for _ in range(2):
        counts = compiled(x).tokens_per_expert()
    assert torch.equal(load.take()[""], 2 * counts) and counts.sum() == 7 * K


def biases(rank: int, ranks: int, seed: int) -> list[Tensor]:
    ep = EPGroup(device="cpu", timeout=30) if ranks > 1 else None
    groups = (ep and ep.process_group,)
    torch.manual_seed(seed)
    model = Model(ep)
    load = LoadCounts(model)
    batches = torch.randn(3, 2, sum(ROWS), H, generator=torch.Generator().manual_seed(seed))
    mine = slice(sum(ROWS[:rank]), sum(ROWS[: rank + 1])) if ranks > 1 else slice(None)
    with torch.no_grad():
        for microbatches in batches:
            for x in microbatches:
                model(x[mine])
            load.update_biases(0.01, groups)
    return [layer.router.selection_bias for layer in model.layers]


def test_bias_updates_of_uneven_ranks_are_those_of_one_process_to_the_bit(seed):
    expected = biases(0, 1, seed)
    assert all(bias.any() for bias in expected)  # an odd number of steps of one size
    for found in run_ranks(biases, len(ROWS), args=(seed,)):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_counts_stay_exact_where_float32_would_lose_tokens():
    load = LoadCounts(model := Model(None))
    name = "layers.0.router"
    load._counts[name] = torch.tensor([2**25 + 1, 2**25, 2**25, 2**25, 2**25, 2**25 - 1])
    load.add(name, Routing(torch.tensor([[0, 1]] * 3, dtype=torch.int32), torch.ones(3, 2), num_experts=E))
    assert load.local()[name].tolist() == [2**25 + 4, 2**25 + 3, 2**25, 2**25, 2**25, 2**25 - 1]
    load.update_biases(1.0)
    assert model.layers[0].router.selection_bias.tolist() == [-1, -1, 1, 1, 1, 1]
    with pytest.raises(ValueError, match="dtype torch.float32: must be integers"):
        all_reduce_counts(torch.ones(3))


def test_a_router_of_ones_own_is_counted_by_hand_beside_the_others(seed):
    class Own(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.zeros(len(x), K, dtype=torch.int32), torch.ones(len(x), K)

    config = MoEConfig(H, 8, E, K)
    model = nn.Sequential(MoELayer(config, device="cpu"), MoELayer(config, device="cpu", router=Own()))
    load = LoadCounts(model)
    x, routing = model[1](torch.randn(5, H), return_routing=True)
    load.add("1", routing)
    counts = load.take()
    assert counts["0.router"].sum() == 0 and counts["1"].tolist() == [5 * K] + [0] * (E - 1)


def test_metrics_of_known_loads():
    even, skewed = torch.full((4,), 6), torch.tensor([8, 4, 0, 0])
    metrics = load_metrics(torch.stack([even, skewed]), slots=torch.tensor([24, 16]))
    assert metrics.max_over_mean.tolist() == [1.0, pytest.approx(8 / 3)]
    assert metrics.min_over_mean.tolist() == [1.0, 0.0]
    share = [2 / 3, 1 / 3]
    entropy = -sum(p * math.log(p) for p in share) / math.log(4)
    assert metrics.entropy.tolist() == pytest.approx([1.0, entropy])
    assert metrics.unused.tolist() == [0, 2]
    assert metrics.dropped.tolist() == pytest.approx([0.0, 0.25])
    nothing = load_metrics(torch.zeros(4, dtype=torch.int64), slots=0)
    assert all(math.isfinite(value.item()) for value in nothing)
    assert load_metrics(torch.tensor([7])).max_over_mean == 1  # one expert


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda r: sequence_balancing_loss(r, 0), "num_sequences=0: must be at least 1"),
        (lambda r: sequence_balancing_loss(r, 3), "num_sequences=3: 4 tokens are no equal runs"),
        (
            lambda r: sequence_balancing_loss(r, 2, torch.zeros(3).long()),
            r"sequence_ids is .* must be integers \[M=4\]",
        ),
        (lambda r: global_balancing_loss(r, counts=torch.ones(E)), r"counts is torch.float32 .* integers \[E=6\]"),
        (lambda r: global_balancing_loss(Routing(r.topk_ids, r.topk_weights)), "routing.scores=None"),
        (lambda r: load_metrics(torch.ones(3)), "counts has dtype torch.float32"),
    ],
)
def test_a_mistake_is_a_value_error_that_names_it(make, message):
    with pytest.raises(ValueError, match=message):
        make(routing_of(torch.zeros(4, E)))
