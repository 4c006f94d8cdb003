"""Quantized rows: what dispatch sends and experts multiply, eight-bit values beside their scales.

    scheme      values           scales
    fp8_block   float8_e4m3fn    [..., ceil(H / 128)], one per 128 columns, the last block partial
    fp8_block_ue8m0              the same, scales rounded up to powers of two
    fp8_row     float8_e4m3fn    [..., 1]
    int8_row    int8             [..., 1]

H row width, S scales per row.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from epmoe.ops.dequantize import dequantize_sum
from epmoe.ops.quantize import ROW_FORMATS, quantize, row_format

ROW_SCHEMES = ("fp8_block", "fp8_block_ue8m0", "fp8_row", "int8_row")
assert tuple(ROW_FORMATS) == ROW_SCHEMES


def scales_per_row(width: int, scheme: str) -> int:
    """S of rows of `width`: 1, or ceil(width / 128) for blocks.

    Raises:
        ValueError: an unknown scheme, or a width below 1.
    """
    form = row_format(scheme)
    if width < 1:
        raise ValueError(f"width={width}: must be at least 1")
    return form.scales(width)


def row_dtype(scheme: str) -> torch.dtype:
    """The dtype of the values."""
    return row_format(scheme).dtype


@dataclasses.dataclass(frozen=True)
class QuantizedRows:
    """Rows whose numbers are values · scale.

    Attributes:
        values: `[..., H]` float8_e4m3fn or int8, as `scheme` says.
        scales: `[..., S]` float32 on the same device, S = `scales_per_row(H, scheme)`.
        scheme: one of `ROW_SCHEMES`.

    Raises:
        ValueError: these do not fit each other, naming the one that does not.
    """

    values: Tensor
    scales: Tensor
    scheme: str

    def __post_init__(self) -> None:
        if self.scheme not in ROW_SCHEMES:
            raise ValueError(f"QuantizedRows.scheme={self.scheme!r}: must be one of {', '.join(ROW_SCHEMES)}")
        form, values, scales = row_format(self.scheme), self.values, self.scales
        if values.dim() < 1 or values.shape[-1] < 1 or values.dtype != form.dtype:
            raise ValueError(
                f"QuantizedRows.values is {values.dtype} {tuple(values.shape)}: must be {form.dtype} [..., H] for "
                f"scheme={self.scheme!r}"
            )
        right = (*values.shape[:-1], form.scales(values.shape[-1]))
        if tuple(scales.shape) != right or scales.dtype != torch.float32:
            raise ValueError(
                f"QuantizedRows.scales is {scales.dtype} {tuple(scales.shape)}: must be torch.float32 {right} for "
                f"scheme={self.scheme!r}"
            )
        if scales.device != values.device:
            raise ValueError(f"QuantizedRows.scales is on {scales.device}: must be on {values.device}, as the values")

    @property
    def shape(self) -> torch.Size:
        """That of the rows, `[..., H]`."""
        return self.values.shape


def quantize_rows(x: Tensor, scheme: str) -> QuantizedRows:
    """`x [..., H]` (floating, dense along H) as eight-bit values and scales; not differentiable.

    A row's result depends on no other row. Zeros have scale 1; an inf or NaN makes its group NaN and nothing else.

    Raises:
        ValueError: an unknown scheme, or an x that is not that.
    """
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"x has shape {tuple(x.shape)}: must be [..., H], H at least 1")
    values, scales = quantize(x.detach().reshape(-1, x.shape[-1]), scheme)
    lead = x.shape[:-1]
    return QuantizedRows(values.view(x.shape), scales.view(*lead, scales.shape[-1]), scheme)


def quantize_rows_by(x: Tensor, scale: Tensor, scheme: str) -> QuantizedRows:
    """`x [..., H]` by one `scale` (float32, one number) that was fixed before: what is past the largest value
    saturates. Scales are per row all the same: a row with an inf or NaN has NaN for one. Not differentiable.

    Raises:
        ValueError: a scheme with scales per block, or a scale that is not that.
    """
    form = row_format(scheme)
    if form.group:
        able = ", ".join(name for name, other in ROW_FORMATS.items() if not other.group)
        raise ValueError(f"scheme={scheme!r}: a fixed scale is one for the row, must be {able}")
    if scale.numel() != 1 or scale.dtype != torch.float32:
        raise ValueError(f"scale is {scale.dtype} {tuple(scale.shape)}: must be one float32")
    wide = x.detach().float()
    finite = wide.isfinite().all(-1, keepdim=True)
    scaled = torch.where(finite, wide / scale, 0).clamp(-form.largest, form.largest)
    values = (scaled.round() if form.dtype == torch.int8 else scaled).nan_to_num(0).to(form.dtype)
    return QuantizedRows(values, torch.where(finite, scale, torch.nan), scheme)


def quantized(x: Tensor | QuantizedRows, scheme: str | None) -> Tensor | QuantizedRows:
    """x as `scheme` wants it, without a gradient; as it is without one, or where it has been quantized already."""
    return x if scheme is None or isinstance(x, QuantizedRows) else quantize_rows(x, scheme)


def dequantize_rows(q: QuantizedRows, dtype: torch.dtype) -> Tensor:
    """values · scale as `[..., H]` of `dtype`, multiplied in float32 (float64 for float64); not differentiable."""
    values, scales = (t.reshape(-1, t.shape[-1]) for t in (q.values, q.scales))
    values, scales = (t if t.stride(-1) == 1 else t.contiguous() for t in (values, scales))
    return dequantize_sum(values, scales, None, q.scheme, dtype).view(q.values.shape)
