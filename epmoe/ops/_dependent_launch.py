"""Programmatic dependent launch: a kernel may start while the one before it in the stream still runs, do what depends
on nothing, and wait there. On the path of a token: between every two of the few small kernels of a decoding step, whose
launches would otherwise cost as much as their work.

A kernel launched with `dependent_launch(device)` must call `wait_for_previous` in every program, before it reads
anything that a kernel wrote and before it writes anything at all: only then has all that stands before it in the stream
finished. Right after, it calls `let_next_start`: the next kernel's programs take the places that this one leaves free.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from epmoe.ops._triton import jit, tl


@jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """Waits until the kernels before this one have finished and their writes are seen; nothing without DEPENDENT."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


@jit
def let_next_start(DEPENDENT: tl.constexpr):
    """Lets the next kernel start as soon as every program of this one has come here; a hint."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@functools.cache
def dependent_launch(device: torch.device) -> dict[str, Any]:
    """Launch arguments of a kernel with a `DEPENDENT: tl.constexpr`: compute capability 9.0 and later can, interpreted
    kernels and other devices run one after the other."""
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"DEPENDENT": True, "launch_pdl": True}
    return {"DEPENDENT": False}
