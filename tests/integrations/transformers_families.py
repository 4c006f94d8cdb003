"""A tiny random model for every preset of `epmoe.integrations.transformers`, and what it should give.

Sizes are odd where they can be (E = 5 or 6 over 2 and 4 ranks), every weight matters (biases, correction bias, norms),
and dense layers, shared experts and auxiliary losses are there where the family has them.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from epmoe.integrations.transformers import PRESETS, Preset

VOCABULARY = 64
RECENT = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)  # 5.17 fails on Granite's auxiliary loss
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"intermediate_size": 20, "moe_intermediate_size": 12, "num_experts_per_tok": 2}
_AUX = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
_SHARED = {"shared_expert_intermediate_size": 10}
_MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
_DEEPSEEK = {**_MOE, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4, "topk_group": 2}
_FIVE = {"intermediate_size": 12, "num_local_experts": 5, "num_experts_per_tok": 2}
_SIX = {"num_experts": 6, "num_experts_per_tok": 2}

TINY: dict[str, dict[str, Any]] = {  # by Preset.family: the config's fields
    "Mixtral": {**_FIVE, **_AUX, "head_dim": 8},
    "Qwen2-MoE": {**_MOE, **_SIX, **_SHARED, **_AUX, "mlp_only_layers": [0]},
    "Qwen3-MoE": {**_MOE, **_SIX, **_AUX, "norm_topk_prob": True, "mlp_only_layers": [0], "head_dim": 8},
    "Qwen3-Next": {
        **_MOE,
        **_SIX,
        **_SHARED,
        **_AUX,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "head_dim": 8,
    },
    "OLMoE": {"intermediate_size": 12, **_SIX, **_AUX},
    "DeepSeek-V2": {
        **_DEEPSEEK,
        **_MLA,
        "topk_method": "group_limited_greedy",
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
    },
    "DeepSeek-V3": {**_DEEPSEEK, **_MLA, "first_k_dense_replace": 1},
    "GLM-4 MoE": {**_DEEPSEEK, "first_k_dense_replace": 1, "head_dim": 8},
    "GLM-4 MoE Lite": {**_DEEPSEEK, **_MLA, "mlp_layer_types": ["dense", "sparse"]},
    "gpt-oss": {
        **_FIVE,
        **_AUX,
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4,
        "swiglu_limit": 1.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "Llama 4": {**_FIVE, "intermediate_size_mlp": 20, "head_dim": 8, "interleave_moe_layer_step": 2},
    "Granite-MoE": {**_FIVE, **(_AUX if RECENT else {})},
    "MiniMax-M2": {**_FIVE, **_AUX, "head_dim": 8},
    "ERNIE 4.5 MoE": {
        **_MOE,
        **_AUX,
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "HunYuan-MoE": {"intermediate_size": 12, "num_experts": 6, "moe_topk": 2, "head_dim": 8},
}


def preset_of(family: str) -> Preset:
    return next(preset for preset in PRESETS if preset.family == family)


def tiny_model(family: str, seed: int, **sizes: Any) -> PreTrainedModel:
    """The family's tiny model, in fp32, with every parameter and correction bias drawn from `seed`; `sizes` are fields
    of its config that are to be others."""
    config = CONFIG_MAPPING[preset_of(family).model_types[-1]](**{**_COMMON, **TINY[family], **sizes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    randomize(model, seed)
    return model


@torch.no_grad()
def randomize(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        noise = torch.randn(tensor.shape, generator=generator)
        if "correction_bias" in name:
            tensor.copy_(0.2 * noise)
        elif isinstance(tensor, nn.Parameter):
            if "norm" in name:
                tensor.add_(0.1 * noise)
            else:
                tensor.copy_(noise * (tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 0.3))


def batch(rank: int, seed: int) -> torch.Tensor:
    """The tokens `[2, T]` of one rank; each rank has another number of them."""
    generator = torch.Generator().manual_seed(seed + 1000 + rank)
    return torch.randint(3, VOCABULARY, (2, (9, 4, 2, 6)[rank]), generator=generator)
