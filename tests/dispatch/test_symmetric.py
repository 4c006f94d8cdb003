"""`symmetric`: the same rows, sums and gradients as all-to-all, by kernels and by twins; any order of operations; ranks
that are slow, late or dead. Real processes whose buffers are shared memory."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from epmoe import EPGroup, ExpertPlacement, PeerError
from epmoe.comm.beside import Manner
from epmoe.config import Activation
from epmoe.dispatch import symmetric
from epmoe.dispatch.all_to_all import AllToAllDispatcher
from epmoe.dispatch.base import Dispatcher
from epmoe.dispatch.inputs import ExpertInput
from epmoe.dispatch.reduce import ExpertOutput, weight_and_reduce
from epmoe.dispatch.symmetric import SymmetricDispatcher
from epmoe.dispatch.wire import RowSpec
from epmoe.experts import ExpertsSpec
from epmoe.experts.grouped import GroupedExperts
from epmoe.kernel import MoEKernel
from epmoe.quant.rows import quantize_rows
from epmoe.testing import RankFailed, poisoned_empty, run_ranks

E, K, H, C = 5, 2, 64, 4
MODES = ["torch", "triton"]  # EPMOE_CPU_KERNELS


def make(
    kind: type[Dispatcher], ep: EPGroup, *, capacity: int = C, layer: str = "blocks.3.moe", experts: int = E
) -> Any:
    placement = ExpertPlacement.contiguous(experts, ep.num_ranks)  # uneven
    owner, expert_map = placement.owner_tensor(ep.device), placement.expert_map(ep.rank, ep.device)
    options = {"max_tokens_per_rank": capacity, "experts_per_rank": placement.experts_per_rank}
    return kind(ep, owner, expert_map, placement.num_local(ep.rank), layer=layer, **options)


def batch(rank: int, seed: int, dtype: torch.dtype = torch.bfloat16, tokens: int | None = None) -> tuple[Tensor, ...]:
    """x, ids with holes, weights: what any rank can rebuild for any other."""
    tokens = [C, 0, C - 1, 1][rank] if tokens is None else tokens
    g = torch.Generator().manual_seed(seed * 10 + rank)
    ids = torch.rand(tokens, E, generator=g).argsort(1)[:, :K].int()
    if tokens > 2:
        ids[1, 1:] = -1
        ids[2] = torch.tensor([-1, E + 1000])
    return torch.randn(tokens, H, generator=g).to(dtype), ids, torch.rand(tokens, K, generator=g)


def owned(rows: ExpertInput) -> Tensor:
    """`[T, K]`: which pairs are for experts here."""
    ids = rows.topk_ids
    return (ids >= 0) & (ids < E) & (rows.expert_map[ids.clamp(0, E - 1).long()] >= 0)


def round_trip(d: Any, x: Tensor, ids: Tensor, weights: Tensor) -> list[Tensor]:
    """What arrives, what comes back and both gradients; an expert is a factor, applied with the router's weight."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    with poisoned_empty():
        rows = d.dispatch(x, ids, weights)
        pairs = owned(rows)
        here = pairs.any(1)
        factor = torch.where(pairs, rows.topk_weights * (1 + rows.topk_ids), 0).sum(1, keepdim=True)
        y = torch.where(here[:, None], rows.x, 0) * factor.to(x.dtype)
        out = d.combine(y, rows.handle)
        loss = out.float().square().sum()
        dx, dw = torch.autograd.grad(loss, [x, weights])
    return [rows.x[here].detach(), rows.topk_ids[here], rows.topk_weights[here].detach(), out.detach(), dx, dw]


def against_all_to_all(rank: int, ranks: int, mode: str, seed: int) -> None:
    ep = EPGroup(timeout=60)
    dtypes = (torch.bfloat16, torch.float32, torch.float16) if mode == "torch" else (torch.bfloat16,)
    for n, dtype in enumerate((*dtypes, dtypes[0])):
        os.environ["EPMOE_CPU_KERNELS"] = "torch"
        experts = E + n % 2  # one more: two ranks get the same number, and owners are computed
        wanted = round_trip(make(AllToAllDispatcher, ep, experts=experts), *batch(rank, seed + n, dtype))
        os.environ["EPMOE_CPU_KERNELS"] = mode
        got = round_trip(make(SymmetricDispatcher, ep, experts=experts), *batch(rank, seed + n, dtype))
        for part, (a, b) in enumerate(zip(got, wanted, strict=True)):
            assert torch.equal(a, b), (mode, dtype, part)


@pytest.mark.parametrize(("mode", "ranks"), [("torch", 1), ("torch", 2), ("torch", 4), ("triton", 1), ("triton", 2)])
def test_rows_sums_and_gradients_are_those_of_all_to_all_to_the_bit(mode: str, ranks: int, seed: int) -> None:
    run_ranks(against_all_to_all, ranks, args=(mode, seed), timeout=120)


def in_float64(rank: int, ranks: int, seed: int) -> None:
    ep = EPGroup(timeout=60)
    x, ids, weights = batch(rank, seed, torch.float64)
    results = [
        round_trip(make(kind, ep), x, ids, weights.double()) for kind in (SymmetricDispatcher, AllToAllDispatcher)
    ]
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b) and a.dtype in (torch.float64, torch.int32)


def test_float64_takes_the_twin(seed: int) -> None:
    run_ranks(in_float64, 2, args=(seed,))


def quantized_on_the_way(rank: int, ranks: int, seed: int) -> None:
    ep = EPGroup(timeout=60)
    x, ids, weights = batch(rank, seed)
    x = x * torch.logspace(-3, 3, x.shape[0] or 1)[: x.shape[0], None].to(x.dtype)
    adapter_ids = torch.arange(x.shape[0], dtype=torch.int32) - 1
    for mode in MODES:
        os.environ["EPMOE_CPU_KERNELS"] = mode
        d = make(SymmetricDispatcher, ep)
        for scheme in ("fp8_block", "int8_row"):
            with pytest.MonkeyPatch.context() as patch:  # nothing is quantized before the launch
                patch.setattr("epmoe.dispatch.symmetric.quantize_rows", None)
                by_dispatch = d.dispatch_async(x, ids, weights, scheme=scheme, adapter_ids=adapter_ids).wait()
            by_caller = d.dispatch(quantize_rows(x, scheme), ids, weights, adapter_ids=adapter_ids)
            here = owned(by_dispatch).any(1)
            assert by_dispatch.scheme == by_caller.scheme == scheme
            for name in ("x", "x_scale", "topk_ids", "topk_weights", "adapter_ids"):
                a, b = (getattr(rows, name)[here].contiguous().view(torch.uint8) for rows in (by_dispatch, by_caller))
                assert torch.equal(a, b), (mode, scheme, name)
            sources = [quantize_rows(batch(0, seed)[0][:0], scheme)] if not here.any() else None
            if sources is None:
                token = here.nonzero()[0, 0] % C
                source = int(here.nonzero()[0, 0]) // C
                sent = batch(source, seed)[0]
                sent = sent * torch.logspace(-3, 3, sent.shape[0])[:, None].to(sent.dtype)
                want = quantize_rows(sent, scheme)
                first = here.nonzero()[0, 0]
                assert torch.equal(by_dispatch.x[first].view(torch.uint8), want.values[token].view(torch.uint8))
                assert torch.equal(by_dispatch.x_scale[first], want.scales[token])


def test_rows_quantized_on_the_way_are_those_quantized_before(seed: int) -> None:
    run_ranks(quantized_on_the_way, 2, args=(seed,), timeout=90)


def weighted_by_combine(rank: int, ranks: int, seed: int) -> None:
    ep = EPGroup(timeout=60)
    x, ids, weights = batch(rank, seed, tokens=12 + rank)  # enough for some to have experts on both ranks
    for mode in MODES:
        os.environ["EPMOE_CPU_KERNELS"] = mode
        d = make(SymmetricDispatcher, ep, capacity=16)
        rows = d.dispatch(x, ids, weights)
        pairs = owned(rows)
        g = torch.Generator().manual_seed(seed + rank)
        slot = torch.full(pairs.shape, -1, dtype=torch.int32)
        slot[pairs] = torch.randperm(int(pairs.sum()) + 3, generator=g)[: int(pairs.sum())].int()
        y = torch.full((int(pairs.sum()) + 3, H), float("nan"), dtype=x.dtype)
        y[slot[pairs].long()] = torch.randn(int(pairs.sum()), H, generator=g).to(x.dtype)
        nan_weights = torch.where(pairs, rows.topk_weights, float("nan"))
        for p in (nan_weights, None):
            delegated = d.combine(ExpertOutput(y, "delegate", slot, p), rows.handle)
            reduced = d.combine(weight_and_reduce(ExpertOutput(y.float(), "contiguous", slot, p)), rows.handle)
            error = (delegated.float() - reduced).norm()  # of rows rounded once on the way, sums once at the end
            assert error <= 5e-3 * reduced.norm(), (mode, p is None)
            before = d.combine(weight_and_reduce(ExpertOutput(y, "contiguous", slot, p)), rows.handle)
            assert torch.equal(delegated, before), f"{mode}: other bits than where the sum is made first"
        y.requires_grad_()
        out = d.combine(ExpertOutput(y, "delegate", slot, nan_weights), rows.handle)
        (dy,) = torch.autograd.grad(out.float().sum(), y)
        assert torch.equal(dy[slot[pairs].long()], rows.topk_weights[pairs][:, None].to(y.dtype).expand(-1, H))


def test_combine_weights_and_sums_experts_rows_itself(seed: int) -> None:
    run_ranks(weighted_by_combine, 2, args=(seed,), timeout=90)


# ---- order, drift, number in flight


def orders(rank: int, ranks: int, mode: str, seed: int) -> None:
    """Two layers of other capacities and three microbatches in one group, combines in any order, each rank late in
    turns, rows held all the while."""
    os.environ["EPMOE_CPU_KERNELS"] = mode
    ep = EPGroup(timeout=60)
    layers = [make(SymmetricDispatcher, ep), make(SymmetricDispatcher, ep, capacity=2 * C, layer="blocks.4.moe")]
    for step, order in enumerate(["DDDCCC", "DDCC", "DCDC", "DDD", "DDCCDC"] if mode == "torch" else ["DDCC", "DDCDC"]):
        held: list[tuple[Any, ExpertInput, Tensor, Tensor]] = []
        combined = 0
        for n, what in enumerate(order):
            if (step + n) % ranks == rank:
                time.sleep(0.02)
            d = layers[n % 2]
            if what == "D":
                tokens = (rank + n + step) % (C + 1)
                x, ids, weights = batch(rank, seed + 10 * step + n, tokens=tokens)
                held.append((d, d.dispatch(x, ids, weights), x, ids))
            else:
                d, rows, x, ids = held[combined]
                combined += 1
                out = d.combine(rows.x * (rank + 1), rows.handle)
                known = (ids >= 0) & (ids < E)
                owner = torch.where(known, d.owner[torch.where(known, ids, 0).long()], -1)
                want = torch.zeros(x.shape)
                for r in range(ranks):
                    want += torch.where((owner == r).any(1)[:, None], (x * (r + 1)).float(), 0)
                assert torch.equal(out, want.to(x.dtype)), (order, n)
        for n, (_, rows, _, _) in enumerate(held):  # nothing was written over
            here = owned(rows).any(1).view(ranks, -1)
            for source in range(ranks):
                tokens = (source + order_index(order, n) + step) % (C + 1)
                sent, _, _ = batch(source, seed + 10 * step + order_index(order, n), tokens=tokens)
                kept = rows.x.view(ranks, -1, H)[source, :tokens][here[source, :tokens]]
                assert torch.equal(kept, sent[here[source, :tokens]]) and not here[source, tokens:].any()
    assert len(ep.channels) <= 2


def order_index(order: str, n: int) -> int:
    """Where the n-th dispatch stands."""
    return [i for i, what in enumerate(order) if what == "D"][n]


@pytest.mark.parametrize("mode, ranks", [("torch", 2), ("torch", 4), ("triton", 2)])
def test_any_order_of_dispatches_and_combines_with_ranks_that_drift(mode: str, ranks: int, seed: int) -> None:
    run_ranks(orders, ranks, args=(mode, seed), timeout=120)


def skewed(rank: int, ranks: int, mode: str, seed: int) -> list[Tensor]:
    os.environ["EPMOE_CPU_KERNELS"] = mode
    d = make(SymmetricDispatcher, EPGroup(timeout=60))
    x, ids, weights = batch(rank, seed, tokens=C)
    outs = []
    for target in (0, E - 1, -1):  # all to the first rank, to the last, to none
        ids = torch.full_like(ids, target)
        rows = d.dispatch(x, ids, weights)
        outs.append(d.combine(rows.x, rows.handle) - (x if target >= 0 else 0))
    return outs


@pytest.mark.parametrize("mode", MODES)
def test_all_tokens_to_one_rank_or_to_none(mode: str, seed: int) -> None:
    for outs in run_ranks(skewed, 2, args=(mode, seed), timeout=60):
        assert all(torch.equal(out, torch.zeros_like(out)) for out in outs)


def budgets(rank: int, ranks: int, seed: int) -> None:
    """SMs of every launch: those of the moment, in backward those of its forward."""
    ep, launched = EPGroup(timeout=30), list[int | None]()

    def heard(whole: Any) -> Any:
        def launch(*arguments: Any, **options: Any) -> Any:
            launched.append(options["sms"])
            assert options["aside"] == (options["sms"] is not None)
            return whole(*arguments, **options)

        return launch

    for name in ("send_rows", "give_back_rows"):
        setattr(symmetric, name, heard(getattr(symmetric, name)))
    d = make(SymmetricDispatcher, ep)
    x, ids, weights = batch(rank, seed, torch.float32)
    handle = d.dispatch(x, ids, weights).handle
    for fixed, now, expected in ((None, 4, 4), (None, 0, None), (7, 4, 7), (None, 9, 9), (None, 0, None)):
        d.overlap_sms = fixed
        launched.clear()
        leaves = (x.clone().requires_grad_(), weights.clone().requires_grad_())
        with ep.beside.launching(Manner(now, False, False)):
            d.combine(torch.zeros(ranks * C, H), handle)  # of the last round
            handle = d.dispatch(x, ids, weights, layout=handle).handle
            rows = d.dispatch(leaves[0], ids, leaves[1], layout=handle)
            out = d.combine(torch.where((rows.topk_ids >= 0).any(1)[:, None], rows.x, 0), rows.handle)
        d.overlap_sms = 3
        torch.autograd.grad(out.sum(), leaves[0])
        assert launched == [expected] * 6, (fixed, now)


def test_the_sms_of_each_call_are_those_of_the_moment_also_by_a_layout_of_before(seed: int) -> None:
    run_ranks(budgets, 2, args=(seed,), timeout=60)


# ---- what must not travel as it is, and what is refused


def awkward_numbers(rank: int, ranks: int, mode: str) -> None:
    os.environ["EPMOE_CPU_KERNELS"] = mode
    d = make(SymmetricDispatcher, EPGroup(timeout=30))
    x = torch.full((2, H), -1, dtype=torch.int16).view(torch.bfloat16)  # NaN, all bits set
    ids = torch.tensor([[0, E - 1], [-1, -1]], dtype=torch.int32)
    weights = torch.full((2, K), -1, dtype=torch.int32).view(torch.float32)
    rows = d.dispatch(x, ids, weights)
    here = owned(rows).any(1)
    assert int(here.sum()) == ranks and rows.x[here].isnan().all() and rows.topk_weights[here].isnan().all()
    assert torch.equal(rows.topk_ids[here], ids[:1].expand(ranks, K))
    assert d.combine(rows.x, rows.handle)[0].isnan().all()
    again = d.dispatch(torch.ones_like(x), ids, torch.ones(2, K))
    assert bool((again.x[here] == 1).all()), "slots are empty again"


@pytest.mark.parametrize("mode", MODES)
def test_nans_with_all_bits_set_arrive_as_nans(mode: str) -> None:
    run_ranks(awkward_numbers, 2, args=(mode,), timeout=60)


def refused(rank: int, ranks: int) -> None:
    ep = EPGroup(timeout=30)
    d = make(SymmetricDispatcher, ep)
    x, ids, weights = batch(0, 1, tokens=C + 1)
    with pytest.raises(ValueError, match=r"layer 'blocks.3.moe', rank 0 of 1: 5 tokens.*max_tokens_per_rank=4"):
        d.dispatch(x, ids, weights)
    with pytest.raises(ValueError, match="'blocks.3.moe', dispatch: rows of 20 bytes.*multiple of 16"):
        d.dispatch(x[:C, :10], ids[:C], weights[:C])


def test_too_many_tokens_and_rows_that_do_not_fit_are_named() -> None:
    run_ranks(refused, 1)


def capacities_differ(rank: int, ranks: int) -> None:
    os.environ["EPMOE_CPU_KERNELS"] = "triton"
    d = make(SymmetricDispatcher, EPGroup(timeout=10), capacity=C + rank)
    d.dispatch(*batch(rank, 1, tokens=1))


def test_ranks_with_other_capacities_learn_it_at_the_first_dispatch() -> None:
    with pytest.raises(RankFailed, match="capacity: rank 0 has 4, rank 1 has 5"):
        run_ranks(capacities_differ, 2)


def planned(rank: int, ranks: int) -> None:
    ep = EPGroup(timeout=30)
    d = make(SymmetricDispatcher, ep)
    plan = d.memory_plan(C, RowSpec(H, torch.bfloat16, K), d.traffic(C, K))
    assert not ep.channels, "nothing is allocated for a plan"
    d.combine(d.dispatch(*batch(rank, 1)).x, d.dispatch(*batch(rank, 1)).handle)
    (channel,) = ep.channels
    assert plan[0].name == "slots, latency profile (throughput above 1024 tokens per rank)"
    assert channel.buffers[rank].numel() == plan[0].nbytes
    for capacity, profile in ((1024, "latency"), (1025, "throughput"), (8192, "throughput")):
        large = make(SymmetricDispatcher, ep, capacity=capacity)
        slots, rows, _ = large.memory_plan(capacity, RowSpec(H, torch.bfloat16, K), large.traffic(capacity, K))
        assert large.profile == profile and slots.name.startswith(f"slots, {profile} profile")
        # two halves, a slot for every token of every rank: values, ids, weights, and whether it is here
        assert slots.nbytes >= 2 * ranks * capacity * (H * 2 + 8 * K + 4) and rows.nbytes >= ranks * capacity * H * 2
    assert len(ep.channels) == 1, "nor for these"
    spec = ExpertsSpec(Activation("swiglu"), H, 32, torch.bfloat16, torch.device("cpu"))
    quantized = MoEKernel(d, GroupedExperts(spec), dispatch_scheme="int8_row").memory_plan(C, K)
    assert "quantized rows" not in {b.name for b in quantized.buffers}, "they are in flight"


def test_the_memory_plan_holds_what_is_then_allocated() -> None:
    run_ranks(planned, 2)


# ---- torch.compile


def compiled(rank: int, ranks: int, seed: int) -> None:
    d = make(SymmetricDispatcher, EPGroup(timeout=60))
    x, ids, weights = batch(rank, seed, torch.float32, tokens=C - rank)

    def f(x: Tensor, weights: Tensor) -> Tensor:
        rows = d.dispatch(x, ids, weights)
        here = (rows.topk_ids >= 0).any(1, keepdim=True)
        pairs = torch.where(here, rows.topk_weights, 0)
        return d.combine(torch.where(here, rows.x, 0) * pairs.sum(1, keepdim=True), rows.handle)

    results = []
    for g in (f, torch.compile(f, backend="aot_eager", fullgraph=True)):
        leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        out = g(*leaves)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    assert len(d.ep.channels) == 1, "eager and compiled calls share buffers"


def test_a_compiled_graph_holds_dispatch_and_combine_with_their_gradients(seed: int) -> None:
    run_ranks(compiled, 2, args=(seed,), timeout=120)


# ---- ranks that are slow, late, dead


def one_rank_fails(rank: int, ranks: int, mode: str, how: str) -> str:
    os.environ["EPMOE_CPU_KERNELS"] = mode
    d = make(SymmetricDispatcher, EPGroup(timeout=20.0))
    rows = d.dispatch(*batch(rank, 1))
    d.combine(rows.x, rows.handle)
    dist.barrier()
    d.ep.timeout = 1.0
    if rank == 1 and how == "late":
        return "late"  # it does not come at all
    if rank == 1 and how == "dies":
        os._exit(7)
    started = time.monotonic()
    try:
        rows = d.dispatch(*batch(rank, 2))
        if rank == 1 and how == "elsewhere":
            d.dispatch(*batch(rank, 3))
        d.combine(rows.x, rows.handle)
        if how == "elsewhere":
            d.dispatch(*batch(rank, 3))
    except PeerError as error:
        assert 0.9 < time.monotonic() - started < 7.0, "not at the deadline"
        return str(error)
    return "well"


@pytest.mark.parametrize("mode", MODES)
def test_a_late_rank_is_an_error_that_says_who_waited_for_whom(mode: str) -> None:
    message, _ = run_ranks(one_rank_fails, 2, args=(mode, "late"), timeout=60)
    for part in ("rank 0 of 2", "group '", "layer 'blocks.3.moe', dispatch", "rank 1 has not delivered", "limit 1 s"):
        assert part in message


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_at_another_operation_delivers_nothing_but_an_error(mode: str) -> None:
    """Its dispatch is not taken for the others' combine: on both sides the first operation that differs fails."""
    messages = run_ranks(one_rank_fails, 2, args=(mode, "elsewhere"), timeout=60)
    for message, operation, peer in zip(messages, ("combine", "dispatch"), (1, 0), strict=True):
        assert f"{operation}: rank {peer} has not delivered" in message and "is at another operation" in message


def survive(rank: int, ranks: int, store: str, heard: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    heard.put(one_rank_fails(rank, ranks, "triton", "dies"))


def test_the_death_of_a_rank_does_not_hang_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of their own: those of `run_ranks` are ended as soon as one of them dies."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("spawn")
    heard = context.Queue()
    processes = [context.Process(target=survive, args=(r, 2, str(tmp_path / "store"), heard)) for r in range(2)]
    for process in processes:
        process.start()
    message = heard.get(timeout=90)
    for process in processes:
        process.join(30)
    ended = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert ended == [0, 7]
    assert "rank 0 of 2" in message and "rank 1 has not delivered" in message
