"""The benches run for real on CPU: cases, figures, and the refusal to time what computes something else."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from epmoe import EPGroup, simulated
from epmoe.bench import layer, problem, routed_mlp
from epmoe.bench.cli import bench_app
from epmoe.bench.layer import LayerCase, measure_layer
from epmoe.bench.problem import make_tokens, make_weights
from epmoe.bench.records import load
from epmoe.bench.session import Session, Settings
from epmoe.bench.shapes import named_shape
from epmoe.bench.timing import Ceilings
from epmoe.testing import RankFailed, run_ranks

TINY = named_shape("tiny")


def bench(tmp_path, *arguments, device="cpu"):
    result = CliRunner().invoke(
        bench_app, [*arguments, "--quick", "--device", device, "--out", str(tmp_path), "--timeout", "100"]
    )
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    return [record for path in tmp_path.iterdir() for record in load(path)]


def rows_sent(tokens, rank, ranks=2):
    """(token, other rank) pairs: rows that leave `rank`, counted by sets."""
    ids = simulated.uniform(TINY.num_experts, TINY.top_k, 1 + rank)(torch.empty(tokens, 1)).topk_ids.tolist()
    share = TINY.num_experts // ranks
    return sum(len({e // share for e in row} - {rank}) for row in ids)


def test_layer_measures_every_combination_and_counts_its_flops_and_bytes(tmp_path):
    options = ["--tokens", "5,24", "--mode", "infer,train", "--dispatcher", "all_to_all,all_gather"]
    records = bench(tmp_path, "layer", "--shape", "tiny", "--ranks", "2", *options)
    cases = {(r["case"]["dispatcher"], r["case"]["tokens"], r["case"]["mode"]): r for r in records}
    assert len(records) == len(cases) == 8
    h, i, k = 64, 32, 2
    dispatch_row, row = h * 2 + 16, h * 2  # bf16 values; K weights and K ids of 4 bytes
    for (dispatcher, tokens, mode), record in cases.items():
        assert (
            record["case"].items() >= {"shape": "tiny", "ranks": 2, "experts": "grouped", "routing": "uniform"}.items()
        )
        rows = tokens if dispatcher == "all_gather" else max(rows_sent(tokens, 0), rows_sent(tokens, 1))
        steps = {"dispatch": rows * dispatch_row, "combine": rows * row}
        if mode == "train":
            steps |= {"combine_backward": rows * row, "dispatch_backward": rows * (row + 16)}
        assert record["wire_bytes_by_step"] == steps and record["wire_bytes"] == sum(steps.values())
        assert TINY.flops(tokens, mode) == 6 * tokens * k * h * i * (3 if mode == "train" else 1)
        assert 0 < record["floor_us"] and 0 < record["median_us"] and record["peers"].keys() == {layer.PEER}


def calls_in_a_row(rank, world_size):
    session = Session(Settings(0, 1), Ceilings(1.0, 1.0, None))
    made = session.problem("tiny", 3, "uniform")
    made.topk_ids[1, 0] = -1
    seen = []

    def forward(x, ids, p, w1, w2):
        assert x is made.x and w1 is made.weights.gate_up_proj and not torch.is_grad_enabled()
        seen.append(ids)
        return x

    assert len(made.in_a_row(forward, 4)()) == 4 and torch.equal(seen[0], made.topk_ids)
    counts = [ids[ids >= 0].bincount(minlength=TINY.num_experts) for ids in seen]
    assert all(torch.equal(ids < 0, made.topk_ids < 0) and ids.max() < TINY.num_experts for ids in seen)
    assert all(torch.equal(count.sort().values, counts[0].sort().values) for count in counts)
    assert len({tuple(count.tolist()) for count in counts}) == 4, "each call by other experts"


def test_calls_in_a_row_meet_other_experts_each_time_and_as_many():
    run_ranks(calls_in_a_row, 1, timeout=60)
    assert [problem.turns_of(tokens) for tokens in (0, 1, 64, 128, 1024, 8192)] == [20, 20, 16, 8, 1, 1]


def test_routed_mlp_measures_against_torch_with_names_chosen_by_auto_resolved(tmp_path):
    options = ["--tokens", "3,16", "--mode", "infer,train", "--experts", "auto", "--routing", "zipf:1.0"]
    records = bench(tmp_path, "routed_mlp", "--shape", "tiny", *options)
    assert [(r["case"]["tokens"], r["case"]["mode"]) for r in records] == [
        *((3, "infer"), (16, "infer"), (3, "train"), (16, "train"))
    ]
    for record in records:
        assert record["case"]["experts"] == "reference" and "eager" not in record["case"]
        assert record["peers"].keys() == {routed_mlp.PEER} and "wire_bytes" not in record


def test_routed_mlp_in_fp8_counts_a_byte_for_a_weight_and_is_as_near_float64_as_fp8_is(tmp_path):
    records = bench(tmp_path, "routed_mlp", "--shape", "tiny", "--tokens", "64", "--scheme", "bf16,fp8_block")
    by_scheme = {r["case"]["scheme"]: r for r in records}
    active = 3 * 64 * 32 * 8  # every expert gets rows of 64 tokens
    for scheme, size in (("bf16", 2), ("fp8_block", 1)):
        record = by_scheme[scheme]
        assert record["gb_s"] == pytest.approx(active * size / record["median_us"] * 1e-3, abs=0.06)
    assert by_scheme["fp8_block"]["peers"] == {}  # torch's has no kernel for a CPU


def test_the_standard_routed_mlps_are_those_of_the_readme_and_take_other_routing(monkeypatch):
    cases = []
    monkeypatch.setattr("epmoe.bench.cli._run", lambda measure, some, *rest: cases.extend(some))
    for arguments in ([], ["--routing", "zipf:1.0", "--eager"]):
        result = CliRunner().invoke(bench_app, ["routed_mlp", *arguments])
        assert result.exit_code == 0, result.output
    named = [(c.scheme, c.shape, c.tokens, c.mode) for c in cases]
    assert len(named) == 2 * len(set(named)) == 36 and named[:18] == named[18:]
    assert ("fp8_block", "deepseek-v3-ep8", 16, "infer") in named and ("bf16", "qwen3-30b", 32768, "train") in named
    assert {(c.routing, c.eager) for c in cases[:18]} == {("uniform", False)}
    assert {(c.routing, c.eager, c.mode) for c in cases[18:]} == {
        *(("zipf:1.0", True, "infer"), ("zipf:1.0", False, "train"))
    }


def test_dispatch_combine_measures_both_dispatchers_against_a_bare_exchange_of_their_bytes(tmp_path):
    options = ["--shape", "tiny", "--ranks", "2", "--tokens", "12", "--dispatcher", "all_to_all,all_gather"]
    gather, exchange = bench(tmp_path, "dispatch_combine", *options)
    assert (gather["case"]["dispatcher"], exchange["case"]["dispatcher"]) == ("all_gather", "all_to_all")
    assert gather["wire_bytes"] == 12 * (2 * 64 * 2 + 16)
    assert exchange["wire_bytes"] == max(rows_sent(12, 0), rows_sent(12, 1)) * (2 * 64 * 2 + 16)
    for record in (gather, exchange):
        assert 0 < record["dispatch_us"] and record["peers"].keys() == {"nccl_all_to_all"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["layer", "--shape", "huge"], "shape='huge'"),
        (["layer", "--tokens", "0"], "tokens='0'"),
        (["layer", "--mode", "train,,infer"], "train,,infer"),
        (["layer", "--device", "tpu"], "device='tpu'"),
        (["layer", "--ranks", "3"], "ranks=3"),
        (["layer", "--dispatcher", "fast"], "dispatcher='fast'"),
        (["layer", "--experts", "fast"], "experts='fast'"),
        (["layer", "--experts", "monolithic"], "experts='monolithic': the layer's weights are bf16, its ids given"),
        (["layer", "--experts", "batched"], "experts='batched': the layer's weights are bf16, its ids given"),
        (["layer", "--experts", "grouped_fp8"], "experts='grouped_fp8': the layer's weights are bf16, its ids given"),
        (["layer", "--dispatcher", "local"], "dispatcher='local' with ranks=2: it moves nothing, so ranks must be 1"),
        (["overlap", "--dispatcher", "local"], "dispatcher='local' with ranks=2: it moves nothing"),
        (["dispatch_combine", "--dispatcher", "local"], "dispatcher='local' with ranks=2: it moves nothing"),
        (["layer", "--timeout", "0"], "Invalid value for '--timeout'"),
        (["layer", "--timeout", "-3"], "Invalid value for '--timeout'"),
        (["layer", "--device", "cpu", "--out", "/proc/x"], "--out: /proc/x: "),
        (["layer", "--routing", "zipf"], "routing='zipf'"),
        (["routed_mlp", "--mode", "train", "--scheme", "fp8_block"], "mode='train'"),
        (["routed_mlp", "--scheme", "int3"], "scheme='int3'"),
        (["routed_mlp", "--experts", "fast"], "experts='fast'"),
        (["routed_mlp", "--scheme", "fp8_block", "--experts", "grouped"], "experts='grouped' with scheme='fp8_block'"),
        (["routed_mlp", "--mode", "train", "--eager"], "eager=True"),
        (["grouped_gemm", "--shape", "Z"], "shape='Z'"),
        (["grouped_gemm", "--layout", "odd"], "layout='odd'"),
        (["grouped_gemm", "--shape", "4x8x48x64"], "n=48"),
        (["grouped_gemm", "--shape", "A", "--rows", "0"], "rows='0'"),
        (["dispatch_combine", "--ranks", "1"], "ranks=1"),
    ],
)
def test_a_mistake_is_named_before_any_rank_starts(arguments, message, monkeypatch):
    monkeypatch.setattr("epmoe.bench.session.run_ranks", lambda *a, **k: pytest.fail("ranks were started"))
    result = CliRunner().invoke(bench_app, arguments, env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 2 and message in result.output


def refuse(case, session):
    raise ValueError(f"tokens={case.tokens}: must be more\nthan that")


def test_a_mistake_that_ranks_find_is_told_without_their_traceback(monkeypatch):
    monkeypatch.setattr("epmoe.bench.cli.measure_layer", refuse)
    result = CliRunner().invoke(
        bench_app, ["layer", "--shape", "tiny", "--tokens", "5", "--device", "cpu", "--quick"], env={"COLUMNS": "200"}
    )
    assert result.exit_code == 2 and "tokens=5: must be more" in result.output and "than that" in result.output
    assert "Traceback" not in result.output


def measure_with_a_wrong_peer(rank, world_size):
    right = layer.all_to_all_grouped_mm
    layer.all_to_all_grouped_mm = lambda *a: right(*a) * (1.05 if rank == 1 else 1.0)
    measure_layer(LayerCase("tiny", "all_to_all", world_size, 8, "infer", "grouped"), Session(Settings(0, 1)))


def test_a_peer_that_disagrees_on_one_rank_stops_the_bench():
    with pytest.raises(RankFailed, match=r"disagree, so nothing was timed: output 4\.\d+e-02 > 0.01"):
        run_ranks(measure_with_a_wrong_peer, 2)


def check_spoiled_outcomes(rank, world_size):
    ep = EPGroup(timeout=30)
    weights = make_weights(TINY, ep)
    tokens = make_tokens(TINY, ep, 12, "uniform")
    made = problem.Problem(**vars(tokens), weights=weights)
    outcome = made.call(made.kernel("all_to_all", "reference")[1], "train")()
    problem.check_reference(outcome, made)
    refused = []
    for part, name in enumerate(problem.OUTCOMES[:3]):
        spoiled = list(outcome)
        spoiled[part] = outcome[part].clone()
        if rank == 1:
            spoiled[part][3] = float("nan") if part == 0 else -spoiled[part][3]
        try:
            problem.check_reference(tuple(spoiled), made)
        except RuntimeError as error:
            refused.append(name in str(error))
    return refused


def test_an_output_or_gradient_unlike_float64_is_refused_on_every_rank():
    assert run_ranks(check_spoiled_outcomes, 2) == [[True] * 3] * 2


@pytest.mark.gpu
def test_routed_mlp_runs_on_a_gpu_as_a_graph_eagerly_and_in_training(tmp_path):
    for options in (["--scheme", "bf16,fp8_block"], ["--eager"], ["--mode", "train"]):
        bench(tmp_path, "routed_mlp", "--shape", "qwen3-30b", "--tokens", "16,17", *options, device="cuda")


@pytest.mark.gpu2
def test_layer_and_dispatch_combine_run_on_two_gpus(tmp_path):
    bench(tmp_path, "layer", "--shape", "tiny", "--ranks", "2", "--tokens", "64", device="cuda")
    bench(tmp_path, "dispatch_combine", "--shape", "tiny", "--ranks", "2", "--tokens", "64", device="cuda")
