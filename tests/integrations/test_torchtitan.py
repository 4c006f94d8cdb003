"""In a block laid out as torchtitan's, our dispatcher gives what the block gives in one process, and its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from epmoe.integrations.torchtitan import TokenDispatcher
from epmoe.testing import run_ranks

D, F, E, K = 8, 6, 4, 2


class RoutedExperts(nn.Module):
    """dispatch, grouped experts on rows in expert order, combine: the seam."""

    def __init__(self, dispatcher: TokenDispatcher, w13: Tensor, w2: Tensor) -> None:
        super().__init__()
        self.token_dispatcher = dispatcher
        self.w13, self.w2 = nn.Parameter(w13), nn.Parameter(w2)

    def forward(self, x: Tensor, scores: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
        rows, counts_here, metadata = self.token_dispatcher.dispatch(x, scores, ids, counts)
        assert counts_here.shape == (len(self.w13),) and counts_here.sum() == len(rows)
        out = []
        for expert, part in enumerate(rows.split(counts_here.tolist())):
            gate, up = (part @ self.w13[expert].T).chunk(2, -1)
            out.append((nn.functional.silu(gate) * up) @ self.w2[expert].T)
        return self.token_dispatcher.combine(torch.cat(out), metadata, x)


class MoE(nn.Module):
    def __init__(self, experts: RoutedExperts, gate: Tensor) -> None:
        super().__init__()
        self.routed_experts, self.gate = experts, nn.Parameter(gate)

    def forward(self, x: Tensor) -> Tensor:
        scores, ids = (x @ self.gate.T).sigmoid().topk(K, dim=-1)
        counts = torch.bincount(ids.flatten(), minlength=E)
        return self.routed_experts(x, scores, ids, counts)


def step(rank: int, ranks: int, seed: int, rows: tuple[int, ...], name: str) -> list[Tensor]:
    """Output, and gradients of x, the router and this rank's experts, each of the sum over all tokens."""
    generator = torch.Generator().manual_seed(seed)
    w13, w2, gate, x = (
        torch.randn(*shape, dtype=torch.float64, generator=generator)
        for shape in ((E, 2 * F, D), (E, D, F), (E, D), (sum(rows), D))
    )
    dispatcher = TokenDispatcher(E, K, name)
    dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (ranks,)) if ranks > 1 else None)
    own = slice(rank * E // ranks, (rank + 1) * E // ranks)
    model = MoE(RoutedExperts(dispatcher, w13[own].clone(), w2[own].clone()), gate)
    x = x[sum(rows[:rank]) : sum(rows[: rank + 1])] if ranks > 1 else x
    x.requires_grad_()
    out = model(x)
    (out * torch.linspace(-1, 1, D, dtype=torch.float64)).sum().backward()
    experts = model.routed_experts
    return [t.detach().clone() for t in (out, x.grad, model.gate.grad, experts.w13.grad, experts.w2.grad)]


@pytest.mark.parametrize("name", ["all_to_all", "all_gather"])
def test_two_ranks_give_the_block_of_one_process(name, seed):
    rows = (5, 3)
    whole = step(0, 1, seed, rows, "auto")
    parts = run_ranks(step, 2, args=(seed, rows, name), timeout=60)
    joined = [torch.cat(pair) for pair in zip(*parts, strict=True)]
    joined[2] = parts[0][2] + parts[1][2]  # the router is replicated: its gradients add up
    for found, expected in zip(joined, whole, strict=True):
        assert (found - expected).norm() < 1e-12 * expected.norm()


def test_the_local_dispatcher_gives_a_loop_over_tokens(seed):
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((5, D), (E, D, D)))
    ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(5)])
    scores = torch.rand(5, K, dtype=torch.float64, generator=generator)
    dispatcher = TokenDispatcher(E, K)
    rows, counts, metadata = dispatcher.dispatch(x, scores, ids)
    out = torch.cat([part @ w[e].T for e, part in enumerate(rows.split(counts.tolist()))])
    expected = torch.stack([sum(scores[t, k] * (w[ids[t, k]] @ x[t]) for k in range(K)) for t in range(5)])
    torch.testing.assert_close(dispatcher.combine(out, metadata, x), expected, rtol=1e-12, atol=1e-13)


def uneven(rank: int, ranks: int) -> str:
    try:
        TokenDispatcher(3, 1).wire_meshes(ep_mesh=init_device_mesh("cpu", (ranks,)))
    except ValueError as error:
        return str(error)
    return "no error"


def test_experts_that_do_not_split_evenly_are_refused():
    assert all("num_experts=3: must be a multiple of the 2 ranks" in text for text in run_ranks(uneven, 2))
