"""One rank, seen from inside: takes its job over a pipe, calls the function, leaves result or traceback in a folder."""

from __future__ import annotations

import dataclasses
import faulthandler
import fcntl
import importlib
import importlib.util
import json
import multiprocessing
import os
import pickle
import random
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import spawn
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RETURNED, FAILED, LEAVE = b"returned", b"failed", b"leave"
# The run's own deadline must speak before a collective's does, so that the report names every rank.
_COLLECTIVE_SLACK = 10.0


@dataclasses.dataclass(frozen=True)
class Job:
    """What every rank of a run is told. `call` is the pickled `(fn, args, kwargs)`; `main` tells how to import the
    parent's `__main__` if `call` needs it; `module` is the name and file of the module that `fn` lives in."""

    world_size: int
    backend: str
    timeout: float
    threads: int
    env: dict[str, str]
    cwd: str
    sys_path: list[str]
    argv: list[str]
    main: dict[str, str]
    module: tuple[str, str] | None
    call: bytes


@dataclasses.dataclass(frozen=True)
class Failure:
    """`time` is `time.monotonic_ns()`, one clock for all processes; `gone`: ranks that had already ended by then."""

    time: int
    gone: list[int]
    kind: str
    traceback: str


def run_rank(control_fd: int) -> int:
    """Run the rank to its end and return its exit code."""
    control = Connection(control_fd)
    folder, rank = json.loads(control.recv_bytes())
    folder = Path(folder)
    job: Job = pickle.loads((folder / "job").read_bytes())
    os.environ.clear()
    os.environ.update(job.env)
    os.chdir(job.cwd)
    sys.path[:] = job.sys_path
    sys.argv[:] = job.argv
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # forked state would give every rank the same "random" numbers
    random.seed()

    stacks = open(folder / f"stacks-{rank}", "w")  # noqa: SIM115, faulthandler writes to it until the end
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, chain=False)
    alive = _hold_alive_lock(folder, rank)
    try:
        result = _call(job, folder, rank)
        _save(result, folder / f"result-{rank}", rank)
    except BaseException as error:
        _record(error, job, folder, rank)
        outcome = FAILED
    else:
        outcome = RETURNED
    _flush()
    code = 1
    try:
        control.send_bytes(outcome)
        # A rank that failed stays until it is ended, so that its peers see no closed connection; one that returned
        # stays until all have, because peers may still write into its memory.
        if control.recv_bytes() == LEAVE and outcome == RETURNED:
            if dist.is_initialized():
                dist.destroy_process_group()
            code = 0
    except (EOFError, ConnectionError):  # the parent is gone
        pass
    finally:
        os.close(alive)
    return code


def _call(job: Job, folder: Path, rank: int) -> Any:
    torch.set_num_threads(job.threads)
    device = None
    if "nccl" in job.backend:
        if torch.cuda._is_in_bad_fork():
            raise RuntimeError("CUDA was touched while importing epmoe: its modules must not ask for a device")
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
    # Its own store, by file: no port that another run could take.
    dist.init_process_group(
        job.backend,
        store=dist.FileStore(str(folder / "store"), job.world_size),
        rank=rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.timeout + _COLLECTIVE_SLACK),
        device_id=device,
    )
    fn, args, kwargs = _load_call(job)
    result = fn(rank, job.world_size, *args, **kwargs)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # a fault of this rank's kernels is this rank's failure
    return result


def _load_call(job: Job) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    if job.main:
        process = multiprocessing.current_process()
        process._inheriting = True  # type: ignore[attr-defined]  # run_ranks refuses to start while this is set
        try:
            spawn.prepare(dict(job.main))
        finally:
            del process._inheriting  # type: ignore[attr-defined]
    if job.module is not None:
        _import_from(*job.module)
    return pickle.loads(job.call)


def _import_from(name: str, file: str) -> None:
    """Import `name` and see to it that it is `file`: a test runner may have loaded a file under a name that the import
    system does not find, or finds elsewhere."""
    try:
        found = getattr(importlib.import_module(name), "__file__", None)
        if found is not None and os.path.realpath(found) == os.path.realpath(file):
            return
    except ModuleNotFoundError as error:
        if error.name is None or not (name + ".").startswith(error.name + "."):
            raise
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, f"{name} was loaded from {file}"
    parent = name.rpartition(".")[0]
    while parent and parent not in sys.modules:
        sys.modules[parent] = types.ModuleType(parent)
        parent = parent.rpartition(".")[0]
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def _save(result: Any, path: Path, rank: int) -> None:
    try:
        torch.save(result, path, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        where, culprit = _unpicklable("result", result)
        raise TypeError(
            f"rank {rank} returned what another process can't receive: {where} is {culprit!r} "
            f"({type(culprit).__qualname__}); return tensors, numbers, strings and containers of them"
        ) from error


def _unpicklable(name: str, value: Any) -> tuple[str, Any]:
    inside: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        inside = [(f"{name}[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        inside = [(f"{name}[{index}]", item) for index, item in enumerate(value)]
    elif dataclasses.is_dataclass(value):
        inside = [(f"{name}.{f.name}", getattr(value, f.name)) for f in dataclasses.fields(value)]
    for where, item in inside:
        try:
            pickle.dumps(item)
        except Exception:
            return _unpicklable(where, item)
    return name, value


def _record(error: BaseException, job: Job, folder: Path, rank: int) -> None:
    now = time.monotonic_ns()
    peers = [peer for peer in range(job.world_size) if peer != rank]
    # A closed connection may be noticed a moment before the lock of the process it belonged to is free.
    for _ in range(5):
        gone = [peer for peer in peers if _has_ended(folder, peer)]
        if gone:
            break
        time.sleep(0.01)
    cls = type(error)
    kind = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next  # the reader looks for their own lines
    text = "".join(traceback.format_exception(cls, error, trace))
    path = folder / f"failure-{rank}"
    path.with_suffix(".part").write_bytes(pickle.dumps(Failure(now, gone, kind, text)))
    path.with_suffix(".part").replace(path)


def _hold_alive_lock(folder: Path, rank: int) -> int:
    """A lock the kernel drops when this process ends, however it ends, and before it closes the (younger) sockets."""
    part = folder / f"alive-{rank}.part"
    fd = os.open(part, os.O_CREAT | os.O_RDWR)
    fcntl.lockf(fd, fcntl.LOCK_EX)
    part.rename(folder / f"alive-{rank}")
    return fd


def _has_ended(folder: Path, rank: int) -> bool:
    try:
        fd = os.open(folder / f"alive-{rank}", os.O_RDWR)
    except FileNotFoundError:  # not yet started
        return False
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # the function closed it, or nobody reads it
            continue
