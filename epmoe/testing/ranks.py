"""Run one function on many ranks: real processes with a process group, a deadline, and the first failure told.

def total(rank, world_size, scale):
    x = torch.full((4,), float(rank * scale))
    torch.distributed.all_reduce(x)
    return x

def test_total():
    assert all(x[0] == 10 for x in run_ranks(total, 2, args=(10,)))
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import spawn
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch

from epmoe.checks import check_int, check_kind, check_seconds, said
from epmoe.testing.forkserver import STATUS, fork_server
from epmoe.testing.rank_process import FAILED, LEAVE, RETURNED, Failure, Job

Result = TypeVar("Result")

_BACKENDS = ("gloo", "nccl", "cpu:gloo,cuda:nccl")
_SIGTERM_GRACE = 0.5
_LEAVE_GRACE = 10.0


class RankFailed(RuntimeError):
    """The first rank to fail, in time. `kind` is the exception's type, or how the process ended ("SIGKILL", "exit code
    3"); `traceback` the remote traceback, or what is known of one; `others` failed too, later."""

    def __init__(self, rank: int, world_size: int, kind: str, traceback: str, others: Sequence[int] = ()) -> None:
        super().__init__(rank, world_size, kind, traceback, others)
        self.rank, self.world_size, self.kind, self.traceback, self.others = rank, world_size, kind, traceback, others

    def __str__(self) -> str:
        also = f"\n(after it, rank {', '.join(map(str, self.others))} failed too)" if self.others else ""
        return f"rank {self.rank} of {self.world_size} failed: {self.kind}\n\n{self.traceback.rstrip()}{also}"


class RanksTimedOut(TimeoutError):
    """`ranks` had not ended `timeout` seconds after the start; `stacks[rank]` says where each stood."""

    def __init__(self, timeout: float, stacks: dict[int, str]) -> None:
        self.timeout, self.stacks, self.ranks = timeout, stacks, sorted(stacks)
        names = ", ".join(map(str, self.ranks))
        where = "".join(f"\n\nrank {rank} stood here:\n{stack}" for rank, stack in sorted(stacks.items()))
        super().__init__(f"after {timeout:g} s these ranks were still running: {names}{where}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.timeout, self.stacks)


def run_ranks(
    fn: Callable[..., Result],
    world_size: int,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    backend: str = "gloo",
    timeout: float = 60.0,
    threads: int = 1,
    env: Mapping[str, str] | None = None,
) -> list[Result]:
    """Call `fn(rank, world_size, *args, **kwargs)` in `world_size` new processes that form the default process group;
    returns what each returned, in rank order, its tensors on the CPU.

    `fn` is importable (or a `functools.partial` of what is). `backend` is "gloo", "nccl" (rank r owns GPU r) or
    "cpu:gloo,cuda:nccl". A rank has this process's environment as it is now plus `env`, its working directory,
    `sys.path`, stdout and stderr, and `threads` torch threads; gloo talks over the loopback interface unless
    GLOO_SOCKET_IFNAME says otherwise. Collectives have a timeout slightly above `timeout`.

    All ranks stay until the last has returned; then the process group is destroyed and the processes end without
    `atexit` handlers and without waiting for threads that `fn` left. Processes that a rank started are ended with it
    if it does not return.

    Raises `RankFailed` as soon as one rank raises or dies, `RanksTimedOut` `timeout` seconds after the start (the
    first call in a process first warms a fork server, seconds that don't count); either way every rank is ended
    before. `ValueError` for arguments that can't work, `RuntimeError` from a script without a `__main__` guard.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "run_ranks was called while a rank imports this script: call it under `if __name__ == '__main__':`"
        )
    check_kind("args", args, Sequence, "a sequence of what fn gets after rank and world_size, as (3,)")
    check_kind("kwargs", kwargs, (Mapping, type(None)), "a mapping, or None")
    check_kind("env", env, (Mapping, type(None)), "a mapping of str to str, or None")
    environment = {**os.environ, **(env or {})}
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    _check(world_size, backend, timeout, threads, environment)
    call = _pickle_call(fn, tuple(args), dict(kwargs or {}))
    _check_signature(fn, tuple(args), dict(kwargs or {}))
    job = Job(
        world_size=world_size,
        backend=backend,
        timeout=timeout,
        threads=threads,
        env=environment,
        cwd=os.getcwd(),
        sys_path=sys.path,
        argv=sys.argv,
        main=_main_module() if b"__main__" in call else {},
        module=_module_of(fn),
        call=call,
    )
    server = fork_server(environment)
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="epmoe-ranks-") as name, contextlib.ExitStack() as ended:
        folder = Path(name)
        (folder / "job").write_bytes(pickle.dumps(job))
        ranks: list[_Rank] = []
        ended.callback(_end, ranks)
        with _output() as (stdout, stderr):
            for number in range(world_size):
                ours, theirs = multiprocessing.Pipe()
                with theirs:
                    pid, status = server.fork(theirs.fileno(), stdout, stderr)
                ranks.append(_Rank(number, pid, ours, status))
                ours.send_bytes(json.dumps([name, number]).encode())

        while not all(rank.returned for rank in ranks):
            if not _listen(ranks, deadline):
                raise RanksTimedOut(timeout, _stacks([r for r in ranks if not r.returned], folder))
            if any(rank.failed for rank in ranks):
                raise _first_failure(ranks, folder)
        for rank in ranks:
            with contextlib.suppress(ConnectionError):  # if it is gone, its exit code says so below
                rank.control.send_bytes(LEAVE)
        deadline = max(deadline, time.monotonic() + _LEAVE_GRACE)
        while not all(rank.code == 0 for rank in ranks):
            if not _listen(ranks, deadline):
                raise RanksTimedOut(timeout, _stacks([r for r in ranks if r.code is None], folder))
            if any(rank.code for rank in ranks):
                raise _first_failure(ranks, folder)
        return [_load(folder, rank.rank) for rank in ranks]


class _Rank:
    """A started rank as its parent sees it; `code` is its exit code once it has ended."""

    def __init__(self, rank: int, pid: int, control: Connection, status: socket.socket) -> None:
        self.rank, self.pid, self.control, self.status = rank, pid, control, status
        self.returned = False
        self.raised = False
        self.code: int | None = None
        self._open: dict[Any, Callable[[], None]] = {control: self._hear, status: self._ended}

    @property
    def failed(self) -> bool:
        return self.raised or self.code not in (None, 0) or (self.code == 0 and not self.returned)

    def channels(self) -> dict[Any, Callable[[], None]]:
        return self._open

    def _hear(self) -> None:
        try:
            message = self.control.recv_bytes()
        except (EOFError, OSError):  # it ended: the status says how
            del self._open[self.control]
            return
        self.returned |= message == RETURNED
        self.raised |= message == FAILED

    def _ended(self) -> None:
        answer = self.status.recv(STATUS.size, socket.MSG_WAITALL)
        if not answer:  # the server itself is gone, and with it the word about this rank's end
            self.signal(signal.SIGKILL)
        self.code = STATUS.unpack(answer)[0] if answer else -signal.SIGKILL
        del self._open[self.status]

    def signal(self, number: int) -> None:
        """To the rank and all it started. Nothing once it has ended: its pid may be another's by then."""
        if self.code is not None:
            return
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:  # not yet the leader of its group, or just ended
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _listen(ranks: Sequence[_Rank], deadline: float) -> bool:
    """Wait for news and take all there is; False if the deadline comes first."""
    channels = {channel: act for rank in ranks for channel, act in rank.channels().items()}
    ready = wait(list(channels), max(0.0, deadline - time.monotonic()))
    # A rank that returned and then died is heard in that order: control before status.
    for channel in sorted(ready, key=lambda channel: isinstance(channel, socket.socket)):
        channels[channel]()
    return bool(ready)


def _first_failure(ranks: Sequence[_Rank], folder: Path) -> RankFailed:
    """Who failed first: by the ranks' own clocks; a death without a word came before a failure that found it dead."""
    while _listen(ranks, 0.0):
        pass
    failures: dict[int, Failure] = {}
    for rank in ranks:
        path = folder / f"failure-{rank.rank}"
        if path.exists():
            failures[rank.rank] = pickle.loads(path.read_bytes())
    first = min(failures, key=lambda r: failures[r].time, default=None)
    silent = [rank for rank in ranks if rank.failed and rank.rank not in failures]
    if first is not None:
        silent = [ranks[r] for r in failures[first].gone if r not in failures and not ranks[r].returned]
        patience = time.monotonic() + 2.0
        while any(rank.code is None for rank in silent) and _listen(ranks, patience):
            pass
    failed = {rank.rank for rank in ranks if rank.failed}
    if silent:
        rank = silent[0]
        stacks = folder / f"stacks-{rank.rank}"
        stack = stacks.read_text(errors="replace") if stacks.exists() else ""
        kind = f"exit code {rank.code}" if (rank.code or 0) >= 0 else signal.Signals(-(rank.code or 0)).name
        text = f"it ended without raising an exception; its output may say more\n{stack}"
        return RankFailed(rank.rank, len(ranks), kind, text, sorted(failed - {rank.rank}))
    assert first is not None, "a failed rank either left a record or died without one"
    return RankFailed(first, len(ranks), failures[first].kind, failures[first].traceback, sorted(failed - {first}))


def _stacks(ranks: Sequence[_Rank], folder: Path) -> dict[int, str]:
    """Where each rank stands: faulthandler writes it on SIGUSR1, even from inside a blocked collective."""
    paths = {rank.rank: folder / f"stacks-{rank.rank}" for rank in ranks}
    for rank in ranks:
        if paths[rank.rank].exists() and rank.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGUSR1)
    texts: dict[int, str] = {}
    for _ in range(20):
        time.sleep(0.05)
        before = texts
        texts = {r: path.read_text(errors="replace") if path.exists() else "" for r, path in paths.items()}
        if all(texts.values()) and texts == before:
            break
    return {r: text.rstrip() or "(it did not answer: stopped, or not yet started)" for r, text in texts.items()}


def _end(ranks: Sequence[_Rank]) -> None:
    for number, patience in ((signal.SIGTERM, _SIGTERM_GRACE), (signal.SIGKILL, 10.0)):
        for rank in ranks:
            rank.signal(number)
        deadline = time.monotonic() + patience
        while any(rank.code is None for rank in ranks) and _listen(ranks, deadline):
            pass
    for rank in ranks:
        rank.control.close()
        rank.status.close()


def _load(folder: Path, rank: int) -> Any:
    try:
        return torch.load(folder / f"result-{rank}", map_location="cpu", weights_only=False)
    except Exception as error:
        raise RuntimeError(f"what rank {rank} returned can't be loaded in this process: {error}") from error


def _check(world_size: int, backend: str, timeout: float, threads: int, env: Mapping[str, str]) -> None:
    check_int("world_size", world_size)
    check_int("threads", threads)
    check_seconds("timeout", timeout)
    if backend not in _BACKENDS:
        raise ValueError(f"backend={backend!r}: must be one of {', '.join(map(repr, _BACKENDS))}")
    for key, text in env.items():
        if not isinstance(text, str):
            raise ValueError(f"env[{key!r}]={text!r}: must be a str")
    # With other visible devices than ours, only the ranks can count them.
    if "nccl" in backend and env.get("CUDA_VISIBLE_DEVICES") == os.environ.get("CUDA_VISIBLE_DEVICES"):
        visible = torch.cuda.device_count()
        if visible < world_size:
            raise ValueError(
                f"world_size={world_size}: backend {backend!r} needs a GPU per rank, {visible} are visible"
            )


def _check_signature(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not callable(fn):
        raise ValueError(f"{said('fn', fn)}: must be a function, called as fn(rank, world_size, *args, **kwargs)")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some of what is written in C has none
        return
    try:
        signature.bind(0, 1, *args, **kwargs)
    except TypeError as error:
        name = getattr(fn, "__qualname__", repr(fn))
        raise ValueError(
            f"fn={name}{signature}: is called as fn(rank, world_size, *args, **kwargs), here with {len(args)} args and "
            f"the kwargs {sorted(kwargs)}: {error}"
        ) from None


def _pickle_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        pickled = pickle.dumps(fn)
    except Exception as error:
        raise ValueError(
            f"fn={fn!r}: must be importable by another process: define it at the top level of a file and bind what "
            f"a closure would hold with args, kwargs or functools.partial ({error})"
        ) from error
    if b"__main__" in pickled and not _main_module():
        raise ValueError(f"fn={fn!r}: __main__ is not a file that another process could import; define it in one")
    for where, value in [
        *((f"args[{i}]", a) for i, a in enumerate(args)),
        *((f"kwargs[{k!r}]", kwargs[k]) for k in kwargs),
    ]:
        try:
            pickle.dumps(value)
        except Exception as error:
            raise ValueError(f"{where}={value!r}: must be picklable, a rank is another process ({error})") from error
    return pickle.dumps((fn, args, kwargs))


def _main_module() -> dict[str, str]:
    data: dict[str, Any] = dict(spawn.get_preparation_data("rank"))
    main: dict[str, str] = {key: value for key, value in data.items() if key.startswith("init_main_from_")}
    if "init_main_from_path" in main and not os.path.exists(main["init_main_from_path"]):
        return {}
    return main


def _module_of(fn: Any) -> tuple[str, str] | None:
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__module__", None) or type(fn).__module__
    file = getattr(sys.modules.get(name), "__file__", None)
    return (name, os.path.abspath(file)) if file and name != "__main__" else None


@contextlib.contextmanager
def _output() -> Iterator[tuple[int, int]]:
    """Descriptors of this process's stdout and stderr, as they are now; the null device for one that is closed."""
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        fds = []
        for fd in (1, 2):
            try:
                os.fstat(fd)
                fds.append(fd)
            except OSError:
                fds.append(null)
        yield fds[0], fds[1]
    finally:
        os.close(null)
