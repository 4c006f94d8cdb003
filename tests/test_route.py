"""`route` against a reference in python floats: every rule, ties, NaN and infinities, forced ids, gradients."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from epmoe.config import RouterConfig
from epmoe.router import load_balancing_loss, route, router_z_loss
from tests.router_cases import GROUPINGS, INF, NAN, SCORINGS, E, K, odd_logits, reference_row, relative


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


IDS, SOFTMAX = torch.zeros(2, 1, dtype=torch.int32), RouterConfig()


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
    ],
)
def test_a_mistake_is_a_value_error_that_names_it(make, message):
    with pytest.raises(ValueError, match=message):
        make()
