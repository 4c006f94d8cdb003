"""Fixed scales of what a layer's experts multiply: what `MoELayer` needs to hold, set and apply them.

    x ── / gate_up_proj_input_scale [1] ──► sent ── GEMM1 ── / down_proj_input_scale [L] ──► GEMM2
    x ──► sent ── / gate_up_proj_input_scale [L] ──► GEMM1 ── ...                             activations=None

L local experts, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from epmoe.checks import said
from epmoe.config import MoEConfig
from epmoe.quant.rows import QuantizedRows, quantize_rows_by

INPUT_SCALE, DOWN_INPUT_SCALE = "gate_up_proj_input_scale", "down_proj_input_scale"
SETTERS = {INPUT_SCALE: ("scales", "set_input_scale"), DOWN_INPUT_SCALE: ("down_scales", "set_down_input_scales")}


class WithFixedScales(nn.Module):
    """The part of `MoELayer` that knows scales which are the same for every row: parameters without a gradient, which a
    forward is refused without."""

    config: MoEConfig
    name: str
    local_experts: tuple[int, ...]

    def __init__(self) -> None:
        super().__init__()
        self._unset_scales: dict[str, tuple[nn.Parameter, int]] = {}  # as they were when they held nothing

    @property
    def _scales_by_expert(self) -> bool:
        return self.config.quant is not None and self.config.quant.scales_by_expert

    def _make_input_scales(self, device: torch.device | str | None) -> None:
        """The fixed scales of rows and of activations, NaN until they are set or loaded: a forward before that is
        refused. Or none."""
        quant, num_local = self.config.quant, len(self.local_experts)
        of_rows = num_local if self._scales_by_expert else 1
        for name, field, number in ((INPUT_SCALE, "scales", of_rows), (DOWN_INPUT_SCALE, "down_scales", num_local)):
            static, mine = quant is not None and getattr(quant, field) == "static", getattr(self, name)
            if static != (mine is not None) or (mine is not None and len(mine) != number):
                self._parameters[name] = None
                self._unset_scales.pop(name, None)
                if static:
                    self._hold(name, torch.full((number,), torch.nan, dtype=torch.float32, device=device))
                    self._mark_unset(name)

    def _mark_unset(self, name: str) -> None:
        parameter = getattr(self, name)
        self._unset_scales[name] = (parameter, version_of(parameter))

    def _look_at_scales(self) -> None:
        """After something was loaded: which fixed scales still hold NaN, or do again. Waits for the device."""
        for name in (INPUT_SCALE, DOWN_INPUT_SCALE):
            parameter = getattr(self, name)
            if type(parameter) is not nn.Parameter or parameter.device.type == "meta":  # DTensor, fake tensors
                continue
            self._unset_scales.pop(name, None)
            if bool(parameter.isnan().any()):
                self._mark_unset(name)

    def _refuse_unset_scales(self) -> None:
        """Raises `ValueError` for a fixed scale that nobody has written since it was made, by whatever way; does not
        look at the device."""
        for name, (parameter, version) in self._unset_scales.items():
            now = getattr(self, name)
            if now is parameter and version_of(now) == version and now.device.type != "meta":
                field, setter = SETTERS[name]
                raise ValueError(
                    f"layer {self.name!r}: QuantConfig({field}='static') and {name} is not set: call {setter}(...), or "
                    "load a checkpoint that has it, before the first forward"
                )

    @torch.no_grad()
    def set_input_scale(self, scale: float | Tensor) -> None:
        """Fixes the scales of rows of `QuantConfig(scales="static")`. The same on all ranks.

        Args:
            scale: a number, or those of all experts of a checkpoint, `[E]` (`input_scale` of their gate and up
                projections), whose largest counts where rows are sent quantized. With `activations=None` each counts
                for its expert.

        Raises:
            ValueError: a layer whose scales are dynamic, another shape, or a scale that is not finite and > 0.
        """
        mine = getattr(self, INPUT_SCALE)
        if mine is None:
            raise ValueError(f"layer {self.name!r}: set_input_scale needs QuantConfig(scales='static')")
        if self._scales_by_expert:
            self._set_of_experts(mine, "scale", scale)
        else:
            largest = numbers_of(f"layer {self.name!r}: scale", scale).max()
            if not (torch.isfinite(largest) and largest > 0):
                raise ValueError(f"layer {self.name!r}: scale={largest.item()}: must be finite and > 0")
            mine.copy_(largest)
        self._unset_scales.pop(INPUT_SCALE, None)

    @torch.no_grad()
    def set_down_input_scales(self, scales: float | Tensor) -> None:
        """Fixes the scales of activations of `QuantConfig(down_scales="static")`.

        Args:
            scales: one number, or `[E]`, one for each logical expert: `input_scale` of a checkpoint's down projections.

        Raises:
            ValueError: a layer whose activations are scaled row by row, another shape, or a scale that is not finite
                and > 0.
        """
        mine = getattr(self, DOWN_INPUT_SCALE)
        if mine is None:
            raise ValueError(f"layer {self.name!r}: set_down_input_scales needs QuantConfig(down_scales='static')")
        self._set_of_experts(mine, "scales", scales)
        self._unset_scales.pop(DOWN_INPUT_SCALE, None)

    def _set_of_experts(self, mine: Tensor, argument: str, scales: float | Tensor) -> None:
        """Writes this rank's of `scales`, one number or `[E]`."""
        what, num_experts = f"layer {self.name!r}: {argument}", self.config.num_experts
        given = numbers_of(what, scales)
        if given.numel() != 1 and tuple(given.shape) not in ((num_experts,), (num_experts, 1)):
            raise ValueError(f"{what} has shape {tuple(given.shape)}: must be one number, or ({num_experts},)")
        if not (given.isfinite() & (given > 0)).all():
            raise ValueError(f"{what}={given.tolist()}: must be finite and > 0")
        every = given.reshape(-1).expand(num_experts)
        mine.copy_(every[list(self.local_experts)])

    def _as_sent(self, x: Tensor) -> Tensor | QuantizedRows:
        """Rows as the kernel gets them: quantized here where their scale is fixed."""
        scale, scheme = getattr(self, INPUT_SCALE), self.config.row_scheme
        if scale is None or scheme is None:
            return x
        if torch.is_grad_enabled() and x.requires_grad:
            raise ValueError(
                f"layer {self.name!r}: scales='static' with an x that needs a gradient: none flows through rows of a "
                "fixed scale; use torch.no_grad(), or dynamic scales"
            )
        return quantize_rows_by(x, scale, scheme)

    def _hold(self, name: str, tensor: Tensor) -> None:
        setattr(self, name, nn.Parameter(tensor, requires_grad=False))


def version_of(parameter: Tensor) -> int:
    """How often it has been written to, where torch counts."""
    return -1 if parameter.is_inference() else parameter._version


def numbers_of(name: str, value: object) -> Tensor:
    """A number, numbers or a tensor of them as float32."""
    try:
        return torch.as_tensor(value, dtype=torch.float32, device=value.device if isinstance(value, Tensor) else "cpu")
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{said(name, value)}: must be a number, or a tensor of numbers") from None
