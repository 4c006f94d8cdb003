"""Which experts compute, and why not the others."""

from __future__ import annotations

import dataclasses

from epmoe.experts.base import Experts, ExpertsSpec
from epmoe.experts.grouped import GroupedExperts
from epmoe.experts.reference import ReferenceExperts
from epmoe.experts.torch_grouped import TorchGroupedExperts

EXPERTS: dict[str, type[Experts]] = {cls.name: cls for cls in (GroupedExperts, TorchGroupedExperts, ReferenceExperts)}
_PREFERENCE = {"cuda": ("grouped", "torch_grouped", "reference"), "cpu": ("reference", "grouped", "torch_grouped")}


@dataclasses.dataclass(frozen=True)
class Selection:
    """The experts chosen, and each candidate passed over before them with its reason."""

    experts: Experts
    passed_over: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return "; ".join([self.experts.name, *(f"not {name}: {reason}" for name, reason in self.passed_over)])


def select_experts(spec: ExpertsSpec, requested: str = "auto") -> Selection:
    """The fastest experts that take `spec`, or the requested ones.

    Raises:
        ValueError: an unknown name; the requested experts refuse; or all do, with each one's reason.
    """
    if requested != "auto":
        if requested not in EXPERTS:
            raise ValueError(f"experts={requested!r}: must be auto, " + ", ".join(EXPERTS))
        return Selection(EXPERTS[requested](spec))
    passed_over: list[tuple[str, str]] = []
    for name in _PREFERENCE["cuda" if spec.device.type == "cuda" else "cpu"]:
        reason = EXPERTS[name].refusal(spec)
        if reason is None:
            return Selection(EXPERTS[name](spec), tuple(passed_over))
        passed_over.append((name, reason))
    raise ValueError(
        "no experts can take this layer: " + "; ".join(f"{name}: {reason}" for name, reason in passed_over)
    )
