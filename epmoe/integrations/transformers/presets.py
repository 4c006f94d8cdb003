"""What each family of `transformers` models calls its MoE parts, and how its expert tensors are laid out.

A preset is plain data: `parallelize` finds the blocks by class name, exchanges the experts inside them and leaves the
router and everything else alone; `from_pretrained` finds the experts' tensors in files by `DiskNames`.

E experts, H hidden size, I expert intermediate size, K experts per token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from epmoe.config import Activation
from epmoe.integrations.transformers.llama4 import llama4_block_forward

_ACTIVATION_OF = {  # class of the experts' act_fn, which multiplies the up projection: our name for the pair
    "SiLUActivation": "swiglu",
    "SiLU": "swiglu",
    "GELUActivation": "geglu",
    "GELU": "geglu",
    "GELUTanh": "geglu_tanh",
    "PytorchGELUTanh": "geglu_tanh",
    "ReLUSquaredActivation": "reglu2",
}


@dataclasses.dataclass(frozen=True)
class ExpertTensors:
    """Names and layout of a model's fused expert tensors.

    Attributes:
        gate_up, down: parameters of the experts module: `[E, 2I, H]` and `[E, H, I]`.
        gate_up_bias, down_bias: `[E, 2I]` and `[E, H]`; None where there are none.
        transposed: they are `[E, H, 2I]` and `[E, I, H]` instead.
        interleaved: along 2I gate and up alternate (g0, u0, g1, u1, ...); otherwise all gates come first.
    """

    gate_up: str = "gate_up_proj"
    down: str = "down_proj"
    gate_up_bias: str | None = None
    down_bias: str | None = None
    transposed: bool = False
    interleaved: bool = False

    def names(self) -> dict[str, str]:
        """Our name of each tensor (`MoELayer`'s): the model's."""
        ours = {
            "gate_up_proj": self.gate_up,
            "down_proj": self.down,
            "gate_up_bias": self.gate_up_bias,
            "down_bias": self.down_bias,
        }
        return {our: theirs for our, theirs in ours.items() if theirs is not None}

    def __str__(self) -> str:
        shapes = "[E, H, 2I], [E, I, H]" if self.transposed else "[E, 2I, H], [E, H, I]"
        marks = (", interleaved" if self.interleaved else "") + (", biases" if self.gate_up_bias else "")
        return shapes + marks


@dataclasses.dataclass(frozen=True)
class DiskNames:
    """How published checkpoints name the experts, where it is not as the model in memory does.

    Attributes:
        block: the MoE block's own name, such as `block_sparse_moe`; None: as in memory.
        gate, up, down: one expert's matrices `<block>.experts.<e>.<gate>.weight`, `[I, H]`, `[I, H]` and `[H, I]`.
        fused_gate_up, fused_down: under the block, tensors over all experts that have another name than in memory.
    """

    block: str | None = None
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    fused_gate_up: str | None = None
    fused_down: str | None = None


@dataclasses.dataclass(frozen=True)
class Preset:
    """One family of models.

    Attributes:
        family: a name for messages and tables.
        blocks: class names of the MoE block.
        model_types: `config.model_type` of the models that have it.
        router: the block's router, by attribute; it stays the model's own.
        router_returns: what the router gives, in order; the K weights and ids reach the experts.
        top_k: the router's attribute that holds K.
        experts: the block's experts, by attribute, called as `experts(hidden [M, H], ids [M, K], weights [M, K])`.
        shared: parts of the block that see every token, by attribute (absent or None in some models); they stay.
        tensors: the experts' parameters.
        activation: None: told from the experts' `act_fn`; or a name of `epmoe.Activation`, whose constants are read
            from the experts' `alpha` and `limit` where it has some.
        weight_on_input: the router weight multiplies an expert's input, not its output.
        returns: what the block's forward gives.
        aux_loss: the model adds a load-balancing loss when `output_router_logits` is set.
        disk: names in checkpoints.
        forward: the block's forward, `f(block, hidden_states)`, where its own does not call the experts as above.
    """

    family: str
    blocks: tuple[str, ...]
    model_types: tuple[str, ...]
    router: str = "gate"
    router_returns: tuple[str, ...] = ("logits", "weights", "ids")
    top_k: str = "top_k"
    experts: str = "experts"
    shared: tuple[str, ...] = ()
    tensors: ExpertTensors = ExpertTensors()
    activation: str | None = None
    weight_on_input: bool = False
    returns: str = "hidden states"
    aux_loss: bool = False
    disk: DiskNames = DiskNames()
    forward: Callable[..., Any] | None = None

    def activation_of(self, experts: nn.Module) -> Activation:
        """The experts' activation.

        Raises:
            ValueError: an `act_fn` that epmoe has no gated form of.
        """
        if self.activation is not None:
            return Activation.named(self.activation, getattr(experts, "alpha", None), getattr(experts, "limit", None))
        act_fn = type(getattr(experts, "act_fn", None)).__name__
        if act_fn not in _ACTIVATION_OF:
            raise ValueError(
                f"preset {self.family!r}: {type(experts).__name__}.act_fn is {act_fn}, must be one of "
                f"{', '.join(_ACTIVATION_OF)}; or set Preset.activation"
            )
        return Activation.named(_ACTIVATION_OF[act_fn])


_BLOCK_SPARSE = DiskNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")

PRESETS = (
    Preset("Mixtral", ("MixtralSparseMoeBlock",), ("mixtral",), aux_loss=True, disk=_BLOCK_SPARSE),
    Preset(
        "Qwen2-MoE",
        ("Qwen2MoeSparseMoeBlock",),
        ("qwen2_moe",),
        shared=("shared_expert", "shared_expert_gate"),
        aux_loss=True,
    ),
    Preset("Qwen3-MoE", ("Qwen3MoeSparseMoeBlock",), ("qwen3_moe",), aux_loss=True),
    Preset(
        "Qwen3-Next",
        ("Qwen3NextSparseMoeBlock",),
        ("qwen3_next",),
        shared=("shared_expert", "shared_expert_gate"),
        aux_loss=True,
    ),
    Preset("OLMoE", ("OlmoeSparseMoeBlock",), ("olmoe",), aux_loss=True),
    Preset("DeepSeek-V2", ("DeepseekV2Moe",), ("deepseek_v2",), shared=("shared_experts",)),
    Preset("DeepSeek-V3", ("DeepseekV3MoE",), ("deepseek_v3",), shared=("shared_experts",)),
    Preset("GLM-4 MoE", ("Glm4MoeMoE",), ("glm4_moe",), shared=("shared_experts",)),
    Preset("GLM-4 MoE Lite", ("Glm4MoeLiteMoE",), ("glm4_moe_lite",), shared=("shared_experts",)),
    Preset(
        "gpt-oss",
        ("GptOssMLP",),
        ("gpt_oss",),
        router="router",
        tensors=ExpertTensors(
            gate_up_bias="gate_up_proj_bias", down_bias="down_proj_bias", transposed=True, interleaved=True
        ),
        activation="swiglu_oai",
        returns="(hidden states, router weights)",
        aux_loss=True,
    ),
    Preset(
        "Llama 4",
        ("Llama4TextMoe",),
        ("llama4", "llama4_text"),
        router="router",
        router_returns=("scores [M, E]", "logits"),
        shared=("shared_expert",),
        tensors=ExpertTensors(transposed=True),
        weight_on_input=True,
        returns="([M, H], router logits)",
        forward=llama4_block_forward,
    ),
    Preset(
        "Granite-MoE",
        ("GraniteMoeMoE",),
        ("granitemoe",),
        router="router",
        aux_loss=True,
        disk=DiskNames(fused_gate_up="input_linear.weight", fused_down="output_linear.weight"),
    ),
    Preset("MiniMax-M2", ("MiniMaxM2SparseMoeBlock",), ("minimax_m2",), aux_loss=True, disk=_BLOCK_SPARSE),
    Preset(
        "ERNIE 4.5 MoE",
        ("Ernie4_5_MoeSparseMoeBlock",),
        ("ernie4_5_moe",),
        shared=("shared_experts",),
        aux_loss=True,
    ),
    Preset("HunYuan-MoE", ("HunYuanMoEV1Moe",), ("hunyuan_v1_moe",), shared=("shared_mlp",)),
)
"""Every family that is known; `parallelize(model, ep, presets=(mine, *PRESETS))` adds one of your own."""


def find_preset(block: nn.Module, presets: Sequence[Preset] = PRESETS) -> Preset | None:
    """The first preset that knows the class of `block`."""
    return next((preset for preset in presets if type(block).__name__ in preset.blocks), None)


def moe_blocks(model: nn.Module, presets: Sequence[Preset] = PRESETS) -> dict[str, tuple[nn.Module, Preset]]:
    """Every MoE block of `model` by name, with its preset.

    Raises:
        ValueError: none is known, or one with 3-D expert tensors is not; says how to describe it.
    """
    modules = dict(model.named_modules())
    found = {name: (module, preset) for name, module in modules.items() if (preset := find_preset(module, presets))}
    known = {f"{name}.{preset.experts}".lstrip(".") for name, (_, preset) in found.items()}
    strangers = [name for name, module in modules.items() if name not in known and _looks_like_experts(module)]
    if strangers:
        raise ValueError(_how_to_describe(model, strangers[0]))
    if not found:
        raise ValueError(_how_to_describe(model, None))
    return found


def _looks_like_experts(module: nn.Module) -> bool:
    """An experts module that no preset covers: fused tensors, not ours."""
    own = dict(module.named_parameters(recurse=False))
    fused = [parameter for name, parameter in own.items() if "proj" in name and parameter.dim() == 3]
    return bool(fused) and "Expert" in type(module).__name__


def _how_to_describe(model: nn.Module, experts: str | None) -> str:
    """What is there, and the preset to write for it, filled in as far as names tell."""
    block, attribute, router, seen = "MyMoeBlock", "experts", "gate", "has no MoE block"
    shared: tuple[str, ...] = ("shared_experts",)
    if experts is not None:
        module = model.get_submodule(experts)
        parent, _, attribute = experts.rpartition(".")
        others = [name for name, _ in model.get_submodule(parent).named_children() if name != attribute]
        routers = [name for name in others if hasattr(model.get_submodule(f"{parent}.{name}"), "top_k")]
        router = (routers or others or ["gate"])[0]
        block, shared = type(model.get_submodule(parent)).__name__, tuple(name for name in others if name != router)
        tensors = "; ".join(f"{name} {tuple(parameter.shape)}" for name, parameter in module.named_parameters())
        seen = f"has the experts {type(module).__name__} ({tensors}) in {block}.{attribute}, which are not one"
    families = ", ".join(preset.family for preset in PRESETS)
    model_type = getattr(getattr(model, "config", None), "model_type", "my_model")
    return (
        f"{type(model).__name__} {seen} that a preset describes (known: {families}). Write one and pass it:\n"
        "    from epmoe.integrations.transformers import PRESETS, ExpertTensors, Preset, parallelize\n"
        f'    mine = Preset("my family", blocks=("{block}",), model_types=("{model_type}",), router="{router}",\n'
        f'                  experts="{attribute}", shared={shared},\n'
        '                  tensors=ExpertTensors(gate_up="gate_up_proj", down="down_proj", transposed=False))\n'
        "    parallelize(model, ep, presets=(mine, *PRESETS))"
    )
