"""`grouped_fp8`: the routed MLP on fp8 weights by our kernels, without a backward, in either layout.

    x ── quantize (unless dispatch has) ── GEMM1, activation, its quantization ── GEMM2 ── × router weight, sum

With scales per block GEMM1's epilogue quantizes the activation, 128 columns at a time. A scale per row needs the whole
row: there the activation leaves GEMM1 in the rows' dtype and a pass of its own quantizes it.

T rows, K experts per token, N (row, expert) pairs in expert order or places of the batched layout, H width, I
intermediate size, L local experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epmoe.comm.workspace import Workspace
from epmoe.dispatch.base import BatchedInput, ExpertInput
from epmoe.dispatch.reduce import ExpertOutput, WeightAndReduce
from epmoe.experts._mlp import Rows
from epmoe.experts.base import Experts, ExpertsSpec, ExpertWeights
from epmoe.ops._segments import batched_segments, standard_segments
from epmoe.ops.align import align_rows
from epmoe.ops.gather_sum import gather_sum
from epmoe.ops.quantize import quantize
from epmoe.ops.scaled_gemm import SCALED_SCHEMES, scaled_grouped_gemm, scaled_grouped_gemm_act


class GroupedFp8Experts(Experts):
    """Grouped GEMMs on fp8 rows and weights on CUDA; on CPU the ops' torch twins. Rows come in the spec's dtype, or
    quantized by the weights' scheme."""

    name = "grouped_fp8"
    layouts = ("standard", "batched")
    row_schemes = (None, *SCALED_SCHEMES)
    schemes = SCALED_SCHEMES
    autograd = False
    cuda_graph = True

    @classmethod
    def refusal(cls, spec: ExpertsSpec) -> str | None:
        if spec.dtype not in (torch.bfloat16, torch.float16):
            return f"dtype={spec.dtype}: must be bfloat16 or float16"
        if spec.device.type == "cuda" and torch.cuda.get_device_capability(spec.device) < (8, 9):
            name = torch.cuda.get_device_name(spec.device)
            return f"{name}: fp8 needs compute capability 8.9; dequantize the weights"
        return None

    def apply(self, rows: ExpertInput | BatchedInput, weights: ExpertWeights) -> Tensor:
        self._refuse_gradients(rows, weights)
        if isinstance(rows, BatchedInput):
            return self._batched(rows, weights)
        y, slot = self._pairs(rows, weights)
        return gather_sum(y, slot, None if self.spec.weight_on_input else rows.topk_weights, self.spec.dtype)

    def output(
        self,
        rows: ExpertInput | BatchedInput,
        weights: ExpertWeights,
        *,
        delegate: bool = False,
        workspace: Workspace | None = None,
    ) -> ExpertOutput:
        """Combine weights and sums."""
        self.check(rows, weights)
        self._refuse_gradients(rows, weights)
        strategy: WeightAndReduce = "delegate" if delegate else "contiguous"
        if isinstance(rows, BatchedInput):
            strategy = "delegate" if delegate else "batched"
            return ExpertOutput(self._batched(rows, weights), strategy, rows.slot, rows.slot_weights)
        y, slot = self._pairs(rows, weights)
        return ExpertOutput(y, strategy, slot, None if self.spec.weight_on_input else rows.topk_weights)

    def _pairs(self, rows: ExpertInput, weights: ExpertWeights) -> tuple[Tensor, Tensor]:
        """`y [N, H]`, one row per pair, and the `slot [T, K]` of each."""
        n = rows.max_assignments
        row_index, offsets, slot = align_rows(rows.topk_ids, rows.expert_map, rows.num_local, n)
        segments = Rows(*standard_segments(offsets), row_index, slot.shape[1], n, rows.expected_m)
        on_input = rows.topk_weights.contiguous().view(-1) if self.spec.weight_on_input else None
        return self._mlp(rows.x, rows.x_scale, weights, segments, n, on_input), slot

    def _batched(self, rows: BatchedInput, weights: ExpertWeights) -> Tensor:
        num_local, capacity, width = rows.x.shape
        n = num_local * capacity
        segments = Rows(*batched_segments(rows.expert_num_tokens, capacity), None, 1, n, rows.expected_m)
        p = rows.topk_weights
        on_input = p.contiguous().view(n) if self.spec.weight_on_input and p is not None else None
        x = rows.x.reshape(n, width)
        return self._mlp(x, None, weights, segments, capacity, on_input).view(num_local, capacity, width)

    def _mlp(
        self, x: Tensor, x_scale: Tensor | None, weights: ExpertWeights, rows: Rows, span: int, weight_in: Tensor | None
    ) -> Tensor:
        """y = act(s·x·w1ᵀ + b1)·w2ᵀ + b2 `[N, H]` for each row of a segment; segments lie in spans of `span` rows."""
        spec, scheme = self.spec, self.spec.scheme
        assert scheme is not None
        w1, w2, s1, s2 = weights.gate_up_proj, weights.down_proj, weights.gate_up_scale, weights.down_scale
        assert s1 is not None and s2 is not None
        start, end, index, divisor, n, expected_m = rows
        last = end[-1:] if span == n else end
        if x_scale is None:  # of rows in their places only those of a segment: the others may hold anything
            x, x_scale = quantize(x, scheme) if index is not None else quantize(x, scheme, last, span)
        act = (spec.activation.name, spec.activation.alpha, spec.activation.limit)
        fused = scheme == "fp8_block"
        a, a_scale = scaled_grouped_gemm_act(
            x, x_scale, w1, s1, weights.gate_up_bias, start, end, index, divisor, n, weight_in, *act, scheme,
            spec.dtype, fused, expected_m=expected_m,
        )  # fmt: skip
        if not fused:
            a, a_scale = quantize(a, scheme, last, span)
        return scaled_grouped_gemm(
            a, a_scale, w2, s2, weights.down_bias, start, end, None, 1, n, scheme, spec.dtype, expected_m=expected_m
        )

    def _refuse_gradients(self, rows: ExpertInput | BatchedInput, weights: ExpertWeights) -> None:
        if not torch.is_grad_enabled():
            return
        named = {
            "x": rows.x,
            "topk_weights": rows.topk_weights,
            "gate_up_bias": weights.gate_up_bias,
            "down_bias": weights.down_bias,
        }
        asked = [name for name, tensor in named.items() if tensor is not None and tensor.requires_grad]
        if asked:
            raise ValueError(
                f"experts={self.name!r}: {asked[0]} needs a gradient and fp8 experts have no backward: run under "
                "torch.no_grad(), or train with weights that are not quantized"
            )
