"""`epmoe trace`: a command's timeline, rank by rank.

The command runs as it is, under torchrun or not. Its processes find EPMOE_TRACE in their environment when they import
epmoe, listen to some of their layers' calls, and each writes a file; what is printed and drawn here comes from those.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from epmoe.overlap.timeline import Timeline

FIGURES = {"wall": "wall_us", "compute": "compute_us", "communication": "communication_us", "exposed": "exposed_us"}


def trace_command(command: Sequence[str], folder: Path, skip: int, calls: int, png: bool, console: Console) -> int:
    """Runs `command`, prints each rank's figures, and returns its exit code (1 if no rank called a layer)."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("rank*.json"):
        old.unlink()
    environment = os.environ | {"EPMOE_TRACE": str(folder.resolve()), "EPMOE_TRACE_WINDOW": f"{skip}:{calls}"}
    try:
        done = subprocess.run(list(command), env=environment, check=False)
    except OSError as error:
        console.print(f"{command[0]}: {error}")
        return 127
    ranks = sorted((Timeline.load(path) for path in folder.glob("rank*.json")), key=lambda line: line.rank)
    if not ranks:
        ended = f"ended with exit code {done.returncode}, after" if done.returncode else "made"
        console.print(f"no trace: the command {ended} fewer than {skip + 1} calls of a layer (--skip), or none")
        return done.returncode or 1
    console.print(table(ranks))
    console.print(f"written to {folder}/rank*.json: open them in ui.perfetto.dev")
    if png:
        for line in ranks:
            line.plot(folder / f"rank{line.rank}.png")
    return done.returncode


def table(ranks: Sequence[Timeline]) -> Table:
    """Milliseconds of each rank, and the share of its communication under which something was computed."""
    made = Table(title="milliseconds", title_justify="left")
    for name in ("rank", *FIGURES, "hidden"):
        made.add_column(name, justify="right")
    for line in ranks:
        moved = line.communication_us
        hidden = "" if moved == 0 else f"{1 - line.exposed_us / moved:.0%}"
        made.add_row(str(line.rank), *(f"{getattr(line, name) / 1e3:,.2f}" for name in FIGURES.values()), hidden)
    return made
