"""Which experts compute, and why not the others."""

from __future__ import annotations

import dataclasses

from epmoe.experts.base import Experts, ExpertsSpec
from epmoe.experts.batched import BatchedExperts
from epmoe.experts.grouped import GroupedExperts
from epmoe.experts.reference import ReferenceExperts
from epmoe.experts.torch_grouped import TorchGroupedExperts

_KINDS: tuple[type[Experts], ...] = (GroupedExperts, TorchGroupedExperts, BatchedExperts, ReferenceExperts)
EXPERTS = {cls.name: cls for cls in _KINDS}
"""Every kind of experts, by name."""
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


@dataclasses.dataclass(frozen=True)
class Selection:
    """The experts chosen, and each candidate passed over before them with its reason."""

    experts: Experts
    passed_over: tuple[tuple[str, str], ...] = ()

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
    if layout not in EXPERTS_BY_LAYOUT:
        raise ValueError(f"layout={layout!r}: must be " + " or ".join(EXPERTS_BY_LAYOUT))
    candidates = EXPERTS_BY_LAYOUT[layout]
    if requested != "auto":
        if requested in candidates:
            return Selection(candidates[requested](spec))
        other = next((cls for cls in _KINDS if cls.name == requested), None)
        takes = "" if other is None else f" takes {' or '.join(other.layouts)} rows and these are {layout}"
        raise ValueError(f"experts={requested!r}{takes}: must be auto, " + ", ".join(candidates))
    passed_over: list[tuple[str, str]] = []
    for name in _PREFERENCE[layout, "cuda" if spec.device.type == "cuda" else "cpu"]:
        reason = candidates[name].refusal(spec)
        if reason is None:
            return Selection(candidates[name](spec), tuple(passed_over))
        passed_over.append((name, reason))
    raise ValueError(
        f"no experts can take {layout} rows of this layer: "
        + "; ".join(f"{name}: {reason}" for name, reason in passed_over)
    )
