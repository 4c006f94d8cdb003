"""Rows and bytes by destination: `rows_by_rank` of every dispatcher against the routing, and what `symmetric` stores
into each peer's memory, word by word, against what it says."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from epmoe import EPGroup, ExpertPlacement
from epmoe.comm.beside import Beside
from epmoe.comm.symmetric import CLOCKS, COUNT_BITS, EMPTY, Channel, stamp_of
from epmoe.dispatch import DISPATCHERS, HierarchicalDispatcher, SymmetricDispatcher, make_dispatcher
from epmoe.dispatch.storable import half_bytes
from epmoe.dispatch.symmetric import SymmetricLayout
from epmoe.dispatch.wire import RowSpec
from epmoe.quant.rows import quantize_rows
from epmoe.testing import run_ranks

R, E, K, H, C = 3, 7, 2, 64, 5
ROUTINGS = ("uneven", "one-hot", "one-hot, elsewhere", "padded", "nowhere")
PLACEMENTS = (ExpertPlacement.contiguous(E, R), ExpertPlacement(E, ((6,), (0, 3, 1, 5, 2), (4,))))


def ids_of(rank: int, routing: str, seed: int) -> Tensor:
    """What any rank can rebuild for any other; one of three has fewer tokens, one of the uneven none."""
    g = torch.Generator().manual_seed(10 * seed + rank)
    tokens = [C, 0, C - 2][rank] if routing == "uneven" else [C, C - 1, 2][rank]
    ids = torch.rand(tokens, E, generator=g).argsort(1)[:, :K].int()
    if routing.startswith("one-hot"):
        ids[:] = torch.tensor([0, 1] if routing == "one-hot" else [6, -1])
    elif routing == "padded":
        ids[torch.rand(ids.shape, generator=g) < 0.4] = -1
        ids[0] = torch.tensor([E + 1000, -7])
    elif routing == "nowhere":
        ids[:] = -1
    return ids


def rows_between(placement: ExpertPlacement, routing: str, seed: int) -> Tensor:
    """`[source, destination]`: tokens of a rank that have an expert at another."""
    table = torch.zeros(R, R, dtype=torch.int64)
    for source in range(R):
        for token in ids_of(source, routing, seed).tolist():
            owners = {r for r in range(R) for e in token if e in placement.ranks[r]}
            for destination in owners - {source}:
                table[source, destination] += 1
    return table


def by_every_dispatcher(rank: int, ranks: int, seed: int) -> None:
    flat, nodes = EPGroup(timeout=60), EPGroup(timeout=60, nodes=[0, 1, 0])
    names = [name for name in DISPATCHERS if name != "local"]
    for n, placement in enumerate(PLACEMENTS):
        for name in names:
            group = nodes if name == "hierarchical" else flat
            d = make_dispatcher(name, group, placement, "cpu", max_tokens_per_rank=C)
            for routing in ROUTINGS if n == 0 else ROUTINGS[:1]:
                ids = ids_of(rank, routing, seed)
                x, weights = torch.randn(len(ids), H), torch.rand(len(ids), K)
                handle = d.dispatch(x, ids, weights, scheme="fp8_row" if n else None).handle
                sent, received = d.rows_by_rank(handle)
                assert sent.dtype == torch.int64 and sent.shape == (R,)
                table = rows_between(placement, routing, seed)
                if name == "all_gather":
                    most = max(len(ids_of(r, routing, seed)) for r in range(R))
                    table = most * (1 - torch.eye(R, dtype=torch.int64))
                elif name == "all_to_all_fixed":
                    table = C * (1 - torch.eye(R, dtype=torch.int64))
                elif isinstance(d, HierarchicalDispatcher):
                    table = by_nodes(placement, routing, seed)
                assert torch.equal(sent, table[rank]), (name, routing, sent, table)
                assert torch.equal(received, table[:, rank]), (name, routing, received, table)
                assert d.wire_bytes(handle, 10) == (10 * int(table[rank].sum()), 10 * int(table[:, rank].sum()))


def by_nodes(placement: ExpertPlacement, routing: str, seed: int) -> Tensor:
    """The same over nodes {0, 2} and {1}: ranks 0 and 2 send to 1 what goes there; 1 sends what goes to that node to 0,
    its like there, which passes on to 2."""
    direct = rows_between(placement, routing, seed)
    direct[1] = 0
    for token in ids_of(1, routing, seed).tolist():
        owners = {r for r in range(R) for e in token if e in placement.ranks[r]}
        direct[1, 0] += bool(owners & {0, 2})
        direct[0, 2] += 2 in owners
    return direct


def test_every_dispatcher_says_how_many_rows_go_to_and_come_from_each_rank(seed: int) -> None:
    run_ranks(by_every_dispatcher, R, args=(seed,), timeout=90)


# ---- the bytes themselves


class Alone(Channel):
    """A channel of rank `rank` whose peers are memory of this process. They have announced one operation, of no tokens:
    so what a launch stores for them stays to be counted."""

    def __init__(self, ep: Any, half: int) -> None:
        self.ep, self.words = ep, True
        self.half_bytes = -(-half // 512) * 512
        self.control_bytes = 512
        nbytes = self.nbytes(ep, half)
        self.buffers = [torch.full((nbytes // 4,), EMPTY, dtype=torch.int32).view(torch.uint8) for _ in range(R)]
        self.peers = tuple(b.view(torch.int32) for b in self.buffers)
        self.peers16 = tuple(b.view(torch.int16) for b in self.buffers)
        self.clock = torch.ones(CLOCKS, dtype=torch.int32)
        self.fault = torch.zeros(1, dtype=torch.int32)
        self._fault_seen, self.dead = self.fault.numpy(), torch.zeros(1, dtype=torch.int32)
        self._operations, self.turn = {}, 1
        for peer in range(R):
            if peer != ep.rank:
                self.peers[ep.rank][R + peer] = stamp_of(1, 0) << COUNT_BITS  # the first operation, in the first turn

    def meet(self, *args: Any) -> None:
        """There is nobody to compare with."""

    def stored(self) -> list[int]:
        """Bytes that lie in each peer's slots; they are this rank's slots alone, if all is well."""
        found = []
        for peer, buffer in enumerate(self.buffers):
            full = buffer.view(torch.int32)[self.control_bytes // 4 :] != EMPTY
            found.append(4 * int(full.sum()) if peer != self.ep.rank else 0)
        return found


@dataclasses.dataclass
class OneOf:
    """What `symmetric` asks of a group, of one rank of three."""

    rank: int
    num_ranks: int = R
    device: torch.device = torch.device("cpu")
    timeout: float = 5.0
    name: str = "alone"
    backend: str = "gloo"
    at_once: int = 1

    def __post_init__(self) -> None:
        self.beside, self.channels = Beside(self.device), []

    def error(self, operation: str, why: str) -> Exception:
        return AssertionError(f"{operation}: {why}")


def one_of(rank: int, placement: ExpertPlacement) -> tuple[SymmetricDispatcher, Alone]:
    ep: Any = OneOf(rank)
    channel = Alone(ep, half_bytes(RowSpec(H, torch.float32, K), R, C))
    ep.channels.append(channel)
    d = SymmetricDispatcher(
        ep,
        placement.owner_tensor("cpu"),
        placement.expert_map(rank, "cpu"),
        placement.num_local(rank),
        max_tokens_per_rank=C,
        experts_per_rank=placement.experts_per_rank,
    )
    return d, channel


STORED = [(routing, None) for routing in ROUTINGS]
STORED += [(routing, s) for routing in ("uneven", "padded") for s in ("fp8_block", "int8_row", "fp8_row, before")]


@pytest.mark.parametrize(("routing", "scheme"), STORED)
def test_each_peer_gets_the_bytes_of_its_rows_and_a_record_of_every_token(
    routing: str, scheme: str | None, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPMOE_CPU_KERNELS", "triton")
    placement = PLACEMENTS[seed % 2]
    table = rows_between(placement, routing, seed)
    name, _, before = (scheme or "").partition(", ")
    for rank in range(R):
        d, channel = one_of(rank, placement)
        ids = ids_of(rank, routing, seed)
        x, weights = torch.randn(len(ids), H).bfloat16(), torch.rand(len(ids), K)
        with torch.no_grad():
            rows = quantize_rows(x, name) if before else x
            handle = d.dispatch(rows, ids, weights, scheme=None if before else name or None).handle
        values, scales = (2 * H, 0) if scheme is None else (H, 4)  # one block, or one row
        # ids and weights, and whether the row is here; scales of rows quantized before lie among the ids
        record = 4 * (1 + 2 * K) + (scales if before else 0)
        scales = 0 if before else scales
        sent = d.rows_by_rank(handle)[0]
        assert torch.equal(sent, table[rank])
        for peer, nbytes in enumerate(channel.stored()):
            goes = int(table[rank, peer]) * (values + scales) + len(ids) * record
            assert nbytes == (0 if peer == rank else goes), (rank, peer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_each_source_gets_back_the_bytes_of_the_rows_that_it_sent(
    dtype: torch.dtype, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPMOE_CPU_KERNELS", "triton")
    for rank in range(R):
        d, channel = one_of(rank, PLACEMENTS[0])
        g = torch.Generator().manual_seed(seed + rank)
        here = torch.rand(R, C, generator=g) < 0.5
        came = torch.where(here[:, :, None], PLACEMENTS[0].ranks[rank][0], -1).expand(R, C, K).reshape(R * C, K)
        handle = d.make_layout(torch.empty(0, K, dtype=torch.int32))  # it waits for nothing itself
        handle = dataclasses.replace(handle, came=came.int().contiguous())
        assert isinstance(handle, SymmetricLayout)
        with torch.no_grad():
            d.combine(torch.randn(R * C, H, generator=g).to(dtype), handle)
        received = here.sum(1)
        received[rank] = 0
        assert torch.equal(d.rows_by_rank(handle)[1], received)
        assert channel.stored() == [int(n) * H * dtype.itemsize for n in received]


# ---- on GPUs


def without_a_wait(rank: int, ranks: int) -> None:
    ep = EPGroup(timeout=60)
    placement = ExpertPlacement.contiguous(E, ranks)
    d = make_dispatcher("symmetric", ep, placement, "cuda", max_tokens_per_rank=C)
    assert isinstance(d, SymmetricDispatcher)
    ids = ids_of(rank, "padded", 1).cuda()
    x, weights = torch.randn(len(ids), H, device="cuda"), torch.rand(len(ids), K, device="cuda")
    for step in range(2):
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        handle = d.dispatch(x, ids, weights).handle
        table = d.rows_by_rank(handle)
        torch.cuda.set_sync_debug_mode("default")
    gathered, work = ep.all_gather_async(table)
    ep.wait(work, "rows by rank")
    tables = gathered.view(ranks, 2, ranks)
    assert torch.equal(tables[:, 0], tables[:, 1].t()), "what one sends another receives"
    owner = torch.where((ids >= 0) & (ids < E), d.owner[ids.clamp(0, E - 1).long()], -1)
    assert table[0].tolist() == [int((owner == r).any(1).sum()) * (r != rank) for r in range(ranks)]


@pytest.mark.gpu2
def test_rows_by_rank_of_symmetric_make_nobody_wait() -> None:
    run_ranks(without_a_wait, 2, backend="nccl", timeout=120)
