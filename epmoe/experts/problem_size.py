"""The sizes of an expert MLP as its arguments show them, whatever the layout and packing of its weights.

T rows, H width, I expert intermediate size, L local experts, C places for each in the batched layout, K experts per
token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ProblemSize(NamedTuple):
    """The sizes of an expert MLP as its arguments show them; see `moe_problem_size`."""

    num_local: int  # L
    rows: int  # T, or C in the batched layout
    width: int  # H
    intermediate: int  # I
    top_k: int  # K


def moe_problem_size(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_ids: Tensor,
    *,
    gated: bool = True,
    packed_int4: bool = False,
    packed_fp6: bool = False,
    transposed: bool = False,
) -> ProblemSize:
    """The sizes that rows, weights and routing agree on: what workspaces and configurations are chosen by.

    Example: bf16 rows `[7, 128]` (or `[4, 16, 128]`), topk_ids `[7, 2]`, L = 4, I = 96::

        w1                    w2                flags
        [4, 192, 128]         [4, 128, 96]
        [4, 96, 128]          [4, 128, 96]      gated=False
        [4, 192, 64] uint8    [4, 128, 48]      packed_int4=True
        [4, 192, 96] uint8    [4, 128, 72]      packed_fp6=True
        [4, 128, 192]         [4, 96, 128]      transposed=True

    Args:
        x: `[T, H]`, or `[L, C, H]` in the batched layout; unpacked.
        w1: `[L, 2I, H]` (`[L, I, H]` not gated); `transposed`: `[L, H, 2I]`.
        w2: `[L, H, I]`; `transposed`: `[L, I, H]`.
        topk_ids: `[T, K]`; in the batched layout those of the tokens, of any length.
        gated: w1 has gate and up rows.
        packed_int4: two weights share a byte (int8 or uint8) along the dimension that is summed over, H in w1 and I in
            w2, which are half as long then.
        packed_fp6: likewise, four weights share three bytes.
        transposed: the weights' last two dimensions change places.

    Raises:
        ValueError: the arguments do not agree, naming the first that does not.
    """
    if x.dim() not in (2, 3):
        raise ValueError(f"x has shape {tuple(x.shape)}: must be [T, H], or [L, C, H] in the batched layout")
    for name, w in (("w1", w1), ("w2", w2)):
        if w.dim() != 3:
            raise ValueError(f"{name} has shape {tuple(w.shape)}: must have three dimensions, experts first")
        if packed_int4 and w.dtype not in (torch.uint8, torch.int8):
            raise ValueError(f"{name} is {w.dtype}: packed_int4=True says that it holds two weights per uint8 or int8")
        if packed_fp6 and w.dtype != torch.uint8:
            raise ValueError(f"{name} is {w.dtype}: packed_fp6=True says that it holds four weights per three uint8")
    if packed_int4 and packed_fp6:
        raise ValueError("packed_int4=True with packed_fp6=True: weights are packed one way or the other")
    rows, width = x.shape[-2:]
    together, held = (2, 1) if packed_int4 else (4, 3) if packed_fp6 else (1, 1)  # weights in how many entries
    num_local, packed = w2.shape[0], w2.shape[1 if transposed else 2]
    intermediate = packed * together // held
    flags = f"gated={gated}, packed_int4={packed_int4}, packed_fp6={packed_fp6}, transposed={transposed}"

    def require(name: str, w: Tensor, out: int, inner: int) -> None:
        right = (num_local, inner, out) if transposed else (num_local, out, inner)
        if tuple(w.shape) != right:
            raise ValueError(f"{name} has shape {tuple(w.shape)}: must be {right} for rows of {width} with {flags}")

    if width % together:
        right = "even, since packed_int4 holds two weights in each byte"
        if packed_fp6:
            right = "a multiple of 4, since packed_fp6 holds four weights in three bytes"
        raise ValueError(f"x has rows of {width}: must be {right}")
    if packed % held:
        raise ValueError(f"w2 has shape {tuple(w2.shape)}: must have threes of bytes, since packed_fp6=True")
    require("w2", w2, width, packed)
    require("w1", w1, intermediate * (2 if gated else 1), width // together * held)
    if x.dim() == 3 and x.shape[0] != num_local:
        raise ValueError(f"x has shape {tuple(x.shape)}: must have one batch per expert, {num_local}")
    if topk_ids.dim() != 2 or (x.dim() == 2 and topk_ids.shape[0] != rows):
        raise ValueError(f"topk_ids has shape {tuple(topk_ids.shape)}: must be [T, K], T = {rows} as x has")
    return ProblemSize(num_local, rows, width, intermediate, topk_ids.shape[1])
