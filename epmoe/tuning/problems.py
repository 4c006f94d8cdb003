"""What `epmoe tune` measures: the grouped products of a model's experts on one rank, with the rows that routing brings.

    op                        N, K of a forward     with `train` also
    grouped_gemm_act          2I, H                                          GEMM1, rows found by index
    grouped_gemm              H, I                  I, H and H, 2I           GEMM2; the gradients of rows
    scaled_grouped_gemm(_act) as those                                       on fp8 or int8
    narrow_grouped_gemm(_act) as those                                       by narrow weights
    grouped_wgrad                                   2I, H and H, I           the gradients of weights

L experts of the rank, H hidden size, I expert intermediate size, T rows in all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from epmoe.bench.shapes import Shape
from epmoe.config import Activation
from epmoe.ops._configs import gemm_config, gemm_plan, wgrad_config
from epmoe.ops._few_rows_configs import few_rows_config, few_rows_plan
from epmoe.ops._gemm_gluon import gluon_plan
from epmoe.ops._narrow_configs import narrow_config, narrow_plan
from epmoe.ops._scaled_configs import scaled_config, scaled_plan
from epmoe.ops.grouped_gemm import grouped_gemm, grouped_gemm_act
from epmoe.ops.grouped_wgrad import grouped_wgrad
from epmoe.ops.narrow_formats import narrow_format
from epmoe.ops.narrow_gemm import narrow_grouped_gemm, narrow_grouped_gemm_act
from epmoe.ops.quantize import row_format
from epmoe.ops.scaled_gemm import SCALED_SCHEMES, scaled_grouped_gemm, scaled_grouped_gemm_act
from epmoe.quant import (
    NARROW_SCHEMES,
    NarrowWeights,
    QuantizedRows,
    QuantizedWeights,
    dequantize_rows,
    narrow_bytes,
    quantize_rows,
    weight_scale_shape,
)
from epmoe.tuning.store import load, lookup

SCHEMES = ("none", *SCALED_SCHEMES, *NARROW_SCHEMES)
DTYPE = torch.bfloat16
ROWS = (1, 4, 16, 64, 128, 256, 512, 1024, 4096)
TRAINED_ROWS = 64  # fewer per expert than this nobody trains with
MOST_ROWS = 1 << 18  # more than this no rank gets
CACHES = (load, lookup, gemm_plan, gluon_plan, few_rows_plan, scaled_plan, narrow_plan)  # they keep configurations

Weights = Tensor | QuantizedWeights | NarrowWeights
Result = tuple[Tensor, Tensor]
"""What an op gives, and its scales, or an empty tensor."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One product. `rows`: expected per expert. `transpose`: of the gradient of rows, whose weights are `[L, K, N]`."""

    op: str
    L: int
    N: int
    K: int
    scheme: str
    rows: int
    activation: Activation = Activation("swiglu")
    top_k: int = 8
    transpose: bool = False

    @property
    def narrow(self) -> bool:
        return self.scheme in NARROW_SCHEMES

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows."""
        return DTYPE if self.scheme == "none" or self.narrow else row_format(self.scheme).dtype

    @property
    def gated(self) -> bool:
        return self.op.endswith("_act") and self.activation.gated

    @property
    def saves(self) -> bool:
        """Whether training takes the same entry, and has the kernel save what it fed the activation."""
        return self.op == "grouped_gemm_act"

    @property
    def loads(self) -> tuple[int, ...]:
        """T of each load that it is measured with. Quantized, a row per expert is what one token has as well, whose
        experts get one row each and the others none; unquantized, a rule of its own decides that."""
        even = self.L * self.rows
        one = self.scheme != "none" and self.rows == 1 and self.L > self.top_k
        return (self.top_k, even) if one else (even,)

    @property
    def num_bytes(self) -> int:
        """Of device memory that its operands and results take, roughly."""
        size, rows, shape = self.dtype.itemsize, self.L * self.rows, (self.L, self.N, self.K)
        weights = narrow_bytes(shape, self.scheme) if self.narrow else math.prod(shape) * size
        return weights + rows * (self.N + 2 * self.K) * max(size, 2)

    def as_key(self) -> dict[str, Any]:
        """The fields of an entry that say what it is for."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {"L": self.L, "N": self.N, "K": self.K, "dtype": dtype, "scheme": self.scheme, "rows": self.rows}


def problems_of(shape: Shape, ranks: int, schemes: Sequence[str], rows: Sequence[int], train: bool) -> list[Problem]:
    """All products of a rank's share of a model's experts, with up to `MOST_ROWS` rows in all.

    Raises:
        ValueError: an unknown scheme, or ranks that do not divide the experts.
    """
    for scheme in schemes:
        if scheme not in SCHEMES:
            raise ValueError(f"scheme={scheme!r}: must be one of {', '.join(SCHEMES)}")
    if shape.num_experts % ranks:
        raise ValueError(f"ranks={ranks}: must divide the {shape.num_experts} experts of {shape.name}")
    local, h, i = shape.num_experts // ranks, shape.hidden_size, shape.intermediate_size
    gate_up, act, top_k = shape.gate_up_size, shape.activation, shape.top_k
    one = "grouped_gemm_act" if act.gated else "grouped_gemm"
    made = []
    for scheme in schemes:
        prefix = "" if scheme == "none" else "narrow_" if scheme in NARROW_SCHEMES else "scaled_"
        for m in (m for m in rows if local * m <= MOST_ROWS):
            made.append(Problem(prefix + one, local, gate_up, h, scheme, m, act, top_k))
            made.append(Problem(f"{prefix}grouped_gemm", local, h, i, scheme, m, act, top_k))
            if train and scheme == "none" and m >= TRAINED_ROWS:
                made.append(Problem("grouped_gemm", local, i, h, scheme, m, act, top_k, transpose=True))
                made.append(Problem("grouped_gemm", local, h, gate_up, scheme, m, act, top_k, transpose=True))
                made.append(Problem("grouped_wgrad", local, gate_up, h, scheme, m, act, top_k))
                made.append(Problem("grouped_wgrad", local, h, i, scheme, m, act, top_k))
    # Files don't tell transposed weights from plain ones: where H = I the gradient of rows takes the forward's entry.
    entries: dict[tuple[object, ...], Problem] = {}
    for p in made:
        entries.setdefault((p.op, p.L, p.N, p.K, p.scheme, p.rows), p)
    return list(entries.values())


def rule(problem: Problem, device: torch.device) -> Any:
    """The configuration that the rules in `ops/` choose where nothing is tuned."""
    L, n, k, rows = problem.L, problem.N, problem.K, problem.rows
    if problem.op == "grouped_wgrad":
        return wgrad_config(device, problem.dtype, rows, n, k, False)
    if problem.narrow:
        return narrow_config(device, problem.scheme, rows, n, k, problem.gated)
    if problem.scheme != "none":
        gathered = problem.op.endswith("_act")
        return scaled_config(device, problem.scheme == "fp8_block", rows, n, k, problem.gated, gathered)
    few = few_rows_config(device, rows, L, n, k, problem.gated, problem.transpose)
    return few or gemm_config(device, problem.dtype, rows, n, k, problem.gated)


def make_weights(problem: Problem, device: torch.device) -> Weights | None:
    """Random weights of its shape; None where it multiplies none."""
    if problem.op == "grouped_wgrad":
        return None
    L, n, k = problem.L, problem.N, problem.K
    generator = torch.Generator(device).manual_seed(0)
    if problem.narrow:
        return _narrow_weights(problem, generator, device)
    if problem.dtype == torch.int8:
        codes = torch.randint(-127, 128, (L, n, k), generator=generator, device=device, dtype=torch.int8)
        scale = torch.rand(L, n, generator=generator, device=device) + 0.5
        return QuantizedWeights(codes, scale * (k**-0.5 / 64), problem.scheme)
    w = torch.empty((L, k, n) if problem.transpose else (L, n, k), dtype=problem.dtype, device=device)
    for expert in w:
        expert.copy_(torch.randn(expert.shape, generator=generator, device=device) * k**-0.5)
    if problem.scheme == "none":
        return w
    scales = torch.rand(weight_scale_shape((L, n, k), problem.scheme), generator=generator, device=device)
    return QuantizedWeights(w, scales + 0.5, problem.scheme)


def _narrow_weights(problem: Problem, generator: torch.Generator, device: torch.device) -> NarrowWeights:
    """Any byte is a number, or several, of every format; scales are near each other."""
    L, n, k = problem.L, problem.N, problem.K
    form = narrow_format(problem.scheme)
    size, dtype = (L, n, form.bytes_per_row(k)), form.scale_dtypes[0]
    values = torch.randint(0, 256, size, generator=generator, device=device, dtype=torch.uint8).view(form.dtype)
    near = torch.rand(L, form.groups(k), n, generator=generator, device=device) + 0.5
    largest = {"int8": 127.0, "int4": 7.0, "fp4": 6.0, "e2m3": 7.5, "e3m2": 28.0}[form.kind]
    wanted = 2 * k**-0.5 / largest
    outer = torch.full((L, n), wanted, device=device) if form.outer else None
    if dtype == torch.uint8:  # exponents
        scales = (near * 4).to(torch.uint8) + (125 + math.floor(math.log2(wanted)))
    else:
        scales = (near if form.outer else near * wanted).to(dtype)
    return NarrowWeights(values, scales, problem.scheme, k, None, outer)


def make_call(
    problem: Problem, weights: Weights | None, total: int, device: torch.device, *, saving: bool = False
) -> Callable[[], Result]:
    """The op on `total` random rows: as many as L · rows go to experts drawn uniformly, fewer to one expert each.

    saving: a GEMM1 that `saves` keeps what backward needs of it, of rows in expert order, as training asks; no other
    call wants more shared memory.
    """
    generator = torch.Generator(device).manual_seed(total)
    L, n, k, top_k = problem.L, problem.N, problem.K, problem.top_k
    if total < L * problem.rows:
        experts = torch.randperm(L, generator=generator, device=device)[:total]
    else:
        experts = torch.randint(L, (total,), generator=generator, device=device)
    offsets = torch.zeros(L + 1, dtype=torch.int32, device=device)
    offsets[1:] = torch.bincount(experts, minlength=L).cumsum(0)
    segments = (offsets[:-1], offsets[1:])
    none = offsets.new_empty(0, dtype=torch.float32)

    def normal(rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, generator=generator, device=device, dtype=DTYPE)

    if problem.op == "grouped_wgrad":
        dy, x = normal(total, n), normal(total, k)

        def gradient() -> Result:
            dw, _ = grouped_wgrad(dy, x, *segments, None, 1, None, 1, None, None, False, DTYPE, expected_m=problem.rows)
            return dw, none

        return gradient
    first = problem.op.endswith("_act")
    gathered = first and not saving
    index = torch.randperm(total, generator=generator, device=device).to(torch.int32) if gathered else None
    x = normal(-(-total // top_k) if gathered else total, k)
    rows = (*segments, index, top_k if gathered else 1, total)
    act = (problem.activation.name, problem.activation.alpha, problem.activation.limit)
    expected = problem.rows
    if isinstance(weights, Tensor):
        w = weights
        if first:
            return lambda: (grouped_gemm_act(x, w, None, *rows, None, *act, saving, expected)[0], none)
        return lambda: (grouped_gemm(x, w, None, *rows, problem.transpose, expected), none)
    if isinstance(weights, NarrowWeights):
        narrow = (x, weights.values, weights.scales, weights.zeros, weights.outer, None, *rows)
        if first:
            return lambda: (narrow_grouped_gemm_act(*narrow, None, *act, weights.scheme, expected), none)
        return lambda: (narrow_grouped_gemm(*narrow, weights.scheme, expected), none)
    assert isinstance(weights, QuantizedWeights)
    scheme, q = problem.scheme, quantize_rows(x, problem.scheme)
    scaled = (q.values, q.scales, weights.values, weights.scales, None, *rows)
    if first:
        again = scheme == "fp8_block"
        return lambda: scaled_grouped_gemm_act(*scaled, None, *act, scheme, DTYPE, again, expected)
    return lambda: (scaled_grouped_gemm(*scaled, scheme, DTYPE, expected), none)


def sampled(result: Result, count: int = 256) -> Tensor:
    """Some rows of a result (of weights' gradients: of its experts'), evenly spread, first and last among them."""
    out, scales = result
    flat = out.flatten(0, -2)
    picked = torch.linspace(0, flat.shape[0] - 1, min(count, flat.shape[0]), device=out.device).long()
    if not scales.numel():
        return flat[picked].double()
    values = flat.view(torch.uint8)[picked].view(out.dtype)
    return dequantize_rows(QuantizedRows(values, scales[picked], "fp8_block"), torch.float64)
