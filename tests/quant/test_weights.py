"""Quantized weights: blocks and channels with their own scales, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from epmoe.quant import WEIGHT_SCHEMES, QuantizedWeights, dequantize_weights, quantize_weights, weight_scale_shape
from epmoe.quant.reference import quantize_group

SIZES = [(256, 128), (160, 80), (192, 320), (1, 1)]
BLOCKS = [(64, 64), (1, 128), (32, 32), (256, 256), (64, 384)]


def weights(n: int, k: int, seed: int) -> Tensor:
    """Three experts whose magnitudes differ by 1e3, with blocks and channels that do too."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(3, n, k, generator=g) * torch.tensor([1.0, 1e3, 1e-3])[:, None, None]
    return w * 10.0 ** torch.randint(-2, 3, (3, n, 1), generator=g)


def groups(w: Tensor, scheme: str, block: tuple[int, int] = (128, 128)) -> list[tuple[tuple[int, ...], Tensor]]:
    """(index of its scale, view of the numbers that share it), one after another."""
    if scheme.endswith("_row"):
        return [((e, n), w[e, n]) for e in range(w.shape[0]) for n in range(w.shape[1])]
    rows, columns = block
    return [
        ((e, i, j), w[e, i * rows : (i + 1) * rows, j * columns : (j + 1) * columns])
        for e in range(w.shape[0])
        for i in range(math.ceil(w.shape[1] / rows))
        for j in range(math.ceil(w.shape[2] / columns))
    ]


@pytest.mark.parametrize("n, k", SIZES)
@pytest.mark.parametrize("scheme", WEIGHT_SCHEMES)
def test_every_block_or_channel_is_rounded_by_its_own_scale(scheme, n, k, seed):
    check_groups(quantize_weights(weights(n, k, seed), scheme), weights(n, k, seed))


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_block_ue8m0"])
def test_blocks_of_any_size_are_rounded_by_their_own_scales(scheme, block, seed):
    n, k = (9, 80) if block[0] == 1 else (160, 420)
    w = weights(n, k, seed) * 10.0 ** (torch.arange(k) // 32 % 3)
    q = quantize_weights(w, scheme, block)
    assert q.block == block
    check_groups(q, w)


def check_groups(q: QuantizedWeights, w: Tensor) -> None:
    scheme, block = q.scheme, q.block
    assert tuple(q.scales.shape) == weight_scale_shape(tuple(w.shape), scheme, block)
    back = dequantize_weights(q, torch.float64)
    for (at, part), (_, got), (_, values) in zip(
        groups(w, scheme, block), groups(back, scheme, block), groups(q.values, scheme, block), strict=True
    ):
        want, scale = quantize_group(part, scheme)
        assert q.scales[at].item() == pytest.approx(scale, rel=1e-6)
        assert torch.equal(got, values.double() * q.scales[at].double())
        exact = part.double() / scale
        assert ((values.double() - exact).abs() <= (want - exact).abs() + 1e-5 * exact.abs()).all()


@pytest.mark.parametrize("scheme", WEIGHT_SCHEMES)
def test_zeros_have_scale_one_and_a_nan_spoils_its_own_group(scheme):
    w = torch.zeros(2, 256, 256)
    w[1, 200, 7] = math.nan
    q = quantize_weights(w, scheme)
    spoiled = q.scales.isnan()
    assert spoiled.sum() == 1 and spoiled[1, 200 if scheme.endswith("_row") else 1].any()
    assert (q.scales[~spoiled] == 1).all() and not q.values.float().any()


def test_bf16_and_float64_weights_quantize_as_their_float32_values(seed):
    w = weights(130, 70, seed).bfloat16()
    for scheme in WEIGHT_SCHEMES:
        want = quantize_weights(w.float(), scheme)
        for dtype in (torch.bfloat16, torch.float64):
            got = quantize_weights(w.to(dtype), scheme)
            assert torch.equal(got.values.float(), want.values.float()) and torch.equal(got.scales, want.scales)


@pytest.mark.parametrize("scheme", WEIGHT_SCHEMES)
def test_parts_that_do_not_fit_are_refused_by_name(scheme):
    q = quantize_weights(torch.randn(2, 130, 70), scheme)
    for values, scales, name, message in [
        (q.values, q.scales, "int3", "scheme='int3'"),
        (q.values.float(), q.scales, scheme, "values is torch.float32"),
        (q.values[0], q.scales, scheme, "values is"),
        (q.values, q.scales[:1], scheme, "scales is torch.float32"),
        (q.values, q.scales.double(), scheme, "scales is torch.float64"),
        (q.values, q.scales.to("meta"), scheme, "scales is on meta"),
    ]:
        with pytest.raises(ValueError, match=f"QuantizedWeights.{message}"):
            QuantizedWeights(values, scales, name)
    block, wrong = ((96, 128), "must be .rows, columns") if "block" in scheme else ((64, 64), "must be .128, 128")
    for call in (
        lambda: QuantizedWeights(q.values, q.scales, scheme, block),
        lambda: quantize_weights(torch.randn(2, 130, 70), scheme, block),
        lambda: weight_scale_shape((2, 130, 70), scheme, block),
    ):
        with pytest.raises(ValueError, match=f"block=.*{block[0]}, {block[1]}.* with scheme='{scheme}': {wrong}"):
            call()
    if "block" in scheme:
        with pytest.raises(ValueError, match=r"scales is .*\(2, 2, 1\): must be torch.float32 \(2, 3, 2\).*and block="):
            QuantizedWeights(q.values, q.scales, scheme, (64, 64))
    with pytest.raises(ValueError, match="w is torch.int32"):
        quantize_weights(torch.ones(1, 2, 3, dtype=torch.int32), scheme)
    with pytest.raises(ValueError, match="scheme='int3'"):
        quantize_weights(torch.ones(1, 2, 3), "int3")
