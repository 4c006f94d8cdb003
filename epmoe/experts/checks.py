"""What `Experts` refuse: weights and rows that do not fit the problem they were made for, each with what would fit.

L local experts, H width, I expert intermediate size, C places for each expert in the batched layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epmoe.dispatch.inputs import BatchedInput
from epmoe.experts.spec import ExpertsSpec, ExpertWeights
from epmoe.ops.quantize import row_format
from epmoe.ops.quantize_blocks import BLOCK
from epmoe.quant import WEIGHT_SCHEMES, row_dtype, weight_scale_shape
from epmoe.quant.narrow import NARROW_SCHEMES, narrow_mismatch


def check_weights(where: str, spec: ExpertsSpec, weights: ExpertWeights, num_local: int, device: torch.device) -> None:
    """Raises `ValueError`, whose message begins with `where`, for weights that do not fit the spec and each other."""
    h, i = spec.hidden_size, spec.intermediate_size
    gate_up = (num_local, 2 * i if spec.activation.gated else i)
    expected = {
        "gate_up_proj": (weights.gate_up_proj, (*gate_up, h)),
        "down_proj": (weights.down_proj, (num_local, h, i)),
        "gate_up_bias": (weights.gate_up_bias, gate_up),
        "down_bias": (weights.down_bias, (num_local, h)),
    }
    check_scales(where, spec, weights)
    for name, (tensor, shape) in expected.items():
        if tensor is None:
            continue
        if spec.scheme in NARROW_SCHEMES and name.endswith("proj"):
            shape = (*shape[:2], *tensor.shape[2:])  # packed: `check_scales` has looked at the rest
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{where}{name} has shape {tuple(tensor.shape)}, must be {shape}")
        if tensor.dtype != spec.dtype and (spec.scheme is None or name.endswith("bias")):
            raise ValueError(
                f"{where}{name} is {tensor.dtype} and the rows are {spec.dtype}: convert one, or "
                "run under torch.autocast"
            )
        if tensor.device != device:
            raise ValueError(f"{where}{name} is on {tensor.device}, the rows on {device}")


def check_scales(where: str, spec: ExpertsSpec, weights: ExpertWeights) -> None:
    """Raises `ValueError` for weights that are not quantized as the spec says."""
    scheme = spec.scheme
    for name in ("gate_up", "down"):
        fixed: Tensor | None = getattr(weights, f"{name}_input_scale")
        here, values = f"{where}{name}_input_scale", getattr(weights, f"{name}_proj")
        if name == "gate_up" and (fixed is not None) != spec.scales_by_expert:
            given = "None" if fixed is None else "given"
            raise ValueError(f"{here} is {given} with scales_by_expert={spec.scales_by_expert} in the spec: must agree")
        if fixed is None:
            continue
        if scheme is None or scheme in NARROW_SCHEMES or row_format(scheme).group:
            able = " or ".join(repr(s) for s in WEIGHT_SCHEMES if not row_format(s).group)
            raise ValueError(f"{here} is given with scheme={scheme!r}: must be {able}")
        each = (values.shape[0],)
        if tuple(fixed.shape) != each or fixed.dtype != torch.float32 or fixed.device != values.device:
            raise ValueError(
                f"{here} is {fixed.dtype} {tuple(fixed.shape)} on {fixed.device}: "
                f"must be torch.float32 {each} on {values.device}"
            )
    for name, width in (("gate_up", spec.hidden_size), ("down", spec.intermediate_size)):
        values = getattr(weights, f"{name}_proj")
        scale: Tensor | None = getattr(weights, f"{name}_scale")
        here = f"{where}{name}"
        zero, outer = getattr(weights, f"{name}_zero"), getattr(weights, f"{name}_outer")
        if scheme not in NARROW_SCHEMES and (zero is not None or outer is not None):
            raise ValueError(
                f"{here}_{'outer' if zero is None else 'zero'} is given with scheme={scheme!r} in the spec: it "
                "belongs to narrow weights"
            )
        if (scheme is None) != (scale is None):
            raise ValueError(
                f"{here}_scale is {'given' if scheme is None else 'None'} with scheme={scheme!r} in the spec: "
                "scales belong to quantized weights"
            )
        if scheme is None or scale is None:
            continue
        if scheme in NARROW_SCHEMES:
            if (reason := narrow_mismatch(values, scale, zero, outer, scheme, width)) is not None:
                raise ValueError(f"{here}: {reason}")
            continue
        right = weight_scale_shape(tuple(values.shape), scheme, spec.block)
        if values.dtype != row_dtype(scheme):
            raise ValueError(f"{here}_proj is {values.dtype}: must be {row_dtype(scheme)} for scheme={scheme!r}")
        if tuple(scale.shape) != right or scale.dtype != torch.float32 or scale.device != values.device:
            raise ValueError(
                f"{here}_scale is {scale.dtype} {tuple(scale.shape)} on {scale.device}: must be torch.float32 "
                f"{right} on {values.device} for scheme={scheme!r}"
                + (f" and block={spec.block}" if spec.block != BLOCK else "")
            )


def check_batched(where: str, spec: ExpertsSpec, rows: BatchedInput) -> None:
    """Raises `ValueError` for rows whose shapes, dtypes or devices do not fit each other."""
    x, counts, p = rows.x, rows.expert_num_tokens, rows.topk_weights
    if x.dim() != 3 or (x.stride(2) != 1 and x.shape[2] > 1 and x.numel() > 0):
        raise ValueError(
            f"{where}x has shape {tuple(x.shape)} and strides {x.stride()}: must be [L, C, H] with dense rows"
        )
    if counts.shape != x.shape[:1] or counts.dtype != torch.int32 or counts.device != x.device:
        raise ValueError(
            f"{where}expert_num_tokens is {counts.dtype} {tuple(counts.shape)} on {counts.device}: must be int32 "
            f"({x.shape[0]},) on {x.device}"
        )
    if not spec.weight_on_input:
        return
    right = f"must be float32 {tuple(x.shape[:2])}, since the router weight is on the input"
    if p is None:
        raise ValueError(f"{where}topk_weights=None: {right}")
    precise = torch.promote_types(spec.dtype, torch.float32)  # of rows that may be quantized
    if p.shape != x.shape[:2] or p.dtype not in (torch.float32, precise) or p.device != x.device:
        raise ValueError(f"{where}topk_weights is {p.dtype} {tuple(p.shape)} on {p.device}: {right}")
