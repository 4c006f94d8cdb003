"""`grouped_int8`: the routed MLP on int8 weights by our kernels, without a backward, in either layout.

    x ── quantize (unless dispatch has) ── GEMM1, activation ── quantize ── GEMM2 ── × router weight, sum

Rows have a scale each, weights one for each output channel, and integers are summed exactly. A row's scale needs the
whole row: the activation leaves GEMM1 in the rows' dtype and a pass of its own quantizes it.
"""

from __future__ import annotations

import torch

from epmoe.experts._inference import ScaledPath
from epmoe.experts.base import Experts
from epmoe.experts.spec import ExpertsSpec


class GroupedInt8Experts(ScaledPath, Experts):
    """Grouped GEMMs on int8 rows and weights on CUDA; on CPU the ops' torch twins. Rows come in the spec's dtype, or
    quantized by the weights' scheme."""

    name = "grouped_int8"
    numbers = "int8"
    layouts = ("standard", "batched")
    row_schemes = (None, "int8_row")
    schemes = ("int8_row",)
    autograd = False
    cuda_graph = True
    batch_invariant = True

    @classmethod
    def refusal(cls, spec: ExpertsSpec) -> str | None:
        if spec.dtype not in (torch.bfloat16, torch.float16):
            return f"dtype={spec.dtype}: must be bfloat16 or float16"
        if spec.device.type == "cuda" and torch.cuda.get_device_capability(spec.device) < (8, 0):
            return f"{torch.cuda.get_device_name(spec.device)}: int8 needs compute capability 8.0"
        return None
