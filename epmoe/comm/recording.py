"""Where a trace listens: launches of rows, waits for them, and what is computed under which name.

Whoever moves rows or computes asks `recording()`; without a trace that is one look-up. What listens, and what it makes
of it, is `overlap.trace`.
"""

from __future__ import annotations

import contextlib
import contextvars
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch


class Recorder(ABC):
    """Listens. Bodies of these contexts do not yield to other microbatches, except `microbatch` itself."""

    @abstractmethod
    def launching(self, name: str) -> AbstractContextManager[Any]:
        """The body launches rows; gives what `waiting` takes."""

    @abstractmethod
    def waiting(self, flight: Any) -> AbstractContextManager[Any]:
        """The body waits for rows that were launched, and takes them up."""

    @abstractmethod
    def computing(self, name: str) -> AbstractContextManager[Any]:
        """The body computes."""

    @abstractmethod
    def microbatch(self, index: int) -> AbstractContextManager[Any]:
        """The body runs this microbatch until it yields."""

    def called(self) -> None:
        """A layer begins."""
        return


_RECORDER: contextvars.ContextVar[Recorder | None] = contextvars.ContextVar("epmoe_recorder", default=None)


def recording() -> Recorder | None:
    """Who listens in this context, if anybody does; compiled code is heard by nobody."""
    return None if torch.compiler.is_compiling() else _RECORDER.get()


@contextlib.contextmanager
def listening(recorder: Recorder) -> Iterator[None]:
    """`recorder` hears what the body does.

    Raises:
        ValueError: somebody listens already.
    """
    if recording() is not None:
        raise ValueError("a trace inside a trace: end the outer one first")
    token = _RECORDER.set(recorder)
    try:
        yield
    finally:
        _RECORDER.reset(token)


def listen_from_here(recorder: Recorder) -> None:
    """The same until the process ends."""
    _RECORDER.set(recorder)


def computing(name: str) -> AbstractContextManager[Any]:
    """The body computes, for whoever listens."""
    recorder = recording()
    return contextlib.nullcontext() if recorder is None else recorder.computing(name)
