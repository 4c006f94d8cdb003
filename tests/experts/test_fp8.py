"""fp8 experts: against float64 with the same quantized numbers and against numbers never quantized, row by row."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from epmoe.config import Activation
from epmoe.dispatch import make_dispatcher
from epmoe.experts import ExpertsSpec, ExpertWeights, GroupedFp8Experts, ReferenceExperts, select_experts
from epmoe.kernel import MoEKernel
from epmoe.ops import _triton
from epmoe.ops.quantize import quantize_reference, row_format
from epmoe.ops.quantize_blocks import BLOCK, quantize_blocks_reference
from epmoe.placement import ExpertPlacement
from epmoe.quant import (
    QuantizedWeights,
    dequantize_rows,
    dequantize_weights,
    quantize_rows,
)
from epmoe.quant.weights import FP8_SCHEMES
from epmoe.testing import poisoned_empty
from tests import naive
from tests.experts.quantized_cases import Case, H, I, K, draw, row_error, same_numbers

# Relative L2 of any one row, and of one row of a case. Tensor cores add fp8 products in about 14 bits, which moves some
# activations across a boundary between two e4m3 numbers, by 2^-3 of themselves; now and then one is most of its row.
SAME_NUMBERS = {"cpu": (8e-3,), "cuda": (3e-2, 2**-3)}
# e4m3 rounds a number by 2.6 % (rms). Six roundings meet in an output: of the row and w1 under each half of the gate,
# of the activation, of w2. That is 6.4 %, and 6.9 % where the gate is steepest (silu multiplies a relative error by up
# to 1.25). A row of thousands of columns is within 3 % of its mean (one sigma), the worst of seven within 9 %.
UNQUANTIZED = {"fp8_block": 0.075, "fp8_block_ue8m0": 0.08, "fp8_row": 0.08}


def make(
    scheme: str, device: str, seed: int, *, act: str = "swiglu", bias: bool = True, on_input: bool = False,
    rows: int = 7, h: int = H, i: int = I, block: tuple[int, int] = BLOCK,
) -> Case:  # fmt: skip
    d = draw(scheme, device, seed, act=act, bias=bias, on_input=on_input, rows=rows, h=h, i=i)
    if block != BLOCK:  # blocks that differ from their neighbours
        g = torch.Generator().manual_seed(seed)
        for w in (d.w1, d.w2):
            w *= 4.0 ** torch.randint(-1, 2, (1, w.shape[1], 1), generator=g)
            w *= 4.0 ** torch.randint(-1, 2, (1, 1, w.shape[2]), generator=g)
    q1, q2 = (quantized_by_twins(w, scheme, block) for w in (d.w1, d.w2))
    tensors = (q1.values, q2.values, d.b1, d.b2, None, q1.scales, q2.scales)
    weights = ExpertWeights(*(None if t is None else t.to(device) for t in tensors))
    spec = dataclasses.replace(d.spec, block=block)
    return Case(spec, d.rows, weights, (d.w1.to(device), d.w2.to(device)))


def quantized_by_twins(w: Tensor, scheme: str, block: tuple[int, int] = BLOCK) -> QuantizedWeights:
    """On CPU, where a GPU's machine runs no kernel and the interpreter would run a program for each channel."""
    if row_format(scheme).group:
        return QuantizedWeights(*quantize_blocks_reference(w, scheme, block), scheme, block)
    values, scales = quantize_reference(w.view(-1, w.shape[2]), scheme)
    return QuantizedWeights(values.view(w.shape), scales.view(w.shape[:2]), scheme)


def expected(c: Case, quantized: bool) -> Tensor:
    """`[T, K, H]`, what each pair's expert gives before its weight; zeros for pairs of no local expert."""
    spec, w = c.spec, c.weights
    assert spec.scheme is not None and w.gate_up_scale is not None and w.down_scale is not None
    w1, w2 = (raw.double() for raw in c.raw)
    if quantized:
        how = (spec.scheme, spec.block)
        w1 = dequantize_weights(QuantizedWeights(w.gate_up_proj, w.gate_up_scale, *how), torch.float64)
        w2 = dequantize_weights(QuantizedWeights(w.down_proj, w.down_scale, *how), torch.float64)
    x = dequantize_rows(quantize_rows(c.rows.x, spec.scheme), torch.float64) if quantized else c.rows.x.double()
    out = torch.zeros(*c.rows.topk_ids.shape, w2.shape[1], dtype=torch.float64, device=x.device)
    for t in range(x.shape[0]):
        for k in range(K):
            e = int(c.rows.topk_ids[t, k])
            e = int(c.rows.expert_map[e]) if e >= 0 else -1
            if e < 0:
                continue
            z = w1[e] @ x[t]
            if spec.weight_on_input:
                z = z * c.rows.topk_weights[t, k].double()
            z = z if w.gate_up_bias is None else z + w.gate_up_bias[e].double()
            a = naive.activation(z, spec.activation.name, 1.0, math.inf)
            if quantized:
                if spec.scheme != "fp8_block":  # it leaves GEMM1 in the rows' dtype
                    a = a.bfloat16().double()
                a = dequantize_rows(quantize_rows(a, spec.scheme), torch.float64)
            y = w2[e] @ a
            out[t, k] = y if w.down_bias is None else y + w.down_bias[e].double()
    return out


def weighted(c: Case, pairs: Tensor) -> Tensor:
    return pairs.sum(1) if c.spec.weight_on_input else (pairs * c.rows.topk_weights.double()[..., None]).sum(1)


@pytest.mark.parametrize("scheme", FP8_SCHEMES)
def test_inputs_for_a_gpu_are_made_without_a_kernel_on_cpu(scheme, seed, monkeypatch):
    monkeypatch.setenv("EPMOE_CPU_KERNELS", "triton")  # as the fixture does
    monkeypatch.setattr(_triton, "INTERPRET", False)
    make(scheme, "cpu", seed)


@pytest.mark.parametrize("act", ["swiglu", "relu2"])
@pytest.mark.parametrize("on_input", [False, True], ids=["weight-on-output", "weight-on-input"])
@pytest.mark.parametrize("scheme", FP8_SCHEMES)
def test_standard_rows_match_float64_of_the_same_quantized_numbers(scheme, on_input, act, device, seed):
    c = make(scheme, device, seed, act=act, on_input=on_input)
    experts = GroupedFp8Experts(c.spec)
    with poisoned_empty():
        y = experts(c.rows, c.weights)
    assert y.dtype == torch.bfloat16
    assert same_numbers(y, weighted(c, expected(c, quantized=True)), *SAME_NUMBERS[device])


@pytest.mark.parametrize("block", [(64, 64), (1, 128), (32, 32), (256, 256)], ids=str)
@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_block_ue8m0"])
def test_blocks_of_any_size_match_float64_in_either_layout(scheme, block, device, seed):
    c = make(scheme, device, seed, block=block)
    experts, want = GroupedFp8Experts(c.spec), expected(c, quantized=True)
    with poisoned_empty():
        y = experts(c.rows, c.weights)
        batched = experts(rows := c.batched(), c.weights)
    assert same_numbers(y, weighted(c, want), *SAME_NUMBERS[device])
    assert rows.slot is not None
    taken = rows.slot >= 0
    got = batched.view(-1, H)[rows.slot[taken].long()].to(want.device)
    assert same_numbers(got, want[taken.to(want.device)], *SAME_NUMBERS[device])
    reference = ReferenceExperts(dataclasses.replace(c.spec, dtype=torch.float64))
    wide = dataclasses.replace(c.rows, x=dequantize_rows(quantize_rows(c.rows.x, scheme), torch.float64))
    wide = dataclasses.replace(wide, topk_weights=wide.topk_weights.double())
    # but for the rounding of the activation, a pass of which `want` has
    assert row_error(reference(wide, c.weights.to(torch.float64)), weighted(c, want)) < UNQUANTIZED[scheme]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("scheme", FP8_SCHEMES)
def test_every_row_is_near_what_nothing_quantized_gives(scheme, device, seed):
    """Wide rows and experts: the error of a row is a mean over their columns, which over few of them is anything."""
    c = make(scheme, device, seed, bias=False, h=1024, i=4096)
    y = GroupedFp8Experts(c.spec)(c.rows, c.weights)
    assert row_error(y, weighted(c, expected(c, quantized=False))) < UNQUANTIZED[scheme]


@pytest.mark.parametrize("on_input", [False, True], ids=["weight-on-output", "weight-on-input"])
@pytest.mark.parametrize("scheme", FP8_SCHEMES)
def test_batched_rows_give_what_standard_rows_give_whatever_the_padding_holds(scheme, on_input, device, seed):
    c = make(scheme, device, seed, on_input=on_input)
    rows = c.batched()
    experts = GroupedFp8Experts(c.spec)
    with poisoned_empty():
        y = experts(rows, c.weights)
        standard = experts.output(c.rows, c.weights)
    assert y.shape == rows.x.shape
    assert rows.slot is not None and standard.slot is not None
    for place, row in zip(rows.slot.view(-1).tolist(), standard.slot.view(-1).tolist(), strict=True):
        assert (place < 0) == (row < 0)
        if place >= 0:
            assert torch.equal(y.view(-1, H)[place], standard.rows[row])


@pytest.mark.parametrize("scheme", FP8_SCHEMES)
def test_rows_quantized_by_dispatch_give_the_same_bits(scheme, device, seed):
    c = make(scheme, device, seed)
    experts = GroupedFp8Experts(c.spec)
    want = experts(c.rows, c.weights)
    q = quantize_rows(c.rows.x, scheme)
    wide = torch.full((q.values.shape[0], H + 64), 0x7F, dtype=torch.uint8, device=device).view(q.values.dtype)
    wide.view(torch.uint8)[:, :H] = q.values.view(torch.uint8)  # a view into messages, as dispatch hands over
    scales = torch.full((q.scales.shape[0], q.scales.shape[1] + 2), math.nan, device=device)
    scales[:, 1:-1] = q.scales
    rows = dataclasses.replace(c.rows, x=wide[:, :H], x_scale=scales[:, 1:-1], scheme=scheme)
    assert torch.equal(experts(rows, c.weights), want)


def test_rows_of_another_scheme_are_refused_with_the_way_out(seed):
    c = make("fp8_block", "cpu", seed)
    q = quantize_rows(c.rows.x, "fp8_row")
    rows = dataclasses.replace(c.rows, x=q.values, x_scale=q.scales, scheme="fp8_row")
    experts = GroupedFp8Experts(c.spec)
    with pytest.raises(ValueError, match=r"rows are quantized \(fp8_row\).*rows.dequantized"):
        experts(rows, c.weights)
    experts(rows.dequantized(torch.bfloat16), c.weights)


@pytest.mark.parametrize("scheme", FP8_SCHEMES)
def test_a_row_with_a_nan_touches_no_other_row(scheme, device, seed):
    c = make(scheme, device, seed)
    experts = GroupedFp8Experts(c.spec)
    want = experts(c.rows, c.weights)
    c.rows.x[4, 100] = math.nan
    got = experts(c.rows, c.weights)
    others = [t for t in range(7) if t != 4]
    assert torch.equal(got[others], want[others])
    if (c.rows.expert_map[c.rows.topk_ids[4].clamp_min(0).long()] >= 0).any():
        assert got[4].isnan().all()


@pytest.mark.parametrize("scheme", FP8_SCHEMES)
def test_no_rows_and_no_local_pairs_are_fine(scheme, device, seed):
    empty = make(scheme, device, seed, rows=0)
    assert GroupedFp8Experts(empty.spec)(empty.rows, empty.weights).shape == (0, H)
    c = make(scheme, device, seed)
    c.rows.topk_ids.fill_(-1)
    with poisoned_empty():
        assert not GroupedFp8Experts(c.spec)(c.rows, c.weights).any()


@pytest.mark.parametrize("layout", ["standard", "batched"])
@pytest.mark.parametrize("scheme", FP8_SCHEMES)
def test_reference_computes_with_the_dequantized_weights_in_float64(scheme, layout, seed):
    c = make(scheme, "cpu", seed)
    spec = dataclasses.replace(c.spec, dtype=torch.float64)
    rows = dataclasses.replace(c.rows, x=c.rows.x.double(), topk_weights=c.rows.topk_weights.double())
    w1, w2 = (
        dequantize_weights(QuantizedWeights(values, scale, scheme), torch.float64)
        for values, scale in (
            (c.weights.gate_up_proj, c.weights.gate_up_scale),
            (c.weights.down_proj, c.weights.down_scale),
        )
    )
    plain = dataclasses.replace(
        c.weights.to(torch.float64), gate_up_proj=w1, down_proj=w2, gate_up_scale=None, down_scale=None
    )
    data = rows if layout == "standard" else dataclasses.replace(c, rows=rows).batched()
    got = ReferenceExperts(spec)(data, c.weights.to(torch.float64))
    want = ReferenceExperts(dataclasses.replace(spec, scheme=None))(data, plain)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0, equal_nan=True)


@pytest.mark.parametrize("dispatch_scheme", [None, "fp8_block", "int8_row"])
@pytest.mark.parametrize("layout", ["standard", "batched"])
@pytest.mark.parametrize("on_input", [False, True], ids=["weight-on-output", "weight-on-input"])
def test_kernel_joins_them_with_a_dispatcher(on_input, layout, dispatch_scheme, device, seed):
    c = make("fp8_block", device, seed, on_input=on_input)
    dispatcher = make_dispatcher("local", None, ExpertPlacement.contiguous(4, 1), device)
    ids = torch.randint(-1, 4, c.rows.topk_ids.shape, generator=torch.Generator().manual_seed(seed)).int().to(device)
    ids[:, 1] = torch.where(ids[:, 1] == ids[:, 0], -1, ids[:, 1])
    experts = select_experts(c.spec, "grouped_fp8", layout).experts
    kernel = MoEKernel(dispatcher, experts, layout=layout, dispatch_scheme=dispatch_scheme)
    rows = dataclasses.replace(c.rows, topk_ids=ids, expert_map=torch.arange(4, dtype=torch.int32, device=device))
    if dispatch_scheme is not None:
        q = quantize_rows(c.rows.x, dispatch_scheme)
        rows = dataclasses.replace(rows, x=q.values, x_scale=q.scales, scheme=dispatch_scheme)
        if layout == "batched" or dispatch_scheme != c.spec.scheme:  # the kernel gives what they take
            rows = rows.dequantized(torch.bfloat16)
    with torch.no_grad(), poisoned_empty():
        y = kernel(c.rows.x, ids, c.rows.topk_weights, c.weights).routed
        assert torch.equal(y, GroupedFp8Experts(c.spec)(rows, c.weights))


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", FP8_SCHEMES)
def test_a_cuda_graph_follows_new_rows_and_ids(scheme, seed):
    c, other = make(scheme, "cuda", seed, rows=40), make(scheme, "cuda", seed + 1, rows=40)
    experts = GroupedFp8Experts(c.spec)
    with torch.no_grad():
        experts(c.rows, c.weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = experts(c.rows, c.weights)
        want = experts(dataclasses.replace(other.rows), c.weights)
        for name in ("x", "topk_ids", "topk_weights"):
            getattr(c.rows, name).copy_(getattr(other.rows, name))
        graph.replay()
    assert torch.equal(y, want)


@pytest.mark.parametrize("scheme", FP8_SCHEMES)
def test_selection_by_scheme_says_who_was_passed_over_and_why(scheme):
    spec = ExpertsSpec(Activation(), H, I, torch.bfloat16, torch.device("cpu"), scheme=scheme)
    for layout in ("standard", "batched"):
        assert select_experts(spec, layout=layout).experts.name == "reference"
        assert select_experts(spec, "grouped_fp8", layout).experts.name == "grouped_fp8"
        on_gpu = dataclasses.replace(spec, device=torch.device("cuda"), dtype=torch.float32)
        selection = select_experts(on_gpu, layout=layout)
        assert selection.experts.name == "reference"
        assert dict(selection.passed_over)["grouped_fp8"].startswith("dtype=torch.float32")
    with pytest.raises(ValueError, match=f"experts='grouped': the weights are of scheme='{scheme}'.*grouped_fp8"):
        select_experts(spec, "grouped")
    with pytest.raises(ValueError, match=r"experts='grouped_fp8': the weights are not quantized.*'grouped'"):
        select_experts(dataclasses.replace(spec, scheme=None), "grouped_fp8")
    with pytest.raises(ValueError, match="no LoRA adapters here"):
        select_experts(dataclasses.replace(spec, lora=True), "grouped_fp8")


def test_gradients_are_refused_and_not_dropped(seed):
    c = make("fp8_block", "cpu", seed)
    experts = GroupedFp8Experts(c.spec)
    for name in ("x", "topk_weights"):
        rows = dataclasses.replace(c.rows, **{name: getattr(c.rows, name).clone().requires_grad_()})
        for call in (experts, experts.output):
            with pytest.raises(ValueError, match=f"{name} needs a gradient and fp8 experts have no backward"):
                call(rows, c.weights)
        with torch.no_grad():
            experts(rows, c.weights)
    bias = dataclasses.replace(c.weights, gate_up_bias=torch.randn(4, 2 * I).bfloat16().requires_grad_())
    with pytest.raises(ValueError, match="gate_up_bias needs a gradient"):
        experts(c.rows, bias)


@pytest.mark.parametrize("scheme", FP8_SCHEMES)
def test_weights_that_do_not_fit_the_scheme_are_named(scheme, seed):
    c = make(scheme, "cpu", seed)
    experts = GroupedFp8Experts(c.spec)
    w = c.weights
    assert w.gate_up_scale is not None and w.down_scale is not None
    for change, message in [
        ({"gate_up_scale": None}, "gate_up_scale is None with scheme"),
        ({"down_scale": w.down_scale[:2]}, "down_scale is torch.float32"),
        ({"gate_up_scale": w.gate_up_scale.double()}, "gate_up_scale is torch.float64"),
        ({"gate_up_proj": w.gate_up_proj.to(torch.bfloat16)}, "gate_up_proj is torch.bfloat16"),
        ({"down_bias": torch.zeros(4, H)}, "down_bias is torch.float32"),
    ]:
        with pytest.raises(ValueError, match=message):
            experts(c.rows, dataclasses.replace(w, **change))
    if row_format(scheme).group:
        for kind in (GroupedFp8Experts, ReferenceExperts):
            with pytest.raises(ValueError, match=r"gate_up_scale is .*\(4, 2, 2\).*\(4, 3, 3\).* and block=\(64, 64\)"):
                kind(dataclasses.replace(c.spec, block=(64, 64)))(c.rows, w)
    plain = ReferenceExperts(dataclasses.replace(c.spec, scheme=None))
    with pytest.raises(ValueError, match="gate_up_scale is given with scheme=None"):
        plain(c.rows, dataclasses.replace(w, gate_up_proj=c.raw[0].bfloat16(), down_proj=c.raw[1].bfloat16()))
