"""What the slots of one-sided operations hold, and in how many bytes. Stands between dispatch, which reserves memory by
it, and the kernels of `symmetric_send` and `symmetric_give_back`, which write and read it.

    slot of a token   values │ here, ids, weights │ scales │ (up to the next multiple of 128 bytes)

H row width, K experts per token, S scales of a row, R ranks, C the most tokens of any rank. Counts are 32-bit words.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from epmoe.ops._triton import HAVE_TRITON, cdiv
from epmoe.ops.quantize import row_format

SLOT_ALIGN = 128  # bytes; where slots begin


def slot_bytes(row_bytes: int) -> int:
    """From one slot to the next, for rows of so many bytes."""
    return cdiv(row_bytes, SLOT_ALIGN) * SLOT_ALIGN


@dataclasses.dataclass(frozen=True)
class Travelling:
    """What the slots of one operation hold: `values` words of numbers, then `ids`, `weights` and `scales` words, the
    first two behind one that says whether the row is here."""

    values: int
    ids: int = 0
    weights: int = 0
    scales: int = 0

    @property
    def record(self) -> int:
        """Words that travel for every token of a peer, here or not."""
        return 1 + self.ids + self.weights if self.ids + self.weights else 0

    @property
    def row(self) -> int:
        """Words that travel for a token that is here."""
        return self.values + self.record + self.scales

    @property
    def slot(self) -> int:
        """Words from one slot to the next."""
        return slot_bytes(4 * self.row) // 4

    def half_bytes(self, num_ranks: int, capacity: int) -> int:
        """Bytes of all slots of one operation."""
        return 4 * self.slot * num_ranks * capacity


def travelling(values: Tensor, words: Tensor | None, weights: Tensor | None, scheme: str | None) -> Travelling:
    """What the slots of `send_rows` with these arguments hold.

    Raises:
        ValueError: an unknown scheme.
    """
    H = values.shape[1]
    if scheme is not None:
        value_words, scales = cdiv(H, 4), row_format(scheme).scales(H)
    else:
        value_words, scales = H * values.itemsize // 4, 0
    word_count = 0 if words is None else words.shape[1]
    weight_count = 0 if weights is None else weights.shape[1] * weights.itemsize // 4
    return Travelling(value_words, word_count, weight_count, scales)


def given_back(width: int, dtype: torch.dtype, gradients: int = 0) -> Travelling:
    """What the slots of `give_back_rows` hold: rows of `width` and that many words of gradients."""
    return Travelling(width * dtype.itemsize // 4, scales=gradients)


def unstorable(width: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why rows of `width` and `dtype` can't be stored to peers; None if they can."""
    row_bytes = width * dtype.itemsize
    if row_bytes % 16:
        return f"rows of {row_bytes} bytes can't be stored to peers: must be a multiple of 16"
    if device.type == "cuda" and (dtype == torch.float64 or not HAVE_TRITON):
        return f"{dtype} rows can't be stored to peers on CUDA: " + (
            "must be float32 or narrower" if HAVE_TRITON else "that needs Triton"
        )
    return None


def aligned_rows(t: Tensor) -> Tensor:
    """`t` with dense rows that begin at multiples of 16 bytes: itself, or a copy."""
    if t.stride(1) == 1 and t.stride(0) * t.itemsize % 16 == 0 and t.data_ptr() % 16 == 0:
        return t
    return t.clone(memory_format=torch.contiguous_format)  # `contiguous` leaves an empty one as it is
