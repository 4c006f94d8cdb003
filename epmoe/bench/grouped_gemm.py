"""Bench `grouped_gemm`: one product of every expert's rows with its weights, alone, beside torch's own.

    layout      rows                                            result
    even        each expert has as many                         a·wᵀ
    uneven      counts drawn as uniform routing draws them      a·wᵀ
    gathered    even, found by index, each row eight times      a·wᵀ
    swiglu      even                                            silu(a·w_gateᵀ) · (a·w_upᵀ), in fp8_block quantized anew
    batched     counts as in uneven, each expert's in C places  a·wᵀ of the places in use, by counts on the device

E experts, T = E · rows rows in all, N weight rows of an expert (2I with swiglu), D the width of a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from epmoe.bench.problem import relative
from epmoe.bench.records import Record, make_record
from epmoe.bench.session import Session
from epmoe.bench.timing import Call
from epmoe.ops._segments import Segments, batched_segments, standard_segments
from epmoe.ops.activation import apply_activation
from epmoe.ops.grouped_gemm import grouped_gemm, grouped_gemm_act
from epmoe.ops.scaled_gemm import scaled_grouped_gemm, scaled_grouped_gemm_act
from epmoe.quant import (
    QuantizedRows,
    QuantizedWeights,
    dequantize_rows,
    dequantize_weights,
    quantize_rows,
    quantize_weights,
)

LAYOUTS = ("even", "uneven", "gathered", "swiglu", "batched")
SCHEMES = ("bf16", "fp8_row", "fp8_block")
TOP_K = 8  # how often a gathered row is read
LIMITS = {"bf16": 6e-3, "fp8_row": 6e-3, "fp8_block": 6e-3, "requantized": 4e-2}  # relative L2 to float64
SWIGLU = ("swiglu", 1.0, float("inf"))

SHAPES = {  # experts, rows of each, N, D
    "A": (32, 1024, 4096, 7168),
    "B": (32, 1024, 7168, 2048),
    "C": (32, 256, 4096, 7168),
    "D": (128, 256, 1536, 2048),
    "F": (128, 1024, 1536, 2048),
    "G": (8, 4096, 4096, 7168),
}
BATCHED_ROWS = (4, 32, 512)  # of an expert, on average: decode, decode of many, prefill
FEWEST_PLACES = 128


@dataclasses.dataclass(frozen=True)
class GroupedGemmCase:
    """`rows` of each expert, on average. What is computed with: bf16, or fp8 values with scales per row and channel
    (`fp8_row`) or per 128 columns and block (`fp8_block`). `capacity`: C of the batched layout; 0 there: twice the
    rows, at least 128."""

    layout: str
    scheme: str
    experts: int
    rows: int
    n: int
    k: int
    capacity: int = 0

    def __post_init__(self) -> None:
        for field, names in (("layout", LAYOUTS), ("scheme", SCHEMES)):
            if getattr(self, field) not in names:
                raise ValueError(f"{field}={getattr(self, field)!r}: must be one of {', '.join(names)}")
        for field in ("experts", "rows", "n", "k"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)}: must be at least 1")
        for field in ("n", "k"):
            if getattr(self, field) % 32:
                raise ValueError(
                    f"{field}={getattr(self, field)}: must be a multiple of 32, or torch can't be beside it"
                )
        if self.layout == "gathered" and self.experts * self.rows % TOP_K:
            raise ValueError(f"experts·rows={self.experts * self.rows}: must be a multiple of {TOP_K} when gathered")
        if self.capacity and (self.layout != "batched" or self.capacity < self.rows):
            right = f"must be at least {self.rows}, the rows" if self.layout == "batched" else "only batched has one"
            raise ValueError(f"capacity={self.capacity} with layout={self.layout!r}: {right}")

    @property
    def places(self) -> int:
        """C."""
        return self.capacity or max(2 * self.rows, FEWEST_PLACES)

    @property
    def identity(self) -> dict[str, str | int]:
        """As a record has it."""
        fields = dataclasses.asdict(self) | {"capacity": self.places}
        return {name: value for name, value in fields.items() if name != "capacity" or self.layout == "batched"}


def standard_cases() -> list[GroupedGemmCase]:
    """Every shape in every scheme with even rows; the other layouts on A and D, batched with rows of its own; few rows
    on A."""
    cases = [GroupedGemmCase("even", scheme, *shape) for shape in SHAPES.values() for scheme in SCHEMES]
    for name in ("A", "D"):
        cases += [GroupedGemmCase(layout, scheme, *SHAPES[name]) for layout in LAYOUTS[1:-1] for scheme in SCHEMES]
        experts, _, n, k = SHAPES[name]
        for rows in BATCHED_ROWS:
            cases += [GroupedGemmCase("batched", scheme, experts, rows, n, k) for scheme in ("bf16", "fp8_block")]
    experts, _, n, k = SHAPES["A"]
    cases += [GroupedGemmCase("even", scheme, experts, rows, n, k) for rows in (1, 4, 16, 64) for scheme in SCHEMES]
    return cases


def named_shape(text: str) -> tuple[int, int, int, int]:
    """A letter of `SHAPES`, or EXPERTSxROWSxNxK."""
    if text in SHAPES:
        return SHAPES[text]
    numbers = text.split("x")
    if len(numbers) != 4 or not all(number.isdecimal() for number in numbers):
        raise ValueError(f"shape={text!r}: must be one of {', '.join(SHAPES)}, or EXPERTSxROWSxNxK")
    experts, rows, n, k = map(int, numbers)
    return experts, rows, n, k


def is_sustained(case: GroupedGemmCase) -> bool:
    """Whether a case is measured back to back for long as well: A and D, even."""
    return case.layout == "even" and (case.experts, case.rows, case.n, case.k) in (SHAPES["A"], SHAPES["D"])


@dataclasses.dataclass(frozen=True)
class Operands:
    """Rows and weights as the scheme has them, and where each expert's rows lie."""

    rows: Tensor | QuantizedRows  # [T, D]; [T / 8, D] gathered, [E · C, D] batched
    weights: Tensor | QuantizedWeights  # [E, N, D]
    segments: Segments  # [E] int32 each
    row_index: Tensor | None  # [T] int32, into eight times the rows
    max_rows: int  # of the result: T, or E · C

    @property
    def counts(self) -> Tensor:
        """Rows of each expert."""
        return self.segments.row_end - self.segments.row_start

    def source(self, rows: Tensor) -> Tensor:
        """Which of `rows` each of the given rows reads."""
        return rows if self.row_index is None else self.row_index[rows].long() // TOP_K


def make_operands(case: GroupedGemmCase, device: torch.device) -> Operands:
    """Drawn on `device` from a fixed seed: rows normal, weights with std 1/√D. Places that no row uses hold numbers
    like the others, since what multiplies them all the same would draw less power for zeros.

    Raises:
        ValueError: an expert of the batched layout has more rows than places.
    """
    generator = torch.Generator(device).manual_seed(0)
    total = case.experts * case.rows
    gathered, batched = case.layout == "gathered", case.layout == "batched"
    max_rows = case.experts * case.places if batched else total
    x = torch.empty(total // TOP_K if gathered else max_rows, case.k, dtype=torch.bfloat16, device=device)
    x.normal_(generator=generator)
    w = torch.empty(case.experts, case.n, case.k, dtype=torch.bfloat16, device=device)
    for expert in w:
        expert.normal_(std=case.k**-0.5, generator=generator)
    if case.layout in ("uneven", "batched"):
        expert_of_row = torch.randint(case.experts, (total,), generator=generator, device=device)
        counts = torch.bincount(expert_of_row, minlength=case.experts)
    else:
        counts = torch.full((case.experts,), case.rows, device=device)
    if batched:
        if (most := int(counts.max())) > case.places:
            raise ValueError(f"capacity={case.places}: must be at least {most}, the most rows drawn for an expert")
        segments = batched_segments(counts.to(torch.int32), case.places)
    else:
        segments = standard_segments(torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32))
    index = torch.randperm(total, generator=generator, device=device).to(torch.int32) if gathered else None
    if case.scheme == "bf16":
        return Operands(x, w, segments, index, max_rows)
    return Operands(quantize_rows(x, case.scheme), quantize_weights(w, case.scheme), segments, index, max_rows)


def our_call(case: GroupedGemmCase, operands: Operands) -> Callable[[], tuple[Tensor, Tensor]]:
    """The op of this case; gives the result and its scales, empty ones where it has none."""
    index = operands.row_index
    rows = (*operands.segments, index, 1 if index is None else TOP_K, operands.max_rows)
    x, w = operands.rows, operands.weights
    none = operands.counts.new_empty(0)
    expected_m = case.rows if case.layout == "batched" else None  # else rows / experts, which is the same
    if isinstance(x, Tensor) and isinstance(w, Tensor):
        if case.layout == "swiglu":
            return lambda: grouped_gemm_act(x, w, None, *rows, None, *SWIGLU, False)
        return lambda: (grouped_gemm(x, w, None, *rows, False, expected_m), none)
    assert isinstance(x, QuantizedRows) and isinstance(w, QuantizedWeights)
    scaled = (x.values, x.scales, w.values, w.scales, None, *rows)
    if case.layout == "swiglu":
        again = case.scheme == "fp8_block"
        return lambda: scaled_grouped_gemm_act(*scaled, None, *SWIGLU, case.scheme, torch.bfloat16, again)
    return lambda: (scaled_grouped_gemm(*scaled, case.scheme, torch.bfloat16, expected_m), none)


def torch_call(case: GroupedGemmCase, operands: Operands) -> tuple[str, Callable[[], Tensor]] | None:
    """What torch has for this case and its name, or None: there is no grouped product with fp8 blocks in torch.

    It reads rows in expert order, so that gathered ones are copied there first, and activates in a pass of its own. Of
    the batched layout it multiplies all places; fp8 as the same numbers in bf16, for it has no batched product in fp8.
    """
    if case.layout == "batched":
        return _batched_product(case, operands)
    x, w, ends = operands.rows, operands.weights, operands.segments.row_end
    index = None if operands.row_index is None else operands.row_index.long() // TOP_K
    product: Callable[[], Tensor]
    if isinstance(x, Tensor) and isinstance(w, Tensor):
        name, columns = "torch_grouped_mm", w.transpose(1, 2)

        def product() -> Tensor:
            return F.grouped_mm(x if index is None else x[index], columns, offs=ends)

    elif case.scheme == "fp8_row" and ends.is_cuda:  # it has no kernel for a CPU
        assert isinstance(x, QuantizedRows) and isinstance(w, QuantizedWeights)
        name = "torch_scaled_grouped_mm"
        values, scales, weights, channels = x.values, x.scales.flatten(), w.values.transpose(1, 2), w.scales

        def product() -> Tensor:
            a, s = (
                (values, scales)
                if index is None
                else (values.view(torch.uint8)[index].view(values.dtype), scales[index])
            )
            return scaled_grouped_mm(a, weights, s, channels, ends)

    else:
        return None
    if case.layout != "swiglu":
        return name, product

    def activated() -> Tensor:
        gate, up = product().chunk(2, dim=-1)
        return F.silu(gate) * up

    return name, activated


def _batched_product(case: GroupedGemmCase, operands: Operands) -> tuple[str, Callable[[], Tensor]]:
    """`[E · C, N]` by one `torch.bmm` of rows `[E, C, D]`, used or not."""
    x, w = operands.rows, operands.weights
    name = "torch_bmm" if isinstance(x, Tensor) else "torch_bmm_bf16"
    x = dequantize_rows(x, torch.bfloat16) if isinstance(x, QuantizedRows) else x
    w = dequantize_weights(w, torch.bfloat16) if isinstance(w, QuantizedWeights) else w
    places, columns = x.view(case.experts, case.places, case.k), w.transpose(1, 2)
    return name, lambda: torch.bmm(places, columns).flatten(0, 1)


def scaled_grouped_mm(a: Tensor, columns: Tensor, row_scale: Tensor, channel_scale: Tensor, ends: Tensor) -> Tensor:
    """torch's grouped product of fp8 rows `[T, D]` and weights `[E, D, N]` with scales `[T]` and `[E, N]`, in bf16."""
    recipe = F.ScalingType.RowWise  # type: ignore[attr-defined]
    return F.scaled_grouped_mm(  # type: ignore[attr-defined]
        a, columns, row_scale, recipe, channel_scale, recipe, offs=ends, use_fast_accum=True
    )


def measure_grouped_gemm(case: GroupedGemmCase, session: Session) -> Record:
    """One record. `median_us`: a burst, of which each call has its own, after `idle` seconds of rest; for the cases of
    `is_sustained` also `sustained_us` and the peers' `sustained_peers`. FLOPs: 2·T·N·D. Floor: the larger of those at
    the scheme's ceiling and of all bytes read and written once at the memory's; of places only those in use count.
    `gb_s` is of weights that have rows.

    Raises:
        RuntimeError: the result and float64 disagree, or torch's and float64.
    """
    operands = make_operands(case, session.device)
    ours, theirs = our_call(case, operands), torch_call(case, operands)
    out, scales = ours()
    sample = _sample(operands)
    expected = _reference(case, operands, sample)
    requantized = scales.numel() > 0
    _check(case, _as_float(out, scales, sample), expected, "epmoe", "requantized" if requantized else case.scheme)
    calls: dict[str, Call] = {"epmoe": ours}
    if theirs is not None:
        calls[theirs[0]] = theirs[1]
        # activated in a pass of its own, it has rounded once more
        _check(
            case, theirs[1]()[sample].double(), expected, theirs[0], case.scheme, 2 if case.layout == "swiglu" else 1
        )

    weights = operands.weights
    w = weights.values if isinstance(weights, QuantizedWeights) else weights
    counts = operands.counts
    used, active = int(counts.sum()), int((counts > 0).sum())
    weight_bytes = active * case.n * case.k * w.element_size()
    x = operands.rows.values if isinstance(operands.rows, QuantizedRows) else operands.rows
    read = used if case.layout == "batched" else x.shape[0]
    moved = weight_bytes + read * case.k * x.element_size() + used * out.shape[1] * out.element_size()
    flops = 2 * used * case.n * case.k
    floor = max(session.ceilings.compute_us(flops, case.scheme), session.ceilings.memory_us(moved))
    del out, scales

    times = session.burst(calls)
    more: dict[str, Any] = {}
    if session.settings.sustained and is_sustained(case):
        sustained = session.sustain(calls, times)
        more["sustained_us"] = sustained.pop("epmoe")
        more["sustained_peers"] = {name: round(value, 2) for name, value in sustained.items()}
    ours_us = times.pop("epmoe")
    return make_record(
        "grouped_gemm",
        case.identity,
        median_us=ours_us,
        floor_us=floor,
        tflops=flops / ours_us * 1e-6,
        gb_s=weight_bytes / ours_us * 1e-3,
        peers=times,
        device=session.device,
        **more,
    )


def _sample(operands: Operands) -> Tensor:
    """Some rows of the first expert that has any and of the last, its very last row among them."""
    used = operands.counts.nonzero().flatten()
    picked = []
    for e in (int(used[0]), int(used[-1])):
        begin, end = (int(bound[e]) for bound in operands.segments)
        picked += sorted({begin, (begin + end) // 2, end - 1})
    return torch.tensor(sorted(set(picked)), device=used.device)


def _reference(case: GroupedGemmCase, operands: Operands, rows: Tensor) -> Tensor:
    """The result at `rows` in float64, of the numbers that the operands hold."""
    source = operands.source(rows)
    x = operands.rows
    if isinstance(x, QuantizedRows):
        values = x.values.view(torch.uint8)[source].view(x.values.dtype)
        a = dequantize_rows(QuantizedRows(values, x.scales[source], x.scheme), torch.float64)
    else:
        a = x[source].double()
    # of experts without rows, which begin where their neighbour does, the last one has it
    expert_of_row = torch.searchsorted(operands.segments.row_start, rows.to(torch.int32), right=True) - 1
    expected = []
    for row, e in zip(a, expert_of_row.tolist(), strict=True):
        w = operands.weights
        if isinstance(w, QuantizedWeights):
            scales = w.scales[e : e + 1]
            matrix = dequantize_weights(QuantizedWeights(w.values[e : e + 1], scales, w.scheme), torch.float64)[0]
        else:
            matrix = w[e].double()
        y = matrix @ row
        expected.append(apply_activation(y[None], *SWIGLU)[0] if case.layout == "swiglu" else y)
    return torch.stack(expected)


def _as_float(out: Tensor, scales: Tensor, rows: Tensor) -> Tensor:
    if not scales.numel():
        return out[rows].double()
    values = out.view(torch.uint8)[rows].view(out.dtype)
    return dequantize_rows(QuantizedRows(values, scales[rows], "fp8_block"), torch.float64)


def _check(case: GroupedGemmCase, got: Tensor, expected: Tensor, who: str, scheme: str, roundings: int = 1) -> None:
    error, limit = relative(got, expected), LIMITS[scheme] * roundings
    if not error <= limit:
        raise RuntimeError(f"{case}: {who} and float64 disagree, so nothing was timed: {error:.2e} > {limit:g}")
