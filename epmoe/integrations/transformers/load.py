"""`from_pretrained`: a parallelized model of which each rank reads its own experts and no others.

    meta model ──► experts exchanged for RoutedExperts ──► transformers loads all but the experts
                                                      └──► each rank: its experts' bytes, one expert at a time

The model is never whole anywhere: its experts exist on the meta device until this rank's share is read.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from epmoe.checks import as_device, check_kind, said
from epmoe.comm import EPGroup
from epmoe.integrations._agreement import Agreement
from epmoe.integrations.transformers.experts import RoutedExperts
from epmoe.integrations.transformers.files import BlockExperts, CheckpointFiles, Dequantized
from epmoe.integrations.transformers.parallelize import bind_methods, check_arguments, install, planned_experts
from epmoe.integrations.transformers.presets import PRESETS, Preset

QUANTIZED = ("fp8", "mxfp4")


def from_pretrained(
    path: str | os.PathLike[str],
    ep: EPGroup | None = None,
    *,
    auto_class: Any = None,
    config: Any = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    presets: Sequence[Preset] = PRESETS,
    progress: bool = True,
    **options: Any,
) -> Any:
    """The model in directory `path`, parallelized over `ep` as `parallelize` does it, in eval mode. Collective.

    Each rank holds the replicated part and its own experts, and of the experts' bytes reads only those. The files may
    hold one matrix per expert or tensors over all of them. FP8 weights (`weight_scale_inv` of tiles, `weight_scale` of
    channels or of the tensor) and MXFP4 experts (`*_blocks`, `*_scales`) are dequantized to `dtype` while they are
    read, one expert at a time: the model then computes, trains and is saved in `dtype`, and takes that much memory.
    With `quant=QuantConfig(...)` experts are quantized as they arrive. Those that are so already stay the very bits
    that they are: FP8 tiles under `QuantConfig("fp8_block", block=...)` of the same tiles, where these end where gate
    and up projection do, FP8 channels under `"fp8_row"`, with the file's `input_scale` where scales are static, and
    MXFP4 under `"mxfp4"`.

    Args:
        path: a local directory of safetensors (`huggingface_hub.snapshot_download(name)` fetches one).
        ep: the ranks that share the experts; None: all of them are loaded.
        auto_class: `transformers.AutoModelForCausalLM` if None; what builds the model from its config.
        config: the model's config, to change something in it; None reads it from `path`.
        dtype: of the parameters; None: the config's, or torch's default.
        device: of the parameters; None: the group's, or the CPU.
        presets: as of `parallelize`.
        progress: show bars on rank 0 while tensors are read.
        options: as of `parallelize`: dispatcher, experts, placement, ...

    Raises:
        ValueError: no checkpoint there, experts that are missing or of another shape, an unknown quantization, FP8
            values without scales, or what `parallelize` refuses.
        RuntimeError: another rank failed; names it and why.

    Example::

        model = from_pretrained("/models/Qwen3-30B-A3B", EPGroup(), dtype=torch.bfloat16)
    """
    import transformers

    check_kind("path", path, (str, os.PathLike), "a directory, as text or a path")
    check_arguments("from_pretrained", ep, presets, options)
    check_kind("dtype", dtype, (torch.dtype, type(None)), "a torch.dtype, or None for the config's")
    if auto_class is not None and not hasattr(auto_class, "from_config"):
        raise ValueError(f"{said('auto_class', auto_class)}: must be a class such as AutoModelForImageTextToText")
    if config is not None and not hasattr(config, "get_text_config"):
        raise ValueError(f"{said('config', config)}: must be the model's config, or None to read it from path")
    device = None if device is None else as_device(device)
    directory = Path(path)
    operation, together = f"loading {directory}", Agreement(ep).together
    with contextlib.ExitStack() as opened:
        with together(operation):
            if not directory.is_dir():
                raise ValueError(
                    f"path={str(path)!r} is no directory: fetch it with huggingface_hub.snapshot_download first"
                )
            config = transformers.AutoConfig.from_pretrained(directory) if config is None else copy.deepcopy(config)
            fp8_block = _forget_quantization(config)
            dtype = dtype or _dtype_of(config)
            files = opened.enter_context(CheckpointFiles(directory, fp8_block))
            builder = transformers.AutoModelForCausalLM if auto_class is None else auto_class
            with torch.device("meta"):
                probe = builder.from_config(config, dtype=dtype)
        layers = planned_experts(probe, ep, presets, **options)
        with together(operation):
            sources = {
                name: BlockExperts.find(
                    files, layer.preset, _names_on_disk(name, layer.preset, probe.base_model_prefix)
                )
                for name, layer in layers.items()
            }
            shown = progress and (ep is None or ep.rank == 0)
            model = _load_replicated(type(probe), config, dtype, files, layers, list(sources.values()), shown)
            device = torch.device(device or ("cpu" if ep is None else ep.device))
            model.to(device)
            with _bar(shown, layers) as advance:
                for name, layer in layers.items():
                    layer.check_device(device)
                    _read_experts(layer, sources[name], advance)
    bind_methods(model, ep)
    return model


def _load_replicated(
    cls: Any,
    config: Any,
    dtype: torch.dtype,
    files: CheckpointFiles,
    layers: dict[str, RoutedExperts],
    experts: list[BlockExperts],
    shown: bool,
) -> Any:
    """A `cls` with `layers` in place, in which transformers has loaded everything but the experts, on the CPU."""
    from transformers import GenerationConfig

    class Loading(cls):
        """Exchanges the experts before anything is allocated."""

        _keys_to_ignore_on_load_missing = [
            *(cls._keys_to_ignore_on_load_missing or ()),
            *(re.escape(f"{name}.{our}") for name, layer in layers.items() for our in layer.expert_parameters()),
        ]

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            install(self, layers)

    # Conversions of names are looked up by these.
    Loading.__name__, Loading.__qualname__, Loading.__module__ = cls.__name__, cls.__qualname__, cls.__module__
    tensors: dict[str, Any] = {}
    elsewhere, others = tuple(start for block in experts for start in block.starts()), files.about_others()
    for name in files.names:
        if name not in others and not name.startswith(elsewhere):
            quantized = files.scale_name(name) is not None
            tensors[name] = Dequantized(files, name, dtype) if quantized else files.wide(name)
    settings = files.directory / "generation_config.json"
    generation = GenerationConfig.from_pretrained(files.directory) if settings.is_file() else None
    with _transformers_bars(shown):
        model = Loading.from_pretrained(
            None, config=config, state_dict=tensors, dtype=dtype, generation_config=generation
        )
    model.__class__ = cls
    vars(model).pop("_weight_conversions", None)  # of what was loaded here only: saving needs the experts' too
    model.config.name_or_path = model.name_or_path = str(files.directory)
    return model


@torch.no_grad()
def _read_experts(layer: RoutedExperts, source: BlockExperts, advance: Callable[[], None]) -> None:
    """This rank's experts of one block, one at a time."""
    parameters = {our: layer.get_parameter(our) for our in layer.preset.tensors.names()}
    for expert in layer.local_experts:
        for our, parameter in parameters.items():
            if layer.weight_scheme is not None and our.endswith("_proj"):
                if (kept := source.kept(our, expert, layer.weight_scheme, layer.weight_block)) is not None:
                    layer.load_experts({n: t[None].to(parameter.device) for n, t in kept.items()}, [expert])
                    continue
            row = source.row(our, expert, layer.dtype)
            shape = (layer.weight_shape(our) if our.endswith("_proj") else parameter.shape)[1:]
            if row.shape != shape:
                raise ValueError(
                    f"{source.files.directory}: {our} of expert {expert} of {layer.name} has shape {tuple(row.shape)} "
                    f"(gate before up, not transposed), the model has {tuple(shape)}"
                )
            layer.load_experts({our: row.contiguous()[None].to(parameter.device)}, [expert])
        advance()
    everywhere = range(layer.config.num_experts)
    for our, field, fix in (
        ("gate_up_proj", "scales", layer.set_input_scale),
        ("down_proj", "down_scales", layer.set_down_input_scales),
    ):
        if layer.config.quant is not None and getattr(layer.config.quant, field) == "static":
            if (found := source.input_scales(our, everywhere)) is not None:
                fix(found)


@contextlib.contextmanager
def _bar(shown: bool, layers: dict[str, RoutedExperts]) -> Iterator[Callable[[], None]]:
    """What to call for every expert that was read."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task("reading experts", total=sum(len(layer.local_experts) for layer in layers.values()))
        yield lambda: bar.advance(task)


@contextlib.contextmanager
def _transformers_bars(shown: bool) -> Iterator[None]:
    """Without those of transformers unless `shown`."""
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    if not shown:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            logging.enable_progress_bar()


def _names_on_disk(experts: str, preset: Preset, prefix: str) -> Iterator[str]:
    """What the block of these experts may be called in files: by either name, with the base model's prefix or not."""
    parent = experts.rpartition(".")[0]
    names = [parent]
    if preset.disk.block is not None:
        names.append(f"{parent.rpartition('.')[0]}.{preset.disk.block}")
    for name in names:
        yield name
        yield name.removeprefix(f"{prefix}.") if name.startswith(f"{prefix}.") else f"{prefix}.{name}"


def _forget_quantization(config: Any) -> tuple[int, int] | None:
    """Takes the quantization out of `config`; the tile of an FP8 scale, None where there is one per tensor."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    settings = found if isinstance(found, dict) else found.to_dict()
    method = str(getattr(settings.get("quant_method"), "value", settings.get("quant_method")))
    if method not in QUANTIZED:
        raise ValueError(f"quantization_config.quant_method={method!r}: must be {' or '.join(QUANTIZED)}, or none")
    del config.quantization_config
    block = settings.get("weight_block_size")
    if block is not None and (not isinstance(block, (list, tuple)) or len(block) != 2):
        raise ValueError(f"quantization_config.weight_block_size={block!r}: must be two sizes, rows and columns")
    return None if block is None else (int(block[0]), int(block[1]))


def _dtype_of(config: Any) -> torch.dtype:
    found = getattr(config.get_text_config(), "dtype", None)
    return found if isinstance(found, torch.dtype) else torch.get_default_dtype()
