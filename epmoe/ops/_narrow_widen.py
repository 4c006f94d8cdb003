"""Narrow numbers widened in registers: bytes, half bytes and 6-bit codes to bf16 and fp16 in a few integer
instructions, exactly. On the path of a token inside the kernel of `ops/narrow_gemm.py`, between a tile of weights and
its dot.

Each number depends on its own byte or word of four bytes alone, so that any layout of a tile in registers will do. A
float of a small integer is the integer under the exponent of the number whose last bit counts 1: 128 in bf16, 1024 in
fp16.
"""

from __future__ import annotations

from epmoe.ops._triton import HAVE_TRITON, jit, tl


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


def _eights_ptx(kind: str, dtype: str) -> str:
    """PTX that makes eight floats of the half bytes of four bytes, those of half bytes j and j + 4 side by side. A code
    of an integer gets the exponent of the number whose last bit counts 1 around it: 128 + code as bf16, 1024 + code as
    fp16. Of e2m1 the bytes of a float are looked up by the magnitude's three bits; then the sign is added."""
    lines = [".reg .b32 f<4>, s, h, l, t;"]
    if kind == "int4":
        lift = {"bf16": "0x43004300", "fp16": "0x64006400"}[dtype]
        for j in range(4):
            lines += [f"shr.u32 t, $8, {4 * j};"] if j else []
            lines += [f"lop3.b32 f{j}, {'t' if j else '$8'}, 0x000F000F, {lift}, 0xEA;"]
    else:
        high = {"bf16": "0x3F3F3F00, 0x40404040", "fp16": "0x3E3C3800, 0x46444240"}[dtype]
        lines += ["and.b32 s, $8, 0x77777777;", "prmt.b32 s, s, 0, 0x3120;"]
        for j in range(4):
            if j % 2 == 0:
                lines += ["shr.u32 s, s, 16;"] if j else []
                lines += [f"prmt.b32 h, {high}, s;"]
                lines += ["prmt.b32 l, 0xC0800000, 0xC0804000, s;"] if dtype == "bf16" else ["mov.b32 l, 0;"]
            lines += [f"prmt.b32 f{j}, l, h, {('0x6240', '0x7351')[j % 2]};"]
            lines += [f"shl.b32 t, $8, {12 - 4 * j};"] if j < 3 else []
            lines += [f"lop3.b32 f{j}, {'t' if j < 3 else '$8'}, 0x80008000, f{j}, 0xEA;"]
    lines += [f"mov.b32 {{${2 * j}, ${2 * j + 1}}}, f{j};" for j in range(4)]
    return "{\n" + "\n".join(lines) + "\n}"


if HAVE_TRITON:
    EIGHTS = tl.constexpr(",".join(["=h"] * 8 + ["r"]))
    INT4_BF16, INT4_FP16 = (tl.constexpr(_eights_ptx("int4", dtype)) for dtype in ("bf16", "fp16"))
    E2M1_BF16, E2M1_FP16 = (tl.constexpr(_eights_ptx("fp4", dtype)) for dtype in ("bf16", "fp16"))


@jit
def _eights_to_bf16(p, PTX: tl.constexpr):
    return tl.inline_asm_elementwise(
        PTX,
        EIGHTS,
        [p],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )


@jit
def _eights_to_fp16(p, PTX: tl.constexpr):
    return tl.inline_asm_elementwise(
        PTX,
        EIGHTS,
        [p],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=1,
    )


def _sixes_ptx(kind: str, dtype: str) -> str:
    """PTX that makes two registers of each of four floats of three of bytes, four columns of each. A code's five bits
    become the low bits of the exponent and the high ones of the mantissa, which is the number times a power of two:
    2**-126 (e2m3) or 2**-124 as bf16, where it may be subnormal, 2**-14 or 2**-12 as fp16."""
    exponent, mantissa = {"e2m3": (2, 3), "e3m2": (3, 2)}[kind]
    # where the exponent field begins, its bias, and how a shift brings the code there, from the low or the high byte
    field, bias = {"bf16": (7, 127), "fp16": (10, 15)}[dtype]
    place = field - mantissa
    shift = f"shl.b32 u, t, {place - 2}" if place + 5 <= 10 else f"shr.b32 u, t, {10 - place}"
    mask = 31 << place
    up = bias - {"e2m3": 1, "e3m2": 3}[kind]
    factor = bias + up << field
    times = "fma.rn.bf16x2 {0}, {0}, m, z" if dtype == "bf16" else "mul.rn.f16x2 {0}, {0}, m"
    lines = [
        ".reg .b32 t, u, m, z, c;",
        f"mov.b32 m, 0x{factor:04X}{factor:04X};",
        "mov.b32 z, 0x80008000;",
        "shl.b32 c, $8, 6;",
        "and.b32 c, c, 0xC0C0C0C0;",
        "shl.b32 t, $9, 4;",
        "lop3.b32 c, t, 0x30303030, c, 0xEA;",
        "shl.b32 t, $10, 2;",
        "lop3.b32 c, t, 0x0C0C0C0C, c, 0xEA;",
    ]
    for quarter, source in enumerate(("$8", "$9", "$10", "c")):
        for pair, bytes_ in enumerate(("0x1100", "0x3322")):
            to = f"${2 * quarter + pair}"
            lines += [
                f"prmt.b32 t, {source}, 0, {bytes_};",
                f"{shift};",
                "and.b32 t, t, 0x80008000;",
                f"lop3.b32 {to}, u, 0x{mask:04X}{mask:04X}, t, 0xEA;",
                f"{times.format(to)};",
            ]
    return "{\n" + "\n".join(lines) + "\n}"


if HAVE_TRITON:
    SIXES = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 3))
    E2M3_BF16, E2M3_FP16 = (tl.constexpr(_sixes_ptx("e2m3", dtype)) for dtype in ("bf16", "fp16"))
    E3M2_BF16, E3M2_FP16 = (tl.constexpr(_sixes_ptx("e3m2", dtype)) for dtype in ("bf16", "fp16"))


@jit
def _sixes_to_bf16(a, b, c, PTX: tl.constexpr):
    return tl.inline_asm_elementwise(
        PTX, SIXES, [a, b, c], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
    )


@jit
def _sixes_to_fp16(a, b, c, PTX: tl.constexpr):
    return tl.inline_asm_elementwise(
        PTX, SIXES, [a, b, c], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=4
    )


@jit
def _small_float(code, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Codes, int32, of a sign, EXPONENT and MANTISSA bits as fp32 in plain arithmetic."""
    WHOLE: tl.constexpr = 1 << MANTISSA
    UNIT: tl.constexpr = 2.0 ** (1 - BIAS - MANTISSA)
    size = code & ((1 << (EXPONENT + MANTISSA)) - 1)
    exponent = size >> MANTISSA
    mantissa = size & (WHOLE - 1)
    units = tl.where(exponent == 0, mantissa, (WHOLE + mantissa) << tl.maximum(exponent - 1, 0))
    return tl.where(code > size, -UNIT, UNIT) * units.to(tl.float32)


@jit
def quarters(a, b, c, KIND: tl.constexpr, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """The four numbers of 6 bits that each three bytes a, b, c hold, as DTYPE (interpreted: fp32), exact."""
    if INTERPRETED:
        EXPONENT: tl.constexpr = 2 if KIND == "e2m3" else 3
        BIAS: tl.constexpr = 1 if KIND == "e2m3" else 3
        a, b, c = a.to(tl.int32), b.to(tl.int32), c.to(tl.int32)
        d = (a & 3) << 4 | (b & 3) << 2 | (c & 3)
        q0 = _small_float(a >> 2, EXPONENT, 5 - EXPONENT, BIAS)
        q1 = _small_float(b >> 2, EXPONENT, 5 - EXPONENT, BIAS)
        q2 = _small_float(c >> 2, EXPONENT, 5 - EXPONENT, BIAS)
        q3 = _small_float(d, EXPONENT, 5 - EXPONENT, BIAS)
    elif KIND == "e2m3":
        if DTYPE == tl.bfloat16:
            q0, q1, q2, q3 = _sixes_to_bf16(a, b, c, E2M3_BF16)
        else:
            q0, q1, q2, q3 = _sixes_to_fp16(a, b, c, E2M3_FP16)
    elif DTYPE == tl.bfloat16:
        q0, q1, q2, q3 = _sixes_to_bf16(a, b, c, E3M2_BF16)
    else:
        q0, q1, q2, q3 = _sixes_to_fp16(a, b, c, E3M2_FP16)
    return q0, q1, q2, q3


@jit
def halves(p, KIND: tl.constexpr, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """The 128 numbers `[rows, 128]` of a span of half bytes, int32 `[rows, 16]`, as DTYPE (interpreted: fp32), exact;
    codes of 4-bit integers plus what exponent bits around them add. Where a column lies: `ops/narrow_formats.py`."""
    ROWS: tl.constexpr = p.shape[0]
    if INTERPRETED:
        code = (p[:, :, None] >> (4 * tl.arange(0, 8))[None, None, :]) & 15
        if KIND == "fp4":
            w = _small_float(code, 2, 1, 1)
        else:
            w = code.to(tl.float32)
        w = w.reshape(ROWS, 4, 4, 2, 2, 2).permute(0, 2, 4, 5, 1, 3)  # q, u, i, p, h to u, p, h, q, i
    else:
        if KIND == "fp4":
            if DTYPE == tl.bfloat16:
                a, b, c, d, e, f, g, h = _eights_to_bf16(p, E2M1_BF16)
            else:
                a, b, c, d, e, f, g, h = _eights_to_fp16(p, E2M1_FP16)
        elif DTYPE == tl.bfloat16:
            a, b, c, d, e, f, g, h = _eights_to_bf16(p, INT4_BF16)
        else:
            a, b, c, d, e, f, g, h = _eights_to_fp16(p, INT4_FP16)
        w = tl.join(tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(g, h)))
        w = w.reshape(ROWS, 4, 4, 2, 2, 2).permute(0, 2, 5, 4, 1, 3)  # q, u, i, h, p to u, p, h, q, i
    return w.reshape(ROWS, 128)


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
