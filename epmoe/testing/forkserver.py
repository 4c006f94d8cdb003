"""A warm process that forks ranks: importing torch takes seconds, forking a process that has it takes milliseconds.

`multiprocessing` has a fork server too; this one exists because there a child runs the parent's `__main__` before
anything of ours, the server ignores an environment that changed since it started, and a child cannot be told where its
output goes. The server never runs an operation, starts no thread and never initialises CUDA, so its forks may.
It ends, and its ranks with it, when the process that started it does.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence

from epmoe.testing.interpreter import quicken_interpreter

STATUS = struct.Struct("q")
# torch._dynamo is what the first call of any torch.library.custom_op imports, triton with it.
_PRELOAD = ("torch.distributed", "torch._dynamo", "epmoe")
# Imported by nearly every file of tests; worth their time only where this process has them too.
_PRELOAD_IF_LOADED = ("numpy", "pytest", "transformers.modeling_utils")
# Read when a module is imported, so a warm process with other values is of no use.
_READ_AT_IMPORT = ("TRITON_INTERPRET", "TORCH_LOGS", "TORCHDYNAMO_", "OMP_", "MKL_", "KMP_", "OPENBLAS_")
_KEPT_WARM = 2
_START_TIMEOUT = 300.0


class ForkServer:
    """The starting side. `fork` returns `(pid, status)`; `status` becomes readable when that process has ended and
    then holds its exit code, negative for a signal, as `STATUS`; nothing at all if the server itself is gone."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._requests, theirs = socket.socketpair()
        loaded = {name for name in sys.modules if name in _PRELOAD_IF_LOADED or name.startswith("epmoe.")}
        modules = sorted({*_PRELOAD, *loaded})
        command = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from {__name__} import serve; serve({theirs.fileno()}, {modules!r})"
        )
        # NVML answers torch.cuda.is_available() without the CUDA runtime, which does not survive a fork; BLAS threads
        # started by importing numpy don't either.
        env = {"OPENBLAS_NUM_THREADS": "1", **env, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self._requests.settimeout(_START_TIMEOUT)
        try:
            ready = self._requests.recv(1)
        except TimeoutError:
            self._process.kill()
            ready = b""
        if not ready:
            self.close()
            raise RuntimeError(
                f"the process that forks ranks did not start (exit code {self._process.returncode}): "
                f"it imports {', '.join(modules)}, and its error output is above"
            )
        self._requests.settimeout(None)

    @property
    def alive(self) -> bool:
        # It says nothing after its first word: something to read is the end of the stream.
        return self._process.poll() is None and not select.select([self._requests], [], [], 0)[0]

    def fork(self, control: int, stdout: int, stderr: int) -> tuple[int, socket.socket]:
        """A new rank that talks over the socket `control` and writes to the other two descriptors (all duplicated)."""
        status, theirs = socket.socketpair()
        with theirs, self._lock:
            socket.send_fds(self._requests, [b"F"], [control, theirs.fileno(), stdout, stderr])
        answer = status.recv(STATUS.size, socket.MSG_WAITALL)
        if len(answer) < STATUS.size:
            status.close()
            raise RuntimeError("the process that forks ranks is gone; its error output, if any, is above")
        return STATUS.unpack(answer)[0], status

    def close(self) -> None:
        self._requests.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


# One warm server per process and environment, the price paid once: the reason this module exists.
_servers: dict[tuple[object, ...], ForkServer] = {}
_servers_lock = threading.Lock()


def fork_server(env: Mapping[str, str]) -> ForkServer:
    """The warm server of this process whose imports saw what `env` says, started if need be."""
    key = (os.getpid(), *sorted(item for item in env.items() if item[0].startswith(_READ_AT_IMPORT)))
    with _servers_lock:
        server = _servers.pop(key, None)
        if server is None or not server.alive:
            server = ForkServer(env)
        _servers[key] = server
        # A rank still running would die with its server, so only servers beyond the newest few go, oldest first.
        for old in [k for k in _servers if k[0] == os.getpid()][:-_KEPT_WARM]:
            _servers.pop(old).close()
        return server


@atexit.register
def _close_servers() -> None:
    for key, server in _servers.items():
        if key[0] == os.getpid():
            server.close()
    _servers.clear()


def serve(request_fd: int, modules: Sequence[str]) -> None:
    """The server: import `modules`, then fork a rank per request until the other side of `request_fd` closes."""
    for name in modules:
        importlib.import_module(name)
    if os.environ.get("TRITON_INTERPRET") == "1":
        quicken_interpreter()
        with contextlib.suppress(ImportError):  # what the first launch of any kernel imports, in some versions
            importlib.import_module("triton.experimental.gluon.nvidia.hopper")
    gc.collect()
    gc.freeze()
    requests = socket.socket(fileno=request_fd)
    wake_r, wake_w = os.pipe()
    os.set_blocking(wake_r, False)
    os.set_blocking(wake_w, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    running: dict[int, socket.socket] = {}
    requests.sendall(b"R")
    while True:
        ready = select.select([requests.fileno(), wake_r], [], [])[0]
        if wake_r in ready:
            os.read(wake_r, 4096)
            _reap(running)
        if requests.fileno() in ready:
            byte, fds, _, _ = socket.recv_fds(requests, 1, 4)
            if not byte:
                break
            control, status_fd, stdout, stderr = fds
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for inherited in (requests, *running.values()):
                    inherited.close()
                for fd in (status_fd, wake_r, wake_w):
                    os.close(fd)
                _become_rank(control, stdout, stderr)
            status = socket.socket(fileno=status_fd)
            running[pid] = status
            status.sendall(STATUS.pack(pid))
            for fd in (control, stdout, stderr):
                os.close(fd)
    _reap(running)
    for pid in running:
        for kill in (os.killpg, os.kill):
            try:
                kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # not yet the leader of its group, or just ended
                continue
    os._exit(0)  # the forks share what a full shutdown would take down, and some extension modules complain of it


def _reap(running: dict[int, socket.socket]) -> None:
    while running:
        pid, wait_status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with running.pop(pid) as status:
            try:
                status.sendall(STATUS.pack(os.waitstatus_to_exitcode(wait_status)))
            except BrokenPipeError:  # the starting side no longer asks
                continue


def _become_rank(control: int, stdout: int, stderr: int) -> None:
    """In the fork: its own process group (whatever the rank starts ends with it), its own output; never returns."""
    code = 1
    try:
        os.setsid()
        for fd, target in ((stdout, 1), (stderr, 2)):
            os.dup2(fd, target)
            os.close(fd)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        from epmoe.testing.rank_process import run_rank

        code = run_rank(control)
    except BaseException:
        traceback.print_exc()
    finally:
        # Not sys.exit: threads the rank left behind must not keep it alive.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
