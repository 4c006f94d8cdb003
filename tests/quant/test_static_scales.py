"""Fixed scales of the activation between the GEMMs: what experts compute with them in either layout, what a layer
holds, and what released checkpoints with `input_scale` become."""

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
from epmoe.dispatch import DISPATCHERS, make_dispatcher
from epmoe.experts import ExpertWeights, select_experts
from epmoe.experts.spec import ExpertsSpec
from epmoe.integrations.checkpoint import load_checkpoint, save_checkpoint
from epmoe.integrations.dcp import load_distributed, save_distributed
from epmoe.kernel import MoEKernel
from epmoe.ops._triton import INTERPRET
from epmoe.placement import ExpertPlacement
from epmoe.quant import dequantize_rows, dequantize_weights, quantize_rows, quantize_weights
from epmoe.quant.reference import round_to_e4m3, round_to_int8
from epmoe.quant.released import expert_parts, rows_scale
from epmoe.testing import poisoned_empty, run_ranks

H, I, E, K, TOKENS = 144, 40, 4, 2, 6  # noqa: E741
KINDS = {"fp8_row": "grouped_fp8", "int8_row": "grouped_int8"}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if INTERPRET == (request.param == "cuda"):
        pytest.skip("Triton was imported " + ("with TRITON_INTERPRET=1" if INTERPRET else "without its interpreter"))
    return str(request.param)


def rounded_by(h: Tensor, scale: float, scheme: str) -> Tensor:
    """What the fixed scale makes of h, in float64, by look-up."""
    most, nearest = (448.0, round_to_e4m3) if scheme == "fp8_row" else (127.0, round_to_int8)
    return nearest((h.double() / scale).clamp(-most, most)) * scale


def problem(scheme: str, seed: int, device: str) -> dict[str, Any]:
    """Experts over three decades; of one of them activations saturate."""
    g = torch.Generator().manual_seed(seed)
    magnitude = torch.tensor([1.0, 1e3, 1e-3, 30.0])[:, None, None]
    w1 = torch.randn(E, 2 * I, H, generator=g) * magnitude.sqrt() / H**0.5
    w2 = torch.randn(E, H, I, generator=g) / magnitude / I**0.5
    x = torch.randn(TOKENS, H, generator=g).bfloat16()
    ids = torch.rand(TOKENS, E, generator=g).argsort(1)[:, :K].int()
    ids[0], ids[3, 1] = torch.tensor([0, 2]), -1  # somebody meets the expert that saturates
    p = torch.rand(TOKENS, K, generator=g) + 0.5
    q1, q2 = quantize_weights(w1, scheme), quantize_weights(w2, scheme)
    most = 448.0 if scheme == "fp8_row" else 127.0
    # about the largest of these activations; a round number would put many of them right between two of e4m3
    fixed = 3.0371 * magnitude[:, 0, 0] / most
    fixed[0] /= 8
    weights = ExpertWeights(q1.values, q2.values, gate_up_scale=q1.scales, down_scale=q2.scales, down_input_scale=fixed)
    on = {n: None if t is None else t.to(device) for n, t in vars(weights).items() if n not in ("lora", "sums")}
    return {"x": x, "ids": ids, "p": p, "q": (q1, q2), "fixed": fixed, "weights": ExpertWeights(**on)}


def expected(c: dict[str, Any], scheme: str, by: Tensor | None, through: torch.dtype = torch.bfloat16) -> Tensor:
    """Float64 of the rounded rows and weights, with activations rounded by `by` (None: not at all), of the dtype
    `through` before."""
    x = dequantize_rows(quantize_rows(c["x"], scheme), torch.float64)
    w1, w2 = (dequantize_weights(q, torch.float64) for q in c["q"])
    out = torch.zeros(TOKENS, H, dtype=torch.float64)
    for t in range(TOKENS):
        for e, p in zip(c["ids"][t].tolist(), c["p"][t].tolist(), strict=True):
            if e < 0:
                continue
            g, u = (w1[e] @ x[t]).chunk(2)
            h = torch.nn.functional.silu(g) * u
            if by is not None:
                h = rounded_by(h.to(through), by[e].item(), scheme)
            out[t] += p * (w2[e] @ h)
    return out


def row_errors(got: Tensor, want: Tensor) -> Tensor:
    return (got.cpu().double() - want).norm(dim=1) / want.norm(dim=1)


@pytest.mark.parametrize("workspace", [False, True], ids=["allocates", "planned"])
@pytest.mark.parametrize("layout", ["standard", "batched"])
@pytest.mark.parametrize("scheme", KINDS)
def test_kernels_multiply_what_the_fixed_scale_leaves(scheme, layout, workspace, device, seed, monkeypatch) -> None:
    c = problem(scheme, seed, device)
    if device == "cpu":
        monkeypatch.setenv("EPMOE_CPU_KERNELS", "triton")
    spec = ExpertsSpec(Activation(), H, I, torch.bfloat16, torch.device(device), scheme=scheme)
    dispatcher = make_dispatcher("local", None, ExpertPlacement.contiguous(E, 1), device)
    experts = select_experts(spec, KINDS[scheme], layout).experts
    scratch = Workspace(torch.device(device), "scratch") if workspace else None
    kernel = MoEKernel(dispatcher, experts, layout=layout, dispatch_scheme=scheme, workspace=scratch)
    with torch.no_grad(), poisoned_empty():
        y = kernel(*(c[n].to(device) for n in ("x", "ids", "p")), c["weights"]).routed
    # an activation that falls on the other side of a rounding moves by a step: 2**-3 of one number among 80
    assert row_errors(y, expected(c, scheme, c["fixed"])).max() < 0.02
    assert row_errors(y, expected(c, scheme, None)).max() > 0.02, "what saturates must show"


@pytest.mark.parametrize("scheme", KINDS)
def test_reference_saturates_too_and_its_gradient_is_not_cut(scheme, seed) -> None:
    c = problem(scheme, seed, "cpu")
    spec = ExpertsSpec(Activation(), H, I, torch.float32, torch.device("cpu"), scheme=scheme)
    dispatcher = make_dispatcher("local", None, ExpertPlacement.contiguous(E, 1), "cpu")
    kernel = MoEKernel(dispatcher, select_experts(spec, "reference").experts, dispatch_scheme=scheme)
    x = c["x"].float().requires_grad_()
    y = kernel(x, c["ids"], c["p"], c["weights"]).routed
    assert row_errors(y.detach(), expected(c, scheme, c["fixed"], torch.float32)).max() < 0.02
    y.float().sum().backward()
    assert x.grad is not None and (x.grad != 0).any(1).all()


def test_a_scale_that_does_not_fit_is_named(seed) -> None:
    c = problem("fp8_row", seed, "cpu")
    dispatcher = make_dispatcher("local", None, ExpertPlacement.contiguous(E, 1), "cpu")
    spec = ExpertsSpec(Activation(), H, I, torch.bfloat16, torch.device("cpu"), scheme="fp8_row")
    kernel = MoEKernel(dispatcher, select_experts(spec).experts)
    with pytest.raises(ValueError, match=r"down_input_scale is torch.float32 \(2,\)"):
        kernel(c["x"], c["ids"], c["p"], replace(c["weights"], down_input_scale=c["fixed"][:2]))
    wide = MoEKernel(dispatcher, select_experts(replace(spec, scheme=None)).experts)
    plain = ExpertWeights(*(dequantize_weights(q, torch.bfloat16) for q in c["q"]), down_input_scale=c["fixed"])
    with pytest.raises(ValueError, match="down_input_scale is given with scheme=None"):
        wide(c["x"], c["ids"], c["p"], plain)


def make(seed: int, quant: QuantConfig | None = None, **options: Any) -> MoELayer:
    torch.manual_seed(seed)
    return MoELayer(MoEConfig(H, I, E, K, quant=quant), dtype=torch.bfloat16, **options)


@pytest.mark.parametrize("scheme", KINDS)
def test_a_layer_holds_saves_and_computes_with_its_experts_scales(scheme, tmp_path: Path, seed) -> None:
    config = QuantConfig(scheme, down_scales="static", experts=KINDS[scheme])
    layer = quantize_(make(seed), config)
    assert isinstance(layer, MoELayer)
    x = torch.randn(TOKENS, H).bfloat16()
    with torch.no_grad():
        with pytest.raises(ValueError, match="down_proj_input_scale is not set: call set_down_input_scales"):
            layer(x)
        scales = torch.rand(E) * 0.01 + 1e-3
        layer.set_down_input_scales(scales)
        y = layer(x)
    assert torch.equal(layer.expert_weights().down_input_scale, scales)  # type: ignore[arg-type]
    other = make(seed + 1, config, device="meta").to_empty(device="cpu")
    other.load_state_dict(layer.state_dict())
    save_checkpoint(tmp_path, layer, None)
    read = make(seed + 2, config)
    load_checkpoint(tmp_path, read, None)
    with torch.no_grad():
        assert torch.equal(other(x), y) and torch.equal(read(x), y)
    assert layer.half().down_proj_input_scale.dtype == torch.float32  # type: ignore[union-attr]
    for wrong, message in ((torch.ones(3), "scales has shape (3,)"), (-1.0, "must be finite and > 0")):
        with pytest.raises(ValueError, match=re.escape(message)):
            layer.set_down_input_scales(wrong)
    quantize_(layer, QuantConfig(scheme))
    assert layer.down_proj_input_scale is None
    with pytest.raises(ValueError, match=r"set_down_input_scales needs QuantConfig\(down_scales='static'\)"):
        layer.set_down_input_scales(1.0)


BOTH = QuantConfig("fp8_row", scales="static", down_scales="static")


def by_setting(layer: MoELayer, source: MoELayer, directory: Path) -> MoELayer:
    layer.set_input_scale(0.02)
    layer.set_down_input_scales(0.5)
    return layer


def by_state_dict(layer: MoELayer, source: MoELayer, directory: Path) -> MoELayer:
    layer.load_state_dict(source.state_dict())
    return layer


def by_assignment(layer: MoELayer, source: MoELayer, directory: Path) -> MoELayer:
    layer.load_state_dict(source.state_dict(), assign=True)
    return layer


def by_checkpoint(layer: MoELayer, source: MoELayer, directory: Path) -> MoELayer:
    save_checkpoint(directory, source, None)
    load_checkpoint(directory, layer, None)
    return layer


def by_distributed_checkpoint(layer: MoELayer, source: MoELayer, directory: Path) -> MoELayer:
    save_distributed(directory, source, None)
    load_distributed(directory, layer, None)
    return layer


def by_hand(layer: MoELayer, source: MoELayer, directory: Path) -> MoELayer:
    with torch.no_grad():
        layer.gate_up_proj_input_scale.fill_(0.02)  # type: ignore[union-attr]
        layer.down_proj_input_scale.fill_(0.5)  # type: ignore[union-attr]
    return layer


WAYS = (by_setting, by_state_dict, by_assignment, by_checkpoint, by_distributed_checkpoint, by_hand)


@pytest.mark.parametrize("meta", [False, True], ids=["made here", "made on meta"])
@pytest.mark.parametrize("way", WAYS)
def test_a_forward_before_its_fixed_scales_are_there_is_refused(way, meta, tmp_path: Path, seed) -> None:
    source = by_setting(make(seed, BOTH), make(seed, BOTH), tmp_path)
    x = torch.randn(TOKENS, H).bfloat16()
    layer = make(seed + 1, BOTH, **({"device": "meta"} if meta else {}))
    if meta and way is not by_assignment:
        layer.to_empty(device="cpu").reset_parameters()
    if not (meta and way is by_assignment):
        with torch.no_grad(), pytest.raises(ValueError, match="gate_up_proj_input_scale is not set: call set_input_s"):
            layer(x)
    layer = way(layer, source, tmp_path)
    with torch.no_grad():
        assert layer(x).isfinite().all()
        layer.half().bfloat16()
        assert layer(x).isfinite().all(), "conversions leave them"
    quantize_(layer, QuantConfig("fp8_row"))
    quantize_(layer, BOTH)  # made anew
    with torch.no_grad(), pytest.raises(ValueError, match="input_scale is not set"):
        layer(x)


def test_fixed_scales_of_some_experts_or_of_a_layer_that_had_none_are_not_enough(seed) -> None:
    config = QuantConfig("fp8_row", down_scales="static")
    layer, x = make(seed, config), torch.randn(TOKENS, H).bfloat16()
    other = make(seed, config, device="meta").to_empty(device="cpu")
    assert other.down_proj_input_scale.isnan().all(), "memory that nobody wrote is no scale"  # type: ignore[union-attr]
    other.load_state_dict(layer.state_dict())
    layer.load_experts({"down_proj_input_scale": torch.ones(2)}, expert_ids=[0, 2])
    for unset in (layer, other):
        with torch.no_grad(), pytest.raises(ValueError, match="down_proj_input_scale is not set"):
            unset(x)
    layer.load_experts({"down_proj_input_scale": torch.ones(2)}, expert_ids=[3, 1])
    with torch.no_grad():
        assert layer(x).isfinite().all()


def test_a_compiled_layer_with_fixed_scales_has_no_break(seed) -> None:
    layer, x = by_setting(make(seed, BOTH), make(seed, BOTH), Path()), torch.randn(TOKENS, H).bfloat16()
    with torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), layer(x))


@pytest.mark.gpu
def test_a_layer_with_fixed_scales_is_captured_and_told_of_unset_ones_without_a_wait(seed) -> None:
    layer, x = make(seed, BOTH, device="cuda"), torch.randn(TOKENS, H, device="cuda").bfloat16()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad(), pytest.raises(ValueError, match="input_scale is not set"):
            layer(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    by_setting(layer, layer, Path())
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        want = layer(x)
        with torch.cuda.graph(graph):
            y = layer(x)
        graph.replay()
    assert torch.equal(y, want)


def share(rank: int, ranks: int, directory: Path) -> tuple[list[int], Tensor, Tensor]:
    ep = EPGroup(timeout=30)
    layer = make(1, QuantConfig("fp8_row", down_scales="static"), ep=ep)
    load_checkpoint(directory, layer, ep)
    loaded = layer.down_proj_input_scale.detach().clone()  # type: ignore[union-attr]
    layer.set_down_input_scales(torch.arange(1.0, E + 1))
    return list(layer.local_experts), loaded, layer.down_proj_input_scale.detach()  # type: ignore[union-attr]


def test_each_rank_loads_and_sets_those_of_its_own_experts(tmp_path: Path, seed) -> None:
    layer = make(seed, QuantConfig("fp8_row", down_scales="static"))
    layer.set_down_input_scales(torch.tensor([0.5, 1.0, 2.0, 4.0]))
    save_checkpoint(tmp_path, layer, None)
    for ids, loaded, set_ in run_ranks(share, 2, args=(tmp_path,)):
        assert loaded.tolist() == [0.5 * 2**e for e in ids]
        assert set_.tolist() == [e + 1.0 for e in ids]


MOVED = [name for name in DISPATCHERS if name != "local"]


def fixed(scheme: str, seed: int, **options: Any) -> MoELayer:
    """Experts three decades apart, with scales of both kinds fixed where the largest rows and activations saturate."""
    quant = QuantConfig(scheme, scales="static", down_scales="static")
    device, ep = options.pop("device", None), options.pop("ep", None)
    torch.manual_seed(seed)
    config = MoEConfig(H, I, E, K, quant=quant, placement="strided", max_tokens_per_rank=TOKENS, **options)
    layer = MoELayer(config, ep, dtype=torch.bfloat16, device=device)
    most = 448.0 if scheme == "fp8_row" else 127.0
    magnitude = torch.logspace(-1, 2, E)
    mine = magnitude[list(layer.local_experts)][:, None].to(layer.gate_up_proj.device)
    layer.gate_up_proj_scale_inv.mul_(mine)  # type: ignore[union-attr]
    layer.set_input_scale(1.5 / most)
    layer.set_down_input_scales(magnitude.square() * 0.7 / most)
    return layer


def rows_of(rank: int, seed: int) -> Tensor:
    return torch.randn(TOKENS - 2 * rank, H, generator=torch.Generator().manual_seed(seed + rank)).bfloat16()


def moved(rank: int, ranks: int, seed: int, device: str, names: list[str]) -> dict[tuple[str, str], Tensor]:
    ep = EPGroup(device=device, timeout=60, nodes=[0, 1] if "hierarchical" in names else None)
    with torch.no_grad(), poisoned_empty():
        return {
            (scheme, name): fixed(scheme, seed, ep=ep, dispatcher=name)(rows_of(rank, seed).to(device)).cpu()
            for scheme in KINDS
            for name in names
        }


@pytest.mark.gpu2
def test_rows_of_fixed_scales_are_stored_to_peers_as_they_are_sent(seed) -> None:
    if INTERPRET:
        pytest.skip("Triton was imported with TRITON_INTERPRET=1")
    for found in run_ranks(moved, 2, args=(seed, "cuda", ["all_to_all", "symmetric"]), backend="nccl", timeout=120):
        for scheme in KINDS:
            assert row_errors(found[scheme, "symmetric"], found[scheme, "all_to_all"].double()).max() < 0.01, scheme


def test_rows_of_fixed_scales_give_the_same_through_every_dispatcher(seed) -> None:
    results = run_ranks(moved, 2, args=(seed, "cpu", MOVED), timeout=120)
    for scheme in KINDS:
        alone = fixed(scheme, seed)
        dynamic = QuantConfig(scheme)
        with torch.no_grad():
            expected = [alone(rows_of(rank, seed)).double() for rank in range(2)]
            free = quantize_(alone, dynamic)(rows_of(0, seed)).double()
        assert row_errors(free, expected[0]).min() > 0.02, "what saturates must show"
        for name in MOVED:
            for found, want in zip(results, expected, strict=True):
                assert row_errors(found[scheme, name], want).max() < 0.01, (scheme, name)


@pytest.mark.parametrize("per_channel", [False, True], ids=["tensor", "channel"])
@pytest.mark.parametrize("scheme", KINDS)
def test_released_experts_load_under_their_own_names_with_static_scales(scheme, per_channel, seed) -> None:
    g = torch.Generator().manual_seed(seed)
    shapes = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
    disk: dict[str, Tensor] = {}
    for e in range(E):
        for name, shape in shapes.items():
            wide = torch.randn(shape, generator=g) * 10.0 ** (e - 1)
            most, dtype = (448.0, torch.float8_e4m3fn) if scheme == "fp8_row" else (127.0, torch.int8)
            scale = (wide.abs().amax(1, keepdim=True) if per_channel else wide.abs().max()) / most
            scaled = (wide / scale).clamp(-most, most)
            disk[f"experts.{e}.{name}.weight"] = (scaled if scheme == "fp8_row" else scaled.round()).to(dtype)
            disk[f"experts.{e}.{name}.weight_scale"] = scale
            disk[f"experts.{e}.{name}.input_scale"] = torch.rand((), generator=g) + 0.01
    config = QuantConfig(scheme, scales="static", down_scales="static")
    layer = make(seed, config)
    for e in layer.local_experts:
        assert layer.load_experts(expert_parts(disk, scheme, f"experts.{e}."), expert_ids=[e]) == [e]
    layer.set_input_scale(torch.stack([rows_scale(disk, f"experts.{e}.") for e in range(E)]))
    held = layer.expert_weights()
    for e in range(E):
        for name, rows, values, scales in (
            ("gate_proj", slice(0, I), held.gate_up_proj, held.gate_up_scale),
            ("up_proj", slice(I, 2 * I), held.gate_up_proj, held.gate_up_scale),
            ("down_proj", slice(0, H), held.down_proj, held.down_scale),
        ):
            assert scales is not None
            weight, scale = disk[f"experts.{e}.{name}.weight"], disk[f"experts.{e}.{name}.weight_scale"]
            assert torch.equal(values[e, rows].view(torch.uint8), weight.view(torch.uint8))
            assert torch.equal(scales[e, rows], scale.reshape(-1).expand(rows.stop - rows.start))
        assert held.down_input_scale is not None
        assert held.down_input_scale[e] == disk[f"experts.{e}.down_proj.input_scale"]
    asked = [disk[f"experts.{e}.{name}.input_scale"] for e in range(E) for name in ("gate_proj", "up_proj")]
    assert layer.gate_up_proj_input_scale == max(asked)
    with torch.no_grad():
        assert layer(torch.randn(5, H).bfloat16()).isfinite().all()


def test_released_experts_that_do_not_fit_are_named() -> None:
    weight = {f"{n}.weight": torch.zeros(4, 4, dtype=torch.int8) for n in ("gate_proj", "up_proj", "down_proj")}
    scale = {f"{n}.weight_scale": torch.ones(()) for n in ("gate_proj", "up_proj", "down_proj")}
    good = {**weight, **scale, "gate_proj.input_scale": torch.ones(1), "up_proj.input_scale": torch.ones(2)}
    assert expert_parts(good, "int8_row").keys() == {
        "gate_up_proj", "gate_up_proj_scale_inv", "down_proj", "down_proj_scale_inv",
    }  # fmt: skip
    for change, message in [
        ({"up_proj.weight": None}, "'up_proj.weight' is missing"),
        ({"down_proj.weight": torch.ones(4, 4)}, "down_proj.weight is torch.float32"),
        ({"down_proj.weight_scale": torch.ones(3)}, "down_proj.weight_scale has shape (3,)"),
        ({"down_proj.input_scale": torch.ones(2)}, "down_proj.input_scale has shape (2,): must be one number"),
    ]:
        tensors = {name: t for name, t in (good | change).items() if t is not None}
        with pytest.raises(ValueError, match=re.escape(message)):
            expert_parts(tensors, "int8_row")
    with pytest.raises(ValueError, match=re.escape("up_proj.input_scale has shape (2,): must be one number")):
        rows_scale(good)
    with pytest.raises(ValueError, match="scheme='int4_g32'"):
        expert_parts(good, "int4_g32")


def test_settings_of_static_checkpoints_and_fields_that_do_not_go_together() -> None:
    released = {"quant_method": "fp8", "activation_scheme": "static"}
    assert QuantConfig.from_checkpoint(released) == QuantConfig("fp8_row", scales="static", down_scales="static")
    assert QuantConfig.from_checkpoint({**released, "activation_scheme": "dynamic"}) == QuantConfig("fp8_row")
    assert QuantConfig.from_checkpoint(released, scales="dynamic").scales == "dynamic"
    for fields, message in [
        ({"weights": "fp8_row", "down_scales": "fixed"}, "QuantConfig.down_scales='fixed'"),
        (
            {"weights": "fp8_block", "down_scales": "static"},
            "QuantConfig.down_scales='static' with weights='fp8_block'",
        ),
        ({"weights": "int4_g32", "down_scales": "static"}, "QuantConfig.down_scales='static' with weights='int4_g32'"),
        ({"down_scales": "static"}, "QuantConfig.down_scales='static' with weights=None"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            QuantConfig(**fields)  # type: ignore[arg-type]
