"""Quantization: the schemes, their data, and references that say what they mean."""

from epmoe.quant.rows import ROW_SCHEMES, QuantizedRows, dequantize_rows, quantize_rows, scales_per_row

__all__ = [
    "ROW_SCHEMES",
    "QuantizedRows",
    "dequantize_rows",
    "quantize_rows",
    "scales_per_row",
]
