"""What all_gather and all_to_all promise, on real processes: rows, adjoints, order of sums, any number in flight."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from epmoe import EPGroup, ExpertPlacement, PeerError, make_dispatcher
from epmoe.dispatch import AllToAllDispatcher, Dispatcher, ExpertInput
from epmoe.dispatch.all_to_all import AllToAllLayout
from epmoe.testing import RankFailed, run_ranks

NAMES = ["all_gather", "all_to_all"]
BACKENDS = [
    pytest.param("gloo", 2, id="gloo-2"),
    pytest.param("gloo", 3, id="gloo-3"),
    pytest.param("nccl", 1, id="nccl-1", marks=pytest.mark.gpu),
    pytest.param("nccl", 2, id="nccl-2", marks=pytest.mark.gpu2),
]
E, K, H = 7, 3, 20


def tokens_of(rank: int) -> int:
    return [5, 0, 9, 2][rank]


def routing_of(rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, ids (with some -1 and one row without experts), weights: what any rank can rebuild for any other."""
    g = torch.Generator().manual_seed(seed * 10 + rank)
    tokens = tokens_of(rank)
    x = torch.randn(tokens, H, generator=g)
    ids = torch.rand(tokens, E, generator=g).argsort(dim=1)[:, :K].int()
    if tokens > 2:
        ids[1, 1:] = -1
        ids[2] = -1
    return x, ids, torch.rand(tokens, K, generator=g)


def make(name: str, layer: str = "moe", timeout: float = 60.0) -> Dispatcher:
    ep = EPGroup(timeout=timeout)
    placement = ExpertPlacement.contiguous(E, ep.num_ranks)
    return make_dispatcher(name, ep, placement, ep.device, layer=layer)


def mine(d: Dispatcher, seed: int) -> tuple[torch.Tensor, ...]:
    return tuple(t.to(d.owner.device) for t in routing_of(d.ep.rank, seed))


def wanted_rows(d: Dispatcher, seed: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The (x, ids, weights) of every token of every rank that has an expert here, by source rank, then token."""
    rows = []
    for source in range(d.num_dispatchers):
        for x, ids, weights in zip(*routing_of(source, seed), strict=True):
            if any(int(e) >= 0 and d.owner[int(e)] == d.ep.rank for e in ids):
                rows.append((x, ids, weights))
    return rows


def has_expert_here(d: Dispatcher, rows: ExpertInput) -> torch.Tensor:
    ids = rows.topk_ids.cpu()
    return ((ids >= 0) & (d.expert_map.cpu()[ids.clamp(0, E - 1).long()] >= 0)).any(1)


def rows_arrive(rank: int, world: int, name: str, seed: int) -> None:
    d = make(name)
    got = d.dispatch(*mine(d, seed))
    here = has_expert_here(d, got)
    want = wanted_rows(d, seed)
    if name == "all_to_all":
        assert bool(here.all()), "a row without an expert here was sent"
    for part, tensor in enumerate((got.x, got.topk_ids, got.topk_weights)):
        expected = torch.stack([row[part] for row in want]) if want else tensor.cpu()[:0]
        assert torch.equal(tensor.cpu()[here], expected)
    pairs = sum(int(d.expert_map[int(e)] >= 0) for _, ids, _ in want for e in ids if e >= 0)
    assert pairs <= got.max_assignments, (pairs, got.max_assignments)
    assert name == "all_gather" or pairs == got.max_assignments


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("backend", "ranks"), BACKENDS)
def test_each_token_reaches_each_owner_once_with_its_routing(backend: str, ranks: int, name: str, seed: int) -> None:
    run_ranks(rows_arrive, ranks, args=(name, seed), backend=backend)


def adjoint_products(rank: int, world: int, name: str, seed: int) -> list[float]:
    """⟨dispatch(x), y⟩ and ⟨x, combine(y)⟩, their autograd twins, over float64 rows."""
    d = make(name)
    x, ids, weights = mine(d, seed)
    x = x.double().requires_grad_()
    weights = weights.double().requires_grad_()
    rows = d.dispatch(x, ids, weights)
    g = torch.Generator().manual_seed(seed + rank)
    owned = has_expert_here(d, rows).to(rows.x.device)[:, None]
    y = (torch.randn(rows.x.shape, generator=g, dtype=torch.float64).to(rows.x.device) * owned).requires_grad_()
    v = torch.randn(rows.topk_weights.shape, generator=g, dtype=torch.float64).to(rows.x.device)
    out = d.combine(y, rows.handle)
    dout = torch.randn(out.shape, generator=g, dtype=torch.float64).to(out.device)
    dx, dw = torch.autograd.grad([rows.x, rows.topk_weights], [x, weights], [y.detach(), v])
    (dy,) = torch.autograd.grad(out, y, dout)
    # the padding rows of all_gather belong to no token: they carry zeros out and nothing back
    products = [(rows.x * y).sum(), (x * out).sum(), (x * dx).sum(), (out * dout).sum(), (y * dy).sum()]
    carried = (rows.topk_weights.nan_to_num() * v).sum(), (weights * dw).sum()
    return [float(p.detach()) for p in (*products, *carried)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("backend", "ranks"), BACKENDS)
def test_dispatch_and_combine_are_adjoint_and_autograd_knows(backend: str, ranks: int, name: str, seed: int) -> None:
    sums = [
        sum(parts)
        for parts in zip(*run_ranks(adjoint_products, ranks, args=(name, seed), backend=backend), strict=True)
    ]
    moved, returned, by_autograd, out_dout, y_dy, weights_out, weights_back = sums
    assert returned == pytest.approx(moved, rel=1e-12, abs=1e-9)
    assert by_autograd == pytest.approx(moved, rel=1e-12, abs=1e-9)
    assert y_dy == pytest.approx(out_dout, rel=1e-12, abs=1e-9)
    assert weights_back == pytest.approx(weights_out, rel=1e-12, abs=1e-9)


def many_in_flight(rank: int, world: int, name: str, seed: int) -> None:
    d = make(name)
    batches = [mine(d, seed + n) for n in range(3)]
    arriving = [d.dispatch_async(*batch) for batch in batches]
    rows = [pending.wait() for pending in reversed(arriving)][::-1]
    returning = [d.combine_async(r.x * (n + 1), r.handle) for n, r in enumerate(rows)]
    for n, (batch, pending) in enumerate(zip(batches, returning, strict=True)):
        x, ids, _ = batch
        owners = torch.where(ids >= 0, d.owner[ids.clamp_min(0).long()], -1)
        # all_gather returns every rank's row, all_to_all the owners' only
        copies = [len({int(o) for o in row if o >= 0}) for row in owners] if name == "all_to_all" else [world] * len(x)
        want = x * (n + 1) * torch.tensor(copies, device=x.device, dtype=x.dtype)[:, None]
        torch.testing.assert_close(pending.wait(), want)
        assert pending.wait() is pending.wait()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("backend", "ranks"), BACKENDS[:1] + BACKENDS[3:])
def test_dispatches_and_combines_may_be_in_flight_together(backend: str, ranks: int, name: str, seed: int) -> None:
    run_ranks(many_in_flight, ranks, args=(name, seed), backend=backend)


def with_and_without_autograd(rank: int, world: int, name: str, seed: int, dtype: torch.dtype, width: int) -> None:
    """Widths whose messages are exactly the values, or padded; rows given back dense, or as a view with a stride."""
    d = make(name)
    _, ids, weights = mine(d, seed)
    g = torch.Generator().manual_seed(seed + rank)
    x = torch.randn(tokens_of(rank), width, generator=g).to(d.owner.device, dtype)
    outcomes = []
    for how in ("no grad needed", "no grad allowed", "grad", "grad of weights"):
        inputs = [x.clone(), weights.clone()]
        for tensor in inputs[1:] if how == "grad of weights" else inputs:
            tensor.requires_grad_(how != "no grad needed")
        with torch.set_grad_enabled(how != "no grad allowed"):
            rows = d.dispatch(inputs[0], ids, inputs[1])
            wide = torch.cat([rows.x, rows.x], dim=1)
            out = [d.combine(given, rows.handle) for given in (rows.x.contiguous(), wide[:, :width])]
        for tensor in (rows.x, rows.topk_weights, *out):
            assert tensor.requires_grad == how.startswith("grad"), how
        outcomes.append([t.detach() for t in (rows.x, rows.topk_ids, rows.topk_weights, *out)])
        assert torch.equal(out[0], out[1])
    for outcome in outcomes[1:]:
        for a, b in zip(outcomes[0], outcome, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)  # NaN: the weights of padding


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 20), (torch.bfloat16, 9)], ids=["dense", "padded"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("backend", "ranks"), BACKENDS[:1] + BACKENDS[3:])
def test_rows_are_the_same_whether_or_not_a_gradient_can_flow(
    backend: str, ranks: int, name: str, dtype: torch.dtype, width: int, seed: int
) -> None:
    run_ranks(with_and_without_autograd, ranks, args=(name, seed, dtype, width), backend=backend)


def test_a_layout_of_a_compiled_graph_holds_the_same_numbers() -> None:
    nothing = torch.empty(0, dtype=torch.int32)
    eager = AllToAllLayout(0, 7, 9, nothing, nothing, [[1, 2], [3, 4]])
    compiled = AllToAllDispatcher.unpack_layout(*AllToAllDispatcher.pack_layout(eager))
    assert isinstance(compiled.splits, torch.Tensor)
    assert compiled.numbers == eager.numbers == [[1, 2], [3, 4]]
    assert torch.equal(compiled.rows, eager.rows)
    assert (compiled.num_tokens, compiled.num_rows, compiled.max_assignments) == (0, 7, 9)


def layout_reused(rank: int, world: int, name: str, seed: int) -> int:
    d = make(name)
    x, ids, weights = mine(d, seed)
    first = d.dispatch(x, ids, weights)
    exchanges = []
    made, d.make_layout = d.make_layout, lambda ids: exchanges.append(1) or made(ids)  # type: ignore[method-assign]
    again = d.dispatch(x * 2, ids, weights, layout=first.handle)
    assert torch.equal(again.x, first.x * 2) and torch.equal(again.topk_ids, first.topk_ids)
    d.dispatch(x, ids, weights)
    return len(exchanges)


@pytest.mark.parametrize("name", NAMES)
def test_a_layout_given_again_needs_no_exchange_of_counts(name: str, seed: int) -> None:
    assert run_ranks(layout_reused, 2, args=(name, seed)) == [1, 1]


def cancelling_sum(rank: int, world: int, name: str) -> torch.Tensor:
    """Rows 1e8, 1 and -1e8 from ranks 0, 1, 2: in fp32 and rank order their sum is 0, in any other order it is not."""
    d = make(name)
    owned = [int((d.owner == r).nonzero()[0]) for r in range(world)]
    ids = torch.tensor([owned], dtype=torch.int32)
    rows = d.dispatch(torch.ones(1, H), ids, torch.ones(1, world))
    value = torch.tensor([1e8, 1.0, -1e8][rank])
    return d.combine(value.expand_as(rows.x).contiguous(), rows.handle)


@pytest.mark.parametrize("name", NAMES)
def test_parts_are_summed_in_rank_order(name: str) -> None:
    for out in run_ranks(cancelling_sum, 3, args=(name,)):
        assert torch.equal(out, torch.zeros(1, H))


def bytes_on_wire(rank: int, world: int, name: str) -> tuple[int, int]:
    d = make(name)
    # token t of rank r goes to experts of rank 0 only: rank 0 sends nothing, the others everything
    tokens = rank + 1
    rows = d.dispatch(torch.ones(tokens, H), torch.zeros(tokens, K, dtype=torch.int32), torch.ones(tokens, K))
    return d.wire_bytes(rows.handle, 100)


def test_wire_bytes_count_rows_that_leave_the_rank() -> None:
    assert run_ranks(bytes_on_wire, 3, args=("all_to_all",)) == [(0, 500), (200, 0), (300, 0)]
    assert run_ranks(bytes_on_wire, 3, args=("all_gather",)) == [(600, 600)] * 3


def one_rank_lags(rank: int, world: int, name: str, how: str) -> None:
    d = make(name, layer="blocks.3.moe", timeout=2.0)
    x, ids, weights = mine(d, 1)
    d.dispatch(x, ids, weights)  # everyone is well at first
    dist.barrier()
    if rank == 1:
        if how == "dies":
            import os

            os._exit(7)
        return  # it stays, and takes no part
    started = time.monotonic()
    try:
        d.dispatch(x, ids, weights)
    except PeerError as error:
        assert time.monotonic() - started < 20, "not at the deadline of 2 s: that of the process group is 50"
        raise RuntimeError(f"as it should: {error}") from error
    raise AssertionError("no error")


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_that_lags_becomes_an_error_within_the_deadline(name: str) -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(one_rank_lags, 2, args=(name, "lags"), timeout=40)
    message = str(failure.value)
    assert (
        "as it should" in message
        and "rank 0 of 2" in message
        and "exchange of" in message
        and "blocks.3.moe" in message
    ), message


def one_rank_dies(rank: int, world: int, name: str) -> str:
    """Rank 1 leaves its group without a word while rank 0 waits."""
    d = make(name, layer="blocks.3.moe", timeout=3.0)
    x, ids, weights = mine(d, 1)
    d.dispatch(x, ids, weights)
    if rank == 1:
        return "left"
    try:
        for _ in range(3):
            d.dispatch(x, ids, weights)
    except PeerError as error:
        return str(error)
    return "no error"


def test_a_rank_that_left_becomes_an_error_for_the_others() -> None:
    messages = run_ranks(one_rank_dies, 2, args=("all_to_all",), timeout=40)
    assert "rank 0 of 2" in messages[0] and "blocks.3.moe" in messages[0]
