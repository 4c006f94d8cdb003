"""Grouped GEMM: twins against float64 loops, kernels against the twins, under every configuration."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from epmoe.config import ACTIVATIONS, Activation
from epmoe.ops import _configs
from epmoe.ops._configs import GemmConfig
from epmoe.ops._segments import standard_segments
from epmoe.ops.grouped_gemm import (
    grouped_gemm,
    grouped_gemm_act,
    grouped_gemm_act_into,
    grouped_gemm_act_reference,
    grouped_gemm_into,
    grouped_gemm_reference,
)
from epmoe.testing import poisoned_empty
from tests.ops.gemm_cases import (
    COUNTS,
    DTYPES,
    LAYOUTS,
    ROW_ERROR,
    case,
    check_act,
    check_gemm,
    naive_rows,
    row_error,
    sizes,
)


@pytest.fixture
def configure(monkeypatch):
    """Replaces the choice of configurations; the plans made from them last as long."""

    def replace(choose):
        _configs.gemm_plan.cache_clear()
        monkeypatch.setattr(_configs, "gemm_config", choose)

    yield replace
    _configs.gemm_plan.cache_clear()


def on_gpu(*args):
    """What a GPU would choose."""
    return gemm_config(*args, interpret=False)


gemm_config = _configs.gemm_config


@pytest.mark.parametrize("transpose", [False, True], ids=["w", "wT"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_twin_is_one_dot_product_per_row_and_column(counts, layout, transpose, seed):
    gather = layout == "gathered"
    capacity = max(counts) + 3 if layout == "batched" else None
    c = case(counts, 7, 5, torch.float64, "cpu", seed, transpose=transpose, dense=not gather, capacity=capacity)
    index, divisor = (c.index, c.k) if gather else (None, 1)
    with poisoned_empty():
        got = grouped_gemm_reference(c.x, c.w, c.bias, *c.segments, index, divisor, c.max_rows, transpose)
    for n, e, x in naive_rows(c, gather):
        want = x @ (c.w[e] if transpose else c.w[e].T) + c.bias[e]
        torch.testing.assert_close(got[n], want, rtol=1e-12, atol=1e-12)
    assert got[c.padding].isnan().all()


def test_twin_scales_before_the_bias_and_the_activation(seed):
    c = case(COUNTS["uneven"], 8, 5, torch.float64, "cpu", seed)
    act, preact = grouped_gemm_act_reference(
        c.x, c.w, c.bias, *c.segments, c.index, c.k, c.max_rows, c.scale, "swiglu", 1.0, math.inf, True
    )
    for n, e, x in naive_rows(c, True):
        y = c.scale[int(c.index[n])].double() * (c.w[e] @ x) + c.bias[e]
        torch.testing.assert_close(preact[n], y, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(act[n], y[:4] * torch.sigmoid(y[:4]) * y[4:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("transpose", [False, True], ids=["w", "wT"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_kernel_agrees_with_the_twin_for_any_split_of_rows(counts, layout, transpose, device, seed):
    if device == "cuda":
        counts = [37 * n for n in counts]
    n, d = sizes(device, (80, 72), (1408, 2880))
    gather = layout == "gathered"
    capacity = max(counts) + seed % 3 if layout == "batched" else None
    c = case(counts, n, d, torch.float32, device, seed, transpose=transpose, dense=not gather, capacity=capacity)
    check_gemm(c, bias=gather, gather=gather, transpose=transpose)


@pytest.mark.parametrize("counts", [[5, 0, 34, 1], [7, 7]], ids=str)
def test_fused_activation_reads_rows_and_scales_in_place_on_batched_experts(counts, device, seed):
    n, d = sizes(device, (48, 24), (1536, 512))
    c = case(counts, n, d, torch.bfloat16, device, seed, dense=True, capacity=max(counts) + seed % 2)
    c.scale[: c.max_rows][c.padding] = math.nan
    check_act(c, Activation("swiglu"), bias=True, scale=True, save=True, gather=False)


@pytest.mark.parametrize("layout", ["in-place", "batched"])
def test_expected_rows_choose_a_configuration_and_never_a_result(layout, device, seed, configure):
    configure(on_gpu)
    capacity = 150 if layout == "batched" else None
    c = case([3, 0, 140, 1], 96, 64, torch.float32, device, seed, dense=True, capacity=capacity)
    chosen = set()
    for expected_m in (None, 0, 1, 40, 100, 10**6):
        check_gemm(c, True, False, False, expected_m)
        share = _configs.expected_rows(c.max_rows, 4, expected_m)
        chosen.add(gemm_config(c.x.device, c.x.dtype, share, 96, 64, False, interpret=False))
    assert len(chosen) > 1, "the hint changed nothing"


def test_expected_rows_are_the_hint_whatever_the_buffer_holds():
    assert _configs.expected_rows(0, 4, None) == 1 and _configs.expected_rows(400, 4, None) == 100
    assert _configs.expected_rows(400, 4, 7) == 7 and _configs.expected_rows(0, 4, 0) == 1
    whole = _configs.expected_rows(400, 4, None)
    assert all(_configs.expected_rows(rows, 4, whole) == whole for rows in (400, 120, 8))  # parts as the whole


@pytest.mark.parametrize("transpose", [False, True], ids=["w", "wT"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n, d", [(7, 24), (24, 7), (192, 80), (80, 192), (1, 1)])
def test_no_size_has_to_be_a_multiple_of_a_block(n, d, dtype, transpose, device, seed):
    counts = [5, 0, 34, 1] if device == "cpu" else [5, 0, 340, 1, 64, 129]
    check_gemm(case(counts, n, d, dtype, device, seed, transpose=transpose), True, True, transpose)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_fused_activation_agrees_with_the_twin(name, dtype, device, seed):
    act = Activation.named(name, limit=0.75 if name in ("swiglu_oai", "swiglu_clamped") else None)
    counts = [5, 0, 34, 1] if device == "cpu" else [185, 0, 1258, 37]
    size, d = sizes(device, (24, 40), (704, 1408))
    c = case(counts, 2 * size if act.gated else size, d, dtype, device, seed)
    check_act(c, act, bias=True, scale=True, save=True)


@pytest.mark.parametrize("save", [False, True], ids=["infer", "train"])
@pytest.mark.parametrize("scale", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("name", ["swiglu", "gelu"])
def test_bias_scale_and_preact_are_independent(name, bias, scale, save, device, seed):
    act = Activation(name)
    n, d = sizes(device, (48, 24), (1536, 512))
    check_act(case([3, 0, 35], n, d, torch.bfloat16, device, seed), act, bias, scale, save)


# What the GPU chooses by rows per expert: swapped operands for few, then wider and wider tiles.
@pytest.mark.parametrize("transpose", [False, True], ids=["w", "wT"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("counts", [[3, 0, 17, 1], [30, 0, 20], [50, 61], [129, 0, 90], [300, 3]], ids=str)
def test_gpu_configurations_are_right(counts, dtype, transpose, device, seed, configure):
    configure(on_gpu)
    check_gemm(case(counts, 300, 80, dtype, device, seed, transpose=transpose), True, True, transpose)


@pytest.mark.parametrize("counts", [[3, 0, 17, 1], [50, 61], [129, 0, 90], [300, 3]], ids=str)
@pytest.mark.parametrize("name", ["swiglu", "relu2"])
def test_gpu_configurations_of_the_fused_activation_are_right(name, counts, device, seed, configure):
    configure(on_gpu)
    check_act(case(counts, 296, 80, torch.bfloat16, device, seed), Activation(name), True, True, True)


SMALL = GemmConfig(32, 32, 32, group_m=2, num_warps=4, num_stages=2)


@pytest.mark.parametrize(
    "change",
    [
        {"group_m": 1},
        {"group_m": 8},
        {"tma": False},
        {"flatten": True},
        {"programs_per_sm": 0},
        {"block_m": 16, "block_n": 64},
    ],
    ids=str,
)
@pytest.mark.parametrize("transpose", [False, True], ids=["w", "wT"])
def test_configurations_decide_speed_only(change, transpose, device, seed, configure):
    config = dataclasses.replace(SMALL, **change)
    configure(lambda *args: config)
    counts = [70, 0, 34, 1]
    check_gemm(case(counts, 88, 72, torch.float16, device, seed, transpose=transpose), True, True, transpose)
    if not transpose:
        check_act(case(counts, 88, 72, torch.float16, device, seed), Activation("swiglu"), True, True, True)


@pytest.mark.parametrize("shift", [1, 8], ids=["unaligned", "aligned"])
def test_weights_may_be_views(shift, device, seed):
    c = case([5, 0, 34], 48, 32, torch.bfloat16, device, seed)
    wide = torch.full((3, 50, 48), math.nan, dtype=c.w.dtype, device=device)
    view = wide[:, 1:49, shift : shift + 32]
    view.copy_(c.w)
    c.w = view
    check_gemm(c, bias=True, gather=True, transpose=False)
    check_act(c, Activation("swiglu"), bias=True, scale=False, save=True)


@pytest.mark.parametrize("counts", [[40], [3, 20]], ids=str)
def test_a_token_does_not_feel_its_neighbours(counts, device, seed):
    c = case(counts, 48, 24, torch.float32, device, seed)
    args = (c.w, c.bias, *c.segments, c.index, c.k, c.max_rows)
    clean = grouped_gemm(c.x, *args, False)[: c.count]
    token = int(c.index[0]) // c.k
    x = c.x.clone()
    x[token] = math.nan
    got = grouped_gemm(x, *args, False)[: c.count]
    hit = c.index[: c.count] // c.k == token
    assert got[hit].isnan().all() and torch.equal(got[~hit], clean[~hit])


def test_the_next_experts_weights_do_not_leak_into_the_reduction(device, seed):
    for transpose in (False, True):
        c = case([9, 4], 40, 24, torch.float16, device, seed, transpose=transpose)
        c.w[1] = math.nan
        got = grouped_gemm(c.x, c.w, None, *c.segments, c.index, c.k, c.max_rows, transpose)
        assert got[:9].isfinite().all() and got[9:13].isnan().all()


def workspace_for(c: SimpleNamespace, *widths: int) -> list[Tensor]:
    """Parts of one buffer, as a planned workspace gives them, and what lies behind them; all NaN."""
    sizes = [c.max_rows * width for width in widths]
    *parts, rest = torch.full((sum(sizes) + 64,), math.nan, dtype=c.x.dtype, device=c.x.device).split([*sizes, 64])
    return [part.view(c.max_rows, width) for part, width in zip(parts, widths, strict=True)] + [rest]


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("save", [False, True], ids=["infer", "train"])
def test_results_go_into_the_callers_buffers_and_nowhere_else(save, kernels, device, seed, monkeypatch):
    monkeypatch.setenv("EPMOE_CPU_KERNELS", kernels)
    c = case([5, 0, 34, 1], 48, 24, torch.bfloat16, device, seed)
    rows = (*c.segments, c.index, c.k)
    out, rest = workspace_for(c, 48)
    grouped_gemm_into(out, c.x, c.w, c.bias, *rows, False)
    want = grouped_gemm(c.x, c.w, c.bias, *rows, c.max_rows, False)
    assert torch.equal(out[c.owned], want[c.owned]) and out[c.padding].isnan().all() and rest.isnan().all()

    act, preact, rest = workspace_for(c, 24, 48)
    tail = (c.scale, "swiglu", 1.0, math.inf)
    grouped_gemm_act_into(act, preact if save else None, c.x, c.w, c.bias, *rows, *tail)
    want_act, want_preact = grouped_gemm_act(c.x, c.w, c.bias, *rows, c.max_rows, *tail, save)
    assert torch.equal(act[c.owned], want_act[c.owned]) and act[c.padding].isnan().all() and rest.isnan().all()
    assert torch.equal(preact[c.owned], want_preact[c.owned]) if save else preact.isnan().all()


def test_buffers_that_do_not_fit_are_named():
    x, w, ends = torch.zeros(4, 8), torch.zeros(2, 6, 8), torch.zeros(2, dtype=torch.int32)
    for wrong in (torch.zeros(4, 5), torch.zeros(24), torch.zeros(4, 6).double(), torch.zeros(6, 4).T):
        with pytest.raises(ValueError, match=r"out is .*must be contiguous torch.float32 \(\d+, 6\)"):
            grouped_gemm_into(wrong, x, w, None, ends, ends, None, 1, False)
    tail = (x, w, None, ends, ends, None, 1, None, "swiglu", 1.0, math.inf)
    with pytest.raises(ValueError, match=r"act is .*must be contiguous torch.float32 \(4, 3\)"):
        grouped_gemm_act_into(torch.zeros(4, 6), None, *tail)
    with pytest.raises(ValueError, match=r"preact is .*must be contiguous torch.float32 \(4, 6\)"):
        grouped_gemm_act_into(torch.zeros(4, 3), torch.zeros(5, 6), *tail)


def test_no_experts_and_no_rows(device):
    none = torch.zeros(0, dtype=torch.int32, device=device)
    x, w = torch.zeros(4, 8, device=device), torch.zeros(0, 6, 8, device=device)
    assert grouped_gemm(x, w, None, none, none, None, 1, 3, False).shape == (3, 6)
    bounds = torch.zeros(2, dtype=torch.int32, device=device)
    w = torch.zeros(2, 6, 8, device=device)
    act, preact = grouped_gemm_act(x[:0], w, None, bounds, bounds, None, 1, 0, None, "swiglu", 1.0, math.inf, True)
    assert act.shape == (0, 3) and preact.shape == (0, 6)


def test_mistakes_are_named():
    x, w, ends = torch.zeros(4, 8), torch.zeros(2, 6, 8), torch.zeros(2, dtype=torch.int32)
    strided = torch.zeros(4, 2, dtype=torch.int32)[:, 0]

    def gemm(x=x, w=w, bias=None, start=ends, end=ends, index=None, divisor=1):
        return grouped_gemm(x, w, bias, start, end, index, divisor, 4, False)

    for match, wrong in {
        "dtype": {"w": w.double()},
        "have 8": {"w": torch.zeros(2, 6, 7)},
        "stride 1": {"x": torch.zeros(8, 4).T},
        "one per expert, 2": {"start": torch.zeros(3, dtype=torch.int32), "end": torch.zeros(3, dtype=torch.int32)},
        "row_end 3": {"end": torch.zeros(3, dtype=torch.int32)},
        "row_start is torch.int64": {"start": ends.long()},
        "row_end is .* strides": {"end": strided[:2]},
        "row_index is .* strides": {"index": strided},
        "bias": {"bias": torch.zeros(2, 8)},
        "index_divisor=0": {"divisor": 0},
    }.items():
        with pytest.raises(ValueError, match=match):
            gemm(**wrong)
    with pytest.raises(ValueError, match="even"):
        grouped_gemm_act(x, w[:, :5], None, ends, ends, None, 1, 4, None, "swiglu", 1.0, math.inf, False)


def test_router_weights_that_lie_apart_are_refused_and_not_misread():
    x, w, ends = torch.zeros(4, 8), torch.zeros(2, 6, 8), torch.zeros(2, dtype=torch.int32)
    message = torch.rand(4, 5)
    for scale in (message[:, 2:3].reshape(-1), message[:, :1], torch.ones(4, dtype=torch.float64)):
        with pytest.raises(ValueError, match="row_scale is .*: must be 1-D, contiguous"):
            grouped_gemm_act(x, w, None, ends, ends, None, 1, 4, scale, "swiglu", 1.0, math.inf, False)


def test_ops_have_faithful_fakes(seed):
    c = case([3, 0, 4], 6, 8, torch.float32, "cpu", seed, tail=0)
    utils = ("test_schema", "test_faketensor")
    rows = (*(t.clone() for t in c.segments), c.index, c.k, c.max_rows)
    for expected_m in (None, 3):
        args = (c.x, c.w, c.bias, *rows, False, expected_m)
        torch.library.opcheck(torch.ops.epmoe.grouped_gemm.default, args, test_utils=utils)
    for save in (False, True):
        args = (c.x, c.w, c.bias, *rows, c.scale, "swiglu", 1.0, math.inf, save)
        torch.library.opcheck(torch.ops.epmoe.grouped_gemm_act.default, args, test_utils=utils)


@pytest.mark.gpu
def test_rows_past_two_billion_elements_are_addressed(seed):
    n, d, rows = 16384, 64, 140_000  # rows * n > 2**31
    generator = torch.Generator("cuda").manual_seed(seed)
    w = torch.randn(2, n, d, generator=generator, device="cuda").bfloat16()
    x = torch.randn(rows, d, generator=generator, device="cuda").bfloat16()
    segments = standard_segments(torch.tensor([0, rows // 2, rows], dtype=torch.int32, device="cuda"))
    y = grouped_gemm(x, w, None, *segments, None, 1, rows, False)
    assert row_error(y[-200:], x[-200:].double() @ w[1].double().T) < ROW_ERROR[torch.bfloat16]
    back = grouped_gemm(y, w, None, *segments, None, 1, rows, True)
    assert row_error(back[-200:], y[-200:].double() @ w[1].double()) < ROW_ERROR[torch.bfloat16]
