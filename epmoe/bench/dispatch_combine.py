"""Bench `dispatch_combine`: rows to the ranks that own their experts and one row each back, nothing computed there.

From `topk_ids` to rows that experts can read, and from rows as experts give them, one per (row, expert) pair, to the
weighted sums `[M, H]`; forward only. With a scheme rows are quantized on the way out, which is part of the time, and
come back in bf16. `symmetric` is timed in a CUDA graph of several round trips, as a decoding step holds those of its
layers, and so is its peer.

The peer is NCCL (gloo on CPU) moving the same bytes there and back with sizes known beforehand: no packing, no sum, no
counts. M tokens on this rank, T rows received, H width.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor

from epmoe.bench import problem as problems
from epmoe.bench.problem import Tokens
from epmoe.bench.records import Record, make_record
from epmoe.bench.session import Session
from epmoe.bench.timing import Call, repeated
from epmoe.dispatch import Dispatcher, ExpertInput, make_dispatcher
from epmoe.dispatch.exchange import Extras, Rows
from epmoe.dispatch.reduce import ExpertOutput, WeightAndReduce
from epmoe.dispatch.symmetric import SymmetricDispatcher
from epmoe.ops.align import align_rows
from epmoe.quant.rows import ROW_SCHEMES, dequantize_rows, quantize_rows

PEER = "nccl_all_to_all"


SCHEMES = ("bf16", *ROW_SCHEMES)
PROFILES = ("auto", "collective", "latency", "throughput")


@dataclasses.dataclass(frozen=True)
class DispatchCombineCase:
    """`tokens` is per rank. `profile` says which kind of transport the dispatcher uses: `collective`, or the profile of
    `symmetric` for so many tokens, `latency` or `throughput`; `auto` is what the dispatcher says."""

    shape: str
    dispatcher: str
    profile: str
    scheme: str
    ranks: int
    tokens: int
    routing: str = "uniform"

    def __post_init__(self) -> None:
        problems.check_names(self.shape, self.routing, dispatcher=self.dispatcher, ranks=self.ranks)
        for field, names in (("profile", PROFILES), ("scheme", SCHEMES)):
            if getattr(self, field) not in names:
                raise ValueError(f"{field}={getattr(self, field)!r}: must be {', '.join(names)}")
        if self.ranks < 2:
            raise ValueError(f"ranks={self.ranks}: must be at least 2, on one nothing moves")


def measure_dispatch_combine(case: DispatchCombineCase, session: Session) -> Record:
    """One record: `median_us` of the round trip and `dispatch_us` of dispatch alone; bytes and GB/s of the round trip,
    per direction and without rows to oneself, and `problem.link_figures`. Floor: those bytes at the link's ceiling.

    Raises:
        RuntimeError: rows do not come back as they should.
    """
    assert case.ranks == session.ep.num_ranks
    tokens = session.tokens(case.shape, case.tokens, case.routing)
    dispatcher = make_dispatcher(
        case.dispatcher,
        session.ep,
        tokens.placement,
        session.device,
        layer="bench",
        max_tokens_per_rank=case.tokens,
    )
    profile = getattr(dispatcher, "profile", "collective")
    if case.profile not in ("auto", profile):
        what = f"dispatcher={dispatcher.name!r} with {case.tokens} tokens is {profile}"
        raise ValueError(f"profile={case.profile!r}: {what}")
    x, ids, p = tokens.x.detach(), tokens.topk_ids, tokens.topk_weights.detach()

    def dispatch() -> ExpertInput:
        if case.scheme == "bf16":
            return dispatcher.dispatch(x, ids, p)
        if isinstance(dispatcher, SymmetricDispatcher):
            return dispatcher.dispatch_async(x, ids, p, scheme=case.scheme).wait()
        return dispatcher.dispatch(quantize_rows(x, case.scheme), ids, p)

    rows = dispatch()
    sent = x if case.scheme == "bf16" else dequantize_rows(quantize_rows(x, case.scheme), x.dtype)
    _check_round_trip(dispatcher, rows, sent, tokens)
    output = _from_experts(dispatcher, rows, x)
    messages = _messages(case.scheme, tokens)
    mine = {step: max(dispatcher.wire_bytes(rows.handle, message)) for step, message in messages.items()}
    wires, _ = problems.of_busiest_rank(mine, 0, session.ep)
    peer = _bare_exchange(dispatcher, rows, tokens, tuple(messages.values()))
    graph = session.device.type == "cuda" and isinstance(dispatcher, SymmetricDispatcher)
    turns = max(1, min(20, 8192 // case.tokens)) if graph else 1
    calls: dict[str, Call] = {
        "epmoe": lambda: dispatcher.combine(output, dispatch().handle),
        "dispatch": dispatch,
        PEER: peer,
    }
    several = {name: repeated(call, turns) for name, call in calls.items()}
    times = {name: time / turns for name, time in session.time(several, graph=graph).items()}
    wire = sum(wires.values())
    link = problems.link_figures(dispatcher, rows, messages, times["epmoe"], session.ceilings)
    named = dataclasses.replace(case, dispatcher=dispatcher.name, profile=profile)
    return make_record(
        "dispatch_combine",
        dataclasses.asdict(named),
        median_us=times["epmoe"],
        floor_us=session.ceilings.wire_us(wire),
        gb_s=wire / times["epmoe"] * 1e-3,
        wire_bytes=wire,
        wire_bytes_by_step=wires,
        dispatch_us=times["dispatch"],
        **link,
        peers={PEER: times[PEER]},
        device=session.device,
    )


def _from_experts(dispatcher: Dispatcher, rows: ExpertInput, x: Tensor) -> ExpertOutput:
    """Rows in expert order as experts would give them, to be weighted and summed by combine."""
    row_index, _, slot = align_rows(rows.topk_ids, rows.expert_map, rows.num_local, rows.max_assignments)
    pairs = torch.randn(int((row_index >= 0).sum()), x.shape[1], device=x.device).to(x.dtype)
    strategy: WeightAndReduce = "delegate" if dispatcher.capabilities.reduces else "contiguous"
    return ExpertOutput(pairs, strategy, slot, rows.topk_weights)


def _messages(scheme: str, tokens: Tokens) -> dict[str, int]:
    """Bytes of one row's message in each step."""
    x, ids, p = tokens.x.detach(), tokens.topk_ids, tokens.topk_weights
    values, words, _ = Extras.join(ids, None, x if scheme == "bf16" else quantize_rows(x, scheme))
    return {"dispatch": Rows(values, p, words).message_bytes, "combine": Rows(x, None, None).message_bytes}


def _check_round_trip(dispatcher: Dispatcher, rows: ExpertInput, sent: Tensor, tokens: Tokens) -> None:
    """Rows sent back as they came must give each token times the number of ranks it went to; where a rank has no expert
    for a row (`all_gather`) it gives zeros, as experts do."""
    ep, ids = tokens.ep, rows.topk_ids
    valid = (ids >= 0) & (ids < rows.expert_map.shape[0])
    wanted = (valid & (rows.expert_map[torch.where(valid, ids, 0).long()] >= 0)).any(1)
    back = dispatcher.combine(torch.where(wanted[:, None], rows.dequantized(sent.dtype).x, 0), rows.handle)
    owners = dispatcher.owner[tokens.topk_ids.long()]
    visited = torch.stack([(owners == rank).any(1) for rank in range(ep.num_ranks)]).sum(0)
    expected = sent * visited[:, None]
    problems.check_agreement((back,), (expected,), ("round trip",), "the tokens themselves", ep)


def _bare_exchange(dispatcher: Dispatcher, rows: ExpertInput, tokens: Tokens, messages: tuple[int, ...]) -> Call:
    """The bytes of `rows` there and of one row each back, `messages` a row, by `all_to_all_single`, densely."""
    ep = tokens.ep
    sent, received = _rows_by_peer(dispatcher, rows, tokens)
    buffers = []
    for message in messages:
        out, back = [n * message for n in sent], [n * message for n in received]
        buffers.append((out, back))
    there, home = ([torch.zeros(sum(sizes), dtype=torch.uint8, device=ep.device) for sizes in pair] for pair in buffers)
    group = ep.process_group

    def exchange() -> None:
        (out, arriving), (out_home, arriving_home) = buffers
        dist.all_to_all_single(there[1], there[0], arriving, out, group=group)
        dist.all_to_all_single(home[0], home[1], out_home, arriving_home, group=group)

    return exchange


def _rows_by_peer(dispatcher: Dispatcher, rows: ExpertInput, tokens: Tokens) -> tuple[list[int], list[int]]:
    """Rows sent to and received from each rank, none to oneself: a token's once to each rank that owns an expert of it,
    or all to all, which shows in how many the dispatcher counts; collective."""
    ep, ids = tokens.ep, tokens.topk_ids
    owners = dispatcher.owner[ids.long()]
    sent = torch.stack([(owners == r).any(1).sum() for r in range(ep.num_ranks)])
    sent[ep.rank] = 0
    counted = dispatcher.wire_bytes(rows.handle, 1)[0]
    if int(sent.sum()) != counted:
        sent.fill_(counted // (ep.num_ranks - 1))[ep.rank] = 0
    everyone = [torch.empty_like(sent) for _ in range(ep.num_ranks)]
    dist.all_gather(everyone, sent, group=ep.process_group)
    return sent.tolist(), torch.stack(everyone)[:, ep.rank].tolist()
