"""`epmoe trace`: a command's processes write timelines, which it prints; the command's exit code is its own."""

from __future__ import annotations

import io
import sys
from pathlib import Path

from rich.console import Console
from typer.testing import CliRunner

from epmoe.cli.main import app
from epmoe.cli.trace import table, trace_command
from epmoe.overlap import Span, Timeline

SCRIPT = """
import sys, torch
from epmoe import MoEConfig, MoELayer, run_microbatched
layer = MoELayer(MoEConfig(16, 24, 6, 2, num_shared_experts=1))
for _ in range(3):
    run_microbatched(layer, torch.randn(4, 16)).sum().backward()
sys.exit(int(sys.argv[1]))
"""


def test_a_script_is_traced_and_keeps_its_exit_code(tmp_path: Path) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "out"
    script.write_text(SCRIPT)
    command = ["trace", "--out", str(folder), "--skip", "2", "--calls", "4", "--", sys.executable, str(script), "3"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 3 and "exposed" in result.output, result.output
    line = Timeline.load(folder / "rank0.json")
    # four calls of a layer are two steps of two microbatches; each dispatches and combines once
    assert (
        sorted(span.name for span in line.spans if span.kind == "communication") == ["combine"] * 4 + ["dispatch"] * 4
    )
    assert {span.microbatch for span in line.spans if span.name == "experts"} == {0, 1}


def test_a_command_without_layers_or_without_a_program_says_so(tmp_path: Path) -> None:
    console = Console(record=True, width=120, file=io.StringIO())
    assert trace_command([sys.executable, "-c", ""], tmp_path, 5, 1, False, console) == 1
    assert "the command made fewer than 6 calls of a layer" in console.export_text()
    assert trace_command([sys.executable, "-c", "raise SystemExit(3)"], tmp_path, 5, 1, False, console) == 3
    assert "the command ended with exit code 3, after fewer than 6 calls" in console.export_text()
    assert trace_command([str(tmp_path / "missing")], tmp_path, 0, 1, False, console) == 127


def test_each_rank_has_its_row() -> None:
    spans = (Span("compute", "a", 0, 3000), Span("communication", "b", 2000, 6000))
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(table([Timeline(spans, 0), Timeline((), 1)]))
    rows = [row.strip("│ ").split() for row in console.export_text().splitlines() if row.startswith("│")]
    assert rows[0][0] == "0" and [c for c in rows[0] if c != "│"] == ["0", "6.00", "3.00", "4.00", "3.00", "25%"]
    assert [c for c in rows[1] if c != "│"] == ["1", "0.00", "0.00", "0.00", "0.00"]
