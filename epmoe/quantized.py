"""Layers whose routed experts are held quantized: `quantize_`, and what `MoELayer` needs to hold, load and move such
parameters.

    gate_up_proj [L, 2I, H] bf16 ──► gate_up_proj [L, 2I, H] fp8, gate_up_proj_scale_inv [L, ⌈2I/R⌉, ⌈H/C⌉] float32

L local experts, H width of the routed experts, I intermediate size, R and C rows and columns of `QuantConfig.block`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from epmoe.checks import check_kind, said
from epmoe.comm import EPGroup
from epmoe.config import MoEConfig
from epmoe.ops.quantize_blocks import BLOCK
from epmoe.quant.config import QuantConfig
from epmoe.quant.formats import FIELDS, FORMATS, weight_format
from epmoe.quant.rows import QuantizedRows, quantize_rows_by

PROJECTIONS = ("gate_up_proj", "down_proj")
INPUT_SCALE, DOWN_INPUT_SCALE = "gate_up_proj_input_scale", "down_proj_input_scale"
SCALE_PARAMETERS = (*(name + suffix for name in PROJECTIONS for suffix in FIELDS), DOWN_INPUT_SCALE)

SETTERS = {INPUT_SCALE: ("scales", "set_input_scale"), DOWN_INPUT_SCALE: ("down_scales", "set_down_input_scales")}


class WithQuantizedExperts(nn.Module):
    """The part of `MoELayer` that knows quantized experts: parameters without a gradient, which keep their dtypes when
    the layer is converted."""

    config: MoEConfig
    ep: EPGroup | None
    name: str
    local_experts: tuple[int, ...]
    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    _kernels: dict[Any, Any]

    def __init__(self) -> None:
        super().__init__()
        self._wide_dtype = torch.get_default_dtype()
        self._unset_scales: dict[str, tuple[nn.Parameter, int]] = {}  # fixed ones, as they were when they held nothing
        for name in (*SCALE_PARAMETERS, INPUT_SCALE):
            self.register_parameter(name, None)

    @property
    def weight_scheme(self) -> str | None:
        """That of the experts' weights; None where they are not quantized."""
        return None if self.config.quant is None else self.config.quant.weights

    @property
    def weight_block(self) -> tuple[int, int]:
        """Rows and columns that share a scale where the experts' weights have them in blocks."""
        return BLOCK if self.config.quant is None else self.config.quant.block

    @property
    def _zero_points(self) -> bool:
        return self.config.quant is not None and self.config.quant.zero_points

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows that the experts take: their own, or what they had before they were quantized."""
        return self.gate_up_proj.dtype if self.weight_scheme is None else self._wide_dtype

    def quantized_parameters(self) -> dict[str, nn.Parameter]:
        """The values and scales of quantized weights by name; empty where they are not quantized."""
        names = () if self.weight_scheme is None else (*PROJECTIONS, *SCALE_PARAMETERS, INPUT_SCALE)
        named = {name: getattr(self, name) for name in names}
        return {name: parameter for name, parameter in named.items() if parameter is not None}

    def weight_shape(self, name: str) -> tuple[int, int, int]:
        """`[L, N, K]` of a projection, unpacked."""
        c = self.config
        h, i, local = c.expert_hidden_size, c.intermediate_size, len(self.local_experts)
        return (local, 2 * i if c.activation_function.gated else i, h) if name == "gate_up_proj" else (local, h, i)

    def _make_projections(self, device: torch.device | str | None, dtype: torch.dtype) -> None:
        """The parameters of w1 and w2, unwritten: wide, or in the parts of the configuration's scheme."""
        self._wide_dtype = dtype
        for name in PROJECTIONS:
            shape = self.weight_shape(name)
            if self.weight_scheme is None:
                setattr(self, name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
                continue
            form = weight_format(self.weight_scheme, self.weight_block)
            for suffix, (part, kind) in form.parts(shape, self._zero_points).items():
                self._hold(name + suffix, torch.empty(part, device=device, dtype=kind))

        self._make_input_scales(device)

    def _make_input_scales(self, device: torch.device | str | None) -> None:
        """The fixed scales of rows and of activations, NaN until they are set or loaded: a forward before that is
        refused. Or none."""
        quant, num_local = self.config.quant, len(self.local_experts)
        for name, field, number in ((INPUT_SCALE, "scales", 1), (DOWN_INPUT_SCALE, "down_scales", num_local)):
            static = quant is not None and getattr(quant, field) == "static"
            if static != (getattr(self, name) is not None):
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
        """Fixes the scale of rows of `QuantConfig(scales="static")`: a number, or those of all experts of a checkpoint
        (`input_scale` of their gate and up projections), whose largest counts. The same on all ranks.

        Raises:
            ValueError: a layer whose scales are dynamic, or a scale that is not finite and > 0.
        """
        mine = getattr(self, INPUT_SCALE)
        if mine is None:
            raise ValueError(f"layer {self.name!r}: set_input_scale needs QuantConfig(scales='static')")
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
        given, num_experts = numbers_of(f"layer {self.name!r}: scales", scales), self.config.num_experts
        if given.numel() != 1 and tuple(given.shape) != (num_experts,):
            raise ValueError(
                f"layer {self.name!r}: scales has shape {tuple(given.shape)}: must be one number, or ({num_experts},)"
            )
        if not (given.isfinite() & (given > 0)).all():
            raise ValueError(f"layer {self.name!r}: scales={given.tolist()}: must be finite and > 0")
        every = given.reshape(-1).expand(num_experts) if given.numel() == 1 else given
        mine.copy_(every[list(self.local_experts)])
        self._unset_scales.pop(DOWN_INPUT_SCALE, None)

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

    def _parts(self, name: str, wide: Tensor) -> dict[str, Tensor]:
        """The parameters that `wide` `[n, N, K]` of one projection becomes, by name."""
        if self.weight_scheme is None:
            return {name: wide}
        parts = weight_format(self.weight_scheme, self.weight_block).quantize(wide, self._zero_points)
        return {name + suffix: part for suffix, part in parts.items()}

    def _write_expert(self, name: str, local: int, wide: Tensor) -> None:
        """Expert `local` of a projection from wide `[N, K]`."""
        for part, tensor in self._parts(name, wide[None]).items():
            copy_bits(getattr(self, part)[local], tensor[0])

    def _draw_expert(self, name: str, local: int, generator: torch.Generator) -> None:
        """Normal with std 1/√K, drawn wide."""
        _, n, k = self.weight_shape(name)
        parameter = getattr(self, name)
        if self.weight_scheme is None:
            parameter[local].normal_(std=k**-0.5, generator=generator)
            return
        wide = torch.empty(n, k, dtype=self._wide_dtype, device=parameter.device)
        self._write_expert(name, local, wide.normal_(std=k**-0.5, generator=generator))

    def _expert_scales(self) -> dict[str, Any]:
        """The fields of `ExpertWeights` beside values."""
        if self.weight_scheme is None:
            return {}
        fields = {
            f"{name.removesuffix('_proj')}_{field}": getattr(self, name + suffix)
            for name in PROJECTIONS
            for suffix, field in FIELDS.items()
        }
        fields["down_input_scale"] = getattr(self, DOWN_INPUT_SCALE)
        return {field: tensor for field, tensor in fields.items() if tensor is not None}

    @torch.no_grad()
    def _quantize(self, quant: QuantConfig) -> None:
        held, asked = (self.weight_scheme, self.weight_block), (quant.weights, quant.block)
        if quant.weights is not None and self.weight_scheme is not None and asked != held:
            blocks = "" if quant.block == self.weight_block else f" and block={self.weight_block}"
            raise ValueError(
                f"layer {self.name!r}: the experts are {self.weight_scheme} already: quantize_ takes wide ones, or a "
                f"configuration with weights={self.weight_scheme!r}{blocks}"
            )
        if quant.weights is None and self.weight_scheme is not None:
            raise ValueError(
                f"layer {self.name!r}: QuantConfig.weights=None, and the experts are {self.weight_scheme}: what was "
                "rounded does not come back; name that scheme, or load wide weights into a new layer"
            )
        if self.ep is not None:
            self.ep.check_same(f"quantize_ of MoELayer {self.name!r}", dataclasses.asdict(quant))
        made = f"layer {self.name!r} was made with "
        if (sent := self.config.dispatch_scheme) not in (None, quant.rows):
            raise ValueError(
                f"{made}dispatch_scheme={sent!r} and this QuantConfig sends rows in {quant.rows!r}: say "
                f"activations={sent!r} in it, or make the layer without dispatch_scheme"
            )
        if quant.weights is not None and (kind := self.config.experts) != "auto":
            raise ValueError(
                f"{made}experts={kind!r}, a kind for weights that are not quantized, and this QuantConfig has "
                f"weights={quant.weights!r}: make it without experts; QuantConfig.experts names the kind"
            )
        wide = {} if self.weight_scheme is not None else {name: getattr(self, name).detach() for name in PROJECTIONS}
        dtype, config = self.dtype, dataclasses.replace(self.config, quant=quant, dispatch_scheme=None)
        self._check_experts(config, dtype)
        self.config, self._wide_dtype = config, dtype
        self._kernels.clear()
        if not wide:
            self._make_input_scales(self.gate_up_proj.device)
        if quant.weights is None or not wide:
            return
        if wide["gate_up_proj"].device.type == "meta":
            self._make_projections("meta", dtype)
            return
        for name in PROJECTIONS:
            parts = self._parts(name, wide.pop(name))
            self._parameters[name] = None  # the wide weights of one projection go before the next is made
            for part, tensor in parts.items():
                self._hold(part, tensor)
        self._make_input_scales(self.gate_up_proj.device)

    def _check_experts(self, config: MoEConfig, dtype: torch.dtype) -> None:
        """Raises `ValueError` where no experts can compute a layer of `config` here."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        held = self.quantized_parameters()
        if not held:
            super()._apply(fn, recurse)
            return self
        unset = [n for n, (p, version) in self._unset_scales.items() if held[n] is p and version_of(p) == version]
        for name in held:
            self._parameters[name] = None
        super()._apply(fn, recurse)
        for name, parameter in held.items():
            moved = fn(parameter.data)
            if moved.dtype != parameter.dtype:  # another dtype was meant for wide numbers: only a device is taken over
                moved = parameter.data.to(moved.device)
            if name in unset and parameter.device.type == "meta" and moved.device.type != "meta":
                moved.fill_(torch.nan)  # no longer what memory happens to hold
            self._parameters[name] = nn.Parameter(moved, requires_grad=False)
        self._unset_scales = {}
        for name in unset:
            self._mark_unset(name)
        probe = fn(torch.empty(0, dtype=self._wide_dtype, device=next(iter(held.values())).device))
        self._wide_dtype = probe.dtype
        return self

    def _is_wide(self, name: str, tensor: Tensor, beside: Mapping[str, Tensor]) -> bool:
        """Whether `tensor` is to be quantized before it becomes `name`.

        Raises:
            ValueError: its values come from elsewhere, and can't be taken as they are.
        """
        mine: Tensor = getattr(self, name)
        if name not in PROJECTIONS or tensor.dtype == mine.dtype:
            if absent := self._parts_missing(name, beside):
                raise ValueError(alone(name, absent))
            return False
        if self.weight_scheme is None and tensor.dtype.itemsize > 1:
            return False
        brings = [name + suffix for suffix in FIELDS if name + suffix in beside]
        if tensor.dtype.itemsize == 1 or brings:
            raise ValueError(mismatch(name, tensor.dtype, mine.dtype))
        return True

    def _parts_missing(self, name: str, beside: Mapping[str, Any], prefix: str = "") -> list[str]:
        """What the values of projection `name` mean nothing without, and is not in `beside`."""
        if name not in PROJECTIONS:
            return []
        held = [name + suffix for suffix in FIELDS if getattr(self, name + suffix) is not None]
        return [part for part in held if prefix + part not in beside]

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        for name in PROJECTIONS:
            given, mine = state_dict.get(prefix + name), getattr(self, name)
            if isinstance(given, Tensor) and mine is not None and given.dtype != mine.dtype:
                if given.dtype.itemsize == 1 or mine.dtype.itemsize == 1:
                    error_msgs.append(mismatch(prefix + name, given.dtype, mine.dtype))
                    return
            if given is not None and (absent := self._parts_missing(name, state_dict, prefix)):
                error_msgs.append(alone(prefix + name, [prefix + part for part in absent]))
                return
        super()._load_from_state_dict(  # type: ignore[misc]
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if any(prefix + name in state_dict for name in (INPUT_SCALE, DOWN_INPUT_SCALE)):
            self._look_at_scales()


def version_of(parameter: Tensor) -> int:
    """How often it has been written to, where torch counts."""
    return -1 if parameter.is_inference() else parameter._version


def numbers_of(name: str, value: object) -> Tensor:
    """A number, numbers or a tensor of them as float32."""
    try:
        return torch.as_tensor(value, dtype=torch.float32, device=value.device if isinstance(value, Tensor) else "cpu")
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{said(name, value)}: must be a number, or a tensor of numbers") from None


def check_loaded(name: str, tensor: Tensor, held: torch.dtype) -> None:
    """Raises `ValueError` for a tensor whose numbers can't become some of dtype `held`: floats of two bytes and more
    take floats, all else takes its own dtype."""
    wide = held.is_floating_point and held.itemsize > 1
    if tensor.dtype != held and not (wide and tensor.is_floating_point()):
        raise ValueError(f"{name} is {tensor.dtype}: must be {held}{', or another floating dtype' if wide else ''}")


def mismatch(name: str, given: torch.dtype, mine: torch.dtype) -> str:
    """Why values of one dtype can't be copied into a parameter of another without their scales."""
    quantized = mine.itemsize == 1
    way = "quantize_ the layer after loading, or use load_experts" if quantized else "quantize_ the layer first"
    return f"{name} is {given} and the layer holds {mine}: values mean nothing without their scales; {way}"


def alone(name: str, absent: Sequence[str]) -> str:
    """Why the values of a quantized projection can't be taken by themselves."""
    return f"{name} comes without {' and '.join(absent)}: values mean nothing without their scales; give them together"


def copy_bits(to: Tensor, values: Tensor) -> None:
    """Copies numbers, or bytes where both are of one byte."""
    if to.dtype.itemsize == 1 and to.dtype == values.dtype:
        to.view(torch.uint8).copy_(values.view(torch.uint8))
    else:
        to.copy_(values)


def quantize_(module: nn.Module, config: QuantConfig) -> nn.Module:
    """Quantizes the routed experts of every `MoELayer` in `module`, in place; routers, shared experts, biases and
    latent projections stay as they are.

    The wide weights are freed one projection at a time. Parameters keep their names, with `_scale_inv` beside them, and
    need no gradient: make the optimizer after this. `state_dict` and `integrations.checkpoint` save and load them as
    they are. Every rank of a layer's group calls it, with the same configuration. A layer that has been quantized takes
    another configuration with the same weights.

    Returns:
        `module`.

    Raises:
        ValueError: no `MoELayer` there, weights quantized by another scheme, ranks that disagree, or no experts that
            can compute it; names the layer. Layers before it have been quantized then.
    """
    check_kind("module", module, nn.Module, "a MoELayer, or a module that contains one")
    scheme = config if isinstance(config, str) and config in FORMATS else "fp8_block"
    check_kind("config", config, QuantConfig, f"a QuantConfig, such as QuantConfig({scheme!r})")
    layers = [layer for layer in module.modules() if isinstance(layer, WithQuantizedExperts)]
    if not layers:
        raise ValueError(f"quantize_ of a {type(module).__name__} without a MoELayer: nothing to quantize")
    for layer in layers:
        layer._quantize(config)
    return module
