"""Fixed scales of rows that differ from expert to expert: rows travel wide, and each expert quantizes its own by its
own number before GEMM1, in either layout and whichever way they moved."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from epmoe import EPGroup, MoEConfig, MoELayer, QuantConfig, quantize_
from epmoe.comm.workspace import Workspace
from epmoe.config import Activation
from epmoe.dispatch import make_dispatcher
from epmoe.experts import select_experts
from epmoe.experts.spec import ExpertsSpec
from epmoe.integrations.checkpoint import load_checkpoint, save_checkpoint
from epmoe.kernel import MoEKernel
from epmoe.ops._triton import INTERPRET
from epmoe.placement import ExpertPlacement
from epmoe.quant import dequantize_weights
from epmoe.testing import poisoned_empty, run_ranks
from tests.quant.test_static_scales import (
    KINDS,
    MOVED,
    TOKENS,
    E,
    H,
    I,
    K,
    problem,
    rounded_by,
    row_errors,
    rows_of,
)

SPREAD = torch.tensor([1.0, 0.4, 3.0, 0.25])  # of rows whose largest is about 3: two experts see them saturate


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if INTERPRET == (request.param == "cuda"):
        pytest.skip("Triton was imported " + ("with TRITON_INTERPRET=1" if INTERPRET else "without its interpreter"))
    return str(request.param)


def largest(scheme: str) -> float:
    return 448.0 if scheme == "fp8_row" else 127.0


def expected(
    c: dict[str, Any], scheme: str, rows: Tensor, on_input: bool, through: torch.dtype = torch.bfloat16
) -> Tensor:
    """Float64 of the rounded weights, of rows rounded by their expert's `rows`, of activations by `c["fixed"]`, of the
    dtype `through` before."""
    w1, w2 = (dequantize_weights(q, torch.float64) for q in c["q"])
    out = torch.zeros(TOKENS, H, dtype=torch.float64)
    for t in range(TOKENS):
        for e, p in zip(c["ids"][t].tolist(), c["p"][t].tolist(), strict=True):
            if e < 0:
                continue
            x = rounded_by(c["x"][t], rows[e].item(), scheme) * (p if on_input else 1)
            g, u = (w1[e] @ x).chunk(2)
            h = rounded_by((torch.nn.functional.silu(g) * u).to(through), c["fixed"][e].item(), scheme)
            out[t] += (1 if on_input else p) * (w2[e] @ h)
    return out


def computed(c: dict[str, Any], scheme: str, experts: str, device: str, rows: Tensor, **how: Any) -> Tensor:
    layout, planned, on_input = how.get("layout", "standard"), how.get("planned", False), how.get("on_input", False)
    dtype = how.get("dtype", torch.bfloat16)
    spec = ExpertsSpec(
        Activation(), H, I, dtype, torch.device(device), scheme=scheme, weight_on_input=on_input, scales_by_expert=True
    )
    kernel = MoEKernel(
        make_dispatcher("local", None, ExpertPlacement.contiguous(E, 1), device),
        select_experts(spec, experts, layout).experts,
        layout=layout,
        workspace=Workspace(torch.device(device), "scratch") if planned else None,
    )
    weights = replace(c["weights"], gate_up_input_scale=rows.to(device))
    with torch.no_grad(), poisoned_empty():
        x, ids, p = (c[name].to(device) for name in ("x", "ids", "p"))
        return kernel(x.to(dtype), ids, p, weights).routed


@pytest.mark.parametrize(("layout", "planned", "on_input"), [
    ("standard", False, False), ("standard", True, True), ("batched", False, True), ("batched", True, False),
], ids=["standard", "standard, planned, weight before", "batched, weight before", "batched, planned"])  # fmt: skip
@pytest.mark.parametrize("scheme", KINDS)
def test_each_expert_multiplies_what_its_own_scale_leaves(
    scheme, layout, planned, on_input, device, seed, monkeypatch
) -> None:
    c, rows = problem(scheme, seed, device), 3.0371 * SPREAD / largest(scheme)
    if device == "cpu":
        monkeypatch.setenv("EPMOE_CPU_KERNELS", "triton")
    y = computed(c, scheme, KINDS[scheme], device, rows, layout=layout, planned=planned, on_input=on_input)
    want = expected(c, scheme, rows, on_input)
    assert row_errors(y, want).max() < 0.02
    for other in (rows.roll(1), rows.max().expand(E)):
        assert row_errors(y, expected(c, scheme, other, on_input)).max() > 0.02, "whose scale must show"


@pytest.mark.parametrize("on_input", [False, True], ids=["weight behind", "weight before"])
@pytest.mark.parametrize("layout", ["standard", "batched"])
@pytest.mark.parametrize("scheme", KINDS)
def test_reference_rounds_by_each_experts_scale_too(scheme, layout, on_input, seed) -> None:
    c, rows = problem(scheme, seed, "cpu"), 3.0371 * SPREAD / largest(scheme)
    y = computed(c, scheme, "reference", "cpu", rows, layout=layout, on_input=on_input, dtype=torch.float32)
    assert row_errors(y, expected(c, scheme, rows, on_input, torch.float32)).max() < 0.02


def test_weights_and_spec_must_agree(seed) -> None:
    c = problem("fp8_row", seed, "cpu")
    for given, message in (
        (None, "gate_up_input_scale is None with scales_by_expert=True in the spec"),
        (torch.ones(2), r"gate_up_input_scale is torch.float32 \(2,\) on cpu: must be torch.float32 \(4,\)"),
    ):
        weights = replace(c["weights"], gate_up_input_scale=given)
        spec = ExpertsSpec(Activation(), H, I, torch.bfloat16, torch.device("cpu"), scheme="fp8_row",
                           scales_by_expert=True)  # fmt: skip
        dispatcher = make_dispatcher("local", None, ExpertPlacement.contiguous(E, 1), "cpu")
        with pytest.raises(ValueError, match=message):
            MoEKernel(dispatcher, select_experts(spec).experts)(c["x"], c["ids"], c["p"], weights)


def quant(scheme: str, **fields: Any) -> QuantConfig:
    return QuantConfig(scheme, activations=None, scales="static", down_scales="static", **fields)


def fixed(scheme: str, seed: int, **options: Any) -> MoELayer:
    """Experts three decades apart, with scales of both kinds fixed where rows and activations saturate."""
    ep = options.pop("ep", None)
    torch.manual_seed(seed)
    config = MoEConfig(H, I, E, K, quant=quant(scheme), placement="strided", max_tokens_per_rank=TOKENS, **options)
    layer = MoELayer(config, ep, dtype=torch.bfloat16)
    magnitude = torch.logspace(-1, 2, E)
    layer.gate_up_proj_scale_inv.mul_(magnitude[list(layer.local_experts)][:, None])  # type: ignore[union-attr]
    layer.set_input_scale(3.0371 * SPREAD / largest(scheme))
    layer.set_down_input_scales(magnitude.square() * 0.7 / largest(scheme))
    return layer


def moved(rank: int, ranks: int, seed: int, directory: Path) -> dict[tuple[str, str], Tensor]:
    ep, results = EPGroup(device="cpu", timeout=60, nodes=[0, 1]), {}
    with torch.no_grad(), poisoned_empty():
        for scheme in KINDS:
            for name in MOVED:
                layer = fixed(scheme, seed, ep=ep, dispatcher=name)
                assert layer.gate_up_proj_input_scale.shape == (len(layer.local_experts),)  # type: ignore[union-attr]
                results[scheme, name] = layer(rows_of(rank, seed))
            save_checkpoint(directory / scheme, layer, ep)
    return results


def test_rows_travel_wide_and_give_the_same_through_every_dispatcher_and_what_is_saved_comes_back(
    seed, tmp_path: Path
) -> None:
    results = run_ranks(moved, 2, args=(seed, tmp_path), timeout=120)
    for scheme in KINDS:
        alone, read = fixed(scheme, seed), fixed(scheme, seed + 1)
        assert alone.config.row_scheme is None
        load_checkpoint(tmp_path / scheme, read, None)
        assert torch.equal(read.gate_up_proj_input_scale, alone.gate_up_proj_input_scale)  # type: ignore[arg-type]
        sent = QuantConfig(scheme, scales="static", down_scales="static")
        with torch.no_grad():
            want = [alone(rows_of(rank, seed)).double() for rank in range(2)]
            by_largest = quantize_(alone, sent)
            assert isinstance(by_largest, MoELayer) and by_largest.gate_up_proj_input_scale.shape == (1,)  # type: ignore[union-attr]
            by_largest.set_input_scale(3.0371 * SPREAD / largest(scheme))
            by_largest.set_down_input_scales(torch.logspace(-1, 2, E).square() * 0.7 / largest(scheme))
            assert row_errors(by_largest(rows_of(0, seed)), want[0]).max() > 0.02, "whose scale must show"
        for name in MOVED:
            for found, expected_rows in zip(results, want, strict=True):
                assert row_errors(found[scheme, name], expected_rows).max() < 0.01, (scheme, name)


def test_scales_are_set_and_loaded_as_the_experts_they_are_of(seed) -> None:
    torch.manual_seed(seed)
    layer = MoELayer(MoEConfig(H, I, E, K, quant=quant("fp8_row")), dtype=torch.bfloat16)
    x = torch.randn(TOKENS, H).bfloat16()
    layer.set_down_input_scales(0.5)
    with torch.no_grad(), pytest.raises(ValueError, match="gate_up_proj_input_scale is not set: call set_input_scale"):
        layer(x)
    layer.load_experts({"gate_up_proj_input_scale": torch.tensor([2.0, 3.0])}, expert_ids=[2, 0])
    with torch.no_grad(), pytest.raises(ValueError, match="gate_up_proj_input_scale is not set"):
        layer(x)
    layer.load_experts({"gate_up_proj_input_scale": torch.tensor([1.0, 4.0])}, expert_ids=[1, 3])
    assert layer.gate_up_proj_input_scale.tolist() == [3.0, 1.0, 2.0, 4.0]  # type: ignore[union-attr]
    layer.set_input_scale(torch.tensor([[1.0], [2.0], [3.0], [4.0]]))  # as `torch.stack` of `rows_scale` has them
    assert layer.gate_up_proj_input_scale.tolist() == [1.0, 2.0, 3.0, 4.0]  # type: ignore[union-attr]
    with torch.no_grad():
        assert layer(x).isfinite().all()
    for wrong, message in ((torch.ones(3), "scale has shape (3,): must be one number, or (4,)"), (-1.0, "> 0")):
        with pytest.raises(ValueError, match=re.escape(message)):
            layer.set_input_scale(wrong)


@pytest.mark.parametrize("scheme", ["fp8_block", "int4_g32", None])
def test_only_weights_that_meet_rows_of_one_scale_can_have_them(scheme) -> None:
    with pytest.raises(ValueError, match=re.escape(f"QuantConfig.scales='static' with weights={scheme!r}")):
        QuantConfig(scheme, activations=None, scales="static")
