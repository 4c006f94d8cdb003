"""LoRA on experts: outputs and every gradient against float64 one token at a time, over every dispatcher and layout."""

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
from epmoe.dispatch.base import BatchedInput, ExpertInput, Layout
from epmoe.experts import EXPERTS, EXPERTS_BY_LAYOUT, ExpertsSpec, ExpertWeights, _lora_mlp, select_experts
from epmoe.experts.lora import ExpertLora, low_rank_update, merge_adapter, stack_adapters
from epmoe.ops._triton import INTERPRET
from epmoe.testing import RankFailed, poisoned_empty, run_ranks
from tests import naive

H, I, E, K, A, R = 24, 20, 5, 2, 3, 6
RANKS = (2, 6, 1)  # of the three adapters; the tensors are padded to R
ALPHA = (4.0, 3.0, 0.5)
LOCAL = (3, 0, 4)  # the logical experts here, in local order
# Relative L2 of the output and of any gradient. The base's pre-activation and output are rounded to 8 bits before the
# update is added: one more error than without LoRA, as `torch_grouped` has it.
TOLERANCE = {torch.float32: (1e-5, 2e-5), torch.bfloat16: (1.2 * 5e-3, 1.2 * 1e-2)}
BASE = ("w1", "w2", "b1", "b2")
ADAPTERS = ("a1", "lb1", "a2", "lb2")
GARBAGE = -(2**31)  # what poisoned int32 memory holds


def draw(seed: int, tokens: int, experts: int, dtype: torch.dtype, act: Activation, bias: bool) -> dict[str, Tensor]:
    """Everything for `experts` experts, of which a token has K, on CPU."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int, fan_in: int = 1) -> Tensor:
        return (torch.randn(*shape, generator=g, dtype=torch.float64) * fan_in**-0.5).to(dtype)

    width = 2 * I if act.gated else I
    drawn = {
        "x": randn(tokens, H),
        "p": torch.rand(tokens, K, generator=g).to(torch.promote_types(dtype, torch.float32)) + 0.2,
        "w1": randn(experts, width, H, fan_in=H),
        "w2": randn(experts, H, I, fan_in=I),
        "a1": randn(experts, A, R, H, fan_in=H),
        "lb1": randn(experts, A, width, R, fan_in=R),
        "a2": randn(experts, A, R, I, fan_in=I),
        "lb2": randn(experts, A, H, R, fan_in=R),
        "dout": randn(tokens, H),
        "ids": torch.rand(tokens, E, generator=g).argsort(1)[:, :K].int(),
        "adapters": torch.randint(-1, A, (tokens,), generator=g).int(),
    }
    if bias:
        drawn |= {"b1": randn(experts, width), "b2": randn(experts, H)}
    for adapter, rank in enumerate(RANKS):
        drawn["a1"][:, adapter, rank:] = drawn["a2"][:, adapter, rank:] = 0
        drawn["lb1"][:, adapter, :, rank:] = drawn["lb2"][:, adapter, :, rank:] = 0
    if tokens > 3:
        drawn["ids"][0, 1], drawn["ids"][1], drawn["ids"][2, 0] = -1, -1, GARBAGE
        drawn["adapters"][:3] = torch.tensor([0, 1, GARBAGE], dtype=torch.int32)
        drawn["adapters"][3] = A  # out of range: none
    return drawn


def scaling(device: str = "cpu") -> Tensor:
    return torch.tensor([alpha / rank for alpha, rank in zip(ALPHA, RANKS, strict=True)], device=device)


def weights_of(leaves: dict[str, Tensor]) -> ExpertWeights:
    lora = ExpertLora(*(leaves[name] for name in ADAPTERS), scaling(leaves["x"].device.type))
    return ExpertWeights(*(leaves.get(name) for name in BASE), lora=lora)


def wanted(drawn: dict[str, Tensor], local: dict[int, int], act: Activation, on_input: bool) -> dict[str, Tensor]:
    """Output and gradients in float64; `local` maps logical experts to rows of the weights."""
    leaf = {name: t.double().clone().requires_grad_() for name, t in drawn.items() if t.is_floating_point()}
    constants, s = (act.name, act.alpha, act.limit), scaling().double()
    # apart once: indexing the whole at every use would give it a gradient of its whole size each time
    own = {name: leaf[name].unbind(0) for name in (*BASE, *ADAPTERS) if name in leaf}
    out = []
    for m in range(drawn["x"].shape[0]):
        total, a = torch.zeros_like(leaf["x"][m]), int(drawn["adapters"][m])
        for k in range(K):
            e = local.get(int(drawn["ids"][m, k]))
            if e is None:
                continue
            row = leaf["x"][m] * leaf["p"][m, k] if on_input else leaf["x"][m]
            h = own["w1"][e] @ row
            h = h + own["b1"][e] if "b1" in own else h
            if 0 <= a < A:
                h = h + s[a] * (own["lb1"][e][a] @ (own["a1"][e][a] @ row))
            h = naive.activation(h, *constants)
            y = own["w2"][e] @ h
            y = y + own["b2"][e] if "b2" in own else y
            if 0 <= a < A:
                y = y + s[a] * (own["lb2"][e][a] @ (own["a2"][e][a] @ h))
            total = total + (y if on_input else y * leaf["p"][m, k])
        out.append(total)
    y = torch.stack(out) if out else leaf["x"] * 0
    (y * leaf["dout"].detach()).sum().backward()
    grads = {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in leaf.items() if n != "dout"}
    return {"out": y.detach(), **grads}


def close(got: Tensor | None, want: Tensor, limit: float, what: Any) -> None:
    assert got is not None, what
    error = (got.detach().double().cpu() - want).norm() / max(float(want.norm()), 1e-30 if want.any() else 1.0)
    assert error <= limit, (what, float(error))


def rows_of(leaves: dict[str, Tensor]) -> ExpertInput:
    """In wider rows, as a message buffer's are."""
    x, tokens = leaves["x"], leaves["x"].shape[0]
    expert_map = torch.tensor([LOCAL.index(e) if e in LOCAL else -1 for e in range(E)], dtype=torch.int32)
    words = torch.cat([leaves["ids"], leaves["adapters"][:, None]], 1)  # views into one message
    layout = Layout(tokens, tokens, tokens * K)
    return ExpertInput(
        x, words[:, :K], leaves["p"], expert_map.to(x.device), len(LOCAL), tokens * K, layout, adapter_ids=words[:, K]
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
    act = Activation.named(name)
    interpreted = os.environ.get("EPMOE_CPU_KERNELS") == "triton" and device == "cpu"
    if interpreted and on_input == frozen:
        pytest.skip("the interpreter is slow: a frozen and a trained case, without and with a bias")
    for dtype, tokens in [(torch.float32, 6)] if interpreted else [(torch.float32, 13), (torch.bfloat16, 48)]:
        drawn = draw(seed, tokens, len(LOCAL), dtype, act, bias)
        want = wanted(drawn, {e: row for row, e in enumerate(LOCAL)}, act, on_input)
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


def test_one_adapter_equals_the_experts_it_is_merged_into(seed: int) -> None:
    for kind, dtype, limit in [("reference", torch.float64, 1e-12), ("grouped", torch.float32, 1e-5)]:
        leaves = draw(seed, 13, len(LOCAL), dtype, Activation(), True)
        leaves["adapters"].fill_(1)
        experts = EXPERTS[kind](ExpertsSpec(Activation(), H, I, dtype, torch.device("cpu"), lora=True))
        weights = weights_of(leaves)
        merged = merge_adapter(weights, 1)
        assert merged.lora is None and not torch.equal(merged.down_proj, weights.down_proj)
        want = experts(dataclasses.replace(rows_of(leaves), adapter_ids=None), merged)
        close(experts(rows_of(leaves), weights), want.double(), limit, kind)
    with pytest.raises(ValueError, match=r"adapter=3: must be in \[0, 3\)"):
        merge_adapter(weights, A)
    with pytest.raises(ValueError, match="adapter=0: there is no lora"):
        merge_adapter(merged, 0)


def test_stacked_adapters_of_different_ranks_update_as_each_alone(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)

    def one(rank: int, alpha: float) -> ExpertLora:
        shapes = ((2, 1, rank, H), (2, 1, 2 * I, rank), (2, 1, rank, I), (2, 1, H, rank))
        tensors = (torch.randn(*shape, generator=g, dtype=torch.float64, requires_grad=True) for shape in shapes)
        return ExpertLora(*tensors, torch.tensor([alpha / rank]))

    adapters = [one(2, 1.0), one(5, 3.0)]
    stacked = stack_adapters(adapters)
    assert (stacked.num_adapters, stacked.rank) == (2, 5) and torch.equal(stacked.scaling, torch.tensor([0.5, 0.6]))
    x = torch.randn(7, H, generator=g, dtype=torch.float64)
    ids = torch.tensor([0, 1, -1, 1, 0, 2, 1], dtype=torch.int32)
    got = low_rank_update(x, stacked.gate_up_a[1], stacked.gate_up_b[1], stacked.scaling, ids)
    for n, adapter in enumerate(ids.tolist()):
        if not 0 <= adapter < 2:
            assert not got[n].any()
            continue
        alone = adapters[adapter]
        s = alone.scaling.double()[0]
        torch.testing.assert_close(got[n], s * (alone.gate_up_b[1, 0] @ (alone.gate_up_a[1, 0] @ x[n])))
    got.sum().backward()
    assert adapters[0].gate_up_a.grad is not None and adapters[0].gate_up_a.grad.shape == (2, 1, 2, H)
    with pytest.raises(ValueError, match="adapters is empty"):
        stack_adapters([])


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


# ---- refusals


def test_experts_without_lora_refuse_it_and_name_those_with() -> None:
    spec = ExpertsSpec(Activation(), H, I, torch.float32, torch.device("cpu"))
    with_lora = dataclasses.replace(spec, lora=True)
    able = r"no LoRA adapters here; use experts='(grouped|reference)' or '(grouped|reference)'"
    for layout, kinds in EXPERTS_BY_LAYOUT.items():
        assert EXPERTS[select_experts(with_lora, layout=layout).experts.name].lora
        for kind in kinds:
            if EXPERTS[kind].lora:
                continue
            with pytest.raises(ValueError, match=f"experts={kind!r}: {able}"):
                select_experts(with_lora, kind, layout)
    on_gpu = dataclasses.replace(with_lora, device=torch.device("cuda"), dtype=torch.float64)
    assert dict(select_experts(on_gpu).passed_over)["torch_grouped"].startswith("no LoRA adapters here")

    moves = make_dispatcher("local", None, ExpertPlacement.contiguous(len(LOCAL), 1), "cpu")
    leaves = draw(1, 4, len(LOCAL), torch.float32, Activation(), False)
    leaves["ids"].clamp_(0, len(LOCAL) - 1)
    batch = (leaves["x"], leaves["ids"], leaves["p"])
    kernel = MoEKernel(moves, select_experts(spec, "torch_grouped").experts)
    with pytest.raises(ValueError, match=f"experts='torch_grouped': weights.lora is given, {able}"):
        kernel(*batch, weights_of(leaves), adapter_ids=leaves["adapters"])


def test_mistakes_are_named() -> None:
    leaves = draw(1, 4, len(LOCAL), torch.float32, Activation(), False)
    spec = ExpertsSpec(Activation(), H, I, torch.float32, torch.device("cpu"), lora=True)
    experts, rows, weights = EXPERTS["grouped"](spec), rows_of(leaves), weights_of(leaves)
    lora = weights.lora
    assert lora is not None
    for match, ids, wrong in [
        ("rows have adapter_ids and weights.lora is None", rows.adapter_ids, None),
        (r"lora.gate_up_b has shape \(3, 3, 39, 6\), must be \(3, 3, 40, 6\)", rows.adapter_ids,
         dataclasses.replace(lora, gate_up_b=lora.gate_up_b[:, :, :-1])),
        (r"lora.down_a has shape \(3, 2, 6, 20\), must be \(3, 3, 6, 20\)", rows.adapter_ids,
         dataclasses.replace(lora, down_a=lora.down_a[:, :2])),
        (r"lora.down_b is torch.float16 and the experts torch.float32", rows.adapter_ids,
         dataclasses.replace(lora, down_b=lora.down_b.half())),
        ("lora.scaling is torch.float64", rows.adapter_ids, dataclasses.replace(lora, scaling=lora.scaling.double())),
        (r"adapter_ids is torch.int64 \(4,\) on cpu, must be int32 \(4,\)", rows.adapter_ids.long(), lora),
        (r"adapter_ids is torch.int32 \(3,\)", rows.adapter_ids[:3], lora),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=match):
            experts(dataclasses.replace(rows, adapter_ids=ids), dataclasses.replace(weights, lora=wrong))


def test_adapter_ids_out_of_range_are_named_when_validating_and_no_adapter_otherwise() -> None:
    leaves = draw(1, 4, len(LOCAL), torch.float32, Activation(), False)
    leaves["ids"] = torch.tensor([[0, 1], [1, 2], [2, -1], [0, 2]], dtype=torch.int32)
    moves = make_dispatcher("local", None, ExpertPlacement.contiguous(len(LOCAL), 1), "cpu")
    spec = ExpertsSpec(Activation(), H, I, torch.float32, torch.device("cpu"), lora=True)
    for kind in ("grouped", "reference"):
        experts = select_experts(spec, kind).experts
        batch = (leaves["x"], leaves["ids"], leaves["p"], weights_of(leaves))
        none, wrong = (torch.tensor([0, 1, n, 2], dtype=torch.int32) for n in (-1, 3))
        MoEKernel(moves, experts, validate=True)(*batch, adapter_ids=none)
        with pytest.raises(ValueError, match=r"adapter_ids\[2\]=3: must be in \[-1, 3\)"):
            MoEKernel(moves, experts, validate=True)(*batch, adapter_ids=wrong)
        results = [MoEKernel(moves, experts, validate=False)(*batch, adapter_ids=ids).routed for ids in (none, wrong)]
        assert torch.equal(*results)


def test_more_experts_and_adapters_than_a_sort_takes_are_refused() -> None:
    many = 4096 // len(LOCAL)
    leaves = draw(1, 4, len(LOCAL), torch.float32, Activation(), False)
    shapes = ((many, 1, H), (many, 2 * I, 1), (many, 1, I), (many, H, 1))
    lora = ExpertLora(*(torch.zeros(len(LOCAL), *shape) for shape in shapes), torch.ones(many))
    experts = EXPERTS["grouped"](ExpertsSpec(Activation(), H, I, torch.float32, torch.device("cpu"), lora=True))
    with pytest.raises(ValueError, match="3 local experts with 1365 adapters make 4098 pairs.*experts='reference'"):
        experts(rows_of(leaves), dataclasses.replace(weights_of(leaves), lora=lora))


def test_batched_rows_keep_their_adapters_whatever_padding_holds(seed: int) -> None:
    """Places past an expert's count may hold any id."""
    leaves = draw(seed, 6, len(LOCAL), torch.float32, Activation(), False)
    counts = torch.tensor([2, 0, 3], dtype=torch.int32)
    x = torch.randn(len(LOCAL), 4, H, generator=torch.Generator().manual_seed(seed))
    ids = torch.tensor([[0, -1, 9, 1], [GARBAGE] * 4, [2, 1, 0, 0]], dtype=torch.int32)
    spec = ExpertsSpec(Activation(), H, I, torch.float32, torch.device("cpu"), lora=True)
    rows = BatchedInput(x, counts, Layout(6, 6, 12), adapter_ids=ids)
    y = EXPERTS["reference"](spec)(rows, weights_of(leaves))
    one = ExpertInput(
        x.view(-1, H), torch.arange(len(LOCAL), dtype=torch.int32).repeat_interleave(4)[:, None].contiguous(),
        torch.ones(12, 1), torch.arange(len(LOCAL), dtype=torch.int32), len(LOCAL), 12, Layout(12, 12, 12),
        adapter_ids=ids.view(-1),
    )  # fmt: skip
    want = EXPERTS["reference"](spec)(one, weights_of(leaves)).view(y.shape)
    for e, n in enumerate(counts.tolist()):
        torch.testing.assert_close(y[e, :n], want[e, :n])


def wrong_kind_on_every_rank(rank: int, ranks: int) -> None:
    leaves = draw(1, 4, 1, torch.float32, Activation(), False)
    placement = ExpertPlacement.contiguous(ranks, ranks)
    moves = make_dispatcher("all_to_all", EPGroup(timeout=20), placement, "cpu")
    spec = ExpertsSpec(Activation(), H, I, torch.float32, torch.device("cpu"))
    kernel = MoEKernel(moves, select_experts(spec, "torch_grouped").experts)
    kernel(leaves["x"], leaves["ids"] % ranks, leaves["p"], weights_of(leaves), adapter_ids=leaves["adapters"])


def test_a_refusal_comes_before_any_rank_waits_for_another() -> None:
    with pytest.raises(RankFailed, match="weights.lora is given, no LoRA adapters here"):
        run_ranks(wrong_kind_on_every_rank, 2, timeout=30)
