"""LoRA by our kernels and by the reference: outputs and every gradient against float64, over every dispatcher."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from epmoe import DISPATCHERS, EPGroup, ExpertPlacement, MoEKernel, make_dispatcher
from epmoe.config import Activation
from epmoe.experts import EXPERTS, EXPERTS_BY_LAYOUT, ExpertsSpec, _lora_mlp, select_experts
from epmoe.ops._triton import INTERPRET
from epmoe.testing import poisoned_empty, run_ranks
from tests.experts.lora_cases import (
    ADAPTERS,
    BASE,
    LOCAL,
    RANKS,
    TOLERANCE,
    A,
    E,
    H,
    I,
    close,
    draw,
    off_its_kinks,
    rows_of,
    wanted,
    weights_of,
)


@pytest.fixture(params=["twins", "kernels", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "twins":
        return "cpu"
    if INTERPRET == (request.param == "cuda"):
        pytest.skip("Triton was imported " + ("with TRITON_INTERPRET=1" if INTERPRET else "without its interpreter"))
    monkeypatch.setenv("EPMOE_CPU_KERNELS", "triton")
    return "cuda" if request.param == "cuda" else "cpu"


def run(
    drawn: dict[str, Tensor],
    kind: str,
    act: Activation,
    on_input: bool,
    device: str,
    frozen: bool,
    trained: tuple[str, ...] = ("x", "p", *ADAPTERS),
) -> dict[str, Tensor | None]:
    """Output and gradients of one kind of experts; those of the base too unless `frozen`."""
    leaves = {name: t.to(device) for name, t in drawn.items()}
    for name in trained if frozen else (*trained, *BASE):
        if name in leaves:
            leaves[name] = leaves[name].clone().requires_grad_()
    spec = ExpertsSpec(act, H, I, leaves["x"].dtype, torch.device(device), on_input, lora=True)
    with poisoned_empty():
        out = EXPERTS[kind](spec)(rows_of(leaves), weights_of(leaves))
        out.backward(leaves["dout"])
    grads = {name: leaves[name].grad for name in ("x", "p", *BASE, *ADAPTERS) if name in leaves}
    return {"out": out, **grads}


@pytest.mark.parametrize(
    ("name", "bias", "on_input", "frozen"),
    [
        ("swiglu", False, False, True),
        ("swiglu_oai", True, True, False),
        ("relu2", True, False, False),
        ("swiglu", True, True, True),
    ],
)
def test_grouped_matches_float64(device: str, name: str, bias: bool, on_input: bool, frozen: bool, seed: int) -> None:
    named = Activation.named(name)
    interpreted = os.environ.get("EPMOE_CPU_KERNELS") == "triton" and device == "cpu"
    if interpreted and on_input == frozen:
        pytest.skip("the interpreter is slow: a frozen and a trained case, without and with a bias")
    for dtype, tokens in [(torch.float32, 6)] if interpreted else [(torch.float32, 13), (torch.bfloat16, 48)]:
        drawn, local = draw(seed, tokens, len(LOCAL), dtype, named, bias), {e: row for row, e in enumerate(LOCAL)}
        act = off_its_kinks(drawn, local, named, on_input)
        want = wanted(drawn, local, act, on_input)
        got = run(drawn, "grouped", act, on_input, device, frozen)
        for what, limit in [("out", TOLERANCE[dtype][0]), *((n, TOLERANCE[dtype][1]) for n in ("x", "p", *ADAPTERS))]:
            close(got[what], want[what], limit, (what, dtype))
        for what in BASE:
            if frozen:
                assert got.get(what) is None, what
            elif what in got:
                close(got[what], want[what], TOLERANCE[dtype][1], (what, dtype))


@pytest.mark.parametrize("kind", ["reference", "grouped"])
@pytest.mark.parametrize("on_input", [False, True], ids=["weight on output", "weight on input"])
def test_float64_rows_are_computed_in_float64(kind: str, on_input: bool, seed: int) -> None:
    act = Activation()
    drawn = draw(seed, 13, len(LOCAL), torch.float64, act, True)
    want = wanted(drawn, {e: row for row, e in enumerate(LOCAL)}, act, on_input)
    got = run(drawn, kind, act, on_input, "cpu", False)
    for what in ("out", "x", "p", *BASE, *ADAPTERS):
        close(got[what], want[what], 1e-12, what)


def test_padding_of_shorter_ranks_gets_no_gradient(seed: int) -> None:
    drawn = draw(seed, 24, len(LOCAL), torch.float32, Activation(), False)
    drawn["ids"][4:, 0] = torch.tensor(LOCAL).repeat(10)[:20]
    drawn["ids"][4:, 1] = 1
    drawn["adapters"][4:] = torch.arange(A).repeat_interleave(len(LOCAL)).repeat(3)[:20]
    got = run(drawn, "grouped", Activation(), False, "cpu", True)
    for adapter, rank in enumerate(RANKS):
        for name in ("a1", "a2"):
            grad = got[name]
            assert grad is not None and not grad[:, adapter, rank:].any() and grad[:, adapter, :rank].any()
        for name in ("lb1", "lb2"):
            grad = got[name]
            assert grad is not None and not grad[:, adapter, :, rank:].any() and grad[:, adapter, :, :rank].any()


def test_rows_without_an_adapter_have_the_bits_of_the_base_experts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPMOE_CPU_KERNELS", "triton")
    if not INTERPRET:
        pytest.skip("Triton was imported without its interpreter")
    dtype = torch.bfloat16
    leaves = draw(seed, 8, len(LOCAL), dtype, Activation(), True)
    leaves["ids"][4:] = torch.tensor([[0, 3], [3, 4], [4, 1], [3, 0]], dtype=torch.int32)
    leaves["adapters"][4:] = torch.tensor([0, -1, 2, -1], dtype=torch.int32)
    experts = EXPERTS["grouped"](ExpertsSpec(Activation(), H, I, dtype, torch.device("cpu"), lora=True))
    rows, weights = rows_of(leaves), weights_of(leaves)
    base = (leaves["adapters"] < 0) | (leaves["adapters"] >= A)
    mixed = experts(rows, weights)
    plain = experts(dataclasses.replace(rows, adapter_ids=None), dataclasses.replace(weights, lora=None))
    assert torch.equal(mixed[base], plain[base])
    assert not torch.equal(mixed[4], plain[4]) and not torch.equal(mixed[6], plain[6])
    assert torch.equal(experts(dataclasses.replace(rows, adapter_ids=None), weights), plain)


def test_rows_without_an_adapter_cost_no_low_rank_product_and_frozen_experts_no_weight_gradient(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted on what the ops are told: rows of the adapters' segments, and segments of the weight gradients."""
    drawn = draw(seed, 13, len(LOCAL), torch.float32, Activation(), True)
    local = torch.isin(drawn["ids"], torch.tensor(LOCAL, dtype=torch.int32))
    has = ((drawn["adapters"] >= 0) & (drawn["adapters"] < A))[:, None]
    low_rank_rows, wgrads = [], []

    def watch(name: str, note: Any) -> None:
        original = getattr(_lora_mlp, name)
        monkeypatch.setattr(_lora_mlp, name, lambda *args, **kw: (note(*args), original(*args, **kw))[1])

    def products(a: Tensor, w: Tensor, bias: Any, start: Tensor, end: Tensor, *_: Any) -> None:
        if w.shape[0] == len(LOCAL) * A:
            low_rank_rows.append(int((end - start).sum()))

    watch("grouped_gemm", products)
    watch("add_low_rank", lambda out, u, w, start, end, *_: low_rank_rows.append(int((end - start).sum())))
    watch("grouped_wgrad", lambda dy, x, start, *_: wgrads.append(start.shape[0]))
    run(drawn, "grouped", Activation(), False, "cpu", True)
    assert low_rank_rows and set(low_rank_rows) == {int((local & has).sum())}
    assert wgrads == [len(LOCAL) * A] * 4


def test_no_rows_give_zero_gradients_to_every_adapter(seed: int) -> None:
    for kind, tokens in itertools.product(("grouped", "reference"), (0, 1)):
        drawn = draw(seed, tokens, len(LOCAL), torch.float32, Activation(), True)
        drawn["ids"].fill_(1)  # nobody's here
        got = run(drawn, kind, Activation(), False, "cpu", False)
        for name in (*BASE, *ADAPTERS):
            grad = got[name]
            assert grad is not None and not grad.any(), (kind, name)
        assert got["out"] is not None and got["out"].shape == (tokens, H) and not got["out"].any()


def test_what_other_adapters_hold_never_reaches_a_row(device: str, seed: int) -> None:
    """An adapter that nobody asked for may be NaN, a slot that was never loaded."""
    for kind in ("grouped", "reference"):
        drawn = draw(seed, 8, len(LOCAL), torch.float32, Activation(), False)
        drawn["adapters"][drawn["adapters"] == 1] = 2
        want = run(drawn, kind, Activation(), False, device, True, ("x", "p"))
        for name in ADAPTERS:
            drawn[name][:, 1] = math.nan
        got = run(drawn, kind, Activation(), False, device, True, ("x", "p"))
        for name in ("out", "x", "p"):
            assert torch.equal(got[name], want[name]), (kind, name)


@pytest.mark.gpu
def test_a_cuda_graph_replays_with_other_rows_and_adapters(seed: int) -> None:
    drawn = [
        {n: t.cuda() for n, t in draw(seed + n, 40, len(LOCAL), torch.bfloat16, Activation(), True).items()}
        for n in range(3)
    ]
    experts = EXPERTS["grouped"](ExpertsSpec(Activation(), H, I, torch.bfloat16, torch.device("cuda"), lora=True))
    weights, static = weights_of(drawn[0]), rows_of(drawn[0])
    with torch.no_grad():
        experts(static, weights)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = experts(static, weights)
        for other in drawn[1:]:
            rows = rows_of(other)
            want = experts(rows, weights)
            for field in ("x", "topk_ids", "topk_weights", "adapter_ids"):
                getattr(static, field).copy_(getattr(rows, field))
            out.fill_(math.nan)
            graph.replay()
            assert torch.equal(out, want)


# ---- through dispatchers


CAP = 7
COMBINATIONS = [
    (dispatcher, kind, layout)
    for dispatcher in DISPATCHERS
    for layout, kinds in EXPERTS_BY_LAYOUT.items()
    for kind in kinds
    if EXPERTS[kind].lora
]


def tokens_of(rank: int, seed: int) -> dict[str, Tensor]:
    """A rank's batch; rank 1 has no tokens."""
    drawn = draw(seed + 1 + rank, [5, 0, CAP, 1][rank], 0, torch.float32, Activation(), False)
    return {name: drawn[name] for name in ("x", "p", "ids", "adapters", "dout")}


def every_combination(rank: int, ranks: int, seed: int) -> list[dict[str, Any]]:
    ep = EPGroup(timeout=60)
    placement = ExpertPlacement.strided(E, ranks)
    full, batch = draw(seed, 0, E, torch.float32, Activation(), False), tokens_of(rank, seed)
    results = []
    for (dispatcher, kind, layout), chunk in itertools.product(COMBINATIONS, (None, 3)):
        if (dispatcher == "local" and ranks > 1) or (chunk is not None and dispatcher not in ("local", "all_gather")):
            continue
        moves = make_dispatcher(
            dispatcher, None if dispatcher == "local" else ep, placement, "cpu", max_tokens_per_rank=CAP
        )
        spec = ExpertsSpec(Activation(), H, I, torch.float32, torch.device("cpu"), lora=True)
        kernel = MoEKernel(moves, select_experts(spec, kind, layout).experts, layout=layout, chunk_tokens=chunk)
        local = list(placement.local_experts(rank))
        leaves = {name: batch[name].clone().requires_grad_() for name in ("x", "p")}
        leaves |= {name: full[name][local].requires_grad_(name in ADAPTERS) for name in ("w1", "w2", *ADAPTERS)}

        def call(kernel: MoEKernel = kernel, leaves: dict[str, Tensor] = leaves) -> Tensor:
            return kernel(
                leaves["x"], batch["ids"], leaves["p"], weights_of(leaves), adapter_ids=batch["adapters"]
            ).routed

        with poisoned_empty():
            with torch.no_grad():
                served = call()
            out = call()
            out.backward(batch["dout"])
        grads = {name: leaves[name].grad for name in ("x", "p", *ADAPTERS)}
        assert leaves["w1"].grad is None
        name = f"{dispatcher} + {kind} ({layout}), chunk_tokens={chunk}"
        results.append({"name": name, "out": out.detach(), "served": served, "local": local, **grads})
    return results


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_dispatcher_gives_the_outputs_and_gradients_of_one_process(ranks: int, seed: int) -> None:
    by_rank = run_ranks(every_combination, ranks, args=(seed,), timeout=150)
    batches = [tokens_of(rank, seed) for rank in range(ranks)]
    drawn = draw(seed, 0, E, torch.float32, Activation(), False)
    drawn |= {name: torch.cat([b[name] for b in batches]) for name in batches[0]}
    want = wanted(drawn, {e: e for e in range(E)}, Activation(), False)
    assert want["a1"].any() and want["lb2"].any()
    for parts in zip(*by_rank, strict=True):
        name = parts[0]["name"]
        for what in ("out", "x", "p"):
            close(torch.cat([part[what] for part in parts]), want[what], 2e-5, (name, what))
        close(torch.cat([part["served"] for part in parts]), want["out"], 1e-5, (name, "served"))
        for what in ADAPTERS:
            whole = torch.empty_like(drawn[what])
            for part in parts:
                whole[part["local"]] = part[what]
            close(whole, want[what], 2e-5, (name, what))
