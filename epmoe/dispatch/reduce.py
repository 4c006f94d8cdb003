"""What experts hand to combine, and how it becomes one row per row received: router weight and sum, in fp32, in the
order of K.

The experts declare the strategy, combine applies it. The router weight is applied once: by whoever holds it, here where
`topk_weights` are given, before where they are not.

T rows received, K experts per token, N (row, expert) pairs in expert order, L local experts, C places per expert.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from torch import Tensor

from epmoe.ops.gather_sum import gather_sum

WeightAndReduce = Literal["no_op", "contiguous", "batched", "delegate"]
"""How combine makes one row per row received of what the experts give.

| strategy | rows | who weights and sums |
|---|---|---|
| `no_op` | `[T, H]` | the experts have |
| `contiguous` | `[N, H]`, pairs in expert order | combine, by `slot`, before rows travel back |
| `batched` | `[L, C, H]` | combine, by `slot` into the L·C places, before rows travel back |
| `delegate` | `[N, H]` or `[L, C, H]` | the dispatcher, in the kernel that sends if it has one, else as the two above |
"""


@dataclasses.dataclass(frozen=True)
class ExpertOutput:
    """Attributes:
    rows: as the strategy says; rows that no slot names may hold anything.
    strategy: see `WeightAndReduce`.
    slot: `[T, K]` int32, the row of each (row, k) pair, -1 for none; None with `no_op`.
    topk_weights: `[T, K]` float32, or None where the weight is in the rows already.

    Raises:
        ValueError: an unknown strategy, or rows, slot and weights that do not belong to it.
    """

    rows: Tensor
    strategy: WeightAndReduce = "no_op"
    slot: Tensor | None = None
    topk_weights: Tensor | None = None

    def __post_init__(self) -> None:
        if self.strategy not in get_args(WeightAndReduce):
            raise ValueError(f"strategy={self.strategy!r}: must be {', '.join(get_args(WeightAndReduce))}")
        if (self.slot is None) != (self.strategy == "no_op"):
            raise ValueError(
                f"strategy={self.strategy!r} {'with' if self.slot is not None else 'without'} slot: every strategy but "
                "'no_op' needs it, and 'no_op' has nothing left to place"
            )
        if self.strategy == "no_op" and self.topk_weights is not None:
            raise ValueError("strategy='no_op' with topk_weights: those rows are weighted already; give None")
        dims = {"no_op": (2,), "contiguous": (2,), "batched": (3,), "delegate": (2, 3)}[self.strategy]
        if self.rows.dim() not in dims:
            raise ValueError(f"strategy={self.strategy!r}: rows have shape {tuple(self.rows.shape)}, must be {dims}-D")


def weight_and_reduce(output: ExpertOutput, *, out: Tensor | None = None) -> Tensor:
    """out[t] = Σ_k topk_weights[t, k] · rows[slot[t, k]], skipping slots of -1; `no_op` rows as they are.

    Args:
        out: `[T, H]` to write into, where no gradient is asked for.

    Returns:
        `[T, H]` in the rows' dtype.
    """
    if output.slot is None:
        return output.rows if out is None else out.copy_(output.rows)
    rows = output.rows if output.rows.dim() == 2 else output.rows.flatten(0, 1)
    return gather_sum(rows, output.slot, output.topk_weights, rows.dtype, out=out)
