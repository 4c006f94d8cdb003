"""Block sizes of the passes that quantize, chosen on the host from shapes alone: they decide speed and never results.

Stands beside the path of a token. Figures behind the choices: one H200, triton 3.6.
"""

from __future__ import annotations

import dataclasses
import functools

from epmoe.ops._triton import INTERPRET, next_power_of_2


@dataclasses.dataclass(frozen=True)
class QuantizeConfig:
    """A pass over rows that share out scales.

    Args:
        groups: scale blocks that a program takes where a row has several; unused where it has one.
        block: columns of a step where a row has one scale.
        num_warps: of a program.
    """

    groups: int
    block: int
    num_warps: int


@functools.lru_cache(maxsize=1024)
def quantize_config(num_rows: int, width: int, interpret: bool = INTERPRET) -> QuantizeConfig:
    """The configuration of `quantize` on `[num_rows, width]`."""
    block = max(16, min(8192, next_power_of_2(width)))
    if interpret:
        return QuantizeConfig(groups=16, block=block, num_warps=4)
    few = num_rows * width <= 1 << 19  # then programs are what is scarce
    return QuantizeConfig(8 if few else 32, block, num_warps=(2 if few else 4) if block <= 2048 else 8)
