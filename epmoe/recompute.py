"""Activation checkpointing that repeats the arithmetic and not the decisions.

Recomputing a router may choose other experts than the first forward did: one bit in a logit is enough, and then rows of
other counts meet the gradients. `checkpoint` therefore keeps each layer's ids and layout (a few bytes per token) and
hands them to the recomputation, which so needs no count exchange either.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch.utils.checkpoint
from torch import Tensor

from epmoe.dispatch.inputs import Layout


@dataclasses.dataclass
class Tape:
    """The decisions of the `MoELayer`s called within one checkpointed function, in order."""

    entries: list[tuple[str, Tensor, Layout]] = dataclasses.field(default_factory=list)
    position: int | None = None  # None while recording

    @property
    def replaying(self) -> bool:
        """Whether the first forward is over and its decisions are being reused."""
        return self.position is not None

    def record(self, layer: str, topk_ids: Tensor, layout: Layout) -> None:
        """Keeps what one layer decided."""
        self.entries.append((layer, topk_ids, layout))

    def next(self, layer: str) -> tuple[Tensor, Layout]:
        """What `layer` decided in the first forward.

        Raises:
            RuntimeError: the recomputation calls other layers than the first forward did.
        """
        assert self.position is not None
        if self.position >= len(self.entries) or self.entries[self.position][0] != layer:
            recorded = [name for name, _, _ in self.entries]
            raise RuntimeError(
                f"recomputation called layer {layer!r} as MoE layer number {self.position}, the first forward called "
                f"{recorded}: a checkpointed function must do the same both times"
            )
        _, topk_ids, layout = self.entries[self.position]
        self.position += 1
        return topk_ids, layout


_TAPE: contextvars.ContextVar[Tape | None] = contextvars.ContextVar("epmoe_tape", default=None)


def current_tape() -> Tape | None:
    """The tape of the checkpointed function that is running, if any; in a compiled graph the compiler recomputes."""
    return None if torch.compiler.is_compiling() else _TAPE.get()


@contextlib.contextmanager
def _running(tape: Tape, replay: bool) -> Iterator[None]:
    tape.position = 0 if replay else None
    token = _TAPE.set(tape)
    try:
        yield
    finally:
        _TAPE.reset(token)


def reuse_routing() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For `torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=epmoe.reuse_routing)`."""
    tape = Tape()
    return _running(tape, replay=False), _running(tape, replay=True)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint` for functions that contain `MoELayer`s: recomputation reuses their routing.

    The plain form works as well; it routes and exchanges counts a second time.
    """
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, context_fn=reuse_routing, **kwargs)
