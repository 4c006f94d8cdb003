"""`Flight`: rows launched and not yet taken up; and the manner in which they are launched.

Where the group says so, a movement runs beside what is computed: its kernels in the communication stream, the last one
included, so that the stream which computes waits for one event and does nothing of it itself. A *late* one begins when
somebody waits for it, behind only that which the current stream had to do when it was launched: one that must first
read counts on the host would else keep the host from launching what the device could do meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch

from epmoe.comm import EPGroup
from epmoe.comm.beside import Manner, keep_for_current_stream

Arrived = TypeVar("Arrived", bound=Iterable[Any])


class Flight(Generic[Arrived]):
    """A launched movement: `arrive` makes the messages usable, as often as one likes; a call gives the rows, once."""

    def __init__(self, arrive: Callable[[], None], finish: Callable[[], Arrived]) -> None:
        self.arrive = arrive
        self._finish = finish

    def __call__(self) -> Arrived:
        self.arrive()
        return self._finish()

    def then(self, made: Callable[[Arrived], Arrived]) -> Flight[Arrived]:
        """The same flight, whose rows are made into others when they are taken."""
        return Flight(self.arrive, lambda: made(self._finish()))


def late(start: Callable[[], Flight[Arrived]]) -> Flight[Arrived]:
    """A flight that starts when it is waited for, and keeps what it starts from no longer than that. One that could not
    start says so whenever it is waited for."""
    starts, started, failed = [start], list[Flight[Arrived]](), list[Exception]()

    def flight() -> Flight[Arrived]:
        if starts:
            try:
                with torch.no_grad():
                    started.append(starts.pop()())
            except Exception as error:
                failed.append(error)
        if failed:
            raise failed[0].with_traceback(None)  # whose frames hold the rows
        return started[0]

    return Flight(lambda: flight().arrive(), lambda: flight()._finish())


def in_manner(
    ep: EPGroup, manner: Manner | None, movement: Callable[[Any], Flight[Arrived]]
) -> Callable[[Any], Flight[Arrived]]:
    """`movement` (of rows, a tuple of tensors and None), launched in this manner."""
    if manner is None:
        return movement

    def start(rows: Any, after: torch.cuda.Event | None) -> Flight[Arrived]:
        beside = ep.beside
        if beside.device.type != "cuda":
            with beside.entered(None, by_copies=manner.copies):
                return movement(rows)
        with beside.entered(after, rows, manner.copies):
            received = movement(rows)()
            there = beside.now()

        def arrive() -> None:
            assert there is not None
            torch.cuda.current_stream(beside.device).wait_event(there)

        def finish() -> Arrived:
            keep_for_current_stream(received)
            return received

        return Flight(arrive, finish)

    def launched(rows: Any) -> Flight[Arrived]:
        after = ep.beside.now()
        if manner.late and ep.beside.puts_off:
            return late(lambda: start(rows, after))
        return start(rows, after)

    return launched
