"""`Workspace`: it grows until it is locked, layers of a group share one per lane, and what it held changes nothing."""

from __future__ import annotations

import pytest
import torch

from epmoe import EPGroup
from epmoe.comm.workspace import Part, Workspace
from epmoe.testing import run_ranks
from tests.test_kernel import E, K, batch_of, local_kernel, make_kernel


def test_a_workspace_grows_until_it_is_locked() -> None:
    space = Workspace(torch.device("cpu"), "lane 0")
    a, b = space.take([Part((3, 5), torch.float32), Part((7,), torch.bfloat16)])
    a.fill_(1)
    b.fill_(2)
    assert a.shape == (3, 5) and b.shape == (7,) and bool((a == 1).all()) and space.nbytes == 512
    held = space.nbytes
    (c,) = space.take([Part((2, 2), torch.float32)])
    assert space.nbytes == held and c.data_ptr() == a.data_ptr()
    space.lock()
    space.take([Part((3, 5), torch.float32)])
    with pytest.raises(RuntimeError, match="lane 0: 4096 bytes are wanted, 512 are there.*locked.*unlock()"):
        space.take([Part((1024,), torch.float32)])
    space.unlock()
    space.take([Part((1024,), torch.float32)])
    assert space.nbytes == 4096


@pytest.mark.parametrize(("experts", "layout"), [("grouped", "standard"), ("batched", "batched")])
def test_what_a_workspace_held_before_changes_no_bit_and_growth_is_planned(
    experts: str, layout: str, seed: int
) -> None:
    space = Workspace(torch.device("cpu"))
    kernel, weights = local_kernel(experts, layout, workspace=space)
    free, _ = local_kernel(experts, layout)
    batch = batch_of(0, 1, "uneven", seed)
    with torch.no_grad():
        want = free(*batch, weights).routed
        assert torch.equal(kernel(*batch, weights).routed, want)
        tokens = batch[0].shape[0]
        shapes = kernel.experts.workspace_shapes(tokens, tokens * K if layout == "standard" else E * tokens)
        assert shapes is not None and space.nbytes == shapes.workspace13.nbytes + shapes.workspace2.nbytes
        space.lock()
        for poison in (float("nan"), 1e4):
            assert space._buffer is not None
            space._buffer.view(torch.float32).fill_(poison)
            assert torch.equal(kernel(*batch, weights).routed, want)
        with pytest.raises(RuntimeError, match="locked"):
            kernel(*[torch.cat([t, t]) for t in batch], weights)
    kernel(*batch, weights).routed.sum().backward()  # with a gradient nothing is kept in it
    assert torch.equal(kernel(*batch, weights).routed.detach(), want)


def lanes(rank: int, ranks: int) -> bool:
    ep = EPGroup()
    kernels = [make_kernel(rank, ranks, "all_to_all", "grouped", "standard", ep)[0] for _ in range(2)]
    return kernels[0].workspace is kernels[1].workspace is ep.workspace() is not ep.workspace(1)


def test_layers_of_a_group_share_one_workspace_per_lane() -> None:
    assert run_ranks(lanes, 1) == [True]
