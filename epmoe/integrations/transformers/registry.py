"""epmoe under a name of `transformers`' own registries: `experts_implementation="epmoe"`, `ep_implementation="epmoe"`.

    register()
    AutoModelForCausalLM.from_pretrained(path, experts_implementation="epmoe")                       one process
    AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(
        fsdp_size=8, ep_size=8, ep_implementation="epmoe"))                                          with its own EP

The model keeps its experts modules; their tensors are brought into our layout at every call, which copies those of
models with transposed tensors: `parallelize` holds them in our layout instead.

M tokens, H hidden size, K experts per token, E experts of this process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from epmoe.checks import check_kind
from epmoe.comm import EPGroup
from epmoe.config import MoEConfig
from epmoe.dispatch import make_dispatcher
from epmoe.experts import ExpertWeights, select_experts_impl
from epmoe.integrations.transformers.layouts import to_ours
from epmoe.integrations.transformers.presets import ExpertTensors, Preset
from epmoe.kernel import MoEKernel
from epmoe.placement import ExpertPlacement

NAME = "epmoe"
TIMEOUT = 300.0  # seconds of any wait on the other ranks
OWN_GATES = {"GptOssExperts": "swiglu_oai"}
"""Experts classes with an `_apply_gate` of their own, and our name for it."""


def register(name: str = NAME) -> None:
    """Makes `name` known as an experts implementation and, where transformers has them, as an EP implementation."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    check_kind("name", name, str, "a str")
    ALL_EXPERTS_FUNCTIONS.register(name, experts_forward)
    try:
        from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
    except ImportError:  # before 5.23
        return

    class EpmoeEP(EPImplementation):
        """Tokens travel to their experts and back by a dispatcher of epmoe. Ranks of a TP group, which share a batch,
        each send their part of it."""

        def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            # One for all layers: it owns their scratch.
            self.experts, self.ep = experts, EPGroup.from_name(ep_mesh.get_group().group_name, TIMEOUT)

        def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            if self.tp_mesh.size() == 1:
                return run_experts(self.experts, hidden_states, top_k_index, top_k_weights, self.ep)
            x, ids, weights = (own_rows(t, self.tp_mesh) for t in (hidden_states, top_k_index, top_k_weights))
            return all_rows(run_experts(self.experts, x, ids, weights, self.ep), hidden_states.shape, self.tp_mesh)

    EPImplementationInterface.register(name, EpmoeEP)


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of a `transformers` experts module, all its experts being here: `[M, H]`.

    Args:
        self: the module; its class says how its tensors are laid out.
        hidden_states: `[M, H]`.
        top_k_index: `[M, K]`; ids of E and above are no expert.
        top_k_weights: `[M, K]`.

    Raises:
        ValueError: an activation that is not known here, or experts with a norm behind them.
    """
    return run_experts(self, hidden_states, top_k_index, top_k_weights, None)


def run_experts(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, ep: EPGroup | None
) -> Tensor:
    """The experts module's tensors under our kernel, whose other experts are on the other ranks of `ep`."""
    preset = _preset_of(type(experts), experts)
    names = preset.tensors.names()
    tensors = {our: to_ours(preset.tensors, our, getattr(experts, theirs)) for our, theirs in names.items()}
    device = hidden_states.device
    dtype = tensors["gate_up_proj"].dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    kernel = _kernel(experts, preset, tensors["gate_up_proj"], top_k_index.shape[1], device, dtype, ep)
    own = {our: tensor.contiguous() for our, tensor in tensors.items()}
    biases = own.get("gate_up_bias"), own.get("down_bias")
    weights = ExpertWeights(own["gate_up_proj"], own["down_proj"], *biases).to(dtype)
    precise = top_k_weights.to(torch.promote_types(dtype, torch.float32))
    with torch.autocast(device.type, enabled=False):
        out = kernel(hidden_states.to(dtype).contiguous(), top_k_index.to(torch.int32), precise, weights)
    return out.routed.to(hidden_states.dtype)


def own_rows(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's rows of what all ranks of `mesh` have; the gradient is all rows' again."""
    return DTensor.from_local(whole, mesh, [Replicate()], run_check=False).redistribute(mesh, [Shard(0)]).to_local()


def all_rows(own: Tensor, shape: torch.Size, mesh: DeviceMesh) -> Tensor:
    """The inverse of `own_rows`, `[M, H]` on every rank; the gradient is this rank's rows'."""
    part = DTensor.from_local(own.contiguous(), mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1))
    return part.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Replicate()])


def _kernel(
    experts: nn.Module,
    preset: Preset,
    w1: Tensor,
    top_k: int,
    device: torch.device,
    dtype: torch.dtype,
    ep: EPGroup | None,
) -> MoEKernel:
    """The kernel for these experts: chosen once, then kept with the module that it is for."""
    kept = vars(experts).setdefault("_epmoe_kernels", {})
    key = (w1.shape[0], device, dtype)
    if key not in kept:
        ranks = 1 if ep is None else ep.num_ranks
        placement = ExpertPlacement.contiguous(w1.shape[0] * ranks, ranks)
        activation = preset.activation_of(experts)
        config = MoEConfig(
            hidden_size=w1.shape[2],
            intermediate_size=w1.shape[1] // 2,
            num_experts=placement.num_experts,
            top_k=top_k,
            activation=activation.name,
            activation_alpha=activation.alpha,
            activation_limit=activation.limit,
            expert_bias=preset.tensors.gate_up_bias is not None,
        )
        dispatcher = make_dispatcher("auto", ep, placement, device, layer=type(experts).__name__)
        kept[key] = MoEKernel(dispatcher, select_experts_impl(config, device=device, dtype=dtype).experts)
    return kept[key]


def _preset_of(cls: type, experts: Any) -> Preset:
    """What the class says of itself, as a preset."""
    from transformers.integrations import moe

    known = getattr(cls, "_apply_gate", None) is moe._default_apply_gate
    norm = getattr(experts, "has_post_expert_norm", False)  # not in 5.17
    if not experts.has_gate or norm or not (known or cls.__name__ in OWN_GATES):
        what = "no gate" if not experts.has_gate else "a norm" if norm else "a gate of its own"
        raise ValueError(f"experts_implementation={NAME!r}: {cls.__name__} has {what}, which is not supported")
    biases = ("gate_up_proj_bias", "down_proj_bias") if experts.has_bias else (None, None)
    tensors = ExpertTensors(
        gate_up_bias=biases[0],
        down_bias=biases[1],
        transposed=experts.is_transposed,
        interleaved=not experts.is_concatenated,
    )
    return Preset(cls.__name__, (), (), tensors=tensors, activation=OWN_GATES.get(cls.__name__))
