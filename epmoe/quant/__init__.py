"""Quantization: the schemes, their data, and references that say what they mean."""

from epmoe.quant.narrow import NARROW_SCHEMES, NarrowWeights, dequantize_narrow, narrow_bytes, quantize_narrow
from epmoe.quant.rows import (
    ROW_SCHEMES,
    QuantizedRows,
    dequantize_rows,
    quantize_rows,
    quantize_rows_by,
    row_dtype,
    scales_per_row,
)
from epmoe.quant.weights import (
    FP8_SCHEMES,
    WEIGHT_SCHEMES,
    QuantizedWeights,
    dequantize_weights,
    quantize_weights,
    weight_scale_shape,
)

__all__ = [
    "FP8_SCHEMES",
    "NARROW_SCHEMES",
    "ROW_SCHEMES",
    "WEIGHT_SCHEMES",
    "NarrowWeights",
    "QuantizedRows",
    "QuantizedWeights",
    "dequantize_narrow",
    "dequantize_rows",
    "dequantize_weights",
    "narrow_bytes",
    "quantize_narrow",
    "quantize_rows",
    "quantize_rows_by",
    "quantize_weights",
    "row_dtype",
    "scales_per_row",
    "weight_scale_shape",
]
