"""The routing kernels against their twin and float64; on the device under test, interpreted on CPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from epmoe.config import RouterConfig
from epmoe.ops import route as ops_route
from epmoe.ops.route import route_topk
from epmoe.ops.route_reference import clean_logits, route_backward_reference, route_reference, score_logits

NAN, INF = math.nan, math.inf
SCORINGS = ["softmax", "topk_softmax", "sigmoid", "sqrt_softplus"]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What the launchers allocate starts as NaN, or as an id that no expert has."""
    real = torch.Tensor.new_empty

    def new_empty(self, *size, **kwargs):
        t = real(self, *size, **kwargs)
        return t if t.is_meta or "device" in kwargs else t.fill_(NAN if t.is_floating_point() else 2**31 - 1)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)


def rules_of(config: RouterConfig, k: int) -> tuple:
    c = config
    return (k, c.scoring, c.renormalize, c.scaling_factor, c.num_groups, c.topk_groups, c.group_score)


def in_float64(z: Tensor) -> Tensor:
    """+inf counts as the largest number of fp32, as it does to the kernel."""
    return z.double().clamp(max=torch.finfo(torch.float32).max)


def relative(got: Tensor, want: Tensor) -> float:
    return ((got.double().cpu() - want.double().cpu()).norm() / want.double().norm().clamp(min=1e-300)).item()


def odd_logits(M: int, E: int, generator: torch.Generator, on_grid: bool = False) -> Tensor:
    """fp32, some of them NaN and infinite, some rows all NaN; on a grid of 1/4 many are equal."""
    z = torch.randn(M, E, generator=generator) * 2
    if on_grid:
        z = (z * 4).round() / 4
    what = torch.randint(0, 48, z.shape, generator=generator)
    for code, value in enumerate((NAN, -INF) if on_grid else (NAN, -INF, INF)):  # beside INF all softmaxes are 0
        z[what == code] = value
    z[torch.rand(M, generator=generator) < 0.05] = NAN
    return z


def check_choice(ids: Tensor, z: Tensor, bias: Tensor | None, mask: Tensor | None, config: RouterConfig, k: int) -> int:
    """`ids` are the twin's in float64, but for rows where a rounding decides; returns how many rows were the same."""
    double = RouterConfig(**{**vars(config), "dtype": torch.float64})
    b64 = None if bias is None else bias.double()
    want, _ = route_reference(in_float64(z), b64, None, mask, *rules_of(double, k))
    differ = (ids != want).any(-1).nonzero().flatten().tolist()
    if not differ:
        return len(ids)
    clean, usable = clean_logits(in_float64(z[differ]).cpu())
    value = clean if config.scoring == "topk_softmax" else score_logits(clean, usable, config.scoring)
    value = value if b64 is None else value + b64.cpu()
    size = value.shape[1] // config.num_groups
    for row, a, w in zip(value.tolist(), ids[differ].tolist(), want[differ].tolist(), strict=True):
        for got_id, want_id in zip(a, w, strict=True):
            assert (got_id < 0) == (want_id < 0)
            if config.num_groups > 1 and got_id // size != want_id // size:
                continue  # groups swapped: their scores are sums of what is compared below
            scale = max(abs(row[got_id]), abs(row[want_id]), 0.25 if b64 is not None else 0.0)
            assert abs(row[got_id] - row[want_id]) <= 1e-6 * scale + 1e-37, (got_id, want_id)
    return len(ids) - len(differ)


def check_all(
    z: Tensor,
    config: RouterConfig,
    k: int,
    device: str,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    seed: int = 0,
) -> None:
    """Choice, weights at that choice and gradients of one call, against float64."""
    z = z.to(device)
    bias, mask = (None if t is None else t.to(device) for t in (bias, mask))
    leaf = z.clone().requires_grad_()
    ids, weights = route_topk(leaf, config, k, bias, None, mask)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32 and not ids.requires_grad
    same = check_choice(ids, z, bias, mask, config, k)
    assert same >= 0.98 * len(ids) or same >= len(ids) - 2

    leaf64 = in_float64(z).requires_grad_()
    _, want = route_reference(leaf64, None, ids, mask, *rules_of(config, k))
    error = (weights - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-30)
    assert error.max() < 5e-6
    assert (weights[ids < 0] == 0).all()
    dweights = torch.randn(weights.shape, generator=torch.Generator().manual_seed(seed)).to(device)
    (grad,) = torch.autograd.grad(weights, leaf, dweights.masked_fill(ids < 0, NAN))
    (want_grad,) = torch.autograd.grad(want, leaf64, dweights.double())
    want_grad = torch.where(z.isfinite(), want_grad, 0.0)
    assert grad.isfinite().all() and (grad[~z.isfinite()] == 0).all()
    assert relative(grad, want_grad) < 5e-6

    forced_ids, forced = route_topk(z, config, k, bias, ids, mask)
    assert torch.equal(forced_ids, ids) and forced_ids is not ids
    torch.testing.assert_close(forced, weights, rtol=1e-6, atol=0)


# M, E, K, groups of which so many are kept; several programs, odd widths, padded groups
SHAPES = [(70, 8, 2, 1, 1), (200, 60, 4, 1, 1), (37, 256, 8, 8, 4), (41, 160, 6, 8, 3), (9, 512, 8, 1, 1)]


CASES = [(*s, score) for s in SHAPES for score in ("max", "top2_sum") if s[3] > 1 or score == "max"]


@pytest.mark.parametrize("M, E, K, groups, kept, group_score", CASES)
@pytest.mark.parametrize("scoring", SCORINGS)
def test_choice_weights_and_gradients_equal_float64(scoring, M, E, K, groups, kept, group_score, device, seed):
    generator = torch.Generator().manual_seed(seed)
    z = odd_logits(M, E, generator)
    for biased, renormalize, masked in ((False, True, False), (True, False, True)):
        config = RouterConfig(
            scoring=scoring,
            renormalize=renormalize,
            scaling_factor=2.5,
            num_groups=groups,
            topk_groups=kept,
            group_score=group_score,
        )
        bias = torch.randn(E, generator=generator) / 8 if biased else None
        mask = torch.rand(M, generator=generator) < 0.8 if masked else None
        check_all(z, config, K, device, bias, mask, seed)


@pytest.mark.parametrize("groups, kept, group_score", [(1, 1, "max"), (5, 3, "max"), (5, 2, "top2_sum")])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_of_equal_logits_the_lower_id_wins(scoring, groups, kept, group_score, device, seed):
    """On a grid equal values abound: the choice is the one that sorting (value, -id) in float64 makes, exactly."""
    generator = torch.Generator().manual_seed(seed)
    z = odd_logits(60, 40, generator, on_grid=True)
    z[:4] = z[:4, :1].expand(-1, 40)
    z[4] = torch.tensor([-0.0, 0.0]).repeat(20)
    config = RouterConfig(scoring=scoring, num_groups=groups, topk_groups=kept, group_score=group_score)
    ids, _ = route_topk(z.to(device), config, 8)
    if groups == 1:
        assert (ids[4].cpu() == torch.arange(8)).all()
        for row, got in zip(z.tolist(), ids.tolist(), strict=True):
            usable = sorted((e for e, v in enumerate(row) if v > -INF), key=lambda e: (-row[e], e))  # noqa: B023
            assert got == (usable + [-1] * 8)[:8]
    else:  # scores of a grid are equal or far apart, sums of two of them too but for sums of unlike pairs
        assert check_choice(ids, z.to(device), None, None, config, 8) >= 54


@pytest.mark.parametrize("scoring", SCORINGS)
def test_extreme_logits_give_the_weights_of_float64_and_finite_gradients(scoring, device):
    z = torch.tensor(
        [
            [NAN, -INF, 0.5, NAN, -INF, NAN],
            [INF, 0.0, 1.0, INF, -INF, 2.0],
            [INF] * 6,
            [-3e38, 3e38, -1e30, 0.0, NAN, 1.0],
            [-200.0] * 6,
            [-60.0, -41.0, -39.0, -70.0, -80.0, 30.0],
            [1e4, 39.0, 41.0, -20.0, 0.0, -0.0],
        ]
    ).to(device)
    ids = torch.tensor([[0, 3, 4], [1, 5, 2], [2, 2, 2]], dtype=torch.int32).repeat(3, 1)[: len(z)].to(device)
    for renormalize in (False, True):
        config = RouterConfig(scoring=scoring, renormalize=renormalize)
        for forced in (None, ids):
            leaf = z.clone().requires_grad_()
            got_ids, weights = route_topk(leaf, config, 3, None, forced)
            _, want = route_reference(in_float64(z), None, got_ids, None, *rules_of(config, 3))
            torch.testing.assert_close(weights.double(), want, rtol=1e-5, atol=1e-22 if renormalize else 1e-37)
            (grad,) = torch.autograd.grad(weights.sum() + weights[:, 0].sum(), leaf)
            assert grad.isfinite().all() and (grad[~z.isfinite()] == 0).all()


def test_slopes_are_right_far_from_zero(device):
    z = torch.tensor([[-90.0, -41.0, -39.0, -20.0, 0.0, 20.0, 39.0, 41.0, 60.0]]).to(device)
    ids = torch.arange(9, dtype=torch.int32, device=device)[None]
    for scoring in ("sigmoid", "sqrt_softplus"):
        config = RouterConfig(scoring=scoring, renormalize=False)
        leaf = z.clone().requires_grad_()
        (grad,) = torch.autograd.grad(route_topk(leaf, config, 9, None, ids)[1].sum(), leaf)
        want = route_backward_reference(torch.ones(1, 9, device=device).double(), z.double(), ids, scoring, False, 1.0)
        torch.testing.assert_close(grad.double(), want, rtol=2e-5, atol=1e-37)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_the_backward_twin_is_the_derivative_of_the_forward_twin(scoring, renormalize, seed):
    generator = torch.Generator().manual_seed(seed)
    z = odd_logits(40, 12, generator).double()
    z[0, :4] = torch.tensor([-90.0, -41.0, -39.0, 41.0])
    ids = torch.randint(-1, 12, (40, 5), generator=generator, dtype=torch.int32)  # repeats some
    leaf = z.requires_grad_()
    rules = (5, scoring, renormalize, 1.7, 1, 1, "max")
    _, weights = route_reference(leaf, None, ids, None, *rules)
    dweights = torch.randn(weights.shape, generator=generator, dtype=torch.float64)
    (want,) = torch.autograd.grad(weights, leaf, dweights)
    got = route_backward_reference(dweights, z.detach(), ids, scoring, renormalize, 1.7)
    assert relative(got, want) < 1e-12


@pytest.mark.parametrize("scoring", SCORINGS)
def test_an_id_forced_twice_gets_the_gradient_of_both_and_a_wild_one_none(scoring, device, seed):
    z = torch.randn(6, 10, generator=torch.Generator().manual_seed(seed)).to(device).requires_grad_()
    ids = torch.tensor([[3, 3, -1, 7]], dtype=torch.int32).repeat(6, 1).to(device)
    wild = ids.clone()
    wild[:, 2] = 2**30
    config = RouterConfig(scoring=scoring)
    got = []
    for forced in (ids, wild):
        out, weights = route_topk(z, config, 4, None, forced)
        assert torch.equal(out, forced) and (weights[:, 2] == 0).all()
        got.append(torch.autograd.grad(weights.square().sum(), z)[0])
    _, want = route_reference(z.double(), None, ids, None, *rules_of(config, 4))
    (want_grad,) = torch.autograd.grad(want.square().sum(), z)
    assert torch.equal(*got) and relative(got[0], want_grad) < 5e-6


def test_the_corners_of_the_rules(device):
    def ids(z, k, scoring="topk_softmax", bias=None, forced=None, mask=None, groups=1, kept=1, score="top2_sum"):
        config = RouterConfig(scoring=scoring, num_groups=groups, topk_groups=kept, group_score=score)
        tensors = (
            None if t is None else torch.tensor(t, dtype=dtype, device=device)
            for t, dtype in ((z, torch.float32), (bias, torch.float32), (forced, torch.int32), (mask, torch.bool))
        )
        z, bias, forced, mask = tensors
        return route_topk(z, config, k, bias, forced, mask)[0].tolist()

    # two of -3e38 sum to -inf, and yet beat the group without a usable expert
    assert ids([[NAN, NAN, -3e38, -3e38, 1.0, 1.0]], 4, groups=3, kept=2) == [[4, 5, 2, 3]]
    # a group of which one expert is usable competes with that one
    assert ids([[9.0, NAN, -4.0, -4.0, NAN, NAN]], 3, "sigmoid", groups=3, kept=2) == [[0, 2, 3]]
    assert ids([[1.0, 4.0, 3.0, 2.0]], 3, groups=4, kept=3) == [[1, 2, 3]]
    for out in (-INF, NAN):  # a bias may take an expert out of the choice
        assert ids([[2.0, 1.0, 0.0]], 3, "softmax", bias=[out, 0.0, 0.0]) == [[1, 2, -1]]
    assert ids([[2.0, 1.0, 0.0]], 2, bias=[0.0, 0.0, INF]) == [[2, 0]]
    # forced ids stay in their slots, but for tokens that are masked
    assert ids([[0.0] * 4] * 2, 2, forced=[[3, 0], [1, 2]], mask=[True, False]) == [[3, 0], [-1, -1]]
    assert ids([[-3.0, -1e-30, -2.0, -1e30, 4.0, 1e-30]], 6) == [[4, 5, 1, 2, 0, 3]]


def test_inputs_may_be_views_with_strides_and_gradients_expanded(device, seed):
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(2 * 5, 24, generator=generator).to(device)
    bias, mask = torch.randn(24, generator=generator).to(device), torch.ones(10, dtype=torch.bool, device=device)
    mask[4] = False
    args = (RouterConfig(scoring="sigmoid"), 3)
    view = z[::2, ::2].requires_grad_()
    ids, weights = route_topk(view, *args, bias[::2], None, mask[::2])
    (grad,) = torch.autograd.grad(weights.sum(), view)
    dense = z[::2, ::2].contiguous().requires_grad_()
    want_ids, want = route_topk(dense, *args, bias[::2].contiguous(), None, mask[::2].contiguous())
    (want_grad,) = torch.autograd.grad(want, dense, torch.ones_like(want))
    assert torch.equal(ids, want_ids) and torch.equal(weights, want) and torch.equal(grad, want_grad)
    assert ids[2].tolist() == [-1] * 3


def test_the_kernel_is_what_runs_and_the_twin_where_it_cannot(device, monkeypatch):
    """fp32 up to MAX_COLUMNS padded experts takes the kernel; float64 and wider rows the twin."""

    def fail(*_):
        raise AssertionError

    config, z = RouterConfig(num_groups=3, topk_groups=2), torch.randn(3, 12, device=device)
    monkeypatch.setattr(ops_route, "route_reference", fail)
    route_topk(z, config, 4)
    monkeypatch.undo()
    monkeypatch.setenv("EPMOE_CPU_KERNELS", "triton")
    monkeypatch.setattr(ops_route, "_route_triton", fail)
    route_topk(z.double(), config, 4)
    wide = RouterConfig(num_groups=3, topk_groups=2)  # 3 groups of 342 pad to 4 of 512
    assert route_topk(torch.randn(2, 1026, device=device), wide, 4)[0].shape == (2, 4)


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_op_registration_holds(kernels, monkeypatch, seed):
    monkeypatch.setenv("EPMOE_CPU_KERNELS", kernels)
    generator = torch.Generator().manual_seed(seed)
    for scoring in SCORINGS:
        z = torch.randn(7, 12, generator=generator).requires_grad_()
        bias, mask = torch.randn(12, generator=generator), torch.arange(7) != 2
        rules = (3, scoring, True, 1.5, 4, 2, "top2_sum")
        # not test_aot_dispatch_dynamic: it adds the sums of all outputs, in int64 if the first one is integer
        utils = ("test_schema", "test_autograd_registration", "test_faketensor")
        forward, backward = torch.ops.epmoe.route.default, torch.ops.epmoe.route_backward.default
        torch.library.opcheck(forward, (z, bias, None, mask, *rules), test_utils=utils)
        ids, _ = forward(z.detach(), bias, None, mask, *rules)
        torch.library.opcheck(forward, (z, None, ids, None, *rules), test_utils=utils)
        torch.library.opcheck(backward, (torch.randn(7, 3), z.detach(), ids, scoring, True, 1.5))


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_compiled_and_eager_agree(kernels, monkeypatch, seed):
    monkeypatch.setenv("EPMOE_CPU_KERNELS", kernels)
    config = RouterConfig(scoring="sigmoid", num_groups=4, topk_groups=2, group_score="top2_sum")
    bias = torch.randn(12, generator=torch.Generator().manual_seed(seed))
    compiled = torch.compile(route_topk, backend="aot_eager", fullgraph=True)
    for tokens in (5, 9):
        z = torch.randn(tokens, 12, generator=torch.Generator().manual_seed(seed + tokens)).requires_grad_()
        results = []
        for f in (route_topk, compiled):
            ids, weights = f(z, config, 3, bias)
            results.append((ids, weights, torch.autograd.grad(weights.square().sum(), z)[0]))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_no_tokens(device):
    z = torch.zeros(0, 12, device=device, requires_grad=True)
    ids, weights = route_topk(z, RouterConfig(), 3, None, None, torch.zeros(0, dtype=torch.bool, device=device))
    assert ids.shape == weights.shape == (0, 3)
    assert torch.autograd.grad(weights.sum(), z)[0].shape == (0, 12)


@pytest.mark.gpu
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize(
    "M, E, K, groups, kept",
    [
        (1, 256, 8, 8, 4),
        (20000, 8, 2, 1, 1),
        (20000, 60, 4, 1, 1),
        (4097, 64, 6, 8, 3),
        (20000, 128, 8, 1, 1),
        (20000, 256, 8, 8, 4),
        (8192, 384, 8, 1, 1),
        (3000, 384, 6, 12, 5),
        (3000, 1024, 8, 1, 1),
    ],
)
def test_many_tokens_on_a_gpu(scoring, M, E, K, groups, kept, seed):
    generator = torch.Generator().manual_seed(seed)
    config = RouterConfig(
        scoring=scoring, scaling_factor=2.5, num_groups=groups, topk_groups=kept, group_score="top2_sum"
    )
    bias, mask = torch.randn(E, generator=generator) / 8, torch.rand(M, generator=generator) < 0.9
    check_all(odd_logits(M, E, generator), config, K, "cuda", seed=seed)
    check_all(odd_logits(M, E, generator), config, K, "cuda", bias, mask, seed)
    z = torch.randn(M, 1, generator=generator).expand(-1, E).cuda() * 3
    ids, _ = route_topk(z, config, K)
    assert (ids.cpu() == torch.arange(K)).all()  # all equal, wherever the row lies


@pytest.mark.gpu
def test_the_host_never_waits_and_a_graph_replays_new_logits(seed):
    config = RouterConfig(scoring="sigmoid", num_groups=8, topk_groups=4, group_score="top2_sum")
    z = torch.randn(300, 256, generator=torch.Generator().manual_seed(seed)).cuda()
    route_topk(z, config, 8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, weights = route_topk(z, config, 8)
    z.copy_(torch.randn(300, 256))
    graph.replay()
    want_ids, want = route_topk(z, config, 8)
    assert torch.equal(ids, want_ids) and torch.equal(weights, want)
