"""Where in a checkpoint's files one block's experts lie, and one expert's tensors in our layout.

Experts lie one matrix each or in tensors over all of them, either held in any way of `packings.py`. Whatever the form,
one expert's bytes are read and no other's.

E experts, H hidden size, I expert intermediate size.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from epmoe.integrations.transformers.files import CheckpointFiles
from epmoe.integrations.transformers.layouts import to_ours
from epmoe.integrations.transformers.packing import Narrow, Packing, Scaled, part_of
from epmoe.integrations.transformers.packing_narrow import WithIntegers
from epmoe.integrations.transformers.packings import PLAIN, packing_of
from epmoe.integrations.transformers.presets import Preset
from epmoe.ops.quantize import row_format
from epmoe.ops.quantize_blocks import BLOCK
from epmoe.quant.checkpoint_formats import concat_channels, take_channels
from epmoe.quant.formats import parts_of

SCALE_KINDS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""What safetensors calls dtypes of scales, and what `QuantConfig.scale_dtype` does."""


@dataclasses.dataclass(frozen=True)
class BlockExperts:
    """One block's experts on disk.

    Attributes:
        sources: by our name, what the model calls it: single experts' matrices with `{}` for the expert, to be stacked
            by rows, or one tensor over all experts.
    """

    files: CheckpointFiles
    preset: Preset
    sources: dict[str, tuple[str, ...]]

    @classmethod
    def find(cls, files: CheckpointFiles, preset: Preset, blocks: Iterable[str]) -> BlockExperts:
        """The experts of the block that is called one of `blocks` there.

        Raises:
            ValueError: none is there, in any form; lists what was looked for.
        """
        tried = []
        for block in blocks:
            for sources in _forms(preset, block, f"{block}.{preset.experts}"):
                names = [name.format(0) for parts in sources.values() for name in parts]
                if all(packing_of(files, name) is not None for name in names):
                    return cls(files, preset, sources)
                tried.append(names[0])
        raise ValueError(
            f"{files.directory}: experts of preset {preset.family!r} are under none of the names {', '.join(tried)}; "
            "Preset.disk says how a checkpoint names them"
        )

    def starts(self) -> list[str]:
        """How the names of these tensors begin on disk, and of their scales, and of no others."""
        return [part.partition("{}")[0] for parts in self.sources.values() for part in parts]

    def tensors(self, expert: int) -> dict[str, ExpertTensor]:
        """One expert's tensors by our names, looked up and not yet read.

        Raises:
            ValueError: the expert has biases, and the preset none.
        """
        return {our: self._tensor(our, expert) for our in self.sources}

    def scale_dtype(self) -> str | None:
        """Of the scales of integers, as `QuantConfig` calls it; None where the experts are something else."""
        (name, packing), *_ = self._tensor("down_proj", 0).matrices
        if not isinstance(packing, WithIntegers):
            return None
        return SCALE_KINDS.get(self.files.kind(part_of(name, packing.scales)))

    def input_scales(self, our: str, experts: Iterable[int]) -> Tensor | None:
        """The fixed scales of what `our` projection of `experts` multiplies, one for each, the larger of gate's and
        up's; None where the checkpoint has none.

        Raises:
            ValueError: it has those of other experts alone.
        """
        found, missing = [], []
        together = "{}" not in self.sources[our][0]
        raw = functools.cache(self.files.raw)  # what is of all experts together is read once
        for expert in experts:
            names = [part_of(part.format(expert), "input_scale") for part in self.sources[our]]
            if absent := [name for name in names if name not in self.files.names]:
                missing += absent
                continue
            scales = [raw(name).float() for name in names]
            each = [scale[expert] if together and scale.numel() > 1 else scale for scale in scales]
            found.append(torch.stack([scale.max() for scale in each]).max())
        if found and missing:
            raise ValueError(
                f"{self.files.directory}: {missing[0]!r} is missing, and other experts have theirs: leave "
                "QuantConfig.scales and down_scales 'dynamic' to scale each row by itself"
            )
        return torch.stack(found) if found else None

    def _tensor(self, our: str, expert: int) -> ExpertTensor:
        parts = self.sources[our]
        together, names = "{}" not in parts[0], [part.format(expert) for part in parts]
        if not together:
            for name in names:
                self._refuse_bias(part_of(name, "bias"))
        matrices = tuple((name, packing_of(self.files, name) or PLAIN) for name in names)
        return ExpertTensor(self.files, self.preset, our, matrices, expert if together else None)

    def _refuse_bias(self, name: str) -> None:
        if name in self.files.names and bool(self.files.raw(name).any()):
            raise ValueError(
                f"{self.files.names[name]}: {name!r} is not all zeros, and experts of preset {self.preset.family!r} "
                "have no biases"
            )


@dataclasses.dataclass(frozen=True)
class ExpertTensor:
    """One tensor of one expert on disk.

    Attributes:
        our: `gate_up_proj`, `down_proj`, `gate_up_bias` or `down_bias`.
        matrices: what it is stacked of by rows, name and way of each.
        one: the expert, where a matrix is a tensor over all of them; None: the matrices are its own.
    """

    files: CheckpointFiles
    preset: Preset
    our: str
    matrices: tuple[tuple[str, Packing], ...]
    one: int | None

    def row(self, dtype: torch.dtype, order: Tensor | None = None) -> Tensor:
        """The tensor in our layout and `dtype`; reads its bytes alone.

        Args:
            order: of gate's and up's channels; None: as on disk.
        """
        tensors, one = self.preset.tensors, self.one
        rows = []
        for name, packing in self.matrices:
            if isinstance(packing, Scaled) and tensors.transposed and one is not None:
                self._refuse_flat_scales(name, packing)
            row = packing.wide(self.files, name, dtype, one)
            lies = dataclasses.replace(tensors, transposed=False) if packing.oriented else tensors
            rows.append(row if one is None else to_ours(lies, self.our, row))
        row = torch.cat(rows) if len(rows) > 1 else rows[0]
        return row if order is None or self.our != "gate_up_proj" else row[_of_both(order)]

    def kept(
        self,
        scheme: str | None,
        block: tuple[int, int] = BLOCK,
        order: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> dict[str, Tensor] | None:
        """Its values and scales with the bits that they have on disk, by our names, for a layer that holds `scheme`;
        None where they mean something else there.

        FP8 tiles of `block` that end where gate and up do; FP8 and INT8 channels; narrow weights.

        Args:
            order: as of `row`.
            device: where narrow weights are packed anew.

        Raises:
            ValueError: weights of that scheme whose columns are in an order of their own.
        """
        if all(isinstance(packing, Narrow) for _, packing in self.matrices):
            return self._kept_narrow(scheme, order, torch.device(device))
        tensors, one, (_, eight) = self.preset.tensors, self.one, self.matrices[0]
        if one is not None and (tensors.transposed or tensors.interleaved):
            return None
        if not isinstance(eight, Scaled) or any(packing is not eight for _, packing in self.matrices):
            return None
        if scheme is None or scheme not in eight.schemes:
            return None
        form = row_format(scheme)
        if form.group and self.files.stored.block != block:
            return None
        values = [eight.read(self.files, name, one) for name, _ in self.matrices]
        scales = [eight.scale(self.files, name, one).float() for name, _ in self.matrices]
        if any(value.dtype != form.dtype for value in values):
            return None
        pairs = list(zip(values, scales, strict=True))
        if not form.group:
            if any(tuple(s.shape) not in ((), (1,), (1, 1), v.shape[:1], (v.shape[0], 1)) for v, s in pairs):
                return None
            scales = [s.reshape(-1).expand(v.shape[0]) for v, s in pairs]
        else:
            if any(value.shape[0] % block[0] for value in values[:-1]):
                return None
            if any(tuple(s.shape) != (-(-v.shape[0] // block[0]), -(-v.shape[1] // block[1])) for v, s in pairs):
                return None
            if scheme == "fp8_block_ue8m0" and any((s.frexp().mantissa != 0.5).any() for s in scales):
                return None
        bits = torch.cat([value.view(torch.uint8) for value in values]).view(form.dtype)
        return {self.our: bits, f"{self.our}_scale_inv": torch.cat(scales)}

    def order(self, scheme: str | None) -> Tensor | None:
        """The order of the expert's activation channels in a layer that keeps this, its down projection, in `scheme`: a
        group of activation-ordered columns lies together only if what they meet is sorted alike."""
        (name, packing), *_ = self.matrices
        if self.one is not None or not isinstance(packing, Narrow) or packing.scheme(self.files, name) != scheme:
            return None
        return packing.order(self.files, name)

    def called(self) -> str | None:
        """The ways in which it is held, as messages call them; None: in plain numbers."""
        if all(packing is PLAIN for _, packing in self.matrices):
            return None
        return " and ".join(dict.fromkeys(packing.called(self.files, name) for name, packing in self.matrices))

    def _kept_narrow(self, scheme: str | None, order: Tensor | None, device: torch.device) -> dict[str, Tensor] | None:
        our, one, parts = self.our, self.one, []
        for name, packing in self.matrices:
            assert isinstance(packing, Narrow)
            if packing.scheme(self.files, name) != scheme:
                return None
            weights, sorting = packing.narrow(self.files, name, one, device)
            if sorting is not None and (our != "down_proj" or one is not None):
                raise ValueError(
                    f"{self.files.directory}: the columns of {name!r} are in activation order (desc_act), which the "
                    f"tokens' rows are not: {scheme!r} can't hold them; leave quant out to have them dequantized, or "
                    "name another scheme, into which they are quantized again"
                )
            parts.append(weights)
        whole = concat_channels(parts) if len(parts) > 1 else parts[0]
        if our == "gate_up_proj" and self.preset.tensors.interleaved and len(parts) == 1:
            channels = torch.arange(whole.shape[1], device=device)
            whole = take_channels(whole, torch.cat((channels[::2], channels[1::2])))
        if our == "gate_up_proj" and order is not None:
            whole = take_channels(whole, _of_both(order).to(device))
        return {our + suffix: part[0] for suffix, part in parts_of(whole).items()}

    def _refuse_flat_scales(self, name: str, packing: Scaled) -> None:
        if (shape := tuple(packing.scale(self.files, name, self.one).shape)) not in ((), (1,)) and len(shape) == 1:
            raise ValueError(
                f"{self.files.names[name]}: {name!r} is transposed, and its scales of an expert are {shape}: must say "
                "with two dimensions whether they are of rows or of columns"
            )


def _of_both(order: Tensor) -> Tensor:
    """The order of gate's channels as that of gate's and up's, which lie behind them."""
    return torch.cat((order, order + len(order)))


def _forms(preset: Preset, block: str, prefix: str) -> list[dict[str, tuple[str, ...]]]:
    """Each form that the experts of `block` may have: its sources."""
    disk = preset.disk
    fused: dict[str, tuple[str, ...]] = {o: (f"{prefix}.{theirs}",) for o, theirs in preset.tensors.names().items()}
    forms = [fused]
    if disk.fused_gate_up is not None and disk.fused_down is not None:
        renamed = {"gate_up_proj": (f"{block}.{disk.fused_gate_up}",), "down_proj": (f"{block}.{disk.fused_down}",)}
        forms.append({**fused, **renamed})
    if preset.tensors.gate_up_bias is None:
        each = f"{prefix}.{{}}."
        gate_up = (f"{each}{disk.gate}.weight", f"{each}{disk.up}.weight")
        forms.append({"gate_up_proj": gate_up, "down_proj": (f"{each}{disk.down}.weight",)})
    return forms
