"""What bench `routed_mlp` needs for fp8: weights that are what fp8 holds, and a peer by torch's `scaled_grouped_mm`.

    epmoe's  sort ─ quantize x [M,H] ─ GEMM1, activation, quantized again in its epilogue ─ GEMM2 ─ weighted sum
    torch's  sort ─ copy rows [N,H] ─ quantize ─ GEMM1 ─ silu · up ─ quantize ─ GEMM2 ─ weighted sum

epmoe's has scales per 128 columns and block (`fp8_block`), torch's per row and channel: it has no other on Hopper.

M tokens, K experts per token, N = M·K pairs, H width, I expert width, E experts, all of them here.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional as F

from epmoe.bench.grouped_gemm import scaled_grouped_mm
from epmoe.bench.problem import Forward, Problem
from epmoe.experts import ExpertWeights
from epmoe.ops.align import align_rows
from epmoe.ops.gather_sum import gather_sum
from epmoe.ops.quantize import quantize
from epmoe.quant import QuantizedWeights, dequantize_weights, quantize_weights

SCHEME, PEER_SCHEME = "fp8_block", "fp8_row"


def on_fp8_weights(problem: Problem) -> Problem:
    """`problem` with its weights rounded to what `fp8_block` holds, so that float64 multiplies the same ones."""
    w1, w2 = (_rounded(q, problem.x.dtype).requires_grad_() for q in _quantized(problem, SCHEME))
    return dataclasses.replace(problem, weights=ExpertWeights(w1, w2))


def _rounded(q: QuantizedWeights, dtype: torch.dtype) -> Tensor:
    """What `q` holds, one expert after the other, since all of them in float32 would take much memory."""
    out = torch.empty_like(q.values, dtype=dtype)
    for e, expert in enumerate(out):
        one = QuantizedWeights(q.values[e : e + 1], q.scales[e : e + 1], q.scheme)
        expert.copy_(dequantize_weights(one, dtype)[0])
    return out


def torch_fp8_forward(problem: Problem) -> Forward:
    """The peer, its weights quantized once and for all with a scale per channel; SwiGLU only."""
    assert problem.shape.activation.name == "swiglu"
    w1, w2 = _quantized(problem, PEER_SCHEME)
    experts = problem.shape.num_experts
    everyone = torch.arange(experts, dtype=torch.int32, device=problem.x.device)

    def product(rows: Tensor, weights: QuantizedWeights, ends: Tensor) -> Tensor:
        values, scales = quantize(rows, PEER_SCHEME)
        return scaled_grouped_mm(values, weights.values.transpose(1, 2), scales.flatten(), weights.scales, ends)

    def forward(x: Tensor, ids: Tensor, p: Tensor, *_: Tensor) -> Tensor:
        index, offsets, slot = align_rows(ids, everyone, experts, ids.numel())
        gate, up = product(x[index // ids.shape[1]], w1, offsets[1:]).chunk(2, dim=-1)
        return gather_sum(product(F.silu(gate) * up, w2, offsets[1:]), slot, p, x.dtype)

    return forward


def _quantized(problem: Problem, scheme: str) -> tuple[QuantizedWeights, QuantizedWeights]:
    weights = problem.weights
    return quantize_weights(weights.gate_up_proj, scheme), quantize_weights(weights.down_proj, scheme)
