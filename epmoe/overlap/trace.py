"""`trace`: a timeline of what the body computes and which rows it moves, on a GPU or on the host.

On a GPU kineto (torch.profiler) says when each kernel ran. Those launched while rows are launched or waited for, and
those of NCCL, of one-sided stores and of copies between GPUs, are communication; the others compute. What the host
launched for a microbatch is that microbatch's; kernels of the backward pass, and of CUDA graphs, belong to none.
Without a GPU the host's own clock counts: a microbatch computes from when it is resumed until it yields, but for
launches and waits.
"""

from __future__ import annotations

import atexit
import bisect
import contextlib
import dataclasses
import json
import os
import re
import tempfile
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from epmoe.comm.recording import Recorder, listen_from_here, listening
from epmoe.overlap.timeline import Span, Timeline

COMMUNICATION = re.compile(  # by name, as inside CUDA graphs
    r"nccl|_send_kernel|_give_back_kernel|symmetric_memory|Memcpy PtoP", re.IGNORECASE
)
_MARK = re.compile(r"epmoe (communication|microbatch): (.*)")


class Traced:
    """What `trace` gives; `timeline` is there when the body has ended."""

    def __init__(self) -> None:
        self._timeline: Timeline | None = None

    @property
    def timeline(self) -> Timeline:
        """The spans of the body.

        Raises:
            ValueError: the body still runs.
        """
        if self._timeline is None:
            raise ValueError("a trace has no timeline before its body has ended")
        return self._timeline


@contextlib.contextmanager
def trace(
    path: Path | str | None = None, *, png: Path | str | None = None, device: torch.device | str | None = None
) -> Iterator[Traced]:
    """The body's timeline, also written to `path` (Chrome's trace format) and drawn to `png`.

    Args:
        device: `cuda` or `cpu`: whose clock counts. None: CUDA where there is one.

    Raises:
        ValueError: a trace inside a trace; `png` without matplotlib.

    Example::

        with epmoe.overlap.trace("step.json") as traced:
            step()
        print(traced.timeline.exposed_us)
    """
    taken = Traced()
    recorder = _recorder(device)
    with listening(recorder), recorder.on():
        yield taken
    taken._timeline = timeline = recorder.timeline()
    if path is not None:
        timeline.save(path)
    if png is not None:
        timeline.plot(png)


class _Switched(Recorder):
    """A recorder that hears nothing unless it is on."""

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        self.begin()
        try:
            yield
        finally:
            self.end()

    @abstractmethod
    def begin(self) -> None:
        """Hears from here."""

    @abstractmethod
    def end(self) -> None:
        """Until here."""

    @abstractmethod
    def timeline(self) -> Timeline:
        """What it heard."""


def _recorder(device: torch.device | str | None) -> HostRecorder | DeviceRecorder:
    kind = torch.device(device).type if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    return DeviceRecorder() if kind == "cuda" else HostRecorder()


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


# ---- the host's clock


@dataclasses.dataclass
class _Flight:
    """Rows launched: their name, when, and the microbatch whose they are."""

    name: str
    start: float
    lane: int | None


class HostRecorder(_Switched):
    """Spans by the host's clock, for rows that move while the host computes: gloo, shared memory."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._lane: int | None = None
        self._name = "compute"
        self._since: float | None = None  # when the present computation began
        self._zero = 0.0

    def _now(self) -> float:
        return (time.perf_counter() - self._zero) * 1e6

    def begin(self) -> None:
        self._zero = time.perf_counter()
        self._since = 0.0

    def end(self) -> None:
        self._pause()
        self._since = None

    def timeline(self) -> Timeline:
        return Timeline(tuple(self._spans), _rank())

    def _pause(self) -> float:
        now = self._now()
        if self._since is not None and now > self._since:
            self._spans.append(Span("compute", self._name, self._since, now, self._lane))
        return now

    @contextlib.contextmanager
    def _apart(self) -> Iterator[float]:
        """The body is no computation."""
        start = self._pause()
        running, self._since = self._since is not None, None
        try:
            yield start
        finally:
            self._since = self._now() if running else None

    @contextlib.contextmanager
    def launching(self, name: str) -> Iterator[_Flight]:
        with self._apart() as start:
            yield _Flight(name, start, self._lane)

    @contextlib.contextmanager
    def waiting(self, flight: _Flight) -> Iterator[None]:
        with self._apart() as start:
            try:
                yield
            finally:
                end = self._now()
                self._spans.append(Span("communication", flight.name, flight.start, end, flight.lane))
                self._spans.append(Span("wait", flight.name, start, end, flight.lane))

    @contextlib.contextmanager
    def computing(self, name: str) -> Iterator[None]:
        now, before = self._pause(), self._name
        self._since = None if self._since is None else now
        self._name = name
        try:
            yield
        finally:
            now = self._pause()
            self._since = None if self._since is None else now
            self._name = before

    @contextlib.contextmanager
    def microbatch(self, index: int) -> Iterator[None]:
        now, outer = self._pause(), (self._lane, self._name)
        self._since = None if self._since is None else now
        self._lane, self._name = index, "compute"
        try:
            yield
        finally:
            now = self._pause()
            self._since = None if self._since is None else now
            self._lane, self._name = outer


# ---- kineto


class DeviceRecorder(_Switched):
    """Marks for kineto on the host, and its kernels as spans."""

    def __init__(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        self._running = False
        self._timeline = Timeline(())

    def begin(self) -> None:
        torch.cuda.synchronize()
        self._profile.start()
        self._running = True

    def end(self) -> None:
        torch.cuda.synchronize()
        self._running = False
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "kineto.json")
            self._profile.export_chrome_trace(str(file))
            self._timeline = Timeline(tuple(spans_of_kineto(json.loads(file.read_text()))), _rank())

    def timeline(self) -> Timeline:
        return self._timeline

    def _mark(self, kind: str, name: str) -> contextlib.AbstractContextManager[Any]:
        if not self._running or torch.cuda.is_current_stream_capturing():
            return contextlib.nullcontext(name)
        return torch.profiler.record_function(f"epmoe {kind}: {name}")

    @contextlib.contextmanager
    def launching(self, name: str) -> Iterator[str]:
        with self._mark("communication", name):
            yield name

    def waiting(self, flight: str) -> contextlib.AbstractContextManager[Any]:
        return self._mark("communication", flight)

    def computing(self, name: str) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def microbatch(self, index: int) -> contextlib.AbstractContextManager[Any]:
        return self._mark("microbatch", str(index))


class _Marks:
    """Marks of one kind in one thread, which lie apart: which one holds a point in time."""

    def __init__(self, marks: list[tuple[float, float, str]]) -> None:
        self._marks = sorted(marks)
        self._starts = [start for start, _, _ in self._marks]

    def at(self, when: float) -> str | None:
        number = bisect.bisect_right(self._starts, when) - 1
        return self._marks[number][2] if number >= 0 and when <= self._marks[number][1] else None


def spans_of_kineto(written: Mapping[str, Any]) -> list[Span]:
    """Spans of the kernels and copies in a Chrome trace of torch.profiler, with times since the first of them."""
    work, launched = [], {}
    marks: dict[Any, dict[str, list[tuple[float, float, str]]]] = {}
    for event in written["traceEvents"]:
        category = event.get("cat")
        if category in ("kernel", "gpu_memcpy", "gpu_memset"):
            work.append(event)
        elif category in ("cuda_runtime", "cuda_driver"):
            correlation = event.get("args", {}).get("correlation")
            launched[correlation] = event["tid"], event["ts"]
        elif category == "user_annotation" and (match := _MARK.fullmatch(event["name"])):
            kinds = marks.setdefault(event["tid"], {"communication": [], "microbatch": []})
            kinds[match[1]].append((event["ts"], event["ts"] + event["dur"], match[2]))
    by_thread = {thread: {kind: _Marks(some) for kind, some in kinds.items()} for thread, kinds in marks.items()}
    zero = min((event["ts"] for event in work), default=0.0)
    spans = []
    for event in work:
        thread, when = launched.get(event.get("args", {}).get("correlation"), (None, 0.0))
        here = by_thread.get(thread)
        verb = here["communication"].at(when) if here else None
        lane = here["microbatch"].at(when) if here else None
        moves = verb is not None or COMMUNICATION.search(event["name"]) is not None
        name = event["name"] if verb is None else f"{verb}: {event['name']}"
        start = event["ts"] - zero
        spans.append(
            Span(
                "communication" if moves else "compute",
                name,
                start,
                start + event["dur"],
                None if lane is None else int(lane),
            )
        )
    return spans


# ---- a process started by `epmoe trace`


class ProcessRecorder(Recorder):
    """Listens to `calls` layers of this process after `skip`, then writes `rank<r>.json` into a folder.

    A layer inside microbatches counts once for each.
    """

    def __init__(self, folder: Path, skip: int, calls: int) -> None:
        self._folder, self._first, self._last = folder, skip, skip + calls
        self._count = 0
        self._inner: HostRecorder | DeviceRecorder | None = None
        atexit.register(self._write)

    def called(self) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # the device may not be waited for, here
        if self._count == self._first:
            self._inner = _recorder(None)
            self._inner.begin()
        elif self._count == self._last:
            self._write()
        self._count += 1

    def _write(self) -> None:
        inner, self._inner = self._inner, None
        if inner is not None:
            inner.end()
            made = inner.timeline()
            made.save(self._folder / f"rank{made.rank}.json")

    def launching(self, name: str) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._inner is None else self._inner.launching(name)

    def waiting(self, flight: Any) -> contextlib.AbstractContextManager[Any]:
        if self._inner is None or flight is None:  # launched before the trace began
            return contextlib.nullcontext()
        return self._inner.waiting(flight)

    def computing(self, name: str) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._inner is None else self._inner.computing(name)

    def microbatch(self, index: int) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._inner is None else self._inner.microbatch(index)


def trace_process(environment: Mapping[str, str] = os.environ) -> None:
    """Begins what `epmoe trace` asked for, if it did: EPMOE_TRACE is a folder, EPMOE_TRACE_WINDOW `skip:calls`."""
    if folder := environment.get("EPMOE_TRACE"):
        skip, calls = environment.get("EPMOE_TRACE_WINDOW", "0:1000000").split(":")
        listen_from_here(ProcessRecorder(Path(folder), int(skip), int(calls)))
