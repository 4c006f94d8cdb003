"""`grouped`: the routed MLP by our Triton kernels: sort by expert, GEMM1 with bias and activation, GEMM2, reduce.

Rows are gathered by index where they lie, forward and backward; only what backward needs is kept: the rows, the
pre-activation and the sort. The gradient of the router weight falls out of the activation's backward, without a GEMM.

T rows, K experts per token, N (row, expert) pairs in expert order, H width, I intermediate size, L local experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from epmoe.config import DTYPES
from epmoe.dispatch.base import ExpertInput
from epmoe.experts.base import Experts, ExpertsSpec, ExpertWeights
from epmoe.experts.reduce import weight_and_reduce
from epmoe.ops.activation import activation_backward
from epmoe.ops.align import align_rows
from epmoe.ops.gather_dot import gather_dot
from epmoe.ops.gather_sum import gather_sum
from epmoe.ops.grouped_gemm import grouped_gemm, grouped_gemm_act
from epmoe.ops.grouped_wgrad import grouped_wgrad


class _RoutedMLP(torch.autograd.Function):
    """h = x·w1ᵀ (+ b1), a = act(h), y = a·w2ᵀ (+ b2), out[t] = Σ_k p[t,k]·y[slot[t,k]] (or p on x, before w1).

    Backward, with g = dout·w2 per pair: dp = ⟨g, a⟩ (+ ⟨dout, b2⟩), dh = act'(h) ⊙ p·g, dw2 = Σ dout ⊗ p·a,
    dx = Σ_k dh·w1, dw1 = Σ dh ⊗ x.
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
        spec: ExpertsSpec,
    ) -> Tensor:
        activation = (spec.activation.name, spec.activation.alpha, spec.activation.limit)
        k = topk_ids.shape[1]
        row_index, offsets, slot = align_rows(topk_ids, expert_map, w1.shape[0], max_assignments)
        on_input = topk_weights.contiguous().view(-1) if spec.weight_on_input else None
        save = any(ctx.needs_input_grad)
        a, h = grouped_gemm_act(
            x, w1, b1, offsets, row_index, k, max_assignments, on_input, *activation, save_preact=save
        )
        y = grouped_gemm(a, w2, b2, offsets, None, 1, max_assignments, False)
        if save:
            ctx.save_for_backward(x, topk_weights, w1, w2, b1, b2, h, row_index, offsets, slot)
            ctx.spec = spec
        return weight_and_reduce(y, slot, None if spec.weight_on_input else topk_weights, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, p, w1, w2, b1, b2, h, row_index, offsets, slot = ctx.saved_tensors
        spec: ExpertsSpec = ctx.spec
        activation = (spec.activation.name, spec.activation.alpha, spec.activation.limit)
        pairs, k = row_index.shape[0], slot.shape[1]
        flat = p.contiguous().view(-1)  # [T, 1] views of messages reshape to strided ones
        on_input = spec.weight_on_input
        dout = dout.contiguous()

        g = grouped_gemm(dout, w2, None, offsets, row_index, k, pairs, True)
        dh, weighted_a, dp_rows = activation_backward(h, g, offsets, row_index, None if on_input else flat, *activation)
        dw2, _ = grouped_wgrad(dout, weighted_a, offsets, row_index, k, None, 1, None, None, False, w2.dtype)
        dx_rows = grouped_gemm(dh, w1, None, offsets, None, 1, pairs, True)
        dx = gather_sum(dx_rows, slot, p if on_input else None, x.dtype)
        scale = (flat, row_index) if on_input else (None, None)
        dw1, db1 = grouped_wgrad(dh, x, offsets, None, 1, row_index, k, *scale, b1 is not None, w1.dtype)

        if on_input:
            dp = gather_dot(x, dx_rows, slot)
        else:
            dp = torch.cat([dp_rows, dp_rows.new_zeros(1)])[slot]  # a slot of -1 takes the zero
        db2 = None
        if b2 is not None:
            db2, dp_bias = _down_bias_backward(dout, None if on_input else p, b2, slot, offsets)
            dp = dp if on_input else dp + dp_bias
        return dx, dp.to(p.dtype), dw1, dw2, db1 if b1 is not None else None, db2, None, None, None, None


def _down_bias_backward(
    dout: Tensor, p: Tensor | None, b2: Tensor, slot: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """`(db2 [L, H], dp [T, K])` of Σ_k p[t,k]·b2[expert(t,k)], by two thin matrix products in the sums' precision."""
    experts = b2.shape[0]
    expert = torch.searchsorted(offsets[1:], slot, right=True).clamp_max(experts - 1)  # [T, K] of each pair
    taken = slot >= 0
    precise = torch.promote_types(dout.dtype, torch.float32)
    coefficient = torch.where(taken, torch.ones_like(slot, dtype=precise) if p is None else p.to(precise), 0)
    table = dout.new_zeros((dout.shape[0], experts), dtype=precise).scatter_add(1, expert, coefficient)  # [T, L]
    dout = dout.to(precise)
    dp = torch.where(taken, (dout @ b2.to(precise).t()).gather(1, expert), 0)
    return (table.t() @ dout).to(b2.dtype), dp


class GroupedExperts(Experts):
    """Triton grouped GEMMs on CUDA; on CPU the ops' torch twins, the same composition of the same steps."""

    name = "grouped"
    cuda_graph = True

    @classmethod
    def refusal(cls, spec: ExpertsSpec) -> str | None:
        dtypes = DTYPES if spec.device.type == "cpu" else (torch.float32, torch.float16, torch.bfloat16)
        if spec.dtype not in dtypes:
            return f"dtype={spec.dtype} on {spec.device.type}: must be one of {', '.join(map(str, dtypes))}"
        if spec.device.type == "cuda" and torch.cuda.get_device_capability(spec.device) < (8, 0):
            return f"{torch.cuda.get_device_name(spec.device)}: Triton's bf16 kernels need compute capability 8.0"
        return None

    def apply(self, rows: ExpertInput, weights: ExpertWeights) -> Tensor:
        return _RoutedMLP.apply(
            rows.x,
            rows.topk_weights,
            weights.gate_up_proj,
            weights.down_proj,
            weights.gate_up_bias,
            weights.down_bias,
            rows.topk_ids,
            rows.expert_map,
            rows.max_assignments,
            self.spec,
        )
