"""Gradients past a rounding: quantized rows count as the wide ones that they stand for.

Rounding to eight bits has a derivative of zero nearly everywhere, so backward takes it for the identity: the gradient
of values · scale is handed to the row that was quantized, as it is. Products see the rounded row in forward and in
their weights' gradients.

T rows, H their width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from epmoe.quant.rows import QuantizedRows, dequantize_rows, quantize_rows


class _Widen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, values: Tensor, scales: Tensor, scheme: str, dtype: torch.dtype) -> Tensor:
        ctx.dtype = source.dtype
        return dequantize_rows(QuantizedRows(values, scales, scheme), dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return grad.to(ctx.dtype), None, None, None, None


def widened(q: QuantizedRows, source: Tensor | None, dtype: torch.dtype) -> Tensor:
    """values · scale `[T, H]` of `dtype`, whose gradient goes to `source [T, H]`; None: to nobody."""
    if source is None:
        return dequantize_rows(q, dtype)
    return _Widen.apply(source, q.values, q.scales, q.scheme, dtype)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: str | None, backward: str | None) -> Tensor:
        ctx.scheme = backward
        return _round(x, forward) if forward is not None else x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad if ctx.scheme is None else _round(grad.contiguous(), ctx.scheme), None, None


def _round(x: Tensor, scheme: str) -> Tensor:
    return dequantize_rows(quantize_rows(x, scheme), x.dtype)


def rounded(x: Tensor, forward: str | None, backward: str | None) -> Tensor:
    """`x [T, H]` as it is after travelling in the scheme `forward`, and its gradient after `backward`: what a movement
    that stays in one process does to rows. None: as they are."""
    return x if forward is None and backward is None else _Rounded.apply(x, forward, backward)
