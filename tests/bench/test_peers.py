"""The plain all-to-all peer computes the layer: output and every gradient against float64, over real ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from epmoe.bench.peers import all_to_all_grouped_mm
from epmoe.testing import poisoned_empty, run_ranks
from tests import naive

H, WIDTH, E, K = 32, 16, 4, 2


def inputs(seed, tokens):
    """All ranks' data: x, ids, weights, w1, w2, dout."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, E, generator=g).topk(K).indices.int()
    p = torch.rand(tokens, K, generator=g)
    w1 = torch.randn(E, 2 * WIDTH, H, generator=g) / H**0.5
    w2 = torch.randn(E, H, WIDTH, generator=g) / WIDTH**0.5
    x, dout = (torch.randn(tokens, H, generator=g) for _ in range(2))
    return x, ids, p, w1, w2, dout


def run_peer(rank, world_size, cases):
    results = []
    for seed, tokens, all_to_first in cases:
        x, ids, p, w1, w2, dout = inputs(seed, tokens * world_size)
        if all_to_first:
            ids = (ids % (E // world_size)).int()
        mine, local = (
            slice(rank * tokens, (rank + 1) * tokens),
            slice(rank * E // world_size, (rank + 1) * E // world_size),
        )
        leaves = [t.clone().requires_grad_() for t in (x[mine], p[mine], w1[local], w2[local])]
        with poisoned_empty():
            y = all_to_all_grouped_mm(leaves[0], ids[mine], *leaves[1:], dist.group.WORLD)
            gradients = torch.autograd.grad(y, leaves, dout[mine])
        results.append((y.detach(), *gradients))
    return results


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_peer_matches_float64_in_output_and_gradients_also_with_a_rank_that_gets_no_rows(ranks, seed):
    cases = [(seed, 9, False), (seed + 1, 1, False), (seed + 2, 5, True)]
    by_rank = run_ranks(run_peer, ranks, args=(cases,))
    for n, (case_seed, tokens, all_to_first) in enumerate(cases):
        x, ids, p, w1, w2, dout = inputs(case_seed, tokens * ranks)
        if all_to_first:
            ids = (ids % (E // ranks)).int()
        leaves = [t.double().requires_grad_() for t in (x, p, w1, w2)]
        experts = {"gate_up_proj": leaves[2], "down_proj": leaves[3]}
        y = naive.routed(leaves[0], ids, leaves[1], experts, ("swiglu", 1.0, float("inf")), False)
        expected = (y.detach(), *torch.autograd.grad(y, leaves, dout.double()))
        for part, want in enumerate(expected):
            got = torch.cat([results[n][part] for results in by_rank]).double()
            assert (got - want).norm() <= 1e-5 * want.norm().clamp_min(1e-12), f"case {n}, part {part}"
