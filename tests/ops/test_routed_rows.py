"""`routed_rows`: its overlapping launches and its plain ones against one pair at a time in float64."""

from __future__ import annotations

import dataclasses
import importlib
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from epmoe.config import Activation
from epmoe.ops import _few_rows_configs
from epmoe.ops._few_rows_configs import FewRowsConfig, few_rows_plan
from epmoe.ops.activation import apply_activation
from epmoe.ops.routed_rows import routed_rows, routed_rows_into
from epmoe.testing import poisoned_empty

module = importlib.import_module("epmoe.ops.routed_rows")
ERROR = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2, torch.float64: 1e-12}  # two GEMMs, three roundings
PLAIN = FewRowsConfig(block_t=16, block_w=64, block_k=32, num_warps=4, num_stages=2)
PAIR = {
    "alike": (PLAIN, PLAIN),
    "other-tiles": (dataclasses.replace(PLAIN, block_w=128, paired=True), dataclasses.replace(PLAIN, block_t=32)),
    "looping": (dataclasses.replace(PLAIN, programs_per_sm=1), dataclasses.replace(PLAIN, programs_per_sm=1)),
}


@pytest.fixture
def overlapped(monkeypatch):
    """Counts the calls that overlapped; `overlapped.by(first, second)` makes plans follow two configurations."""
    calls = []
    launch = module._launch_overlapped

    def counted(*args):
        slot = launch(*args)
        calls.append(slot is not None)
        return slot

    def by(first, second):
        few_rows_plan.cache_clear()
        choose = lambda device, rows, tiles, n, k, gated, *_: first if gated else second  # noqa: E731
        monkeypatch.setattr(_few_rows_configs, "few_rows_config", choose)

    monkeypatch.setattr(module, "_launch_overlapped", counted)
    yield SimpleNamespace(calls=calls, by=by)
    few_rows_plan.cache_clear()


def case(T: int, dtype: torch.dtype, device: str, seed: int, K: int = 3, H: int = 40, I: int = 48) -> SimpleNamespace:
    """E = 8 experts of which 5 are local, in another order; ids of no expert among the choices."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int, fan_in: int = 1) -> Tensor:
        return (torch.randn(*shape, generator=generator) / fan_in**0.5).to(dtype).to(device)

    ids = torch.rand(T, 8, generator=generator).argsort(1)[:, :K].int()
    ids[torch.rand(T, K, generator=generator) < 0.1] = -1
    return SimpleNamespace(
        x=randn(T, H),
        w1=randn(5, 2 * I, H, fan_in=H),
        b1=randn(5, 2 * I),
        w2=randn(5, H, I, fan_in=I),
        b2=randn(5, H),
        topk_ids=ids.to(device),
        expert_map=torch.tensor([3, -1, 0, 4, -1, 2, 1, -1], dtype=torch.int32, device=device),
        scale=torch.rand(T * K, generator=generator).to(device) + 0.5,
    )


def run(c: SimpleNamespace, max_rows: int, bias: bool = True, scale: bool = True) -> tuple[Tensor, Tensor]:
    with poisoned_empty():
        return routed_rows(
            c.x, c.w1, c.b1 if bias else None, c.w2, c.b2 if bias else None, c.topk_ids, c.expert_map, max_rows,
            c.scale if scale else None, "swiglu", 1.0, math.inf,
        )  # fmt: skip


def check(c: SimpleNamespace, y: Tensor, slot: Tensor, bias: bool = True, scale: bool = True) -> None:
    K, used = slot.shape[1], []
    for pair, (expert, row) in enumerate(zip(c.topk_ids.view(-1).tolist(), slot.view(-1).tolist(), strict=True)):
        e = int(c.expert_map[expert]) if expert >= 0 else -1
        if e < 0:
            assert row == -1
        elif row >= 0:
            h = (c.w1[e].double() @ c.x[pair // K].double()) * (float(c.scale[pair]) if scale else 1.0)
            a = apply_activation(h + c.b1[e].double() if bias else h, "swiglu")
            want = c.w2[e].double() @ a + (c.b2[e].double() if bias else 0.0)
            assert ((y[row].double() - want).norm() / want.norm()).item() < ERROR[y.dtype]
            used.append(row)
    assert sorted(used) == list(range(len(used)))
    assert y[len(used) :].isnan().all(), "a row of no pair was written"


@pytest.mark.parametrize("configs", PAIR.values(), ids=PAIR.keys())
@pytest.mark.parametrize("T", [1, 23])
def test_overlapping_launches_are_right(T, configs, device, seed, overlapped):
    overlapped.by(*configs)
    c = case(T, torch.float16, device, seed)
    y, slot = run(c, T * 3 + 2)
    assert overlapped.calls == [True]
    check(c, y, slot)


@pytest.mark.parametrize("bias, scale", [(False, False), (True, False), (False, True)])
def test_bias_and_scale_are_independent(bias, scale, device, seed, overlapped):
    overlapped.by(PLAIN, PLAIN)
    c = case(4, torch.bfloat16, device, seed)
    check(c, *run(c, 12, bias, scale), bias, scale)
    assert overlapped.calls == [True]


def test_pairs_without_room_get_no_row(device, seed, overlapped):
    overlapped.by(PLAIN, PLAIN)
    c = case(9, torch.float16, device, seed)
    y, slot = run(c, 8)
    check(c, y, slot)
    assert slot.max() == 7 and overlapped.calls == [True]


def test_tokens_without_an_expert_here_give_no_rows(device, seed, overlapped):
    overlapped.by(PLAIN, PLAIN)
    c = case(3, torch.float16, device, seed)
    c.topk_ids.fill_(-1)
    y, slot = run(c, 9)
    assert (slot == -1).all() and y.isnan().all()


def test_a_split_reduction_and_other_plans_go_one_after_the_other(device, seed, overlapped):
    c = case(5, torch.float16, device, seed)
    for configs in ((PLAIN, dataclasses.replace(PLAIN, split=2)), (None, None)):
        overlapped.by(*configs)
        check(c, *run(c, 15))
    assert overlapped.calls == [False, False]


def test_twins_agree(seed):
    c = case(6, torch.float64, "cpu", seed)
    c.scale = c.scale.double()
    check(c, *run(c, 20))


def test_buffers_of_the_caller_are_written(device, seed, overlapped):
    overlapped.by(PLAIN, PLAIN)
    c = case(4, torch.float16, device, seed)
    y, act = (torch.full((12, n), math.nan, dtype=torch.float16, device=device) for n in (40, 48))
    weights = (c.w1, c.b1, c.w2, c.b2)
    slot = routed_rows_into(y, act, c.x, *weights, c.topk_ids, c.expert_map, c.scale, "swiglu", 1.0, math.inf)
    check(c, y, slot)


def test_mistakes_are_named(device, seed, overlapped):
    overlapped.by(PLAIN, PLAIN)
    c = case(4, torch.float16, device, seed)
    for match, wrong in {
        "topk_ids": {"topk_ids": c.topk_ids.long()},
        "w has dtype": {"w2": c.w2.bfloat16()},
        "have 40": {"w1": c.w1[:, :, 1:]},
        "bias": {"b1": c.b1[:, 1:]},
        "row_scale": {"scale": c.scale.view(-1, 1)},
        "3-D": {"w1": c.w1[0]},
    }.items():
        with pytest.raises(ValueError, match=match):
            run(SimpleNamespace(**(vars(c) | wrong)), 12)


def test_op_registration_holds(seed):
    c = case(4, torch.float32, "cpu", seed)
    args = (c.x, c.w1, c.b1, c.w2, c.b2, c.topk_ids, c.expert_map, 12, c.scale, "swiglu", 1.0, math.inf)
    torch.library.opcheck(torch.ops.epmoe.routed_rows.default, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 5, 64, 128, 200])
def test_overlapping_changes_no_bit_and_replays_with_other_routing(T, seed, monkeypatch, overlapped):
    generator = torch.Generator("cuda").manual_seed(seed)
    E, I, H, K = 64, 768, 2048, 8
    c = SimpleNamespace(
        x=torch.randn(T, H, generator=generator, device="cuda").bfloat16(),
        w1=(torch.randn(E, 2 * I, H, generator=generator, device="cuda") / H**0.5).bfloat16(),
        w2=(torch.randn(E, H, I, generator=generator, device="cuda") / I**0.5).bfloat16(),
        b1=None,
        b2=None,
        topk_ids=torch.zeros(T, K, dtype=torch.int32, device="cuda"),
        expert_map=torch.arange(E, dtype=torch.int32, device="cuda"),
        scale=None,
    )

    def call() -> tuple[Tensor, Tensor]:
        args = (c.x, c.w1, c.b1, c.w2, c.b2, c.topk_ids, c.expert_map, T * K)
        return routed_rows(*args, None, Activation("swiglu").name, 1.0, math.inf)

    call()
    assert overlapped.calls == [True]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, slot = call()
    for _ in range(20):
        ids = torch.rand(T, E, generator=generator, device="cuda").topk(K, dim=1).indices.int()
        c.topk_ids.copy_(ids)
        graph.replay()
        with monkeypatch.context() as plain:
            plain.setattr(module, "_launch_overlapped", lambda *args: None)
            want, want_slot = call()
        assert torch.equal(slot, want_slot) and torch.equal(y, want)
