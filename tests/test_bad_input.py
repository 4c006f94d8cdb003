"""Each mistake a user can make gets an error that names what to change: a test per message."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from epmoe import (
    Activation,
    EPGroup,
    ExpertPlacement,
    ExpertsSpec,
    ExpertWeights,
    MoEConfig,
    MoEKernel,
    MoELayer,
    QuantConfig,
    Router,
    RouterConfig,
    make_dispatcher,
    quantize_,
    select_experts,
)
from epmoe.dispatch import DISPATCHERS, RowSpec
from epmoe.experts import EXPERTS, TRAINING_EXPERTS, select_experts_impl
from epmoe.overlap import MinTokens, run_microbatched
from epmoe.testing import RankFailed, run_ranks

SMALL: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_experts": 6, "top_k": 2}
CONFIG, FP8 = MoEConfig(**SMALL), QuantConfig("fp8_block")
SPEC = ExpertsSpec(Activation(), 16, 24, torch.float32, torch.device("cpu"))


def raises(*parts: str) -> Any:
    return pytest.raises(ValueError, match=".*".join(re.escape(part) for part in parts))


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


def dispatcher(name: str, ep: Any = None, placement: Any = None, device: str = "cpu", **options: Any) -> Any:
    return make_dispatcher(name, ep, placement or ExpertPlacement.contiguous(6, 1), device, **options)


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


def test_an_input_that_does_not_fit_names_layer_and_shape() -> None:
    layer = MoELayer(MoEConfig(**SMALL), name="blocks.7.moe")
    with raises("blocks.7.moe", "(3, 17)", "[..., 16]"):
        layer(torch.randn(3, 17))
    with raises("blocks.7.moe", "torch.float16", "torch.float32", "torch.autocast"):
        layer(torch.randn(3, 16).half())
    with raises("blocks.7.moe", "meta", "cpu"):
        layer(torch.empty(3, 16, device="meta"))
    with raises("blocks.7.moe", "token_mask", "bool", "(3,)"):
        layer(torch.randn(3, 16), token_mask=torch.ones(2, dtype=torch.bool))
    with raises("blocks.7.moe", "token_mask", "bool"):
        layer(torch.randn(3, 16), token_mask=torch.ones(3))
    with raises("blocks.7.moe", "x=[1.0]", "a tensor [..., 16]"):
        layer([1.0])
    with raises("blocks.7.moe", "token_mask=True", "a bool tensor (3,)"):
        layer(torch.randn(3, 16), token_mask=True)
    with raises("routing= is int", "a Routing or two tensors"):
        layer(torch.randn(3, 16), routing=3)
    layer.add_lora(["a", "b"], 2, 4.0)
    for ids in ("b", True):
        with raises("blocks.7.moe", f"adapter_ids={ids!r}", "0 for 'a', 1 for 'b', -1 for none"):
            layer(torch.randn(3, 16), adapter_ids=ids)
    with raises("blocks.7.moe", "to_empty"):
        MoELayer(MoEConfig(**SMALL), device="meta", name="blocks.7.moe")(torch.randn(3, 16))


def test_a_router_of_ones_own_that_returns_nonsense_is_named() -> None:
    x = torch.randn(3, 16)
    for returned, parts in [
        (torch.zeros(3, 2), ["router returned Tensor", "topk_ids"]),
        ((torch.zeros(3, 1, dtype=torch.int32), torch.zeros(3, 1)), ["topk_ids", "[3, 1]", "[3, 2]"]),
        ((torch.zeros(3, 2), torch.zeros(3, 2)), ["topk_ids", "torch.float32"]),
        ((torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 1)), ["topk_weights", "[3, 1]"]),
        ((torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2).int()), ["topk_weights", "torch.int32"]),
    ]:
        with raises(*parts):
            MoELayer(MoEConfig(**SMALL), router=lambda _, r=returned: r)(x)


def test_load_experts_names_the_tensor_and_its_shape() -> None:
    layer = MoELayer(MoEConfig(**SMALL))
    with raises("'w1'", "gate_up_proj, down_proj"):
        layer.load_experts({"w1": torch.zeros(6, 48, 16)})
    with raises("down_proj", "(3, 16, 24)", "(6, 16, 24)", "pass expert_ids"):
        layer.load_experts({"down_proj": torch.zeros(3, 16, 24)})
    with raises("down_proj", "(2, 24, 16)", "(2, 16, 24)"):
        layer.load_experts({"down_proj": torch.zeros(2, 24, 16)}, expert_ids=[0, 1])
    for ids in ([0, 0], [0, 6], [-1, 2], [0.7, 1], ["0", "1"], [True, 0]):
        with raises(f"expert_ids={ids}", "[0, 6)"):
            layer.load_experts({"down_proj": torch.zeros(2, 16, 24)}, expert_ids=ids)  # type: ignore[arg-type]
    with raises("expert_ids=2", "distinct ids in [0, 6)"):
        layer.load_experts({"down_proj": torch.zeros(2, 16, 24)}, expert_ids=2)  # type: ignore[arg-type]
    with raises("tensors={}", "gate_up_proj, down_proj"):
        layer.load_experts({})
    with raises("tensors=[]", "must map names to tensors"):
        layer.load_experts([])  # type: ignore[arg-type]
    with raises("down_proj=[1.0]", "a tensor"):
        layer.load_experts({"down_proj": [1.0]})  # type: ignore[dict-item]
    with raises("down_proj is torch.int64", "torch.float32, or another floating dtype"):
        layer.load_experts({"down_proj": torch.zeros(6, 16, 24, dtype=torch.int64)})
    for ids in (torch.tensor([5, 1]), np.array([5, 1]), (5, 1)):
        assert layer.load_experts({"down_proj": torch.zeros(2, 16, 24)}, expert_ids=ids) == [5, 1]


@pytest.mark.parametrize(("wrong", "message"), [
    (("x", 2, 1.0), "adapters='x': must be a number > 0, or a list of names"),
    ((2.0, 2, 1.0), "adapters=2.0: must be a number > 0"),
    (([0, 1], 2, 1.0), "adapters=[0, 1]: must be a number > 0, or distinct names"),
    ((1, "2", 1.0), "rank='2': must be an int > 0"),
    ((1, 2, "x"), "alpha='x': must be a number > 0"),
    ((2, 2, [1.0, None]), "alpha=[1.0, None]: must be a number > 0, or one for each of 2 adapters"),
    ((1, 2, True), "alpha=True: must be a number > 0"),
])  # fmt: skip
def test_adapters_that_are_none_are_named(wrong: tuple[Any, ...], message: str) -> None:
    with raises("layer 'moe'", message):
        MoELayer(CONFIG).add_lora(*wrong)


def kernel(**options: Any) -> tuple[MoEKernel, ExpertWeights]:
    weights = ExpertWeights(torch.randn(6, 48, 16), torch.randn(6, 16, 24))
    return MoEKernel(dispatcher("local"), select_experts(SPEC).experts, **options), weights


def test_a_kernel_called_by_hand_checks_its_arguments() -> None:
    call, weights = kernel()
    x, ids, p = torch.randn(3, 16), torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2)
    assert call(x, ids, p, weights).routed.shape == (3, 16)
    for args, parts in [
        ((x[None], ids, p), ["x [M, H]", "(1, 3, 16)"]),
        (([1.0], ids, p), ["x=[1.0]", "a tensor"]),
        ((x, None, p), ["topk_ids=None", "tensors [M, K]"]),
        ((x, ids, 1.0), ["topk_weights=1.0", "tensors [M, K]"]),
        ((x[:2], ids, p), ["x has 2 rows and topk_ids 3"]),
        ((torch.randn(16, 3).t(), ids, p), ["x.stride(-1)=3", "x.contiguous()"]),
        ((x, ids.float(), p), ["topk_ids.dtype=torch.float32", "torch.int32"]),
        ((x, ids, p.half()), ["topk_weights.dtype=torch.float16", "torch.float32"]),
        ((x, ids.to("meta"), p), ["topk_ids is on meta", "cpu"]),
        ((torch.randn(3, 12), ids, p), ["rows are 12 wide", "hidden_size is 16"]),
        ((x.half(), ids, p), ["rows are torch.float16, made for torch.float32", "convert"]),
    ]:
        with raises(*parts):
            call(*args, weights)
    with raises("weights=(1, 2)", "ExpertWeights(gate_up_proj, down_proj, ...)"):
        call(x, ids, p, (1, 2))  # type: ignore[arg-type]
    with raises("inplace='x'", "True or False"), torch.no_grad():
        call(x, ids, p, weights, inplace="x")  # type: ignore[arg-type]
    for experts in (5, 9):
        with raises(f"logits are of shape (3, {experts})", "[M, 6]"):
            call.from_logits(x, torch.randn(3, experts), weights, router=RouterConfig(), top_k=2)
    with raises("logits=3", "[M, 6]"):
        call.from_logits(x, 3, weights, router=RouterConfig(), top_k=2)  # type: ignore[arg-type]
    with raises("down_proj has shape (6, 24, 16)", "(6, 16, 24)"):
        call(x, ids, p, ExpertWeights(weights.gate_up_proj, weights.down_proj.transpose(1, 2)))
    with raises("gate_up_bias has shape (6, 24)", "(6, 48)"):
        call(x, ids, p, ExpertWeights(weights.gate_up_proj, weights.down_proj, torch.zeros(6, 24)))


@pytest.mark.parametrize(("options", "parts"), [
    ({"chunk_tokens": 2.5}, ["chunk_tokens=2.5", "an int > 0, or None for all at once"]),
    ({"chunk_tokens": 0}, ["chunk_tokens=0", "an int > 0"]),
    ({"comm_sms": "8"}, ["comm_sms='8'", "an int > 0, or None for what the dispatcher needs"]),
    ({"workspace": 3}, ["workspace=3", "a Workspace, or None"]),
    ({"validate": "no"}, ["validate='no'", "True or False"]),
    ({"combine_scheme": "fp8"}, ["combine_scheme='fp8'", "one of fp8_block", "None for rows as they are"]),
    ({"grad_scheme": "fp8"}, ["grad_scheme='fp8'", "one of fp8_block"]),
    ({"dispatch_scheme": "fp8"}, ["dispatch_scheme='fp8'", "one of fp8_block"]),
    ({"shared_experts_order": "first"}, ["shared_experts_order='first'", "one of auto, before"]),
], ids=lambda v: next(iter(v)) if isinstance(v, dict) else "")  # fmt: skip
def test_a_kernel_that_cannot_be_made_names_the_setting(options: dict[str, Any], parts: list[str]) -> None:
    with raises(*parts):
        kernel(**options)


def test_a_kernel_is_made_of_a_dispatcher_and_experts() -> None:
    made, chosen = dispatcher("local"), select_experts(SPEC)
    with raises("dispatcher='local'", "as make_dispatcher(...) gives it"):
        MoEKernel("local", chosen.experts)  # type: ignore[arg-type]
    with raises("experts is a Selection", "as select_experts(spec).experts are"):
        MoEKernel(made, chosen)  # type: ignore[arg-type]
    batched = select_experts(SPEC, "batched", "batched").experts
    with raises("expert_capacity=2.5", "an int > 0, or None for room for every row"):
        MoEKernel(made, batched, layout="batched", expert_capacity=2.5)  # type: ignore[arg-type]


def layout_mistakes(rank: int, world: int) -> None:
    """Of every dispatcher; on two ranks all make them alike."""
    ep = EPGroup(timeout=60) if world > 1 else None
    two = EPGroup(timeout=60, nodes=1) if world > 1 else None
    x, ids, p = torch.randn(3, 16), torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2)
    names = [name for name in DISPATCHERS if (name == "local") == (world == 1)]
    for name in names:
        group, options = (two if name == "hierarchical" else ep), {"max_tokens_per_rank": 4, "layer": "blocks.3"}
        d = make_dispatcher(name, group, ExpertPlacement.contiguous(6, world), "cpu", **options)  # type: ignore[arg-type]
        of_two, of_three = d.make_layout(ids[:2]), d.make_layout(ids)
        with raises("layer 'blocks.3'", "layout is of 2 tokens, topk_ids of 3"):
            d.dispatch(x, ids, p, layout=of_two)
        with raises("layout='batched'", f"what make_layout or a dispatch of {name!r} gave"):
            d.dispatch(x, ids, p, layout="batched")  # type: ignore[arg-type]
        rows = d.dispatch(x, ids, p, layout=of_three)
        handle, wide = rows.handle, d.name != "local"
        with raises("combine takes one row per row dispatched", f"[{handle.num_rows}, H]"):
            d.combine(torch.zeros(handle.num_rows + 1, 16), handle)
        with raises("rows=[1.0]", "a tensor [T, H], or an ExpertOutput"):
            d.combine([1.0], handle)  # type: ignore[arg-type]
        with raises("handle=None", "what make_layout or a dispatch"):
            d.combine(rows.x, None)  # type: ignore[arg-type]
        for out in (torch.empty(2, 16), torch.empty(3, 8), torch.empty(3, 16, dtype=torch.float64)):
            with raises(f"out is {out.dtype} {tuple(out.shape)}", "must be torch.float32 (3, 16)"):
                d.combine(rows.x.clone(), handle, out=out)
        with torch.no_grad():
            assert d.combine(rows.x.clone(), handle, out=torch.empty(3, 16)).shape == (3, 16), wide
        known = make_dispatcher(
            name,
            group,
            ExpertPlacement.contiguous(6, world),
            "cpu",
            rows=RowSpec(16, torch.float32),
            **options,  # type: ignore[arg-type]
        )
        with raises("combine got rows 8 wide", "must be 16"):
            known.combine(torch.zeros(handle.num_rows, 8), handle)


def test_a_layout_of_other_tokens_and_rows_that_do_not_fit_it_are_refused() -> None:
    layout_mistakes(0, 1)
    run_ranks(layout_mistakes, 2)


@pytest.mark.parametrize("how", ["argument", "environment", "config"])
def test_ids_out_of_range_raise_when_asked_to_validate(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, p = torch.tensor([[0, 1], [5, -1], [2, 6]], dtype=torch.int32), torch.ones(3, 2)
    x = torch.randn(3, 16)
    if how == "environment":
        monkeypatch.setenv("EPMOE_VALIDATE", "1")
    with raises("topk_ids[2, 1]=6", "num_experts=6"):
        if how == "config":
            MoELayer(MoEConfig(**SMALL, validate=True), router=lambda _: (ids, p))(x)
        else:
            call, weights = kernel(validate=True) if how == "argument" else kernel()
            call(x, ids, p, weights)
    call, weights = kernel(validate=True)
    with raises("topk_weights[0, 1]=nan"):
        call(x, ids.clamp_max(5), torch.tensor([[1, float("nan")]] * 3), weights)


@pytest.mark.parametrize("experts", ["reference", "grouped", "torch_grouped"])
def test_ids_out_of_range_unvalidated_count_as_no_expert_and_reach_no_memory(experts: str) -> None:
    good = torch.tensor([[0, 1], [5, -1], [2, -1]], dtype=torch.int32)
    bad = torch.tensor([[0, 1], [5, 2**31 - 1], [2, -(2**31)]], dtype=torch.int32)
    p, x = torch.rand(3, 2), torch.randn(3, 16)
    torch.manual_seed(0)
    layers = [MoELayer(MoEConfig(**SMALL, experts=experts), router=lambda _, i=ids: (i, p)) for ids in (good, bad)]
    layers[1].load_state_dict(layers[0].state_dict())
    assert torch.equal(layers[0](x), layers[1](x))


def test_an_ep_group_without_torch_distributed_says_what_to_call() -> None:
    with raises("init_process_group", "ep=None"):
        EPGroup()


def group_mistakes(rank: int, world: int) -> list[str]:
    messages = []
    for options in (
        {"timeout": 0},
        {"device": "cuda"},
        {"timeout": -1.0},
        {"timeout": "5"},
        {"timeout": None},
        {"timeout": float("inf")},
        {"device": "meta"},
        {"device": "gpu"},
        {"nodes": 3},
        {"nodes": 1.5},
        {"nodes": "01"},
        {"process_group": [0, 1]},
    ):
        with pytest.raises(ValueError) as error:
            EPGroup(**options)
        messages.append(str(error.value))
    other = [dist.new_group([r]) for r in range(world)][1 - rank]
    with pytest.raises(ValueError) as error:
        EPGroup(other)
    messages.append(str(error.value))
    ep = EPGroup()
    for make in (
        lambda: MoELayer(MoEConfig(**{**SMALL, "num_experts": 1, "top_k": 1}), ep),
        lambda: MoELayer(MoEConfig(**SMALL, dispatcher="local"), ep),
        lambda: make_dispatcher("all_to_all", ep, ExpertPlacement.contiguous(6, 3), "cpu"),
        lambda: MoELayer(MoEConfig(**SMALL, placement=((0, 1), (2, 3), (4, 5))), ep),
        lambda: MoELayer(ep, CONFIG),
    ):
        with pytest.raises(ValueError) as error:
            make()
        messages.append(str(error.value))
    return messages


def test_mistakes_around_a_group_are_named_on_every_rank() -> None:
    wanted = [
        "timeout=0",
        "gloo",
        "timeout=-1",
        "timeout='5': must be seconds, finite and > 0",
        "timeout=None: must be seconds",
        "timeout=inf: must be seconds, finite",
        "device='meta': must be cpu or cuda",
        "device='gpu': must be cpu, cuda",
        "nodes=3: must be at most the 2 ranks",
        "nodes=1.5: must be ranks per node",
        "nodes='01': must be ranks per node",
        "process_group=[0, 1]: must be a group of torch.distributed, or None; make one of some ranks by",
        "not a member",
        "num_experts=1",
        "dispatcher='local' with 2 ranks",
        "3",
        "3",
        "the first argument is the MoEConfig, the second the EPGroup",
    ]
    for messages in run_ranks(group_mistakes, 2):
        for message, part in zip(messages, wanted, strict=True):
            assert part in message, (part, message)


def build_differently(rank: int, world: int, field: str) -> None:
    ep = EPGroup(timeout=20)
    config: dict[str, Any] = dict(SMALL)
    dtype, router = torch.float32, None
    if rank == 1:
        if field == "dtype":
            dtype = torch.bfloat16
        elif field == "own router":
            router = lambda x: x  # noqa: E731
        elif field == "router.scoring":
            config["router"] = RouterConfig(scoring="sigmoid")
        elif field == "placement":
            config["placement"] = "strided"
        else:
            config[field] = config[field] + 1
    MoELayer(MoEConfig(**config), ep, dtype=dtype, router=router, name="blocks.0")


@pytest.mark.parametrize("field", ["num_experts", "top_k", "router.scoring", "placement", "dtype", "own router"])
def test_ranks_built_differently_find_out_at_construction_and_name_the_field(field: str) -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(build_differently, 2, args=(field,), timeout=40)
    message = str(failure.value)
    assert "MoELayer 'blocks.0' differs between ranks" in message
    assert f"{field}: rank 0 has" in message and message.count(": rank 0 has") == 1, message


@pytest.mark.gpu
def test_tensors_on_different_devices_are_named() -> None:
    layer = MoELayer(MoEConfig(**SMALL), device="cuda")
    with raises("x is on cpu", "cuda:0"):
        layer(torch.randn(3, 16))
