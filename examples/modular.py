"""The parts of a MoE layer put together by hand: router, dispatcher, experts and kernel, without `MoELayer`.

    python examples/modular.py
    torchrun --nproc-per-node=2 examples/modular.py

Every rank routes its own tokens, rows go to the ranks that own their experts, and one reduced row per token and rank
comes back. The result is compared with a loop over all experts in float64, which needs no ranks at all.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from model import join_ranks
from torch.nn import functional as F

from epmoe import (
    ExpertPlacement,
    ExpertsSpec,
    ExpertWeights,
    MoEKernel,
    RouterConfig,
    make_dispatcher,
    route,
    select_experts,
)
from epmoe.config import Activation

M, H, I, E, K = (
    64,
    128,
    96,
    8,
    2,
)  # tokens of each rank, hidden size, expert intermediate size, experts, experts per token


def main() -> None:
    ep, device = join_ranks()
    rank, ranks = (0, 1) if ep is None else (ep.rank, ep.num_ranks)

    torch.manual_seed(0)  # all ranks draw all experts, and each keeps its own
    router, w1, w2 = torch.randn(E, H) / H**0.5, torch.randn(E, 2 * I, H) / H**0.5, torch.randn(E, H, I) / I**0.5
    x = torch.randn(ranks, M, H)[rank]

    placement = ExpertPlacement.contiguous(E, ranks)
    mine = list(placement.local_experts(rank))
    weights = ExpertWeights(w1[mine].to(device), w2[mine].to(device))
    dispatcher = make_dispatcher("auto", ep, placement, device)
    selection = select_experts(ExpertsSpec(Activation("swiglu"), H, I, torch.float32, device))
    routing = route((x @ router.t()).to(device), RouterConfig(), K)

    # the whole path in one call ...
    kernel = MoEKernel(dispatcher, selection.experts)
    out = kernel(x.to(device), routing.topk_ids, routing.topk_weights, weights).routed

    # ... and the same path step by step, where other work could run while rows are on their way
    sending = dispatcher.dispatch_async(x.to(device), routing.topk_ids, routing.topk_weights)
    rows = sending.wait()
    returning = dispatcher.combine_async(selection.experts(rows, weights), rows.handle)
    assert torch.equal(returning.wait(), out)

    expected = torch.zeros(M, H, dtype=torch.float64)
    for k in range(K):
        for token, expert in enumerate(routing.topk_ids[:, k].tolist()):
            gate, up = (w1[expert].double() @ x[token].double()).chunk(2)
            weight = routing.topk_weights[token, k].double().cpu()
            expected[token] += weight * (w2[expert].double() @ (F.silu(gate) * up))
    error = ((out.double().cpu() - expected).norm() / expected.norm()).item()
    sent, received = dispatcher.wire_bytes(rows.handle, H * 4)
    print(
        f"rank {rank} of {ranks}: experts {mine} by {selection}; {dispatcher.name}: {M} tokens, {rows.x.shape[0]} rows "
        f"here, {sent:,} bytes sent, {received:,} received; relative error against float64: {error:.1e}",
        flush=True,
    )
    assert error < 1e-5
    if ep is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
