"""Meshes for expert × data parallelism, and DDP and FSDP2 around a model with `MoELayer`s.

    D = 8 ranks, ep_ranks = 4      replica 0:  0  1  2  3      a row is an EPGroup: it shares one set of experts
                                   replica 1:  4  5  6  7      a column holds the same experts

Everything but the routed experts belongs to all D ranks, rank r's experts to its column alone:

    |                     | replicated parameters      | routed experts                                            |
    |---------------------|----------------------------|-----------------------------------------------------------|
    | `data_parallel`     | a copy on every rank       | a copy on every rank of the column                        |
    | `fully_shard_moe`   | sharded over all D ranks   | sharded over the column (a column of one: only cast)      |
    | gradient            | mean over the D ranks      | sum over the column, divided by D (`gradients` says why)  |

With either, a rank's loss is the mean over its own tokens; with uneven tokens, D · (its sum) / (tokens of all ranks).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from epmoe.comm import EPGroup
from epmoe.integrations.gradients import broadcast, check_group, expert_parameters
from epmoe.layer import MoELayer


@dataclasses.dataclass(frozen=True)
class MoEMesh:
    """The ranks of one job by what they share. Rank n is member n % R of EP group n // R.

    Attributes:
        ep: this rank's row: the group its layers are built with.
        experts: this rank's column, 1-D: experts are sharded or copied along it.
        data: all ranks, what everything else is sharded or copied along; 1-D, or 2-D (replicate, shard) for HSDP.
    """

    ep: EPGroup
    experts: DeviceMesh
    data: DeviceMesh

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The column as `epmoe.integrations.gradients` and `.checkpoint` take it; None where this rank is alone."""
        return self.experts.get_group() if self.experts.size() > 1 else None


def make_mesh(
    ep_ranks: int, *, device_type: str | None = None, shard_ranks: int | None = None, timeout: float = 300.0
) -> MoEMesh:
    """Splits all ranks of the job into EP groups of `ep_ranks` neighbours. Collective.

    Args:
        ep_ranks: R; choose it no larger than the GPUs of one NVLink domain where the model allows it.
        device_type: `cuda` or `cpu`; None: by the default group's backend.
        shard_ranks: shard replicated parameters over so many neighbours and copy them beyond (HSDP). None: over all.
        timeout: of the `EPGroup`.

    Raises:
        ValueError: torch.distributed is not initialised, or a size does not divide the number of ranks.
    """
    if not dist.is_initialized():
        raise ValueError("make_mesh needs torch.distributed: call torch.distributed.init_process_group(...) first")
    ranks = dist.get_world_size()
    for name, value in (("ep_ranks", ep_ranks), ("shard_ranks", shard_ranks)):
        if value is not None and (value < 1 or ranks % value):
            raise ValueError(f"{name}={value}: must divide the {ranks} ranks of the job")
    if device_type is None:
        device_type = "cuda" if "nccl" in dist.get_backend() else "cpu"
    grid = init_device_mesh(device_type, (ranks // ep_ranks, ep_ranks), mesh_dim_names=("replica", "ep"))
    # Groups of their own, where a mesh may give the default one: expert traffic must not queue behind FSDP's.
    limit = timedelta(seconds=timeout)
    rows = [dist.new_group(list(range(r, r + ep_ranks)), timeout=limit) for r in range(0, ranks, ep_ranks)]
    if shard_ranks in (None, ranks):
        data = init_device_mesh(device_type, (ranks,), mesh_dim_names=("data",))
    else:
        shape = (ranks // shard_ranks, shard_ranks)
        data = init_device_mesh(device_type, shape, mesh_dim_names=("data_replicate", "data_shard"))
    device = "cpu" if device_type == "cpu" else None
    return MoEMesh(EPGroup(rows[dist.get_rank() // ep_ranks], device=device, timeout=timeout), grid["replica"], data)


def ddp_ignore_experts(model: nn.Module) -> list[str]:
    """Tells a later `DistributedDataParallel(model)` to leave the routed experts alone; returns their names.

    DDP would average different experts over the ranks of an EP group. After each step's last backward the experts are
    `reduce_expert_gradients`'s. What was ignored before stays so.
    """
    names = list(expert_parameters(model))
    before = list(getattr(model, "_ddp_params_and_buffers_to_ignore", []))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [*before, *names])
    return names


def data_parallel(model: nn.Module, mesh: MoEMesh, **options: Any) -> DistributedDataParallel:
    """`model` in DDP over all ranks, its experts outside of it and equal along each column. Collective.

    One step: backward (as often as wanted, in `no_sync()` but for the last), then
    `reduce_expert_gradients(model, mesh.ep, replicas=mesh.replicas)`, `clip_grad_norm_(model, mesh.ep, ...)`, and the
    optimizer.

    Args:
        options: of `DistributedDataParallel`.

    Raises:
        ValueError: a layer of `model` was built with another group than `mesh.ep`.
    """
    check_group(model, mesh.ep)
    ddp_ignore_experts(model)
    wrapped = DistributedDataParallel(model, **options)  # sends rank 0's replicated parameters
    if mesh.replicas is not None:
        for parameter in expert_parameters(model).values():
            broadcast(parameter, mesh.replicas)
    return wrapped


def fully_shard_moe(
    model: nn.Module,
    mesh: MoEMesh,
    *,
    blocks: Iterable[nn.Module] = (),
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  (frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008  (frozen)
    reshard_after_forward: bool | None = None,
) -> FSDPModule:
    """`fully_shard` for a model with `MoELayer`s: every parameter on the mesh it belongs to. In place; returns `model`.

    Build the optimizer afterwards. Gradients are ready after backward: `clip_grad_norm_(model, mesh.ep, ...)` is all
    that stands before the optimizer. To accumulate, `model.set_requires_gradient_sync(False)` but for the last
    backward. Each rank keeps its part of the parameters as they are here: seed all ranks alike, or load a checkpoint.

    Routers keep their own dtype under `mp_policy`: rounded logits choose other experts.

    Args:
        blocks: modules that are gathered as one unit each, such as transformer blocks, inner ones first.
        mp_policy, offload_policy, reshard_after_forward: of `fully_shard`, for all units.

    Raises:
        ValueError: a layer was built with another group than `mesh.ep`.
    """
    check_group(model, mesh.ep)
    options: dict[str, Any] = {
        "mp_policy": mp_policy, "offload_policy": offload_policy, "reshard_after_forward": reshard_after_forward
    }  # fmt: skip
    for module in list(model.modules()):
        if isinstance(module, MoELayer):
            shard_layer(module, mesh, **options)
    for block in blocks:
        if not isinstance(block, FSDPModule):
            fully_shard(block, mesh=mesh.data, **options)
    if not isinstance(model, FSDPModule):
        fully_shard(model, mesh=mesh.data, **options)
    assert isinstance(model, FSDPModule)
    return model


def shard_layer(
    layer: MoELayer,
    mesh: MoEMesh,
    *,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  (frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008  (frozen)
    reshard_after_forward: bool | None = None,
) -> None:
    """What `fully_shard_moe` does to one layer, for those who shard the rest themselves: call it first.

    Raises:
        ValueError: as `fully_shard_moe`.
    """
    check_group(layer, mesh.ep)
    options: dict[str, Any] = {"offload_policy": offload_policy, "reshard_after_forward": reshard_after_forward}
    # FSDP does not look into a module that has its own mesh, so what is replicated in there comes first.
    router, shared = layer.router, layer.shared_experts
    if isinstance(router, nn.Module) and any(True for _ in router.parameters()):
        exact = dataclasses.replace(mp_policy, param_dtype=None, output_dtype=None, cast_forward_inputs=False)
        fully_shard(router, mesh=mesh.data, mp_policy=exact, **options)
    for replicated in (shared, layer.latent_down, layer.latent_up):
        if replicated is not None:
            fully_shard(replicated, mesh=mesh.data, mp_policy=mp_policy, **options)

    copies, ranks = mesh.experts.size(), mesh.ep.num_ranks

    def placement(parameter: nn.Parameter) -> Shard:
        # fewer experts than ranks in the column would leave some ranks without any
        few = parameter.shape[0] < copies and parameter.dim() > 1 and parameter.shape[1] % copies == 0
        return Shard(1) if few else Shard(0)

    fully_shard(layer, mesh=mesh.experts, shard_placement_fn=placement, mp_policy=mp_policy, **options)
    assert isinstance(layer, FSDPModule)

    def divide(gradients: Tensor) -> None:
        gradients.div_(ranks)  # FSDP has made the mean over the column; the sum over the row came by itself
        if gradients.is_cuda:  # not the stream they were made on, and FSDP drops them before what it casts is cast
            gradients.record_stream(torch.cuda.current_stream(gradients.device))

    layer.set_all_reduce_hook(divide)
