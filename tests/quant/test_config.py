"""`QuantConfig`: what it means, what it refuses by name, and what released checkpoints say."""

from __future__ import annotations

import re
from typing import Any

import pytest

from epmoe import MoEConfig, QuantConfig
from epmoe.quant import WEIGHT_SCHEMES
from epmoe.quant.formats import FORMATS, weight_format


@pytest.mark.parametrize("scheme", WEIGHT_SCHEMES)
def test_rows_travel_in_the_scheme_that_the_weights_products_take(scheme: str) -> None:
    assert QuantConfig(scheme).rows == FORMATS[scheme].rows == scheme
    assert QuantConfig(scheme, activations=None).rows is None
    assert QuantConfig(scheme, activations="int8_row").rows == "int8_row"
    assert MoEConfig(16, 16, 4, 2, quant=QuantConfig(scheme)).row_scheme == scheme


def test_without_weights_nothing_is_quantized_but_what_is_named() -> None:
    assert QuantConfig().rows is None
    assert QuantConfig(activations="fp8_block").rows == "fp8_block"
    assert MoEConfig(16, 16, 4, 2, dispatch_scheme="fp8_row").row_scheme == "fp8_row"
    assert MoEConfig(16, 16, 4, 2).row_scheme is None


@pytest.mark.parametrize(("wrong", "message"), [
    ({"weights": "fp9"}, "QuantConfig.weights='fp9': must be None, or one of fp8_block"),
    ({"activations": "fp9"}, "QuantConfig.activations='fp9'"),
    ({"gradients": "as weights"}, "QuantConfig.gradients='as weights'"),
    ({"combine": "bf16"}, "QuantConfig.combine='bf16'"),
    ({"weights": "int4_g32", "zero_points": "yes"}, "QuantConfig.zero_points='yes': must be True or False"),
    ({"weights": "fp8_row", "zero_points": True}, "QuantConfig.zero_points=True with weights='fp8_row': must be"),
    ({"weights": "int4_g32", "scale_dtype": "half"}, "QuantConfig.scale_dtype='half' with weights='int4_g32': must be"),
    ({"weights": "nvfp4", "scale_dtype": "float16"}, "QuantConfig.scale_dtype='float16' with weights='nvfp4': must be"),
    ({"scale_dtype": "float16"}, "QuantConfig.scale_dtype='float16' with weights=None: must be None, or bfloat16, flo"),
    ({"weights": "fp8_row", "scales": "fixed"}, "QuantConfig.scales='fixed': must be 'dynamic' or 'static'"),
    ({"weights": "fp8_block", "scales": "static"}, "QuantConfig.scales='static' with weights='fp8_block'"),
    ({"activations": "fp8_row", "scales": "static"}, "QuantConfig.scales='static' with weights=None"),
    ({"weights": "fp8_block", "block": (96, 128)}, "QuantConfig.block=(96, 128) with weights='fp8_block': must be"),
    ({"weights": "fp8_block_ue8m0", "block": (64, 16)}, "QuantConfig.block=(64, 16) with weights='fp8_block_ue8m0'"),
    ({"weights": "fp8_block", "block": 64}, "QuantConfig.block=64 with weights='fp8_block': must be (rows, columns)"),
    ({"weights": "fp8_row", "block": (64, 128)}, "block=(64, 128) with weights='fp8_row': must be (128, 128): only"),
    ({"block": (64, 128)}, "QuantConfig.block=(64, 128) with weights=None: must be (128, 128): only weights in fp8"),
    ({"experts": "grouped"}, "QuantConfig.experts='grouped' with weights=None"),
], ids=lambda v: next(iter(v)) if isinstance(v, dict) else "")  # fmt: skip
def test_a_wrong_field_is_named_with_its_value_and_what_would_be_right(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        QuantConfig(**wrong)


def test_two_ways_of_naming_the_rows_scheme_must_agree() -> None:
    quant = QuantConfig(activations="fp8_block")
    assert MoEConfig(16, 16, 4, 2, quant=quant, dispatch_scheme="fp8_block").row_scheme == "fp8_block"
    with pytest.raises(ValueError, match="MoEConfig.dispatch_scheme='fp8_row': must be left unset"):
        MoEConfig(16, 16, 4, 2, quant=quant, dispatch_scheme="fp8_row")
    with pytest.raises(ValueError, match="scheme='int3'"):
        weight_format("int3")
    with pytest.raises(ValueError, match="block=.64, 64. with scheme='int8_row': must be .128, 128."):
        weight_format("int8_row", (64, 64))


def test_the_settings_of_released_checkpoints_are_read() -> None:
    deepseek = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
    assert QuantConfig.from_checkpoint(deepseek) == QuantConfig("fp8_block")
    assert QuantConfig.from_checkpoint({**deepseek, "scale_fmt": "ue8m0"}).weights == "fp8_block_ue8m0"
    assert QuantConfig.from_checkpoint(deepseek, combine="fp8_block").combine == "fp8_block"
    assert QuantConfig.from_checkpoint({**deepseek, "weight_block_size": [1, 64]}) == QuantConfig(
        "fp8_block", block=(1, 64)
    )
    assert QuantConfig.from_checkpoint({**deepseek, "scale_fmt": "float"}) == QuantConfig("fp8_block")
    with pytest.raises(ValueError, match="settings is a QuantConfig: must be the dict"):
        QuantConfig.from_checkpoint(QuantConfig())  # type: ignore[arg-type]
    for change in (
        {"quant_method": "bitsandbytes"},
        {"weight_block_size": [8, 8]},
        {"weight_block_size": 128},
        {"activation_scheme": "static"},
        {"fmt": "e5m2"},
        {"scale_fmt": "x"},
        {"expert_dtype": "fp4"},
    ):
        name, value = next(iter(change.items()))
        with pytest.raises(ValueError, match=re.escape(f"quantization_config.{name}={value!r}")):
            QuantConfig.from_checkpoint({**deepseek, **change})
