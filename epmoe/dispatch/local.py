"""`local`: all experts live in this process, so nothing moves and every row is its token."""

from __future__ import annotations

from torch import Tensor

from epmoe.dispatch.base import Dispatcher, DispatcherCapabilities, ExpertInput, Layout, Pending


class LocalDispatcher(Dispatcher):
    """T = M: `dispatch` hands the tokens to the experts and `combine` hands their rows back."""

    name = "local"
    capabilities = DispatcherCapabilities(cuda_graph=True)

    def make_layout(self, topk_ids: Tensor) -> Layout:
        tokens, k = topk_ids.shape
        return Layout(tokens, tokens, tokens * k)

    def dispatch_async(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, *, layout: Layout | None = None
    ) -> Pending[ExpertInput]:
        self.check(x, topk_ids, topk_weights)
        layout = layout or self.make_layout(topk_ids)
        return Pending.done(self.expert_input(x, topk_ids, topk_weights, layout))

    def combine_async(self, rows: Tensor, handle: Layout) -> Pending[Tensor]:
        return Pending.done(rows)

    def wire_bytes(self, handle: Layout, row_bytes: int) -> tuple[int, int]:
        return 0, 0
