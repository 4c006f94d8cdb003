"""MXFP6 from end to end: what a layer holds and reads, the sizes that packed weights show, and who says to take it."""

from __future__ import annotations

import pytest
import torch

from epmoe import MoEConfig, MoELayer, QuantConfig, quantize_
from epmoe.capabilities import experts_table
from epmoe.experts import moe_problem_size
from epmoe.ops._triton import INTERPRET
from epmoe.quant import NarrowWeights, dequantize_narrow, narrow_bytes

SCHEMES = ("mxfp6_e2m3", "mxfp6_e3m2")
L, H, I, K, T = 4, 128, 96, 2, 7  # noqa: E741


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_sizes_are_those_of_the_problem_with_four_weights_in_three_bytes(gated: bool, transposed: bool) -> None:
    w1 = torch.empty(L, (2 if gated else 1) * I, H // 4 * 3, dtype=torch.uint8)
    w2 = torch.empty(L, H, I // 4 * 3, dtype=torch.uint8)
    if transposed:
        w1, w2 = w1.mT.contiguous(), w2.mT.contiguous()
    x, ids, flags = torch.empty(T, H), torch.zeros(T, K), {"gated": gated, "transposed": transposed}
    assert moe_problem_size(x, w1, w2, ids, packed_fp6=True, **flags) == (L, T, H, I, K)
    batched = moe_problem_size(torch.empty(L, 16, H), w1, w2, ids, packed_fp6=True, **flags)
    assert batched == (L, 16, H, I, K)
    for wrong in ({}, {"packed_int4": True}):
        with pytest.raises(ValueError, match="w[12] has shape"):
            moe_problem_size(x, w1, w2, ids, **flags, **wrong)


def test_packings_that_can_t_be_are_named() -> None:
    w1, w2 = torch.empty(L, 2 * I, 96, dtype=torch.uint8), torch.empty(L, H, 72, dtype=torch.uint8)
    x, ids = torch.empty(T, H), torch.zeros(T, K)
    for message, args, flags in (
        ("w1 is torch.int8: packed_fp6=True", (x, w1.char(), w2, ids), {}),
        ("packed_int4=True with packed_fp6=True", (x, w1, w2, ids), {"packed_int4": True}),
        ("x has rows of 126: must be a multiple of 4", (x[:, :126], w1, w2, ids), {}),
        ("w2 has shape .*must have threes of bytes", (x, w1, w2[:, :, :71], ids), {}),
    ):
        with pytest.raises(ValueError, match=message):
            moe_problem_size(*args, packed_fp6=True, **flags)


@pytest.mark.parametrize("experts", ["reference", "weight_only"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_layer_holds_three_quarters_of_a_byte_for_each_weight(scheme, experts, seed, monkeypatch) -> None:
    if INTERPRET:
        monkeypatch.setenv("EPMOE_CPU_KERNELS", "triton" if experts == "weight_only" else "torch")
    torch.manual_seed(seed)
    layer = MoELayer(MoEConfig(256, 128, L, K), dtype=torch.bfloat16)
    wide = {name: getattr(layer, name).detach().double() for name in ("gate_up_proj", "down_proj")}
    quantize_(layer, QuantConfig(scheme, experts=experts))
    assert sum(p.nbytes for p in layer.quantized_parameters().values()) == sum(
        narrow_bytes(tuple(w.shape), scheme) for w in wide.values()
    )
    assert layer.gate_up_proj.nbytes == wide["gate_up_proj"].numel() * 3 // 4
    x = torch.randn(5, 256).bfloat16()
    with torch.no_grad():
        y = layer(x).double()
        held = {}
        for name, w in wide.items():
            q = NarrowWeights(getattr(layer, name), getattr(layer, f"{name}_scale_inv"), scheme, w.shape[2])
            held[name] = dequantize_narrow(q, torch.float64)
            assert (held[name] - w).norm() < (0.035 if scheme == "mxfp6_e2m3" else 0.065) * w.norm()
        routing = layer.router(x)  # type: ignore[operator]
        want = torch.zeros_like(y)
        for t in range(5):
            for e, p in zip(routing.topk_ids[t].tolist(), routing.topk_weights[t].tolist(), strict=True):
                g, u = (held["gate_up_proj"][e] @ x[t].double()).chunk(2)
                want[t] += p * (held["down_proj"][e] @ (torch.nn.functional.silu(g) * u))
    assert ((y - want).norm(dim=1) < 1e-2 * want.norm(dim=1)).all()


def test_the_table_of_capabilities_names_them() -> None:
    schemes = {row["experts"]: set(row["weight_schemes"]) for row in experts_table()}
    able = {name for name, takes in schemes.items() if set(SCHEMES) <= takes}
    assert able == {"reference", "weight_only"}
