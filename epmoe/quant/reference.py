"""What the schemes mean, in float64 and slowly: numbers rounded to those that eight bits hold by looking them up, and
products of what was rounded. Tests hold kernels against this, and it shares no arithmetic with them.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from epmoe.ops.quantize import row_format


@functools.cache
def e4m3_numbers() -> Tensor:
    """The finite numbers of float8_e4m3fn that are not negative, ascending: 0, 7 subnormals from 2**-9 on, then 8 to
    each power of two, the last one 448."""
    steps = [m * 2.0**-9 for m in range(8)]
    steps += [(8 + m) * 2.0 ** (e - 3) for e in range(-6, 9) for m in range(8)]
    return torch.tensor(steps[:-1], dtype=torch.float64, device="cpu")  # what would be 480 is NaN


def round_to_e4m3(x: Tensor) -> Tensor:
    """Each number of finite `x` as the nearest that float8_e4m3fn holds, in float64; ties to the even mantissa, past
    448 to 448."""
    numbers = e4m3_numbers()
    size = x.double().abs().clamp_max(448.0)
    above = torch.searchsorted(numbers, size.contiguous()).clamp_max(len(numbers) - 1)
    below = (above - 1).clamp_min(0)
    up, down = numbers[above] - size, size - numbers[below]
    take_above = (up < down) | ((up == down) & (above % 2 == 0))  # codes ascend, so an even one has an even mantissa
    return torch.where(take_above, numbers[above], numbers[below]).copysign(x.double())


def round_to_int8(x: Tensor) -> Tensor:
    """Each number of finite `x` as the nearest integer within ±127, ties to even, in float64."""
    return x.double().clamp(-127, 127).round()


def quantize_group(x: Tensor, scheme: str) -> tuple[Tensor, float]:
    """(values, scale) in float64 of numbers `x` that share a scale, as `quantize_rows` promises them up to the rounding
    of the scale itself."""
    form = row_format(scheme)
    amax = x.double().abs().max().item() if x.isfinite().all() else float("nan")
    if amax != amax:
        return torch.zeros_like(x, dtype=torch.float64), amax
    scale = max(amax / form.largest, 2.0**-126) if amax > 0 else 1.0
    if form.power_of_two and amax > 0:
        scale = 2.0 ** math.ceil(math.log2(torch.tensor(scale, dtype=torch.float32, device="cpu").item()))
    scaled = x.double() / scale
    return (round_to_int8 if form.dtype == torch.int8 else round_to_e4m3)(scaled), scale
