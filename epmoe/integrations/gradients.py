"""Data parallelism around expert parallelism: which gradients to sum, over whom, and divided by what.

Stands after backward and before the optimizer. The ranks of an `EPGroup` are data-parallel too: each has its own tokens
and its own copy of everything but the routed experts. Tokens cross to the experts and back, gradients do the same.

Derivation. D data ranks; rank d has the loss l_d over its own tokens, and what should be minimised is their mean
l = (1/D) Σ_d l_d. Backward on each rank starts from its own l_d.

* Replicated parameter: rank d's copy meets rank d's tokens only, so it holds ∂l_d/∂θ. Wanted: (1/D) Σ_d ∂l_d/∂θ, the
  mean over all data ranks.
* Expert: its one copy met the tokens of every rank of the EP group, and every rank's backward reached it, so it holds
  Σ_d ∂l_d/∂w already. Wanted: that divided by D. Averaging it over the EP ranks as well would mix different experts;
  leaving it undivided trains experts at D times the learning rate (at D times the gradient, where clipping acts).
* D/R EP groups beside each other hold the same experts D/R times: an expert's gradients are also summed over those
  copies (`replicas`), and still divided by D.

Worked example, two ranks, one scalar each: y = w·θ·x, experts on rank 0 only, θ = w = 1, l_d = y_d, x_0 = 1, x_1 = 3.
After backward θ's copies hold 1 and 3, the expert holds 1 + 3 = 4. The loss (y_0 + y_1)/2 has gradient 2 for θ and 2
for w: the mean of 1 and 3, and 4/2.

A mean of means is the mean over all tokens only if all ranks have as many. With uneven tokens let each rank's loss be
its sum divided by the token count of all ranks, and pass `average=False`: everything is summed, nothing divided. Under
DDP and FSDP, which divide, multiply that loss by D instead.

Who reduces what: a bare model `reduce_gradients`; under DDP, DDP the replicated parameters and
`reduce_expert_gradients` the experts; under FSDP (`epmoe.integrations.parallel`) FSDP all of them.

Norms. A gradient counts once, however many ranks hold it: of a replicated one every rank takes its own copy, of experts
the group's ranks hold different rows, of a DTensor the ranks along its sharded mesh dimensions hold different parts.

A parameter with a `main_grad` (`MoEConfig.main_grad`, Megatron) has its gradient there, everything else in `.grad`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from epmoe.checks import check_bool, check_kind, is_number, require
from epmoe.comm import EPGroup
from epmoe.layer import MoELayer

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13

BUCKET_BYTES = 64 * 2**20  # of one all-reduce


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that differ between ranks, by dotted name: the routed experts of every `MoELayer` in `model`."""
    owned = {
        id(parameter)
        for layer in model.modules()
        if isinstance(layer, MoELayer)
        for parameter in layer.expert_parameters().values()
    }
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in owned}


def replicated_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """All other parameters, by dotted name: every rank has the same."""
    experts = expert_parameters(model)
    return {name: parameter for name, parameter in model.named_parameters() if name not in experts}


def gradient_of(parameter: nn.Parameter) -> Tensor | None:
    """Its gradient: `main_grad` where there is one."""
    main = getattr(parameter, "main_grad", None)
    return parameter.grad if main is None else main


def reduce_gradients(
    model: nn.Module,
    ep: EPGroup | None,
    *,
    replicas: dist.ProcessGroup | None = None,
    average: bool = True,
) -> None:
    """Makes every `.grad` the gradient of the loss of all data ranks, in place. Collective: all ranks call it.

    Sums are made in fp32 (fp64 for fp64 gradients) and rounded once to the gradient's dtype. A replicated parameter
    without a gradient on this rank (it had no tokens) counts as zeros and gets the others' sum; a parameter that needs
    no gradient is left out.

    Args:
        model: holds the `MoELayer`s.
        ep: their group; None when one process holds all experts.
        replicas: the ranks, this one included, that hold the same experts in other EP groups.
        average: True: the loss is the mean of the ranks' losses. False: it is their sum (each already divided by the
            global number of tokens).

    Raises:
        ValueError: a layer of `model` belongs to another group than `ep`, or FSDP shards `model`.
        PeerError: a rank did not take part within the group's deadline.
    """
    check_group(model, ep)
    replicated = replicated_parameters(model)
    _check_plain(replicated)
    reduce_expert_gradients(model, ep, replicas=replicas, average=average)
    if (ranks := _data_ranks(ep, replicas)) > 1:
        for bucket in _buckets([p for p in replicated.values() if p.requires_grad]):
            _reduce(bucket, ep, replicas, 1 / ranks if average else 1.0)


def reduce_expert_gradients(
    model: nn.Module,
    ep: EPGroup | None,
    *,
    replicas: dist.ProcessGroup | None = None,
    average: bool = True,
) -> None:
    """The experts' half of `reduce_gradients`: what is left to do where DDP reduces the replicated parameters.

    Once per optimizer step, after the last of its backwards. Arguments and errors as there.
    """
    check_group(model, ep)
    experts = expert_parameters(model)
    _check_plain(experts)
    check_bool("average", average)
    scale = 1 / _data_ranks(ep, replicas) if average else 1.0
    if replicas is not None and dist.get_world_size(replicas) > 1:
        for bucket in _buckets([p for p in experts.values() if p.requires_grad]):
            _reduce(bucket, None, replicas, scale)
    elif scale != 1:
        for parameter in experts.values():
            if (gradient := gradient_of(parameter)) is not None:
                gradient.mul_(scale)


@torch.no_grad()
def grad_norm(model: nn.Module, ep: EPGroup | None, norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients, each counted once however many ranks hold it: experts, replicas, FSDP's shards.

    Call it once gradients are reduced. Collective. Every rank computes the same bits.

    Args:
        norm_type: p of the p-norm, may be `inf`.

    Returns:
        Scalar, fp32 (fp64 with fp64 gradients): what one process with all experts would find.

    Raises:
        ValueError: `norm_type` is not > 0, a layer of `model` belongs to another group than `ep`, or a gradient still
            waits for a reduction (DTensor's `Partial`).
    """
    require(is_number(norm_type) and norm_type > 0, "norm_type", norm_type, "a number > 0, or inf")
    check_group(model, ep)
    experts = {id(parameter) for parameter in expert_parameters(model).values()}
    # Parameters choose the collectives, not gradients, which one rank may lack: every rank takes the same steps.
    parts: dict[tuple[bool, DeviceMesh | None, tuple[Placement, ...]], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        gradient = gradient_of(parameter)
        if not parameter.requires_grad and gradient is None:
            continue
        layout: tuple[DeviceMesh | None, tuple[Placement, ...]] = (None, ())
        if isinstance(parameter, DTensor):
            layout = parameter.device_mesh, parameter.placements
        part = parts.setdefault((id(parameter) in experts, *layout), [])
        if gradient is not None:
            if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
                raise ValueError(f"gradient of {name!r} is {gradient.placements}: reduce it first")
            part.append(_local(gradient))

    first = next(model.parameters())
    device = ep.device if ep is not None else first.device
    dtype = _sum_dtype(first)
    norms = [torch.zeros(1, device=device, dtype=dtype)]
    # Norms are gathered, not their powers summed: any p, no overflow, one order on every rank.
    for (of_experts, mesh, placements), gradients in parts.items():
        found = _norm(gradients, norm_type, device if mesh is None else torch.device(mesh.device_type), dtype)
        for dim, placement in enumerate(placements):
            if mesh is not None and not placement.is_replicate():
                found = _gathered_norm(found, mesh.get_group(dim), norm_type)
        found = found.to(device)
        if of_experts and ep is not None:
            gathered, work = ep.all_gather_async(found)
            ep.wait(work, "all-gather of gradient norms")
            found = torch.linalg.vector_norm(gathered, norm_type)[None]
        norms.append(found)
    return torch.linalg.vector_norm(torch.cat(norms), norm_type)


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, ep: EPGroup | None, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` of the whole model, by its `grad_norm`. Collective.

    Call it once gradients are reduced. Every rank computes the same bits, so replicas stay equal.

    Args:
        max_norm: gradients are multiplied by min(1, max_norm / (norm + 1e-6)).
        norm_type: p of the p-norm, may be `inf`.

    Returns:
        The norm before clipping.

    Raises:
        ValueError: `max_norm` is not > 0, or as `grad_norm`.
    """
    require(is_number(max_norm) and max_norm > 0, "max_norm", max_norm, "a number > 0")
    total = grad_norm(model, ep, norm_type)
    coefficient = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for parameter in model.parameters():
        if (gradient := gradient_of(parameter)) is not None:
            gradient = _local(gradient)
            gradient.mul_(coefficient.to(gradient.device))
    return total


@torch.no_grad()
def broadcast_parameters(model: nn.Module, ep: EPGroup | None, *, replicas: dist.ProcessGroup | None = None) -> None:
    """Gives every rank rank 0's replicated parameters and buffers; over `replicas` the experts too. Collective.

    Ranks that were seeded alike have them already: `MoELayer` draws each expert from its own generator.
    """
    check_group(model, ep)
    shared = [*replicated_parameters(model).values(), *model.buffers()]
    if ep is not None:
        for tensor in shared:
            broadcast(tensor, ep.process_group)
    if replicas is not None:
        for tensor in (*shared, *expert_parameters(model).values()):
            broadcast(tensor, replicas)


def _data_ranks(ep: EPGroup | None, replicas: dist.ProcessGroup | None) -> int:
    """D."""
    return (1 if ep is None else ep.num_ranks) * (1 if replicas is None else dist.get_world_size(replicas))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _norm(gradients: list[Tensor], norm_type: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Of this rank's parts alone, `[1]`; a rank may have none, or only empty ones, which have no norm for p = inf."""
    norms = [torch.linalg.vector_norm(g, norm_type, dtype=_sum_dtype(g)) for g in gradients if g.numel()]
    if not norms:
        return torch.zeros(1, device=device, dtype=dtype)
    return torch.linalg.vector_norm(torch.stack([n.to(device, dtype) for n in norms]), norm_type)[None]


def _gathered_norm(norm: Tensor, group: dist.ProcessGroup, norm_type: float) -> Tensor:
    gathered = norm.new_empty(dist.get_world_size(group))
    _all_gather(gathered, norm, group=group)
    return torch.linalg.vector_norm(gathered, norm_type)[None]


@torch.no_grad()
def broadcast(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """The first rank's `tensor` to all of `group`, in place."""
    data = tensor.detach().reshape(-1).clone()
    dist.broadcast(data.view(torch.uint8), group=group, group_src=0)  # bytes: every backend knows them
    tensor.copy_(data.view(tensor.shape))


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _buckets(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Runs of parameters of one device and sum dtype, each at most BUCKET_BYTES or one parameter; same on all ranks."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        bytes_ = parameter.numel() * _sum_dtype(parameter).itemsize
        other = bucket and (_sum_dtype(bucket[0]), bucket[0].device) != (_sum_dtype(parameter), parameter.device)
        if bucket and (other or size + bytes_ > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += bytes_
    if bucket:
        yield bucket


@torch.no_grad()
def _reduce(bucket: list[nn.Parameter], ep: EPGroup | None, replicas: dist.ProcessGroup | None, scale: float) -> None:
    dtype = _sum_dtype(bucket[0])
    found = [(p, gradient_of(p)) for p in bucket]
    flat = torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1).to(dtype) for p, g in found])
    if ep is not None:
        work = dist.all_reduce(flat, group=ep.process_group, async_op=True)
        assert work is not None
        ep.wait(work, "all-reduce of gradients")
    if replicas is not None:
        dist.all_reduce(flat, group=replicas)
    flat.mul_(scale)
    for parameter, total in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
        gradient = gradient_of(parameter)
        if gradient is None:
            gradient = parameter.grad = torch.empty_like(parameter)
        gradient.copy_(total.view(parameter.shape))


def check_group(model: nn.Module, ep: EPGroup | None) -> None:
    """Raises ValueError where a layer of `model` was built with another group than `ep`, or these are no such."""
    check_kind("model", model, nn.Module, "a module with MoELayers")
    check_kind("ep", ep, (EPGroup, type(None)), "the EPGroup of its layers, or None where one process has all experts")
    for name, layer in model.named_modules():
        if isinstance(layer, MoELayer) and (layer.ep and layer.ep.name) != (ep and ep.name):
            raise ValueError(f"ep={ep}: layer {name or layer.name!r} was built with ep={layer.ep}; pass that group")


def _check_plain(parameters: dict[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"parameter {name!r} is a DTensor, whose owner (FSDP, tensor parallelism) reduces its gradient: leave "
                "this call out"
            )
