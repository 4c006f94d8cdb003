"""Formats of expert weights: the tensors they promise are those they make, and a checkpoint's gate and up join."""

from __future__ import annotations

import pytest
import torch

from epmoe.quant import QuantizedWeights, dequantize_weights, quantize_weights
from epmoe.quant.formats import FORMATS, join_gate_up


@pytest.mark.parametrize("shape", [(2, 160, 192), (1, 256, 80), (3, 4, 130)], ids=str)
@pytest.mark.parametrize("scheme", FORMATS)
def test_parts_have_the_shapes_and_dtypes_that_the_format_promises(scheme: str, shape: tuple, seed: int) -> None:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    for zeros in (False, True)[: 1 + FORMATS[scheme].zeros]:
        made = FORMATS[scheme].quantize(w, zeros)
        assert {s: (tuple(t.shape), t.dtype) for s, t in made.items()} == FORMATS[scheme].parts(shape, zeros)


def gate_and_up(scheme: str, rows: int, seed: int) -> list[QuantizedWeights]:
    """Projections whose experts and blocks differ by decades."""
    g = torch.Generator().manual_seed(seed)
    magnitude = torch.tensor([1.0, 1e3])[:, None, None]
    return [quantize_weights(torch.randn(2, rows, 200, generator=g) * magnitude * m, scheme) for m in (1.0, 30.0)]


@pytest.mark.parametrize(("scheme", "rows"), [("fp8_block", 256), ("fp8_block_ue8m0", 128), ("fp8_row", 80)])
def test_gate_and_up_join_to_the_bit_where_blocks_keep_their_rows(scheme: str, rows: int, seed: int) -> None:
    gate, up = gate_and_up(scheme, rows, seed)
    joined = join_gate_up(gate, up)
    for part, first in ((gate, 0), (up, rows)):
        assert torch.equal(joined.values.view(torch.uint8)[:, first : first + rows], part.values.view(torch.uint8))
    assert torch.equal(joined.scales, torch.cat([gate.scales, up.scales], 1))


@pytest.mark.parametrize("rows", [80, 192])
def test_blocks_that_gate_and_up_share_are_rounded_once_more_and_no_others(rows: int, seed: int) -> None:
    gate, up = gate_and_up("fp8_block", rows, seed)
    joined = join_gate_up(gate, up)
    want = torch.cat([dequantize_weights(part, torch.float64) for part in (gate, up)], 1)
    got = dequantize_weights(joined, torch.float64)
    kept = rows // 128 * 128
    assert torch.equal(got[:, :kept], want[:, :kept])
    # no number moves by more than half a step of e4m3, taken at the block's largest where it is small
    block = joined.scales.repeat_interleave(128, 1)[:, : 2 * rows].repeat_interleave(128, 2)[:, :, :200].double()
    assert ((got - want).abs() <= 2**-4 * want.abs() + 2**-10 * block).all()
    assert (got - want)[:, kept:].any()


def test_projections_that_differ_are_refused() -> None:
    gate, up = (quantize_weights(torch.ones(1, n, 8), "fp8_block") for n in (4, 5))
    with pytest.raises(ValueError, match="gate is fp8_block .*must be alike"):
        join_gate_up(gate, up)
