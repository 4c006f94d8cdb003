"""Rank 0's decisions: which request waits, which runs in which slot of which rank, and when it is done.

    submit ──► waiting ──► (rank, slot) ──► done
                  └── cancelled, refused ────┘

The HTTP side calls `submit`, `cancel` and `load` from its thread, the engine `plan`, `take` and `stop` from its own.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from serving.batch import Sampling
from serving.engine import NO_TOKEN, Plan, Start
from serving.text import GrowingText

HEARTBEAT = 0.5  # seconds at most between two plans: other ranks learn and tell by then that the server is to stop


class Refused(Exception):
    """No request is taken now."""


class QueueFull(Refused):
    """As many requests wait as may."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one step adds to an answer."""

    token: int | None
    text: str
    finish: Literal["stop", "length"] | None = None  # of the last piece
    error: str | None = None  # of the last piece, when the request ended before it was done


@dataclasses.dataclass(eq=False)
class Request:
    """What is asked for.

    `emit` gets the pieces, one after the other, on the engine's thread; it must not block.
    """

    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    text: GrowingText
    end_tokens: frozenset[int]  # those after which a text is over
    emit: Callable[[Piece], None]
    num_tokens: int = 0
    cancelled: bool = False

    def take(self, token: int) -> bool:
        """Adds a token; whether it was the last."""
        self.num_tokens += 1
        ended = token in self.end_tokens
        text = "" if ended else self.text.push(token)
        finish: Literal["stop", "length"] | None = None
        if ended or self.text.stopped:
            finish = "stop"
        elif self.num_tokens == self.max_tokens:
            finish = "length"
        self.emit(Piece(token, text + (self.text.finish() if finish else ""), finish))
        return finish is not None


class Scheduler:
    """First come, first served, each on the rank that has least to do.

    Args:
        slots: requests at a time on one rank.
        max_waiting: requests that may wait for a slot.
        grace: seconds that running requests have to finish once the server is to stop.
    """

    def __init__(self, ranks: int, slots: int, max_waiting: int, grace: float) -> None:
        self.max_waiting, self.grace = max_waiting, grace
        self.done = [0] * ranks  # requests by rank
        self.stopping = False
        self._running: list[dict[int, Request]] = [{} for _ in range(ranks)]
        self._free = [list(range(slots)) for _ in range(ranks)]
        self._waiting: deque[Request] = deque()
        self._leaving: dict[int, list[int]] = {}
        self._deadline = 0.0
        self._turn = 0  # of several ranks that have as little to do
        self._changed = threading.Condition()

    # ---- from the HTTP side

    def submit(self, request: Request) -> None:
        """Lets it wait for a slot.

        Raises:
            QueueFull: too many wait.
            Refused: the server is stopping.
        """
        with self._changed:
            if self.stopping:
                raise Refused("the server is stopping")
            if len(self._waiting) >= self.max_waiting:
                raise QueueFull(f"{len(self._waiting)} requests wait already: try again later")
            self._waiting.append(request)
            self._changed.notify()

    def cancel(self, request: Request) -> None:
        """Lets go of a request that nobody waits for any more; one that is done stays so."""
        with self._changed:
            request.cancelled = True
            self._changed.notify()

    def load(self) -> tuple[list[int], int]:
        """Requests running on each rank, and waiting."""
        with self._changed:
            return [len(running) for running in self._running], len(self._waiting)

    # ---- from the engine

    def plan(self) -> Plan:
        """The next step; waits a while for something to do."""
        with self._changed:
            self._changed.wait_for(lambda: self.stopping or self._waiting or any(self._running), HEARTBEAT)
            if self.stopping:
                self._end_those("the server is stopping", running=time.monotonic() > self._deadline)
            self._let_cancelled_go()
            leave, self._leaving = self._leaving, {}
            decode = any(self._running)
            start = self._starts()
            return Plan(leave, decode, start, stop=self.stopping and not decode)

    def take(self, tokens: list[list[int]]) -> None:
        """The tokens of the step that was planned last, by rank and slot."""
        with self._changed:
            for rank, running in enumerate(self._running):
                for slot, request in list(running.items()):
                    token = tokens[rank][slot]
                    assert token != NO_TOKEN, f"rank {rank} gave no token for slot {slot}"
                    if request.take(token):
                        self.done[rank] += 1
                        self._let_go(rank, slot)

    def stop(self) -> None:
        """Takes no more requests; those that run have the grace to finish, those that wait are refused."""
        with self._changed:
            if not self.stopping:
                self.stopping, self._deadline = True, time.monotonic() + self.grace
                self._changed.notify()

    def fail(self, why: str) -> None:
        """Ends all requests: the engine has failed."""
        with self._changed:
            self.stopping = True
            self._end_those(why, running=True)

    # ---- both within the lock

    def _starts(self) -> dict[int, Start]:
        ranks = len(self._running)
        by_load = sorted(range(ranks), key=lambda rank: (len(self._running[rank]), (rank - self._turn) % ranks))
        starts = {}
        for rank in by_load:
            if self._waiting and self._free[rank]:
                request, slot = self._waiting.popleft(), self._free[rank].pop()
                self._running[rank][slot] = request
                starts[rank] = Start(slot, request.prompt, request.sampling)
                self._turn = rank + 1
        return starts

    def _let_cancelled_go(self) -> None:
        self._waiting = deque(request for request in self._waiting if not request.cancelled)
        for rank, running in enumerate(self._running):
            for slot in [slot for slot, request in running.items() if request.cancelled]:
                self._let_go(rank, slot)

    def _end_those(self, why: str, *, running: bool) -> None:
        """All that wait, and if so all that run."""
        ended = [*self._waiting, *(request for each in self._running for request in each.values() if running)]
        for request in ended:
            request.cancelled = True
            request.emit(Piece(None, "", error=why))

    def _let_go(self, rank: int, slot: int) -> None:
        del self._running[rank][slot]
        self._free[rank].append(slot)
        self._leaving.setdefault(rank, []).append(slot)
