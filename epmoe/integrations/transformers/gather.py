"""A block's experts whole again: each expert comes once from the rank that owns it.

Stands outside the path of a token: saving and undoing. One expert's tensors move at a time, so that the device needs
room for one of them and not for all.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from epmoe.comm import EPGroup
from epmoe.integrations.transformers.experts import RoutedExperts
from epmoe.integrations.transformers.layouts import to_theirs


@torch.no_grad()
def whole_experts(layer: RoutedExperts, *, everywhere: bool) -> nn.Module | None:
    """The model's own experts module with all experts in the model's layout. Collective.

    Args:
        everywhere: on every rank, where its parameters are; otherwise on rank 0 alone, in host memory, None elsewhere.

    Raises:
        ValueError: the layer has LoRA adapters or quantized weights, which the model's own module has no place for.
        PeerError: a rank did not take part within the group's deadline.
    """
    if layer.lora_adapters:
        names = ", ".join(adapter.name for adapter in layer.lora_adapters)
        raise ValueError(f"{layer.name}: has the LoRA adapters {names}: merge them (epmoe.experts.merge_adapter) first")
    if layer.weight_scheme is not None:
        raise ValueError(
            f"{layer.name}: its weights are {layer.weight_scheme}, the model's own are not: save the wide model first, "
            "or use epmoe.integrations.checkpoint"
        )
    here = everywhere or layer.ep is None or layer.ep.rank == 0
    whole = layer.skeleton() if here else None
    for our, theirs in layer.preset.tensors.names().items():
        local = layer.get_parameter(our)
        full: Tensor | None = None
        if whole is not None:
            like = whole.get_parameter(theirs)
            full = torch.empty(like.shape, dtype=local.dtype, device=local.device if everywhere else "cpu")
        for expert, owner in enumerate(layer.placement.owner()):
            row = _row(layer, our, expert, owner, everywhere=everywhere)
            if full is not None:
                assert row is not None
                full[expert].copy_(to_theirs(layer.preset.tensors, our, row))
        if whole is not None:
            assert full is not None
            setattr(whole, theirs, nn.Parameter(full, requires_grad=local.requires_grad))
    return whole


def _row(layer: RoutedExperts, our: str, expert: int, owner: int, *, everywhere: bool) -> Tensor | None:
    """One expert's tensor in our layout: on every rank, or on rank 0."""
    ep, local = layer.ep, layer.get_parameter(our)
    mine = local[layer.local_experts.index(expert)] if expert in layer.local_experts else None
    if ep is None or ep.num_ranks == 1 or (owner == 0 and not everywhere):
        return mine
    if not everywhere and ep.rank not in (0, owner):
        return None
    row = torch.empty(local.shape[1:], dtype=local.dtype, device=local.device) if mine is None else mine.contiguous()
    data = row.view(-1).view(torch.uint8)  # bytes: every backend knows them
    _move(ep, data, owner, f"{layer.name}: gathering expert {expert}", everywhere=everywhere)
    return row


def _move(ep: EPGroup, data: Tensor, owner: int, operation: str, *, everywhere: bool) -> None:
    group = ep.process_group
    if everywhere:
        work = dist.broadcast(data, group=group, group_src=owner, async_op=True)
    elif ep.rank == owner:
        work = dist.isend(data, group=group, group_dst=0)
    else:
        work = dist.irecv(data, group=group, group_src=owner)
    assert work is not None
    ep.wait(work, operation)
