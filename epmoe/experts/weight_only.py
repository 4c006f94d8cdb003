"""`weight_only`: the routed MLP on rows that are not quantized and narrow weights (4 or 8 bits, `quant/narrow.py`), by
our kernels, without a backward, in either layout.

    x ── GEMM1 (w1 widened tile by tile), activation ── GEMM2 ── × router weight, sum

N (row, expert) pairs in expert order or places of the batched layout, H width, I intermediate size, L local experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epmoe.comm.workspace import Workspace
from epmoe.experts._inference import InferencePath
from epmoe.experts._mlp import Rows, mlp_workspace_shapes
from epmoe.experts.base import Experts
from epmoe.experts.spec import ExpertsSpec, ExpertWeights, WorkspaceShapes
from epmoe.ops.narrow_gemm import (
    ROW_DTYPES,
    narrow_grouped_gemm,
    narrow_grouped_gemm_act,
    narrow_grouped_gemm_act_into,
    narrow_grouped_gemm_into,
)
from epmoe.quant.narrow import NARROW_SCHEMES


class WeightOnlyExperts(InferencePath, Experts):
    """Grouped GEMMs on narrow weights on CUDA; on CPU the ops' torch twins."""

    name = "weight_only"
    numbers = "narrow"
    layouts = ("standard", "batched")
    schemes = NARROW_SCHEMES
    autograd = False
    cuda_graph = True
    batch_invariant = True

    @classmethod
    def refusal(cls, spec: ExpertsSpec) -> str | None:
        if spec.dtype not in ROW_DTYPES:
            return f"dtype={spec.dtype}: must be bfloat16 or float16"
        if spec.device.type == "cuda" and torch.cuda.get_device_capability(spec.device) < (8, 0):
            return f"{torch.cuda.get_device_name(spec.device)}: widening needs compute capability 8.0"
        return None

    def workspace_shapes(self, num_rows: int, num_pairs: int) -> WorkspaceShapes:
        return mlp_workspace_shapes(self.spec, num_rows, num_pairs)

    def _mlp(
        self,
        x: Tensor,
        x_scale: Tensor | None,
        weights: ExpertWeights,
        rows: Rows,
        span: int,
        weight_in: Tensor | None,
        space: Workspace | None = None,
    ) -> Tensor:
        scheme, activation = self.spec.scheme, self.spec.activation
        s1, s2 = weights.gate_up_scale, weights.down_scale
        assert scheme is not None and s1 is not None and s2 is not None and x_scale is None
        start, end, index, divisor, n, expected_m = rows
        w1 = (weights.gate_up_proj, s1, weights.gate_up_zero, weights.gate_up_outer, weights.gate_up_bias)
        w2 = (weights.down_proj, s2, weights.down_zero, weights.down_outer, weights.down_bias)
        act = (activation.name, activation.alpha, activation.limit)
        if space is None:
            a = narrow_grouped_gemm_act(
                x, *w1, start, end, index, divisor, n, weight_in, *act, scheme, expected_m=expected_m
            )
            return narrow_grouped_gemm(a, *w2, start, end, None, 1, n, scheme, expected_m=expected_m)
        y, a = space.take(self.workspace_shapes(x.shape[0], n)[:2])
        narrow_grouped_gemm_act_into(a, x, *w1, start, end, index, divisor, weight_in, *act, scheme, expected_m)
        narrow_grouped_gemm_into(y, a, *w2, start, end, None, 1, scheme, expected_m)
        return y
