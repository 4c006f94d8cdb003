"""Timelines: what was exposed is what a step would save without communication, on the host's clock and from kineto."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import epmoe
from epmoe import EPGroup, MoEConfig, MoEKernel, MoELayer, run_microbatched
from epmoe.dispatch.base import DispatcherCapabilities
from epmoe.dispatch.inputs import Pending
from epmoe.dispatch.local import LocalDispatcher
from epmoe.overlap.timeline import Span, Timeline, union, without
from epmoe.overlap.trace import ProcessRecorder, spans_of_kineto
from epmoe.testing import run_ranks
from tests.test_kernel import batch_of, local_kernel

DELAY = WORK = 0.25


class Clock:
    """Time that passes where somebody spends it and nowhere else; stands for the module `time`."""

    def __init__(self) -> None:
        self.now = 7.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(sys.modules["epmoe.overlap.trace"], "time", made)
    return made


class SlowLink(LocalDispatcher):
    """Rows arrive `DELAY` after the launch, whatever happens meanwhile."""

    capabilities = DispatcherCapabilities(asynchronous=True, exact_pairs=True)
    clock: Clock

    def late(self, pending: Pending[Any]) -> Pending[Any]:
        due = self.clock.now + DELAY

        def finish() -> Any:
            self.clock.sleep(max(0.0, due - self.clock.now))
            return pending.wait()

        return Pending(finish)

    def dispatch_async(self, *args: Any, **kwargs: Any) -> Pending[Any]:
        return self.late(super().dispatch_async(*args, **kwargs))

    def combine_async(self, *args: Any, **kwargs: Any) -> Pending[Any]:
        return self.late(super().combine_async(*args, **kwargs))


def slow_kernel(clock: Clock, **options: Any) -> tuple[MoEKernel, Any]:
    plain, weights = local_kernel("reference", "standard")
    d = plain.dispatcher
    link = SlowLink(None, d.owner, d.expert_map, d.num_local)
    link.clock = clock
    return MoEKernel(link, plain.experts, **options), weights


def slow_layers(clock: Clock, seed: int, layers: int = 3) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """A stack whose attention and experts take `WORK` each, for a batch or for a part of one, and its inputs."""
    kernel, weights = slow_kernel(clock)
    compute = kernel._compute

    def slow(*args: Any) -> Any:
        clock.sleep(WORK)
        return compute(*args)

    kernel._compute = slow  # type: ignore[method-assign]

    def stack(x: torch.Tensor, ids: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        for _ in range(layers):
            clock.sleep(WORK)
            x = kernel(x, ids, p, weights).routed
        return x

    return stack, batch_of(0, 1, "uneven", seed)


def test_serial_communication_is_exposed_and_overlapped_communication_is_not(clock: Clock, seed: int) -> None:
    stack, batch = slow_layers(clock, seed)
    lines = {}
    for interleave in (False, True):
        with epmoe.trace() as traced:
            run_microbatched(stack, *batch, interleave=interleave)
        lines[interleave] = traced.timeline
    flights = 3 * 2 * 2  # layers, microbatches, dispatch and combine
    serial, overlapped = lines[False], lines[True]
    # one part after the other: each flight stands alone
    assert serial.exposed_us == serial.communication_us == flights * DELAY * 1e6
    # in turn: each lies under the other part's work, but for the last combine
    assert overlapped.exposed_us == DELAY * 1e6
    for line in lines.values():
        assert line.compute_us == 3 * 2 * 2 * WORK * 1e6 and line.idle_us == 0
        assert line.wall_us == line.compute_us + line.exposed_us
        assert line.lanes == ["compute 0", "communication 0", "compute 1", "communication 1"]


def test_shared_experts_run_under_combine_and_are_named(clock: Clock, seed: int) -> None:
    exposed = {}
    for order in ("after", "during"):
        kernel, weights = slow_kernel(clock, shared_experts_order=order)
        x, ids, p = batch_of(0, 1, "uneven", seed)
        with epmoe.trace() as traced:
            kernel(x, ids, p, weights, shared_experts=lambda x=x: clock.sleep(2 * DELAY) or x)
        exposed[order] = traced.timeline.exposed_us / 1e6
        assert {span.name for span in traced.timeline.spans} >= {"dispatch", "combine", "shared experts"}
    assert exposed == {"after": 2 * DELAY, "during": DELAY}


def traced_training(rank: int, ranks: int, folder: str) -> dict[str, float]:
    ep = EPGroup(timeout=30)
    layer = MoELayer(MoEConfig(16, 24, 6, 2, num_shared_experts=1), ep)
    x = torch.randn(9, 16, requires_grad=True)
    with epmoe.trace(Path(folder, f"{rank}.json")) as traced:
        run_microbatched(layer, x, ep=ep).sum().backward()
    names = [span.name for span in traced.timeline.spans if span.kind == "communication"]
    expected = ["backward of combine", "backward of dispatch", "combine", "dispatch"]
    assert sorted(names) == sorted(2 * expected), names
    assert traced.timeline.rank == rank
    return traced.timeline.summary()


def test_backward_is_in_the_timeline_which_is_read_from_its_file_again(tmp_path: Path) -> None:
    summaries = run_ranks(traced_training, 2, args=(str(tmp_path),), timeout=60)
    for rank, summary in enumerate(summaries):
        again = Timeline.load(tmp_path / f"{rank}.json")
        assert again.rank == rank and again.summary() == pytest.approx(summary, abs=0.01)
        events = json.loads((tmp_path / f"{rank}.json").read_text())["traceEvents"]
        assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} >= {"compute 1", "exposed"}
        assert all(e["dur"] >= 0 and e["pid"] == rank for e in events if e["ph"] == "X")
    other = tmp_path / "other.json"
    other.write_text("{}")
    with pytest.raises(ValueError, match=r"other.json: no trace written by epmoe"):
        Timeline.load(other)


def kineto() -> dict[str, Any]:
    """Two microbatches: attention, an all-to-all under it, experts; and a kernel of a thread without marks."""

    def kernel(correlation: int, name: str, ts: float, dur: float, category: str = "kernel") -> dict[str, Any]:
        args = {"correlation": correlation}
        return {"cat": category, "ph": "X", "name": name, "ts": ts, "dur": dur, "tid": 7, "args": args}

    def launch(correlation: int, ts: float, thread: int = 1) -> dict[str, Any]:
        args = {"correlation": correlation}
        return {
            "cat": "cuda_runtime",
            "ph": "X",
            "name": "cudaLaunchKernel",
            "ts": ts,
            "dur": 1,
            "tid": thread,
            "args": args,
        }

    def mark(name: str, ts: float, dur: float) -> dict[str, Any]:
        return {"cat": "user_annotation", "ph": "X", "name": name, "ts": ts, "dur": dur, "tid": 1}

    return {
        "traceEvents": [
            mark("epmoe microbatch: 0", 100, 50),
            mark("epmoe communication: dispatch", 130, 15),
            mark("epmoe microbatch: 1", 160, 50),
            launch(1, 110),
            launch(2, 135),
            launch(3, 140),
            launch(4, 170),
            launch(5, 300, thread=2),
            launch(6, 310, thread=2),
            kernel(1, "flash", 1000, 100),
            kernel(2, "_pack_rows_kernel", 1100, 10),
            kernel(3, "ncclDevKernel_SendRecv", 1110, 100),
            kernel(4, "flash", 1120, 60),
            kernel(5, "wgrad", 1300, 50),
            kernel(6, "ncclDevKernel_AllReduce", 1330, 40),
            {"cat": "cpu_op", "ph": "X", "name": "aten::mm", "ts": 100, "dur": 5, "tid": 1},
        ]
    }


def test_kernels_are_placed_by_what_launched_them() -> None:
    line = Timeline(tuple(spans_of_kineto(kineto())))
    placed = [(span.kind, span.microbatch, span.start_us) for span in line.spans]
    assert placed == [
        ("compute", 0, 0),
        ("communication", 0, 100),
        ("communication", 0, 110),
        ("compute", 1, 120),
        ("compute", None, 300),
        ("communication", None, 330),
    ]
    # packing 10, the exchange before and after attention 10 + 30, and 20 behind the weight gradient
    assert line.exposed_us == 10 + 10 + 30 + 20
    assert line.summary() == {
        "wall_us": 370, "compute_us": 210, "communication_us": 150, "exposed_us": 70, "idle_us": 90
    }  # fmt: skip
    assert line.spans[1].name == "dispatch: _pack_rows_kernel"


def test_intervals_are_joined_and_cut() -> None:
    assert union([(5, 7), (1, 2), (2, 3), (6, 9), (4, 4)]) == [(1, 3), (5, 9)]
    assert without([(0, 10), (12, 14)], [(-1, 1), (3, 4), (8, 13)]) == [(1, 3), (4, 8), (13, 14)]
    assert without([(0, 1)], []) == [(0, 1)] and without([(0, 1)], [(0, 1)]) == []


def test_a_process_records_its_window_of_calls(clock: Clock, tmp_path: Path) -> None:
    recorder = ProcessRecorder(tmp_path, skip=2, calls=3)
    for call in range(9):
        recorder.called()
        with recorder.launching(f"dispatch {call}") as flight:
            pass
        with recorder.waiting(flight):
            clock.sleep(0.5)
    names = [span.name for span in Timeline.load(tmp_path / "rank0.json").spans if span.kind == "communication"]
    assert names == ["dispatch 2", "dispatch 3", "dispatch 4"]


def test_a_trace_inside_a_trace_is_refused_and_an_open_one_has_no_timeline() -> None:
    with epmoe.trace() as traced:
        with pytest.raises(ValueError, match="before its body has ended"):
            traced.timeline  # noqa: B018
        with pytest.raises(ValueError, match="a trace inside a trace"), epmoe.trace():
            pass
    assert traced.timeline.communication_us == 0


def test_the_picture_needs_matplotlib_alone(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    line = Timeline(
        (Span("compute", "a", 0, 50, 0), Span("communication", "b", 20, 80, 1), Span("wait", "b", 60, 80, 1))
    )
    assert line.plot(tmp_path / "new" / "line.png").read_bytes().startswith(b"\x89PNG")
