"""Whether training with rows in eight bits learns as training with wide rows does: compares runs of `train_lm.py`.

    for s in 0 1 2; do python examples/train_lm.py --seed $s --out runs/wide-$s; done
    python examples/train_lm.py --seed 0 --dispatch fp8_block --out runs/fp8-0
    python examples/compare_runs.py runs/wide-0 runs/wide-1 runs/wide-2 --against runs/fp8-0

A seed draws the initial weights and the batches. Noise is how far apart the wide runs end, by nothing but their seeds;
a quantized run has the seed, and so the batches, of the wide run in the same place of the list.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, NamedTuple

import typer


def bits_of(run: Path) -> list[float]:
    """Bits per byte of every step.

    Raises:
        ValueError: there is no log of steps.
    """
    log = run / "log.jsonl"
    if not log.is_file():
        raise ValueError(f"{run}: has no log.jsonl, must be the --out of a run of train_lm.py")
    steps = [json.loads(line)["bits_per_byte"] for line in log.read_text().splitlines()]
    if not steps:
        raise ValueError(f"{log}: has no steps")
    return steps


class Comparison(NamedTuple):
    """Attributes:
    ends: of the wide runs, mean bits per byte of their last steps.
    noise: how far apart these are.
    differences: of each quantized run, its end less that of the wide run beside it.
    """

    ends: tuple[float, ...]
    noise: float
    differences: tuple[float, ...]

    @property
    def within(self) -> bool:
        """Whether every quantized run ends as near to the wide one as other seeds do."""
        return all(abs(difference) <= self.noise for difference in self.differences)


def compare(wide: list[list[float]], quantized: list[list[float]], last: int) -> Comparison:
    """Compares curves step by step, each by the mean of its `last` steps.

    Raises:
        ValueError: fewer than two wide runs, more quantized than wide ones, or runs of different lengths.
    """
    if len(wide) < 2 or not 1 <= len(quantized) <= len(wide):
        raise ValueError(
            f"{len(wide)} wide runs and {len(quantized)} quantized ones: must be at least two wide ones, and one for "
            "each quantized one"
        )
    lengths = {len(run) for run in (*wide, *quantized)}
    if len(lengths) > 1 or not 1 <= last <= min(lengths):
        raise ValueError(
            f"last={last} of runs of {sorted(lengths)} steps: must be as many in all, and last within them"
        )
    ends = [sum(run[-last:]) / last for run in wide]
    differences = [sum(run[-last:]) / last - end for run, end in zip(quantized, ends, strict=False)]
    return Comparison(tuple(ends), max(ends) - min(ends), tuple(differences))


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    wide: Annotated[list[Path], typer.Argument(help="Runs with wide rows, of different seeds.")],
    against: Annotated[list[Path], typer.Option(help="Quantized runs, of the same seeds in the same order.")],
    last: Annotated[int, typer.Option(min=1, help="Steps at the end that count.")] = 50,
) -> None:
    """Exit with 1 unless the quantized runs end within the noise of the wide ones."""
    try:
        found = compare([bits_of(run) for run in wide], [bits_of(run) for run in against], last)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    ends = ", ".join(f"{end:.4f}" for end in found.ends)
    print(f"wide runs end at {ends} bits/byte: noise {found.noise:.4f}")
    for run, difference in zip(against, found.differences, strict=True):
        print(f"{run}: {difference:+.4f}")
    if not found.within:
        print("beyond the noise")
        sys.exit(1)


if __name__ == "__main__":
    app()
