"""Expert tensors between a model's layout and ours.

Ours is `[..., 2I, H]` with all gate rows before all up rows, `[..., H, I]`, biases `[..., 2I]` and `[..., H]`; a
model's may be transposed, or alternate gate and up. Leading dimensions are free: one expert or all of them.

Example: I = 2, one column of an interleaved `gate_up_proj`: (g0, u0, g1, u1) is (g0, g1, u0, u1) in ours.
"""

from __future__ import annotations

from torch import Tensor

from epmoe.integrations.transformers.presets import ExpertTensors


def to_ours(tensors: ExpertTensors, name: str, tensor: Tensor) -> Tensor:
    """A view of `tensor` in our layout (a copy where gate and up alternate).

    Args:
        name: `gate_up_proj`, `down_proj`, `gate_up_bias` or `down_bias`.
        tensor: as the model has it.
    """
    if tensors.transposed and name.endswith("_proj"):
        tensor = tensor.transpose(-1, -2)
    if tensors.interleaved and name.startswith("gate_up"):
        dim = -2 if name.endswith("_proj") else -1
        tensor = _regroup(tensor, dim, (tensor.shape[dim] // 2, 2))
    return tensor


def to_theirs(tensors: ExpertTensors, name: str, tensor: Tensor) -> Tensor:
    """The inverse of `to_ours`."""
    if tensors.interleaved and name.startswith("gate_up"):
        dim = -2 if name.endswith("_proj") else -1
        tensor = _regroup(tensor, dim, (2, tensor.shape[dim] // 2))
    if tensors.transposed and name.endswith("_proj"):
        tensor = tensor.transpose(-1, -2)
    return tensor


def _regroup(tensor: Tensor, dim: int, sizes: tuple[int, int]) -> Tensor:
    """Reads `dim` as a matrix of `sizes` and transposes it."""
    return tensor.unflatten(dim, sizes).transpose(dim - 1, dim).flatten(dim - 1, dim)
