"""`MoEKernel.memory_plan` against what a forward on CPU holds at any moment: bytes of the storages that are alive.

A mode sees every tensor made, but for those inside operations of our own, whose torch twins are not what runs on GPUs.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from epmoe import (
    DISPATCHERS,
    Activation,
    EPGroup,
    ExpertPlacement,
    ExpertsSpec,
    ExpertWeights,
    MoEKernel,
    make_dispatcher,
    select_experts,
)
from epmoe.comm.workspace import Workspace
from epmoe.testing import run_ranks

TOKENS, H, I = 200, 512, 128  # rows are what counts beside indices, of which plans do not list every one


class Live(TorchDispatchMode):
    """Attributes: `peak`, the most bytes alive after any operation, of storages made since the mode was entered."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def meet(self, tensors: Any, made: bool) -> None:
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                reference, _ = self.known.get(storage._cdata, (None, 0))
                if reference is None or reference.expired():
                    self.known[storage._cdata] = (StorageWeakRef(storage), storage.nbytes() if made else 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.meet((args, kwargs), made=False)
        out = func(*args, **(kwargs or {}))
        self.note(out)
        return out

    def note(self, made: Any) -> None:
        self.meet(made, made=True)
        self.known = {key: (ref, nbytes) for key, (ref, nbytes) in self.known.items() if not ref.expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.known.values()))


@contextlib.contextmanager
def as_operations(live: Live) -> Iterator[None]:
    """Of the twins of one-sided kernels, which are no `torch.library` operations, only results are seen."""

    def seen_from_outside(twin: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(twin)
        def call(*args: Any, **options: Any) -> Any:
            with _disable_current_modes():
                result = twin(*args, **options)
            live.note(result)
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module, name in (("send", "send_rows_reference"), ("give_back", "give_back_reference")):
            place = f"epmoe.ops.symmetric_{module}"
            patch.setattr(f"{place}.{name}", seen_from_outside(getattr(__import__(place, fromlist=[name]), name)))
        yield


def planned_and_measured(rank: int, ranks: int, seed: int) -> dict[str, tuple[int, int, int]]:
    """Every token has an expert on each rank, so that as many rows move as a plan must allow for. By dispatcher and
    chunk: bytes that a plan says are held at least, those it says at most, and the peak."""
    torch.manual_seed(seed + rank)
    ep = EPGroup(timeout=60, nodes=[0, 0, 1][:ranks]) if ranks > 1 else None
    placement, found = ExpertPlacement.contiguous(2 * ranks, ranks), {}
    spec = ExpertsSpec(Activation(), H, I, torch.float32, torch.device("cpu"))
    weights = ExpertWeights(torch.randn(2, 2 * I, H), torch.randn(2, H, I))
    x, p = torch.randn(TOKENS, H), torch.rand(TOKENS, ranks)
    ids = (2 * torch.arange(ranks) + torch.randint(0, 2, (TOKENS, ranks))).int()
    for name in DISPATCHERS:
        if (name == "local") != (ranks == 1):
            continue
        for chunk in (None, 64):
            moves = make_dispatcher(name, ep, placement, "cpu", max_tokens_per_rank=TOKENS)
            kernel = MoEKernel(moves, select_experts(spec, "grouped").experts, chunk_tokens=chunk)
            with torch.no_grad():
                layout = kernel(x, ids, p, weights).layout  # peers' memory is made, and stays
                assert layout is not None
                traffic = moves.traffic(TOKENS, ranks)._replace(pairs=layout.max_assignments)
                del layout
                kernel.workspace = Workspace(torch.device("cpu"))
                plan = kernel.memory_plan(TOKENS, ranks, traffic=traffic)
                peaks = []
                for _ in range(3):  # a collective's thread may let go of its tensors a little later
                    kernel.workspace = Workspace(torch.device("cpu"))
                    gc.collect()
                    with Live() as live, as_operations(live):
                        out = kernel(x, ids, p, weights)
                    del out
                    peaks.append(live.peak)
            there = sum(buffer.nbytes for buffer in plan.buffers if buffer.name.startswith("slots"))
            # Of combine a plan adds up what is held one after another: rows received until the experts' are reduced,
            # then those that came back. In parts, what was reduced and all of it together besides.
            reduced = sum(buffer.nbytes for buffer in plan.buffers if buffer.name == "reduced rows sent back")
            least = max(plan.during(step) for step in ("dispatch", "experts", "sum"))
            most = plan.peak if chunk else max(least, plan.during("experts") + reduced)
            found[f"{name}, {chunk}"] = (least - there, most - there, min(peaks))
    return found


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_a_forward_holds_is_within_its_plan(ranks: int, seed: int) -> None:
    for found in run_ranks(planned_and_measured, ranks, args=(seed,), timeout=60):
        assert len(found) == 2 * (1 if ranks == 1 else len(DISPATCHERS) - 1)
        for case, (least, most, peak) in found.items():
            assert 0.98 * least <= peak <= 1.04 * most, (case, least, most, peak)  # indices of a sort besides
