"""`from_pretrained` gives the model that transformers gives, while each rank reads its own experts' bytes alone."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import (  # noqa: E402
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    Llama4Config,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: E402

from epmoe import EPGroup  # noqa: E402
from epmoe.integrations.transformers import (  # noqa: E402
    PRESETS,
    files,
    from_pretrained,
    parallelize,
    routed_experts,
    unparallelize,
)
from epmoe.integrations.transformers.dequantize import dequantize_mxfp4, dequantize_scaled  # noqa: E402
from epmoe.ops.narrow_formats import pack_nibbles  # noqa: E402
from epmoe.quant.config import QuantConfig  # noqa: E402
from epmoe.testing import run_ranks  # noqa: E402
from tests.integrations.counted_files import Counted  # noqa: E402
from tests.integrations.transformers_families import batch, randomize, tiny_model  # noqa: E402

FAMILIES = [preset.family for preset in PRESETS]
FORMS = [(family, "as published") for family in FAMILIES] + [(f, "as in memory") for f in ("Mixtral", "Granite-MoE")]


def close(found: Tensor, expected: Tensor) -> bool:
    found, expected = found.detach().double(), expected.detach().double()
    return bool((found - expected).norm() <= 1e-5 * expected.norm())


def load_everything(rank: int, ranks: int, seed: int, directory: str) -> dict[tuple[str, str], tuple[Tensor, int, int]]:
    """Logits of this rank's tokens, bytes read of experts, and bytes of this rank's experts, by family and form."""
    ep = EPGroup(device="cpu", timeout=50)
    files.safe_open = Counted.open
    results = {}
    for family, form in FORMS:
        Counted.read = Counter()
        model = from_pretrained(Path(directory, form, family), ep, placement="strided")
        layers = routed_experts(model)
        marks = (".experts.", "input_linear", "output_linear")
        read = sum(count for name, count in Counted.read.items() if any(mark in name for mark in marks))
        own = sum(p.numel() * p.element_size() for layer in layers.values() for p in layer.parameters())
        results[family, form] = model(batch(rank, seed)).logits.detach(), read, own
    return results


def test_every_form_of_every_family_loads_and_each_rank_reads_its_own_experts_alone(seed, tmp_path):
    expected = {}
    for family, form in FORMS:
        model = tiny_model(family, seed).eval()
        model.save_pretrained(tmp_path / form / family, save_original_format=form == "as published")
        expected[family] = [model(batch(rank, seed)).logits for rank in range(2)]
    results = run_ranks(load_everything, 2, args=(seed, str(tmp_path)), timeout=150)
    for rank, found in enumerate(results):
        for (family, form), (logits, read, own) in found.items():
            assert close(logits, expected[family][rank]), (family, form, rank)
            assert read == own, (family, form, rank)


def saved(family: str, seed: int, directory: Path, **kwargs: Any) -> Path:
    tiny_model(family, seed).save_pretrained(directory, **kwargs)
    return directory


def test_the_loaded_model_is_the_one_that_transformers_loads(seed, tmp_path):
    path = saved("Qwen2-MoE", seed, tmp_path, max_shard_size="20kB")
    assert (path / files.INDEX).is_file()
    GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=5).save_pretrained(path)
    plain, ours = AutoModelForCausalLM.from_pretrained(path), from_pretrained(path, progress=False)
    assert type(ours) is type(plain) and not ours.training
    assert ours.generation_config.to_dict() == plain.generation_config.to_dict()
    assert ours.config.to_dict() == plain.config.to_dict() and ours.config.name_or_path == str(path)
    tokens = (model.generate(batch(0, seed), output_router_logits=False) for model in (ours, plain))
    assert torch.equal(*tokens)
    for name, tensor in unparallelize(ours).state_dict().items():
        assert torch.equal(tensor, plain.state_dict()[name]), name
    assert ours.model.layers[1].mlp.experts.config is ours.config
    assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), plain.buffers(), strict=True))


def test_bars_are_shown_unless_they_are_not_wanted(seed, tmp_path, capfd):
    path = saved("OLMoE", seed, tmp_path)
    from_pretrained(path)
    shown = capfd.readouterr().err
    assert "reading experts" in shown and "12/12" in shown  # 6 experts in each of two layers
    from_pretrained(path, progress=False)
    assert capfd.readouterr().err == ""


def peak(rank: int, ranks: int, directory: str, small: str) -> tuple[int, int, int]:
    """Host memory in bytes: the most that loading took beyond what was there, this rank's experts, and the rest."""
    ep = EPGroup(device="cpu", timeout=50)
    from_pretrained(small, ep)  # what is imported and allocated once

    def resident(which: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(which))

    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = resident("VmRSS")
    model = from_pretrained(directory, ep)
    taken = resident("VmHWM") - before
    own = sum(p.nbytes for layer in routed_experts(model).values() for p in layer.parameters())
    return taken, own, sum(p.nbytes for p in model.parameters()) - own


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak of resident memory")
def test_no_rank_ever_holds_much_more_than_its_own_share(seed, tmp_path):
    small = saved("Qwen3-MoE", seed, tmp_path / "small")
    config = tiny_model("Qwen3-MoE", seed).config
    config.update({"hidden_size": 256, "moe_intermediate_size": 512, "num_experts": 32, "num_hidden_layers": 4})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "large")
    for taken, own, rest in run_ranks(peak, 4, args=(str(tmp_path / "large"), str(small)), timeout=90):
        assert own == 3 * 8 * 3 * 256 * 512 * 4  # a quarter of three layers' experts
        # mapped pages of the files that were read count beside what was made of them
        assert own < taken < 2.3 * (own + rest) + (8 << 20) < 4 * own, (taken, own, rest)


def test_dtype_config_and_class_can_be_chosen(seed, tmp_path):
    path = saved("DeepSeek-V3", seed, tmp_path)
    config = AutoConfig.from_pretrained(path)
    config.num_hidden_layers = 2
    config.attention_dropout = 0.25
    model = from_pretrained(path, auto_class=AutoModel, config=config, dtype=torch.bfloat16)
    plain = AutoModel.from_pretrained(path, dtype=torch.bfloat16)
    assert type(model) is type(plain) and model.config.attention_dropout == 0.25
    assert {n: t.dtype for n, t in model.state_dict().items()} == {n: t.dtype for n, t in plain.state_dict().items()}
    assert next(iter(routed_experts(model).values())).gate_up_proj.dtype == torch.bfloat16


def quantize_fp8(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    grid = [-(-size // tile) for size, tile in zip(weight.shape, block, strict=True)]
    scale = torch.rand(grid) + 0.5
    wide = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: weight.shape[0], : weight.shape[1]]
    return (weight / wide).to(torch.float8_e4m3fn), scale


@pytest.mark.parametrize("fused", [False, True])
def test_fp8_checkpoints_are_dequantized_tile_by_tile(fused, seed, tmp_path):
    """Tiles of 8 × 8 over matrices of 12 rows: the last are cut."""
    path = saved("DeepSeek-V3", seed, tmp_path, save_original_format=not fused)
    tensors, expected = {}, {}
    for name, tensor in load_file(path / files.SINGLE).items():
        tensors[name] = expected[name] = tensor
        if "experts" in name or ("_proj" in name and "self_attn" in name):
            each = tensor if tensor.dim() == 3 else tensor[None]
            weights, scales = zip(*(quantize_fp8(matrix, (8, 8)) for matrix in each), strict=True)
            wide = [s.repeat_interleave(8, 0).repeat_interleave(8, 1)[: w.shape[0], : w.shape[1]].double()
                    for w, s in zip(weights, scales, strict=True)]  # fmt: skip
            values = torch.stack([w.double() * s for w, s in zip(weights, wide, strict=True)]).float()
            shape = (slice(None),) if tensor.dim() == 3 else (0,)
            tensors[name] = torch.stack([w.view(torch.uint8) for w in weights]).view(torch.float8_e4m3fn)[shape]
            tensors[f"{name}_scale_inv"], expected[name] = torch.stack(scales)[shape], values[shape]
    save_file(expected, path / files.SINGLE)
    plain = AutoModelForCausalLM.from_pretrained(path)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / files.SINGLE)
    settings = json.loads((path / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [8, 8], "fmt": "e4m3"}
    (path / "config.json").write_text(json.dumps(settings))

    model = from_pretrained(path)
    assert not hasattr(model.config, "quantization_config")
    assert close(model(batch(0, seed)).logits, plain(batch(0, seed)).logits)
    for name, tensor in unparallelize(model).state_dict().items():
        assert close(tensor, plain.state_dict()[name]), name


def test_a_model_with_a_vision_part_loads_by_its_own_class(seed, tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    pixels = {"vision_output_dim": 16, "image_size": 16, "patch_size": 8}
    projector = {"projector_input_dim": 16, "projector_output_dim": 16}
    text = tiny_model("Llama 4", seed).config.to_dict()
    config = Llama4Config(text_config=text, vision_config={**sizes, **pixels, **projector})
    plain = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    randomize(plain, seed)
    plain.save_pretrained(tmp_path)
    model = from_pretrained(tmp_path, auto_class=AutoModelForImageTextToText)
    assert type(model) is type(plain)
    x, image = batch(0, seed), torch.randn(1, 3, 16, 16)
    # by its parts: the whole model's forward fails in transformers 5.24 itself
    assert close(model.language_model(input_ids=x).logits, plain.language_model(input_ids=x).logits)
    seen = [each.get_image_features(pixel_values=image) for each in (model, plain)]
    seen = [getattr(features, "last_hidden_state", features) for features in seen]
    assert close(*seen) and seen[0].norm() > 0
    assert [name for name in routed_experts(model) if name.startswith("language_model.")]
    for name, tensor in unparallelize(model).state_dict().items():
        assert torch.equal(tensor, plain.state_dict()[name]), name


CHANNELS = (
    lambda n: (),
    lambda n: (1,),
    lambda n: (n,),
    lambda n: (n, 1),
)  # shapes of `weight_scale` of a matrix with n rows


def with_scales(path: Path, fused: bool, static: bool = False) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Rewrites a checkpoint's experts and attention in FP8 with a scale per tensor or channel, in all four shapes by
    turns; what it would hold without, and what it holds."""
    tensors, wide, turn = {}, {}, 0
    for name, tensor in load_file(path / files.SINGLE).items():
        tensors[name] = wide[name] = tensor
        if "experts" not in name and not ("_proj" in name and "self_attn" in name):
            continue
        turn += 1
        form = CHANNELS[turn % 4 if tensor.dim() == 2 else turn % 3]
        lead = tensor.shape[:-2]
        scale = torch.rand(lead + form(tensor.shape[-2])) * 0.01 + 0.001
        by_row = scale.reshape(*lead, -1, 1)
        values = (tensor / by_row).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[name], tensors[f"{name}_scale"] = values, scale
        wide[name] = (values.double() * by_row).float()
        if static and not fused:
            tensors[f"{name.removesuffix('weight')}input_scale"] = torch.tensor(0.01 * turn)
    save_file(tensors, path / files.SINGLE)
    settings = json.loads((path / "config.json").read_text())
    kind = "static" if static else "dynamic"
    settings["quantization_config"] = {"quant_method": "fp8", "activation_scheme": kind}
    (path / "config.json").write_text(json.dumps(settings))
    return wide, tensors


@pytest.mark.parametrize("fused", [False, True])
def test_fp8_checkpoints_with_a_scale_per_tensor_or_channel_are_scaled(fused, seed, tmp_path):
    path = saved("DeepSeek-V3", seed, tmp_path / "fp8", save_original_format=not fused)
    shutil.copytree(path, tmp_path / "wide")
    wide, _ = with_scales(path, fused)
    save_file(wide, tmp_path / "wide" / files.SINGLE)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "wide")
    model = from_pretrained(path)
    assert close(model(batch(0, seed)).logits, plain(batch(0, seed)).logits)
    for name, tensor in unparallelize(model).state_dict().items():
        assert close(tensor, plain.state_dict()[name]), name


def test_fp8_channels_stay_the_bits_they_are_and_fixed_scales_come_along(seed, tmp_path):
    path = saved("Qwen3-MoE", seed, tmp_path, save_original_format=True)
    wide, stored = with_scales(path, fused=False, static=True)
    quant = QuantConfig.from_checkpoint(json.loads((path / "config.json").read_text())["quantization_config"])
    model = from_pretrained(path, quant=quant)
    for name, layer in routed_experts(model).items():
        for our, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            values, scale = layer.get_parameter(our), layer.get_parameter(f"{our}_scale_inv")
            each = [[f"{name}.{e}.{part}" for part in parts] for e in range(6)]
            fixed = [max(stored[f"{n}.input_scale"].item() for n in names) for names in each]
            for expert, names in enumerate(each):
                bits = torch.cat([stored[f"{n}.weight"].view(torch.uint8) for n in names])
                scales = [stored[f"{n}.weight_scale"].reshape(-1).expand(values.shape[1] // len(names)) for n in names]
                assert torch.equal(values[expert].view(torch.uint8), bits)
                assert torch.equal(scale[expert], torch.cat(scales))
            expected = torch.tensor([max(fixed)] if our == "gate_up_proj" else fixed)
            assert torch.equal(layer.get_parameter(f"{our}_input_scale"), expected)
    with torch.no_grad():
        assert model(batch(0, seed)).logits.isfinite().all()


@pytest.mark.parametrize("which", ["mlp.experts.1.up_proj", "self_attn.q_proj"])
def test_fp8_values_without_their_scales_are_refused(which, seed, tmp_path):
    path = saved("Qwen3-MoE", seed, tmp_path, save_original_format=True)
    _, stored = with_scales(path, fused=False)
    name = f"model.layers.1.{which}.weight"
    del stored[f"{name}_scale"]
    save_file(stored, path / files.SINGLE)
    told = rf"'{name}' is .*neither '{name}_scale_inv' nor '{name}_scale' is there: values mean nothing without"
    with pytest.raises(ValueError, match=told.replace(".", r"\.").replace(r"\.*", ".*")):
        from_pretrained(path)


@pytest.mark.parametrize("block", [(128, 128), (16, 32), (1, 384)], ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_fp8_experts_stay_the_bits_they_are_in_an_fp8_layer(fused, block, seed, tmp_path):
    """Tiles that end where gate and up do; the last along H is cut."""
    config = tiny_model("Qwen3-MoE", seed).config
    config.update({"hidden_size": 160, "moe_intermediate_size": 128, "num_experts": 3})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path, save_original_format=not fused)
    tensors, stored = {}, {}
    for name, tensor in load_file(tmp_path / files.SINGLE).items():
        tensors[name] = tensor
        if ".experts." in name:
            each = tensor if tensor.dim() == 3 else tensor[None]
            weights, scales = zip(*(quantize_fp8(matrix * 30, block) for matrix in each), strict=True)
            values = torch.stack([w.view(torch.uint8) for w in weights]).view(torch.float8_e4m3fn)
            tensors[name], scale = (values, torch.stack(scales)) if fused else (values[0], scales[0])
            tensors[f"{name}_scale_inv"] = scale
            stored[name] = tensors[name], scale
    save_file(tensors, tmp_path / files.SINGLE)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(block)}
    (tmp_path / "config.json").write_text(json.dumps(settings))

    quant = QuantConfig.from_checkpoint(settings["quantization_config"])
    (name, layer), *rest = routed_experts(from_pretrained(tmp_path, quant=quant)).items()
    assert not rest
    for our, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        values, scale = layer.get_parameter(our), layer.get_parameter(f"{our}_scale_inv")
        for expert in range(3):
            if fused:
                expected = tuple(t[expert] for t in stored[f"{name}.{our}"])
            else:
                found = [stored[f"{name}.{expert}.{part}.weight"] for part in parts]
                expected = tuple(torch.cat([t.view(torch.uint8) if t.itemsize == 1 else t for t in ts])
                                 for ts in zip(*found, strict=True))  # fmt: skip
            assert torch.equal(values[expert].view(torch.uint8), expected[0].view(torch.uint8))
            assert torch.equal(scale[expert], expected[1])


def test_mxfp4_checkpoints_are_dequantized_as_transformers_does(seed, tmp_path):
    path = saved("gpt-oss", seed, tmp_path)
    settings = json.loads((path / "config.json").read_text())
    settings |= {"hidden_size": 64, "intermediate_size": 32}
    settings["quantization_config"] = {"quant_method": "mxfp4"}
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**settings, "quantization_config": None}))
    plain.save_pretrained(path)
    tensors = load_file(path / files.SINGLE)
    generator = torch.Generator().manual_seed(seed)
    for name in [name for name in tensors if "experts" in name and name.endswith("_proj")]:
        experts, inner, outer = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outer, inner // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 126, (experts, outer, inner // 32), generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain.get_parameter(name).data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(tensors, path / files.SINGLE)
    (path / "config.json").write_text(json.dumps(settings))

    model = from_pretrained(path)
    assert close(model(batch(0, seed)).logits, plain.eval()(batch(0, seed)).logits)
    packed = from_pretrained(path, quant=QuantConfig("mxfp4"))
    assert close(packed(batch(0, seed)).logits, plain(batch(0, seed)).logits)
    for name, layer in routed_experts(packed).items():  # the very codes and scales, gates before up projections
        for our in ("gate_up_proj", "down_proj"):
            codes = (t := tensors[f"{name}.{our}_blocks"], t >> 4)
            codes = torch.stack([c & 15 for c in codes], -1).flatten(2)
            scales = tensors[f"{name}.{our}_scales"]
            if our == "gate_up_proj":
                codes, scales = (torch.cat([t[:, ::2], t[:, 1::2]], 1) for t in (codes, scales))
            assert torch.equal(layer.get_parameter(our), pack_nibbles(codes, 0))
            assert torch.equal(layer.get_parameter(f"{our}_scale_inv"), scales.mT)
    for name, tensor in unparallelize(model).state_dict().items():
        assert torch.equal(tensor, plain.state_dict()[name]), name


def test_experts_are_quantized_as_they_arrive(seed, tmp_path):
    path, x, quant = saved("gpt-oss", seed, tmp_path), batch(0, seed), QuantConfig("fp8_block")
    expected = parallelize(tiny_model("gpt-oss", seed).eval(), quant=quant)
    model = from_pretrained(path, quant=quant)
    for name, parameter in model.named_parameters():
        other = expected.get_parameter(name)
        assert parameter.dtype == other.dtype and torch.equal(parameter.float(), other.float()), name
    assert any(parameter.dtype == torch.float8_e4m3fn for parameter in model.parameters())
    assert close(model(x).logits, expected(x).logits)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"torch_dtype": 1}, "torch_dtype=...: from_pretrained has no such option: it is called dtype here"),
        ({"device_map": "auto"}, "device_map=...: from_pretrained has no such option: a rank has its experts and"),
        ({"foo": 1}, "foo=...: from_pretrained has no such option; known: placement, dispatcher"),
        ({"top_k": 4}, "top_k=...: from_pretrained takes it from the model"),
        ({"path": 3}, "path=3: must be a directory, as text or a path"),
        ({"ep": 3}, "ep=3: must be an EPGroup"),
        ({"auto_class": "AutoModel"}, "auto_class='AutoModel': must be a class such as"),
        ({"config": {}}, "config={}: must be the model's config, or None"),
        ({"dtype": "bfloat16"}, "dtype='bfloat16': must be a torch.dtype"),
        ({"device": "gpu"}, "device='gpu': must be cpu, cuda"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_arguments_that_are_none_are_refused_before_anything_is_read(arguments, said, tmp_path):
    with pytest.raises(ValueError, match=re.escape(said)):
        from_pretrained(**{"path": tmp_path, **arguments})


def test_what_cannot_be_loaded_is_refused_by_name(seed, tmp_path):
    with pytest.raises(ValueError, match="is no directory"):
        from_pretrained(tmp_path / "nowhere")
    path = saved("OLMoE", seed, tmp_path / "model")

    def changed(**tensors: Tensor | None) -> Path:
        shutil.copytree(path, tmp_path / "changed", dirs_exist_ok=True)
        found = {**load_file(path / files.SINGLE), **tensors}
        save_file({n: t for n, t in found.items() if t is not None}, tmp_path / "changed" / files.SINGLE)
        return tmp_path / "changed"

    with pytest.raises(ValueError, match=r"experts of preset 'OLMoE' are under none of .*experts\.0\.gate_proj"):
        from_pretrained(changed(**{"model.layers.1.mlp.experts.0.up_proj.weight": None}))
    with pytest.raises(ValueError, match=r"gate_up_proj of expert 3 of model\.layers\.1.*\(25, 16\).*has \(24, 16\)"):
        from_pretrained(changed(**{"model.layers.1.mlp.experts.3.up_proj.weight": torch.zeros(13, 16)}))
    with pytest.raises(ValueError, match=r"'model\.layers\.1\.mlp\.experts\.5\.down_proj\.weight' is missing"):
        from_pretrained(changed(**{"model.layers.1.mlp.experts.5.down_proj.weight": None}))
    for kind, said in ((torch.int32, "scales is torch.int32: must be a float8 or"), (torch.float8_e4m3fn, "floating")):
        name = "model.layers.1.mlp.experts.5.down_proj.weight"
        scale = torch.ones((), dtype=torch.uint8 if kind == torch.float8_e4m3fn else torch.float32)
        with pytest.raises(ValueError, match=said):
            from_pretrained(changed(**{name: torch.ones(16, 12).to(kind), f"{name}_scale": scale}))
    settings = json.loads((path / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "fp8", "weight_block_size": 128}
    (path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"weight_block_size=128: must be two sizes"):
        from_pretrained(path)
    settings["quantization_config"] = {"quant_method": "hqq"}
    (path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="quant_method='hqq': must be fp8, mxfp4, gptq, awq"):
        from_pretrained(path)
    (path / files.SINGLE).unlink()
    (path / "config.json").write_text((tmp_path / "changed" / "config.json").read_text())
    with pytest.raises(ValueError, match=r"neither model\.safetensors\.index\.json nor model\.safetensors"):
        from_pretrained(path)


def test_dequantizing_refuses_what_does_not_fit():
    weight = torch.zeros(12, 16).to(torch.float8_e4m3fn)
    for scale, block in ((torch.ones(2), None), (torch.ones(1, 12), (8, 8)), (torch.ones(12, 1, 1), None)):
        with pytest.raises(ValueError, match=r"one number, \[12\], \[12, 1\] or \[1, 16\] for a weight \(12, 16\)"):
            dequantize_scaled(weight, scale, torch.float32, block)
    with pytest.raises(ValueError, match=r"scales have shape \(2, 3\): must be \(2, 2\)"):
        dequantize_scaled(weight, torch.ones(2, 3), torch.float32, (8, 8))
    assert torch.equal(dequantize_scaled(weight, torch.ones(()), torch.float32, None), torch.zeros(12, 16))
    with pytest.raises(ValueError, match=r"must be uint8 \[N, G, 16\]"):
        dequantize_mxfp4(torch.zeros(4, 2, 8, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.uint8), torch.float32)
