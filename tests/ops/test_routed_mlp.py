"""The one-launch routed MLP against float64, one token and one expert at a time; on the device under test, interpreted
on CPU."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from epmoe.config import ACTIVATIONS, Activation, RouterConfig
from epmoe.ops import routed_mlp as module
from epmoe.ops._routed_mlp_configs import MAX_TOKENS
from epmoe.ops.route_reference import route_reference
from epmoe.ops.routed_mlp import Rules, routed_mlp, routed_mlp_fits, routed_mlp_reference
from epmoe.testing import poisoned_empty
from tests import naive

NAN = math.nan
# relative L2
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}


@dataclasses.dataclass
class Case:
    x: Tensor
    logits: Tensor
    weights: dict[str, Tensor]
    act: Activation
    router: RouterConfig
    k: int
    bias: Tensor | None = None
    on_input: bool = False

    def args(self) -> tuple:
        w, r, a = self.weights, self.router, self.act
        rules = (self.k, r.scoring, r.renormalize, r.scaling_factor, r.num_groups, r.topk_groups, r.group_score)
        tensors = (self.x, self.logits, self.bias, w["w1"], w.get("b1"), w["w2"], w.get("b2"))
        return *tensors, *rules, a.name, a.alpha, a.limit, self.on_input

    def run(self) -> Tensor:
        with poisoned_empty():
            return routed_mlp(*self.args())

    def want(self) -> Tensor:
        """float64; ids from the routing op's twin, which has tests of its own."""
        bias = None if self.bias is None else self.bias.cpu()
        logits, r = self.logits.cpu().float(), self.router
        ids, _ = route_reference(logits, bias, None, None, *self.args()[7:14])
        logits = torch.where(logits.isnan(), -math.inf, logits).double()
        p = naive.router_weights(logits, ids, r.scoring, r.renormalize, r.scaling_factor)
        named = {"w1": "gate_up_proj", "w2": "down_proj", "b1": "gate_up_bias", "b2": "down_bias"}
        experts = {named[name]: t.double().cpu() for name, t in self.weights.items()}
        act = (self.act.name, self.act.alpha, self.act.limit)
        return naive.routed(self.x.double().cpu(), ids, p, experts, act, self.on_input)

    def check(self) -> None:
        got, want = self.run(), self.want()
        assert got.dtype == self.x.dtype and got.shape == want.shape
        error = ((got.double().cpu() - want).norm() / want.norm()).item()
        assert error < TOLERANCE[self.x.dtype], error


def make(
    M: int,
    seed: int,
    device: str,
    *,
    E: int = 4,
    k: int = 2,
    h: int = 40,
    i: int = 24,
    act: str = "swiglu",
    dtype: torch.dtype = torch.float32,
    router: RouterConfig | None = None,
    bias: bool = True,
    on_input: bool = False,
) -> Case:
    g = torch.Generator().manual_seed(seed)
    activation = Activation.named(act)
    wide = 2 * i if activation.gated else i
    randn = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    magnitude = 2.0 ** (torch.arange(E) % 3 - 1)[:, None, None]
    weights = {"w1": randn(E, wide, h) * magnitude / h**0.5, "w2": randn(E, h, i) * magnitude / i**0.5}
    if bias:
        weights |= {"b1": randn(E, wide), "b2": randn(E, h)}
    router = router or RouterConfig()
    return Case(
        randn(M, h).to(dtype).to(device),
        randn(M, E).to(device),
        {name: t.to(dtype).to(device) for name, t in weights.items()},
        activation,
        router,
        k,
        randn(E).to(device) if router.selection_bias else None,
        on_input,
    )


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_every_activation_with_biases(act, device, seed):
    make(2, seed, device, E=3, k=1, act=act).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("on_input", [False, True], ids=["on output", "on input"])
def test_dtypes_with_the_router_weight_on_either_side(dtype, on_input, device, seed):
    act, bias = ("swiglu", False) if on_input else ("relu2", True)
    make(2, seed, device, E=3, h=80, i=40, act=act, dtype=dtype, on_input=on_input, bias=bias).check()


@pytest.mark.parametrize("M", [1, 3, MAX_TOKENS])
def test_tokens_that_share_experts_and_tokens_that_do_not(M, device, seed):
    c = make(M, seed, device, E=5)
    assert routed_mlp_fits(c.x, c.logits, c.weights["w1"], c.weights["w2"], 1)
    c.check()
    c.logits[:] = c.logits[0].clone()
    c.check()


@pytest.mark.parametrize(
    "router",
    [
        RouterConfig(scoring="sigmoid", scaling_factor=2.5, num_groups=4, topk_groups=2, group_score="top2_sum"),
        RouterConfig(scoring="topk_softmax", renormalize=False, selection_bias=True),
        RouterConfig(scoring="sqrt_softplus", num_groups=3, topk_groups=2, selection_bias=True),
    ],
    ids=lambda r: r.scoring,
)
def test_routing_rules(router, device, seed):
    make(2, seed, device, E=12, k=3, router=router, bias=False).check()


@pytest.mark.parametrize("logits", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_routed_in_float32(logits, device, seed):
    c = make(1, seed, device, dtype=torch.bfloat16)
    c.logits = c.logits.to(logits)
    c.check()


def test_unusable_experts_are_skipped_and_tokens_without_any_give_zero(device, seed):
    c = make(4, seed, device, E=5, k=3)
    c.logits[0, [1, 4]] = NAN
    c.logits[1, 1:] = NAN  # one expert left
    c.logits[2] = NAN
    c.logits[3, :3] = -math.inf  # two left
    c.check()
    c.logits[:] = NAN
    assert (c.run() == 0).all()
    c.x, c.logits = c.x[:1], c.logits[:1]
    assert (c.run() == 0).all()
    c.logits[0, 2] = 1.0
    c.check()


def test_weights_of_an_expert_reach_only_the_tokens_that_chose_it(device, seed):
    c = make(4, seed, device, k=1, i=16)
    c.logits = torch.eye(4, device=device) * 9
    want = c.run()
    for name in ("w1", "w2", "b1", "b2"):
        c.weights[name][2] = NAN
    got = c.run()
    assert got[2].isnan().all() and torch.equal(got[[0, 1, 3]], want[[0, 1, 3]])
    c.x[1] = NAN
    assert torch.equal(c.run()[[0, 3]], want[[0, 3]])


def test_rows_may_lie_apart_and_weights_too(device, seed):
    c = make(2, seed, device, E=3, k=1)
    want = c.run()
    wide = torch.full((2, c.x.shape[1] + 16), NAN, device=device)
    wide[:, : c.x.shape[1]] = c.x
    c.x = wide[:, : c.x.shape[1]]
    for name in ("w1", "w2"):
        w = c.weights[name]
        apart = torch.full((w.shape[0], w.shape[1] + 3, w.shape[2] + 8), NAN, device=device)
        apart[:, : w.shape[1], : w.shape[2]] = w
        c.weights[name] = apart[:, : w.shape[1], : w.shape[2]]
    assert torch.equal(c.run(), want)


@pytest.mark.parametrize(("h", "i"), [(64, 32), (33, 17), (70, 35)])
def test_widths_that_blocks_do_not_divide(h, i, device, seed):
    make(2, seed, device, E=3, k=1, h=h, i=i, dtype=torch.bfloat16).check()


def test_the_twin_takes_what_the_kernel_does_not(monkeypatch, seed):
    monkeypatch.setenv("EPMOE_CPU_KERNELS", "triton")
    for c in (make(MAX_TOKENS + 1, seed, "cpu"), make(2, seed, "cpu", dtype=torch.float64)):
        c.logits = c.logits.to(c.x.dtype)
        assert not routed_mlp_fits(c.x, c.logits, c.weights["w1"], c.weights["w2"], 1)
        error = ((c.run().double() - c.want()).norm() / c.want().norm()).item()
        assert error < 1e-5


def test_no_tokens(device, seed):
    c = make(0, seed, device)
    assert c.run().shape == c.x.shape


def test_mistakes_are_named(seed):
    c = make(2, seed, "cpu")
    w = c.weights
    for match, change in (
        ("x has shape", {"x": c.x.t()}),
        ("logits has shape", {"logits": c.logits[:, 1:]}),
        (r"w1 has shape .*must be \(4, 48, 40\)", {"weights": w | {"w1": w["w1"][:, 1:]}}),
        ("b2 is torch.float64", {"weights": w | {"b2": w["b2"].double()}}),
        ("b1 has strides", {"weights": w | {"b1": w["b1"].t().contiguous().t()}}),
        ("selection_bias has shape", {"bias": torch.zeros(3)}),
        ("w2 has shape", {"weights": w | {"w2": w["w2"][0]}}),
    ):
        with pytest.raises(ValueError, match=match):
            dataclasses.replace(c, **change).run()


def test_the_fake_is_faithful(seed):
    c = make(2, seed, "cpu")
    torch.library.opcheck(torch.ops.epmoe.routed_mlp.default, c.args(), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 2, MAX_TOKENS])
def test_large_shapes_in_one_launch_and_in_two_give_the_same_bits(M, monkeypatch, seed):
    c = make(M, seed, "cuda", E=128, k=8, h=2048, i=768, dtype=torch.bfloat16, bias=False)
    first = c.run()
    tensors = [None if t is None else t.float() for t in c.args()[:7]]
    want = routed_mlp_reference(*tensors, Rules(*c.args()[7:]))
    assert ((first.float() - want).norm() / want.norm()).item() < 5e-3
    assert all(torch.equal(c.run(), first) for _ in range(20))
    monkeypatch.setattr(module, "cooperative_launch", lambda device: None)
    assert torch.equal(c.run(), first)


@pytest.mark.gpu
def test_replays_of_a_graph_follow_their_inputs(seed):
    c = make(2, seed, "cuda", E=64, k=4, h=1024, i=512, dtype=torch.bfloat16)
    c.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = routed_mlp(*c.args())
    for step in range(5):
        other = make(2, seed + step + 1, "cuda", E=64, k=4, h=1024, i=512, dtype=torch.bfloat16)
        c.x.copy_(other.x)
        c.logits.copy_(other.logits)
        graph.replay()
        assert torch.equal(got, c.run())


@pytest.mark.gpu
def test_launches_on_two_streams_do_not_meet_at_one_barrier(seed):
    cases = [make(1, seed + s, "cuda", E=32, k=4, h=512, i=256, dtype=torch.bfloat16) for s in range(2)]
    want = [c.run() for c in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    got: list[list[Tensor]] = [[], []]
    for _ in range(50):
        for s, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[s].append(routed_mlp(*cases[s].args()))
    torch.cuda.synchronize()
    for s in range(2):
        assert all(torch.equal(one, want[s]) for one in got[s])
