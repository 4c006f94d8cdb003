"""README's figures come from the records and from nothing else."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from epmoe.bench.cli import bench_app
from epmoe.bench.records import RESULTS, make_record, save
from epmoe.bench.table import BEGIN, END, OTHERS, all_tables, rendered

README = RESULTS.parents[2] / "README.md"


def record(bench, tokens, mode, median, **more):
    case = {"shape": "tiny", "tokens": tokens, "mode": mode}
    device = torch.device("cpu")
    return make_record(bench, case, median_us=median, floor_us=1.0, peers={"nccl": 3.0}, device=device, **more)


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setenv("EPMOE_COMMIT", "abc1234")
    records = [
        record("routed_mlp", 16, "infer", 7.0, gb_s=3.0),
        record("layer", 128, "train", 1234.5, tflops=5.5, ceilings={"hbm_gb_s": 1.0}),
        record("layer", 16, "train", 2.0),
        record("grouped_gemm", 16, "infer", 5.0),
    ]
    save(records, tmp_path / "results", 2)
    return tmp_path / "results"


def table(*arguments):
    return CliRunner().invoke(bench_app, ["table", *map(str, arguments)], env={"COLUMNS": "200", "TERM": "dumb"})


def test_a_table_per_bench_has_constants_in_its_caption_and_rows_in_the_order_of_numbers(results):
    layer, routed_mlp, grouped_gemm = all_tables(results)
    assert grouped_gemm.title == "`grouped_gemm` on 2 × cpu"
    lines = layer.markdown().splitlines()
    assert lines[0] == "**`layer` on 2 × cpu**"
    assert lines[2].startswith("shape tiny; mode train; torch ") and lines[2].endswith("commit abc1234")
    assert lines[4:] == [
        "| tokens | epmoe µs | floor µs | TFLOP/s | nccl µs |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| 16 | 2.0 | 1.0 |  | 3.0 (1.50×) |",
        "| 128 | 1,234 | 1.0 | 6 | 3.0 (0.00×) |",
    ]
    # a single record has no constants: all of its case is shown
    assert routed_mlp.header[:3] == ("shape", "tokens", "mode") and "GB/s" in routed_mlp.header


def test_only_what_lies_between_the_markers_is_replaced_and_a_second_time_changes_nothing(results, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before {BEGIN}old{END} after\n")
    assert table("--readme", readme, "--results", results).exit_code == 0
    once = readme.read_text()
    assert once.startswith(f"before {BEGIN}\n\n**`layer`") and once.endswith(f"{END} after\n") and "old" not in once
    assert table("--readme", readme, "--results", results).exit_code == 0
    assert readme.read_text() == once
    more = (results / OTHERS).read_text()
    assert "`grouped_gemm` on" in more and "`layer`" not in more and "grouped_gemm" not in once


def test_check_fails_on_a_stale_readme_and_changes_nothing(results, tmp_path):
    readme = tmp_path / "README.md"
    stale = f"{BEGIN}\nold\n{END}\n"
    readme.write_text(stale)
    failed = table("--check", "--readme", readme, "--results", results)
    assert failed.exit_code == 1 and "not up to date" in failed.output and readme.read_text() == stale
    table("--readme", readme, "--results", results)
    assert table("--check", "--readme", readme, "--results", results).exit_code == 0
    for bench in ("layer", "grouped_gemm"):  # of README, and of the other page
        save([record(bench, 16, "train", 99.0)], results, 2)
        assert table("--check", "--readme", readme, "--results", results).exit_code == 1
        table("--readme", readme, "--results", results)


@pytest.mark.parametrize("text", ["no markers", f"{BEGIN} alone", f"{END}{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"])
def test_a_readme_without_its_two_markers_is_refused(results, tmp_path, text):
    with pytest.raises(ValueError, match="bench:begin"):
        rendered(text, all_tables(results))
    readme = tmp_path / "README.md"
    readme.write_text(text)
    assert table("--readme", readme, "--results", results).exit_code == 2
    assert readme.read_text() == text


@pytest.mark.skipif(not README.exists() or BEGIN not in README.read_text(), reason="README.md has no figures")
def test_this_projects_readme_shows_its_records():
    done = table("--check")
    assert done.exit_code == 0, done.output
