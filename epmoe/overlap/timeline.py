"""`Timeline`: what ran under what, and how much of the time that rows took was exposed.

Spans of computation and of communication, each perhaps of one microbatch. *Exposed* is communication under which
nothing was computed: what a step would save if rows moved in no time. A timeline is written as Chrome's trace format
(chrome://tracing, ui.perfetto.dev), which it can be read from again, and as a picture.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

Kind = Literal["compute", "communication", "wait"]
KINDS: tuple[Kind, ...] = ("compute", "communication", "wait")
"""`wait`: the host stood still for rows; part of a communication span, drawn and not added."""

Interval = tuple[float, float]
COLORS = {"compute": "#4878a8", "communication": "#e0a030", "wait": "#c03030"}


@dataclasses.dataclass(frozen=True)
class Span:
    """Attributes: `start_us`, `end_us` since the trace began; `microbatch`: None outside of any, or where unknown."""

    kind: Kind
    name: str
    start_us: float
    end_us: float
    microbatch: int | None = None

    @property
    def lane(self) -> str:
        """The line that it is drawn on."""
        kind = "communication" if self.kind == "wait" else self.kind
        return kind if self.microbatch is None else f"{kind} {self.microbatch}"


def union(spans: Iterable[Interval]) -> list[Interval]:
    """The same points in time as intervals apart from each other, in order."""
    joined: list[Interval] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        elif end > start:
            joined.append((start, end))
    return joined


def without(these: Sequence[Interval], those: Sequence[Interval]) -> list[Interval]:
    """What of `these` lies outside of `those`; both as `union` gives them."""
    left: list[Interval] = []
    begin = 0
    for start, end in these:
        while begin < len(those) and those[begin][1] <= start:
            begin += 1
        at = begin
        while start < end:
            if at == len(those) or those[at][0] >= end:
                left.append((start, end))
                break
            if those[at][0] > start:
                left.append((start, those[at][0]))
            start = max(start, those[at][1])
            at += 1
    return left


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The spans of one rank."""

    spans: tuple[Span, ...]
    rank: int = 0

    def of(self, kind: Kind) -> list[Interval]:
        """When something of this kind ran."""
        return union((span.start_us, span.end_us) for span in self.spans if span.kind == kind)

    @property
    def wall_us(self) -> float:
        """From the first span's start to the last one's end."""
        if not self.spans:
            return 0.0
        return max(span.end_us for span in self.spans) - min(span.start_us for span in self.spans)

    @property
    def compute_us(self) -> float:
        """In which something was computed."""
        return _length(self.of("compute"))

    @property
    def communication_us(self) -> float:
        """In which rows were on their way."""
        return _length(self.of("communication"))

    @property
    def exposed(self) -> list[Interval]:
        """When rows were on their way and nothing was computed."""
        return without(self.of("communication"), self.of("compute"))

    @property
    def exposed_us(self) -> float:
        """How long that was."""
        return _length(self.exposed)

    @property
    def idle_us(self) -> float:
        """In which neither was the case: launches, the host, other work."""
        return self.wall_us - _length(union([*self.of("compute"), *self.of("communication")]))

    def summary(self) -> dict[str, float]:
        """The figures, in microseconds."""
        names = ("wall_us", "compute_us", "communication_us", "exposed_us", "idle_us")
        return {name: round(getattr(self, name), 3) for name in names}

    @property
    def lanes(self) -> list[str]:
        """Lines in the order in which they are drawn: each microbatch's computation above its communication."""
        order = {span.lane: (-1 if span.microbatch is None else span.microbatch, span.lane) for span in self.spans}
        return sorted(order, key=lambda lane: (order[lane][0], not lane.startswith("compute")))

    def chrome(self) -> dict[str, Any]:
        """Chrome's trace format: a process per rank, a thread per lane."""
        lanes = {lane: number for number, lane in enumerate([*self.lanes, "exposed"])}
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": self.rank, "args": {"name": f"rank {self.rank}"}}
        ]
        for lane, number in lanes.items():
            common = {"ph": "M", "pid": self.rank, "tid": number}
            events.append({**common, "name": "thread_name", "args": {"name": lane}})
            events.append({**common, "name": "thread_sort_index", "args": {"sort_index": number}})

        def event(name: str, kind: str, lane: str, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
            place = {"pid": self.rank, "tid": lanes[lane], "ts": start, "dur": end - start}
            return {"ph": "X", "name": name, "cat": kind, **place, "args": args}

        for span in self.spans:
            args = {"microbatch": span.microbatch}
            events.append(event(span.name, span.kind, span.lane, span.start_us, span.end_us, args))
        events += [event("exposed", "exposed", "exposed", start, end, {}) for start, end in self.exposed]
        return {"traceEvents": events, "displayTimeUnit": "ms", "epmoe": {"rank": self.rank, **self.summary()}}

    def save(self, path: Path | str) -> Path:
        """Writes `chrome()` as JSON."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.chrome()))
        return path

    @classmethod
    def load(cls, path: Path | str) -> Timeline:
        """What `save` wrote.

        Raises:
            ValueError: another file.
        """
        try:
            written = json.loads(Path(path).read_text())
            rank, events = written["epmoe"]["rank"], written["traceEvents"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: no trace written by epmoe") from error
        spans = [
            Span(e["cat"], e["name"], e["ts"], e["ts"] + e["dur"], e["args"]["microbatch"])
            for e in events
            if e.get("cat") in KINDS
        ]
        return cls(tuple(spans), rank)

    def plot(self, path: Path | str, title: str = "") -> Path:
        """A picture: a line per lane, exposed communication shaded through all of them.

        Raises:
            ValueError: matplotlib is missing.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ValueError("a picture needs matplotlib: pip install 'epmoe[plots]'") from error
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        lanes, begin = self.lanes, min((span.start_us for span in self.spans), default=0.0)
        figure = Figure(figsize=(11, 1.1 + 0.42 * max(1, len(lanes))), layout="constrained")
        axes = figure.subplots()
        for start, end in self.exposed:
            axes.axvspan((start - begin) / 1e3, (end - begin) / 1e3, color="#f4d6d6", linewidth=0)
        for kind in KINDS:
            for number, lane in enumerate(lanes):
                drawn = union((s.start_us, s.end_us) for s in self.spans if s.lane == lane and s.kind == kind)
                bars = [((start - begin) / 1e3, (end - start) / 1e3) for start, end in drawn]
                axes.broken_barh(bars, (number - 0.4, 0.8), facecolors=COLORS[kind], linewidth=0)
        axes.set_yticks(range(len(lanes)), lanes)
        axes.set_ylim(len(lanes) - 0.5, -0.5)
        axes.set_xlabel("ms")
        figures = ", ".join(f"{name[:-3]} {value / 1e3:.2f}" for name, value in self.summary().items())
        axes.set_title(f"{title or f'rank {self.rank}'}: {figures} ms", fontsize=9, loc="left")
        figure.savefig(path, dpi=110)
        return path
