"""Grouped GEMM for few rows: the ops through its kernel against float64, under every kind of configuration; plans."""

from __future__ import annotations

import dataclasses
import functools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from epmoe.config import ACTIVATIONS, Activation
from epmoe.ops import _few_rows_configs, _gemm_few_rows
from epmoe.ops._few_rows_configs import MAX_ROWS, FewRowsConfig, few_rows_plan
from epmoe.ops._segments import batched_segments, standard_segments
from epmoe.ops._triton import INTERPRET
from epmoe.ops.align import align_rows
from epmoe.ops.grouped_gemm import (
    grouped_gemm,
    grouped_gemm_act,
    grouped_gemm_act_reference,
    grouped_gemm_reference,
)
from epmoe.testing import poisoned_empty
from tests.ops.gemm_cases import LAYOUTS, ROW_ERROR, row_error

PLAIN = FewRowsConfig(block_t=16, block_w=64, block_k=32, num_warps=4, num_stages=2)
CONFIGS = {
    "one-program-per-item": PLAIN,
    "looping": dataclasses.replace(PLAIN, programs_per_sm=1),
    "split": dataclasses.replace(PLAIN, split=2),
    "split-unevenly": dataclasses.replace(PLAIN, split=3, programs_per_sm=1),
    "wide": dataclasses.replace(PLAIN, block_t=32, block_w=128),
    "paired": dataclasses.replace(PLAIN, block_w=128, paired=True),
    "deep": dataclasses.replace(PLAIN, block_t=64, block_k=128),
}
UNEVEN = [3, 0, 18]


@pytest.fixture
def configure(monkeypatch):
    """Makes every plan follow one configuration, and counts the plans that were followed."""
    followed = []

    def planned(*args):
        plan = few_rows_plan(*args)
        followed.append(plan is not None)
        return plan

    def replace(config):
        few_rows_plan.cache_clear()
        monkeypatch.setattr(_few_rows_configs, "few_rows_config", lambda *args, **options: config)

    monkeypatch.setattr(_gemm_few_rows, "few_rows_plan", planned)
    yield replace
    few_rows_plan.cache_clear()
    assert followed and all(followed), "another kernel ran"


def case(
    counts: list[int],
    n: int,
    d: int,
    dtype: torch.dtype,
    device: str,
    seed: int,
    layout: str = "gathered",
    transpose: bool = False,
    k: int = 3,
) -> SimpleNamespace:
    """Rows of x inside a wider NaN buffer, tokens that nobody chose and padding are NaN, index entries of it are -1.

    Experts' weights differ in magnitude, so that a row multiplied by another expert's is far off.
    """
    generator = torch.Generator().manual_seed(seed)
    count, L = sum(counts), len(counts)
    if layout == "batched":
        capacity = max(counts) + 1 + seed % 3
        segments, max_rows = batched_segments(torch.tensor(counts, dtype=torch.int32), capacity), L * capacity
    else:
        segments = standard_segments(torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int())
        max_rows = count + 3
    bounds = list(zip(*(t.tolist() for t in segments), strict=True))
    owned = torch.tensor([n for start, end in bounds for n in range(start, end)], dtype=torch.int64)
    tokens = -(-(count + 2) // k)
    index = torch.full((max_rows,), -1, dtype=torch.int32)
    index[owned] = torch.randperm(tokens * k, generator=generator)[:count].int()
    gathered = layout == "gathered"
    x = torch.full((tokens if gathered else max_rows, d + 8), math.nan)
    used = index[owned].long() // k if gathered else owned
    x[used, :d] = torch.randn(count, d, generator=generator)
    magnitude = 2.0 ** (torch.arange(L) % 4 - 1)  # its cube (reglu2) must fit fp16
    w = torch.randn(L, *((d, n) if transpose else (n, d)), generator=generator) * magnitude[:, None, None] / d**0.5
    bias = torch.randn(L, n, generator=generator) * magnitude[:, None]
    scale = torch.rand(max(tokens * k, max_rows), generator=generator) + 0.5
    padding = torch.ones(max_rows, dtype=torch.bool)
    padding[owned] = False
    if not gathered:
        scale[:max_rows][padding] = math.nan
    c = SimpleNamespace(owned=owned, padding=padding, scale=scale, index=index)
    c.x, c.w, c.bias = x.to(dtype), w.to(dtype), bias.to(dtype)
    for name, t in vars(c).items():
        setattr(c, name, t.to(device))
    c.x = c.x[:, :d]
    c.segments = tuple(t.to(device) for t in segments)
    c.rows = (*c.segments, c.index if gathered else None, k if gathered else 1, max_rows)
    return c


def check(c: SimpleNamespace, got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape and got.dtype == c.x.dtype
    assert row_error(got[c.owned], want[c.owned]) < ROW_ERROR[c.x.dtype]
    assert got[c.padding].isnan().all(), "a row of no expert was written"


def check_gemm(c: SimpleNamespace, bias: bool, transpose: bool, expected_m: int | None = None) -> Tensor:
    b = c.bias if bias else None
    with poisoned_empty():
        got = grouped_gemm(c.x, c.w, b, *c.rows, transpose, expected_m=expected_m)
    wide = (c.x.double(), c.w.double(), None if b is None else b.double())
    check(c, got, grouped_gemm_reference(*wide, *c.rows, transpose))
    return got


def check_act(c: SimpleNamespace, act: Activation, bias: bool, scale: bool, save: bool) -> None:
    b, s = c.bias if bias else None, c.scale if scale else None
    tail = (act.name, act.alpha, act.limit, save)
    with poisoned_empty():
        got = grouped_gemm_act(c.x, c.w, b, *c.rows, s, *tail)
    wide = (c.x.double(), c.w.double(), None if b is None else b.double())
    want = grouped_gemm_act_reference(*wide, *c.rows, s, *tail)
    check(c, got[0], want[0])
    if save:
        check(c, got[1], want[1])
    else:
        assert got[1].shape == (0,)


@pytest.mark.parametrize("transpose", [False, True], ids=["w", "wT"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_every_configuration_is_right(config, transpose, device, seed, configure):
    configure(config)
    layout = LAYOUTS[seed % 3]
    c = case(UNEVEN, 72, 56, torch.float16, device, seed, layout, transpose)
    check_gemm(c, bias=layout == "gathered", transpose=transpose)


@pytest.mark.parametrize("counts", [[0, 1, 0], [17], [0, 0], [16, 0, 0, 33]], ids=str)
def test_any_split_of_rows_is_right(counts, device, seed, configure):
    configure(PLAIN)
    for layout in LAYOUTS:
        check_gemm(case(counts, 32, 32, torch.bfloat16, device, seed, layout), bias=True, transpose=False)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_every_configuration_is_right_for_a_gated_gemm1(config, device, seed, configure):
    configure(config)
    c = case(UNEVEN, 80, 56, torch.bfloat16, device, seed, LAYOUTS[seed % 3])
    check_act(c, Activation("swiglu"), bias=True, scale=True, save=True)


@pytest.mark.parametrize("name, split", [*((name, 1) for name in ACTIVATIONS), ("geglu", 2), ("relu2", 2)])
def test_every_activation_whole_and_in_parts(name, split, device, seed, configure):
    configure(dataclasses.replace(PLAIN, split=split))
    # a limit that many values exceed
    act = Activation.named(name, limit=0.75 if name in ("swiglu_oai", "swiglu_clamped") else None)
    c = case([2, 0, 5], 64 if act.gated else 32, 32, torch.float16, device, seed)
    check_act(c, act, bias=True, scale=True, save=True)


@pytest.mark.parametrize("bias, scale, save", [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)])
@pytest.mark.parametrize("config", ["one-program-per-item", "split"])
@pytest.mark.parametrize("name", ["swiglu", "gelu"])
def test_bias_scale_and_preact_are_independent(name, config, bias, scale, save, device, seed, configure):
    configure(CONFIGS[config])
    c = case([2, 0, 5], 64, 32, torch.bfloat16, device, seed, LAYOUTS[seed % 3])
    check_act(c, Activation(name), bool(bias), bool(scale), bool(save))


@pytest.mark.parametrize("config", ["one-program-per-item", "split-unevenly", "paired"])
@pytest.mark.parametrize("n, d", [(16, 16), (24, 40), (66, 70), (2, 17)], ids=str)
def test_widths_need_not_fit_the_blocks(n, d, config, device, seed, configure):
    """Neither those whose rows a tensor descriptor can't describe."""
    configure(CONFIGS[config])
    for transpose in (False, True):
        check_gemm(case([5, 0, 2], n, d, torch.float16, device, seed, "in-place", transpose), True, transpose)
    check_act(case([5, 0, 2], n, d, torch.float16, device, seed), Activation("swiglu"), True, True, True)


def test_weights_may_be_views(device, seed, configure):
    for config, shift in (("one-program-per-item", 1), ("paired", 8), ("split", 8)):
        configure(CONFIGS[config])
        c = case([5, 0, 2], 96, 32, torch.bfloat16, device, seed)
        view = torch.full((3, 98, 48), math.nan, dtype=c.w.dtype, device=device)[:, 1:97, shift : shift + 32]
        view.copy_(c.w)
        c.w = view
        check_gemm(c, bias=True, transpose=False)
        check_act(c, Activation("swiglu"), bias=True, scale=False, save=True)


@pytest.mark.parametrize("config", ["one-program-per-item", "split", "looping"])
def test_a_row_has_the_same_bits_in_any_company(config, device, seed, configure):
    configure(CONFIGS[config])
    n, d = 48, 80
    c = case([1, 20, 3], n, d, torch.bfloat16, device, seed, "in-place")
    full = grouped_gemm(c.x, c.w, None, *c.rows, False, expected_m=2)
    row = 1 + seed % 20
    start = torch.tensor([0, 0, 1], dtype=torch.int32, device=device)
    end = torch.tensor([0, 1, 1], dtype=torch.int32, device=device)
    alone = grouped_gemm(c.x[row : row + 1], c.w, None, start, end, None, 1, 4, False, expected_m=2)
    assert torch.equal(alone[0], full[row])


@pytest.mark.parametrize("config", ["one-program-per-item", "split-unevenly", "deep"])
def test_neither_a_neighbour_nor_the_next_experts_weights_leak(config, device, seed, configure):
    configure(CONFIGS[config])
    c = case([9, 4], 40, 24, torch.float16, device, seed, "in-place")
    clean = grouped_gemm(c.x, c.w, None, *c.rows, False)
    c.x[3], c.w[1] = math.nan, math.nan
    got = grouped_gemm(c.x, c.w, None, *c.rows, False)
    others = [n for n in range(9) if n != 3]
    assert torch.equal(got[others], clean[others]) and got[3].isnan().all() and got[9:13].isnan().all()


def test_more_rows_than_expected_are_all_computed(device, seed, configure):
    """`expected_m` bounds the programs that are started, and never what is computed."""
    configure(PLAIN)
    c = case([70, 0, 1, 0], 64, 32, torch.float16, device, seed, "batched")
    check_gemm(c, bias=False, transpose=False, expected_m=1)


# --- the plan ---------------------------------------------------------------------------------------------------------


def plan(dtype=torch.bfloat16, shape=(128, 1536, 2048), rows=8, expected_m=None, transpose=False, gated=True):
    _, w_rows, inner = shape
    few_rows_plan.cache_clear()
    return few_rows_plan(
        torch.device("cpu"), dtype, shape, (w_rows * inner, inner, 1), True, rows, expected_m, transpose, gated
    )


def test_long_rows_of_half_a_tile_are_left_to_the_gluon_kernel_where_it_runs(on_gpu, monkeypatch):
    def taken(rows, shape=(128, 4096, 1536), gated=False, **options):
        return plan(shape=shape, rows=shape[0] * rows, gated=gated, **options) is not None

    assert taken(64)
    monkeypatch.setattr(_few_rows_configs, "_has_gluon", lambda device: True)
    _few_rows_configs.few_rows_config.func.cache_clear()
    assert not taken(64) and not taken(49) and taken(48)
    assert taken(64, gated=True) and taken(64, transpose=True)
    assert taken(64, shape=(128, 2048, 768)) and taken(64, shape=(8, 4096, 14336))


@pytest.fixture
def on_gpu(monkeypatch):
    """Plans as a GPU of 132 multiprocessors gets them."""
    few_rows_config = _few_rows_configs.few_rows_config
    few_rows_config.cache_clear()
    monkeypatch.setattr(_few_rows_configs, "_num_sms", lambda device: 132)
    monkeypatch.setattr(_few_rows_configs, "few_rows_config", functools.partial(few_rows_config, interpret=False))
    yield
    few_rows_config.cache_clear()
    few_rows_plan.cache_clear()


def test_many_rows_and_other_dtypes_are_left_to_others(on_gpu):
    assert plan(rows=128 * MAX_ROWS) is not None
    assert plan(rows=128 * MAX_ROWS + 1) is None
    assert plan(rows=128 * 4096, expected_m=MAX_ROWS) is not None
    assert plan(rows=128 * 4096, expected_m=MAX_ROWS + 1) is None
    assert plan(torch.float32) is None
    assert plan(rows=0) is None and plan(shape=(0, 16, 16)) is None


@pytest.mark.parametrize("rows", [1, 8, 128, 1024, 4096, 8192])
@pytest.mark.parametrize(
    "shape, gated", [((128, 1536, 2048), True), ((128, 2048, 768), False), ((8, 28672, 4096), True)]
)
def test_plans_hold_every_item_that_could_be(shape, gated, rows, on_gpu):
    got = plan(shape=shape, rows=rows, gated=gated)
    if got is None:
        assert rows > shape[0] * MAX_ROWS
        return
    block_t, block_w = got.constants["BLOCK_T"], got.constants["BLOCK_W"]
    worst = min(shape[0], rows) + (rows - min(shape[0], rows)) // block_t  # each active expert a tile, the rest one's
    assert got.programs >= worst * -(-shape[1] // block_w) * got.split


def test_a_reduction_is_split_where_programs_would_be_missing_and_rows_are_few(on_gpu):
    assert plan(shape=(128, 1536, 2048), rows=1).split > 1
    assert plan(shape=(128, 1536, 2048), rows=8).split == 1  # eight experts' tiles
    assert plan(shape=(1, 1536, 2048), rows=4096, expected_m=1).split == 1


def test_the_interpreter_runs_its_own_configuration():
    if INTERPRET:
        assert plan() is None


# --- one GPU ----------------------------------------------------------------------------------------------------------


def routed(tokens: int, experts: int, k: int, generator: torch.Generator) -> Tensor:
    return torch.rand(tokens, experts, generator=generator, device="cuda").topk(k, dim=1).indices.int()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 7, 64, 300])
def test_the_choice_of_a_gpu_is_right_at_full_size(tokens, seed):
    """As experts call it: sorted on the device, GEMM1, then GEMM2, each launched before the one before it has ended."""
    generator = torch.Generator("cuda").manual_seed(seed)
    E, I, H, k = 32, 768, 2048, 8
    w1 = torch.randn(E, 2 * I, H, generator=generator, device="cuda").bfloat16() / H**0.5
    w2 = torch.randn(E, H, I, generator=generator, device="cuda").bfloat16() / I**0.5
    x = torch.randn(tokens, H, generator=generator, device="cuda").bfloat16()
    everyone = torch.arange(E, dtype=torch.int32, device="cuda")
    rows = tokens * k
    for _ in range(3):
        index, offsets, _ = align_rows(routed(tokens, E, k, generator), everyone, E, rows)
        segments = standard_segments(offsets)
        act, _ = grouped_gemm_act(x, w1, None, *segments, index, k, rows, None, "swiglu", 1.0, math.inf, False)
        y = grouped_gemm(act, w2, None, *segments, None, 1, rows, False)
        wide = (x.double(), w1.double(), None, *segments, index, k, rows)
        want, _ = grouped_gemm_act_reference(*wide, None, "swiglu", 1.0, math.inf, False)
        assert row_error(act, want) < ROW_ERROR[torch.bfloat16]
        want = grouped_gemm_reference(act.double(), w2.double(), None, *segments, None, 1, rows, False)
        assert row_error(y, want) < ROW_ERROR[torch.bfloat16]


@pytest.mark.gpu
def test_segments_written_right_before_are_waited_for(seed):
    """The GEMM is launched while the sort still runs."""
    generator = torch.Generator("cuda").manual_seed(seed)
    E, n, d, rows = 64, 1024, 512, 64
    w = torch.randn(E, n, d, generator=generator, device="cuda").bfloat16()
    x = torch.randn(rows, d, generator=generator, device="cuda").bfloat16()
    everyone = torch.arange(E, dtype=torch.int32, device="cuda")
    for _ in range(20):
        ids = torch.randint(0, E, (rows, 1), generator=generator, device="cuda", dtype=torch.int32)
        _, offsets, _ = align_rows(ids, everyone, E, rows)
        got = grouped_gemm(x, w, None, *standard_segments(offsets), None, 1, rows, False)
        expert = ids.view(-1).sort().values.long()
        assert row_error(got, torch.einsum("rd,rnd->rn", x.double(), w[expert].double())) < ROW_ERROR[torch.bfloat16]


@pytest.mark.gpu
def test_a_graph_replays_with_other_routing(seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    E, n, d, k, tokens = 64, 1024, 512, 4, 6
    w = torch.randn(E, n, d, generator=generator, device="cuda").bfloat16()
    x = torch.randn(tokens, d, generator=generator, device="cuda").bfloat16()
    everyone = torch.arange(E, dtype=torch.int32, device="cuda")
    ids = routed(tokens, E, k, generator)

    def step() -> tuple[Tensor, ...]:
        index, offsets, _ = align_rows(ids, everyone, E, tokens * k)
        y = grouped_gemm(x, w, None, *standard_segments(offsets), index, k, tokens * k, False)
        return y, index, offsets

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, index, offsets = step()
    for _ in range(3):
        ids.copy_(routed(tokens, E, k, generator))
        graph.replay()
        rows = (*standard_segments(offsets), index, k, tokens * k)
        want = grouped_gemm_reference(x.double(), w.double(), None, *rows, False)
        assert row_error(y, want) < ROW_ERROR[torch.bfloat16]
        first = y.clone()
        graph.replay()
        assert torch.equal(y, first)
