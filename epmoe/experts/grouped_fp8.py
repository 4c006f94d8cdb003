"""`grouped_fp8`: the routed MLP on fp8 weights by our kernels, without a backward, in either layout.

    x ── quantize (unless dispatch has) ── GEMM1, activation, its quantization ── GEMM2 ── × router weight, sum

With scales per block GEMM1's epilogue quantizes the activation, 128 columns at a time. A scale per row needs the whole
row, and scales that are powers of two another rounding: there the activation leaves GEMM1 in the rows' dtype and a pass
of its own quantizes it.
"""

from __future__ import annotations

import torch

from epmoe.experts._inference import ScaledPath
from epmoe.experts.base import Experts
from epmoe.experts.spec import ExpertsSpec
from epmoe.quant.weights import FP8_SCHEMES


class GroupedFp8Experts(ScaledPath, Experts):
    """Grouped GEMMs on fp8 rows and weights on CUDA; on CPU the ops' torch twins. Rows come in the spec's dtype, or
    quantized by the weights' scheme."""

    name = "grouped_fp8"
    numbers = "fp8"
    layouts = ("standard", "batched")
    row_schemes = (None, *FP8_SCHEMES)
    schemes = FP8_SCHEMES
    autograd = False
    cuda_graph = True
    batch_invariant = True

    @classmethod
    def refusal(cls, spec: ExpertsSpec) -> str | None:
        if spec.dtype not in (torch.bfloat16, torch.float16):
            return f"dtype={spec.dtype}: must be bfloat16 or float16"
        if spec.device.type == "cuda" and torch.cuda.get_device_capability(spec.device) < (8, 9):
            name = torch.cuda.get_device_name(spec.device)
            return f"{name}: fp8 needs compute capability 8.9; dequantize the weights"
        return None
