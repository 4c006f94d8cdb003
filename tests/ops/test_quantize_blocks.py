"""Blocks of weights to eight bits: the kernel against the twin bit by bit; the twin against float64 is in
`tests/quant/test_weights.py`."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from epmoe.ops._triton import INTERPRET
from epmoe.ops.quantize_blocks import block_mismatch, quantize_blocks, quantize_blocks_reference, round_blocks
from epmoe.quant import QuantizedWeights, dequantize_weights
from epmoe.testing import poisoned_empty

SCHEMES = ["fp8_block", "fp8_block_ue8m0"]


def weights(n: int, k: int, seed: int) -> Tensor:
    """Two experts over six decades, with a block of zeros, one of subnormals, one that holds a NaN."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(2, n, k, generator=g) * torch.tensor([1e3, 1e-3])[:, None, None]
    w[0, :128, :128] = 0
    w[1, :128, :128] = 1e-40
    w[0, -1, -1] = math.nan
    return w


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "k"), [(256, 128), (160, 200), (1, 1)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_kernel_and_twin_give_the_same_bits(scheme, n, k, dtype, device, seed):
    w = weights(n, k, seed).to(device, dtype)
    with poisoned_empty():
        values, scales = quantize_blocks(w, scheme)
        wide = round_blocks(w, scheme)
    want, want_scales = quantize_blocks_reference(w.cpu(), scheme)
    bits, right = values.cpu().view(torch.uint8), want.view(torch.uint8)
    if INTERPRET:  # Triton 3.6's loses the sign of what it rounds to zero
        bits, right = (torch.where(b == 0x80, 0, b) for b in (bits, right))
    assert torch.equal(bits, right)
    assert torch.equal(scales.cpu().nan_to_num(-1), want_scales.nan_to_num(-1))
    held = dequantize_weights(QuantizedWeights(want, want_scales, scheme), dtype)
    assert wide.dtype == dtype
    normal = ~(held.abs() < 2.0**-126)  # the interpreter's cast to bf16 loses those
    assert torch.equal(wide.cpu()[normal].nan_to_num(-1), held[normal].nan_to_num(-1))


@pytest.mark.parametrize(
    "block", [(64, 64), (32, 128), (1, 64), (16, 32), (128, 384), (256, 128), (2**40, 2**40)], ids=str
)
def test_kernel_and_twin_give_the_same_bits_in_blocks_of_any_size(block, device, seed):
    """Widths that cut the last block; the largest are read in several pieces."""
    w = weights(150 if block[0] > 16 else 19, 420 if block[1] > 128 else 200, seed).to(device)
    with poisoned_empty():
        values, scales = quantize_blocks(w, "fp8_block", *block)
    want, want_scales = quantize_blocks_reference(w.cpu(), "fp8_block", block)
    bits, right = values.cpu().view(torch.uint8), want.view(torch.uint8)
    if INTERPRET:  # as above
        bits, right = (torch.where(b == 0x80, 0, b) for b in (bits, right))
    assert torch.equal(bits, right)
    assert scales.shape == (2, -(-w.shape[1] // block[0]), -(-w.shape[2] // block[1]))
    assert torch.equal(scales.cpu().nan_to_num(-1), want_scales.nan_to_num(-1))


@pytest.mark.parametrize(
    "block", [(3, 128), (0, 128), (-64, 64), (128, 16), (192, 128), (128, 200), (128,), (64.0, 64)]
)
def test_blocks_that_no_dot_could_multiply_are_refused_with_those_that_can(block):
    assert block_mismatch(block) is not None
    if len(block) == 2 and isinstance(block[0], int):
        with pytest.raises(ValueError, match="rows 1, 2, 4, .. 128 or a multiple of 128, columns 32, 64 or a multiple"):
            quantize_blocks(torch.ones(1, 4, 4), "fp8_block", *block)


def test_rows_may_lie_apart_and_what_does_not_fit_is_named(device, seed):
    wide = weights(130, 300, seed).to(device)
    for got, want in zip(
        quantize_blocks(wide[:, :, :200], "fp8_block"),
        quantize_blocks(wide[:, :, :200].contiguous(), "fp8_block"),
        strict=True,
    ):
        assert torch.equal(got.float().nan_to_num(-1), want.float().nan_to_num(-1))
    assert quantize_blocks(wide[:0], "fp8_block")[1].shape == (0, 2, 3)
    for w, scheme, message in [
        (wide, "fp8_row", "scheme='fp8_row': must be one with scales per block"),
        (wide.int(), "fp8_block", "w is torch.int32"),
        (wide[0], "fp8_block", "w is torch.float32"),
        (wide.transpose(1, 2), "fp8_block", "dense along K"),
    ]:
        for call in (quantize_blocks, round_blocks):
            with pytest.raises(ValueError, match=message):
                call(w, scheme)
    shapes = torch.ops.epmoe.quantize_blocks(torch.empty(2, 130, 300, device="meta"), "fp8_block", 32, 256)
    assert [t.shape for t in shapes] == [(2, 130, 300), (2, 5, 2)]
