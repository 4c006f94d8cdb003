"""`MoEKernel`: where dispatch, experts and combine meet.

    x, topk_ids, topk_weights
      └─ dispatch ──► experts ──► combine launched ──► shared experts ──► combine waited for ──► out [M,H]

Any dispatcher goes with any experts of the same layout. The kernel owns no parameters and no state.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from epmoe.dispatch.base import Dispatcher, Layout
from epmoe.experts.base import Experts, ExpertWeights
from epmoe.router import validate_routing


class KernelOutput(NamedTuple):
    """Attributes: `routed [M, H]`; `shared`, what the shared experts gave, or None; `layout`, reusable with the same
    ids."""

    routed: Tensor
    shared: Tensor | None
    layout: Layout


class MoEKernel:
    """One dispatcher and one kind of experts, joined.

    Args:
        dispatcher: how rows move; see `epmoe.dispatch`.
        experts: how they are computed; see `epmoe.experts`.
        validate: check ids and weights of every call against [-1, E) and for NaN, waiting for the device. None: when
            EPMOE_VALIDATE=1. Unchecked ids outside [0, E) count as no expert; they never reach memory.

    Raises:
        ValueError: the two share no layout.

    Example::

        kernel = MoEKernel(make_dispatcher("all_to_all", ep, placement, "cuda"), select_experts(spec).experts)
        out = kernel(x, routing.topk_ids, routing.topk_weights, weights).routed
    """

    def __init__(self, dispatcher: Dispatcher, experts: Experts, *, validate: bool | None = None) -> None:
        if not set(dispatcher.capabilities.layouts) & set(experts.layouts):
            raise ValueError(
                f"dispatcher {dispatcher.name!r} gives {' or '.join(dispatcher.capabilities.layouts)} layout, experts "
                f"{experts.name!r} take {' or '.join(experts.layouts)}: choose a pair that shares one"
            )
        self.dispatcher = dispatcher
        self.experts = experts
        self.validate = os.environ.get("EPMOE_VALIDATE", "0") not in ("", "0") if validate is None else validate

    def __call__(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        weights: ExpertWeights,
        *,
        shared_experts: Callable[[], Tensor] | None = None,
        layout: Layout | None = None,
    ) -> KernelOutput:
        """The routed experts' output, with the shared experts computed while combine is in flight.

        Args:
            x: `[M, H]`, inner stride 1. M may be 0 and may differ between ranks; all ranks must call.
            topk_ids: `[M, K]` int32 logical ids; -1 is no expert and costs nothing.
            topk_weights: `[M, K]` float32.
            weights: this rank's experts.
            shared_experts: called without arguments once combine has been launched.
            layout: from an earlier call with the same ids: no count exchange then.

        Raises:
            ValueError: shapes, dtypes, devices or strides that do not fit; ids out of range when validating.
            PeerError: a rank did not take part within the group's deadline.
        """
        if self.validate:
            validate_routing(topk_ids, topk_weights, self.dispatcher.owner.shape[0])
        rows = self.dispatcher.dispatch_async(x, topk_ids, topk_weights, layout=layout).wait()
        reduced = self.experts(rows, weights)
        combining = self.dispatcher.combine_async(reduced, rows.handle)
        shared = shared_experts() if shared_experts is not None else None
        return KernelOutput(combining.wait(), shared, rows.handle)
