"""Mistakes in what is handed to a layer or a kernel get an error that names what to change: a test per message."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from epmoe import (
    EPGroup,
    ExpertPlacement,
    ExpertWeights,
    MoEConfig,
    MoEKernel,
    MoELayer,
    RouterConfig,
    make_dispatcher,
    select_experts,
)
from epmoe.dispatch import DISPATCHERS, RowSpec
from epmoe.testing import run_ranks
from tests.mistakes import CONFIG, SMALL, SPEC, dispatcher, kernel, raises


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


@pytest.mark.gpu
def test_tensors_on_different_devices_are_named() -> None:
    layer = MoELayer(MoEConfig(**SMALL), device="cuda")
    with raises("x is on cpu", "cuda:0"):
        layer(torch.randn(3, 16))
