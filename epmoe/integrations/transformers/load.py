"""`from_pretrained`: a parallelized model of which each rank reads its own experts and no others.

    meta model ──► experts exchanged for RoutedExperts ──► transformers loads all but the experts
                                                      └──► each rank: its experts' bytes, one expert at a time

The model is never whole anywhere: its experts exist on the meta device until this rank's share is read.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from epmoe.checks import as_device, check_kind, said
from epmoe.comm import EPGroup
from epmoe.integrations._agreement import Agreement
from epmoe.integrations.transformers.block_experts import BlockExperts
from epmoe.integrations.transformers.experts import RoutedExperts
from epmoe.integrations.transformers.files import CheckpointFiles
from epmoe.integrations.transformers.packing import without_scales
from epmoe.integrations.transformers.packings import PLAIN, Dequantized, all_but
from epmoe.integrations.transformers.parallelize import bind_methods, check_arguments, install, planned_experts
from epmoe.integrations.transformers.presets import PRESETS, Preset, moe_blocks
from epmoe.quant.config import QuantConfig
from epmoe.quant.formats import FORMATS, SCALE, ZERO
from epmoe.quant.stored import Stored, read_settings

MODELOPT = "hf_quant_config.json"
"""What ModelOpt writes beside a `config.json` that does not speak of quantization."""


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
    hold one matrix per expert or tensors over all of them. Quantized weights (FP8, INT8, MXFP4, NVFP4, GPTQ, AWQ, those
    of compressed-tensors and ModelOpt: `packings.py` has their names) are dequantized to `dtype` while they are read,
    one matrix at a time: the model then computes, trains and is saved in `dtype`, and takes that much memory.
    With `quant=QuantConfig(...)` experts are quantized as they arrive. Those that are so already stay the very numbers
    that they are: FP8 tiles under `QuantConfig("fp8_block", block=...)` of the same tiles, where these end where gate
    and up projection do, FP8 and INT8 channels under `"fp8_row"` and `"int8_row"`, with the file's `input_scale` where
    scales are static, and narrow ones under their scheme, `"int4_g128"`, `"mxfp4"`, `"nvfp4"`, ..
    `QuantConfig.from_checkpoint` reads which that is from `config.json`. Dense layers are dequantized all the same. The
    model's config no longer says that anything is quantized.

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
            stored = _forget_quantization(config, directory)
            dtype = dtype or _dtype_of(config)
            files = opened.enter_context(CheckpointFiles(directory, stored))
            builder = transformers.AutoModelForCausalLM if auto_class is None else auto_class
            with torch.device("meta"):
                probe = builder.from_config(config, dtype=dtype)
            sources = {}
            for block, (_, preset) in moe_blocks(probe, presets).items():
                name = f"{block}.{preset.experts}".lstrip(".")
                names = _names_on_disk(name, preset, probe.base_model_prefix)
                sources[name] = BlockExperts.find(files, preset, names)
            options = _with_scales_as_stored(options, sources.values())
        layers = planned_experts(probe, ep, presets, **options)
        with together(operation):
            shown = progress and (ep is None or ep.rank == 0)
            model = _load_replicated(type(probe), config, dtype, files, layers, list(sources.values()), shown)
            device = torch.device(device or ("cpu" if ep is None else ep.device))
            model.to(device)
            apart, fates = 1.0, Counter[str]()
            with _bar(shown, layers) as advance:
                for name, layer in layers.items():
                    layer.check_device(device)
                    apart = max(apart, _read_experts(layer, sources[name], advance, fates))
            for fate, number in fates.items():
                _say(shown, f"{number} matrices of experts in {fate}")
            if apart > 1:
                _say(
                    shown,
                    f"input scales of experts differ, by up to {apart:.3g} times: rows are sent by the largest; "
                    "QuantConfig(activations=None, scales='static') has each expert quantize them by its own",
                )
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
    read: set[str] = set()
    others = all_but(files, [start for block in experts for start in block.starts()])
    for name, packing in others.items():
        if packing is PLAIN:
            tensors[name] = files.slice(name)
            if (kind := files.kind(name)).startswith("F8") or kind == "I8":
                raise ValueError(f"{files.names[name]}: {without_scales(name, kind)}")
        else:
            tensors[name] = Dequantized(files, name, packing, dtype, read)
    settings = files.directory / "generation_config.json"
    generation = GenerationConfig.from_pretrained(files.directory) if settings.is_file() else None
    with _transformers_bars(shown):
        model = Loading.from_pretrained(
            None, config=config, state_dict=tensors, dtype=dtype, generation_config=generation
        )
    if dense := [name for name in others if name in read]:  # files hold more: layers that predict further tokens
        kinds = " and ".join(dict.fromkeys(others[name].called(files, name) for name in dense))
        _say(shown, f"{len(dense)} dense matrices in {kinds}, such as {dense[0]}: dequantized to {dtype}")
    model.__class__ = cls
    vars(model).pop("_weight_conversions", None)  # of what was loaded here only: saving needs the experts' too
    model.config.name_or_path = model.name_or_path = str(files.directory)
    return model


@torch.no_grad()
def _read_experts(
    layer: RoutedExperts, source: BlockExperts, advance: Callable[[], None], fates: Counter[str]
) -> float:
    """This rank's experts of one block, one at a time; counts in `fates` what became of quantized ones. How many times
    the largest fixed scale that rows are sent by is the smallest that an expert asked for; 1 where they agree, or each
    has its own."""
    parameters = {our: layer.get_parameter(our) for our in layer.preset.tensors.names()}
    scheme, block = layer.weight_scheme, layer.weight_block
    otherwise = f"dequantized to {layer.dtype}" + ("" if scheme is None else f" and quantized again to {scheme}")
    for expert in layer.local_experts:
        tensors = source.tensors(expert)
        order = None if scheme is None else tensors["down_proj"].order(scheme)
        for our, parameter in parameters.items():
            tensor = tensors[our]
            if scheme is not None and our.endswith("_proj"):
                if (kept := tensor.kept(scheme, block, order, parameter.device)) is not None:
                    kept = _as_held(kept, layer, our, f"{source.files.directory}: {our} of expert {expert}")
                    layer.load_experts({n: t[None].to(parameter.device) for n, t in kept.items()}, [expert])
                    fates[f"{tensor.called()}: kept as they are, {scheme}"] += 1
                    continue
            row = tensor.row(layer.dtype, order)
            shape = (layer.weight_shape(our) if our.endswith("_proj") else parameter.shape)[1:]
            if row.shape != shape:
                raise ValueError(
                    f"{source.files.directory}: {our} of expert {expert} of {layer.name} has shape {tuple(row.shape)} "
                    f"(gate before up, not transposed), the model has {tuple(shape)}"
                )
            layer.load_experts({our: row.contiguous()[None].to(parameter.device)}, [expert])
            if (called := tensor.called()) is not None:
                fates[f"{called}: {otherwise}"] += 1
        advance()
    everywhere, apart = range(layer.config.num_experts), 1.0
    for our, field, fix in (
        ("gate_up_proj", "scales", layer.set_input_scale),
        ("down_proj", "down_scales", layer.set_down_input_scales),
    ):
        if layer.config.quant is not None and getattr(layer.config.quant, field) == "static":
            if (found := source.input_scales(our, everywhere)) is not None:
                fix(found)
                if our == "gate_up_proj" and not layer.config.quant.scales_by_expert:
                    apart = float(found.max() / found.min())
    return apart


def _as_held(parts: dict[str, Tensor], layer: RoutedExperts, our: str, what: str) -> dict[str, Tensor]:
    """Parts of quantized weights in the dtypes that the layer has, with zero points if it has those.

    Raises:
        ValueError: it would change them.
    """
    zero, held = f"{our}{ZERO}", dict(parts)
    mine = getattr(layer, zero)
    if mine is None and zero in held:
        raise ValueError(f"{what} of {layer.name} has zero points: QuantConfig(zero_points=True) holds them")
    if mine is not None and zero not in held:
        held[zero] = torch.zeros_like(held[f"{our}{SCALE}"], dtype=mine.dtype)
    scales, dtype = held[f"{our}{SCALE}"], layer.get_parameter(f"{our}{SCALE}").dtype
    if scales.dtype != dtype and not torch.equal(scales.to(dtype).to(scales.dtype), scales):
        raise ValueError(
            f"{what} of {layer.name} has scales in {scales.dtype}, which {dtype} does not hold: "
            "QuantConfig(scale_dtype='float32') does"
        )
    return held


def _with_scales_as_stored(options: dict[str, Any], sources: Iterable[BlockExperts]) -> dict[str, Any]:
    """The options, whose integers have scales in the files' dtype where nothing else was asked for."""
    quant = options.get("quant")
    if not isinstance(quant, QuantConfig) or quant.weights is None or quant.scale_dtype is not None:
        return options
    if not FORMATS[quant.weights].zeros:
        return options
    found = next((dtype for source in sources if (dtype := source.scale_dtype()) is not None), None)
    return {**options, "quant": dataclasses.replace(quant, scale_dtype=found)}


def _say(shown: bool, text: str) -> None:
    if shown:
        Console(stderr=True, soft_wrap=True).print(text, highlight=False, markup=False)


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


def _forget_quantization(config: Any, directory: Path) -> Stored:
    """Takes the quantization out of `config`; how the files hold weights by it, or by what ModelOpt wrote beside it."""
    found = None
    for part in (config, config.get_text_config()):
        for name in ("quantization_config", "compression_config"):
            if (given := getattr(part, name, None)) is not None:
                found = found if found is not None else given
                delattr(part, name)
    if found is None and (directory / MODELOPT).is_file():
        found = json.loads((directory / MODELOPT).read_text())
    if found is None:
        return Stored()
    return read_settings(found if isinstance(found, dict) else found.to_dict())


def _dtype_of(config: Any) -> torch.dtype:
    found = getattr(config.get_text_config(), "dtype", None)
    return found if isinstance(found, torch.dtype) else torch.get_default_dtype()
