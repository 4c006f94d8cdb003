"""Formats of expert weights: the tensors they promise are those they make, and a checkpoint's gate and up join."""

from __future__ import annotations

import pytest
import torch

from epmoe.quant import QuantizedWeights, dequantize_weights, quantize_weights
from epmoe.quant.formats import FORMATS, SCALE_DTYPES, join_gate_up, weight_format


@pytest.mark.parametrize("shape", [(2, 160, 192), (1, 256, 80), (3, 4, 130)], ids=str)
@pytest.mark.parametrize("scheme", FORMATS)
def test_parts_have_the_shapes_and_dtypes_that_the_format_promises(scheme: str, shape: tuple, seed: int) -> None:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    for zeros in (False, True)[: 1 + FORMATS[scheme].zeros]:
        made = FORMATS[scheme].quantize(w, zeros)
        assert {s: (tuple(t.shape), t.dtype) for s, t in made.items()} == FORMATS[scheme].parts(shape, zeros)


@pytest.mark.parametrize("dtype", SCALE_DTYPES)
@pytest.mark.parametrize("scheme", ["int4_g32", "int8_channel"])
def test_scales_of_integers_have_the_dtype_that_is_asked_for(scheme: str, dtype: str, seed: int) -> None:
    form, generator = weight_format(scheme, scale_dtype=dtype), torch.Generator().manual_seed(seed)
    w = torch.randn(2, 8, 72, generator=generator)
    for zeros in (False, True):
        made = form.quantize(w, zeros)
        assert {s: (tuple(t.shape), t.dtype) for s, t in made.items()} == form.parts((2, 8, 72), zeros)
        assert made["_scale_inv"].dtype == SCALE_DTYPES[dtype]
    with pytest.raises(ValueError, match=f"scale_dtype='{dtype}' with scheme='nvfp4': must be None, or"):
        weight_format("nvfp4", scale_dtype=dtype)


@pytest.mark.parametrize("block", [(64, 64), (1, 128), (256, 384)], ids=str)
def test_parts_by_blocks_of_any_size_are_those_that_the_format_promises(block: tuple[int, int], seed: int) -> None:
    shape, form = (2, 160, 420), weight_format("fp8_block", block)
    made = form.quantize(torch.randn(shape, generator=torch.Generator().manual_seed(seed)), False)
    assert {s: (tuple(t.shape), t.dtype) for s, t in made.items()} == form.parts(shape, False)
    assert made["_scale_inv"].shape == (2, -(-160 // block[0]), -(-420 // block[1]))


def gate_and_up(scheme: str, rows: int, seed: int, block: tuple[int, int] = (128, 128)) -> list[QuantizedWeights]:
    """Projections whose experts and blocks differ by decades."""
    g = torch.Generator().manual_seed(seed)
    magnitude = torch.tensor([1.0, 1e3])[:, None, None]
    parts = [torch.randn(2, rows, 200, generator=g) * magnitude * m for m in (1.0, 30.0)]
    return [quantize_weights(part, scheme, block) for part in parts]


@pytest.mark.parametrize(("scheme", "rows", "block"), [
    ("fp8_block", 256, (128, 128)), ("fp8_block_ue8m0", 128, (128, 128)), ("fp8_row", 80, (128, 128)),
    ("fp8_block", 80, (16, 64)), ("fp8_block", 256, (256, 128)),
])  # fmt: skip
def test_gate_and_up_join_to_the_bit_where_blocks_keep_their_rows(
    scheme: str, rows: int, block: tuple[int, int], seed: int
) -> None:
    gate, up = gate_and_up(scheme, rows, seed, block)
    joined = join_gate_up(gate, up)
    for part, first in ((gate, 0), (up, rows)):
        assert torch.equal(joined.values.view(torch.uint8)[:, first : first + rows], part.values.view(torch.uint8))
    assert torch.equal(joined.scales, torch.cat([gate.scales, up.scales], 1)) and joined.block == block


@pytest.mark.parametrize(("rows", "block"), [(80, (128, 128)), (192, (128, 128)), (80, (64, 64)), (384, (256, 128))])
def test_blocks_that_gate_and_up_share_are_rounded_once_more_and_no_others(
    rows: int, block: tuple[int, int], seed: int
) -> None:
    gate, up = gate_and_up("fp8_block", rows, seed, block)
    joined = join_gate_up(gate, up)
    want = torch.cat([dequantize_weights(part, torch.float64) for part in (gate, up)], 1)
    got = dequantize_weights(joined, torch.float64)
    kept = rows // block[0] * block[0]
    assert torch.equal(got[:, :kept], want[:, :kept])
    # no number moves by more than half a step of e4m3, taken at the block's largest where it is small
    step = joined.scales.repeat_interleave(block[0], 1)[:, : 2 * rows].repeat_interleave(block[1], 2)[:, :, :200]
    assert ((got - want).abs() <= 2**-4 * want.abs() + 2**-10 * step.double()).all()
    assert (got - want)[:, kept:].any()


def test_projections_that_differ_are_refused() -> None:
    gate, up = (quantize_weights(torch.ones(1, n, 8), "fp8_block") for n in (4, 5))
    with pytest.raises(ValueError, match="gate is fp8_block .*must be alike"):
        join_gate_up(gate, up)
    with pytest.raises(ValueError, match="by blocks of .128, 128.*by blocks of .64, 64.*must be alike"):
        join_gate_up(gate, quantize_weights(torch.ones(1, 4, 8), "fp8_block", (64, 64)))
