"""What a row costs on the wire: the bytes of one message in each of the four movements of a layer.

    dispatch               [values H | weights K, ids K (, adapter) (, scales)]
    combine                [values H (| scales)]
    backward of combine    [values H (| scales)]
    backward of dispatch   [values H | weights' gradients K (, scales)]

Values and the words beside them each end at a multiple of 16 bytes. A row of H = 7168 with K = 8 in `fp8_block` is
7168 + 4·56 + 4·16 = 7456 bytes, in bf16 14,400. It goes once to each rank that owns one of its experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from epmoe.comm.memory import Buffer, Step, buffer
from epmoe.ops.pack_rows import row_layout
from epmoe.quant.rows import row_dtype, scales_per_row


class RowBytes(NamedTuple):
    """Bytes of one row's message, by movement."""

    dispatch: int
    combine: int
    combine_backward: int
    dispatch_backward: int


def row_bytes(
    width: int,
    dtype: torch.dtype,
    top_k: int,
    *,
    scheme: str | None = None,
    combine_scheme: str | None = None,
    grad_scheme: str | None = None,
    adapters: bool = False,
) -> RowBytes:
    """The bytes of a row of `width` in the four movements.

    Args:
        dtype: of rows that travel wide. Beside float64 weights are float64 too.
        top_k: K.
        scheme, combine_scheme, grad_scheme: of rows sent, of rows of combine, of gradients in both directions.
        adapters: each row carries the id of its LoRA adapter.

    Raises:
        ValueError: an unknown scheme, or a width below 1.
    """
    weight_words = top_k * (2 if dtype == torch.float64 else 1)

    def message(quantized: str | None, words: int) -> int:
        if quantized is None:
            return row_layout(width, dtype, words).row_bytes
        return row_layout(width, row_dtype(quantized), words + scales_per_row(width, quantized)).row_bytes

    return RowBytes(
        message(scheme, top_k + weight_words + adapters),
        message(combine_scheme, 0),
        message(grad_scheme, 0),
        message(grad_scheme, weight_words),
    )


def narrowed_buffers(name: str, rows: int, width: int, scheme: str, *steps: Step) -> list[Buffer]:
    """What rows `[rows, width]` of `name` become before their message: values of `scheme`, and scales."""
    return [
        buffer(f"{name}, quantized", (rows, width), row_dtype(scheme), *steps),
        buffer(f"scales of {name}", (rows, scales_per_row(width, scheme)), torch.float32, *steps),
    ]
