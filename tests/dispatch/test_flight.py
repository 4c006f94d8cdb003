"""Flights: late ones start once, when somebody waits, without recording gradients, and then keep nothing alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from epmoe import PeerError
from epmoe.dispatch.flight import Flight, late


def test_a_late_flight_starts_at_the_first_wait_and_once() -> None:
    events: list[str] = []

    def start() -> Flight[tuple[str]]:
        events.append(f"start, gradients {torch.is_grad_enabled()}")
        return Flight(lambda: events.append("arrive"), lambda: ("rows",))

    flight = late(start)
    assert events == []
    flight.arrive()
    assert flight() == ("rows",)
    assert events == ["start, gradients False", "arrive", "arrive"] and torch.is_grad_enabled()


def test_a_flight_that_has_started_lets_go_of_what_it_started_from() -> None:
    rows = torch.zeros(3)
    alive = weakref.ref(rows)

    def start(rows: torch.Tensor = rows) -> Flight[tuple[int]]:
        return Flight(lambda: None, lambda: (3,))

    flight = late(start)
    del rows, start
    assert alive() is not None
    flight.arrive()
    gc.collect()
    assert alive() is None and flight() == (3,)


def test_a_late_flight_that_failed_fails_whenever_it_is_waited_for() -> None:
    started = []

    def start() -> Flight[tuple[str]]:
        started.append(1)
        raise PeerError("rank 1 has not delivered")

    flight = late(start)
    for wait in (flight.arrive, flight.arrive, flight, flight.then(lambda rows: rows)):
        with pytest.raises(PeerError, match="rank 1 has not delivered"):
            wait()
    assert started == [1], "an exchange that failed is not begun again"
