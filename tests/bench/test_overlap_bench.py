"""Bench `overlap` on CPU: every way is timed, rows that do not move leave the experts their work, bits are checked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from epmoe.bench import overlap
from epmoe.bench.cli import bench_app
from epmoe.bench.overlap import Model, OverlapCase, measure_overlap, switch_us
from epmoe.bench.records import load
from epmoe.bench.session import Session, Settings
from epmoe.bench.timing import Ceilings
from epmoe.overlap import Timeline
from epmoe.testing import RankFailed, run_ranks

CASE = OverlapCase("tiny", 1, 16, "train", "all_to_all", 2, layers=1)


def test_every_way_is_timed_and_traced(tmp_path: Path) -> None:
    options = ["--shape", "tiny", "--shared", "0,1", "--tokens", "16", "--layers", "1", "--mode", "infer", "--quick"]
    options += ["--device", "cpu", "--out", str(tmp_path), "--traces", str(tmp_path / "lines"), "--timeout", "100"]
    result = CliRunner().invoke(bench_app, ["overlap", *options])
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    plain, shared = load(tmp_path / "cpu-x2.json")
    ways = {name for name in shared if name.endswith("_us")} - {"median_us", "floor_us"}
    names = ("serial", "shared", "microbatches", "both", "no_comm", "split_no_comm", "switch")
    assert ways == {f"{name}_us" for name in names}
    assert ways - plain.keys() == {"shared_us", "both_us"} and plain["median_us"] == plain["microbatches_us"]
    assert shared["median_us"] == min(shared[f"{way}_us"] for way in ("shared", "microbatches", "both"))
    for record in (plain, shared):
        gained, possible = record["serial_us"] - record["median_us"], record["serial_us"] - record["no_comm_us"]
        assert record["hidden_fraction"] == pytest.approx(gained / possible if possible > 0 else 0, abs=0.01)
    lines = [Timeline.load(path) for path in (tmp_path / "lines").glob("tiny-1-16-*-both-rank*.json")]
    assert sorted(line.rank for line in lines) == [0, 1] and all(line.communication_us > 0 for line in lines)


def unmoved(rank: int, ranks: int) -> list[bool]:
    session = Session(Settings(1, 1), Ceilings(1.0, 1.0, 1.0))
    model = Model(CASE, session)
    (kernel,) = model.kernels
    rows, compute = [], kernel._compute

    def computing(some, weights):  # type: ignore[no-untyped-def]
        rows.append((some.x.shape, some.topk_ids.clone()))
        return compute(some, weights)

    kernel._compute = computing  # type: ignore[method-assign]
    counts = [len(model.step(split=False, order="after", moves=moves)) for moves in (True, False, False)]
    moved, first, second = rows
    same = [moved[0] == other[0] and torch.equal(moved[1], other[1]) for other in (first, second)]
    return [*same, len(set(counts)) == 1]  # as many gradients


def test_rows_that_do_not_move_are_as_many_and_give_all_gradients() -> None:
    assert run_ranks(unmoved, 2, timeout=60) == [[True] * 3] * 2


def wrong(rank: int, ranks: int) -> None:
    session = Session(Settings(1, 1), Ceilings(1.0, 1.0, 1.0))
    run = overlap.run_microbatched
    overlap.run_microbatched = lambda *a, interleave, **k: run(*a, interleave=interleave, **k) + interleave
    measure_overlap(CASE, session)


def test_microbatches_that_compute_something_else_are_not_timed() -> None:
    with pytest.raises(RankFailed, match="in turn give other bits than one after another"):
        run_ranks(wrong, 2, timeout=60)


def test_a_case_names_what_is_wrong_with_it_and_a_switch_takes_time() -> None:
    with pytest.raises(ValueError, match="tokens=1, layers=4, shared_experts=0"):
        OverlapCase("tiny", 0, 1, "infer", "all_to_all", 2)
    for dispatcher in ("all_to_all", "auto"):
        with pytest.raises(ValueError, match=f"graph=True with dispatcher='{dispatcher}'"):
            OverlapCase("tiny", 0, 8, "train", dispatcher, 2, graph=True)
    assert 0 < switch_us(torch.device("cpu")) < 1000
