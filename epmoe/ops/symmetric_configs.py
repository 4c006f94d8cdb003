"""Launches of the kernels over symmetric memory, chosen on the host from shapes alone: they decide speed, not results.

Programs are of two kinds. *Senders* never wait; *takers* wait for what peers send, and so does the one *herald* of a
launch, for their announcements. No set of waits is a circle, whatever the order in which programs start:

 1. A group has one operation running at a time, so a device has at most one for each of its n groups
    (`EPGroup.at_once`). Takers hold at most 2/3 of a device, those of n groups 2/(3n) each.
 2. So a third of every device is never held by programs that wait for peers. Senders and computations that hold it end
    by themselves, and the next sender of any group finds room: all senders of all ranks get done, whichever group a
    rank began with. Then so do the takers.
 3. A kernel that starts early (`_dependent_launch`) holds places while it waits for the one before it in its stream. It
    starts once all programs of that one have, senders included. With one group that is well: this rank has sent what
    peers wait for, and nothing else on it could be waited for. With several it could keep another group's senders out,
    for which a peer waits that keeps out this group's. Then no kernel starts early behind an operation (`NEXT_EARLY`).
 4. NCCL's kernels, which also wait for peers, hold 32 SMs at most: what is left of the third finds room elsewhere.
 5. Streams in which groups run at once have hardware queues of their own (CUDA_DEVICE_MAX_CONNECTIONS, 8 unless it is
    set). In a shared queue a wait for one group's operation holds another's back.

Without the bounds of 1 three groups on three ranks can stand still for good, or rather until the deadline: takers of A
and B fill rank 0, of B and C rank 1, of C and A rank 2, and each waits for a sender that finds no room.

Two profiles. *latency*: as many programs as there are pieces of work, small pieces. *throughput*: resident programs
that walk through whole rows, senders and takers side by side, so that the link is busy in both directions from start to
end and what has come is still in L2 when it is taken up. They differ in nothing that peers could notice.

The sizes were measured on two H200 at rows of 7168 numbers; other widths and numbers of ranks take them over, but for
the shares of `give_back_config`, which count the rows of a sum. What to expect of more ranks: docs/dispatchers.md.
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


def reached(num_ranks: int, top_k: int) -> float:
    """The probability that a token goes to a given rank, for `top_k` experts drawn alike: 1 - (1 - 1/R)^K."""
    return 1 - (1 - 1 / num_ranks) ** top_k


def _shares(
    device: torch.device, to_send: int, to_take: int, num_warps: int, max_registers: int, sms: int | None, dear: float,
    groups: int, most_per_sm: int = 64,
) -> tuple[int, int]:  # fmt: skip
    """(senders, takers): at least one of each, takers on at most two thirds of the places; of all places of the device,
    for all of its `groups` together.

    What is sent last and what is taken last should be so at the same time, where taking a piece up is `dear` times as
    long as sending one. Every program of a kind gets the same number of pieces, or one less.
    """
    if device.type != "cuda":
        return max(1, min(to_send, 5)), max(1, min(to_take, 3))
    available = _num_sms(device)
    fit = min(REGISTERS // (32 * num_warps * max_registers), THREADS // (32 * num_warps))
    places = min(min(fit, most_per_sm) * min(available, sms or available), CLOCKS) - 1  # one is the herald's
    most_takers = min(2 * places // 3, 2 * fit * available // (3 * groups))
    best: tuple[float, int, int] | None = None
    for rounds in range(1, max(1, to_send) + 1):
        senders = max(1, cdiv(to_send, rounds))
        room = min(places - senders, most_takers)
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
    rowwise: bool = False,
    groups: int = 1,
    interpret: bool = INTERPRET,
) -> SymmetricConfig:
    """The launch of `send_rows` for rows of `row_words` at the sender and `taken_words` on the way; `rowwise`: each is
    quantized by one scale, for which whoever sends a part of it reads all of it; `groups`: `EPGroup.at_once`."""
    latency = profile == "latency"
    block = 128 if interpret else 1024
    take = min(next_power_of_2(taken_words), 2048)
    parts = cdiv(row_words, block)
    run = 2 if interpret else 1 if latency else parts
    if (
        rowwise and latency and not interpret
    ):  # reads a row once where tokens alone are as many as programs (unmeasured)
        run = min(parts, max(1, capacity * parts // 512))
    to_send, to_take = capacity * cdiv(parts, run), capacity * (num_ranks - 1)
    # four programs an SM fill the link, more take turns at it; a taker takes a row up, a sender sends `run` parts
    most_per_sm = 4 if sms is None and to_send > 512 else 8
    senders, takers = _shares(device, to_send, to_take, 4, 64, sms, parts / run, groups, most_per_sm)
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
    groups: int = 1,
    top_k: int = 8,
    interpret: bool = INTERPRET,
) -> SymmetricConfig:
    """The launch of `give_back_rows` for rows of `row_words`, each the sum of `terms` rows (0: as it is); `groups`: as
    above; `top_k`: by which tokens reach ranks."""
    latency = profile == "latency"
    # sums of several rows want few words a thread, and many programs that wait for them
    block, take, warps = (256, 256, 2) if terms else (512, 1024, 4)
    if interpret:
        block = take = 128
    parts, taken_parts = cdiv(row_words, block), cdiv(row_words, take)
    run, taken_run = (2, 2) if interpret else (1, 1) if latency or terms else (parts, taken_parts)
    to_send, to_take = capacity * cdiv(parts, run) * (num_ranks - 1), capacity * cdiv(taken_parts, taken_run)
    dear = 1.5
    if num_ranks > 2:  # a token's sum has a row of each rank reached, what is sent is one row all the same
        dear *= (1 + (num_ranks - 1) * reached(num_ranks, top_k)) / 2
    shares = _shares(device, to_send, to_take, warps, 64, sms, dear, groups)
    return SymmetricConfig(*shares, block, take, run, taken_run, warps, 64)


def launch_options(device: torch.device, config: SymmetricConfig, groups: int) -> dict[str, Any]:
    """The launch arguments that are no parameters of the kernel, `DEPENDENT`, and `NEXT_EARLY`: whether the next kernel
    in the stream may start early."""
    if device.type != "cuda":
        return {"DEPENDENT": False, "NEXT_EARLY": False}
    options = {"num_warps": config.num_warps, "maxnreg": config.max_registers, **dependent_launch(device)}
    return options | {"NEXT_EARLY": options["DEPENDENT"] and groups == 1}


def warm(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], config: SymmetricConfig) -> None:
    """Compiles a kernel without launching it."""
    if not INTERPRET:
        kernel.warmup(*arguments, grid=(config.programs,), **constants)
