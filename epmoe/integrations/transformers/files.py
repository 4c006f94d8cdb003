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
from epmoe.quant.config import BLOCK

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class CheckpointFiles(contextlib.ExitStack):
    """Tensors by name, from files that stay open until the context ends.

    Args:
        directory: holds `model.safetensors`, or an index and the files that it names.
        fp8_block: tile of one scale of FP8 tensors; None: one scale per tensor.

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
        """A matrix, or one expert's of a tensor over all of them, in `dtype`; dequantized if scales lie beside it."""
        scale = self.scale_name(name)
        weight = self.raw(name, expert)
        if scale is None:
            return weight.to(dtype)
        try:
            return dequantize_fp8(weight, self.raw(scale, expert), dtype, self.fp8_block)
        except ValueError as error:
            raise ValueError(f"{self.names[name]}: {name!r}: {error}") from error

    def mxfp4(self, name: str, dtype: torch.dtype, expert: int) -> Tensor:
        """One expert's matrix of `<name>_blocks` and `<name>_scales`, in `dtype`."""
        return dequantize_mxfp4(self.raw(f"{name}_blocks", expert), self.raw(f"{name}_scales", expert), dtype)

    def scale_name(self, name: str) -> str | None:
        """The name of a tensor's FP8 scales, if it has any."""
        scale = f"{name}_scale_inv"
        return scale if scale in self.names else None

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
        return to_ours(tensors, our, self.files.matrix(parts[0], dtype, expert))

    def fp8_row(self, our: str, expert: int) -> dict[str, Tensor] | None:
        """One expert's FP8 values and scales as they lie on disk, by our names, where they mean the same in our layout:
        tiles of 128 × 128 that end where gate and up do. None elsewhere."""
        tensors, parts = self.preset.tensors, self.sources[our]
        one = None if "{}" in parts[0] else expert
        names = [part.format(expert) for part in parts]
        same = self.files.fp8_block == BLOCK and not (tensors.transposed or tensors.interleaved)
        if not same or any(self.files.scale_name(name) is None for name in names):
            return None
        values = [self.files.raw(name, one) for name in names]
        if any(value.dtype != torch.float8_e4m3fn or value.shape[0] % BLOCK[0] for value in values[:-1]):
            return None
        scales = [self.files.raw(f"{name}_scale_inv", one).float() for name in names]
        bits = torch.cat([value.view(torch.uint8) for value in values]).view(torch.float8_e4m3fn)
        return {our: bits, f"{our}_scale_inv": torch.cat(scales)}


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
