"""`batched`: the expert MLP by our Triton kernels on the batched-experts layout, where dispatch has already put each
expert's rows together: no sort, no gather, and no weighting or sum, which combine does.

Counts are read on the device, so that a CUDA graph may hold all of it. Rows past an expert's count are neither read nor
written, forward or backward, except that the gradients of such rows of x are set to 0: they influence nothing, and
whatever stands upstream (a dispatcher that never looks at them, an indexing that adds them up) is right with zeros.

L local experts, C places for each, H width, I intermediate size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from epmoe.comm.workspace import Workspace
from epmoe.dispatch.inputs import BatchedInput, ExpertInput
from epmoe.dispatch.reduce import ExpertOutput, WeightAndReduce
from epmoe.experts._mlp import (
    Rows,
    kernel_refusal,
    may_use_workspace,
    mlp_backward,
    mlp_forward,
    mlp_infer,
    mlp_workspace_shapes,
)
from epmoe.experts.base import Experts
from epmoe.experts.gradient_sums import GradientSums, PartSums
from epmoe.experts.spec import ExpertsSpec, ExpertWeights, WorkspaceShapes
from epmoe.ops._segments import batched_segments
from epmoe.ops.gather_dot import gather_dot
from epmoe.ops.gather_sum import gather_sum


class _BatchedMLP(torch.autograd.Function):
    """y[l, c] = act(x[l, c]·w1[l]ᵀ + b1[l])·w2[l]ᵀ + b2[l] for c < expert_num_tokens[l]; with p, of p[l, c]·x[l, c].

    Backward: `mlp_backward` per row; with p on the input, dp = ⟨x, dh·w1⟩ and dx = p·dh·w1.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        p: Tensor | None,
        w1: Tensor,
        w2: Tensor,
        b1: Tensor | None,
        b2: Tensor | None,
        expert_num_tokens: Tensor,
        expected_m: int | None,
        spec: ExpertsSpec,
        sums: GradientSums | None,
    ) -> Tensor:
        num_local, capacity, width = x.shape
        n = num_local * capacity
        rows = Rows(*batched_segments(expert_num_tokens, capacity), None, 1, n, expected_m)
        weight_in = None if p is None else p.contiguous().view(n)
        save = any(ctx.needs_input_grad)
        y, h = mlp_forward(x.reshape(n, width), w1, w2, b1, b2, rows, weight_in, spec.activation, save)
        if save:
            ctx.save_for_backward(x, p, w1, w2, b1, b2, h, rows.row_start, rows.row_end, expert_num_tokens)
            ctx.expected_m, ctx.spec, ctx.sums = expected_m, spec, sums
        return y.view(num_local, capacity, width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, p, w1, w2, b1, b2, h, row_start, row_end, counts = ctx.saved_tensors
        num_local, capacity, width = x.shape
        n = num_local * capacity
        rows = Rows(row_start, row_end, None, 1, n, ctx.expected_m)
        weight_in = None if p is None else p.contiguous().view(n)
        flat_x, dy = x.reshape(n, width), dy.contiguous().view(n, width)
        with_bias, sums = (b1 is not None, b2 is not None), PartSums(ctx, ctx.sums)
        grad = mlp_backward(dy, flat_x, w1, w2, h, rows, None, weight_in, None, ctx.spec.activation, *with_bias, sums)

        padding = torch.arange(capacity, device=x.device) >= counts[:, None]  # [L, C]
        if p is None:
            dx, dp = grad.rows.view(x.shape).masked_fill_(padding[:, :, None], 0), None
        else:
            own = torch.arange(n, dtype=torch.int32, device=x.device).masked_fill_(padding.view(n), -1)[:, None]
            dx = gather_sum(grad.rows, own, p.contiguous().view(n, 1), x.dtype).view(x.shape)
            dp = gather_dot(flat_x, grad.rows, own).view(p.shape).to(p.dtype)
        return dx, dp, grad.w1, grad.w2, grad.b1, grad.b2, *[None] * 4


class BatchedExperts(Experts):
    """Triton grouped GEMMs over `[L, C, H]` on CUDA; on CPU the ops' torch twins, the same composition of the same
    steps."""

    name = "batched"
    layouts = ("batched",)
    cuda_graph = True
    sums_gradients = True
    batch_invariant = True

    @classmethod
    def refusal(cls, spec: ExpertsSpec) -> str | None:
        return kernel_refusal(spec)

    def apply(self, rows: ExpertInput | BatchedInput, weights: ExpertWeights) -> Tensor:
        assert isinstance(rows, BatchedInput)
        return _BatchedMLP.apply(
            rows.x,
            rows.topk_weights if self.spec.weight_on_input else None,
            weights.gate_up_proj,
            weights.down_proj,
            weights.gate_up_bias,
            weights.down_bias,
            rows.expert_num_tokens,
            self.expected_rows(rows),
            self.spec,
            weights.sums,
        )

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
        assert isinstance(rows, BatchedInput)
        if not may_use_workspace(workspace, rows.x):
            return super().output(rows, weights, delegate=delegate, workspace=workspace)
        assert workspace is not None
        self.check(rows, weights)
        num_local, capacity, width = rows.x.shape
        n = num_local * capacity
        y, a = workspace.take(self.workspace_shapes(n, n)[:2])
        segments = Rows(*batched_segments(rows.expert_num_tokens, capacity), None, 1, n, self.expected_rows(rows))
        p = rows.topk_weights
        on_input = p.contiguous().view(n) if self.spec.weight_on_input and p is not None else None
        mlp_infer(rows.x.reshape(n, width), weights, segments, on_input, self.spec.activation, y, a)
        strategy: WeightAndReduce = "delegate" if delegate else "batched"
        return ExpertOutput(y.view(num_local, capacity, width), strategy, rows.slot, rows.slot_weights)
