"""Which rows belong to which expert, in either layout: what every grouped op is told, forward and backward.

Expert e owns rows row_start[e] .. row_end[e]. Rows between two segments and behind the last one are padding: no op
reads or writes them, so that they may hold anything.

    standard, rows sorted by expert       offsets = [0, 2, 2, 5]      row_start = [0, 2, 2]    row_end = [2, 2, 5]
    batched-experts [L, C, H], C = 4      counts  = [2, 0, 3]         row_start = [0, 4, 8]    row_end = [2, 4, 11]

Letters: L local experts, C places per expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from epmoe.ops._triton import check_flat


class Segments(NamedTuple):
    """`row_start` and `row_end`, both `[L]` int32 on the device; segments ascend and do not overlap."""

    row_start: Tensor
    row_end: Tensor


class RowMap(NamedTuple):
    """Where each row n of an expert's segment comes from: row n of an operand, or row_index[n] // divisor of it.

    `row_scale`, flat, multiplies its products: read at row_index[n], or at n where there is no index.
    """

    row_start: Tensor
    row_end: Tensor
    row_index: Tensor | None = None
    divisor: int = 1
    row_scale: Tensor | None = None

    def at(self, own: slice) -> slice | Tensor:
        """The rows of an operand that a segment's rows `own` come from. For the torch twins, as the next."""
        return own if self.row_index is None else self.row_index[own].long() // self.divisor

    def scales(self, own: slice) -> Tensor | None:
        """`[n, 1]`, what multiplies the products of the segment's rows `own`, or None."""
        if self.row_scale is None:
            return None
        return self.row_scale[own if self.row_index is None else self.row_index[own].long()][:, None]


def standard_segments(offsets: Tensor) -> Segments:
    """The segments of sorted rows: `offsets [L + 1]` as `align_rows` gives them."""
    return Segments(offsets[:-1], offsets[1:])


def batched_segments(expert_num_tokens: Tensor, capacity: int) -> Segments:
    """The segments of `[L, C, H]` seen as `[L·C, H]`, from its counts `[L]` int32; never waits for the device."""
    step = max(capacity, 1)
    start = torch.arange(0, expert_num_tokens.shape[0] * step, step, dtype=torch.int32, device=expert_num_tokens.device)
    return Segments(start, start + expert_num_tokens)


def check_segments(row_start: Tensor, row_end: Tensor, num_local: int | None = None) -> None:
    """Raises `ValueError` unless both are contiguous int32 `[L]`."""
    check_flat(row_start, "row_start", torch.int32)
    check_flat(row_end, "row_end", torch.int32)
    lengths = {row_start.shape[0], row_end.shape[0]} | ({num_local} if num_local is not None else set())
    if len(lengths) > 1:
        raise ValueError(
            f"row_start has {row_start.shape[0]} entries, row_end {row_end.shape[0]}: must have one per expert"
            + (f", {num_local}" if num_local is not None else "")
        )


def segment_slices(row_start: Tensor, row_end: Tensor) -> list[tuple[int, slice]]:
    """(expert, its rows) of each expert that has any; waits for the device. For the torch twins."""
    bounds = zip(row_start.tolist(), row_end.tolist(), strict=True)
    return [(e, slice(start, end)) for e, (start, end) in enumerate(bounds) if end > start]
