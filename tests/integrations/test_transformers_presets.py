"""What presets say of each family is so; one of your own is enough for a new one; what does not fit is refused."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

from torch import Tensor  # noqa: E402
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel  # noqa: E402

from epmoe.integrations.transformers import PRESETS, ExpertTensors, Preset, parallelize, routed_experts  # noqa: E402
from epmoe.integrations.transformers.layouts import to_ours, to_theirs  # noqa: E402
from epmoe.integrations.transformers.presets import moe_blocks  # noqa: E402
from tests.integrations.transformers_families import RECENT, batch, preset_of, randomize, tiny_model  # noqa: E402

FAMILIES = [preset.family for preset in PRESETS]
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}


def close(found: Tensor, expected: Tensor) -> bool:
    found, expected = found.detach().double(), expected.detach().double()
    return bool((found - expected).norm() <= 1e-5 * expected.norm())


def tiny(model_type: str, seed: int, **fields: Any) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**SIZES, **fields))
    model.set_experts_implementation("eager")
    randomize(model, seed)
    return model.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_preset_tells_the_truth(family, seed):
    model, preset = tiny_model(family, seed), preset_of(family)
    assert model.config.model_type in preset.model_types
    seen: dict[str, Any] = {}
    for name, (block, found) in moe_blocks(model).items():
        assert found is preset
        children = dict(block.named_children())
        assert set(children) == {preset.router, preset.experts, *preset.shared}, name
        block.register_forward_hook(lambda m, i, out: seen.update(block=out))
        children[preset.router].register_forward_hook(lambda m, i, out: seen.update(router=out))
    out = model(batch(0, seed), labels=batch(0, seed))
    assert len(seen["router"]) == len(preset.router_returns)
    assert isinstance(seen["block"], tuple) == preset.returns.startswith("(")
    asked_for = getattr(model.config, "output_router_logits", False)
    assert (getattr(out, "aux_loss", None) is not None) == (preset.aux_loss and asked_for)
    assert asked_for or not preset.aux_loss or not RECENT


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_layouts_are_undone_and_ours_has_gates_first(transposed, interleaved):
    tensors = ExpertTensors(transposed=transposed, interleaved=interleaved, gate_up_bias="b", down_bias="c")
    gate, up = torch.randn(5, 3, 4), torch.randn(5, 3, 4)
    theirs = torch.stack((gate, up), dim=2).flatten(1, 2) if interleaved else torch.cat((gate, up), dim=1)
    theirs = theirs.transpose(1, 2) if transposed else theirs
    assert torch.equal(to_ours(tensors, "gate_up_proj", theirs), torch.cat((gate, up), dim=1))
    for name, shape in (("gate_up_proj", theirs.shape), ("down_proj", (5, 4, 3)), ("gate_up_bias", (5, 6))):
        tensor = torch.randn(shape)
        assert torch.equal(to_theirs(tensors, name, to_ours(tensors, name, tensor)), tensor)
        assert torch.equal(to_ours(tensors, name, tensor)[2], to_ours(tensors, name, tensor[2]))


@pytest.mark.parametrize("hidden_act", ["gelu", "gelu_pytorch_tanh", "swish"])
def test_the_activation_is_the_models(hidden_act, seed):
    model, x = tiny("mixtral", seed, hidden_act=hidden_act), batch(0, seed)
    expected = model(x).logits
    assert close(parallelize(model)(x).logits, expected)


def test_an_unknown_family_is_refused_with_a_preset_that_works(seed):
    model, x = tiny("phimoe", seed), batch(0, seed)
    expected = model(x).logits
    with pytest.raises(ValueError, match=r"PhimoeExperts \(gate_up_proj \(5, 24, 16\); down_proj") as error:
        parallelize(model)
    recipe = re.sub(r"^.*?\n", "", str(error.value)).replace("    ", "")
    exec(re.sub(r",\n", ",", recipe), {"model": model, "ep": None})
    assert len(routed_experts(model)) == 2
    assert close(model(x).logits, expected)


def test_a_model_without_experts_is_refused():
    config = CONFIG_MAPPING["llama"](**{k: v for k, v in SIZES.items() if "expert" not in k})
    with pytest.raises(ValueError, match="LlamaForCausalLM has no MoE block that a preset describes"):
        parallelize(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"router": "router"},
            r"has no module 'router', where .* its router; it has gate, experts",
        ),
        ({"experts": "mlp"}, r"has the experts MixtralExperts"),
        ({"top_k": "k"}, r"gate\.k=None: must be the int K"),
        (
            {"tensors": ExpertTensors(gate_up="w13")},
            r"the parameters down_proj, gate_up_proj; preset 'Mixtral'",
        ),
        ({"tensors": ExpertTensors(transposed=True)}, r"down_proj \(5, 16, 12\) does not fit gate_up_proj"),
        ({"activation": "silu"}, r"activation 'silu' is not gated"),
    ],
)
def test_a_preset_that_does_not_fit_is_refused_and_nothing_is_changed(change, message, seed):
    model = tiny("mixtral", seed)
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    with pytest.raises(ValueError, match=message):
        parallelize(model, presets=(dataclasses.replace(preset_of("Mixtral"), **change),))
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert "save_pretrained" not in vars(model)


def test_what_cannot_be_done_is_refused_before_anything_changes(seed):
    model = tiny("mixtral", seed, hidden_act="relu")
    with pytest.raises(ValueError, match=r"MixtralExperts\.act_fn is ReLU, must be one of SiLUActivation"):
        parallelize(model)
    model = tiny("mixtral", seed)
    with pytest.raises(ValueError, match="monolithic"):
        parallelize(model, experts="monolithic")
    with pytest.raises(ValueError, match="dispatcher='nowhere'"):
        parallelize(model, dispatcher="nowhere")
    with pytest.raises(ValueError, match=r"no parallelized experts: call parallelize"):
        routed_experts(model)
    parallelize(model)
    with pytest.raises(ValueError, match=r"MixtralForCausalLM is parallelized already"):
        parallelize(model)


def documented() -> list[list[str]]:
    text = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text()
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows if len(row) == 7]


def test_the_documented_table_is_that_of_the_presets():
    def row(preset: Preset) -> list[str]:
        code = [f"`{name}`" for name in preset.model_types]
        shared = ", ".join(f"`{name}`" for name in preset.shared) or "–"
        weight = " on the input" if preset.weight_on_input else ""
        return [
            preset.family,
            ", ".join(code),
            f"`{preset.blocks[0]}`",
            shared,
            str(preset.tensors),
            (preset.activation or "`hidden_act`") + (f", router weight{weight}" if weight else ""),
            "yes" if preset.aux_loss else "no",
        ]

    assert documented()[2:] == [row(preset) for preset in PRESETS]
