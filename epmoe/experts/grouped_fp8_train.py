"""`grouped_fp8_train`: training whose forward products are in fp8. Weights stay wide masters, which are quantized anew
at every call; rows are multiplied as dispatch quantized them.

    x ── quantize (unless dispatch has) ── GEMM1 ── h ── activation ── quantize ── GEMM2 ── × router weight, sum
    backward in the rows' dtype, on what the products multiplied: rounded rows and rounded weights, made wide again

Backward takes each rounding for the identity. The activation enters it as it was before its rounding, from which it
differs by 2.6 %. Rows, pre-activation and the sort are all that is kept: 1 byte for each number of a row.

T rows, K experts per token, N (row, expert) pairs in expert order, H width, I intermediate size, L local experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from epmoe.dispatch.inputs import BatchedInput, ExpertInput
from epmoe.experts._mlp import Rows, mlp_backward
from epmoe.experts.base import Experts
from epmoe.experts.gradient_sums import PartSums
from epmoe.experts.grouped import _down_bias_backward
from epmoe.experts.spec import ExpertsSpec, ExpertWeights
from epmoe.ops._segments import standard_segments
from epmoe.ops.activation import apply_activation
from epmoe.ops.align import align_rows
from epmoe.ops.gather_sum import gather_sum
from epmoe.ops.quantize import quantize
from epmoe.ops.quantize_blocks import quantize_blocks, round_blocks
from epmoe.ops.scaled_gemm import scaled_grouped_gemm
from epmoe.quant.rows import QuantizedRows, dequantize_rows, quantize_rows

SCHEME = "fp8_block"


class _Fp8RoutedMLP(torch.autograd.Function):
    """h = x̂·ŵ1ᵀ (+ b1), y = q(act(h))·ŵ2ᵀ (+ b2), out[t] = Σ_k p[t,k]·y[slot[t,k]]; x̂ and ŵ are rounded."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        topk_weights: Tensor,
        w1: Tensor,
        w2: Tensor,
        b1: Tensor | None,
        b2: Tensor | None,
        topk_ids: Tensor,
        expert_map: Tensor,
        n: int,
        expected_m: int | None,
        spec: ExpertsSpec,
        quantized: QuantizedRows | None,
    ) -> Tensor:
        q = quantize_rows(x, SCHEME) if quantized is None else quantized
        row_index, offsets, slot = align_rows(topk_ids, expert_map, w1.shape[0], n)
        start, end = standard_segments(offsets)
        h = scaled_grouped_gemm(
            q.values, q.scales, *quantize_blocks(w1, SCHEME), b1, start, end, row_index, topk_ids.shape[1], n, SCHEME,
            spec.dtype, expected_m=expected_m,
        )  # fmt: skip
        act = spec.activation
        a, a_scale = quantize(apply_activation(h, act.name, act.alpha, act.limit), SCHEME, end[-1:], n)
        y = scaled_grouped_gemm(
            a, a_scale, *quantize_blocks(w2, SCHEME), b2, start, end, None, 1, n, SCHEME, spec.dtype,
            expected_m=expected_m,
        )  # fmt: skip
        ctx.save_for_backward(q.values, q.scales, topk_weights, w1, w2, b1, b2, h, row_index, offsets, slot)
        ctx.spec, ctx.expected_m = spec, expected_m
        return gather_sum(y, slot, topk_weights, spec.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        values, scales, p, w1, w2, b1, b2, h, row_index, offsets, slot = ctx.saved_tensors
        spec: ExpertsSpec = ctx.spec
        rows = Rows(*standard_segments(offsets), row_index, slot.shape[1], row_index.shape[0], ctx.expected_m)
        x = dequantize_rows(QuantizedRows(values, scales, SCHEME), spec.dtype)
        dout = dout.contiguous()
        grad = mlp_backward(
            dout, x, round_blocks(w1, SCHEME), round_blocks(w2, SCHEME), h, rows, slot, None, p.contiguous().view(-1),
            spec.activation, b1 is not None, False, PartSums(ctx, None),
        )  # fmt: skip
        dx = gather_sum(grad.rows, slot, None, spec.dtype)
        dp = torch.cat([grad.weight, grad.weight.new_zeros(1)])[slot]  # a slot of -1 takes the zero
        db2 = None
        if b2 is not None:
            db2, dp_bias = _down_bias_backward(dout, p, b2, slot, offsets)
            db2, dp = db2.to(b2.dtype), dp + dp_bias
        return dx, dp.to(p.dtype), grad.w1, grad.w2, grad.b1, db2, *[None] * 6


class GroupedFp8TrainExperts(Experts):
    """Grouped GEMMs in fp8 forward and in the rows' dtype backward on CUDA; on CPU the ops' torch twins. Asked for by
    name: `MoEConfig(experts="grouped_fp8_train", dispatch_scheme="fp8_block")`."""

    name = "grouped_fp8_train"
    row_schemes = (None, SCHEME)

    @classmethod
    def refusal(cls, spec: ExpertsSpec) -> str | None:
        if spec.dtype not in (torch.bfloat16, torch.float16):
            return (
                f"dtype={spec.dtype}: must be bfloat16 or float16; run under torch.autocast, or use experts='grouped'"
            )
        if spec.weight_on_input:
            return "router_weight_on_input: the fp8 product has no backward through it; use experts='grouped'"
        if spec.device.type == "cuda" and torch.cuda.get_device_capability(spec.device) < (8, 9):
            return f"{torch.cuda.get_device_name(spec.device)}: fp8 needs compute capability 8.9; use experts='grouped'"
        return None

    def takes_rows(self, scheme: str | None, layout: str, training: bool = False) -> bool:
        return scheme in self.row_schemes and layout == "standard"

    def apply(self, rows: ExpertInput | BatchedInput, weights: ExpertWeights) -> Tensor:
        assert isinstance(rows, ExpertInput)
        quantized, x = None, rows.x
        if rows.x_scale is not None and rows.scheme is not None:
            quantized = QuantizedRows(rows.x, rows.x_scale, rows.scheme)
            x = rows.x if rows.source is None else rows.source
        return _Fp8RoutedMLP.apply(
            x,
            rows.topk_weights,
            weights.gate_up_proj,
            weights.down_proj,
            weights.gate_up_bias,
            weights.down_bias,
            rows.topk_ids,
            rows.expert_map,
            rows.max_assignments,
            rows.expected_m,
            self.spec,
            quantized,
        )
