from __future__ import annotations

import json
import subprocess
import sys
import types

import pytest
import typer
from typer.testing import CliRunner

import epmoe
from epmoe.capabilities import KINDS
from epmoe.cli.main import app
from epmoe.dispatch import DISPATCHERS


def run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(args))
    return result.exit_code, result.output


def test_help_names_every_command() -> None:
    code, text = run("--help")
    assert code == 0 and all(name in text for name in ("doctor", "bench", "version"))


def test_version_is_the_package_s() -> None:
    assert run("version") == (0, epmoe.__version__ + "\n")


@pytest.mark.parametrize("line", ["nosuch", "doctor --ranks 0", "doctor --ranks two", "doctor --timeout 0", "doctor x"])
def test_wrong_arguments_give_usage_and_exit_code_2(line: str) -> None:
    code, text = run(*line.split())
    assert code == 2 and "Usage:" in text


def test_bench_gets_its_whole_command_line_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[object] = []
    bench_app = typer.Typer()

    @bench_app.command()
    def layer(name: str, tokens: int = 0, dry: bool = False) -> None:
        got.extend([name, tokens, dry])

    module = types.ModuleType("epmoe.bench.cli")
    module.bench_app = bench_app  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "epmoe.bench.cli", module)
    assert run("bench", "--dry", "qwen3-30b", "--tokens", "5")[0] == 0
    assert got == ["qwen3-30b", 5, True]
    code, text = run("bench", "--help")
    assert code == 0 and "epmoe bench" in text and "--tokens" in text
    assert run("bench", "--nosuch")[0] == 2


def test_the_module_runs_as_a_command() -> None:
    done = subprocess.run([sys.executable, "-m", "epmoe", "version"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, epmoe.__version__ + "\n"), done.stderr


def test_capabilities_are_printed_without_trying_anything_and_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    code, printed = run("doctor", "--capabilities", "--json")
    tables = json.loads(printed)
    assert code == 0
    assert {row["dispatcher"] for row in tables["dispatchers"]} == set(DISPATCHERS)
    assert {row["experts"] for row in tables["experts"]} == set(KINDS)
    assert any(pair["refusal"] for pair in tables["combinations"])
    monkeypatch.setenv("COLUMNS", "200")
    _, text = run("doctor", "--capabilities")
    for name in (*DISPATCHERS, *KINDS, "works together", "refused", "choose a pair that fits"):
        assert name in text
