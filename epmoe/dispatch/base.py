"""What every way of moving rows promises: `dispatch` to the ranks that own a token's experts, and `combine` back.

    x [M,H] ── dispatch ──► ExpertInput: rows [T,H] ── experts ──► one reduced row each [T,H] ── combine ──► [M,H]

Both verbs have an async form that returns `Pending`. State travels in `ExpertInput.handle`; a dispatcher keeps none, so
any number of layers, microbatches and recomputations may be in flight. Backward of each verb moves rows as the other.

M tokens on this rank, T rows this rank received, H hidden size, K experts per token, E logical experts, L local
experts.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from epmoe.comm import EPGroup

Value = TypeVar("Value")


class Pending(Generic[Value]):
    """Something on its way. `wait()` gives it, once or many times; `hook`, when there is one, only makes it arrive.

    Launch, do something else, then wait: what lies between overlaps with the transfer.
    """

    def __init__(self, finish: Callable[[], Value], hook: Callable[[], None] | None = None) -> None:
        self._finish: Callable[[], Value] | None = finish
        self._value: Value | None = None
        self.hook = hook

    @classmethod
    def done(cls, value: Value) -> Pending[Value]:
        """A `Pending` that has already arrived."""
        return cls(lambda: value)

    def wait(self) -> Value:
        """The value; blocks the host or the current stream until it is usable.

        Raises:
            PeerError: a peer did not deliver within the group's deadline.
        """
        if self._finish is not None:
            self._value = self._finish()
            self._finish = None
        return self._value  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Who sends what to whom for one set of `topk_ids`, without the data: made once, reusable by a recomputation.

    Subclasses add what their dispatcher needs. All of it follows from the ids alone.
    """

    num_tokens: int  # M
    num_rows: int  # T
    max_assignments: int  # upper bound, known to the host, of (row, local expert) pairs on this rank


@dataclasses.dataclass(frozen=True)
class ExpertInput:
    """Rows in the standard layout, as the experts get them.

    Attributes:
        x: `[T, H]`; inner stride 1, rows may lie apart (a view into a message buffer).
        topk_ids: `[T, K]` int32, logical ids, those of other ranks included; outside [0, E) means no expert.
        topk_weights: `[T, K]` float32 (float64 beside float64 rows).
        expert_map: `[E]` int32, logical -> local id or -1.
        num_local: L.
        max_assignments: at most this many (row, k) pairs belong to local experts.
        handle: what `combine` and both backwards need.
    """

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    expert_map: Tensor
    num_local: int
    max_assignments: int
    handle: Layout


@dataclasses.dataclass(frozen=True)
class BatchedInput:
    """Rows in the batched-experts layout, as the experts get them: C places for each local expert, filled from 0.

    Attributes:
        x: `[L, C, H]`, inner stride 1. Rows past an expert's count may hold anything, NaN included: they are never
        read.
        expert_num_tokens: `[L]` int32 on the device, how many rows each expert has; each at most C.
        handle: what `combine` and both backwards need.
        topk_weights: `[L, C]` float32 (float64 beside float64 rows), each row's router weight. Needed only where the
            weight is applied to the input: on the output `combine` applies it.
        expected_m: the rows an expert should expect, (M·R·K + E) // E. It picks the kernels' configuration and never
            what is computed; None expects all C.
    """

    x: Tensor
    expert_num_tokens: Tensor
    handle: Layout
    topk_weights: Tensor | None = None
    expected_m: int | None = None

    @property
    def num_local(self) -> int:
        """L."""
        return self.x.shape[0]


@dataclasses.dataclass(frozen=True)
class DispatcherCapabilities:
    """What a dispatcher can do, stated so that nobody finds out by a crash."""

    layouts: tuple[str, ...] = ("standard",)
    asynchronous: bool = False
    cuda_graph: bool = False
    autograd: bool = True
    host_sync: bool = False  # waits for the device once per dispatch, to learn how many rows arrive
    backends: tuple[str, ...] = ()  # of torch.distributed; empty: needs none


class Dispatcher(ABC):
    """Base of `local`, `all_gather`, `all_to_all` and `all_to_all_fixed`.

    Args:
        ep: the group, or None for one process.
        owner: `[E]` int32, the rank that owns each expert.
        expert_map: `[E]` int32, logical -> local id on this rank, or -1.
        num_local: L.
        layer: a name for error messages.
        max_tokens_per_rank: the most tokens any rank brings to one call; needed by those that reserve room for them.
    """

    name: ClassVar[str]
    capabilities: ClassVar[DispatcherCapabilities]

    def __init__(
        self,
        ep: EPGroup | None,
        owner: Tensor,
        expert_map: Tensor,
        num_local: int,
        *,
        layer: str = "moe",
        max_tokens_per_rank: int | None = None,
    ) -> None:
        self.ep = ep
        self.owner = owner
        self.expert_map = expert_map
        self.num_local = num_local
        self.layer = layer
        self.max_tokens_per_rank = max_tokens_per_rank

    @property
    def where(self) -> str:
        """Layer and rank, as errors name them."""
        return f"layer {self.layer!r}, rank {self.ep.rank if self.ep is not None else 0} of {self.num_ranks}"

    @property
    def num_ranks(self) -> int:
        """R: how many dispatchers of this layer exchange rows with each other."""
        return self.ep.num_ranks if self.ep is not None else 1

    @abstractmethod
    def make_layout(self, topk_ids: Tensor) -> Layout:
        """The movement that `topk_ids [M, K]` ask for. Collective where ranks must tell each other sizes."""

    @abstractmethod
    def dispatch_async(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, *, layout: Layout | None = None
    ) -> Pending[ExpertInput]:
        """Launches `x [M, H]` and its routing towards the owners; `layout` reuses one made for the same ids."""

    @abstractmethod
    def combine_async(self, rows: Tensor, handle: Layout) -> Pending[Tensor]:
        """Launches `rows [T, H]`, one reduced row per row received, back to their tokens: `[M, H]` when waited for.

        Until then `rows` may be what the transfer reads: leave them as they are.
        """

    @abstractmethod
    def wire_bytes(self, handle: Layout, row_bytes: int) -> tuple[int, int]:
        """Bytes that this rank sends to and receives from other ranks in one dispatch of rows of `row_bytes`."""

    def dispatch(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, *, layout: Layout | None = None
    ) -> ExpertInput:
        """`dispatch_async(...).wait()`."""
        return self.dispatch_async(x, topk_ids, topk_weights, layout=layout).wait()

    def combine(self, rows: Tensor, handle: Layout) -> Tensor:
        """`combine_async(...).wait()`."""
        return self.combine_async(rows, handle).wait()

    def expert_input(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, handle: Layout) -> ExpertInput:
        """Puts what arrived beside this rank's expert map."""
        return ExpertInput(x, topk_ids, topk_weights, self.expert_map, self.num_local, handle.max_assignments, handle)

    def check(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
        """Raises `ValueError` for shapes, dtypes, devices or strides that can't be dispatched."""
        where = f"layer {self.layer!r}: "
        if x.dim() != 2 or topk_ids.dim() != 2 or topk_weights.shape != topk_ids.shape:
            raise ValueError(
                f"{where}dispatch takes x [M, H], topk_ids [M, K], topk_weights [M, K], got {tuple(x.shape)}, "
                f"{tuple(topk_ids.shape)}, {tuple(topk_weights.shape)}"
            )
        if x.shape[0] != topk_ids.shape[0]:
            raise ValueError(f"{where}x has {x.shape[0]} rows and topk_ids {topk_ids.shape[0]}: one per token each")
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(f"{where}x.stride(-1)={x.stride(-1)}: rows must be dense, call x.contiguous()")
        if topk_ids.dtype != torch.int32:
            raise ValueError(f"{where}topk_ids.dtype={topk_ids.dtype}: must be torch.int32")
        if topk_weights.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{where}topk_weights.dtype={topk_weights.dtype}: must be torch.float32 (or float64)")
        for name, tensor in (("x", x), ("topk_ids", topk_ids), ("topk_weights", topk_weights)):
            if tensor.device != self.owner.device:
                raise ValueError(f"{where}{name} is on {tensor.device}, the layer on {self.owner.device}")
