"""The ways in which checkpoint files hold a matrix that the model calls `name`, told by the tensors that are there.

    way                values                   beside them
    plain              name
    FP8, INT8          name (F8_E4M3, I8)       name_scale_inv, name_scale or name_weight_scale
    NVFP4, ModelOpt    name (U8)                name_scale, name_scale_2; name_weight_scale, name_weight_scale_2
    MXFP4              name_blocks              name_scales
    NVFP4, MXFP4       name_packed (U8)         name_scale, of NVFP4 name_global_scale                compressed-tensors
    integers           name_packed (I32)        name_scale, name_shape, name_zero_point, name_g_idx   compressed-tensors
    GPTQ, AWQ          qweight, in the place of the `weight` that `name` ends in, and qzeros, scales, g_idx there

`packing_of` finds the way of a matrix: of an expert's, of a tensor over all experts, of a dense layer's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from epmoe.integrations.transformers.files import CheckpointFiles
from epmoe.integrations.transformers.packing import Fp8, Int8, Packing
from epmoe.integrations.transformers.packing_narrow import (
    ModelOptNvfp4,
    ModelOptTogether,
    Mxfp4Blocks,
    PackedFp4,
    PackedIntegers,
    Words,
)

OF_CACHES = (".k_scale", ".v_scale", ".q_scale", ".prob_scale", ".k_zero_point", ".v_zero_point")
"""How names end that are of a cache of keys and values in fewer bits."""
PACKINGS = (
    Words(), PackedIntegers(), PackedFp4(), Mxfp4Blocks(), ModelOptNvfp4(), ModelOptTogether(), Int8(), Fp8(),
    Packing(),
)  # fmt: skip
"""Every way; of those whose tensors are there the first is meant."""
PLAIN = PACKINGS[-1]


@dataclasses.dataclass(frozen=True)
class Dequantized:
    """A matrix that is read and dequantized when it is indexed, as a slice of safetensors is read; its name is in
    `read` from then on."""

    files: CheckpointFiles
    name: str
    packing: Packing
    dtype: torch.dtype
    read: set[str]

    def __getitem__(self, index: Any) -> Tensor:
        self.read.add(self.name)
        return self.packing.wide(self.files, self.name, self.dtype)[index]


def packing_of(files: CheckpointFiles, name: str) -> Packing | None:
    """How the files hold matrix `name`; None: they don't."""
    return next((packing for packing in PACKINGS if packing.there(files, name)), None)


def all_but(files: CheckpointFiles, starts: Iterable[str]) -> dict[str, Packing]:
    """Every tensor whose name begins with none of `starts`, by the name that the model knows it by, with its way.

    Raises:
        ValueError: layers whose inputs are scaled before they are multiplied.
    """
    found: dict[str, Packing] = {}
    rest = [name for name in files.names if not name.startswith(tuple(starts))]
    if scaled := [name for name in files.names if name.endswith(".pre_quant_scale")]:
        raise ValueError(
            f"{files.names[scaled[0]]}: {scaled[0]!r}: inputs that are scaled channel by channel are not supported"
        )
    for stored in rest:
        for packing in PACKINGS:
            name = packing.name_of(stored)
            if name is not None and packing.there(files, name):
                found.setdefault(name, packing)
                break
    quantized = {name: packing for name, packing in found.items() if packing is not PLAIN}
    beside = {part for name, packing in quantized.items() for part in packing.parts(name)}
    return quantized | {
        name: PLAIN
        for name in rest
        if name not in quantized and name not in beside and not name.endswith(("_scale_inv", *OF_CACHES))
    }
