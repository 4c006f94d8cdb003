"""Every block of docs/training.md runs as it stands, one after the other, on four ranks."""

from __future__ import annotations

import re
from pathlib import Path

import torch
import torch.distributed as dist

from epmoe.testing import run_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "training.md"


def run_page(rank: int, ranks: int, text: str) -> tuple[int, dict, float]:
    dist.init_process_group = lambda *_, **__: None  # the ranks have a group already
    names: dict = {}
    blocks = list(re.finditer(r"```python\n(.*?)```", text, re.S))
    for block in blocks:
        line = text[: block.start()].count("\n") + 1
        exec(compile("\n" * line + block[1], str(PAGE), "exec"), names)
    counts = sum(int(c.sum()) for c in names["counts"].values())
    assert counts == 2 * 16 * 2 * ranks  # two layers, 16 tokens of a rank, two experts each
    weights = names["model"][0].moe.down_proj.detach()
    assert weights.shape[0] == 8 // 4 and bool(torch.isfinite(weights).all())
    return len(blocks), names["extra"], float(names["norm"])


def test_the_training_page_runs():
    results = run_ranks(run_page, 4, args=(PAGE.read_text(),), timeout=150)
    assert all(result == results[0] for result in results)
    blocks, extra, norm = results[0]
    assert blocks == 7 and extra == {"step": 3} and norm > 0
