"""Narrow weights as they lie in memory: the formats, how 4- and 6-bit numbers share bytes, and what the numbers mean,
in plain torch. Beside the path of a token: `ops/narrow_gemm.py` multiplies by them, `quant/narrow.py` makes them.

    scheme                  number                                   scales [L, S, N]         zeros [L, S, N]
    int4_g32 _g64 _g128     (v - z) · s, v in -8..7                  one per 32, 64, 128      int8, or None: 0
    int8_g32 _g64 _g128     the same, v in -128..127                 columns of K             likewise
    int4_channel            as above                                 S = 1                    likewise
    int8_channel
    mxfp4                   e2m1 · 2**(byte - 127), byte 255: NaN    uint8, one per 32
    nvfp4                   e2m1 · s · outer[L, N]                   float8_e4m3fn, per 16
    mxfp6_e2m3, mxfp6_e3m2  e2m3 or e3m2 · 2**(byte - 127)           as mxfp4

Scales lie groups outside and channels inside, so that those of a tile of weights are read side by side. Rows of 4-bit
numbers are filled up with zeros to whole spans of 128 columns, 64 bytes, in which they lie as the tensor cores'
registers take them: byte 16·q + 4·u + 2·i + p of a span (q, u < 4; i, p < 2) holds column 32·u + 16·p + 2·q + i in its
low half, and the one 8 columns on in its high half. So a thread finds all its numbers of a span in 16 bytes on end, and
those of one of its registers in half bytes j and j + 4 of a word, a shift and a mask away. A 4-bit integer v is stored
as v + 8; e2m1 is a sign, two bits of exponent and one of mantissa: its numbers are 0, 0.5, 1, 1.5, 2, 3, 4 and 6. e2m3
and e3m2, of a sign and five bits, end at 7.5 and 28.

Four 6-bit codes share three bytes, whose columns lie 32 apart, so that a quarter of a span is one group: byte
96·s + 32·p + j (p < 3, j < 32) holds the code of column 128·s + 32·p + j in its upper six bits, and in its lower two
those two of column 128·s + 96 + j that p counts from the top.

Letters: L local experts, N output channels, K what is summed over, S groups along K.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from epmoe.ops._triton import cdiv

SPAN = 128  # columns that share 64 bytes, or 96
NIBBLES = (4, 2, 2, 4, 2)  # u, p, h, q and i, of which column 32·u + 16·p + 8·h + 2·q + i of a span consists
REAL_SCALES = (torch.bfloat16, torch.float16, torch.float32)


class SmallFloat(NamedTuple):
    """Floats of few bits without inf or NaN: a sign, `exponent` bits of it, `mantissa` bits, subnormal below 2**(1 -
    bias)."""

    exponent: int
    mantissa: int
    bias: int

    @property
    def sign(self) -> int:
        """The code's bit that is set below zero."""
        return 1 << self.exponent + self.mantissa

    def magnitudes(self) -> tuple[float, ...]:
        """The numbers of the codes without a sign, ascending."""
        whole = 1 << self.mantissa

        def number(code: int) -> float:
            exponent, mantissa = divmod(code, whole)
            return math.ldexp(mantissa + whole * (exponent > 0), max(exponent, 1) - self.bias - self.mantissa)

        return tuple(map(number, range(self.sign)))


FLOATS = {"fp4": SmallFloat(2, 1, 1), "e2m3": SmallFloat(2, 3, 1), "e3m2": SmallFloat(3, 2, 3)}


class NarrowFormat(NamedTuple):
    """What a scheme's weights are.

    Attributes:
        kind: `int4`, `int8`, `fp4` (e2m1), `e2m3` or `e3m2`.
        group: columns that share a scale; 0: all of them.
        scale_dtypes: that scales may have; the first is the usual one.
        zeros: may have zero points.
        outer: has a second scale for each channel.
    """

    kind: str
    group: int
    scale_dtypes: tuple[torch.dtype, ...]
    zeros: bool = False
    outer: bool = False

    def groups(self, width: int) -> int:
        """S for rows of `width` numbers."""
        return cdiv(width, self.group) if self.group else 1

    @property
    def bits(self) -> int:
        """Of a number."""
        return {"int8": 8, "e2m3": 6, "e3m2": 6}.get(self.kind, 4)

    @property
    def dtype(self) -> torch.dtype:
        """Of the values."""
        return torch.int8 if self.kind == "int8" else torch.uint8

    def bytes_per_row(self, width: int) -> int:
        """Bytes, and entries, of a row of `width` numbers."""
        return width if self.bits == 8 else cdiv(width, SPAN) * (SPAN * self.bits // 8)


def _integers() -> dict[str, NarrowFormat]:
    groups = {"g32": 32, "g64": 64, "g128": 128, "channel": 0}
    return {
        f"{kind}_{name}": NarrowFormat(kind, group, REAL_SCALES, zeros=True)
        for kind in ("int4", "int8")
        for name, group in groups.items()
    }


NARROW_FORMATS = {
    **_integers(),
    "mxfp4": NarrowFormat("fp4", 32, (torch.uint8,)),
    "nvfp4": NarrowFormat("fp4", 16, (torch.float8_e4m3fn,), outer=True),
    "mxfp6_e2m3": NarrowFormat("e2m3", 32, (torch.uint8,)),
    "mxfp6_e3m2": NarrowFormat("e3m2", 32, (torch.uint8,)),
}


def narrow_format(scheme: str) -> NarrowFormat:
    """The format of `scheme`; `ValueError` for one that is not."""
    if scheme not in NARROW_FORMATS:
        raise ValueError(f"scheme={scheme!r}: must be one of {', '.join(NARROW_FORMATS)}")
    return NARROW_FORMATS[scheme]


def pack_nibbles(codes: Tensor, fill: int) -> Tensor:
    """uint8 codes 0..15 `[..., K]` as bytes `[..., 64·ceil(K / 128)]`; `fill` is the code of the columns past K."""
    width = codes.shape[-1]
    padded = F.pad(codes, (0, -width % SPAN), value=fill)
    u_p_h_q_i = padded.unflatten(-1, (-1, *NIBBLES))
    bytes_ = u_p_h_q_i[..., 0, :, :] | u_p_h_q_i[..., 1, :, :] << 4
    return torch.movedim(bytes_, (-4, -3, -2, -1), (-3, -1, -4, -2)).flatten(-5).contiguous()


def unpack_nibbles(packed: Tensor, width: int) -> Tensor:
    """The inverse of `pack_nibbles`: codes `[..., width]`, uint8."""
    q_u_i_p = packed.unflatten(-1, (-1, 4, 4, 2, 2))
    u_p_q_i = torch.movedim(q_u_i_p, (-4, -3, -2, -1), (-2, -4, -1, -3))
    return torch.stack((u_p_q_i & 15, u_p_q_i >> 4), -3).flatten(-6)[..., :width]


def pack_sixes(codes: Tensor) -> Tensor:
    """uint8 codes 0..63 `[..., K]` as bytes `[..., 96·ceil(K / 128)]`; the columns past K are zeros."""
    padded = F.pad(codes, (0, -codes.shape[-1] % SPAN))
    quarters = padded.unflatten(-1, (-1, 4, SPAN // 4))
    last = quarters[..., 3, :]
    lower = torch.stack((last >> 4, last >> 2 & 3, last & 3), -2)
    return (quarters[..., :3, :] << 2 | lower).flatten(-3).contiguous()


def unpack_sixes(packed: Tensor, width: int) -> Tensor:
    """The inverse of `pack_sixes`: codes `[..., width]`, uint8."""
    bytes_ = packed.unflatten(-1, (-1, 3, SPAN // 4))
    lower = bytes_ & 3
    last = lower[..., 0, :] << 4 | lower[..., 1, :] << 2 | lower[..., 2, :]
    return torch.cat((bytes_ >> 2, last.unsqueeze(-2)), -2).flatten(-3)[..., :width]


def pack_codes(codes: Tensor, kind: str) -> Tensor:
    """Codes `[..., K]` as they lie: uint8 codes packed, where several share bytes, or int8 numbers as they are."""
    if kind == "int8":
        return codes
    return pack_sixes(codes) if kind in ("e2m3", "e3m2") else pack_nibbles(codes, 8 if kind == "int4" else 0)


def numbers_of(values: Tensor, kind: str, width: int, dtype: torch.dtype) -> Tensor:
    """Values `[..., *]` as numbers `[..., width]` of `dtype`, before zero point and scale."""
    if kind == "int8":
        return values.to(dtype)
    if kind == "int4":
        return unpack_nibbles(values, width).to(dtype) - 8
    codes = unpack_nibbles(values, width) if kind == "fp4" else unpack_sixes(values, width)
    sizes = FLOATS[kind].magnitudes()
    table = torch.tensor([*sizes, *(-x for x in sizes)], dtype=dtype, device=values.device)
    return table[codes.int()]


def scales_of(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales as numbers; bytes are exponents."""
    if scales.dtype != torch.uint8:
        return scales.to(dtype)
    table = torch.tensor([*(2.0 ** (byte - 127) for byte in range(255)), math.nan], dtype=dtype, device=scales.device)
    return table[scales.int()]


def widen(
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    outer: Tensor | None,
    scheme: str,
    width: int,
    dtype: torch.dtype,
) -> Tensor:
    """One expert's or several experts' weights `[..., N, width]` in `dtype`, computed in `dtype`."""
    form = narrow_format(scheme)
    group = form.group or width

    def along_k(per_group: Tensor) -> Tensor:
        return per_group.mT.repeat_interleave(group, dim=-1)[..., :width]

    w = numbers_of(values, form.kind, width, dtype)
    if zeros is not None:
        w = w - along_k(zeros.to(dtype))
    w = w * along_k(scales_of(scales, dtype))
    return w if outer is None else w * outer.to(dtype)[..., None]
