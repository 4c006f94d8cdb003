"""`from_pretrained` gives the model that transformers gives, while each rank reads its own experts' bytes alone."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationConfig  # noqa: E402
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
from epmoe.integrations.transformers.dequantize import dequantize_fp8, dequantize_mxfp4  # noqa: E402
from epmoe.quant.config import QuantConfig  # noqa: E402
from epmoe.testing import run_ranks  # noqa: E402
from tests.integrations.transformers_families import batch, tiny_model  # noqa: E402

FAMILIES = [preset.family for preset in PRESETS]
FORMS = [(family, "as published") for family in FAMILIES] + [(f, "as in memory") for f in ("Mixtral", "Granite-MoE")]


def close(found: Tensor, expected: Tensor) -> bool:
    found, expected = found.detach().double(), expected.detach().double()
    return bool((found - expected).norm() <= 1e-5 * expected.norm())


class Counted:
    """`safe_open` that adds up the bytes read of each tensor in `read`."""

    read: Counter[str]

    def __init__(self, file: Any, name: str | None = None) -> None:
        self.file, self.name = file, name

    @classmethod
    def open(cls, path: Path, framework: str) -> Counted:
        return cls(safe_open(path, framework=framework))

    def __enter__(self) -> Counted:
        self.file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.file.__exit__(*error)

    def keys(self) -> list[str]:
        return self.file.keys()

    def get_slice(self, name: str) -> Counted:
        return Counted(self.file.get_slice(name), name)

    def __getitem__(self, index: Any) -> Tensor:
        found = self.file[index]
        Counted.read[self.name] += found.numel() * found.element_size()
        return found


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


def quantize_fp8(weight: Tensor, block: int) -> tuple[Tensor, Tensor]:
    grid = [-(-size // block) for size in weight.shape]
    scale = torch.rand(grid) + 0.5
    wide = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[: weight.shape[0], : weight.shape[1]]
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
            weights, scales = zip(*(quantize_fp8(matrix, 8) for matrix in each), strict=True)
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


@pytest.mark.parametrize("fused", [False, True])
def test_fp8_experts_stay_the_bits_they_are_in_an_fp8_layer(fused, seed, tmp_path):
    """Two tiles along H; gate and up are one tile of rows each."""
    config = tiny_model("Qwen3-MoE", seed).config
    config.update({"hidden_size": 160, "moe_intermediate_size": 128, "num_experts": 3})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path, save_original_format=not fused)
    tensors, stored = {}, {}
    for name, tensor in load_file(tmp_path / files.SINGLE).items():
        tensors[name] = tensor
        if ".experts." in name:
            each = tensor if tensor.dim() == 3 else tensor[None]
            weights, scales = zip(*(quantize_fp8(matrix * 30, 128) for matrix in each), strict=True)
            values = torch.stack([w.view(torch.uint8) for w in weights]).view(torch.float8_e4m3fn)
            tensors[name], scale = (values, torch.stack(scales)) if fused else (values[0], scales[0])
            tensors[f"{name}_scale_inv"] = scale
            stored[name] = tensors[name], scale
    save_file(tensors, tmp_path / files.SINGLE)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(settings))

    (name, layer), *rest = routed_experts(from_pretrained(tmp_path, quant=QuantConfig("fp8_block"))).items()
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
    packed = from_pretrained(path, quant=QuantConfig("mxfp4"))  # quantized again, to the same numbers
    assert close(packed(batch(0, seed)).logits, plain(batch(0, seed)).logits)
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
    settings = json.loads((path / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "awq"}
    (path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="quant_method='awq': must be fp8 or mxfp4"):
        from_pretrained(path)
    (path / files.SINGLE).unlink()
    (path / "config.json").write_text((tmp_path / "changed" / "config.json").read_text())
    with pytest.raises(ValueError, match=r"neither model\.safetensors\.index\.json nor model\.safetensors"):
        from_pretrained(path)


def test_dequantizing_refuses_what_does_not_fit():
    weight = torch.zeros(12, 16).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"scales have shape \(2, 3\): must be \(2, 2\)"):
        dequantize_fp8(weight, torch.ones(2, 3), torch.float32, (8, 8))
    assert torch.equal(dequantize_fp8(weight, torch.ones(()), torch.float32, None), torch.zeros(12, 16))
    with pytest.raises(ValueError, match=r"must be uint8 \[N, G, 16\]"):
        dequantize_mxfp4(torch.zeros(4, 2, 8, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.uint8), torch.float32)
