"""Between the layouts: every row of a local expert has its place, padding is never read, overflow is counted."""

from __future__ import annotations

import pytest
import torch

from epmoe.dispatch.batched import batch
from epmoe.dispatch.inputs import ExpertInput, Layout

E, L, H = 9, 4, 12
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def received(seed: int, rows: int, k: int = 3, device: str = "cpu") -> ExpertInput:
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(rows, E, generator=g).argsort(1)[:, :k].int()
    ids[torch.rand(ids.shape, generator=g) < 0.2] = -1
    expert_map = torch.full((E,), -1, dtype=torch.int32)
    expert_map[torch.tensor([7, 2, 5, 0])] = torch.arange(L, dtype=torch.int32)
    x = torch.randn(rows, H, generator=g, dtype=torch.float64)
    weights = torch.rand(rows, k, generator=g, dtype=torch.float64)
    tensors = (t.to(device) for t in (x, ids, weights, expert_map))
    return ExpertInput(*tensors, L, rows * k, Layout(rows, rows, rows * k))


def rows_of(rows: ExpertInput, expert: int) -> list[tuple[int, int]]:
    """The (t, k) of a local expert, in order, by hand."""
    ids = rows.topk_ids.tolist()
    mapped = rows.expert_map.tolist()
    return [(t, k) for t, row in enumerate(ids) for k, e in enumerate(row) if e >= 0 and mapped[e] == expert]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("count", "capacity"), [(0, 4), (1, 1), (7, 7), (7, 2), (40, 16), (40, 64)])
def test_each_expert_has_its_rows_in_order_up_to_the_capacity(
    device: str, count: int, capacity: int, seed: int
) -> None:
    rows = received(seed, count, device=device)
    made = batch(rows, capacity, with_weights=True)
    assert made.rows.x.shape == (L, capacity, H) and made.rows.topk_weights is not None
    for expert in range(L):
        want = rows_of(rows, expert)
        here = want[:capacity]
        assert int(made.rows.expert_num_tokens[expert]) == len(here)
        assert int(made.overflow[expert]) == len(want) - len(here)
        for place, (t, k) in enumerate(want):
            expected = expert * capacity + place if place < capacity else -1
            assert int(made.rows.slot[t, k]) == expected
            if place < capacity:
                assert torch.equal(made.rows.x[expert, place], rows.x[t])
                assert made.rows.topk_weights[expert, place] == rows.topk_weights[t, k]
    elsewhere = sum(len(rows_of(rows, e)) for e in range(L))
    assert int((made.rows.slot == -1).sum()) == rows.topk_ids.numel() - elsewhere + int(made.overflow.sum())


def test_gradients_of_rows_and_weights_come_back_from_their_places(seed: int) -> None:
    rows = received(seed, 11)
    x, weights = rows.x.clone().requires_grad_(), rows.topk_weights.clone().requires_grad_()

    def spread(x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = batch(ExpertInput(x, rows.topk_ids, weights, rows.expert_map, L, 33, rows.handle), 5, with_weights=True)
        assert made.rows.topk_weights is not None
        return made.rows.x, made.rows.topk_weights

    assert torch.autograd.gradcheck(spread, (x, weights))


def test_a_padding_rows_gradient_goes_nowhere(seed: int) -> None:
    rows = received(seed, 11)
    x = rows.x.clone().requires_grad_()
    made = batch(ExpertInput(x, rows.topk_ids, rows.topk_weights, rows.expert_map, L, 33, rows.handle), 8)
    grad = torch.full_like(made.rows.x, float("nan"))
    for expert, count in enumerate(made.rows.expert_num_tokens.tolist()):
        grad[expert, :count] = 1.0
    made.rows.x.backward(grad)
    copies = torch.tensor([[float((made.rows.slot[t] >= 0).sum())] for t in range(11)]).double()
    assert x.grad is not None and torch.equal(x.grad, copies.expand(11, H))
