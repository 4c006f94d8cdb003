"""Clocks: medians of calls that all ranks start together, and the ceilings of the machine they run on.

A call is timed as a model meets it: the host runs ahead of the device until the call itself makes it wait, and launches
that the device has to wait for count.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from epmoe.comm import EPGroup

Call = Callable[[], object]


def median_us(
    fn: Call,
    *,
    warmup: int,
    repeat: int,
    device: torch.device,
    ep: EPGroup | None = None,
    flush_l2: bool = False,
    graph: bool = False,
) -> float:
    """`interleaved_us` of one call."""
    return interleaved_us(
        {"fn": fn}, warmup=warmup, repeat=repeat, device=device, ep=ep, flush_l2=flush_l2, graph=graph
    )["fn"]


def interleaved_us(
    calls: Mapping[str, Call],
    *,
    warmup: int,
    repeat: int,
    device: torch.device,
    ep: EPGroup | None = None,
    flush_l2: bool = False,
    graph: bool = False,
) -> dict[str, float]:
    """Microseconds of each call: the median over `repeat` rounds, and of that the maximum over the ranks of `ep`.

    Each round makes every call once, beginning with another one each time, so that a clock that sinks as the chip warms
    up favours none. Before each call the ranks meet: in the stream on CUDA, on the host on CPU. Collective over `ep`.

    Args:
        calls: the same names in the same order on every rank.
        warmup: rounds before the first one that counts; compilation happens there.
        device: CUDA times by events in the current stream, CPU by the host's clock.
        flush_l2: fill the L2 cache with what no call needs before each one, by reading: what was written there would
            have to be written back meanwhile. CUDA only; a CPU ignores it.
        graph: capture each call in a CUDA graph after the warmup and time its replay.

    Raises:
        ValueError: `graph` on CPU, or nothing to measure.
    """
    if warmup < 0 or repeat < 1 or not calls:
        raise ValueError(f"warmup={warmup}, repeat={repeat}, {len(calls)} calls: must be >= 0, >= 1 and at least one")
    cuda = device.type == "cuda"
    if graph and not cuda:
        raise ValueError(f"graph=True on {device}: only CUDA has graphs")
    for _ in range(warmup):
        for call in calls.values():
            call()
    timed = {name: _captured(call) for name, call in calls.items()} if graph else dict(calls)
    gc.collect()

    clock = _EventClock(device) if cuda else _HostClock()
    meet = _meeting(device, ep)
    flush = torch.zeros(_l2_bytes(device) // 2, dtype=torch.int32, device=device) if flush_l2 and cuda else None
    names = list(timed)
    for round_ in range(repeat):
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            if flush is not None:
                flush.amax()
            meet()
            clock.time(name, timed[name])
    samples = clock.samples()
    medians = torch.tensor([statistics.median(samples[name]) for name in names], dtype=torch.float64, device=device)
    return dict(zip(names, max_over_ranks(medians, ep).tolist(), strict=True))


def repeated(call: Call, turns: int) -> Call:
    """`turns` calls in a row: what a graph of them is captured from."""

    def several() -> None:
        for _ in range(turns):
            call()

    return several


def burst_us(
    calls: Mapping[str, Call], *, idle: float, warmup: int, repeat: int, device: torch.device
) -> dict[str, float]:
    """Microseconds of each call as a chip at rest makes it: idle seconds, then `warmup` + `repeat` calls back to back,
    of which the last `repeat` count, by their median. Each has an idle time of its own, so none finds a warmer chip.

    Raises:
        ValueError: a negative `idle` or `warmup`, or nothing to measure.
    """
    if idle < 0 or warmup < 0 or repeat < 1 or not calls:
        raise ValueError(
            f"idle={idle}, warmup={warmup}, repeat={repeat}, {len(calls)} calls: must be >= 0, >= 0, >= 1 and at least "
            "one"
        )
    clock = _EventClock(device) if device.type == "cuda" else _HostClock()
    gc.collect()
    for name, call in calls.items():
        _wait(device)
        time.sleep(idle)
        for _ in range(warmup):
            call()
        for _ in range(repeat):
            clock.time(name, call)
    return {name: statistics.median(samples) for name, samples in clock.samples().items()}


def sustained_us(
    calls: Mapping[str, Call], once_us: Mapping[str, float], *, seconds: float, device: torch.device
) -> dict[str, float]:
    """Microseconds of each call as a chip at work makes it, under its power limit: `seconds` of it back to back in four
    runs, in turn with the other calls' without a pause, after one such turn that does not count. The median run's mean.

    Args:
        once_us: about how long each call takes, as `burst_us` says.

    Raises:
        ValueError: seconds that are not above 0, or nothing to measure.
    """
    if not seconds > 0 or not calls:
        raise ValueError(f"seconds={seconds}, {len(calls)} calls: must be above 0 and at least one")
    runs = 4
    times = {name: max(1, round(seconds / runs * 1e6 / max(once_us[name], 1.0))) for name in calls}
    clock = _EventClock(device) if device.type == "cuda" else _HostClock()
    gc.collect()
    for turn in range(runs + 1):
        for name, call in calls.items():

            def run(call: Call = call, count: int = times[name]) -> None:
                for _ in range(count):
                    call()

            clock.time(name if turn else f"{name}, first", run)
    samples = clock.samples()
    return {name: statistics.median(samples[name]) / times[name] for name in calls}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def max_over_ranks(values: Tensor, ep: EPGroup | None) -> Tensor:
    """`values`, each the largest of any rank, in place; collective."""
    if ep is not None:
        dist.all_reduce(values, dist.ReduceOp.MAX, group=ep.process_group)
    return values


class _HostClock:
    def __init__(self) -> None:
        self._samples: dict[str, list[float]] = {}

    def time(self, name: str, call: Call) -> None:
        start = time.perf_counter()
        call()
        self._samples.setdefault(name, []).append((time.perf_counter() - start) * 1e6)

    def samples(self) -> dict[str, list[float]]:
        return self._samples


class _EventClock:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}

    def time(self, name: str, call: Call) -> None:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        self._events.setdefault(name, []).append((start, end))

    def samples(self) -> dict[str, list[float]]:
        torch.cuda.synchronize(self._device)
        return {
            name: [start.elapsed_time(end) * 1e3 for start, end in pairs]  # elapsed_time is in ms
            for name, pairs in self._events.items()
        }


def _meeting(device: torch.device, ep: EPGroup | None) -> Call:
    """A barrier: under CUDA one that the stream waits for and the host does not."""
    if ep is None:
        return lambda: None
    group = ep.process_group
    if device.type != "cuda":
        return lambda: dist.barrier(group)
    token = torch.zeros(1, device=device)
    return lambda: dist.all_reduce(token, group=group)


def _captured(call: Call) -> Call:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # thread_local: NCCL's watchdog may ask for its events meanwhile
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        kept = call()

    def replay() -> object:
        graph.replay()
        return kept  # the graph writes there

    return replay


def _l2_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).L2_cache_size


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What this machine gave in the run whose records stand beside it.

    Attributes:
        bf16_tflops: one large bf16 matrix product.
        hbm_gb_s: device memory, bytes read plus bytes written.
        link_gb_s: one rank to its peers, one direction of a link that carries both at once; None with one rank.
        fp8_tflops: one large fp8 matrix product with a scale per row; None where torch has none.
    """

    bf16_tflops: float
    hbm_gb_s: float
    link_gb_s: float | None
    fp8_tflops: float | None = None

    def compute_us(self, flops: float, scheme: str = "bf16") -> float:
        """Of products in `scheme`; where fp8 has no ceiling, at that of bf16."""
        eight_bit = self.fp8_tflops if scheme.startswith("fp8") else None
        return flops / (eight_bit or self.bf16_tflops) * 1e-6

    def memory_us(self, num_bytes: float) -> float:
        return num_bytes / self.hbm_gb_s * 1e-3

    def wire_us(self, num_bytes: float) -> float:
        """Of bytes per direction and rank; none take no time."""
        assert num_bytes == 0 or self.link_gb_s is not None, "one rank sends nothing"
        return num_bytes / self.link_gb_s * 1e-3 if self.link_gb_s is not None else 0.0

    def rounded(self) -> dict[str, float]:
        """As records carry it."""
        return {name: round(value, 1) for name, value in dataclasses.asdict(self).items() if value is not None}


def measure_ceilings(device: torch.device, ep: EPGroup | None) -> Ceilings:
    """Measures all of them; collective, about a second. On CPU with small operands, for form's sake.

    Matrix products: 2·n³ operations, n = 8192. Memory: a copy of 1 GiB is 2 GiB of traffic. Link: the better of NCCL's
    all-to-all (each rank sends 256 MiB to each other one) and, on one host, a plain copy between two GPUs. Each is the
    best of any rank, so that a floor made of them stays one.
    """
    cuda = device.type == "cuda"

    def clock(call: Call, together: EPGroup | None = None) -> float:
        warmup, repeat = (5, 20) if cuda else (1, 3)
        return median_us(call, warmup=warmup, repeat=repeat, device=device, ep=together)

    n = 8192 if cuda else 128
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=device) for _ in range(2))
    product = torch.empty_like(a)
    tflops = 2 * n**3 / clock(lambda: torch.mm(a, b, out=product)) * 1e-6
    fp8 = None
    if cuda and torch.cuda.get_device_capability(device) >= (8, 9):
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        one = torch.ones(n, 1, device=device)

        def scaled() -> Tensor:
            return torch._scaled_mm(a8, b8, one, one.t(), out_dtype=torch.bfloat16, use_fast_accum=True)

        fp8 = 2 * n**3 / clock(scaled) * 1e-6

    size = 1 << 30 if cuda else 1 << 20
    source = torch.zeros(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    hbm = 2 * size / clock(lambda: target.copy_(source)) * 1e-3

    if ep is None or ep.num_ranks == 1:
        return Ceilings(tflops, hbm, None, fp8)
    chunk = 256 << 20 if cuda else 1 << 16
    used = (ep.num_ranks - 1) * chunk  # rows to oneself cross no link
    send = torch.zeros(used, dtype=torch.uint8, device=device)
    receive = torch.empty_like(send)
    splits = [0 if rank == ep.rank else chunk for rank in range(ep.num_ranks)]
    group = ep.process_group
    link = used / clock(lambda: dist.all_to_all_single(receive, send, splits, splits, group=group), ep) * 1e-3
    if cuda and ep.rank == 0 and torch.cuda.device_count() > 1:  # the other ranks wait for this one below
        other = torch.device("cuda", (torch.cuda.current_device() + 1) % torch.cuda.device_count())
        there = torch.empty(chunk, dtype=torch.uint8, device=other)
        here = send[:chunk]
        link = max(link, chunk / clock(lambda: there.copy_(here)) * 1e-3)
    best = max_over_ranks(torch.tensor([tflops, hbm, link, fp8 or 0.0], dtype=torch.float64, device=device), ep)
    tflops, hbm, link, fp8 = best.tolist()
    return Ceilings(tflops, hbm, link, fp8 or None)
