"""One way in which checkpoint files hold a matrix: plain numbers, eight bits with scales, what narrow weights have in
common.

Each way reads a matrix, or one expert's of a tensor over all experts, as numbers of a dtype (`wide`); those that are
narrow weights give them without rounding too (`narrow`). Which ways there are: `packings.py`.

N output channels, K what is summed over.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from epmoe.integrations.transformers.dequantize import dequantize_scaled
from epmoe.integrations.transformers.files import CheckpointFiles
from epmoe.quant.checkpoint_formats import Imported
from epmoe.quant.weights import FP8_SCHEMES

OF_ACTIVATIONS = ("input_scale", "input_global_scale", "input_zero_point", "output_scale")
"""What may lie beside a quantized `weight` and says nothing of it."""
SCALES = ("_scale_inv", "_scale", "_weight_scale")
"""What is added to the name of eight-bit values for that of their scales."""


class Packing:
    """One way.

    Attributes:
        label: its name.
        values: the part that holds the values; as `part_of`.
        needs, may: parts that must, and that can be there beside it.
        oriented: matrices are `[N, K]`, whichever way the model's own tensors over all experts lie.
    """

    label = "plain numbers"
    values = ""
    needs: tuple[str, ...] = ()
    may: tuple[str, ...] = ()
    oriented = False

    def called(self, files: CheckpointFiles, name: str) -> str:
        """What messages call the way of matrix `name`."""
        return self.label

    def there(self, files: CheckpointFiles, name: str) -> bool:
        """Whether the matrix is held in this way."""
        return part_of(name, self.values) in files.names

    def name_of(self, stored: str) -> str | None:
        """The matrix whose values a tensor called `stored` may hold; None: of none."""
        if not self.values.startswith("_"):
            return stored
        return stored.removesuffix(self.values) if stored.endswith(self.values) else None

    def parts(self, name: str) -> set[str]:
        """Names of the tensors that belong to the matrix where they are there."""
        return {part_of(name, part) for part in (self.values, *self.needs, *self.may)}

    def wide(self, files: CheckpointFiles, name: str, dtype: torch.dtype, expert: int | None = None) -> Tensor:
        """The matrix in `dtype`, or one expert's of a tensor over all of them; reads those bytes alone.

        Raises:
            ValueError: a part is missing, or parts that don't fit each other.
        """
        found = files.raw(name, expert)
        if found.dtype.itemsize == 1:
            raise ValueError(f"{files.names[name]}: {without_scales(name, str(found.dtype))}")
        return found.to(dtype)


class Scaled(Packing):
    """Eight-bit values, with a scale for each tile, channel or tensor.

    Attributes:
        schemes: those that may hold such values as they are.
    """

    may: tuple[str, ...] = (*SCALES, *OF_ACTIVATIONS)
    schemes: tuple[str, ...] = ()

    def there(self, files: CheckpointFiles, name: str) -> bool:
        return name in files.names and self.scale_name(files, name) is not None

    def scale_name(self, files: CheckpointFiles, name: str) -> str | None:
        """The name of the scales, if there are some."""
        return next((name + part for part in SCALES if name + part in files.names), None)

    def scale(self, files: CheckpointFiles, name: str, expert: int | None = None) -> Tensor:
        """The scales of a tensor, or of one expert's part of it; one number may stand for all experts."""
        scale = self.scale_name(files, name)
        assert scale is not None
        shape = files.slice(scale).get_shape()
        found = files.raw(scale, None if len(shape) == 0 or list(shape) == [1] else expert)
        if not found.is_floating_point():
            raise ValueError(f"{files.names[scale]}: scales {scale!r} are {found.dtype}: must be floating numbers")
        return found

    def wide(self, files: CheckpointFiles, name: str, dtype: torch.dtype, expert: int | None = None) -> Tensor:
        weight = self.read(files, name, expert)
        with told(files, name, name):
            return dequantize_scaled(weight, self.scale(files, name, expert), dtype, files.stored.block)

    def read(self, files: CheckpointFiles, name: str, expert: int | None = None) -> Tensor:
        """The values of a tensor, or of one expert's part of it, without their scales.

        Raises:
            ValueError: they mean something else.
        """
        return files.raw(name, expert)


class Fp8(Scaled):
    """Eight-bit floats."""

    label, schemes = "FP8", FP8_SCHEMES

    def read(self, files: CheckpointFiles, name: str, expert: int | None = None) -> Tensor:
        weight = super().read(files, name, expert)
        if not weight.is_floating_point():
            raise ValueError(
                f"{files.names[name]}: {name!r} with scales is {weight.dtype}: must be a float8 or torch.int8"
            )
        return weight


class Int8(Scaled):
    """Integers of eight bits, one in a byte."""

    label, schemes, may = "INT8", ("int8_row",), (*Scaled.may, "_zero_point")

    def there(self, files: CheckpointFiles, name: str) -> bool:
        return super().there(files, name) and files.kind(name) == "I8"

    def read(self, files: CheckpointFiles, name: str, expert: int | None = None) -> Tensor:
        zeros = f"{name}_zero_point"
        if zeros in files.names and bool(files.raw(zeros).any()):
            raise ValueError(
                f"{files.names[zeros]}: {zeros!r} is not all zeros: INT8 weights with zero points "
                "are not supported, must be symmetric"
            )
        return super().read(files, name, expert)


class Narrow(Packing, ABC):
    """Those that are narrow weights of `quant.narrow`, scheme by scheme."""

    oriented = True

    @abstractmethod
    def scheme(self, files: CheckpointFiles, name: str) -> str:
        """The scheme that holds these numbers as they are; reads shapes alone.

        Raises:
            ValueError: there is none, or a part is missing.
        """

    @abstractmethod
    def narrow(self, files: CheckpointFiles, name: str, expert: int | None, device: torch.device) -> Imported:
        """`[1, N, K]` on `device`, with the order of its columns where that is not the file's.

        Raises:
            ValueError: a part is missing, parts that don't fit, or numbers that narrow weights don't hold.
        """

    def order(self, files: CheckpointFiles, name: str) -> Tensor | None:
        """The order that `narrow` will bring the columns of one expert's matrix into; reads no values."""
        return None

    def _part(self, files: CheckpointFiles, name: str, part: str, expert: int | None = None) -> Tensor:
        return files.raw(self._name(files, name, part), expert)

    def _shape(self, files: CheckpointFiles, name: str, part: str) -> list[int]:
        return list(files.slice(self._name(files, name, part)).get_shape())

    def _name(self, files: CheckpointFiles, name: str, part: str) -> str:
        stored = part_of(name, part)
        if stored not in files.names:
            where, needs = files.names[part_of(name, self.values)], (part_of(name, each) for each in self.needs)
            raise ValueError(
                f"{where}: {name!r} is held in {self.called(files, name)}, and {stored!r} is not there: values mean "
                f"nothing without {', '.join(needs)}"
            )
        return stored


def part_of(name: str, part: str) -> str:
    """The tensor beside matrix `name`: `_scale` is added to its name, `scales` stands where `weight` does in it, and
    is added with a `_` where it does not."""
    if not part or part.startswith("_"):
        return name + part
    return name.removesuffix("weight") + part if name.endswith("weight") else f"{name}_{part}"


def without_scales(name: str, kind: str) -> str:
    """What to say of eight-bit values that have no scales."""
    beside = " nor ".join(repr(name + part) for part in ("_scale_inv", "_scale"))
    return f"{name!r} is {kind}, and neither {beside} is there: values mean nothing without their scales"


@contextlib.contextmanager
def told(files: CheckpointFiles, name: str, stored: str) -> Iterator[None]:
    """Errors name the file and the matrix."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{files.names[stored]}: {name!r}: {error}") from error
