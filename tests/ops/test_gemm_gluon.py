"""The Gluon kernel of grouped GEMM: chosen where it can run and nowhere else, and right for every variant of a tile."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from epmoe.config import Activation
from epmoe.ops import _configs, _gemm_gluon
from epmoe.ops import grouped_gemm as grouped_gemm_module
from epmoe.ops._gemm_gluon import gluon_plan, launch_gluon
from epmoe.ops._segments import RowMap, standard_segments
from epmoe.ops.activation import Epilogue
from epmoe.ops.grouped_gemm import grouped_gemm, grouped_gemm_act
from epmoe.testing import poisoned_empty
from tests.ops.gemm_cases import case, check_act, check_gemm

CPU = torch.device("cpu")
# Tiles hold 64, 128, 256 or 288 rows; a last one takes up to 32 rows beyond 256.
EDGES = [5, 0, 340, 1, 64, 65, 129, 256, 257, 288, 289, 513]
ACTIVATIONS = ["swiglu", "swiglu_oai", "swiglu_clamped", "geglu_tanh", "reglu2", "silu", "relu2"]


@pytest.fixture
def forget(monkeypatch):
    """Plans made here are not found by later tests."""
    gluon_plan.cache_clear()
    yield monkeypatch
    gluon_plan.cache_clear()


@pytest.fixture
def known(forget):
    """As if the kernel were known to work on this device."""
    choose = _configs.gemm_config.__wrapped__
    forget.setattr(_configs, "gemm_config", lambda *args: choose(*args, interpret=False))
    forget.setattr(_configs, "_has_gluon", lambda device: True)
    forget.setattr(_gemm_gluon, "_layout", lambda dtype, block: None)


@pytest.fixture
def only_gluon(forget):
    """The Gluon kernel, for any number of rows; a call that another kernel would serve fails."""
    choose = _configs.gemm_config
    forget.setattr(_configs, "gemm_config", lambda *args: dataclasses.replace(choose(*args), gluon=True))

    def refuse(*args):
        raise AssertionError("the Gluon kernel did not take the operands")

    forget.setattr(grouped_gemm_module, "launch_few_rows", lambda *args: False)
    forget.setattr(grouped_gemm_module, "launch_triton", refuse)


def plan(n=256, depth=128, strides=None, transpose=False, gated=False, dtype=torch.bfloat16, rows=256):
    shape = (2, depth, n) if transpose else (2, n, depth)
    strides = strides or (shape[1] * shape[2], shape[2], 1)
    return gluon_plan(CPU, dtype, shape, strides, rows, transpose, gated, False)


def test_no_plan_where_the_kernel_is_not_known_to_work(forget):
    choose = _configs.gemm_config.__wrapped__
    forget.setattr(_configs, "gemm_config", lambda *args: choose(*args, interpret=False))
    assert plan() is None


def test_a_plan_is_for_what_tensor_descriptors_can_reach(known):
    assert plan() is not None and plan(transpose=True) is not None and plan(gated=True) is not None
    for unfit in ({"n": 260}, {"depth": 100}, {"n": 264, "gated": True}, {"strides": (0, 128, 1)}):
        assert plan(**unfit) is None, unfit


def test_the_kernel_is_chosen_for_16_bits_and_where_it_was_measured_to_be_the_faster(known):
    assert [rows for rows in (48, 64, 65, 128, 129, 512, 513) if plan(rows=rows) is not None] == [64, 129, 512]
    assert plan(rows=64, gated=True) is None
    assert plan(dtype=torch.float16) is not None and plan(dtype=torch.float32) is None


def test_a_gated_tile_takes_gates_and_up_projections_in_turns(known):
    shape, strides, block, _ = plan(n=288, depth=40, gated=True).w
    w = torch.arange(2 * 288).reshape(2, 288, 1).expand(2, 288, 40).contiguous()
    seen = w.as_strided(shape, strides)[1, : block[1], :, :, 0].reshape(-1) - 288
    gates = torch.arange(32).reshape(4, 8)
    assert torch.equal(seen, torch.stack([gates, gates + 144], 1).reshape(-1))


def test_cpu_tensors_are_left_to_others():
    a, w, out = torch.zeros(4, 64), torch.zeros(2, 64, 64), torch.zeros(4, 64)
    bounds = torch.zeros(2, dtype=torch.int32)
    assert not launch_gluon(a, w, None, RowMap(bounds, bounds), out, None, False, None, Epilogue())


@pytest.mark.gpu
@pytest.mark.parametrize("transpose", [False, True], ids=["w", "wT"])
@pytest.mark.parametrize("gather", [False, True], ids=["in-place", "gathered"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "counts, n, d",
    [(EDGES, 208, 136), ([700, 0, 33, 128, 65], 1408, 16), ([1024, 300], 16, 520), ([260] * 70, 520, 256)],
    ids=["edges", "one-step", "narrow", "many-tiles"],
)
def test_every_variant_of_a_tile_is_right(counts, n, d, dtype, gather, transpose, only_gluon, seed):
    check_gemm(
        case(counts, n, d, dtype, "cuda", seed, transpose=transpose, dense=not gather), gather, gather, transpose
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name, gather", [(name, i % 2 == 0) for i, name in enumerate(ACTIVATIONS)])
def test_every_activation_and_what_it_saw_is_right(name, gather, only_gluon, seed):
    act = Activation.named(name, limit=0.75 if name in ("swiglu_oai", "swiglu_clamped") else None)
    size, d = 104, 136
    c = case(EDGES, 2 * size if act.gated else size, d, torch.bfloat16, "cuda", seed, dense=not gather)
    check_act(c, act, bias=True, scale=True, save=True, gather=gather)


@pytest.mark.gpu
@pytest.mark.parametrize("bias, scale, save", [(0, 0, 0), (1, 0, 1), (0, 1, 0), (0, 0, 1)])
def test_bias_scale_and_preact_are_independent(bias, scale, save, only_gluon, seed):
    c = case([700, 0, 270, 40], 2 * 96, 72, torch.bfloat16, "cuda", seed)
    check_act(c, Activation("swiglu"), bool(bias), bool(scale), bool(save))


@pytest.mark.gpu
def test_batched_experts_and_views_of_weights(only_gluon, seed):
    c = case([290, 0, 129], 192, 64, torch.bfloat16, "cuda", seed, dense=True, capacity=301)
    wide = torch.full((3, 200, 80), math.nan, dtype=c.w.dtype, device="cuda")
    wide[:, 8:, 8:72] = c.w
    c.w = wide[:, 8:, 8:72]
    check_gemm(c, bias=True, gather=False, transpose=False)
    check_act(c, Activation("swiglu"), bias=True, scale=True, save=True, gather=False)


@pytest.mark.gpu
@pytest.mark.parametrize("gather", [False, True], ids=["in-place", "gathered"])
def test_a_row_has_the_same_bits_whatever_else_is_in_the_batch(gather, only_gluon, seed):
    c = case([700, 0, 270, 40], 192, 200, torch.bfloat16, "cuda", seed, dense=not gather)
    index = c.index if gather else None
    divisor = c.k if gather else 1
    full = grouped_gemm(c.x, c.w, c.bias, *c.segments, index, divisor, c.max_rows, False)
    again = grouped_gemm(c.x, c.w, c.bias, *c.segments, index, divisor, c.max_rows, False)
    assert torch.equal(full[: c.count], again[: c.count])
    starts, ends = (t.clone() for t in c.segments)
    for skip in (1, 63, 200):  # other places in other tiles
        alone = grouped_gemm(
            c.x, c.w, c.bias, torch.minimum(starts + skip, ends), ends, index, divisor, c.max_rows, False
        )
        for start, end in c.bounds:
            assert torch.equal(alone[min(start + skip, end) : end], full[min(start + skip, end) : end])


@pytest.mark.gpu
def test_a_captured_launch_follows_the_counts_on_the_device(only_gluon, seed):
    c = case([300, 40, 0], 192, 64, torch.bfloat16, "cuda", seed, dense=True)
    run = lambda: grouped_gemm_act(  # noqa: E731
        c.x, c.w, c.bias, *c.segments, None, 1, c.max_rows, None, "swiglu", 1.0, math.inf, False
    )[0]
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for start, end in ([0, 300, 340], [300, 340, 340]), ([0, 10, 340], [10, 340, 340]):
        for own, now in zip(c.segments, (start, end), strict=True):
            own.copy_(torch.tensor(now, dtype=torch.int32))
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out[: c.count], run()[: c.count])


@pytest.mark.gpu
def test_unaligned_operands_go_to_another_kernel(seed):
    c = case([300, 200], 256, 136, torch.bfloat16, "cuda", seed)
    c.w = torch.cat([c.w.flatten()[:1], c.w.flatten()])[1:].reshape(c.w.shape)
    with poisoned_empty():
        check_gemm(c, bias=True, gather=True, transpose=False)


@pytest.mark.gpu
@pytest.mark.parametrize("gather", [False, True], ids=["in-place", "gathered"])
def test_rows_past_two_billion_elements_are_addressed(gather, only_gluon, seed):
    n, d, rows = 16384, 64, 140_000  # rows * n > 2**31
    generator = torch.Generator("cuda").manual_seed(seed)
    w = torch.randn(2, n, d, generator=generator, device="cuda").bfloat16()
    x = torch.randn(rows, d, generator=generator, device="cuda").bfloat16()
    segments = standard_segments(torch.tensor([0, rows // 2, rows], dtype=torch.int32, device="cuda"))
    index = torch.arange(rows, dtype=torch.int32, device="cuda") if gather else None
    y = grouped_gemm(x, w, None, *segments, index, 1, rows, False)
    want = x[-200:].double() @ w[1].double().T
    assert (y[-200:].double() - want).norm() < 4e-3 * want.norm()
    back = grouped_gemm(y, w, None, *segments, index, 1, rows, True)
    want = y[-200:].double() @ w[1].double()
    assert (back[-200:].double() - want).norm() < 4e-3 * want.norm()
