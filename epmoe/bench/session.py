"""What the cases of one bench share while their ranks live: group, ceilings, experts; and where each record goes.

A bench is a function `measure(case, session) -> Record`, called on every rank. Cases run one after the other in the
same processes, so kernels compile once; a record is on disk and its line on the screen before the next case begins.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from epmoe.bench import records
from epmoe.bench.problem import Problem, Tokens, make_tokens, make_weights
from epmoe.bench.records import Record
from epmoe.bench.shapes import Shape, named_shape
from epmoe.bench.timing import Call, Ceilings, interleaved_us, measure_ceilings
from epmoe.comm import EPGroup
from epmoe.experts import ExpertWeights
from epmoe.testing import run_ranks


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to measure, whatever the case. `out` is the folder of the records, None to keep none."""

    warmup: int = 5
    repeat: int = 30
    out: str | None = None
    group_timeout: float = 300.0


class Session:
    """One rank's view of a run."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.ep = EPGroup(timeout=settings.group_timeout)
        self.device = self.ep.device
        self.ceilings: Ceilings = measure_ceilings(self.device, self.ep)
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


Measure = Callable[[Any, Session], Record]


def run_bench(
    measure: Measure, cases: Sequence[Any], ranks: int, settings: Settings, *, device: str = "auto", timeout: float
) -> list[Record]:
    """Starts `ranks` processes, measures every case there, and returns the records in the order of the cases.

    Args:
        device: `cuda` (NCCL), `cpu` (gloo) or `auto`.
        timeout: seconds for the whole run; records of the cases measured until then are kept.

    Raises:
        ValueError: an unknown device, or fewer GPUs than ranks.
        RankFailed: a rank raised, for example because epmoe and a peer disagree.
        RanksTimedOut: the run took longer.
    """
    if device not in ("auto", "cuda", "cpu"):
        raise ValueError(f"device={device!r}: must be auto, cuda or cpu")
    cuda = torch.cuda.is_available() if device == "auto" else device == "cuda"
    by_rank = run_ranks(
        _measure_all,
        ranks,
        args=(measure, cases, settings),
        backend="nccl" if cuda else "gloo",
        timeout=timeout,
        # multicast, which not every host lends, would serve the barriers only
        env={"NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE", "0")},
    )
    return by_rank[0]


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
