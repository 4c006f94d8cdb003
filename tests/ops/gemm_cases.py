"""Unquantized grouped products as tests make them: operands in every layout, and what their results are held to."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import Tensor

from epmoe.config import Activation
from epmoe.ops._segments import batched_segments, standard_segments
from epmoe.ops.grouped_gemm import (
    grouped_gemm,
    grouped_gemm_act,
    grouped_gemm_act_reference,
    grouped_gemm_reference,
)
from epmoe.testing import poisoned_empty

# Relative L2 of any one row: an fp32 sum, or one rounding of it (2^-11, 2^-8 at worst).
ROW_ERROR = {torch.float32: 5e-6, torch.float16: 6e-4, torch.bfloat16: 4.5e-3}
DTYPES = list(ROW_ERROR)
COUNTS = {
    "uneven": [5, 0, 34, 1],
    "no-rows": [0, 0, 0],
    "one-row": [0, 1, 0],
    "one-expert": [33],
    "one-hot": [0, 0, 0, 0, 41],
}
# How rows are found: in sorted order, by an index, or as batched experts, which are dense and lie apart.
LAYOUTS = ["in-place", "gathered", "batched"]


def sizes(device: str, small: tuple[int, int], large: tuple[int, int]) -> tuple[int, int]:
    return small if device == "cpu" else large


def case(
    counts: list[int],
    n: int,
    d: int,
    dtype: torch.dtype,
    device: str,
    seed: int,
    k: int = 3,
    tail: int = 5,
    transpose: bool = False,
    dense: bool = False,
    capacity: int | None = None,
) -> SimpleNamespace:
    """Rows of x inside a wider NaN buffer, tokens that nobody chose are NaN, -1 indices in rows of no expert.

    With `capacity` in the batched layout, else sorted with `tail` rows of no expert behind the last one.

    Experts' weights differ in magnitude too, so that a row multiplied by another expert's is far off.
    """
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    count, L = sum(counts), len(counts)
    tokens = -(-(count + 4) // k)
    if capacity is None:
        segments = standard_segments(torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int())
        max_rows = count + tail
    else:
        segments, max_rows = batched_segments(torch.tensor(counts, dtype=torch.int32), capacity), L * capacity
    bounds = list(zip(*(t.tolist() for t in segments), strict=True))
    owned = torch.tensor([n for start, end in bounds for n in range(start, end)], dtype=torch.int64)
    index = torch.full((max_rows,), -1, dtype=torch.int32)
    index[owned] = torch.randperm(tokens * k, generator=generator)[:count].int()
    x = torch.full((max_rows if dense else tokens, d + 8), math.nan, dtype=dtype)
    used = owned if dense else index[owned].long() // k
    x[used, :d] = randn(len(used), d).to(dtype)
    padding = torch.ones(max_rows, dtype=torch.bool)
    padding[owned] = False
    magnitude = 2.0 ** (torch.arange(L) % 4 - 1)  # its cube (reglu2) must fit fp16
    w = (randn(L, *((d, n) if transpose else (n, d))) * magnitude[:, None, None] / d**0.5).to(dtype)
    bias = (randn(L, n) * magnitude[:, None]).to(dtype)
    scale = torch.rand(max(tokens * k, max_rows), generator=generator) + 0.5
    tensors = {"x": x, "w": w, "bias": bias, "index": index, "scale": scale, "owned": owned, "padding": padding}
    built = SimpleNamespace(**{name: t.to(device) for name, t in tensors.items()})
    built.x = built.x[:, :d]
    built.segments = tuple(t.to(device) for t in segments)
    built.bounds, built.count, built.k, built.max_rows = bounds, count, k, max_rows
    return built


def row_error(got: Tensor, want: Tensor) -> float:
    """The largest relative L2 error of a row; one that cancelled to nearly nothing counts as 5 % of the average row."""
    if not len(want):
        return 0.0
    norms = want.norm(dim=-1)
    return ((got.double() - want).norm(dim=-1) / norms.clamp_min(norms.mean() / 20)).max().item()


def check_gemm(c: SimpleNamespace, bias: bool, gather: bool, transpose: bool, expected_m: int | None = None) -> Tensor:
    index, divisor = (c.index, c.k) if gather else (None, 1)
    b = c.bias if bias else None
    rows = (*c.segments, index, divisor, c.max_rows)
    with poisoned_empty():
        got = grouped_gemm(c.x, c.w, b, *rows, transpose, expected_m=expected_m)
    want = grouped_gemm_reference(c.x.double(), c.w.double(), None if b is None else b.double(), *rows, transpose)
    assert got.shape == want.shape and got.dtype == c.x.dtype
    assert row_error(got[c.owned], want[c.owned]) < ROW_ERROR[c.x.dtype]
    assert got[c.padding].isnan().all(), "a row of no expert was written"
    return got


def check_act(c: SimpleNamespace, act: Activation, bias: bool, scale: bool, save: bool, gather: bool = True) -> None:
    b, s = c.bias if bias else None, c.scale if scale else None
    tail = (act.name, act.alpha, act.limit, save)
    rows = (*c.segments, c.index if gather else None, c.k if gather else 1, c.max_rows)
    with poisoned_empty():
        got = grouped_gemm_act(c.x, c.w, b, *rows, s, *tail)
    wide_bias = None if b is None else b.double()
    want = grouped_gemm_act_reference(c.x.double(), c.w.double(), wide_bias, *rows, s, *tail)
    for g, w in zip(got[: 1 + save], want[: 1 + save], strict=True):
        assert g.shape == w.shape and g.dtype == c.x.dtype
        # relu² of a sum near 0 has no relative accuracy of its own: rows are measured, never single numbers
        assert row_error(g[c.owned], w[c.owned]) < ROW_ERROR[c.x.dtype]
        assert g[c.padding].isnan().all(), "a row of no expert was written"
    if not save:
        assert got[1].shape == (0,)


def naive_rows(c: SimpleNamespace, gather: bool) -> list[tuple[int, int, Tensor]]:
    """(row n, expert, row of x) for every row, one at a time."""
    return [
        (n, e, c.x[int(c.index[n]) // c.k if gather else n])
        for e, (start, end) in enumerate(c.bounds)
        for n in range(start, end)
    ]
