"""`quantize_`: layers whose experts are held in fp8 compute, convert, save and load as such."""

from __future__ import annotations

import copy
import gc
import itertools
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from epmoe import EPGroup, MoEConfig, MoELayer, QuantConfig, quantize_
from epmoe.integrations.checkpoint import load_checkpoint, save_checkpoint
from epmoe.integrations.dcp import load_distributed, save_distributed
from epmoe.quant import (
    WEIGHT_SCHEMES,
    QuantizedWeights,
    dequantize_weights,
    quantize_rows_by,
    quantize_weights,
)
from epmoe.quant.formats import FORMATS, join_gate_up, parts_of
from epmoe.testing import RankFailed, run_ranks

H, I, E, K = 192, 80, 6, 2  # noqa: E741  (neither is a multiple of a scale block)


def make(seed: int, quant: QuantConfig | None = None, **options: Any) -> MoELayer:
    torch.manual_seed(seed)
    options = {"expert_bias": True, "dtype": torch.bfloat16, **options}
    layer_options = {name: options.pop(name) for name in ("dtype", "device", "ep") if name in options}
    return MoELayer(MoEConfig(H, I, E, K, quant=quant, **options), **layer_options)


def bits(layer: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().contiguous().view(torch.uint8).clone() for name, tensor in layer.state_dict().items()}


def same_bits(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = bits(a), bits(b)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def widened(layer: MoELayer, scheme: str) -> MoELayer:
    """A wide layer with the numbers that the quantized one holds."""
    wide = make(0)
    state = {name: t for name, t in layer.state_dict().items() if not name.endswith("_scale_inv")}
    for name in ("gate_up_proj", "down_proj"):
        q = QuantizedWeights(state[name], getattr(layer, f"{name}_scale_inv"), scheme)
        state[name] = dequantize_weights(q, torch.float32)
    wide = wide.float()
    wide.load_state_dict(state)
    return wide


@pytest.mark.parametrize("experts", ["reference", "kernels"])
@pytest.mark.parametrize("scheme", WEIGHT_SCHEMES)
def test_a_quantized_layer_holds_and_computes_what_its_scheme_says(scheme: str, experts: str, seed: int) -> None:
    if experts == "kernels":
        experts = "grouped_int8" if scheme == "int8_row" else "grouped_fp8"
    layer = make(seed)
    original = copy.deepcopy(layer)
    assert quantize_(layer, QuantConfig(scheme, experts=experts)) is layer
    for name in ("gate_up_proj", "down_proj"):
        want = quantize_weights(getattr(original, name), scheme)
        assert torch.equal(getattr(layer, name).view(torch.uint8), want.values.view(torch.uint8))
        assert torch.equal(getattr(layer, f"{name}_scale_inv"), want.scales)
    assert not any(p.requires_grad for p in layer.quantized_parameters().values())
    x = torch.randn(20, H).bfloat16()
    with torch.no_grad():
        y = layer(x).float()
        kernel = layer.kernel(x.device, x.dtype)
        assert kernel.experts.name == experts and kernel.dispatch_scheme == scheme
        for other, most in ((widened(layer, scheme), 0.06), (original.float(), 0.09)):
            want = other(x.float())
            assert (y - want).norm() / want.norm() < most


def test_wide_weights_are_freed(seed: int) -> None:
    layer = make(seed)
    wide = [weakref.ref(layer.gate_up_proj), weakref.ref(layer.down_proj)]
    quantize_(layer, QuantConfig("fp8_block"))
    gc.collect()
    assert [ref() for ref in wide] == [None, None]
    assert layer.gate_up_proj.nbytes == E * 2 * I * H


@pytest.mark.parametrize("scheme", WEIGHT_SCHEMES)
def test_saved_and_loaded_again_every_bit_is_the_same(scheme: str, tmp_path: Path, seed: int) -> None:
    config = QuantConfig(scheme)
    layer = quantize_(make(seed), config)
    assert isinstance(layer, MoELayer)
    built = make(seed + 1, config)  # made quantized, without wide weights
    empty = make(seed + 1, config, device="meta").to_empty(device="cpu")
    after = quantize_(make(seed + 2), config)
    for other in (built, empty, after):
        assert not same_bits(layer, other)
        other.load_state_dict(layer.state_dict())
        assert same_bits(layer, other)
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    read = make(seed + 3, config)
    read.load_state_dict(torch.load(tmp_path / "layer.pt"))
    assert same_bits(layer, read)
    save_checkpoint(tmp_path / "checkpoint", layer, None)
    read = make(seed + 4, config)
    load_checkpoint(tmp_path / "checkpoint", read, None)
    assert same_bits(layer, read)


NARROW = ("int8_channel", "mxfp4", "mxfp6_e2m3", "nvfp4")
CONFIGS = {scheme: QuantConfig(scheme) for scheme in (*WEIGHT_SCHEMES, *NARROW)} | {
    "int4_g64 with zeros": QuantConfig("int4_g64", zero_points=True),
    "fp8_block of (1, 128)": QuantConfig("fp8_block", block=(1, 128)),
    "fp8_row static": QuantConfig("fp8_row", scales="static", down_scales="static"),
}


def share(rank: int, ranks: int, directory: Path) -> list[dict[str, Any]]:
    ep, found = EPGroup(timeout=30), []
    for number, config in enumerate(CONFIGS.values()):
        layer, again = (make(1, config, ep=ep, device="meta").to_empty(device="cpu") for _ in range(2))
        load_checkpoint(directory / f"{number}", layer, ep)
        load_distributed(directory / f"{number}" / "dcp", again)
        found.append({"ids": layer.local_experts, "held": bits(layer), "by dcp": bits(again)})
        if config == QuantConfig("fp8_block"):
            torch.manual_seed(rank)
            with torch.no_grad():
                found[-1]["y"] = layer(torch.randn(4, H).bfloat16())
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_one_rank_loads_on_two_whatever_the_scheme(tmp_path: Path, seed: int) -> None:
    layers = []
    for number, config in enumerate(CONFIGS.values()):
        layer = quantize_(make(seed), config)
        assert isinstance(layer, MoELayer)
        if config.scales == "static":
            layer.set_input_scale(0.25)
            layer.set_down_input_scales(torch.rand(E) + 0.5)
        save_checkpoint(tmp_path / f"{number}", layer, None)
        save_distributed(tmp_path / f"{number}" / "dcp", layer)
        layers.append(layer)
        again = make(seed + 1, config, device="meta").to_empty(device="cpu")
        load_checkpoint(tmp_path / f"{number}", again, None)
        assert same_bits(layer, again), config
    for rank, parts in enumerate(run_ranks(share, 2, args=(tmp_path,), timeout=120)):
        for (name, config), layer, part in zip(CONFIGS.items(), layers, parts, strict=True):
            whole, experts, ids = bits(layer), layer.expert_parameters(), list(part["ids"])
            for way in ("held", "by dcp"):
                assert part[way].keys() == whole.keys()
                for tensor, held in part[way].items():
                    want = whole[tensor].view(E, -1)[ids].flatten() if tensor in experts else whole[tensor].flatten()
                    assert torch.equal(held.flatten(), want), (name, way, tensor)
            if config == QuantConfig("fp8_block"):
                torch.manual_seed(rank)
                with torch.no_grad():
                    want = layer(torch.randn(4, H).bfloat16()).float()
                assert (part["y"].float() - want).norm() < 1e-2 * want.norm()


def quantized_differently(rank: int, ranks: int) -> None:
    layer = make(0, ep=EPGroup(timeout=30))
    quantize_(layer, QuantConfig("fp8_block", combine=[None, "fp8_block"][rank]))


def test_ranks_that_disagree_are_told_the_field() -> None:
    with pytest.raises(RankFailed, match="quantize_ of MoELayer 'moe' differs.*combine: rank 0 has None, rank 1"):
        run_ranks(quantized_differently, 2)


@pytest.mark.parametrize("scheme", WEIGHT_SCHEMES)
def test_values_and_scales_of_a_checkpoint_load_without_widening(scheme: str, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    made = {n: quantize_weights(torch.randn(E, *s, generator=g), scheme) for n, s in
            (("gate_up_proj", (2 * I, H)), ("down_proj", (H, I)))}  # fmt: skip
    layer = make(seed, QuantConfig(scheme))
    tensors = {name: q.values for name, q in made.items()}
    # scales as some writers leave them: the last dimension not dense
    scales = {f"{name}_scale_inv": q.scales.transpose(1, -1).contiguous().transpose(1, -1) for name, q in made.items()}
    ids = [4, 1, 0, 2, 5, 3]
    chosen = {n: t.view(torch.uint8)[ids].view(t.dtype) if t.dtype.itemsize == 1 else t[ids] for n, t in
              (tensors | scales).items()}  # fmt: skip
    assert layer.load_experts(chosen, ids) == ids
    for name, tensor in (tensors | scales).items():
        held = getattr(layer, name)
        assert torch.equal(held.contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


def test_wide_weights_given_to_a_quantized_layer_are_quantized(seed: int) -> None:
    wide, layer = make(seed), make(seed + 1, QuantConfig("fp8_block"))
    layer.load_experts({name: getattr(wide, name).detach() for name in ("gate_up_proj", "down_proj")})
    quantize_(wide, QuantConfig("fp8_block"))
    for name, parameter in layer.quantized_parameters().items():
        assert torch.equal(parameter.view(torch.uint8), getattr(wide, name).view(torch.uint8)), name


def test_values_without_their_scales_are_refused_wherever_they_come_from(tmp_path: Path, seed: int) -> None:
    wide, layer = make(seed), quantize_(make(seed), QuantConfig("fp8_block"))
    assert isinstance(layer, MoELayer)
    message = re.escape("values mean nothing without their scales")
    for to, given in ((layer, wide), (wide, layer)):
        with pytest.raises(RuntimeError, match=message):
            to.load_state_dict(given.state_dict(), strict=False)
    with pytest.raises(ValueError, match=message):
        wide.load_experts({"gate_up_proj": layer.gate_up_proj.detach()})
    with pytest.raises(ValueError, match=message):
        both = {"gate_up_proj": wide.gate_up_proj.detach(), "gate_up_proj_scale_inv": layer.gate_up_proj_scale_inv}
        layer.load_experts(both)
    before = {name: parameter.clone() for name, parameter in layer.quantized_parameters().items()}
    with pytest.raises(ValueError, match=f"gate_up_proj comes without gate_up_proj_scale_inv: {message}"):
        layer.load_experts({"gate_up_proj": torch.zeros_like(layer.gate_up_proj)})
    parts = {n: torch.zeros_like(t) for n, t in layer.state_dict().items() if n != "down_proj_scale_inv"}
    with pytest.raises(RuntimeError, match=f"down_proj comes without down_proj_scale_inv: {message}"):
        layer.load_state_dict(parts, strict=False)
    assert all(torch.equal(before[name].float(), held.float()) for name, held in layer.quantized_parameters().items())
    layer.load_state_dict({}, strict=False)  # nothing is no mistake
    save_checkpoint(tmp_path, wide, None)
    with pytest.raises(ValueError, match=f"{message}|gate_up_proj_scale_inv' is missing"):
        load_checkpoint(tmp_path, layer, None)


def test_conversions_leave_values_and_scales_alone(seed: int) -> None:
    layer = quantize_(make(seed), QuantConfig("fp8_block"))
    assert isinstance(layer, MoELayer)
    before = {name: p.detach().clone() for name, p in layer.quantized_parameters().items()}
    layer.half()
    assert layer.dtype == layer.gate_up_bias.dtype == torch.float16  # type: ignore[union-attr]
    for name, parameter in layer.quantized_parameters().items():
        assert torch.equal(parameter.view(torch.uint8), before[name].view(torch.uint8)), name
    with torch.no_grad():
        assert layer(torch.randn(3, H).half()).dtype == torch.float16
    with pytest.raises(ValueError, match=r"x is torch.bfloat16, the experts are torch.float16"):
        layer(torch.randn(3, H).bfloat16())
    layer.to("meta")
    assert all(p.device.type == "meta" for p in layer.parameters())


def test_every_layer_of_a_model_is_quantized_and_nothing_else(seed: int) -> None:
    model = nn.ModuleDict({"a": make(seed, num_shared_experts=1), "b": nn.Linear(4, 4), "c": make(seed)})
    quantize_(model, QuantConfig("fp8_row"))
    narrow = [name for name, p in model.named_parameters() if p.dtype.itemsize == 1]
    assert narrow == [f"{layer}.{name}" for layer in "ac" for name in ("gate_up_proj", "down_proj")]
    with pytest.raises(ValueError, match="quantize_ of a Linear without a MoELayer"):
        quantize_(nn.Linear(2, 2), QuantConfig("fp8_row"))


def test_a_second_configuration_may_change_all_but_the_weights(seed: int) -> None:
    layer = quantize_(make(seed), QuantConfig("fp8_block"))
    held = bits(layer)
    quantize_(layer, QuantConfig("fp8_block", activations=None, experts="reference"))
    assert layer.config.row_scheme is None  # type: ignore[union-attr]
    assert all(torch.equal(tensor, held[name]) for name, tensor in bits(layer).items())
    for other in (QuantConfig("fp8_row"), QuantConfig()):
        with pytest.raises(ValueError, match="layer 'moe'.*fp8_block"):
            quantize_(layer, other)
    layer = quantize_(make(seed), QuantConfig("int4_g32", scale_dtype="float16"))
    assert layer.down_proj_scale_inv.dtype == torch.float16
    quantize_(layer, QuantConfig("int4_g32", scale_dtype="float16", experts="reference"))
    for other, more in (
        (QuantConfig("int4_g32"), "scale_dtype='float16'"),
        (QuantConfig("int4_g32", zero_points=True, scale_dtype="float16"), "zero_points=False"),
    ):
        with pytest.raises(ValueError, match=f"with weights='int4_g32' and {more}$"):
            quantize_(layer, other)


def test_experts_that_cannot_compute_it_leave_the_layer_as_it_was(seed: int) -> None:
    layer = make(seed)
    held = bits(layer)
    with pytest.raises(ValueError, match="experts='grouped': the weights are of scheme='fp8_block'"):
        quantize_(layer, QuantConfig("fp8_block", experts="grouped"))
    assert all(torch.equal(tensor, held[name]) for name, tensor in bits(layer).items())
    layer(torch.randn(2, H).bfloat16()).sum().backward()


def test_ranks_seeded_alike_draw_the_same_quantized_experts(seed: int) -> None:
    built, after = make(seed, QuantConfig("fp8_block")), quantize_(make(seed), QuantConfig("fp8_block"))
    assert same_bits(built, after)


@pytest.mark.parametrize(
    ("scheme", "zeros"),
    [
        ("int4_g64", True),
        ("int8_channel", False),
        ("mxfp4", False),
        ("nvfp4", False),
        ("int8_row", False),
        ("mxfp6_e2m3", False),
        ("mxfp6_e3m2", False),
    ],
)
def test_narrow_weights_go_the_same_ways(scheme: str, zeros: bool, seed: int) -> None:
    config = QuantConfig(scheme, zero_points=zeros)
    layer, wide = quantize_(make(seed), config), make(seed)
    assert isinstance(layer, MoELayer)
    other = make(seed + 1, config, device="meta").to_empty(device="cpu")
    other.load_state_dict(layer.state_dict())
    parts = {f"{name}{suffix}": part for name in ("gate_up_proj", "down_proj")
             for suffix, part in FORMATS[scheme].quantize(getattr(wide, name).detach(), zeros).items()}  # fmt: skip
    loaded = make(seed, config)
    loaded.load_experts(parts)
    assert parts.keys() == layer.quantized_parameters().keys()
    assert same_bits(layer, other) and same_bits(layer, loaded)
    x = torch.randn(20, H).bfloat16()
    with torch.no_grad():
        y, want = layer(x).float(), wide(x).float()
    assert (y - want).norm() < (0.05 if "int8" in scheme else 0.35) * want.norm()


@pytest.mark.parametrize("experts", ["kernels", "reference"])
@pytest.mark.parametrize("scheme", ["fp8_row", "int8_row"])
def test_rows_of_a_fixed_scale_are_quantized_by_it_and_no_other(scheme: str, experts: str, seed: int) -> None:
    if experts == "kernels":
        experts = "grouped_int8" if scheme == "int8_row" else "grouped_fp8"
    layer = quantize_(make(seed), QuantConfig(scheme, scales="static", experts=experts))
    assert isinstance(layer, MoELayer)
    x = torch.randn(9, H).bfloat16()
    with torch.no_grad():
        with pytest.raises(ValueError, match="gate_up_proj_input_scale is not set: call set_input_scale"):
            layer(x)
        scale = x.float().abs().max() / (448 if scheme == "fp8_row" else 127)
        layer.set_input_scale(torch.stack([scale / 3, scale, scale / 2]))
        y = layer(x)
        kernel, (ids, p) = layer.kernel(x.device, x.dtype), routing_of(layer, x)
        want = kernel(quantize_rows_by(x, scale[None], scheme), ids, p, layer.expert_weights()).routed
        assert torch.equal(y, want)
        dynamic = quantize_(make(seed), QuantConfig(scheme, experts=experts))(x)
        assert 0 < (y - dynamic).float().norm() < 0.1 * dynamic.float().norm()
    assert layer.half().gate_up_proj_input_scale.dtype == torch.float32  # type: ignore[union-attr]
    other = make(seed + 1, layer.config.quant)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.gate_up_proj_input_scale, layer.gate_up_proj_input_scale)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scales='static' with an x that needs a gradient"):
        layer(torch.randn(2, H).half().requires_grad_())
    quantize_(layer, QuantConfig(scheme))
    assert layer.gate_up_proj_input_scale is None
    with pytest.raises(ValueError, match=r"set_input_scale needs QuantConfig\(scales='static'\)"):
        layer.set_input_scale(1.0)


def routing_of(layer: MoELayer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    routing = layer.router(x)  # type: ignore[operator]
    return routing.topk_ids, routing.topk_weights


@pytest.mark.parametrize("inner", [128, 80])
def test_a_released_checkpoint_loads_expert_by_expert(inner: int, seed: int) -> None:
    """Tensors as DeepSeek-V3 names them, one expert and one projection each; every bit stays where 128 divides I."""
    g = torch.Generator().manual_seed(seed)
    config = QuantConfig.from_checkpoint({"quant_method": "fp8", "weight_block_size": [128, 128]})
    shapes = {"gate_proj": (inner, H), "up_proj": (inner, H), "down_proj": (H, inner)}
    disk = {}
    for expert, (name, shape) in itertools.product(range(E), shapes.items()):
        q = quantize_weights(torch.randn(1, *shape, generator=g), "fp8_block")
        disk[f"{expert}.{name}.weight"], disk[f"{expert}.{name}.weight_scale_inv"] = q.values[0], q.scales[0]
    layer = MoELayer(MoEConfig(H, inner, E, K, quant=config), device="meta", dtype=torch.bfloat16).to_empty(
        device="cpu"
    )
    for expert in layer.local_experts:
        gate, up, down = (
            QuantizedWeights(
                disk[f"{expert}.{n}.weight"][None], disk[f"{expert}.{n}.weight_scale_inv"][None], "fp8_block"
            )
            for n in shapes
        )
        parts = {f"gate_up_proj{suffix}": part for suffix, part in parts_of(join_gate_up(gate, up)).items()}
        parts |= {f"down_proj{suffix}": part for suffix, part in parts_of(down).items()}
        assert layer.load_experts(parts, expert_ids=[expert]) == [expert]
    for expert in range(E):
        held = layer.gate_up_proj[expert].float(), layer.gate_up_proj_scale_inv[expert]  # type: ignore[index]
        for n, name in enumerate(("gate_proj", "up_proj")):
            values, scales = disk[f"{expert}.{name}.weight"], disk[f"{expert}.{name}.weight_scale_inv"]
            wide = dequantize_weights(QuantizedWeights(values[None], scales[None], "fp8_block"), torch.float32)[0]
            block = held[1].repeat_interleave(128, 0)[: 2 * inner].repeat_interleave(128, 1)[:, :H]
            mine = (held[0] * block)[n * inner : (n + 1) * inner]
            # where a block spans both projections, one more rounding to three bits of mantissa: 2**-4 at worst
            assert torch.equal(mine, wide) if inner == 128 else (mine - wide).norm() <= 2**-4 * wide.norm()
        assert torch.equal(layer.down_proj[expert].float(), disk[f"{expert}.down_proj.weight"].float())
