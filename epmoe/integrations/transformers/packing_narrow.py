"""The ways in which checkpoint files hold narrow weights: four-bit floats, and integers in words.

N output channels, K what is summed over.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from epmoe.integrations.transformers.dequantize import dequantize_integers, dequantize_mxfp4, dequantize_nvfp4
from epmoe.integrations.transformers.files import CheckpointFiles
from epmoe.integrations.transformers.packing import OF_ACTIVATIONS, Narrow, part_of, told
from epmoe.quant.checkpoint_formats import (
    Imported,
    Integers,
    awq_integers,
    from_mxfp4_blocks,
    from_nvfp4,
    gptq_integers,
    integer_scheme,
    narrow_of,
    packed_integers,
)


class Mxfp4Blocks(Narrow):
    """Tensors over all experts as gpt-oss has them."""

    label, values, needs = "MXFP4", "_blocks", ("_scales",)

    def scheme(self, files: CheckpointFiles, name: str) -> str:
        return "mxfp4"

    def wide(self, files: CheckpointFiles, name: str, dtype: torch.dtype, expert: int | None = None) -> Tensor:
        blocks, scales = (self._part(files, name, part, expert) for part in ("_blocks", "_scales"))
        with told(files, name, f"{name}_blocks"):
            return dequantize_mxfp4(blocks, scales, dtype)

    def narrow(self, files: CheckpointFiles, name: str, expert: int | None, device: torch.device) -> Imported:
        found = [self._part(files, name, part, expert)[None].to(device) for part in ("_blocks", "_scales")]
        with told(files, name, f"{name}_blocks"):
            return Imported(from_mxfp4_blocks(*found), None)


class ModelOptNvfp4(Narrow):
    """Four-bit floats whose second scale is what the first is multiplied by."""

    label, needs, may = "NVFP4", ("_scale", "_scale_2"), OF_ACTIVATIONS
    inner, outer = "_scale", "_scale_2"

    def there(self, files: CheckpointFiles, name: str) -> bool:
        if name not in files.names or name + self.inner not in files.names:
            return False
        return name + self.outer in files.names or files.kind(name) == "U8"

    def scheme(self, files: CheckpointFiles, name: str) -> str:
        return "nvfp4"

    def wide(self, files: CheckpointFiles, name: str, dtype: torch.dtype, expert: int | None = None) -> Tensor:
        found = self._found(files, name, expert)
        with told(files, name, part_of(name, self.values)):
            return dequantize_nvfp4(*found, dtype)

    def narrow(self, files: CheckpointFiles, name: str, expert: int | None, device: torch.device) -> Imported:
        found = [part.to(device) for part in self._found(files, name, expert)]
        with told(files, name, part_of(name, self.values)):
            return Imported(from_nvfp4(*found), None)

    def _found(self, files: CheckpointFiles, name: str, expert: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Values, their scales, and the number that those are multiplied by."""
        values, scales = (self._part(files, name, part, expert) for part in (self.values, self.inner))
        outer = self._part(files, name, self.outer)
        if expert is not None and outer.numel() > 1:
            outer = outer[expert]
        if outer.numel() != 1 or not bool(outer.isfinite().all() and (outer > 0).all()):
            stored = part_of(name, self.outer)
            given = outer.item() if outer.numel() == 1 else f"of shape {tuple(outer.shape)}"
            raise ValueError(f"{files.names[stored]}: {stored!r} is {given}: must be one number > 0")
        return values, scales, outer.float().reshape(())


class ModelOptTogether(ModelOptNvfp4):
    """Those of all experts in one tensor, `[E, N, K/2]`, or `[E, K/2, N]` where the model's own is transposed."""

    needs, inner, outer = ("_weight_scale", "_weight_scale_2"), "_weight_scale", "_weight_scale_2"

    def _found(self, files: CheckpointFiles, name: str, expert: int | None) -> tuple[Tensor, Tensor, Tensor]:
        values, scales, outer = super()._found(files, name, expert)
        if values.shape == (scales.shape[0] * 8, *scales.shape[1:]):
            values, scales = values.T.contiguous(), scales.T.contiguous()
        return values, scales, outer


class PackedFp4(ModelOptNvfp4):
    """Four-bit floats of compressed-tensors: NVFP4, whose second scale is what the first is divided by, or MXFP4."""

    values, needs, outer = "_packed", ("_scale", "_global_scale"), "_global_scale"

    def there(self, files: CheckpointFiles, name: str) -> bool:
        stored = part_of(name, self.values)
        return stored in files.names and files.kind(stored) == "U8"

    def called(self, files: CheckpointFiles, name: str) -> str:
        exponents = f"{name}_scale" in files.names and files.kind(f"{name}_scale") in ("U8", "F8_E8M0")
        return "MXFP4" if exponents else "NVFP4"

    def scheme(self, files: CheckpointFiles, name: str) -> str:
        self._name(files, name, "_scale")
        return self.called(files, name).lower()

    def wide(self, files: CheckpointFiles, name: str, dtype: torch.dtype, expert: int | None = None) -> Tensor:
        if self.scheme(files, name) == "nvfp4":
            return super().wide(files, name, dtype, expert)
        blocks, scales = self._blocks(files, name, expert)
        with told(files, name, f"{name}_packed"):
            return dequantize_mxfp4(blocks, scales, dtype)

    def narrow(self, files: CheckpointFiles, name: str, expert: int | None, device: torch.device) -> Imported:
        if self.scheme(files, name) == "nvfp4":
            return super().narrow(files, name, expert, device)
        found = [part[None].to(device) for part in self._blocks(files, name, expert)]
        with told(files, name, f"{name}_packed"):
            return Imported(from_mxfp4_blocks(*found), None)

    def _blocks(self, files: CheckpointFiles, name: str, expert: int | None) -> tuple[Tensor, Tensor]:
        packed = self._part(files, name, "_packed", expert)
        if packed.shape[-1] % 16:
            raise ValueError(f"{files.names[f'{name}_packed']}: {name!r} has no whole groups of 32 columns")
        return packed.unflatten(-1, (-1, 16)), self._part(files, name, "_scale", expert).view(torch.uint8)

    def _found(self, files: CheckpointFiles, name: str, expert: int | None) -> tuple[Tensor, Tensor, Tensor]:
        values, scales, outer = super()._found(files, name, expert)
        return values, scales, 1 / outer


class WithIntegers(Narrow):
    """Integers in words; `scales` is the part that holds those of groups."""

    scales = "_scale"

    @abstractmethod
    def integers(
        self, files: CheckpointFiles, name: str, expert: int | None, device: torch.device | str = "cpu"
    ) -> Integers:
        """What the words hold, in the order of the file."""

    def wide(self, files: CheckpointFiles, name: str, dtype: torch.dtype, expert: int | None = None) -> Tensor:
        return dequantize_integers(self.integers(files, name, expert), dtype)

    def narrow(self, files: CheckpointFiles, name: str, expert: int | None, device: torch.device) -> Imported:
        integers = self.integers(files, name, expert, device)
        with told(files, name, part_of(name, self.values)):
            return narrow_of(integers)

    def _sorted(self, files: CheckpointFiles, name: str, part: str, group_size: int) -> Tensor | None:
        """The order that sorts the columns by the groups that `part` names; None: they lie so."""
        stored = part_of(name, part)
        if stored not in files.names:
            return None
        groups = files.raw(stored).long()
        plain = torch.arange(len(groups), device=groups.device) // (len(groups) if group_size == -1 else group_size)
        return None if bool((groups < 0).all()) or torch.equal(groups, plain) else groups.argsort(stable=True)


class PackedIntegers(WithIntegers):
    """Integers of compressed-tensors, packed along K."""

    label, values, needs = "packed integers", "_packed", ("_scale",)
    may = ("_shape", "_zero_point", "_g_idx", *OF_ACTIVATIONS)

    def there(self, files: CheckpointFiles, name: str) -> bool:
        stored = part_of(name, self.values)
        return stored in files.names and files.kind(stored) == "I32"

    def scheme(self, files: CheckpointFiles, name: str) -> str:
        _, bits, size = self._sizes(files, name)
        with told(files, name, f"{name}_packed"):
            return integer_scheme(bits, size)

    def order(self, files: CheckpointFiles, name: str) -> Tensor | None:
        return self._sorted(files, name, "_g_idx", self._sizes(files, name)[2])

    def integers(
        self, files: CheckpointFiles, name: str, expert: int | None, device: torch.device | str = "cpu"
    ) -> Integers:
        width, bits, size = self._sizes(files, name)
        parts = {
            f"weight{part}": files.raw(name + part, expert).to(device)
            for part in ("_packed", "_scale", "_zero_point", "_g_idx")
            if part in self.needs or name + part in files.names
        }
        with told(files, name, f"{name}_packed"):
            return packed_integers(**parts, width=width, bits=bits, group_size=size)

    def _sizes(self, files: CheckpointFiles, name: str) -> tuple[int, int, int]:
        """K, bits and group size, which layers of one checkpoint may have of their own."""
        words, groups = (self._shape(files, name, part)[-1] for part in ("_packed", "_scale"))
        if f"{name}_shape" not in files.names:
            width, bits = words * 32 // files.stored.bits, files.stored.bits
        else:
            width = int(files.raw(f"{name}_shape").flatten()[-1])
            bits = files.stored.bits if -(-width * files.stored.bits // 32) == words else round(words * 32 / width)
        return width, bits, _group_size(width, groups, files.stored.group_size)


class Words(WithIntegers):
    """GPTQ and AWQ, of which `quantization_config` tells which it is."""

    label, values, scales = "GPTQ or AWQ", "qweight", "scales"
    needs, may = ("qzeros", "scales"), ("g_idx", *OF_ACTIVATIONS)

    def called(self, files: CheckpointFiles, name: str) -> str:
        return (files.stored.words or self.label).upper()

    def there(self, files: CheckpointFiles, name: str) -> bool:
        return name.endswith(".weight") and part_of(name, "qweight") in files.names

    def name_of(self, stored: str) -> str | None:
        return f"{stored.removesuffix('qweight')}weight" if stored.endswith(".qweight") else None

    def scheme(self, files: CheckpointFiles, name: str) -> str:
        bits, size = self._sizes(files, name)
        with told(files, name, part_of(name, "qweight")):
            if bits not in (4, 8):
                raise ValueError(f"bits={bits}: must be 4 or 8")
            return integer_scheme(bits, size)

    def order(self, files: CheckpointFiles, name: str) -> Tensor | None:
        return self._sorted(files, name, "g_idx", self._sizes(files, name)[1]) if files.stored.words == "gptq" else None

    def integers(
        self, files: CheckpointFiles, name: str, expert: int | None, device: torch.device | str = "cpu"
    ) -> Integers:
        bits, size = self._sizes(files, name)
        words, zeros, scales = (self._part(files, name, part, expert).to(device) for part in (self.values, *self.needs))
        with told(files, name, part_of(name, "qweight")):
            if files.stored.words == "awq":
                return awq_integers(words, zeros, scales, group_size=size)
            stored = part_of(name, "g_idx")
            groups = files.raw(stored, expert).to(device) if stored in files.names else None
            how = {"zeros_less_one": files.stored.zeros_less_one, "zeros_borrow": files.stored.zeros_borrow}
            return gptq_integers(words, zeros, scales, groups, bits=bits, group_size=size, **how)

    def _sizes(self, files: CheckpointFiles, name: str) -> tuple[int, int]:
        """Bits and group size, which layers may have of their own (GPTQ's `dynamic`, AutoRound's `extra_config`): told
        by the shapes."""
        stored = files.stored
        if stored.words is None:
            raise ValueError(
                f"{files.directory}: {name!r} is held in `qweight`, and quantization_config.quant_method="
                f"{stored.method!r} does not say how: must be gptq, awq or auto-round"
            )
        words, groups = self._shape(files, name, "qweight")[-2], self._shape(files, name, "scales")[-2]
        if stored.words == "awq":
            return 4, _group_size(words, groups, stored.group_size)
        bits = self._bits(files, name)
        return bits, _group_size(words * 32 // bits, groups, stored.group_size)

    def _bits(self, files: CheckpointFiles, name: str) -> int:
        """By what lies beside the words: the group of each row where files have it, else zero points, of which each
        channel has one."""
        beside, usual = part_of(name, "g_idx"), files.stored.bits
        if beside in files.names:
            return self._shape(files, name, "qweight")[-2] * 32 // files.slice(beside).get_shape()[-1]
        zeros, channels = (self._shape(files, name, part)[-1] for part in self.needs)
        return usual if -(-channels * usual // 32) == zeros else round(zeros * 32 / channels) or usual


def _group_size(width: int, groups: int, usual: int) -> int:
    """Of `groups` over `width` columns, the usual one where it fits."""
    if usual > 0 and -(-width // usual) == groups:
        return usual
    return -1 if groups == 1 else -(-width // groups)
