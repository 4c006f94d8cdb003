"""Every format that expert weights can be held in, by scheme: which tensors they become, and how they are made.

What `quantize_`, `MoELayer` and checkpoints agree on. A weight `name` becomes the parameters `name` (values) and
`name` + suffix: scales have the suffix `_scale_inv`, as released fp8 checkpoints name what values are multiplied by;
zero points `_zero`, second scales `_outer`. What the numbers mean: `quant/weights.py`, `quant/narrow.py`.

L experts, N output channels (2I for gate and up rows together), K what is summed over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epmoe.ops.narrow_formats import narrow_format
from epmoe.ops.quantize import row_format
from epmoe.ops.quantize_blocks import BLOCK
from epmoe.quant.narrow import NARROW_SCHEMES, NarrowWeights, quantize_narrow
from epmoe.quant.weights import (
    WEIGHT_SCHEMES,
    QuantizedWeights,
    dequantize_weights,
    quantize_weights,
    scheme_block_mismatch,
    weight_scale_shape,
)

Shape = tuple[int, ...]
SCALE, ZERO, OUTER = "_scale_inv", "_zero", "_outer"
SCALE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""Of scales of integers, by `QuantConfig.scale_dtype`."""
SCALE_DTYPE = "bfloat16"
"""What None stands for there."""
FIELDS = {SCALE: "scale", ZERO: "zero", OUTER: "outer"}
"""The part of an `ExpertWeights` field's name that stands for a suffix: `gate_up_proj_scale_inv` is `gate_up_scale`."""


class WeightFormat(NamedTuple):
    """Attributes:
    rows: the scheme of rows that its products multiply, None where the weights are widened instead.
    zeros: it may have zero points.
    parts: shape and dtype of each tensor of weights `[L, N, K]`, by suffix; the values have none. With zero points or
        not.
    quantize: those tensors of wide weights `[L, N, K]`. With zero points or not.
    """

    rows: str | None
    zeros: bool
    parts: Callable[[tuple[int, int, int], bool], dict[str, tuple[Shape, torch.dtype]]]
    quantize: Callable[[Tensor, bool], dict[str, Tensor]]


def _scaled_parts(
    scheme: str, shape: tuple[int, int, int], zeros: bool, block: tuple[int, int] = BLOCK
) -> dict[str, tuple[Shape, torch.dtype]]:
    return {"": (shape, row_format(scheme).dtype), SCALE: (weight_scale_shape(shape, scheme, block), torch.float32)}


def _scaled(scheme: str, w: Tensor, zeros: bool, block: tuple[int, int] = BLOCK) -> dict[str, Tensor]:
    return parts_of(quantize_weights(w, scheme, block))


def _narrow_parts(
    scheme: str, shape: tuple[int, int, int], zeros: bool, scale_dtype: torch.dtype | None = None
) -> dict[str, tuple[Shape, torch.dtype]]:
    form, (num_local, n, k) = narrow_format(scheme), shape
    per_group = (num_local, form.groups(k), n)
    parts = {
        "": ((num_local, n, form.bytes_per_row(k)), form.dtype),
        SCALE: (per_group, scale_dtype or form.scale_dtypes[0]),
    }
    parts |= {ZERO: (per_group, torch.int8)} if zeros else {}
    return parts | ({OUTER: ((num_local, n), torch.float32)} if form.outer else {})


def _narrow(scheme: str, w: Tensor, zeros: bool, scale_dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    return parts_of(quantize_narrow(w, scheme, zeros=zeros, scale_dtype=scale_dtype))


def parts_of(weights: QuantizedWeights | NarrowWeights) -> dict[str, Tensor]:
    """The tensors of quantized weights by suffix: `{name + suffix: part}` is what `MoELayer.load_experts` takes."""
    parts = {"": weights.values, SCALE: weights.scales}
    if isinstance(weights, NarrowWeights):
        more = {ZERO: weights.zeros, OUTER: weights.outer}
        parts |= {suffix: part for suffix, part in more.items() if part is not None}
    return parts


def _format(rows: str | None, zeros: bool, parts: Callable[..., Any], make: Callable[..., Any], scheme: str) -> Any:
    return WeightFormat(rows, zeros, functools.partial(parts, scheme), functools.partial(make, scheme))


FORMATS: Mapping[str, WeightFormat] = {
    scheme: _format(scheme, False, _scaled_parts, _scaled, scheme) for scheme in WEIGHT_SCHEMES
} | {scheme: _format(None, narrow_format(scheme).zeros, _narrow_parts, _narrow, scheme) for scheme in NARROW_SCHEMES}
"""Each format by the name of its scheme, with blocks of 128 × 128 where it has blocks."""


def scale_dtype_mismatch(scheme: str | None, scale_dtype: str | None) -> str | None:
    """Why weights of `scheme` can't have scales of `scale_dtype`; None: they can."""
    if scale_dtype is None or (scheme in NARROW_SCHEMES and FORMATS[scheme].zeros and scale_dtype in SCALE_DTYPES):
        return None
    able = ", ".join(scheme for scheme, form in FORMATS.items() if form.zeros)
    return f"must be None, or {', '.join(SCALE_DTYPES)} with weights in one of {able}"


def weight_format(scheme: str, block: tuple[int, int] = BLOCK, scale_dtype: str | None = None) -> WeightFormat:
    """The format of `scheme`, with a scale for each `block` of rows and columns, of integer schemes in `scale_dtype`.

    Raises:
        ValueError: there is none of that name, or it has no such blocks or scales.
    """
    if scheme not in FORMATS:
        raise ValueError(f"scheme={scheme!r}: must be one of {', '.join(FORMATS)}")
    form = FORMATS[scheme]
    if (reason := scheme_block_mismatch(scheme, block)) is not None:
        raise ValueError(f"block={block!r} with scheme={scheme!r}: {reason}")
    if (reason := scale_dtype_mismatch(scheme, scale_dtype)) is not None:
        raise ValueError(f"scale_dtype={scale_dtype!r} with scheme={scheme!r}: {reason}")
    if scale_dtype is not None:
        dtype = SCALE_DTYPES[scale_dtype]
        parts = functools.partial(_narrow_parts, scheme, scale_dtype=dtype)
        return form._replace(parts=parts, quantize=functools.partial(_narrow, scheme, scale_dtype=dtype))
    if block == BLOCK:
        return form
    parts, make = functools.partial(_scaled_parts, scheme, block=block), functools.partial(_scaled, scheme, block=block)
    return form._replace(parts=parts, quantize=make)


def join_gate_up(gate: QuantizedWeights, up: QuantizedWeights) -> QuantizedWeights:
    """w1 `[L, 2I, H]` of a checkpoint's gate and up projections `[L, I, H]`, without widening them.

    Values and scales are those of the checkpoint, to the bit, where I is a multiple of the rows of a scale block (or
    scales are per channel). Elsewhere one block of w1 holds the last gates and the first up projections, and every
    block of the up projections lies across two: blocks that do not keep their rows are rounded again, an error of at
    most half a step of e4m3 more.

    Raises:
        ValueError: the two differ in scheme, block or shape.
    """
    if (gate.scheme, gate.block, gate.values.shape) != (up.scheme, up.block, up.values.shape):
        kinds = [f"{part.scheme} {tuple(part.values.shape)} by blocks of {part.block}" for part in (gate, up)]
        raise ValueError(f"gate is {kinds[0]}, up {kinds[1]}: must be alike")
    scheme, block, rows = gate.scheme, gate.block, gate.values.shape[1]
    values = torch.cat([gate.values.view(torch.uint8), up.values.view(torch.uint8)], 1).view(gate.values.dtype)
    scales = torch.cat([gate.scales, up.scales], 1)
    if not row_format(scheme).group or rows % block[0] == 0:
        return QuantizedWeights(values, scales, scheme, block)
    wide = torch.cat([dequantize_weights(part, torch.float32) for part in (gate, up)], 1)
    again = quantize_weights(wide, scheme, block)
    kept = rows // block[0]  # blocks of gates alone, which keep their scales and values
    again.values.view(torch.uint8)[:, : kept * block[0]] = values.view(torch.uint8)[:, : kept * block[0]]
    again.scales[:, :kept] = scales[:, :kept]
    return again
