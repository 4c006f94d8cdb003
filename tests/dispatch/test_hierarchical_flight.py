"""`hierarchical` with several dispatches at once: in flight, interleaved, reused, compiled; and a rank that lags."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from epmoe import EPGroup, MoEConfig, MoELayer, PeerError
from epmoe.dispatch.hierarchical import HierarchicalLayout
from epmoe.dispatch.reduce import ExpertOutput
from epmoe.overlap import run_microbatched
from epmoe.quant.rows import dequantize_rows, quantize_rows
from epmoe.testing import run_ranks
from tests.dispatch.hierarchical_cases import NODES, E, make, routing_of


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


def lags(rank: int, ranks: int, labels: list[int], absent: int, known: bool) -> str:
    """With a layout made before there are no counts to wait for: the steps themselves meet the silence."""
    d = make("hierarchical", EPGroup(nodes=labels, timeout=2.0), "blocks.3.moe")
    x, ids, weights = routing_of(rank, ranks, "uneven", 1)
    rows = d.dispatch(x, ids, weights)
    layout = rows.handle if known else None
    d.combine(rows.x, rows.handle)  # everyone is well at first
    dist.barrier()
    if rank == absent:
        return "late"  # it stays, and takes no part
    started = time.monotonic()
    try:
        d.combine(d.dispatch(x, ids, weights, layout=layout).x, rows.handle)
    except PeerError as error:
        assert time.monotonic() - started < 20, "not at the deadline of 2 s: that of the process group is 50"
        return str(error)
    return "no error"


@pytest.mark.parametrize(("absent", "known"), [(1, False), (2, True)])
def test_a_rank_that_lags_becomes_an_error_within_the_deadline(absent: int, known: bool) -> None:
    said = run_ranks(lags, 3, args=(NODES["2+1"], absent, known), timeout=40)
    for rank in {0, 1, 2} - {absent}:
        assert f"rank {rank} of 3" in said[rank] and "layer 'blocks.3.moe', " in said[rank], said
        assert ("exchange of" in said[rank]) != known, said
