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
from epmoe.comm.memory import Buffer, Step, buffer
from epmoe.comm.symmetric import agreed, unreachable
from epmoe.dispatch.base import DispatcherCapabilities, Traffic
from epmoe.dispatch.exchange import ExchangeDispatcher, Rows, arrival, register_ops
from epmoe.dispatch.flight import Flight, late
from epmoe.dispatch.inputs import Layout
from epmoe.dispatch.node_layout import HierarchicalLayout, exchange_counts, hierarchical_layout, tables
from epmoe.dispatch.node_slots import put, slots_buffer, take_back
from epmoe.dispatch.storable import refusal_there_and_back
from epmoe.dispatch.wire import RowSpec, narrowed_buffers
from epmoe.ops.pack_rows import pack_rows


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
            CUDA no float64), which can't go back quantized; a `ValueError` says what is missing. Every rank has a place
            for every row that may be relayed to it, so it is for few tokens. Set it on all ranks together, where the
            dispatcher was not told what `rows` will move before a `MoEKernel` is made, which knows. With one node it is
            without effect: `symmetric` is for that, and so it is in a compiled graph.
    """

    _one_sided = False

    name = "hierarchical"
    layout_type = HierarchicalLayout
    capabilities = DispatcherCapabilities(
        asynchronous=True, host_sync=True, backends=("gloo", "nccl"), exact_pairs=True, quantized_back=True
    )

    def __init__(self, ep: EPGroup | None, *args: Any, **kwargs: Any) -> None:
        super().__init__(ep, *args, **kwargs)
        self.tables = tables(self.owner, self.ep)
        if self.ep.nodes.two_levels:
            self.ep.node_group()

    @property
    def one_sided(self) -> bool:
        return self._one_sided

    @one_sided.setter
    def one_sided(self, value: bool) -> None:
        if value and self.ep.nodes.two_levels:
            if self.max_tokens_per_rank is None:
                raise ValueError(
                    f"layer {self.layer!r}: one_sided=True reserves room for max_tokens_per_rank: set it, or leave "
                    "one_sided unset"
                )
            node = self.ep.node_group()
            blind = unreachable(node) if node.num_ranks > 1 else None
            if (why := agreed(self.ep, blind or "")) != "":
                raise ValueError(f"layer {self.layer!r}: one_sided=True: {why}; leave it unset")
            if self.rows is not None and (refused := self._unstorable(self.rows)) is not None:
                raise ValueError(refused)
        self._one_sided = value

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

    def row_refusal(self, rows: RowSpec) -> str | None:
        return self._unstorable(rows) if self.one_sided and self.ep.nodes.two_levels else None

    def _unstorable(self, rows: RowSpec) -> str | None:
        # of the largest node, also on a rank that stores nothing: all ranks refuse alike
        why = refusal_there_and_back(rows, self.ep.nodes.largest, self._most_relayed(), self.owner.device)
        return None if why is None else f"layer {self.layer!r}: {why}; set the dispatcher's one_sided to False"

    def _most_relayed(self, node: int | None = None) -> int:
        """The most rows that any rank, or any of one node, can be given to relay."""
        assert self.max_tokens_per_rank is not None, "one_sided asks for it"
        relays = collections.Counter(
            relay for entered in self.ep.nodes.entrances for n, relay in enumerate(entered) if node in (None, n)
        )
        return self.max_tokens_per_rank * max(relays.values())

    def _capacity(self, num_tokens: int) -> int:
        """The most rows that any rank of this node can be given to relay, where they have slots there; else 0."""
        if not self._stores_inside():
            return 0
        most = self.max_tokens_per_rank
        assert most is not None, "one_sided asks for it"
        if num_tokens > most:
            raise ValueError(
                f"{self.where}: {num_tokens} tokens with max_tokens_per_rank={most}: one_sided=True reserves "
                "room for it, so raise it, or set one_sided to False"
            )
        return self._most_relayed(self.ep.nodes.places[self.ep.rank][0])

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
        return (
            [layout.send_index, layout.slot, layout.relay_index, layout.relay_slot, layout.splits_on_host],
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

    def memory_plan(self, num_tokens: int, rows: RowSpec, traffic: Traffic, *, reduced: bool = False) -> list[Buffer]:
        nodes = self.ep.nodes
        plan = super().memory_plan(num_tokens, rows, traffic, reduced=reduced)
        if not nodes.two_levels:
            return plan
        byte, inside, width = torch.uint8, len(nodes.beside(self.ep.rank)), rows.width
        message, back, *_ = rows.nbytes()
        scheme, capacity = rows.combine_scheme, self._capacity(num_tokens)
        held: dict[str, tuple[Step, ...]] = {}
        # the second step back is launched on CUDA beside what the first began with, on CPU when waited for
        if scheme is not None and self.ep.device.type == "cuda" and inside > 1:
            held = {"reduced rows": ("reduce", "combine", "sum")}
        elif scheme is not None and self.ep.device.type == "cpu" and inside == 1:
            held = {"reduced rows sent back": ("sum",)}
        buffers = [buffer("places", (num_tokens, len(nodes.ranks)), torch.int32)]
        buffers += [b._replace(steps=held.get(b.name, b.steps)) for b in plan[1:]]
        if inside == 1:
            return buffers
        # quantized ones are made once what was sent inside the node has been let go of; slots hold them to the end
        sums: tuple[Step, ...] = ("sum",) if scheme is not None else ("combine", "sum") if capacity else ("combine",)
        buffers += [
            buffer("places inside the node", (traffic.relayed, inside), torch.int32),
            buffer("rows relayed", (traffic.relayed, message), byte, "dispatch"),
            buffer("rows passed on", (traffic.passed_on, message), byte, "dispatch"),
            buffer("rows that came back inside the node", (traffic.passed_on, back), byte, "combine", "sum"),
            buffer("sums of the node", (traffic.relayed, width), rows.dtype, *sums),
        ]
        if scheme is not None:
            buffers += narrowed_buffers("sums of the node", traffic.relayed, width, scheme, "sum")
        if capacity:
            buffers.append(slots_buffer(self.ep.node_group(), capacity, rows))
        return buffers

    def rows_by_rank(self, handle: Layout) -> Tensor:
        assert isinstance(handle, HierarchicalLayout)
        splits = handle.numbers(self.ep)
        rows = torch.tensor([splits.sent, splits.relayed], device="cpu")
        rows[:, list(self.ep.nodes.beside(self.ep.rank))] += torch.tensor(
            [splits.passed_on, splits.received], device="cpu"
        )
        return self.but_for_itself(rows)

    def link_bytes(self, handle: Layout, row_bytes: int) -> LinkBytes:
        """What `wire_bytes` adds up, by level: Σ over tokens of the distinct remote nodes that own their experts, and
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
