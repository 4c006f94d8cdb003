"""`RoutedExperts`: a `MoELayer` in the place of a model's experts, called as the model calls them.

    block: h [M,H] ── the model's router ──► ids, weights [M,K] ── RoutedExperts(h, ids, weights) ──► [M,H]

M tokens of this rank, H hidden size, I expert intermediate size, E experts, L experts on this rank, K experts per
token.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from epmoe.comm import EPGroup
from epmoe.config import MoEConfig
from epmoe.integrations.transformers.layouts import to_ours
from epmoe.integrations.transformers.presets import Preset
from epmoe.kernel import MoEKernel
from epmoe.layer import MoELayer


@dataclasses.dataclass(frozen=True)
class Manner:
    """Another way to reach the same experts: settings, and the kernels made for them."""

    config: MoEConfig
    kernels: dict[tuple[torch.device, torch.dtype], MoEKernel] = dataclasses.field(default_factory=dict)


class RoutedExperts(MoELayer):
    """This rank's share of one block's experts, in `MoELayer`'s layout, routed by the model's own router.

    Built on the meta device; `take_from` the original, or `to_empty` and load. All that knows `MoELayer` knows it:
    gradients, clipping, checkpoints, `add_lora`.

    Args:
        original: the model's experts module; a skeleton without memory is kept to rebuild it from.
        top_k: K.
        name: the module's name in the model.
        options: fields of `MoEConfig`: placement, dispatcher, experts, ...

    Raises:
        ValueError: tensors that the preset does not describe, or what `MoELayer` can't build.
    """

    def __init__(
        self, original: nn.Module, preset: Preset, ep: EPGroup | None, *, top_k: int, name: str, **options: Any
    ) -> None:
        tensors = _described(original, preset, name)
        num_experts, width, hidden = to_ours(preset.tensors, "gate_up_proj", tensors["gate_up_proj"]).shape
        activation = preset.activation_of(original)
        if not activation.gated:
            raise ValueError(f"{name}: preset {preset.family!r}: activation {activation.name!r} is not gated")
        down = to_ours(preset.tensors, "down_proj", tensors["down_proj"]).shape
        if down != (num_experts, hidden, width // 2) or width % 2:
            raise ValueError(
                f"{name}: down_proj {tuple(tensors['down_proj'].shape)} does not fit gate_up_proj "
                f"{tuple(tensors['gate_up_proj'].shape)}: preset {preset.family!r} says {preset.tensors}"
            )
        config = MoEConfig(
            hidden_size=hidden,
            intermediate_size=width // 2,
            num_experts=num_experts,
            top_k=top_k,
            activation=activation.name,
            activation_alpha=activation.alpha,
            activation_limit=activation.limit,
            router_weight_on_input=preset.weight_on_input,
            expert_bias=preset.tensors.gate_up_bias is not None,
            **options,
        )
        dtype = tensors["gate_up_proj"].dtype
        super().__init__(config, ep, device="meta", dtype=dtype, router=_the_models_router, name=name)
        self.preset = preset
        self._token_mask: Tensor | None = None
        self._skeleton = (_on_meta(original),)  # in a tuple: no submodule
        self.train(original.training)
        for our, tensor in tensors.items():
            mine = self.get_parameter(our)
            mine.requires_grad_(tensor.requires_grad and mine.dtype == dtype)

    @torch.no_grad()
    def take_from(self, original: nn.Module) -> None:
        """Copies this rank's experts out of the model's; keeps the parameters where all stay here as they are."""
        if self.weight_scheme is not None:
            self.to_empty(device=next(original.parameters()).device)
            for our, tensor in _described(original, self.preset, self.name).items():
                for expert in self.local_experts:
                    row = to_ours(self.preset.tensors, our, tensor[expert]).contiguous()
                    self.load_experts({our: row[None]}, [expert])
            return
        everything = self.local_experts == tuple(range(self.config.num_experts))
        ids = torch.tensor(self.local_experts, device="cpu")
        for our, tensor in _described(original, self.preset, self.name).items():
            mine = tensor if everything else tensor.detach()[ids.to(tensor.device)]
            mine = to_ours(self.preset.tensors, our, mine)
            if mine is not tensor or not isinstance(mine, nn.Parameter):
                mine = nn.Parameter(mine.detach().contiguous(), requires_grad=tensor.requires_grad)
            setattr(self, our, mine)

    def check_device(self, device: torch.device) -> None:
        """Raises `ValueError` where dispatcher and experts can't work with parameters on `device`."""
        if device.type != "meta":
            self.kernel(device, self.dtype)

    def stand_for(self, original: nn.Module) -> None:
        """Keeps the skeleton of `original`, which is about to leave the model."""
        self._skeleton = (_on_meta(original),)

    def skeleton(self) -> nn.Module:
        """The model's own experts module again, with parameters of full size on the meta device."""
        skeleton = _on_meta(self._skeleton[0])
        skeleton.train(self.training)
        for our, theirs in self.preset.tensors.names().items():
            skeleton.get_parameter(theirs).requires_grad_(self.get_parameter(our).requires_grad)
        return skeleton

    def manner(self, dispatcher: str, max_tokens_per_rank: int) -> Manner:
        """This layer's settings with another dispatcher, for `reached`; the same on all ranks."""
        config = dataclasses.replace(self.config, dispatcher=dispatcher, max_tokens_per_rank=max_tokens_per_rank)
        return Manner(config)

    @contextlib.contextmanager
    def reached(self, manner: Manner, token_mask: Tensor | None = None) -> Iterator[None]:
        """The body calls these experts in `manner`, with tokens of which those whose `token_mask`, bool `[M]`, is False
        are padding: they go to no expert."""
        before = self.config, self._kernels, self._token_mask
        self.config, self._kernels, self._token_mask = manner.config, manner.kernels, token_mask
        try:
            yield
        finally:
            self.config, self._kernels, self._token_mask = before

    def forward(  # type: ignore[override]  # the model calls it, with its own router's result
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """The experts' weighted sum for this rank's tokens, in the shape and dtype of `hidden_states`.

        Args:
            hidden_states: `[M, H]`; cast to the weights' dtype where the two differ outside autocast.
            top_k_index: `[M, K]` expert ids; outside `[0, E)` is no expert.
            top_k_weights: `[M, K]`.

        Raises:
            ValueError: shapes that do not fit.
            PeerError: another rank did not take part within the group's deadline.
        """
        x = hidden_states
        if not torch.is_autocast_enabled(x.device.type):
            x = x.to(self.dtype)
        out = super().forward(x, routing=(top_k_index, top_k_weights), token_mask=self._token_mask)
        assert isinstance(out, Tensor)
        return out.to(hidden_states.dtype)


def _the_models_router(x: Tensor) -> tuple[Tensor, Tensor]:
    raise ValueError("these experts have no router: call them with the ids and weights of the model's own")


def _described(original: nn.Module, preset: Preset, name: str) -> dict[str, Tensor]:
    """The experts' parameters by our names; checks that the preset describes all of them."""
    own = dict(original.named_parameters())
    names = preset.tensors.names()
    if set(own) != set(names.values()):
        raise ValueError(
            f"{name}: {type(original).__name__} has the parameters {', '.join(sorted(own)) or 'none'}; preset "
            f"{preset.family!r} describes {', '.join(sorted(names.values()))}"
        )
    for theirs, tensor in own.items():
        if tensor.dim() != (2 if "bias" in theirs else 3):
            raise ValueError(f"{name}.{theirs} has shape {tuple(tensor.shape)}: must be {preset.tensors}")
    return {our: own[theirs] for our, theirs in names.items()}


def _on_meta(original: nn.Module) -> nn.Module:
    """A copy of `original` with its config whose parameters are on the meta device: no memory of their size."""
    memo: dict[int, Any] = {}
    for parameter in original.parameters():
        meta = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(meta, requires_grad=parameter.requires_grad)
    if (config := getattr(original, "config", None)) is not None:
        memo[id(config)] = config  # the model's: what is set there later holds here
    return copy.deepcopy(original, memo)
