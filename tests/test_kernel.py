"""`MoEKernel`: every dispatcher with every experts in every layout, overflow, chunking, and where shared experts
run."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from epmoe import (
    Activation,
    EPGroup,
    ExpertPlacement,
    ExpertsSpec,
    ExpertWeights,
    MoEKernel,
    make_dispatcher,
    select_experts,
)
from epmoe.capabilities import KINDS, combinations
from epmoe.dispatch.inputs import Pending
from epmoe.experts import EXPERTS
from epmoe.testing import RankFailed, poisoned_empty, run_ranks
from tests import naive

E, K, H, I, CAP = 7, 2, 16, 24, 9
# Monolithic experts take logits, and have tests of their own; quantized kinds are walked through in
# quant/test_every_dispatcher.py, those that train in fewer bits in experts/test_fp8_train.py.
COMBINATIONS = [
    (c.dispatcher, c.experts, c.layout)
    for c in combinations()
    if c.refusal is None and not KINDS[c.experts].monolithic and c.experts in EXPERTS
]
SITUATIONS = ["a rank without tokens", "one token each", "all to one rank", "no experts at all", "uneven"]


def make_weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    return {
        "gate_up_proj": (torch.randn(E, 2 * I, H, generator=g) * H**-0.5).to(dtype),
        "down_proj": (torch.randn(E, H, I, generator=g) * I**-0.5).to(dtype),
    }


def make_kernel(
    rank: int, ranks: int, dispatcher: str, experts: str, layout: str, ep: EPGroup | None, **options: Any
) -> tuple[MoEKernel, ExpertWeights]:
    placement = ExpertPlacement.contiguous(E, ranks)  # uneven for 2 and 4 ranks
    moves = make_dispatcher(dispatcher, ep, placement, "cpu", layer="blocks.1", max_tokens_per_rank=CAP)
    spec = ExpertsSpec(Activation(), H, I, torch.float32, torch.device("cpu"))
    local = list(placement.local_experts(rank))
    weights = ExpertWeights(**{name: w[local].requires_grad_() for name, w in make_weights().items()})
    return MoEKernel(moves, select_experts(spec, experts, layout).experts, layout=layout, **options), weights


def batch_of(rank: int, ranks: int, situation: str, seed: int) -> tuple[torch.Tensor, ...]:
    tokens = {"a rank without tokens": [0, 6, 3, 1][rank], "one token each": 1}.get(situation, CAP - rank)
    g = torch.Generator().manual_seed(seed * 4 + rank)
    ids = torch.rand(tokens, E, generator=g).argsort(1)[:, :K].int()
    if situation == "all to one rank":
        ids = torch.tensor([[E - 1, -1]], dtype=torch.int32).expand(tokens, K).contiguous()
    elif situation == "no experts at all":
        ids.fill_(-1)
    else:
        ids[torch.rand(ids.shape, generator=g) < 0.1] = -1
    return torch.randn(tokens, H, generator=g), ids, torch.rand(tokens, K, generator=g)


def every_combination(rank: int, ranks: int, seed: int) -> list[Any]:
    ep = EPGroup(timeout=60)
    results = []
    for (dispatcher, experts, layout), situation in itertools.product(COMBINATIONS, SITUATIONS):
        if dispatcher == "local" and ranks > 1:
            continue
        group = None if dispatcher == "local" else ep
        kernel, weights = make_kernel(rank, ranks, dispatcher, experts, layout, group)
        x, ids, p = batch_of(rank, ranks, situation, seed)
        x.requires_grad_()
        p.requires_grad_()
        with poisoned_empty():
            out = kernel(x, ids, p, weights).routed
            out.square().sum().backward()
        name = f"{dispatcher} + {experts} ({layout}), {situation}"
        grads = (x.grad, p.grad, weights.gate_up_proj.grad, weights.down_proj.grad)
        results.append((name, situation, out.detach(), *grads))
    return results


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_dispatcher_with_every_experts_matches_float64_in_every_situation(ranks: int, seed: int) -> None:
    by_rank = run_ranks(every_combination, ranks, args=(seed,), timeout=150)
    wanted: dict[str, list[torch.Tensor]] = {}
    for situation in SITUATIONS:
        batches = [batch_of(rank, ranks, situation, seed) for rank in range(ranks)]
        x, p = (torch.cat([b[i] for b in batches]).double().requires_grad_() for i in (0, 2))
        experts = {name: w.double().requires_grad_() for name, w in make_weights().items()}
        out = naive.routed(x, torch.cat([b[1] for b in batches]), p, experts, ("swiglu", 1.0, 1.0), False)
        if out.requires_grad:  # some token has an expert
            out.square().sum().backward()
        leaves = [x, p, *experts.values()]
        wanted[situation] = [out.detach(), *(torch.zeros_like(t) if t.grad is None else t.grad for t in leaves)]
    for parts in zip(*by_rank, strict=True):
        name, situation = parts[0][:2]
        for n, want in enumerate(wanted[situation]):
            got = torch.cat([part[2 + n] for part in parts]).double()
            assert (got - want).norm() <= 1e-5 * max(want.norm(), 1.0), (name, n)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.detach().double() - want.detach().double()).norm() / want.detach().double().norm())


def local_kernel(experts: str, layout: str, **options: Any) -> tuple[MoEKernel, ExpertWeights]:
    return make_kernel(0, 1, "local", experts, layout, None, **options)


@pytest.mark.parametrize("experts", ["batched", "reference"])
def test_overflow_raises_and_names_layer_rank_capacity_and_counts(experts: str) -> None:
    kernel, weights = local_kernel(experts, "batched", expert_capacity=3)
    x, _, p = batch_of(0, 1, "uneven", 1)
    fits = torch.tensor([[0, 1]] * 3 + [[2, 3]] * 3 + [[4, 5]] * 3, dtype=torch.int32)
    kernel(x, fits, p, weights)
    crowded = fits.clone()
    crowded[3:5, 0] = 0
    with pytest.raises(
        RuntimeError, match=r"layer 'blocks.1', rank 0 of 1.*expert_capacity=3.*0: 2\).*'chunk'.*'drop'"
    ):
        kernel(x, crowded, p, weights)
    kernel(x, fits, p, weights)  # reported once
    kernel.overflow.check()


def overflow_on_one_rank(rank: int, ranks: int) -> None:
    kernel, weights = make_kernel(rank, ranks, "all_to_all", "batched", "batched", EPGroup(), expert_capacity=2)
    kernel(*batch_of(rank, ranks, "all to one rank", 1), weights)


def test_overflow_is_raised_by_the_rank_that_overflows() -> None:
    with pytest.raises(RankFailed, match=r"layer 'blocks.1', rank 1 of 2: rows found no place.*\(local.*2: 15\)"):
        run_ranks(overflow_on_one_rank, 2)


def test_overflow_dropped_is_counted_and_costs_only_the_dropped_rows() -> None:
    kernel, weights = local_kernel("batched", "batched", expert_capacity=2, overflow="drop")
    roomy, _ = local_kernel("batched", "batched")
    x, _, p = batch_of(0, 1, "uneven", 1)
    ids = torch.tensor([[0, 1], [0, 1], [0, 2], [3, 0]] + [[4, 5]] * 2 + [[-1, -1]] * 3, dtype=torch.int32)
    kept = ids.clone()
    kept[2, 0] = kept[3, 1] = -1
    assert torch.equal(kernel(x, ids, p, weights).routed, roomy(x, kept, p, weights).routed)
    assert kernel.overflow.dropped == 2
    kernel(x, ids, p, weights)
    assert kernel.overflow.dropped == 4


@pytest.mark.parametrize(
    ("experts", "layout", "options"),
    [("batched", "batched", {"expert_capacity": 2, "overflow": "chunk"})]
    + [
        (e, layout, {"chunk_tokens": n})
        for d, e, layout in COMBINATIONS
        if d == "local" and layout == "standard"
        for n in (1, 4, 100)
    ]
    + [("batched", "batched", {"chunk_tokens": 4})],
)
def test_rounds_give_the_same_bits_as_all_rows_at_once(
    experts: str, layout: str, options: dict[str, Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = experts in (
        "grouped",
        "batched",
    )  # torch's products on CPU pick their order of sums by the number of rows
    if kernels and not torch.cuda.is_available():
        monkeypatch.setenv("EPMOE_CPU_KERNELS", "triton")
    batch = batch_of(0, 1, "uneven", seed)
    kernel, weights = local_kernel(experts, layout)
    chunked, _ = local_kernel(experts, layout, **options)
    want = kernel(*batch, weights).routed
    got = chunked(*batch, weights).routed
    torch.testing.assert_close(got, want, **({"rtol": 0, "atol": 0} if kernels else {}))
    (dw,) = torch.autograd.grad(want.sum(), weights.down_proj)
    (dw_chunked,) = torch.autograd.grad(got.sum(), weights.down_proj)
    torch.testing.assert_close(dw_chunked, dw)


@pytest.mark.parametrize("poison", [float("nan"), 1e4])
def test_what_unused_places_hold_changes_no_bit(poison: float, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import epmoe.kernel

    batch = batch_of(0, 1, "uneven", seed)
    kernel, weights = local_kernel("batched", "batched")
    want = kernel(*batch, weights).routed
    honest = epmoe.kernel.batch

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        made = honest(*args, **kwargs)
        unused = torch.arange(made.rows.x.shape[1]) >= made.rows.expert_num_tokens[:, None]
        assert unused.any()
        made.rows.x.detach()[unused] = poison
        return made

    monkeypatch.setattr(epmoe.kernel, "batch", poisoned)
    assert torch.equal(kernel(*batch, weights).routed, want)


def test_shared_experts_run_where_the_setting_says() -> None:
    def run(order: str, asynchronous: bool) -> list[str]:
        kernel, weights = local_kernel("reference", "standard", shared_experts_order=order)
        done: list[str] = []
        moves = kernel.dispatcher
        dispatch, combine = moves.dispatch_async, moves.combine_async

        def noted(name: str, pending: Pending[Any]) -> Pending[Any]:
            done.append(f"{name} launched")
            return Pending(lambda: (done.append(f"{name} waited"), pending.wait())[1])

        moves.dispatch_async = lambda *a, **k: noted("dispatch", dispatch(*a, **k))  # type: ignore[method-assign]
        moves.combine_async = lambda *a, **k: noted("combine", combine(*a, **k))  # type: ignore[method-assign]
        x, ids, p = batch_of(0, 1, "uneven", 1)
        out = kernel(x, ids, p, weights, shared_experts=lambda: (done.append("shared"), x)[1])
        assert out.shared is x
        return done

    moves = ["dispatch launched", "dispatch waited", "combine launched", "combine waited"]
    assert run("before", True) == ["shared", *moves]
    assert run("during", True) == [*moves[:3], "shared", moves[3]]
    assert run("after", True) == [*moves, "shared"]
    assert run("auto", True) == [*moves, "shared"]  # local: nothing is in flight


def test_wrong_settings_are_named() -> None:
    for options, parts in [
        ({"layout": "batched"}, "layout='batched'.*'grouped' take standard"),
        ({"expert_capacity": 4}, "expert_capacity=4 with standard rows"),
        ({"chunk_tokens": 0}, "chunk_tokens=0"),
        ({"shared_experts_order": "sometimes"}, "shared_experts_order='sometimes'.*during"),
        ({"overflow": "ignore"}, "overflow='ignore'.*raise, chunk or drop"),
    ]:
        spec = ExpertsSpec(Activation(), H, I, torch.float32, torch.device("cpu"))
        moves = make_dispatcher("local", None, ExpertPlacement.contiguous(E, 1), "cpu")
        with pytest.raises(ValueError, match=parts):
            MoEKernel(moves, select_experts(spec, "grouped").experts, **options)
    with pytest.raises(ValueError, match="expert_capacity=0"):
        local_kernel("batched", "batched", expert_capacity=0)
    with pytest.raises(ValueError, match="overflow='drop' without expert_capacity"):
        local_kernel("batched", "batched", overflow="drop")


def too_many_tokens(rank: int, ranks: int) -> None:
    kernel, weights = make_kernel(rank, ranks, "all_to_all_fixed", "reference", "standard", EPGroup())
    x = torch.randn(CAP + 1, H)
    kernel(x, torch.zeros(CAP + 1, K, dtype=torch.int32), torch.ones(CAP + 1, K), weights)


def test_more_tokens_than_the_fixed_dispatcher_has_room_for_are_refused() -> None:
    with pytest.raises(
        RankFailed, match="layer 'blocks.1', rank . of 2: 10 tokens are more than max_tokens_per_rank=9"
    ):
        run_ranks(too_many_tokens, 2)


# ---- CUDA graphs


def captured(rank: int, ranks: int, experts: str, layout: str, seed: int) -> list[float]:
    """Captures once, then replays with other inputs, ids and counts; relative errors against eager calls."""
    dtype, h, i, e, cap = torch.bfloat16, 256, 128, 8, 32
    ep = EPGroup() if ranks > 1 else None
    placement = ExpertPlacement.contiguous(e, ranks)
    name = "all_to_all_fixed" if ranks > 1 else "local"
    moves = make_dispatcher(name, ep, placement, "cuda", max_tokens_per_rank=cap)
    spec = ExpertsSpec(Activation(), h, i, dtype, torch.device("cuda"))
    kernel = MoEKernel(moves, select_experts(spec, experts, layout).experts, layout=layout)
    g = torch.Generator("cuda").manual_seed(seed + rank)
    local = placement.num_local(rank)
    weights = ExpertWeights(
        torch.randn(local, 2 * i, h, generator=g, device="cuda").to(dtype) * h**-0.5,
        torch.randn(local, h, i, generator=g, device="cuda").to(dtype) * i**-0.5,
    )

    def draw(one_expert: bool) -> tuple[torch.Tensor, ...]:
        ids = torch.rand(cap, e, generator=g, device="cuda").argsort(1)[:, :K].int()
        if one_expert:
            ids[:, 0], ids[:, 1] = 3, -1
        x = torch.randn(cap, h, generator=g, device="cuda").to(dtype)
        return x, ids, torch.rand(cap, K, generator=g, device="cuda")

    static = draw(False)
    errors = []
    with torch.no_grad():
        for _ in range(3):
            kernel(*static, weights)  # compiles, and lets NCCL connect
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = kernel(*static, weights).routed
        for replay in range(6):
            fresh = draw(replay == 2)
            want = kernel(*fresh, weights).routed  # eager and replays interleaved
            for place, tensor in zip(static, fresh, strict=True):
                place.copy_(tensor)
            out.fill_(float("nan"))
            graph.replay()
            errors.append(float((out - want).norm() / want.norm()))
    torch.cuda.synchronize()
    return errors


@pytest.mark.gpu
@pytest.mark.parametrize(("experts", "layout"), [("grouped", "standard"), ("batched", "batched")])
def test_a_captured_kernel_replays_with_other_inputs_ids_and_counts_on_one_gpu(
    experts: str, layout: str, seed: int
) -> None:
    assert run_ranks(captured, 1, args=(experts, layout, seed), backend="nccl", timeout=150) == [[0.0] * 6]


@pytest.mark.gpu2
@pytest.mark.parametrize(("experts", "layout"), [("grouped", "standard"), ("batched", "batched")])
def test_a_captured_kernel_replays_with_other_inputs_ids_and_counts_on_two_gpus(
    experts: str, layout: str, seed: int
) -> None:
    assert run_ranks(captured, 2, args=(experts, layout, seed), backend="nccl", timeout=150) == [[0.0] * 6] * 2


# ---- rounds on the device


@pytest.mark.gpu
@pytest.mark.parametrize(("experts", "layout"), [("grouped", "standard"), ("batched", "batched")])
def test_rounds_on_a_gpu_give_the_same_bits_as_all_rows_at_once(experts: str, layout: str, seed: int) -> None:
    dtype, e, h, i, tokens = torch.bfloat16, 8, 512, 256, 1000
    g = torch.Generator("cuda").manual_seed(seed)
    spec = ExpertsSpec(Activation(), h, i, dtype, torch.device("cuda"))
    weights = ExpertWeights(
        torch.randn(e, 2 * i, h, generator=g, device="cuda").to(dtype) * h**-0.5,
        torch.randn(e, h, i, generator=g, device="cuda").to(dtype) * i**-0.5,
    )
    x = torch.randn(tokens, h, generator=g, device="cuda").to(dtype)
    ids = torch.rand(tokens, e, generator=g, device="cuda").argsort(1)[:, :K].int()
    p = torch.rand(tokens, K, generator=g, device="cuda")
    outs = []
    for chunk in (None, 300, 7):
        moves = make_dispatcher("local", None, ExpertPlacement.contiguous(e, 1), "cuda")
        kernel = MoEKernel(moves, select_experts(spec, experts, layout).experts, layout=layout, chunk_tokens=chunk)
        outs.append(kernel(x, ids, p, weights).routed)
    assert torch.equal(outs[1], outs[0]) and torch.equal(outs[2], outs[0])
