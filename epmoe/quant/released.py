"""One expert of a released checkpoint whose weights and rows are both in eight bits, under the names that it has there,
as `MoELayer.load_experts` takes it. Beside the path of a token.

    {gate_proj, up_proj, down_proj}.weight            [N, K] float8_e4m3fn or int8
    {gate_proj, up_proj, down_proj}.weight_scale      one number, [N] or [N, 1]: of the tensor, or of each channel
    {gate_proj, up_proj, down_proj}.weight_scale_inv  [ceil(N / R), ceil(K / C)], with scales per block instead
    {gate_proj, up_proj, down_proj}.input_scale       one number, of what the projection multiplies, where it is static

N output channels, K what is summed over, R and C rows and columns of a block.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from epmoe.ops.quantize import row_format
from epmoe.ops.quantize_blocks import BLOCK
from epmoe.quant.formats import join_gate_up, parts_of
from epmoe.quant.weights import WEIGHT_SCHEMES, QuantizedWeights


def expert_parts(
    tensors: Mapping[str, Tensor], scheme: str, prefix: str = "", block: tuple[int, int] = BLOCK
) -> dict[str, Tensor]:
    """The expert under `prefix`, without widening it: `layer.load_experts(expert_parts(...), expert_ids=[e])`.

    Values keep their bits. A scale for a tensor becomes the same scale for each of its channels, so that gate and up
    projections keep theirs; scales per block as `quant.formats.join_gate_up` says.

    Args:
        tensors: by name, as above; others are left alone.
        scheme: what the layer's `QuantConfig.weights` is, one of `WEIGHT_SCHEMES`.
        prefix: of the names, such as `model.layers.3.mlp.experts.17.`.
        block: what the layer's `QuantConfig.block` is, `weight_block_size` of the checkpoint.

    Returns:
        `gate_up_proj`, `down_proj`, their scales and, where the checkpoint has `down_proj.input_scale`,
        `down_proj_input_scale` (for `QuantConfig(down_scales="static")`), each with a first dimension of one expert.

    Raises:
        ValueError: a name that is missing, or a tensor that is not that.
    """
    names = ("gate_proj", "up_proj", "down_proj")
    gate, up, down = (_projection(tensors, prefix + name, scheme, block) for name in names)
    parts = {f"gate_up_proj{suffix}": part for suffix, part in parts_of(join_gate_up(gate, up)).items()}
    parts |= {f"down_proj{suffix}": part for suffix, part in parts_of(down).items()}
    if (fixed := tensors.get(f"{prefix}down_proj.input_scale")) is not None:
        parts["down_proj_input_scale"] = _one_number(fixed, f"{prefix}down_proj.input_scale")
    return parts


def rows_scale(tensors: Mapping[str, Tensor], prefix: str = "") -> Tensor:
    """`[1]`, the fixed scale of rows that the expert under `prefix` asks for: the larger of its gate and up
    projections'. `MoELayer.set_input_scale` takes those of all experts, of which the largest counts, or each where rows
    travel wide.

    Raises:
        ValueError: a name that is missing, or a tensor that is not one number.
    """
    names = [f"{prefix}{name}.input_scale" for name in ("gate_proj", "up_proj")]
    return torch.stack([_one_number(_named(tensors, name), name) for name in names]).amax(0)


def _named(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise ValueError(f"{name!r} is missing")
    return tensors[name]


def _one_number(t: Tensor, name: str) -> Tensor:
    if t.numel() != 1:
        raise ValueError(f"{name} has shape {tuple(t.shape)}: must be one number")
    return t.float().reshape(1)


def _projection(tensors: Mapping[str, Tensor], name: str, scheme: str, block: tuple[int, int]) -> QuantizedWeights:
    """`[1, N, K]`."""
    if scheme not in WEIGHT_SCHEMES:
        raise ValueError(f"scheme={scheme!r}: must be one of {', '.join(WEIGHT_SCHEMES)}")
    weight, dtype = _named(tensors, f"{name}.weight"), row_format(scheme).dtype
    if weight.dim() != 2 or weight.dtype != dtype:
        raise ValueError(
            f"{name}.weight is {weight.dtype} {tuple(weight.shape)}: must be {dtype} [N, K] for {scheme!r}"
        )
    if row_format(scheme).group:
        scale = _named(tensors, f"{name}.weight_scale_inv").float()
        return QuantizedWeights(weight[None], scale[None].contiguous(), scheme, block)
    scale, channels = _named(tensors, f"{name}.weight_scale").float(), weight.shape[0]
    if scale.numel() not in (1, channels) or scale.dim() > 2 or (scale.dim() == 2 and scale.shape[1] != 1):
        raise ValueError(
            f"{name}.weight_scale has shape {tuple(scale.shape)}: must be one number, [{channels}] or [{channels}, 1]"
        )
    return QuantizedWeights(weight[None], scale.reshape(1, -1).expand(1, channels).contiguous(), scheme)
