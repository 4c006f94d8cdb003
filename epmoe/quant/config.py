"""`QuantConfig`: which numbers of a layer are held, sent and multiplied in eight bits or fewer.

x ── activations ──► dispatch ──► weights (× activations, between the GEMMs too) ── combine ──► y
dx ◄── gradients ── dispatch ◄── bf16 ◄── gradients ── combine ◄── dy
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from epmoe.checks import check_bool
from epmoe.ops.quantize import row_format
from epmoe.ops.quantize_blocks import BLOCK, block_mismatch
from epmoe.quant.formats import FORMATS, scale_dtype_mismatch
from epmoe.quant.rows import ROW_SCHEMES
from epmoe.quant.stored import read_settings
from epmoe.quant.weights import scheme_block_mismatch

AS_WEIGHTS = "as weights"


def _scheme(field: str, value: str | None, allowed: tuple[str, ...]) -> None:
    if value is not None and value not in allowed:
        raise ValueError(f"QuantConfig.{field}={value!r}: must be None, or one of {', '.join(allowed)}")


@dataclasses.dataclass(frozen=True)
class QuantConfig:
    """How a layer is quantized. All but `weights` serve training too.

    Args:
        weights: scheme of the routed experts' weights (`quant.formats.FORMATS`); None: they stay wide, as training
            needs them.
        activations: scheme of rows, which are quantized once, before they are sent, and travel as values and scales.
            Experts that compute with that scheme multiply them as they arrived, others dequantize them. `as weights`:
            the scheme of rows that the weights' products take; None: rows travel wide, and experts that multiply
            quantized rows quantize them on arrival.
        gradients: scheme of the rows that carry gradients, in the backward of dispatch and of combine. None: they
            travel in the rows' dtype.
        combine: scheme of the experts' rows on their way back. None: they travel in the rows' dtype. With `fp8_block`
            it costs about 2.6 % of each rank's part of a row, relative L2, and saves half of combine's bytes.
        experts: the kind that computes with quantized weights; `auto`: the fastest that can. For weights that are not
            quantized `MoEConfig.experts` says.
        block: rows and columns of w that share a scale in block schemes, the last of each partial: rows 1, 2, 4, .. 128
            or a multiple of 128, columns 32, 64 or a multiple of 128. Rows of activations have a scale for 128 columns
            all the same. The fastest kernels are those of 128 × 128.
        scales: of rows, `dynamic`, each row's own, or `static`: fixed before (`MoELayer.set_input_scale`). For serving,
            with `fp8_row` or `int8_row` rows. Rows that are quantized before they are sent have one number for all
            experts, since a row is sent once, to several of them. With `activations=None` they travel wide, and each
            expert quantizes its own by its own number.
        down_scales: of the activation between the GEMMs, `dynamic`, or `static`: one number for each expert
            (`MoELayer.set_down_input_scales`), with `fp8_row` or `int8_row` weights. What is past it saturates.
        zero_points: of integer schemes that may have them, as GPTQ and AWQ checkpoints do.
        scale_dtype: of the scales of integer schemes, `bfloat16` (also None), `float16` or `float32`: as the checkpoint
            has them, so that they keep their bits.

    Raises:
        ValueError: a scheme that does not exist, or fields that do not go together.

    Example::

        quantize_(model, QuantConfig("fp8_block"))                      # serve: weights, rows and activations in fp8
        MoEConfig(..., quant=QuantConfig(activations="fp8_block"))      # train: rows sent in fp8, gradients in bf16
    """

    weights: str | None = None
    activations: str | None = AS_WEIGHTS
    gradients: str | None = None
    combine: str | None = None
    experts: str = "auto"
    block: tuple[int, int] = BLOCK
    scales: str = "dynamic"
    down_scales: str = "dynamic"
    zero_points: bool = False
    scale_dtype: str | None = None

    def __post_init__(self) -> None:
        _scheme("weights", self.weights, tuple(FORMATS))
        for field in ("activations", "gradients", "combine"):
            value = getattr(self, field)
            _scheme(field, None if field == "activations" and value == AS_WEIGHTS else value, ROW_SCHEMES)
        if self.experts != "auto" and self.weights is None:
            raise ValueError(
                f"QuantConfig.experts={self.experts!r} with weights=None: must be left unset; MoEConfig.experts names "
                "the kind for weights that are not quantized"
            )
        block = tuple(self.block) if isinstance(self.block, (list, tuple)) else (self.block,)
        if (reason := scheme_block_mismatch(self.weights, block)) is not None:
            raise ValueError(f"QuantConfig.block={self.block!r} with weights={self.weights!r}: {reason}")
        object.__setattr__(self, "block", block)  # a list is what files have

        check_bool("QuantConfig.zero_points", self.zero_points)
        for field in ("scales", "down_scales"):
            if getattr(self, field) not in ("dynamic", "static"):
                raise ValueError(f"QuantConfig.{field}={getattr(self, field)!r}: must be 'dynamic' or 'static'")
        if self.scales == "static":
            rows = self.rows
            if rows is None and self.weights is not None:
                rows = FORMATS[self.weights].rows
            if self.weights is None or rows is None or row_format(rows).group:
                raise ValueError(
                    f"QuantConfig.scales='static' with weights={self.weights!r} and rows in {rows!r}: must be "
                    "quantized weights and rows with one scale, fp8_row or int8_row"
                )
        if self.down_scales == "static" and (
            self.weights is None or FORMATS[self.weights].rows is None or row_format(self.weights).group
        ):
            raise ValueError(
                f"QuantConfig.down_scales='static' with weights={self.weights!r}: must be weights that meet rows with "
                "one scale, fp8_row or int8_row"
            )
        if self.zero_points and (self.weights is None or not FORMATS[self.weights].zeros):
            able = ", ".join(scheme for scheme, form in FORMATS.items() if form.zeros)
            raise ValueError(f"QuantConfig.zero_points=True with weights={self.weights!r}: must be one of {able}")
        if (reason := scale_dtype_mismatch(self.weights, self.scale_dtype)) is not None:
            raise ValueError(f"QuantConfig.scale_dtype={self.scale_dtype!r} with weights={self.weights!r}: {reason}")

    @property
    def scales_by_expert(self) -> bool:
        """Whether rows travel wide and are quantized by fixed scales of the experts that they meet."""
        return self.scales == "static" and self.rows is None

    @property
    def rows(self) -> str | None:
        """The scheme that rows are sent in."""
        if self.activations != AS_WEIGHTS:
            return self.activations
        return None if self.weights is None else FORMATS[self.weights].rows

    @classmethod
    def from_checkpoint(cls, settings: Mapping[str, Any], **fields: Any) -> QuantConfig:
        """The configuration that holds a released checkpoint's experts as they are, from the `quantization_config` of
        its `config.json`.

        Args:
            settings: DeepSeek's form, `quant_method="fp8"`, `weight_block_size=[128, 128]` or another `block`,
                `scale_fmt="ue8m0"` where scales are powers of two; or without a block: weights with one scale for a
                tensor or a channel (`weight_scale`), and rows likewise under `activation_scheme="static"`
                (`input_scale`). Or those of GPTQ, AWQ, AutoRound, MXFP4, compressed-tensors or ModelOpt
                (or its `hf_quant_config.json`), as `quant.stored.read_settings` reads them. Where only a cache of keys
                and values is quantized, nothing is here.
            fields: other fields of the `QuantConfig`.

        Raises:
            ValueError: another method, number format, block, kind of scales or of activations, or layers that are not
                all alike.
        """
        stored = read_settings(settings)
        if stored.method is None:
            return cls(**fields)
        if stored.method != "fp8":
            if stored.scheme is None:
                raise ValueError(
                    f"quantization_config of {stored.method} has layers of several kinds: name that of the experts, "
                    "such as QuantConfig('nvfp4')"
                )
            if stored.rows is not None:
                raise ValueError(
                    f"quantization_config.{stored.rows} in {stored.scheme!r}: leave quant out to have weights "
                    f"dequantized, or pass QuantConfig({stored.scheme!r}) to have activations in that all the same"
                )
            given: dict[str, Any] = {"scales": "static", "down_scales": "static"} if stored.static else {}
            given |= {} if stored.block is None else {"block": stored.block}
            return cls(stored.scheme, **({"zero_points": stored.zero_points} | given | fields))
        for name, right in (
            ("activation_scheme", ("dynamic", "static", None)),
            ("fmt", ("e4m3", "e4m3fn", "float8_e4m3fn", None)),
            ("scale_fmt", ("ue8m0", "float", None)),
            ("expert_dtype", ("fp8", None)),
        ):
            if settings.get(name) not in right:
                allowed = ", ".join(repr(each) for each in right if each is not None)
                unset = ", or left out" if None in right else ""
                raise ValueError(f"quantization_config.{name}={settings.get(name)!r}: must be {allowed}{unset}")
        block, static = settings.get("weight_block_size"), settings.get("activation_scheme") == "static"
        if block is None:
            fixed = {"scales": "static", "down_scales": "static"} if static else {}
            return cls("fp8_row", **(fixed | fields))
        if static:
            raise ValueError(
                "quantization_config.activation_scheme='static' with weight_block_size: must be 'dynamic', since rows "
                "have a scale per block then"
            )
        sizes = tuple(block) if isinstance(block, (list, tuple)) else (block,)
        if (reason := block_mismatch(sizes)) is not None:
            raise ValueError(f"quantization_config.weight_block_size={block!r}: {reason}")
        scheme = "fp8_block_ue8m0" if settings.get("scale_fmt") == "ue8m0" else "fp8_block"
        return cls(scheme, **({"block": tuple(block)} | fields))
