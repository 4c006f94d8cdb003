"""Dependent launches: only where the device has them, and no kernel sees what the one before it has not written yet."""

from __future__ import annotations

import pytest
import torch

from epmoe.ops._dependent_launch import dependent_launch
from epmoe.ops.gather_sum import gather_sum


def test_kernels_of_a_cpu_wait_for_nothing():
    assert dependent_launch(torch.device("cpu")) == {"DEPENDENT": False}


@pytest.mark.gpu
def test_a_chain_of_small_kernels_sees_each_ones_writes(seed):
    """Each launch shifts the rows by one: after as many as there are rows all are back, if none ran ahead."""
    generator = torch.Generator("cuda").manual_seed(seed)
    rows = torch.randn(64, 4096, generator=generator, device="cuda")
    shift = ((torch.arange(64, device="cuda") + 1) % 64).int()[:, None]
    gather_sum(rows, shift)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rows
        for _ in range(64):
            out = gather_sum(out, shift)
    for _ in range(5):
        rows.normal_(generator=generator)
        graph.replay()
        assert torch.equal(out, rows)
