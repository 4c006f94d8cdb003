"""`from_pretrained` of integers of a byte each, compressed-tensors' `int-quantized`: dequantized, or the very bytes; of
plain weights beside a quantized cache; and of settings that leave something out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from epmoe.integrations.transformers import from_pretrained, routed_experts, unparallelize  # noqa: E402
from epmoe.quant.config import QuantConfig  # noqa: E402
from tests.integrations.quantized_checkpoints import (  # noqa: E402
    SINGLE,
    Integers,
    compressed,
    gptq,
    int8,
    packed_integers,
    write,
)
from tests.integrations.test_transformers_packings import error, error_of_most  # noqa: E402
from tests.integrations.test_transformers_packings_edges import EXPERT, logits_of, made  # noqa: E402
from tests.integrations.transformers_families import preset_of  # noqa: E402

ROWS: dict[str, Any] = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
FIXED = {**ROWS, "strategy": "tensor", "dynamic": False}
BYTES: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}
CHANNELS = compressed("int-quantized", ROWS, strategy="channel", **BYTES)
TENSORS = compressed("naive-quantized", ROWS, **BYTES)
STATIC = compressed("int-quantized", FIXED, strategy="channel", **BYTES)
FIXED_SCALES = (0.08, 0.04)  # past which next to nothing lies
CASES = {
    "channels": ("Qwen3-MoE", CHANNELS, int8()),
    "tensors": ("Mixtral", TENSORS, int8(whole=True)),
    "static": ("DeepSeek-V3", STATIC, int8(fixed=FIXED_SCALES)),
    "transposed": ("Llama 4", CHANNELS, int8()),
}


@pytest.mark.parametrize("case", CASES)
def test_bytes_are_dequantized_or_kept(case, seed, tmp_path, capfd):
    family, settings, pack = CASES[case]
    narrow, wide, numbers, stored = write(family, settings, pack, tmp_path, seed)
    plain = AutoModelForCausalLM.from_pretrained(wide)
    expected = logits_of(plain, seed)
    model = from_pretrained(narrow, progress=False)
    assert error(logits_of(model, seed), expected) <= 1e-5
    for name, tensor in unparallelize(model).state_dict().items():
        assert error(tensor, plain.state_dict()[name]) <= 1e-6, name  # one rounding to float32 or two

    quant = QuantConfig.from_checkpoint(settings)
    assert (quant.weights, quant.scales) == ("int8_row", "static" if case == "static" else "dynamic")
    capfd.readouterr()
    kept = from_pretrained(narrow, quant=quant)
    layers = routed_experts(kept)
    matrices = sum(2 * len(layer.local_experts) for layer in layers.values())
    assert f"{matrices} matrices of experts in INT8: kept as they are, int8_row\n" in capfd.readouterr().err
    bound = 0.05 if case == "static" else 0.02  # rows are rounded too
    assert error_of_most(logits_of(kept, seed), expected) <= bound
    names = preset_of(family).disk
    for name, layer in layers.items():
        on_disk = name.replace("mlp", names.block) if names.block else name
        for our, parts in (("gate_up_proj", (names.gate, names.up)), ("down_proj", (names.down,))):
            values, scales = (layer.get_parameter(our + suffix).data for suffix in ("", "_scale_inv"))
            for expert in range(layer.config.num_experts):
                stems = [f"{on_disk}.{expert}.{part}.weight" for part in parts]
                assert torch.equal(values[expert], torch.cat([stored[stem] for stem in stems]))
                found = values[expert].double() * scales[expert].double()[:, None]
                assert torch.equal(found, torch.cat([numbers[stem] for stem in stems]))
            if case == "static":
                fixed = FIXED_SCALES[our == "gate_up_proj"]
                assert torch.equal(layer.get_parameter(f"{our}_input_scale").unique(), torch.tensor([fixed]))


def test_another_scheme_rounds_bytes_again(seed, tmp_path):
    narrow, wide = made(seed, tmp_path, CHANNELS, int8())
    expected = logits_of(AutoModelForCausalLM.from_pretrained(wide), seed)
    for scheme, bound in (("fp8_row", 0.15), ("int8_g32", 0.03)):
        model = from_pretrained(narrow, quant=QuantConfig(scheme))
        assert {layer.weight_scheme for layer in routed_experts(model).values()} == {scheme}
        assert 1e-4 < error_of_most(logits_of(model, seed), expected) <= bound


def test_weights_are_read_whatever_activations_they_met(seed, tmp_path):
    settings = compressed("int-quantized", {**ROWS, "symmetric": False}, strategy="channel", **BYTES)
    narrow, wide = made(seed, tmp_path, settings, int8())
    expected = logits_of(AutoModelForCausalLM.from_pretrained(wide), seed)
    assert error(logits_of(from_pretrained(narrow), seed), expected) <= 1e-5
    with pytest.raises(
        ValueError, match=r"input_activations\.symmetric=False: must be True in 'int8_row': leave quant"
    ):
        QuantConfig.from_checkpoint(settings)


@pytest.mark.parametrize("scheme", [None, "int8_row"])
def test_zero_points_of_bytes_are_read_where_they_are_zeros_and_else_refused(scheme, seed, tmp_path):
    zeros = f"{EXPERT}.weight_zero_point"
    narrow, wide = made(seed, tmp_path, CHANNELS, int8(), lambda t: t.update({zeros: torch.zeros(96, 1).char()}))
    quant = None if scheme is None else QuantConfig(scheme)
    expected = logits_of(AutoModelForCausalLM.from_pretrained(wide), seed)
    kept = from_pretrained(narrow, quant=quant)
    assert error_of_most(logits_of(kept, seed), expected) <= (1e-5 if scheme is None else 0.02)
    tensors = load_file(narrow / SINGLE)
    save_file({**tensors, zeros: torch.ones(96, 1).char()}, narrow / SINGLE)
    with pytest.raises(ValueError, match=rf"'{zeros}' is not all zeros: INT8 weights with zero points are not"):
        from_pretrained(narrow, quant=quant)


@pytest.mark.parametrize("stem", [EXPERT, "model.layers.1.self_attn.q_proj"])
def test_bytes_without_scales_are_named(stem, seed, tmp_path):
    narrow, _ = made(seed, tmp_path, CHANNELS, int8(), lambda tensors: tensors.pop(f"{stem}.weight_scale"))
    with pytest.raises(ValueError, match=rf"'{stem}\.weight' is (I8|torch\.int8), and neither .* is there"):
        from_pretrained(narrow, progress=False)


def with_settings(path: Path, settings: dict[str, Any]) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


@pytest.mark.parametrize("form", ["modelopt", "modelopt-file", "compressed-tensors"])
def test_weights_beside_a_quantized_cache_are_loaded_as_they_are(form, seed, tmp_path):
    _, wide = made(seed, tmp_path, CHANNELS, int8())
    plain = AutoModelForCausalLM.from_pretrained(wide)
    tensors = load_file(wide / SINGLE)
    scales = {f"model.layers.{layer}.self_attn.{which}_scale": torch.ones(1) for layer in range(2) for which in "kv"}
    save_file({**tensors, **scales}, wide / SINGLE)
    cache = {"num_bits": 8, "type": "float", "dynamic": False}
    settings: dict[str, Any] = {
        "modelopt": {"quant_method": "modelopt", "quant_algo": None, "kv_cache_scheme": cache},
        "modelopt-file": {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}},
        "compressed-tensors": {"quant_method": form, "format": "dense", "config_groups": {}, "kv_cache_scheme": cache},
    }[form]
    if form == "modelopt-file":
        (wide / "hf_quant_config.json").write_text(json.dumps(settings))
    else:
        with_settings(wide, settings)
    model = from_pretrained(wide, quant=QuantConfig.from_checkpoint(settings), progress=False)
    assert not hasattr(model.config, "quantization_config")
    assert error(logits_of(model, seed), logits_of(plain, seed)) <= 1e-5
    for name, tensor in unparallelize(model).state_dict().items():
        assert torch.equal(tensor, plain.state_dict()[name]), name


@pytest.mark.parametrize(("settings", "pack"), [
    (
        compressed("pack-quantized", num_bits=4, type="int", group_size=32, symmetric=True),
        packed_integers(Integers(4, 32)),
    ),
    (
        {"quant_method": "intel/auto-round", "backend": "auto_round:gptq:exllamav2", "bits": 4, "group_size": 32},
        gptq(Integers(4, 32, zeros=True)),
    ),
    (
        {"quant_method": "intel/auto-round", "backend": "auto_round:exllamav2", "bits": 4, "group_size": 32},
        gptq(Integers(4, 32, zeros=True), less_one=False),
    ),
], ids=["no-strategy", "auto-round-gptq", "auto-round"])  # fmt: skip
def test_settings_of_older_files_are_read(settings, pack, seed, tmp_path):
    narrow, wide = made(seed, tmp_path, {**settings, "sym": False}, pack)
    expected = logits_of(AutoModelForCausalLM.from_pretrained(wide), seed)
    for quant in (None, QuantConfig.from_checkpoint({**settings, "sym": False})):
        assert error(logits_of(from_pretrained(narrow, quant=quant), seed), expected) <= 1e-5
