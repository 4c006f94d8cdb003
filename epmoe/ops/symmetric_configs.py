"""Launches of the kernels over symmetric memory, chosen on the host from shapes alone: they decide speed, not results.

Programs are of two kinds. *Senders* never wait; *takers* wait for what peers send. Takers are so few that senders, and
kernels of other streams, always find room beside them: whatever the order in which programs start and however many are
resident, all senders of all ranks get done, and then so do the takers. No set of waits is a circle.

Two profiles. *latency*: as many programs as there are pieces of work, small pieces. *throughput*: resident programs
that walk through whole rows, senders and takers side by side, so that the link is busy in both directions from start to
end and what has come is still in L2 when it is taken up. They differ in nothing that peers could notice.

The sizes are first choices and have not been measured yet.
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
        num_warps: of a program.
        max_registers: of a thread.
    """

    senders: int
    takers: int
    block: int
    take: int
    num_warps: int
    max_registers: int

    @property
    def programs(self) -> int:
        """Of both kinds."""
        return self.senders + self.takers


def profile_of(capacity: int) -> str:
    """`latency` or `throughput`, from max_tokens_per_rank: the same on all ranks."""
    return "latency" if capacity <= LATENCY_TOKENS else "throughput"


def _shares(
    device: torch.device, to_send: int, to_take: int, num_warps: int, max_registers: int, sms: int | None
) -> tuple[int, int]:
    """(senders, takers): at least one of each, takers on at most half of the places."""
    if device.type != "cuda":
        return max(1, min(to_send, 5)), max(1, min(to_take, 3))
    available = _num_sms(device)
    per_sm = min(REGISTERS // (32 * num_warps * max_registers), THREADS // (32 * num_warps))
    places = min(per_sm * min(available, sms or available), CLOCKS)
    takers = max(1, min(to_take, places // 2))
    return max(1, min(to_send, places - takers)), takers


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
    whole = next_power_of_2(cdiv(row_words, 64)) * 64
    block = min(whole, 128 if interpret else 512 if latency else 4096)
    take = min(next_power_of_2(taken_words), 2048)
    warps, registers = (4, 64) if latency else (8, 80)
    to_send, to_take = capacity * cdiv(row_words, block), capacity * (num_ranks - 1)
    return SymmetricConfig(*_shares(device, to_send, to_take, warps, registers, sms), block, take, warps, registers)


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
    whole = next_power_of_2(row_words)
    block = min(whole, 128 if interpret else 512)
    take = min(whole, 128 if interpret else 512 if capacity <= 64 else 1024)
    warps, registers = 4, 64
    to_send, to_take = capacity * cdiv(row_words, block) * (num_ranks - 1), capacity * cdiv(row_words, take)
    return SymmetricConfig(*_shares(device, to_send, to_take, warps, registers, sms), block, take, warps, registers)


def launch_options(device: torch.device, config: SymmetricConfig) -> dict[str, Any]:
    """The launch arguments that are no parameters of the kernel, and `DEPENDENT`."""
    if device.type != "cuda":
        return {"DEPENDENT": False}
    return {"num_warps": config.num_warps, "maxnreg": config.max_registers, **dependent_launch(device)}


def warm(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], config: SymmetricConfig) -> None:
    """Compiles a kernel without launching it."""
    if not INTERPRET:
        kernel.warmup(*arguments, grid=(config.programs,), **constants)
