"""What experts are asked to compute, and with what: the problem, this rank's weights, the scratch of a forward.

T rows, H width, I expert intermediate size, L local experts, N (row, expert) pairs.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from epmoe.checks import check_bool, check_int, check_kind, check_name
from epmoe.comm.workspace import Part
from epmoe.config import DTYPES, Activation, MoEConfig
from epmoe.experts.gradient_sums import GradientSums
from epmoe.experts.lora import ExpertLora
from epmoe.ops.quantize_blocks import BLOCK
from epmoe.quant.formats import FORMATS


@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """This rank's experts, in local order.

    Attributes:
        gate_up_proj: w1 `[L, 2I, H]`, gate rows then up rows (`[L, I, H]` when the activation is not gated).
        down_proj: w2 `[L, H, I]`.
        gate_up_bias: `[L, 2I]` (or `[L, I]`), or None.
        down_bias: `[L, H]`, or None.
        lora: adapters beside them, which rows with `adapter_ids` meet too, or None.
        gate_up_scale, down_scale: scales of quantized gate_up_proj and down_proj, of the shapes and dtypes that
            the scheme says (`quant/weights.py`, `quant/narrow.py`); None where they are not quantized. Narrow
            weights are packed along their last dimension.
        sums: where gradients of parts are added up, set by `sum_gradients`; None: autograd does.
        gate_up_zero, down_zero, gate_up_outer, down_outer: zero points and second scales of narrow weights, or None.
        gate_up_input_scale, down_input_scale: `[L]` float32, fixed scales of what GEMM1 and GEMM2 multiply, each
            expert's; None: it is scaled row by row, or rows come quantized.
    """

    gate_up_proj: Tensor
    down_proj: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    lora: ExpertLora | None = None
    gate_up_scale: Tensor | None = None
    down_scale: Tensor | None = None
    sums: GradientSums | None = None
    gate_up_zero: Tensor | None = None
    down_zero: Tensor | None = None
    gate_up_outer: Tensor | None = None
    down_outer: Tensor | None = None
    down_input_scale: Tensor | None = None
    gate_up_input_scale: Tensor | None = None

    def to(self, dtype: torch.dtype) -> ExpertWeights:
        """The same weights in `dtype`, differentiably; quantized ones keep their values and scales."""
        narrow = (self.gate_up_proj, self.down_proj) if self.gate_up_scale is None else ()
        if self.lora is None and all(
            t is None or t.dtype == dtype for t in (*narrow, self.gate_up_bias, self.down_bias)
        ):
            return self
        gate_up_bias = None if self.gate_up_bias is None else self.gate_up_bias.to(dtype)
        down_bias = None if self.down_bias is None else self.down_bias.to(dtype)
        lora = None if self.lora is None else self.lora.to(dtype)
        w1, w2 = self.gate_up_proj, self.down_proj
        if self.gate_up_scale is None:
            w1, w2 = w1.to(dtype), w2.to(dtype)
        return dataclasses.replace(
            self, gate_up_proj=w1, down_proj=w2, gate_up_bias=gate_up_bias, down_bias=down_bias, lora=lora
        )


@dataclasses.dataclass(frozen=True)
class ExpertsSpec:
    """The problem that a kind of experts is asked to take on.

    Attributes:
        activation: between the GEMMs.
        hidden_size: H; intermediate_size: I; both as the experts see them.
        dtype: of rows, and of weights that are not quantized.
        device: where they are.
        weight_on_input: the router weight multiplies the row before GEMM1.
        lora: the weights may have adapters.
        scheme: of quantized weights, one of `quant.WEIGHT_SCHEMES` or `quant.NARROW_SCHEMES`; None where they are not.
        batch_invariant: a row's result must have the same bits whichever rows are with it, and however many.
        block: rows and columns of quantized weights that share a scale, of schemes with blocks.
        scales_by_expert: rows come wide, and each expert quantizes its own by a fixed scale of its own
            (`ExpertWeights.gate_up_input_scale`).

    Raises:
        ValueError: a field of another kind, or a size, scheme or dtype that there is not.
    """

    activation: Activation
    hidden_size: int
    intermediate_size: int
    dtype: torch.dtype
    device: torch.device
    weight_on_input: bool = False
    lora: bool = False
    scheme: str | None = None
    batch_invariant: bool = False
    block: tuple[int, int] = BLOCK
    scales_by_expert: bool = False

    def __post_init__(self) -> None:
        check_kind("ExpertsSpec.activation", self.activation, Activation, "an Activation, as Activation('swiglu')")
        for field in ("hidden_size", "intermediate_size"):
            check_int(f"ExpertsSpec.{field}", getattr(self, field))
        check_kind("ExpertsSpec.dtype", self.dtype, torch.dtype, "one of " + ", ".join(map(str, DTYPES)))
        check_kind("ExpertsSpec.device", self.device, torch.device, "a torch.device, as torch.device('cpu')")
        for field in ("weight_on_input", "lora", "batch_invariant", "scales_by_expert"):
            check_bool(f"ExpertsSpec.{field}", getattr(self, field))
        check_name("ExpertsSpec.scheme", self.scheme, FORMATS, none="weights that are not quantized")

    @classmethod
    def of(cls, config: MoEConfig, *, device: torch.device, dtype: torch.dtype, lora: bool = False) -> ExpertsSpec:
        """What a layer of this configuration asks of its experts."""
        return cls(
            config.activation_function,
            config.expert_hidden_size,
            config.intermediate_size,
            dtype,
            device,
            config.router_weight_on_input,
            lora,
            None if config.quant is None else config.quant.weights,
            config.batch_invariant,
            BLOCK if config.quant is None else config.quant.block,
            config.quant is not None and config.quant.scales_by_expert,
        )


class WorkspaceShapes(NamedTuple):
    """Scratch of one forward without gradients.

    Attributes:
        workspace13: what the GEMMs give, one at a time: GEMM1's output where the activation is a pass of its own, then
            GEMM2's `[N, H]`.
        workspace2: the activation's output `[N, I]`, GEMM2's input.
        output: `[T, H]`, one reduced row per row received.
    """

    workspace13: Part
    workspace2: Part
    output: Part
