"""What happens when an expert gets more rows than it has places: `raise`, `chunk` or `drop`, never silence.

Counts stay on the device; the host looks at a copy that follows each call, so nobody waits and graphs can be captured.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

OverflowPolicy = Literal["raise", "chunk", "drop"]


class Overflow:
    """Counts rows that found no place, for one kernel.

    Args:
        policy: `raise`: an error at the host's next contact (the next call, `poll` or `check`; the replay of a CUDA
            graph is none); `chunk`: experts run in rounds of at most `capacity` rows, so nothing can overflow; `drop`:
            rows are left out and counted in `dropped`.
        capacity: places per expert, or None for as many as there are rows.
        where: names rank and layer in the error.

    Raises:
        ValueError: an unknown policy, or one without a capacity.
    """

    def __init__(self, policy: str, capacity: int | None, where: str) -> None:
        if policy not in get_args(OverflowPolicy):
            raise ValueError(f"overflow={policy!r}: must be raise, chunk or drop")
        if capacity is not None and capacity < 1:
            raise ValueError(f"expert_capacity={capacity}: must be at least 1, or None for room for every row")
        if capacity is None and policy != "raise":
            raise ValueError(f"overflow={policy!r} without expert_capacity: nothing can overflow, set expert_capacity")
        self.policy = policy
        self.capacity = capacity
        self.where = where
        self._counts: Tensor | None = None  # [L] int64 on the device, all calls together
        self._seen: Tensor | None = None  # [L] int64 on the host, a call or so behind

    @property
    def dropped(self) -> int:
        """Rows left out so far, over all experts of this rank; waits for the device."""
        return 0 if self._counts is None else int(self._counts.sum())

    def record(self, overflow: Tensor) -> None:
        """Adds `overflow [L]`, the rows of each expert that found no place in this call; does not wait."""
        if self.capacity is None or self.policy == "chunk":
            return
        if self._counts is None:
            with torch.inference_mode(False):  # they outlive the call that makes them
                self._counts = torch.zeros(overflow.shape, dtype=torch.int64, device=overflow.device)
                self._seen = torch.zeros(overflow.shape, dtype=torch.int64, device="cpu", pin_memory=overflow.is_cuda)
        assert self._seen is not None
        self._counts += overflow
        if self.policy == "raise":
            self._seen.copy_(self._counts, non_blocking=True)
            if not overflow.is_cuda:
                self._raise_if_seen()

    def check(self) -> None:
        """Waits for the device and raises if anything overflowed under `raise`.

        Raises:
            RuntimeError: names rank, layer, capacity and each expert's excess.
        """
        if self.policy == "raise" and self._counts is not None and self._seen is not None:
            self._seen.copy_(self._counts)
            self._raise_if_seen()

    def poll(self) -> None:
        """`check` of what has reached the host by now, without waiting. A captured call counts as any other, but its
        replay does not ask: who captures graphs calls this before their results leave, once they are there.
        `EPGroup.check` is for late peers only."""
        if self.policy == "raise" and self._seen is not None:
            self._raise_if_seen()

    def _raise_if_seen(self) -> None:
        assert self._seen is not None and self._counts is not None
        excess = {expert: count for expert, count in enumerate(self._seen.tolist()) if count}
        if not excess:
            return
        self._seen.zero_()
        self._counts.zero_()
        listed = ", ".join(f"{expert}: {count}" for expert, count in excess.items())
        raise RuntimeError(
            f"{self.where}: rows found no place among expert_capacity={self.capacity} (local expert: rows over, summed "
            f"since the last check: {listed}); those outputs are wrong. Raise expert_capacity, or set overflow='chunk' "
            "(more rounds) or 'drop' (counted)"
        )
