"""`all_to_all`: each token goes once to each rank that owns one of its experts, and comes back as one reduced row.

Sizes vary with the routing, so the ranks first tell each other how many rows come: one small exchange and one wait of
the host per layer, which a recomputation with the same layout does not repeat. Then one message per row: values, router
weights and ids together. On the way back a token's parts are summed in fp32 in rank order.

M tokens on this rank, S rows sent (token × destination), T rows received, R ranks. `ops.destinations` has an example.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from epmoe.comm import EPGroup
from epmoe.dispatch.base import DispatcherCapabilities, Traffic
from epmoe.dispatch.exchange import ExchangeDispatcher, Flight, Rows, arrival, register_ops
from epmoe.dispatch.inputs import Layout
from epmoe.ops.destinations import destinations

TOKENS_AT = 32  # the bit of a count of rows where a rank's number of tokens begins, if it travels along


@dataclasses.dataclass(frozen=True)
class AllToAllLayout(Layout):
    """`send_index [S]` int32: the token of each row sent, by destination; `slot [M, R]` int32: where a token's row for
    a rank lies among them, -1 if it has none; `splits [2, R]`: rows sent to and received from each rank, as numbers, or
    as the int64 host tensor that a compiled graph has; `most_rows`: tokens of the rank that has most, where known."""

    send_index: Tensor
    slot: Tensor
    splits: list[list[int]] | Tensor
    most_rows: int | None = None

    @property
    def rows(self) -> Tensor:
        """`splits` as a tensor."""
        return (
            self.splits
            if isinstance(self.splits, Tensor)
            else torch.tensor(self.splits, dtype=torch.int64, device="cpu")
        )

    @property
    def numbers(self) -> list[list[int]]:
        """`splits` as numbers."""
        return self.splits.tolist() if isinstance(self.splits, Tensor) else self.splits


def exchange_counts(topk_ids: Tensor, owner: Tensor, ep: EPGroup, operation: str) -> AllToAllLayout:
    """Ranks tell each other how many rows come: one exchange, one wait of the host."""
    both = topk_ids.new_empty((2, ep.num_ranks, 2), dtype=torch.int64)  # of ours and of the peers', for one copy
    ours, theirs = both.unbind()
    send_index, slot, _ = destinations(topk_ids, owner, ep.num_ranks, counts=ours)
    with_tokens = ep.goes_by_copies()
    if with_tokens:  # every rank's, beside its rows
        ours[:, 0] += topk_ids.shape[0] << TOKENS_AT
    _, work = ep.all_to_all_async(ours, out=theirs)
    ep.wait(work, operation)
    to_peers, from_peers = ep.to_host(both, operation)
    sent, received = ([rows & (1 << TOKENS_AT) - 1 for rows, _ in counts] for counts in (to_peers, from_peers))
    return AllToAllLayout(
        num_tokens=topk_ids.shape[0],
        num_rows=sum(received),
        max_assignments=sum(pairs for _, pairs in from_peers),
        send_index=send_index.narrow(0, 0, sum(sent)),
        slot=slot,
        splits=[sent, received],
        most_rows=max(rows >> TOKENS_AT for rows, _ in from_peers) if with_tokens else None,
    )


@torch.library.custom_op("epmoe::all_to_all_layout", mutates_args=())
def all_to_all_layout(
    topk_ids: Tensor, owner: Tensor, group: str, timeout: float, operation: str
) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """`exchange_counts` for compiled graphs: `(send_index [S], slot [M, R], splits [2, R] on the host, T, pairs
    received)`."""
    layout = exchange_counts(topk_ids, owner, EPGroup.from_name(group, timeout), operation)
    return layout.send_index.clone(), layout.slot, layout.rows, layout.num_rows, layout.max_assignments


@all_to_all_layout.register_fake
def _(topk_ids, owner, group, timeout, operation):  # type: ignore[no-untyped-def]
    ctx = torch.library.get_ctx()
    ranks = EPGroup.from_name(group, timeout).num_ranks
    send_index = topk_ids.new_empty(ctx.new_dynamic_size())
    slot = topk_ids.new_empty((topk_ids.shape[0], ranks))
    rows = torch.empty((2, ranks), dtype=torch.int64, device="cpu")
    return send_index, slot, rows, ctx.new_dynamic_size(), ctx.new_dynamic_size()


@register_ops
class AllToAllDispatcher(ExchangeDispatcher):
    """Variable-size all-to-all each way, after one exchange of counts."""

    name = "all_to_all"
    layout_type = AllToAllLayout
    copies = True
    capabilities = DispatcherCapabilities(
        asynchronous=True, host_sync=True, backends=("gloo", "nccl"), exact_pairs=True, quantized_back=True
    )

    def make_layout(self, topk_ids: Tensor) -> AllToAllLayout:
        operation = f"layer {self.layer!r}, exchange of row counts"
        if not torch.compiler.is_compiling():
            return exchange_counts(topk_ids, self.owner, self.ep, operation)
        send_index, slot, splits, received, pairs = all_to_all_layout(
            topk_ids, self.owner, self.ep.name, self.ep.timeout, operation
        )
        return AllToAllLayout(topk_ids.shape[0], received, pairs, send_index, slot, splits)

    @staticmethod
    def send(rows: Rows, layout: AllToAllLayout, ep: EPGroup, operation: str) -> Flight:
        sent, received = layout.numbers
        messages = rows.pack(layout.send_index)
        return arrival(rows, ep.all_to_all_async(messages, sent, received, most_rows=layout.most_rows), ep, operation)

    @staticmethod
    def give_back(rows: Rows, layout: AllToAllLayout, ep: EPGroup, operation: str, out: Tensor | None = None) -> Flight:
        sent, received = layout.numbers
        launched = ep.all_to_all_async(rows.pack(None), received, sent, most_rows=layout.most_rows)
        return arrival(rows, launched, ep, operation, layout.slot, out)

    @staticmethod
    def pack_layout(layout: AllToAllLayout) -> tuple[list[Tensor], list[int]]:
        return (
            [layout.send_index, layout.slot, layout.rows],
            [layout.num_tokens, layout.num_rows, layout.max_assignments],
        )

    @staticmethod
    def unpack_layout(tensors: Sequence[Tensor], numbers: Sequence[int]) -> AllToAllLayout:
        tokens, received, pairs = numbers
        send_index, slot, splits = tensors
        return AllToAllLayout(tokens, received, pairs, send_index, slot, splits)

    def traffic(self, num_tokens: int, top_k: int) -> Traffic:
        rows = num_tokens * self.ep.num_ranks  # all of every rank's tokens come here
        return Traffic(num_tokens * min(self.ep.num_ranks, top_k), rows, rows * min(top_k, self.num_local))

    def rows_by_rank(self, handle: Layout) -> Tensor:
        assert isinstance(handle, AllToAllLayout)
        return self.but_for_itself(torch.tensor(handle.numbers, device="cpu"))
