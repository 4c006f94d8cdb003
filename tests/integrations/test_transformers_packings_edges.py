"""What lies beside packed weights, what else they can become, and what can't be loaded or kept is refused by name."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from epmoe.integrations.transformers import files, from_pretrained, routed_experts, unparallelize  # noqa: E402
from epmoe.integrations.transformers.files import CheckpointFiles  # noqa: E402
from epmoe.integrations.transformers.packings import all_but  # noqa: E402
from epmoe.quant.config import QuantConfig  # noqa: E402
from epmoe.quant.stored import read_settings  # noqa: E402
from tests.integrations.counted_files import Counted  # noqa: E402
from tests.integrations.quantized_checkpoints import (  # noqa: E402
    SINGLE,
    Integers,
    awq,
    compressed,
    fp8,
    fp8_of_tensors,
    gptq,
    nvfp4,
    together,
    write,
)
from tests.integrations.test_transformers_packings import AWQ, FP8, GPTQ, MODELOPT, NVFP4, error, error_of_most  # noqa: E402
from tests.integrations.transformers_families import batch  # noqa: E402

EXPERT, DENSE = "model.layers.1.mlp.experts.1.gate_proj", "model.layers.1.self_attn.q_proj"
FOUR = {**GPTQ, "bits": 4, "group_size": 32}
Change = Callable[[dict[str, Tensor]], Any]


def made(
    seed: int, path: Path, settings: dict[str, Any] | None, pack: Any, change: Change | None = None
) -> tuple[Path, Path]:
    """A Qwen3-MoE with `settings` in its config, after `change` of its tensors; and the wide one."""
    narrow, wide, _, stored = write("Qwen3-MoE", settings or {}, pack, path, seed)
    if change is not None:
        change(stored)
        save_file({name: tensor.contiguous() for name, tensor in stored.items()}, narrow / SINGLE)
    if settings is None:
        config = json.loads((narrow / "config.json").read_text())
        del config["quantization_config"]
        (narrow / "config.json").write_text(json.dumps(config))
    return narrow, wide


def logits_of(model: Any, seed: int) -> Tensor:
    with torch.no_grad():
        return model(batch(0, seed)).logits


def test_modelopts_own_file_is_read_and_what_is_of_caches_is_left_alone(seed, tmp_path):
    def with_caches(tensors: dict[str, Tensor]) -> None:
        tensors |= {f"{DENSE[:-6]}{which}_proj.{which}_scale": torch.ones(()) for which in "kv"}

    narrow, wide = made(seed, tmp_path, None, nvfp4(modelopt=True), with_caches)
    settings = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (narrow / "hf_quant_config.json").write_text(json.dumps(settings))
    expected = logits_of(AutoModelForCausalLM.from_pretrained(wide), seed)
    with CheckpointFiles(narrow, read_settings(MODELOPT)) as files:
        assert not any("scale" in name for name in all_but(files, ()))
    assert error(logits_of(from_pretrained(narrow), seed), expected) <= 1e-5
    quant = QuantConfig.from_checkpoint(settings)
    assert quant == QuantConfig("nvfp4")
    assert error(logits_of(from_pretrained(narrow, quant=quant), seed), expected) <= 1e-5


@pytest.mark.parametrize("groups", [True, False], ids=["g_idx", "no-g_idx"])
def test_layers_of_one_checkpoint_may_differ_and_zero_biases_mean_nothing(groups, seed, tmp_path):
    """As `dynamic` of GPTQ and, without `g_idx`, `extra_config` of AutoRound have it: attention in eight bits with
    other groups, experts in four."""

    def pack(stem: str, w: Tensor, generator: torch.Generator) -> Any:
        how = Integers(8, 64, zeros=True) if "self_attn" in stem else Integers(4, 32)
        tensors, numbers = gptq(how, groups=groups)(stem, w, generator)
        return (tensors | {f"{stem}.bias": torch.zeros(len(w))} if ".experts." in stem else tensors), numbers

    narrow, wide = made(seed, tmp_path, FOUR, pack)
    expected = logits_of(AutoModelForCausalLM.from_pretrained(wide), seed)
    for quant in (None, QuantConfig("int4_g32"), QuantConfig("int4_g32", zero_points=True, scale_dtype="float32")):
        assert error(logits_of(from_pretrained(narrow, quant=quant), seed), expected) <= 1e-5


@pytest.mark.parametrize(("scheme", "bound"), [("fp8_row", 0.15), ("int4_g64", 0.4), ("int8_g32", 0.03)])
def test_another_scheme_quantizes_the_numbers_again(scheme, bound, seed, tmp_path):
    narrow, wide = made(seed, tmp_path, FOUR, gptq(Integers(4, 32, ordered=True)))
    model = from_pretrained(narrow, quant=QuantConfig(scheme))
    assert {layer.weight_scheme for layer in routed_experts(model).values()} == {scheme}
    expected = logits_of(AutoModelForCausalLM.from_pretrained(wide), seed)
    assert 1e-4 < error_of_most(logits_of(model, seed), expected) <= bound


def test_fp8_matrices_of_single_experts_are_kept_where_the_models_own_tensor_is_transposed(seed, tmp_path, capfd):
    narrow, _, _, stored = write("Llama 4", FP8, fp8, tmp_path, seed)
    model = from_pretrained(narrow, quant=QuantConfig.from_checkpoint(FP8))
    assert "10 matrices of experts in FP8: kept as they are, fp8_row\n" in capfd.readouterr().err
    for name, layer in routed_experts(model).items():
        for expert in range(layer.config.num_experts):
            for our, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
                for ours, theirs in ((our, "weight"), (f"{our}_scale_inv", "weight_scale")):
                    found = layer.get_parameter(ours)[expert].view(torch.uint8).flatten()
                    on_disk = [stored[f"{name}.{expert}.{part}.{theirs}"] for part in parts]
                    assert torch.equal(found, torch.cat([t.view(torch.uint8) for t in on_disk]).flatten())


def test_layers_that_the_model_has_not_are_neither_read_nor_said(seed, tmp_path, monkeypatch, capfd):
    """As DeepSeek-V3's last one, which predicts a further token."""

    def with_another(tensors: dict[str, Tensor]) -> None:
        tensors |= {n.replace("layers.1.", "layers.2."): t.clone() for n, t in tensors.items() if "layers.1." in n}

    narrow, _ = made(seed, tmp_path, FOUR, gptq(Integers(4, 32)), with_another)
    monkeypatch.setattr(files, "safe_open", Counted.open)
    monkeypatch.setattr(Counted, "read", Counter(), raising=False)
    model = from_pretrained(narrow)
    names = [name for name in load_file(narrow / SINGLE) if name.endswith("qweight") and ".experts." not in name]
    dense = sum("layers.2." not in name for name in names)
    assert len(model.model.layers) == 2 and not any("layers.2." in name for name in Counted.read)
    assert f"\n{dense} dense matrices in GPTQ, such as " in f"\n{capfd.readouterr().err}"


def test_weights_that_another_scheme_holds_are_read_once(seed, tmp_path, monkeypatch):
    narrow, _ = made(seed, tmp_path, FP8, fp8)
    monkeypatch.setattr(files, "safe_open", Counted.open)
    monkeypatch.setattr(Counted, "read", Counter(), raising=False)
    from_pretrained(narrow, quant=QuantConfig("int4_g32"), progress=False)
    stored = load_file(narrow / SINGLE)
    read = {name: count for name, count in Counted.read.items() if name.endswith("_proj.weight")}
    assert read and all(count == stored[name].nbytes for name, count in read.items())


@pytest.mark.parametrize("fused", [False, True])
def test_biases_and_input_scales_of_experts_are_read_once(fused, seed, tmp_path, monkeypatch):
    narrow, _, _, stored = write("Llama 4" if fused else "Qwen3-MoE", MODELOPT, fp8_of_tensors(2**-7), tmp_path, seed)
    stems = [name.removesuffix("weight") for name in stored if ".experts." in name and name.endswith("_proj.weight")]
    stored = together(stored) if fused else stored | {f"{stem}bias": torch.zeros(1) for stem in stems}
    save_file(stored, narrow / SINGLE)
    monkeypatch.setattr(files, "safe_open", Counted.open)
    monkeypatch.setattr(Counted, "read", Counter(), raising=False)
    from_pretrained(narrow, quant=QuantConfig("fp8_row", scales="static", down_scales="static"), progress=False)
    beside = {n: t.nbytes for n, t in stored.items() if ".experts." in n and n.endswith(("bias", "input_scale"))}
    assert beside and {name: Counted.read[name] for name in beside} == beside


def test_scales_keep_their_dtype(seed, tmp_path):
    def pack(dtype: torch.dtype) -> Any:
        def of(stem: str, w: Tensor, generator: torch.Generator) -> Any:
            tensors, numbers = awq(Integers(4, 32, zeros=True))(stem, w, generator)
            return {name: t.to(dtype) if "scales" in name else t for name, t in tensors.items()}, numbers

        return of

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        narrow, _ = made(seed, tmp_path / str(dtype), {**AWQ, "group_size": 32}, pack(dtype))
        model = from_pretrained(narrow, quant=QuantConfig("int4_g32", zero_points=True))
        for layer in routed_experts(model).values():
            assert layer.get_parameter("down_proj_scale_inv").dtype == dtype
            assert layer.config.quant.scale_dtype == str(dtype).removeprefix("torch.")


def test_input_scales_that_differ_are_each_experts_own_where_rows_travel_wide(seed, tmp_path, capfd):
    def pack(stem: str, w: Tensor, generator: torch.Generator) -> Any:
        tensors, numbers = fp8(stem, w, generator)
        expert = int(stem.partition(".experts.")[2].partition(".")[0] or 0)
        return tensors | {f"{stem}.input_scale": torch.tensor(0.01 * (1 + expert + ("up" in stem)))}, numbers

    settings = compressed("float-quantized", num_bits=8, type="float", strategy="channel")
    settings["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "strategy": "tensor", "dynamic": False}
    narrow, wide = made(seed, tmp_path, settings, pack)
    expected = logits_of(AutoModelForCausalLM.from_pretrained(wide), seed)
    each = torch.tensor([0.02, 0.03, 0.04, 0.05, 0.06, 0.07])  # the larger of gate's and up's
    for own in (False, True):
        capfd.readouterr()
        quant = QuantConfig.from_checkpoint(settings, **({"activations": None} if own else {}))
        model = from_pretrained(narrow, quant=quant)
        said = capfd.readouterr().err
        assert ("input scales of experts differ, by up to 3.5 times: rows are sent by the largest" in said) != own
        for layer in routed_experts(model).values():
            assert torch.equal(layer.get_parameter("gate_up_proj_input_scale"), each if own else each[-1:])
            assert torch.allclose(layer.get_parameter("down_proj_input_scale"), each - 0.01)
        assert error_of_most(logits_of(model, seed), expected) <= 0.15


@pytest.mark.parametrize(("pack", "scheme", "label"), [
    (nvfp4(modelopt=True, second_scale=2**-10), "nvfp4", "NVFP4: kept as they are, nvfp4"),
    (fp8_of_tensors(2**-7), "fp8_row", "FP8: dequantized to torch.float32 and quantized again to fp8_row"),
], ids=["nvfp4", "fp8"])  # fmt: skip
def test_modelopts_tensors_over_all_experts_are_read(pack, scheme, label, seed, tmp_path, capfd):
    narrow, wide, _, stored = write("Llama 4", MODELOPT, pack, tmp_path, seed)
    plain = AutoModelForCausalLM.from_pretrained(wide)
    tensors, each = together(stored), torch.arange(1, plain.config.num_local_experts + 1) / 64
    for name in tensors:  # what may be one number for all experts, or each one's
        if name.endswith("experts.gate_up_proj_weight_scale_2"):
            tensors[name] = tensors[name].repeat(len(each))
        if name.endswith("experts.down_proj_input_scale"):
            tensors[name] = each.clone()
    save_file(tensors, narrow / SINGLE)
    expected = logits_of(plain, seed)
    model = from_pretrained(narrow)
    assert error(logits_of(model, seed), expected) <= 1e-5
    for name, tensor in unparallelize(model).state_dict().items():
        assert error(tensor, plain.state_dict()[name]) <= 1e-6, name
    capfd.readouterr()
    quant = QuantConfig(scheme) if scheme == "nvfp4" else QuantConfig(scheme, scales="static", down_scales="static")
    kept = from_pretrained(narrow, quant=quant)
    assert f"matrices of experts in {label}" in capfd.readouterr().err
    if scheme == "nvfp4":
        assert error(logits_of(kept, seed), expected) <= 1e-5
    for layer in routed_experts(kept).values():
        if scheme == "fp8_row":
            assert layer.get_parameter("gate_up_proj_input_scale").unique().tolist() == pytest.approx([0.02])
            assert torch.equal(layer.get_parameter("down_proj_input_scale"), each)


def without(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: tensors.update({name: change(tensors[name])})


def added(name: str, tensor: Tensor) -> Change:
    return lambda tensors: tensors.update({name: tensor})


PLAIN, ZEROS = gptq(Integers(4, 32)), gptq(Integers(4, 32, zeros=True))
SHUFFLE = changed(f"{EXPERT}.g_idx", lambda t: t.flip(0))
REFUSED: dict[str, tuple[Any, Any, Change | None, str | None, str]] = {  # settings, packer, change, scheme, message
    "activation order of gate": (
        *(FOUR, PLAIN, SHUFFLE, "int4_g32"),
        rf"the columns of '{EXPERT}.weight' are in activation order (desc_act), which the tokens' rows are not: "
        "'int4_g32' can't hold them; leave quant out",
    ),
    "zero points": (FOUR, ZEROS, None, "int4_g32", "has zero points: QuantConfig(zero_points=True) holds them"),
    "scales": (FOUR, PLAIN, without(f"{EXPERT}.scales"), None, f"held in GPTQ, and '{EXPERT}.scales' is not there"),
    "scales of a dense layer": (
        *(FOUR, PLAIN, without(f"{DENSE}.scales"), "int4_g32"),
        f"'{DENSE}.scales' is not there: values mean nothing without {DENSE}.qzeros, {DENSE}.scales",
    ),
    "zeros of AWQ": (
        *({**AWQ, "group_size": 32}, awq(Integers(4, 32)), without(f"{EXPERT}.qzeros"), "int4_g32"),
        f"'{EXPERT}.weight' is held in AWQ, and '{EXPERT}.qzeros' is not there",
    ),
    "second scale": (
        *(MODELOPT, nvfp4(modelopt=True), without(f"{EXPERT}.weight_scale_2"), "nvfp4"),
        f"'{EXPERT}.weight' is held in NVFP4, and '{EXPERT}.weight_scale_2' is not there",
    ),
    "global scale": (
        *(NVFP4, nvfp4(modelopt=False), without(f"{DENSE}.weight_global_scale"), None),
        f"'{DENSE}.weight_global_scale' is not there",
    ),
    "global scale of zero": (
        *(NVFP4, nvfp4(modelopt=False), changed(f"{EXPERT}.weight_global_scale", torch.zeros_like), "nvfp4"),
        f"'{EXPERT}.weight_global_scale' is 0.0: must be one number > 0",
    ),
    "no settings": (None, PLAIN, None, None, "is held in `qweight`, and quantization_config.quant_method=None"),
    "groups": (
        *(FOUR, PLAIN, changed(f"{EXPERT}.g_idx", lambda t: t + 7), None),
        f"'{EXPERT}.weight': g_idx names groups from 7 to 8: must be from 0 to 1, as scales has",
    ),
    "groups of other sizes": (
        *(FOUR, PLAIN, changed(f"{EXPERT}.g_idx", torch.zeros_like), "int4_g32"),
        f"'{EXPERT}.weight': g_idx has groups that are not of 32 columns",
    ),
    "shapes": (
        *(FOUR, PLAIN, changed(f"{EXPERT}.qzeros", lambda t: t[:, 1:]), "int4_g32"),
        f"'{EXPERT}.weight': qzeros has shape (2, 11): must be (2, 12)",
    ),
    "three bits": ({**FOUR, "bits": 3}, PLAIN, None, None, "quantization_config.bits=3: must be 4 or 8"),
    "layers in two bits": (
        *(FOUR, PLAIN, changed(f"{EXPERT}.g_idx", lambda t: torch.arange(128, dtype=torch.int32) // 64), "int4_g32"),
        f"'{EXPERT}.weight': bits=2: must be 4 or 8",
    ),
    "groups of 16": (
        *({**NVFP4, "format": "pack-quantized"}, PLAIN, None, None),
        "config_groups.group_0.weights.strategy='tensor_group': must be group or channel",
    ),
    "biases of experts": (
        *(FOUR, PLAIN, added(f"{EXPERT}.bias", torch.ones(96)), None),
        f"'{EXPERT}.bias' is not all zeros, and experts of preset 'Qwen3-MoE' have no biases",
    ),
    "inputs that are scaled": (
        *(MODELOPT, nvfp4(modelopt=True), added(f"{EXPERT}.pre_quant_scale", torch.ones(64)), None),
        f"'{EXPERT}.pre_quant_scale': inputs that are scaled channel by channel",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_or_kept_is_refused_by_name(case, seed, tmp_path):
    settings, pack, change, scheme, message = REFUSED[case]
    narrow, _ = made(seed, tmp_path, settings, pack, change)
    with pytest.raises(ValueError, match=re.escape(message)):
        from_pretrained(narrow, quant=None if scheme is None else QuantConfig(scheme), progress=False)


def test_a_fixed_scale_of_inputs_that_is_missing_beside_others_is_named(seed, tmp_path):
    settings = {"quant_method": "modelopt", "quant_algo": "FP8"}
    narrow, _ = made(seed, tmp_path, settings, fp8_of_tensors(2**-7), without(f"{EXPERT}.input_scale"))
    with pytest.raises(ValueError, match=f"'{EXPERT}.input_scale' is missing, and other experts have theirs: leave"):
        from_pretrained(narrow, quant=QuantConfig.from_checkpoint(settings), progress=False)


def test_scales_that_another_dtype_would_round_are_refused(seed, tmp_path):
    narrow, _ = made(seed, tmp_path, FOUR, PLAIN)
    message = r"gate_up_proj of expert 0 .* scales in torch.float16, which torch.bfloat16 does not hold: .*'float32'"
    with pytest.raises(ValueError, match=message):
        from_pretrained(narrow, quant=QuantConfig("int4_g32", scale_dtype="bfloat16"))


def test_columns_in_activation_order_are_read_wide_in_the_order_of_the_model(seed, tmp_path):
    def reordered(tensors: dict[str, Tensor]) -> None:
        """Gate's groups are other columns': the words stay, so that columns get the scale that g_idx says."""
        tensors[f"{EXPERT}.g_idx"] = tensors[f"{EXPERT}.g_idx"].flip(0)

    narrow, wide = made(seed, tmp_path, FOUR, PLAIN, reordered)
    tensors, stored = load_file(wide / SINGLE), load_file(narrow / SINGLE)
    scales, weight = stored[f"{EXPERT}.scales"].double(), tensors[f"{EXPERT}.weight"].double()
    group = torch.arange(64) // 32
    tensors[f"{EXPERT}.weight"] = (weight / scales[group].T * scales[group.flip(0)].T).float()
    save_file(tensors, wide / SINGLE)
    expected = logits_of(AutoModelForCausalLM.from_pretrained(wide), seed)
    assert error(logits_of(from_pretrained(narrow), seed), expected) <= 1e-5
