"""LoRA on routed experts: the adapters' tensors, and what they mean in plain torch.

For a row of adapter a at expert e, with s = scaling[a]:

    h = x·w1[e]ᵀ + s·(x·gate_up_a[e,a]ᵀ)·gate_up_b[e,a]ᵀ        y = act(h)·w2[e]ᵀ + s·(act(h)·down_a[e,a]ᵀ)·down_b[e,a]ᵀ

A row without an adapter meets the base expert alone. A router weight on the input multiplies x, the update's x too.

L local experts, A adapters, R their rank (shorter ones are padded with zeros), H width, I intermediate size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from epmoe.experts.spec import ExpertsSpec, ExpertWeights


@dataclasses.dataclass(frozen=True)
class ExpertLora:
    """The adapters of this rank's experts, in local order; experts first, as in `ExpertWeights`.

    Attributes:
        gate_up_a: `[L, A, R, H]`.
        gate_up_b: `[L, A, 2I, R]`, gate rows then up rows (`[L, A, I, R]` when the activation is not gated).
        down_a: `[L, A, R, I]`.
        down_b: `[L, A, H, R]`.
        scaling: `[A]` float32, alpha / rank of each adapter by its own rank; it gets no gradient.
    """

    gate_up_a: Tensor
    gate_up_b: Tensor
    down_a: Tensor
    down_b: Tensor
    scaling: Tensor

    @property
    def num_adapters(self) -> int:
        """A."""
        return self.scaling.shape[0]

    @property
    def rank(self) -> int:
        """R, the largest rank."""
        return self.gate_up_a.shape[2]

    def to(self, dtype: torch.dtype) -> ExpertLora:
        """The same adapters in `dtype`, differentiably; the scaling stays float32."""
        return ExpertLora(
            self.gate_up_a.to(dtype),
            self.gate_up_b.to(dtype),
            self.down_a.to(dtype),
            self.down_b.to(dtype),
            self.scaling,
        )

    def check(self, where: str, spec: ExpertsSpec, num_local: int, device: torch.device) -> None:
        """Raises `ValueError`, beginning with `where`, for shapes, dtypes or devices that do not fit the experts."""
        h, i = spec.hidden_size, spec.intermediate_size
        if self.scaling.dim() != 1 or self.scaling.shape[0] < 1 or self.scaling.dtype != torch.float32:
            raise ValueError(
                f"{where}lora.scaling is {self.scaling.dtype} {tuple(self.scaling.shape)}: must be float32 [A], A >= 1"
            )
        if self.gate_up_a.dim() != 4:
            raise ValueError(f"{where}lora.gate_up_a has shape {tuple(self.gate_up_a.shape)}: must be [L, A, R, H]")
        lead, rank = (num_local, self.num_adapters), self.rank
        expected = {
            "gate_up_a": (*lead, rank, h),
            "gate_up_b": (*lead, 2 * i if spec.activation.gated else i, rank),
            "down_a": (*lead, rank, i),
            "down_b": (*lead, h, rank),
        }
        for name, shape in expected.items():
            tensor: Tensor = getattr(self, name)
            if tuple(tensor.shape) != shape or rank < 1:
                raise ValueError(
                    f"{where}lora.{name} has shape {tuple(tensor.shape)}, must be {shape}, with R at least 1"
                )
            if tensor.dtype != spec.dtype:
                raise ValueError(
                    f"{where}lora.{name} is {tensor.dtype} and the experts {spec.dtype}: convert with .to()"
                )
        for name in (*expected, "scaling"):
            if getattr(self, name).device != device:
                raise ValueError(f"{where}lora.{name} is on {getattr(self, name).device}, the rows on {device}")


def stack_adapters(adapters: Sequence[ExpertLora]) -> ExpertLora:
    """Several adapters, or sets of them, as one, numbered in the order given; shorter ranks are padded with zeros.

    Padding changes nothing: its products are zero, and so are its gradients. Differentiable.

    Raises:
        ValueError: nothing to stack.
    """
    if not adapters:
        raise ValueError("adapters is empty: give at least one ExpertLora")
    rank = max(adapter.rank for adapter in adapters)

    def padded(name: str, dim: int) -> Tensor:
        tensors = (getattr(adapter, name) for adapter in adapters)
        return torch.cat([F.pad(t, (0, 0) * (-1 - dim) + (0, rank - t.shape[dim])) for t in tensors], dim=1)

    return ExpertLora(
        padded("gate_up_a", -2),
        padded("gate_up_b", -1),
        padded("down_a", -2),
        padded("down_b", -1),
        torch.cat([adapter.scaling for adapter in adapters]),
    )


def low_rank_update(x: Tensor, a: Tensor, b: Tensor, scaling: Tensor, adapter_ids: Tensor) -> Tensor:
    """What the adapters of one expert add to its output, one adapter after another in plain torch.

    Args:
        x: `[n, D]`; a: `[A, R, D]`; b: `[A, N, R]`, in the precision to compute in.
        scaling: `[A]`.
        adapter_ids: `[n]`; outside `[0, A)` is no adapter.

    Returns:
        `[n, N]`, zeros for rows without an adapter.
    """
    out = x.new_zeros(x.shape[0], b.shape[1])
    for adapter in range(a.shape[0]):
        (rows,) = (adapter_ids == adapter).nonzero(as_tuple=True)  # also when there are none: gradients are zeros then
        delta = F.linear(F.linear(x[rows], a[adapter]), b[adapter]) * scaling[adapter].to(x.dtype)
        out = out.index_put((rows,), delta)
    return out


def merge_adapter(weights: ExpertWeights, adapter: int) -> ExpertWeights:
    """The experts with one adapter folded into them, without any beside them: what every row of it would meet.

    Sums are made in float32 (float64 for float64) and rounded once to the weights' dtype.

    Raises:
        ValueError: `weights` have no adapters, or not this one, or are quantized.
    """
    lora = weights.lora
    if lora is None or not 0 <= adapter < lora.num_adapters:
        raise ValueError(
            f"adapter={adapter}: must be in [0, {lora.num_adapters})"
            if lora
            else f"adapter={adapter}: there is no lora"
        )

    if weights.gate_up_scale is not None:
        raise ValueError("weights are quantized: dequantize them, merge, and quantize again")

    def merged(w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        wide = torch.promote_types(w.dtype, torch.float32)
        delta = b[:, adapter].to(wide) @ a[:, adapter].to(wide)
        return (w.to(wide) + lora.scaling[adapter].to(wide) * delta).to(w.dtype)

    return dataclasses.replace(
        weights,
        gate_up_proj=merged(weights.gate_up_proj, lora.gate_up_a, lora.gate_up_b),
        down_proj=merged(weights.down_proj, lora.down_a, lora.down_b),
        lora=None,
    )


def validate_adapters(adapter_ids: Tensor, lora: ExpertLora | None) -> None:
    """Raises `ValueError` unless all `adapter_ids` are in `[-1, A)`; waits for the device."""
    adapters = 0 if lora is None else lora.num_adapters
    wrong = (adapter_ids < -1) | (adapter_ids >= adapters)
    if bool(wrong.any()):
        place = int(wrong.nonzero()[0, 0])
        raise ValueError(
            f"adapter_ids[{place}]={int(adapter_ids[place])}: must be in [-1, {adapters}), the adapters of weights.lora"
        )
