"""What goes with what: every dispatcher with every kind of experts in every layout, and why not where not.

Read off the declarations of the classes, so nothing is tried and no GPU is needed. `MoEKernel` refuses by the same
words, `epmoe doctor --capabilities` prints the table, and the tests walk through it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from epmoe.dispatch import DISPATCHERS
from epmoe.dispatch.base import Dispatcher
from epmoe.experts import EXPERTS, QUANTIZED_EXPERTS, TRAINING_EXPERTS
from epmoe.experts.base import Experts

LAYOUTS = ("standard", "batched")
KINDS: Mapping[str, type[Experts]] = EXPERTS | QUANTIZED_EXPERTS | TRAINING_EXPERTS
"""Every kind of experts, by name."""


def refusal(dispatcher: Dispatcher | type[Dispatcher], experts: Experts | type[Experts], layout: str) -> str | None:
    """Why these can't be joined, with the way out; None if they can."""
    if layout not in experts.layouts:
        return (
            f"layout={layout!r}: experts {experts.name!r} take {' or '.join(experts.layouts)} rows; choose a pair that "
            "fits"
        )
    if experts.monolithic and dispatcher.name != "local":
        return (
            f"experts={experts.name!r} with dispatcher={dispatcher.name!r}: they go from router logits to the output "
            "in one kernel and never show the topk_ids that a dispatcher moves rows by; use dispatcher='local', or "
            "experts that take topk_ids"
        )
    return None


def scheme_refusal(
    dispatcher: Dispatcher | type[Dispatcher], combine_scheme: str | None, grad_scheme: str | None
) -> str | None:
    """Why rows can't travel back in these schemes, with the way out; None if they can."""
    named = {"combine_scheme": combine_scheme, "grad_scheme": grad_scheme}
    asked = [f"{name}={scheme!r}" for name, scheme in named.items() if scheme is not None]
    if not asked or dispatcher.capabilities.quantized_back:
        return None
    able = (repr(d.name) for d in DISPATCHERS.values() if d.capabilities.quantized_back)
    return (
        f"{asked[0]} with dispatcher={dispatcher.name!r}, which sends rows of combine and gradients wide: leave it "
        f"unset, or use dispatcher={' or '.join(able)}"
    )


class Combination(NamedTuple):
    """Attributes: names of the parts; `refusal`, None where they work together."""

    dispatcher: str
    experts: str
    layout: str
    refusal: str | None


def combinations() -> list[Combination]:
    """Every dispatcher × experts × layout."""
    return [
        Combination(d.name, e.name, layout, refusal(d, e, layout))
        for d in DISPATCHERS.values()
        for e in KINDS.values()
        for layout in LAYOUTS
    ]


def dispatcher_table() -> list[dict[str, Any]]:
    """One row per dispatcher: its name and `DispatcherCapabilities`."""
    return [{"dispatcher": d.name, **dataclasses.asdict(d.capabilities)} for d in DISPATCHERS.values()]


def experts_table() -> list[dict[str, Any]]:
    """One row per kind of experts: its name and what its class declares."""
    return [
        {
            "experts": e.name,
            "layouts": e.layouts,
            "weight_and_reduce": tuple(e.weight_and_reduce[layout] for layout in e.layouts),
            "weight_schemes": tuple(scheme or "none" for scheme in e.schemes),
            "row_schemes": tuple(scheme or "none" for scheme in e.row_schemes),
            "autograd": e.autograd,
            "cuda_graph": e.cuda_graph,
            "monolithic": e.monolithic,
            "lora": e.lora,
        }
        for e in KINDS.values()
    ]


def as_dict() -> dict[str, Any]:
    """All three tables, of plain data: what `epmoe doctor --capabilities --json` prints."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return str(value).removeprefix("torch.")
        return list(value) if isinstance(value, tuple) else value

    return {
        "dispatchers": [{key: plain(value) for key, value in row.items()} for row in dispatcher_table()],
        "experts": [{key: plain(value) for key, value in row.items()} for row in experts_table()],
        "combinations": [c._asdict() for c in combinations()],
    }
