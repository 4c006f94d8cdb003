"""What the collective dispatchers share: differentiable launch and wait, and the same as opaque ops for
`torch.compile`.

A dispatcher of this kind knows two movements: `send` (tokens to ranks, [M,·] -> [T,·]) and `give_back` (ranks to
tokens, [T,·] -> [M,·], summed over ranks). They are each other's adjoint, so four uses cover everything:

    dispatch  forward = send       backward = give_back
    combine   forward = give_back  backward = send

Launch and wait are separate autograd nodes. Backward therefore launches where forward waited and waits where forward
launched: what was computed between them in forward, its backward is computed between them in backward.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import Work

from epmoe.comm import EPGroup
from epmoe.comm.beside import keep_for_current_stream
from epmoe.comm.memory import Buffer, buffer
from epmoe.comm.recording import Recorder, recording
from epmoe.dispatch.base import Dispatcher, Traffic
from epmoe.dispatch.flight import Flight, in_manner
from epmoe.dispatch.inputs import ExpertInput, Layout, Pending
from epmoe.dispatch.messages import Extras, Rows, side_by_side
from epmoe.dispatch.reduce import ExpertOutput
from epmoe.dispatch.wire import RowSpec, buffers_sent_back
from epmoe.ops._leases import Lease
from epmoe.quant.rows import QuantizedRows, quantized
from epmoe.quant.straight_through import rounded

Movement = Callable[[Rows], Flight[Rows]]


@dataclasses.dataclass
class _Link:
    """Joins a launch node to its wait node, in forward and in backward."""

    launch: Movement
    adjoint: Movement
    ids: Tensor | None
    words: Tensor | None
    name: str
    sent: Tensor | None = None  # quantized values, which travel in the place of their source
    sms: int = 0  # that backward, too, leaves free while its rows are on their way
    recorder: Recorder | None = None
    forward: Flight | None = None
    backward: Flight | None = None
    received_ids: Tensor | None = None
    received: Tensor | None = None  # quantized values
    lease: Lease | None = None
    heard: Any = None

    def launching(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.recorder is None else self.recorder.launching(f"backward of {self.name}")

    def waiting(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.recorder is None else self.recorder.waiting(self.heard)


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: _Link, values: Tensor, weights: Tensor | None) -> Tensor:
        ctx.link = link
        sent = values if link.sent is None else link.sent
        link.forward = link.launch(Rows(sent, weights, link.ids, link.words))
        link.words = None
        return values.new_empty(0)  # carries the graph from launch to wait

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[None, Tensor, Tensor | None]:
        link = ctx.link
        flight, link.backward = link.backward, None
        assert flight is not None, "the wait node launches the gradient before the launch node waits for it"
        with link.waiting():
            gradient = flight()
        if link.lease is not None:
            link.lease.end()
        return None, gradient.values, gradient.weights


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: _Link, token: Tensor) -> tuple[Tensor, Tensor | None]:
        ctx.link = link
        flight, link.forward = link.forward, None
        assert flight is not None, "each launch is waited for once"
        rows = flight()
        link.received_ids = rows.ids
        if link.sent is None:
            return rows.values, rows.weights
        link.sent, link.received = None, rows.values
        return token.new_empty(1, 1).expand(rows.values.shape), rows.weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, values: Tensor, weights: Tensor | None) -> tuple[None, Tensor]:
        link = ctx.link
        with link.launching() as link.heard:
            link.backward = link.adjoint(Rows(values.contiguous(), weights, None))
        if link.sms:
            link.lease = Lease(values.device, link.sms)
        return None, values.new_empty(0)


def arrival(
    rows: Rows,
    launched: tuple[Tensor, Work],
    ep: EPGroup,
    operation: str,
    slot: Tensor | None = None,
    out: Tensor | None = None,
) -> Flight:
    """Waits for launched messages shaped like `rows` and unpacks them; with `slot [M, R]`, sums them over ranks."""
    messages, work = launched
    flying = [work]  # which may hold what was sent

    def arrive() -> None:
        for one in flying:
            ep.wait(one, operation)

    def finish() -> Rows:
        flying.clear()
        received = rows.unpack(messages)
        return received if slot is None else received.sum_over_ranks(slot, out)

    return Flight(arrive, finish)


def launch(movement: Movement, adjoint: Movement, rows: Rows, name: str, sms: int = 0) -> Flight:
    """Launches `movement` of `rows`; `adjoint` is its backward, where a gradient can flow.

    Args:
        name: of the movement, in traces.
        sms: kept free while the gradient is on its way; 0 where it moves alone.
    """
    given = rows.values if rows.source is None else rows.source
    leaves = (given,) if rows.weights is None else (given, rows.weights)
    if not torch.is_grad_enabled() or not any(leaf.requires_grad for leaf in leaves):
        return movement(rows)
    sent = None if rows.source is None else rows.values
    link = _Link(movement, adjoint, rows.ids, rows.words, name, sent, sms, recording())
    token = _Launch.apply(link, given, rows.weights)

    def finish() -> Rows:
        values, weights = _Wait.apply(link, token)
        if link.received is None:
            return Rows(values, weights, link.received_ids)
        return Rows(link.received, weights, link.received_ids, source=values)

    assert link.forward is not None
    return Flight(link.forward.arrive, finish)


class ExchangeDispatcher(Dispatcher):
    """A dispatcher made of the two movements, over one `EPGroup`."""

    ep: EPGroup
    copies: ClassVar[bool] = False  # its movements are all-to-alls of which all ranks know the most rows
    goes_beside_itself: ClassVar[bool] = False  # its movements know a stream and a number of SMs of their own

    def __init__(self, ep: EPGroup | None, *args: Any, layer: str = "moe", **kwargs: Any) -> None:
        if ep is None:
            raise ValueError(f"layer {layer!r}: dispatcher={self.name!r} needs an EPGroup; pass ep=, or use 'local'")
        super().__init__(ep, *args, layer=layer, **kwargs)

    @staticmethod
    @abstractmethod
    def send(rows: Rows, layout: Any, ep: EPGroup, operation: str) -> Flight:
        """Launches `[M, ·]` rows to the ranks `layout` names: `[T, ·]` when waited for."""

    @staticmethod
    @abstractmethod
    def give_back(rows: Rows, layout: Any, ep: EPGroup, operation: str, out: Tensor | None = None) -> Flight:
        """Launches `[T, ·]` rows back; waited for, their sum over ranks in rank order, in fp32: `[M, ·]`, in `out`
        where it is given."""

    @staticmethod
    def arrived(layout: Any, topk_ids: Tensor) -> Any:
        """The layout once the ids have arrived: what the handle is, and what gives rows back. Here the same."""
        return layout

    @staticmethod
    @abstractmethod
    def pack_layout(layout: Any) -> tuple[list[Tensor], list[int]]:
        """The layout as tensors and numbers, for an op's signature."""

    @staticmethod
    @abstractmethod
    def unpack_layout(tensors: Sequence[Tensor], numbers: Sequence[int]) -> Layout:
        """The inverse of `pack_layout`."""

    def sms_beside(self, copies: bool) -> int:
        """Copy engines take none, only the kernels that pack rows, add them up and meet: 4."""
        return 4 if copies and self.copies and self.ep.has_copies() else super().sms_beside(copies)

    def memory_plan(self, num_tokens: int, rows: RowSpec, traffic: Traffic, *, reduced: bool = False) -> list[Buffer]:
        message, back, *_ = rows.nbytes()
        byte = torch.uint8
        return [
            buffer("places", (num_tokens, self.ep.num_ranks), torch.int32),
            buffer("rows sent", (traffic.sent, message), byte, "dispatch"),
            buffer("rows received", (traffic.received, message), byte, "dispatch", "experts", "reduce"),
            *buffers_sent_back(traffic.received, rows),
            buffer("rows that came back", (self.rows_back(traffic), back), byte, "combine", "sum"),
            buffer("output", (num_tokens, rows.width), rows.dtype, "sum"),
        ]

    def rows_back(self, traffic: Traffic) -> int:
        """Rows that combine gets back: one for each that dispatch sent."""
        return traffic.sent

    def but_for_itself(self, rows: Tensor) -> Tensor:
        """`rows [2, R]` without those of a rank to itself, which cross no link."""
        rows[:, self.ep.rank] = 0
        return rows

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
        compiling, source = torch.compiler.is_compiling(), None
        if isinstance(x, Tensor) and torch.is_grad_enabled() and (x.requires_grad or topk_weights.requires_grad):
            if compiling:  # an op has one gradient for each of its arguments: wide rows, rounded all the same
                x, scheme = rounded(x, scheme, None), None
            source = x if scheme is not None else None
        x = quantized(x, scheme)
        values, ids, extras = Extras.join(topk_ids, adapter_ids, x)
        # before the host may have to wait for counts, which these do not depend on
        words = None if compiling else side_by_side(topk_weights, ids)
        made, handle = layout, layout

        def send(rows: Rows) -> Flight:
            nonlocal made
            if made is None:
                keep_for_current_stream([topk_ids])
                made = self.make_layout(topk_ids)
            return self.send(rows, made, self.ep, f"layer {self.layer!r}, dispatch")

        def received(rows: Tensor, weights: Tensor, ids: Tensor, source: Tensor | None = None) -> ExpertInput:
            nonlocal handle
            received_ids, others = extras.split(ids)
            if source is not None:  # backward may multiply a row that is nobody's by zero: it must not be NaN
                scales = others["x_scale"].view(torch.int32)
                others |= {"source": source, "x_scale": torch.where(scales == -1, 0, scales).view(torch.float32)}
            assert made is not None
            handle = self.arrived(made, received_ids)
            return self.expert_input(rows, received_ids, weights, handle, **others)

        if compiling:
            made = layout if layout is not None else self.make_layout(topk_ids)
            tensors, numbers = self.pack_layout(made)
            sent = _ops(self).send(values, topk_weights, ids, tensors, numbers, self.ep.name, self.ep.timeout)
            came = sent[0] if isinstance(x, QuantizedRows) else rounded(sent[0], None, grad_scheme)
            return Pending.done(received(came, *sent[1:]))

        flight = self._launch(
            send,
            lambda rows: self.give_back(
                rows.narrowed(grad_scheme), handle, self.ep, f"layer {self.layer!r}, backward of dispatch"
            ),
            Rows(values, topk_weights, ids, words, source),
            "dispatch",
        )
        beside = self.ep.beside.manner is not None

        def finish() -> ExpertInput:
            rows = flight()
            assert rows.ids is not None and rows.weights is not None
            if beside:
                keep_for_current_stream(vars(made).values())
            return received(rows.values, rows.weights, rows.ids, rows.source)

        return Pending(finish, flight.arrive)

    def combine_async(
        self,
        rows: Tensor | ExpertOutput,
        handle: Layout,
        *,
        out: Tensor | None = None,
        scheme: str | None = None,
        grad_scheme: str | None = None,
    ) -> Pending[Tensor]:
        compiling = torch.compiler.is_compiling()
        self.check_back(rows, handle, out)
        rows = self.reduced(rows)
        if compiling:
            tensors, numbers = self.pack_layout(handle)
            sums = _ops(self).give_back(rounded(rows, scheme, None), tensors, numbers, self.ep.name, self.ep.timeout)
            given = rounded(sums, None, grad_scheme)
            return Pending.done(given if out is None else out.copy_(given))

        def send_gradient(rows: Rows) -> Flight:
            flight = self.send(
                rows.narrowed(grad_scheme), handle, self.ep, f"layer {self.layer!r}, backward of combine"
            )
            return flight.then(Rows.widened)

        flight = self._launch(
            lambda rows: self.give_back(rows.narrowed(scheme), handle, self.ep, f"layer {self.layer!r}, combine", out),
            send_gradient,
            Rows(rows, None, None),
            "combine",
        )
        return Pending(lambda: flight().values, flight.arrive)

    def _launch(self, movement: Movement, adjoint: Movement, rows: Rows, name: str) -> Flight:
        """`launch` in the manner of the moment, and backward likewise."""
        manner = self.ep.beside.manner
        sms = 0 if manner is None else manner.sms
        if self.goes_beside_itself:
            manner = None
        back = None if manner is None else manner._replace(late=False)
        return launch(in_manner(self.ep, manner, movement), in_manner(self.ep, back, adjoint), rows, name, sms)


class CompiledOps(NamedTuple):
    """`send` and `give_back` as `torch.library` ops that return when the rows have arrived."""

    send: Callable[..., tuple[Tensor, Tensor, Tensor]]
    give_back: Callable[..., Tensor]


_OPS: dict[str, CompiledOps] = {}  # filled once per dispatcher class, at import


def _ops(dispatcher: ExchangeDispatcher) -> CompiledOps:
    return _OPS[dispatcher.name]


def register_ops(cls: type[ExchangeDispatcher]) -> type[ExchangeDispatcher]:
    """Class decorator: defines `epmoe::<name>_send`, `_give_back` and their adjoints.

    Inside a compiled graph a movement is one op with a fake and a backward: nothing to break the graph at, and no
    buffer that inductor could reuse while it is in flight. Overlap within the graph is what this form gives up.
    """
    name = cls.name

    def prepare(tensors: list[Tensor], numbers: list[int], group: str, timeout: float) -> tuple[Layout, EPGroup]:
        return cls.unpack_layout(tensors, numbers), EPGroup.from_name(group, timeout)

    @torch.library.custom_op(f"epmoe::{name}_send", mutates_args=())
    def send(
        values: Tensor,
        weights: Tensor,
        ids: Tensor,
        tensors: list[Tensor],
        numbers: list[int],
        group: str,
        timeout: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        layout, ep = prepare(tensors, numbers, group, timeout)
        rows = cls.send(Rows(values, weights, ids), layout, ep, f"{name} dispatch in a compiled graph")()
        assert rows.weights is not None and rows.ids is not None
        return rows.values.contiguous(), rows.weights.contiguous(), rows.ids.contiguous()

    @send.register_fake
    def _(values, weights, ids, tensors, numbers, group, timeout):  # type: ignore[no-untyped-def]
        rows = numbers[1]
        return tuple(part.new_empty((rows, part.shape[1])) for part in (values, weights, ids))

    @torch.library.custom_op(f"epmoe::{name}_send_values", mutates_args=())
    def send_values(values: Tensor, tensors: list[Tensor], numbers: list[int], group: str, timeout: float) -> Tensor:
        layout, ep = prepare(tensors, numbers, group, timeout)
        rows = cls.send(Rows(values, None, None), layout, ep, f"{name} backward of combine in a compiled graph")()
        return rows.values.contiguous()

    @send_values.register_fake
    def _(values, tensors, numbers, group, timeout):  # type: ignore[no-untyped-def]
        return values.new_empty((numbers[1], values.shape[1]))

    @torch.library.custom_op(f"epmoe::{name}_give_back", mutates_args=())
    def give_back(values: Tensor, tensors: list[Tensor], numbers: list[int], group: str, timeout: float) -> Tensor:
        layout, ep = prepare(tensors, numbers, group, timeout)
        return cls.give_back(Rows(values, None, None), layout, ep, f"{name} combine in a compiled graph")().values

    @give_back.register_fake
    def _(values, tensors, numbers, group, timeout):  # type: ignore[no-untyped-def]
        return values.new_empty((numbers[0], values.shape[1]))

    @torch.library.custom_op(f"epmoe::{name}_give_back_gradient", mutates_args=())
    def give_back_gradient(
        values: Tensor, weights: Tensor, tensors: list[Tensor], numbers: list[int], group: str, timeout: float
    ) -> tuple[Tensor, Tensor]:
        layout, ep = prepare(tensors, numbers, group, timeout)
        rows = cls.give_back(
            Rows(values, weights, None), layout, ep, f"{name} backward of dispatch in a compiled graph"
        )()
        assert rows.weights is not None
        return rows.values, rows.weights

    @give_back_gradient.register_fake
    def _(values, weights, tensors, numbers, group, timeout):  # type: ignore[no-untyped-def]
        return tuple(part.new_empty((numbers[0], part.shape[1])) for part in (values, weights))

    def keep_after_send(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, weights, _, tensors, numbers, ctx.group, ctx.timeout = inputs
        ids = output[2][:, : weights.shape[1]]
        known, ctx.numbers = cls.pack_layout(cls.arrived(cls.unpack_layout(tensors, numbers), ids))
        ctx.given = len(tensors)
        ctx.save_for_backward(*known)

    def send_backward(ctx: Any, values: Tensor, weights: Tensor, _: Any) -> tuple[Any, ...]:
        gradient = give_back_gradient(values, weights, list(ctx.saved_tensors), ctx.numbers, ctx.group, ctx.timeout)
        return *gradient, None, [None] * ctx.given, None, None, None

    def keep_after_give_back(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *_, tensors, ctx.numbers, ctx.group, ctx.timeout = inputs
        ctx.save_for_backward(*tensors)

    def give_back_backward(ctx: Any, values: Tensor) -> tuple[Any, ...]:
        gradient = send_values(values, list(ctx.saved_tensors), ctx.numbers, ctx.group, ctx.timeout)
        return gradient, [None] * len(ctx.saved_tensors), None, None, None

    send.register_autograd(send_backward, setup_context=keep_after_send)
    give_back.register_autograd(give_back_backward, setup_context=keep_after_give_back)
    _OPS[name] = CompiledOps(send, give_back)
    return cls
