"""Launches of the kernels over symmetric memory, chosen on the host from shapes alone: they decide speed, not results.

Programs are of two kinds. *Senders* never wait; *takers* wait for what peers send. Takers are so few that senders, and
kernels of other streams, always find room beside them: whatever the order in which programs start and however many are
resident, all senders of all ranks get done, and then so do the takers. No set of waits is a circle.

Two profiles. *latency*: as many programs as there are pieces of work, small pieces. *throughput*: resident programs
that walk through whole rows, senders and takers side by side, so that the link is busy in both directions from start to
end and what has come is still in L2 when it is taken up. They differ in nothing that peers could notice.

The sizes were measured on two H200 at rows of 7168 numbers; other widths and numbers of ranks take them over.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from epmoe.comm.symmetric import CLOCKS
from epmoe.ops._configs import _num_sms
from epmoe.ops._dependent_launch import dependent_launch
from epmoe.ops._triton import INTERPRET, cdiv, next_power_of_2

LATENCY_TOKENS = 1024  # capacities up to this one get the latency profile
REGISTERS = 65536  # of an SM
THREADS = 2048  # of an SM


@dataclasses.dataclass(frozen=True)
class SymmetricConfig:
    """One launch.

    Args:
        senders, takers: programs of each kind.
        block: words that a sender sends at once; a power of two.
        take: words that a taker takes up at once; a power of two.
        run, taken_run: parts of a row, of `block` and of `take` words, that a sender and a taker go through in turn.
        num_warps: of a program.
        max_registers: of a thread.
        eager: takers look at a row before they know whether it comes.
    """

    senders: int
    takers: int
    block: int
    take: int
    run: int
    taken_run: int
    num_warps: int
    max_registers: int
    eager: bool = False

    @property
    def programs(self) -> int:
        """Of both kinds, and the herald, which sends and takes nothing but announcements."""
        return 1 + self.senders + self.takers


def profile_of(capacity: int) -> str:
    """`latency` or `throughput`, from max_tokens_per_rank: the same on all ranks."""
    return "latency" if capacity <= LATENCY_TOKENS else "throughput"


def _shares(
    device: torch.device, to_send: int, to_take: int, num_warps: int, max_registers: int, sms: int | None, dear: float,
    most_per_sm: int = 64,
) -> tuple[int, int]:  # fmt: skip
    """(senders, takers): at least one of each, takers on at most two thirds of the places.

    What is sent last and what is taken last should be so at the same time, where taking a piece up is `dear` times as
    long as sending one. Every program of a kind gets the same number of pieces, or one less.
    """
    if device.type != "cuda":
        return max(1, min(to_send, 5)), max(1, min(to_take, 3))
    available = _num_sms(device)
    per_sm = min(REGISTERS // (32 * num_warps * max_registers), THREADS // (32 * num_warps), most_per_sm)
    places = min(per_sm * min(available, sms or available), CLOCKS) - 1  # one is the herald's
    best: tuple[float, int, int] | None = None
    for rounds in range(1, max(1, to_send) + 1):
        senders = max(1, cdiv(to_send, rounds))
        room = min(places - senders, 2 * places // 3)
        if room < 1:
            continue
        taken_rounds = max(1, cdiv(to_take, room))
        time = max(rounds, dear * taken_rounds)
        if best is None or time < best[0]:
            best = time, senders, max(1, cdiv(to_take, taken_rounds))
        if rounds >= dear * taken_rounds:
            break
    assert best is not None, "at least three places"
    return best[1:]


@functools.lru_cache(maxsize=1024)
def send_config(
    device: torch.device,
    capacity: int,
    num_ranks: int,
    row_words: int,
    taken_words: int,
    sms: int | None,
    profile: str,
    interpret: bool = INTERPRET,
) -> SymmetricConfig:
    """The launch of `send_rows` for rows of `row_words` at the sender and `taken_words` on the way."""
    latency = profile == "latency"
    block = 128 if interpret else 1024
    take = min(next_power_of_2(taken_words), 2048)
    parts = cdiv(row_words, block)
    run = 2 if interpret else 1 if latency else parts
    to_send, to_take = capacity * cdiv(parts, run), capacity * (num_ranks - 1)
    # four programs an SM fill the link, more take turns at it; a taker takes a row up, a sender sends `run` parts
    most_per_sm = 4 if sms is None and to_send > 512 else 8
    senders, takers = _shares(device, to_send, to_take, 4, 64, sms, parts / run, most_per_sm)
    return SymmetricConfig(senders, takers, block, take, run, 1, 4, 64, eager=latency)


@functools.lru_cache(maxsize=1024)
def give_back_config(
    device: torch.device,
    capacity: int,
    num_ranks: int,
    row_words: int,
    terms: int,
    sms: int | None,
    profile: str,
    interpret: bool = INTERPRET,
) -> SymmetricConfig:
    """The launch of `give_back_rows` for rows of `row_words`, each the sum of `terms` rows (0: as it is)."""
    latency = profile == "latency"
    # sums of several rows want few words a thread, and many programs that wait for them
    block, take, warps = (256, 256, 2) if terms else (512, 1024, 4)
    if interpret:
        block = take = 128
    parts, taken_parts = cdiv(row_words, block), cdiv(row_words, take)
    run, taken_run = (2, 2) if interpret else (1, 1) if latency or terms else (parts, taken_parts)
    to_send, to_take = capacity * cdiv(parts, run) * (num_ranks - 1), capacity * cdiv(taken_parts, taken_run)
    shares = _shares(device, to_send, to_take, warps, 64, sms, 1.5)
    return SymmetricConfig(*shares, block, take, run, taken_run, warps, 64)


def launch_options(device: torch.device, config: SymmetricConfig) -> dict[str, Any]:
    """The launch arguments that are no parameters of the kernel, and `DEPENDENT`."""
    if device.type != "cuda":
        return {"DEPENDENT": False}
    return {"num_warps": config.num_warps, "maxnreg": config.max_registers, **dependent_launch(device)}


def warm(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], config: SymmetricConfig) -> None:
    """Compiles a kernel without launching it."""
    if not INTERPRET:
        kernel.warmup(*arguments, grid=(config.programs,), **constants)
