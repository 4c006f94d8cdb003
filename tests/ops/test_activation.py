"""The activation: torch forward against its formulas, twin against autograd, kernel against twin."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from epmoe.config import ACTIVATIONS, Activation
from epmoe.ops import _configs, activation
from epmoe.ops._segments import batched_segments, standard_segments
from epmoe.ops.activation import activation_backward, activation_backward_reference, apply_activation
from epmoe.testing import poisoned_empty

ROUNDING = {torch.float32: 5e-6, torch.float16: 6e-4, torch.bfloat16: 4.5e-3}  # of one rounding (2^-11, 2^-8 at worst)


@pytest.fixture(params=ACTIVATIONS)
def act(request):
    """Every activation; a limit of 0.75 so that normal inputs reach both clamps."""
    clamped = request.param in ("swiglu_oai", "swiglu_clamped")
    return Activation.named(request.param, limit=0.75 if clamped else None)


def formula(act: Activation, g: Tensor, u: Tensor) -> Tensor:
    """The table in `Activation`, written with other functions than the code under test."""
    if act.name in ("swiglu_oai", "swiglu_clamped"):
        g = torch.where(g > act.limit, torch.full_like(g, act.limit), g)
        u = torch.where(u.abs() > act.limit, act.limit * u.sign(), u) + (1 if act.name == "swiglu_oai" else 0)
        return u * g / (1 + torch.exp(-act.alpha * g))
    return {
        "swiglu": lambda: u * g / (1 + torch.exp(-g)),
        "geglu": lambda: u * g * (1 - 0.5 * torch.erfc(g / math.sqrt(2))),
        "geglu_tanh": lambda: u * 0.5 * g * (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))),
        "reglu2": lambda: u * torch.where(g > 0, g * g, 0),
        "silu": lambda: g / (1 + torch.exp(-g)),
        "gelu": lambda: g * (1 - 0.5 * torch.erfc(g / math.sqrt(2))),
        "relu2": lambda: torch.where(g > 0, g * g, 0),
    }[act.name]()


def relative(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def case(act: Activation, count: int, tail: int, size: int, dtype: torch.dtype, device: str, seed: int):
    """preact and grad as views into wider NaN buffers, NaN rows and -1 indices past `count`."""
    generator = torch.Generator().manual_seed(seed)
    wide = 2 * size if act.gated else size
    preact = torch.full((count + tail, wide + 5), math.nan, dtype=dtype)
    grad = torch.full((count + tail, size + 3), math.nan, dtype=dtype)
    preact[:count, :wide] = (2 * torch.randn(count, wide, generator=generator)).to(dtype)
    grad[:count, :size] = torch.randn(count, size, generator=generator).to(dtype)
    index = torch.full((count + tail,), -1, dtype=torch.int32)
    index[:count] = torch.randperm(count + 4, generator=generator)[:count].int()
    weights = torch.rand(count + 4, generator=generator)
    offsets = torch.tensor([0, count // 3, count // 3, count], dtype=torch.int32)
    preact, grad, index, weights, offsets = (t.to(device) for t in (preact, grad, index, weights, offsets))
    return preact[:, :wide], grad[:, :size], standard_segments(offsets), index, weights


def test_forward_follows_its_formula_for_any_leading_shape(act, seed):
    torch.manual_seed(seed)
    preact = 2 * torch.randn(2, 3, 10, dtype=torch.float64)
    g, u = preact.chunk(2, -1) if act.gated else (preact, preact)
    got = apply_activation(preact, act.name, act.alpha, act.limit)
    assert got.shape == ((2, 3, 5) if act.gated else (2, 3, 10))
    torch.testing.assert_close(got, formula(act, g, u), rtol=1e-12, atol=1e-12)


def test_forward_gradient_is_the_numerical_one(act, seed):
    torch.manual_seed(seed)
    preact = (2 * torch.randn(3, 6, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda p: apply_activation(p, act.name, act.alpha, act.limit), preact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_forward_rounds_once(act, dtype, seed):
    torch.manual_seed(seed)
    preact = (2 * torch.randn(64, 32)).to(dtype)
    got = apply_activation(preact, act.name, act.alpha, act.limit)
    want = apply_activation(preact.double(), act.name, act.alpha, act.limit)
    assert got.dtype == dtype and relative(got, want) < ROUNDING[dtype]


def test_odd_width_of_a_gated_activation_is_named():
    with pytest.raises(ValueError, match="even"):
        apply_activation(torch.zeros(2, 5), "swiglu")


def test_twin_is_the_gradient_of_the_forward(act, seed):
    preact, grad, segments, index, weights = case(act, 9, 2, 6, torch.float64, "cpu", seed)
    w = weights.double()[index[:9].long()][:, None]
    leaf = preact[:9].detach().clone().requires_grad_()
    out = apply_activation(leaf, act.name, act.alpha, act.limit)
    (want,) = torch.autograd.grad((out * w * grad[:9]).sum(), leaf)
    dpre, act_scaled, dweight = activation_backward_reference(
        preact, grad, *segments, index, weights.double(), act.name, act.alpha, act.limit
    )
    torch.testing.assert_close(dpre[:9], want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(act_scaled[:9], (out * w).detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dweight[:9], (out * grad[:9]).sum(-1).detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "unweighted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_kernel_agrees_with_the_float64_twin_and_leaves_the_tail_alone(act, dtype, weighted, device, seed):
    count, size = (7, 24) if device == "cpu" else (1111, 2880)
    preact, grad, segments, index, weights = case(act, count, 3, size, dtype, device, seed)
    weights = weights if weighted else None
    with poisoned_empty():
        got = activation_backward(preact, grad, *segments, index, weights, act.name, act.alpha, act.limit)
    want = activation_backward_reference(
        preact.double(), grad.double(), *segments, index, weights, act.name, act.alpha, act.limit
    )
    for name, g, w in zip(("dpre", "act_scaled", "dweight"), got, want, strict=True):
        assert g.shape == w.shape and g.dtype == (torch.float32 if name == "dweight" else dtype)
        assert relative(g[:count], w[:count]) < (5e-6 if name == "dweight" else ROUNDING[dtype]), name
        assert g[count:].isnan().all(), f"{name} was written past the last row"


@pytest.mark.parametrize("name", ["swiglu_oai", "swiglu_clamped"])
def test_gradient_passes_on_the_clamp_and_stops_beyond_it(name, device):
    g = torch.tensor([7.0, 7.5, 1.0, 1.0, 1.0, 1.0])
    u = torch.tensor([1.0, 1.0, 7.0, 7.5, -7.0, -7.5])
    preact, grad = torch.cat([g, u])[None].to(device), torch.ones(1, 6, device=device)
    segments = standard_segments(torch.tensor([0, 1], dtype=torch.int32, device=device))
    args = (*segments, None, None, name, 1.0, 7.0)
    leaf = preact.clone().requires_grad_()
    apply_activation(leaf, name, 1.0, 7.0).sum().backward()
    for dpre in (activation_backward(preact, grad, *args)[0], leaf.grad):
        by_g, by_u = dpre[0].chunk(2)
        assert (by_g != 0).tolist() == [True, False, True, True, True, True]
        assert (by_u != 0).tolist() == [True, True, True, False, True, False]


def test_bf16_results_are_rounded_to_nearest_even(device):
    bits = torch.arange(0x3F00, 0x4200, dtype=torch.int32).to(torch.uint16)  # 0.5 to 32, every bf16
    preact = bits.view(torch.bfloat16).reshape(8, -1).to(device)
    preact[0, 0] = math.nan
    segments = standard_segments(torch.tensor([0, 8], dtype=torch.int32, device=device))
    _, act, _ = activation_backward(preact, torch.ones_like(preact), *segments, None, None, "relu2", 1.0, math.inf)
    want = preact.float().square().to(torch.bfloat16)  # the square of a bf16 is exact in fp32
    torch.testing.assert_close(act, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("count", [0, 1])
def test_few_rows(act, count, device, seed):
    preact, grad, segments, index, weights = case(act, count, 2, 8, torch.float32, device, seed)
    args = (preact, grad, *segments, index, weights, act.name, act.alpha, act.limit)
    with poisoned_empty():
        got, want = activation_backward(*args), activation_backward_reference(*args)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_empty_buffers_do_not_launch(device):
    empty = torch.empty(0, 8, device=device)
    bounds = torch.zeros(2, dtype=torch.int32, device=device)
    got = activation_backward(empty, empty[:, :4].contiguous(), bounds, bounds, None, None, "swiglu", 1.0, math.inf)
    assert [tuple(g.shape) for g in got] == [(0, 8), (0, 4), (0,)]


def test_columns_are_walked_in_steps_when_a_row_is_wider_than_a_block(monkeypatch, device, seed):
    monkeypatch.setattr(activation, "row_config", lambda width: _configs.RowConfig(16, 4, 2))
    act = Activation("geglu")
    preact, grad, segments, index, weights = case(act, 13, 1, 43, torch.float32, device, seed)
    args = (*segments, index, weights, act.name, act.alpha, act.limit)
    got = activation_backward(preact, grad, *args)
    want = activation_backward_reference(preact.double(), grad.double(), *args)
    for g, w in zip(got, want, strict=True):
        assert relative(g[:13], w[:13]) < 5e-6


def test_a_nan_stays_in_its_own_row(act, device, seed):
    preact, grad, segments, index, weights = case(act, 5, 1, 8, torch.float32, device, seed)
    args = (*segments, index, weights, act.name, act.alpha, act.limit)
    clean = activation_backward(preact, grad, *args)
    preact = preact.clone()
    preact[2, 0] = math.nan
    got = activation_backward(preact, grad, *args)
    assert got[1][2].isnan().any() and got[2][2].isnan()  # (a clamp's gradient at NaN is 0, as in torch)
    for g, c in zip(got, clean, strict=True):
        others = torch.tensor([0, 1, 3, 4], device=device)
        assert torch.equal(g[others], c[others])


def test_mistakes_are_named():
    preact, grad = torch.zeros(2, 8), torch.zeros(2, 4)
    start, end = torch.tensor([0], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    tail = ("swiglu", 1.0, math.inf)
    with pytest.raises(ValueError, match="grad"):
        activation_backward(preact, torch.zeros(2, 8), start, end, None, None, *tail)
    with pytest.raises(ValueError, match="row_end is torch.int64"):
        activation_backward(preact, grad, start, end.long(), None, None, *tail)
    with pytest.raises(ValueError, match="activation='swish'"):
        activation_backward(preact, grad, start, end, None, None, "swish", 1.0, math.inf)
    with pytest.raises(ValueError, match="topk_weights_flat is .* strides .*: must be 1-D, contiguous"):
        activation_backward(preact, grad, start, end, None, torch.rand(2, 3)[:, 1:2].reshape(-1), *tail)


@pytest.mark.parametrize("counts, capacity", [([3, 0, 7, 1], 7), ([0, 0], 3), ([9], 11)], ids=str)
def test_rows_between_the_segments_of_batched_experts_are_left_alone(act, counts, capacity, device, seed):
    if device == "cuda":
        counts, capacity = [50 * n for n in counts], 50 * capacity
    generator = torch.Generator().manual_seed(seed)
    rows, size = len(counts) * capacity, 24
    owned = torch.tensor([e * capacity + c for e, count in enumerate(counts) for c in range(count)], dtype=torch.int64)
    padding = torch.ones(rows, dtype=torch.bool)
    padding[owned] = False
    preact = torch.randn(rows, 2 * size if act.gated else size, generator=generator)
    grad, weights = torch.randn(rows, size, generator=generator), torch.rand(rows, generator=generator)
    segments = batched_segments(torch.tensor(counts, dtype=torch.int32), capacity)
    tail = (act.name, act.alpha, act.limit)
    inputs = [t.to(device) for t in (preact, grad, *segments)], weights.to(device)
    with poisoned_empty():
        clean = activation_backward(*inputs[0], None, inputs[1], *tail)
    for t in (preact, grad, weights):
        t[padding] = math.nan
    inputs = [t.to(device) for t in (preact, grad, *segments)], weights.to(device)
    with poisoned_empty():
        got = activation_backward(*inputs[0], None, inputs[1], *tail)
    want = activation_backward_reference(preact.double(), grad.double(), *segments, None, weights.double(), *tail)
    for g, c, w in zip(got, clean, want, strict=True):
        assert torch.equal(g[owned], c[owned])
        torch.testing.assert_close(g[owned].cpu(), w[owned].float(), rtol=1e-4, atol=1e-5)
        assert g[padding].isnan().all()


def test_op_has_a_faithful_fake(act, seed):
    preact, grad, segments, index, weights = case(act, 4, 0, 6, torch.float32, "cpu", seed)
    args = (preact, grad, *(t.clone() for t in segments), index, weights, act.name, act.alpha, act.limit)
    torch.library.opcheck(
        torch.ops.epmoe.activation_backward.default, args, test_utils=("test_schema", "test_faketensor")
    )
