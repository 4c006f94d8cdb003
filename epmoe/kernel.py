"""`MoEKernel`: where dispatch, experts and combine meet.

    x, topk_ids, topk_weights
      └─ dispatch ──► experts ──► combine launched ──► shared experts ──► combine waited for ──► out [M,H]

Any dispatcher goes with any experts: rows arrive in the standard layout [T,H], and experts that want each expert's rows
together, [L,C,H], get them spread on the device. The kernel owns no parameters.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epmoe.capabilities import refusal, scheme_refusal
from epmoe.checks import check_bool, check_int, check_kind, check_name, said
from epmoe.comm.memory import MemoryPlan
from epmoe.comm.recording import computing, recording
from epmoe.comm.workspace import Workspace
from epmoe.config import SHARED_EXPERTS_ORDERS, RouterConfig
from epmoe.dispatch.base import Dispatcher, Traffic
from epmoe.dispatch.batched import batch
from epmoe.dispatch.inputs import ExpertInput, Layout, Pending
from epmoe.dispatch.overflow import Overflow
from epmoe.dispatch.reduce import ExpertOutput, weight_and_reduce
from epmoe.dispatch.wire import RowSpec
from epmoe.experts.base import Experts
from epmoe.experts.gradient_sums import sum_gradients
from epmoe.experts.lora import validate_adapters
from epmoe.experts.spec import ExpertWeights
from epmoe.memory import plan_forward
from epmoe.overlap.launch import OnItsWay
from epmoe.overlap.microbatch import current_microbatch
from epmoe.overlap.splitting import current_splitting
from epmoe.quant.rows import ROW_SCHEMES, QuantizedRows
from epmoe.router import route
from epmoe.routing import saturated_ids, validate_routing

MIN_TOKENS_BESIDE = 1024  # for fewer, shared experts end before another stream has begun


class KernelOutput(NamedTuple):
    """Attributes: `routed [M, H]`; `shared`, what the shared experts gave, or None; `layout`, reusable with the same
    ids (None from a monolithic kernel, which shows none)."""

    routed: Tensor
    shared: Tensor | None
    layout: Layout | None


class MoEKernel:
    """One dispatcher and one kind of experts, joined.

    Args:
        dispatcher: how rows move; see `epmoe.dispatch`.
        experts: how they are computed; see `epmoe.experts`. Monolithic ones take router logits and go with `local`.
        layout: of the experts' rows, `standard` or `batched`; None: `standard` where the experts take it.
        dispatch_scheme: quantize rows before they are sent (`fp8_block`, `fp8_row`, `int8_row`, ...): fewer bytes on
            the wire. Experts that compute with that scheme get the values and scales as they arrive, others get them
            dequantized. Gradients take the rounding for the identity. None defers: rows travel as they are and the
            experts quantize, if they do.
        combine_scheme: quantize the experts' rows on their way back; see `Dispatcher.combine_async`.
        grad_scheme: quantize the gradients of rows on their way, in both directions.
        quantized_before: rows come to each call in `dispatch_scheme` already, as those of a fixed scale do; then
            `memory_plan` counts them.
        expert_capacity: C of the batched layout, places per expert on this rank; None: room for every row.
        overflow: what happens past the capacity: `raise`, `chunk` or `drop`; see `Overflow`. `raise` is found by the
            next call, and in CUDA graphs of your own, whose replays are no calls, by `kernel.overflow.poll()`.
        chunk_tokens: compute at most this many received rows at a time, for less memory; None: all at once. Outputs
            of our kernels are the same to the bit (but for decoding batches of up to 64 pairs, whose sums may be split
            where all are at once). In training the parts' weight gradients are added in float32 and rounded once (in
            a compiled graph, and those of adapters, in the weights' dtype).
        shared_experts_order: compute them `before` dispatch, `during` combine, `after` it, or `auto`: during, where
            that has been measured to pay (`Dispatcher.pays_beside_shared`).
        comm_sms: SMs for rows that move beside a computation, whose kernels leave them free. None: as many as the
            dispatcher needs, measured. The same on all ranks.
        workspace: scratch for forwards without gradients. None: the group's, which all its layers share; without a
            group, the allocator's.
        validate: check ids and weights of every call against [-1, E) and for NaN, waiting for the device. None: when
            EPMOE_VALIDATE=1. Unchecked ids outside [0, E) count as no expert; they never reach memory.

    Raises:
        ValueError: a setting that does not exist, or parts that do not go together.

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
        dispatch_scheme: str | None = None,
        combine_scheme: str | None = None,
        grad_scheme: str | None = None,
        quantized_before: bool = False,
        expert_capacity: int | None = None,
        overflow: str = "raise",
        chunk_tokens: int | None = None,
        shared_experts_order: str = "auto",
        comm_sms: int | None = None,
        workspace: Workspace | None = None,
        validate: bool | None = None,
    ) -> None:
        check_kind("dispatcher", dispatcher, Dispatcher, "a Dispatcher, as make_dispatcher(...) gives it")
        right = "Experts, as select_experts(spec).experts are"
        check_kind("experts", experts, Experts, right, "a Selection has them" if hasattr(experts, "candidates") else "")
        layout = layout or experts.layouts[0]
        if (reason := refusal(dispatcher, experts, layout)) is not None:
            raise ValueError(reason)
        if expert_capacity is not None and layout != "batched":
            raise ValueError(
                f"expert_capacity={expert_capacity} with {layout} rows, which have no places: use experts='batched', "
                "or leave it unset"
            )
        schemes = {"dispatch_scheme": dispatch_scheme, "combine_scheme": combine_scheme, "grad_scheme": grad_scheme}
        for name, scheme in schemes.items():
            check_name(name, scheme, ROW_SCHEMES, none="rows as they are")
        check_int("chunk_tokens", chunk_tokens, or_none=True, right="an int > 0, or None for all at once")
        check_int("expert_capacity", expert_capacity, or_none=True, right="an int > 0, or None for room for every row")
        check_int("comm_sms", comm_sms, or_none=True, right="an int > 0, or None for what the dispatcher needs")
        check_kind("workspace", workspace, (Workspace, type(None)), "a Workspace, or None for the group's")
        check_bool("validate", validate, or_none=True)
        check_bool("quantized_before", quantized_before)
        check_name("shared_experts_order", shared_experts_order, SHARED_EXPERTS_ORDERS)
        if quantized_before and dispatch_scheme is None:
            raise ValueError("quantized_before=True with dispatch_scheme=None: name the scheme that rows come in")
        if (reason := scheme_refusal(dispatcher, combine_scheme, grad_scheme)) is not None:
            raise ValueError(reason)
        width, dtype = experts.spec.hidden_size, experts.spec.dtype
        self._rows = RowSpec(width, dtype, 1, dispatch_scheme, combine_scheme, grad_scheme, quantized_before)
        if (reason := dispatcher.row_refusal(self._rows)) is not None:
            raise ValueError(reason)
        if experts.monolithic:
            idle = {**schemes, "chunk_tokens": chunk_tokens, "workspace": workspace}
            for name, value in idle.items():
                if value is not None:
                    raise ValueError(f"{name}={value!r}: experts {experts.name!r} get no rows sent; leave it unset")
        if shared_experts_order == "auto":
            shared_experts_order = "during" if dispatcher.pays_beside_shared else "after"
        self.dispatcher = dispatcher
        self.experts = experts
        self.layout = layout
        self.dispatch_scheme, self.combine_scheme, self.grad_scheme = dispatch_scheme, combine_scheme, grad_scheme
        self.overflow = Overflow(overflow, expert_capacity, dispatcher.where)
        limits = [n for n in (chunk_tokens, expert_capacity if overflow == "chunk" else None) if n is not None]
        self.chunk_tokens = min(limits, default=None)
        self.shared_experts_order = shared_experts_order
        self.comm_sms = comm_sms
        self.workspace = dispatcher.ep.workspace() if workspace is None and dispatcher.ep is not None else workspace
        self._shares_workspace = workspace is None
        self.validate = os.environ.get("EPMOE_VALIDATE", "0") not in ("", "0") if validate is None else validate

    @property
    def output_is_reduced(self) -> bool:
        """Whether `routed` is the sum over all ranks; if not, the caller adds it up over the group."""
        return self.dispatcher.capabilities.output_is_reduced

    def __call__(
        self,
        x: Tensor | QuantizedRows,
        topk_ids: Tensor,
        topk_weights: Tensor,
        weights: ExpertWeights,
        *,
        shared_experts: Callable[[], Tensor] | None = None,
        layout: Layout | None = None,
        adapter_ids: Tensor | None = None,
        out: Tensor | None = None,
        inplace: bool = False,
    ) -> KernelOutput:
        """The routed experts' output, with the shared experts computed while combine is in flight.

        Args:
            x: `[M, H]`, inner stride 1, or rows that are quantized already. M may be 0 and may differ between ranks;
                all ranks must call.
            topk_ids: `[M, K]` logical ids; -1 is no expert and costs nothing.
            topk_weights: `[M, K]` float32.
            weights: this rank's experts.
            shared_experts: called once, without arguments, where `shared_experts_order` says.
            layout: from an earlier call with the same ids: no count exchange then.
            adapter_ids: `[M]` int32, each token's LoRA adapter (`ExpertWeights.lora`), -1 for none; unless validated,
                whatever is outside `[0, A)` counts as none. All ranks give it or none does.
            out: `[M, H]` to write `routed` into, where no gradient is asked for.
            inplace: write it over x. Shared experts, which may read x, then run first, as with an `out` in x's memory.

        Raises:
            ValueError: shapes, dtypes, devices or strides that do not fit; ids out of range when validating.
            PeerError: a rank did not take part within the group's deadline.
            RuntimeError: an earlier call overflowed `expert_capacity` under `overflow="raise"`.
        """
        if self.experts.monolithic:
            raise ValueError(f"experts={self.experts.name!r} route by themselves: call from_logits(x, logits, ...)")
        if not isinstance(weights, ExpertWeights):
            raise ValueError(f"{said('weights', weights)}: must be ExpertWeights(gate_up_proj, down_proj, ...)")
        if not isinstance(topk_ids, Tensor) or not isinstance(topk_weights, Tensor):
            raise ValueError(
                f"{said('topk_ids', topk_ids)}, {said('topk_weights', topk_weights)}: must be tensors [M, K], as a "
                "Routing has them"
            )
        self.experts.check_lora(weights.lora, adapter_ids is not None)  # before rows move: on all ranks or on none
        if torch.compiler.is_compiling():
            unknown = self.chunk_tokens is not None and self.dispatcher.capabilities.host_sync
            if self.validate or unknown:
                name = "validate" if self.validate else "chunk_tokens"
                raise ValueError(
                    f"{name} in a compiled graph, which can't look at values or at sizes the routing decides: unset it"
                )
        if self.validate:
            validate_routing(topk_ids, topk_weights, self.dispatcher.owner.shape[0])
            if adapter_ids is not None:
                validate_adapters(adapter_ids, weights.lora)
        if (splitting := current_splitting()) is not None:
            splitting.compare(self.dispatcher.ep)
        self.overflow.poll()
        if not torch.compiler.is_compiling() and (recorder := recording()) is not None:
            recorder.called()
        out = self._destination(x, out, inplace, weights, topk_weights)
        order = self.shared_experts_order if shared_experts is not None else None
        if order is not None and out is not None and isinstance(x, Tensor) and share_memory(out, x):
            order = "before"
        shared = shared_experts() if shared_experts is not None and order == "before" else None

        def dispatch() -> Pending[ExpertInput]:
            return self.dispatcher.dispatch_async(
                x,
                self._ids_as_wanted(topk_ids),
                topk_weights,
                layout=layout,
                adapter_ids=adapter_ids,
                scheme=self.dispatch_scheme,
                **given(grad_scheme=self.grad_scheme),
            )

        arriving = self._launch(dispatch, "dispatch", topk_ids)
        rows = arriving.arrived()
        handle = rows.handle
        with computing("experts"):
            output = self._compute(rows, weights)
        del rows, arriving  # the received rows' memory is free for what comes back
        back = given(scheme=self.combine_scheme, grad_scheme=self.grad_scheme)
        combining = self._launch(
            functools.partial(self.dispatcher.combine_async, output, handle, out=out, **back),
            "combine",
            topk_ids,
            order == "during",
        )
        del output
        if shared_experts is not None and order == "during":
            with computing("shared experts"):
                shared = shared_experts()
        routed = combining.arrived()

        if shared_experts is not None and order == "after":
            with computing("shared experts"):
                shared = shared_experts()
        return KernelOutput(routed, shared, handle)

    def _launch(
        self, launch: Callable[[], Pending[Any]], name: str, topk_ids: Tensor, with_shared: bool = False
    ) -> OnItsWay[Any]:
        """Rows beside what is computed meanwhile, if anything is: by other microbatches or the shared experts."""
        together = current_microbatch() is not None
        tokens = self.dispatcher.max_tokens_per_rank or topk_ids.shape[0]
        overlaps = not torch.compiler.is_compiling() and (together or (with_shared and tokens >= MIN_TOKENS_BESIDE))
        late = together and self.dispatcher.capabilities.host_sync
        sms = 0 if not overlaps else self.dispatcher.sms_beside(together) if self.comm_sms is None else self.comm_sms
        # whether parts of a batch take turns all ranks decide alike, not how many tokens each of them has
        return OnItsWay(
            launch, name, ep=self.dispatcher.ep, sms=sms, late=late, copies=together, device=topk_ids.device
        )

    def from_logits(
        self,
        x: Tensor,
        logits: Tensor,
        weights: ExpertWeights,
        *,
        router: RouterConfig,
        top_k: int,
        selection_bias: Tensor | None = None,
        **options: Any,
    ) -> KernelOutput:
        """The same from router logits: monolithic experts fuse the routing with what follows, others are routed first.

        Args:
            x: `[M, H]`.
            logits: `[M, E]`.
            weights: this rank's experts.
            router, top_k, selection_bias: as `epmoe.route` takes them.
            options: as of `__call__`; monolithic experts take `shared_experts` alone.

        Raises:
            ValueError: as `__call__`, or options that a monolithic kernel has no use for.
        """
        num_experts = self.dispatcher.owner.shape[0]
        if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[1] != num_experts:
            have = f"of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else said("logits", logits)
            raise ValueError(f"logits are {have}: must be [M, {num_experts}], one for each expert of the dispatcher")
        if not self.experts.monolithic:
            routing = route(logits, router, top_k, selection_bias=selection_bias)
            precise = routing.topk_weights.to(torch.promote_types(self.experts.spec.dtype, torch.float32))
            return self(x, routing.topk_ids, precise, weights, **options)
        shared_experts = options.pop("shared_experts", None)
        if options:
            raise ValueError(
                f"experts={self.experts.name!r} show no routing, so {', '.join(options)} can't apply to them: leave it "
                "out, or use experts that take topk_ids"
            )
        routed = self.experts.from_logits(x, logits, router, weights, selection_bias=selection_bias, top_k=top_k)
        return KernelOutput(routed, None if shared_experts is None else shared_experts(), None)

    def memory_plan(self, num_tokens: int, top_k: int, *, traffic: Traffic | None = None) -> MemoryPlan:
        """The buffers of a forward without gradients, with their bytes and its peak, before anything is allocated.

        Args:
            num_tokens: M, the most that any rank brings.
            top_k: K.
            traffic: the rows that move, where they are known; None: the most that any routing can move.

        Raises:
            ValueError: experts that plan no workspace.
        """
        return plan_forward(
            self.dispatcher,
            self.experts,
            self.layout,
            self.workspace,
            num_tokens=num_tokens,
            sent=dataclasses.replace(self._rows, top_k=top_k),
            chunk_tokens=self.chunk_tokens,
            capacity=self.overflow.capacity,
            traffic=traffic,
        )

    def wire_bytes(self, layout: Layout, top_k: int, *, adapters: bool = False) -> dict[str, tuple[int, int]]:
        """Bytes that this rank sends to and receives from other ranks in a call with `layout` (`KernelOutput.layout`):
        in `dispatch`, `combine`, `combine_backward` and `dispatch_backward`. Counts travel besides, where ranks
        exchange them.

        Args:
            top_k: K.
            adapters: rows carry adapter ids.
        """
        row = dataclasses.replace(self._rows, top_k=top_k).nbytes(adapters=adapters)
        return self.dispatcher.bytes_by_movement(layout, row)

    def _ids_as_wanted(self, topk_ids: Tensor) -> Tensor:
        return saturated_ids(topk_ids) if self.dispatcher.capabilities.topk_ids_dtype == torch.int32 else topk_ids

    def _destination(
        self, x: Tensor | QuantizedRows, out: Tensor | None, inplace: bool, weights: ExpertWeights, p: Tensor
    ) -> Tensor | None:
        """Where the result goes: `out`, x, or None for memory of its own."""
        if out is None and inplace is False:
            return None
        check_bool("inplace", inplace)
        name = "out" if out is not None else "inplace"
        if out is not None and inplace:
            raise ValueError("out=... with inplace=True: give one")
        if isinstance(x, QuantizedRows) and inplace:
            raise ValueError("inplace=True with quantized rows, which can't hold the result: give out=")
        rows = x.values if isinstance(x, QuantizedRows) else x
        parts = [getattr(weights, field.name) for field in dataclasses.fields(weights)]
        leaves = [rows, p, *(part for part in parts if isinstance(part, Tensor))]
        if torch.is_grad_enabled() and (weights.lora is not None or any(leaf.requires_grad for leaf in leaves)):
            raise ValueError(
                f"{name} while gradients are recorded: backward needs what it would overwrite; use no_grad"
            )
        to = rows if out is None else out
        right = (*x.shape[:1], self.experts.spec.hidden_size)
        fits = tuple(to.shape) == right and to.dtype == self.experts.spec.dtype and to.is_contiguous()
        if not fits or to.device != rows.device or to.requires_grad:
            raise ValueError(
                f"{name}: {to.dtype} {tuple(to.shape)} with strides {to.stride()} on {to.device} must be contiguous "
                f"{self.experts.spec.dtype} {right} on {rows.device}, without requires_grad"
            )
        return to

    def _scratch(self) -> Workspace | None:
        """The workspace of the lane that is running; each microbatch has its own."""
        microbatch = current_microbatch()
        if microbatch is None or microbatch.index == 0 or self.workspace is None:
            return self.workspace
        ep = self.dispatcher.ep
        return ep.workspace(microbatch.index) if ep is not None and self._shares_workspace else None

    def _compute(self, rows: ExpertInput, weights: ExpertWeights) -> ExpertOutput:
        """This rank's experts on the rows received, at most `chunk_tokens` at a time; reduced where experts compute and
        not where rows move, but for a dispatcher that does both in one."""
        size = self.chunk_tokens
        if size is None or rows.x.shape[0] <= size:
            output = self._compute_part(rows, weights)
            whole = self.dispatcher.ep is None or self.dispatcher.capabilities.reduces
            return output if whole else ExpertOutput(self.dispatcher.reduced(output))
        if weights.sums is None:
            weights = sum_gradients(weights)
        parts = split(rows, size)
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return ExpertOutput(torch.cat([weight_and_reduce(self._compute_part(part, weights)) for part in parts]))
        spec = self.experts.spec
        reduced = rows.x.new_empty((rows.x.shape[0], spec.hidden_size), dtype=spec.dtype)
        for part, place in zip(parts, reduced.split(size), strict=True):
            weight_and_reduce(self._compute_part(part, weights), out=place)
        return ExpertOutput(reduced)

    def _compute_part(self, rows: ExpertInput, weights: ExpertWeights) -> ExpertOutput:
        spec, experts = self.experts.spec, self.experts
        if not experts.takes_rows(rows.scheme, self.layout, rows.source is not None):
            rows = rows.dequantized(spec.dtype)
        delegate = self.dispatcher.capabilities.reduces and self.chunk_tokens is None
        if self.layout == "standard":
            return experts.output(rows, weights, delegate=delegate, workspace=self._scratch())
        made = batch(rows, self.overflow.capacity or rows.x.shape[0], with_weights=spec.weight_on_input)
        self.overflow.record(made.overflow)
        return experts.output(made.rows, weights, delegate=delegate, workspace=self._scratch())


def given(**schemes: str | None) -> dict[str, Any]:
    """Those that are set: dispatchers that send rows back wide know no others."""
    return {name: scheme for name, scheme in schemes.items() if scheme is not None}


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are views of one storage."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def split(rows: ExpertInput, size: int) -> list[ExpertInput]:
    """`rows` in parts of at most `size`, in order."""
    expected_m = rows.expected_m
    if expected_m is None:  # all parts are computed as the whole would be, to the bit
        expected_m = -(-rows.max_assignments // rows.num_local)
    fields = ("x", "topk_ids", "topk_weights", "x_scale", "adapter_ids", "source")
    parts = []
    for first in range(0, rows.x.shape[0], size):
        cut = {name: getattr(rows, name)[first : first + size] for name in fields if getattr(rows, name) is not None}
        pairs = min(rows.max_assignments, cut["topk_ids"].numel())
        parts.append(dataclasses.replace(rows, max_assignments=pairs, expected_m=expected_m, **cut))
    return parts
