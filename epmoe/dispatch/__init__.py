"""Ways of moving rows between ranks; `make_dispatcher` picks one by name or by what the group can do."""

from __future__ import annotations

import dataclasses

import torch

from epmoe.checks import as_device, check_here, check_int, check_kind, check_name
from epmoe.comm import EPGroup
from epmoe.comm.symmetric import unreachable
from epmoe.dispatch.all_gather import AllGatherDispatcher
from epmoe.dispatch.all_to_all import AllToAllDispatcher
from epmoe.dispatch.all_to_all_fixed import FixedAllToAllDispatcher
from epmoe.dispatch.base import Dispatcher, DispatcherCapabilities
from epmoe.dispatch.hierarchical import HierarchicalDispatcher
from epmoe.dispatch.inputs import BatchedInput, ExpertInput, Layout, Pending
from epmoe.dispatch.local import LocalDispatcher
from epmoe.dispatch.storable import refusal_there_and_back
from epmoe.dispatch.symmetric import SymmetricDispatcher
from epmoe.dispatch.wire import RowSpec
from epmoe.ops.symmetric_configs import LATENCY_TOKENS
from epmoe.placement import ExpertPlacement

DISPATCHERS: dict[str, type[Dispatcher]] = {
    cls.name: cls
    for cls in (
        LocalDispatcher,
        AllGatherDispatcher,
        AllToAllDispatcher,
        FixedAllToAllDispatcher,
        HierarchicalDispatcher,
        SymmetricDispatcher,
    )
}

__all__ = [
    "DISPATCHERS",
    "AllGatherDispatcher",
    "AllToAllDispatcher",
    "BatchedInput",
    "Dispatcher",
    "DispatcherCapabilities",
    "ExpertInput",
    "FixedAllToAllDispatcher",
    "HierarchicalDispatcher",
    "Layout",
    "LocalDispatcher",
    "Pending",
    "RowSpec",
    "SymmetricDispatcher",
    "make_dispatcher",
]


def make_dispatcher(
    name: str,
    ep: EPGroup | None,
    placement: ExpertPlacement,
    device: torch.device | str,
    *,
    layer: str = "moe",
    max_tokens_per_rank: int | None = None,
    rows: RowSpec | None = None,
    compared: bool = False,
) -> Dispatcher:
    """The dispatcher `name` for this rank's experts; collective, whatever the name.

    `auto`: `local` on one rank; `hierarchical` where the group spans nodes of which one has several ranks; `symmetric`
    where all ranks are GPUs that reach each other's memory, `rows` can be stored and `max_tokens_per_rank` is set, to
    no more than decoding brings (`LATENCY_TOKENS`): its places are for the most that could come; else `all_to_all`,
    with a warning where nothing but the rows is in the way. `symmetric` where ranks do not reach each other becomes
    `all_to_all`, with a warning. A group warns once of each.

    Ranks compare what they ask for, 32 bytes of each, and only then find out what they reach and where they are.

    Args:
        max_tokens_per_rank: the most tokens any rank brings to one call; the same on all ranks.
        rows: what will move, so that rows that can't are refused now, or `auto` finds a dispatcher for them; the same
            on all ranks. None: not known, `auto` takes them for storable.
        compared: the ranks have compared all this already, as those of a `MoELayer` do: they do not do it again.

    Raises:
        ValueError: an unknown name, `local` on several ranks, a placement for another number of ranks, a device that
            the group does not serve, rows that can't move; ranks that do not ask for the same, with each one's value.
        PeerError: a rank makes no dispatcher within the group's deadline.
    """
    check_kind("ep", ep, (EPGroup, type(None)), "an EPGroup, or None for all experts in this process")
    right = "an ExpertPlacement, as ExpertPlacement.contiguous(num_experts, num_ranks)"
    check_kind("placement", placement, ExpertPlacement, right)
    check_kind("rows", rows, (RowSpec, type(None)), "a RowSpec, or None where it is not known")
    ranks, rank = (ep.num_ranks, ep.rank) if ep is not None else (1, 0)
    if ep is not None and not compared and not torch.compiler.is_compiling():  # a graph has no place for it
        ep.check_same(f"layer {layer!r}: make_dispatcher", _asked(name, placement, max_tokens_per_rank, rows))
    if placement.num_ranks != ranks:
        there = "the EPGroup has" if ep is not None else "without an EPGroup there is"
        raise ValueError(f"placement is for {placement.num_ranks} ranks, {there} {ranks}")
    check_int("max_tokens_per_rank", max_tokens_per_rank, or_none=True)
    check_name("dispatcher", name, ("auto", *DISPATCHERS))
    if name == "auto":
        name = _suited(ep, max_tokens_per_rank, rows)
    if name == "local" and ranks > 1:
        raise ValueError(f"dispatcher='local' with {ranks} ranks: experts elsewhere are out of reach; use 'all_to_all'")
    if DISPATCHERS[name].capabilities.max_tokens and max_tokens_per_rank is None:
        raise ValueError(f"layer {layer!r}: dispatcher={name!r} reserves room for max_tokens_per_rank: set it")
    device = as_device(device, here=False)
    if ep is not None and device.type not in (ep.device.type, "meta"):
        raise ValueError(f"device={str(device)!r}, but the EPGroup moves {ep.device.type} tensors ({ep.backend})")
    check_here(device)
    why = unreachable(ep) if name == "symmetric" and ep is not None else None
    if ep is not None and why is not None:
        ep.warn_once(f"dispatcher='symmetric' becomes 'all_to_all': {why}")
        name = "all_to_all"
    made = DISPATCHERS[name](
        ep,
        placement.owner_tensor(device),
        placement.expert_map(rank, device),
        placement.num_local(rank),
        layer=layer,
        max_tokens_per_rank=max_tokens_per_rank,
        experts_per_rank=placement.experts_per_rank,
        rows=rows,
    )
    if rows is not None and (why := made.row_refusal(rows)) is not None:
        raise ValueError(why)
    return made


def _asked(
    name: str, placement: ExpertPlacement, max_tokens_per_rank: int | None, rows: RowSpec | None
) -> dict[str, object]:
    """What ranks compare; a placement by its rule, where it has one."""
    experts, ranks = placement.num_experts, placement.num_ranks
    rules = ("contiguous", "strided")
    named = (rule for rule in rules if ExpertPlacement.from_spec(rule, experts, ranks) == placement)
    asked: dict[str, object] = {
        "dispatcher": name,
        "max_tokens_per_rank": max_tokens_per_rank,
        "experts": experts,
        "placement": f"{next(named, placement.ranks)} over {ranks} ranks",
    }
    if rows is not None:
        asked |= {f"rows.{field}": value for field, value in dataclasses.asdict(rows).items()}
    return asked


def _suited(ep: EPGroup | None, max_tokens_per_rank: int | None, rows: RowSpec | None) -> str:
    """What `auto` is."""
    if ep is None or ep.num_ranks == 1:
        return "local"
    if ep.nodes.two_levels:
        return "hierarchical"
    if max_tokens_per_rank is None or max_tokens_per_rank > LATENCY_TOKENS:
        return "all_to_all"
    if ep.device.type != "cuda" or unreachable(ep) is not None:
        return "all_to_all"
    if rows is None or (why := refusal_there_and_back(rows, ep.num_ranks, max_tokens_per_rank, ep.device)) is None:
        return "symmetric"
    ep.warn_once(f"dispatcher='auto' is 'all_to_all' and not 'symmetric': {why}")
    return "all_to_all"
