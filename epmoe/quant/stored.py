"""What the `quantization_config` of a checkpoint's `config.json` says of how its weights are stored.

Read once, before any tensor: `QuantConfig.from_checkpoint` makes the layer's settings of it, and
`integrations.transformers.from_pretrained` knows by it what words and scales mean. Beside the path of a token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from epmoe.quant.checkpoint_formats import integer_scheme

GPTQ_FORMATS = {"gptq": True, "gptq_v2": False}
"""`checkpoint_format` of GPTQ: whether zero points are stored less one."""
AUTO_ROUND = {
    "auto_round:auto_gptq": "gptq", "auto_round:gptqmodel": "gptq_v2", "auto_round": "gptq_v2",
    "auto_round:auto_awq": "awq",
}  # fmt: skip
"""`packing_format` of AutoRound whose tensors are AWQ's, or those of a `checkpoint_format` of GPTQ."""
COMPRESSED_FORMATS = (
    "nvfp4-pack-quantized", "mxfp4-pack-quantized", "pack-quantized", "float-quantized", "int-quantized",
    "naive-quantized",
)  # fmt: skip
MODELOPT_ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "FP8", "MIXED_PRECISION")


@dataclasses.dataclass(frozen=True)
class Stored:
    """Attributes:
    method: `quant_method`; None: nothing is quantized.
    scheme: the scheme of `quant.formats.FORMATS` that holds these numbers as they are; None: there is none, or the
        weights are not all stored alike.
    block: rows and columns of a tile with one FP8 scale; None: a scale is for the tensor or a channel.
    zero_points: integers have them.
    static: scales of activations are fixed, `input_scale`.
    rows: what of the activations rows of `scheme` can't be, the field, its value and what it must be; None: nothing.
    words: what tensors called `qweight` are, "gptq" or "awq"; None: there should be none.
    bits, group_size: of integers; -1: a group is a whole row.
    zeros_less_one, zeros_borrow: zero points of GPTQ are stored less one, and how; as of `from_gptq`.
    """

    method: str | None = None
    scheme: str | None = None
    block: tuple[int, int] | None = None
    zero_points: bool = False
    static: bool = False
    rows: str | None = None
    words: str | None = None
    bits: int = 4
    group_size: int = 128
    zeros_less_one: bool = True
    zeros_borrow: bool = False


def read_settings(settings: Mapping[str, Any]) -> Stored:
    """How weights are stored under `quantization_config`: as plain numbers where it is of a cache of keys and values
    alone.

    Args:
        settings: of `quant_method` fp8, mxfp4, gptq, awq, auto-round (in the packing of GPTQ or AWQ),
            compressed-tensors or modelopt; or what ModelOpt's `hf_quant_config.json` holds.

    Raises:
        ValueError: another method, or a field of it that nothing here can read; names it, its value and what would do.
    """
    if not isinstance(settings, Mapping):
        raise ValueError(f"settings is a {type(settings).__name__}: must be the dict of quantization_config")
    method = method_of(settings)
    if method not in _READERS:
        raise _refused("quant_method", method, f"{', '.join(dict.fromkeys(_READERS))}, or none")
    found = _READERS[method](settings)
    return Stored() if found is None else dataclasses.replace(found, method=method)


def method_of(settings: Mapping[str, Any]) -> str:
    """`quant_method`, whether it is text or an enumeration; ModelOpt's own file has none."""
    found = settings.get("quant_method", "modelopt" if "quantization" in settings else None)
    return str(getattr(found, "value", found))


def _refused(field: str, value: object, right: str) -> ValueError:
    return ValueError(f"quantization_config.{field}={value!r}: must be {right}")


def _fp8(settings: Mapping[str, Any]) -> Stored:
    block = settings.get("weight_block_size")
    if block is not None and (not isinstance(block, (list, tuple)) or len(block) != 2):
        raise _refused("weight_block_size", block, "two sizes, rows and columns")
    static = settings.get("activation_scheme") == "static"
    return Stored(block=None if block is None else (int(block[0]), int(block[1])), static=static)


def _mxfp4(settings: Mapping[str, Any]) -> Stored:
    return Stored(scheme="mxfp4")


def _integers(bits: object, group_size: object, zero_points: bool, where: str = "") -> Stored:
    """Integers of `bits`, with a scale for each group; `where` the two fields stand."""
    if bits not in (4, 8):
        raise _refused(f"{where}{'num_bits' if where else 'bits'}", bits, "4 or 8")
    if not isinstance(group_size, int):
        raise _refused(f"{where}group_size", group_size, "a number")
    try:
        scheme = integer_scheme(int(bits), group_size)  # type: ignore[call-overload]
    except ValueError as error:
        raise ValueError(f"quantization_config.{where}{error}") from error
    return Stored(scheme=scheme, zero_points=zero_points, bits=int(bits), group_size=group_size)  # type: ignore[call-overload]


def _gptq(settings: Mapping[str, Any]) -> Stored:
    form = str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()
    if form not in GPTQ_FORMATS:
        raise _refused("checkpoint_format", form, " or ".join(GPTQ_FORMATS))
    found = _integers(settings.get("bits"), settings.get("group_size", 128), settings.get("sym") is False)
    writer = str((settings.get("meta") or {}).get("quantizer")).lower()
    less_one = GPTQ_FORMATS[form]
    return dataclasses.replace(
        found, words="gptq", zeros_less_one=less_one, zeros_borrow=less_one and "gptqmodel" in writer
    )


def _awq(settings: Mapping[str, Any]) -> Stored:
    form = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if form != "gemm":
        raise _refused("version", form, "gemm")
    if (bits := settings.get("bits", 4)) != 4:
        raise _refused("bits", bits, "4")
    found = _integers(bits, settings.get("group_size", 128), settings.get("zero_point") is not False)
    return dataclasses.replace(found, words="awq")


def _auto_round(settings: Mapping[str, Any]) -> Stored:
    packing = settings.get("packing_format")
    if packing is None and "backend" in settings:
        packing = _packing_of_backend(str(settings["backend"]))
    if packing not in AUTO_ROUND:
        raise _refused("packing_format", packing, ", ".join(AUTO_ROUND))
    if AUTO_ROUND[packing] == "awq":
        return _awq({"zero_point": settings.get("sym") is False, **_only(settings, "bits", "group_size")})
    return _gptq({"checkpoint_format": AUTO_ROUND[packing], **_only(settings, "bits", "group_size", "sym")})


def _packing_of_backend(backend: str) -> str:
    """`packing_format` of old files of AutoRound, which name a kernel in its place, such as
    `auto_round:gptq:exllamav2`."""
    names = backend.split(":")
    for own, usual in (("gptq", "auto_gptq"), ("awq", "auto_awq")):
        if own in names or usual in names:
            return f"auto_round:{usual}"
    if backend in ("auto_round", "auto_round:exllamav2", "auto_round:tritonv2"):
        return "auto_round"
    raise _refused("backend", backend, "left out, and packing_format given: it says how weights are packed")


def _only(settings: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: settings[name] for name in names if name in settings}


def _compressed(settings: Mapping[str, Any]) -> Stored | None:
    for field in ("transform_config", "sparsity_config"):
        given = settings.get(field)
        if given and given.get("format", "other") != "dense":
            raise _refused(field, given, "left out: weights are not what a layer multiplies by then")
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or (not groups and not settings.get("kv_cache_scheme")):
        raise _refused("config_groups", groups, "groups of layers with their weights' settings")
    found = [_group(settings, name, group) for name, group in groups.items() if group.get("weights") is not None]
    if not found:
        return None
    blocks = {each.block for each in found if each.block is not None}
    if len(blocks) > 1:
        raise _refused("config_groups", sorted(blocks), "tiles of one size in all groups")
    alike = all(each == found[0] for each in found)
    return found[0] if alike else Stored(block=next(iter(blocks), None))


def _group(settings: Mapping[str, Any], name: str, group: Mapping[str, Any]) -> Stored:
    form, where = group.get("format") or settings.get("format"), f"config_groups.{name}."
    weights, inputs = group["weights"], group.get("input_activations") or {}
    if form not in COMPRESSED_FORMATS:
        raise _refused("format", form, ", ".join(COMPRESSED_FORMATS))
    if form in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        return Stored(scheme=form.partition("-")[0])
    strategy = _strategy(weights)
    if form == "pack-quantized":
        if strategy not in ("group", "channel"):
            raise _refused(f"{where}weights.strategy", strategy, "group or channel")
        size = -1 if strategy == "channel" else weights.get("group_size")
        return _integers(weights.get("num_bits"), size, weights.get("symmetric") is False, f"{where}weights.")
    kind = (weights.get("type"), weights.get("num_bits"))
    able = {"float-quantized": ("float",), "int-quantized": ("int",)}.get(form, ("float", "int"))
    if kind not in [(each, 8) for each in able]:
        right = f"{' or '.join(able)} of 8 bits in format {form!r}"
        raise _refused(f"{where}weights", f"{kind[0]} of {kind[1]} bits", right)
    static = bool(inputs) and not inputs.get("dynamic")
    if kind[0] == "int":
        if strategy not in ("tensor", "channel"):
            raise _refused(f"{where}weights.strategy", strategy, f"tensor or channel in format {form!r}")
        if weights.get("symmetric") is False:
            raise _refused(f"{where}weights.symmetric", False, f"True in format {form!r}")
        return Stored(scheme="int8_row", static=static, rows=_unlike_rows(inputs, f"{where}input_activations."))
    if strategy != "block":
        return Stored(scheme="fp8_row", static=static)
    block = weights.get("block_structure")
    if not isinstance(block, (list, tuple)) or len(block) != 2:
        raise _refused(f"{where}weights.block_structure", block, "two sizes, rows and columns")
    return Stored(scheme="fp8_block", block=(int(block[0]), int(block[1])))


def _strategy(arguments: Mapping[str, Any]) -> str:
    """What shares a scale, which compressed-tensors tells by `group_size` where `strategy` is left out."""
    size = arguments.get("group_size")
    usual = "tensor" if size is None else "channel" if size == -1 else "group"
    return str(arguments.get("strategy") or usual)


def _unlike_rows(inputs: Mapping[str, Any], where: str) -> str | None:
    """As of `Stored.rows`, of rows of int8 with one scale and no zero point; no `inputs`: they are not quantized."""
    if not inputs:
        return None
    for field, found, right in (
        ("type", inputs.get("type", "int"), ("int",)),
        ("num_bits", inputs.get("num_bits", 8), (8,)),
        ("symmetric", inputs.get("symmetric", True), (True,)),
        ("strategy", _strategy(inputs), ("token", "tensor")),
    ):
        if found not in right:
            return f"{where}{field}={found!r}: must be {' or '.join(str(each) for each in right)}"
    return None


def _modelopt(settings: Mapping[str, Any]) -> Stored | None:
    fields = settings if "quant_algo" in settings else settings.get("quantization") or {}
    given = fields.get("quant_algo")
    if given is None and "quant_algo" in fields:
        return None
    if given not in MODELOPT_ALGORITHMS:
        raise _refused("quant_algo", given, ", ".join(MODELOPT_ALGORITHMS))
    if given == "MIXED_PRECISION":
        return Stored()
    return Stored(scheme="fp8_row", static=True) if given == "FP8" else Stored(scheme="nvfp4")


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Stored | None]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "modelopt_mixed": _modelopt,
    "intel/auto-round": _auto_round,
}
