"""Bench `dispatch_combine`: rows to the ranks that own their experts and one row each back, nothing computed there.

From `topk_ids` to rows that experts can read, and from rows as experts give them to the sums `[M, H]`; forward only.
The peer is NCCL (gloo on CPU) moving the same bytes there and back with sizes known beforehand: no packing, no sum, no
counts. M tokens on this rank, T rows received, H width.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

from epmoe.bench import problem as problems
from epmoe.bench.problem import Tokens
from epmoe.bench.records import Record, make_record
from epmoe.bench.session import Session
from epmoe.bench.timing import Call
from epmoe.dispatch import Dispatcher, ExpertInput, make_dispatcher
from epmoe.dispatch.exchange import Rows

PEER = "nccl_all_to_all"


@dataclasses.dataclass(frozen=True)
class DispatchCombineCase:
    """`tokens` is per rank. `profile` says which kind of transport the dispatcher uses: `collective`."""

    shape: str
    dispatcher: str
    profile: str
    scheme: str
    ranks: int
    tokens: int
    routing: str = "uniform"

    def __post_init__(self) -> None:
        problems.check_names(self.shape, self.routing, dispatcher=self.dispatcher)
        if self.profile != "collective" or self.scheme != "bf16":
            raise ValueError(f"profile={self.profile!r}, scheme={self.scheme!r}: must be collective and bf16")
        if self.ranks < 2:
            raise ValueError(f"ranks={self.ranks}: must be at least 2, on one nothing moves")


def measure_dispatch_combine(case: DispatchCombineCase, session: Session) -> Record:
    """One record: `median_us` of the round trip and `dispatch_us` of dispatch alone; bytes and GB/s of the round trip,
    per direction and without rows to oneself. Floor: those bytes at the link's ceiling.

    Raises:
        RuntimeError: rows do not come back as they should.
    """
    assert case.ranks == session.ep.num_ranks
    tokens = session.tokens(case.shape, case.tokens, case.routing)
    dispatcher = make_dispatcher(case.dispatcher, session.ep, tokens.placement, session.device, layer="bench")
    x, ids, p = tokens.x.detach(), tokens.topk_ids, tokens.topk_weights.detach()

    rows = dispatcher.dispatch(x, ids, p)
    _check_round_trip(dispatcher, rows, tokens)
    from_experts = rows.x.contiguous()  # experts give dense rows
    wires, _ = problems.of_busiest_rank(problems.wire_bytes(dispatcher, rows, tokens, "infer"), 0, session.ep)
    peer = _bare_exchange(dispatcher, rows, tokens)
    del rows

    times = session.time(
        {
            "epmoe": lambda: dispatcher.combine(from_experts, dispatcher.dispatch(x, ids, p).handle),
            "dispatch": lambda: dispatcher.dispatch(x, ids, p),
            PEER: peer,
        }
    )
    wire = sum(wires.values())
    named = dataclasses.replace(case, dispatcher=dispatcher.name)
    return make_record(
        "dispatch_combine",
        dataclasses.asdict(named),
        median_us=times["epmoe"],
        floor_us=session.ceilings.wire_us(wire),
        gb_s=wire / times["epmoe"] * 1e-3,
        wire_bytes=wire,
        wire_bytes_by_step=wires,
        dispatch_us=times["dispatch"],
        peers={PEER: times[PEER]},
        device=session.device,
    )


def _check_round_trip(dispatcher: Dispatcher, rows: ExpertInput, tokens: Tokens) -> None:
    """Rows sent back as they came must give each token times the number of ranks it went to; where a rank has no expert
    for a row (`all_gather`) it gives zeros, as experts do."""
    ep, ids = tokens.ep, rows.topk_ids
    valid = (ids >= 0) & (ids < rows.expert_map.shape[0])
    wanted = (valid & (rows.expert_map[torch.where(valid, ids, 0).long()] >= 0)).any(1)
    back = dispatcher.combine(torch.where(wanted[:, None], rows.x, 0), rows.handle)
    owners = dispatcher.owner[tokens.topk_ids.long()]
    visited = torch.stack([(owners == rank).any(1) for rank in range(ep.num_ranks)]).sum(0)
    expected = tokens.x.detach() * visited[:, None]
    problems.check_agreement((back,), (expected,), ("round trip",), "the tokens themselves", ep)


def _bare_exchange(dispatcher: Dispatcher, rows: ExpertInput, tokens: Tokens) -> Call:
    """The bytes of `rows` there and of one row each back by `all_to_all_single`, from dense buffers of bytes."""
    ep, others = tokens.ep, tokens.ep.num_ranks - 1
    sent, received = _rows_by_peer(dispatcher, rows, ep.rank, others)
    buffers = []
    for message in (
        Rows(tokens.x, tokens.topk_weights, tokens.topk_ids).message_bytes,
        Rows(tokens.x, None, None).message_bytes,
    ):
        out, back = [n * message for n in sent], [n * message for n in received]
        buffers.append((out, back))
    there, home = ([torch.zeros(sum(sizes), dtype=torch.uint8, device=ep.device) for sizes in pair] for pair in buffers)
    group = ep.process_group

    def exchange() -> None:
        (out, arriving), (out_home, arriving_home) = buffers
        dist.all_to_all_single(there[1], there[0], arriving, out, group=group)
        dist.all_to_all_single(home[0], home[1], out_home, arriving_home, group=group)

    return exchange


def _rows_by_peer(dispatcher: Dispatcher, rows: ExpertInput, rank: int, others: int) -> tuple[list[int], list[int]]:
    """Rows sent to and received from each rank, none to oneself. Where the layout does not list them they are equal."""
    listed = getattr(rows.handle, "rows", None)
    if listed is not None:
        sent, received = listed.tolist()
    else:
        sent, received = ([n // others] * (others + 1) for n in dispatcher.wire_bytes(rows.handle, 1))
    sent[rank] = received[rank] = 0
    return sent, received
