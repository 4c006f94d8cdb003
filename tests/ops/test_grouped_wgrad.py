"""Grouped wgrad: the twin against float64 outer products, kernels (interpreted on CPU) against the twin."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from epmoe.ops import _configs
from epmoe.ops import grouped_wgrad as module
from epmoe.ops._configs import WgradConfig
from epmoe.ops._segments import batched_segments, standard_segments
from epmoe.ops.grouped_wgrad import grouped_wgrad, grouped_wgrad_reference
from epmoe.testing import poisoned_empty
from tests.ops.gemm_cases import COUNTS

# Relative L2 of one expert's gradient: an fp32 sum, or one rounding of it (2^-11, 2^-8 at worst).
ERROR = {torch.float32: 5e-6, torch.float16: 6e-4, torch.bfloat16: 4.5e-3}
DTYPES = list(ERROR)
# Which operand is read through the index: W1's gradient gathers x, W2's gathers dy.
GATHERS = {"neither": (False, False), "w1": (False, True), "w2": (True, False), "both": (True, True)}


def case(
    counts: list[int],
    n: int,
    d: int,
    dtype: torch.dtype,
    device: str,
    seed: int,
    gather: tuple[bool, bool] = (False, True),
    tail: int = 5,
    capacity: int | None = None,
) -> SimpleNamespace:
    """dy and x inside wider NaN buffers, NaN in rows that nobody names and in those of no expert, whose index is -1.

    Each gathered operand has its own divisor (dy: 3, x: 2). With `capacity` in the batched layout.
    """
    generator = torch.Generator().manual_seed(seed)
    count = sum(counts)
    if capacity is None:
        segments = standard_segments(torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int())
        num_rows = count + tail
    else:
        segments, num_rows = batched_segments(torch.tensor(counts, dtype=torch.int32), capacity), len(counts) * capacity
    bounds = list(zip(*(t.tolist() for t in segments), strict=True))
    owned = torch.tensor([n for start, end in bounds for n in range(start, end)], dtype=torch.int64)
    index = torch.full((num_rows,), -1, dtype=torch.int32)
    index[owned] = torch.randperm(count + 6, generator=generator)[:count].int()

    def operand(width: int, gathered: bool, divisor: int) -> Tensor:
        used = torch.unique(index[owned].long() // divisor) if gathered else owned
        buffer = torch.full((max(num_rows, count + 6), width + 8), math.nan, dtype=dtype)
        buffer[used, :width] = torch.randn(len(used), width, generator=generator).to(dtype)
        return buffer.to(device)[:, :width]

    dy, x = operand(n, gather[0], 3), operand(d, gather[1], 2)
    index = index.to(device)
    return SimpleNamespace(
        dy=dy,
        x=x,
        segments=tuple(t.to(device) for t in segments),
        bounds=bounds,
        dy_index=index if gather[0] else None,
        dy_divisor=3 if gather[0] else 1,
        x_index=index if gather[1] else None,
        x_divisor=2 if gather[1] else 1,
        index=index,
        scale=(torch.rand(count + 6, generator=generator) + 0.5).to(device),
        counts=counts,
    )


def arguments(c: SimpleNamespace, scale: bool, bias: bool, out_dtype: torch.dtype, wide: bool = False) -> tuple:
    dy, x = (c.dy.double(), c.x.double()) if wide else (c.dy, c.x)
    scales = (c.scale, c.index) if scale else (None, None)
    return (dy, x, *c.segments, c.dy_index, c.dy_divisor, c.x_index, c.x_divisor, *scales, bias, out_dtype)


def check(c: SimpleNamespace, scale: bool = False, bias: bool = True, out_dtype: torch.dtype | None = None) -> None:
    out_dtype = out_dtype or c.dy.dtype
    with poisoned_empty():
        got = grouped_wgrad(*arguments(c, scale, bias, out_dtype))
    want = grouped_wgrad_reference(*arguments(c, scale, bias, torch.float64, wide=True))
    # A scaled row is rounded once more, before the dot.
    limit = ERROR[out_dtype] + (ERROR[c.dy.dtype] if scale else 0.0)
    for what, g, w in zip(("dw", "dbias"), got, want, strict=True):
        assert g.shape == w.shape and g.dtype == out_dtype
        if what == "dbias" and not bias:
            assert g.shape == (0,)
            continue
        for e, rows in enumerate(c.counts):
            if rows == 0:
                assert (g[e] == 0).all(), f"{what} of expert {e}, which has no rows"
            else:
                error = ((g[e].double() - w[e]).norm() / w[e].norm()).item()
                assert error < (limit if what == "dw" else ERROR[out_dtype]), f"{what} of expert {e}"


@pytest.mark.parametrize("gather", GATHERS.values(), ids=GATHERS.keys())
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_twin_is_the_sum_of_outer_products(counts, gather, seed):
    c = case(counts, 4, 3, torch.float64, "cpu", seed, gather)
    with poisoned_empty():
        dw, dbias = grouped_wgrad_reference(*arguments(c, True, True, torch.float64))
    want, want_bias = torch.zeros_like(dw), torch.zeros_like(dbias)
    for e, (start, end) in enumerate(c.bounds):
        for n in range(start, end):
            g = c.dy[int(c.index[n]) // 3 if gather[0] else n]
            h = c.x[int(c.index[n]) // 2 if gather[1] else n]
            want[e] += c.scale[int(c.index[n])].double() * torch.outer(g, h)
            want_bias[e] += g
    torch.testing.assert_close(dw, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dbias, want_bias, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "counts, gather", [(c, g) for c in COUNTS for g in GATHERS if c == "uneven" or g in ("neither", "both")]
)
def test_kernel_agrees_with_the_twin_for_any_split_of_rows(counts, gather, device, seed):
    rows = COUNTS[counts] if device == "cpu" else [37 * n for n in COUNTS[counts]]
    n, d = (40, 72) if device == "cpu" else (1408, 2880)
    check(case(rows, n, d, torch.bfloat16, device, seed, GATHERS[gather]), out_dtype=torch.float32)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_batched_experts_never_read_between_their_segments(counts, device, seed):
    n, d = (40, 72) if device == "cpu" else (1408, 2880)
    capacity = max(counts) + seed % 3
    c = case(counts, n, d, torch.bfloat16, device, seed, (False, False), capacity=capacity)
    check(c)
    c.scale, c.index = torch.rand(len(counts) * capacity, device=device) + 0.5, None
    for (_, end), e in zip(c.bounds, range(1, len(counts) + 1), strict=True):
        c.scale[end : e * capacity] = math.nan
    check(c, scale=True)


@pytest.mark.parametrize(
    "n, d, dtype",
    [(7, 24, torch.bfloat16), (24, 7, torch.float16), (72, 80, torch.bfloat16), (80, 136, torch.float16)]
    + [(9, 1, torch.float32), (72, 136, torch.float32)],
)
def test_no_size_has_to_be_a_multiple_of_a_block(n, d, dtype, device, seed):
    counts = [5, 0, 34, 1] if device == "cpu" else [5, 0, 340, 1, 64, 129]
    check(case(counts, n, d, dtype, device, seed))


@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=["same", "fp32-gradients"])
@pytest.mark.parametrize("scale, bias", [(False, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale_bias_and_output_dtype_are_independent(dtype, scale, bias, out_dtype, device, seed):
    n, d = (40, 24) if device == "cpu" else (1536, 512)
    counts = [3, 0, 35] if device == "cpu" else [111, 0, 1295]
    check(case(counts, n, d, dtype, device, seed), scale, bias, out_dtype)


def test_scale_without_an_index_is_read_in_sorted_order(device, seed):
    c = case([3, 0, 35], 24, 16, torch.float32, device, seed)
    args = list(arguments(c, True, False, torch.float32))
    want, _ = grouped_wgrad(*args)
    args[8], args[9] = torch.full((43,), math.nan, device=device), None
    args[8][:38] = c.scale[c.index[:38].long()]
    assert torch.equal(grouped_wgrad(*args)[0], want)


@pytest.mark.parametrize("gather", [(False, False), (False, True)], ids=["in-place", "gathered"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n, d", [(130, 260), (72, 40)])
def test_gpu_configurations_are_right(n, d, dtype, gather, device, seed, monkeypatch):
    if dtype == torch.float32:
        n, d = n // 2 + 1, d // 2  # its blocks are half as large, and the interpreter is slow
    monkeypatch.setattr(module, "wgrad_config", lambda *args: _configs.wgrad_config(*args, interpret=False))
    check(case([70, 0, 3], n, d, dtype, device, seed, gather), scale=True)


SMALL = WgradConfig(32, 32, 32, group_m=2, num_warps=4, num_stages=2, store_bytes=4096)


@pytest.mark.parametrize(
    "change",
    [
        {"group_m": 1},
        {"group_m": 8, "tma": False},
        {"programs_per_sm": 0},
        {"block_m": 64, "block_k": 16},
        {"store_bytes": 1024},
        {"store_bytes": 512},
    ],
    ids=str,
)
def test_configurations_decide_speed_only(change, device, seed, monkeypatch):
    config = dataclasses.replace(SMALL, **change)
    monkeypatch.setattr(module, "wgrad_config", lambda *args: config)
    check(case([34, 0, 5], 72, 40, torch.float16, device, seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_nan_stays_with_its_expert(dtype, device, seed):
    c = case([9, 4, 6], 24, 16, dtype, device, seed, gather=(False, False))
    clean, clean_bias = grouped_wgrad(*arguments(c, False, True, torch.float32))
    c.dy[10] = math.nan
    dw, dbias = grouped_wgrad(*arguments(c, False, True, torch.float32))
    assert dw[1].isnan().all() and dbias[1].isnan().all()
    for e in (0, 2):
        assert torch.equal(dw[e], clean[e]) and torch.equal(dbias[e], clean_bias[e])


@pytest.mark.parametrize("tma", [True, False], ids=["descriptors", "pointers"])
@pytest.mark.parametrize("n, d, dtype", [(40, 72, torch.bfloat16), (41, 70, torch.bfloat16), (40, 72, torch.float32)])
def test_accumulating_adds_what_would_be_returned_and_rounds_nothing(n, d, dtype, tma, device, seed, monkeypatch):
    config = dataclasses.replace(SMALL, tma=tma)
    monkeypatch.setattr(module, "wgrad_config", lambda *args: config)
    c = case([5, 0, 34, 1], n, d, dtype, device, seed)
    into = torch.randn(4, n, d, generator=torch.Generator().manual_seed(seed)).to(device)
    before = into.clone()
    args = arguments(c, False, True, dtype)
    dw, dbias = grouped_wgrad(*args, accumulate_into=into)
    want, want_bias = grouped_wgrad(*args[:-1], torch.float32)
    assert dw.shape == (0,) and torch.equal(dbias, want_bias.to(dtype))
    assert torch.equal(into, before + want)


def test_twin_accumulates_too(seed):
    c = case([5, 0, 3], 4, 3, torch.float64, "cpu", seed)
    into = torch.randn(3, 4, 3, dtype=torch.float64)
    before, args = into.clone(), arguments(c, True, False, torch.float64)
    dw, _ = grouped_wgrad(*args, accumulate_into=into)
    assert dw.shape == (0,)
    torch.testing.assert_close(into, before + grouped_wgrad(*args)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gather", GATHERS.values(), ids=GATHERS.keys())
def test_operands_that_no_descriptor_takes_are_read_all_the_same(gather, device, seed):
    n, d = (40, 72) if device == "cpu" else (1408, 2880)
    c = case([5, 0, 34, 1], n, d, torch.bfloat16, device, seed, gather)
    c.dy, c.x = c.dy[:, 1:], c.x[:, :-1]  # one begins, the other's width ends, off a multiple of 16 bytes
    check(c)
    c = case([5, 0, 34, 1], n, d, torch.bfloat16, device, seed, gather)
    c.x = c.x.clone(memory_format=torch.contiguous_format)[:, :-1].contiguous()  # its rows begin off one too
    check(c)


@pytest.mark.gpu
@pytest.mark.parametrize("gather", GATHERS.values(), ids=GATHERS.keys())
@pytest.mark.parametrize("stride", [2048, 2056], ids=str)
def test_every_way_of_reading_fits_an_sm(gather, stride, seed):
    """Triton copies asynchronously only where a row's stride is a multiple of 16 elements; stages are for either."""
    c = case([700, 0, 3, 300], 1536, 2048, torch.bfloat16, "cuda", seed, gather)
    c.dy, c.x = (torch.nn.functional.pad(t, (0, stride - 2048))[:, : t.shape[1]] for t in (c.dy, c.x))
    for scale, out_dtype in ((False, torch.bfloat16), (True, torch.float32)):
        check(c, scale=scale, out_dtype=out_dtype)


@pytest.mark.gpu
def test_the_same_inputs_give_the_same_bits(seed):
    c = case([700, 0, 3, 2000], 1408, 2880, torch.bfloat16, "cuda", seed)
    first = grouped_wgrad(*arguments(c, True, True, torch.float32))
    for _ in range(3):
        for again, once in zip(grouped_wgrad(*arguments(c, True, True, torch.float32)), first, strict=True):
            assert torch.equal(again, once)


@pytest.mark.gpu
def test_rows_past_two_billion_elements_are_addressed(seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    n, d, rows = 16384, 64, 140_000  # rows * n > 2**31
    dy = torch.randn(rows, n, generator=generator, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(rows, d, generator=generator, device="cuda", dtype=torch.bfloat16)
    segments = standard_segments(torch.tensor([0, rows - 64, rows], dtype=torch.int32, device="cuda"))
    dw, dbias = grouped_wgrad(dy, x, *segments, None, 1, None, 1, None, None, True, torch.float32)
    want = dy[-64:].double().T @ x[-64:].double()
    assert ((dw[1] - want).norm() / want.norm()).item() < ERROR[torch.float32]
    want = dy[-64:].double().sum(0)
    assert ((dbias[1] - want).norm() / want.norm()).item() < ERROR[torch.float32]


def test_no_experts_and_no_rows(device):
    empty = torch.zeros(0, 8, device=device)
    none = torch.zeros(0, dtype=torch.int32, device=device)
    dw, dbias = grouped_wgrad(empty, empty, none, none, None, 1, None, 1, None, None, True, torch.float32)
    assert dw.shape == (0, 8, 8) and dbias.shape == (0, 8)
    bounds = torch.zeros(2, dtype=torch.int32, device=device)
    dw, dbias = grouped_wgrad(empty, empty[:, :5], bounds, bounds, None, 1, None, 1, None, None, True, torch.float32)
    assert dw.shape == (2, 8, 5) and (dw == 0).all() and (dbias == 0).all()


def test_mistakes_are_named():
    dy, ends = torch.zeros(4, 8), torch.zeros(2, dtype=torch.int32)
    strided = torch.zeros(4, 2, dtype=torch.int32)[:, 0]
    strided_scale = torch.rand(4, 3)[:, 1:2].reshape(-1)

    def wgrad(
        dy=dy, x=dy, start=ends, divisor=1, dy_index=None, x_index=None, scale=None, scale_index=None, into=None
    ) -> None:
        args = (dy, x, start, ends, dy_index, divisor, x_index, 1, scale, scale_index, False, torch.float32)
        grouped_wgrad(*args, accumulate_into=into)

    for match, wrong in {
        "dtype": {"x": dy.double()},
        "dy has shape .* stride 1": {"dy": torch.zeros(8, 4).T},
        "row_start is torch.int64": {"start": ends.long()},
        "row_start has 1": {"start": ends[:1]},
        "dy_index is .* strides": {"dy_index": strided},
        "x_index is .* strides": {"x_index": strided},
        "row_scale is .* strides": {"scale": strided_scale},
        "scale_index is .* strides": {"scale_index": strided},
        "dy_divisor=0": {"divisor": 0},
        r"accumulate_into is .*\(2, 8, 7\).*must be contiguous, \(2, 8, 8\)": {"into": torch.zeros(2, 8, 7)},
        "accumulate_into is torch.bfloat16": {"into": torch.zeros(2, 8, 8, dtype=torch.bfloat16)},
        "accumulate_into is .* strides": {"into": torch.zeros(2, 8, 8).transpose(1, 2)},
    }.items():
        with pytest.raises(ValueError, match=match):
            wgrad(**wrong)


@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_op_has_a_faithful_fake(bias, seed):
    c = case([3, 0, 4], 6, 8, torch.float32, "cpu", seed, tail=0)
    args = arguments(c, True, bias, torch.float32)
    args = tuple(a.clone() if isinstance(a, Tensor) else a for a in args)
    into = torch.zeros(3, 6, 8)
    for kwargs in ({"expected_m": None, "accumulate_into": None}, {"expected_m": 3, "accumulate_into": into}):
        torch.library.opcheck(
            torch.ops.epmoe.grouped_wgrad.default, args, kwargs, test_utils=("test_schema", "test_faketensor")
        )
