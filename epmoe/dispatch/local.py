"""`local`: all experts live in this process, so nothing moves and every row is its token. Rows are rounded all the same
where a scheme says how they would travel, so that a model computes alike at any number of ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from epmoe.dispatch.base import Dispatcher, DispatcherCapabilities, Traffic
from epmoe.dispatch.inputs import ExpertInput, Layout, Pending
from epmoe.dispatch.reduce import ExpertOutput
from epmoe.quant.rows import QuantizedRows, quantized
from epmoe.quant.straight_through import rounded


class LocalDispatcher(Dispatcher):
    """T = M: `dispatch` hands the tokens to the experts and `combine` hands their rows back."""

    name = "local"
    hands_on = True
    capabilities = DispatcherCapabilities(cuda_graph=True, exact_pairs=True, quantized_back=True)

    def make_layout(self, topk_ids: Tensor) -> Layout:
        tokens, k = topk_ids.shape
        return Layout(tokens, tokens, tokens * k)

    def dispatch_async(
        self,
        x: Tensor | QuantizedRows,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        layout: Layout | None = None,
        adapter_ids: Tensor | None = None,
        scheme: str | None = None,
        grad_scheme: str | None = None,
    ) -> Pending[ExpertInput]:
        self.check(x, topk_ids, topk_weights, adapter_ids, layout)
        source = None
        if isinstance(x, Tensor) and torch.is_grad_enabled() and (x.requires_grad or topk_weights.requires_grad):
            x = rounded(x, None, grad_scheme)
            source = None if scheme is None else x
        x = quantized(x, scheme)
        values, scales, sent_as = (x.values, x.scales, x.scheme) if isinstance(x, QuantizedRows) else (x, None, None)
        if scales is not None and scales.stride(-1) != 1:  # by column, as some quantizers leave them
            scales = scales.contiguous()
        rows = self.expert_input(
            values,
            topk_ids,
            topk_weights,
            layout or self.make_layout(topk_ids),
            x_scale=scales,
            scheme=sent_as,
            adapter_ids=adapter_ids,
            source=source,
        )
        return Pending.done(rows)

    def combine_async(
        self,
        rows: Tensor | ExpertOutput,
        handle: Layout,
        *,
        out: Tensor | None = None,
        scheme: str | None = None,
        grad_scheme: str | None = None,
    ) -> Pending[Tensor]:
        self.check_back(rows, handle, out)
        if scheme is not None or grad_scheme is not None:
            rows = rounded(self.reduced(rows), scheme, grad_scheme)
        reduced = self.reduced(rows, out)
        return Pending.done(reduced if out is None or not isinstance(rows, Tensor) else out.copy_(reduced))

    def traffic(self, num_tokens: int, top_k: int) -> Traffic:
        return Traffic(0, num_tokens, num_tokens * top_k)

    def rows_by_rank(self, handle: Layout) -> Tensor:
        return torch.zeros(2, 1, dtype=torch.int64, device="cpu")
