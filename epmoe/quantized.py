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

from epmoe.checks import check_kind
from epmoe.comm import EPGroup
from epmoe.config import MoEConfig
from epmoe.fixed_scales import DOWN_INPUT_SCALE, INPUT_SCALE, WithFixedScales, version_of
from epmoe.ops.quantize_blocks import BLOCK
from epmoe.quant.config import QuantConfig
from epmoe.quant.formats import FIELDS, FORMATS, SCALE_DTYPE, WeightFormat, weight_format

PROJECTIONS = ("gate_up_proj", "down_proj")
SCALE_PARAMETERS = (*(name + suffix for name in PROJECTIONS for suffix in FIELDS), DOWN_INPUT_SCALE)


class WithQuantizedExperts(WithFixedScales):
    """The part of `MoELayer` that knows quantized experts: parameters without a gradient, which keep their dtypes when
    the layer is converted."""

    ep: EPGroup | None
    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    _kernels: dict[Any, Any]

    def __init__(self) -> None:
        super().__init__()
        self._wide_dtype = torch.get_default_dtype()
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

    def _weight_format(self, scheme: str) -> WeightFormat:
        assert self.config.quant is not None
        return weight_format(scheme, self.weight_block, self.config.quant.scale_dtype)

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
            form = self._weight_format(self.weight_scheme)
            for suffix, (part, kind) in form.parts(shape, self._zero_points).items():
                self._hold(name + suffix, torch.empty(part, device=device, dtype=kind))

        self._make_input_scales(device)

    def _parts(self, name: str, wide: Tensor) -> dict[str, Tensor]:
        """The parameters that `wide` `[n, N, K]` of one projection becomes, by name."""
        if self.weight_scheme is None:
            return {name: wide}
        parts = self._weight_format(self.weight_scheme).quantize(wide, self._zero_points)
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
        fields["gate_up_input_scale"] = getattr(self, INPUT_SCALE) if self._scales_by_expert else None
        return {field: tensor for field, tensor in fields.items() if tensor is not None}

    @torch.no_grad()
    def _quantize(self, quant: QuantConfig) -> None:
        held, asked = (None if of is None or of.weights is None else _holds(of) for of in (self.config.quant, quant))
        if held is not None and asked is not None and asked != held:
            right = [
                f"{field}={value!r}" for field, value in held.items() if field == "weights" or asked[field] != value
            ]
            raise ValueError(
                f"layer {self.name!r}: the experts are {self.weight_scheme} already: quantize_ takes wide ones, or a "
                f"configuration with {' and '.join(right)}"
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


def _holds(quant: QuantConfig) -> dict[str, Any]:
    """What a configuration says of the tensors that hold the weights."""
    fields = {name: getattr(quant, name) for name in ("weights", "block", "zero_points")}
    return {**fields, "scale_dtype": quant.scale_dtype or SCALE_DTYPE}


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
