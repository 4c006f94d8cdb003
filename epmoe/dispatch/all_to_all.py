"""`all_to_all`: each token goes once to each rank that owns one of its experts, and comes back as one reduced row.

Sizes vary with the routing, so the ranks first tell each other how many rows come: one small exchange and one wait of
the host per layer, which a recomputation with the same layout does not repeat. Then one message per row: values, router
weights and ids together. On the way back a token's parts are summed in fp32 in rank order.

M tokens on this rank, S rows sent (token × destination), T rows received, R ranks, K experts per token, E experts.

Example, R = 2, experts 0-1 on rank 0 and 2-3 on rank 1, topk_ids = [[0, 1], [1, 3], [2, 3]]:
    token 0 goes to rank 0, token 1 to both, token 2 to rank 1: S = 4
    send_index = [0, 1 | 1, 2]     slot = [[0, -1], [1, 2], [-1, 3]]     rows to send = [2, 2]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from epmoe.comm import EPGroup
from epmoe.dispatch.base import DispatcherCapabilities, Layout
from epmoe.dispatch.exchange import ExchangeDispatcher, Flight, Rows, register_ops


@dataclasses.dataclass(frozen=True)
class AllToAllLayout(Layout):
    """`send_index [S]` int32: the token of each row sent, by destination; `slot [M, R]` int32: where a token's row for
    a rank lies among them, -1 if it has none; `rows [2, R]` int64 on the host: rows sent to and received from each
    rank."""

    send_index: Tensor
    slot: Tensor
    rows: Tensor


def destinations(topk_ids: Tensor, owner: Tensor, num_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where the tokens of `topk_ids [M, K]` go, on the device; ids outside [0, E) go nowhere.

    Returns:
        `send_index [M·R]`, of which the first S are used; `slot [M, R]`; `counts [R, 2]` int64: rows and
        (row, expert) pairs for each rank.
    """
    tokens = topk_ids.shape[0]
    device = topk_ids.device
    valid = (topk_ids >= 0) & (topk_ids < owner.shape[0])
    rank = torch.where(valid, owner[torch.where(valid, topk_ids, 0)], num_ranks).long()  # [M, K]
    pairs = torch.zeros(tokens, num_ranks + 1, dtype=torch.int64, device=device)
    pairs = pairs.scatter_add(1, rank, torch.ones_like(rank))[:, :num_ranks].t()  # [R, M]
    goes = pairs > 0
    position = goes.reshape(-1).cumsum(0).view_as(goes) - 1
    slot = torch.where(goes, position, -1)
    token = torch.arange(tokens, dtype=torch.int32, device=device).expand(num_ranks, tokens)
    # rows that go nowhere write to one spare element behind the list
    target = torch.where(goes, position, num_ranks * tokens)
    send_index = torch.empty(num_ranks * tokens + 1, dtype=torch.int32, device=device)
    send_index.scatter_(0, target.reshape(-1), token.reshape(-1))
    counts = torch.stack([goes.sum(1), pairs.sum(1)], dim=1)
    return send_index[:-1], slot.t().to(torch.int32).contiguous(), counts


@torch.library.custom_op("epmoe::all_to_all_layout", mutates_args=())
def all_to_all_layout(
    topk_ids: Tensor, owner: Tensor, group: str, timeout: float, operation: str
) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """`(send_index [S], slot [M, R], rows [2, R] on the host, T, pairs received)`: one exchange, one wait of
    the host."""
    ep = EPGroup.from_name(group, timeout)
    send_index, slot, counts = destinations(topk_ids, owner, ep.num_ranks)
    one_each = [1] * ep.num_ranks
    incoming, work = ep.all_to_all_async(counts, one_each, one_each)
    ep.wait(work, operation)
    both = ep.to_host(torch.stack([counts, incoming]), operation)  # [2, R, 2]
    rows = both[..., 0].contiguous()
    sent, received = rows.sum(1).tolist()
    return send_index[:sent].clone(), slot, rows, received, int(both[1, :, 1].sum())


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
    capabilities = DispatcherCapabilities(asynchronous=True, host_sync=True, backends=("gloo", "nccl"))

    def make_layout(self, topk_ids: Tensor) -> AllToAllLayout:
        operation = f"layer {self.layer!r}, exchange of row counts"
        send_index, slot, rows, received, pairs = all_to_all_layout(
            topk_ids, self.owner, self.ep.name, self.ep.timeout, operation
        )
        return AllToAllLayout(topk_ids.shape[0], received, pairs, send_index, slot, rows)

    @staticmethod
    def send(rows: Rows, layout: AllToAllLayout, ep: EPGroup, operation: str) -> Flight:
        sent, received = layout.rows.tolist()
        messages, work = ep.all_to_all_async(rows.pack(layout.send_index), sent, received)

        def finish() -> Rows:
            ep.wait(work, operation)
            return rows.unpack(messages)

        return finish

    @staticmethod
    def give_back(rows: Rows, layout: AllToAllLayout, ep: EPGroup, operation: str) -> Flight:
        sent, received = layout.rows.tolist()
        messages, work = ep.all_to_all_async(rows.pack(None), received, sent)

        def finish() -> Rows:
            ep.wait(work, operation)
            return rows.unpack(messages).sum_over_ranks(layout.slot)

        return finish

    @staticmethod
    def pack_layout(layout: AllToAllLayout) -> tuple[list[Tensor], list[int]]:
        return (
            [layout.send_index, layout.slot, layout.rows],
            [layout.num_tokens, layout.num_rows, layout.max_assignments],
        )

    @staticmethod
    def unpack_layout(tensors: Sequence[Tensor], numbers: Sequence[int]) -> AllToAllLayout:
        tokens, received, pairs = numbers
        return AllToAllLayout(tokens, received, pairs, *tensors)

    def wire_bytes(self, handle: Layout, row_bytes: int) -> tuple[int, int]:
        assert isinstance(handle, AllToAllLayout)
        others = torch.arange(self.ep.num_ranks) != self.ep.rank
        sent, received = handle.rows[:, others].sum(1).tolist()
        return sent * row_bytes, received * row_bytes
