"""`from_pretrained` of GPTQ, AWQ, NVFP4 and other packed checkpoints: the very numbers that were packed, wide or kept
narrow, each rank its own experts alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

from torch import Tensor  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from epmoe import EPGroup  # noqa: E402
from epmoe.integrations.checkpoint import load_checkpoint, save_checkpoint  # noqa: E402
from epmoe.integrations.transformers import (  # noqa: E402
    RoutedExperts,
    files,
    from_pretrained,
    routed_experts,
    save_pretrained,
    unparallelize,
)
from epmoe.quant import NarrowWeights, dequantize_narrow  # noqa: E402
from epmoe.quant.config import QuantConfig  # noqa: E402
from epmoe.testing import run_ranks  # noqa: E402
from tests.integrations.counted_files import Counted  # noqa: E402
from tests.integrations.quantized_checkpoints import (  # noqa: E402
    Integers,
    Packer,
    awq,
    compressed,
    fp8,
    gptq,
    mxfp4,
    nvfp4,
    packed_integers,
    write,
)
from tests.integrations.transformers_families import batch, preset_of  # noqa: E402

GPTQ = {"quant_method": "gptq", "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:gptqmodel"}
PACKED = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=True)
EIGHT = compressed("pack-quantized", num_bits=8, type="int", strategy="channel", symmetric=False)
NVFP4 = compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)
MXFP4 = compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32)
FP8 = compressed("float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True)
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}

CASES: dict[str, tuple[str, dict[str, Any], Packer, str]] = {  # family, settings, packer, the scheme that keeps it
    "gptq-int4_g32": ("Mixtral", {**GPTQ, "bits": 4, "group_size": 32}, gptq(Integers(4, 32)), "int4_g32"),
    "gptq-int4_g128-zeros": (
        "Qwen3-MoE",
        {**GPTQ, "bits": 4, "group_size": 128, "sym": False},
        gptq(Integers(4, 128, zeros=True)),
        "int4_g128",
    ),
    "gptq-int8_g64": ("Qwen2-MoE", {**GPTQ, "bits": 8, "group_size": 64}, gptq(Integers(8, 64)), "int8_g64"),
    "gptq_v2-int8_g32-zeros": (
        "Mixtral",
        {**GPTQ, "bits": 8, "group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"},
        gptq(Integers(8, 32, zeros=True), less_one=False),
        "int8_g32",
    ),
    "gptqmodel-int4_g32-zeros": (
        "Qwen2-MoE",
        {**GPTQ, "bits": 4, "group_size": 32, "sym": False, "meta": {"quantizer": ["gptqmodel:5.0.0"]}},
        gptq(Integers(4, 32, zeros=True), borrow=True),
        "int4_g32",
    ),
    "gptq-channel": ("DeepSeek-V3", {**GPTQ, "bits": 4, "group_size": -1}, gptq(Integers(4, -1)), "int4_channel"),
    "gptq-desc_act": (
        "Qwen3-MoE",
        {**GPTQ, "bits": 4, "group_size": 32, "sym": False, "desc_act": True},
        gptq(Integers(4, 32, zeros=True, ordered=True)),
        "int4_g32",
    ),
    "auto_round": (
        "Qwen2-MoE",
        {**ROUND, "bits": 4, "group_size": 64, "sym": False},
        gptq(Integers(4, 64, zeros=True), less_one=False),
        "int4_g64",
    ),
    "awq-g32": ("DeepSeek-V3", {**AWQ, "group_size": 32}, awq(Integers(4, 32, zeros=True)), "int4_g32"),
    "awq-g64": ("Mixtral", {**AWQ, "group_size": 64}, awq(Integers(4, 64, zeros=True)), "int4_g64"),
    "packed-int4_g32": ("DeepSeek-V3", PACKED, packed_integers(Integers(4, 32)), "int4_g32"),
    "packed-int8-zeros": ("Qwen3-MoE", EIGHT, packed_integers(Integers(8, -1, zeros=True)), "int8_channel"),
    "nvfp4": ("Qwen3-MoE", NVFP4, nvfp4(modelopt=False), "nvfp4"),
    "nvfp4-llama4": ("Llama 4", NVFP4, nvfp4(modelopt=False), "nvfp4"),
    "nvfp4-modelopt": ("DeepSeek-V3", MODELOPT, nvfp4(modelopt=True), "nvfp4"),
    "mxfp4-packed": ("Mixtral", MXFP4, mxfp4, "mxfp4"),
    "fp8-compressed": ("Qwen3-MoE", FP8, fp8, "fp8_row"),
}


def error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


def error_of_most(found: Tensor, expected: Tensor) -> float:
    """That of the token in the middle, for models whose rows or weights are rounded unlike: a token whose router is
    close to undecided may take another expert in one of them."""
    found, expected = found.detach().double(), expected.detach().double()
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median())


def held(layer: RoutedExperts, our: str) -> Tensor:
    """The numbers `[L, N, K]` in float64 of a projection held narrow."""
    parts = [getattr(layer, our + suffix) for suffix in ("", "_scale_inv", "_zero", "_outer")]
    values, scales, zeros, outer = (None if part is None else part.data for part in parts)
    assert layer.weight_scheme is not None
    width = layer.weight_shape(our)[2]
    return dequantize_narrow(NarrowWeights(values, scales, layer.weight_scheme, width, zeros, outer), torch.float64)


@pytest.mark.parametrize("case", CASES)
def test_packed_checkpoints_load_wide_and_keep_their_numbers_narrow(case, seed, tmp_path):
    family, settings, pack, scheme = CASES[case]
    narrow, wide, numbers, _ = write(family, settings, pack, tmp_path, seed)
    plain = AutoModelForCausalLM.from_pretrained(wide)
    expected = plain(batch(0, seed)).logits

    model = from_pretrained(narrow, progress=False)
    assert not hasattr(model.config, "quantization_config")
    assert error(model(batch(0, seed)).logits, expected) <= 1e-5
    for name, tensor in unparallelize(model).state_dict().items():
        assert error(tensor, plain.state_dict()[name]) <= 1e-6, name  # one rounding to float32 or two

    quant = QuantConfig.from_checkpoint(settings)
    assert quant.weights == scheme
    kept = from_pretrained(narrow, quant=quant, progress=False)
    if scheme == "fp8_row":  # rows are rounded too
        assert error_of_most(kept(batch(0, seed)).logits, expected) <= 0.1
        return
    assert error(kept(batch(0, seed)).logits, expected) <= 1e-5
    names = preset_of(family).disk
    for name, layer in routed_experts(kept).items():
        on_disk = name.replace("mlp", names.block) if names.block else name
        gate_up, down = held(layer, "gate_up_proj"), held(layer, "down_proj")
        for expert in range(layer.config.num_experts):
            gate, up, out = (numbers[f"{on_disk}.{expert}.{n}.weight"] for n in (names.gate, names.up, names.down))
            order = torch.arange(len(gate))
            if case == "gptq-desc_act":  # the activation's channels are sorted as the columns of `down` are
                order = torch.cdist(down[expert].T, out.T).argmin(1)
                assert not torch.equal(order, torch.arange(len(gate))) and len(set(order.tolist())) == len(gate)
            expected_rows = torch.cat((gate[order], up[order]))
            if scheme == "nvfp4":  # 1 / global scale is rounded to float32
                assert error(gate_up[expert], expected_rows) < 1e-7 and error(down[expert], out) < 1e-7
            else:
                assert torch.equal(gate_up[expert], expected_rows) and torch.equal(down[expert], out[:, order])


SHARED = ("gptq-desc_act", "awq-g32", "nvfp4-modelopt", "packed-int4_g32")


def load_and_save(
    rank: int, ranks: int, seed: int, directory: str
) -> dict[str, tuple[Tensor, Tensor, dict[str, int], tuple[int, ...]]]:
    """By case: logits of the wide and the narrow model, bytes read of experts' matrices, and this rank's experts."""
    ep = EPGroup(device="cpu", timeout=50)
    files.safe_open, Counted.read = Counted.open, Counter()
    results = {}
    for case in SHARED:
        path = Path(directory, case)
        wide = from_pretrained(path / "narrow", ep, placement="strided", progress=False)
        Counted.read = Counter()
        quant = QuantConfig.from_checkpoint(CASES[case][1])
        model = from_pretrained(path / "narrow", ep, placement="strided", quant=quant, progress=False)
        read = {name: count for name, count in Counted.read.items() if ".experts." in name}
        save_checkpoint(path / "saved", model, ep)
        own = next(iter(routed_experts(model).values())).local_experts
        with torch.no_grad():
            results[case] = wide(batch(rank, seed)).logits, model(batch(rank, seed)).logits, read, own
    return results


def test_ranks_read_their_own_experts_and_what_they_save_comes_back_to_the_bit(seed, tmp_path):
    expected, size = {}, {}
    for case in SHARED:
        family, settings, pack, _ = CASES[case]
        _, wide, _, stored = write(family, settings, pack, tmp_path / case, seed)
        size[case] = {name: tensor.numel() * tensor.element_size() for name, tensor in stored.items()}
        plain = AutoModelForCausalLM.from_pretrained(wide)
        expected[case] = [plain(batch(rank, seed)).logits for rank in range(2)]
    for rank, found in enumerate(run_ranks(load_and_save, 2, args=(seed, str(tmp_path)), timeout=120)):
        for case, (wide, narrow, read, own) in found.items():
            assert error(wide, expected[case][rank]) <= 1e-5, (case, rank)
            assert error(narrow, expected[case][rank]) <= 1e-5, (case, rank)
            for name, count in read.items():
                expert = int(name.partition(".experts.")[2].partition(".")[0])
                times = 2 if name.endswith("g_idx") else 5 if name.endswith("shape") else 1
                assert expert in own and count <= times * size[case][name], (case, rank, name)
            values = [name for name in read if name.endswith(("qweight", "weight_packed", "weight"))]
            assert len(values) == 3 * len(own) * len({name.partition(".experts.")[0] for name in values})
    for case in SHARED:
        quant = QuantConfig.from_checkpoint(CASES[case][1])
        once, again = (from_pretrained(tmp_path / case / "narrow", quant=quant, progress=False) for _ in range(2))
        for layer in routed_experts(again).values():
            for parameter in layer.parameters():
                parameter.data.view(torch.uint8).fill_(1)
        load_checkpoint(tmp_path / case / "saved", again, None)
        for name, tensor in once.state_dict().items():
            bits = [t.contiguous().view(-1).view(torch.uint8) for t in (tensor, again.state_dict()[name])]
            assert tensor.dtype == again.state_dict()[name].dtype and torch.equal(*bits), name


def test_a_dequantized_model_is_saved_as_plain_transformers_reads_it(seed, tmp_path):
    family, settings, pack, _ = CASES["awq-g64"]
    narrow, wide, _, _ = write(family, settings, pack, tmp_path, seed)
    model = from_pretrained(narrow, progress=False)
    model.save_pretrained(tmp_path / "again")
    again, plain = AutoModelForCausalLM.from_pretrained(tmp_path / "again"), AutoModelForCausalLM.from_pretrained(wide)
    assert not hasattr(again.config, "quantization_config")
    ours = unparallelize(model).state_dict()
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, ours[name]) and error(tensor, plain.state_dict()[name]) <= 1e-6, name
    kept = from_pretrained(narrow, quant=QuantConfig.from_checkpoint(settings), progress=False)
    with pytest.raises(ValueError, match=r"its weights are int4_g64, the model's own are not: save the wide model"):
        save_pretrained(kept, tmp_path / "kept")


@pytest.mark.parametrize("case", ["gptq-desc_act", "awq-g32", "nvfp4", "nvfp4-modelopt"])
def test_narrow_experts_compute_on_rows_that_are_not_quantized(case, seed, tmp_path):
    family, settings, pack, _ = CASES[case]
    narrow, _, _, _ = write(family, settings, pack, tmp_path, seed)
    quant = QuantConfig.from_checkpoint(settings, experts="weight_only")
    layer = next(iter(routed_experts(from_pretrained(narrow, quant=quant, dtype=torch.bfloat16)).values()))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 64, generator=generator).bfloat16()
    ids = torch.randint(0, layer.config.num_experts, (6, 1), generator=generator)
    gate_up, down = held(layer, "gate_up_proj"), held(layer, "down_proj")
    expected = torch.empty(6, 64, dtype=torch.float64)
    for row, expert in enumerate(ids[:, 0].tolist()):
        gate, up = (gate_up[expert] @ x[row].double()).chunk(2)
        expected[row] = down[expert] @ (torch.nn.functional.silu(gate) * up)
    slots = torch.full((6, layer.config.top_k), -1)
    slots[:, :1] = ids
    with torch.no_grad():
        found = layer(x, slots, torch.ones(slots.shape))
    assert error(found, expected) <= 5e-3


def test_what_became_of_quantized_matrices_is_said(seed, tmp_path, capfd):
    family, settings, pack, _ = CASES["mxfp4-packed"]
    narrow, _, _, _ = write(family, settings, pack, tmp_path, seed)
    for scheme, fate in (
        (None, "dequantized to torch.bfloat16"),
        ("mxfp4", "kept as they are, mxfp4"),
        ("int8_g32", "dequantized to torch.bfloat16 and quantized again to int8_g32"),
    ):
        capfd.readouterr()
        model = from_pretrained(narrow, dtype=torch.bfloat16, quant=None if scheme is None else QuantConfig(scheme))
        said = capfd.readouterr().err.splitlines()
        experts = sum(2 * len(layer.local_experts) for layer in routed_experts(model).values())
        assert f"{experts} matrices of experts in MXFP4: {fate}" in said
        (dense,) = (line for line in said if "dense" in line)
        assert dense.startswith("8 dense matrices in MXFP4, such as model.layers.0.self_attn.")
        assert dense.endswith("dequantized to torch.bfloat16")
    from_pretrained(narrow, progress=False)
    assert capfd.readouterr().err == ""
