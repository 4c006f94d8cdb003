"""Which experts compute, and why not the others."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from epmoe.checks import as_device, check_kind, check_name
from epmoe.config import MoEConfig
from epmoe.experts.base import Experts
from epmoe.experts.batched import BatchedExperts
from epmoe.experts.grouped import GroupedExperts
from epmoe.experts.grouped_fp8 import GroupedFp8Experts
from epmoe.experts.grouped_fp8_train import GroupedFp8TrainExperts
from epmoe.experts.grouped_int8 import GroupedInt8Experts
from epmoe.experts.monolithic import MonolithicExperts
from epmoe.experts.reference import ReferenceExperts
from epmoe.experts.spec import ExpertsSpec
from epmoe.experts.torch_grouped import TorchGroupedExperts
from epmoe.experts.weight_only import WeightOnlyExperts

_KINDS: tuple[type[Experts], ...] = (
    GroupedExperts,
    TorchGroupedExperts,
    BatchedExperts,
    MonolithicExperts,
    ReferenceExperts,
)
EXPERTS = {cls.name: cls for cls in _KINDS}
"""Every kind of experts for weights that are not quantized, by name."""
QUANTIZED_EXPERTS: dict[str, type[Experts]] = {
    cls.name: cls for cls in (GroupedFp8Experts, GroupedInt8Experts, WeightOnlyExperts, ReferenceExperts)
}
"""Every kind for quantized weights; each says in `schemes` for which."""
TRAINING_EXPERTS: dict[str, type[Experts]] = {cls.name: cls for cls in (GroupedFp8TrainExperts,)}
"""Kinds for wide weights that multiply in fewer bits than these have; by name only, never by `auto`."""
EXPERTS_BY_LAYOUT = {
    layout: {cls.name: cls for cls in _KINDS if layout in cls.layouts} for layout in ("standard", "batched")
}
"""Those that take rows in a layout, by layout and name."""

_PREFERENCE = {
    ("standard", "cuda"): ("grouped", "torch_grouped", "reference"),
    ("standard", "cpu"): ("reference", "grouped", "torch_grouped"),
    ("batched", "cuda"): ("batched", "reference"),
    ("batched", "cpu"): ("reference", "batched"),
}
_QUANTIZED_PREFERENCE = {
    "cuda": ("grouped_fp8", "grouped_int8", "weight_only", "reference"),
    "cpu": ("reference", "grouped_fp8", "grouped_int8", "weight_only"),
}


class Candidate(NamedTuple):
    """Attributes: `name`; `refusal`, why it can't take the problem, None if it can; `note`, what was made of it."""

    name: str
    refusal: str | None
    note: str


@dataclasses.dataclass(frozen=True)
class Selection:
    """The experts chosen, and every candidate in the order of preference with what speaks against it."""

    experts: Experts
    candidates: tuple[Candidate, ...] = ()

    @property
    def passed_over(self) -> tuple[tuple[str, str], ...]:
        """Candidates that would have come first, each with its reason."""
        names = [candidate.name for candidate in self.candidates]
        before = self.candidates[: names.index(self.experts.name)] if self.experts.name in names else ()
        return tuple((candidate.name, candidate.refusal) for candidate in before if candidate.refusal is not None)

    def __str__(self) -> str:
        return "; ".join([self.experts.name, *(f"not {name}: {reason}" for name, reason in self.passed_over)])


def select_experts(spec: ExpertsSpec, requested: str = "auto", layout: str = "standard") -> Selection:
    """The fastest experts that take `spec` with rows in `layout`, or the requested ones.

    Args:
        requested: a name, or `auto`.
        layout: `standard` or `batched`, what the dispatcher gives.

    Raises:
        ValueError: an unknown name or layout; the requested experts take another layout or refuse; or all do, with
            each one's reason.
    """
    check_kind("spec", spec, ExpertsSpec, "an ExpertsSpec", "a MoEConfig goes to select_experts_impl")
    check_name("layout", layout, EXPERTS_BY_LAYOUT)
    check_kind("experts", requested, str, "auto, or the name of a kind")
    device = "cuda" if spec.device.type == "cuda" else "cpu"
    if spec.scheme is None:
        kinds, preferred = EXPERTS_BY_LAYOUT[layout], _PREFERENCE[layout, device]
    else:
        kinds = {name: cls for name, cls in QUANTIZED_EXPERTS.items() if layout in cls.layouts}
        preferred = tuple(name for name in _QUANTIZED_PREFERENCE[device] if name in kinds)
    if requested in TRAINING_EXPERTS and spec.scheme is None and layout in TRAINING_EXPERTS[requested].layouts:
        kinds = {**kinds, requested: TRAINING_EXPERTS[requested]}
    refusals = {
        name: kinds[name].reason_against(spec) for name in (*preferred, *(n for n in kinds if n not in preferred))
    }
    if requested != "auto":
        if requested not in kinds:
            other = (EXPERTS | QUANTIZED_EXPERTS | TRAINING_EXPERTS).get(requested)
            if other is not None and spec.scheme not in other.schemes:
                raise ValueError(f"experts={requested!r}: {other.reason_against(spec)}")
            takes = "" if other is None else f" takes {' or '.join(other.layouts)} rows and these are {layout}"
            named = [n for n, k in TRAINING_EXPERTS.items() if spec.scheme is None and layout in k.layouts]
            raise ValueError(f"experts={requested!r}{takes}: must be auto, " + ", ".join([*kinds, *named]))
        chosen, why = requested, "asked for by name"
    else:
        willing = [name for name in preferred if refusals[name] is None]
        if not willing:
            raise ValueError(
                f"no experts can take {layout} rows of this layer: "
                + "; ".join(f"{name}: {refusals[name]}" for name in preferred)
            )
        chosen, why = willing[0], "the fastest that takes this layer"

    def note(name: str, refusal: str | None) -> str:
        if name == chosen:
            return why
        if refusal is not None:
            return refusal
        return f"would do; {chosen} is preferred" if name in preferred else "only by name"

    candidates = tuple(Candidate(name, refusal, note(name, refusal)) for name, refusal in refusals.items())
    return Selection(kinds[chosen](spec), candidates)


def select_experts_impl(
    config: MoEConfig, *, device: torch.device | str, dtype: torch.dtype, lora: bool = False
) -> Selection:
    """The implementation that a layer of this configuration gets, and every candidate with its reason.

    Args:
        device, dtype: of rows and weights.
        lora: the layer has adapters.

    Raises:
        ValueError: as `select_experts`.
    """
    check_kind("config", config, MoEConfig, "a MoEConfig")
    spec = ExpertsSpec.of(config, device=as_device(device, here=False), dtype=dtype, lora=lora)
    quant = config.quant
    requested = config.experts if quant is None or quant.weights is None else quant.experts
    return select_experts(spec, requested, config.experts_layout)
