"""Training with rows sent in eight bits: the curve of the loss stays within the noise of the one with wide rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = 30


def curve(out: Path, text: Path, seed: int, dispatch: str | None) -> list[float]:
    """Bits per byte of each step of `examples/train_lm.py`."""
    import train_lm  # type: ignore[import-not-found]

    sizes = {"layers": 1, "hidden": 64, "intermediate": 48, "experts": 4, "context": 32, "global_batch": 4}
    train_lm.train(
        data=text, out=out, steps=STEPS, lr=5e-3, eval_bytes=64, prompt="the ", seed=seed, dispatch=dispatch, **sizes
    )
    return [json.loads(line)["bits_per_byte"] for line in (out / "log.jsonl").read_text().splitlines()]


def test_fp8_dispatch_learns_as_wide_rows_do(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n * (seed % 97 + 3) % 1009}: the quick brown fox jumped over it.\n" for n in range(400)))
    wide, narrow = (curve(tmp_path / str(scheme), text, seed % 1000, scheme) for scheme in (None, "fp8_block"))
    assert sum(wide[-8:]) / 8 < 0.75 * wide[0], "nothing was learned"
    # Over most of the curve: at its end the loss is a tenth of what it was, and relative differences of that are noise.
    means = [sum(run[-20:]) / 20 for run in (wide, narrow)]
    assert abs(means[1] - means[0]) < 0.02 * means[0], means  # other batches move it by ten percent
    assert narrow != wide, "nothing was quantized"
