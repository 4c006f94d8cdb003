"""Experts on narrow weights: against float64 with the same numbers and against numbers never quantized, row by row."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch
from torch import Tensor

from epmoe.comm.workspace import Workspace
from epmoe.config import Activation
from epmoe.dispatch import make_dispatcher
from epmoe.experts import ExpertsSpec, ExpertWeights, ReferenceExperts, WeightOnlyExperts, select_experts
from epmoe.kernel import MoEKernel
from epmoe.placement import ExpertPlacement
from epmoe.quant import NARROW_SCHEMES, NarrowWeights, dequantize_narrow, quantize_narrow
from epmoe.testing import poisoned_empty
from tests import naive
from tests.experts.quantized_cases import Case, H, I, K, draw, peaks_on_a_gpu, row_error

# Relative L2 of any one row: the activation leaves GEMM1 in bf16, the result is rounded again; integers with scales for
# 32 columns are multiplied by them in bf16.
SAME_NUMBERS = 1e-2
# Of random experts and rows, the scheme's own error in both GEMMs and the gate: about twice that of the weights.
UNQUANTIZED = {"int4": 0.3, "int8": 0.02, "mxfp4": 0.3, "nvfp4": 0.25, "mxfp6": 0.15}


@dataclasses.dataclass
class NarrowCase(Case):
    narrow: tuple[NarrowWeights, NarrowWeights]


def fields(q1: NarrowWeights, q2: NarrowWeights) -> dict[str, Tensor | None]:
    return {
        "gate_up_proj": q1.values, "gate_up_scale": q1.scales, "gate_up_zero": q1.zeros, "gate_up_outer": q1.outer,
        "down_proj": q2.values, "down_scale": q2.scales, "down_zero": q2.zeros, "down_outer": q2.outer,
    }  # fmt: skip


def make(
    scheme: str, device: str, seed: int, *, zeros: bool = False, act: str = "swiglu", bias: bool = True,
    on_input: bool = False, rows: int = 7, local: int = 4, h: int = H, i: int = I,
) -> NarrowCase:  # fmt: skip
    d = draw(scheme, device, seed, act=act, bias=bias, on_input=on_input, rows=rows, h=h, i=i, local=local)
    q1, q2 = (quantize_narrow(w, scheme, zeros=zeros) for w in (d.w1, d.w2))
    tensors = {**fields(q1, q2), "gate_up_bias": d.b1, "down_bias": d.b2}
    weights = ExpertWeights(**{name: None if t is None else t.to(device) for name, t in tensors.items()})
    return NarrowCase(d.spec, d.rows, weights, (d.w1, d.w2), (q1, q2))


def expected(c: NarrowCase, quantized: bool) -> Tensor:
    """`[T, H]` in float64, one pair after the other."""
    spec, w = c.spec, c.weights
    w1, w2 = (dequantize_narrow(q, torch.float64) for q in c.narrow) if quantized else (t.double() for t in c.raw)
    b1, b2 = (None if b is None else b.cpu().double() for b in (w.gate_up_bias, w.down_bias))
    x, p, ids, owner = (t.cpu() for t in (c.rows.x.double(), c.rows.topk_weights, c.rows.topk_ids, c.rows.expert_map))
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for k in range(K):
            e = int(owner[ids[t, k]]) if ids[t, k] >= 0 else -1
            if e < 0:
                continue
            weight = p[t, k].double()
            z = w1[e] @ x[t] * (weight if spec.weight_on_input else 1.0)
            a = naive.activation(z if b1 is None else z + b1[e], spec.activation.name, 1.0, math.inf)
            y = w2[e] @ a
            y = y if b2 is None else y + b2[e]
            out[t] += y if spec.weight_on_input else y * weight
    return out


@pytest.mark.parametrize("scheme", NARROW_SCHEMES)
def test_standard_rows_match_float64_of_the_same_numbers(scheme, device, seed):
    c = make(scheme, device, seed, zeros=scheme.startswith("int"), on_input=scheme.endswith("g32"))
    experts = WeightOnlyExperts(c.spec)
    with poisoned_empty():
        y = experts(c.rows, c.weights)
    assert y.dtype == torch.bfloat16
    assert row_error(y, expected(c, quantized=True)) < SAME_NUMBERS


@pytest.mark.parametrize("act", ["relu2", "geglu"])
def test_other_activations_and_one_expert(act, device, seed):
    c = make("int4_g128", device, seed, act=act, local=1, bias=False)
    with poisoned_empty():
        y = WeightOnlyExperts(c.spec)(c.rows, c.weights)
    assert row_error(y, expected(c, quantized=True)) < SAME_NUMBERS


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("scheme", NARROW_SCHEMES)
def test_every_row_is_near_what_nothing_quantized_gives(scheme, device, seed):
    """Wide rows and experts: the error of a row is a mean over their columns, which over few of them is anything."""
    c = make(scheme, device, seed, bias=False, h=512, i=1024)
    y = WeightOnlyExperts(c.spec)(c.rows, c.weights)
    assert row_error(y, expected(c, quantized=False)) < UNQUANTIZED[scheme.split("_")[0]]


@pytest.mark.parametrize("on_input", [False, True], ids=["weight-on-output", "weight-on-input"])
def test_batched_rows_give_what_standard_rows_give_whatever_the_padding_holds(on_input, device, seed):
    c = make("int4_g64", device, seed, zeros=True, on_input=on_input)
    rows = c.batched()
    experts = WeightOnlyExperts(dataclasses.replace(c.spec, batch_invariant=True))
    with poisoned_empty():
        y = experts(rows, c.weights)
        standard = experts.output(c.rows, c.weights)
    assert y.shape == rows.x.shape
    assert rows.slot is not None and standard.slot is not None
    for place, row in zip(rows.slot.view(-1).tolist(), standard.slot.view(-1).tolist(), strict=True):
        assert (place < 0) == (row < 0)
        if place >= 0:
            assert torch.equal(y.view(-1, H)[place], standard.rows[row])


def test_a_row_with_a_nan_touches_no_other_row(device, seed):
    c = make("mxfp4", device, seed)
    experts = WeightOnlyExperts(c.spec)
    want = experts(c.rows, c.weights)
    c.rows.x[4, 100] = math.nan
    got = experts(c.rows, c.weights)
    others = [t for t in range(7) if t != 4]
    assert torch.equal(got[others], want[others])
    if (c.rows.expert_map[c.rows.topk_ids[4].clamp_min(0).long()] >= 0).any():
        assert got[4].isnan().all()


def test_no_rows_and_no_local_pairs_are_fine(device, seed):
    empty = make("nvfp4", device, seed, rows=0)
    assert WeightOnlyExperts(empty.spec)(empty.rows, empty.weights).shape == (0, H)
    c = make("nvfp4", device, seed)
    c.rows.topk_ids.fill_(-1)
    with poisoned_empty():
        assert not WeightOnlyExperts(c.spec)(c.rows, c.weights).any()


@pytest.mark.parametrize("layout", ["standard", "batched"])
@pytest.mark.parametrize("scheme", ["int4_g32", "int8_channel", "mxfp4", "nvfp4"])
def test_reference_computes_with_the_dequantized_weights_in_float64(scheme, layout, seed):
    c = make(scheme, "cpu", seed, zeros=scheme.startswith("int"))
    spec = dataclasses.replace(c.spec, dtype=torch.float64)
    rows = dataclasses.replace(c.rows, x=c.rows.x.double(), topk_weights=c.rows.topk_weights.double())
    weights = c.weights.to(torch.float64)
    assert weights.gate_up_proj is c.weights.gate_up_proj and weights.down_outer is c.weights.down_outer
    w1, w2 = (dequantize_narrow(q, torch.float64) for q in c.narrow)
    plain = ExpertWeights(w1, w2, weights.gate_up_bias, weights.down_bias)
    data = rows if layout == "standard" else dataclasses.replace(c, rows=rows).batched()
    got = ReferenceExperts(spec)(data, weights)
    want = ReferenceExperts(dataclasses.replace(spec, scheme=None))(data, plain)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0, equal_nan=True)


@pytest.mark.parametrize("dispatch_scheme", [None, "fp8_block"])
@pytest.mark.parametrize("layout", ["standard", "batched"])
def test_kernel_joins_them_with_a_dispatcher_that_may_quantize_rows(layout, dispatch_scheme, device, seed):
    c = make("int4_g128", device, seed)
    dispatcher = make_dispatcher("local", None, ExpertPlacement.contiguous(4, 1), device)
    ids = c.rows.topk_ids.clamp_max(3)
    ids[:, 1] = torch.where(ids[:, 1] == ids[:, 0], -1, ids[:, 1])
    experts = select_experts(c.spec, "weight_only", layout).experts
    kernel = MoEKernel(dispatcher, experts, layout=layout, dispatch_scheme=dispatch_scheme)
    with torch.no_grad(), poisoned_empty():
        y = kernel(c.rows.x, ids, c.rows.topk_weights, c.weights).routed
    c.rows = dataclasses.replace(c.rows, topk_ids=ids, expert_map=torch.arange(4, dtype=torch.int32, device=device))
    assert row_error(y, expected(c, quantized=True)) < (SAME_NUMBERS if dispatch_scheme is None else 0.1)


@pytest.mark.parametrize("layout", ["standard", "batched"])
@pytest.mark.parametrize("scheme", ["int4_g128", "nvfp4"])
def test_a_workspace_changes_no_bit_whatever_it_held_and_is_as_large_as_planned(scheme, layout, device, seed):
    c = make(scheme, device, seed)
    ids = c.rows.topk_ids.clamp_max(3)
    ids[:, 1] = torch.where(ids[:, 1] == ids[:, 0], -1, ids[:, 1])
    rows = (c.rows.x, ids, c.rows.topk_weights, c.weights)
    space = Workspace(torch.device(device))

    def kernel(workspace):
        dispatcher = make_dispatcher("local", None, ExpertPlacement.contiguous(4, 1), device)
        experts = select_experts(c.spec, "weight_only", layout).experts
        return MoEKernel(dispatcher, experts, layout=layout, workspace=workspace)

    free, planned = kernel(None), kernel(space)
    with torch.no_grad(), poisoned_empty():
        want = free(*rows).routed
        assert torch.equal(planned(*rows).routed, want)
        pairs = 4 * 7 if layout == "batched" else 7 * K
        shapes = planned.experts.workspace_shapes(7, pairs)
        assert space.nbytes == shapes.workspace13.nbytes + shapes.workspace2.nbytes
        assert {b.name: b.nbytes for b in planned.memory_plan(7, K).buffers}[space.name] == space.nbytes
        space.lock()
        space._buffer.fill_(0xFF)  # NaN in every dtype
        assert torch.equal(planned(*rows).routed, want)
        with pytest.raises(RuntimeError, match="locked"):
            planned(*[torch.cat([t, t]) for t in rows[:3]], rows[3])


def quantized(scheme, w1, w2):
    return ExpertWeights(**fields(*(quantize_narrow(w, scheme) for w in (w1, w2))))


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["int4_g128", "mxfp4"])
def test_the_predicted_peak_is_the_allocators(scheme):
    plan, peak = peaks_on_a_gpu("weight_only", scheme, functools.partial(quantized, scheme))
    assert abs(plan - peak) <= 0.04 * peak, (plan, peak)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["int4_g128", "mxfp4"])
def test_a_cuda_graph_follows_new_rows_and_ids(scheme, seed):
    c, other = make(scheme, "cuda", seed, rows=40), make(scheme, "cuda", seed + 1, rows=40)
    experts = WeightOnlyExperts(c.spec)
    with torch.no_grad():
        experts(c.rows, c.weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = experts(c.rows, c.weights)
        want = experts(other.rows, c.weights)
        for name in ("x", "topk_ids", "topk_weights"):
            getattr(c.rows, name).copy_(getattr(other.rows, name))
        graph.replay()
    assert torch.equal(y, want)


def test_selection_by_scheme_says_who_was_passed_over_and_why():
    for scheme in NARROW_SCHEMES:
        spec = ExpertsSpec(Activation(), H, I, torch.bfloat16, torch.device("cpu"), scheme=scheme)
        for layout in ("standard", "batched"):
            assert select_experts(spec, layout=layout).experts.name == "reference"
            assert select_experts(spec, "weight_only", layout).experts.name == "weight_only"
            on_gpu = dataclasses.replace(spec, device=torch.device("cuda"), dtype=torch.float32)
            passed = dict(select_experts(on_gpu, layout=layout).passed_over)
            assert passed["weight_only"].startswith("dtype=torch.float32")
            assert "'weight_only'" in passed["grouped_fp8"]


def test_gradients_are_refused_and_not_dropped(seed):
    c = make("int4_g128", "cpu", seed)
    experts = WeightOnlyExperts(c.spec)
    rows = dataclasses.replace(c.rows, x=c.rows.x.clone().requires_grad_())
    for call in (experts, experts.output):
        with pytest.raises(ValueError, match="x needs a gradient and narrow experts have no backward"):
            call(rows, c.weights)


def test_weights_that_do_not_fit_the_scheme_are_named(seed):
    c = make("int4_g64", "cpu", seed, zeros=True)
    experts, w = WeightOnlyExperts(c.spec), c.weights
    assert w.gate_up_scale is not None and w.down_zero is not None
    for change, message in [
        ({"gate_up_scale": None}, "gate_up_scale is None with scheme"),
        ({"gate_up_scale": w.gate_up_scale.double()}, "gate_up: scales is torch.float64"),
        ({"down_zero": w.down_zero[:2]}, "down: zeros is"),
        ({"down_outer": torch.ones(4, H)}, "down: outer is given"),
        ({"gate_up_proj": w.gate_up_proj[:, :, :64].contiguous()}, "gate_up: values is"),
        ({"gate_up_proj": w.gate_up_proj[:, 2:].contiguous(), "gate_up_scale": w.gate_up_scale[:, :, 2:].contiguous(),
          "gate_up_zero": None}, "gate_up_proj has shape"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            experts(c.rows, dataclasses.replace(w, **change))
    plain = ReferenceExperts(dataclasses.replace(c.spec, scheme=None))
    wide = ExpertWeights(c.raw[0].bfloat16(), c.raw[1].bfloat16(), w.gate_up_bias, w.down_bias)
    with pytest.raises(ValueError, match="gate_up_zero is given with scheme=None"):
        plain(c.rows, dataclasses.replace(wide, gate_up_zero=w.gate_up_zero))
