"""`hierarchical`: for groups that span nodes. Each token crosses the network once per node that owns one of its
experts, and is passed on there to each rank that does; on the way back the ranks of a node add up first.

    dispatch  x [M,H] ── network ──► rows relayed [G,H] ── inside the node ──► rows [T,H]
    combine   rows [T,H] ── inside the node ──► sums of the node [G,H] ── network ──► sums over nodes [M,H]

Over the network a rank talks to one rank of every other node, of its own local index (`comm.nodes`): an all-to-all of
the whole group whose other parts are empty, which sends nothing there. So nodes of different sizes need no case of
their own, and the communicator is the one that is there. Inside the node is another communicator: one movement's second
step runs beside another's first. On CUDA what lies between the steps runs in a stream of its own, launched with the
first; on CPU it is launched where the movement is waited for, so all ranks wait for their movements in the same order.

Sums are in fp32 and in rank order, first over the ranks of a node, rounded to the rows' dtype for the network, then
over nodes. The same inputs give the same bits; other dispatchers, which add in another order, may give other last bits.
Where rows go back quantized, so does a node's sum: a part that meets others on its node is rounded twice.

Sizes vary with the routing: ranks exchange counts and wait for them once per layer, as `all_to_all` does, then the ids
of the rows to relay, by which each relay knows where to. A layout that is reused needs neither. With one node, or one
rank on each, a step falls away, and what is left moves the rows that `all_to_all` moves.

M tokens on this rank, N nodes, R ranks, n of them on this node; S rows sent over the network (token × node; those of
this node stay here), G relayed, F passed on (row × rank of this node), T received.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epmoe.comm import EPGroup
from epmoe.comm.memory import Buffer, buffer
from epmoe.dispatch.base import DispatcherCapabilities, Layout, Traffic
from epmoe.dispatch.exchange import ExchangeDispatcher, Rows, arrival, register_ops
from epmoe.dispatch.flight import Flight, late
from epmoe.dispatch.node_slots import Slots, put, refusal, slots_buffer, take_back
from epmoe.dispatch.wire import narrowed_buffers, row_bytes
from epmoe.ops.destinations import destinations
from epmoe.ops.pack_rows import pack_rows


class Splits(NamedTuple):
    """Rows by rank: `[R]` each over the network, `[n]` each inside the node."""

    sent: list[int]
    relayed: list[int]
    passed_on: list[int]
    received: list[int]


@dataclasses.dataclass(frozen=True)
class HierarchicalLayout(Layout):
    """`send_index [S]` int32: the token of each row sent; `slot [M, N]` int32: where a token's rows lie among them, -1
    for none; `relay_index [F]` and `relay_slot [G, n]`: the same for the rows relayed, empty without that step;
    `splits [2R + 2n]`: as `Splits` has them one after another, as numbers, or as the int64 host tensor that a compiled
    graph has; `slots`: of rows relayed over symmetric memory, else None."""

    send_index: Tensor
    slot: Tensor
    relay_index: Tensor
    relay_slot: Tensor
    splits: list[int] | Tensor
    slots: Slots | None = None

    def numbers(self, ep: EPGroup) -> Splits:
        """The splits as numbers, by rank."""
        flat = self.splits.tolist() if isinstance(self.splits, Tensor) else self.splits
        ranks, inside = ep.num_ranks, len(flat) // 2 - ep.num_ranks
        ends = [ranks, 2 * ranks, 2 * ranks + inside]
        return Splits(flat[: ends[0]], flat[ends[0] : ends[1]], flat[ends[1] : ends[2]], flat[ends[2] :])


class Tables(NamedTuple):
    """Where experts are, as this rank's routing meets them; on the layer's device.

    `rank_of [E]` int32; `way_to [E]` int32: which of this rank's N ways out leads there, ways in the order of the ranks
    that they lead to; `inside [E]` int32: index on this node, -1 elsewhere; `told [R, largest node + 2]` int64: which
    numbers each rank is told, of (rows, pairs) by rank, the same by way, and a zero: rows for each rank of its node,
    pairs for itself, rows for its node.
    """

    rank_of: Tensor
    way_to: Tensor
    inside: Tensor
    told: Tensor


def tables(owner: Tensor, ep: EPGroup) -> Tables:
    """The tables for experts of `owner [E]`; collective the first time, when the group finds its nodes."""
    nodes, ranks = ep.nodes, ep.num_ranks
    ways = sorted(range(len(nodes.ranks)), key=nodes.entrances[ep.rank].__getitem__)
    way = [ways.index(node) for node, _ in nodes.places]
    inside = [index if rank in nodes.beside(ep.rank) else -1 for rank, (_, index) in enumerate(nodes.places)]
    zero = 2 * (ranks + len(ways))
    told = []
    for rank in range(ranks):
        together = nodes.beside(rank)
        rows = [2 * other for other in together] + [zero] * (nodes.largest - len(together))
        told.append([*rows, 2 * rank + 1, 2 * (ranks + way[rank])])

    def of_expert(by_rank: list[int]) -> Tensor:
        return torch.tensor(by_rank, dtype=torch.int32, device=owner.device)[owner.long()]

    return Tables(owner, of_expert(way), of_expert(inside), torch.tensor(told, device=owner.device))


def exchange_counts(
    topk_ids: Tensor, where: Tables, ep: EPGroup, operation: str, capacity: int = 0
) -> HierarchicalLayout:
    """Ranks tell each other how many rows come and relays where they go on to: two exchanges, one wait of the host.

    Args:
        capacity: of slots for the rows relayed; 0: they go by an all-to-all.
    """
    nodes, ranks = ep.nodes, ep.num_ranks
    (here, index), mine = nodes.places[ep.rank], nodes.beside(ep.rank)

    _, _, by_rank = destinations(topk_ids, where.rank_of, ranks)
    send_index, slot, by_way = destinations(topk_ids, where.way_to, len(nodes.ranks))
    counts = torch.cat([by_rank.view(-1), by_way.view(-1), by_rank.new_zeros(1)])
    both = topk_ids.new_empty((2, *where.told.shape), dtype=torch.int64)  # of ours and of the peers', for one copy
    ours, theirs = both.unbind()
    torch.index_select(counts, 0, where.told.view(-1), out=ours.view(-1))
    _, work = ep.all_to_all_async(ours, out=theirs)
    ep.wait(work, operation)
    to_peers, from_peers = ep.to_host(both, operation)

    splits = Splits([0] * ranks, [0] * ranks, [0] * len(mine), [0] * len(mine))
    for rank in nodes.entrances[ep.rank]:
        splits.sent[rank] = to_peers[rank][-1]
    for source, told in enumerate(from_peers):
        relay = nodes.entrances[source][here]
        splits.received[nodes.places[relay][1]] += told[index]
        if relay == ep.rank:
            splits.relayed[source] = told[-1]
            splits.passed_on[:] = [a + b for a, b in zip(splits.passed_on, told, strict=False)]
    send_index = send_index.narrow(0, 0, sum(splits.sent))
    relayed = topk_ids
    if nodes.two_levels:
        sent_ids = topk_ids.index_select(0, send_index)
        relayed, work = ep.all_to_all_async(sent_ids, splits.sent, splits.relayed)
        ep.wait(work, operation)
    relay_index, relay_slot = topk_ids.new_empty(0), topk_ids.new_empty((0, len(mine)))
    slots = None
    if capacity:
        slots = Slots(capacity, relayed.contiguous(), where.inside)
    elif len(mine) > 1 or len(nodes.ranks) == 1:
        relay_index, relay_slot, _ = destinations(relayed, where.inside, len(mine))
        relay_index = relay_index.narrow(0, 0, sum(splits.passed_on))
    return HierarchicalLayout(
        num_tokens=topk_ids.shape[0],
        num_rows=len(mine) * capacity or sum(splits.received),
        max_assignments=sum(told[-2] for told in from_peers),
        send_index=send_index,
        slot=slot,
        relay_index=relay_index,
        relay_slot=relay_slot,
        splits=[n for part in splits for n in part],
        slots=slots,
    )


@torch.library.custom_op("epmoe::hierarchical_layout", mutates_args=())
def hierarchical_layout(
    topk_ids: Tensor, where: list[Tensor], group: str, timeout: float, operation: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, int]:
    """`exchange_counts` for compiled graphs: `(send_index [S], slot [M, N], relay_index [F], relay_slot [G, n], splits
    [2R + 2n] on the host, T, pairs received)`."""
    made = exchange_counts(topk_ids, Tables(*where), EPGroup.from_name(group, timeout), operation)
    (send_index, slot, relay_index, relay_slot, splits), (_, received, pairs) = HierarchicalDispatcher.pack_layout(made)
    return send_index.clone(), slot, relay_index.clone(), relay_slot, splits, received, pairs


@hierarchical_layout.register_fake
def _(topk_ids, where, group, timeout, operation):  # type: ignore[no-untyped-def]
    ctx = torch.library.get_ctx()
    ep = EPGroup.from_name(group, timeout)
    inside = len(ep.nodes.beside(ep.rank))
    return (
        topk_ids.new_empty(ctx.new_dynamic_size()),
        topk_ids.new_empty((topk_ids.shape[0], len(ep.nodes.ranks))),
        topk_ids.new_empty(ctx.new_dynamic_size()),
        topk_ids.new_empty((ctx.new_dynamic_size(), inside)),
        torch.empty(2 * (ep.num_ranks + inside), dtype=torch.int64, device="cpu"),
        ctx.new_dynamic_size(),
        ctx.new_dynamic_size(),
    )


class LinkBytes(NamedTuple):
    """Bytes that a rank sends and receives in one dispatch: over the network, and inside its node."""

    inter_node: tuple[int, int]
    intra_node: tuple[int, int]


@register_ops
class HierarchicalDispatcher(ExchangeDispatcher):
    """Over the network once per token and node, inside the node once per token and rank; the nodes are `ep.nodes`.

    Making one is collective where the group's nodes or its communicator inside the node are not there yet.

    Attributes:
        one_sided: inside the node rows are stored straight into the peers' memory, in one launch each way without
            counts; needs `max_tokens_per_rank`, peer access inside each node, and rows of a multiple of 16 bytes (on
            CUDA no float64). Every rank has a place for every row that may be relayed to it, so it is for few tokens.
            Set it on all ranks alike, before the first call. With one node it is without effect: `symmetric` is for
            that, and so it is in a compiled graph. Rows can't go back quantized then.
    """

    one_sided: bool = False

    name = "hierarchical"
    capabilities = DispatcherCapabilities(
        asynchronous=True, host_sync=True, backends=("gloo", "nccl"), exact_pairs=True, quantized_back=True
    )

    def __init__(self, ep: EPGroup | None, *args: Any, **kwargs: Any) -> None:
        super().__init__(ep, *args, **kwargs)
        self.tables = tables(self.owner, self.ep)
        if self.ep.nodes.two_levels:
            self.ep.node_group()

    def make_layout(self, topk_ids: Tensor) -> HierarchicalLayout:
        operation = f"layer {self.layer!r}, exchange of row counts"
        if not torch.compiler.is_compiling():
            return exchange_counts(topk_ids, self.tables, self.ep, operation, self._capacity(topk_ids.shape[0]))
        *tensors, received, pairs = hierarchical_layout(
            topk_ids, list(self.tables), self.ep.name, self.ep.timeout, operation
        )
        return HierarchicalLayout(topk_ids.shape[0], received, pairs, *tensors)

    def _stores_inside(self) -> bool:
        if not self.one_sided:
            return False
        nodes = self.ep.nodes
        return nodes.two_levels and len(nodes.beside(self.ep.rank)) > 1

    def row_refusal(self, width: int, dtype: torch.dtype) -> str | None:
        why = refusal(width, dtype, self.owner.device) if self._stores_inside() else None
        return None if why is None else f"layer {self.layer!r}: {why}"

    def _capacity(self, num_tokens: int) -> int:
        """The most rows that any rank of this node can be given to relay, where they have slots there; else 0."""
        nodes, rank = self.ep.nodes, self.ep.rank
        if not self._stores_inside():
            return 0
        most = self.max_tokens_per_rank
        if most is None or num_tokens > most:
            raise ValueError(
                f"{self.where}: {num_tokens} tokens with max_tokens_per_rank={most}: one_sided=True reserves "
                "room for it, so set or raise it, or set one_sided to False"
            )
        relays = collections.Counter(entered[nodes.places[rank][0]] for entered in nodes.entrances)
        return most * max(relays.values())

    @staticmethod
    def arrived(layout: HierarchicalLayout, topk_ids: Tensor) -> HierarchicalLayout:
        if layout.slots is None:
            return layout
        return dataclasses.replace(layout, slots=dataclasses.replace(layout.slots, came=topk_ids))

    @staticmethod
    def send(rows: Rows, layout: HierarchicalLayout, ep: EPGroup, operation: str) -> Flight:
        splits, nodes = layout.numbers(ep), ep.nodes
        if len(nodes.ranks) == 1:
            launched = ep.all_to_all_async(rows.pack(layout.relay_index), splits.passed_on, splits.received)
            return arrival(rows, launched, ep, operation)
        relayed, work = ep.all_to_all_async(rows.pack(layout.send_index), splits.sent, splits.relayed)
        if len(splits.passed_on) == 1:
            return arrival(rows, (relayed, work), ep, operation)
        slots = layout.slots
        if slots is not None:
            _check_wide(rows, operation)
        received = relayed.new_empty((layout.num_rows if slots is None else 0, relayed.shape[1]))

        def pass_on() -> Flight:
            ep.wait(work, f"{operation}, between nodes")
            if slots is not None:
                return put(rows.unpack(relayed), slots, ep.node_group(), f"{operation}, inside the node")
            messages = pack_rows(relayed, None, layout.relay_index)
            launched = ep.node_group().all_to_all_async(messages, splits.passed_on, splits.received, out=received)
            return arrival(rows, launched, ep, f"{operation}, inside the node")

        return onward(pass_on, ep, (relayed, layout))

    @staticmethod
    def give_back(
        rows: Rows, layout: HierarchicalLayout, ep: EPGroup, operation: str, out: Tensor | None = None
    ) -> Flight:
        splits, nodes = layout.numbers(ep), ep.nodes
        if len(nodes.ranks) == 1:
            launched = ep.all_to_all_async(rows.pack(None), splits.received, splits.passed_on)
            return arrival(rows, launched, ep, operation, layout.relay_slot, out)
        if not nodes.two_levels:
            launched = ep.all_to_all_async(rows.pack(None), splits.relayed, splits.sent)
            return arrival(rows, launched, ep, operation, layout.slot, out)
        came = rows.values.new_empty((sum(splits.sent), rows.message_bytes), dtype=torch.uint8)
        slots, inside = layout.slots, f"{operation}, inside the node"
        if len(splits.passed_on) == 1:  # alone here, but the others' network step comes when theirs does
            first = Flight(lambda: None, lambda: rows)
        elif slots is not None:
            _check_wide(rows, operation)
            first = late(lambda: take_back(rows, slots, ep.node_group(), inside))
        else:
            launched = ep.node_group().all_to_all_async(rows.pack(None), splits.received, splits.passed_on)
            first = arrival(rows, launched, ep, inside, layout.relay_slot)

        def send_sums() -> Flight:
            sums = first().narrowed(rows.scheme).pack(None)
            launched = ep.all_to_all_async(sums, splits.relayed, splits.sent, out=came)
            return arrival(rows, launched, ep, f"{operation}, between nodes", layout.slot, out)

        return onward(send_sums, ep, (first, layout))

    @staticmethod
    def pack_layout(layout: HierarchicalLayout) -> tuple[list[Tensor], list[int]]:
        splits = layout.splits
        splits = splits if isinstance(splits, Tensor) else torch.tensor(splits, dtype=torch.int64)
        return (
            [layout.send_index, layout.slot, layout.relay_index, layout.relay_slot, splits],
            [layout.num_tokens, layout.num_rows, layout.max_assignments],
        )

    @staticmethod
    def unpack_layout(tensors: Sequence[Tensor], numbers: Sequence[int]) -> HierarchicalLayout:
        tokens, received, pairs = numbers
        send_index, slot, relay_index, relay_slot, splits = tensors
        return HierarchicalLayout(tokens, received, pairs, send_index, slot, relay_index, relay_slot, splits)

    def traffic(self, num_tokens: int, top_k: int) -> Traffic:
        nodes, rank = self.ep.nodes, self.ep.rank
        inside, received = len(nodes.beside(rank)), num_tokens * self.ep.num_ranks
        pairs = received * min(top_k, self.num_local)
        if not nodes.two_levels:
            return Traffic(num_tokens * min(self.ep.num_ranks, top_k), received, pairs)
        relayed = num_tokens * sum(entered[nodes.places[rank][0]] == rank for entered in nodes.entrances)
        sent = num_tokens * min(len(nodes.ranks), top_k)
        if capacity := self._capacity(num_tokens):
            return Traffic(sent, inside * capacity, pairs, relayed)
        return Traffic(sent, received, pairs, relayed, relayed * min(inside, top_k) if inside > 1 else 0)

    def memory_plan(
        self,
        num_tokens: int,
        width: int,
        dtype: torch.dtype,
        message_bytes: int,
        traffic: Traffic,
        *,
        combine_scheme: str | None = None,
    ) -> list[Buffer]:
        nodes = self.ep.nodes
        plan = super().memory_plan(num_tokens, width, dtype, message_bytes, traffic, combine_scheme=combine_scheme)
        if not nodes.two_levels:
            return plan
        byte, inside = torch.uint8, len(nodes.beside(self.ep.rank))
        back = row_bytes(width, dtype, 1, combine_scheme=combine_scheme).combine
        buffers = [buffer("places", (num_tokens, len(nodes.ranks)), torch.int32), *plan[1:]]
        if inside > 1:
            buffers += [
                buffer("places inside the node", (traffic.relayed, inside), torch.int32),
                buffer("rows relayed", (traffic.relayed, message_bytes), byte, "dispatch"),
                buffer("rows passed on", (traffic.passed_on, message_bytes), byte, "dispatch"),
                buffer("rows that came back inside the node", (traffic.passed_on, back), byte, "combine", "sum"),
                buffer("sums of the node", (traffic.relayed, width), dtype, "combine", "sum"),
            ]
            if combine_scheme is not None:
                relayed = narrowed_buffers("sums of the node", traffic.relayed, width, combine_scheme, "combine", "sum")
                buffers += [*relayed, buffer("sums sent on", (traffic.relayed, back), byte, "combine", "sum")]
            if capacity := self._capacity(num_tokens):
                buffers.append(slots_buffer(self.ep.node_group(), capacity, message_bytes, width * dtype.itemsize))
        return buffers

    def wire_bytes(self, handle: Layout, row_bytes: int) -> tuple[int, int]:
        (sent, received), (passed_on, came) = self.link_bytes(handle, row_bytes)
        return sent + passed_on, received + came

    def link_bytes(self, handle: Layout, row_bytes: int) -> LinkBytes:
        """The same as `wire_bytes`, by level: Σ over tokens of the distinct remote nodes that own their experts, and
        what is passed on or sent inside the node."""
        assert isinstance(handle, HierarchicalLayout)
        rank, (_, index) = self.ep.rank, self.ep.nodes.places[self.ep.rank]
        own = (rank, rank, index, index)
        sent, relayed, passed_on, received = (
            (sum(rows) - rows[at]) * row_bytes for rows, at in zip(handle.numbers(self.ep), own, strict=True)
        )
        return LinkBytes((sent, relayed), (passed_on, received))


def _check_wide(rows: Rows, operation: str) -> None:
    if rows.scheme is not None:
        raise ValueError(
            f"{operation}: rows quantized on the way back (scheme={rows.scheme!r}) with one_sided=True: leave "
            "combine_scheme and grad_scheme unset, or set one_sided to False"
        )


def onward(then: Callable[[], Flight], ep: EPGroup, keep: object) -> Flight:
    """A movement whose first step is launched; `then` waits for it and launches the second, into memory that the
    current stream owns.

    Args:
        keep: what the step between reads. In the other stream the allocator does not know of it, so it lives until the
            current stream has waited.
    """
    if ep.device.type == "cuda":
        stream = ep.beside.stream
        stream.wait_stream(torch.cuda.current_stream(ep.device))
        with torch.cuda.stream(stream):
            second = then()
        return Flight(second.arrive, lambda: (keep, second())[1])
    launched: list[Flight] = []

    def arrive() -> None:
        if not launched:
            launched.append(then())
        launched[0].arrive()

    return Flight(arrive, lambda: launched[0]())
