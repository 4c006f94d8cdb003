"""A few dozen steps with rows in fp8 end within the noise that other seeds make, and the comparison says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
STEPS, LAST = 36, 8


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


def run(out: Path, text: Path, seed: int, dispatch: str | None) -> Path:
    import train_lm  # type: ignore[import-not-found]

    sizes = {"layers": 1, "hidden": 64, "intermediate": 48, "experts": 4, "context": 32, "global_batch": 4}
    train_lm.train(
        data=text, out=out, steps=STEPS, lr=5e-3, eval_bytes=64, prompt="the ", seed=seed, dispatch=dispatch, **sizes
    )
    return out


def test_rows_in_fp8_learn_within_the_noise_of_three_seeds(tmp_path: Path) -> None:
    import compare_runs  # type: ignore[import-not-found]

    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n * 37 % 1009}: the quick brown fox jumped over it.\n" for n in range(400)))
    wide = [run(tmp_path / f"wide-{seed}", text, seed, None) for seed in range(3)]
    narrow = run(tmp_path / "fp8-0", text, 0, "fp8_block")
    curves = [compare_runs.bits_of(one) for one in (*wide, narrow)]
    found = compare_runs.compare(curves[:3], curves[3:], LAST)
    assert max(found.ends) < 0.75 * curves[0][0], "nothing was learned"
    assert curves[3] != curves[0], "nothing was quantized"
    assert found.within, found
    names = [*map(str, wide), "--against", str(narrow), "--last", str(LAST)]
    result = CliRunner().invoke(compare_runs.app, names)
    assert result.exit_code == 0 and f"noise {found.noise:.4f}" in result.output, result.output


def test_a_run_beyond_the_noise_is_told_and_runs_that_do_not_go_together_are_named(tmp_path: Path) -> None:
    import compare_runs

    flat = [[2.0] * 10, [2.1] * 10, [1.95] * 10]
    assert compare_runs.compare(flat, [[2.14] * 10], 5).within
    far = compare_runs.compare(flat, [[2.0] * 10, [2.4] * 10], 5)
    assert not far.within and far.differences == pytest.approx((0.0, 0.3)) and far.noise == pytest.approx(0.15)
    for arguments, message in [
        ((flat[:1], flat[:1], 5), "1 wide runs and 1 quantized ones"),
        ((flat, [], 5), "3 wide runs and 0 quantized"),
        ((flat, [[2.0] * 9], 5), "runs of [9, 10] steps"),
        ((flat, flat[:1], 11), "last=11"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            compare_runs.compare(*arguments)
    with pytest.raises(ValueError, match="has no log.jsonl"):
        compare_runs.bits_of(tmp_path)
