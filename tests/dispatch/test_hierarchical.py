"""`hierarchical` over pretended nodes: once over the network per token and node, else what `all_to_all` does."""

from __future__ import annotations

import dataclasses
import os
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from epmoe import EPGroup, ExpertPlacement, MoEConfig, MoELayer, PeerError, make_dispatcher
from epmoe.dispatch import Dispatcher, _suited
from epmoe.dispatch.hierarchical import HierarchicalDispatcher, HierarchicalLayout
from epmoe.dispatch.reduce import ExpertOutput
from epmoe.overlap import run_microbatched
from epmoe.quant.config import QuantConfig
from epmoe.quant.rows import dequantize_rows, quantize_rows
from epmoe.testing import RankFailed, poisoned_empty, run_ranks
from tests import naive
from tests.test_kernel import SITUATIONS, batch_of, make_kernel, make_weights
from tests.test_kernel import K as KERNEL_K

NODES = {
    "1x2": [0, 0],
    "2x1": [0, 1],
    "2+1": [0, 0, 1],
    "1+2, mixed up": [0, 1, 0],
    "1x4": [0, 0, 0, 0],
    "2x2": [0, 0, 1, 1],
    "2x2, mixed up": [0, 1, 1, 0],
    "3+1": [1, 1, 0, 1],
    "4x1": [0, 1, 2, 3],
}
E, K, H, CAP = 9, 3, 20, 9


def make(name: str, ep: EPGroup, layer: str = "moe") -> Dispatcher:
    placement = ExpertPlacement.strided(E, ep.num_ranks)
    return make_dispatcher(name, ep, placement, "cpu", layer=layer, max_tokens_per_rank=CAP)


def routing_of(rank: int, ranks: int, situation: str, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x with the token's own number in its first column, ids, weights: what any rank can rebuild for any other."""
    tokens = {"a rank without tokens": [7, 0, 3, 1][rank], "one token each": 1}.get(situation, CAP - 2 * rank)
    g = torch.Generator().manual_seed(seed * 10 + rank)
    x = torch.randn(tokens, H, generator=g, dtype=torch.float64)
    x[:, 0] = 100 * rank + torch.arange(tokens)
    ids = torch.rand(tokens, E, generator=g).argsort(1)[:, :K].int()
    if situation == "all to one rank":
        ids = (ids % (-(-E // ranks))) * ranks + ranks - 1  # of a strided placement
        ids[ids >= E] = -1
    elif situation == "all to one expert":
        ids = torch.tensor([[-1, E - 1, -1]], dtype=torch.int32).expand(tokens, K).contiguous()
    elif situation == "no experts at all":
        ids.fill_(-1)
    else:
        ids[torch.rand(ids.shape, generator=g) < 0.2] = -1
        ids[torch.rand(ids.shape, generator=g) < 0.05] = E + 3
    return x, ids, torch.rand(tokens, K, generator=g, dtype=torch.float64)


def wanted_links(
    labels: list[int], rank: int, owner: torch.Tensor, situation: str, seed: int
) -> tuple[tuple[int, int], int]:
    """From the ids of all tokens: rows that this rank sends and receives over the network, once per token and remote
    node; and what it would send there once per token and remote rank."""
    index = [labels[:r].count(label) for r, label in enumerate(labels)]
    enter_here = [i % labels.count(labels[rank]) == index[rank] for i in index]
    sent = received = by_rank = 0
    for source in range(len(labels)):
        _, ids, _ = routing_of(source, len(labels), situation, seed)
        for row in ids.tolist():
            far = [labels[int(owner[e])] for e in row if 0 <= e < E]
            remote = set(far) - {labels[source]}
            if source == rank:
                sent += len(remote)
                by_rank += len({int(owner[e]) for e in row if 0 <= e < E and labels[int(owner[e])] != labels[rank]})
            elif labels[rank] in remote and enter_here[source]:
                received += 1
    return (sent, received), by_rank


def spied(ep: EPGroup, labels: list[int], moved: dict[str, int], inside: bool = False) -> None:
    """Counts the rows that a group's all-to-alls send to other ranks, by level."""
    ranks = ep.num_ranks
    honest = ep.all_to_all_async

    def counting(buffer: torch.Tensor, send: Any = None, receive: Any = None, **options: Any) -> Any:
        if send is not None and buffer.dtype == torch.uint8:  # messages; ids of relayed rows are int32
            for r in range(ranks):
                if r != ep.rank:
                    far = not inside and labels[r] != labels[ep.rank]
                    moved["inter" if far else "intra"] += send[r]
        return honest(buffer, send, receive, **options)

    ep.all_to_all_async = counting  # type: ignore[method-assign]


def moved_as(rank: int, ranks: int, labels: list[int], one_sided: bool, seed: int) -> None:
    """Rows, sums, gradients and bytes of every situation, against `all_to_all` and the ids themselves."""
    ep, plain = EPGroup(nodes=labels, timeout=60), EPGroup(timeout=60)
    moved = {"inter": 0, "intra": 0}
    spied(ep, labels, moved)
    if ep.nodes.two_levels:
        spied(ep.node_group(), labels, moved, inside=True)
    ways = {"hierarchical": make("hierarchical", ep), "all_to_all": make("all_to_all", plain)}
    ways["hierarchical"].one_sided = one_sided  # type: ignore[attr-defined]
    alone = not ep.nodes.two_levels or len(ep.nodes.beside(rank)) == 1
    by_message = not one_sided or alone  # else peers' memory is written to, unseen
    for situation in (*SITUATIONS, "all to one expert"):
        results: dict[str, list[torch.Tensor]] = {}
        for name, d in ways.items():
            x, ids, weights = routing_of(rank, ranks, situation, seed)
            x.requires_grad_()
            weights.requires_grad_()
            moved["inter"] = moved["intra"] = 0
            with poisoned_empty():
                rows = d.dispatch(x, ids, weights)
            if name == "hierarchical":
                assert isinstance(d, HierarchicalDispatcher)
                links = d.link_bytes(rows.handle, 10)
                assert moved["inter"] * 10 == links.inter_node[0]
                assert moved["intra"] * 10 == (links.intra_node[0] if by_message else 0)
                want, by_rank = wanted_links(labels, rank, d.owner, situation, seed)
                assert links.inter_node == (want[0] * 10, want[1] * 10), situation
                assert moved["inter"] <= by_rank and (ep.nodes.largest > 1 or moved["inter"] == by_rank)
                assert d.wire_bytes(rows.handle, 10)[0] == links.inter_node[0] + links.intra_node[0]
            taken = (rows.topk_ids >= 0).any(1)
            assert bool(taken.all()) or (name == "hierarchical" and one_sided)
            order = torch.where(taken, rows.x[:, 0].detach(), torch.inf).argsort(stable=True)[: int(taken.sum())]
            here = (rows.topk_ids >= 0) & (rows.topk_ids < E)
            here &= d.expert_map[torch.where(here, rows.topk_ids, 0).long()] >= 0
            assert torch.equal(here.any(1), taken), "a row without an expert here was sent"
            assert int(here.sum()) == rows.max_assignments and rows.x.shape[0] == rows.handle.num_rows
            # what experts could give: depends on the row, its weights and the rank
            y = torch.sin(rows.x * (rank + 1)) * rows.topk_weights.sum(1, keepdim=True)
            with poisoned_empty():
                out = d.combine(y, rows.handle)
                moved["inter"] = moved["intra"] = 0
                (out * (rank + 2)).square().sum().backward()
            if name == "hierarchical":
                # combine's backward sends as dispatch does; dispatch's backward gives back what came
                (sent, came), (passed_on, came_inside) = d.link_bytes(rows.handle, 1)
                assert moved["inter"] == sent + came, situation
                assert moved["intra"] == (passed_on + came_inside if by_message else 0), situation
            assert x.grad is not None and weights.grad is not None
            tensors = [rows.x.detach()[order], rows.topk_ids[order], rows.topk_weights.detach()[order]]
            results[name] = [*tensors, out.detach(), x.grad, weights.grad]
        for n, (a, b) in enumerate(zip(*results.values(), strict=True)):
            if n < 3:
                assert torch.equal(a, b), (situation, n)
            else:
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=f"{situation}, {n}")


@pytest.mark.parametrize("nodes", NODES)
def test_rows_sums_and_gradients_are_those_of_all_to_all_and_rows_cross_once_per_node(nodes: str, seed: int) -> None:
    run_ranks(moved_as, len(NODES[nodes]), args=(NODES[nodes], False, seed), timeout=90)


@pytest.mark.parametrize("nodes", ["1x2", "2+1", "2x2", "3+1"])
def test_rows_stored_into_the_memory_of_the_node_are_the_same(nodes: str, seed: int) -> None:
    run_ranks(moved_as, len(NODES[nodes]), args=(NODES[nodes], True, seed), timeout=90)


def whole_layers(rank: int, ranks: int, labels: list[int], kernels: str, situations: list[str], seed: int) -> list[Any]:
    """With kernels, in the interpreter, inside the node over symmetric memory."""
    ep = EPGroup(nodes=labels, timeout=60)
    os.environ["EPMOE_CPU_KERNELS"] = kernels
    one_sided, experts = (False, "grouped") if kernels == "torch" else (True, "reference")
    results = []
    for situation in situations:
        kernel, weights = make_kernel(rank, ranks, "hierarchical", experts, "standard", ep)
        kernel.dispatcher.one_sided = one_sided  # type: ignore[attr-defined]
        x, ids, p = batch_of(rank, ranks, situation, seed)
        x.requires_grad_()
        p.requires_grad_()
        with poisoned_empty():
            out = kernel(x, ids, p, weights).routed
            out.square().sum().backward()
        results.append((out.detach(), x.grad, p.grad, weights.gate_up_proj.grad))
    return results


@pytest.mark.parametrize(
    ("nodes", "kernels", "situations"),
    [
        ("2+1", "torch", SITUATIONS),
        ("2x2", "torch", SITUATIONS),
        pytest.param(
            "2+1", "triton", ["a rank without tokens"],
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's kernels are compiled here"),
        ),
    ],
)  # fmt: skip
def test_a_layer_over_nodes_matches_float64_in_every_situation(
    nodes: str, kernels: str, situations: list[str], seed: int
) -> None:
    ranks = len(NODES[nodes])
    by_rank = run_ranks(whole_layers, ranks, args=(NODES[nodes], kernels, situations, seed), timeout=90)
    for n, situation in enumerate(situations):
        batches = [batch_of(rank, ranks, situation, seed) for rank in range(ranks)]
        x, p = (torch.cat([b[i] for b in batches]).double().requires_grad_() for i in (0, 2))
        experts = {name: w.double().requires_grad_() for name, w in make_weights().items()}
        out = naive.routed(x, torch.cat([b[1] for b in batches]), p, experts, ("swiglu", 1.0, 1.0), False)
        if situation != "no experts at all":
            out.square().sum().backward()
        leaves = [x, p, experts["gate_up_proj"]]
        want = [out.detach(), *(torch.zeros_like(t) if t.grad is None else t.grad for t in leaves)]
        for part, right in enumerate(want):
            got = torch.cat([results[n][part] for results in by_rank]).double()
            assert (got - right).norm() <= 1e-5 * max(right.norm(), 1.0), (situation, part)


# ---- sums


def summed(rank: int, ranks: int, labels: list[int], values: list[float], dtype: torch.dtype) -> torch.Tensor:
    """One token of each rank goes to every rank, whose row is a constant; twice, other ranks being late each time."""
    d = make("hierarchical", EPGroup(nodes=labels, timeout=60))
    ids = torch.arange(ranks, dtype=torch.int32)[None]
    outs = []
    for late in (0, ranks - 1):
        rows = d.dispatch(torch.ones(1, H, dtype=dtype), ids, torch.ones(1, ranks))
        time.sleep(0.2 * (rank == late))
        outs.append(d.combine(torch.full(rows.x.shape, values[rank], dtype=dtype), rows.handle))
    assert torch.equal(*outs), "what arrives first decides nothing"
    return outs[0]


def test_a_node_s_rows_are_summed_first_and_then_nodes_in_rank_order() -> None:
    first_inside = [1e8, 1.0, -1e8, 1.0]  # one rank after another it would be 1
    backwards = [1e8, -1e8, 1.0, 0.0], [1e8, 0.0, -1e8, 1.0]  # from the last to the first both would be 0
    for labels, values, want in (
        (NODES["2x2"], first_inside, 0.0),
        ([0, 0, 0, 1], backwards[0], 1.0),
        ([0, 0, 1, 2], backwards[1], 1.0),
    ):
        for out in run_ranks(summed, 4, args=(labels, values, torch.float32)):
            assert torch.equal(out, torch.full((1, H), want)), labels


def quantized_back(rank: int, ranks: int, labels: list[int], scheme: str, seed: int) -> tuple[torch.Tensor, ...]:
    """Every rank's row for each token of each rank, and what came back of them quantized."""
    ep = EPGroup(nodes=labels, timeout=60)
    d = make("hierarchical", ep)
    x = torch.full((2, H), float(rank))
    x[:, 1] = torch.arange(2)
    rows = d.dispatch(x, torch.arange(ranks, dtype=torch.int32).expand(2, ranks).contiguous(), torch.ones(2, ranks))
    y = torch.randn(ranks, 2, H, generator=torch.Generator().manual_seed(seed + rank))
    of_rank = y[rows.x[:, 0].long(), rows.x[:, 1].long()]
    return y, d.combine_async(of_rank, rows.handle, scheme=scheme).wait()


@pytest.mark.parametrize("scheme", ["fp8_row", "int8_row"])
def test_rows_quantized_on_the_way_back_are_rounded_for_each_step(scheme: str, seed: int) -> None:
    def rounded(t: torch.Tensor) -> torch.Tensor:
        return dequantize_rows(quantize_rows(t, scheme), torch.float32)

    labels = NODES["2x2"]
    results = run_ranks(quantized_back, 4, args=(labels, scheme, seed))
    for rank, (_, out) in enumerate(results):
        parts = [rounded(y[rank]) for y, _ in results]
        assert torch.equal(out, rounded(parts[0] + parts[1]) + rounded(parts[2] + parts[3]))


def test_a_node_s_sum_is_in_fp32_and_rounded_once() -> None:
    small = 3 * 2.0**-10  # added to 1 in bf16 it is lost; twice of it is not
    for out in run_ranks(summed, 4, args=([0, 0, 0, 1], [1.0, small, small, 0.0], torch.bfloat16)):
        assert torch.equal(out, torch.full((1, H), 1 + 2.0**-7, dtype=torch.bfloat16))


# ---- many at once


def many(rank: int, ranks: int, labels: list[int], seed: int) -> None:
    """Dispatches and combines in flight together, in any order; two groups with other nodes beside each other."""
    ep = EPGroup(nodes=labels, timeout=60)
    every = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    part = EPGroup(every[rank // 2], nodes=1, timeout=60)
    ways = [make("hierarchical", ep, "a"), make("hierarchical", ep, "b"), make("hierarchical", part, "c")]
    batches = [routing_of(d.ep.rank, d.ep.num_ranks, "uneven", seed + n) for n, d in enumerate(ways)]
    assert ep.node_group() is ways[1].ep.node_group()
    for turn in (1, -1):
        arriving = [d.dispatch_async(*batch) for d, batch in zip(ways, batches, strict=True)]
        rows = [pending.wait() for pending in arriving[::turn]][::turn]
        returning = [d.combine_async(r.x * (n + 1), r.handle) for n, (d, r) in enumerate(zip(ways, rows, strict=True))]
        for n, pending in list(enumerate(returning))[::turn]:
            x, ids, _ = batches[n]
            known = (ids >= 0) & (ids < E)
            owners = torch.where(known, ways[n].owner[torch.where(known, ids, 0).long()], -1)
            copies = torch.tensor([len({int(o) for o in row if o >= 0}) for row in owners], dtype=x.dtype)
            assert pending.hook is not None
            pending.hook()
            torch.testing.assert_close(pending.wait(), x * (n + 1) * copies[:, None])
            assert pending.wait() is pending.wait()


def test_many_may_be_in_flight_over_several_groups(seed: int) -> None:
    run_ranks(many, 4, args=(NODES["2x2, mixed up"], seed), timeout=60)


def interleaved(rank: int, ranks: int, labels: list[int], seed: int) -> bool:
    """Two layers, forward and backward: D D C C, against one microbatch after another."""
    ep = EPGroup(nodes=labels, timeout=60)
    torch.manual_seed(seed)
    config = MoEConfig(16, 24, 6, 2, dispatcher="hierarchical", num_shared_experts=1)
    layers = torch.nn.Sequential(*(MoELayer(config, ep, name=f"moe {n}") for n in range(2)))
    x = torch.randn([7, 1, 0][rank], 16, requires_grad=True)
    results = []
    for together in (False, True):
        x.grad = None
        y = run_microbatched(layers, x, interleave=together, num_microbatches=2)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in layers.parameters())])
        layers.zero_grad()
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("nodes", ["2+1", "1+2, mixed up"])
def test_interleaved_microbatches_have_the_bits_of_one_after_another(nodes: str, seed: int) -> None:
    assert run_ranks(interleaved, 3, args=(NODES[nodes], seed), timeout=60) == [True] * 3


def reused(rank: int, ranks: int, labels: list[int], seed: int) -> list[int]:
    """A layout given again, bits of quantized rows and adapters that travel along."""
    ep = EPGroup(nodes=labels, timeout=60)
    d = make("hierarchical", ep)
    x, ids, weights = routing_of(rank, ranks, "uneven", seed)
    first = d.dispatch(x, ids, weights)
    exchanges: list[int] = []
    made, d.make_layout = d.make_layout, lambda ids: exchanges.append(1) or made(ids)  # type: ignore[method-assign]
    again = d.dispatch(x * 2, ids, weights, layout=first.handle)
    assert torch.equal(again.x, first.x * 2) and torch.equal(again.topk_ids, first.topk_ids)
    with torch.no_grad():
        tag = x[:, 0].int()
        quantized = quantize_rows(x.float(), "fp8_row")
        sent = d.dispatch(quantized, ids, weights.float(), layout=first.handle, adapter_ids=tag)
        assert sent.adapter_ids is not None and torch.equal(sent.adapter_ids, first.x[:, 0].int())
        back = d.dispatch(dequantize_rows(quantized, torch.float32), ids, weights.float(), layout=first.handle)
        assert torch.equal(sent.dequantized(torch.float32).x, back.x)
        out = torch.full_like(x, float("nan"))
        assert d.combine(ExpertOutput(first.x), first.handle, out=out) is out
        assert torch.equal(out, d.combine(first.x, first.handle))
    return exchanges


def test_a_layout_given_again_needs_no_exchange_and_whatever_travels_stays_with_its_row(seed: int) -> None:
    assert run_ranks(reused, 3, args=(NODES["2+1"], seed)) == [[]] * 3


# ---- what becomes of a rank that does not take part


def lags(rank: int, ranks: int, labels: list[int], absent: int, known: bool) -> str:
    """With a layout made before there are no counts to wait for: the steps themselves meet the silence."""
    d = make("hierarchical", EPGroup(nodes=labels, timeout=2.0), "blocks.3.moe")
    x, ids, weights = routing_of(rank, ranks, "uneven", 1)
    rows = d.dispatch(x, ids, weights)
    layout = rows.handle if known else None
    d.combine(rows.x, rows.handle)  # everyone is well at first
    dist.barrier()
    if rank == absent:
        time.sleep(4)
        return "late"
    started = time.monotonic()
    try:
        d.combine(d.dispatch(x, ids, weights, layout=layout).x, rows.handle)
    except PeerError as error:
        assert time.monotonic() - started < 3.8, "long after the deadline"
        return str(error)
    return "no error"


@pytest.mark.parametrize(("absent", "known"), [(1, False), (2, True)])
def test_a_rank_that_lags_becomes_an_error_within_the_deadline(absent: int, known: bool) -> None:
    said = run_ranks(lags, 3, args=(NODES["2+1"], absent, known), timeout=40)
    for rank in {0, 1, 2} - {absent}:
        assert f"rank {rank} of 3" in said[rank] and "layer 'blocks.3.moe', " in said[rank], said
        assert ("exchange of" in said[rank]) != known, said


# ---- where it is chosen, and what it plans


def chosen(rank: int, ranks: int, labels: list[int]) -> str:
    return make("auto", EPGroup(nodes=labels, timeout=60)).name


def test_auto_goes_by_nodes_only_where_there_are_two_levels() -> None:
    for nodes, name in (("1x2", "all_to_all"), ("2x1", "all_to_all"), ("2+1", "hierarchical")):
        assert set(run_ranks(chosen, len(NODES[nodes]), args=(NODES[nodes],))) == {name}


def test_auto_stores_rows_to_peers_only_where_they_can_be() -> None:
    """On one node of GPUs that reach each other; else a layer that `all_to_all` serves would be refused."""
    nodes = SimpleNamespace(two_levels=False)
    ep: Any = SimpleNamespace(num_ranks=2, nodes=nodes, device=torch.device("cuda"), reachability="", rank=0)
    assert _suited(ep, None) == "all_to_all" and _suited(ep, 8) == "symmetric" and _suited(ep, 8192) == "all_to_all"
    plain = MoEConfig(2880, 64, 4, 2, max_tokens_per_rank=8)
    assert plain.rows_are_storable(torch.bfloat16) and not plain.rows_are_storable(torch.float64)
    for quant in (QuantConfig(combine="fp8_block"), QuantConfig(gradients="fp8_block")):
        assert not dataclasses.replace(plain, quant=quant).rows_are_storable(torch.bfloat16)
    narrow = dataclasses.replace(plain, hidden_size=72)
    assert narrow.rows_are_storable(torch.bfloat16)
    assert not dataclasses.replace(narrow, dispatch_scheme="fp8_row").rows_are_storable(torch.bfloat16)
    assert not dataclasses.replace(narrow, hidden_size=68).rows_are_storable(torch.bfloat16)


def planned(rank: int, ranks: int, labels: list[int]) -> dict[str, int]:
    kernel, _ = make_kernel(rank, ranks, "hierarchical", "grouped", "standard", EPGroup(nodes=labels))
    plan = kernel.memory_plan(8, KERNEL_K)
    assert kernel.memory_plan(4, KERNEL_K).peak < plan.peak
    found = {b.name: b.nbytes for b in plan.buffers}
    kernel.dispatcher.one_sided = True  # type: ignore[attr-defined]
    found |= {f"one-sided {b.name}": b.nbytes for b in kernel.memory_plan(8, KERNEL_K).buffers}
    return found


def test_the_memory_plan_holds_what_is_relayed() -> None:
    """8 tokens of width 16 in float32, K = 2: rows of 80 bytes with ids and weights, of 64 on the way back."""
    found = run_ranks(planned, 3, args=(NODES["2+1"],))
    rows = {"rows sent": (16, 80), "rows received": (24, 80), "rows that came back": (16, 64)}
    # rank 0 relays for itself and rank 2, rank 1 for itself
    relayed = {"rows relayed": (1, 80), "rows passed on": (2, 80), "sums of the node": (1, 64)}
    for rank, sources in ((0, 16), (1, 8)):
        wanted = rows | {name: (n * sources, row) for name, (n, row) in relayed.items()}
        for name, (n, row) in wanted.items():
            assert found[rank][name] == -(-n * row // 512) * 512, (rank, name)
        # two ranks with a place for 9 tokens of each of two sources, the most that either relays
        assert found[rank]["one-sided rows received"] == -(-2 * 18 * 80 // 512) * 512
        assert found[rank]["one-sided slots inside the node"] >= 2 * 2 * 18 * 80
    assert not set(relayed) & set(found[2]), "a rank alone on its node passes nothing on"


def refusals(rank: int, ranks: int, labels: list[int]) -> list[str]:
    """What rows can't be stored into peers' memory; nothing has moved inside the node by then."""
    said = []
    for width, tokens, options in ((H, CAP + 1, {}), (3, 1, {}), (32, 1, {"scheme": "fp8_row"})):
        d = make("hierarchical", EPGroup(nodes=labels, timeout=60), "blocks.3.moe")
        d.one_sided = True  # type: ignore[attr-defined]
        try:
            x, ids = torch.ones(tokens, width), torch.arange(ranks, dtype=torch.int32).expand(tokens, ranks)
            rows = d.dispatch(x, ids.contiguous(), torch.ones(tokens, ranks))
            d.combine_async(rows.x, rows.handle, **options).wait()  # type: ignore[arg-type]
        except ValueError as error:
            said.append(str(error))
    return said


def test_one_sided_steps_say_what_they_can_not_store() -> None:
    for few, narrow, quantized in run_ranks(refusals, 4, args=(NODES["2x2"],)):
        assert "10 tokens with max_tokens_per_rank=9" in few and "set or raise it" in few
        assert "rows of 12 bytes can't be stored to peers" in narrow and "one_sided to False" in narrow
        assert "scheme='fp8_row') with one_sided=True" in quantized


def no_group() -> None:
    make_dispatcher("hierarchical", None, ExpertPlacement.contiguous(E, 1), "cpu")


def test_without_a_group_it_is_refused() -> None:
    with pytest.raises(ValueError, match="dispatcher='hierarchical' needs an EPGroup; pass ep=, or use 'local'"):
        no_group()


def test_a_failure_is_the_one_rank_s() -> None:
    with pytest.raises(RankFailed, match="nodes="):
        run_ranks(chosen, 2, args=([0, 1, 1],))


def as_ops(rank: int, ranks: int, seed: int) -> None:
    """The ops that compiled graphs have, forward and backward, against launches and waits."""
    d = make("hierarchical", EPGroup(timeout=60))
    assert d.ep.nodes.ranks == ((0, 1), (2,)), "from the environment"
    results = []
    for compiling in (False, True):
        x, ids, weights = (t.requires_grad_(t.is_floating_point()) for t in routing_of(rank, ranks, "uneven", seed))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda compiling=compiling: compiling)
            rows = d.dispatch(x, ids, weights)
            out = d.combine(torch.sin(rows.x) * rows.topk_weights.sum(1, keepdim=True), rows.handle)
        (out * (rank + 1)).square().sum().backward()
        assert isinstance(rows.handle, HierarchicalLayout) and isinstance(rows.handle.splits, list) != compiling
        results.append([rows.x, rows.topk_ids, rows.topk_weights, out, x.grad, weights.grad])
    for n, (a, b) in enumerate(zip(*results, strict=True)):
        assert torch.equal(a, b), n


def test_a_compiled_graph_s_ops_move_the_same_bits(seed: int) -> None:
    run_ranks(as_ops, 3, args=(seed,), env={"EPMOE_RANKS_PER_NODE": "2"})
