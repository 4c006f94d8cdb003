"""Simulated routers: distinct experts, the promised load, the same routing from the same seed."""

from __future__ import annotations

import pytest
import torch

from epmoe.placement import ExpertPlacement
from epmoe.routing import validate_routing
from epmoe.simulated import one_expert, one_rank, replay, uniform, zipf

PLACEMENT = ExpertPlacement.explicit([[5, 1, 2], [0, 4, 3, 7], [6]])
ROUTERS = {
    "uniform": lambda seed: uniform(8, 4, seed),
    "uniform, K = E": lambda seed: uniform(4, 4, seed),
    "zipf": lambda seed: zipf(8, 4, 1.2, seed),
    "one_expert": lambda seed: one_expert(8, 4, 3),
    "one_rank": lambda seed: one_rank(PLACEMENT, 4, 1, seed),
    "one_rank with too few": lambda seed: one_rank(PLACEMENT, 4, 0, seed),
}


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("num_tokens", [0, 1, 33])
def test_routing_is_well_formed_with_distinct_experts(name, num_tokens, seed):
    router = ROUTERS[name](seed)
    routing = router(torch.full((num_tokens, 3), torch.nan))
    ids, weights = routing.topk_ids, routing.topk_weights
    assert ids.shape == weights.shape == (num_tokens, 4)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    validate_routing(ids, weights, router.num_experts)
    for row in ids.tolist():
        used = [e for e in row if e >= 0]
        assert used and len(set(used)) == len(used)
    assert torch.all((weights > 0) == (ids >= 0))
    torch.testing.assert_close(weights.sum(-1), torch.ones(num_tokens))
    assert routing.tokens_per_expert().sum() == (ids >= 0).sum()


@pytest.mark.parametrize("name", ROUTERS)
def test_a_seed_fixes_every_token_whatever_the_batch_and_the_call(name, seed):
    router = ROUTERS[name](seed)
    first, again = router(torch.empty(40, 2)), router(torch.empty(40, 2))
    fresh, short = ROUTERS[name](seed)(torch.empty(40, 2)), router(torch.empty(7, 2))
    for other in (again, fresh):
        assert torch.equal(first.topk_ids, other.topk_ids) and torch.equal(first.topk_weights, other.topk_weights)
    assert torch.equal(first.topk_ids[:7], short.topk_ids) and torch.equal(first.topk_weights[:7], short.topk_weights)


@pytest.mark.parametrize("name", ["uniform", "zipf", "one_rank"])
def test_another_seed_gives_another_routing(name, seed):
    x = torch.empty(40, 2)
    assert not torch.equal(ROUTERS[name](seed)(x).topk_ids, ROUTERS[name](seed + 1)(x).topk_ids)


def test_uniform_loads_every_expert_alike(seed):
    counts = uniform(16, 3, seed)(torch.empty(8000, 1)).tokens_per_expert()
    expected, sigma = 8000 * 3 / 16, (8000 * 3 / 16 * 13 / 16) ** 0.5
    assert (counts - expected).abs().max() < 6 * sigma


def test_zipf_loads_follow_the_power_law_for_one_slot(seed):
    num_tokens = 20000
    counts = zipf(6, 1, 1.5, seed)(torch.empty(num_tokens, 1)).tokens_per_expert().sort(descending=True).values
    chance = torch.arange(1, 7).double() ** -1.5
    chance /= chance.sum()
    assert ((counts - num_tokens * chance).abs() < 6 * (num_tokens * chance).sqrt()).all()


def test_zipf_hot_experts_move_with_the_seed_and_exponent_zero_is_uniform(seed):
    x = torch.empty(500, 1)
    hottest = {int(zipf(16, 1, 2.0, seed + n)(x).tokens_per_expert().argmax()) for n in range(24)}
    assert len(hottest) > 3
    assert torch.equal(zipf(16, 4, 0, seed)(x).topk_ids, uniform(16, 4, seed)(x).topk_ids)


def test_weights_differ_between_slots_so_that_swapped_ones_show(seed):
    weights = uniform(8, 4, seed)(torch.empty(50, 1)).topk_weights.sort(-1).values
    assert (weights.diff(dim=-1) > 0).all()


def test_one_expert_fills_slot_zero_only():
    routing = one_expert(8, 3, 5)(torch.empty(4, 1))
    assert routing.topk_ids.tolist() == [[5, -1, -1]] * 4
    assert routing.topk_weights.tolist() == [[1.0, 0.0, 0.0]] * 4


def test_one_rank_uses_all_and_only_the_experts_of_that_rank(seed):
    for rank in range(3):
        ids = one_rank(PLACEMENT, 2, rank, seed)(torch.empty(200, 1)).topk_ids
        assert set(ids[ids >= 0].tolist()) == set(PLACEMENT.local_experts(rank))
        assert ((ids >= 0).sum(-1) == min(2, PLACEMENT.num_local(rank))).all()


def test_replay_gives_the_records_in_order_and_then_says_it_is_out():
    records = [torch.tensor([[0, 2], [1, -1]]), torch.tensor([[3, 1]], dtype=torch.int32), torch.empty(0, 2).int()]
    router = replay(records)
    first = router(torch.empty(2, 5))
    assert first.topk_ids.dtype == torch.int32 and first.topk_ids.tolist() == records[0].tolist()
    assert first.topk_weights.tolist() == [[0.5, 0.5], [1.0, 0.0]]
    with pytest.raises(ValueError, match=r"call 2 has M=3 tokens but its record holds 1"):
        router(torch.empty(3, 5))
    assert router(torch.empty(1, 5)).topk_ids.tolist() == [[3, 1]]
    assert router(torch.empty(0, 5)).tokens_per_expert().tolist() == [0, 0, 0, 0]
    with pytest.raises(ValueError, match=r"call 4 but only 3 routings were recorded"):
        router(torch.empty(1, 5))


def test_replay_keeps_the_recorded_weights():
    weights = torch.tensor([[0.25, 3.0]], dtype=torch.bfloat16)
    routing = replay([torch.tensor([[7, 0]])], [weights], num_experts=9)(torch.empty(1, 2))
    assert routing.topk_weights.dtype == torch.float32 and torch.equal(routing.topk_weights, weights.float())
    assert routing.num_experts == 9


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: uniform(4, 5), r"top_k=5: must be in \[1, num_experts=4\]"),
        (lambda: uniform(4, 0), r"top_k=0: must be"),
        (lambda: zipf(4, 2, -1.0), r"exponent=-1.0: must be finite and at least 0"),
        (lambda: one_expert(4, 2, 4), r"expert=4: must be in \[0, num_experts=4\)"),
        (lambda: one_rank(PLACEMENT, 2, 3), r"rank=3: must be in \[0, 3\)"),
        (lambda: replay([torch.tensor([[0, 1], [2, 2]])]), r"record 0: row 1 names expert 2 twice"),
        (lambda: replay([torch.tensor([[0, 4]])], num_experts=4), r"record 0: topk_ids\[0, 1\]=4: must be in \[0"),
        (lambda: replay([torch.tensor([0, 4])]), r"ids\[0\] has shape \[2\]: must be \[M, K\]"),
        (lambda: replay([torch.tensor([[0.0]])]), r"record 0: topk_ids has dtype torch.float32"),
        (lambda: replay([torch.tensor([[0]])], []), r"1 records of ids but 0 of weights"),
        (lambda: replay([torch.tensor([[0]])], [torch.ones(1, 2)]), r"record 0: topk_weights has shape \[1, 2\]"),
    ],
)
def test_a_mistake_is_a_value_error_that_names_it(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROUTERS)
def test_cuda_and_cpu_draw_the_same_experts(name, seed):
    router = ROUTERS[name](seed)
    on_cpu, on_cuda = router(torch.empty(300, 2)), router(torch.empty(300, 2, device="cuda"))
    assert on_cuda.topk_ids.is_cuda and on_cuda.topk_weights.is_cuda
    assert torch.equal(on_cpu.topk_ids, on_cuda.topk_ids.cpu())
    torch.testing.assert_close(on_cpu.topk_weights, on_cuda.topk_weights.cpu())
