"""How a batch was split, as the layers inside see it: ranks that split otherwise take one part's rows for another's.

Asked by `MoEKernel` before its first dispatch inside `run_microbatched`, where the ranks that matter are known.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from epmoe.comm import EPGroup


@dataclasses.dataclass(frozen=True)
class Splitting:
    """What a call of `run_microbatched` was told that asked nobody (`ep=None`).

    Attributes:
        parts: `num_microbatches`.
        min_tokens: the limit that counts; 0: none.
    """

    parts: int
    min_tokens: int

    def compare(self, ep: EPGroup | None) -> None:
        """Once for each number of parts and group, collective: all ranks of `ep` split into as many.

        Raises:
            ValueError: they do not; or each decides by its own tokens whether to split.
        """
        if ep is None or ep.num_ranks == 1:
            return
        if self.min_tokens:
            raise ValueError(
                f"run_microbatched(min_tokens={self.min_tokens}) around a layer on {ep.num_ranks} ranks would count "
                "this rank's tokens alone, and ranks could split differently: pass ep=, the layers' EPGroup"
            )
        if self.parts in ep.compared_splits:
            return
        if ep.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        with ep.beside.alone():  # the device may be far behind the host
            ep.check_same("run_microbatched", {"num_microbatches": self.parts})
        ep.compared_splits.add(self.parts)


_CURRENT: ContextVar[Splitting | None] = ContextVar("splitting", default=None)


def current_splitting() -> Splitting | None:
    """That of the `run_microbatched` around this call, also where it runs its batch whole; none where its ranks have
    agreed, and in a compiled graph."""
    return None if torch.compiler.is_compiling() else _CURRENT.get()


@contextlib.contextmanager
def split_like(splitting: Splitting | None) -> Iterator[None]:
    """The layers called in the body are told; None: there is nothing to compare."""
    token = _CURRENT.set(splitting)
    try:
        yield
    finally:
        _CURRENT.reset(token)
