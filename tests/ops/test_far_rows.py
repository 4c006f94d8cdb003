"""Operands and results of more than 2**31 elements: what lies past the reach of 32-bit addresses is right.

Buffers are as `torch.empty` leaves them except for what is read: a few rows at the beginning, more at the end, and the
weights of the first and the last expert. On CPU the same runs small, through the interpreter: there it says that these
tests are right, on a GPU that addresses do not wrap.

T rows, D what is summed over, N columns of a result, L experts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from epmoe.ops._segments import Segments
from epmoe.ops._triton import INTERPRET
from epmoe.ops.activation import apply_activation
from epmoe.ops.gather_sum import gather_sum
from epmoe.ops.grouped_gemm import grouped_gemm
from epmoe.ops.narrow_gemm import narrow_grouped_gemm, narrow_grouped_gemm_act
from epmoe.ops.pack_rows import pack_rows, unpack_rows
from epmoe.ops.quantize import quantize, quantize_reference, row_format
from epmoe.ops.quantize_blocks import quantize_blocks_reference
from epmoe.ops.quantize_by import quantize_by
from epmoe.ops.scaled_gemm import scaled_grouped_gemm, scaled_grouped_gemm_act
from epmoe.quant import (
    NarrowWeights,
    QuantizedRows,
    QuantizedWeights,
    dequantize_narrow,
    dequantize_rows,
    dequantize_weights,
    quantize_narrow,
    weight_scale_shape,
)

FIRST, LAST = 3, 40  # rows that are read at the beginning and at the end
SWIGLU = ("swiglu", 1.0, float("inf"))
LIMIT = 1e-2  # relative L2 to float64: a rounding of the result to bf16 and, of narrow weights, one of each product
REQUANTIZED = {"fp8_block": 0.05, "fp8_row": 0.05, "int8_row": 0.02}


@dataclasses.dataclass(frozen=True)
class Reach:
    """`elements`: what no index below reaches; buffers are as much larger as the rows at the end take."""

    device: str
    elements: int
    depth: int  # D
    width: int  # N
    seed: int

    @functools.cached_property
    def generator(self) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self.seed)

    def rows(self, stride: int) -> int:
        """T of a buffer whose last rows, `stride` elements apart, lie past `elements`."""
        return self.elements // stride + 1 + LAST

    def randn(self, *shape: int) -> Tensor:
        """Rows over three decades."""
        x = torch.randn(*shape, generator=self.generator, device=self.device)
        return x * 10.0 ** (torch.arange(shape[0], device=self.device) % 3 - 1).view(-1, *[1] * (len(shape) - 1))

    def shuffled(self) -> Tensor:
        """The rows at both ends in another order."""
        return torch.randperm(FIRST + LAST, generator=self.generator, device=self.device)

    def empty_bytes(self, count: int, shift: int = 0) -> Tensor:
        """Bytes that begin `shift` past a multiple of 16."""
        return torch.empty(count + shift, dtype=torch.uint8, device=self.device)[shift:]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def reach(request, monkeypatch, seed) -> Iterator[Reach]:
    """Where the kernels run: compiled on a GPU, through the interpreter on CPU. One process can do only one of them."""
    cuda = request.param == "cuda"
    if INTERPRET == cuda:
        pytest.skip("Triton was imported " + ("with TRITON_INTERPRET=1" if INTERPRET else "without its interpreter"))
    monkeypatch.setenv("EPMOE_CPU_KERNELS", "triton")
    yield Reach("cuda", 2**31, 4096, 4096, seed) if cuda else Reach("cpu", 2**13, 256, 128, seed)
    if cuda:
        torch.cuda.empty_cache()  # buffers of the next test have other sizes


class Path(NamedTuple):
    """`rows`: that an expert should expect, by which a kernel is chosen. `aligned`: tensor descriptors may be used."""

    rows: int
    aligned: bool
    gathered: bool


PATHS = {
    "few": Path(4, True, False),
    "many": Path(512, True, False),
    "most": Path(1024, True, False),
    "few-apart": Path(4, False, True),
    "many-apart": Path(512, False, False),
    "many-gathered": Path(512, True, True),
}


def put(buffer: Tensor, rows: Tensor, far: int = -LAST) -> None:
    """`rows` at both ends of `buffer`, by slices: torch's own indexing is not what is tested. `far`: where the last
    begin."""
    far %= buffer.shape[0]
    buffer[:FIRST], buffer[far : far + LAST] = rows[:FIRST], rows[FIRST:]


def take(buffer: Tensor, far: int = -LAST) -> Tensor:
    """The rows at both ends of `buffer`."""
    far %= buffer.shape[0]
    parts = [part.contiguous() for part in (buffer[:FIRST], buffer[far : far + LAST])]
    if buffer.element_size() > 1:
        return torch.cat(parts)
    return torch.cat([part.view(torch.uint8) for part in parts]).view(buffer.dtype)


class Rows(NamedTuple):
    """Which rows the first and the last expert have, those at both ends, and from which of these they come."""

    segments: Segments
    index: Tensor | None
    divisor: int
    source: Tensor

    def expected(self, x: Tensor, first: Tensor, last: Tensor) -> Tensor:
        """Products of the rows `x` that were put at the ends, by the weights of the two experts, in float64."""
        a = x.double()[self.source]
        return torch.cat([a[:FIRST] @ first.double().T, a[FIRST:] @ last.double().T])


def ends_of(count: int, device: str) -> Tensor:
    """The rows at both ends of `count`."""
    return torch.cat([torch.arange(FIRST, device=device), torch.arange(count - LAST, count, device=device)])


def two_experts(reach: Reach, num_local: int, count: int, gathered: bool) -> Rows:
    start = torch.full((num_local,), FIRST, dtype=torch.int32, device=reach.device)
    end = start.clone()
    start[0], start[-1], end[-1] = 0, count - LAST, count
    if not gathered:
        return Rows(Segments(start, end), None, 1, torch.arange(FIRST + LAST, device=reach.device))
    source, used = reach.shuffled(), ends_of(count, reach.device)
    index = torch.full((count,), -1, dtype=torch.int32, device=reach.device)
    put(index, (2 * used[source] + 1).int())
    return Rows(Segments(start, end), index, 2, source)


def close(got: Tensor, want: Tensor, limit: float) -> None:
    """At either end by itself, so that the far one can't hide."""
    for part in (slice(None, FIRST), slice(FIRST, None)):
        error = (got[part].double() - want[part]).norm() / want[part].norm()
        assert error < limit, f"rows {part}: {error:.2e}"


def eight_bit_rows(reach: Reach, scheme: str, aligned: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Values `[T, D]` and scales `[T, S]`, side by side in rows of one buffer as messages have them, and what the rows
    at both ends mean in float64. The scales too lie past `reach.elements`, of their own."""
    d, form = reach.depth, row_format(scheme)
    s = form.scales(d)
    stride = -(-(d + 4 * s) // 16) * 16 + (0 if aligned else 8)
    count = reach.rows(stride // 4)
    buffer = reach.empty_bytes(count * stride, 0 if aligned else 8).view(count, stride)
    values, scales = quantize_reference(reach.randn(FIRST + LAST, d), scheme)
    put(buffer[:, :d], values.view(torch.uint8))
    put(buffer[:, d : d + 4 * s], scales.view(torch.uint8))
    meant = dequantize_rows(QuantizedRows(values, scales, scheme), torch.float64)
    return buffer[:, :d].view(form.dtype), buffer[:, d : d + 4 * s].view(torch.float32), meant


def eight_bit_weights(reach: Reach, n: int, scheme: str, aligned: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`[L, n, D]` with scales, and what the first and the last expert mean, `[2, n, D]` in float64."""
    d, dtype = reach.depth, row_format(scheme).dtype
    num_local = reach.elements // (n * d) + 2
    values = reach.empty_bytes(num_local * n * d, 0 if aligned else 8).view(num_local, n, d)
    scales = torch.empty(weight_scale_shape((num_local, n, d), scheme), device=reach.device)
    w = reach.randn(2 * n, d).view(2, n, d) / d**0.5
    if scheme == "fp8_block":
        q = QuantizedWeights(*quantize_blocks_reference(w, scheme), scheme)
    else:
        own, channel = quantize_reference(w.view(2 * n, d), scheme)
        q = QuantizedWeights(own.view(w.shape), channel.view(2, n), scheme)
    for e in (0, -1):
        values[e], scales[e] = q.values[e].view(torch.uint8), q.scales[e]
    return values.view(dtype), scales, dequantize_weights(q, torch.float64)


EIGHT_BIT = [
    *(("fp8_block", path) for path in ("few", "many", "few-apart", "many-apart", "many-gathered")),
    *(("fp8_row", path) for path in ("few", "many", "few-apart", "many-apart")),
    *(("int8_row", path) for path in ("few-apart", "many")),
]


@pytest.mark.parametrize(("scheme", "path"), EIGHT_BIT)
def test_eight_bit_rows_weights_and_results_are_reached(scheme, path, reach):
    how = PATHS[path]
    n = reach.width if how.aligned else reach.width + 4  # rows of a result that descriptors don't take either
    x, x_scale, meant = eight_bit_rows(reach, scheme, how.aligned)
    w, w_scale, (first, last) = eight_bit_weights(reach, n, scheme, how.aligned)
    count, num_local = x.shape[0], w.shape[0]
    rows = two_experts(reach, num_local, count, how.gathered)
    assert (
        min((count - LAST) * n, (count - LAST) * x_scale.stride(0), (num_local - 1) * n * reach.depth) > reach.elements
    )
    y = scaled_grouped_gemm(
        x, x_scale, w, w_scale, None, *rows.segments, rows.index, rows.divisor, count, scheme, torch.bfloat16, how.rows
    )
    close(take(y), rows.expected(meant, first, last), LIMIT)


@pytest.mark.parametrize("path", ["few", "many", "many-apart"])
def test_what_the_first_product_quantizes_is_reached(path, reach):
    how, scheme = PATHS[path], "fp8_block"
    x, x_scale, meant = eight_bit_rows(reach, scheme, how.aligned)
    w, w_scale, (first, last) = eight_bit_weights(reach, 2 * reach.width, scheme, how.aligned)
    count = x.shape[0]
    rows = two_experts(reach, w.shape[0], count, how.gathered)
    assert (count - LAST) * reach.width > reach.elements
    a, a_scale = scaled_grouped_gemm_act(
        x, x_scale, w, w_scale, None, *rows.segments, rows.index, rows.divisor, count, None, *SWIGLU, scheme,
        torch.bfloat16, True, how.rows,
    )  # fmt: skip
    got = QuantizedRows(take(a), take(a_scale), scheme)
    want = apply_activation(rows.expected(meant, first, last), *SWIGLU)
    close(dequantize_rows(got, torch.float64), want, REQUANTIZED[scheme])


def wide_rows(reach: Reach, stride: int, count: int) -> tuple[Tensor, Tensor]:
    """bf16 `[T, D]`, and what the rows at both ends are in float64."""
    x = torch.empty(count, stride, dtype=torch.bfloat16, device=reach.device)[:, : reach.depth]
    own = reach.randn(FIRST + LAST, reach.depth).bfloat16()
    put(x, own)
    return x, own.double()


def narrow_weights(reach: Reach, n: int, scheme: str, aligned: bool) -> tuple[NarrowWeights, Tensor]:
    """`[L, n, D]`, and what the first and the last expert mean, `[2, n, D]` in float64."""
    q = quantize_narrow(
        reach.randn(2 * n, reach.depth).view(2, n, -1) / reach.depth**0.5, scheme, zeros="int" in scheme
    )
    _, _, row = q.values.shape
    num_local = reach.elements // (n * row) + 2
    values = reach.empty_bytes(num_local * n * row, 0 if aligned else 8).view(num_local, n, row).view(q.values.dtype)
    scales = q.scales.new_empty(num_local, *q.scales.shape[1:])
    zeros = None if q.zeros is None else q.zeros.new_empty(scales.shape)
    for e in (0, -1):
        values[e], scales[e] = q.values[e], q.scales[e]
        if zeros is not None:
            zeros[e] = q.zeros[e]
    return NarrowWeights(values, scales, scheme, reach.depth, zeros), dequantize_narrow(q, torch.float64)


@pytest.mark.parametrize("path", ["few", "many", "few-apart", "many-apart"])
@pytest.mark.parametrize("scheme", ["int4_g128", "mxfp4"])
def test_narrow_weights_their_rows_and_results_are_reached(scheme, path, reach):
    how, n = PATHS[path], reach.width
    q, (first, last) = narrow_weights(reach, n, scheme, how.aligned)
    count = reach.rows(min(reach.depth, n))
    x, meant = wide_rows(reach, reach.depth + (0 if how.aligned else 4), count)
    rows = two_experts(reach, q.shape[0], count, how.gathered)
    y = narrow_grouped_gemm(
        x, q.values, q.scales, q.zeros, None, None, *rows.segments, rows.index, rows.divisor, count, scheme, how.rows
    )
    close(take(y), rows.expected(meant, first, last), LIMIT)


def test_the_first_product_by_narrow_weights_is_reached(reach):
    how, scheme = PATHS["few"], "mxfp4"
    q, (first, last) = narrow_weights(reach, 2 * reach.width, scheme, how.aligned)
    count = reach.rows(min(reach.depth, reach.width))
    x, meant = wide_rows(reach, reach.depth, count)
    rows = two_experts(reach, q.shape[0], count, how.gathered)
    a = narrow_grouped_gemm_act(
        x, q.values, q.scales, None, None, None, *rows.segments, rows.index, rows.divisor, count, None, *SWIGLU, scheme,
        how.rows,
    )  # fmt: skip
    close(take(a), apply_activation(rows.expected(meant, first, last), *SWIGLU), LIMIT)


WIDE = [("few", False), ("many", False), ("most", False), ("most", True), ("few-apart", False), ("many-apart", True)]


@pytest.mark.parametrize(("path", "transpose"), WIDE)
def test_rows_weights_and_results_in_bf16_are_reached(path, transpose, reach):
    how = PATHS[path]
    d, n = reach.depth, reach.width if how.aligned else reach.width + 4
    num_local, count = reach.elements // (n * d) + 2, reach.rows(min(d, n))
    w = reach.empty_bytes(2 * num_local * n * d, 0 if how.aligned else 8).view(torch.bfloat16)
    w = w.view(num_local, d, n) if transpose else w.view(num_local, n, d)
    for e in (0, -1):
        w[e] = torch.randn(w.shape[1:], generator=reach.generator, device=reach.device).roll(e) / d**0.5
    x, meant = wide_rows(reach, d + (0 if how.aligned else 4), count)
    rows = two_experts(reach, num_local, count, how.gathered)
    y = grouped_gemm(x, w, None, *rows.segments, rows.index, rows.divisor, count, transpose, how.rows)
    first, last = (w[e].T if transpose else w[e] for e in (0, -1))
    close(take(y), rows.expected(meant, first, last), LIMIT)


@pytest.mark.parametrize("spans", [False, True])
@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_row", "int8_row"])
def test_quantized_rows_are_reached_all_of_them_or_those_of_a_span(scheme, spans, reach):
    count, far, ends, span = reach.rows(reach.depth), -LAST, None, 0
    if spans:
        span = -(-reach.elements // (3 * reach.depth)) + LAST
        count, far = 4 * span, 3 * span
        ends = torch.arange(0, count, span, dtype=torch.int32, device=reach.device)
        ends[0], ends[-1] = FIRST, far + LAST
    x = torch.empty(count, reach.depth, dtype=torch.bfloat16, device=reach.device)
    own = reach.randn(FIRST + LAST, reach.depth).bfloat16()
    put(x, own, far)
    assert far % count * reach.depth > reach.elements
    values, scales = quantize(x, scheme, ends, span)
    got = QuantizedRows(take(values, far), take(scales, far), scheme)
    want, want_scales = quantize_reference(own.cpu(), scheme)
    assert torch.equal(got.values.cpu().view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(got.scales.cpu(), want_scales)
    close(dequantize_rows(got, torch.float64), own.double(), REQUANTIZED[scheme])


@pytest.mark.parametrize("scheme", ["fp8_row", "int8_row"])
def test_rows_quantized_by_fixed_scales_are_reached(scheme, reach):
    count = reach.rows(reach.depth)
    x = torch.empty(count, reach.depth, dtype=torch.bfloat16, device=reach.device)
    segments = two_experts(reach, 4, count, False).segments
    fixed = torch.tensor([0.5, 1.0, 1.0, 0.25], device=reach.device)
    scale = fixed[[0] * FIRST + [3] * LAST]
    own = torch.randn(FIRST + LAST, reach.depth, generator=reach.generator, device=reach.device)
    own = (own / own.abs().amax(1, keepdim=True) * row_format(scheme).largest * scale[:, None]).bfloat16()
    put(x, own)
    values, scales = quantize_by(x, fixed, *segments, scheme)
    got = QuantizedRows(take(values), take(scales), scheme)
    assert torch.equal(got.scales.flatten(), scale)
    close(dequantize_rows(got, torch.float64), own.double(), REQUANTIZED[scheme])


def test_sums_of_far_rows_into_far_rows_are_reached(reach):
    count = reach.rows(reach.depth)
    src, own = wide_rows(reach, reach.depth, count)
    used, order = ends_of(count, reach.device), reach.shuffled()
    source = torch.stack([order, order.roll(1)], 1)
    index = torch.full((count, 2), -1, dtype=torch.int32, device=reach.device)
    put(index, used[source].int())
    weight = torch.rand(count, 2, generator=reach.generator, device=reach.device)
    out = gather_sum(src, index, weight)
    close(take(out), (take(weight).double()[..., None] * own[source]).sum(1), LIMIT)
    assert not out[FIRST:-LAST].any()  # no term, no number: nothing was written there by a wrapped address


@pytest.mark.parametrize("aligned", [True, False])
def test_message_rows_are_reached_with_their_words(aligned, reach):
    """By four bytes at once where rows are aligned, and by one where they are not."""
    words, h = 5, 2 * reach.depth if aligned else reach.depth - 1
    stride = h + 16 * 2 if aligned else h
    count = reach.rows(stride // 4 if aligned else stride)
    buffer = reach.empty_bytes(count * stride).view(count, stride)
    values = buffer[:, :h].view(torch.float8_e4m3fn)
    extras = buffer[:, h : h + 4 * words].view(torch.int32) if aligned else None
    if extras is None:
        extras = torch.empty(count, words, dtype=torch.int32, device=reach.device)
    used, source = ends_of(count, reach.device), reach.shuffled()
    own = torch.randint(256, (len(used), h), generator=reach.generator, device=reach.device, dtype=torch.uint8)
    own_words = torch.randint(1 << 30, (len(used), words), generator=reach.generator, device=reach.device).int()
    put(buffer[:, :h], own)
    put(extras, own_words)
    index = torch.full((count,), -1, dtype=torch.int32, device=reach.device)
    put(index, used[source].int())
    packed = pack_rows(values, extras, index)
    assert (count - LAST) * packed.shape[1] // (4 if aligned else 1) > reach.elements
    got, got_words = unpack_rows(packed, h, values.dtype, words)
    assert torch.equal(take(got).view(torch.uint8), own[source]) and torch.equal(take(got_words), own_words[source])
    assert not packed[FIRST, :h].any() and (got_words[FIRST] == -1).all()  # named by no index
