"""`grouped`: the routed MLP by our Triton kernels: sort by expert, GEMM1 with bias and activation, GEMM2, reduce.

The forward gathers rows by index where they lie, the backward copies them into expert order first; only what backward
needs is kept: the rows, the pre-activation and the sort. The gradient of the router weight falls out of the
activation's backward, without a GEMM.

T rows, K experts per token, N (row, expert) pairs in expert order, H width, I intermediate size, L local experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from epmoe.comm.workspace import Workspace
from epmoe.dispatch.inputs import BatchedInput, ExpertInput
from epmoe.dispatch.reduce import ExpertOutput
from epmoe.experts._lora_mlp import lora_routed_mlp
from epmoe.experts._mlp import (
    Rows,
    kernel_refusal,
    may_use_workspace,
    mlp_backward,
    mlp_forward,
    mlp_workspace_shapes,
)
from epmoe.experts.base import Experts
from epmoe.experts.gradient_sums import GradientSums, PartSums, summed_by_autograd
from epmoe.experts.spec import ExpertsSpec, ExpertWeights, WorkspaceShapes
from epmoe.ops._segments import standard_segments
from epmoe.ops.align import align_rows
from epmoe.ops.gather_dot import gather_dot
from epmoe.ops.gather_sum import gather_sum
from epmoe.ops.routed_rows import routed_rows, routed_rows_into
from epmoe.quant.rows import QuantizedRows, dequantize_rows


class _RoutedMLP(torch.autograd.Function):
    """h = x·w1ᵀ (+ b1), a = act(h), y = a·w2ᵀ (+ b2), out[t] = Σ_k p[t,k]·y[slot[t,k]] (or p on x, before w1).

    Backward: `mlp_backward` per pair, dx the sum of a row's K gradients, dp with ⟨dout, b2⟩ added.
    """

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
        max_assignments: int,
        expected_m: int | None,
        spec: ExpertsSpec,
        sums: GradientSums | None,
        quantized: QuantizedRows | None,
    ) -> Tensor:
        """`quantized`: the rows that x stands for, where they came so. They are kept as they are: backward makes them
        wide again for the gradient of w1."""
        source = x
        if quantized is not None:
            x = dequantize_rows(quantized, x.dtype)
        on_input = topk_weights.contiguous().view(-1) if spec.weight_on_input else None
        if any(ctx.needs_input_grad):
            row_index, offsets, slot = align_rows(topk_ids, expert_map, w1.shape[0], max_assignments)
            rows = Rows(*standard_segments(offsets), row_index, topk_ids.shape[1], max_assignments, expected_m)
            y, h = mlp_forward(x, w1, w2, b1, b2, rows, on_input, spec.activation, True)
            kept = (x, None) if quantized is None else (quantized.values, quantized.scales)
            ctx.save_for_backward(*kept, topk_weights, w1, w2, b1, b2, h, row_index, offsets, slot)
            ctx.scheme, ctx.dtype = None if quantized is None else quantized.scheme, source.dtype
            ctx.spec, ctx.expected_m, ctx.sums = spec, expected_m, sums
        else:
            act = (spec.activation.name, spec.activation.alpha, spec.activation.limit)
            y, slot = routed_rows(
                x, w1, b1, w2, b2, topk_ids, expert_map, max_assignments, on_input, *act, expected_m=expected_m
            )
        return gather_sum(y, slot, None if spec.weight_on_input else topk_weights, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, scales, p, w1, w2, b1, b2, h, row_index, offsets, slot = ctx.saved_tensors
        if ctx.scheme is not None:
            x = dequantize_rows(QuantizedRows(x, scales, ctx.scheme), ctx.dtype)
        spec: ExpertsSpec = ctx.spec
        rows = Rows(*standard_segments(offsets), row_index, slot.shape[1], row_index.shape[0], ctx.expected_m)
        flat = p.contiguous().view(-1)  # [T, 1] views of messages reshape to strided ones
        dout = dout.contiguous()
        on_input = spec.weight_on_input
        weight_in, weight_out = (flat, None) if on_input else (None, flat)
        sums = PartSums(ctx, ctx.sums)
        grad = mlp_backward(
            dout, x, w1, w2, h, rows, slot, weight_in, weight_out, spec.activation, b1 is not None, False, sums
        )
        dx = gather_sum(grad.rows, slot, p if on_input else None, x.dtype)
        if on_input:
            dp = gather_dot(x, grad.rows, slot)
        else:
            dp = torch.cat([grad.weight, grad.weight.new_zeros(1)])[slot]  # a slot of -1 takes the zero
        db2 = None
        if b2 is not None:
            db2, dp_bias = _down_bias_backward(dout, None if on_input else p, b2, slot, offsets)
            db2 = sums.give("down_bias", db2, b2.dtype)
            dp = dp if on_input else dp + dp_bias
        return dx, dp.to(p.dtype), grad.w1, grad.w2, grad.b1, db2, *[None] * 7


def _down_bias_backward(
    dout: Tensor, p: Tensor | None, b2: Tensor, slot: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """`(db2 [L, H], dp [T, K])` of Σ_k p[t,k]·b2[expert(t,k)], by and in the precision of two thin matrix products."""
    experts = b2.shape[0]
    expert = torch.searchsorted(offsets[1:], slot, right=True).clamp_max(experts - 1)  # [T, K] of each pair
    taken = slot >= 0
    precise = torch.promote_types(dout.dtype, torch.float32)
    coefficient = torch.where(taken, torch.ones_like(slot, dtype=precise) if p is None else p.to(precise), 0)
    table = dout.new_zeros((dout.shape[0], experts), dtype=precise).scatter_add(1, expert, coefficient)  # [T, L]
    dout = torch.where(taken.any(1, keepdim=True), dout, 0).to(precise)  # rows that nobody sent may hold anything
    dp = torch.where(taken, (dout @ b2.to(precise).t()).gather(1, expert), 0)
    return table.t() @ dout, dp


class GroupedExperts(Experts):
    """Triton grouped GEMMs on CUDA; on CPU the ops' torch twins, the same composition of the same steps."""

    name = "grouped"
    cuda_graph = True
    lora = True
    sums_gradients = True
    batch_invariant = True

    @classmethod
    def refusal(cls, spec: ExpertsSpec) -> str | None:
        return kernel_refusal(spec)

    def apply(self, rows: ExpertInput | BatchedInput, weights: ExpertWeights) -> Tensor:
        assert isinstance(rows, ExpertInput)
        if weights.lora is not None and rows.adapter_ids is not None:
            return lora_routed_mlp(rows.dequantized(self.spec.dtype), summed_by_autograd(weights), self.spec)
        quantized = None
        if rows.x_scale is not None and rows.scheme is not None:
            quantized = QuantizedRows(rows.x, rows.x_scale, rows.scheme)
        return _RoutedMLP.apply(
            rows.x if quantized is None else rows.source,
            rows.topk_weights,
            weights.gate_up_proj,
            weights.down_proj,
            weights.gate_up_bias,
            weights.down_bias,
            rows.topk_ids,
            rows.expert_map,
            rows.max_assignments,
            self.expected_rows(rows),
            self.spec,
            weights.sums,
            quantized,
        )

    def takes_rows(self, scheme: str | None, layout: str, training: bool = False) -> bool:
        return super().takes_rows(scheme, layout) or (training and layout == "standard")

    def workspace_shapes(self, num_rows: int, num_pairs: int) -> WorkspaceShapes:
        return mlp_workspace_shapes(self.spec, num_rows, num_pairs)

    def output(
        self,
        rows: ExpertInput | BatchedInput,
        weights: ExpertWeights,
        *,
        delegate: bool = False,
        workspace: Workspace | None = None,
    ) -> ExpertOutput:
        """`no_op` with a gradient, since weight and sum are part of one backward; else combine does both."""
        assert isinstance(rows, ExpertInput)
        if not may_use_workspace(workspace, rows.x) or rows.adapter_ids is not None:
            return super().output(rows, weights, delegate=delegate, workspace=workspace)
        assert workspace is not None
        self.check(rows, weights)
        num_rows, spec = rows.max_assignments, self.spec
        y, a = workspace.take(self.workspace_shapes(rows.x.shape[0], num_rows)[:2])
        on_input = rows.topk_weights.contiguous().view(-1) if spec.weight_on_input else None
        slot = routed_rows_into(
            y,
            a,
            rows.x,
            weights.gate_up_proj,
            weights.gate_up_bias,
            weights.down_proj,
            weights.down_bias,
            rows.topk_ids,
            rows.expert_map,
            on_input,
            spec.activation.name,
            spec.activation.alpha,
            spec.activation.limit,
            expected_m=self.expected_rows(rows),
        )
        p = None if spec.weight_on_input else rows.topk_weights
        return ExpertOutput(y, "delegate" if delegate else "contiguous", slot, p)
