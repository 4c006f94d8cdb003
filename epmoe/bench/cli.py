"""`epmoe bench`: a command per bench, and `table`, which fills README from the records.

Options that take several values take them with commas; every combination is a case, and all cases run in one start of
the ranks. Each is printed and recorded when it is done, so that a run that is cut off keeps what it has.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from epmoe.bench import grouped_gemm as gemms
from epmoe.bench import routed_mlp as mlps
from epmoe.bench.dispatch_combine import DispatchCombineCase, measure_dispatch_combine
from epmoe.bench.grouped_gemm import GroupedGemmCase, measure_grouped_gemm
from epmoe.bench.layer import LayerCase, measure_layer
from epmoe.bench.model import ModelCase, measure_model
from epmoe.bench.overlap import OverlapCase, measure_overlap
from epmoe.bench.quantized import SCHEMES, SHAPES, TOKENS, QuantizedCase, measure_quantized
from epmoe.bench.records import RESULTS, Record
from epmoe.bench.routed_mlp import RoutedMLPCase, measure_routed_mlp
from epmoe.bench.session import Measure, Settings, run_bench
from epmoe.bench.table import OTHERS, all_tables, devices_named, page, rendered, tables
from epmoe.testing import RankFailed, RanksTimedOut

bench_app = typer.Typer(help="Measure, beside a floor and a peer of the same run.", no_args_is_help=True)

Shapes = Annotated[str, typer.Option(help="Names from epmoe/bench/shapes.py.")]
TokensPerRank = Annotated[str, typer.Option(help="Tokens per rank.")]
Ranks = Annotated[int, typer.Option(min=1, help="Processes, one GPU each.")]
RankCounts = Annotated[str, typer.Option(help="Processes, one GPU each; of several numbers one run after another.")]
Modes = Annotated[str, typer.Option(help="infer (forward) or train (forward and backward).")]
Dispatchers = Annotated[str, typer.Option(help="auto, or a name from epmoe/dispatch, such as symmetric.")]
ExpertsNames = Annotated[str, typer.Option(help="grouped, torch_grouped, reference or auto.")]
Routings = Annotated[str, typer.Option(help="uniform, zipf:EXPONENT or one_hot.")]
Out = Annotated[Path | None, typer.Option(help="Folder of the records; default: epmoe/bench/results, none for CPU.")]
Quick = Annotated[bool, typer.Option("--quick", help="Few repetitions: to see that it works.")]
Device = Annotated[str, typer.Option(help="auto, cuda or cpu.")]
Timeout = Annotated[float, typer.Option(min=1, help="Seconds for all cases together.")]
Compilers = Annotated[int, typer.Option(min=0, help="Processes that compile kernels first; each uses GPU memory.")]

TIMEOUT = 540.0
COMPILERS = min(12, os.cpu_count() or 1)
QUANTIZED_SHAPES, QUANTIZED_SCHEMES = ",".join(SHAPES), ",".join(SCHEMES)
QUANTIZED_TOKENS = ",".join(map(str, TOKENS))


@bench_app.command("layer")
def layer(
    shape: Shapes = "qwen3-30b",
    tokens: TokensPerRank = "8192",
    ranks: RankCounts = "2",
    mode: Modes = "infer,train",
    dispatcher: Dispatchers = "all_to_all",
    experts: ExpertsNames = "grouped",
    routing: Routings = "uniform",
    out: Out = None,
    quick: Quick = False,
    device: Device = "auto",
    timeout: Timeout = TIMEOUT,
) -> None:
    """The routed path without the router: dispatch, experts, combine."""
    cases = _cases(
        LayerCase,
        shape=_values(shape),
        dispatcher=_values(dispatcher),
        ranks=_numbers(ranks, "ranks"),
        tokens=_numbers(tokens),
        mode=_values(mode),
        experts=_values(experts),
        routing=_values(routing),
    )
    _run(measure_layer, cases, None, out, quick, device, timeout)


@bench_app.command("routed_mlp")
def routed_mlp(
    shape: Annotated[str | None, typer.Option(help="Names from epmoe/bench/shapes.py.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens.")] = None,
    mode: Annotated[str | None, typer.Option(help="infer (forward) or train (forward and backward).")] = None,
    scheme: Annotated[str | None, typer.Option(help="bf16 or fp8_block.")] = None,
    experts: Annotated[str | None, typer.Option(help="grouped (fp8: grouped_fp8), torch_grouped, reference.")] = None,
    routing: Routings = "uniform",
    eager: Annotated[bool, typer.Option("--eager", help="Time infer as launches, not as a CUDA graph.")] = False,
    out: Out = None,
    quick: Quick = False,
    device: Device = "auto",
    timeout: Timeout = TIMEOUT,
    compilers: Compilers = COMPILERS,
) -> None:
    """The experts of one GPU: sort, GEMM1, activation, GEMM2, weighted sum.

    Without shape, tokens, mode and scheme: the cases of README's table.
    """
    if shape is tokens is mode is scheme is None:
        cases = mlps.standard_cases()
        cases = [dataclasses.replace(case, eager=eager and case.mode == "infer") for case in cases]
        cases = _changed(cases, routing=routing, **({} if experts is None else {"experts": experts}))
    else:
        cases = []
        for one in _values(scheme or "bf16"):
            cases += _cases(
                RoutedMLPCase,
                scheme=[one],
                shape=_values(shape or "qwen3-30b"),
                tokens=_numbers(tokens or "1,16,64,128,512,4096,16384"),
                mode=_values(mode or "infer"),
                experts=_values(experts or mlps.KERNELS.get(one, "auto")),
                routing=_values(routing),
                eager=[eager],
            )
    _run(measure_routed_mlp, cases, 1, out, quick, device, timeout, compilers)


@bench_app.command("quantized")
def quantized(
    shape: Shapes = QUANTIZED_SHAPES,
    tokens: Annotated[str, typer.Option(help="Tokens: few decode, many prefill.")] = QUANTIZED_TOKENS,
    scheme: Annotated[str, typer.Option(help="Of the weights, names from epmoe/quant/formats.py.")] = QUANTIZED_SCHEMES,
    experts: Annotated[str, typer.Option(help="auto, grouped_fp8, grouped_int8, weight_only or reference.")] = "auto",
    routing: Routings = "uniform",
    out: Out = None,
    quick: Quick = False,
    device: Device = "auto",
    timeout: Timeout = TIMEOUT,
    compilers: Compilers = COMPILERS,
) -> None:
    """The experts of one GPU on weights of every scheme."""
    fields = {"experts": _values(experts), "routing": _values(routing)}
    cases = []
    for one in _values(shape):  # cases of a shape share the experts drawn
        cases += _cases(QuantizedCase, shape=[one], tokens=_numbers(tokens), scheme=_values(scheme), **fields)
    _run(measure_quantized, cases, 1, out, quick, device, timeout, compilers)


@bench_app.command("grouped_gemm")
def grouped_gemm(
    shape: Annotated[str | None, typer.Option(help="A, B, C, D, F, G or EXPERTSxROWSxNxK.")] = None,
    layout: Annotated[str | None, typer.Option(help="even, uneven, gathered, swiglu or batched.")] = None,
    scheme: Annotated[str | None, typer.Option(help="bf16, fp8_row or fp8_block.")] = None,
    rows: Annotated[str | None, typer.Option(help="Rows per expert, instead of the shapes' own.")] = None,
    capacity: Annotated[int, typer.Option(min=0, help="Places per expert when batched; 0: twice the rows.")] = 0,
    sustained: Annotated[float, typer.Option(min=0, help="Seconds of A and D back to back; 0: bursts only.")] = 1.0,
    out: Out = None,
    quick: Quick = False,
    device: Device = "auto",
    timeout: Timeout = TIMEOUT,
    compilers: Compilers = COMPILERS,
) -> None:
    """One grouped matrix product: a burst after a rest, and of A and D also the speed under load.

    Without shape, layout, scheme and rows: the cases of README's table.
    """
    if shape is layout is scheme is rows is None and not capacity:
        cases = gemms.standard_cases()
    else:
        try:
            shapes = [gemms.named_shape(name) for name in _values(shape or "A,B,C,D,F,G")]
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        counts = None if rows is None else _numbers(rows, "rows")
        cases = []
        for experts, own, n, k in shapes:
            fields = {"experts": [experts], "rows": counts or [own], "n": [n], "k": [k], "capacity": [capacity]}
            cases += _cases(
                GroupedGemmCase, layout=_values(layout or "even"), scheme=_values(scheme or "bf16"), **fields
            )
    settings = {} if quick else {"warmup": 3, "repeat": 20, "idle": 0.33}
    settings["sustained"] = 0.02 if quick and sustained else sustained
    _run(measure_grouped_gemm, cases, 1, out, quick, device, timeout, compilers, settings)


@bench_app.command("dispatch_combine")
def dispatch_combine(
    shape: Shapes = "deepseek-v3",
    tokens: TokensPerRank = "8,128,1024,4096,8192",
    ranks: RankCounts = "2",
    dispatcher: Dispatchers = "all_to_all",
    routing: Routings = "uniform",
    profile: Annotated[str, typer.Option(help="auto, collective, latency or throughput.")] = "auto",
    scheme: Annotated[str, typer.Option(help="How rows are sent: bf16, fp8_block, fp8_row, int8_row …")] = "bf16",
    out: Out = None,
    quick: Quick = False,
    device: Device = "auto",
    timeout: Timeout = TIMEOUT,
) -> None:
    """Rows to their experts' ranks and back, with nothing computed there."""
    cases = _cases(
        DispatchCombineCase,
        shape=_values(shape),
        dispatcher=_values(dispatcher),
        profile=_values(profile),
        scheme=_values(scheme),
        ranks=_numbers(ranks, "ranks"),
        tokens=_numbers(tokens),
        routing=_values(routing),
    )
    _run(measure_dispatch_combine, cases, None, out, quick, device, timeout)


@bench_app.command("overlap")
def overlap(
    shape: Shapes = "qwen3-30b",
    shared: Annotated[str, typer.Option(help="Shared experts, of the routed ones' width each.")] = "0,2",
    tokens: TokensPerRank = "2048,4096,8192,16384",
    ranks: RankCounts = "2",
    mode: Modes = "infer,train",
    dispatcher: Dispatchers = "all_to_all",
    layers: Annotated[int, typer.Option(min=1, help="Blocks of a step.")] = 4,
    graph: Annotated[bool, typer.Option("--graph", help="Time CUDA graphs; dispatchers that capture.")] = False,
    routing: Routings = "uniform",
    traces: Annotated[Path | None, typer.Option(help="Folder for a timeline of each way to run a step.")] = None,
    out: Out = None,
    quick: Quick = False,
    device: Device = "auto",
    timeout: Timeout = TIMEOUT,
) -> None:
    """Steps of transformer blocks: serial, overlapped in each way, and with rows that do not move."""
    cases = _cases(
        OverlapCase,
        shape=_values(shape),
        shared_experts=_numbers(shared, "shared", least=0),
        tokens=_numbers(tokens),
        mode=_values(mode),
        dispatcher=_values(dispatcher),
        ranks=_numbers(ranks, "ranks"),
        layers=[layers],
        graph=[graph],
        routing=_values(routing),
    )
    measure = functools.partial(measure_overlap, traces=None if traces is None else traces.resolve())
    _run(measure, cases, None, out, quick, device, timeout)


@bench_app.command("scale")
def scale(
    shape: Shapes = "deepseek-v3,qwen3-30b",
    tokens: Annotated[str, typer.Option(help="Tokens per rank; layer and overlap take the most.")] = "1,128,1024,8192",
    ranks: Annotated[str, typer.Option(help="Processes, one GPU each; more than there are GPUs: left out.")] = "2,4,8",
    routing: Routings = "uniform,zipf:1.0,one_hot",
    out: Out = None,
    quick: Quick = False,
    device: Device = "auto",
    timeout: Timeout = 3 * TIMEOUT,
) -> None:
    """What more ranks cost: dispatch_combine, layer and overlap one after the other, by the cases of each that say so.

    dispatch_combine sends rows in fp8_block, by all_to_all and symmetric; layer and overlap infer and train by
    all_to_all, overlap with uniform routing and two shared experts.
    """
    counts, sizes, shapes, routings = _numbers(ranks, "ranks"), _numbers(tokens), _values(shape), _values(routing)
    if torch.cuda.is_available() if device == "auto" else device == "cuda":
        here = torch.cuda.device_count()
        if not (counts := [count for count in counts if count <= here]):
            raise typer.BadParameter(f"ranks={ranks!r}: needs a GPU per rank, {here} are visible")
    common: dict[str, list[Any]] = {"shape": shapes, "ranks": counts}
    whole = common | {"dispatcher": ["all_to_all"], "mode": ["infer", "train"], "tokens": [max(sizes)]}
    moved = common | {"dispatcher": ["all_to_all", "symmetric"], "profile": ["auto"], "scheme": ["fp8_block"]}
    parts: list[tuple[Measure, list[Any]]] = [
        (measure_dispatch_combine, _cases(DispatchCombineCase, **moved, tokens=sizes, routing=routings)),
        (measure_layer, _cases(LayerCase, **whole, experts=["grouped"], routing=routings)),
        (measure_overlap, _cases(OverlapCase, **whole, shared_experts=[2])),
    ]
    until = time.monotonic() + timeout
    for measure, cases in parts:
        _run(measure, cases, None, out, quick, device, max(1.0, until - time.monotonic()))


@bench_app.command("model")
def model(
    shape: Shapes = "qwen3-30b",
    layers: Annotated[int, typer.Option(min=1, help="Of the model.")] = 4,
    ranks: Ranks = 2,
    mode: Annotated[str, typer.Option(help="train, decode or both.")] = "train,decode",
    tokens: Annotated[str, typer.Option(help="Tokens per rank of a training step.")] = "4096",
    rows: Annotated[str, typer.Option(help="Rows per rank of a decoding step.")] = "1,16,64",
    context: Annotated[int, typer.Option(min=1, help="Tokens before each row's newest.")] = 511,
    dispatcher: Dispatchers = "auto",
    out: Out = None,
    quick: Quick = False,
    device: Device = "auto",
    timeout: Timeout = TIMEOUT,
) -> None:
    """A transformers model, training and decoding, beside its own expert parallelism and grouped_mm."""
    cases = []
    for one in _values(mode):
        counts, before = (_numbers(tokens), 0) if one == "train" else (_numbers(rows, "rows"), context)
        cases += _cases(
            ModelCase,
            shape=_values(shape),
            layers=[layers],
            ranks=[ranks],
            mode=[one],
            tokens=counts,
            context=[before],
            dispatcher=_values(dispatcher),
        )
    _run(measure_model, cases, ranks, out, quick, device, timeout)


@bench_app.command("table")
def table(
    check: Annotated[bool, typer.Option("--check", help="Change nothing; fail if tables are not up to date.")] = False,
    readme: Annotated[Path, typer.Option(help="The file with the markers.")] = RESULTS.parents[2] / "README.md",
    results: Annotated[Path, typer.Option(help="Folder of the records.")] = RESULTS,
) -> None:
    """Write README's figures anew from the records, and beside these the tables that README has no room for."""
    console = _console()
    made, others = all_tables(results), results / OTHERS
    for one in made:
        console.print(one.rich())
    try:
        old = readme.read_text()
        new = rendered(old, made)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{readme}: {error}", param_hint="--readme") from error
    pages = {readme: (old, new), others: (others.read_text() if others.exists() else "", page(made))}
    stale = [path for path, (before, after) in pages.items() if before != after]
    if check and stale:
        console.print(f"{', '.join(map(str, stale))}: not up to date: run `epmoe bench table`")
        raise typer.Exit(1)
    if not check:
        for path in stale:
            path.write_text(pages[path][1])


def _run(
    measure: Measure,
    cases: Sequence[Any],
    ranks: int | None,
    out: Path | None,
    quick: bool,
    device: str,
    timeout: float,
    compilers: int = 0,
    settings_of_bench: Mapping[str, Any] | None = None,
) -> None:
    """All cases on as many ranks; None: each on as many as it says, the fewest first."""
    console = _console()
    cuda = torch.cuda.is_available() if device == "auto" else device == "cuda"
    if out is None and cuda:
        out = RESULTS
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise typer.BadParameter(f"{out}: {error.strerror or error}", param_hint="--out") from error
    settings = Settings(*(2, 5) if quick else (5, 30), out=None if out is None else str(out.resolve()))
    settings = dataclasses.replace(settings, **(settings_of_bench or {}))
    by_ranks: dict[int, list[Any]] = {}
    for case in cases:
        by_ranks.setdefault(ranks or case.ranks, []).append(case)
    if cuda and (most := max(by_ranks)) > torch.cuda.device_count():
        raise typer.BadParameter(f"ranks={most}: needs a GPU per rank, {torch.cuda.device_count()} are visible")
    measured: list[Record] = []
    until = time.monotonic() + timeout
    try:
        for count, some in sorted(by_ranks.items()):
            left = max(1.0, until - time.monotonic())
            measured += run_bench(measure, some, count, settings, device=device, timeout=left, compilers=compilers)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except (RankFailed, RanksTimedOut) as error:
        if isinstance(error, RankFailed) and error.kind == "ValueError":
            raise typer.BadParameter(error.traceback.rpartition("ValueError: ")[2].strip()) from error
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    for one in tables(measured, devices_named(by_ranks, measured[0]["device"])):
        console.print(one.rich())
    console.print(f"recorded in {out}" if out is not None else "not recorded: give --out DIR to keep figures of a CPU")


def _cases(kind: Callable[..., Any], **fields: list[Any]) -> list[Any]:
    """One case for every combination of the fields' values, the last field varying fastest."""
    try:
        return [kind(**dict(zip(fields, values, strict=True))) for values in itertools.product(*fields.values())]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _changed(cases: Sequence[Any], **fields: Any) -> list[Any]:
    try:
        return [dataclasses.replace(case, **fields) for case in cases]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _values(option: str) -> list[str]:
    values = [value.strip() for value in option.split(",")]
    if not all(values):
        raise typer.BadParameter(f"{option!r}: must be one value, or several with commas")
    return values


def _numbers(option: str, name: str = "tokens", least: int = 1) -> list[int]:
    values = _values(option)
    for value in values:
        if not value.isdecimal() or int(value) < least:
            raise typer.BadParameter(f"{name}={value!r}: must be a whole number above {least - 1}")
    return [int(value) for value in values]


def _console() -> Console:
    console = Console(highlight=False)
    # a pipe has no width of its own, and rich would cut the columns to 80
    return console if console.is_terminal else Console(highlight=False, width=240)
