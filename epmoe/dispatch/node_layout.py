"""Who sends what to whom where tokens go by nodes: rows over the network to a relay, and on from there inside the node.
Stands before the movements of `hierarchical`, which go by it.

    topk_ids ── counts to every rank ──► sizes of both steps ── ids of rows to relay ──► where relays pass them on to

M tokens on this rank, N nodes, R ranks, n of them on this node; S rows sent over the network, G relayed, F passed on, T
received; E experts, K of them per token.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from epmoe.comm import EPGroup
from epmoe.dispatch.inputs import Layout
from epmoe.dispatch.node_slots import Slots
from epmoe.ops.destinations import destinations


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

    @property
    def splits_on_host(self) -> Tensor:
        """`splits` as a tensor."""
        return (
            self.splits
            if isinstance(self.splits, Tensor)
            else torch.tensor(self.splits, dtype=torch.int64, device="cpu")
        )

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
    indices = made.send_index.clone(), made.slot, made.relay_index.clone(), made.relay_slot
    return *indices, made.splits_on_host, made.num_rows, made.max_assignments


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
