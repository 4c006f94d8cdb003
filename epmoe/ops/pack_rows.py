"""Message rows: values and their routing words side by side in bytes, so that one transfer carries both.

Stands in dispatch, between choosing what goes to which rank and moving it; `unpack_rows` gives the receiver views of
what arrived, without a copy.

Letters: M rows of values, H values per row, W int32 words per row (ids, weights' bits, a row number), S message rows.

    | H values | zeros to 16 bytes | W words | zeros to 16 bytes |
    0          values_bytes        extras_offset                 row_bytes
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from epmoe.ops._triton import cdiv, jit, next_power_of_2, op, tl, use_triton

ALIGN = 16  # bytes; one vector access, and more than any dtype needs to be viewed in place
COPY_BYTES = 4096  # of a row per program at most


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """Where things lie in a message row, in bytes. `extras_offset` and `row_bytes` are multiples of 16."""

    values_bytes: int
    extras_offset: int
    row_bytes: int


def row_layout(H: int, dtype: torch.dtype, W: int) -> RowLayout:
    """Layout of a row of `H` values of `dtype` and `W` int32 words.

    Raises:
        ValueError: H < 1 or W < 0.
    """
    if H < 1 or W < 0:
        raise ValueError(f"H={H}, W={W}: must be at least 1 and 0")
    values_bytes = H * dtype.itemsize
    extras_offset = -(-values_bytes // ALIGN) * ALIGN
    return RowLayout(values_bytes, extras_offset, extras_offset + -(-4 * W // ALIGN) * ALIGN)


@jit(do_not_specialize=["num_values"])
def _pack_rows_kernel(
    values_ptr, extras_ptr, index_ptr, out_ptr, out_words_ptr, num_values,
    values_units, values_stride_units, values_pad_units, row_units, extras_stride, extras_word, row_words,
    W: tl.constexpr, TAIL: tl.constexpr, HAS_INDEX: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # `out_ptr` has the element the values are copied by, `out_words_ptr` is the same buffer in int32. Sizes come in
    # units of UNIT elements: the products tell the compiler how far it may vectorise.
    s = tl.program_id(0).to(tl.int64)
    n = s
    if HAS_INDEX:
        n = tl.load(index_ptr + s).to(tl.int64)
    present = (n >= 0) & (n < num_values)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = values_ptr + n * (values_stride_units * UNIT) + col
    value = tl.load(source, mask=col < tl.where(present, values_units, 0) * UNIT, other=0)
    tl.store(out_ptr + s * (row_units * UNIT) + col, value, mask=col < values_pad_units * UNIT)
    if TAIL > 0:
        if tl.program_id(1) == 0:
            k = tl.arange(0, TAIL)
            word = tl.load(extras_ptr + n * extras_stride + k, mask=k < tl.where(present, W, 0), other=-1)
            word = tl.where(k < W, word, 0)
            tl.store(out_words_ptr + s * row_words + extras_word + k, word, mask=extras_word + k < row_words)


def _copy_element(values: Tensor, layout: RowLayout) -> tuple[torch.dtype, int]:
    """Integer dtype the rows of `values` are copied by, and how many of them are known to lie together and aligned."""
    steps = (values.data_ptr(), layout.values_bytes, values.stride(0) * values.itemsize)
    if all(step % ALIGN == 0 for step in steps):
        return torch.int32, ALIGN // 4
    for dtype in (torch.int32, torch.int16):
        if all(step % dtype.itemsize == 0 for step in steps):
            return dtype, 1
    return torch.uint8, 1


def _pack_rows_triton(values: Tensor, extras: Tensor | None, index: Tensor | None) -> Tensor:
    if values.stride(1) != 1:
        values = values.contiguous()
    if extras is not None and extras.stride(1) != 1:
        extras = extras.contiguous()
    index = None if index is None else index.contiguous()
    S, layout = _output_shape(values, extras, index)
    out = values.new_empty(S, layout.row_bytes, dtype=torch.uint8)
    if S == 0:
        return out
    W = 0 if extras is None else extras.shape[1]
    tail = (layout.row_bytes - layout.extras_offset) // 4
    element, unit = _copy_element(values, layout)
    unit_bytes = element.itemsize * unit
    block = max(128, min(COPY_BYTES // element.itemsize, next_power_of_2(layout.extras_offset // element.itemsize)))
    grid = (S, cdiv(layout.extras_offset, block * element.itemsize))
    with torch.cuda.device_of(values):
        _pack_rows_kernel[grid](
            values.view(element) if values.shape[0] > 0 else out.view(element),
            extras, index, out.view(element), out.view(torch.int32), values.shape[0],
            layout.values_bytes // unit_bytes, values.stride(0) * values.itemsize // unit_bytes,
            layout.extras_offset // unit_bytes, layout.row_bytes // unit_bytes,
            0 if extras is None else extras.stride(0), layout.extras_offset // 4, layout.row_bytes // 4,
            W=W, TAIL=next_power_of_2(tail) if tail else 0, HAS_INDEX=index is not None, UNIT=unit, BLOCK=block,
            num_warps=4 if block >= 512 else 1,
        )  # fmt: skip
    return out


def pack_rows_reference(values: Tensor, extras: Tensor | None = None, index: Tensor | None = None) -> Tensor:
    """`pack_rows` in torch, moving bytes and never numbers."""
    S, layout = _output_shape(values, extras, index)
    W = 0 if extras is None else extras.shape[1]
    out = torch.zeros(S, layout.row_bytes, dtype=torch.uint8, device=values.device)
    words = out.view(torch.int32)[:, layout.extras_offset // 4 :][:, :W]
    words.fill_(-1)
    if S == 0 or values.shape[0] == 0:
        return out
    n = torch.arange(S, device=values.device) if index is None else index.long()
    present = ((n >= 0) & (n < values.shape[0]))[:, None]
    n = n.clamp(0, values.shape[0] - 1)
    out[:, : layout.values_bytes] = torch.where(present, values.contiguous().view(torch.uint8)[n], 0)
    if extras is not None:
        words.copy_(torch.where(present, extras[n], -1))
    return out


def _output_shape(values: Tensor, extras: Tensor | None, index: Tensor | None) -> tuple[int, RowLayout]:
    S = values.shape[0] if index is None else index.shape[0]
    return S, row_layout(values.shape[1], values.dtype, 0 if extras is None else extras.shape[1])


@op("pack_rows", "(Tensor values, Tensor? extras, Tensor? index) -> Tensor")
def _pack_rows(values, extras, index):
    return (_pack_rows_triton if use_triton(values) else pack_rows_reference)(values, extras, index)


@_pack_rows.register_fake
def _(values, extras, index):
    S, layout = _output_shape(values, extras, index)
    return values.new_empty(S, layout.row_bytes, dtype=torch.uint8)


def pack_rows(values: Tensor, extras: Tensor | None = None, index: Tensor | None = None) -> Tensor:
    """One message row per entry of `index`: the bytes of `values[index[s]]`, then the words `extras[index[s]]`.

    Args:
        values: `[M, H]` of any dtype; a row stride is fine.
        extras: `[M, W]` int32, or None for W = 0.
        index: `[S]` int32, or None to take all M rows in order. Outside `[0, M)`, -1 or garbage alike, nothing is
            read: the row gets zeros for its values and -1 for its words.

    Returns:
        uint8 `[S, row_bytes]` laid out as `row_layout(H, values.dtype, W)` says, padding zero. Not differentiable.

    Raises:
        ValueError: wrong shape or dtype.
    """
    if values.dim() != 2:
        raise ValueError(f"values has shape {tuple(values.shape)}: must be [M, H]")
    if extras is not None and (extras.dtype != torch.int32 or extras.dim() != 2 or len(extras) != len(values)):
        raise ValueError(f"extras is {extras.dtype} {tuple(extras.shape)}: must be int32 [{len(values)}, W]")
    if index is not None and (index.dtype != torch.int32 or index.dim() != 1):
        raise ValueError(f"index is {index.dtype} {tuple(index.shape)}: must be int32 [S]")
    row_layout(values.shape[1], values.dtype, 0)
    return _pack_rows(values, extras, index)


def unpack_rows(buf: Tensor, H: int, dtype: torch.dtype, W: int) -> tuple[Tensor, Tensor]:
    """Views of packed rows: values `[S, H]` of `dtype` and extras `[S, W]` int32, both with a row stride, no copy.

    Args:
        buf: uint8 `[S, row_bytes]`, contiguous along its rows, starting at a multiple of 16 bytes in its storage.

    Raises:
        ValueError: `buf` is not that, or its rows are not those of `row_layout(H, dtype, W)`.
    """
    layout = row_layout(H, dtype, W)
    if buf.dtype != torch.uint8 or buf.dim() != 2 or buf.shape[1] != layout.row_bytes:
        raise ValueError(f"buf is {buf.dtype} {tuple(buf.shape)}: must be uint8 [S, {layout.row_bytes}]")
    if buf.stride(1) != 1 or buf.stride(0) % ALIGN or buf.storage_offset() % ALIGN:
        raise ValueError(
            f"buf has strides {buf.stride()} and storage offset {buf.storage_offset()}: must have dense rows that "
            f"start at multiples of {ALIGN} bytes"
        )
    values = buf[:, : layout.values_bytes].view(dtype)
    extras = buf[:, layout.extras_offset : layout.extras_offset + 4 * W].view(torch.int32)
    return values, extras
