"""The instructions that widen narrow numbers on a GPU, carried out here one by one: every code in every place becomes
the number that it means. The interpreter takes plain arithmetic instead, which the tests of `narrow_gemm` cover."""

from __future__ import annotations

import inspect
import re
import textwrap

import pytest
import torch

from epmoe.ops import _narrow_widen
from epmoe.ops._narrow_widen import _eights_ptx, _sixes_ptx
from epmoe.ops.narrow_formats import numbers_of, pack_sixes

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def floats(word: int, kind: str) -> list[float]:
    """Both halves of a register."""
    return torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32).to(torch.uint16).view(DTYPES[kind]).tolist()


def register(values: list[float], kind: str) -> int:
    """Two numbers that the dtype holds exactly."""
    halves = torch.tensor(values, dtype=torch.float64).to(DTYPES[kind])
    assert halves.double().tolist() == values, "rounded on the way"
    low, high = halves.view(torch.uint16).tolist()
    return int(low) | int(high) << 16


def permuted(a: int, b: int, selector: int) -> int:
    pool = [a >> 8 * i & 255 for i in range(4)] + [b >> 8 * i & 255 for i in range(4)]
    picked = 0
    for i in range(4):
        choice = selector >> 4 * i & 15
        byte = pool[choice & 7]
        picked |= (255 * (byte >> 7) if choice & 8 else byte) << 8 * i
    return picked


def carried_out(ptx: str, inputs: list[int], outputs: int) -> list[int]:
    """The registers $0.. of inline assembly whose inputs follow them."""
    state = {f"${outputs + i}": word for i, word in enumerate(inputs)}
    for line in filter(None, (line.strip() for line in ptx.replace("{", "").replace("}", "").split(";"))):
        if line.startswith(".reg"):
            continue
        name, operands = line.split(None, 1)
        to, *sources = (operand.strip() for operand in operands.split(","))
        if name == "mov.b32" and len(sources) == 2:  # a register in two
            state[to], state[sources[0]] = state[sources[1]] & 0xFFFF, state[sources[1]] >> 16
            continue
        a = [state[s] if s in state else int(s, 0) for s in sources]
        kind = "bf16" if "bf16" in name else "fp16"
        match name.split(".")[0]:
            case "mov":
                word = a[0]
            case "shl":
                word = a[0] << a[1]
            case "shr":
                word = a[0] >> a[1]
            case "and":
                word = a[0] & a[1]
            case "xor":
                word = a[0] ^ a[1]
            case "prmt":
                word = permuted(*a)
            case "lop3":
                assert a[3] == 0xEA
                word = a[0] & a[1] | a[2]
            case operation:
                numbers = zip(*(floats(word, kind) for word in a), strict=True)
                exact = {"fma": lambda x, y, z: x * y + z, "mul": lambda x, y: x * y, "sub": lambda x, y: x - y}
                word = register([exact[operation](*pair) for pair in numbers], kind)
        state[to] = word & 0xFFFFFFFF
    return [state[f"${i}"] for i in range(outputs)]


def assembly(name: str) -> str:
    """That of a function of `_narrow_widen`."""
    function = getattr(_narrow_widen, name)
    source = inspect.getsource(getattr(function, "fn", function))
    return textwrap.dedent(re.findall(r'"""(.*?)"""', source, re.S)[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["e2m3", "e3m2"])
def test_three_bytes_become_the_four_numbers_that_they_hold(kind: str, dtype: str) -> None:
    g = torch.Generator().manual_seed(0)
    for first in range(0, 64, 4):
        # every code in every quarter, and anything beside it
        codes = torch.randint(0, 64, (4, 32), generator=g, dtype=torch.uint8)
        for quarter in range(4):
            codes[quarter, :4] = torch.arange(first, first + 4).roll(quarter)
        packed = pack_sixes(codes.flatten())
        want = numbers_of(packed, kind, 128, torch.float64).view(4, 32)[:, :4]
        words = [int.from_bytes(bytes(packed[32 * p : 32 * p + 4].tolist()), "little") for p in range(3)]
        made = carried_out(_sixes_ptx(kind, dtype), words, 8)
        got = [[*floats(made[2 * q], dtype), *floats(made[2 * q + 1], dtype)] for q in range(4)]
        assert got == want.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_become_integers(dtype: str) -> None:
    for byte in range(256):
        word = byte | (255 - byte) << 8
        got = floats(carried_out(assembly(f"_bytes_to_{dtype}"), [word], 1)[0], dtype)
        assert got == [float(v - 256 if v > 127 else v) for v in (byte, 255 - byte)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_half_bytes_become_codes_under_an_exponent_and_small_floats(dtype: str) -> None:
    lift = {"bf16": 128.0, "fp16": 1024.0}[dtype]
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    numbers += [-x for x in numbers]
    for first in range(256):
        bytes_ = [(first + 75 * place) * (2 * place + 1) % 256 for place in range(4)]
        codes = [code for byte in bytes_ for code in (byte & 15, byte >> 4)]
        word = int.from_bytes(bytes(bytes_), "little")
        for kind, meaning in (("int4", [lift + code for code in range(16)]), ("fp4", numbers)):
            halves = carried_out(_eights_ptx(kind, dtype), [word], 8)
            got = [floats(half, dtype)[0] for half in halves]
            assert got == [meaning[codes[j + 4 * i]] for j in range(4) for i in range(2)]
