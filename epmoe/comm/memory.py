"""`MemoryPlan`: what a forward will allocate, said before it is.

A plan lists buffers and the steps in which each is held; the step that holds most is the peak. It counts what our code
asks the allocator for, beyond the caller's input and parameters: not what NCCL or torch's contexts hold for themselves.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, NamedTuple

import torch

Step = Literal["dispatch", "experts", "reduce", "combine", "sum"]
STEPS: tuple[Step, ...] = ("dispatch", "experts", "reduce", "combine", "sum")
"""Rows are packed and arrive · experts compute · of what they give one row is made for each that arrived, where ranks
then exchange those · they travel back · ranks' parts are added up."""

BLOCK = 512  # bytes; torch's CUDA allocator rounds up to them


class Buffer(NamedTuple):
    """`nbytes` held during `steps`."""

    name: str
    nbytes: int
    steps: tuple[Step, ...]


def buffer(name: str, shape: tuple[int, ...], dtype: torch.dtype, *steps: Step) -> Buffer:
    """The buffer of a tensor, rounded up as the allocator rounds."""
    return Buffer(name, -(-math.prod(shape) * dtype.itemsize // BLOCK) * BLOCK, steps or STEPS)


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Attributes: `buffers`, in the order in which they appear. `str()` is a table."""

    buffers: tuple[Buffer, ...]

    def during(self, step: Step) -> int:
        """Bytes held in a step."""
        return sum(b.nbytes for b in self.buffers if step in b.steps)

    @property
    def peak(self) -> int:
        """The most bytes held in any step."""
        return max(self.during(step) for step in STEPS)

    def __str__(self) -> str:
        lines = [f"{b.nbytes / 2**20:12,.2f} MiB  {b.name} ({', '.join(b.steps)})" for b in self.buffers]
        lines += [f"{self.during(step) / 2**20:12,.2f} MiB  in all during {step}" for step in STEPS]
        return "\n".join([*lines, f"{self.peak / 2**20:12,.2f} MiB  peak"])
