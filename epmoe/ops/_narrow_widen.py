"""Narrow numbers widened in registers: bytes and half bytes to bf16 and fp16 in a few integer instructions, exactly. On
the path of a token inside the kernel of `ops/narrow_gemm.py`, between a tile of weights and its dot.

Each number depends on its own byte alone, so that any layout of a tile in registers will do. A float of a small integer
is the integer under the exponent of the number whose last bit counts 1: 128 in bf16, 1024 in fp16.
"""

from __future__ import annotations

from epmoe.ops._triton import jit, tl


@jit
def _bytes_to_bf16(p):
    """int8 as bf16: 128 + low seven bits, less 128 or, below zero, 256; each step exact."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 t, u, minus;
        mov.b32 minus, 0xBF80BF80;
        prmt.b32 t, $1, 0, 0x4140;
        lop3.b32 u, t, 0x00800080, 0x43004300, 0xEA;
        lop3.b32 t, t, 0x007F007F, 0x43004300, 0xEA;
        fma.rn.bf16x2 $0, u, minus, t;
        }
        """,
        "=r,r",
        [p],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@jit
def _bytes_to_fp16(p):
    """int8 as fp16: 1024 + (v + 128), less 1152."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 t, c;
        mov.b32 c, 0x64806480;
        prmt.b32 t, $1, 0x64, 0x4140;
        xor.b32 t, t, 0x00800080;
        sub.f16x2 $0, t, c;
        }
        """,
        "=r,r",
        [p],
        dtype=tl.float16,
        is_pure=True,
        pack=2,
    )


@jit
def _nibbles_to_bf16(p):
    """Both halves of bytes as bf16, 128 + code."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 t, u;
        prmt.b32 t, $2, 0x43, 0x4140;
        shr.u32 u, t, 4;
        and.b32 $0, t, 0xFF0FFF0F;
        lop3.b32 $1, u, 0x000F000F, 0x43004300, 0xEA;
        }
        """,
        "=r,=r,r",
        [p],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@jit
def _nibbles_to_fp16(p):
    """Both halves of bytes as fp16, 1024 + code."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 t, u;
        prmt.b32 t, $2, 0x64, 0x4140;
        shr.u32 u, t, 4;
        and.b32 $0, t, 0xFF0FFF0F;
        lop3.b32 $1, u, 0x000F000F, 0x64006400, 0xEA;
        }
        """,
        "=r,=r,r",
        [p],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@jit
def _e2m1_to_bf16(p):
    """Both halves of bytes, e2m1, as bf16: its high and its low byte looked up by the magnitude's three bits, then the
    sign."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 s, h, l, t, u;
        and.b32 s, $2, 0x7777;
        prmt.b32 h, 0x3F3F3F00, 0x40404040, s;
        prmt.b32 l, 0xC0800000, 0xC0804000, s;
        prmt.b32 t, $2, 0, 0x1100;
        shl.b32 u, t, 4;
        prmt.b32 $0, l, h, 0x6240;
        prmt.b32 $1, l, h, 0x7351;
        lop3.b32 $0, u, 0x80008000, $0, 0xEA;
        lop3.b32 $1, t, 0x80008000, $1, 0xEA;
        }
        """,
        "=&r,=&r,r",
        [p],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@jit
def _e2m1_to_fp16(p):
    """The same as fp16, whose low byte is 0."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 s, h, t, u;
        and.b32 s, $2, 0x7777;
        prmt.b32 h, 0x3E3C3800, 0x46444240, s;
        prmt.b32 t, $2, 0, 0x1100;
        shl.b32 u, t, 4;
        prmt.b32 $0, h, 0, 0x2404;
        prmt.b32 $1, h, 0, 0x3414;
        lop3.b32 $0, u, 0x80008000, $0, 0xEA;
        lop3.b32 $1, t, 0x80008000, $1, 0xEA;
        }
        """,
        "=&r,=&r,r",
        [p],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@jit
def _e2m1(code):
    """e2m1 codes, int32, as fp32 in plain arithmetic."""
    exponent = (code >> 1) & 3
    mantissa = code & 1
    twice = tl.where(exponent == 0, mantissa, (2 + mantissa) << tl.maximum(exponent - 1, 0))
    return tl.where(code >= 8, -0.5, 0.5) * twice.to(tl.float32)


@jit
def halves(p, KIND: tl.constexpr, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """The numbers in the low and in the high halves of bytes, as DTYPE (interpreted: fp32), exact; codes of 4-bit
    integers plus what exponent bits around them add."""
    if INTERPRETED:
        lo, hi = (p & 15).to(tl.int32), (p >> 4).to(tl.int32)
        if KIND == "fp4":
            lo, hi = _e2m1(lo), _e2m1(hi)
        else:
            lo, hi = lo.to(tl.float32), hi.to(tl.float32)
    elif KIND == "fp4":
        if DTYPE == tl.bfloat16:
            lo, hi = _e2m1_to_bf16(p)
        else:
            lo, hi = _e2m1_to_fp16(p)
    elif DTYPE == tl.bfloat16:
        lo, hi = _nibbles_to_bf16(p)
    else:
        lo, hi = _nibbles_to_fp16(p)
    return lo, hi


@jit
def whole(p, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """int8 as DTYPE (interpreted: fp32), exact."""
    if INTERPRETED:
        wide = p.to(tl.float32)
    elif DTYPE == tl.bfloat16:
        wide = _bytes_to_bf16(p)
    else:
        wide = _bytes_to_fp16(p)
    return wide
