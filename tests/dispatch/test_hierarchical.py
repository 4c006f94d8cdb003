"""`hierarchical` over pretended nodes: once over the network per token and node, else what `all_to_all` does."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch

from epmoe import EPGroup
from epmoe.dispatch.hierarchical import HierarchicalDispatcher
from epmoe.quant.rows import dequantize_rows, quantize_rows
from epmoe.testing import poisoned_empty, run_ranks
from tests import naive
from tests.dispatch.hierarchical_cases import NODES, E, H, make, routing_of
from tests.test_kernel import SITUATIONS, batch_of, make_kernel, make_weights


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
