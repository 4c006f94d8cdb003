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
def tune(
    shape: Annotated[str, typer.Option(help="Names from epmoe/bench/shapes.py, with commas.")],
    ranks: Annotated[str, typer.Option(help="Ranks that share the experts: each has a share of them.")] = "1",
    scheme: Annotated[str, typer.Option(help="none (bf16), fp8_block, fp8_row, int8_row, int4_g128, mxfp4 …")] = "none",
    rows: Annotated[str | None, typer.Option(help="Expected rows per expert; default 1,4,16,64,256,1024,4096.")] = None,
    train: Annotated[bool, typer.Option("--train", help="Also the gradients of rows and weights.")] = False,
    out: Annotated[
        str | None, typer.Option(help="Folder of the files; default EPMOE_TUNING_DIR, or the package.")
    ] = None,
    candidates: Annotated[int, typer.Option(min=1, help="Configurations to try per problem, at most.")] = 6,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds, of which the median counts.")] = 7,
    workers: Annotated[int | None, typer.Option(min=0, help="Processes that compile; each uses GPU memory.")] = None,
) -> None:
    """Measure kernel configurations on this GPU and keep the fastest where the kernels look for them.

    Each is compared with what the kernels would choose without. What is measured is saved model shape by model shape.
    """
    from epmoe.cli.tune import tune as run

    run(shape, ranks, scheme, rows, train, out, candidates, repeat, workers)


@app.command(context_settings={"allow_interspersed_args": False})
def trace(
    command: Annotated[list[str], typer.Argument(help="After `--`: what to run, torchrun included.")],
    out: Annotated[str, typer.Option(help="Folder of rank<r>.json, and of rank<r>.png.")] = "trace",
    skip: Annotated[int, typer.Option(min=0, help="Calls of a layer to let pass first: warm-up.")] = 0,
    calls: Annotated[int, typer.Option(min=1, help="Calls of a layer to record; in microbatches one for each.")] = 64,
    png: Annotated[bool, typer.Option("--png", help="Also draw (needs matplotlib).")] = False,
) -> None:
    """Run a command and show what ran under what: `epmoe trace -- torchrun --nproc-per-node 2 train.py`.

    Writes Chrome's trace format, a file per rank, and prints how much communication was exposed.
    """
    from pathlib import Path

    from rich.console import Console

    from epmoe.cli.trace import trace_command

    raise typer.Exit(trace_command(command, Path(out), skip, calls, png, Console(highlight=False)))


@app.command()
def version() -> None:
    """Print the version."""
    from epmoe import __version__

    typer.echo(__version__)
