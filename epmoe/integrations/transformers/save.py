"""`save_pretrained` of a parallelized model: a directory that plain `transformers` loads.

Rank 0 gathers the experts, puts them back into the model's own modules for as long as the model saves itself, and so
has names, layouts, sharding and metadata as the untouched model writes them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from torch import nn

from epmoe.integrations._agreement import Agreement
from epmoe.integrations.transformers.experts import RoutedExperts
from epmoe.integrations.transformers.gather import whole_experts


def save_pretrained(model: Any, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
    """Writes the whole model into `save_directory` with its own `save_pretrained`, every expert once. Collective.

    Rank 0 writes, and holds all experts in host memory for as long as that takes. With several EP groups, save from
    one. For saving and resuming training at
    any number of ranks without that, see `epmoe.integrations.checkpoint`.

    Args:
        kwargs: of the model's own `save_pretrained`; `state_dict` and `is_main_process` are ours to choose.

    Raises:
        ValueError: one of those is given, the model is not parallelized, or has LoRA adapters.
        RuntimeError: on the other ranks, if rank 0 failed; says why.
    """
    for name in ("state_dict", "is_main_process"):
        if kwargs.pop(name, None) is not None:
            raise ValueError(f"{name}=...: leave it unset; all ranks call save_pretrained, rank 0 gathers and writes")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, RoutedExperts)}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no parallelized experts: use its own save_pretrained")
    ep = next(iter(layers.values())).ep
    own = {name: whole_experts(layer, everywhere=False) for name, layer in layers.items()}
    with Agreement(ep).together(f"saving in {save_directory}"):
        if ep is None or ep.rank == 0:
            with _in_place(model, own):
                type(model).save_pretrained(model, save_directory, **kwargs)


@contextlib.contextmanager
def _in_place(model: nn.Module, modules: dict[str, nn.Module | None]) -> Iterator[None]:
    """`modules` where they belong in `model`, and what is there now again afterwards."""
    before = {name: model.get_submodule(name) for name in modules}
    try:
        for name, module in modules.items():
            model.set_submodule(name, module)  # type: ignore[arg-type]
        yield
    finally:
        for name, module in before.items():
            model.set_submodule(name, module)
