"""`Workspace`: scratch memory that experts write between their GEMMs, allocated once and then reused.

One belongs to each group and lane (a microbatch has a lane of its own); layers that hold the group share it, since they
compute one after another. It only grows; after `lock()`, which belongs after warm-up, growth is an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

ALIGN = 256  # bytes; where parts begin, as the allocator's own tensors do


class Part(NamedTuple):
    """A tensor wanted from a workspace."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes it takes, rounded up to where the next part may begin."""
        return -(-math.prod(self.shape) * self.dtype.itemsize // ALIGN) * ALIGN


class Workspace:
    """Grow-only scratch of one device.

    What `take` gives holds anything, NaN included, and is valid until the next `take`. Only forward passes without
    gradients use it: what backward needs must outlive the layer.

    Args:
        device: where it lies.
        name: names it in errors.
    """

    def __init__(self, device: torch.device, name: str = "workspace") -> None:
        self.device = device
        self.name = name
        self._buffer: Tensor | None = None
        self._taken: tuple[tuple[Part, ...], list[Tensor]] = ((), [])  # the last parts, which come again and again
        self._captured: list[Tensor] = []  # what CUDA graphs hold addresses of
        self._locked = False

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 0 if self._buffer is None else self._buffer.numel()

    def lock(self) -> None:
        """Turns growth into an error: call it after the largest batch has been through."""
        self._locked = True

    def unlock(self) -> None:
        """Lets it grow again."""
        self._locked = False

    def take(self, parts: Sequence[Part]) -> list[Tensor]:
        """Tensors side by side in the buffer, which grows if it must.

        Raises:
            RuntimeError: it would have to grow, and is locked or in the middle of capturing a CUDA graph.
        """
        wanted = sum(part.nbytes for part in parts)
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if wanted > self.nbytes:
            if self._locked or capturing:
                why, way = (
                    ("locked", "call unlock(), or lock() it only after the largest batch has been through")
                    if self._locked
                    else ("in a CUDA graph's capture", "run the layer once at this size before capturing")
                )
                raise RuntimeError(
                    f"{self.name}: {wanted} bytes are wanted, {self.nbytes} are there and it is {why}: {way}"
                )
            if self._buffer is not None and self.device.type == "cuda":
                self._buffer.record_stream(torch.cuda.current_stream(self.device))  # it may be in use there still
            self._buffer, self._taken = None, ((), [])  # before the new one is there: never both
            with torch.inference_mode(False):  # it outlives the call that makes it
                self._buffer = torch.empty(wanted, dtype=torch.uint8, device=self.device)
        if self._buffer is None:
            return [torch.empty(part.shape, dtype=part.dtype, device=self.device) for part in parts]
        if capturing and not any(held is self._buffer for held in self._captured):
            self._captured.append(self._buffer)
        wished = tuple(parts)
        if self._taken[0] != wished:
            with torch.inference_mode(False):  # as above
                self._taken = (wished, carved(self._buffer, wished))
        return list(self._taken[1])


def carved(memory: Tensor, parts: Sequence[Part]) -> list[Tensor]:
    """Tensors side by side in `memory`, bytes of at least the parts' sum."""
    tensors, begin = [], 0
    for part in parts:
        size = math.prod(part.shape) * part.dtype.itemsize
        tensors.append(memory[begin : begin + size].view(part.dtype).view(part.shape))
        begin += part.nbytes
    return tensors
