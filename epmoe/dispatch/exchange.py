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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import Work

from epmoe.comm import EPGroup
from epmoe.comm.memory import Buffer, buffer
from epmoe.dispatch.base import Dispatcher, ExpertInput, Layout, Pending, Traffic
from epmoe.dispatch.reduce import ExpertOutput
from epmoe.ops.gather_sum import gather_sum
from epmoe.ops.pack_rows import pack_rows, row_layout, unpack_rows
from epmoe.quant.rows import QuantizedRows, quantized


class Rows(NamedTuple):
    """What belongs to each row and travels with it in one message; `weights` and `ids` may be absent."""

    values: Tensor  # [n, H]
    weights: Tensor | None  # [n, K] float: router weights, or their gradient
    ids: Tensor | None  # [n, K+] int32: ids, and whatever else no gradient flows to; see `Extras`
    words: Tensor | None = None  # weights and ids as they travel, where they have been put side by side already

    @property
    def word_counts(self) -> tuple[int, int]:
        """How many 4-byte words of weights and of ids follow the values."""
        weights = 0 if self.weights is None else self.weights.shape[1] * self.weights.element_size() // 4
        return weights, 0 if self.ids is None else self.ids.shape[1]

    @property
    def message_bytes(self) -> int:
        """Bytes of one row's message."""
        return row_layout(self.values.shape[1], self.values.dtype, sum(self.word_counts)).row_bytes

    @property
    def bare(self) -> bool:
        """Whether a message is nothing but a row's values, so that dense rows are messages as they lie."""
        width = self.values.shape[1] * self.values.element_size()
        return self.weights is None and self.ids is None and self.message_bytes == width

    def pack(self, index: Tensor | None) -> Tensor:
        """Messages `[S, bytes]` of rows `index [S]` (None: all); an index outside `[0, n)` makes a row without
        experts. May be the rows themselves."""
        if index is None and self.bare and self.values.is_contiguous():
            return self.values.view(torch.uint8)
        words = self.words if self.words is not None else side_by_side(self.weights, self.ids)
        return pack_rows(self.values, words, index)

    def unpack(self, messages: Tensor) -> Rows:
        """Views into received `messages`, which are shaped like these rows."""
        if self.bare:
            return Rows(messages.view(self.values.dtype), None, None)
        weight_words, id_words = self.word_counts
        values, words = unpack_rows(messages, self.values.shape[1], self.values.dtype, weight_words + id_words)
        weights = None if self.weights is None else words[:, :weight_words].view(self.weights.dtype)
        return Rows(values, weights, None if self.ids is None else words[:, weight_words:])

    def sum_over_ranks(self, slot: Tensor, out: Tensor | None = None) -> Rows:
        """Adds up the rows that `slot [M, R]` names (-1: none), in rank order, in fp32."""
        weights = None if self.weights is None else gather_sum(self.weights, slot, None, self.weights.dtype)
        return Rows(gather_sum(self.values, slot, None, self.values.dtype, out=out), weights, None)


def side_by_side(weights: Tensor | None, ids: Tensor | None) -> Tensor | None:
    """The bits of `weights [n, K]` and the `ids [n, K]` as int32 words, one row of a message each; no gradient."""
    words = [] if weights is None else [weights.detach().contiguous().view(torch.int32)]
    words += [] if ids is None else [ids]
    return torch.cat(words, dim=1) if len(words) > 1 else words[0] if words else None


class Extras(NamedTuple):
    """What travels as int32 words beside a row's ids: its LoRA adapter and the bits of its scales."""

    top_k: int
    adapter: bool
    scheme: str | None

    @classmethod
    def join(
        cls, topk_ids: Tensor, adapter_ids: Tensor | None, x: Tensor | QuantizedRows
    ) -> tuple[Tensor, Tensor, Extras]:
        """The rows' values, their words `[M, K + ...]`, and how to take the words apart."""
        values, scales, scheme = (x.values, x.scales, x.scheme) if isinstance(x, QuantizedRows) else (x, None, None)
        words = [topk_ids]
        if adapter_ids is not None:
            words.append(adapter_ids[:, None])
        if scales is not None:
            words.append(scales.view(torch.int32))
        joined = torch.cat(words, dim=1) if len(words) > 1 else topk_ids
        return values, joined, cls(topk_ids.shape[1], adapter_ids is not None, scheme)

    def split(self, words: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """`topk_ids` and the other fields of an `ExpertInput`, views into the words."""
        first_scale = self.top_k + self.adapter
        adapter_ids = words[:, self.top_k] if self.adapter else None
        scales = None if self.scheme is None else words[:, first_scale:].view(torch.float32)
        return words[:, : self.top_k], {"adapter_ids": adapter_ids, "x_scale": scales, "scheme": self.scheme}


class Flight:
    """A launched movement: `arrive` makes the messages usable, as often as one likes; a call gives the rows, once."""

    def __init__(self, arrive: Callable[[], None], finish: Callable[[], Rows]) -> None:
        self.arrive = arrive
        self._finish = finish

    def __call__(self) -> Rows:
        self.arrive()
        return self._finish()


Movement = Callable[[Rows], Flight]


@dataclasses.dataclass
class _Link:
    """Joins a launch node to its wait node, in forward and in backward."""

    launch: Movement
    adjoint: Movement
    ids: Tensor | None
    words: Tensor | None
    forward: Flight | None = None
    backward: Flight | None = None
    received_ids: Tensor | None = None


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: _Link, values: Tensor, weights: Tensor | None) -> Tensor:
        ctx.link = link
        link.forward = link.launch(Rows(values, weights, link.ids, link.words))
        link.words = None
        return values.new_empty(0)  # carries the graph from launch to wait

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[None, Tensor, Tensor | None]:
        flight, ctx.link.backward = ctx.link.backward, None
        assert flight is not None, "the wait node launches the gradient before the launch node waits for it"
        gradient = flight()
        return None, gradient.values, gradient.weights


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: _Link, token: Tensor) -> tuple[Tensor, Tensor | None]:
        ctx.link = link
        flight, link.forward = link.forward, None
        assert flight is not None, "each launch is waited for once"
        rows = flight()
        link.received_ids = rows.ids
        return rows.values, rows.weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, values: Tensor, weights: Tensor | None) -> tuple[None, Tensor]:
        ctx.link.backward = ctx.link.adjoint(Rows(values.contiguous(), weights, None))
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

    def finish() -> Rows:
        received = rows.unpack(messages)
        return received if slot is None else received.sum_over_ranks(slot, out)

    return Flight(lambda: ep.wait(work, operation), finish)


def launch(movement: Movement, adjoint: Movement, rows: Rows) -> Flight:
    """Launches `movement` of `rows`; `adjoint` is its backward, where a gradient can flow."""
    leaves = (rows.values,) if rows.weights is None else (rows.values, rows.weights)
    if not torch.is_grad_enabled() or not any(leaf.requires_grad for leaf in leaves):
        return movement(rows)
    link = _Link(movement, adjoint, rows.ids, rows.words)
    token = _Launch.apply(link, rows.values, rows.weights)

    def finish() -> Rows:
        values, weights = _Wait.apply(link, token)
        return Rows(values, weights, link.received_ids)

    assert link.forward is not None
    return Flight(link.forward.arrive, finish)


class ExchangeDispatcher(Dispatcher):
    """A dispatcher made of the two movements, over one `EPGroup`."""

    ep: EPGroup

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

    def memory_plan(
        self, num_tokens: int, width: int, dtype: torch.dtype, message_bytes: int, traffic: Traffic
    ) -> list[Buffer]:
        sent, received, _ = traffic
        byte = torch.uint8
        return [
            buffer("places", (num_tokens, self.ep.num_ranks), torch.int32),
            buffer("rows sent", (sent, message_bytes), byte, "dispatch"),
            buffer("rows received", (received, message_bytes), byte, "dispatch", "experts", "combine"),
            buffer("reduced rows sent back", (received, width), dtype, "combine", "sum"),
            buffer("rows that came back", (self.rows_back(traffic), width), dtype, "combine", "sum"),
            buffer("output", (num_tokens, width), dtype, "sum"),
        ]

    def rows_back(self, traffic: Traffic) -> int:
        """Rows that combine gets back: one for each that dispatch sent."""
        return traffic.sent

    def dispatch_async(
        self,
        x: Tensor | QuantizedRows,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        layout: Layout | None = None,
        adapter_ids: Tensor | None = None,
        scheme: str | None = None,
    ) -> Pending[ExpertInput]:
        x = quantized(x, scheme)
        self.check(x, topk_ids, topk_weights, adapter_ids)
        values, ids, extras = Extras.join(topk_ids, adapter_ids, x)
        compiling = torch.compiler.is_compiling()
        # before the host may have to wait for counts, which these do not depend on
        words = None if compiling else side_by_side(topk_weights, ids)
        made = layout if layout is not None else self.make_layout(topk_ids)

        handle = made

        def received(rows: Tensor, weights: Tensor, ids: Tensor) -> ExpertInput:
            nonlocal handle
            received_ids, others = extras.split(ids)
            handle = self.arrived(made, received_ids)
            return self.expert_input(rows, received_ids, weights, handle, **others)

        if compiling:
            tensors, numbers = self.pack_layout(made)
            return Pending.done(
                received(*_ops(self).send(values, topk_weights, ids, tensors, numbers, self.ep.name, self.ep.timeout))
            )

        flight = launch(
            lambda rows: self.send(rows, made, self.ep, f"layer {self.layer!r}, dispatch"),
            lambda rows: self.give_back(rows, handle, self.ep, f"layer {self.layer!r}, backward of dispatch"),
            Rows(values, topk_weights, ids, words),
        )

        def finish() -> ExpertInput:
            rows = flight()
            assert rows.ids is not None and rows.weights is not None
            return received(rows.values, rows.weights, rows.ids)

        return Pending(finish, flight.arrive)

    def combine_async(
        self, rows: Tensor | ExpertOutput, handle: Layout, *, out: Tensor | None = None
    ) -> Pending[Tensor]:
        compiling = torch.compiler.is_compiling()
        rows = self.reduced(rows)
        if rows.dim() != 2 or (not compiling and rows.shape[0] != handle.num_rows):
            raise ValueError(
                f"layer {self.layer!r}: combine takes one row per row dispatched, [{handle.num_rows}, H], "
                f"got {tuple(rows.shape)}"
            )
        if compiling:
            tensors, numbers = self.pack_layout(handle)
            given = _ops(self).give_back(rows, tensors, numbers, self.ep.name, self.ep.timeout)
            return Pending.done(given if out is None else out.copy_(given))

        flight = launch(
            lambda rows: self.give_back(rows, handle, self.ep, f"layer {self.layer!r}, combine", out),
            lambda rows: self.send(rows, handle, self.ep, f"layer {self.layer!r}, backward of combine"),
            Rows(rows, None, None),
        )
        return Pending(lambda: flight().values, flight.arrive)


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
