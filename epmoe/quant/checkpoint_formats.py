"""Narrow weights as released checkpoints hold them, and as `NarrowWeights`: numbers are moved and never rounded again.

    GPTQ    qweight int32 [K·b/32, N], bits i·b.. of word r: input row r·32/b + i, unsigned
            qzeros int32 [S, N·b/32], likewise along N, each less 1, or the word as a whole less 1 in each place, or as
            they are (`gptq_v2`); scales [S, N]; g_idx [K]
    AWQ     qweight int32 [K, N/8], bits 4·i.. of word c: output column 8·c + (0 2 4 6 1 3 5 7)[i]
            qzeros int32 [S, N/8] likewise, as they are; scales [S, N]
    packed  weight_packed int32 [N, K·b/32], bits b·i.. of word c: input column c·32/b + i, unsigned; weight_scale
            [N, S]; weight_zero_point int32 [N·b/32, S], packed along N, as they are, or int8 [N, S] less 2^(b-1), as
            compressed-tensors wrote them until 0.9.3, or none
    MXFP4   blocks uint8 [E, N, K/32, 16], the even column in the low half; scales uint8 [E, N, K/32]
    MXFP6   blocks uint8 [E, N, K/32, 24], six bits a column from the lowest on, four in three bytes; scales as MXFP4
    NVFP4   weight uint8 [N, K/2], the even column in the low half; weight_scale e4m3 [N, K/16]; weight_scale_2 a number

b bits, N output channels, K what is summed over, S groups along K, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from epmoe.ops.narrow_formats import narrow_format, pack_nibbles, pack_sixes
from epmoe.quant.narrow import NarrowWeights

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Imported(NamedTuple):
    """Attributes:
    weights: of one expert, `[1, N, K]`.
    order: column j of `weights` is the checkpoint's column order[j]; None: they are in its order.
    """

    weights: NarrowWeights
    order: Tensor | None


class Integers(NamedTuple):
    """A linear layer in integers, one group for each input row: `(codes - points[group]) · scales[group]`.

    Attributes:
        codes: uint8 `[K, N]`, unsigned.
        points: uint8 `[S, N]`, zero points.
        scales: `[S, N]`.
        group: int64 `[K]`, the group of each row.
        bits: 4 or 8.
        group_size: rows of a group, -1: all of them.
    """

    codes: Tensor
    points: Tensor
    scales: Tensor
    group: Tensor
    bits: int
    group_size: int


def gptq_integers(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None = None,
    *,
    bits: int = 4,
    group_size: int = 128,
    zeros_less_one: bool = True,
    zeros_borrow: bool = False,
) -> Integers:
    """What a GPTQ layer's words hold, in the order of its rows. Arguments and errors as of `from_gptq`."""
    if bits not in (4, 8):
        raise ValueError(f"bits={bits}: must be 4 or 8")
    per_word = 32 // bits
    _words(qweight, "qweight")
    k, n = qweight.shape[0] * per_word, qweight.shape[1]
    groups = _groups(k, group_size)
    _fits(scales, "scales", (groups, n))
    _words(qzeros, "qzeros", (groups, -(-n // per_word)))
    codes = _unpack(qweight.T, bits).T
    if zeros_less_one and zeros_borrow:
        qzeros = qzeros + sum(1 << place for place in range(0, 32, bits))
    points = _unpack(qzeros, bits)[:, :n]
    if zeros_less_one and not zeros_borrow:
        points = (points + 1) & ((1 << bits) - 1)
    plain = _plain_groups(k, group_size, qweight.device)
    group = plain if g_idx is None else _named_groups(g_idx, "g_idx", k, groups)
    return Integers(codes, points, scales, group, bits, group_size)


def from_gptq(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None = None,
    *,
    bits: int = 4,
    group_size: int = 128,
    zeros_less_one: bool = True,
    zeros_borrow: bool = False,
) -> Imported:
    """One linear layer of a GPTQ checkpoint.

    With activation order (`desc_act`) columns of a group do not lie together: they are sorted by group, and the rows
    that meet them must be sorted alike. For a down projection that costs nothing: its rows are the channels of gate and
    up projection, `take_channels(gate, order)`. Rows of a gate or up projection are the token's own, in one order for
    all experts: there a layer with an `order` can't be served.

    Args:
        qweight, qzeros, scales, g_idx: as above; g_idx, the group of each input row, None: row // group_size.
        bits: 4 or 8.
        group_size: 32, 64, a multiple of 128, or -1: one group.
        zeros_less_one: zero points are stored less one, as `checkpoint_format="gptq"` has it and `gptq_v2` has not.
        zeros_borrow: one was taken from every zero point of a word at once, as GPTQModel does, so that a zero point of
            0 borrowed from the next one; else each is by itself, and 0 stored as the largest. The same without a 0.

    Raises:
        ValueError: shapes or dtypes are not those, or groups of g_idx that are not `group_size` columns each.
    """
    return narrow_of(
        gptq_integers(
            qweight, qzeros, scales, g_idx,
            bits=bits, group_size=group_size, zeros_less_one=zeros_less_one, zeros_borrow=zeros_borrow,
        )
    )  # fmt: skip


def awq_integers(qweight: Tensor, qzeros: Tensor, scales: Tensor, *, group_size: int = 128) -> Integers:
    """What an AWQ layer's words hold. Arguments and errors as of `from_awq`."""
    _words(qweight, "qweight")
    k, n = qweight.shape[0], qweight.shape[1] * 8
    groups = _groups(k, group_size)
    _fits(scales, "scales", (groups, n))
    _words(qzeros, "qzeros", (groups, n // 8))
    place = [AWQ_ORDER.index(column) for column in range(8)]
    codes, points = (_unpack(words, 4).unflatten(-1, (-1, 8))[..., place].flatten(1) for words in (qweight, qzeros))
    return Integers(codes, points, scales, _plain_groups(k, group_size, qweight.device), 4, group_size)


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, *, group_size: int = 128) -> NarrowWeights:
    """One linear layer of an AWQ checkpoint (`gemm`), `[1, N, K]`.

    Raises:
        ValueError: shapes or dtypes are not as above, or a group size other than 32, 64, multiples of 128, or -1.
    """
    return narrow_of(awq_integers(qweight, qzeros, scales, group_size=group_size)).weights


def packed_integers(
    weight_packed: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None = None,
    weight_g_idx: Tensor | None = None,
    *,
    width: int,
    bits: int = 4,
    group_size: int = 128,
) -> Integers:
    """What the words of a linear layer in compressed-tensors' `pack-quantized` hold, in the order of its rows.

    Args:
        weight_packed, weight_scale, weight_zero_point: as above; no zero points: they are the middle code.
        weight_g_idx: the group of each input column, where activation order was kept; -1 everywhere is none.
        width: K, `weight_shape[1]`.
        bits, group_size: as of `from_gptq`.

    Raises:
        ValueError: shapes or dtypes are not those.
    """
    if bits not in (4, 8):
        raise ValueError(f"bits={bits}: must be 4 or 8")
    per_word = 32 // bits
    _words(weight_packed, "weight_packed")
    n, groups = weight_packed.shape[0], _groups(width, group_size)
    _fits(weight_packed, "weight_packed", (n, -(-width // per_word)))
    _fits(weight_scale, "weight_scale", (n, groups))
    codes = _unpack(weight_packed, bits)[:, :width].T
    if weight_zero_point is None:
        points = codes.new_full((groups, n), 1 << bits - 1)
    elif weight_zero_point.dtype == torch.int8:
        _fits(weight_zero_point, "weight_zero_point", (n, groups))
        points = (weight_zero_point.T.short() + (1 << bits - 1)).to(torch.uint8)
    else:
        _words(weight_zero_point, "weight_zero_point", (-(-n // per_word), groups))
        points = _unpack(weight_zero_point.T, bits)[:, :n]
    group = _plain_groups(width, group_size, codes.device)
    if weight_g_idx is not None and not bool((weight_g_idx < 0).all()):
        group = _named_groups(weight_g_idx, "weight_g_idx", width, groups)
    return Integers(codes, points, weight_scale.T, group, bits, group_size)


def narrow_of(integers: Integers) -> Imported:
    """The same numbers as `[1, N, K]`, their columns sorted by group where the groups do not lie together.

    Raises:
        ValueError: a group size other than 32, 64, multiples of 128, or -1, or groups that are not of that size.
    """
    codes, points, scales, group, bits, size = integers
    k, half = codes.shape[0], 1 << bits - 1
    scheme, order = integer_scheme(bits, size), None
    plain = _plain_groups(k, size, group.device)
    if not torch.equal(group, plain):
        order = group.argsort(stable=True)
        if not torch.equal(group[order], plain):
            raise ValueError(f"g_idx has groups that are not of {size} columns: must be those of group_size")
        codes = codes[order]
    if scheme.endswith("_g128") and size > 128:
        scales, points = (t.repeat_interleave(size // 128, 0)[: -(-k // 128)] for t in (scales, points))
    if scales.dtype not in narrow_format(scheme).scale_dtypes:
        raise ValueError(f"scales is {scales.dtype}: must be torch.float16, torch.bfloat16 or torch.float32")
    zeros = None if bool((points == half).all()) else (points.short() - half).to(torch.int8)[None].contiguous()
    values = pack_nibbles(codes.T, half) if bits == 4 else (codes ^ half).view(torch.int8).T.contiguous()
    return Imported(NarrowWeights(values[None], scales[None].contiguous(), scheme, k, zeros), order)


def integer_scheme(bits: int, group_size: int) -> str:
    """The scheme of integers of `bits` with a scale for each group of 32, 64, a multiple of 128, or -1, all columns.

    Raises:
        ValueError: groups of another size.
    """
    if group_size in (-1, 32, 64):
        return f"int{bits}_channel" if group_size == -1 else f"int{bits}_g{group_size}"
    if group_size > 0 and group_size % 128 == 0:
        return f"int{bits}_g128"
    raise ValueError(f"group_size={group_size}: must be 32, 64, a multiple of 128, or -1")


def from_mxfp4_blocks(blocks: Tensor, scales: Tensor, *, interleaved: bool = False) -> NarrowWeights:
    """The experts of a projection in MXFP4, `[E, N, K]`.

    Args:
        interleaved: channels are gate 0, up 0, gate 1, .. as gpt-oss has them; they become gates, then up projections.

    Raises:
        ValueError: shapes or dtypes are not as above.
    """
    blocks, scales = _mx_blocks(blocks, scales, 16, interleaved)
    values = pack_nibbles(_pairs(blocks).flatten(2), 0)
    return NarrowWeights(values, scales, "mxfp4", blocks.shape[2] * 32)


def from_mxfp6_blocks(blocks: Tensor, scales: Tensor, scheme: str, *, interleaved: bool = False) -> NarrowWeights:
    """The experts of a projection in MXFP6, `[E, N, K]`.

    Weights `[E, N, 3·K/4]` that are not cut into blocks are the same bytes: `weight.unflatten(-1, (-1, 24))`.

    Args:
        scheme: what the six bits are, `mxfp6_e2m3` or `mxfp6_e3m2`.
        interleaved: as in `from_mxfp4_blocks`.

    Raises:
        ValueError: another scheme, or shapes or dtypes that are not as above.
    """
    if scheme not in ("mxfp6_e2m3", "mxfp6_e3m2"):
        raise ValueError(f"scheme={scheme!r}: must be mxfp6_e2m3 or mxfp6_e3m2")
    blocks, scales = _mx_blocks(blocks, scales, 24, interleaved)
    first, second, third = blocks.unflatten(-1, (-1, 3)).unbind(-1)
    codes = (first & 63, first >> 6 | (second & 15) << 2, second >> 4 | (third & 3) << 4, third >> 2)
    values = pack_sixes(torch.stack(codes, -1).flatten(2))
    return NarrowWeights(values, scales, scheme, blocks.shape[2] * 32)


def from_nvfp4(weight: Tensor, weight_scale: Tensor, weight_scale_2: Tensor) -> NarrowWeights:
    """One linear layer in NVFP4 with weights of `weight · weight_scale · weight_scale_2`, `[1, N, K]`.

    Raises:
        ValueError: shapes or dtypes are not as above.
    """
    if weight.dim() != 2 or weight.dtype != torch.uint8 or weight.shape[1] % 8:
        raise ValueError(f"weight is {weight.dtype} {tuple(weight.shape)}: must be torch.uint8 [N, K/2], K in sixteens")
    if weight_scale.dtype != torch.float8_e4m3fn:
        raise ValueError(f"weight_scale is {weight_scale.dtype}: must be torch.float8_e4m3fn")
    n, k = weight.shape[0], weight.shape[1] * 2
    _fits(weight_scale, "weight_scale", (n, k // 16))
    if weight_scale_2.numel() != 1:
        raise ValueError(f"weight_scale_2 has shape {tuple(weight_scale_2.shape)}: must be one number")
    scales = weight_scale.view(torch.uint8).T.contiguous().view(torch.float8_e4m3fn)
    outer = weight_scale_2.float().reshape(1, 1).repeat(1, n)
    return NarrowWeights(pack_nibbles(_pairs(weight), 0)[None], scales[None], "nvfp4", k, outer=outer)


def stack_narrow(parts: Sequence[NarrowWeights]) -> NarrowWeights:
    """Experts `[Lᵢ, N, K]` one after another, in one `[ΣLᵢ, N, K]`; those without zero points beside others get 0.

    Raises:
        ValueError: they differ in scheme or shape.
    """
    return _joined(parts, 0)


def concat_channels(parts: Sequence[NarrowWeights]) -> NarrowWeights:
    """Projections `[L, Nᵢ, K]` with the channels of all: `concat_channels([gate, up])` is w1.

    Raises:
        ValueError: they differ in scheme or shape.
    """
    return _joined(parts, 1)


def take_channels(q: NarrowWeights, index: Tensor) -> NarrowWeights:
    """The channels `index` (int64) of q, in that order."""
    values = q.values[:, index].contiguous()
    scales, zeros = (None if t is None else _bits(t)[..., index].contiguous() for t in (q.scales, q.zeros))
    assert scales is not None
    outer = None if q.outer is None else q.outer[:, index].contiguous()
    return NarrowWeights(values, scales.view(q.scales.dtype), q.scheme, q.width, zeros, outer)


def _mx_blocks(blocks: Tensor, scales: Tensor, size: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Blocks of `size` bytes, gates before up projections, and scales as `NarrowWeights` has them."""
    if blocks.dim() != 4 or blocks.shape[3] != size or blocks.dtype != torch.uint8:
        raise ValueError(f"blocks is {blocks.dtype} {tuple(blocks.shape)}: must be torch.uint8 [E, N, K/32, {size}]")
    if scales.dtype != torch.uint8:
        raise ValueError(f"scales is {scales.dtype}: must be torch.uint8")
    _fits(scales, "scales", tuple(blocks.shape[:3]))
    if interleaved:
        blocks, scales = (torch.cat((t[:, ::2], t[:, 1::2]), 1) for t in (blocks, scales))
    return blocks, scales.mT.contiguous()


def _words(t: Tensor, name: str, shape: tuple[int, int] | None = None) -> None:
    if t.dtype != torch.int32 or t.dim() != 2:
        raise ValueError(f"{name} is {t.dtype} {tuple(t.shape)}: must be torch.int32 with two dimensions")
    if shape is not None:
        _fits(t, name, shape)


def _fits(t: Tensor, name: str, shape: tuple[int, ...]) -> None:
    if tuple(t.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(t.shape)}: must be {shape}, as the other parts say")


def _groups(k: int, group_size: int) -> int:
    if group_size != -1 and group_size < 1:
        raise ValueError(f"group_size={group_size}: must be 32, 64, a multiple of 128, or -1")
    return 1 if group_size == -1 else -(-k // group_size)


def _plain_groups(k: int, group_size: int, device: torch.device) -> Tensor:
    """int64 `[K]`, of groups that lie together."""
    return torch.arange(k, device=device) // (k if group_size == -1 else group_size)


def _named_groups(g_idx: Tensor, name: str, k: int, groups: int) -> Tensor:
    """int64 `[K]`, each row's group as a checkpoint names it."""
    _fits(g_idx, name, (k,))
    if not bool(((g_idx >= 0) & (g_idx < groups)).all()):
        found = f"{int(g_idx.min())} to {int(g_idx.max())}"
        raise ValueError(f"{name} names groups from {found}: must be from 0 to {groups - 1}, as scales has")
    return g_idx.long()


def _unpack(words: Tensor, bits: int) -> Tensor:
    """int32 `[..., W]` as unsigned numbers `[..., W · 32 / bits]`, uint8, each word's lowest bits first."""
    parts = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return parts if bits == 8 else _pairs(parts)


def _pairs(packed: Tensor) -> Tensor:
    """uint8 `[..., B]` as codes `[..., 2·B]`, low halves first."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def _bits(t: Tensor) -> Tensor:
    """fp8 as bytes, for which there are kernels everywhere."""
    return t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t


def _joined(parts: Sequence[NarrowWeights], dim: int) -> NarrowWeights:
    if not parts:
        raise ValueError("parts is empty: must hold at least one")
    first = parts[0]
    for i, part in enumerate(parts):
        alike = (part.scheme, part.width, part.scales.dtype) == (first.scheme, first.width, first.scales.dtype)
        if not alike or part.shape[1 - dim] != first.shape[1 - dim]:
            raise ValueError(
                f"parts[{i}] is {part.scheme} {part.shape} with {part.scales.dtype} scales, parts[0] {first.scheme} "
                f"{first.shape} with {first.scales.dtype}: must be alike"
            )
    along = 0 if dim == 0 else 2  # channels are inside in what groups have
    values = torch.cat([part.values for part in parts], dim)
    scales = torch.cat([_bits(part.scales) for part in parts], along).view(first.scales.dtype)
    zeros = outer = None
    if any(part.zeros is not None for part in parts):
        given = [torch.zeros_like(p.scales, dtype=torch.int8) if p.zeros is None else p.zeros for p in parts]
        zeros = torch.cat(given, along)
    if first.outer is not None:
        outer = torch.cat([part.outer for part in parts if part.outer is not None], dim)
    return NarrowWeights(values, scales, first.scheme, first.width, zeros, outer)
