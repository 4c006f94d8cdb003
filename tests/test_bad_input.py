"""Each mistake a user can make gets an error that names what to change: a test per message."""

from __future__ import annotations

import re
from typing import Any

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
    RouterConfig,
    make_dispatcher,
    select_experts,
)
from epmoe.testing import RankFailed, run_ranks

SMALL: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_experts": 6, "top_k": 2}


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
], ids=lambda v: next(iter(v)) if isinstance(v, dict) else "")  # fmt: skip
def test_a_wrong_router_config_names_field_value_and_range(wrong: dict[str, Any], parts: list[str]) -> None:
    with raises(*parts):
        RouterConfig(**wrong)


@pytest.mark.parametrize(("wrong", "parts"), [
    ({"dispatcher": "carrier_pigeon"}, ["dispatcher='carrier_pigeon'", "all_to_all"]),
    ({"dispatcher": "all_to_all"}, ["dispatcher='all_to_all' needs an EPGroup", "'local'"]),
    ({"experts": "abacus"}, ["experts='abacus'", "auto, grouped"]),
    ({"placement": ((0, 1, 2), (3, 4, 5))}, ["2", "1"]),
    ({"placement": ((0, 1, 2, 3, 4),)}, ["5"]),
    ({"hidden_size": 81, "experts": "torch_grouped"}, ["torch_grouped", "hidden_size=81", "experts='grouped'"]),
    ({"intermediate_size": 3, "experts": "torch_grouped"}, ["torch_grouped", "intermediate_size=3"]),
], ids=lambda v: next(iter(v)) if isinstance(v, dict) else "")  # fmt: skip
def test_a_layer_that_cannot_be_built_says_why(wrong: dict[str, Any], parts: list[str]) -> None:
    with raises(*parts):
        MoELayer(MoEConfig(**{**SMALL, **wrong}))


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
    for ids in ([0, 0], [0, 6], [-1, 2]):
        with raises(f"expert_ids={ids}", "[0, 6)"):
            layer.load_experts({"down_proj": torch.zeros(2, 16, 24)}, expert_ids=ids)


def kernel(**options: Any) -> tuple[MoEKernel, ExpertWeights]:
    spec = ExpertsSpec(Activation(), 16, 24, torch.float32, torch.device("cpu"))
    dispatcher = make_dispatcher("local", None, ExpertPlacement.contiguous(6, 1), "cpu")
    weights = ExpertWeights(torch.randn(6, 48, 16), torch.randn(6, 16, 24))
    return MoEKernel(dispatcher, select_experts(spec).experts, **options), weights


def test_a_kernel_called_by_hand_checks_its_arguments() -> None:
    call, weights = kernel()
    x, ids, p = torch.randn(3, 16), torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2)
    assert call(x, ids, p, weights).routed.shape == (3, 16)
    for args, parts in [
        ((x[None], ids, p), ["x [M, H]", "(1, 3, 16)"]),
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
    with raises("down_proj has shape (6, 24, 16)", "(6, 16, 24)"):
        call(x, ids, p, ExpertWeights(weights.gate_up_proj, weights.down_proj.transpose(1, 2)))
    with raises("gate_up_bias has shape (6, 24)", "(6, 48)"):
        call(x, ids, p, ExpertWeights(weights.gate_up_proj, weights.down_proj, torch.zeros(6, 24)))


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
        "not a member",
        "num_experts=1",
        "dispatcher='local' with 2 ranks",
        "3",
        "3",
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
