"""Batched experts: outputs and every gradient against float64 one row at a time, and padding that nobody looks at."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from epmoe.config import ACTIVATIONS, Activation
from epmoe.dispatch.inputs import BatchedInput, ExpertInput, Layout
from epmoe.experts import EXPERTS_BY_LAYOUT, BatchedExperts, ExpertsSpec, ExpertWeights, ReferenceExperts
from epmoe.testing import poisoned_empty
from tests import naive

# relative L2 of the output and of any gradient
TOLERANCE = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (1e-5, 2e-5),
    torch.float16: (1e-3, 2e-3),
    torch.bfloat16: (5e-3, 1e-2),
}
COUNTS = {
    "0, 1 and C": ([0, 1, 9, 4], 9),
    "one expert": ([5], 7),
    "no rows": ([0, 0, 0], 4),
    "no places": ([0, 0], 0),
    "full": ([33, 33], 33),
}
NAMES = ("x", "w1", "w2", "b1", "b2", "p")


@dataclasses.dataclass
class Case:
    spec: ExpertsSpec
    rows: BatchedInput
    leaves: dict[str, Tensor]
    dy: Tensor
    owned: Tensor  # [L, C] bool

    @property
    def weights(self) -> ExpertWeights:
        return ExpertWeights(*(self.leaves.get(name) for name in ("w1", "w2", "b1", "b2")))


def make(
    counts: list[int],
    capacity: int,
    act: Activation,
    dtype: torch.dtype,
    seed: int,
    *,
    device: str = "cpu",
    h: int = 24,
    i: int = 40,
    bias: bool = True,
    on_input: bool = False,
    padding: float = math.nan,
    apart: bool = False,
    expected_m: int | None = None,
) -> Case:
    """Rows past the counts, of x, of the router weights and of the output's gradient, hold `padding`.

    `apart`: rows are views into wider ones, as a message buffer's are.
    """
    g = torch.Generator().manual_seed(seed)
    num = len(counts)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    owned = torch.arange(capacity) < torch.tensor(counts)[:, None]
    wide = 2 * i if act.gated else i
    magnitude = 2.0 ** (torch.arange(num) % 3 - 1)[:, None]
    x, dy = randn(num, capacity, h), randn(num, capacity, h)
    p = torch.rand(num, capacity, generator=g) + 0.5
    data = {
        "w1": randn(num, wide, h) * magnitude[..., None] / h**0.5,
        "w2": randn(num, h, i) * magnitude[..., None] / i**0.5,
    }
    if bias:
        data |= {"b1": randn(num, wide), "b2": randn(num, h) * magnitude}
    for t in (x, dy, p):
        t[~owned] = padding
    leaves = {name: t.to(dtype).to(device).requires_grad_() for name, t in data.items()}
    x = x.to(dtype).to(device)
    if apart:
        buffer = torch.full((num, capacity, h + 8), math.nan, dtype=dtype, device=device)
        buffer[..., :h] = x
        x = buffer[..., :h]
    leaves["x"] = x.requires_grad_()
    p = p.to(torch.promote_types(dtype, torch.float32)).to(device)
    if on_input:
        leaves["p"] = p.requires_grad_()
    expert_num_tokens = torch.tensor(counts, dtype=torch.int32, device=device)
    rows = BatchedInput(leaves["x"], expert_num_tokens, Layout(0, num * capacity, num * capacity), p, expected_m)
    spec = ExpertsSpec(act, h, i, dtype, torch.device(device), on_input)
    return Case(spec, rows, leaves, dy.to(dtype).to(device), owned)


def run(kind: type, c: Case) -> dict[str, Tensor]:
    y = kind(c.spec)(c.rows, c.weights)
    with poisoned_empty():
        gradients = torch.autograd.grad(y, list(c.leaves.values()), c.dy)
    return {"y": y.detach()} | dict(zip(c.leaves, gradients, strict=True))


def expected(c: Case) -> dict[str, Tensor]:
    """One row at a time in float64; rows past the counts 0."""
    leaf = {name: t.detach().double().cpu().requires_grad_() for name, t in c.leaves.items()}
    act = c.spec.activation
    y = torch.zeros(c.dy.shape, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for e, count in enumerate(c.rows.expert_num_tokens.tolist()):
        for r in range(count):
            row = leaf["x"][e, r] * (leaf["p"][e, r] if "p" in leaf else 1)
            z = leaf["w1"][e] @ row + (leaf["b1"][e] if "b1" in leaf else 0)
            z = leaf["w2"][e] @ naive.activation(z, act.name, act.alpha, act.limit)
            z = z + (leaf["b2"][e] if "b2" in leaf else 0)
            y[e, r] = z.detach()
            total = total + z @ c.dy[e, r].double().cpu()
    total = total + sum(torch.nan_to_num(t.double()).sum() * 0 for t in leaf.values())
    gradients = torch.autograd.grad(total, list(leaf.values()))
    return {"y": y} | {n: torch.nan_to_num(g) for n, g in zip(leaf, gradients, strict=True)}


def check(c: Case, got: dict[str, Tensor]) -> None:
    tolerance, owned = TOLERANCE[c.spec.dtype], c.owned
    for name, want in expected(c).items():
        g = got[name].double().cpu()
        if name in ("x", "p"):
            assert (g[~owned] == 0).all(), f"the gradient of {name}'s padding is not 0"
        if name == "y":
            g, want = g[owned], want[owned]
        assert g.shape == want.shape
        scale = want.norm().item() or 1.0
        error = (g - want).norm().item() / scale
        assert error <= tolerance[name != "y"], f"{name}: {error:.2e}"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("kind", EXPERTS_BY_LAYOUT["batched"].values(), ids=EXPERTS_BY_LAYOUT["batched"].keys())
def test_outputs_and_gradients_match_float64_for_every_activation_and_dtype(kind, name, dtype, seed):
    limit = None
    if name in ("swiglu_oai", "swiglu_clamped"):
        # the slope jumps at the clamp, and a rounded pre-activation next to it has another gradient
        limit = 1.5 if dtype.itemsize > 2 else 64.0
    act = Activation.named(name, limit=limit)
    c = make([0, 1, 6, 3], 6, act, dtype, seed)
    check(c, run(kind, c))


@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("on_input", [False, True], ids=["weight-on-output", "weight-on-input"])
@pytest.mark.parametrize("counts, capacity", COUNTS.values(), ids=COUNTS.keys())
@pytest.mark.parametrize("kind", EXPERTS_BY_LAYOUT["batched"].values(), ids=EXPERTS_BY_LAYOUT["batched"].keys())
def test_any_counts_with_and_without_bias_and_weight_on_the_input(kind, counts, capacity, on_input, bias, seed):
    for name in ("swiglu", "gelu"):
        c = make(counts, capacity, Activation(name), torch.float32, seed, bias=bias, on_input=on_input, apart=True)
        check(c, run(kind, c))


@pytest.mark.parametrize("on_input", [False, True], ids=["weight-on-output", "weight-on-input"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts, capacity", COUNTS.values(), ids=COUNTS.keys())
def test_kernels_match_float64(counts, capacity, dtype, on_input, device, seed):
    if device == "cuda":
        counts, capacity = [37 * n for n in counts], 37 * capacity
    c = make(
        counts, capacity, Activation(), dtype, seed, device=device, on_input=on_input, apart=dtype != torch.float16
    )
    got = run(BatchedExperts, c)
    if device == "cuda":  # one row at a time takes too long
        reference = make(counts, capacity, Activation(), torch.float64, seed, device=device, on_input=on_input)
        for name, leaf in c.leaves.items():
            reference.leaves[name].data.copy_(leaf.detach())
        reference.dy.copy_(c.dy)
        want = run(ReferenceExperts, reference)
        for name, limit in zip(got, [TOLERANCE[dtype][0], *[TOLERANCE[dtype][1]] * 6], strict=False):
            g, w = got[name].double(), want[name].double()
            if name == "y":
                g, w = g[c.owned], w[c.owned]
            assert (g - w).norm() <= limit * max(w.norm().item(), 1e-30), name
    else:
        check(c, got)


@pytest.mark.parametrize("on_input", [False, True], ids=["weight-on-output", "weight-on-input"])
def test_what_lies_in_the_padding_changes_no_bit(on_input, device, seed):
    results = []
    for padding in (0.0, math.nan, 1e4):
        c = make(
            [3, 0, 34, 1], 35, Activation(), torch.bfloat16, seed, device=device, on_input=on_input, padding=padding
        )
        results.append(run(BatchedExperts, c))
    for other in results[1:]:
        for name, clean in results[0].items():
            a, b = (clean[c.owned], other[name][c.owned]) if name == "y" else (clean, other[name])
            assert a.isfinite().all() and torch.equal(a, b), name


def test_padding_of_the_output_is_not_written(device, seed):
    c = make([3, 0, 7, 1], 8, Activation(), torch.float32, seed, device=device)
    with poisoned_empty(), torch.no_grad():
        y = BatchedExperts(c.spec)(c.rows, c.weights)
    assert y[c.owned].isfinite().all() and y[~c.owned].isnan().all()


@pytest.mark.parametrize("expected_m", [0, 1, 5, 10**6])
def test_the_expected_rows_change_no_bit_of_a_row_sum_in_float64(expected_m, seed):
    counts, capacity = [3, 0, 7, 1], 9
    c, other = (make(counts, capacity, Activation(), torch.float64, seed, expected_m=m) for m in (None, expected_m))
    for name, clean in run(BatchedExperts, c).items():
        got = run(BatchedExperts, other)[name]
        assert torch.equal(got[c.owned] if name == "y" else got, clean[c.owned] if name == "y" else clean)


def test_gradients_flow_to_tokens_that_padding_names_too(seed):
    """An upstream that fills padding with token 0 adds up the gradients of all its rows: zeros there keep it right."""
    c = make([2, 0, 3], 4, Activation(), torch.float64, seed)
    tokens = torch.randn(5, 24, dtype=torch.float64, requires_grad=True)
    place = torch.zeros(3, 4, dtype=torch.int64)
    place[c.owned] = torch.arange(5)
    for kind in EXPERTS_BY_LAYOUT["batched"].values():
        x = tokens[place]
        y = kind(c.spec)(dataclasses.replace(c.rows, x=x), c.weights)
        with poisoned_empty():
            (got,) = torch.autograd.grad(y, tokens, torch.where(c.owned[..., None], c.dy, 0))
        leaf = make([2, 0, 3], 4, Activation(), torch.float64, seed)
        leaf.leaves["x"].data.copy_(tokens.detach()[place])
        torch.testing.assert_close(got, expected(leaf)["x"][c.owned])


def test_batches_whose_experts_lie_apart_in_memory_are_taken(seed):
    c = make([3, 0, 7], 8, Activation(), torch.float32, seed)
    buffer = torch.full((3, 11, 24), math.nan)
    buffer[:, :8] = c.leaves["x"].detach()
    apart = dataclasses.replace(c.rows, x=buffer[:, :8])
    for kind in EXPERTS_BY_LAYOUT["batched"].values():
        y, want = (kind(c.spec)(rows, c.weights)[c.owned] for rows in (apart, c.rows))
        assert torch.equal(y, want)


def test_inference_keeps_nothing_and_gives_the_same(seed):
    c = make([3, 0, 7], 8, Activation(), torch.bfloat16, seed)
    y = BatchedExperts(c.spec)(c.rows, c.weights)
    with torch.inference_mode():
        again = BatchedExperts(c.spec)(c.rows, c.weights)
    assert torch.equal(y[c.owned], again[c.owned]) and again.grad_fn is None


def test_one_graph_under_torch_compile(seed):
    c = make([3, 0, 7, 1], 8, Activation(), torch.float32, seed, padding=0.0)

    def f(x: Tensor, counts: Tensor) -> Tensor:
        rows = BatchedInput(x * 1, counts, c.rows.handle)
        y = BatchedExperts(c.spec)(rows, c.weights)
        return torch.where((torch.arange(x.shape[1]) < counts[:, None])[..., None], y, 0)

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    results = []
    for g in (f, compiled):
        x = c.leaves["x"].detach().clone().requires_grad_()
        y = g(x, c.rows.expert_num_tokens)
        results.append((y, *torch.autograd.grad(y, [x, *(c.leaves[n] for n in ("w1", "w2", "b1", "b2"))], c.dy)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
def test_a_cuda_graph_replays_with_other_counts(seed):
    c = make([30, 0, 64, 1], 64, Activation(), torch.bfloat16, seed, device="cuda", padding=0.0, expected_m=16)
    experts = BatchedExperts(c.spec)
    with torch.no_grad():
        experts(c.rows, c.weights)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = experts(c.rows, c.weights)
        for counts in ([30, 0, 64, 1], [0, 64, 1, 2], [0, 0, 0, 0], [64, 64, 64, 64]):
            c.rows.expert_num_tokens.copy_(torch.tensor(counts, dtype=torch.int32))
            graph.replay()
            owned = torch.arange(64, device="cuda") < c.rows.expert_num_tokens[:, None]
            assert torch.equal(y[owned], experts(c.rows, c.weights)[owned])


def test_mistakes_are_named(seed):
    c = make([3, 0, 7], 8, Activation(), torch.float32, seed)
    experts = BatchedExperts(c.spec)

    def wrong(match: str, **changes: object) -> None:
        with pytest.raises(ValueError, match=match):
            experts(dataclasses.replace(c.rows, **changes), c.weights)

    wrong(r"x has shape .*must be \[L, C, H\]", x=c.rows.x[0])
    wrong(r"strides .*dense rows", x=torch.zeros(3, 24, 8).transpose(1, 2))
    wrong("23 wide, hidden_size is 24", x=c.rows.x[..., :23])
    wrong("expert_num_tokens is torch.int64", expert_num_tokens=c.rows.expert_num_tokens.long())
    wrong(r"expert_num_tokens is .* \(2,\)", expert_num_tokens=c.rows.expert_num_tokens[:2])
    wrong("gate_up_proj has shape", x=c.rows.x[:2], expert_num_tokens=c.rows.expert_num_tokens[:2])
    wrong("rows are torch.float64", x=c.rows.x.double())
    on_input = BatchedExperts(dataclasses.replace(c.spec, weight_on_input=True))
    for p in (None, torch.ones(3, 7), torch.ones(3, 8, dtype=torch.float16)):
        with pytest.raises(ValueError, match=r"topk_weights.*must be float32 \(3, 8\)"):
            on_input(dataclasses.replace(c.rows, topk_weights=p), c.weights)
    ids = torch.zeros(4, 1, dtype=torch.int32)
    standard = ExpertInput(
        torch.zeros(4, 24), ids, torch.ones(4, 1), torch.zeros(1, dtype=torch.int32), 3, 4, c.rows.handle
    )
    with pytest.raises(ValueError, match="standard layout, must be batched"):
        experts(standard, c.weights)
