"""Released packings, each packed here number by number as its format says, against the numbers that went in."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from epmoe.quant import dequantize_narrow, quantize_narrow
from epmoe.quant.checkpoint_formats import (
    concat_channels,
    from_awq,
    from_gptq,
    from_mxfp4_blocks,
    from_mxfp6_blocks,
    from_nvfp4,
    narrow_of,
    packed_integers,
    stack_narrow,
    take_channels,
)
from tests.quant.test_narrow import six_bit_number

E2M1 = [sign * x for sign in (1, -1) for x in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]


def word(numbers: list[int], bits: int) -> int:
    total = sum(number << bits * i for i, number in enumerate(numbers))
    return total - (1 << 32) if total >= 1 << 31 else total


def along_rows(u: Tensor, bits: int) -> Tensor:
    per = 32 // bits
    rows = range(0, u.shape[0], per)
    return torch.tensor(
        [[word([int(x) for x in u[r : r + per, c]], bits) for c in range(u.shape[1])] for r in rows], dtype=torch.int32
    )


def integers(k: int, n: int, groups: int, bits: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    u = torch.randint(0, 1 << bits, (k, n), generator=g)
    z = torch.randint(0, 1 << bits, (groups, n), generator=g)
    return u, z, (torch.rand(groups, n, generator=g) + 0.1).half()


def meant(u: Tensor, z: Tensor, s: Tensor, group: Tensor) -> Tensor:
    """`[N, K]`, (u - z) · s by each row's group."""
    return ((u - z[group]).double() * s.double()[group]).T


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128, 256, -1])
def test_gptq_packs_along_k_and_stores_zero_points_less_one(group, bits, seed):
    k, n = 288, 16
    size = k if group == -1 else group
    u, z, s = integers(k, n, math.ceil(k / size), bits, seed)
    z[0, 0] = 0
    qweight = along_rows(u, bits)
    qzeros = along_rows(((z - 1) % (1 << bits)).T, bits).T
    q, order = from_gptq(qweight, qzeros, s, torch.arange(k) // size, bits=bits, group_size=group)
    assert order is None and q.shape == (1, n, k) and q.scheme.startswith(f"int{bits}")
    want = meant(u, z, s, torch.arange(k) // size)
    assert torch.equal(dequantize_narrow(q, torch.float64)[0], want)
    again, _ = from_gptq(qweight, along_rows(z.T, bits).T, s, bits=bits, group_size=group, zeros_less_one=False)
    assert torch.equal(dequantize_narrow(again, torch.float64)[0], want)
    borrowed = along_rows((z - 1).T, bits).T  # of whole words, in which -1 takes from the next
    assert not torch.equal(borrowed, qzeros)
    again, _ = from_gptq(qweight, borrowed, s, bits=bits, group_size=group, zeros_borrow=True)
    assert torch.equal(dequantize_narrow(again, torch.float64)[0], want)


def test_gptq_without_zero_points_of_its_own_has_none_here(seed):
    u, z, s = integers(64, 8, 2, 4, seed)
    z.fill_(8)
    q, _ = from_gptq(along_rows(u, 4), along_rows((z - 1).T, 4).T, s, group_size=32)
    assert q.zeros is None
    assert torch.equal(dequantize_narrow(q, torch.float64)[0], meant(u, z, s, torch.arange(64) // 32))


def test_activation_order_sorts_columns_and_says_how(seed):
    u, z, s = integers(128, 8, 4, 4, seed)
    g_idx = (torch.arange(128) // 32)[torch.randperm(128, generator=torch.Generator().manual_seed(seed))]
    q, order = from_gptq(along_rows(u, 4), along_rows(((z - 1) % 16).T, 4).T, s, g_idx.int(), group_size=32)
    assert order is not None
    assert torch.equal(dequantize_narrow(q, torch.float64)[0], meant(u, z, s, g_idx)[:, order])
    with pytest.raises(ValueError, match="g_idx has groups that are not of 32 columns"):
        from_gptq(along_rows(u, 4), along_rows(z.T, 4).T, s, torch.zeros(128, dtype=torch.int32), group_size=32)


def test_a_down_projection_with_an_order_meets_reordered_channels(seed):
    g = torch.Generator().manual_seed(seed)
    gate = quantize_narrow(torch.randn(1, 64, 40, generator=g), "int4_g32", zeros=True)
    order = torch.randperm(64, generator=g)
    for q in (gate, quantize_narrow(torch.randn(1, 64, 40, generator=g), "nvfp4")):
        want = dequantize_narrow(q, torch.float64)[:, order]
        assert torch.equal(dequantize_narrow(take_channels(q, order), torch.float64), want)


@pytest.mark.parametrize("group", [32, 64, 128, -1])
def test_awq_packs_along_n_in_its_own_order(group, seed):
    k, n = 192, 24
    size = k if group == -1 else group
    u, z, s = integers(k, n, math.ceil(k / size), 4, seed)

    def packed(t: Tensor) -> Tensor:
        words = [
            [word([int(t[r, 8 * c + column]) for column in (0, 2, 4, 6, 1, 3, 5, 7)], 4) for c in range(n // 8)]
            for r in range(t.shape[0])
        ]
        return torch.tensor(words, dtype=torch.int32)

    q = from_awq(packed(u), packed(z), s, group_size=group)
    assert torch.equal(dequantize_narrow(q, torch.float64)[0], meant(u, z, s, torch.arange(k) // size))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 128, -1])
def test_compressed_tensors_packs_weights_along_k_and_zero_points_along_n(group, bits, seed):
    k, n = 92, 12
    size = k if group == -1 else group
    u, z, s = integers(k, n, math.ceil(k / size), bits, seed)
    filled = torch.cat((u, torch.zeros(-k % 8, n, dtype=u.dtype)))  # whole words
    points = torch.cat((z, torch.zeros(len(z), -n % 8, dtype=z.dtype)), 1) if bits == 4 else z
    packed, scales, g_idx = along_rows(filled, bits).T[:, : -(-k * bits // 32)], s.T, torch.arange(k) // size
    along_n, signed = along_rows(points.T, bits), (z.T.long() - (1 << bits - 1)).to(torch.int8)
    for given, order in ((along_n, None), (along_n, torch.full((k,), -1)), (along_n, g_idx), (signed, None)):
        q, moved = narrow_of(packed_integers(packed, scales, given, order, width=k, bits=bits, group_size=group))
        assert moved is None and torch.equal(dequantize_narrow(q, torch.float64)[0], meant(u, z, s, g_idx))
    q, _ = narrow_of(packed_integers(packed, scales, width=k, bits=bits, group_size=group))
    middle = torch.full_like(z, 1 << bits - 1)
    assert q.zeros is None and torch.equal(dequantize_narrow(q, torch.float64)[0], meant(u, middle, s, g_idx))


@pytest.mark.parametrize("interleaved", [False, True], ids=["plain", "interleaved"])
def test_mxfp4_blocks_hold_the_even_column_in_the_low_half(interleaved, seed):
    g = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), generator=g, dtype=torch.uint8)
    scales = torch.randint(100, 140, (2, 6, 3), generator=g, dtype=torch.uint8)
    q = from_mxfp4_blocks(blocks, scales, interleaved=interleaved)
    got = dequantize_narrow(q, torch.float64)
    for e, n, k in [(0, 0, 0), (0, 1, 1), (1, 5, 95), (1, 2, 33), (0, 4, 62)]:
        byte = int(blocks[e, n, k // 32, k % 32 // 2])
        want = E2M1[byte >> 4 if k % 2 else byte & 15] * 2.0 ** (int(scales[e, n, k // 32]) - 127)
        row = n // 2 + 3 * (n % 2) if interleaved else n
        assert got[e, row, k].item() == want


@pytest.mark.parametrize("interleaved", [False, True], ids=["plain", "interleaved"])
@pytest.mark.parametrize("scheme", ["mxfp6_e2m3", "mxfp6_e3m2"])
def test_mxfp6_blocks_are_a_string_of_six_bits_each(scheme, interleaved, seed):
    g = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (2, 6, 3, 24), generator=g, dtype=torch.uint8)
    scales = torch.randint(100, 140, (2, 6, 3), generator=g, dtype=torch.uint8)
    got = dequantize_narrow(from_mxfp6_blocks(blocks, scales, scheme, interleaved=interleaved), torch.float64)
    for e, n, k in [(0, 0, 0), (0, 1, 1), (1, 5, 95), (1, 2, 34), (0, 4, 63), (1, 3, 28)]:
        bits = int.from_bytes(bytes(blocks[e, n, k // 32].tolist()), "little")
        code = bits >> 6 * (k % 32) & 63
        number = six_bit_number(scheme[-4:], code & 31) * (-1 if code > 31 else 1)
        row = n // 2 + 3 * (n % 2) if interleaved else n
        assert got[e, row, k].item() == number * 2.0 ** (int(scales[e, n, k // 32]) - 127)


def test_nvfp4_multiplies_both_scales(seed):
    g = torch.Generator().manual_seed(seed)
    weight = torch.randint(0, 256, (6, 40), generator=g, dtype=torch.uint8)
    scale = (torch.rand(6, 5, generator=g) * 100).to(torch.float8_e4m3fn)
    q = from_nvfp4(weight, scale, torch.tensor(0.01))
    got = dequantize_narrow(q, torch.float64)[0]
    for n, k in [(0, 0), (1, 1), (5, 79), (2, 33)]:
        byte = int(weight[n, k // 2])
        want = E2M1[byte >> 4 if k % 2 else byte & 15] * float(scale[n, k // 16]) * float(torch.tensor(0.01))
        assert got[n, k].item() == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("scheme", ["int4_g64", "int8_channel", "mxfp4", "nvfp4", "mxfp6_e3m2"])
def test_experts_are_stacked_and_channels_joined(scheme, seed):
    g = torch.Generator().manual_seed(seed)
    wide = [torch.randn(1, 5, 130, generator=g) for _ in range(4)]
    zeros = [scheme.startswith("int") and i != 1 for i in range(4)]
    gate0, up0, gate1, up1 = (quantize_narrow(w, scheme, zeros=z) for w, z in zip(wide, zeros, strict=True))
    q = stack_narrow([concat_channels([gate0, up0]), concat_channels([gate1, up1])])
    assert q.shape == (2, 10, 130)
    want = [dequantize_narrow(part, torch.float64)[0] for part in (gate0, up0, gate1, up1)]
    assert torch.equal(dequantize_narrow(q, torch.float64).flatten(0, 1), torch.cat(want))
    with pytest.raises(ValueError, match=r"parts\[1\] is"):
        stack_narrow([gate0, quantize_narrow(wide[0][:, :4], scheme)])


def test_parts_that_do_not_fit_are_named(seed):
    u, z, s = integers(64, 8, 2, 4, seed)
    qweight, qzeros = along_rows(u, 4), along_rows(z.T, 4).T
    for call, message in [
        (lambda: from_gptq(qweight, qzeros, s, bits=3, group_size=32), "bits=3"),
        (lambda: from_gptq(qweight.long(), qzeros, s, group_size=32), "qweight is torch.int64"),
        (lambda: from_gptq(qweight, qzeros, s, group_size=64), "scales has shape"),
        (lambda: from_gptq(qweight, qzeros, s, torch.zeros(3), group_size=32), "g_idx has shape"),
        (lambda: from_gptq(qweight, qzeros.T, s, group_size=32), "qzeros has shape"),
        (lambda: from_gptq(qweight, qzeros, s.double(), group_size=32), "scales is torch.float64"),
        (lambda: from_awq(qweight, qzeros, s), "scales has shape"),
        (lambda: from_gptq(qweight, qzeros, s, torch.full((64,), 2), group_size=32), "g_idx names groups from 2 to 2"),
        (lambda: from_gptq(qweight, qzeros, s, group_size=0), "group_size=0"),
        (lambda: packed_integers(qweight, s, width=64, bits=2), "bits=2"),
        (lambda: packed_integers(qweight, s, width=72), "weight_packed has shape"),
        (lambda: packed_integers(qweight, s, width=64), "weight_scale has shape"),
        (lambda: packed_integers(qweight, qweight[:, :1], qzeros.T, width=64), "weight_zero_point has shape"),
        (lambda: packed_integers(qweight, qweight[:, :1], z.to(torch.int8), width=64), "weight_zero_point has shape"),
        (
            lambda: packed_integers(qweight, qweight[:, :1], None, torch.full((64,), 3), width=64),
            "weight_g_idx names groups from 3 to 3",
        ),
        (lambda: from_mxfp4_blocks(torch.zeros(2, 3, 4, 8, dtype=torch.uint8), s), "blocks is"),
        (lambda: from_mxfp4_blocks(torch.zeros(2, 3, 4, 16, dtype=torch.uint8), s), "scales is torch.float16"),
        (lambda: from_mxfp6_blocks(torch.zeros(2, 3, 4, 16, dtype=torch.uint8), s, "mxfp6_e2m3"), "blocks is"),
        (lambda: from_mxfp6_blocks(torch.zeros(2, 3, 4, 24, dtype=torch.uint8), s, "mxfp6_e2m3"), "scales is torch.fl"),
        (lambda: from_mxfp6_blocks(torch.zeros(2, 3, 4, 24, dtype=torch.uint8), s, "mxfp4"), "scheme='mxfp4'"),
        (lambda: from_nvfp4(torch.zeros(3, 4, dtype=torch.uint8), s, s), "weight is"),
        (lambda: stack_narrow([]), "parts is empty"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    g48 = integers(96, 8, 2, 4, seed)
    with pytest.raises(ValueError, match="group_size=48"):
        from_gptq(along_rows(g48[0], 4), along_rows(g48[1].T, 4).T, g48[2], group_size=48)
