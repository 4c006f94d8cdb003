"""Messages: what of each row travels, and how it lies in the bytes of one transfer, wide or quantized.

    dispatch             values H, ids and scales, router weights          quantized for the experts, as they arrive
    combine, gradients   values H (, weights' gradients) (, scales)        quantized when launched, wide once arrived

n rows, H their width, K experts per token, M tokens, R ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from epmoe.ops.dequantize import dequantize_sum
from epmoe.ops.gather_sum import gather_sum
from epmoe.ops.pack_rows import pack_rows, row_layout, unpack_rows
from epmoe.quant.rows import QuantizedRows, quantize_rows


class Rows(NamedTuple):
    """What belongs to each row and travels with it in one message; `weights` and `ids` may be absent."""

    values: Tensor  # [n, H]
    weights: Tensor | None  # [n, K] float: router weights, or their gradient
    ids: Tensor | None  # [n, K+] int32: ids, and whatever else no gradient flows to; see `Extras`
    words: Tensor | None = None  # weights and ids as they travel, where they have been put side by side already
    source: Tensor | None = None  # [n, H], what stands for quantized values in autograd; see `ExpertInput.source`
    scheme: str | None = None  # of what `narrowed` made: then ids are the bits of the scales
    wide: torch.dtype | None = None  # the values' dtype before that

    def narrowed(self, scheme: str | None) -> Rows:
        """These rows as `scheme` sends them; themselves without one."""
        if scheme is None or self.scheme is not None:
            return self
        assert self.ids is None, "scales take the place of ids"
        q = quantize_rows(self.values, scheme)
        return Rows(q.values, self.weights, q.scales.view(torch.int32), scheme=scheme, wide=self.values.dtype)

    def widened(self) -> Rows:
        """The inverse of `narrowed`; a row that is nobody's is zeros, as it is among wide ones."""
        if self.scheme is None or self.ids is None or self.wide is None:
            return self
        scales = torch.where(self.ids == -1, 0, self.ids).view(torch.float32)  # those bits are no scale's
        return Rows(dequantize_sum(self.values, scales, None, self.scheme, self.wide), self.weights, None)

    @property
    def word_counts(self) -> tuple[int, int]:
        """How many 4-byte words of weights and of ids follow the values."""
        weights = 0 if self.weights is None else self.weights.shape[1] * self.weights.element_size() // 4
        return weights, 0 if self.ids is None else self.ids.shape[1]

    @property
    def message_bytes(self) -> int:
        """Bytes of one row's message."""
        return row_layout(self.values.shape[1], self.values.dtype, sum(self.word_counts)).row_bytes

    @property
    def bare(self) -> bool:
        """Whether a message is nothing but a row's values, so that dense rows are messages as they lie."""
        width = self.values.shape[1] * self.values.element_size()
        return self.weights is None and self.ids is None and self.message_bytes == width

    def pack(self, index: Tensor | None) -> Tensor:
        """Messages `[S, bytes]` of rows `index [S]` (None: all); an index outside `[0, n)` makes a row without
        experts. May be the rows themselves."""
        dense = self.values.is_contiguous() and self.values.stride(-1) == 1  # an empty one may be an expanded gradient
        if index is None and self.bare and dense:
            return self.values.view(torch.uint8)
        words = self.words if self.words is not None else side_by_side(self.weights, self.ids)
        return pack_rows(self.values, words, index)

    def unpack(self, messages: Tensor) -> Rows:
        """Views into received `messages`, which are shaped like these rows."""
        if self.bare:
            return Rows(messages.view(self.values.dtype), None, None)
        like = {"scheme": self.scheme, "wide": self.wide}
        weight_words, id_words = self.word_counts
        values, words = unpack_rows(messages, self.values.shape[1], self.values.dtype, weight_words + id_words)
        weights = None if self.weights is None else words[:, :weight_words].view(self.weights.dtype)
        return Rows(values, weights, None if self.ids is None else words[:, weight_words:], **like)  # type: ignore[arg-type]

    def sum_over_ranks(self, slot: Tensor, out: Tensor | None = None) -> Rows:
        """Adds up the rows that `slot [M, R]` names (-1: none), in rank order, in fp32."""
        weights = None if self.weights is None else gather_sum(self.weights, slot, None, self.weights.dtype)
        if self.scheme is not None and self.ids is not None and self.wide is not None:
            total = dequantize_sum(self.values, self.ids.view(torch.float32), slot, self.scheme, self.wide)
            return Rows(total if out is None else out.copy_(total), weights, None)
        return Rows(gather_sum(self.values, slot, None, self.values.dtype, out=out), weights, None)


def side_by_side(weights: Tensor | None, ids: Tensor | None) -> Tensor | None:
    """The bits of `weights [n, K]` and the `ids [n, K]` as int32 words, one row of a message each; no gradient."""
    words = []
    if weights is not None:
        dense = weights.detach()
        if dense.stride(-1) != 1:  # `contiguous` leaves an empty one as it is
            dense = dense.clone(memory_format=torch.contiguous_format)
        words.append(dense.view(torch.int32))
    words += [] if ids is None else [ids]
    return torch.cat(words, dim=1) if len(words) > 1 else words[0] if words else None


class Extras(NamedTuple):
    """What travels as int32 words beside a row's ids: its LoRA adapter and the bits of its scales."""

    top_k: int
    adapter: bool
    scheme: str | None

    @classmethod
    def join(
        cls, topk_ids: Tensor, adapter_ids: Tensor | None, x: Tensor | QuantizedRows
    ) -> tuple[Tensor, Tensor, Extras]:
        """The rows' values, their words `[M, K + ...]`, and how to take the words apart."""
        values, scales, scheme = (x.values, x.scales, x.scheme) if isinstance(x, QuantizedRows) else (x, None, None)
        words = [topk_ids]
        if adapter_ids is not None:
            words.append(adapter_ids[:, None])
        if scales is not None:
            words.append(scales.view(torch.int32))
        joined = torch.cat(words, dim=1) if len(words) > 1 else topk_ids
        return values, joined, cls(topk_ids.shape[1], adapter_ids is not None, scheme)

    def split(self, words: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """`topk_ids` and the other fields of an `ExpertInput`, views into the words."""
        first_scale = self.top_k + self.adapter
        adapter_ids = words[:, self.top_k] if self.adapter else None
        scales = None if self.scheme is None else words[:, first_scale:].view(torch.float32)
        return words[:, : self.top_k], {"adapter_ids": adapter_ids, "x_scale": scales, "scheme": self.scheme}
