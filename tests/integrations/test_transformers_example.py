"""examples/hf_generate.py as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5.17")

ROOT = Path(__file__).resolve().parents[2]


def test_two_ranks_generate_what_the_untouched_model_generates():
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    command = [sys.executable, *launcher, str(ROOT / "examples" / "hf_generate.py"), "--check", "--new-tokens", "4"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for rank in range(2):
        assert f"rank {rank}: the same tokens as the untouched model's" in ended.stdout
    assert "8 experts here" in ended.stdout
