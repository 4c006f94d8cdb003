"""The router's product: logits as if x and weight were raised to a wider dtype first, without copies of them that wide.

Tensor cores multiply two numbers of half precision exactly and add the products in fp32, so on CUDA x and weight stay
as they are. On the path of a token: before the first step, `ops.route`.

x `[M, H]`, weight `[E, H]`, logits `[M, E]`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

_HALVES = (torch.bfloat16, torch.float16)


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x · weightᵀ + bias, all raised to `dtype` first; differentiable, gradients in the dtypes of the arguments.

    Args:
        x: `[M, H]`; weight: `[E, H]`; bias: `[E]` or None; floating, of any dtypes.
        dtype: of the product and of the result, `torch.float32` or `torch.float64`.

    Returns:
        `[M, E]` in `dtype`.
    """
    wide_bias = None if bias is None else bias.to(dtype)
    if not _stays_narrow(x, weight, dtype):
        return F.linear(x.to(dtype), weight.to(dtype), wide_bias)
    logits: Tensor = _NarrowProduct.apply(x, weight)
    return logits if wide_bias is None else logits + wide_bias


def _stays_narrow(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    fits = x.is_cuda and dtype == torch.float32 and x.dtype == weight.dtype and x.dtype in _HALVES
    plain = type(x) is Tensor and type(weight) in (Tensor, nn.Parameter)
    return fits and plain and not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


class _NarrowProduct(torch.autograd.Function):
    """The fp32 product of halves. Keeps x as it came; the gradients are products in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogits: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        dx = (dlogits @ weight.float()).to(x.dtype) if ctx.needs_input_grad[0] else None
        dweight = (dlogits.t() @ x.float()).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return dx, dweight
