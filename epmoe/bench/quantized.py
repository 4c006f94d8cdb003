"""Bench `quantized`: the routed MLP of one GPU on weights of every scheme, where decoding is the time that their bytes
take and prefill that of the products.

    epmoe's  sort ─ (quantize x) ─ GEMM1, activation (quantized) ─ GEMM2 ─ weighted sum
    peers    the same by torch: `grouped_mm` on what the weights hold in bf16, `scaled_grouped_mm` with a scale per row
             and channel beside fp8, `_int_mm` one expert after the other beside int8

M tokens, K experts per token, H width, I expert width, E experts, all of them here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from epmoe.bench import problem as problems
from epmoe.bench.fp8_mlp import PEER_SCHEME, torch_fp8_forward
from epmoe.bench.problem import OUTCOMES, Forward, Problem
from epmoe.bench.records import Record, make_record
from epmoe.bench.session import Session
from epmoe.dispatch import make_dispatcher
from epmoe.experts import QUANTIZED_EXPERTS, ExpertsSpec, ExpertWeights, select_experts
from epmoe.kernel import MoEKernel
from epmoe.ops.align import align_rows
from epmoe.ops.gather_sum import gather_sum
from epmoe.ops.quantize import quantize
from epmoe.quant import (
    NARROW_SCHEMES,
    NarrowWeights,
    QuantizedWeights,
    dequantize_narrow,
    dequantize_weights,
    quantize_weights,
)
from epmoe.quant.formats import FIELDS, FORMATS, OUTER, SCALE, ZERO, weight_format

SCHEMES = (
    "fp8_block", "fp8_row", "int8_row", "int4_g128", "int8_channel", "mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "nvfp4",
)  # fmt: skip
SHAPES = ("qwen3-30b", "deepseek-v3-ep8", "gpt-oss-120b", "mixtral")
TOKENS = (1, 4, 16, 64, 4096)
GROUPED_PEER = "torch_grouped_mm (bf16)"
FP8_PEER = f"torch_scaled_grouped_mm ({PEER_SCHEME})"
INT8_PEER = "torch_int_mm (int8_row)"
INT_MM_ROWS = 17  # that `_int_mm` asks for at least
# relative L2 to float64 of the weights as they are held: what rounding the rows costs, or one rounding to bf16
OUTPUT_LIMITS = {"fp8": 0.07, "int8_row": 0.03}


@dataclasses.dataclass(frozen=True)
class QuantizedCase:
    """`scheme` of the weights, one of `quant.formats.FORMATS`; rows are multiplied in the scheme that goes with it. On
    CUDA timed as a CUDA graph's replay."""

    scheme: str
    shape: str
    tokens: int
    experts: str = "auto"
    routing: str = "uniform"

    def __post_init__(self) -> None:
        problems.check_names(self.shape, self.routing, experts=self.experts)
        if self.scheme not in FORMATS:
            raise ValueError(f"scheme={self.scheme!r}: must be one of {', '.join(FORMATS)}")
        if self.experts not in ("auto", *QUANTIZED_EXPERTS):
            raise ValueError(f"experts={self.experts!r}: must be auto, {', '.join(QUANTIZED_EXPERTS)}")
        if self.tokens < 1:
            raise ValueError(f"tokens={self.tokens}: must be at least 1")


def standard_cases() -> list[QuantizedCase]:
    """Every scheme at every shape, few tokens and many. In the order in which shapes share the experts drawn."""
    return [QuantizedCase(scheme, shape, m) for shape in SHAPES for m in TOKENS for scheme in SCHEMES]


def measure_quantized(case: QuantizedCase, session: Session) -> Record:
    """One record. FLOPs: 6·M·K·H·I. `gb_s`: bytes of values, scales and zero points of the experts that got rows, over
    the time. Floor: the larger of those bytes at the memory's ceiling and of the FLOPs at that of the products, which
    are in bf16 where weights are widened. No call finds its weights in the L2 cache; few tokens are timed as a graph of
    several calls, each by other experts (`Problem.in_a_row`).

    Raises:
        RuntimeError: epmoe and float64, or a peer and float64, disagree.
    """
    assert session.ep.num_ranks == 1, "nothing moves here"
    problem = session.problem(case.shape, case.tokens, case.routing)
    weights, held = _quantized(problem, case.scheme)
    problem = dataclasses.replace(problem, weights=held)
    shape, device = problem.shape, session.device
    spec = ExpertsSpec(
        shape.activation, shape.hidden_size, shape.intermediate_size, problem.x.dtype, device, scheme=case.scheme
    )
    kernel = MoEKernel(
        make_dispatcher("local", None, problem.placement, device, layer="bench"),
        select_experts(spec, case.experts).experts,
    )
    forwards: dict[str, Forward] = {"epmoe": lambda x, ids, p, *_: kernel(x, ids, p, weights).routed}
    forwards |= _peers(case, problem)
    calls = {name: problem.call(forward, "infer") for name, forward in forwards.items()}
    ours = calls["epmoe"]()
    limit = next((limit for name, limit in OUTPUT_LIMITS.items() if case.scheme.startswith(name)), 0.0)
    problems.check_reference(ours, problem, limit or problems.OUTPUT_LIMIT)
    for name in list(calls)[1:]:
        theirs = calls[name]()
        # each of the two is that far from what float64 gives
        both = (limit or problems.OUTPUT_LIMIT) + max(OUTPUT_LIMITS.values())
        problems.check_agreement(ours, theirs, OUTCOMES[:1], name, session.ep, both)
        del theirs
    del ours

    read = bytes_read(weights, int(problem.topk_ids.unique().numel()))
    flops = shape.flops(case.tokens, "infer")
    # the tensor cores take int8 as fast as fp8
    products = "bf16" if case.scheme in NARROW_SCHEMES else "fp8_row"
    times = session.time_in_a_row(problem, forwards)
    ours_us = times.pop("epmoe")
    return make_record(
        "quantized",
        dataclasses.asdict(dataclasses.replace(case, experts=kernel.experts.name)),
        median_us=ours_us,
        floor_us=max(session.ceilings.compute_us(flops, products), session.ceilings.memory_us(read)),
        tflops=flops / ours_us * 1e-6,
        gb_s=read / ours_us * 1e-3,
        peers=times,
        device=device,
    )


def bytes_read(weights: ExpertWeights, active: int) -> int:
    """Of values, scales, zero points and second scales of so many experts."""
    parts = [t for t in vars(weights).values() if isinstance(t, Tensor)]
    return active * sum(t[0].numel() * t.element_size() for t in parts)


def _quantized(problem: Problem, scheme: str) -> tuple[ExpertWeights, ExpertWeights]:
    """The problem's weights in `scheme`, and what these hold in the rows' dtype."""
    fields: dict[str, Any] = {}
    held: list[Tensor] = []
    for name in ("gate_up", "down"):
        wide = getattr(problem.weights, f"{name}_proj").detach()
        parts = weight_format(scheme).quantize(wide, False)
        held.append(_widened(parts, scheme, wide))
        fields |= {f"{name}_{FIELDS[suffix] if suffix else 'proj'}": part for suffix, part in parts.items()}
    return ExpertWeights(**fields), ExpertWeights(held[0], held[1])


def _widened(parts: Mapping[str, Tensor], scheme: str, wide: Tensor) -> Tensor:
    """One projection, an expert at a time, since all of them in float32 would take much memory."""
    out = torch.empty_like(wide)
    for e in range(wide.shape[0]):
        one = {suffix: part[e : e + 1] for suffix, part in parts.items()}
        values, scale = one[""], one[SCALE]
        if scheme in NARROW_SCHEMES:
            narrow = NarrowWeights(values, scale, scheme, wide.shape[2], one.get(ZERO), one.get(OUTER))
            out[e] = dequantize_narrow(narrow, wide.dtype)[0]
        else:
            out[e] = dequantize_weights(QuantizedWeights(values, scale, scheme), wide.dtype)[0]
    return out.requires_grad_()


def _peers(case: QuantizedCase, problem: Problem) -> dict[str, Forward]:
    """What torch has; without a kernel for a CPU where it has none."""
    peers: dict[str, Forward] = {}
    if problem.shape.activation.name != "swiglu":
        return peers
    peers[GROUPED_PEER] = problem.kernel("local", "torch_grouped")[1]
    if case.scheme.startswith("fp8") and problem.x.is_cuda:
        peers[FP8_PEER] = torch_fp8_forward(problem)
    if case.scheme == "int8_row":
        counts = problem.topk_ids.flatten().long().bincount(minlength=problem.shape.num_experts).tolist()
        if all(n >= INT_MM_ROWS for n in counts):
            peers[INT8_PEER] = _int_mm_forward(problem, counts)
    return peers


def _int_mm_forward(problem: Problem, counts: list[int]) -> Forward:
    """One `_int_mm` for each expert, whose rows are known on the host; SwiGLU."""
    w1, w2 = (quantize_weights(w.detach(), "int8_row") for w in problem.leaves[2:])
    experts = problem.shape.num_experts
    everyone = torch.arange(experts, dtype=torch.int32, device=problem.x.device)

    def product(rows: Tensor, weights: QuantizedWeights) -> Tensor:
        values, scales = quantize(rows, "int8_row")
        parts = [torch._int_mm(v, weights.values[e].t()) for e, v in enumerate(values.split(counts))]
        channels = [scale.expand(n, -1) for n, scale in zip(counts, weights.scales, strict=True)]
        return (torch.cat(parts) * scales * torch.cat(channels)).to(rows.dtype)

    def forward(x: Tensor, ids: Tensor, p: Tensor, *_: Tensor) -> Tensor:
        index, _offsets, slot = align_rows(ids, everyone, experts, ids.numel())
        gate, up = product(x[index // ids.shape[1]], w1).chunk(2, dim=-1)
        return gather_sum(product(F.silu(gate) * up, w2), slot, p, x.dtype)

    return forward
