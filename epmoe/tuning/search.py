"""`epmoe tune`: measures the candidates of each problem beside what the rules would take, and keeps the fastest.

    problems of one weight shape ─ each candidate once, in processes side by side (compiles, finds what can't run) ─
    when all have ended: each again in this process, alone on the GPU: same result as the rule's? ─ replayed as CUDA
    graphs in turn, L2 full of other things ─ an entry

A candidate is forced by a tuning folder with nothing else in it (`EPMOE_TUNING_DIR`), the way its entry will be found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import gc
import math
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from epmoe.bench.problem import relative
from epmoe.bench.records import commit
from epmoe.bench.timing import interleaved_us
from epmoe.testing import RankFailed, RanksTimedOut, run_ranks
from epmoe.tuning import store
from epmoe.tuning.candidates import near
from epmoe.tuning.problems import CACHES, Problem, Result, make_call, make_weights, rule, sampled

GAIN = 0.01  # by which a candidate must be faster than the rule's choice to take its place
LIMIT, REQUANTIZED_LIMIT = 6e-3, 4e-2  # relative L2 to what the rule's choice gives
MEMORY_SHARE = 0.7  # of what is free, for all processes together


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to search.

    Attributes:
        candidates: at most so many per problem, the rule's own among them.
        repeat: rounds, of which the median counts.
        workers: processes that try candidates first, side by side; 0: none, and whatever hangs, hangs here.
        group_timeout: seconds for all candidates of one weight shape.
    """

    candidates: int = 6
    repeat: int = 7
    workers: int = 8
    group_timeout: float = 120.0


@dataclasses.dataclass(frozen=True)
class Found:
    """What came of one problem.

    Attributes:
        entry: as a file holds it; None where even the rule's choice does not run.
        refused: candidates that did not run or gave another result, and why.
    """

    problem: Problem
    entry: Mapping[str, Any] | None
    refused: Mapping[str, str]

    @property
    def gain(self) -> float:
        """How many times as long the rule's choice takes."""
        return self.entry["rule_us"] / self.entry["us"] if self.entry is not None else 1.0


def groups_of(problems: Sequence[Problem]) -> list[list[Problem]]:
    """Problems that share weights, so that these are made once; each problem once, in the order they came."""
    groups: dict[Problem, list[Problem]] = {}
    for problem in dict.fromkeys(problems):
        groups.setdefault(dataclasses.replace(problem, rows=1), []).append(problem)
    return list(groups.values())


def search(
    problems: Sequence[Problem], device: torch.device, settings: Settings, step: Callable[[str, int], None]
) -> Iterator[list[Found]]:
    """Measures all problems and gives what was found, group by group.

    Args:
        step: told `compiled` and `measured`, and how many problems that were.

    Raises:
        ValueError: `device` is no GPU, or Triton is missing.
    """
    if store.folder_for(device) is None:
        raise ValueError(f"device={str(device)!r}: must be a CUDA GPU, with Triton installed")
    groups = groups_of(problems)
    tried = {p: near(p, rule(p, device), device)[: settings.candidates] for p in problems}
    room = _Room(int(torch.cuda.mem_get_info(device)[0] * MEMORY_SHARE) if settings.workers else 0)

    def compile_group(group: list[Problem]) -> dict[tuple[int, int], str]:
        failed: dict[tuple[int, int], str] = {}
        left = [(i, j) for i, p in enumerate(group) for j in range(len(tried[p]))]
        with room.taken(max(p.num_bytes for p in group)):
            while left:  # a candidate that breaks its process is passed over by another one
                work = [(group[i], i, j, tried[group[i]][j]) for i, j in left]
                try:
                    (outcome,) = run_ranks(_run_each, 1, args=(device, work), timeout=settings.group_timeout)
                    done, reasons = outcome
                except (RankFailed, RanksTimedOut) as error:  # which one is not known: none is trusted but the rule's
                    done, reason = len(left), str(error).strip().splitlines()[-1]
                    reasons = {(i, j): reason for i, j in left if j}
                failed |= reasons
                left = left[done:]
        step("compiled", len(group))
        return failed

    gc.freeze()  # what is there now stays; each measurement collects the rest
    pool = ThreadPoolExecutor(max(1, settings.workers))
    try:
        with Forcing(device) as forcing:
            compiled = [pool.submit(compile_group, group) for group in groups] if settings.workers else []
            all_failed = [one.result() for one in compiled] or [{} for _ in groups]  # measured on a GPU at rest
            for group, failed in zip(groups, all_failed, strict=True):
                weights = make_weights(group[0], device)
                found = []
                for i, problem in enumerate(group):
                    own = {j: reason for (of, j), reason in failed.items() if of == i}
                    found.append(_measure(problem, tried[problem], own, weights, forcing, device, settings.repeat))
                    step("measured", 1)
                del weights
                torch.cuda.empty_cache()
                yield found
    finally:
        pool.shutdown(cancel_futures=True)
        gc.unfreeze()


class _Room:
    """Bytes of device memory that processes share: who needs more than is left waits."""

    def __init__(self, limit: int) -> None:
        self._limit, self._left, self._changed = limit, limit, threading.Condition()

    @contextlib.contextmanager
    def taken(self, wanted: int) -> Iterator[None]:
        wanted = min(wanted, self._limit)
        with self._changed:
            self._changed.wait_for(lambda: self._left >= wanted)
            self._left -= wanted
        try:
            yield
        finally:
            with self._changed:
                self._left += wanted
                self._changed.notify_all()


class Forcing:
    """Forces configurations, while it is entered: `forcing.to(problem, config)` makes the op of `problem` run with
    `config`, and all else as the rules say. One at a time in a process; no other thread may run ops meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._folder = tempfile.TemporaryDirectory(prefix="epmoe-tune-")
        self._before = os.environ.get(store.VARIABLE)

    def __enter__(self) -> Forcing:
        os.environ[store.VARIABLE] = self._folder.name
        return self

    def __exit__(self, *_: object) -> None:
        del os.environ[store.VARIABLE]
        if self._before is not None:
            os.environ[store.VARIABLE] = self._before
        self._folder.cleanup()
        _forget()

    def to(self, problem: Problem, config: Any) -> None:
        place = store.folder_for(self._device)
        assert place is not None
        for path in place.glob("*.json"):
            path.unlink()
        store.write(place / f"{problem.op}.json", [_entry(problem, config)])
        _forget()


def _forget() -> None:
    for cached in CACHES:
        cached.cache_clear()


def _entry(problem: Problem, config: Any) -> dict[str, Any]:
    return problem.as_key() | {"kind": type(config).__name__, "config": dataclasses.asdict(config)}


def _run_each(
    rank: int, world_size: int, device: torch.device, work: Sequence[tuple[Problem, int, int, Any]]
) -> tuple[int, dict[tuple[int, int], str]]:
    """Candidates of problems of one weight shape, each once as inference asks and, where training would take it too, as
    training does: problem, its place, the candidate's place, the candidate.

    Returns:
        How many were tried: all, or those until one broke this process' context. Of those that failed, places and why.
    """
    weights = make_weights(work[0][0], device)
    failed: dict[tuple[int, int], str] = {}
    with Forcing(device) as forcing:
        calls: list[Callable[[], Result]] = []
        before: Problem | None = None
        for done, (problem, i, j, config) in enumerate(work):
            if problem is not before:
                kinds = (False, True) if problem.saves else (False,)
                calls = [make_call(problem, weights, problem.loads[0], device, saving=saving) for saving in kinds]
                before = problem
            forcing.to(problem, config)
            try:
                for call in calls:
                    call()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
            except Exception as error:
                failed[i, j] = _reason(error)
                if _is_broken(device):
                    return done + 1, failed
    return len(work), failed


def _is_broken(device: torch.device) -> bool:
    """Whether an error has left the device unusable to this process."""
    try:
        torch.zeros(1, device=device).add_(1).tolist()
    except Exception:
        return True
    return False


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]


def _measure(
    problem: Problem,
    configs: Sequence[Any],
    failed: Mapping[int, str],
    weights: Any,
    forcing: Forcing,
    device: torch.device,
    repeat: int,
) -> Found:
    names = [str(config) for config in configs]
    refused = {names[j]: reason for j, reason in failed.items()}
    able = {name: config for name, config in zip(names, configs, strict=True) if name not in refused}
    by_load = []
    for total in problem.loads:
        call = make_call(problem, weights, total, device)
        calls = {name: functools.partial(_run_forced, forcing, problem, able[name], call) for name in able}
        expected: torch.Tensor | None = None
        for name in able:
            try:
                result = calls[name]()
                got = sampled(result)
            except Exception as error:
                refused[name] = _reason(error)
                continue
            expected = got if expected is None else expected
            difference, limit = relative(got, expected), REQUANTIZED_LIMIT if result[1].numel() else LIMIT
            if not difference <= limit:
                refused[name] = f"another result: {difference:.1e} > {limit:g}"
        calls = {name: call for name, call in calls.items() if name not in refused}
        if names[0] in refused:
            return Found(problem, None, refused)
        by_load.append(
            interleaved_us(calls, warmup=1, repeat=repeat, device=device, flush_l2=True, graph=device.type == "cuda")
        )
    # of several loads, the geometric mean
    us = {
        name: math.prod(times[name] for times in by_load) ** (1 / len(by_load)) for name in able if name not in refused
    }
    best = min(us, key=lambda name: us[name])
    if us[best] > us[names[0]] * (1 - GAIN):
        best = names[0]
    measured = {"us": round(us[best], 2), "rule_us": round(us[names[0]], 2), "tried": len(us)}
    return Found(problem, _entry(problem, able[best]) | measured | _provenance(), refused)


def _run_forced(forcing: Forcing, problem: Problem, config: Any, call: Callable[[], Result]) -> Result:
    forcing.to(problem, config)
    return call()


@functools.cache
def _provenance() -> dict[str, str]:
    import triton

    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"commit": commit(), "date": today, "torch": torch.__version__, "triton": triton.__version__}


def save(found: Sequence[Found], folder: Path) -> list[Path]:
    """Puts the entries into `<folder>/<op>.json`; the files written."""
    by_op: dict[str, list[Mapping[str, Any]]] = {}
    for one in found:
        if one.entry is not None:
            by_op.setdefault(one.problem.op, []).append(one.entry)
    for op, entries in by_op.items():
        store.write(folder / f"{op}.json", entries)
    return [folder / f"{op}.json" for op in by_op]
