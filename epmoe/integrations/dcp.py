"""`torch.distributed.checkpoint` for models with `MoELayer`s: saved at any EP size and placement, loaded at any other.

Every expert is an entry of its own, by its logical id, whichever rank has it:

    model.blocks.0.moe.down_proj.7                    [H, I]
    optimizer.state.blocks.0.moe.down_proj.7.exp_avg  [H, I]
    model.embed.weight                                as the model has it (FSDP's shards are resharded by torch)

A rank writes and reads the experts it holds, or its part of them under `fully_shard_moe`; those that several ranks hold
are written once. torch checks that what it writes covers every entry once; what a model lacks is refused when it is
loaded, and so are experts, layers or parameters that the model does not have.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from epmoe.integrations._agreement import plain_json
from epmoe.layer import MoELayer

ENTRY = "training"  # the name under which `save_distributed` keeps everything


class TrainingState(Stateful):
    """Model, optimizer and plain data as `torch.distributed.checkpoint` saves and loads them.

    For those who call it themselves, asynchronously or with a storage of their own; `save_distributed` and
    `load_distributed` do it for a directory. All ranks take part.

    Args:
        model: with or without FSDP, DDP, `torch.compile` around it.
        optimizer: with per-parameter state of tensors of the parameter's shape and of scalars (SGD, Adam, AdamW, ...).
        extra: plain JSON data to save along; replaced by what was saved when it is loaded.

    Example::

        dcp.save({"training": TrainingState(model, optimizer)}, checkpoint_id=directory)
        dcp.load({"training": TrainingState(model, optimizer)}, checkpoint_id=directory)
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, extra: dict[str, Any] | None = None
    ) -> None:
        inner: Any = model
        while isinstance(inner, DistributedDataParallel) or hasattr(inner, "_orig_mod"):  # the latter: torch.compile
            inner = inner.module if isinstance(inner, DistributedDataParallel) else inner._orig_mod
        self.model: nn.Module = inner
        self.optimizer, self.extra = optimizer, plain_json(extra)
        self._model: dict[str, Any] = {}
        self._optimizer: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Tensors are the model's and the optimizer's or rows of them: loading writes into these."""
        experts = _experts(self.model)
        self._model = dict(get_model_state_dict(self.model))
        model: dict[str, Any] = {}
        for name, value in self._model.items():
            model |= _rows(name, value, experts[name]) if name in experts else {name: value}
        state: dict[str, Any] = {"model": model, "extra": json.dumps(self.extra)}
        if self.optimizer is not None:
            fresh = not self.optimizer.state
            self._optimizer = dict(get_optimizer_state_dict(self.model, self.optimizer))
            if fresh:  # torch has made the state by a step without gradients, which shall not count
                for values in self._optimizer["state"].values():
                    if isinstance(values.get("step"), Tensor):
                        values["step"].zero_()
            split: dict[str, Any] = {}
            for name, values in self._optimizer["state"].items():
                for key, value in values.items():
                    # a step count stays the parameter's: all its experts share it
                    rows = _rows(name, value, experts[name]) if _has_rows(name, value, experts) else {name: value}
                    for row, part in rows.items():
                        split.setdefault(row, {})[key] = part
            state["optimizer"] = {"state": split, "param_groups": self._optimizer["param_groups"]}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what has been read since `state_dict`, whose tensors hold it already."""
        model = {name: state_dict["model"].get(name, value) for name, value in self._model.items()}
        set_model_state_dict(self.model, model)
        if self.optimizer is not None:
            loaded = state_dict["optimizer"]
            state = {n: values | loaded["state"].get(n, {}) for n, values in self._optimizer["state"].items()}
            whole = {"state": state, "param_groups": loaded["param_groups"]}
            set_optimizer_state_dict(self.model, self.optimizer, whole)
        self.extra = json.loads(state_dict["extra"])

    def entries(self) -> set[str]:
        """The names of all tensors that all ranks together read, without the part they are in."""
        experts, names = _experts(self.model), set()
        self.state_dict()
        state = self._optimizer.get("state", {})
        flat = [(name, "", value) for name, value in self._model.items()]
        flat += [(name, f".{key}", value) for name, values in state.items() for key, value in values.items()]
        for name, key, value in flat:
            ids = range(experts[name].config.num_experts) if _has_rows(name, value, experts) else [None]
            names |= {f"{name}{key}" if expert is None else f"{name}.{expert}{key}" for expert in ids}
        return names


def save_distributed(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: dict[str, Any] | None = None,
) -> None:
    """Writes everything into `directory`, which all ranks must see; `extra` is rank 0's. Collective."""
    dcp.save({ENTRY: TrainingState(model, optimizer, extra)}, checkpoint_id=directory)


def load_distributed(
    directory: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Fills `model` (and `optimizer`) in place from what `save_distributed` wrote; returns `extra`. Collective.

    Raises:
        ValueError: no checkpoint in `directory`, or one with entries that the model or the optimizer does not have, or
            without an optimizer though one is given; names them.
        CheckpointException: on every rank, an entry is missing, has another shape, or can't be read; names it.
    """
    state = TrainingState(model, optimizer)
    try:
        saved = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    except FileNotFoundError as error:
        raise ValueError(f"{directory}: no checkpoint, or one whose saving never finished: {error}") from error
    parts = {"model": f"{ENTRY}.model."} | ({"optimizer": f"{ENTRY}.optimizer.state."} if optimizer is not None else {})
    entries = state.entries()
    for part, prefix in parts.items():
        found = {name.removeprefix(prefix) for name in saved if name.startswith(prefix)}
        if part == "optimizer" and not found and state._optimizer["state"]:
            raise ValueError(f"{directory}: saved without an optimizer; load it with optimizer=None")
        if unexpected := sorted(found - entries):
            raise ValueError(f"{directory}: has {unexpected[0]!r}, which the {part} here has not")
    dcp.load({ENTRY: state}, checkpoint_id=directory)
    return state.extra


def _experts(model: nn.Module) -> dict[str, MoELayer]:
    """The layer of every routed expert parameter, by the parameter's name in a state dict."""
    found = {}
    for prefix, layer in model.named_modules(remove_duplicate=False):
        if isinstance(layer, MoELayer):
            for name in layer.expert_parameters():
                full = f"{prefix}.{name}" if prefix else name
                found[full.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")] = layer
    return found


def _has_rows(name: str, value: Any, experts: dict[str, MoELayer]) -> bool:
    return name in experts and isinstance(value, Tensor) and value.dim() > 0


def _rows(name: str, value: Tensor, layer: MoELayer) -> dict[str, Tensor]:
    """Views of this rank's rows of `value [L, ...]`, each under its expert's name."""
    ids, mesh = layer.local_experts, None
    if isinstance(value, DTensor):
        if value.device_mesh.ndim != 1:
            raise ValueError(
                f"{name!r} lies on the mesh {value.device_mesh}: experts may be sharded along one dimension"
            )
        mesh, placement, rows = value.device_mesh, value.placements[0], value.shape[0]
        value = value.to_local()
        if placement.is_shard(0):
            share = -(-rows // mesh.size())  # torch.chunk's: the last ranks may have fewer or none
            first = min(rows, share * mesh.get_local_rank())
            ids, mesh = ids[first : first + value.shape[0]], None
        elif isinstance(placement, Shard):
            inner = Shard(placement.dim - 1)
            parts = [DTensor.from_local(value[row], mesh, [inner], run_check=False) for row in range(len(ids))]
            return {f"{name}.{expert}": part for expert, part in zip(ids, parts, strict=True)}
    return {f"{name}.{expert}": value[row] for row, expert in enumerate(ids)}
