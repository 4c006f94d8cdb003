"""Checkpoints of tiny models as released ones are: quantized matrix by matrix in float64 and packed word by word, each
packing written here from its description and sharing no code with what reads it.

N output channels, K what is summed over, S groups along K; u unsigned codes, z their zero points, s scales.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.integrations.transformers_families import tiny_model

SINGLE = "model.safetensors"
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
_WIDTHS = {"hidden_size": 64, "moe_intermediate_size": 96, "intermediate_size": 64}
_MLA = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
SIZES: dict[str, dict[str, Any]] = {  # whole words, and groups that are cut
    "Mixtral": {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32},
    "Qwen2-MoE": {**_WIDTHS, "shared_expert_intermediate_size": 32},
    "Qwen3-MoE": {**_WIDTHS, "head_dim": 32},
    "DeepSeek-V3": {**_WIDTHS, **_MLA},
    "Llama 4": {"hidden_size": 64, "intermediate_size": 96, "intermediate_size_mlp": 64, "head_dim": 32},
}


@dataclasses.dataclass(frozen=True)
class Integers:
    """How a matrix is rounded: bits, group size (-1: one group), zero points or not, activation order or not."""

    bits: int
    group: int
    zeros: bool = False
    ordered: bool = False

    def of(self, w: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """u `[N, K]`, z `[N, S]`, s `[N, S]` float16, the group of each column, and the numbers that they stand for."""
        n, k = w.shape
        size, top = (k if self.group == -1 else self.group), (1 << self.bits) - 1
        column = torch.arange(k) // size
        if self.ordered:
            column = column[torch.randperm(k, generator=generator)]
        groups = -(-k // size)
        s, z = torch.empty(n, groups, dtype=torch.float16), torch.empty(n, groups, dtype=torch.int64)
        for g in range(groups):
            own = w.double()[:, column == g]
            low, high = own.amin(1).clamp_max(0), own.amax(1).clamp_min(0)
            if self.zeros:
                s[:, g] = ((high - low) / top).half()
                z[:, g] = (-low / s[:, g].double()).round().clamp(0, top).long()
            else:
                s[:, g] = (torch.maximum(high, -low) / (top // 2)).half()
                z[:, g] = (top + 1) // 2
        if self.zeros:
            z[0, 0] = 0  # which GPTQ stores as -1
            z[1, 0] = top
        u = (w.double() / s.double()[:, column]).round().long() + z[:, column]
        u = u.clamp(0, top)
        return u, z, s, column, (u - z[:, column]).double() * s.double()[:, column]


def words(u: Tensor, bits: int, place: tuple[int, ...] | None = None) -> Tensor:
    """`[.., W · 32 / bits]` as int32 `[.., W]`: number `i` of a word from bit `bits · i` on, or `place[i]` there."""
    each = u.long().unflatten(-1, (-1, 32 // bits))
    if place is not None:
        each = each[..., list(place)]
    total = sum(each[..., i] << bits * i for i in range(32 // bits))
    assert isinstance(total, Tensor)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)


Packed = tuple[dict[str, Tensor], Tensor]
Packer = Callable[[str, Tensor, torch.Generator], Packed]


def gptq(how: Integers, less_one: bool = True, borrow: bool = False, groups: bool = True) -> Packer:
    """`borrow`: one is taken from all zero points of a word at once. `groups`: `g_idx` is there."""

    def pack(stem: str, w: Tensor, generator: torch.Generator) -> Packed:
        ordered = how if "down_proj" in stem or not how.ordered else dataclasses.replace(how, ordered=False)
        u, z, s, column, numbers = ordered.of(w, generator)
        stored = (z - 1) % (1 << how.bits) if less_one and not borrow else z
        tensors = {
            "qweight": words(u, how.bits).T,
            "qzeros": words(stored.T, how.bits) - (0x11111111 if borrow else 0),
            "scales": s.T,
        } | ({"g_idx": column.int()} if groups else {})
        return {f"{stem}.{part}": t.contiguous() for part, t in tensors.items()}, numbers

    return pack


def awq(how: Integers) -> Packer:
    def pack(stem: str, w: Tensor, generator: torch.Generator) -> Packed:
        u, z, s, _, numbers = how.of(w, generator)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {"qweight": words(u.T, 4, order), "qzeros": words(z.T, 4, order), "scales": s.T}
        return {f"{stem}.{part}": t.contiguous() for part, t in tensors.items()}, numbers

    return pack


def packed_integers(how: Integers) -> Packer:
    def pack(stem: str, w: Tensor, generator: torch.Generator) -> Packed:
        u, z, s, _, numbers = how.of(w, generator)
        tensors = {"weight_packed": words(u, how.bits), "weight_scale": s, "weight_shape": torch.tensor(w.shape)}
        if how.zeros:
            tensors["weight_zero_point"] = words(z.T, how.bits).T
        return {f"{stem}.{part}": t.contiguous() for part, t in tensors.items()}, numbers

    return pack


def nearest_e2m1(x: Tensor) -> Tensor:
    """Codes, sign in the fourth bit."""
    code = (x.abs()[..., None] - E2M1).abs().argmin(-1)
    return code | (x < 0).long() << 3


def numbers_of(code: Tensor) -> Tensor:
    return E2M1[code & 7] * torch.where(code > 7, -1.0, 1.0)


def pairs(code: Tensor) -> Tensor:
    return (code[..., ::2] | code[..., 1::2] << 4).to(torch.uint8)


def nvfp4(modelopt: bool, second_scale: float | None = None) -> Packer:
    """`second_scale`: of all matrices; None: each has its own."""

    def pack(stem: str, w: Tensor, generator: torch.Generator) -> Packed:
        groups = w.double().unflatten(1, (-1, 16))
        outer = (groups.abs().max() / (448 * 6)).float() if second_scale is None else torch.tensor(second_scale)
        second = outer if modelopt else (1 / outer)
        by = outer.double() if modelopt else 1 / second.double()
        scale = (groups.abs().amax(-1) / 6 / by).clamp(2**-9, 448).to(torch.float8_e4m3fn)
        code = nearest_e2m1(groups / (scale.double() * by)[..., None])
        numbers = (numbers_of(code) * (scale.double() * by)[..., None]).flatten(1)
        tensors = {"weight_scale": scale, "input_scale" if modelopt else "input_global_scale": torch.tensor(0.5)}
        tensors["weight" if modelopt else "weight_packed"] = pairs(code.flatten(1))
        tensors["weight_scale_2" if modelopt else "weight_global_scale"] = second if modelopt else second[None]
        return {f"{stem}.{part}": t.contiguous() for part, t in tensors.items()}, numbers

    return pack


def mxfp4(stem: str, w: Tensor, generator: torch.Generator) -> Packed:
    groups = w.double().unflatten(1, (-1, 32))
    exponent = groups.abs().amax(-1).log2().floor() - 2
    code = nearest_e2m1(groups * 2 ** -exponent[..., None])
    numbers = (numbers_of(code) * 2 ** exponent[..., None]).flatten(1)
    scale = (exponent + 127).to(torch.uint8)
    if "w3" in stem:  # either dtype has been seen
        scale = scale.view(torch.float8_e8m0fnu)
    return {f"{stem}.weight_packed": pairs(code.flatten(1)), f"{stem}.weight_scale": scale}, numbers


def fp8(stem: str, w: Tensor, generator: torch.Generator) -> Packed:
    scale = (w.double().abs().amax(1, keepdim=True) / 448).float()
    values = (w.double() / scale).to(torch.float8_e4m3fn)
    return {f"{stem}.weight": values.contiguous(), f"{stem}.weight_scale": scale}, values.double() * scale


def int8(whole: bool = False, fixed: tuple[float, float] | None = None) -> Packer:
    """A scale for each channel, or `whole`: for the tensor. `fixed`: scales of the inputs of a down projection and of
    all others."""

    def pack(stem: str, w: Tensor, generator: torch.Generator) -> Packed:
        most = w.double().abs().amax().reshape(1, 1) if whole else w.double().abs().amax(1, keepdim=True)
        scale = (most / 127).float()
        values = (w.double() / scale).round().clamp(-128, 127).to(torch.int8)
        values[0, 0] = -128
        tensors = {"weight": values.contiguous(), "weight_scale": scale.reshape(1) if whole else scale}
        tensors |= {} if fixed is None else {"input_scale": torch.tensor([fixed["down_proj" not in stem]])}
        return {f"{stem}.{part}": t for part, t in tensors.items()}, values.double() * scale

    return pack


def fp8_of_tensors(scale: float) -> Packer:
    def pack(stem: str, w: Tensor, generator: torch.Generator) -> Packed:
        values = (w.double() / scale).to(torch.float8_e4m3fn)
        beside = {f"{stem}.weight_scale": torch.tensor(scale), f"{stem}.input_scale": torch.tensor(0.02)}
        return {f"{stem}.weight": values.contiguous()} | beside, values.double() * scale

    return pack


def together(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with a block's experts in tensors over all of them, gate before up, as ModelOpt writes Llama 4's:
    `[E, K, N]` or what that is packed, `gate_up_proj_weight_scale` beside `gate_up_proj`; of numbers there is one."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for stem in sorted({name.partition(".experts.")[0] for name in tensors if name not in found}):
        start = f"{stem}.experts."
        of = {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
        experts = range(len({name.partition(".")[0] for name in of}))
        for part in sorted({name.rpartition(".")[2] for name in of}):
            for whole, rows in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
                name = f"{start}{whole}" + ("" if part == "weight" else f"_{part}")
                each = [[of[f"{expert}.{row}.{part}"] for row in rows] for expert in experts]
                if each[0][0].dim() == 2:
                    bits = torch.stack([torch.cat([t.view(torch.uint8) for t in one]).T for one in each])
                    found[name] = bits.contiguous().view(each[0][0].dtype)
                else:
                    assert len({t.item() for one in each for t in one}) == 1
                    found[name] = each[0][0]
    return found


def compressed(form: str, inputs: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


def is_linear(name: str) -> bool:
    """What quantizers round: all but embeddings, head, norms and routers."""
    return re.search(r"(_proj|_proj_with_mqa|\.q_[ab]_proj|\.w[123])\.weight$", name) is not None


def write(
    family: str, settings: dict[str, Any], pack: Packer, directory: Path, seed: int
) -> tuple[Path, Path, dict[str, Tensor], dict[str, Tensor]]:
    """The quantized checkpoint, the same with wide float32 weights, and by name the numbers in float64 and the tensors
    that were stored."""
    wide, narrow = directory / "wide", directory / "narrow"
    tiny_model(family, seed, **SIZES[family]).save_pretrained(wide, save_original_format=True)
    shutil.copytree(wide, narrow)
    generator, tensors, stored, numbers = torch.Generator().manual_seed(seed), load_file(wide / SINGLE), {}, {}
    for name, tensor in list(tensors.items()):
        if ".experts." in name and tensor.dim() == 3:  # Llama 4's [E, K, N], which quantizers take apart
            stem = name.rpartition(".")[0]
            parts = {"gate_proj": 0, "up_proj": 1} if "gate_up" in name else {"down_proj": 0}
            for part, which in parts.items():
                for expert, each in enumerate(tensor.chunk(len(parts), 2)[which]):
                    own = f"{stem}.{expert}.{part}"
                    packed, numbers[f"{own}.weight"] = pack(own, each.T, generator)
                    stored |= packed
                    each.copy_(numbers[f"{own}.weight"].T)
        elif is_linear(name):
            packed, numbers[name] = pack(name.removesuffix(".weight"), tensor, generator)
            stored |= packed
            tensors[name] = numbers[name].float()
        else:
            stored[name] = tensor
    save_file(tensors, wide / SINGLE)
    save_file(stored, narrow / SINGLE)
    config = json.loads((narrow / "config.json").read_text())
    (narrow / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return narrow, wide, numbers, stored
