"""Beside what is computed: the stream in which a group's rows move, between launch and wait of dispatch and combine.

    current stream        attention 0 ─ attention 1 ─────────────── experts 0 ─ ...
    communication stream        └ event ─ dispatch 0 ─ event ┘

Each launch waits for an event of the stream that computes, recorded where the rows are ready, and the other way round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Manner(NamedTuple):
    """How rows are launched: with kernels of at most `sms` SMs; at once, or (`late`) when they are waited for; by copy
    engines where that can be, which all ranks must want alike."""

    sms: int
    late: bool
    copies: bool


class Beside:
    """The communication stream of a group, and how what is launched now should use it.

    On CPU there are no streams: rows move as the backend moves them, and only `late` has a meaning.

    Attributes:
        manner: of what is launched now; None: in the current stream, with the whole chip.
        puts_off: whether launches may be `late`. They are on CUDA, where a launch that begins by waiting for counts
            should come after the other microbatch's kernels: meanwhile the device computes those. Over gloo it is the
            launch that lets rows move at all.
        copies: whether rows beside a computation go by copy engines (`comm.copies`) where the ranks reach each other.
        by_copies: whether what is launched now should go so.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.manner: Manner | None = None
        self.puts_off = device.type == "cuda"
        self.copies = device.type == "cuda"
        self.by_copies = False
        self._stream: torch.cuda.Stream | None = None

    @property
    def sms(self) -> int:
        """Of the manner; 0 without one."""
        return 0 if self.manner is None else self.manner.sms

    @property
    def stream(self) -> torch.cuda.Stream:
        """Of a higher priority than computation: few programs, which peers wait for."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device, priority=-1)
        return self._stream

    @contextlib.contextmanager
    def launching(self, manner: Manner | None) -> Iterator[None]:
        """What the body launches is launched in this manner. The body does not yield to other microbatches."""
        before, self.manner = self.manner, manner
        try:
            yield
        finally:
            self.manner = before

    def now(self) -> torch.cuda.Event | None:
        """What the current stream has to do so far: what rows wait for that are launched later; None on CPU."""
        return None if self.device.type != "cuda" else torch.cuda.current_stream(self.device).record_event()

    def alone(self) -> contextlib.AbstractContextManager[object]:
        """The body's kernels run in the communication stream and wait for nothing that is computed."""
        return contextlib.nullcontext() if self.device.type != "cuda" else torch.cuda.stream(self.stream)

    @contextlib.contextmanager
    def entered(
        self, after: torch.cuda.Event | None, arguments: Iterable[object] = (), by_copies: bool = False
    ) -> Iterator[None]:
        """The body's kernels run in the communication stream, once `after` has happened. `arguments` that are tensors
        may be given up by the caller before those kernels have read them."""
        self.by_copies = by_copies and self.copies
        try:
            if self.device.type != "cuda":
                yield
                return
            assert after is not None
            self.stream.wait_event(after)
            with torch.cuda.stream(self.stream):
                keep_for_current_stream(arguments)
                yield
        finally:
            self.by_copies = False


def keep_for_current_stream(values: Iterable[object]) -> None:
    """The memory of the CUDA tensors among `values` is not given to others before what the current stream has to do by
    then, when they are let go of, is done."""
    stream = None
    for value in values:
        if isinstance(value, Tensor) and value.is_cuda:
            stream = stream or torch.cuda.current_stream(value.device)
            value.record_stream(stream)
