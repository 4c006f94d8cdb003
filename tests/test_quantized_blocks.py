"""Layers whose fp8 weights have blocks other than 128 × 128: held, saved, loaded and computed as such, by one process
and by two, against the wide layer that has the same numbers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from epmoe import EPGroup, MoEConfig, MoELayer, QuantConfig, quantize_
from epmoe.integrations.checkpoint import load_checkpoint, save_checkpoint
from epmoe.quant import QuantizedWeights, dequantize_weights, quantize_weights, weight_scale_shape
from epmoe.quant.released import expert_parts
from epmoe.testing import run_ranks

H, I, E, K = 416, 80, 4, 2  # noqa: E741  (neither is a multiple of 64)
BLOCKS = [(64, 64), (1, 128), (256, 256), (64, 384)]
# Relative L2. The same numbers: roundings to bf16. The activation in e4m3 besides: 2^-4 of each number at worst.
SAME, ROUNDED = 1e-2, 2**-4


def make(seed: int, quant: QuantConfig | None = None, ep: EPGroup | None = None, **options: Any) -> MoELayer:
    torch.manual_seed(seed)
    return MoELayer(MoEConfig(H, I, E, K, quant=quant, **options), ep, dtype=torch.bfloat16)


@torch.no_grad()
def uneven(seed: int) -> MoELayer:
    """A wide layer whose weights' blocks differ from their neighbours'."""
    layer, g = make(seed), torch.Generator().manual_seed(seed)
    for w in (layer.gate_up_proj, layer.down_proj):
        w *= 4.0 ** torch.randint(-1, 2, (1, w.shape[1], 1), generator=g)
        w *= 4.0 ** torch.randint(-1, 2, (1, 1, w.shape[2]), generator=g)
    return layer


def widened(layer: MoELayer) -> MoELayer:
    """A wide layer with the numbers that the quantized one holds."""
    wide, state = make(0), dict(layer.state_dict())
    for name in ("gate_up_proj", "down_proj"):
        q = QuantizedWeights(state[name], state.pop(f"{name}_scale_inv"), "fp8_block", layer.weight_block)
        state[name] = dequantize_weights(q, torch.float32)
    wide = wide.float()
    wide.load_state_dict(state)
    return wide


def bits(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().contiguous().view(torch.uint8).clone() for name, tensor in layer.state_dict().items()}


def same_bits(a: MoELayer, b: MoELayer) -> bool:
    ours, theirs = bits(a), bits(b)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def error(y: torch.Tensor, want: torch.Tensor) -> float:
    return ((y.float() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_layer_computes_with_the_numbers_that_it_holds(block: tuple[int, int], seed: int) -> None:
    layer, x = uneven(seed), torch.randn(20, H).bfloat16()
    quantize_(layer, QuantConfig("fp8_block", experts="grouped_fp8", block=block))
    for name in ("gate_up_proj", "down_proj"):
        shape = weight_scale_shape(layer.weight_shape(name), "fp8_block", block)
        assert tuple(getattr(layer, f"{name}_scale_inv").shape) == shape
    with torch.no_grad():
        y = layer(x)
        quantize_(layer, QuantConfig("fp8_block", experts="reference", block=block))
        assert error(y, layer(x).float()) < ROUNDED
        quantize_(layer, QuantConfig("fp8_block", activations=None, experts="reference", block=block))
        assert error(layer(x), widened(layer)(x.float())) < SAME


def share(rank: int, ranks: int, directory: Path, block: tuple[int, int], seed: int) -> dict[str, Any]:
    ep, found = EPGroup(timeout=60), {}
    x = torch.randn(6, H, generator=torch.Generator().manual_seed(seed + rank)).bfloat16()
    for experts, capacity in itertools.product(("grouped_fp8", "reference"), (None, 12)):
        rows = {} if experts == "grouped_fp8" else {"activations": None}
        quant = QuantConfig("fp8_block", experts=experts, block=block, **rows)
        layer = make(1, quant, ep, expert_capacity=capacity, dispatcher="all_to_all")
        load_checkpoint(directory, layer, ep)
        with torch.no_grad():
            found[f"{experts} {layer.config.experts_layout}"] = layer(x)
    return {"x": x, "y": found, "ids": layer.local_experts, "held": bits(layer)}


@pytest.mark.parametrize("block", [(64, 64), (256, 256)], ids=str)
def test_two_ranks_give_what_the_wide_layer_of_the_same_numbers_gives(
    block: tuple[int, int], tmp_path: Path, seed: int
) -> None:
    layer = uneven(seed)
    quantize_(layer, QuantConfig("fp8_block", experts="grouped_fp8", block=block))
    save_checkpoint(tmp_path, layer, None)
    whole, wide = bits(layer), widened(layer)
    for part in run_ranks(share, 2, args=(tmp_path, block, seed)):
        ids = list(part["ids"])
        for name, held in part["held"].items():
            assert torch.equal(held, whole[name] if name.startswith("router") else whole[name][ids]), name
        with torch.no_grad():
            want = {"reference": wide(part["x"].float()), "grouped_fp8": layer(part["x"]).float()}
        assert len(part["y"]) == 4
        for name, y in part["y"].items():
            assert error(y, want[name.split()[0]]) < SAME, name


@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_block_ue8m0"])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_saved_and_loaded_again_every_bit_is_the_same(
    block: tuple[int, int], scheme: str, tmp_path: Path, seed: int
) -> None:
    config, layer = QuantConfig(scheme, block=block), uneven(seed)
    quantize_(layer, config)
    built = make(seed + 1, config)  # made quantized, without wide weights
    assert not same_bits(layer, built)
    built.load_state_dict(layer.state_dict())
    assert same_bits(layer, built)
    save_checkpoint(tmp_path, layer, None)
    read = make(seed + 2, config)
    load_checkpoint(tmp_path, read, None)
    assert same_bits(layer, read)
    wide, given = uneven(seed), make(seed + 3, config)
    given.load_experts({name: getattr(wide, name).detach() for name in ("gate_up_proj", "down_proj")})
    assert all(torch.equal(bits(given)[name], bits(layer)[name]) for name in layer.quantized_parameters())


def test_a_layer_is_not_taken_for_one_of_other_blocks(seed: int) -> None:
    layer = make(seed, QuantConfig("fp8_block", block=(64, 64)))
    before = bits(layer)
    for other in (QuantConfig("fp8_block"), QuantConfig("fp8_block", block=(64, 128))):
        with pytest.raises(ValueError, match=r"fp8_block already.* with weights='fp8_block' and block=\(64, 64\)"):
            quantize_(layer, other)
        with pytest.raises(RuntimeError, match="size mismatch for gate_up_proj_scale_inv"):
            make(seed, other).load_state_dict(layer.state_dict())
    assert all(torch.equal(tensor, before[name]) for name, tensor in bits(layer).items())
    quantize_(layer, QuantConfig("fp8_block", activations=None, block=(64, 64)))
    assert layer.config.row_scheme is None


@pytest.mark.parametrize("block", [(16, 64), (64, 384)], ids=str)
def test_a_released_checkpoint_loads_by_the_blocks_that_it_names(block: tuple[int, int], seed: int) -> None:
    """Every bit stays where blocks end with the gates: 16 rows divide I, 64 do not."""
    g = torch.Generator().manual_seed(seed)
    config = QuantConfig.from_checkpoint({"quant_method": "fp8", "weight_block_size": list(block)})
    shapes = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
    disk, held = {}, {}
    for e, (name, shape) in itertools.product(range(E), shapes.items()):
        q = quantize_weights(torch.randn(1, *shape, generator=g), "fp8_block", block)
        disk[f"{e}.{name}.weight"], disk[f"{e}.{name}.weight_scale_inv"] = q.values[0], q.scales[0]
        held[e, name] = dequantize_weights(q, torch.float32)[0]
    layer = make(seed, config)
    for e in range(E):
        assert layer.load_experts(expert_parts(disk, "fp8_block", f"{e}.", block), expert_ids=[e]) == [e]
    wide = widened(layer)
    for e in range(E):
        assert torch.equal(wide.down_proj[e], held[e, "down_proj"])
        got, want = wide.gate_up_proj[e], torch.cat([held[e, "gate_proj"], held[e, "up_proj"]])
        assert torch.equal(got, want) if I % block[0] == 0 else (got - want).norm() <= 2**-4 * want.norm()
    with pytest.raises(ValueError, match="scales is .* must be torch.float32"):
        expert_parts(disk, "fp8_block", "0.")
