"""What goes from a dispatcher to the experts: rows in the standard or the batched layout, the layout of one dispatch,
and what is still on its way.

T rows this rank received, H hidden size, K experts per token, E logical experts, L local experts, C places of a local
expert, S scales of a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from epmoe.quant.rows import QuantizedRows
from epmoe.quant.straight_through import widened

Value = TypeVar("Value")


class Pending(Generic[Value]):
    """Something on its way. `wait()` gives it, once or many times; `hook`, when there is one, only makes it arrive.

    Launch, do something else, then wait: what lies between overlaps with the transfer. The hook is light: it neither
    unpacks nor sums, so a scheduler may call it early and leave the rest to `wait`.
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
        expected_m: the rows an expert should expect, (M·R·K + E) // E. It picks the kernels' configuration and never
            what is computed; None where `max_assignments` is the true number, so that max_assignments / L is better.
        x_scale: `[T, S]` float32 where x is quantized, else None; see `quant.rows.QuantizedRows`.
        scheme: the scheme of quantized rows, else None.
        adapter_ids: `[T]` int32, the LoRA adapter of each row, outside the adapters' range for none; None: nobody's.
        source: `[T, H]` in the dtype that rows had, what stands for quantized x in autograd: whoever computes with x
            gives this its gradient, which reaches the tokens. It may be without memory of its own: it is never read.
            None: nobody wants a gradient.
    """

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    expert_map: Tensor
    num_local: int
    max_assignments: int
    handle: Layout
    expected_m: int | None = None
    x_scale: Tensor | None = None
    scheme: str | None = None
    adapter_ids: Tensor | None = None
    source: Tensor | None = None

    def dequantized(self, dtype: torch.dtype) -> ExpertInput:
        """The same rows in `dtype`, differentiably where they have a source; these themselves where they are not
        quantized."""
        if self.x_scale is None or self.scheme is None:
            return self
        x = widened(QuantizedRows(self.x, self.x_scale, self.scheme), self.source, dtype)
        return dataclasses.replace(self, x=x, x_scale=None, scheme=None, source=None)


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
        slot: `[T, K]` int32, the place l·C + c of each (row, k) pair received, -1 for none: what combine sums by.
        slot_weights: `[T, K]`, the router weights that combine applies; None where they are on the input.
        adapter_ids: `[L, C]` int32, as in `ExpertInput`.
        x_scale, scheme: of quantized x, `[L, C, S]` float32, and its scheme; else None.
    """

    x: Tensor
    expert_num_tokens: Tensor
    handle: Layout
    topk_weights: Tensor | None = None
    expected_m: int | None = None
    slot: Tensor | None = None
    slot_weights: Tensor | None = None
    adapter_ids: Tensor | None = None
    x_scale: Tensor | None = None
    scheme: str | None = None

    @property
    def num_local(self) -> int:
        """L."""
        return self.x.shape[0]
