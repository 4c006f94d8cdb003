"""SMs that kernels leave free for rows on their way. Stands beside the path of a token, where launches are sized.

A kernel that is launched while the chip is full of programs that loop over tiles finds no place until they end. So
whoever moves rows beside a computation takes out a `Lease`, and kernels of that kind start fewer programs as long as
one is out. What waits for a peer never needs more than it has leased, and what computes never waits: whatever the order
in which they start, all of them end.
"""

from __future__ import annotations

import functools
import threading

import torch


class _Leases:
    """Of one device. The chip is one, whatever groups share it, so this is the one thing that no group owns."""

    def __init__(self) -> None:
        self.sms: list[int] = []
        self.lock = threading.RLock()  # a collection inside may end a lease


@functools.cache
def _leases(device: torch.device) -> _Leases:
    return _Leases()


class Lease:
    """SMs kept free on `device` until `end` is called, or nobody holds the lease any more."""

    def __init__(self, device: torch.device, sms: int) -> None:
        self._device, self._sms = device, sms
        leases = _leases(device)
        with leases.lock:
            leases.sms.append(sms)
        self._open = True

    def end(self) -> None:
        """What is launched from here on may have them. Once or often."""
        if self._open:
            self._open = False
            leases = _leases(self._device)
            with leases.lock:
                leases.sms.remove(self._sms)

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self.end()


def leased_sms(device: torch.device) -> int:
    """SMs that kernels launched on `device` now should leave free: the largest lease, since rows move one after
    another."""
    return max(_leases(device).sms, default=0)
