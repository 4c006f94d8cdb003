"""Mistakes in what configures and makes something get an error that names what to change: a test per message."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from epmoe import (
    ExpertPlacement,
    MoEConfig,
    MoELayer,
    QuantConfig,
    Router,
    RouterConfig,
    quantize_,
    select_experts,
)
from epmoe.dispatch import DISPATCHERS
from epmoe.experts import EXPERTS, TRAINING_EXPERTS, select_experts_impl
from epmoe.overlap import MinTokens, run_microbatched
from tests.mistakes import CONFIG, FP8, SMALL, SPEC, dispatcher, raises


@pytest.mark.parametrize(("wrong", "parts"), [
    ({"hidden_size": 0}, ["MoEConfig.hidden_size=0", "an int > 0"]),
    ({"intermediate_size": 2.5}, ["MoEConfig.intermediate_size=2.5", "an int > 0"]),
    ({"num_experts": True}, ["MoEConfig.num_experts=True", "an int > 0"]),
    ({"top_k": 7}, ["MoEConfig.top_k=7", "at most num_experts=6"]),
    ({"latent_size": -1}, ["MoEConfig.latent_size=-1"]),
    ({"activation": "swish"}, ["activation='swish'", "one of swiglu, geglu"]),
    ({"activation_limit": 7.0}, ["activation_limit=7.0", "'swiglu' has no clamp"]),
    ({"activation_alpha": 1.7}, ["activation_alpha=1.7", "'swiglu' does not read it"]),
    ({"activation": "swiglu_oai", "activation_limit": -1.0}, ["activation_limit=-1.0", "> 0"]),
    ({"num_shared_experts": -1}, ["MoEConfig.num_shared_experts=-1"]),
    ({"shared_expert_gate": True}, ["MoEConfig.shared_expert_gate=True", "num_shared_experts=0"]),
    ({"placement": "random"}, ["MoEConfig.placement='random'", "contiguous, strided"]),
    ({"placement": None}, ["MoEConfig.placement=None", "an ExpertPlacement, or one tuple of expert ids per rank"]),
    ({"placement": (3, 4)}, ["MoEConfig.placement=(3, 4)", "one tuple of expert ids per rank"]),
    ({"placement": ExpertPlacement.contiguous(4, 2)}, ["no rank owns expert 4", "num_experts=6"]),
    ({"num_shared_experts": True}, ["MoEConfig.num_shared_experts=True", "an int >= 0"]),
    ({"max_tokens_per_rank": "8"}, ["MoEConfig.max_tokens_per_rank='8'", "an int > 0, or None"]),
    ({"chunk_tokens": "4"}, ["MoEConfig.chunk_tokens='4'", "an int > 0, or None"]),
    ({"activation": "swiglu_oai", "activation_alpha": "x"}, ["activation_alpha='x'", "a finite number"]),
    ({"activation": "swiglu_oai", "activation_limit": "7"}, ["activation_limit='7'", "a number > 0"]),
    ({"activation": "swiglu_oai", "activation_limit": float("nan")}, ["activation_limit=nan", "a number > 0"]),
    ({"activation": ["swiglu"]}, ["activation=['swiglu']", "one of swiglu, geglu"]),
    ({"expert_bias": "no"}, ["MoEConfig.expert_bias='no'", "True or False"]),
    ({"router_weight_on_input": "yes"}, ["MoEConfig.router_weight_on_input='yes'", "True or False"]),
    ({"num_shared_experts": 1, "shared_expert_gate": "x"}, ["MoEConfig.shared_expert_gate='x'", "True or False"]),
    ({"main_grad": 1}, ["MoEConfig.main_grad=1", "True or False"]),
    ({"batch_invariant": None}, ["MoEConfig.batch_invariant=None", "True or False"]),
    ({"validate": torch.tensor(True)}, ["MoEConfig.validate is a Tensor", "True or False"]),
    ({"router": "softmax"}, ["MoEConfig.router='softmax'", "a RouterConfig, such as RouterConfig(scoring='softmax')"]),
    ({"router": None}, ["MoEConfig.router=None", "a RouterConfig"]),
    ({"router": {"scoring": "softmax"}}, ["MoEConfig.router={'scoring': 'softmax'}", "a RouterConfig"]),
    ({"quant": "fp8_block"}, ["MoEConfig.quant='fp8_block'", "as QuantConfig('fp8_block')"]),
    ({"quant": QuantConfig}, ["MoEConfig.quant=<class", "as QuantConfig('fp8_block')"]),
    ({"dispatch_scheme": "fp8"}, ["MoEConfig.dispatch_scheme='fp8'", "one of fp8_block", "None for rows as they are"]),
    ({"dispatcher": "pigeon"}, ["MoEConfig.dispatcher='pigeon'", "one of auto, local", "symmetric"]),
    ({"dispatcher": None}, ["MoEConfig.dispatcher=None", "one of auto, local"]),
    ({"experts": "x"}, ["MoEConfig.experts='x'", "auto, grouped, torch_grouped, batched", "grouped_fp8_train"]),
    ({"experts": "grouped_fp8"}, ["MoEConfig.experts='grouped_fp8'", "set quant=QuantConfig('fp8_block')"]),
    ({"experts": "weight_only"}, ["MoEConfig.experts='weight_only'", "set quant=QuantConfig('int4_g32')", "mxfp4"]),
    ({"overflow": "ignore"}, ["MoEConfig.overflow='ignore'", "one of raise, chunk, drop"]),
    ({"shared_experts_order": "first"}, ["MoEConfig.shared_experts_order='first'", "auto, before, during, after"]),
    ({"quant": FP8, "experts": "grouped"}, ["MoEConfig.experts='grouped'", "left unset", "QuantConfig.experts names"]),
    ({"quant": FP8, "experts": "batched"}, ["MoEConfig.experts='batched'", "expert_capacity gives batched rows"]),
    ({"quant": QuantConfig("fp8_row", experts="abacus")}, ["QuantConfig.experts='abacus'", "auto, grouped_fp8"]),
    ({"quant": FP8, "main_grad": True}, ["MoEConfig.main_grad=True", "left unset", "no gradients to add"]),
    ({"router": RouterConfig(num_groups=4)}, ["MoEConfig.router.num_groups=4", "a divisor of num_experts=6"]),
    ({"router": RouterConfig(num_groups=3), "top_k": 3}, ["MoEConfig.top_k=3", "at most 2", "topk_groups=1 of 3"]),
], ids=lambda v: next(iter(v)) if isinstance(v, dict) else "")  # fmt: skip
def test_a_wrong_config_names_field_value_and_range(wrong: dict[str, Any], parts: list[str]) -> None:
    with raises(*parts):
        MoEConfig(**{**SMALL, **wrong})


@pytest.mark.parametrize(("wrong", "parts"), [
    ({"scoring": "softmin"}, ["RouterConfig.scoring='softmin'", "softmax"]),
    ({"group_score": "mean"}, ["RouterConfig.group_score='mean'", "max or top2_sum"]),
    ({"num_groups": 2, "topk_groups": 3}, ["RouterConfig.topk_groups=3", "at most num_groups=2"]),
    ({"scaling_factor": 0.0}, ["RouterConfig.scaling_factor=0.0"]),
    ({"dtype": torch.bfloat16}, ["RouterConfig.dtype=torch.bfloat16", "torch.float32"]),
    ({"scaling_factor": "x"}, ["RouterConfig.scaling_factor='x'", "a number, finite and not 0"]),
    ({"num_groups": "2"}, ["RouterConfig.num_groups='2'", "an int > 0"]),
    ({"renormalize": "no"}, ["RouterConfig.renormalize='no'", "True or False"]),
    ({"bias": 1}, ["RouterConfig.bias=1", "True or False"]),
    ({"selection_bias": torch.zeros(6)}, ["RouterConfig.selection_bias is a Tensor", "True or False"]),
], ids=lambda v: next(iter(v)) if isinstance(v, dict) else "")  # fmt: skip
def test_a_wrong_router_config_names_field_value_and_range(wrong: dict[str, Any], parts: list[str]) -> None:
    with raises(*parts):
        RouterConfig(**wrong)


@pytest.mark.parametrize(("wrong", "parts"), [
    ({"dispatcher": "carrier_pigeon"}, ["dispatcher='carrier_pigeon'", "all_to_all"]),
    ({"dispatcher": "all_to_all"}, ["dispatcher='all_to_all' needs an EPGroup", "'local'"]),
    ({"experts": "abacus"}, ["experts='abacus'", "auto, grouped"]),
    ({"placement": ((0, 1, 2), (3, 4, 5))}, ["lists 2 ranks but all experts are to be on 1", "an EPGroup of 2 ranks"]),
    ({"placement": ((0, 1, 2, 3, 4),)}, ["5"]),
    ({"hidden_size": 81, "experts": "torch_grouped"}, ["torch_grouped", "hidden_size=81", "experts='grouped'"]),
    ({"intermediate_size": 3, "experts": "torch_grouped"}, ["torch_grouped", "intermediate_size=3"]),
], ids=lambda v: next(iter(v)) if isinstance(v, dict) else "")  # fmt: skip
def test_a_layer_that_cannot_be_built_says_why(wrong: dict[str, Any], parts: list[str]) -> None:
    with raises(*parts):
        MoELayer(MoEConfig(**{**SMALL, **wrong}))


@pytest.mark.parametrize(("make", "parts"), [
    (lambda: MoELayer(SMALL), ["config={'hidden_size': 16", "a MoEConfig"]),  # type: ignore[arg-type]
    (lambda: MoELayer(CONFIG, 2), ["ep=2", "an EPGroup, or None"]),  # type: ignore[arg-type]
    (lambda: MoELayer(CONFIG, router=3), ["router=3", "a module or function of x"]),  # type: ignore[arg-type]
    (lambda: MoELayer(CONFIG, router="softmax"), ["router='softmax'", "MoEConfig(router="]),  # type: ignore[arg-type]
    (lambda: MoELayer(CONFIG, dtype="float32"), ["dtype='float32'", "torch.float32"]),  # type: ignore[arg-type]
    (lambda: MoELayer(CONFIG, device="gpu"), ["device='gpu'", "cpu, cuda, cuda:N or meta"]),
    (lambda: MoELayer(CONFIG, device="cuda:99"), ["device='cuda:99'", "must be c"]),
    (lambda: Router(RouterConfig(), 16, 6, 2, device="gpu"), ["device='gpu'", "cpu, cuda"]),
    (lambda: Router("softmax", 16, 6, 2), ["config='softmax'", "a RouterConfig"]),  # type: ignore[arg-type]
    (lambda: Router(RouterConfig(), 16, 6.0, 2), ["num_experts=6.0", "an int > 0"]),  # type: ignore[arg-type]
    (lambda: quantize_(MoELayer(CONFIG), "fp8_block"), ["config='fp8_block'", "as QuantConfig('fp8_block')"]),  # type: ignore[arg-type]
    (lambda: quantize_(MoELayer(CONFIG), QuantConfig), ["config=<class", "a QuantConfig, such"]),  # type: ignore[arg-type]
    (lambda: quantize_(CONFIG, FP8), ["module is a MoEConfig", "a MoELayer"]),  # type: ignore[arg-type]
    (lambda: quantize_(MoELayer(MoEConfig(**SMALL, experts="grouped")), FP8), ["layer 'moe'", "experts='grouped'"]),
    (lambda: quantize_(MoELayer(MoEConfig(**SMALL, dispatch_scheme="int8_row")), FP8),
     ["layer 'moe'", "dispatch_scheme='int8_row'", "rows in 'fp8_block'", "activations='int8_row'"]),
    (lambda: select_experts(CONFIG), ["spec is a MoEConfig", "an ExpertsSpec"]),  # type: ignore[arg-type]
    (lambda: select_experts(SPEC, "x"), ["experts='x'", "auto, grouped", "grouped_fp8_train"]),
    (lambda: select_experts(SPEC, "weight_only"), ["the weights are not quantized", "QuantConfig('int4_g32')"]),
    (lambda: select_experts(SPEC, 3), ["experts=3", "the name of a kind"]),  # type: ignore[arg-type]
    (lambda: select_experts_impl(CONFIG, device="gpu", dtype=torch.float32), ["device='gpu'", "cpu, cuda"]),
    (lambda: dispatcher("auto", placement=6), ["placement=6", "an ExpertPlacement"]),
    (lambda: dispatcher("auto", device="gpu"), ["device='gpu'", "cpu, cuda"]),
    (lambda: dispatcher("auto", ep=2), ["ep=2", "an EPGroup"]),
    (lambda: dispatcher("auto", placement=ExpertPlacement.contiguous(6, 2)), ["for 2 ranks", "without an EPGroup"]),
    *((lambda n=n: dispatcher("symmetric", max_tokens_per_rank=n), [f"max_tokens_per_rank={n!r}", "an int > 0"])
      for n in (0, -4, "8", True)),
    (lambda: MinTokens("x"), ["MinTokens.prefill='x'", "an int >= 0"]),  # type: ignore[arg-type]
], ids=lambda v: v[0] if isinstance(v, list) else "")  # fmt: skip
def test_a_wrong_kind_is_named_where_something_is_made(make: Callable[[], Any], parts: list[str]) -> None:
    with raises(*parts):
        make()


@pytest.mark.parametrize(("field", "value", "right"), [
    ("activation", "swiglu", "an Activation"),
    ("hidden_size", 0, "an int > 0"),
    ("intermediate_size", 2.5, "an int > 0"),
    ("dtype", "float32", "one of torch.float64"),
    ("device", "cpu", "a torch.device"),
    ("weight_on_input", "yes", "True or False"),
    ("scheme", "fp9", "one of fp8_block"),
])  # fmt: skip
def test_a_spec_checks_itself(field: str, value: Any, right: str) -> None:
    with raises(f"ExpertsSpec.{field}={value!r}", right):
        dataclasses.replace(SPEC, **{field: value})


@pytest.mark.parametrize(("option", "value", "right"), [
    ("num_microbatches", "2", "an int > 0"),
    ("interleave", "x", "True or False"),
    ("randomness", 1, "True or False"),
    ("split", "22", "the sizes of the parts"),
    ("ep", 3, "EPGroup"),
    ("min_tokens", True, "a number of tokens"),
])  # fmt: skip
def test_run_microbatched_checks_what_it_is_told(option: str, value: Any, right: str) -> None:
    with raises(f"{option}={value!r}", right):
        run_microbatched(lambda x: x, torch.zeros(4, 2), **{option: value})
    with raises("split[1]=2.5", "an int >= 0"):
        run_microbatched(lambda x: x, torch.zeros(4, 2), split=[1, 2.5])  # type: ignore[list-item]


def test_a_placement_is_taken_in_every_form_that_says_it() -> None:
    ranks = ((0, 2, 4), (1, 3, 5))
    for form in (ExpertPlacement(6, ranks), ranks, [list(own) for own in ranks], [range(0, 6, 2), range(1, 6, 2)]):
        assert MoEConfig(**SMALL, placement=form).placement == ranks  # type: ignore[arg-type]


def test_names_of_every_kind_and_numbers_of_numpy_are_taken() -> None:
    for name in (*EXPERTS, *TRAINING_EXPERTS):
        MoEConfig(**SMALL, experts=name)
    for name in DISPATCHERS:
        MoEConfig(**SMALL, dispatcher=name, max_tokens_per_rank=8)
    alpha = np.float32(1.5)
    assert MoEConfig(**SMALL, activation="swiglu_oai", activation_alpha=alpha).activation_function.alpha == alpha


def test_odd_sizes_work_where_nothing_forbids_them() -> None:
    for experts in ("reference", "grouped"):
        layer = MoELayer(MoEConfig(81, 3, 5, 5, experts=experts), dtype=torch.bfloat16)
        assert layer(torch.randn(3, 81).bfloat16()).isfinite().all()


def test_dtypes_that_no_kernel_has_are_refused() -> None:
    with raises("dtype=torch.int8", "torch.bfloat16"):
        MoELayer(MoEConfig(**SMALL), dtype=torch.int8)
    with raises("torch_grouped", "dtype=torch.float64"):
        MoELayer(MoEConfig(**SMALL, experts="torch_grouped"), dtype=torch.float64)
