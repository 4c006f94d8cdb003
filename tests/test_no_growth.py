"""Nothing grows over many steps: tensors, what `epmoe` holds, threads, files, mapped and allocated memory.

Steps of every sort in one random order, the same on all ranks: training, also recomputed, also in microbatches,
inference, and calls that are refused.
"""

from __future__ import annotations

import collections
import ctypes
import gc
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import epmoe
from epmoe import EPGroup, MoEConfig, MoELayer, run_microbatched
from epmoe.testing import run_ranks

H, E, CAP = 64, 6, 32
SORTS = ("train", "train", "recomputed", "microbatches", "inference", "refused")


def make_layer(ep: EPGroup, dispatcher: str, device: str = "cpu", width: int = H) -> MoELayer:
    config = MoEConfig(width, 48, E, 2, dispatcher=dispatcher, num_shared_experts=1, max_tokens_per_rank=CAP)
    return MoELayer(config, ep, device=device, dtype=torch.float32)


def take_step(layer: MoELayer, ep: EPGroup, sort: str, tokens: int) -> None:
    x = torch.randn(tokens, layer.config.hidden_size, device=ep.device, requires_grad=sort != "inference")
    if sort == "refused":
        with pytest.raises(ValueError, match="must be"):
            layer(torch.randn(tokens, layer.config.hidden_size + 1, device=ep.device))
    elif sort == "inference":
        with torch.no_grad():
            layer(x)
    else:
        if sort == "microbatches":
            y = run_microbatched(layer, x, ep=ep)
        else:
            y = epmoe.checkpoint(layer, x) if sort == "recomputed" else layer(x)
        y.square().sum().backward()
        layer.zero_grad()


def held(ep: EPGroup, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """What must not grow, by kind. Gloo's threads let go of a collective's rows a moment after whoever waited for it
    goes on: they are given that moment, and as long as it takes to be what was held `before`, up to ten seconds."""
    time.sleep(0.5)
    deadline = time.monotonic() + 10
    while (now := held_now(ep)) != before and before is not None and time.monotonic() < deadline:
        time.sleep(0.1)
    return now


def held_now(ep: EPGroup) -> dict[str, Any]:
    gc.collect()
    objects: collections.Counter[str] = collections.Counter()
    for thing in gc.get_objects():
        kind = type(thing)
        if issubclass(kind, torch.Tensor):
            objects["tensors"] += 1
        elif kind.__module__.split(".")[0] == "epmoe":
            objects[f"{kind.__module__}.{kind.__qualname__}"] += 1
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "epmoe-symmetric" in line]
    assert all(line.endswith("(deleted)") for line in maps), "files of shared memory have no name any more"
    names = {"channels": ep.channels, "workspaces": ep._workspaces, "landings": ep._landings}
    counts: dict[str, Any] = {name: len(them) for name, them in names.items()}
    counts |= {f"operations of channel {n}": len(channel._operations) for n, channel in enumerate(ep.channels)}
    counts["bytes of workspaces"] = sum(space.nbytes for space in ep._workspaces.values())
    counts |= {"descriptors": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task"))}
    return {**objects, **counts, "mapped files": len(maps)}


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def allocated() -> int:
    """Bytes that this process has of malloc, tensors among them; without what is kept for the next."""
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = _Mallinfo
    gc.collect()
    now = ask()
    return int(now.uordblks + now.hblkhd)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def many_steps(
    rank: int, ranks: int, seed: int, warm: int, steps: int, leaks: bool = False
) -> tuple[dict[str, Any], dict[str, Any], int, int]:
    """What is held after `warm` steps and after `steps` more, and bytes by which malloc and the process grew meanwhile.
    `leaks`: where every training step's output is kept."""
    ep, own, common = EPGroup(timeout=60), random.Random(seed + rank), random.Random(seed)
    torch.manual_seed(seed)
    layers = [make_layer(ep, dispatcher) for dispatcher in ("symmetric", "all_to_all")]
    kept: list[torch.Tensor] = []
    if leaks:
        layers[0].register_forward_hook(lambda module, args, out: kept.append(out.detach()))
    before, sizes = dict[str, Any](), (0, 0)
    for step in range(warm + steps):
        if step == warm:
            before, sizes = held(ep), (allocated(), resident())
        for layer in layers:
            sort = SORTS[step] if step < len(SORTS) else common.choice(SORTS)
            # at first the most of all ranks, so that buffers have the size they keep
            take_step(layer, ep, sort, CAP if step < len(SORTS) else own.randrange(CAP + 1))
    after = held(ep, before)
    return before, after, allocated() - sizes[0], resident() - sizes[1]


# torch.distributed's flight recorder keeps half a kilobyte of each of the last 2,000 collectives
NO_RECORDER = {"TORCH_FR_BUFFER_SIZE": "0"}


@pytest.mark.skipif(
    not os.path.isdir("/proc/self/fd") or not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="asks Linux and glibc"
)
def test_steps_of_every_sort_leave_nothing_behind(seed: int) -> None:
    for before, after, allocated, resident in run_ranks(
        many_steps, 2, args=(seed, 20, 80), timeout=120, env=NO_RECORDER
    ):
        assert before["tensors"] > 0 and before["mapped files"] > 0 and before["channels"] > 0
        assert after == before
        assert allocated < 2**17  # a step's rows are up to 8 KiB: those of each would be half a megabyte
        assert resident < 2**22
    for before, after, allocated, _ in run_ranks(many_steps, 2, args=(seed, 8, 25, True), timeout=60, env=NO_RECORDER):
        assert after["tensors"] > before["tensors"] + 10 and allocated > 2**15, "a leak is seen"


def on_two_gpus(rank: int, ranks: int, dispatcher: str, steps: int) -> list[int]:
    """Bytes allocated and reserved, after a few steps and after `steps` more."""
    ep = EPGroup(timeout=60)
    layer = make_layer(ep, dispatcher, "cuda", 256)
    found = []
    for count in (50, steps):
        for step in range(count):
            take_step(layer, ep, "train", CAP if step < 3 else step * (rank + 3) % (CAP + 1))
        torch.cuda.synchronize()
        gc.collect()
        found += [torch.cuda.memory_allocated(), torch.cuda.memory_reserved()]
    return found


@pytest.mark.gpu2
@pytest.mark.parametrize("dispatcher", ["symmetric", "all_to_all"])
def test_ten_thousand_steps_allocate_no_byte_more_on_two_gpus(dispatcher: str) -> None:
    for allocated, reserved, then, reserved_then in run_ranks(
        on_two_gpus, 2, args=(dispatcher, 10_000), backend="nccl", timeout=170
    ):
        assert then == allocated and reserved_then == reserved
