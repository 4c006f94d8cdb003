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
its sum divided by the token count of all ranks, and pass `average=False`: everything is summed, nothing divided.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from epmoe.comm import EPGroup
from epmoe.layer import MoELayer

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
        ValueError: a layer of `model` belongs to another group than `ep`.
        PeerError: a rank did not take part within the group's deadline.
    """
    _check_group(model, ep)
    copies = 1 if replicas is None else dist.get_world_size(replicas)
    ranks = (1 if ep is None else ep.num_ranks) * copies
    scale = 1 / ranks if average else 1.0
    experts = [p for p in expert_parameters(model).values() if p.requires_grad]
    replicated = [p for p in replicated_parameters(model).values() if p.requires_grad]

    if ranks == copies:
        experts, replicated = experts + replicated, []  # no EP: everything is there `copies` times
    if copies > 1:
        for bucket in _buckets(experts):
            _reduce(bucket, None, replicas, scale)
    elif scale != 1:
        for parameter in experts:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
    for bucket in _buckets(replicated):
        _reduce(bucket, ep, replicas, scale)


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, ep: EPGroup | None, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` of the whole model: replicated gradients count once, experts over all ranks.

    Call it after `reduce_gradients`. Collective. Every rank computes the same bits, so replicas stay equal.

    Args:
        max_norm: gradients are multiplied by min(1, max_norm / (norm + 1e-6)).
        norm_type: p of the p-norm, may be `inf`.

    Returns:
        The norm before clipping, scalar, fp32 (fp64 with fp64 gradients): what one process with all experts would find.

    Raises:
        ValueError: `max_norm` or `norm_type` is not > 0.
    """
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if not value > 0:
            raise ValueError(f"{name}={value!r}: must be > 0")
    _check_group(model, ep)
    here = [p.grad for p in expert_parameters(model).values() if p.grad is not None]
    everywhere = [p.grad for p in replicated_parameters(model).values() if p.grad is not None]
    parameter = next(model.parameters())
    device, dtype = parameter.device, _sum_dtype(parameter)

    def norm(gradients: list[Tensor]) -> Tensor:
        norms = [torch.linalg.vector_norm(g, norm_type, dtype=_sum_dtype(g)).to(device, dtype) for g in gradients]
        return (
            torch.linalg.vector_norm(torch.stack(norms), norm_type)
            if norms
            else torch.zeros((), device=device, dtype=dtype)
        )

    # Norms are gathered, not their powers summed: any p, no overflow, one order on every rank.
    of_experts = norm(here)[None]
    if ep is not None:
        of_experts, work = ep.all_gather_async(of_experts)
        ep.wait(work, "all-gather of gradient norms")
    total = torch.linalg.vector_norm(torch.cat([norm(everywhere)[None], of_experts]), norm_type)
    coefficient = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in (*here, *everywhere):
        gradient.mul_(coefficient.to(gradient.device))
    return total


@torch.no_grad()
def broadcast_parameters(model: nn.Module, ep: EPGroup | None, *, replicas: dist.ProcessGroup | None = None) -> None:
    """Gives every rank rank 0's replicated parameters and buffers; over `replicas` the experts too. Collective.

    Ranks that were seeded alike have them already: `MoELayer` draws each expert from its own generator.
    """
    _check_group(model, ep)
    shared = [*replicated_parameters(model).values(), *model.buffers()]
    if ep is not None:
        for tensor in shared:
            _broadcast(tensor, ep.process_group)
    if replicas is not None:
        for tensor in (*shared, *expert_parameters(model).values()):
            _broadcast(tensor, replicas)


def _broadcast(tensor: Tensor, group: dist.ProcessGroup) -> None:
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
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1).to(dtype) for p in bucket])
    if ep is not None:
        work = dist.all_reduce(flat, group=ep.process_group, async_op=True)
        assert work is not None
        ep.wait(work, "all-reduce of gradients")
    if replicas is not None:
        dist.all_reduce(flat, group=replicas)
    flat.mul_(scale)
    for parameter, total in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(total.view(parameter.shape))


def _check_group(model: nn.Module, ep: EPGroup | None) -> None:
    for name, layer in model.named_modules():
        if isinstance(layer, MoELayer) and (layer.ep and layer.ep.name) != (ep and ep.name):
            raise ValueError(f"ep={ep}: layer {name or layer.name!r} was built with ep={layer.ep}; pass that group")
