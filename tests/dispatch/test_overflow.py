"""What a replayed CUDA graph can't raise itself: rows that found no place are found by `overflow.poll`, late peers by
`EPGroup.check`, and neither finds the other's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from epmoe import Activation, EPGroup, ExpertPlacement, ExpertsSpec, ExpertWeights, MoEKernel, PeerError
from epmoe.dispatch import HierarchicalDispatcher, make_dispatcher
from epmoe.experts import select_experts
from epmoe.testing import run_ranks

E, K, H, I, M = 4, 2, 32, 16, 3  # noqa: E741


def kernel_of(name: str, ep: EPGroup | None, device: str, **options: Any) -> tuple[MoEKernel, ExpertWeights]:
    placement = ExpertPlacement.contiguous(E, 1 if ep is None else ep.num_ranks)
    d = make_dispatcher(name, ep, placement, device, layer="blocks.3", max_tokens_per_rank=M)
    if isinstance(d, HierarchicalDispatcher):
        d.one_sided = True
    spec = ExpertsSpec(Activation(), H, I, torch.bfloat16, torch.device(device))
    options = {"layout": "batched", "expert_capacity": M, **options}
    local = d.num_local
    weights = [torch.randn(s, device=device, dtype=torch.bfloat16) for s in ((local, 2 * I, H), (local, H, I))]
    return MoEKernel(d, select_experts(spec, "batched", "batched").experts, **options), ExpertWeights(*weights)


def batch(device: str, experts: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    ids = torch.tensor([experts] * M, dtype=torch.int32, device=device)
    return torch.randn(M, H, device=device, dtype=torch.bfloat16), ids, torch.ones(M, K, device=device)


def each_finds_its_own(rank: int, ranks: int) -> None:
    flat, nodes = EPGroup(timeout=30), EPGroup(timeout=30, nodes=[0, 0, 1])
    with torch.no_grad():
        for name, ep in (("symmetric", flat), ("hierarchical", nodes)):
            kernel, weights = kernel_of(name, ep, "cpu", expert_capacity=ranks * M)
            kernel(*batch("cpu", (0, 3)), weights)
            ep.check()
            kernel.overflow.poll()

            # as a replay leaves it: this rank's own counts, and nothing of the peers
            assert kernel.overflow._counts is not None and kernel.overflow._seen is not None
            kernel.overflow._counts[0] = kernel.overflow._seen[0] = 2
            ep.check()
            with pytest.raises(RuntimeError, match=rf"layer 'blocks.3', rank {rank} of 3: rows found no place.*0: 2"):
                kernel.overflow.poll()
            kernel.overflow.poll()  # said once

            group = ep if ep is flat else ep.node_group()
            for channel in group.channels:
                channel.fault[0] = 1  # operation 0, of rank 0
                kernel.overflow.poll()
                with pytest.raises(PeerError, match="rank 0 has not delivered"):
                    ep.check()
            assert group.channels or rank == 2, "a rank alone on its node stores nothing"


def test_late_peers_and_rows_over_are_found_by_one_each() -> None:
    run_ranks(each_finds_its_own, 3, timeout=60)


def replayed(rank: int, ranks: int, name: str) -> None:
    ep = EPGroup(timeout=30) if ranks > 1 else None
    # room for the rows of (0, 2), of all ranks, and not for those of (0, 0), twice as many
    kernel, weights = kernel_of(name, ep, "cuda", expert_capacity=M * ranks)
    inputs, over = batch("cuda", (0, 2)), batch("cuda", (0, 0))
    with torch.no_grad():
        kernel(*inputs, weights)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernel(*inputs, weights)
        for replay in range(3):
            inputs[1].copy_(over[1] if replay == 1 else inputs[1])
            graph.replay()
            torch.cuda.synchronize()
            if ep is not None:
                ep.check()
            if replay == 1 and rank == 0:
                with pytest.raises(RuntimeError, match=rf"rows found no place among expert_capacity={M * ranks}"):
                    kernel.overflow.poll()
            else:
                kernel.overflow.poll()
            inputs[1].copy_(torch.tensor([0, 2], device="cuda"))


@pytest.mark.gpu
def test_rows_over_in_a_replayed_graph_are_found_by_poll() -> None:
    run_ranks(replayed, 1, args=("local",), backend="nccl", timeout=120)


@pytest.mark.gpu2
@pytest.mark.parametrize("name", ["symmetric", "all_to_all_fixed"])
def test_rows_over_in_a_replayed_graph_of_two_ranks_are_found_by_poll(name: str) -> None:
    run_ranks(replayed, 2, args=(name,), backend="nccl", timeout=120)
