"""`parallelize`: the experts of a `transformers` model spread over ranks, everything else left as it is.

    model ── block ── router (stays)         block ── router (stays)
                  ├── experts [E, ...]   ──►       ├── RoutedExperts [L, ...]
                  └── shared  (stays)              └── shared  (stays)

E experts, L experts on this rank.
"""

from __future__ import annotations

import dataclasses
import os
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from epmoe.checks import check_kind, said
from epmoe.comm import EPGroup
from epmoe.config import MoEConfig
from epmoe.integrations.transformers.experts import RoutedExperts
from epmoe.integrations.transformers.gather import whole_experts
from epmoe.integrations.transformers.presets import PRESETS, Preset, moe_blocks
from epmoe.integrations.transformers.save import save_pretrained

Model = TypeVar("Model", bound=nn.Module)

FROM_THE_MODEL = (
    "hidden_size", "intermediate_size", "num_experts", "top_k", "activation", "activation_alpha", "activation_limit",
    "router", "router_weight_on_input", "expert_bias", "num_shared_experts", "shared_intermediate_size",
    "shared_expert_gate", "shared_experts_order", "latent_size",
)  # fmt: skip
"""Fields of `MoEConfig` that say what the model is, whose router and shared experts stay its own."""
OPTIONS = tuple(field.name for field in dataclasses.fields(MoEConfig) if field.name not in FROM_THE_MODEL)
_CALLED_HERE = {
    "torch_dtype": "it is called dtype here",
    "device_map": "a rank has its experts and all the rest on one device; it is called device here",
    "quantization_config": "quant=QuantConfig(...) says how experts are held",
    "attn_implementation": "set it in the config that is given as config=",
}


def parallelize(
    model: Model,
    ep: EPGroup | None = None,
    *,
    presets: Sequence[Preset] = PRESETS,
    dispatcher: str = "auto",
    experts: str = "auto",
    placement: str | tuple[tuple[int, ...], ...] = "contiguous",
    **options: Any,
) -> Model:
    """Spreads the experts of every MoE block of `model` over the ranks of `ep`, in place; returns `model`.

    The blocks keep their router (auxiliary losses and recorded router logits go on working), shared experts and return
    types; dense layers, `forward` and `generate` are untouched. Afterwards each rank holds only its own experts, has
    tokens of its own, and all ranks must call the model equally often: `model.generate` does that by itself
    (`synced_gpus`) where `ep` spans all processes. `model.save_pretrained` becomes collective and writes the whole
    model. For gradients see `epmoe.integrations.gradients`.

    Args:
        model: the same weights on every rank; on the meta device, the experts stay there.
        ep: the ranks that share the experts; None: all of them stay in this process.
        presets: what is known of each family; put one of your own first.
        dispatcher, experts, placement: as of `MoEConfig`.
        options: its other settings: `max_tokens_per_rank`, `dispatch_scheme`, `chunk_tokens`, `expert_capacity`,
            `overflow`, `quant`, `validate`, ... Those that the model decides (sizes, router, activation, shared
            experts) can't be given.

    Raises:
        ValueError: an option that there is not, no preset fits (the message shows how to write one), the model is
            parallelized already, or what `MoELayer` can't do here. The model is unchanged then.

    Example::

        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        parallelize(model, EPGroup())
    """
    if not isinstance(model, nn.Module):
        hint = "; from_pretrained(path, ep) loads one" if isinstance(model, (str, os.PathLike)) else ""
        raise ValueError(f"{said('model', model)}: must be a model of transformers{hint}")
    options = {"dispatcher": dispatcher, "experts": experts, "placement": placement, **options}
    check_arguments("parallelize", ep, presets, options)
    layers = planned_experts(model, ep, presets, **options)
    originals = {name: model.get_submodule(name) for name in layers}
    for name, layer in layers.items():
        layer.check_device(next(originals[name].parameters()).device)
    for name, layer in layers.items():
        layer.take_from(originals.pop(name))
        install(model, {name: layer})
    bind_methods(model, ep)
    return model


def check_arguments(function: str, ep: EPGroup | None, presets: Sequence[Preset], options: Mapping[str, Any]) -> None:
    """Raises `ValueError` for arguments of `function` that are none; the ones that a model decides are told apart."""
    check_kind("ep", ep, (EPGroup, type(None)), "an EPGroup, or None for all experts in this process")
    if not isinstance(presets, (list, tuple)) or not all(isinstance(preset, Preset) for preset in presets):
        raise ValueError(f"{said('presets', presets)}: must be Presets, such as (mine, *PRESETS)")
    for name in options:
        if name in OPTIONS:
            continue
        if name in FROM_THE_MODEL:
            raise ValueError(f"{name}=...: {function} takes it from the model; leave it out")
        own = ("dtype", "device", "auto_class", "config", "progress") if function == "from_pretrained" else ()
        hint = _CALLED_HERE.get(name) if function == "from_pretrained" else None
        known = ", ".join((*OPTIONS, "presets", *own))
        raise ValueError(f"{name}=...: {function} has no such option{f': {hint}' if hint else ''}; known: {known}")


@torch.no_grad()
def unparallelize(model: Model) -> Model:
    """Gives every rank all experts back, in the model's own modules and names, in place. Collective.

    Expert parameters are new objects: make optimizers afterwards.

    Raises:
        ValueError: the model is not parallelized, or has LoRA adapters.
    """
    for name, layer in routed_experts(model).items():
        own = whole_experts(layer, everywhere=True)
        assert own is not None
        model.set_submodule(name, own)
        if layer.preset.forward is not None:
            vars(_block(model, name)).pop("forward", None)
    for method in ("generate", "save_pretrained"):
        vars(model).pop(method, None)
    return model


def routed_experts(model: nn.Module) -> dict[str, RoutedExperts]:
    """The parallelized experts of `model`, by name.

    Raises:
        ValueError: there are none.
    """
    found = {name: module for name, module in model.named_modules() if isinstance(module, RoutedExperts)}
    if not found:
        raise ValueError(f"{type(model).__name__} has no parallelized experts: call parallelize(model, ep) first")
    return found


def planned_experts(
    model: nn.Module, ep: EPGroup | None, presets: Sequence[Preset], **options: Any
) -> dict[str, RoutedExperts]:
    """What is to take the place of every block's experts, by their name, on the meta device. Collective.

    Raises:
        ValueError: as `parallelize`.
    """
    if any(isinstance(module, RoutedExperts) for module in model.modules()):
        raise ValueError(f"{type(model).__name__} is parallelized already: unparallelize(model) first")
    layers = {}
    for name, (block, preset) in moe_blocks(model, presets).items():
        original, router = _part(block, preset.experts, preset, name), _part(block, preset.router, preset, name)
        top_k = getattr(router, preset.top_k, None)
        if not isinstance(top_k, int):
            where = f"{name}.{preset.router}.{preset.top_k}"
            raise ValueError(f"{where}={top_k!r}: must be the int K by preset {preset.family!r}")
        path = f"{name}.{preset.experts}".lstrip(".")
        layers[path] = RoutedExperts(original, preset, ep, top_k=top_k, name=path, **options)
    return layers


def install(model: nn.Module, layers: Mapping[str, RoutedExperts]) -> None:
    """Puts each of `layers` where its name says, and the preset's forward on its block if there is one."""
    for name, layer in layers.items():
        layer.stand_for(model.get_submodule(name))
        model.set_submodule(name, layer)
        if layer.preset.forward is not None:
            block = _block(model, name)
            block.forward = types.MethodType(layer.preset.forward, block)  # type: ignore[method-assign]


def bind_methods(model: nn.Module, ep: EPGroup | None) -> None:
    """The methods of `model` that have to know of the other ranks."""
    _bind(model, "save_pretrained", save_pretrained)
    if ep is not None and ep.num_ranks > 1 and ep.num_ranks == dist.get_world_size():
        _bind(model, "generate", _generate_together)


def _generate_together(model: Any, *args: Any, synced_gpus: bool | None = None, **kwargs: Any) -> Any:
    """`model.generate`, by default until the last rank is done: every rank's experts are needed until then."""
    return type(model).generate(model, *args, synced_gpus=synced_gpus is None or synced_gpus, **kwargs)


def _bind(model: nn.Module, name: str, function: Callable[..., Any]) -> None:
    if hasattr(type(model), name):
        setattr(model, name, types.MethodType(function, model))


def _part(block: nn.Module, attribute: str, preset: Preset, name: str) -> nn.Module:
    part = getattr(block, attribute, None)
    if not isinstance(part, nn.Module):
        raise ValueError(
            f"{name}: {type(block).__name__} has no module {attribute!r}, where preset {preset.family!r} expects its "
            f"{'experts' if attribute == preset.experts else 'router'}; it has "
            f"{', '.join(child for child, _ in block.named_children())}"
        )
    return part


def _block(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])
