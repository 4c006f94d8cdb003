"""The safetensors files of a `transformers` checkpoint, and where in them one block's experts lie.

Experts come in any of four forms, told by their names: one matrix per expert, or one tensor over all of them, each
plain or quantized. Whatever the form, `BlockExperts.row` reads one expert's bytes and no other's.

E experts, H hidden size, I expert intermediate size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from epmoe.integrations.transformers.dequantize import dequantize_fp8, dequantize_mxfp4
from epmoe.integrations.transformers.layouts import to_ours
from epmoe.integrations.transformers.presets import Preset
from epmoe.ops.quantize_blocks import BLOCK
from epmoe.quant.checkpoint_formats import from_mxfp4_blocks
from epmoe.quant.formats import parts_of

SCALES = ("_scale_inv", "_scale")
"""What the scales of FP8 tensors are called beside them: of tiles, and of channels or the whole tensor."""
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class CheckpointFiles(contextlib.ExitStack):
    """Tensors by name, from files that stay open until the context ends.

    Args:
        directory: holds `model.safetensors`, or an index and the files that it names.
        fp8_block: tile of one scale of FP8 tensors; None: a scale for the whole tensor, or for each channel.

    Raises:
        ValueError: no checkpoint there, or a file that the index names is missing.
    """

    def __init__(self, directory: Path, fp8_block: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.directory, self.fp8_block = directory, fp8_block
        self._open: dict[Path, Any] = {}
        index = directory / INDEX
        if index.is_file():
            self.names = {name: directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        elif (directory / SINGLE).is_file():
            self.names = dict.fromkeys(self._file(directory / SINGLE).keys(), directory / SINGLE)
        else:
            raise ValueError(f"{directory}: neither {INDEX} nor {SINGLE} is there; must be a checkpoint of safetensors")
        for path in sorted(set(self.names.values())):
            if not path.is_file():
                raise ValueError(f"{path} is missing, which {INDEX} names")

    def slice(self, name: str) -> Any:
        """The tensor as safetensors gives it before reading: index it to read those bytes."""
        if name not in self.names:
            raise ValueError(f"{self.directory}: tensor {name!r} is missing")
        return self._file(self.names[name]).get_slice(name)

    def matrix(self, name: str, dtype: torch.dtype, expert: int | None = None) -> Tensor:
        """A matrix, or one expert's of a tensor over all of them, in `dtype`; dequantized if scales lie beside it.

        Raises:
            ValueError: quantized values without scales, or scales that don't fit them.
        """
        weight = self.raw(name, expert)
        if self.scale_name(name) is None:
            if weight.dtype.itemsize == 1:
                raise ValueError(f"{self.names[name]}: {self._without_scales(name, str(weight.dtype))}")
            return weight.to(dtype)
        if not weight.is_floating_point():
            raise ValueError(f"{self.names[name]}: {name!r} with scales is {weight.dtype}: must be a float8")
        try:
            return dequantize_fp8(weight, self.scale(name, expert), dtype, self.fp8_block)
        except ValueError as error:
            raise ValueError(f"{self.names[name]}: {name!r}: {error}") from error

    def mxfp4(self, name: str, dtype: torch.dtype, expert: int) -> Tensor:
        """One expert's matrix of `<name>_blocks` and `<name>_scales`, in `dtype`."""
        return dequantize_mxfp4(self.raw(f"{name}_blocks", expert), self.raw(f"{name}_scales", expert), dtype)

    def scale_name(self, name: str) -> str | None:
        """The name of a tensor's FP8 scales, if it has any."""
        return next((name + suffix for suffix in SCALES if name + suffix in self.names), None)

    def scale(self, name: str, expert: int | None = None) -> Tensor:
        """The FP8 scales of a tensor, or of one expert's part of it; one number may stand for all experts."""
        scale = self.scale_name(name)
        assert scale is not None
        shape = self.slice(scale).get_shape()
        found = self.raw(scale, None if len(shape) == 0 or list(shape) == [1] else expert)
        if not found.is_floating_point():
            raise ValueError(f"{self.names[scale]}: scales {scale!r} are {found.dtype}: must be floating numbers")
        return found

    def wide(self, name: str) -> Any:
        """As `slice`, of a tensor that has no scales.

        Raises:
            ValueError: it needs some.
        """
        found = self.slice(name)
        if (kind := found.get_dtype()).startswith("F8"):
            raise ValueError(f"{self.names[name]}: {self._without_scales(name, kind)}")
        return found

    def about_others(self) -> set[str]:
        """Names of tensors that only say how others are quantized: scales, and fixed scales of their inputs."""
        scaled = [name for name in self.names if self.scale_name(name) is not None]
        beside = [name + suffix for name in scaled for suffix in SCALES]
        beside += [f"{name.removesuffix('weight')}input_scale" for name in scaled if name.endswith(".weight")]
        return {name for name in self.names if name.endswith("_scale_inv")}.union(beside)

    def _without_scales(self, name: str, kind: str) -> str:
        beside = " nor ".join(repr(name + suffix) for suffix in SCALES)
        return f"{name!r} is {kind}, and neither {beside} is there: values mean nothing without their scales"

    def raw(self, name: str, expert: int | None = None) -> Tensor:
        """A tensor as it is stored, or one expert's part of it."""
        found = self.slice(name)
        return found[...] if expert is None else found[expert]

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = self.enter_context(safe_open(path, framework="pt"))
        return self._open[path]


@dataclasses.dataclass(frozen=True)
class Dequantized:
    """An FP8 matrix that is read and dequantized when it is indexed, as a slice of safetensors is read."""

    files: CheckpointFiles
    name: str
    dtype: torch.dtype

    def __getitem__(self, index: Any) -> Tensor:
        return self.files.matrix(self.name, self.dtype)[index]


@dataclasses.dataclass(frozen=True)
class BlockExperts:
    """One block's experts on disk.

    Attributes:
        sources: by our name, what holds it: names of single experts' matrices with `{}` for the expert, to be stacked
            by rows, or the name of one tensor over all experts.
        packed: those tensors are MXFP4.
    """

    files: CheckpointFiles
    preset: Preset
    sources: dict[str, tuple[str, ...]]
    packed: bool = False

    @classmethod
    def find(cls, files: CheckpointFiles, preset: Preset, blocks: Iterable[str]) -> BlockExperts:
        """The experts of the block that is called one of `blocks` there.

        Raises:
            ValueError: none is there, in any form; lists what was looked for.
        """
        tried = []
        for block in blocks:
            prefix = f"{block}.{preset.experts}"
            for packed, sources in _forms(preset, block, prefix):
                names = [name.format(0) for parts in sources.values() for name in parts]
                if packed:
                    names = [f"{name}_blocks" if name.endswith("_proj") else name for name in names]
                if all(name in files.names for name in names):
                    return cls(files, preset, sources, packed)
                tried.append(names[0])
        raise ValueError(
            f"{files.directory}: experts of preset {preset.family!r} are under none of the names {', '.join(tried)}; "
            "Preset.disk says how a checkpoint names them"
        )

    def starts(self) -> list[str]:
        """How the names of these tensors begin on disk, and of their scales, and of no others."""
        return [part.partition("{}")[0] for parts in self.sources.values() for part in parts]

    def row(self, our: str, expert: int, dtype: torch.dtype) -> Tensor:
        """One expert's tensor in our layout and `dtype`; reads its bytes alone.

        Args:
            our: `gate_up_proj`, `down_proj`, `gate_up_bias` or `down_bias`.
        """
        tensors, parts = self.preset.tensors, self.sources[our]
        if "{}" in parts[0]:
            return torch.cat([self.files.matrix(part.format(expert), dtype) for part in parts])
        if self.packed and our.endswith("_proj"):  # packed along the sum, so never transposed
            row = self.files.mxfp4(parts[0], dtype, expert)
            return to_ours(dataclasses.replace(tensors, transposed=False), our, row)
        if tensors.transposed and self.files.scale_name(parts[0]) is not None:
            if (shape := tuple(self.files.scale(parts[0], expert).shape)) not in ((), (1,)) and len(shape) == 1:
                raise ValueError(
                    f"{self.files.names[parts[0]]}: {parts[0]!r} is transposed, and its scales of an expert are "
                    f"{shape}: must say with two dimensions whether they are of rows or of columns"
                )
        return to_ours(tensors, our, self.files.matrix(parts[0], dtype, expert))

    def kept(
        self, our: str, expert: int, scheme: str | None, block: tuple[int, int] = BLOCK
    ) -> dict[str, Tensor] | None:
        """One expert's values and scales with the bits that they have on disk, by our names, for a layer that holds
        `scheme`; None where they mean something else there.

        FP8 tiles of `block` that end where gate and up do; FP8 channels; MXFP4.
        """
        tensors, parts = self.preset.tensors, self.sources[our]
        if self.packed:
            if scheme != "mxfp4":
                return None
            alternate = tensors.interleaved and our.startswith("gate_up")
            found = (self.files.raw(f"{parts[0]}_{part}", expert)[None] for part in ("blocks", "scales"))
            return {our + n: t[0] for n, t in parts_of(from_mxfp4_blocks(*found, interleaved=alternate)).items()}
        one = None if "{}" in parts[0] else expert
        names = [part.format(expert) for part in parts]
        if tensors.transposed or tensors.interleaved or any(self.files.scale_name(name) is None for name in names):
            return None
        values, scales = [self.files.raw(n, one) for n in names], [self.files.scale(n, one).float() for n in names]
        if any(value.dtype != torch.float8_e4m3fn for value in values):
            return None
        pairs = list(zip(values, scales, strict=True))
        if scheme == "fp8_row":
            if any(tuple(s.shape) not in ((), (1,), (1, 1), v.shape[:1], (v.shape[0], 1)) for v, s in pairs):
                return None
            scales = [s.reshape(-1).expand(v.shape[0]) for v, s in pairs]
        elif scheme in ("fp8_block", "fp8_block_ue8m0"):
            if self.files.fp8_block != block or any(value.shape[0] % block[0] for value in values[:-1]):
                return None
            if any(tuple(s.shape) != (-(-v.shape[0] // block[0]), -(-v.shape[1] // block[1])) for v, s in pairs):
                return None
            if scheme == "fp8_block_ue8m0" and any((s.frexp().mantissa != 0.5).any() for s in scales):
                return None
        else:
            return None
        bits = torch.cat([value.view(torch.uint8) for value in values]).view(torch.float8_e4m3fn)
        return {our: bits, f"{our}_scale_inv": torch.cat(scales)}

    def input_scales(self, our: str, experts: Iterable[int]) -> Tensor | None:
        """The fixed scales of what `our` projection of `experts` multiplies, one for each, the larger of gate's and
        up's; None where the checkpoint has none."""
        stems = [part.removesuffix("weight") for part in self.sources[our]]
        names = [[f"{stem.format(expert)}input_scale" for stem in stems] for expert in experts]
        if not all(name in self.files.names for each in names for name in each):
            return None
        return torch.stack([torch.stack([self.files.raw(n).float().max() for n in each]).max() for each in names])


def _forms(preset: Preset, block: str, prefix: str) -> list[tuple[bool, dict[str, tuple[str, ...]]]]:
    """Each form that the experts of `block` may have: whether packed, and its sources."""
    disk = preset.disk
    fused: dict[str, tuple[str, ...]] = {o: (f"{prefix}.{theirs}",) for o, theirs in preset.tensors.names().items()}
    forms = [(True, fused), (False, fused)]
    if disk.fused_gate_up is not None and disk.fused_down is not None:
        renamed = {"gate_up_proj": (f"{block}.{disk.fused_gate_up}",), "down_proj": (f"{block}.{disk.fused_down}",)}
        forms.append((False, {**fused, **renamed}))
    if preset.tensors.gate_up_bias is None:
        each = f"{prefix}.{{}}."
        gate_up = (f"{each}{disk.gate}.weight", f"{each}{disk.up}.weight")
        forms.append((False, {"gate_up_proj": gate_up, "down_proj": (f"{each}{disk.down}.weight",)}))
    return forms
