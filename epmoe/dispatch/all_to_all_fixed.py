"""`all_to_all_fixed`: an all-to-all whose sizes the host knows beforehand, so that nothing waits for counts.

Every rank sends every other `max_tokens_per_rank` rows, one place per token; a place whose token has no expert there
goes out empty and no expert reads it. No exchange of counts, no host in the loop, capturable in a CUDA graph. It
moves as many bytes as the capacity says: for decode, where few tokens meet many experts.

M tokens on this rank, at most C = max_tokens_per_rank; R ranks; T = R·C rows, source by source.
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
class FixedLayout(Layout):
    """`send_index [R·C]` int32: the token in each place, or -1; `slot [M, R]` int32: each token's place per rank, or
    -1."""

    send_index: Tensor
    slot: Tensor


@register_ops
class FixedAllToAllDispatcher(ExchangeDispatcher):
    """Equal all-to-all each way; needs `max_tokens_per_rank`, the same on all ranks."""

    name = "all_to_all_fixed"
    layout_type = FixedLayout
    copies = True
    capabilities = DispatcherCapabilities(
        asynchronous=True, cuda_graph=True, backends=("gloo", "nccl"), max_tokens=True, quantized_back=True
    )

    def make_layout(self, topk_ids: Tensor) -> FixedLayout:
        tokens, k = topk_ids.shape
        ranks, capacity = self.ep.num_ranks, self.max_tokens_per_rank
        assert capacity is not None, "make_dispatcher asks for it"
        if tokens > capacity:
            raise ValueError(
                f"{self.where}: {tokens} tokens are more than "
                f"max_tokens_per_rank={capacity}: raise it, or call the layer with fewer tokens at a time"
            )
        valid = (topk_ids >= 0) & (topk_ids < self.owner.shape[0])
        owner = torch.where(valid, self.owner[torch.where(valid, topk_ids, 0)], ranks)
        goes = (owner[:, :, None] == torch.arange(ranks, dtype=torch.int32, device=owner.device)).any(1)  # [M, R]
        token = torch.arange(tokens, dtype=torch.int32, device=owner.device)
        send_index = torch.full((ranks, capacity), -1, dtype=torch.int32, device=owner.device)
        send_index[:, :tokens] = torch.where(goes.t(), token, -1)
        first = torch.arange(ranks, dtype=torch.int32, device=owner.device) * capacity
        slot = torch.where(goes, first + token[:, None], -1)
        rows = ranks * capacity
        return FixedLayout(tokens, rows, rows * k, send_index.view(-1), slot)

    @staticmethod
    def send(rows: Rows, layout: FixedLayout, ep: EPGroup, operation: str) -> Flight:
        most = layout.num_rows // ep.num_ranks
        return arrival(rows, ep.all_to_all_async(rows.pack(layout.send_index), most_rows=most), ep, operation)

    @staticmethod
    def give_back(rows: Rows, layout: FixedLayout, ep: EPGroup, operation: str, out: Tensor | None = None) -> Flight:
        launched = ep.all_to_all_async(rows.pack(None), most_rows=layout.num_rows // ep.num_ranks)
        return arrival(rows, launched, ep, operation, layout.slot, out)

    @staticmethod
    def pack_layout(layout: FixedLayout) -> tuple[list[Tensor], list[int]]:
        return [layout.send_index, layout.slot], [layout.num_tokens, layout.num_rows, layout.max_assignments]

    @staticmethod
    def unpack_layout(tensors: Sequence[Tensor], numbers: Sequence[int]) -> FixedLayout:
        tokens, rows, pairs = numbers
        return FixedLayout(tokens, rows, pairs, *tensors)

    def traffic(self, num_tokens: int, top_k: int) -> Traffic:
        assert self.max_tokens_per_rank is not None
        rows = self.ep.num_ranks * self.max_tokens_per_rank
        return Traffic(rows, rows, rows * top_k)

    def rows_by_rank(self, handle: Layout) -> Tensor:
        assert self.max_tokens_per_rank is not None
        return self.but_for_itself(torch.full((2, self.ep.num_ranks), self.max_tokens_per_rank, device="cpu"))
