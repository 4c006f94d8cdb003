"""The expert MLP on segments: gradients against autograd row by row, and the memory a step of training takes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from epmoe.config import Activation
from epmoe.dispatch.inputs import ExpertInput, Layout
from epmoe.experts import ExpertsSpec, ExpertWeights, GroupedExperts
from epmoe.experts._mlp import Rows, mlp_backward, mlp_forward
from epmoe.experts.gradient_sums import PartSums
from epmoe.ops._segments import standard_segments
from epmoe.ops._triton import INTERPRET
from epmoe.ops.activation import apply_activation
from epmoe.ops.align import align_rows
from epmoe.testing import poisoned_empty

ACT = Activation("swiglu")
L, K, T, H, I = 4, 3, 11, 6, 5  # noqa: E741


def routed(seed: int) -> tuple[Tensor, Tensor, Tensor, Rows]:
    """ids with absent experts and an expert without rows; row_index, slot and the rows they make."""
    ids = torch.stack([torch.randperm(L, generator=torch.Generator().manual_seed(seed + t))[:K] for t in range(T)])
    ids = torch.where(ids == 2, -1, ids).int()
    most = T * K + 2
    row_index, offsets, slot = align_rows(ids, torch.arange(L, dtype=torch.int32), L, most)
    return ids, row_index, slot, Rows(*standard_segments(offsets), row_index, K, most)


@pytest.mark.parametrize("weight", ["input", "output", "none"])
@pytest.mark.parametrize("copied", [True, False], ids=["by-index", "in-place"])
def test_gradients_are_those_of_autograd(weight, copied, seed):
    g = torch.Generator().manual_seed(seed)
    ids, row_index, slot, rows = routed(seed)
    w1, w2 = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((L, 2 * I, H), (L, H, I)))
    b1 = torch.randn(L, 2 * I, generator=g, dtype=torch.float64)
    x, dout = (torch.randn(T, H, generator=g, dtype=torch.float64) for _ in range(2))
    p = torch.rand(T, K, generator=g, dtype=torch.float64) + 0.5
    leaves = [t.requires_grad_() for t in (x, w1, w2, b1, p)]
    terms = []  # (pair, its row of the output, weighted)
    x_of_pair = {}
    for t in range(T):
        for k in range(K):
            e = int(ids[t, k])
            if e < 0:
                continue
            row = x_of_pair[int(slot[t, k])] = x[t] * 1  # a leaf of its own: its gradient is a row's
            row.retain_grad()
            scaled = row * p[t, k] if weight == "input" else row
            y = w2[e] @ apply_activation(w1[e] @ scaled + b1[e], ACT.name)
            terms.append((y * p[t, k] if weight == "output" else y) @ dout[t])
    torch.stack(terms).sum().backward()

    flat, named = p.detach().view(-1), sorted(x_of_pair)
    weight_in, weight_out = (flat if weight == name else None for name in ("input", "output"))
    x, w1, w2, b1, p = (leaf.detach() for leaf in leaves)
    if not copied:  # as batched experts have them: rows and weights where the segments say
        at = row_index[: len(named)].long()
        place = torch.full((rows.num_rows, H), math.nan, dtype=torch.float64)
        x, dout = (place.index_copy(0, torch.arange(len(named)), t[at // K]) for t in (x, dout))
        flat = torch.full((rows.num_rows,), math.nan, dtype=torch.float64).index_copy(
            0, torch.arange(len(named)), flat[at]
        )
        weight_in, weight_out = (None if w is None else flat for w in (weight_in, weight_out))
        rows = rows._replace(row_index=None, divisor=1)
    with poisoned_empty():
        _, h = mlp_forward(x, w1, w2, b1, None, rows, weight_in, ACT, True)
        got = mlp_backward(
            dout,
            x,
            w1,
            w2,
            h,
            rows,
            slot if copied else None,
            weight_in,
            weight_out,
            ACT,
            True,
            False,
            PartSums(None, None),
        )
    assert got.b2 is None and len(named) < rows.num_rows
    for name, have, want in (("w1", got.w1, leaves[1]), ("w2", got.w2, leaves[2]), ("b1", got.b1, leaves[3])):
        torch.testing.assert_close(have, want.grad, rtol=1e-10, atol=1e-10, msg=name)
    assert (got.w1[2] == 0).all() and (got.w2[2] == 0).all()
    for n in named:  # (before the weight on the input, which the sum over a row's experts multiplies)
        want = x_of_pair[n].grad
        factor = flat[row_index[n]] if copied else flat[n]
        torch.testing.assert_close(got.rows[n] * (factor if weight == "input" else 1), want, rtol=1e-10, atol=1e-10)
    if weight == "output":
        dp = torch.zeros(T * K, dtype=torch.float64)
        dp[row_index[: len(named)].long()] = got.weight[: len(named)].double()
        torch.testing.assert_close(dp.view(T, K), leaves[4].grad, rtol=1e-10, atol=1e-10)


@pytest.mark.gpu
def test_training_holds_little_more_than_what_it_gives_and_saves(seed):
    """Peak above weights and inputs: the gradients, the saved h, its gradient, each pair's row and the result's rows.

    With 1024 rows per expert and fewer, the sorted copies of dout and x, the activation and its gradient pass through
    memory that these need later.
    """
    if INTERPRET:
        pytest.skip("Triton was imported with TRITON_INTERPRET=1")
    experts, top_k, tokens, width, size = 16, 4, 4096, 1024, 512
    pairs = tokens * top_k
    torch.manual_seed(seed)
    made = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    w1, w2 = torch.randn(experts, 2 * size, width, **made), torch.randn(experts, width, size, **made)
    x, dout = torch.randn(tokens, width, **made), torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    ids = torch.rand(tokens, experts, device="cuda").topk(top_k).indices.int()
    p = torch.rand(tokens, top_k, device="cuda", requires_grad=True)
    expert_map = torch.arange(experts, dtype=torch.int32, device="cuda")
    rows = ExpertInput(x, ids, p, expert_map, experts, pairs, Layout(0, tokens, tokens))
    kind = GroupedExperts(ExpertsSpec(ACT, width, size, torch.bfloat16, torch.device("cuda")))

    def train() -> None:
        out = kind(rows, ExpertWeights(w1, w2))
        torch.autograd.grad(out, (x, p, w1, w2), dout)

    train()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    train()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    necessary = 2 * (w1.numel() + w2.numel() + pairs * (2 * size + 2 * size + width) + 2 * x.numel())
    assert peak <= 1.05 * necessary, f"{peak / necessary:.3f} of {necessary} bytes"
