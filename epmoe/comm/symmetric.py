"""Memory that every rank of a group can write to, and the channels that one-sided operations run on.

On CUDA it is `torch.distributed._symmetric_memory` (peers' buffers over NVLink), on CPU shared files mapped by every
process, so the same kernels exchange rows between real processes without a GPU.

A channel is a buffer on every rank, in two halves that operations use in turn. Those of a group run one after another,
in the same order on all ranks; other groups' run when they like:

    | control words [2, R] | half 0: slots | half 1: slots |

The *stamp* of operation n is n mod 8, and which operation it is (a layer's dispatch, a layer's combine). Rank s
announces operation n to rank d by writing `stamp << 21 | count` to d's control word [n % 2, s]. An operation ends only
after every peer has announced it. That a peer has announced n says that all it did in n - 1 is done, so a rank that has
ended n may write into the half that n - 1 used: two halves are enough, whatever the operations are and however ranks
drift apart. While n is awaited its control word holds n - 2's stamp or n's, so 8 are enough. A peer whose n is another
operation, since it splits its batch otherwise or calls its layers in another order, has not announced this rank's: that
ends at the deadline with an error, and not with its rows.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from epmoe.comm.group import EPGroup

ALIGN = 512  # bytes; where halves begin
CLOCKS = 2048  # copies of the epoch, and so the most programs of a launch
COUNT_BITS = 21
OPERATION_BITS = 7  # of a stamp; a channel's further operations share the numbers of its first
TURNS = 8
COMPILING = 300.0  # seconds that a peer may be later than others at the first operation of a kind
HALF_BYTES = 4 * 2**31 - ALIGN  # the largest half: words of it are counted in 31 bits
EMPTY = -1  # what a word of a slot holds until one arrives


def stamp_of(turn: int, code: int) -> int:
    """What says that a peer is at this turn, and at the operation of this number (`Channel.begin`)."""
    return turn % TURNS << OPERATION_BITS | code % (1 << OPERATION_BITS)


def host_identity() -> str:
    """What ranks of one operating system have in common, containers included."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


def unreachable(ep: EPGroup) -> str | None:
    """Why the group's ranks can't write to each other's memory, or None if they can; collective, asked once.

    All ranks get the same answer.
    """
    if ep.reachability is None:
        mine = (host_identity(), *_device(ep.device))
        gathered: list[tuple[str, str, str]] = ep.gather(mine, "whether ranks reach each other's memory")
        hosts, devices = {host for host, _, _ in gathered}, [device for _, device, _ in gathered]
        if len(hosts) > 1:
            trouble = f"its {ep.num_ranks} ranks are on {len(hosts)} hosts"
        elif ep.device.type != "cuda":
            trouble = ""
        else:
            trouble = next((why for *_, why in gathered if why), "") or agreed(ep, _blind(ep.device, devices))
            trouble = trouble or _trial(ep)
        ep.reachability = trouble
    return ep.reachability or None


def _device(device: torch.device) -> tuple[str, str]:
    """What identifies a device on its host, and why it can't be written to by others."""
    if device.type != "cuda":
        return "", ""
    if torch.version.hip is not None:
        return "", "symmetric memory is used on NVIDIA GPUs only"
    return str(torch.cuda.get_device_properties(device).uuid), ""


def _blind(device: torch.device, devices: list[str]) -> str:
    """Why `device` can't write to one of `devices`, of those this process sees; "" if it can."""
    for other in range(torch.cuda.device_count()):
        known = str(torch.cuda.get_device_properties(other).uuid) in devices
        if known and other != device.index and not torch.cuda.can_device_access_peer(device.index or 0, other):
            return f"GPU {device.index} has no peer access to GPU {other}"
    return ""


def agreed(ep: EPGroup, failed: str) -> str:
    """The first rank's failure, on all ranks; collective."""
    gathered = ep.gather(failed, "whether every rank reaches its peers' memory")
    return next((why for why in gathered if why), "")


def _trial(ep: EPGroup) -> str:
    """Tries for real, with a few bytes: drivers and containers forbid what the devices could do."""
    try:
        _device_buffers(ep, ALIGN)
        failed = ""
    except RuntimeError as error:
        failed = f"rank {ep.rank}: {str(error).splitlines()[0]}"
    return agreed(ep, failed)


def _device_buffers(ep: EPGroup, nbytes: int) -> tuple[list[Tensor], object]:
    import torch.distributed._symmetric_memory as symmetric_memory

    own = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=ep.device)
    handle = symmetric_memory.rendezvous(own, ep.name)  # type: ignore[arg-type]
    assert handle is not None
    return [
        own if rank == ep.rank else handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(ep.num_ranks)
    ], handle


def _host_buffers(ep: EPGroup, nbytes: int) -> list[Tensor]:
    """One file per rank, mapped by all and then without a name: nothing is left when the processes end, however."""
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    descriptor, path = tempfile.mkstemp(prefix="epmoe-symmetric-", dir=folder)
    try:
        failed = ""
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, nbytes)  # a full /dev/shm is an error here, a dead process later
            else:
                os.truncate(descriptor, nbytes)
        except OSError as error:
            failed = str(error)
        offers: list[tuple[str, str]] = ep.gather((path, failed), f"{nbytes} bytes of shared memory of each rank")
        for rank, (_, why) in enumerate(offers):
            if why:
                raise RuntimeError(
                    f"rank {rank}: {folder} has no room for {nbytes} bytes of shared memory ({why}): enlarge it, or "
                    "lower max_tokens_per_rank"
                )
        buffers = [torch.from_file(name, shared=True, size=nbytes, dtype=torch.uint8) for name, _ in offers]
        dist.barrier(group=ep.process_group)
        return buffers
    finally:
        os.close(descriptor)
        os.unlink(path)


class Channel:
    """A symmetric buffer, and all that one-sided operations on it share. Making one is collective.

    Args:
        ep: the group.
        half_bytes: of one half.
        words: kernels use it (a word that is not `EMPTY` has arrived); else the torch twins (what a control word
            announces has arrived).

    Attributes:
        peers: every rank's buffer as int32 words, this rank's included; `peers16`: the same as int16.
        clock: `[CLOCKS]` int32, one copy of the epoch per program, so that no program waits for another to have read
            it. Program p of N keeps p, p + N, p + 2·N, ...: any grid finds its copies up to date.
        fault: `[1]` int32 the host can read at any time, `operation << 8 | peer + 1` once a wait has failed; `dead [1]`
            on the device: later waits give up at once.
    """

    def __init__(self, ep: EPGroup, half_bytes: int, words: bool) -> None:
        self.ep = ep
        self.words = words
        self.half_bytes = -(-half_bytes // ALIGN) * ALIGN
        self.control_bytes = -(-8 * ep.num_ranks // ALIGN) * ALIGN
        nbytes = self.nbytes(ep, half_bytes)
        if half_bytes > HALF_BYTES:
            raise ValueError(f"a channel with halves of {half_bytes} bytes: must be at most {HALF_BYTES}")
        self._handle: object = None
        if ep.device.type == "cuda":
            buffers, self._handle = _device_buffers(ep, nbytes)
        else:
            buffers = _host_buffers(ep, nbytes)
        self.buffers = buffers
        self.peers = tuple(buffer.view(torch.int32) for buffer in buffers)
        self.peers16 = tuple(buffer.view(torch.int16) for buffer in buffers)
        self.clock = torch.ones(CLOCKS, dtype=torch.int32, device=ep.device)
        self.fault = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=ep.device.type == "cuda")
        self._fault_seen = self.fault.numpy()
        self.dead = torch.zeros(1, dtype=torch.int32, device=ep.device)
        self.turn = 1  # the epoch of the torch twins
        self._fence = threading.Lock()
        self._operations: dict[str, int] = {}
        self._met: set[tuple[tuple[str, object], ...]] = set()
        self._compiled: set[tuple[object, ...]] = set()
        self._aside: torch.cuda.Stream | None = None
        self.peers[ep.rank].fill_(EMPTY)
        if ep.device.type == "cuda":
            torch.cuda.synchronize(ep.device)
        dist.barrier(group=ep.process_group)

    @staticmethod
    def nbytes(ep: EPGroup, half_bytes: int) -> int:
        """Bytes of a buffer with halves of `half_bytes`, on each rank."""
        return -(-8 * ep.num_ranks // ALIGN) * ALIGN + 2 * (-(-half_bytes // ALIGN) * ALIGN)

    @property
    def limit_us(self) -> int:
        """What a wait may take."""
        return min(int(self.ep.timeout * 1e6), 2**31 - 1)

    def begin(self, operation: str) -> int:
        """Called before each launch; gives the number that errors name it by.

        Raises:
            PeerError: an earlier operation on this channel failed.
        """
        self.check()
        return self._operations.setdefault(operation, len(self._operations))

    @contextlib.contextmanager
    def launching(self, aside: bool, arguments: Sequence[object] = ()) -> Iterator[None]:
        """The body launches an operation: in the current stream, or `aside` in one of the channel's own that first
        waits for it; behind the group's last operation either way, also where that was on another channel.

        Inside the capture of a CUDA graph only the operations of that capture are in order, whatever their streams: put
        the graph's replays where its operations belong.
        """
        if self.ep.device.type != "cuda":
            yield
            return
        stream = current = torch.cuda.current_stream(self.ep.device)
        if aside:
            if self._aside is None:
                self._aside = self.ep.beside.stream
            stream = self._aside
            stream.wait_stream(current)
        last = self.ep.last_launch
        if last is not None and last != stream and _takes_part(last):
            stream.wait_stream(last)
        self.ep.last_launch = stream
        with torch.cuda.stream(stream):
            yield
        if aside:
            for argument in arguments:  # what the caller drops before it waits must not be reused
                if isinstance(argument, Tensor) and argument.is_cuda:
                    argument.record_stream(stream)

    def arrival(self, aside: bool) -> Callable[[], None]:
        """What makes the current stream wait for the operation launched last, if it went aside."""
        if not aside or self._aside is None:
            return _nothing
        event = self._aside.record_event()
        return lambda: torch.cuda.current_stream(self.ep.device).wait_event(event)

    def check(self) -> None:
        """Raises `PeerError` if an operation has failed by now; does not wait for the device."""
        code = int(self._fault_seen[0])
        if code:
            operation = next((name for name, n in self._operations.items() if n == code >> 8), "an operation")
            raise self.ep.error(
                operation,
                f"rank {(code & 255) - 1} has not delivered (limit {self.ep.timeout:g} s), or is at another operation; "
                "results are wrong",
            )

    def meet(
        self, kind: str, fields: Mapping[str, object], compile_kernel: Callable[[], object], variant: object = None
    ) -> None:
        """Before the first operation of its kind: compiles, compares its shape over the ranks, and waits for them.

        Ranks compile at different speeds: here they wait `COMPILING` seconds where the deadline is shorter.

        Args:
            variant: what else the kernel depends on, each rank for itself.

        Raises:
            ValueError: ranks disagree, or a CUDA graph is being captured.
            PeerError: a rank did not come.
        """
        key = (("", kind), *fields.items())
        if (key, variant) in self._compiled:
            return
        if self.ep.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                f"{kind} {dict(fields)} for the first time inside the capture of a CUDA graph: run it once before "
                "capturing, the ranks have to meet"
            )
        compile_kernel()
        if key not in self._met:
            self.ep.meet(f"{kind} over symmetric memory, its kernel compiled", max(self.ep.timeout, COMPILING))
            self.ep.check_same(f"group {self.ep.name!r}: {kind} over symmetric memory", fields)
            self._met.add(key)
        self._compiled.add((key, variant))

    # ---- the torch twins' side

    def half(self, rank: int, turn: int) -> Tensor:
        """The bytes of the half of `rank`'s buffer that operation `turn` uses."""
        return self.buffers[rank].narrow(0, self.control_bytes + turn % 2 * self.half_bytes, self.half_bytes)

    def announce(self, count: int, code: int) -> None:
        """Tells every peer that all written to it in this turn, operation `code`, is there: `count` tokens."""
        with self._fence:  # a full barrier on every processor: what was written before is seen before
            pass
        word = stamp_of(self.turn, code) << COUNT_BITS | count
        for rank, peer in enumerate(self.peers):
            if rank != self.ep.rank:
                peer[self.turn % 2 * self.ep.num_ranks + self.ep.rank] = word

    def announced(self, rank: int, code: int) -> int:
        """Waits until `rank` has announced this turn's operation `code`, and gives its count.

        Raises:
            PeerError: it did not within the deadline.
        """
        control = self.peers[self.ep.rank][self.turn % 2 * self.ep.num_ranks + rank : :][:1].numpy()
        deadline = time.monotonic() + self.ep.timeout
        stamp = stamp_of(self.turn, code)
        while int(control[0]) >> COUNT_BITS != stamp:
            if time.monotonic() > deadline:
                self.fault[0] = code << 8 | rank + 1
                self.check()
            time.sleep(0.0001)
        with self._fence:
            pass
        return int(control[0]) & ((1 << COUNT_BITS) - 1)

    @contextlib.contextmanager
    def one_turn(self) -> Iterator[int]:
        """The body is one operation of a torch twin."""
        yield self.turn
        self.turn += 1


def _takes_part(stream: torch.cuda.Stream) -> bool:
    """Whether the current stream may wait for this one: inside a capture only where the capture has reached it, and
    what was launched there before is no part of the graph."""
    if not torch.cuda.is_current_stream_capturing():
        return True
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def _nothing() -> None:
    return None


def channel_for(ep: EPGroup, half_bytes: int, words: bool) -> Channel:
    """A channel of the group with room for `half_bytes` in a half: an earlier one, or a new one, which is collective.

    Earlier ones stay: CUDA graphs hold their addresses.

    Raises:
        ValueError: the ranks can't reach each other, or a CUDA graph is being captured.
    """
    for channel in ep.channels:
        if channel.words == words and channel.half_bytes >= half_bytes:
            return channel
    if ep.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "symmetric memory would have to grow inside the capture of a CUDA graph: run the layer once before"
        )
    why = unreachable(ep)
    if why is not None:
        raise ValueError(f"group {ep.name!r} can't use symmetric memory: {why}; use dispatcher='all_to_all'")
    with torch.inference_mode(False):  # it outlives the call that makes it
        made = Channel(ep, half_bytes, words)
    ep.channels.append(made)
    ep.shares_device()  # what was launched before, by other groups too, is done: making a channel waits for the device
    return made
