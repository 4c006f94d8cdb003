"""What released checkpoints' settings say of their weights, and what they may not say."""

from __future__ import annotations

import re
from enum import Enum
from typing import Any

import pytest

from epmoe import QuantConfig
from epmoe.quant.stored import Stored, read_settings

GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}


def compressed(form: str, inputs: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


INTEGERS = compressed("pack-quantized", type="int", num_bits=4, strategy="group", group_size=32, symmetric=False)
FLOATS = compressed("float-quantized", {"dynamic": False}, type="float", num_bits=8, strategy="tensor")
TILES = compressed("float-quantized", type="float", num_bits=8, strategy="block", block_structure=[64, 128])
BYTES: dict[str, Any] = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
ROWS: dict[str, Any] = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
W8A8 = compressed("int-quantized", ROWS, **BYTES)
ROUND: dict[str, Any] = {"quant_method": "intel/auto-round", "bits": 4, "group_size": 128}
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
NVFP4 = compressed("nvfp4-pack-quantized", type="float", num_bits=4, strategy="tensor_group", group_size=16)


class Method(Enum):
    GPTQ = "gptq"


@pytest.mark.parametrize(("settings", "quant"), [
    (GPTQ, QuantConfig("int4_g128")),
    ({**GPTQ, "quant_method": Method.GPTQ, "group_size": 512}, QuantConfig("int4_g128")),
    ({**GPTQ, "bits": 8, "group_size": 32, "sym": False}, QuantConfig("int8_g32", zero_points=True)),
    ({**GPTQ, "group_size": -1, "checkpoint_format": "gptq_v2"}, QuantConfig("int4_channel")),
    (AWQ, QuantConfig("int4_g64", zero_points=True)),
    ({**AWQ, "zero_point": False, "version": "GEMM"}, QuantConfig("int4_g64")),
    ({**GPTQ, "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}, QuantConfig("int4_g128")),
    (
        {**GPTQ, "quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "sym": False},
        QuantConfig("int4_g128", zero_points=True),
    ),
    (INTEGERS, QuantConfig("int4_g32", zero_points=True)),
    (compressed("pack-quantized", type="int", num_bits=8, strategy="channel"), QuantConfig("int8_channel")),
    (NVFP4, QuantConfig("nvfp4")),
    (compressed("mxfp4-pack-quantized"), QuantConfig("mxfp4")),
    (FLOATS, QuantConfig("fp8_row", scales="static", down_scales="static")),
    (TILES, QuantConfig("fp8_block", block=(64, 128))),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, QuantConfig("nvfp4")),
    (
        {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}},
        QuantConfig("fp8_row", scales="static", down_scales="static"),
    ),
    ({"quant_method": "mxfp4"}, QuantConfig("mxfp4")),
    (W8A8, QuantConfig("int8_row")),
    (compressed("naive-quantized", ROWS, type="int", num_bits=8, strategy="tensor"), QuantConfig("int8_row")),
    (
        compressed("int-quantized", {**ROWS, "strategy": "tensor", "dynamic": False}, **BYTES),
        QuantConfig("int8_row", scales="static", down_scales="static"),
    ),
    ({**ROUND, "backend": "auto_round:gptq:exllamav2", "sym": True}, QuantConfig("int4_g128")),
    ({**ROUND, "backend": "awq:gemm", "sym": False}, QuantConfig("int4_g128", zero_points=True)),
], ids=str)  # fmt: skip
def test_settings_name_the_scheme_that_holds_the_weights_as_they_are(settings, quant):
    assert QuantConfig.from_checkpoint(settings) == quant
    assert QuantConfig.from_checkpoint(settings, combine="fp8_block").combine == "fp8_block"


def test_what_the_words_mean_is_told():
    assert read_settings(GPTQ) == Stored("gptq", "int4_g128", words="gptq")
    assert not read_settings({**GPTQ, "checkpoint_format": "gptq_v2"}).zeros_less_one
    for quantizer, form, borrow in (("gptqmodel:5.0", "gptq", True), ("gptqmodel:5.0", "gptq_v2", False),
                                    (["auto_gptq:0.7.1"], "gptq", False), (["gptqmodel:1"], "gptq", True)):  # fmt: skip
        meta = {"checkpoint_format": form, "meta": {"quantizer": quantizer}}
        assert read_settings({**GPTQ, **meta}).zeros_borrow == borrow
    for form, less_one in (("auto_round:auto_gptq", True), ("auto_round:gptqmodel", False), ("auto_round", False)):
        rounded = read_settings({**GPTQ, "quant_method": "auto-round", "packing_format": form})
        assert (rounded.words, rounded.zeros_less_one) == ("gptq", less_one)
    for kernel, less_one in (("gptq", True), ("auto_round:auto_gptq:tritonv2", True), ("auto_round:exllamav2", False)):
        old = read_settings({**ROUND, "backend": kernel})
        assert (old.words, old.zeros_less_one) == ("gptq", less_one)
    assert read_settings({**ROUND, "backend": "auto_round:awq:gemm"}).words == "awq"
    assert read_settings(AWQ).words == "awq" and read_settings(INTEGERS).words is None
    assert read_settings({"quant_method": "fp8", "weight_block_size": [8, 16]}).block == (8, 16)


def test_layers_of_several_kinds_have_no_scheme_in_common():
    groups = {**NVFP4["config_groups"], "group_1": {**FLOATS["config_groups"]["group_0"], "format": "float-quantized"}}
    mixed = {**NVFP4, "config_groups": groups}
    assert read_settings(mixed) == Stored("compressed-tensors")
    for settings in (mixed, {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}):
        with pytest.raises(ValueError, match="has layers of several kinds: name that of the experts"):
            QuantConfig.from_checkpoint(settings)


@pytest.mark.parametrize("left_out", [False, True], ids=["null", "left-out"])
@pytest.mark.parametrize(("form", "group_size", "strategy"), [
    ("pack-quantized", 64, "group"), ("pack-quantized", -1, "channel"), ("int-quantized", None, "tensor"),
    ("int-quantized", -1, "channel"), ("float-quantized", None, "tensor"),
])  # fmt: skip
def test_a_strategy_that_is_left_out_is_told_by_the_group_size(form, group_size, strategy, left_out):
    kind = {"type": "float" if form == "float-quantized" else "int", "num_bits": 8, "group_size": group_size}
    usual = {} if left_out else {"strategy": None}
    rows = {"type": "int", "num_bits": 8, "dynamic": True}
    found = read_settings(compressed(form, {**rows, **usual}, **kind, **usual))
    assert found == read_settings(compressed(form, {**rows, "strategy": "tensor"}, **kind, strategy=strategy))


def test_without_group_size_packed_integers_need_a_strategy():
    with pytest.raises(ValueError, match="weights.strategy='tensor': must be group or channel"):
        read_settings(compressed("pack-quantized", type="int", num_bits=4))


@pytest.mark.parametrize("settings", [
    {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}},
    {"quant_method": "modelopt", "quant_algo": None, "kv_cache_scheme": CACHE},
    {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "kv_cache_scheme": CACHE},
    {
        "quant_method": "compressed-tensors", "format": "naive-quantized",
        "config_groups": {"group_0": {"targets": ["Attention"], "weights": None, "input_activations": CACHE}},
    },
], ids=["modelopt-file", "modelopt", "no-groups", "attention"])  # fmt: skip
def test_beside_a_quantized_cache_weights_are_plain(settings):
    assert read_settings(settings) == Stored()
    assert QuantConfig.from_checkpoint(settings) == QuantConfig()
    assert QuantConfig.from_checkpoint(settings, weights="fp8_block") == QuantConfig("fp8_block")


@pytest.mark.parametrize(("inputs", "message"), [
    ({"symmetric": False}, "symmetric=False: must be True"),
    ({"symmetric": False, "strategy": "tensor", "dynamic": False}, "symmetric=False: must be True"),
    ({"num_bits": 4}, "num_bits=4: must be 8"),
    ({"type": "float"}, "type='float': must be int"),
    ({"strategy": "group", "group_size": 128}, "strategy='group': must be token or tensor"),
    ({"strategy": None, "group_size": 128}, "strategy='group': must be token or tensor"),
], ids=str)  # fmt: skip
def test_activations_that_rows_of_bytes_cannot_be_are_named_and_the_weights_read(inputs, message):
    settings = compressed("int-quantized", {**ROWS, **inputs}, **BYTES)
    assert read_settings(settings).scheme == "int8_row"
    named = re.escape(
        f"quantization_config.config_groups.group_0.input_activations.{message} in 'int8_row': leave quant"
    )
    with pytest.raises(ValueError, match=f"^{named}"):
        QuantConfig.from_checkpoint(settings)


@pytest.mark.parametrize(("settings", "message"), [
    ({"quant_method": "hqq"}, "quant_method='hqq': must be fp8, mxfp4, gptq, awq, auto-round, compressed-tensors"),
    ({**GPTQ, "bits": 3}, "bits=3: must be 4 or 8"),
    ({**GPTQ, "bits": None}, "bits=None: must be 4 or 8"),
    ({**GPTQ, "group_size": 48}, "group_size=48: must be 32, 64, a multiple of 128, or -1"),
    ({**GPTQ, "group_size": "all"}, "group_size='all': must be a number"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format='marlin': must be gptq or gptq_v2"),
    ({**AWQ, "version": "gemv"}, "version='gemv': must be gemm"),
    ({**AWQ, "bits": 8}, "bits=8: must be 4"),
    ({**GPTQ, "quant_method": "auto-round"}, "packing_format=None: must be auto_round:auto_gptq, auto_round:gptqmodel"),
    (compressed("marlin-24"), "format='marlin-24': must be nvfp4-pack-quantized, "),
    ({**NVFP4, "config_groups": {}}, "config_groups={}: must be groups of layers"),
    ({**NVFP4, "transform_config": {"config_groups": {}}}, "transform_config={'config_groups': {}}: must be left out"),
    ({**NVFP4, "sparsity_config": {"format": "sparse-24"}}, "sparsity_config={'format': 'sparse-24'}: must be left"),
    (compressed("pack-quantized", num_bits=4, strategy="tensor"), "weights.strategy='tensor': must be group or chan"),
    (compressed("pack-quantized", num_bits=2, strategy="channel"), "group_0.weights.num_bits=2: must be 4 or 8"),
    (
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=48),
        "config_groups.group_0.weights.group_size=48: must be 32",
    ),
    (compressed("naive-quantized", type="int", num_bits=4), "weights='int of 4 bits': must be float or int of 8 bits"),
    (compressed("float-quantized", type="int", num_bits=8), "weights='int of 8 bits': must be float of 8 bits in"),
    (compressed("int-quantized", ROWS, **{**BYTES, "symmetric": False}), "weights.symmetric=False: must be True in"),
    (
        compressed("int-quantized", ROWS, **{**BYTES, "strategy": "group", "group_size": 128}),
        "weights.strategy='group': must be tensor or channel in format 'int-quantized'",
    ),
    ({**ROUND, "backend": "auto_round:marlin"}, "backend='auto_round:marlin': must be left out, and packing_format"),
    ({"quant_method": "modelopt"}, "quant_algo=None: must be NVFP4, W4A16_NVFP4"),
    (compressed("float-quantized", type="float", num_bits=8, strategy="block"), "block_structure=None: must be two"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo='W4A8_AWQ': must be NVFP4, W4A16_NVFP4"),
    ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size=128: must be two sizes"),
], ids=lambda v: v if isinstance(v, str) else "")  # fmt: skip
def test_settings_that_nothing_here_can_read_are_named(settings, message):
    with pytest.raises(ValueError, match=r"^quantization_config\..*" + re.escape(message)):
        read_settings(settings)
