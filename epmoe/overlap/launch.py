"""Launch and wait, as `MoEKernel` does both around what it computes.

    launch dispatch ─ (others run) ─ wait ─ experts ─ launch combine ─ shared experts ─ (others run) ─ wait

Rows under which something will be computed are launched beside it and hold a lease on SMs; others have the chip.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from epmoe.comm import EPGroup
from epmoe.comm.beside import Manner
from epmoe.comm.recording import recording
from epmoe.dispatch.inputs import Pending
from epmoe.ops._leases import Lease
from epmoe.overlap.microbatch import current_microbatch

Value = TypeVar("Value")


class OnItsWay(Generic[Value]):
    """What has been launched.

    Args:
        launch: launches it.
        name: in traces.
        ep: the group whose communication stream it may use; None: nothing moves.
        sms: that it may take while something is computed beside it; 0: it has the chip, and nothing is.
        late, copies: it may begin as late as it is waited for, and go by copy engines; see `comm.beside`.
        device: of the rows.
    """

    def __init__(
        self,
        launch: Callable[[], Pending[Value]],
        name: str,
        *,
        ep: EPGroup | None,
        sms: int,
        late: bool,
        copies: bool,
        device: torch.device,
    ) -> None:
        moves_beside = ep is not None and sms > 0
        manner = (
            ep.beside.launching(Manner(sms, late, copies)) if ep is not None and sms > 0 else contextlib.nullcontext()
        )
        self._recorder = None if torch.compiler.is_compiling() else recording()
        with self._heard("launching", name) as self._flight, manner:
            self._pending: Pending[Value] = launch()
        self._lease = Lease(device, sms) if moves_beside else None

    def _heard(self, what: str, argument: Any) -> contextlib.AbstractContextManager[Any]:
        recorder = self._recorder
        return contextlib.nullcontext() if recorder is None else getattr(recorder, what)(argument)

    def arrived(self) -> Value:
        """It, once it is here: other microbatches run first, or else the hook. Once."""
        microbatch = current_microbatch()
        if microbatch is not None:
            microbatch.let_others_run()
        with self._heard("waiting", self._flight):
            if microbatch is None and self._pending.hook is not None:
                self._pending.hook()
            value = self._pending.wait()
        del self._pending
        if self._lease is not None:
            self._lease.end()
        return value
