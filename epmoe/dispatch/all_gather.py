"""`all_gather`: every rank gets every token, runs its own experts on them, and gets the sums of its own tokens back.

The number of bytes does not depend on the routing, and a token reaches a rank even if no expert there wants it: right
for few tokens, small groups and K near R; `all_to_all` moves less otherwise. The way back is a reduce-scatter done as
an equal all-to-all whose parts are summed in fp32 in rank order, so the result does not depend on the library's
algorithm.

M tokens on this rank, C = the largest M of any rank (shorter ranks are padded with rows that no expert wants), T = R·C.
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


@dataclasses.dataclass(frozen=True)
class AllGatherLayout(Layout):
    """`capacity` is C; `send_index [C]` are this rank's tokens and then numbers that no token has; `slot [M, R]` where
    each token's parts land."""

    capacity: int
    send_index: Tensor
    slot: Tensor


def exchange_capacity(topk_ids: Tensor, ep: EPGroup, operation: str) -> int:
    """The largest number of tokens on any rank: one exchange, and one wait of the host for the device."""
    tokens = torch.full((1,), topk_ids.shape[0], dtype=torch.int64, device=topk_ids.device)
    counts, work = ep.all_gather_async(tokens)
    ep.wait(work, operation)
    return max(ep.to_host(counts, operation))


@torch.library.custom_op("epmoe::all_gather_capacity", mutates_args=())
def all_gather_capacity(topk_ids: Tensor, group: str, timeout: float, operation: str) -> int:
    """`exchange_capacity` for compiled graphs."""
    return exchange_capacity(topk_ids, EPGroup.from_name(group, timeout), operation)


@all_gather_capacity.register_fake
def _(topk_ids, group, timeout, operation):  # type: ignore[no-untyped-def]
    return torch.library.get_ctx().new_dynamic_size()


@register_ops
class AllGatherDispatcher(ExchangeDispatcher):
    """All-gather out, reduce-scatter back; one count exchange per dispatch."""

    name = "all_gather"
    layout_type = AllGatherLayout
    capabilities = DispatcherCapabilities(
        asynchronous=True, host_sync=True, backends=("gloo", "nccl"), quantized_back=True
    )

    def make_layout(self, topk_ids: Tensor) -> AllGatherLayout:
        tokens, k = topk_ids.shape
        ranks = self.ep.num_ranks
        operation = f"layer {self.layer!r}, exchange of token counts"
        if torch.compiler.is_compiling():
            capacity = all_gather_capacity(topk_ids, self.ep.name, self.ep.timeout, operation)
            torch._check(capacity >= tokens)
        else:
            capacity = exchange_capacity(topk_ids, self.ep, operation)
        places = torch.arange(ranks * capacity, dtype=torch.int32, device=topk_ids.device).view(ranks, capacity)
        return AllGatherLayout(
            num_tokens=tokens,
            num_rows=ranks * capacity,
            max_assignments=ranks * capacity * k,
            capacity=capacity,
            send_index=places[0],
            slot=places[:, :tokens].t().contiguous(),
        )

    @staticmethod
    def send(rows: Rows, layout: AllGatherLayout, ep: EPGroup, operation: str) -> Flight:
        return arrival(rows, ep.all_gather_async(rows.pack(layout.send_index)), ep, operation)

    @staticmethod
    def give_back(
        rows: Rows, layout: AllGatherLayout, ep: EPGroup, operation: str, out: Tensor | None = None
    ) -> Flight:
        return arrival(rows, ep.all_to_all_async(rows.pack(None)), ep, operation, layout.slot, out)

    @staticmethod
    def pack_layout(layout: AllGatherLayout) -> tuple[list[Tensor], list[int]]:
        return (
            [layout.send_index, layout.slot],
            [layout.num_tokens, layout.num_rows, layout.max_assignments, layout.capacity],
        )

    @staticmethod
    def unpack_layout(tensors: Sequence[Tensor], numbers: Sequence[int]) -> AllGatherLayout:
        tokens, rows, assignments, capacity = numbers
        return AllGatherLayout(tokens, rows, assignments, capacity, *tensors)

    def traffic(self, num_tokens: int, top_k: int) -> Traffic:
        rows = self.ep.num_ranks * num_tokens
        return Traffic(num_tokens, rows, rows * top_k)

    def rows_back(self, traffic: Traffic) -> int:
        return traffic.received

    def rows_by_rank(self, handle: Layout) -> Tensor:
        assert isinstance(handle, AllGatherLayout)
        return self.but_for_itself(torch.full((2, self.ep.num_ranks), handle.capacity, device="cpu"))
