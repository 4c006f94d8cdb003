"""Which rows can be stored into peers' memory, and how many bytes their slots are: known before a token exists, so that
a layer which could not move its rows is refused when it is made. Stands beside `symmetric`, and beside `hierarchical`
where it is `one_sided`.

H row width, K experts per token, R ranks, C the most rows that any of them sends.
"""

from __future__ import annotations

import torch

from epmoe.comm.symmetric import COUNT_BITS, HALF_BYTES
from epmoe.dispatch.wire import RowSpec
from epmoe.ops._triton import cdiv
from epmoe.ops.symmetric_slots import Travelling, given_back, unstorable
from epmoe.quant.rows import row_dtype, scales_per_row


def half_bytes(rows: RowSpec, num_ranks: int, capacity: int) -> int:
    """Bytes of the slots of one operation, of the dispatch or the combine of a forward, whichever needs more."""
    scheme = rows.scheme
    itemsize = (rows.dtype if scheme is None else row_dtype(scheme)).itemsize
    scales = 0 if scheme is None else scales_per_row(rows.width, scheme)
    sent = Travelling(cdiv(rows.width * itemsize, 4), rows.top_k, rows.weight_words, scales)
    return max(plan.half_bytes(num_ranks, capacity) for plan in (sent, given_back(rows.width, rows.dtype)))


def refusal_there_and_back(rows: RowSpec, num_ranks: int, capacity: int, device: torch.device) -> str | None:
    """As `refusal`, and because of what goes back quantized, which no slot takes."""
    if (schemes := rows.back_schemes) != "":
        return f"rows quantized on the way back ({schemes}) can't be stored to peers"
    return refusal(rows, num_ranks, capacity, device)


def refusal(rows: RowSpec, num_ranks: int, capacity: int, device: torch.device) -> str | None:
    """Why these rows can't be stored to peers, `capacity` of each; None if they can."""
    if (why := unstorable(rows.width, rows.dtype, device)) is not None:
        return why
    if rows.scheme is not None and (why := unstorable(rows.width, row_dtype(rows.scheme), device)) is not None:
        return f"{rows.scheme} {why}"
    if capacity >= 1 << COUNT_BITS:
        return f"{capacity} rows of each rank can't be counted: must be less than {1 << COUNT_BITS}"
    if (needed := half_bytes(rows, num_ranks, capacity)) > HALF_BYTES:
        return (
            f"{capacity} rows of each of {num_ranks} ranks need {needed} bytes of slots: must be at most {HALF_BYTES}"
        )
    return None
