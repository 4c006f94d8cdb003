"""Monolithic experts: from logits to the output, few tokens and many, against float64 and the grouped experts."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from epmoe.config import Activation, RouterConfig
from epmoe.dispatch.inputs import ExpertInput, Layout
from epmoe.experts.grouped import GroupedExperts
from epmoe.experts.monolithic import MonolithicExperts
from epmoe.experts.spec import ExpertsSpec, ExpertWeights
from epmoe.ops._routed_mlp_configs import MAX_TOKENS
from epmoe.router import route
from epmoe.testing import poisoned_empty
from tests import naive

H, I, E, K = 40, 24, 6, 2
# relative L2
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}
ROUTER = RouterConfig(
    scoring="sigmoid", num_groups=3, topk_groups=2, group_score="top2_sum", scaling_factor=1.5, selection_bias=True
)


@dataclasses.dataclass
class Case:
    spec: ExpertsSpec
    x: Tensor
    logits: Tensor
    weights: ExpertWeights
    bias: Tensor

    def run(self, router: RouterConfig = ROUTER) -> Tensor:
        with poisoned_empty(), torch.no_grad():
            return MonolithicExperts(self.spec).from_logits(
                self.x, self.logits, router, self.weights, selection_bias=self.bias, top_k=K
            )

    def want(self, router: RouterConfig = ROUTER) -> Tensor:
        logits = self.logits.detach().double().cpu()
        ids = route(self.logits.float(), router, K, selection_bias=self.bias).topk_ids.cpu()
        p = naive.router_weights(logits, ids, router.scoring, router.renormalize, router.scaling_factor)
        fields = ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias")
        experts = {f: t.detach().double().cpu() for f in fields if (t := getattr(self.weights, f)) is not None}
        act = self.spec.activation
        x = self.x.detach().double().cpu()
        return naive.routed(x, ids, p, experts, (act.name, act.alpha, act.limit), self.spec.weight_on_input)


def make(
    M: int,
    seed: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    on_input: bool = False,
    bias: bool = True,
) -> Case:
    g = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    shapes = [(E, 2 * I, H), (E, H, I), *([(E, 2 * I), (E, H)] if bias else [])]
    weights = [(randn(*s) / s[-1] ** 0.5).to(dtype).to(device) for s in shapes]
    spec = ExpertsSpec(Activation("swiglu"), H, I, dtype, torch.device(device), on_input)
    x, logits, selection = randn(M, H).to(dtype), randn(M, E), randn(E)
    return Case(spec, x.to(device), logits.to(device), ExpertWeights(*weights), selection.to(device))


def relative(got: Tensor, want: Tensor) -> float:
    return ((got.double().cpu() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("on_input", [False, True], ids=["on output", "on input"])
@pytest.mark.parametrize("M", [2, MAX_TOKENS + 3])
def test_few_tokens_and_many_agree_with_float64(M, on_input, device, seed):
    c = make(M, seed, device, torch.bfloat16, on_input)
    got = c.run()
    assert got.dtype == torch.bfloat16 and relative(got, c.want()) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_twins_agree_with_float64_whatever_the_router_computes_in(dtype, seed):
    for router in (ROUTER, dataclasses.replace(ROUTER, dtype=torch.float64)):
        for M in (1, MAX_TOKENS + 1):
            c = make(M, seed, dtype=dtype, bias=False)
            c.logits = c.logits.to(dtype)
            precise = router.dtype == torch.float64 and dtype == torch.float64
            assert relative(c.run(router), c.want(router)) < (1e-12 if precise else 1e-5)


def test_many_tokens_give_what_a_router_and_grouped_experts_give(device, seed):
    c = make(MAX_TOKENS + 5, seed, device)
    routing = route(c.logits, ROUTER, K, selection_bias=c.bias)
    M = c.x.shape[0]
    every = torch.arange(E, dtype=torch.int32, device=device)
    rows = ExpertInput(c.x, routing.topk_ids, routing.topk_weights, every, E, M * K, Layout(M, M, M * K))
    with torch.no_grad():
        assert torch.equal(c.run(), GroupedExperts(c.spec)(rows, c.weights))


def test_no_tokens(device, seed):
    assert make(0, seed, device).run().shape == (0, H)


def test_a_gradient_is_refused_where_one_would_be_recorded(seed):
    c = make(2, seed)
    c.x.requires_grad_()
    want = c.run()  # under no_grad
    with pytest.raises(ValueError, match="x wants a gradient.*experts='grouped'"):
        MonolithicExperts(c.spec).from_logits(c.x, c.logits, ROUTER, c.weights, selection_bias=c.bias, top_k=K)
    c.x.requires_grad_(False)
    assert torch.equal(
        MonolithicExperts(c.spec).from_logits(c.x, c.logits, ROUTER, c.weights, selection_bias=c.bias, top_k=K), want
    )


def test_routed_rows_are_refused(seed):
    c = make(1, seed)
    rows = ExpertInput(c.x, torch.zeros(1, K), torch.zeros(1, K), torch.zeros(E), E, K, Layout(1, 1, K))
    with pytest.raises(ValueError, match="call from_logits"):
        MonolithicExperts(c.spec)(rows, c.weights)
    assert MonolithicExperts.monolithic and not MonolithicExperts.autograd and MonolithicExperts.cuda_graph


def test_mistakes_are_named(seed):
    c, w = make(2, seed), make(2, seed).weights
    for match, change in (
        (r"x has shape .*must be \[M, H=40\]", {"x": c.x[:, 1:]}),
        (r"logits has shape \(2, 5\), must be \(2, 6\), 6 experts being local", {"logits": c.logits[:, :5]}),
        ("logits is torch.int64", {"logits": c.logits.long()}),
        ("selection_bias has shape", {"bias": c.bias[:3]}),
        ("gate_up_proj has shape", {"weights": dataclasses.replace(w, gate_up_proj=w.gate_up_proj[:, 2:])}),
        ("down_proj is torch.float64", {"weights": dataclasses.replace(w, down_proj=w.down_proj.double())}),
    ):
        with pytest.raises(ValueError, match=match):
            dataclasses.replace(c, **change).run()
    with pytest.raises(ValueError, match="top_k=2 of 6 experts in 4 groups"):
        c.run(RouterConfig(num_groups=4, topk_groups=2))
    with pytest.raises(ValueError, match="top_k=2 of 6 experts in 6 groups"):
        c.run(RouterConfig(num_groups=6, topk_groups=1))


@pytest.mark.gpu
@pytest.mark.parametrize("M", [2, MAX_TOKENS + 8])
def test_replays_of_a_graph_follow_their_inputs(M, seed):
    c = make(M, seed, "cuda", torch.bfloat16)
    experts = MonolithicExperts(c.spec)

    def run() -> Tensor:
        return experts.from_logits(c.x, c.logits, ROUTER, c.weights, selection_bias=c.bias, top_k=K)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for step in range(4):
        other = make(M, seed + step + 1, "cuda", torch.bfloat16)
        c.x.copy_(other.x)
        c.logits.copy_(other.logits)
        graph.replay()
        assert torch.equal(got, run())
        assert relative(got, c.want()) < TOLERANCE[torch.bfloat16]
