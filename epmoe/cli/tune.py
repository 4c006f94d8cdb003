"""`epmoe tune`: takes the command line apart, shows how far the search is, saves as it goes, and says what it gave."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from epmoe.bench.shapes import named_shape
from epmoe.tuning import store
from epmoe.tuning.problems import ROWS, Problem, problems_of
from epmoe.tuning.search import Found, Settings, save, search

WORKERS = 12  # each has a CUDA context, and its share of the operands


def tune(
    shape: str,
    ranks: str,
    scheme: str,
    rows: str | None,
    train: bool,
    out: str | None,
    candidates: int,
    repeat: int,
    workers: int | None,
) -> None:
    """`epmoe tune`; a mistake in an option is a `typer.BadParameter`."""
    try:
        counts = ROWS if rows is None else _numbers(rows, "rows")
        problems = [
            problem
            for name in _values(shape, "shape")
            for share in _numbers(ranks, "ranks")
            for problem in problems_of(named_shape(name), share, _values(scheme, "scheme"), counts, train)
        ]
        if not torch.cuda.is_available():
            raise ValueError("no GPU: torch sees no CUDA device, and nothing else is tuned")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    device = torch.device("cuda", torch.cuda.current_device())
    place = store.folder_for(device)
    if place is None:
        raise typer.BadParameter("Triton is missing: install it with `pip install triton`")
    if out is not None:
        place = Path(out).resolve() / place.relative_to(place.parents[1])
    if workers is None:
        workers = min(WORKERS, os.cpu_count() or 1)
    settings = Settings(candidates=candidates, repeat=repeat, workers=workers)
    found = _followed(problems, device, settings, place)
    console = Console(highlight=False)
    console.print(summary(found))
    console.print(f"in {place}")


def _followed(problems: list[Problem], device: torch.device, settings: Settings, place: Path) -> list[Found]:
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    found: list[Found] = []
    with Progress(*columns, console=console) as progress:
        total = len(dict.fromkeys(problems))
        bars = {name: progress.add_task(name, total=total) for name in ("compiled", "measured")}
        if not settings.workers:
            progress.remove_task(bars.pop("compiled"))
        step: Callable[[str, int], None] = lambda name, count: progress.advance(bars[name], count)  # noqa: E731
        for some in search(problems, device, settings, step):
            save(some, place)
            found += some
            for one in some:
                if one.entry is None:
                    progress.console.print(f"{one.problem}: not measured: {next(iter(one.refused.values()))}")
    return found


def summary(found: Iterable[Found]) -> Table:
    """A row per op and scheme: how many problems, where another choice than the rule's won, and by how much."""
    table = Table(title="Found", title_justify="left")
    for name in ("op", "scheme"):
        table.add_column(name, no_wrap=True)
    for name in ("measured", "better than the rule", "median gain there", "largest", "candidates refused"):
        table.add_column(name, justify="right")
    by_op: dict[tuple[str, str], list[Found]] = {}
    for one in found:
        by_op.setdefault((one.problem.op, one.problem.scheme), []).append(one)
    for (op, scheme), some in by_op.items():
        gains = [one.gain for one in some if one.gain > 1]
        table.add_row(
            op,
            scheme,
            str(sum(one.entry is not None for one in some)),
            str(len(gains)),
            f"{statistics.median(gains):.2f}×" if gains else "",
            f"{max(gains):.2f}×" if gains else "",
            str(sum(len(one.refused) for one in some)),
        )
    return table


def _values(option: str, name: str) -> list[str]:
    values = [value.strip() for value in option.split(",")]
    if not all(values):
        raise ValueError(f"{name}={option!r}: must be one value, or several with commas")
    return values


def _numbers(option: str, name: str) -> list[int]:
    values = _values(option, name)
    for value in values:
        if not value.isdecimal() or int(value) < 1:
            raise ValueError(f"{name}={value!r}: must be a whole number above 0")
    return [int(value) for value in values]
