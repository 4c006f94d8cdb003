"""What every way of computing experts promises: rows in the standard layout in, one reduced row each out.

    ExpertInput x [T,H] ── GEMM1 (w1) ── activation ── GEMM2 (w2) ── × router weight, sum over local experts ──► [T,H]

T rows, H width, I expert intermediate size, L local experts, K experts per token.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from epmoe.config import Activation
from epmoe.dispatch.base import ExpertInput


@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """This rank's experts, in local order.

    Attributes:
        gate_up_proj: w1 `[L, 2I, H]`, gate rows then up rows (`[L, I, H]` when the activation is not gated).
        down_proj: w2 `[L, H, I]`.
        gate_up_bias: `[L, 2I]` (or `[L, I]`), or None.
        down_bias: `[L, H]`, or None.
    """

    gate_up_proj: Tensor
    down_proj: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def to(self, dtype: torch.dtype) -> ExpertWeights:
        """The same weights in `dtype`, differentiably."""
        gate_up_bias = None if self.gate_up_bias is None else self.gate_up_bias.to(dtype)
        down_bias = None if self.down_bias is None else self.down_bias.to(dtype)
        return ExpertWeights(self.gate_up_proj.to(dtype), self.down_proj.to(dtype), gate_up_bias, down_bias)


@dataclasses.dataclass(frozen=True)
class ExpertsSpec:
    """The problem that a kind of experts is asked to take on.

    Attributes:
        activation: between the GEMMs.
        hidden_size: H; intermediate_size: I; both as the experts see them.
        dtype: of rows and weights.
        device: where they are.
        weight_on_input: the router weight multiplies the row before GEMM1.
    """

    activation: Activation
    hidden_size: int
    intermediate_size: int
    dtype: torch.dtype
    device: torch.device
    weight_on_input: bool = False


class Experts(ABC):
    """Base of `reference`, `torch_grouped` and `grouped`. Holds the spec and no tensors."""

    name: ClassVar[str]
    layouts: ClassVar[tuple[str, ...]] = ("standard",)
    autograd: ClassVar[bool] = True
    cuda_graph: ClassVar[bool] = False

    def __init__(self, spec: ExpertsSpec) -> None:
        if (reason := self.refusal(spec)) is not None:
            raise ValueError(f"experts={self.name!r}: {reason}")
        self.spec = spec

    @classmethod
    @abstractmethod
    def refusal(cls, spec: ExpertsSpec) -> str | None:
        """Why these experts can't take `spec`, and what would be needed; None if they can."""

    @abstractmethod
    def apply(self, rows: ExpertInput, weights: ExpertWeights) -> Tensor:
        """The routed MLP of this rank's experts: `[T, H]`, weighted and summed over them in fp32 in the order of K."""

    def __call__(self, rows: ExpertInput, weights: ExpertWeights) -> Tensor:
        """`apply` after checking that rows and weights fit each other and the spec."""
        self.check(rows, weights)
        return self.apply(rows, weights)

    def check(self, rows: ExpertInput, weights: ExpertWeights) -> None:
        """Raises `ValueError` for shapes, dtypes or devices that do not fit."""
        spec = self.spec
        h, i = spec.hidden_size, spec.intermediate_size
        gate_up = (rows.num_local, 2 * i if spec.activation.gated else i)
        expected = {
            "gate_up_proj": (weights.gate_up_proj, (*gate_up, h)),
            "down_proj": (weights.down_proj, (rows.num_local, h, i)),
            "gate_up_bias": (weights.gate_up_bias, gate_up),
            "down_bias": (weights.down_bias, (rows.num_local, h)),
        }
        if rows.x.shape[-1] != h:
            raise ValueError(f"experts={self.name!r}: rows are {rows.x.shape[-1]} wide, hidden_size is {h}")
        for name, (tensor, shape) in expected.items():
            if tensor is None:
                continue
            if tuple(tensor.shape) != shape:
                raise ValueError(f"experts={self.name!r}: {name} has shape {tuple(tensor.shape)}, must be {shape}")
            if tensor.dtype != rows.x.dtype:
                raise ValueError(
                    f"experts={self.name!r}: {name} is {tensor.dtype} and the rows are {rows.x.dtype}: convert one, or "
                    "run under torch.autocast"
                )
            if tensor.device != rows.x.device:
                raise ValueError(f"experts={self.name!r}: {name} is on {tensor.device}, the rows on {rows.x.device}")


def local_ids(rows: ExpertInput) -> Tensor:
    """`[T, K]` int64: the local expert of each pair; L where it has none here (other ranks', -1, out of range)."""
    ids = rows.topk_ids
    valid = (ids >= 0) & (ids < rows.expert_map.shape[0])
    local = rows.expert_map[torch.where(valid, ids, 0)]
    return torch.where(valid & (local >= 0), local, rows.num_local).long()
