"""`torch_grouped`: the routed MLP by `torch.nn.functional.grouped_mm`, with our permutation and reduction around it.

`grouped_mm` leaves rows past its last offset unwritten, forward and backward, so what lies there is replaced before any
arithmetic could spread it.

T rows, K experts per token, N (row, expert) pairs in expert order, L local experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from epmoe.comm.workspace import Workspace
from epmoe.dispatch.inputs import BatchedInput, ExpertInput
from epmoe.dispatch.reduce import ExpertOutput, weight_and_reduce
from epmoe.experts.base import Experts
from epmoe.experts.gradient_sums import summed_by_autograd
from epmoe.experts.spec import ExpertsSpec, ExpertWeights
from epmoe.ops.activation import apply_activation
from epmoe.ops.align import align_rows
from epmoe.ops.gather_sum import gather_sum


class _Permute(torch.autograd.Function):
    """Rows in expert order; its backward sums each row's K gradients in a fixed order, which index_select's would
    not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, row_index: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(slot)
        return x[row_index.clamp_min(0) // slot.shape[1]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slot,) = ctx.saved_tensors
        return gather_sum(grad.contiguous(), slot, None, grad.dtype), None, None


class TorchGroupedExperts(Experts):
    """Grouped GEMMs by torch (CUTLASS on Hopper); sizes that are multiples of 16 bytes only."""

    name = "torch_grouped"
    weight_and_reduce = {"standard": "contiguous"}

    @classmethod
    def refusal(cls, spec: ExpertsSpec) -> str | None:
        if not hasattr(F, "grouped_mm"):
            return f"torch {torch.__version__} has no torch.nn.functional.grouped_mm: install torch >= 2.11"
        if spec.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"dtype={spec.dtype}: must be bfloat16, float16 or float32"
        for name, width in (("hidden_size", spec.hidden_size), ("intermediate_size", spec.intermediate_size)):
            if width * spec.dtype.itemsize % 16:
                return (
                    f"{name}={width} makes rows of {width * spec.dtype.itemsize} bytes and grouped_mm needs multiples "
                    "of 16: use experts='grouped' or 'reference'"
                )
        return None

    def output(
        self,
        rows: ExpertInput | BatchedInput,
        weights: ExpertWeights,
        *,
        delegate: bool = False,
        workspace: Workspace | None = None,
    ) -> ExpertOutput:
        self.check(rows, weights)
        assert isinstance(rows, ExpertInput)
        y, slot = self._pairs(rows, summed_by_autograd(weights))
        p = None if self.spec.weight_on_input else rows.topk_weights
        return ExpertOutput(y, "delegate" if delegate else "contiguous", slot, p)

    def apply(self, rows: ExpertInput | BatchedInput, weights: ExpertWeights) -> Tensor:
        return weight_and_reduce(self.output(rows, weights))

    def _pairs(self, rows: ExpertInput, weights: ExpertWeights) -> tuple[Tensor, Tensor]:
        """One row per (row, expert) pair `[N, H]`, in expert order, and the `slot [T, K]` of each pair."""
        activation = self.spec.activation
        row_index, offsets, slot = align_rows(rows.topk_ids, rows.expert_map, rows.num_local, rows.max_assignments)
        if rows.max_assignments == 0:  # grouped_mm takes no empty operands; keep every input in the graph
            inputs = (rows.topk_weights, weights.gate_up_proj, weights.down_proj)
            biases = (b for b in (weights.gate_up_bias, weights.down_bias) if b is not None)
            none = sum((tensor.sum() * 0).to(rows.x.dtype) for tensor in (*inputs, *biases))
            return rows.x.new_zeros(0, rows.x.shape[1]) + (rows.x.sum() * 0 + none), slot
        ends = offsets[1:]
        position = torch.arange(rows.max_assignments, dtype=torch.int32, device=rows.x.device)
        real = (position < ends[-1])[:, None]
        expert = torch.searchsorted(ends, position, right=True).clamp_max(rows.num_local - 1)

        wide = torch.promote_types(rows.x.dtype, torch.float32)
        x = _Permute.apply(rows.x, row_index, slot)
        if self.spec.weight_on_input:
            scale = rows.topk_weights.reshape(-1, 1)[row_index.clamp_min(0)]
            x = torch.where(real, (x * scale).to(x.dtype), 0)  # also stops the tail's gradient short of `scale`
        h = F.grouped_mm(x, weights.gate_up_proj.transpose(1, 2), offs=ends)
        h = torch.where(real, h, 0)
        # Biases are looked up in float32, in which autograd then adds the gradients of their rows up.
        if weights.gate_up_bias is not None:
            h = h + weights.gate_up_bias.to(wide)[expert].to(h.dtype)
        h = apply_activation(h, activation.name, activation.alpha, activation.limit)
        y = F.grouped_mm(torch.where(real, h, 0), weights.down_proj.transpose(1, 2), offs=ends)
        if weights.down_bias is not None:
            y = torch.where(real, y, 0) + weights.down_bias.to(wide)[expert].to(y.dtype)
        return y, slot
