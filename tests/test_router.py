"""Routing against a reference in python floats: every rule, ties, NaN and infinities, gradients, losses, messages."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from epmoe.config import RouterConfig
from epmoe.ops import route as ops_route
from epmoe.router import (
    Router,
    Routing,
    as_routing,
    load_balancing_loss,
    route,
    router_z_loss,
    update_selection_bias,
    validate_routing,
)

NAN, INF = math.nan, math.inf
SCORINGS = ["softmax", "topk_softmax", "sigmoid", "sqrt_softplus"]
GROUPINGS = {  # E = 12
    "no groups": {},
    "4 groups by max": {"num_groups": 4, "topk_groups": 2, "group_score": "max"},
    "4 groups by top2": {"num_groups": 4, "topk_groups": 2, "group_score": "top2_sum"},
    "groups of one by top2": {"num_groups": 12, "topk_groups": 5, "group_score": "top2_sum"},
}
E, K = 12, 4


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-300)).item()


def reference_row(z: list[float], config: RouterConfig, k: int, bias: list[float]):
    """(ids, weights, scores, gap): one token in python floats; gap = the closest decision that was no exact tie."""
    usable = [e for e, v in enumerate(z) if not math.isnan(v) and v != -INF]
    z = [min(v, torch.finfo(config.dtype).max) for v in z]
    scores = [0.0] * len(z)
    if config.scoring in ("softmax", "topk_softmax"):
        total = sum(math.exp(z[e] - max(z[i] for i in usable)) for e in usable)
        for e in usable:
            scores[e] = math.exp(z[e] - max(z[i] for i in usable)) / total
    for e in usable:
        if config.scoring == "sigmoid":
            scores[e] = 1 / (1 + math.exp(-z[e])) if z[e] > 0 else math.exp(z[e]) / (1 + math.exp(z[e]))
        if config.scoring == "sqrt_softplus":
            scores[e] = math.sqrt(z[e] + math.log1p(math.exp(-z[e])) if z[e] > 0 else math.log1p(math.exp(z[e])))
    value = {e: (z[e] if config.scoring == "topk_softmax" else scores[e]) + bias[e] for e in usable}
    gap = INF

    def best(of: dict[int, float], count: int) -> list[int]:
        nonlocal gap
        order = sorted(of, key=lambda i: (-of[i], i))
        for a, b in zip(order, order[1:], strict=False):
            if of[a] != of[b]:
                gap = min(gap, of[a] - of[b])
        return order[:count]

    if config.num_groups > 1:
        size = len(z) // config.num_groups
        group_value = {}
        for g in range(config.num_groups):
            inside = sorted((value[e] for e in usable if e // size == g), reverse=True)
            if inside:
                group_value[g] = inside[0] if config.group_score == "max" else sum(inside[:2])
        kept = best(group_value, config.topk_groups)
        value = {e: v for e, v in value.items() if e // size in kept}
    ids = best(value, k)
    if config.scoring == "topk_softmax":
        weights = [math.exp(z[e] - max(z[i] for i in ids)) for e in ids]
        weights = [w / sum(weights) for w in weights]
    else:
        weights = [scores[e] for e in ids]
    if config.renormalize:
        weights = [w / (sum(weights) + 1e-20) for w in weights]
    weights = [w * config.scaling_factor for w in weights]
    pad = k - len(ids)
    return ids + [-1] * pad, weights + [0.0] * pad, scores, gap


def odd_logits(num_tokens: int, generator: torch.Generator) -> torch.Tensor:
    """fp64, on a grid of 1/4 so that many tie, one in eight of them NaN, -inf or +inf."""
    z = (torch.randn(num_tokens, E, generator=generator, dtype=torch.float64) * 8).round() / 4
    what = torch.randint(0, 24, z.shape, generator=generator)
    for code, value in enumerate((NAN, -INF, INF)):
        z[what == code] = value
    z[torch.rand(num_tokens, generator=generator) < 0.1] = NAN
    return z


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("renormalize", [False, True], ids=["raw", "renorm"])
@pytest.mark.parametrize("biased", [False, True], ids=["unbiased", "biased"])
@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("scoring", SCORINGS)
def test_route_equals_the_reference(scoring, grouping, biased, renormalize, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    scale = 0.5 + float(torch.rand((), generator=generator))
    config = RouterConfig(
        scoring=scoring, renormalize=renormalize, scaling_factor=scale, dtype=dtype, **GROUPINGS[grouping]
    )
    z = odd_logits(29, generator)
    bias = torch.randint(-2, 3, (E,), generator=generator) / 8 if biased else None
    got = route(z, config, K, selection_bias=bias)
    assert got.topk_ids.dtype == torch.int32 and got.topk_weights.dtype == got.scores.dtype == dtype
    compared = 0
    for token, row in enumerate(z.tolist()):
        ids, weights, scores, gap = reference_row(row, config, K, [0.0] * E if bias is None else bias.tolist())
        if gap < 1e-5 and dtype == torch.float32:
            continue  # fp32 may decide otherwise
        compared += 1
        assert got.topk_ids[token].tolist() == ids
        tolerance = 2e-6 if dtype == torch.float32 else 1e-13
        assert relative(got.topk_weights[token], torch.tensor(weights, dtype=torch.float64)) < tolerance
        assert relative(got.scores[token], torch.tensor(scores, dtype=torch.float64)) < tolerance
        assert all(w == 0 for w, e in zip(got.topk_weights[token].tolist(), ids, strict=True) if e == -1)
    assert compared > 10


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("grouping", ["no groups", "4 groups by top2"])
def test_gradcheck_of_weights_and_scores(scoring, grouping, seed):
    generator = torch.Generator().manual_seed(seed)
    rank = torch.stack([torch.randperm(E, generator=generator) for _ in range(5)])
    z = (rank * 0.37 - 2 + 0.1 * torch.rand(5, E, generator=generator)).double().requires_grad_()
    config = RouterConfig(scoring=scoring, scaling_factor=1.7, dtype=torch.float64, **GROUPINGS[grouping])

    def both(z):
        routing = route(z, config, K)
        return routing.topk_weights, routing.scores

    assert torch.autograd.gradcheck(both, (z,))


@pytest.mark.parametrize("scoring", ["sigmoid", "sqrt_softplus"])
def test_scores_and_their_gradients_are_right_far_from_zero(scoring):
    z = torch.tensor([[-90.0, -41.0, -39.0, -20.0, 0.0, 20.0, 39.0, 41.0, 1e4]], requires_grad=True)
    scores = route(z, RouterConfig(scoring=scoring), 1).scores
    (grad,) = torch.autograd.grad(scores.sum(), z)
    for value, score, slope in zip(z[0].tolist(), scores[0].tolist(), grad[0].tolist(), strict=True):
        sigmoid = math.exp(min(value, 0)) / (1 + math.exp(-abs(value)))
        softplus = max(value, 0) + math.log1p(math.exp(-abs(value)))
        want = sigmoid if scoring == "sigmoid" else math.sqrt(softplus)
        complement = math.exp(min(-value, 0)) / (1 + math.exp(-abs(value)))
        want_slope = sigmoid * complement if scoring == "sigmoid" else sigmoid / (2 * math.sqrt(softplus))
        assert score == pytest.approx(want, rel=1e-5) and slope == pytest.approx(want_slope, rel=1e-5, abs=1e-37)


NASTY = [
    [NAN] * 6,
    [-INF] * 6,
    [NAN, -INF, 0.5, NAN, -INF, NAN],
    [INF, 0.0, 1.0, INF, -INF, 2.0],
    [INF] * 6,
    [-3e38, 3e38, -1e30, 0.0, NAN, 1.0],
    [-200.0] * 6,
    [-100.0, -95.0, -110.0, 200.0, -300.0, 88.0],
    [0.0, -0.0, 1.0, -1.0, 2.0, 0.5],
]


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("forced", [False, True])
def test_nothing_is_nan_forward_or_backward_whatever_the_logits(scoring, renormalize, groups, forced):
    z = torch.tensor(NASTY, requires_grad=True)
    config = RouterConfig(scoring=scoring, renormalize=renormalize, num_groups=groups, topk_groups=groups - groups // 2)
    ids = torch.tensor([[0, 3, 4]] * len(NASTY)) if forced else None
    routing = route(z, config, 3, topk_ids=ids)
    assert routing.topk_weights.isfinite().all() and routing.scores.isfinite().all()
    assert not routing.logits.isnan().any()
    weight = torch.rand(routing.topk_weights.shape) + 0.5
    loss = (routing.topk_weights * weight).sum() + routing.scores.square().sum().clamp(max=1e6)
    loss = loss + load_balancing_loss(routing, 6)
    with torch.autograd.set_detect_anomaly(True):  # no NaN on the way either
        (grad,) = torch.autograd.grad(loss, z)
    assert grad.isfinite().all()
    assert (grad[z.isnan() | z.isinf()] == 0).all()


@pytest.mark.parametrize("scoring", SCORINGS)
def test_an_all_nan_row_goes_nowhere_and_its_neighbours_do_not_notice(scoring, seed):
    z = torch.randn(5, E, generator=torch.Generator().manual_seed(seed))
    config = RouterConfig(scoring=scoring)
    before = route(z, config, K)
    z[2] = NAN
    after = route(z, config, K)
    assert after.topk_ids[2].tolist() == [-1] * K and after.topk_weights[2].tolist() == [0.0] * K
    rest = torch.tensor([0, 1, 3, 4])
    assert torch.equal(before.topk_ids[rest], after.topk_ids[rest])
    assert torch.equal(before.topk_weights[rest], after.topk_weights[rest])


@pytest.mark.parametrize("scoring", SCORINGS)
def test_plus_infinity_wins_and_shares_with_its_equals(scoring):
    routing = route(torch.tensor([[0.0, INF, 5.0, INF, 1.0]]), RouterConfig(scoring=scoring), 2)
    assert routing.topk_ids.tolist() == [[1, 3]]
    assert routing.topk_weights.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_of_equal_logits_the_lower_id_wins_at_any_place_in_the_batch(scoring, dtype, seed):
    values = torch.randn(400, 1, generator=torch.Generator().manual_seed(seed)) * 3
    for experts in (1, 3, 37):
        routing = route(values.expand(-1, experts), RouterConfig(scoring=scoring, dtype=dtype), experts)
        assert (routing.topk_ids == torch.arange(experts)).all()


def test_minus_zero_ties_with_zero():
    for dtype in (torch.float32, torch.float64):
        config = RouterConfig(scoring="topk_softmax", dtype=dtype)
        assert route(torch.tensor([[-0.0, 0.0, -0.0, 0.0]]), config, 4).topk_ids.tolist() == [[0, 1, 2, 3]]


def test_negative_values_are_ordered_by_value():
    z = torch.tensor([[-3.0, -1e-30, -2.0, -1e30, 4.0, 1e-30]])
    assert route(z, RouterConfig(scoring="topk_softmax"), 6).topk_ids.tolist() == [[4, 5, 1, 2, 0, 3]]


def test_a_group_with_one_usable_expert_still_competes_and_an_empty_group_does_not():
    config = RouterConfig(scoring="sigmoid", num_groups=3, topk_groups=2, group_score="top2_sum")
    z = torch.tensor([[9.0, NAN, -4.0, -4.0, NAN, NAN]])
    assert route(z, config, 3).topk_ids.tolist() == [[0, 2, 3]]
    huge = torch.tensor([[NAN, NAN, -3e38, -3e38, 1.0, 1.0]])  # their sum overflows to -inf
    config_z = dataclasses.replace(config, scoring="topk_softmax")
    assert route(huge, config_z, 4).topk_ids.tolist() == [[4, 5, 2, 3]]
    low = torch.tensor([-5.0] * 4 + [0.0] * 2)  # negative sums must still beat the group that is empty
    assert route(z, config, 4, selection_bias=low).topk_ids.tolist() == [[0, 2, 3, -1]]


def test_a_full_precision_choice_is_made_from_bf16_logits_under_autocast():
    z = torch.randn(6, E, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing = route(z, RouterConfig(), K)
        loss = load_balancing_loss(routing, E) + router_z_loss(routing)
    plain = route(z.float(), RouterConfig(), K)
    assert torch.equal(routing.topk_weights, plain.topk_weights) and torch.equal(routing.topk_ids, plain.topk_ids)
    assert routing.scores.dtype == loss.dtype == torch.float32


@pytest.mark.parametrize("num_tokens", [0, 3])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_k_equal_to_e_and_no_tokens(scoring, num_tokens, seed):
    z = torch.randn(num_tokens, 5, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    config = RouterConfig(scoring=scoring, num_groups=5, topk_groups=5)
    routing = route(z, config, 5, selection_bias=torch.zeros(5), token_mask=torch.ones(num_tokens, dtype=torch.bool))
    assert routing.topk_ids.shape == routing.topk_weights.shape == (num_tokens, 5)
    assert routing.topk_ids.sort(-1).values.tolist() == [list(range(5))] * num_tokens
    assert routing.tokens_per_expert().tolist() == [num_tokens] * 5
    loss = routing.topk_weights.sum() + load_balancing_loss(routing, 5) + router_z_loss(routing)
    loss.backward()
    assert z.grad.shape == z.shape and loss.isfinite()


@pytest.mark.parametrize("scoring", SCORINGS)
def test_forced_ids_give_the_weights_and_gradients_of_the_choice_that_made_them(scoring, seed):
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(9, E, generator=generator, requires_grad=True)
    z.data[4] = NAN
    config, bias = RouterConfig(scoring=scoring, scaling_factor=2.5), torch.randn(E, generator=generator)
    mask = torch.arange(9) != 7
    free = route(z, config, K, selection_bias=bias, token_mask=mask)
    (free_grad,) = torch.autograd.grad(free.topk_weights.square().sum(), z)
    for dtype in (torch.int32, torch.int64):
        forced = route(z, config, K, topk_ids=free.topk_ids.to(dtype), token_mask=mask)
        assert forced.topk_ids.dtype == torch.int32 and torch.equal(forced.topk_ids, free.topk_ids)
        assert torch.equal(forced.topk_weights, free.topk_weights)
        (grad,) = torch.autograd.grad(forced.topk_weights.square().sum(), z)
        assert torch.equal(grad, free_grad)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_a_forced_forward_saves_the_tensors_that_the_free_one_saved(scoring):
    """What torch.utils.checkpoint demands of a recomputation."""
    router = Router(RouterConfig(scoring=scoring, selection_bias=True, num_groups=4, topk_groups=2), 8, E, K)
    x, saved = torch.randn(5, 8), []
    ids = router(x).topk_ids
    for forced in (None, ids):
        shapes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=shapes: s.append((t.shape, t.dtype)), lambda t: t):
            router(x, topk_ids=forced, token_mask=torch.ones(5, dtype=torch.bool))
        saved.append(shapes)
    assert saved[0] == saved[1] and saved[0]


def test_forced_ids_are_kept_in_place_with_their_own_weights():
    z = torch.tensor([[0.0, 1.0, 2.0, NAN], [0.0, 1.0, 2.0, 3.0]])
    ids = torch.tensor([[3, 0, 2], [-1, 1, -1]])
    routing = route(z, RouterConfig(scoring="sigmoid", renormalize=False), 3, topk_ids=ids)
    assert routing.topk_ids.tolist() == ids.tolist()
    want = torch.tensor([[0, 0.5, z[0, 2].sigmoid()], [0, z[1, 1].sigmoid(), 0]])
    torch.testing.assert_close(routing.topk_weights, want)
    over_usable = route(z, RouterConfig(scoring="topk_softmax"), 3, topk_ids=ids).topk_weights
    torch.testing.assert_close(over_usable[0, 1:], z[0, [0, 2]].softmax(0))
    assert over_usable[0, 0] == 0 and over_usable[1].tolist() == [0, 1, 0]
    masked = route(z, RouterConfig(), 3, topk_ids=ids, token_mask=torch.tensor([True, False]))
    assert masked.topk_ids.tolist() == [[3, 0, 2], [-1, -1, -1]]


def test_the_linear_map_and_one_kernel_are_all_that_a_forward_computes(monkeypatch):
    """Scores and logits wait until they are read."""

    class Computed(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket not in (torch.ops.aten.t, torch.ops.aten.detach):
                names.append(func.overloadpacket._qualified_op_name)
            return func(*args, **(kwargs or {}))

    monkeypatch.setenv("EPMOE_CPU_KERNELS", "triton")
    launches, names = [], []
    monkeypatch.setattr(
        ops_route, "_route_triton", lambda *a: launches.append(a) or (torch.zeros(5, K), torch.ones(5, K))
    )
    router = Router(RouterConfig(scoring="sigmoid", selection_bias=True), 8, E, K)
    with torch.no_grad(), Computed():
        routing = router(torch.randn(5, 8))
    names.remove("aten::randn")
    assert names == ["aten::mm", "epmoe::route"] and len(launches) == 1
    torch.testing.assert_close(routing.scores, routing.logits.sigmoid())


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


@pytest.mark.parametrize("loss_inside", [False, True])
def test_a_compiled_route_returns_the_same_routing(loss_inside, seed):
    z = torch.randn(7, E, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    mask = torch.arange(7) != 3

    def f(z):
        routing = route(z, RouterConfig(scoring="sigmoid"), K, token_mask=mask)
        return (load_balancing_loss(routing, E) + router_z_loss(routing), routing) if loss_inside else (None, routing)

    results = []
    for g in (f, torch.compile(f, backend="aot_eager", fullgraph=True)):
        loss, routing = g(z)
        loss = load_balancing_loss(routing, E) + router_z_loss(routing) if loss is None else loss
        (grad,) = torch.autograd.grad(loss + routing.topk_weights.square().sum(), z)
        results.append((routing.topk_ids, routing.topk_weights, routing.logits, routing.scores, grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_selection_bias_changes_the_choice_and_never_the_weights():
    z = torch.tensor([[2.0, 1.0, 0.0]])
    config = RouterConfig(scoring="sigmoid", renormalize=False)
    bias = torch.tensor([0.0, 0.0, 5.0], requires_grad=True)
    routing = route(z, config, 2, selection_bias=bias)
    assert routing.topk_ids.tolist() == [[2, 0]]
    torch.testing.assert_close(routing.topk_weights, z.sigmoid()[:, [2, 0]])
    assert not routing.topk_weights.requires_grad
    for out in (-INF, NAN):
        assert route(z, config, 3, selection_bias=torch.tensor([out, 0.0, 0.0])).topk_ids.tolist() == [[1, 2, -1]]


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


def test_bias_update_moves_by_the_sign_of_exact_integer_differences():
    router = Router(RouterConfig(scoring="sigmoid", selection_bias=True), 4, 4, 1)
    big = 2**40  # fp32 would see four equal counts
    update_selection_bias(router, torch.tensor([big + 1, big - 1, big, big]), 0.5)
    assert router.selection_bias.tolist() == [-0.5, 0.5, 0.0, 0.0]
    update_selection_bias(router, torch.tensor([0, 9, 1, 1], dtype=torch.int32), 0.25)
    assert router.selection_bias.tolist() == [-0.25, 0.25, 0.25, 0.25]
    update_selection_bias(router, torch.zeros(4, dtype=torch.int64), 0.25)
    assert router.selection_bias.tolist() == [-0.25, 0.25, 0.25, 0.25]


def test_bias_updates_balance_a_lopsided_router(seed):
    generator = torch.Generator().manual_seed(seed)
    router = Router(RouterConfig(scoring="sigmoid", selection_bias=True), 16, 8, 2)
    x = torch.randn(512, 16, generator=generator) + 0.5
    first = router(x).tokens_per_expert()
    for _ in range(200):
        update_selection_bias(router, router(x).tokens_per_expert(), 0.01)
    last = router(x).tokens_per_expert()
    assert last.max() - last.min() < (first.max() - first.min()) / 2 or last.max() - last.min() < 24


@pytest.mark.parametrize("bias", [False, True])
def test_router_is_a_full_precision_linear_map_under_autocast(bias, seed):
    torch.manual_seed(seed)
    router = Router(RouterConfig(bias=bias), 64, 10, 3, dtype=torch.bfloat16)
    assert (router.bias is not None) == bias and router.selection_bias is None
    if bias:
        nn.init.normal_(router.bias)
    x = torch.randn(33, 64, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing = router(x)
    want = x.double() @ router.weight.double().T + (router.bias.double() if bias else 0)
    assert routing.logits.dtype == routing.topk_weights.dtype == torch.float32
    assert relative(routing.logits, want) < 1e-6
    (routing.topk_weights.square().sum()).backward()
    assert all(p.grad.dtype == torch.bfloat16 and p.grad.norm() > 0 for p in router.parameters())
    assert routing.logits.shape == (33, 10)
    assert router(x, topk_ids=routing.topk_ids.flip(-1)).topk_ids.tolist() == routing.topk_ids.flip(-1).tolist()


def test_nan_padding_under_a_token_mask_reaches_no_gradient(seed):
    torch.manual_seed(seed)
    router = Router(RouterConfig(bias=True), 8, 6, 2)
    x = torch.randn(5, 8)
    x[3] = NAN
    x.requires_grad_()
    routing = router(x, token_mask=torch.arange(5) != 3)
    assert routing.topk_ids[3].tolist() == [-1, -1]
    (routing.topk_weights.square().sum() + router_z_loss(routing)).backward()
    assert all(p.grad.isfinite().all() for p in router.parameters())
    assert x.grad.isfinite().all() and (x.grad[3] == 0).all() and x.grad[0].norm() > 0


def test_selection_bias_keeps_its_fp32_bits_through_casts_and_loads():
    router = Router(RouterConfig(scoring="sigmoid", selection_bias=True), 8, 6, 2)
    exact = torch.arange(6) * 0.1 + 1e-6
    router.selection_bias.copy_(exact)
    model = nn.Sequential(router)
    for cast in (lambda m: m.to(torch.bfloat16), nn.Module.half, nn.Module.double, copy.deepcopy, nn.Module.bfloat16):
        model = cast(model)
        assert model[0].selection_bias.dtype == torch.float32 and torch.equal(model[0].selection_bias, exact)
        assert "selection_bias" in dict(model[0].named_buffers())
    assert model[0].weight.dtype == torch.bfloat16
    state = model.state_dict()
    assert torch.equal(state["0.selection_bias"], exact)
    half = {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}
    model.load_state_dict(half, assign=True)
    assert model[0].selection_bias.dtype == torch.float32
    model.load_state_dict(state)
    assert torch.equal(model[0].selection_bias, exact)


def test_meta_construction_materialises_into_the_same_kind_of_router():
    with torch.device("meta"):
        router = Router(RouterConfig(scoring="sigmoid", bias=True, selection_bias=True), 400, 32, 2)
    assert router.weight.is_meta and router(torch.empty(3, 400, device="meta")).topk_ids.shape == (3, 2)
    router.to(torch.bfloat16).to_empty(device="cpu")
    for tensor in (*router.parameters(), *router.buffers()):
        tensor.data.fill_(NAN)
    router.reset_parameters()
    assert router.selection_bias.dtype == torch.float32 and router.weight.dtype == torch.bfloat16
    assert router.selection_bias.tolist() == router.bias.tolist() == [0.0] * 32
    assert float(router.weight.float().std()) == pytest.approx(400**-0.5, rel=0.1)


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


IDS, ONES, SOFTMAX = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1), RouterConfig()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: route(torch.zeros(3), SOFTMAX, 1), r"logits has shape \[3\]: must be \[M, E\]"),
        (lambda: route(torch.zeros(2, 3), SOFTMAX, 4), r"top_k=4: must be in \[1, 3\]"),
        (lambda: route(torch.zeros(2, 3), SOFTMAX, 0), r"top_k=0: must be in \[1, 3\]"),
        (
            lambda: route(torch.zeros(2, 6), RouterConfig(num_groups=3, topk_groups=2), 5),
            r"top_k=5: must be in \[1, 4\], the experts in topk_groups=2",
        ),
        (
            lambda: route(torch.zeros(2, 7), RouterConfig(num_groups=3), 1),
            r"num_experts=7: must be a positive multiple of RouterConfig.num_groups=3",
        ),
        (
            lambda: route(torch.zeros(2, 3), SOFTMAX, 1, selection_bias=torch.zeros(2)),
            r"selection_bias has shape \[2\]: must be \[E=3\]",
        ),
        (
            lambda: route(torch.zeros(2, 3), SOFTMAX, 1, token_mask=torch.ones(2)),
            r"token_mask is torch.float32 \[2\]: must be torch.bool \[M=2\]",
        ),
        (
            lambda: route(torch.zeros(2, 3), SOFTMAX, 1, token_mask=torch.ones(3, dtype=torch.bool)),
            r"token_mask is torch.bool \[3\]: must be torch.bool \[M=2\]",
        ),
        (
            lambda: route(torch.zeros(2, 3), SOFTMAX, 2, topk_ids=IDS),
            r"topk_ids has shape \[2, 1\]: must be \[M, K\] = \[2, 2\]",
        ),
        (
            lambda: route(torch.zeros(2, 3), SOFTMAX, 1, topk_ids=IDS.to(torch.int16)),
            r"topk_ids has dtype torch.int16: must be int32 or int64",
        ),
        (lambda: Router(SOFTMAX, 0, 4, 1), r"hidden_size=0: must be > 0"),
        (lambda: Router(SOFTMAX, 4, 4, 5), r"top_k=5: must be in \[1, 4\]"),
        (lambda: Router(SOFTMAX, 4, 4, 1)(torch.zeros(2, 3)), r"x has shape \[2, 3\]: must be \[M, H=4\]"),
        (lambda: Router(SOFTMAX, 4, 4, 1)(torch.zeros(1, 2, 4)), r"x has shape \[1, 2, 4\]: must be \[M, H=4\]"),
        (
            lambda: Router(SOFTMAX, 4, 4, 1)(torch.zeros(2, 4), token_mask=torch.ones(1, dtype=torch.bool)),
            r"token_mask is torch.bool \[1\]",
        ),
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
        (
            lambda: update_selection_bias(Router(SOFTMAX, 4, 4, 1), torch.zeros(4).long(), 0.1),
            r"router has no selection_bias: set RouterConfig.selection_bias=True",
        ),
        (
            lambda: update_selection_bias(biased_router(), torch.zeros(3).long(), 0.1),
            r"tokens_per_expert has shape \[3\]: must be \[E=4\]",
        ),
        (
            lambda: update_selection_bias(biased_router(), torch.zeros(4), 0.1),
            r"tokens_per_expert has dtype torch.float32: must be int32 or int64",
        ),
        (
            lambda: update_selection_bias(biased_router(), torch.zeros(4).long(), NAN),
            r"rate=nan: must be finite and at least 0",
        ),
    ],
)
def test_a_mistake_is_a_value_error_that_names_it(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def biased_router() -> Router:
    return Router(RouterConfig(selection_bias=True), 4, 4, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_cuda_breaks_ties_as_cpu_does_and_never_waits_for_the_device(grouping, dtype, seed):
    z = odd_logits(200, torch.Generator().manual_seed(seed))
    config = RouterConfig(scoring="topk_softmax", dtype=dtype, **GROUPINGS[grouping])
    want, on_cuda = route(z, config, K), z.cuda().requires_grad_()
    mask = torch.ones(200, dtype=torch.bool, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = route(on_cuda, config, K, token_mask=mask)
        counts = got.tokens_per_expert()
        (got.topk_weights.sum() + load_balancing_loss(got, E)).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got.topk_ids.cpu(), want.topk_ids) and torch.equal(counts.cpu(), want.tokens_per_expert())
    assert relative(got.topk_weights.cpu(), want.topk_weights) < 1e-6 and on_cuda.grad.isfinite().all()
