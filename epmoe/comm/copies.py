"""All-to-all by copy engines: rows cross NVLink without taking an SM from what is computed meanwhile.

Every rank lays its rows out in memory that its peers can read, a region for each; they meet; each fetches its region
from every peer, into tensors of its own; they meet again, and the memory is free. Between the meetings, which are
launches of one small block, there are nothing but copies. It takes a few microseconds more than NCCL's kernel, which
fills 32 SMs of an H200 while it runs: for rows that move beside a computation.

On CPU the memory is shared files, for the tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from epmoe.comm.symmetric import ALIGN, _device_buffers, _host_buffers

if TYPE_CHECKING:
    from epmoe.comm.group import EPGroup


class Copied:
    """What has been launched in one stream; stands where a `torch.distributed.Work` could."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def wait(self, timeout: object = None) -> None:
        """Makes the current stream wait, where it is another one."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            if current != self._stream:
                current.wait_stream(self._stream)


class Copies:
    """Memory that a group's ranks fetch each other's rows from. Making it is collective.

    Operations on it run one after another, in one stream and in the same order on all ranks.

    Args:
        ep: the group; its ranks reach each other (`comm.symmetric.unreachable`).
        region_bytes: the most that any rank sends to another at once, the same on all ranks.
    """

    def __init__(self, ep: EPGroup, region_bytes: int) -> None:
        self.ep = ep
        self.region_bytes = -(-max(region_bytes, 1) // ALIGN) * ALIGN
        nbytes = ep.num_ranks * self.region_bytes
        self._handle: object = None
        if ep.device.type == "cuda":
            buffers, self._handle = _device_buffers(ep, nbytes)
        else:
            buffers = _host_buffers(ep, nbytes)
        own = buffers[ep.rank]
        self._ours = [self._region(own, rank) for rank in range(ep.num_ranks)]
        self._theirs = [self._region(buffer, ep.rank) for buffer in buffers]

    def _region(self, buffer: Tensor, rank: int) -> Tensor:
        return buffer.narrow(0, rank * self.region_bytes, self.region_bytes)

    def all_to_all(
        self, buffer: Tensor, out: Tensor, send_rows: list[int] | None, receive_rows: list[int] | None
    ) -> Copied:
        """Launches in the current stream what `EPGroup.all_to_all_async` does; both tensors contiguous."""
        ranks, rank = self.ep.num_ranks, self.ep.rank
        sent, received = (
            [t.shape[0] // ranks] * ranks if rows is None else rows
            for t, rows in ((buffer, send_rows), (out, receive_rows))
        )
        ours, theirs = _by_rank(buffer, sent), _by_rank(out, received)
        for peer in range(ranks):
            if peer != rank and ours[peer].numel() > 0:
                self._ours[peer][: ours[peer].numel()].copy_(ours[peer])
        self._meet(0)
        for step in range(1, ranks):
            peer = (rank + step) % ranks  # each from another one at a time
            if theirs[peer].numel() > 0:
                theirs[peer].copy_(self._theirs[peer][: theirs[peer].numel()])
        if ours[rank].numel() > 0:
            theirs[rank].copy_(ours[rank])
        self._meet(1)
        return Copied(self.ep.device)

    def _meet(self, channel: int) -> None:
        if self._handle is None:
            dist.barrier(group=self.ep.process_group)
        else:
            limit = min(int(self.ep.timeout * 1000), 2**31 - 1)
            self._handle.barrier(channel=channel, timeout_ms=limit)  # type: ignore[attr-defined]


def _by_rank(t: Tensor, rows: list[int]) -> list[Tensor]:
    """The bytes of each rank's rows, as they lie."""
    assert t.is_contiguous() and sum(rows) == t.shape[0]
    row_bytes = t.itemsize * t.shape[1:].numel()
    flat = t.view(-1).view(torch.uint8) if t.numel() > 0 else t.new_empty(0, dtype=torch.uint8)
    return list(flat.split([count * row_bytes for count in rows]))
