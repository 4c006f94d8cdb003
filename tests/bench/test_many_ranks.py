"""Benches on several numbers of ranks in one command: a file for each, one table, what crossed the links."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from epmoe.bench.cli import bench_app
from epmoe.bench.records import load, save
from epmoe.bench.table import all_tables
from tests.bench.test_layer_bench import rows_sent


def bench(folder: Path, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    options = ["--shape", "tiny", "--quick", "--device", "cpu", "--out", str(folder), "--timeout", "100"]
    result = CliRunner().invoke(bench_app, [*arguments, *options])
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    return [record for path in sorted(folder.iterdir()) for record in load(path)], result.output


def test_dispatch_combine_on_two_and_four_ranks_with_uniform_skewed_and_one_hot_routing(tmp_path: Path) -> None:
    options = ["--ranks", "2,4", "--tokens", "12", "--routing", "uniform,zipf:1.0,one_hot"]
    records, printed = bench(tmp_path, "dispatch_combine", *options, "--dispatcher", "symmetric,all_to_all")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cpu-x2.json", "cpu-x4.json"] and "growth" in printed
    by_case = {(r["case"]["ranks"], r["case"]["routing"], r["case"]["dispatcher"]): r for r in records}
    assert len(by_case) == len(records) == 12
    there, back = 64 * 2 + 16, 64 * 2  # bf16 values; K = 2 ids and weights of 4 bytes
    for (ranks, routing, _), record in by_case.items():
        # the floor counts each step's busier direction, these the busier one of both steps
        most = 100 * record["floor_us"] / record["median_us"]
        assert most / 2 - 0.02 <= record["link_percent"] <= most + 0.02 and record["link_percent"] > 0
        if routing == "one_hot":  # both experts of every token are the first rank's: it gets all, and answers all
            assert record["received_mb"] == pytest.approx(12 * (ranks - 1) * there * 1e-6, abs=1e-4)
            assert record["sent_mb"] == pytest.approx(12 * max(there, (ranks - 1) * back) * 1e-6, abs=1e-4)
    uniform = [by_case[ranks, "uniform", "symmetric"]["wire_bytes"] for ranks in (2, 4)]
    assert uniform[0] == max(rows_sent(12, 0), rows_sent(12, 1)) * (there + back) and uniform[1] > uniform[0]


def test_layer_and_overlap_on_two_and_four_ranks_say_what_moving_costs(tmp_path: Path) -> None:
    options = ["--ranks", "2,4", "--tokens", "8", "--dispatcher", "symmetric", "--mode", "infer"]
    records, printed = bench(tmp_path / "layer", "layer", *options, "--routing", "one_hot")
    assert [r["case"]["ranks"] for r in records] == [2, 4] and "moving µs" in printed
    for record in records:
        assert record["experts_us"] > 0 and record["timed"] == "eager"
        assert record["moving_us"] == pytest.approx(record["median_us"] - record["experts_us"], abs=0.02)
    more = ["--shared", "0", "--layers", "1", "--routing", "one_hot"]
    records, _ = bench(tmp_path / "overlap", "overlap", *options, *more)
    assert [(r["case"]["ranks"], r["case"]["routing"]) for r in records] == [(2, "one_hot"), (4, "one_hot")]
    assert all(record["link_percent"] > 0 for record in records)


def test_scale_is_one_command_for_moving_layers_and_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr("epmoe.bench.cli._run", lambda measure, cases, *_: ran.append((measure.__name__, cases)))
    result = CliRunner().invoke(bench_app, ["scale", "--device", "cpu"])
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    assert [name for name, _ in ran] == ["measure_dispatch_combine", "measure_layer", "measure_overlap"]
    for (_, cases), routings in zip(ran, (3, 3, 1), strict=True):
        assert {case.ranks for case in cases} == {2, 4, 8} and {case.shape for case in cases} > {"deepseek-v3"}
        assert len({case.routing for case in cases}) == routings
    sent = ran[0][1]
    assert {(case.dispatcher, case.scheme) for case in sent} == {(d, "fp8_block") for d in ("all_to_all", "symmetric")}
    assert {case.tokens for case in sent} == {1, 128, 1024, 8192}
    assert {(case.tokens, case.mode) for case in ran[1][1]} == {(8192, "infer"), (8192, "train")}
    ran.clear()
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert CliRunner().invoke(bench_app, ["scale", "--device", "cuda"]).exit_code == 0
    assert {case.ranks for _, cases in ran for case in cases} == {2, 4}
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    refused = CliRunner().invoke(bench_app, ["scale", "--device", "cuda"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert refused.exit_code == 2 and "ranks='2,4,8': needs a GPU per rank, 1 are visible" in refused.output


def test_one_table_holds_all_numbers_of_ranks_with_growth_over_the_fewest(tmp_path: Path) -> None:
    for ranks, median in ((2, 10.0), (8, 25.0)):
        records = [
            {
                "bench": "dispatch_combine",
                "case": {"ranks": ranks, "tokens": tokens},
                "median_us": median * tokens,
                "floor_us": 1.0,
                "peers": {},
                **dict.fromkeys(("commit", "date", "torch", "triton"), "x"),
                "device": "GPU",
            }
            for tokens in (1, 4)
        ]
        save(records, tmp_path, ranks)
    (table,) = all_tables(tmp_path)
    assert table.title == "`dispatch_combine` on 2, 8 × GPU"
    assert table.header == ("ranks", "tokens", "epmoe µs", "floor µs", "growth")
    assert [(row[0], row[1], row[-1]) for row in table.rows] == [
        ("2", "1", "1.00×"), ("2", "4", "1.00×"), ("8", "1", "2.50×"), ("8", "4", "2.50×")
    ]  # fmt: skip


def test_a_number_of_ranks_that_is_none_is_named() -> None:
    result = CliRunner().invoke(bench_app, ["layer", "--ranks", "2,x"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 2 and "ranks='x'" in result.output


@pytest.mark.gpu2
def test_on_gpus_a_decoding_layer_is_timed_as_a_graph_and_a_prefill_as_launches(tmp_path: Path) -> None:
    options = ["--shape", "qwen3-30b", "--ranks", "2", "--tokens", "64,2048", "--dispatcher", "symmetric"]
    options += ["--mode", "infer", "--quick", "--device", "cuda", "--out", str(tmp_path), "--timeout", "140"]
    result = CliRunner().invoke(bench_app, ["layer", *options])
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    few, many = (record for path in tmp_path.iterdir() for record in load(path))
    assert (few["timed"], many["timed"]) == ("graph", "eager")
    for record in (few, many):
        whole = record.get("graph_us", record["median_us"])
        assert record["moving_us"] > 0 < record["experts_us"]
        assert record["moving_us"] + record["experts_us"] == pytest.approx(whole, abs=0.02)
    assert "graph_us" in many and "graph_us" not in few
