"""Ranks that save or load together: they hear each other's values, fail together or not at all, and share tensors.

A rank stands in a row, its EP group, and where the same experts are held several times in a column, its replicas.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from epmoe.checks import check_kind, said
from epmoe.comm import EPGroup


class Agreement:
    """The ranks of a row and, with `replicas`, of all rows beside it.

    Attributes:
        rank, ranks: place in the row, and its size.
        copy: which row this is; row 0 writes.
    """

    def __init__(self, ep: EPGroup | None, replicas: dist.ProcessGroup | None = None) -> None:
        check_kind("ep", ep, (EPGroup, type(None)), "the EPGroup of the model's layers, or None without one")
        self.rank, self.ranks = (0, 1) if ep is None else (ep.rank, ep.num_ranks)
        self.copy = 0 if replicas is None else dist.get_rank(replicas)
        self._row = None if ep is None else ep.process_group
        self._column = replicas

    def gather(self, value: Any) -> list[Any]:
        """The values of the row's ranks, in rank order. Collective."""
        return _gather(self._row, value)

    @contextlib.contextmanager
    def together(self, operation: str) -> Iterator[None]:
        """A block that fails on all ranks or on none: the others raise with the reason.

        Inside, no rank may fail where others wait for it: the only collectives are `gathered`'s.
        """
        try:
            yield
        except Exception as error:
            self._reasons(f"{type(error).__name__}: {error}")
            raise
        for copy, row in enumerate(self._reasons(None)):
            for rank, reason in enumerate(row):
                if reason is not None:
                    where = f"rank {rank}" if self._column is None else f"rank {rank} of copy {copy}"
                    raise RuntimeError(f"{operation}: {where} failed: {reason}")

    def _reasons(self, own: str | None) -> list[list[str | None]]:
        return _gather(self._column, _gather(self._row, own))


def _gather(group: dist.ProcessGroup | None, value: Any) -> list[Any]:
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def plain_json(extra: dict[str, Any] | None) -> dict[str, Any]:
    """`extra` as a checkpoint keeps it.

    Raises:
        ValueError: it is no dict of plain data; names the entry.
    """
    if extra is None:
        return {}
    check_kind("extra", extra, dict, "a dict of plain JSON data, or None")
    for name, value in extra.items():
        try:
            json.dumps({name: value})
        except (TypeError, ValueError) as error:
            hint = "plain JSON data (numbers, text, lists, dicts); tensors belong to the model as buffers"
            raise ValueError(f"{said(f'extra[{name!r}]', value)}: must be {hint}: {error}") from error
    return extra


def gathered(tensor: Tensor) -> Tensor:
    """All of a DTensor, on each rank of its mesh; another tensor as it is. Collective over the mesh."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def keep_own_part(out: DTensor, whole: Tensor) -> None:
    """Copies this rank's part of `whole`, which every rank has, into `out`."""
    mesh = out.device_mesh
    parts = distribute_tensor(whole.to(mesh.device_type), mesh, out.placements, src_data_rank=None)
    out.to_local().copy_(parts.to_local())
