"""What the cases of one bench share while their ranks live: group, ceilings, experts; and where each record goes.

A bench is a function `measure(case, session) -> Record`, called on every rank. Cases run one after the other in the
same processes, so kernels compile once; a record is on disk and its line on the screen before the next case begins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from epmoe.bench import records
from epmoe.bench.problem import Forward, Problem, Tokens, make_tokens, make_weights, turns_of
from epmoe.bench.records import Record
from epmoe.bench.shapes import Shape, named_shape
from epmoe.bench.timing import Call, Ceilings, burst_us, interleaved_us, measure_ceilings, sustained_us
from epmoe.comm import EPGroup
from epmoe.experts import ExpertWeights
from epmoe.testing import RankFailed, RanksTimedOut, run_ranks


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to measure, whatever the case.

    Attributes:
        warmup, repeat: calls before those that count, and those.
        idle: seconds of rest before a burst, for benches that measure bursts.
        sustained: seconds of each call back to back, for those that measure that too; 0 leaves it out.
        out: folder of the records, None to keep none.
    """

    warmup: int = 5
    repeat: int = 30
    out: str | None = None
    group_timeout: float = 300.0
    idle: float = 0.0
    sustained: float = 0.0


class Session:
    """One rank's view of a run. `ceilings`: None measures them."""

    def __init__(self, settings: Settings, ceilings: Ceilings | None = None) -> None:
        self.settings = settings
        self.ep = EPGroup(timeout=settings.group_timeout)
        self.device = self.ep.device
        self.ceilings: Ceilings = ceilings or measure_ceilings(self.device, self.ep)
        self._weights: tuple[Shape, ExpertWeights] | None = None

    def tokens(self, shape: str, tokens: int, routing: str) -> Tokens:
        """Tokens and routing alone."""
        return make_tokens(named_shape(shape), self.ep, tokens, routing)

    def problem(self, shape: str, tokens: int, routing: str) -> Problem:
        """Tokens, routing and experts; the experts are kept for the next case of the same shape."""
        made = self.tokens(shape, tokens, routing)
        if self._weights is None or self._weights[0] != made.shape:
            self._weights = None  # before the next ones are allocated
            self._weights = made.shape, make_weights(made.shape, self.ep)
        fields = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
        return Problem(**fields, weights=self._weights[1])

    def forget(self) -> None:
        """Gives the memory of experts and of what was cached back."""
        self._weights = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def time(self, calls: Mapping[str, Call], *, flush_l2: bool = False, graph: bool = False) -> dict[str, float]:
        """`interleaved_us` with this run's settings."""
        return interleaved_us(
            calls,
            warmup=self.settings.warmup,
            repeat=self.settings.repeat,
            device=self.device,
            ep=self.ep,
            flush_l2=flush_l2,
            graph=graph,
        )

    def time_in_a_row(self, problem: Problem, forwards: Mapping[str, Forward]) -> dict[str, float]:
        """Microseconds of one forward of each without autograd: on CUDA from graphs of as many as `turns_of` says, no
        call finding its weights in the L2 cache (`Problem.in_a_row`)."""
        cuda = self.device.type == "cuda"
        turns = turns_of(problem.x.shape[0]) if cuda else 1
        calls = {name: problem.in_a_row(forward, turns) for name, forward in forwards.items()}
        return {name: time / turns for name, time in self.time(calls, flush_l2=True, graph=cuda).items()}

    def burst(self, calls: Mapping[str, Call]) -> dict[str, float]:
        """`burst_us` with this run's settings."""
        settings = self.settings
        return burst_us(calls, idle=settings.idle, warmup=settings.warmup, repeat=settings.repeat, device=self.device)

    def sustain(self, calls: Mapping[str, Call], once_us: Mapping[str, float]) -> dict[str, float]:
        """`sustained_us` with this run's settings."""
        return sustained_us(calls, once_us, seconds=self.settings.sustained, device=self.device)


Measure = Callable[[Any, Session], Record]


def run_bench(
    measure: Measure,
    cases: Sequence[Any],
    ranks: int,
    settings: Settings,
    *,
    device: str = "auto",
    timeout: float,
    compilers: int = 0,
) -> list[Record]:
    """Starts `ranks` processes, measures every case there, and returns the records in the order of the cases.

    Args:
        device: `cuda` (NCCL), `cpu` (gloo) or `auto`.
        timeout: seconds for the whole run; records of the cases measured until then are kept.
        compilers: with one rank on CUDA, so many processes first run the cases once side by side, which fills Triton's
            cache on disk: one process would compile one kernel after the other. They share the GPU's memory.

    Raises:
        ValueError: an unknown device, or fewer GPUs than ranks.
        RankFailed: a rank raised, for example because epmoe and a peer disagree.
        RanksTimedOut: the run took longer.
    """
    if device not in ("auto", "cuda", "cpu"):
        raise ValueError(f"device={device!r}: must be auto, cuda or cpu")
    cuda = torch.cuda.is_available() if device == "auto" else device == "cuda"
    backend = "nccl" if cuda else "gloo"
    # multicast, which not every host lends, would serve the barriers only
    env = {"NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE", "0")}
    compilers = min(compilers, len(cases)) if cuda and ranks == 1 else 0
    if compilers > 1:

        def compile_some(some: Sequence[Any]) -> None:
            # whatever fails here is met again, and told, by the rank that measures
            with contextlib.suppress(RankFailed, RanksTimedOut):
                run_ranks(_run_once, 1, args=(measure, some, settings), backend=backend, timeout=timeout, env=env)

        with ThreadPoolExecutor(compilers) as pool:
            list(pool.map(compile_some, [cases[first::compilers] for first in range(compilers)]))
    by_rank = run_ranks(_measure_all, ranks, args=(measure, cases, settings), backend=backend, timeout=timeout, env=env)
    return by_rank[0]


def _run_once(rank: int, world_size: int, measure: Measure, cases: Sequence[Any], settings: Settings) -> None:
    """Every case with as few calls as can be, and its record forgotten."""
    once = dataclasses.replace(settings, warmup=1, repeat=1, idle=0.0, sustained=0.0)
    session = Session(once, Ceilings(1.0, 1.0, None))
    for case in cases:
        # a rank that runs out of memory beside the others can still compile what is smaller
        with contextlib.suppress(torch.OutOfMemoryError):
            measure(case, session)
        session.forget()


def _measure_all(
    rank: int, world_size: int, measure: Measure, cases: Sequence[Any], settings: Settings
) -> list[Record]:
    session = Session(settings)
    if rank == 0:
        print(f"ceilings: {session.ceilings.rounded()}", flush=True)
    measured = []
    for case in cases:
        record = measure(case, session) | {"ceilings": session.ceilings.rounded()}
        measured.append(record)
        if rank == 0:
            if settings.out is not None:
                records.save([record], Path(settings.out), world_size)
            print(line(record), flush=True)
    return measured


def line(record: Record) -> str:
    """A record in one line of text."""
    case = " ".join(f"{key}={value}" for key, value in record["case"].items())
    peers = "".join(f", {name} {value:.1f}" for name, value in record["peers"].items())
    rates = "".join(
        f", {record[key]:.0f} {unit}" for key, unit in (("tflops", "TFLOP/s"), ("gb_s", "GB/s")) if key in record
    )
    return f"{record['bench']} {case}: {record['median_us']:.1f} us (floor {record['floor_us']:.1f}{rates}{peers})"
