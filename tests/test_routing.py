"""A `Routing`: scores and logits as they are read, masks, counts, losses, and what one's own router may return."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from epmoe.config import RouterConfig
from epmoe.router import load_balancing_loss, route, router_z_loss
from epmoe.routing import Routing, as_routing, validate_routing
from tests.router_cases import INF, NAN, SCORINGS, E, K


def test_scores_read_without_gradients_first_still_give_them_to_a_loss():
    z = torch.randn(3, E, requires_grad=True)
    routing = route(z, RouterConfig(), K)
    with torch.no_grad():
        routing.scores.mean(), routing.logits.mean()
    with torch.inference_mode():
        assert routing.masked(torch.ones(3, dtype=torch.bool)).scores.norm() > 0
    assert routing.scores is routing.scores
    assert torch.autograd.grad(load_balancing_loss(routing, E) + router_z_loss(routing), z)[0].norm() > 0
    with torch.no_grad():
        unrecorded = route(z, RouterConfig(), K)
    assert not unrecorded.scores.requires_grad and not unrecorded.logits.requires_grad
    with torch.inference_mode():
        served = route(torch.randn(3, E), RouterConfig(), K)
    torch.testing.assert_close(served.scores.sum(-1), torch.ones(3))


def test_scores_are_refused_once_what_they_are_made_of_has_changed():
    z, mask = torch.randn(3, E), torch.ones(3, dtype=torch.bool)
    before = route(z, RouterConfig(), K).scores
    for changed in (z, mask):
        routing = route(z, RouterConfig(), K, token_mask=mask)
        changed.zero_()
        for read in (lambda r: r.scores, lambda r: r.logits, lambda r: r.masked(mask).scores):
            with pytest.raises(RuntimeError, match="changed in place after route"):
                read(routing)
    assert before.norm() > 0


def test_one_part_of_a_routing_can_be_replaced():
    whole = route(torch.randn(3, E), RouterConfig(), K)
    halved = dataclasses.replace(whole, topk_weights=whole.topk_weights / 2)
    assert halved.scores is whole.scores and halved.logits is whole.logits and halved.num_experts == E
    assert torch.equal(halved.topk_weights * 2, whole.topk_weights)
    with pytest.raises(dataclasses.FrozenInstanceError):
        whole.topk_ids = whole.topk_ids


def test_counts_are_exact_integers_beyond_what_fp32_can_hold():
    ids = torch.zeros(2**24 + 3, 1, dtype=torch.int8).to(torch.int32)
    ids[:2] = -1
    counts = Routing(ids, ids, num_experts=3).tokens_per_expert()
    assert counts.dtype == torch.int64 and counts.tolist() == [2**24 + 1, 0, 0]


def test_masked_tokens_count_in_nothing(seed):
    generator = torch.Generator().manual_seed(seed)
    z, mask = torch.randn(8, E, generator=generator), torch.arange(8) % 3 != 1
    padded = z.clone()
    padded[~mask] = NAN
    for config in (RouterConfig(), RouterConfig(scoring="sigmoid")):
        kept, masked = route(z[mask], config, K), route(padded, config, K, token_mask=mask)
        assert (masked.topk_ids[~mask] == -1).all() and (masked.topk_weights[~mask] == 0).all()
        assert torch.equal(masked.topk_ids[mask], kept.topk_ids)
        assert torch.equal(masked.tokens_per_expert(), kept.tokens_per_expert())
        torch.testing.assert_close(load_balancing_loss(masked, E), load_balancing_loss(kept, E))
        torch.testing.assert_close(router_z_loss(masked), router_z_loss(kept))
        all_masked = route(padded.requires_grad_(), config, K, token_mask=torch.zeros(8, dtype=torch.bool))
        loss = load_balancing_loss(all_masked, E) + router_z_loss(all_masked)
        assert loss == 0 and (torch.autograd.grad(loss, padded)[0] == 0).all()


def test_masking_afterwards_is_masking_in_route(seed):
    z, mask = torch.randn(8, E, generator=torch.Generator().manual_seed(seed)), torch.arange(8) % 3 != 1
    z[1] = NAN
    for config in (RouterConfig(), RouterConfig(scoring="topk_softmax")):
        after, inside = route(z, config, K).masked(mask), route(z, config, K, token_mask=mask)
        for name in ("topk_ids", "topk_weights", "logits", "scores"):
            assert torch.equal(getattr(after, name), getattr(inside, name)), name
        assert after.num_experts == E
    pair = Routing(torch.tensor([[1], [2]]), torch.tensor([[0.5], [NAN]]), num_experts=3).masked(mask[:2])
    assert pair.topk_ids.tolist() == [[1], [-1]] and pair.topk_weights.tolist() == [[0.5], [0.0]]
    assert pair.logits is None and pair.scores is None


@pytest.mark.parametrize("scoring", SCORINGS)
def test_load_balancing_loss_equals_the_formula_and_is_one_when_uniform(scoring, seed):
    z = torch.randn(11, E, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, requires_grad=True)
    routing = route(z, RouterConfig(scoring=scoring, dtype=torch.float64), K)
    want = 0.0
    for e in range(E):
        f = sum(row.count(e) for row in routing.topk_ids.tolist()) / (11 * K)
        p = sum(row[e] / sum(row) for row in routing.scores.tolist()) / 11
        want += E * f * p
    assert load_balancing_loss(routing, E).item() == pytest.approx(want, rel=1e-12)
    assert torch.autograd.gradcheck(
        lambda z: load_balancing_loss(route(z, RouterConfig(dtype=torch.float64), K, topk_ids=routing.topk_ids), E),
        (z,),
    )
    ids = torch.arange(E).reshape(3, K).int()
    scores = torch.full((4, E), 0.3)
    scores[3] = NAN  # a token that goes nowhere
    uniform = Routing(torch.cat([ids, torch.full_like(ids[:1], -1)]), torch.ones(4, K), None, scores)
    assert float(load_balancing_loss(uniform, E)) == pytest.approx(1.0)


def test_z_loss_equals_the_formula_and_ignores_unusable_experts(seed):
    z = torch.randn(7, E, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    z[0, :3], z[1, 4], z[3] = -INF, NAN, NAN
    z.requires_grad_()
    live = [[v for v in row if v > -INF] for row in z.tolist()]
    want = sum(math.log(sum(map(math.exp, row))) ** 2 for row in live if row) / 6
    loss = router_z_loss(route(z, RouterConfig(dtype=torch.float64), K))
    assert loss.item() == pytest.approx(want, rel=1e-12)
    (grad,) = torch.autograd.grad(loss, z)
    assert grad.isfinite().all() and (grad[3] == 0).all() and grad[2].abs().min() > 0


def test_a_router_of_ones_own_may_return_a_pair_or_a_routing():
    ids, weights = torch.tensor([[1, -1], [0, 2]]), torch.rand(2, 2, dtype=torch.bfloat16, requires_grad=True)
    pair = as_routing((ids, weights), 2, 2, 3)
    assert pair.topk_ids.dtype == torch.int32 and pair.topk_ids.tolist() == ids.tolist()
    assert pair.topk_weights.dtype == torch.float32 and pair.topk_weights.requires_grad
    assert pair.tokens_per_expert().tolist() == [1, 1, 1]
    whole = route(torch.randn(2, 3), RouterConfig(), 2)
    again = as_routing(whole, 2, 2, 3)
    assert again.topk_weights is whole.topk_weights and again.scores is whole.scores and again.logits is whole.logits


def test_a_wild_int64_id_does_not_wrap_into_a_valid_one():
    ids = torch.tensor([[2**32 + 1]])
    routing = as_routing((ids, torch.ones(1, 1)), 1, 1, 3)
    with pytest.raises(ValueError, match=r"topk_ids\[0, 0\]=2147483647: must be in \[0, num_experts=3\)"):
        validate_routing(routing.topk_ids, routing.topk_weights, 3)


def test_validate_routing_accepts_what_is_right():
    validate_routing(torch.tensor([[0, -1], [2, 1]]), torch.ones(2, 2), 3)
    validate_routing(torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2), 3)
    validate_routing(torch.tensor([[0, -1]]), torch.tensor([[1.0, NAN]]), 3)  # nobody reads that weight


IDS, ONES = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: as_routing(IDS, 2, 1, 3), r"the router returned Tensor: must be a Routing or two tensors"),
        (lambda: as_routing((IDS, ONES, ONES), 2, 1, 3), r"the router returned tuple: must be"),
        (lambda: as_routing((IDS, 1.0), 2, 1, 3), r"the router returned tuple: must be"),
        (lambda: as_routing((IDS, ONES), 3, 1, 3), r"topk_ids has shape \[2, 1\]: must be \[M, K\] = \[3, 1\]"),
        (lambda: as_routing((IDS[:, 0], ONES), 2, 1, 3), r"topk_ids has shape \[2\]: must be \[M, K\]"),
        (lambda: as_routing((IDS, ONES[:1]), 2, 1, 3), r"topk_weights has shape \[1, 1\]: must be \[M, K\] = \[2, 1\]"),
        (lambda: as_routing((ONES, ONES), 2, 1, 3), r"topk_ids has dtype torch.float32: must be int32 or int64"),
        (lambda: as_routing((IDS, IDS), 2, 1, 3), r"topk_weights has dtype torch.int32: must be a floating dtype"),
        (lambda: as_routing((IDS, ONES.to("meta")), 2, 1, 3), r"topk_ids is on cpu and topk_weights on meta"),
        (
            lambda: as_routing(Routing(IDS, ONES, torch.zeros(2, 4)), 2, 1, 3),
            r"logits has shape \[2, 4\]: must be \[M, E\] = \[2, 3\]",
        ),
        (
            lambda: validate_routing(torch.tensor([[0, -1], [3, -2]]), torch.ones(2, 2), 3),
            r"topk_ids\[1, 0\]=3: must be in \[0, num_experts=3\), or -1 for no expert",
        ),
        (
            lambda: validate_routing(torch.tensor([[0, -2]]), torch.ones(1, 2), 3),
            r"topk_ids\[0, 1\]=-2: must be in",
        ),
        (
            lambda: validate_routing(IDS, torch.tensor([[1.0], [NAN]]), 3),
            r"topk_weights\[1, 0\]=nan: must be finite",
        ),
        (lambda: Routing(IDS, ONES).tokens_per_expert(), r"Routing.num_experts=None"),
        (lambda: load_balancing_loss(Routing(IDS, ONES), 3), r"routing.scores=None: load_balancing_loss needs"),
        (lambda: router_z_loss(Routing(IDS, ONES)), r"routing.logits=None: router_z_loss needs"),
    ],
)
def test_a_mistake_is_a_value_error_that_names_it(make, message):
    with pytest.raises(ValueError, match=message):
        make()
