"""Ways of moving rows between ranks; `make_dispatcher` picks one by name or by what the group can do."""

from __future__ import annotations

import warnings

import torch

from epmoe.comm import EPGroup
from epmoe.comm.symmetric import unreachable
from epmoe.dispatch.all_gather import AllGatherDispatcher
from epmoe.dispatch.all_to_all import AllToAllDispatcher
from epmoe.dispatch.all_to_all_fixed import FixedAllToAllDispatcher
from epmoe.dispatch.base import BatchedInput, Dispatcher, DispatcherCapabilities, ExpertInput, Layout, Pending
from epmoe.dispatch.hierarchical import HierarchicalDispatcher
from epmoe.dispatch.local import LocalDispatcher
from epmoe.dispatch.symmetric import SymmetricDispatcher
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
    storable: bool = True,
) -> Dispatcher:
    """The dispatcher `name` for this rank's experts.

    `auto`: `local` on one rank; `hierarchical` where the group spans nodes of which one has several ranks; `symmetric`
    where all ranks are GPUs that reach each other's memory, rows are `storable` and `max_tokens_per_rank` is set, to no
    more than decoding brings (`LATENCY_TOKENS`): its places are for the most that could come; else `all_to_all`.
    `symmetric` where ranks do not reach each other becomes `all_to_all`, with a warning.

    `auto`, `symmetric` and `hierarchical` are made by all ranks together: they compare what decides, and find out what
    they reach and where they are.

    Args:
        max_tokens_per_rank: the most tokens any rank brings to one call; the same on all ranks.
        storable: what `symmetric` asks of rows: a multiple of 16 bytes, no float64, and wide on their way back. False
            keeps `auto` from it; the same on all ranks.

    Raises:
        ValueError: an unknown name, `local` on several ranks, a placement for another number of ranks, a device that
            the group does not serve; ranks of which each asks for one of those three, but not for the same one, or with
            another `max_tokens_per_rank` or `storable`.
    """
    ranks, rank = (ep.num_ranks, ep.rank) if ep is not None else (1, 0)
    if ep is not None and ranks > 1 and name in ("auto", "symmetric", "hierarchical"):
        decides = {"dispatcher": name, "max_tokens_per_rank": max_tokens_per_rank, "storable": storable}
        ep.check_same(f"layer {layer!r}: make_dispatcher", decides)
    if placement.num_ranks != ranks:
        raise ValueError(f"placement is for {placement.num_ranks} ranks, the EPGroup has {ranks}")
    if name == "auto":
        name = _suited(ep, max_tokens_per_rank if storable else None)
    if name not in DISPATCHERS:
        raise ValueError(f"dispatcher={name!r}: must be auto, " + ", ".join(DISPATCHERS))
    if name == "local" and ranks > 1:
        raise ValueError(f"dispatcher='local' with {ranks} ranks: experts elsewhere are out of reach; use 'all_to_all'")
    if DISPATCHERS[name].capabilities.max_tokens and max_tokens_per_rank is None:
        raise ValueError(f"layer {layer!r}: dispatcher={name!r} reserves room for max_tokens_per_rank: set it")
    device = torch.device(device)
    if ep is not None and device.type not in (ep.device.type, "meta"):
        raise ValueError(f"device={str(device)!r}, but the EPGroup moves {ep.device.type} tensors ({ep.backend})")
    why = unreachable(ep) if name == "symmetric" and ep is not None else None
    if why is not None:
        warnings.warn(f"dispatcher='symmetric' becomes 'all_to_all': {why}", stacklevel=2)
        name = "all_to_all"
    return DISPATCHERS[name](
        ep,
        placement.owner_tensor(device),
        placement.expert_map(rank, device),
        placement.num_local(rank),
        layer=layer,
        max_tokens_per_rank=max_tokens_per_rank,
        experts_per_rank=placement.experts_per_rank,
    )


def _suited(ep: EPGroup | None, max_tokens_per_rank: int | None) -> str:
    """What `auto` is."""
    if ep is None or ep.num_ranks == 1:
        return "local"
    if ep.nodes.two_levels:
        return "hierarchical"
    few = max_tokens_per_rank is not None and max_tokens_per_rank <= LATENCY_TOKENS
    return "symmetric" if ep.device.type == "cuda" and few and unreachable(ep) is None else "all_to_all"
