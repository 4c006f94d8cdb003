"""The search of `epmoe tune`: what it tries, that a forced configuration is the one that runs, and what it keeps."""

from __future__ import annotations

import dataclasses
import os
import threading

import pytest
import torch
from typer.testing import CliRunner

from epmoe.bench.shapes import Shape
from epmoe.cli import tune as command
from epmoe.cli.main import app
from epmoe.ops import _gemm_triton, narrow_gemm, scaled_gemm
from epmoe.ops._few_rows_configs import FewRowsConfig
from epmoe.testing import RankFailed
from epmoe.tuning import search, store
from epmoe.tuning.candidates import near
from epmoe.tuning.problems import Problem, make_call, make_weights, problems_of, rule
from epmoe.tuning.search import Forcing, Found, Settings, groups_of

CPU = torch.device("cpu")
SMALL = Problem("grouped_gemm", 4, 64, 96, "none", 8)
ALONE = Settings(workers=0, repeat=2)


def nothing(*_):
    """A step that nobody watches."""


@pytest.fixture
def on_cpu(monkeypatch, tmp_path):
    """The kernels in the interpreter, and a folder for the CPU as if it were tuned."""
    monkeypatch.setenv("EPMOE_CPU_KERNELS", "triton")
    monkeypatch.delenv("EPMOE_TUNING_DIR", raising=False)

    def folder_for(device):
        given = os.environ.get("EPMOE_TUNING_DIR")
        return store.Path(given or tmp_path / "shipped") / device.type / "triton-3.6"

    monkeypatch.setattr(store, "folder_for", folder_for)
    search._forget()
    yield tmp_path
    search._forget()


def spied(monkeypatch):
    seen = []
    plan = _gemm_triton.gemm_plan

    def remember(*args):
        made = plan(*args)
        seen.append(made.config)
        return made

    monkeypatch.setattr(_gemm_triton, "gemm_plan", remember)
    return seen


def timed_as(monkeypatch, us):
    """Calls take what `us` says of their configuration."""

    def interleaved(calls, **_):
        for call in calls.values():
            call()
        return {name: us(call.args[2]) for name, call in calls.items()}

    monkeypatch.setattr(search, "interleaved_us", interleaved)


def test_problems_with_the_same_weights_make_one_group_and_each_stands_once():
    some = [dataclasses.replace(SMALL, rows=rows) for rows in (1, 4)]
    other = dataclasses.replace(SMALL, transpose=True)
    assert groups_of([some[0], other, some[1], some[0]]) == [some, [other]]


def test_a_forced_configuration_is_the_one_that_runs_and_afterwards_the_rules_hold_again(on_cpu, monkeypatch):
    seen = spied(monkeypatch)
    call = make_call(SMALL, make_weights(SMALL, CPU), 32, CPU)
    ruled = rule(SMALL, CPU)
    odd = dataclasses.replace(ruled, block_n=32, group_m=3)
    with Forcing(CPU) as forcing:
        folder = os.environ["EPMOE_TUNING_DIR"]
        for config in (odd, ruled):
            forcing.to(SMALL, config)
            call()
        forcing.to(dataclasses.replace(SMALL, op="grouped_gemm_act"), odd)  # another op's is not ours
        call()
    call()
    assert seen == [odd, ruled, ruled, ruled]
    assert "EPMOE_TUNING_DIR" not in os.environ and not os.path.exists(folder)


def test_a_search_saves_the_fastest_and_what_it_saved_is_then_what_runs(on_cpu, monkeypatch):
    tried = near(SMALL, rule(SMALL, CPU), CPU)
    best = tried[2]
    timed_as(monkeypatch, lambda config: 5.0 if config == best else 8.0)
    steps = []
    ((found,),) = search.search([SMALL], CPU, ALONE, lambda *step: steps.append(step))
    assert found.refused == {} and found.gain == 8 / 5 and steps == [("measured", 1)]
    assert found.entry["kind"] == type(best).__name__ and found.entry["config"] == dataclasses.asdict(best)
    assert (found.entry["us"], found.entry["rule_us"], found.entry["tried"]) == (5.0, 8.0, len(tried))

    search.save([found], store.folder_for(CPU))
    seen = spied(monkeypatch)
    make_call(SMALL, make_weights(SMALL, CPU), 32, CPU)()
    assert seen == [best]


def test_less_than_a_percent_is_no_reason_to_leave_the_rule(on_cpu, monkeypatch):
    ruled = rule(SMALL, CPU)
    timed_as(monkeypatch, lambda config: 1000.0 if config == ruled else 991.0)
    ((found,),) = search.search([SMALL], CPU, ALONE, nothing)
    assert found.entry["config"] == dataclasses.asdict(ruled) and found.gain == 1


@pytest.mark.parametrize("scheme", ["int4_g128", "mxfp4", "int8_row"])
@pytest.mark.parametrize("end", ["", "_act"])
def test_a_search_of_int8_and_narrow_weights_is_found_again_by_their_kernels(scheme, end, on_cpu, monkeypatch):
    prefix, module, plan = ("scaled", scaled_gemm, "scaled_plan") if scheme == "int8_row" else (
        "narrow", narrow_gemm, "narrow_plan"
    )  # fmt: skip
    problem = Problem(f"{prefix}_grouped_gemm{end}", 4, 128, 128, scheme, 8)
    ruled = rule(problem, CPU)
    other = dataclasses.replace(ruled, **({"block_m": 16} if prefix == "scaled" else {"block_t": 16, "num_stages": 3}))
    monkeypatch.setattr(search, "near", lambda *args: [ruled, other])
    timed_as(monkeypatch, lambda config: 5.0 if config == other else 8.0)
    ((found,),) = search.search([problem], CPU, ALONE, nothing)
    assert found.refused == {} and found.gain == 8 / 5 and found.entry["kind"] == type(other).__name__
    search.save([found], store.folder_for(CPU))
    search._forget()

    seen, make = [], getattr(module, plan)

    def remember(*args):
        made = make(*args)
        seen.append((made.constants.get("BLOCK_T", made.constants.get("BLOCK_M")), made.constants["num_stages"]))
        return made

    monkeypatch.setattr(module, plan, remember)
    weights = make_weights(problem, CPU)
    make_call(problem, weights, 32, CPU)()
    make_call(dataclasses.replace(problem, rows=64), weights, 256, CPU)()  # too far from what was measured
    ruled_size = getattr(ruled, "block_t", None) or ruled.block_m
    assert seen == [(16, other.num_stages), (ruled_size, ruled.num_stages)]


def test_several_loads_count_alike_whatever_their_size(on_cpu, monkeypatch):
    problem = Problem("scaled_grouped_gemm", 16, 64, 96, "fp8_row", 1)
    _, one, other, *_ = near(problem, rule(problem, CPU), CPU)
    loads = iter([{one: 50.0, other: 90.0}, {one: 1000.0, other: 400.0}])

    def interleaved(calls, **_):
        own = next(loads)
        return {
            name: own.get(call.args[2], 100.0 if len(own) and 50.0 in own.values() else 1000.0)
            for name, call in calls.items()
        }

    monkeypatch.setattr(search, "interleaved_us", interleaved)
    ((found,),) = search.search([problem], CPU, ALONE, nothing)
    assert found.entry["config"] == dataclasses.asdict(other)  # 0.9 · 0.4 < 0.5 · 1.0
    assert found.gain == pytest.approx((0.9 * 0.4) ** -0.5, rel=1e-3)


def test_a_candidate_that_fails_or_gives_another_result_is_refused_by_name(on_cpu, monkeypatch):
    ruled, failing, wrong, *others = near(SMALL, rule(SMALL, CPU), CPU)
    right = search._run_forced

    def run(forcing, problem, config, call):
        if config == failing:
            raise RuntimeError("out of resource")
        out, scales = right(forcing, problem, config, call)
        return (out * 1.1 if config == wrong else out), scales

    monkeypatch.setattr(search, "_run_forced", run)
    timed_as(monkeypatch, lambda config: 9.0 if config == ruled else 7.0)
    ((found,),) = search.search([SMALL], CPU, ALONE, nothing)
    assert found.refused.keys() == {str(failing), str(wrong)}
    assert "out of resource" in found.refused[str(failing)] and "another result" in found.refused[str(wrong)]
    assert found.entry["tried"] == 1 + len(others)
    assert found.entry["config"] not in map(dataclasses.asdict, (ruled, failing, wrong))


def test_a_problem_whose_rule_does_not_run_has_no_entry_and_does_not_end_the_search(on_cpu, monkeypatch):
    ruled, right = rule(SMALL, CPU), search._run_forced

    def run(forcing, problem, config, call):
        if config == ruled and problem is SMALL:
            raise RuntimeError("no room")
        return right(forcing, problem, config, call)

    monkeypatch.setattr(search, "_run_forced", run)
    timed_as(monkeypatch, lambda config: 1.0)
    other = dataclasses.replace(SMALL, K=64)
    (first,), (second,) = search.search([SMALL, other], CPU, ALONE, nothing)
    assert first.entry is None and "no room" in first.refused[str(ruled)] and second.entry is not None
    assert search.save([first], on_cpu / "out") == []


@pytest.mark.parametrize("dies", [False, True])
def test_what_failed_in_its_own_process_is_not_tried_again_here(on_cpu, monkeypatch, dies):
    ruled, failed, *rest = near(SMALL, rule(SMALL, CPU), CPU)

    def run_ranks(fn, ranks, *, args, timeout):
        assert fn is search._run_each
        assert args[1] == [(SMALL, 0, j, config) for j, config in enumerate([ruled, failed, *rest])]
        if dies:
            raise RankFailed(0, 1, "SIGSEGV", "it ended")
        return [(len(args[1]), {(0, 1): "OutOfResources: too much"})]

    monkeypatch.setattr(search, "run_ranks", run_ranks)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
    timed_as(monkeypatch, lambda config: 3.0 if config == ruled else 1.0)
    steps = []
    ((found,),) = search.search([SMALL], CPU, Settings(workers=2), lambda *step: steps.append(step))
    assert sorted(steps) == [("compiled", 1), ("measured", 1)]
    assert found.refused.keys() == {str(c) for c in ([failed, *rest] if dies else [failed])}
    assert found.entry["tried"] == (1 if dies else len(rest) + 1)


def test_candidates_that_fail_in_their_process_are_named_by_place(on_cpu, monkeypatch):
    ruled = rule(SMALL, CPU)
    bad = dataclasses.replace(ruled, block_n=24)  # no power of two
    problem = dataclasses.replace(SMALL, rows=4)
    work = [(SMALL, 0, 0, ruled), (problem, 1, 0, ruled), (problem, 1, 1, bad), (problem, 1, 2, ruled)]
    done, failed = search._run_each(0, 1, CPU, work)
    assert done == 4 and failed.keys() == {(1, 1)} and "power of 2" in failed[1, 1]
    monkeypatch.setattr(search, "_is_broken", lambda device: True)
    assert search._run_each(0, 1, CPU, work) == (3, failed)  # the last is left to another process


def test_a_candidate_that_has_no_room_for_what_training_saves_is_refused(on_cpu, monkeypatch):
    first = dataclasses.replace(SMALL, op="grouped_gemm_act", N=128)
    ruled = rule(first, CPU)
    asked = []

    def made(problem, weights, total, device, *, saving=False):
        def call():
            asked.append((problem.op, saving))
            if saving:
                raise RuntimeError("out of resource: shared memory")

        return call

    monkeypatch.setattr(search, "make_call", made)
    done, failed = search._run_each(0, 1, CPU, [(first, 0, 0, ruled)])
    assert done == 1 and failed.keys() == {(0, 0)} and "shared memory" in failed[0, 0]
    assert search._run_each(0, 1, CPU, [(SMALL, 0, 0, rule(SMALL, CPU))]) == (1, {})
    assert asked == [("grouped_gemm_act", False), ("grouped_gemm_act", True), (SMALL.op, False)]


def test_after_a_candidate_that_broke_its_process_another_one_tries_the_rest(on_cpu, monkeypatch):
    ruled, failed, *rest = near(SMALL, rule(SMALL, CPU), CPU)
    started = []

    def run_ranks(fn, ranks, *, args, timeout):
        started.append([config for _, _, _, config in args[1]])
        breaks = failed in started[-1]
        return [(2, {(0, 1): "AcceleratorError: an illegal instruction"}) if breaks else (len(args[1]), {})]

    monkeypatch.setattr(search, "run_ranks", run_ranks)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
    timed_as(monkeypatch, lambda config: 3.0 if config == ruled else 1.0)
    ((found,),) = search.search([SMALL], CPU, Settings(workers=1), nothing)
    assert started == [[ruled, failed, *rest], rest]
    assert found.refused == {str(failed): "AcceleratorError: an illegal instruction"}
    assert found.entry["tried"] == len(rest) + 1


def test_processes_wait_for_room_and_who_needs_more_than_there_is_takes_all():
    room, order = search._Room(10), []
    inside, leave = threading.Event(), threading.Event()

    def first():
        with room.taken(50):
            order.append("first in")
            inside.set()
            leave.wait(10)
            order.append("first out")

    def second():
        inside.wait(10)
        with room.taken(1):
            order.append("second in")

    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    inside.wait(10)
    leave.set()
    for thread in threads:
        thread.join(10)
    assert order == ["first in", "first out", "second in"]


def test_a_cpu_is_not_tuned():
    with pytest.raises(ValueError, match="device='cpu'"):
        next(iter(search.search([SMALL], CPU, ALONE, nothing)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shape", "huge"], "shape='huge'"),
        (["--shape", "tiny", "--ranks", "3"], "ranks=3"),
        (["--shape", "tiny", "--ranks", "x"], "ranks='x'"),
        (["--shape", "tiny", "--rows", "0"], "rows='0'"),
        (["--shape", "tiny", "--scheme", "none,,fp8_row"], "none,,fp8_row"),
        (["--shape", "tiny"], "no GPU"),
    ],
)
def test_a_mistake_on_the_command_line_is_named(options, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["tune", *options], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 2 and message in result.output


def test_the_command_saves_where_it_is_told_and_sums_up(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.setattr(store, "_triton_version", lambda: "3.6")

    def fake(wanted, device, settings, step):
        assert device == torch.device("cuda", 0) and settings.candidates == 4 and settings.workers == 3
        for problem in wanted:
            entry = search._entry(problem, FewRowsConfig(16, 128, 128, num_warps=4, num_stages=3)) | {
                "us": 10.0,
                "rule_us": 12.0 if problem.rows == 4 else 10.0,
            }
            step("measured", 1)
            yield [Found(problem, entry, {"one": "failed"} if problem.rows == 4 else {})]

    monkeypatch.setattr(command, "search", fake)
    options = ["--shape", "tiny", "--ranks", "1,2", "--rows", "1,4", "--candidates", "4", "--workers", "3"]
    result = CliRunner().invoke(app, ["tune", *options, "--out", str(tmp_path)], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    folder = tmp_path / "nvidia-h200" / "triton-3.6"
    assert {path.name for path in folder.iterdir()} == {"grouped_gemm.json", "grouped_gemm_act.json"}
    assert len(store.read(folder / "grouped_gemm.json")) == 4
    assert "1.20×" in result.output and str(folder) in result.output.replace("\n", "")


@pytest.mark.gpu
def test_a_gpu_is_tuned_in_processes_side_by_side_and_finds_its_files(tmp_path, monkeypatch):
    monkeypatch.setenv("EPMOE_TUNING_DIR", str(tmp_path))
    device = torch.device("cuda", 0)
    shape = Shape("small", 256, 256, 8, 2)
    schemes = ("none", "fp8_block", "fp8_row", "int8_row", "int4_g128", "mxfp4")
    wanted = [p for s in schemes for p in problems_of(shape, 1, [s], [1, 64, 256], True)]
    found = [one for some in search.search(wanted, device, Settings(3, 2, 4), nothing) for one in some]
    assert len(found) == len(wanted) and all(one.entry is not None for one in found)
    search.save(found, store.folder_for(device))
    search._forget()
    for one in found:
        p = one.problem
        entry = store.lookup(p.op, device, p.L, p.N, p.K, p.dtype, p.scheme, p.rows)
        assert entry is not None and dict(entry.config) == one.entry["config"]
        make_call(p, make_weights(p, device), p.loads[-1], device)()
    torch.cuda.synchronize()
