"""examples/hf_finetune.py as a user starts it, and plain `transformers` with what it saved."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.17")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(300)
def test_two_ranks_learn_a_text_and_plain_transformers_knows_it_afterwards(seed, tmp_path):
    text = tmp_path / "text"
    text.write_text(f"{seed % 97} quick brown foxes jumped over the lazy dogs.\n" * 40)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        "OMP_NUM_THREADS": "1",
    }
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    settings = ["--data", str(text), "--out", str(tmp_path / "out"), "--steps", "30", "--batch", "4", "--context", "32"]
    command = [sys.executable, *launcher, str(ROOT / "examples" / "hf_finetune.py"), *settings, "--check"]
    ended = subprocess.run(
        [*command, "--seed", str(seed % 1000)], env=environment, capture_output=True, text=True, timeout=250
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "4 experts here" in ended.stdout and "read back by transformers alone" in ended.stdout
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", ended.stdout)]
    assert len(losses) == 11 and losses[-1] < 0.8 * losses[0]

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_router_logits=False)
    tokens = torch.tensor([list(text.read_bytes()[:64])])
    with torch.no_grad():
        loss = model(input_ids=tokens, labels=tokens).loss.item()
    assert loss < 0.7 * math.log(256)
