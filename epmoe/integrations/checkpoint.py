"""Checkpoints that load at any EP size: each rank writes its own experts, each rank reads only its own.

A directory holds `index.json` and one safetensors file per EP rank:

    rank-00000-of-00002-<token>.safetensors   its experts [L, ...], and everything replicated
    rank-00001-of-00002-<token>.safetensors   its experts [L, ...]

Tensors have the name of their parameter or buffer; optimizer state of a parameter is `<parameter>@<state>`, such as
`blocks.0.moe.down_proj@exp_avg`. The metadata's `experts` maps each `MoELayer` to the logical ids of its rows there.

The index is replaced atomically after all files are on disk, and only then are the files of the previous checkpoint
removed: whatever interrupts a save, `index.json` names a whole checkpoint or there is none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import uuid
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from epmoe.comm import EPGroup
from epmoe.integrations._agreement import Agreement, gathered, keep_own_part, plain_json
from epmoe.layer import MoELayer
from epmoe.quantized import copy_bits, mismatch

INDEX = "index.json"
_FORMAT = 1


def save_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    ep: EPGroup | None,
    optimizer: torch.optim.Optimizer | None = None,
    extra: dict[str, Any] | None = None,
    *,
    replicas: dist.ProcessGroup | None = None,
) -> None:
    """Writes `model`, the optimizer's state and `extra` into `directory`, which all ranks must see. Collective.

    A checkpoint that is there already is replaced once the new one is whole. What FSDP shards is gathered, one tensor
    at a time.

    Args:
        optimizer: any whose per-parameter state is tensors of the parameter's shape, scalars and numbers (SGD, Adam,
            AdamW, ...). Its groups' settings are saved too.
        extra: plain JSON data, rank 0's; what `load_checkpoint` returns.
        replicas: the ranks that hold the same experts in other EP groups; all call, the first writes. None with
            several groups and without FSDP: save from one.

    Raises:
        ValueError: optimizer state of another kind, or a parameter of the optimizer that is not the model's.
        RuntimeError: on every rank, if writing failed on one; names rank and reason.
    """
    directory = Path(directory)
    operation = f"saving a checkpoint in {directory}"
    job = Agreement(ep, replicas)
    rank, ranks, writes = job.rank, job.ranks, job.copy == 0
    token = job.gather(uuid.uuid4().hex[:12])[0]
    path = directory / f"rank-{rank:05d}-of-{ranks:05d}-{token}.safetensors"
    try:
        with job.together(operation):
            directory.mkdir(parents=True, exist_ok=True)
            settings = json.dumps({"param_groups": _group_settings(optimizer), "extra": plain_json(extra)})
            ids = {layer: list(module.local_experts) for layer, module in _moe_layers(model).items()}
            tensors = _own_tensors(model, optimizer, writes, rank == 0)
            if writes:
                save_file(tensors, path, {"experts": json.dumps(ids)})
                path.chmod(directory.stat().st_mode & 0o666)  # safetensors leaves it to the owner alone
                _flush(path)
        files = job.gather({"file": path.name, "bytes": path.stat().st_size} if writes else None)
        with job.together(operation):
            if writes and rank == 0:
                for file in files:
                    _check_file(directory, file)
                index = {"format": _FORMAT, "files": files, **json.loads(settings)}
                _replace(directory / INDEX, json.dumps(index, indent=1))
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    if writes and rank == 0:  # the checkpoint before, and what interrupted saves left
        for other in directory.glob("rank-*-of-*-*.safetensors"):
            if other.name not in {file["file"] for file in files}:
                other.unlink(missing_ok=True)


def load_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    ep: EPGroup | None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    replicas: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Fills `model` (and `optimizer`) in place, at any EP size and placement; returns what was saved as `extra`.

    Collective. Reads the headers of all files, and the rows of this rank's experts. Values are converted to the model's
    dtypes.

    Raises:
        ValueError: no whole checkpoint in `directory`, a missing or unexpected tensor, a wrong shape, an expert that is
            missing or there twice, no optimizer state though `optimizer` is given. Names file and tensor.
        RuntimeError: another rank failed to load; names it and why.
    """
    directory = Path(directory)
    with Agreement(ep, replicas).together(f"loading the checkpoint in {directory}"), contextlib.ExitStack() as opened:
        index = _read_index(directory)
        shards = [_Shard.open(directory, file, opened) for file in index["files"]]
        reader = _Reader(shards, model)
        reader.check_names()
        with torch.no_grad():
            for name, tensor in _named_tensors(model).items():
                reader.read(name, name, tensor)
        if optimizer is not None:
            _load_optimizer(reader, model, optimizer, index, directory)
    return index["extra"]


def read_extra(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """What was saved as `extra`, without a model: the configuration to build one from, say.

    Raises:
        ValueError: no whole checkpoint there.
    """
    return _read_index(Path(directory))["extra"]


# ---- what is in a model and an optimizer


def _moe_layers(model: nn.Module) -> dict[str, MoELayer]:
    """By every name they have: a layer used in two places is saved under both, as its other tensors are."""
    modules = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in modules if isinstance(module, MoELayer)}


def _expert_tensors(model: nn.Module) -> dict[str, tuple[str, MoELayer]]:
    """Layer name and layer of every routed expert parameter, by the parameter's name."""
    return {
        f"{layer}.{name}" if layer else name: (layer, module)
        for layer, module in _moe_layers(model).items()
        for name in module.expert_parameters()
    }


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name."""
    tensors = model.state_dict(keep_vars=True)
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name!r} in the model's state_dict is a {type(value).__name__}: only tensors can be saved"
            )
    return tensors


def _own_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, writes: bool, with_replicated: bool
) -> dict[str, Tensor]:
    """What this rank writes. All ranks gather what is sharded, whether they write it or not."""
    experts, tensors = _expert_tensors(model), _named_tensors(model)
    if optimizer is not None:
        for name, parameter in _optimized(model, optimizer).items():
            tensors |= {f"{name}@{key}": value for key, value in _state_tensors(name, parameter, optimizer).items()}
    own = {}
    for name, tensor in tensors.items():
        whole = gathered(tensor.detach())
        if writes and (with_replicated or name.partition("@")[0] in experts):
            # copied: safetensors refuses tensors that share memory, as tied weights do
            own[name] = whole.to("cpu", copy=True).contiguous()
    return own


def _optimized(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """The optimizer's parameters by name, in its own order."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        if id(parameter) not in names:
            raise ValueError(f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the model's")
    return {names[id(parameter)]: parameter for parameter in parameters}


def _state_tensors(name: str, parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    out = {}
    for key, value in optimizer.state.get(parameter, {}).items():
        if value is None:
            continue
        if isinstance(value, int | float):
            value = torch.tensor(value, dtype=torch.float64, device="cpu")
        if not isinstance(value, Tensor) or (value.shape != parameter.shape and value.numel() != 1):
            kind = f"tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"optimizer state {key!r} of {name!r} is a {kind}: only tensors of the parameter's shape "
                f"{tuple(parameter.shape)} and scalars can be saved"
            )
        out[key] = value if value.shape == parameter.shape else value.reshape(())
    return out


def _group_settings(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]] | None:
    if optimizer is None:
        return None
    hidden = ("params", "param_names")
    return [
        {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items() if k not in hidden}
        for group in optimizer.param_groups
    ]


# ---- reading


@dataclasses.dataclass(frozen=True)
class _Shard:
    """One open file: its tensors' names, and the logical ids of each layer's rows."""

    path: Path
    file: Any
    names: frozenset[str]
    experts: dict[str, list[int]]

    @classmethod
    def open(cls, directory: Path, entry: dict[str, Any], opened: contextlib.ExitStack) -> _Shard:
        path = _check_file(directory, entry)
        try:
            file = opened.enter_context(safe_open(path, framework="pt"))
            return cls(path, file, frozenset(file.keys()), json.loads((file.metadata() or {})["experts"]))
        except (SafetensorError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: no file of a checkpoint: {type(error).__name__}: {error}") from error

    def slice(self, name: str, shape: tuple[int, ...]) -> Any:
        if name not in self.names:
            raise ValueError(f"{self.path}: tensor {name!r} is missing")
        found = self.file.get_slice(name)
        if tuple(found.get_shape()) != shape:
            raise ValueError(f"{self.path}: tensor {name!r} has shape {tuple(found.get_shape())}, the model {shape}")
        return found


class _Reader:
    """Finds each tensor of `model`, or this rank's rows of it, in the shards; shard 0 has what is replicated."""

    def __init__(self, shards: list[_Shard], model: nn.Module) -> None:
        self.shards, self.model = shards, model
        self.experts = _expert_tensors(model)
        self.rows = {name: self._locate(name, module) for name, module in _moe_layers(model).items()}

    def _locate(self, layer: str, module: MoELayer) -> dict[int, tuple[_Shard, int]]:
        """Where each expert of a layer lies: every one exactly once."""
        where: dict[int, tuple[_Shard, int]] = {}
        for shard in self.shards:
            for row, expert in enumerate(shard.experts.get(layer, [])):
                if expert in where:
                    raise ValueError(
                        f"expert {expert} of layer {layer!r} is there twice: in {where[expert][0].path}, {shard.path}"
                    )
                where[expert] = (shard, row)
        wanted = set(range(module.config.num_experts))
        if missing := sorted(wanted - set(where)):
            files = ", ".join(str(shard.path) for shard in self.shards)
            raise ValueError(f"experts {missing} of layer {layer!r} are missing from {files}")
        if unknown := sorted(set(where) - wanted):
            path = where[unknown[0]][0].path
            raise ValueError(f"{path}: layer {layer!r} has expert {unknown[0]}, the model {len(wanted)} experts")
        return where

    def check_names(self) -> None:
        """The model has every tensor that the files have (the reverse shows when it is read)."""
        wanted = set(_named_tensors(self.model))
        for shard in self.shards:
            if unexpected := sorted(name for name in shard.names if name.partition("@")[0] not in wanted):
                raise ValueError(f"{shard.path}: tensor {unexpected[0]!r} is not in the model")

    def sources(self, parameter: str) -> list[_Shard]:
        """The shards that hold what this rank needs of `parameter`."""
        if parameter not in self.experts:
            return self.shards[:1]
        layer, module = self.experts[parameter]
        found = [self.rows[layer][expert][0] for expert in module.local_experts]
        return [shard for shard in self.shards if any(shard is other for other in found)]

    def state_keys(self, parameter: str) -> set[str]:
        """The optimizer state that was saved for `parameter`."""
        marks = f"{parameter}@"
        return {name.removeprefix(marks) for s in self.sources(parameter) for name in s.names if name.startswith(marks)}

    def read(self, name: str, parameter: str, out: Tensor) -> None:
        """Copies tensor `name`, laid out like `parameter`, into `out`."""
        if isinstance(out, DTensor):
            whole = torch.empty(out.shape, dtype=out.dtype, device="cpu")
            self.read(name, parameter, whole)
            keep_own_part(out, whole)
            return
        if parameter not in self.experts:
            self.shards[0].slice(name, tuple(out.shape))
            out.copy_(self.shards[0].file.get_tensor(name))
            return
        layer, module = self.experts[parameter]
        slices: dict[Path, Any] = {}
        for local, expert in enumerate(module.local_experts):
            shard, row = self.rows[layer][expert]
            if shard.path not in slices:
                slices[shard.path] = shard.slice(name, (len(shard.experts[layer]), *out.shape[1:]))
            given = slices[shard.path][row]
            if given.dtype != out.dtype and 1 in (given.dtype.itemsize, out.dtype.itemsize):
                raise ValueError(f"{shard.path}: {mismatch(name, given.dtype, out.dtype)}")
            copy_bits(out[local], given)

    def read_state(self, key: str, parameter: str, like: Tensor) -> Tensor:
        """Optimizer state `key` of `parameter`: of its shape, or a scalar that all of its files agree on."""
        name = f"{parameter}@{key}"
        sources = self.sources(parameter)
        for shard in sources:
            if name not in shard.names:
                raise ValueError(f"{shard.path}: tensor {name!r} is missing")
        saved = sources[0].file.get_slice(name)
        if len(saved.get_shape()) == like.dim() and like.dim() > 0:
            out = torch.empty_like(like)
            self.read(name, parameter, out)
            return out
        scalars = [shard.file.get_tensor(name) for shard in sources]
        for shard, scalar in zip(sources, scalars, strict=True):
            if not torch.equal(scalar, scalars[0]):
                raise ValueError(
                    f"{shard.path}: {name!r} is {scalar}, {scalars[0]} in {sources[0].path}: they can't merge"
                )
        return scalars[0]


def _load_optimizer(
    reader: _Reader, model: nn.Module, optimizer: torch.optim.Optimizer, index: dict[str, Any], directory: Path
) -> None:
    groups = index["param_groups"]
    if groups is None:
        raise ValueError(f"{directory}: saved without an optimizer; load it with optimizer=None")
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(
            f"{directory}: has {len(groups)} parameter groups, the optimizer {len(optimizer.param_groups)}"
        )
    state_dict = optimizer.state_dict()
    state = {}
    for number, (name, parameter) in enumerate(_optimized(model, optimizer).items()):
        if keys := reader.state_keys(name):
            state[number] = {key: reader.read_state(key, name, parameter.detach()) for key in sorted(keys)}
    for group, settings in zip(state_dict["param_groups"], groups, strict=True):
        group |= {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
    optimizer.load_state_dict({"state": state, "param_groups": state_dict["param_groups"]})


# ---- files


def _read_index(directory: Path) -> dict[str, Any]:
    path = directory / INDEX
    if not path.is_file():
        raise ValueError(f"{path} is not there: no checkpoint, or one whose saving never finished")
    try:
        index = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: no JSON: {error}") from error
    if index.get("format") != _FORMAT:
        raise ValueError(f"{path}: format {index.get('format')!r}, this version reads {_FORMAT}")
    return index


def _check_file(directory: Path, entry: dict[str, Any]) -> Path:
    path = directory / entry["file"]
    if not path.is_file():
        raise ValueError(f"{path} is missing: all ranks must see the same directory")
    if path.stat().st_size != entry["bytes"]:
        raise ValueError(
            f"{path} has {path.stat().st_size} bytes, must have {entry['bytes']}: it is cut short or changed"
        )
    return path


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.partial")
    temporary.write_text(text)
    _flush(temporary)
    os.replace(temporary, path)
