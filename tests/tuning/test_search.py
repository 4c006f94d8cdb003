"""The search of `epmoe tune`: what it tries, that a forced configuration is the one that runs, and what it keeps."""

from __future__ import annotations

import dataclasses
import os
import threading

import pytest
import torch
from typer.testing import CliRunner

from epmoe.bench.shapes import Shape, named_shape
from epmoe.cli import tune as command
from epmoe.cli.main import app
from epmoe.config import Activation
from epmoe.ops import _gemm_triton, narrow_gemm, scaled_gemm
from epmoe.ops._configs import GemmConfig, WgradConfig
from epmoe.ops._few_rows_configs import FewRowsConfig
from epmoe.ops._narrow_configs import NarrowConfig, narrow_config
from epmoe.ops._scaled_configs import ScaledConfig
from epmoe.ops.scaled_gemm import SCALED_SCHEMES
from epmoe.quant import NARROW_SCHEMES
from epmoe.testing import RankFailed
from epmoe.tuning import problems, search, store
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


def test_a_models_problems_are_both_products_of_a_ranks_share_and_in_training_all_gradients():
    shape = named_shape("qwen3-30b")
    plain = problems_of(shape, 4, ["none"], [4, 256], False)
    assert [(p.op, p.L, p.N, p.K, p.rows) for p in plain] == [
        ("grouped_gemm_act", 32, 1536, 2048, 4),
        ("grouped_gemm", 32, 2048, 768, 4),
        ("grouped_gemm_act", 32, 1536, 2048, 256),
        ("grouped_gemm", 32, 2048, 768, 256),
    ]
    more = [p for p in problems_of(shape, 4, ["none"], [4, 256], True) if p not in plain]
    assert [(p.op, p.N, p.K, p.rows, p.transpose) for p in more] == [
        ("grouped_gemm", 768, 2048, 256, True),
        ("grouped_gemm", 2048, 1536, 256, True),
        ("grouped_wgrad", 1536, 2048, 256, False),
        ("grouped_wgrad", 2048, 768, 256, False),
    ]
    eight_bits = ("fp8_block", "fp8_row", "int8_row")
    scaled = problems_of(shape, 4, eight_bits, [4], True)
    assert {(p.op, p.scheme) for p in scaled} == {
        (f"scaled_grouped_gemm{end}", scheme) for end in ("", "_act") for scheme in eight_bits
    }
    narrow = problems_of(shape, 4, ["int4_g128", "mxfp4"], [4], True)
    assert [(p.op, p.N, p.K, p.scheme) for p in narrow] == [
        (f"narrow_grouped_gemm{end}", n, k, scheme)
        for scheme in ("int4_g128", "mxfp4")
        for end, n, k in (("_act", 1536, 2048), ("", 2048, 768))
    ]


@pytest.mark.parametrize(
    ("scheme", "dtype", "weight_bytes"),
    [
        ("none", torch.bfloat16, 2.0),
        ("fp8_row", torch.float8_e4m3fn, 1.0),
        ("int8_row", torch.int8, 1.0),
        ("int4_g128", torch.bfloat16, 0.5 + 2 / 128),
        ("mxfp4", torch.bfloat16, 0.5 + 1 / 32),
        ("mxfp6_e2m3", torch.bfloat16, 0.75 + 1 / 32),
    ],
)
def test_a_problem_has_the_dtype_of_its_rows_and_the_bytes_of_its_weights(scheme, dtype, weight_bytes):
    problem = Problem("grouped_gemm", 4, 256, 512, scheme, 0)
    assert problem.dtype == dtype and problem.num_bytes == 4 * 256 * 512 * weight_bytes
    assert problem.as_key()["dtype"] == str(dtype).removeprefix("torch.")


def test_no_two_problems_are_one_entry_of_a_file():
    made = problems_of(Shape("square", 256, 256, 8, 2), 1, ["none", "fp8_row"], [1, 64, 256], True)
    entries = [(p.op, p.L, p.N, p.K, p.scheme, p.rows) for p in made]
    assert len(set(entries)) == len(entries)
    assert [p.transpose for p in made if (p.op, p.rows, p.K) == ("grouped_gemm", 64, 256)] == [False]


def test_problems_stop_at_the_rows_that_a_rank_may_get():
    rows = [p.rows for p in problems_of(named_shape("deepseek-v3"), 1, ["none"], problems.ROWS, False)]
    assert (
        max(rows) == 1024
        and max(p.rows for p in problems_of(named_shape("mixtral"), 1, ["none"], problems.ROWS, False)) == 4096
    )


@pytest.mark.parametrize(("ranks", "scheme", "message"), [(3, "none", "ranks=3"), (1, "int3", "scheme='int3'")])
def test_ranks_that_do_not_divide_and_unknown_schemes_are_refused(ranks, scheme, message):
    with pytest.raises(ValueError, match=message):
        problems_of(named_shape("mixtral"), ranks, [scheme], [1], False)


CHOSEN = [
    FewRowsConfig(16, 64, 128, num_warps=4, num_stages=4),
    FewRowsConfig(64, 128, 64, num_warps=4, num_stages=4),
    GemmConfig(128, 256, 64, 8, num_warps=8, num_stages=4, flatten=True),
    ScaledConfig(16, 128, 8, num_warps=4, num_stages=5, swap_ab=True, programs_per_sm=0, gluon=True),
    ScaledConfig(128, 256, 8, num_warps=8, num_stages=4, split=True, gluon=True),
    NarrowConfig(16, 64, num_warps=4, num_stages=3, spans=2),
    NarrowConfig(32, 64, num_warps=4, num_stages=4),
    NarrowConfig(256, 128, num_warps=8, num_stages=3, on_tile=True),
    WgradConfig(128, 256, 64, 8, num_warps=8, num_stages=4),
]


@pytest.mark.parametrize(
    "chosen", CHOSEN, ids=lambda c: f"{type(c).__name__}-{c.block_m if hasattr(c, 'block_m') else c.block_t}"
)
@pytest.mark.parametrize("rows", [1, 16, 64, 1024])
def test_the_rules_own_choice_is_tried_first_and_nothing_twice(chosen, rows):
    scheme = {ScaledConfig: "fp8_block", NarrowConfig: "int4_g128"}.get(type(chosen), "none")
    tried = near(dataclasses.replace(SMALL, K=512, scheme=scheme, rows=rows), chosen, CPU)
    assert tried[0] == chosen and 2 < len(tried) == len(set(tried)) <= 9
    for config in tried:
        # blocks are powers of two, and the entry that holds the configuration gives it back
        assert all(v & (v - 1) == 0 for name, v in vars(config).items() if name.startswith("block"))
        assert store.Entry(1, type(config).__name__, dataclasses.asdict(config), "").of(type(config)) == config


@pytest.mark.parametrize("scheme", ["int4_g128", "int4_channel", "int8_g32", "mxfp4", "nvfp4", "mxfp6_e2m3"])
@pytest.mark.parametrize("rows", problems.ROWS)
def test_candidates_of_narrow_weights_round_as_the_rule_does_and_keep_the_blocks_that_it_has_to_have(
    scheme, rows, monkeypatch
):
    monkeypatch.setattr("epmoe.ops._narrow_configs._has_roomy_sms", lambda device: True)
    for k in (512, 320):
        ruled = narrow_config(CPU, scheme, rows, 256, k, False, interpret=False)
        tried = near(dataclasses.replace(SMALL, op="narrow_grouped_gemm", scheme=scheme, rows=rows, K=k), ruled, CPU)
        assert len(tried) > 3 and {config.on_tile for config in tried} == {ruled.on_tile}
        for config in tried:
            assert (
                config.block_w >= 64 and config.block_t >= 16 and config.num_stages >= 2 and config.num_warps in (4, 8)
            )
            assert config.spans == 1 or (k % 256 == 0 and config.block_t <= 64 and not scheme.startswith("int8"))


def test_gluon_kernels_are_tried_where_they_run_and_nowhere_else(monkeypatch):
    many, scaled = CHOSEN[2], dataclasses.replace(CHOSEN[3], gluon=False)
    for able in (False, True):
        monkeypatch.setattr("epmoe.tuning.candidates._has_gluon", lambda device, able=able: able)
        monkeypatch.setattr("epmoe.tuning.candidates.runs_gluon", lambda device, able=able: able)
        for chosen, rows, scheme in ((many, 1024, "none"), (CHOSEN[0], 64, "none"), (scaled, 16, "fp8_block")):
            tried = near(dataclasses.replace(SMALL, scheme=scheme, rows=rows), chosen, CPU)
            assert any(getattr(config, "gluon", False) for config in tried) == able
        for scheme in ("fp8_row", "int8_row"):  # it reads scales per block
            tried = near(dataclasses.replace(SMALL, scheme=scheme, rows=16), scaled, CPU)
            assert not any(config.gluon for config in tried)


def schemes_of(op):
    if op.startswith("narrow"):
        return NARROW_SCHEMES
    return SCALED_SCHEMES if op.startswith("scaled") else ("none",)


@pytest.mark.parametrize("rows", problems.ROWS)
@pytest.mark.parametrize("op", store.OPS)
def test_there_is_a_rule_for_every_problem(op, rows):
    for scheme in schemes_of(op):
        assert type(rule(Problem(op, 4, 64, 96, scheme, rows), CPU)).__name__ in store.KINDS


@pytest.mark.parametrize("op", store.OPS)
@pytest.mark.parametrize("activation", ["swiglu", "swiglu_oai"])
def test_every_problem_can_be_run_at_every_load_and_rows_past_nobody_are_not_counted(op, activation):
    for scheme in schemes_of(op):
        for rows in (1, 3):
            problem = Problem(op, 16, 64, 128, scheme, rows, Activation.named(activation), top_k=4)
            weights = make_weights(problem, CPU)
            assert problem.loads == ((4, 16) if rows == 1 and scheme != "none" else (16 * rows,))
            for total in problem.loads:
                result = make_call(problem, weights, total, CPU)()
                sample = problems.sampled(result)
                assert sample.dtype == torch.float64 and sample.isfinite().all() and sample.abs().sum() > 0
                if op.endswith("gemm"):  # numbers as a model's: those far from 1 draw another power
                    assert 0.2 < sample.std() < 5


def test_the_gradient_of_rows_multiplies_by_the_weights_as_they_lie():
    problem = dataclasses.replace(SMALL, transpose=True)
    weights = make_weights(problem, CPU)
    assert weights.shape == (4, 96, 64)
    assert make_call(problem, weights, 32, CPU)()[0].shape == (32, 64)


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
            entry = search._entry(problem, CHOSEN[0]) | {"us": 10.0, "rule_us": 12.0 if problem.rows == 4 else 10.0}
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
