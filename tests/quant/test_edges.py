"""Rows and weights at the edges of every scheme, through whole layers: zeros, infinities, NaN, subnormals, decades, odd
widths, strides; and a token's result is its own, to the bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from epmoe import MoEConfig, MoELayer, QuantConfig, quantize_
from epmoe.ops._triton import INTERPRET
from epmoe.quant import NARROW_SCHEMES, QuantizedRows, quantize_rows
from epmoe.quant.formats import FORMATS

E, K, TOKENS = 4, 2, 8
WIDTHS = [(192, 80), (80, 192)]  # neither is a multiple of a block of 128
KERNELS = {"fp8_block": "grouped_fp8", "fp8_block_ue8m0": "grouped_fp8", "fp8_row": "grouped_fp8"} | {
    "int8_row": "grouped_int8"
}
ALL_KERNELS = KERNELS | dict.fromkeys(NARROW_SCHEMES, "weight_only")
SCHEMES = [*ALL_KERNELS, None]  # None: rows rounded on the wire alone
# Worst relative error of a row, of 80 or 192 columns, against nothing quantized but the rows.
OWN = {"int4": 0.45, "mxfp4": 0.45, "nvfp4": 0.4, "mxfp6": 0.2}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if INTERPRET == (request.param == "cuda"):
        pytest.skip("Triton was imported " + ("with TRITON_INTERPRET=1" if INTERPRET else "without its interpreter"))
    return str(request.param)


def make(scheme: str | None, experts: str, widths: tuple[int, int], seed: int, device: str) -> MoELayer:
    """Experts over three decades, one of whose projections is zeros, under a fixed routing."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(TOKENS, E, generator=g).argsort(1)[:, :K].int().to(device)
    p = (torch.rand(TOKENS, K, generator=g) + 0.5).to(device)
    torch.manual_seed(seed)
    layer = MoELayer(
        MoEConfig(*widths, E, K, experts="auto" if scheme else experts),
        device=device,
        dtype=torch.bfloat16,
        router=lambda x: (ids[: len(x)], p[: len(x)]),
    )
    with torch.no_grad():
        magnitude = torch.tensor([1.0, 1e3, 1e-3, 30.0], device=device)[:, None, None]
        layer.gate_up_proj.mul_(magnitude)
        layer.down_proj.div_(magnitude)
        layer.down_proj[2, : widths[0] // 2] = 0  # whole blocks of zeros
    config = QuantConfig(scheme, experts=experts) if scheme else QuantConfig(activations="fp8_block")
    return quantize_(layer, config)  # type: ignore[return-value]


def kinds(scheme: str | None) -> list[str]:
    return ["reference", "grouped" if scheme is None else ALL_KERNELS[scheme]]


CASES = [(scheme, experts) for scheme in SCHEMES for experts in kinds(scheme)]


def rows(widths: tuple[int, int], seed: int, device: str) -> Tensor:
    """Magnitudes over six decades."""
    g = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(TOKENS, widths[0], generator=g) * 10.0 ** torch.linspace(-3, 3, TOKENS)[:, None]
    return x.bfloat16().to(device)


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize(("scheme", "experts"), CASES)
def test_a_token_s_result_depends_on_no_other_token(scheme, experts, widths, device, seed) -> None:
    layer = make(scheme, experts, widths, seed, device)
    x = rows(widths, seed, device)
    with torch.no_grad():
        want = layer(x)
        assert want.isfinite().all() and want.any(1).all()
        for spoil in (0.0, 1e30, math.nan, math.inf, -math.inf, 1e-40):
            others = x.clone()
            others[1::2] = spoil
            assert torch.equal(layer(others)[::2], want[::2]), spoil


@pytest.mark.parametrize(("scheme", "experts"), CASES)
def test_each_row_keeps_its_precision_over_six_decades(scheme, experts, device, seed) -> None:
    layer = make(scheme, experts, WIDTHS[0], seed, device)
    wide = make(None, "reference", WIDTHS[0], seed, device)
    quantize_(wide, QuantConfig())
    x = rows(WIDTHS[0], seed, device)
    with torch.no_grad():
        got, want = layer(x).double(), wide(x).double()
    most = next((most for name, most in OWN.items() if scheme and scheme.startswith(name)), 0.12)
    errors = (got - want).norm(dim=1) / want.norm(dim=1)
    assert errors.mean() < most and errors.max() < 1.5 * most  # a row whose sums cancel is further off than others


@pytest.mark.parametrize(("scheme", "experts"), CASES)
def test_zeros_give_zeros_and_what_is_not_finite_stays_with_its_token(scheme, experts, device, seed) -> None:
    layer = make(scheme, experts, WIDTHS[0], seed, device)
    x = rows(WIDTHS[0], seed, device)
    x[0], x[1], x[2, 5], x[3, 190] = 0, 1e-40, math.nan, math.inf
    with torch.no_grad():
        y = layer(x)
    assert not y[0].any(), "zeros"
    assert y[1].isfinite().all() and y[1].abs().max() < 1e-30, "subnormals"
    assert not y[2].isfinite().any() and not y[3].isfinite().all(), "NaN and inf are not hidden"
    assert y[4:].isfinite().all()


@pytest.mark.parametrize("scheme", list(KERNELS))
def test_scales_by_column_are_read_right(scheme, device, seed) -> None:
    layer = make(scheme, KERNELS[scheme], WIDTHS[0], seed, device)
    kernel = layer.kernel(torch.device(device), torch.bfloat16)
    x = rows(WIDTHS[0], seed, device)
    ids, p = layer.router(x)  # type: ignore[operator]
    q = quantize_rows(x, FORMATS[scheme].rows or "")
    by_column = QuantizedRows(q.values, q.scales.t().contiguous().t(), q.scheme)
    with torch.no_grad():
        want, got = (kernel(r, ids, p, layer.expert_weights()).routed for r in (q, by_column))
    assert torch.equal(got, want) and torch.equal(want, layer(x).detach())
