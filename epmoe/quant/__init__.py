"""Quantization: the schemes, their data, and references that say what they mean."""

from epmoe.quant.rows import ROW_SCHEMES, QuantizedRows, dequantize_rows, quantize_rows, row_dtype, scales_per_row
from epmoe.quant.weights import (
    WEIGHT_SCHEMES,
    QuantizedWeights,
    dequantize_weights,
    quantize_weights,
    weight_scale_shape,
)

__all__ = [
    "ROW_SCHEMES",
    "WEIGHT_SCHEMES",
    "QuantizedRows",
    "QuantizedWeights",
    "dequantize_rows",
    "dequantize_weights",
    "quantize_rows",
    "quantize_weights",
    "row_dtype",
    "scales_per_row",
    "weight_scale_shape",
]
