"""Runs a script of examples/ as `python` does on one rank and torchrun on several, in forks of a warm process.

A fresh interpreter imports torch for longer than most examples run. That torchrun itself starts them is seen by
tests/launch and by `make demo`.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import torch.distributed as dist

from epmoe.testing import RankFailed, run_ranks

ROOT = Path(__file__).resolve().parents[2]


def start(script: str, ranks: int, *args: str, timeout: float = 150) -> subprocess.CompletedProcess[str]:
    """Of examples/`script`, on CPU: how it ended (1 if any rank did not end well) and what all ranks wrote, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        # The store that torchrun's agent would keep.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        code, failure = 0, ""
        try:
            run_ranks(
                _run,
                ranks,
                args=([str(ROOT / "examples" / script), *args], store.port, Path(folder)),
                timeout=timeout,
                env={"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"},
            )
        except RankFailed as error:
            code, failure = 1, f"{error}\n"
        written = [
            "".join(path.read_text(errors="replace") for path in sorted(Path(folder).glob(f"{stream}-*")))
            for stream in ("stdout", "stderr")
        ]
    written[1] += failure
    return subprocess.CompletedProcess([script, *args], code, *written)


def succeed(script: str, ranks: int, *args: str, timeout: float = 150) -> str:
    ended = start(script, ranks, *args, timeout=timeout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def _run(rank: int, ranks: int, argv: list[str], port: int, folder: Path) -> None:
    dist.barrier()  # or a rank that is still connecting finds another one gone
    dist.destroy_process_group()  # the script makes its own
    for number, stream in ((1, "stdout"), (2, "stderr")):
        fd = os.open(folder / f"{stream}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(fd, number)
        os.close(fd)
    if ranks > 1:
        os.environ |= {
            "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
        }  # fmt: skip
    sys.argv[:] = argv
    sys.path.insert(0, os.path.dirname(argv[0]))
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code in (None, 0):
            return
        if not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        raise RuntimeError(f"ended with {end.code}") from end
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
