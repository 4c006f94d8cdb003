"""`MoEKernel`: where dispatch, experts and combine meet.

    x, topk_ids, topk_weights
      └─ dispatch ──► experts ──► combine launched ──► shared experts ──► combine waited for ──► out [M,H]

Any dispatcher goes with any experts: rows arrive in the standard layout [T,H], and experts that want each expert's rows
together, [L,C,H], get them spread on the device. The kernel owns no parameters.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from epmoe.dispatch.base import Dispatcher, ExpertInput, Layout
from epmoe.dispatch.batched import batch
from epmoe.dispatch.overflow import Overflow
from epmoe.experts.base import Experts, ExpertWeights
from epmoe.experts.reduce import weight_and_reduce
from epmoe.router import validate_routing

SHARED_EXPERTS_ORDERS = ("auto", "before", "during", "after")


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
        layout: of the experts' rows, `standard` or `batched`; None: `standard` where the experts take it.
        expert_capacity: C of the batched layout, places per expert on this rank; None: room for every row.
        overflow: what happens past the capacity: `raise`, `chunk` or `drop`; see `Overflow`.
        chunk_tokens: compute at most this many received rows at a time, for less memory; None: all at once. Outputs
            of our kernels are the same to the bit; in training, autograd adds the parts' weight gradients in the
            weights' dtype, so many small parts in bf16 cost precision there.
        shared_experts_order: compute them `before` dispatch, `during` combine, `after` it, or `auto`: during, if the
            dispatcher moves rows asynchronously.
        validate: check ids and weights of every call against [-1, E) and for NaN, waiting for the device. None: when
            EPMOE_VALIDATE=1. Unchecked ids outside [0, E) count as no expert; they never reach memory.

    Raises:
        ValueError: a setting that does not exist, or experts that do not take the layout.

    Example::

        kernel = MoEKernel(make_dispatcher("all_to_all", ep, placement, "cuda"), select_experts(spec).experts)
        out = kernel(x, routing.topk_ids, routing.topk_weights, weights).routed
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        experts: Experts,
        *,
        layout: str | None = None,
        expert_capacity: int | None = None,
        overflow: str = "raise",
        chunk_tokens: int | None = None,
        shared_experts_order: str = "auto",
        validate: bool | None = None,
    ) -> None:
        layout = layout or experts.layouts[0]
        if layout not in experts.layouts:
            raise ValueError(
                f"layout={layout!r}: experts {experts.name!r} take {' or '.join(experts.layouts)} rows; choose a pair "
                "that fits"
            )
        if expert_capacity is not None and layout != "batched":
            raise ValueError(
                f"expert_capacity={expert_capacity} with {layout} rows, which have no places: use experts='batched', "
                "or leave it unset"
            )
        if chunk_tokens is not None and chunk_tokens < 1:
            raise ValueError(f"chunk_tokens={chunk_tokens}: must be at least 1, or None for all at once")
        if shared_experts_order not in SHARED_EXPERTS_ORDERS:
            raise ValueError(
                f"shared_experts_order={shared_experts_order!r}: must be {', '.join(SHARED_EXPERTS_ORDERS)}"
            )
        if shared_experts_order == "auto":
            shared_experts_order = "during" if dispatcher.capabilities.asynchronous else "after"
        self.dispatcher = dispatcher
        self.experts = experts
        self.layout = layout
        self.overflow = Overflow(overflow, expert_capacity, dispatcher.where)
        self.chunk_tokens = expert_capacity if overflow == "chunk" else chunk_tokens
        self.shared_experts_order = shared_experts_order
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
            shared_experts: called once, without arguments, where `shared_experts_order` says.
            layout: from an earlier call with the same ids: no count exchange then.

        Raises:
            ValueError: shapes, dtypes, devices or strides that do not fit; ids out of range when validating.
            PeerError: a rank did not take part within the group's deadline.
            RuntimeError: an earlier call overflowed `expert_capacity` under `overflow="raise"`.
        """
        if self.validate:
            validate_routing(topk_ids, topk_weights, self.dispatcher.owner.shape[0])
        self.overflow.poll()
        order = self.shared_experts_order if shared_experts is not None else None
        shared = shared_experts() if shared_experts is not None and order == "before" else None

        rows = self.dispatcher.dispatch_async(x, topk_ids, topk_weights, layout=layout).wait()
        combining = self.dispatcher.combine_async(self._compute(rows, weights), rows.handle)
        if shared_experts is not None and order == "during":
            shared = shared_experts()
        routed = combining.wait()

        if shared_experts is not None and order == "after":
            shared = shared_experts()
        return KernelOutput(routed, shared, rows.handle)

    def _compute(self, rows: ExpertInput, weights: ExpertWeights) -> Tensor:
        """This rank's experts on the rows received, one reduced row each `[T, H]`, at most `chunk_tokens` at a time."""
        size = self.chunk_tokens
        if size is None or rows.x.shape[0] <= size:
            return self._compute_part(rows, weights)
        parts = [self._compute_part(part, weights) for part in split(rows, size)]
        return torch.cat(parts)

    def _compute_part(self, rows: ExpertInput, weights: ExpertWeights) -> Tensor:
        if self.layout == "standard":
            return self.experts(rows, weights)
        on_input = self.experts.spec.weight_on_input
        capacity = self.overflow.capacity or rows.x.shape[0]
        made = batch(rows, capacity, with_weights=on_input)
        self.overflow.record(made.overflow)
        y = self.experts(made.rows, weights)
        # the weight is applied once: here, unless the experts had it on their input
        return weight_and_reduce(y.flatten(0, 1), made.slot, None if on_input else rows.topk_weights, y.dtype)


def split(rows: ExpertInput, size: int) -> list[ExpertInput]:
    """`rows` in parts of at most `size`, in order."""
    k = rows.topk_ids.shape[1]
    return [
        dataclasses.replace(
            rows, x=x, topk_ids=ids, topk_weights=weights, max_assignments=min(rows.max_assignments, x.shape[0] * k)
        )
        for x, ids, weights in zip(
            rows.x.split(size), rows.topk_ids.split(size), rows.topk_weights.split(size), strict=True
        )
    ]
