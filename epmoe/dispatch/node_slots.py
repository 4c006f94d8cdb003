"""The step inside a node over symmetric memory: relayed rows are stored straight into the peers' slots, and their sums
come back the same way. Stands behind the network step of `hierarchical` where it is `one_sided`.

Every row relayed has its place on every rank of the node, so there is nothing to place and nothing to wait for on the
host; most places stay empty. G rows relayed, at most C; n ranks of the node, n·C rows received, K experts per token.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from epmoe.comm import EPGroup
from epmoe.comm.beside import keep_for_current_stream
from epmoe.comm.memory import STEPS, Buffer
from epmoe.comm.symmetric import Channel, channel_for
from epmoe.dispatch.exchange import Rows
from epmoe.dispatch.flight import Flight
from epmoe.dispatch.storable import half_bytes
from epmoe.dispatch.wire import RowSpec
from epmoe.ops._triton import use_triton
from epmoe.ops.symmetric_configs import profile_of
from epmoe.ops.symmetric_give_back import give_back_rows
from epmoe.ops.symmetric_send import send_rows
from epmoe.ops.symmetric_slots import Travelling, given_back, travelling, unstorable


@dataclasses.dataclass(frozen=True)
class Slots:
    """`capacity`: C, the same on the node; `relayed_ids [G, K]`, `inside [E]`: where relayed rows go, an index on the
    node or -1; `came [n·C, K]`: the ids that came, known once dispatch has arrived."""

    capacity: int
    relayed_ids: Tensor
    inside: Tensor
    came: Tensor | None = None


def put(rows: Rows, slots: Slots, node: EPGroup, operation: str) -> Flight[Rows]:
    """`rows [G, ·]` to the ranks of the node that own their experts: `[n·C, ·]`, with ids of -1 where none came."""
    plan = travelling(rows.values, rows.ids, rows.weights, None)
    channel = _channel(node, plan, slots, rows.values, operation)
    sent = send_rows(
        channel,
        rows.values,
        slots.relayed_ids,
        slots.inside,
        slots.capacity,
        operation=operation,
        words=rows.ids,
        weights=rows.weights,
        came=slots.came if rows.ids is None else None,
        profile=profile_of(slots.capacity),
    )
    return _taken(channel, Rows(sent.values, sent.weights, sent.words))


def take_back(rows: Rows, slots: Slots, node: EPGroup, operation: str) -> Flight[Rows]:
    """`rows [n·C, ·]` back to their relays, and there their sums over the node in rank order, in fp32: `[G, ·]`."""
    assert slots.came is not None, "rows come back by the handle that dispatch gave"
    words = 0 if rows.weights is None else rows.weights.shape[1] * rows.weights.itemsize // 4
    plan = given_back(rows.values.shape[1], rows.values.dtype, words)
    channel = _channel(node, plan, slots, rows.values, operation)
    values, weights = give_back_rows(
        channel,
        rows.values,
        slots.came,
        slots.relayed_ids,
        slots.inside,
        slots.capacity,
        operation=operation,
        gradients=rows.weights,
        profile=profile_of(slots.capacity),
    )
    return _taken(channel, Rows(values, weights, None))


def slots_buffer(node: EPGroup, capacity: int, rows: RowSpec) -> Buffer:
    """The memory of the slots; it stays, for all layers of the group that need no more."""
    nbytes = Channel.nbytes(node, half_bytes(rows, node.num_ranks, capacity))
    return Buffer("slots inside the node", nbytes, STEPS)


def _taken(channel: Channel, rows: Rows) -> Flight[Rows]:
    if not rows.values.is_cuda:
        return Flight(channel.check, lambda: rows)
    there = torch.cuda.current_stream(rows.values.device).record_event()

    def finish() -> Rows:
        keep_for_current_stream(rows)
        return rows

    return Flight(lambda: torch.cuda.current_stream(rows.values.device).wait_event(there), finish)


def _channel(node: EPGroup, plan: Travelling, slots: Slots, values: Tensor, operation: str) -> Channel:
    if (why := unstorable(values.shape[1], values.dtype, values.device)) is not None:
        raise ValueError(f"{operation}: {why}; set the dispatcher's one_sided to False")
    return channel_for(node, plan.half_bytes(node.num_ranks, slots.capacity), use_triton(values))
