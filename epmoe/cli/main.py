"""The commands of `epmoe`. Each imports what it needs when it runs, so that `--help` stays quick."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

app = typer.Typer(
    help="Expert-parallel Mixture-of-Experts layers: what works here, and how fast.",
    no_args_is_help=True,
    add_completion=False,
)


@app.command()
def doctor(
    ranks: Annotated[int, typer.Option(min=1, max=64, help="Processes to try the dispatchers with.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print the same report as JSON.")] = False,
    timeout: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds that one trial may take.")] = 60.0,
    capabilities: Annotated[
        bool, typer.Option("--capabilities", help="Print what goes with what, and why not where not; try nothing.")
    ] = False,
) -> None:
    """Say what this machine can run, and what stands in the way.

    Every way of moving and computing is tried for real, in processes of its own. Exit code 0: at least one dispatcher
    with one kind of experts works on each type of device present; 1: on one of them nothing does.
    """
    from rich.console import Console

    from epmoe.cli.doctor import examine
    from epmoe.cli.render import render, render_capabilities

    if capabilities:
        from epmoe.capabilities import as_dict

        if as_json:
            typer.echo(json.dumps(as_dict(), indent=2))
        else:
            render_capabilities(as_dict(), Console(highlight=False))
        return
    interactive = sys.stderr.isatty()
    progress = Console(stderr=True, highlight=False)
    report = examine(
        ranks=ranks, timeout=timeout, say=lambda text: progress.print(text, style="dim") if interactive else None
    )
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        render(report, Console(highlight=False))
    raise typer.Exit(0 if report.ok else 1)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
    add_help_option=False,  # --help and all else are for the benches' own command line
)
def bench(context: typer.Context) -> None:
    """Measure: `epmoe bench --help` lists the benches."""
    from epmoe.bench.cli import bench_app

    bench_app(args=context.args, prog_name="epmoe bench")


@app.command()
def version() -> None:
    """Print the version."""
    from epmoe import __version__

    typer.echo(__version__)
