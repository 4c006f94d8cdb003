"""What a row costs on the wire: the bytes of one message in each of the four movements of a layer.

    dispatch               [values H | weights K, ids K (, adapter) (, scales)]
    combine                [values H (| scales)]
    backward of combine    [values H (| scales)]
    backward of dispatch   [values H | weights' gradients K (, scales)]

Values and the words beside them each end at a multiple of 16 bytes. A row of H = 7168 with K = 8 in `fp8_block` is
7168 + 4·56 + 4·16 = 7456 bytes, in bf16 14,400. It goes once to each rank that owns one of its experts.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from epmoe.comm.memory import Buffer, Step, buffer
from epmoe.config import MoEConfig
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
    weight_words = top_k * words_per_weight(dtype)

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


def words_per_weight(dtype: torch.dtype) -> int:
    """32-bit words of a router weight beside rows of `dtype`: weights are float32, beside float64 rows float64."""
    return 2 if dtype == torch.float64 else 1


@dataclasses.dataclass(frozen=True)
class RowSpec:
    """What a layer's rows are on their way: all that is known of them before a token exists.

    Attributes:
        width: H, as the experts see it.
        dtype: of rows that travel wide, and of what the experts give.
        top_k: K; 1 where it is not known.
        scheme, combine_scheme, grad_scheme: of rows sent, of rows of combine, of gradients in both directions.
        quantized_before: rows come to dispatch in `scheme` already, as those of a fixed scale do.
    """

    width: int
    dtype: torch.dtype
    top_k: int = 1
    scheme: str | None = None
    combine_scheme: str | None = None
    grad_scheme: str | None = None
    quantized_before: bool = False

    @classmethod
    def of(cls, config: MoEConfig, dtype: torch.dtype) -> RowSpec:
        """Those of a layer of this configuration."""
        quant = config.quant
        return cls(
            config.expert_hidden_size,
            dtype,
            config.top_k,
            config.row_scheme,
            None if quant is None else quant.combine,
            None if quant is None else quant.gradients,
            quant is not None and quant.scales == "static" and not quant.scales_by_expert,
        )

    @property
    def back_schemes(self) -> str:
        """The schemes of what goes back, by name; "" where all of it is wide."""
        named = {"combine_scheme": self.combine_scheme, "grad_scheme": self.grad_scheme}
        return ", ".join(f"{name}={scheme!r}" for name, scheme in named.items() if scheme is not None)

    @property
    def weight_words(self) -> int:
        """32-bit words of a row's router weights."""
        return self.top_k * words_per_weight(self.dtype)

    def nbytes(self, *, adapters: bool = False) -> RowBytes:
        """The bytes of a row in the four movements."""
        schemes = {"scheme": self.scheme, "combine_scheme": self.combine_scheme, "grad_scheme": self.grad_scheme}
        return row_bytes(self.width, self.dtype, self.top_k, adapters=adapters, **schemes)


def narrowed_buffers(name: str, rows: int, width: int, scheme: str, *steps: Step) -> list[Buffer]:
    """What rows `[rows, width]` of `name` become before their message: values of `scheme`, and scales."""
    return [
        buffer(f"{name}, quantized", (rows, width), row_dtype(scheme), *steps),
        buffer(f"scales of {name}", (rows, scales_per_row(width, scheme)), torch.float32, *steps),
    ]


def buffers_sent_back(received: int, rows: RowSpec) -> list[Buffer]:
    """What the experts' reduced rows, one for each of `received`, are until their sums are there: wide ones are
    messages as they lie where nothing fills them up, and are held until then."""
    back, wide, width = rows.nbytes().combine, rows.width * rows.dtype.itemsize, rows.width
    if rows.combine_scheme is None and back == wide:
        return [buffer("reduced rows sent back", (received, back), torch.uint8, "reduce", "combine", "sum")]
    held: tuple[Step, ...] = ("reduce", "combine", "sum")
    narrowed: list[Buffer] = []
    if rows.combine_scheme is not None:
        held = ("reduce", "combine")
        narrowed = narrowed_buffers("reduced rows", received, width, rows.combine_scheme, "combine", "sum")
    return [
        buffer("reduced rows", (received, width), rows.dtype, *held),
        *narrowed,
        buffer("reduced rows sent back", (received, back), torch.uint8, "combine"),
    ]
