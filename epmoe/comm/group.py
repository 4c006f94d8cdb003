"""`EPGroup`: the ranks that share one set of experts, and every wait on them.

Layers hold a group and share it by holding it; several groups live side by side in one process. All waits go through
here, so all of them have a deadline and an error that names rank, layer and operation.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from epmoe.checks import as_device, check_here, check_kind, check_seconds, require
from epmoe.comm.beside import Beside
from epmoe.comm.copies import Copies
from epmoe.comm.nodes import Nodes, declared_labels, find_nodes
from epmoe.comm.symmetric import Channel, unreachable
from epmoe.comm.workspace import Workspace

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13


_LIVE: weakref.WeakValueDictionary[str, EPGroup] = weakref.WeakValueDictionary()  # finds groups, owns none


class PeerError(RuntimeError):
    """A peer did not take part in an operation within the deadline, or its connection broke.

    The collective group is unusable afterwards: end the process, or rebuild the group with the ranks that are left.
    """


class EPGroup:
    """R ranks that hold the experts of one or more layers between them.

    Args:
        process_group: a `torch.distributed` group. None makes a communicator of its own over all ranks, so that expert
            traffic never queues behind DDP's or FSDP's; this is a collective call.
        device: where tensors live. None: the current CUDA device under NCCL, else CPU.
        timeout: seconds any wait may take. Under NCCL the host meets a silent peer at the count exchange of the next
            layer; a kernel that hangs in between is ended by torch's own watchdog after the same time.
        nodes: ranks per node, or each rank's node, the same on all ranks. None: EPMOE_RANKS_PER_NODE where that is set,
            else ranks of one host share a node. Say it where fast links reach further than a host, or not as far.

    Attributes:
        at_once: groups whose operations over symmetric memory may run on this device at the same time, in streams of
            their own. They leave room for each other (`ops.symmetric_configs`). It grows by itself as groups get such
            memory; a CUDA graph keeps what it was captured with, so set it before where other groups come later.

    Raises:
        ValueError: torch.distributed is not initialised, or the backend does not fit the device.

    Example::

        dist.init_process_group("nccl")
        ep = EPGroup()
        layer = MoELayer(config, ep, device="cuda", dtype=torch.bfloat16)
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str | None = None,
        timeout: float = 300.0,
        nodes: int | Sequence[object] | None = None,
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                "EPGroup needs torch.distributed: call torch.distributed.init_process_group(...) first (torchrun sets "
                "its environment), or pass ep=None to run all experts in this process"
            )
        check_seconds("timeout", timeout)
        if device is not None:
            device = as_device(device, here=False)
            require(device.type != "meta", "device", str(device), "cpu or cuda, where rows can move")
        outside: object = dist.GroupMember.NON_GROUP_MEMBER  # what new_group gives ranks that are not in it
        if process_group is not None and process_group is not outside:
            hint = "make one of some ranks by torch.distributed.new_group(ranks)"
            check_kind("process_group", process_group, dist.ProcessGroup, "a group of torch.distributed, or None", hint)
        if process_group is None:
            process_group = dist.new_group(timeout=timedelta(seconds=timeout))
        assert process_group is not None
        if dist.get_rank(process_group) < 0:
            raise ValueError(f"rank {dist.get_rank()} is not a member of the process_group it was given")
        self.process_group = process_group
        self.timeout = timeout
        self.rank = dist.get_rank(process_group)
        self.num_ranks = dist.get_world_size(process_group)
        self.name: str = process_group.group_name
        self.backend: str = str(dist.get_backend(process_group))
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in self.backend else "cpu"
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.backend == "gloo":
            raise ValueError(f"device={str(self.device)!r} with a gloo group: use backend='nccl', or device='cpu'")
        if self.device.type == "cpu" and self.backend == "nccl":
            raise ValueError("device='cpu' with an NCCL group: use backend='gloo' (or 'cpu:gloo,cuda:nccl')")
        check_here(self.device)
        if self.device.type == "cuda" and self.device.index is None:  # groups of one device have to know each other
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._all_to_all_options = dist.distributed_c10d.AllToAllOptions()
        self._all_to_all_options.asyncOp = True
        self._workspaces: dict[int, Workspace] = {}
        self.beside = Beside(self.device)
        self._copies: Copies | None = None
        self._old_copies: list[Copies] = []
        # of comm.symmetric: the buffers that peers write to, and why there can be none ("" if there can)
        self.channels: list[Channel] = []
        self.reachability: str | None = None
        # of comm.nodes: what was said about nodes, what they are, and the communicator inside this rank's
        self._node_labels = declared_labels(nodes, self.num_ranks)
        self._nodes: Nodes | None = None
        self._node_group: EPGroup | None = None
        # where numbers land on the host, and what says that they have; in use only inside `to_host`
        self._landings: dict[tuple[torch.Size, torch.dtype], tuple[Tensor, torch.cuda.Event]] = {}
        self._said: set[str] = set()
        self._meetings = 0
        self.compared_splits: set[int] = set()  # numbers of microbatches, see `overlap/splitting.py`
        self.last_launch: torch.cuda.Stream | None = None  # of an operation over symmetric memory
        self.at_once = 1
        known = _LIVE.get(self.name)
        first = known is None or known.process_group is not process_group
        _LIVE[self.name if first else f"{self.name}, {id(self)}"] = self

    @classmethod
    def from_name(cls, name: str, timeout: float) -> EPGroup:
        """The group of an existing communicator, by its `torch.distributed` name: what compiled graphs carry.

        The one that layers hold where there is one, so that eager and compiled calls share buffers.
        """
        process_group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
        known = _LIVE.get(name)
        if known is not None and known.process_group is process_group and known.timeout == timeout:
            return known
        return cls(process_group, timeout=timeout)

    def check(self) -> None:
        """Raises `PeerError` if a peer was late in an operation over symmetric memory, also one that a CUDA graph
        replayed, as far as the host knows by now; does not wait for the device. Each launch asks by itself, a replay
        can't: who captures graphs calls this before their results leave.

        It finds late peers and nothing else. Rows that found no place under `overflow="raise"` are each kernel's own:
        `MoEKernel.overflow.poll()`.
        """
        for channel in self.channels:
            channel.check()
        if self._node_group is not None:
            self._node_group.check()

    def shares_device(self) -> None:
        """Counts the groups with symmetric memory on this device, now that this one has some, for all of them."""
        sharing = [group for group in _LIVE.values() if group.channels and group.device == self.device]
        for group in sharing:
            group.at_once = max(group.at_once, len(sharing))

    def __repr__(self) -> str:
        return f"EPGroup(rank {self.rank} of {self.num_ranks}, {self.backend}, {self.device}, {self.name!r})"

    def workspace(self, lane: int = 0) -> Workspace:
        """The scratch of one lane, shared by all layers that hold this group; a microbatch has a lane of its own."""
        if lane not in self._workspaces:
            self._workspaces[lane] = Workspace(self.device, f"workspace of group {self.name!r}, lane {lane}")
        return self._workspaces[lane]

    @property
    def nodes(self) -> Nodes:
        """Which ranks share a node; the first time collective.

        Raises:
            ValueError: ranks declare different nodes.
        """
        if self._nodes is None:
            self._nodes = find_nodes(self, self._node_labels)
        return self._nodes

    def node_group(self) -> EPGroup:
        """The ranks of this rank's node, over a communicator of their own; the first time collective.

        Every rank of the group calls, those alone on their node too. Under NCCL with a `device_id` bound at
        `init_process_group`, torch splits communicators: then all ranks of the default group have to.
        """
        if len(self.nodes.ranks) == 1:
            return self
        if self._node_group is None:
            everyone = dist.get_process_group_ranks(self.process_group)
            mine = self.nodes.beside(self.rank)
            inside = dist.new_group(
                [everyone[rank] for rank in mine],
                timeout=timedelta(seconds=self.timeout),
                backend=self.backend,
                use_local_synchronization=True,
            )
            self._node_group = EPGroup(inside, device=self.device, timeout=self.timeout, nodes=len(mine))
            assert self._node_group.rank == mine.index(self.rank), "torch numbers a group's ranks in ascending order"
        return self._node_group

    def error(self, operation: str, why: str) -> PeerError:
        """The error for a wait that failed: names rank, group, operation (which names the layer) and the way out."""
        members = dist.get_process_group_ranks(self.process_group)
        first, last = members[0], members[-1]
        named = f"{first}..{last}" if members == list(range(first, last + 1)) else ", ".join(map(str, members))
        return PeerError(
            f"rank {self.rank} of {self.num_ranks} (group {self.name!r} of ranks {named}, {self.backend}): {operation}"
            f": {why}. A peer has died, runs other code, or is slower than the limit: look at the other ranks' output "
            f"first; raise EPGroup(timeout={self.timeout:g}) if they were only slow"
        )

    def wait(self, work: dist.Work, operation: str) -> None:
        """Makes the result of `work` usable: blocks the host (gloo) or the current stream (NCCL).

        Raises:
            PeerError: the deadline passed or the connection broke.
        """
        try:
            if self.backend == "nccl":
                work.wait()
            else:
                work.wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            raise self.error(operation, f"{str(error).splitlines()[0]} (limit {self.timeout:g} s)") from error

    def meet(self, operation: str, limit: float) -> None:
        """Waits until every rank has come here, at most `limit` seconds, which may be more than the deadline that the
        communicator has for its collectives.

        Raises:
            PeerError: not all came, naming those that did not.
        """
        store = dist.distributed_c10d._get_default_store()
        keys = [f"epmoe/{self.name}/{self._meetings}/{rank}" for rank in range(self.num_ranks)]
        self._meetings += 1
        store.set(keys[self.rank], "here")
        try:
            store.wait(keys, timedelta(seconds=limit))
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise self.error(operation, f"ranks {missing} have not come (limit {limit:g} s)") from error

    def to_host(self, values: Tensor, operation: str) -> Any:
        """The numbers of a small device tensor as (nested) lists, once what produces it has run: at most `timeout`
        seconds.

        Raises:
            PeerError: the values did not arrive in time.
        """
        if values.device.type == "cpu":
            return values.tolist()
        if torch.cuda.is_current_stream_capturing():
            raise ValueError(
                f"{operation}: this dispatcher reads counts on the host, so it can't be captured in a CUDA graph; "
                "capture the parts around the layer, or use a dispatcher whose capabilities say cuda_graph"
            )
        key = values.shape, values.dtype
        if key not in self._landings:
            with torch.inference_mode(False):  # it outlives the call that makes it
                landing = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
                self._landings[key] = landing, torch.cuda.Event()
        host, arrived = self._landings[key]
        host.copy_(values, non_blocking=True)
        arrived.record(torch.cuda.current_stream(values.device))
        started = time.monotonic()
        while not arrived.query():
            waited = time.monotonic() - started
            if waited > self.timeout:
                raise self.error(operation, f"no numbers from the peers after {waited:.0f} s")
            # The device idles until the host sees this, so spin, letting other threads run. Long waits are for a peer.
            time.sleep(0.0 if waited < 0.1 else 0.0002)
        return host.tolist()

    def all_to_all_async(
        self,
        buffer: Tensor,
        send_rows: list[int] | None = None,
        receive_rows: list[int] | None = None,
        *,
        out: Tensor | None = None,
        most_rows: int | None = None,
    ) -> tuple[Tensor, dist.Work]:
        """Sends `buffer[sum(send_rows), ...]`, split by rank (None for both: into equal parts); once waited for, the
        result has `sum(receive_rows)` rows.

        Args:
            most_rows: at least as many as any rank sends to any other, the same number on all ranks; allows for copy
                engines where rows move beside a computation. None: not known.
        """
        if out is None:
            rows = buffer.shape[0] if receive_rows is None else sum(receive_rows)
            out = buffer.new_empty((rows, *buffer.shape[1:]))
        if most_rows is not None and self.goes_by_copies():
            row_bytes = buffer.itemsize * buffer.shape[1:].numel()
            return out, self._copies_of(most_rows * row_bytes).all_to_all(buffer, out, send_rows, receive_rows)  # type: ignore[return-value]
        # what `dist.all_to_all_single` does after checks that cost as much host time again
        work = self.process_group.alltoall_base(
            out, buffer, receive_rows or [], send_rows or [], self._all_to_all_options
        )
        return out, work

    def goes_by_copies(self) -> bool:
        """Whether what is launched now goes by copy engines; the first time collective, where it could."""
        return self.beside.by_copies and self.has_copies()

    def has_copies(self) -> bool:
        """Whether rows beside a computation may go by copy engines; the first time collective, where they could."""
        return self.beside.copies and unreachable(self) is None

    def _copies_of(self, region_bytes: int) -> Copies:
        if self._copies is None or self._copies.region_bytes < region_bytes:
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise ValueError(
                    "symmetric memory would have to grow inside the capture of a CUDA graph: run the microbatches once "
                    "before"
                )
            if self._copies is not None:
                self._old_copies.append(self._copies)  # CUDA graphs hold addresses
            with torch.inference_mode(False):  # it outlives the call that makes it
                self._copies = Copies(self, 1 << (region_bytes - 1).bit_length())
        return self._copies

    def all_gather_async(self, buffer: Tensor) -> tuple[Tensor, dist.Work]:
        """Every rank's `buffer [n, ...]` (same shape on all), in rank order: `[R·n, ...]` once waited for."""
        out = buffer.new_empty((self.num_ranks * buffer.shape[0], *buffer.shape[1:]))
        return out, _all_gather(out, buffer, group=self.process_group, async_op=True)

    def warn_once(self, text: str) -> None:
        """Warns of what concerns all layers of the group, the first time."""
        if text not in self._said:
            self._said.add(text)
            warnings.warn(text, stacklevel=3)

    def check_same(self, subject: str, fields: Mapping[str, object]) -> None:
        """Compares `fields` over all ranks; collective. Where they agree, 32 bytes of each rank are exchanged, once.

        Raises:
            ValueError: on every rank, naming each field that differs and each rank's value.
            PeerError: a rank does not compare anything within the deadline.
        """
        if self.num_ranks == 1:
            return
        mine = {key: str(value) for key, value in fields.items()}
        operation = f"{subject}, compared over the ranks"
        digests = self._bytes_of_all(hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).digest(), operation)
        if all(other == digests[0] for other in digests):
            return
        ranks = self.gather(mine, operation)
        names = sorted(set().union(*ranks))
        differing = [
            f"{name}: " + ", ".join(f"rank {r} has {values.get(name, '(unset)')}" for r, values in enumerate(ranks))
            for name in names
            if len({values.get(name) for values in ranks}) > 1
        ]
        raise ValueError(f"{subject} differs between ranks; make it equal on all of them. " + "; ".join(differing))

    def gather(self, mine: Any, operation: str) -> list[Any]:
        """Every rank's `mine`, small and picklable, in rank order; collective, within the deadline.

        Raises:
            PeerError: a rank does not take part.
        """
        text = pickle.dumps(mine)
        told = self._bytes_of_all(len(text).to_bytes(8, "little"), operation)
        sizes = [int.from_bytes(size, "little") for size in told]
        texts = self._bytes_of_all(text.ljust(max(sizes), b"\0"), operation)
        return [pickle.loads(other[:size]) for other, size in zip(texts, sizes, strict=True)]

    def _bytes_of_all(self, mine: bytes, operation: str) -> list[bytes]:
        """Every rank's bytes, as many of each."""
        told = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self.device)
        gathered, work = self.all_gather_async(told)
        self.wait(work, operation)
        return [bytes(row) for row in self.to_host(gathered.view(self.num_ranks, len(mine)), operation)]
