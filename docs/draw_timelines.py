"""Draws the timelines of docs/overlap.md: two layers on CPU, whose kernels and link take fixed times.

PYTHONPATH=. python docs/draw_timelines.py      # needs matplotlib
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch  # noqa: E402

import epmoe  # noqa: E402
from epmoe import Activation, ExpertsSpec, ExpertWeights, MoEKernel, run_microbatched, select_experts  # noqa: E402
from epmoe.dispatch.base import DispatcherCapabilities  # noqa: E402
from epmoe.dispatch.inputs import Pending  # noqa: E402
from epmoe.dispatch.local import LocalDispatcher  # noqa: E402

SECONDS = {"attention": 0.3, "experts": 0.4, "shared": 0.15, "dispatch": 0.15, "combine": 0.15}  # of a whole batch
TOKENS, H, E, LAYERS = 8, 16, 4, 2


def spend(what: str, tokens: int) -> None:
    """Time for so many tokens."""
    time.sleep(SECONDS[what] * tokens / TOKENS)


class Link(LocalDispatcher):
    """Rows cross one link, one launch after another."""

    capabilities = DispatcherCapabilities(asynchronous=True, exact_pairs=True)
    free = 0.0

    def crosses(self, what: str, tokens: int, pending: Pending[Any]) -> Pending[Any]:
        """`pending`, there when the link has carried it."""
        self.free = due = max(self.free, time.monotonic()) + SECONDS[what] * tokens / TOKENS

        def finish() -> Any:
            time.sleep(max(0.0, due - time.monotonic()))
            return pending.wait()

        return Pending(finish)

    def dispatch_async(self, x: Any, *args: Any, **kwargs: Any) -> Pending[Any]:
        return self.crosses("dispatch", x.shape[0], super().dispatch_async(x, *args, **kwargs))

    def combine_async(self, rows: Any, handle: Any, **kwargs: Any) -> Pending[Any]:
        return self.crosses("combine", handle.num_tokens, super().combine_async(rows, handle, **kwargs))


def main(folder: Path) -> None:
    """One picture for each way."""
    spec = ExpertsSpec(Activation(), H, H, torch.float32, torch.device("cpu"))
    ids = torch.arange(E, dtype=torch.int32)
    link = Link(None, torch.zeros_like(ids), ids, E)
    kernel = MoEKernel(link, select_experts(spec, "reference").experts)
    compute = kernel._compute
    weights = ExpertWeights(torch.zeros(E, 2 * H, H), torch.zeros(E, H, H))

    def experts(rows: Any, *rest: Any) -> Any:
        spend("experts", rows.x.shape[0])
        return compute(rows, *rest)

    kernel._compute = experts  # type: ignore[method-assign]

    def model(x: torch.Tensor, topk_ids: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        def shared() -> torch.Tensor:
            spend("shared", x.shape[0])
            return x

        for _ in range(LAYERS):
            spend("attention", x.shape[0])
            kernel(x, topk_ids, p, weights, shared_experts=shared)
        return x

    batch = torch.zeros(TOKENS, H), torch.zeros(TOKENS, 2, dtype=torch.int32), torch.ones(TOKENS, 2)
    ways = {"serial": ("after", 1), "shared": ("during", 1), "microbatches": ("after", 2), "both": ("during", 2)}
    for name, (order, parts) in ways.items():
        kernel.shared_experts_order = order
        with epmoe.trace() as traced:
            if parts == 1:
                model(*batch)
            else:
                run_microbatched(model, *batch, num_microbatches=parts)
        traced.timeline.plot(folder / f"{name}.png", name)


if __name__ == "__main__":
    main(Path(__file__).parent / "timelines")
