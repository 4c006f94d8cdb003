"""Records: what identifies one, what replaces what, and that a file is whole or untouched."""

from __future__ import annotations

import json
import subprocess

import pytest
import torch

from epmoe.bench.records import commit, dump, load, make_record, results_file, save

CPU = torch.device("cpu")


def record(tokens=8, median=5.0, bench="layer", **more):
    case = {"shape": "tiny", "tokens": tokens}
    return make_record(bench, case, median_us=median, floor_us=1.0, peers={"other": 6.789}, device=CPU, **more)


def test_a_record_has_the_fields_of_the_format_in_order_and_leaves_out_what_was_not_measured(monkeypatch):
    monkeypatch.setenv("EPMOE_COMMIT", "abc1234")
    made = record(median=1.23456, tflops=7.77777, wire_bytes=10, dispatch_us=3.14159)
    assert list(made) == [
        *("bench", "case", "median_us", "floor_us", "tflops", "wire_bytes", "peers", "dispatch_us"),
        *("commit", "date", "torch", "triton", "device"),
    ]
    assert (made["median_us"], made["tflops"], made["dispatch_us"]) == (1.23, 7.8, 3.14)
    assert made["peers"] == {"other": 6.79}
    assert (made["commit"], made["torch"], made["device"]) == ("abc1234", torch.__version__, "cpu")


def test_the_newest_record_of_a_bench_and_case_replaces_the_older_and_leaves_the_others(tmp_path):
    (path,) = save([record(8, 1.0), record(16, 2.0), record(8, 3.0, bench="routed_mlp")], tmp_path, 2)
    newer = record(8, 9.0)
    newer["case"] = dict(reversed(newer["case"].items()))  # the order of a case's keys means nothing
    assert save([newer], tmp_path, 2) == [path] == [tmp_path / "cpu-x2.json"]
    assert [(r["bench"], r["case"]["tokens"], r["median_us"]) for r in load(path)] == [
        ("layer", 8, 9.0),
        ("layer", 16, 2.0),
        ("routed_mlp", 8, 3.0),
    ]


def test_another_number_of_devices_is_another_file(tmp_path):
    save([record()], tmp_path, 1)
    save([record()], tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cpu-x1.json", "cpu-x2.json"]
    assert results_file(tmp_path, "NVIDIA H200", 8).name == "nvidia-h200-x8.json"


def test_a_file_has_one_record_per_line_with_numbers_in_their_own_order():
    text = dump([record(128), record(16), record(1024)])
    lines = text.splitlines()
    assert [json.loads(line.rstrip(","))["case"]["tokens"] for line in lines[1:-1]] == [16, 128, 1024]
    assert (lines[0], lines[-1]) == ("[", "]") and json.loads(text) and json.loads(dump([])) == []


@pytest.mark.parametrize("broken", [{"median_us": float("nan")}, {"extra": object()}, {"peers": None}])
def test_a_record_that_cannot_be_kept_raises_and_leaves_the_file_as_it_was(tmp_path, broken):
    (path,) = save([record(8)], tmp_path, 1)
    before = path.read_bytes()
    bad = record(16) | broken
    if bad["peers"] is None:
        del bad["peers"]
    with pytest.raises((ValueError, TypeError)):
        save([bad], tmp_path, 1)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_file_that_holds_no_records_is_named(tmp_path):
    path = tmp_path / "cpu-x1.json"
    for text in ("{", '{"bench": 1}', "[1]"):
        path.write_text(text)
        with pytest.raises(ValueError, match="cpu-x1.json"):
            load(path)


def test_the_commit_is_the_given_one_else_gits_with_changes_marked_but_not_those_of_records(tmp_path, monkeypatch):
    monkeypatch.delenv("EPMOE_COMMIT", raising=False)
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):  # set when the suite runs from a git hook
        monkeypatch.delenv(name, raising=False)

    def git(*arguments):
        config = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *config, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    assert commit(tmp_path) == "unknown"
    git("init")
    assert commit(tmp_path) == "unknown"  # no commit yet
    (tmp_path / "code.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "one")
    head = git("rev-parse", "--short", "HEAD")
    assert commit(tmp_path) == head
    (tmp_path / "README.md").write_text("figures")
    save([record()], tmp_path / "epmoe" / "bench" / "results", 1)
    assert commit(tmp_path) == head
    (tmp_path / "code.py").write_text("2")
    assert commit(tmp_path) == f"{head}-dirty"
    monkeypatch.setenv("EPMOE_COMMIT", "given")
    assert commit(tmp_path) == "given"
