"""`symmetric`: ranks store rows straight into each other's memory, over NVLink or in one host's shared memory.

    dispatch  x [M,H] ──► slots [source rank, token] of every owner ──► rows [R·C,H]
    combine   rows [R·C,H] ──► slots [owner, token] of the source ──► sums over ranks [M,H]

One launch each: ops.symmetric_send, ops.symmetric_give_back. Every token has its place on every rank, so nobody counts,
no host takes part, and all of it can be captured in a CUDA graph. Backward moves gradients through the same buffers.
Received rows are tensors of their own: any number of them may be alive, in any order of dispatches and combines, as
long as all ranks take the same order.

Two profiles of one protocol, chosen by the capacity: `latency` for decoding, `throughput` for many tokens.

M tokens on this rank, C = max_tokens_per_rank, R ranks, K experts per token, T = R·C rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from epmoe.comm import EPGroup
from epmoe.comm.memory import STEPS, Buffer, buffer
from epmoe.comm.symmetric import Channel, channel_for
from epmoe.dispatch.base import DispatcherCapabilities, Traffic
from epmoe.dispatch.exchange import ExchangeDispatcher, Extras, Flight, Rows, register_ops
from epmoe.dispatch.inputs import ExpertInput, Layout, Pending
from epmoe.dispatch.reduce import ExpertOutput
from epmoe.dispatch.storable import half_bytes, refusal
from epmoe.dispatch.wire import RowSpec
from epmoe.ops._triton import use_triton
from epmoe.ops.symmetric_configs import LATENCY_TOKENS, profile_of
from epmoe.ops.symmetric_give_back import give_back_rows
from epmoe.ops.symmetric_send import Sent, send_rows
from epmoe.ops.symmetric_slots import Travelling, given_back, travelling, unstorable
from epmoe.ops.symmetric_words import WORD_KINDS
from epmoe.quant.rows import QuantizedRows, quantize_rows


@dataclasses.dataclass(frozen=True)
class SymmetricLayout(Layout):
    """`topk_ids [M, K]`, `owner [E]`: where this rank's tokens go; `came [T, K]`: the ids that came, known once
    dispatch has arrived; `capacity`: C; `overlap_sms`: of the call that moves rows by it and of its backward, 0 for
    all; `experts_per_rank`: as for `ops.send_rows`."""

    capacity: int
    overlap_sms: int
    experts_per_rank: int
    topk_ids: Tensor
    owner: Tensor
    came: Tensor | None = None


@register_ops
class SymmetricDispatcher(ExchangeDispatcher):
    """One-sided stores over symmetric memory; needs `max_tokens_per_rank`, the same on all ranks.

    Ranks are on one host, with peer access between their GPUs, or on CPU. Rows are a multiple of 16 bytes long; on CUDA
    they are float32, bfloat16 or float16, or quantized.

    Attributes:
        overlap_sms: None: as the group says (`ep.beside`): in the current stream with all SMs, or in the communication
            stream with a few. A number: always there, with at most so many. It is asked at each call, also where a
            layout is reused; a backward moves rows as its forward did.
    """

    overlap_sms: int | None = None
    goes_beside_itself = True

    name = "symmetric"
    layout_type = SymmetricLayout
    capabilities = DispatcherCapabilities(
        asynchronous=True, cuda_graph=True, backends=("gloo", "nccl"), max_tokens=True, reduces=True
    )

    @property
    def capacity(self) -> int:
        """C."""
        assert self.max_tokens_per_rank is not None, "make_dispatcher asks for it"
        return self.max_tokens_per_rank

    @property
    def profile(self) -> str:
        """`latency` or `throughput`."""
        return profile_of(self.capacity)

    def traffic(self, num_tokens: int, top_k: int) -> Traffic:
        rows = self.ep.num_ranks * self.capacity
        return Traffic(num_tokens * min(self.ep.num_ranks, top_k), rows, rows * top_k)

    def memory_plan(self, num_tokens: int, rows: RowSpec, traffic: Traffic, *, reduced: bool = False) -> list[Buffer]:
        """The slots are shared by all layers of the group that need no more, and stay."""
        assert rows.combine_scheme is None, "capabilities say that no row goes back quantized"
        ranks, capacity = self.ep.num_ranks, self.capacity
        other = "throughput above" if self.profile == "latency" else "latency up to"
        profiles = f"{self.profile} profile ({other} {LATENCY_TOKENS} tokens per rank)"
        came = ranks * capacity
        parts = [buffer("reduced rows", (came, rows.width), rows.dtype, "reduce", "combine")] if reduced else []
        return [
            Buffer(f"slots, {profiles}", Channel.nbytes(self.ep, half_bytes(rows, ranks, capacity)), STEPS),
            buffer("rows received", (came, rows.nbytes().dispatch), torch.uint8, "dispatch", "experts", "reduce"),
            *parts,
            buffer("output", (num_tokens, rows.width), rows.dtype, "combine", "sum"),
        ]

    @property
    def pays_beside_shared(self) -> bool:
        """No: on two H200 combine of 8,192 tokens took 112 µs with the whole chip, half as many 433 µs with 16 SMs."""
        return False

    def quantizes_in_flight(self, dtype: torch.dtype) -> bool:
        return dtype.itemsize == 2  # nothing in the launch takes wider words apart

    def row_refusal(self, rows: RowSpec) -> str | None:
        why = refusal(rows, self.num_dispatchers, self.capacity, self.owner.device)
        return None if why is None else f"layer {self.layer!r}: {why}; use dispatcher='all_to_all'"

    def make_layout(self, topk_ids: Tensor) -> SymmetricLayout:
        tokens, k = topk_ids.shape
        if tokens > self.capacity:
            raise ValueError(
                f"{self.where}: {tokens} tokens are more than max_tokens_per_rank={self.capacity}: raise it, or call "
                "the layer with fewer tokens at a time"
            )
        rows = self.ep.num_ranks * self.capacity
        numbers = (tokens, rows, rows * k, self.capacity, self._sms, self.experts_per_rank)
        return SymmetricLayout(*numbers, topk_ids, self.owner)

    @property
    def _sms(self) -> int:
        """Of what is launched now; 0: all."""
        return self.overlap_sms or self.ep.beside.sms

    def _as_launched_now(self, layout: Layout) -> SymmetricLayout:
        assert isinstance(layout, SymmetricLayout)
        sms = self._sms
        return layout if layout.overlap_sms == sms else dataclasses.replace(layout, overlap_sms=sms)

    @staticmethod
    def arrived(layout: SymmetricLayout, topk_ids: Tensor) -> SymmetricLayout:
        return dataclasses.replace(layout, came=topk_ids)

    @staticmethod
    def send(rows: Rows, layout: SymmetricLayout, ep: EPGroup, operation: str) -> Flight:
        sent, arrive = _send(rows, layout, ep, operation)
        return Flight(arrive, lambda: Rows(sent.values, sent.weights, sent.words))

    @staticmethod
    def give_back(
        rows: Rows, layout: SymmetricLayout, ep: EPGroup, operation: str, out: Tensor | None = None
    ) -> Flight:
        back, arrive = _give_back(ExpertOutput(rows.values), rows.weights, layout, ep, operation, out)
        return Flight(arrive, lambda: back)

    @staticmethod
    def pack_layout(layout: SymmetricLayout) -> tuple[list[Tensor], list[int]]:
        tensors = [layout.topk_ids, layout.owner] + ([] if layout.came is None else [layout.came])
        plain = (layout.num_tokens, layout.num_rows, layout.max_assignments)
        return tensors, [*plain, layout.capacity, layout.overlap_sms, layout.experts_per_rank]

    @staticmethod
    def unpack_layout(tensors: Sequence[Tensor], numbers: Sequence[int]) -> SymmetricLayout:
        return SymmetricLayout(*numbers, *tensors)  # type: ignore[arg-type]

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
        """As `Dispatcher.dispatch_async`; `scheme` quantizes 16-bit rows while they are sent, in the same launch."""
        if layout is not None:
            self.check_layout("layout", layout)
            layout = self._as_launched_now(layout)
        wants_gradient = torch.is_grad_enabled() and (
            topk_weights.requires_grad or (isinstance(x, Tensor) and x.requires_grad)
        )
        if torch.compiler.is_compiling() or wants_gradient:
            schemes = {"scheme": scheme, "grad_scheme": grad_scheme}
            return super().dispatch_async(x, topk_ids, topk_weights, layout=layout, adapter_ids=adapter_ids, **schemes)
        if isinstance(x, QuantizedRows):
            scheme = None  # they are in it already
        elif scheme is not None and not self.quantizes_in_flight(x.dtype):
            x, scheme = quantize_rows(x, scheme), None
        self.check(x, topk_ids, topk_weights, adapter_ids, layout)
        made = layout if layout is not None else self.make_layout(topk_ids)
        values, words, extras = Extras.join(topk_ids, adapter_ids, x)
        sent, arrive = _send(
            Rows(values, topk_weights, words), made, self.ep, f"layer {self.layer!r}, dispatch", scheme
        )
        assert sent.words is not None and sent.weights is not None
        ids, others = extras.split(sent.words)
        if sent.scales is not None:
            others |= {"x_scale": sent.scales, "scheme": scheme}
        rows = self.expert_input(sent.values, ids, sent.weights, self.arrived(made, ids), **others)
        return Pending(lambda: (arrive(), rows)[1], arrive)

    def combine_async(
        self,
        rows: Tensor | ExpertOutput,
        handle: Layout,
        *,
        out: Tensor | None = None,
        scheme: str | None = None,
        grad_scheme: str | None = None,
    ) -> Pending[Tensor]:
        assert scheme is None and grad_scheme is None, "capabilities say that no row goes back quantized"
        self.check_back(rows, handle, out)
        output = rows if isinstance(rows, ExpertOutput) else ExpertOutput(rows)
        handle = self._as_launched_now(handle)
        wants_gradient = torch.is_grad_enabled() and (
            output.rows.requires_grad or (output.topk_weights is not None and output.topk_weights.requires_grad)
        )
        fused = output.strategy == "delegate" and output.rows.dtype in WORD_KINDS
        if not fused or wants_gradient or torch.compiler.is_compiling():
            return super().combine_async(rows, handle, out=out)
        back, arrive = _give_back(output, None, handle, self.ep, f"layer {self.layer!r}, combine", out)
        return Pending(lambda: (arrive(), back.values)[1], arrive)

    def rows_by_rank(self, handle: Layout) -> Tensor:
        assert isinstance(handle, SymmetricLayout) and handle.came is not None, "after dispatch"
        ids, ranks = handle.topk_ids, torch.arange(self.ep.num_ranks, device=self.owner.device)
        known = (ids >= 0) & (ids < handle.owner.shape[0])
        owner = torch.where(known, handle.owner[torch.where(known, ids, 0).long()], -1)
        sent = (owner[:, :, None] == ranks).any(1).sum(0)
        came = (handle.came >= 0).any(1).view(self.ep.num_ranks, self.capacity).sum(1)
        return self.but_for_itself(torch.stack([sent, came]))


def _channel(ep: EPGroup, plan: Travelling, layout: SymmetricLayout, values: Tensor, operation: str) -> Channel:
    words = use_triton(values)
    if (why := unstorable(values.shape[1], values.dtype, values.device)) is not None:
        raise ValueError(f"{operation}: {why}; use dispatcher='all_to_all'")
    return channel_for(ep, plan.half_bytes(ep.num_ranks, layout.capacity), words)


def _send(
    rows: Rows, layout: SymmetricLayout, ep: EPGroup, operation: str, scheme: str | None = None
) -> tuple[Sent, Callable[[], None]]:
    """Rows with their routing, or without it the way an earlier dispatch took; and what makes them arrive."""
    came = layout.came if rows.ids is None else None
    plan = travelling(rows.values, rows.ids, rows.weights, scheme)
    channel = _channel(ep, plan, layout, rows.values, operation)
    sent = send_rows(
        channel,
        rows.values,
        layout.topk_ids,
        layout.owner,
        layout.capacity,
        operation=operation,
        words=rows.ids,
        weights=rows.weights,
        came=came,
        scheme=scheme,
        **_manner(layout),
    )
    return sent, channel.arrival(layout.overlap_sms > 0)


def _give_back(
    output: ExpertOutput,
    gradients: Tensor | None,
    layout: SymmetricLayout,
    ep: EPGroup,
    operation: str,
    out: Tensor | None,
) -> tuple[Rows, Callable[[], None]]:
    assert layout.came is not None, "combine takes the handle that dispatch gave"
    rows = output.rows if output.rows.dim() == 2 else output.rows.flatten(0, 1)
    words = 0 if gradients is None else gradients.shape[1] * gradients.itemsize // 4
    plan = given_back(rows.shape[1], rows.dtype, words)
    channel = _channel(ep, plan, layout, rows, operation)
    values, summed = give_back_rows(
        channel,
        rows,
        layout.came,
        layout.topk_ids,
        layout.owner,
        layout.capacity,
        operation=operation,
        slot=output.slot,
        slot_weights=output.topk_weights,
        gradients=gradients,
        out=out,
        **_manner(layout),
    )
    return Rows(values, summed, None), channel.arrival(layout.overlap_sms > 0)


def _manner(layout: SymmetricLayout) -> dict[str, Any]:
    sms = layout.overlap_sms or None
    return {
        "experts_per_rank": layout.experts_per_rank,
        "profile": profile_of(layout.capacity),
        "sms": sms,
        "aside": sms is not None,
    }
