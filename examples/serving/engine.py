"""The loop that every rank runs: hear the plan, do this rank's part, report the tokens.

    rank 0    plan ──►┐                  ┌──► tokens to their requests, then the next plan
    rank r         ──►┴─ decode, prefill ┴──►

A step has at most two forwards, the same two on all ranks: one token more for every running request, then the prompts
that begin, at most one per rank. A rank without a part in a forward serves the others' tokens with its experts.
Plans and tokens travel over gloo, beside the traffic of the experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from epmoe import EPGroup
from epmoe.integrations.transformers.decode import Decoder
from serving.batch import Batch, Sampler, Sampling

NO_TOKEN = -1


@dataclasses.dataclass(frozen=True)
class Start:
    """A request that begins in a slot."""

    slot: int
    prompt: list[int]
    sampling: Sampling


@dataclasses.dataclass(frozen=True)
class Plan:
    """One step, as rank 0 has decided it for all ranks; slots by rank."""

    leave: dict[int, list[int]] = dataclasses.field(default_factory=dict)  # first of all
    decode: bool = False  # a request runs somewhere
    start: dict[int, Start] = dataclasses.field(default_factory=dict)
    stop: bool = False  # the last plan


class Planner(Protocol):
    """What decides; on rank 0 alone."""

    def plan(self) -> Plan: ...

    def take(self, tokens: list[list[int]]) -> None: ...

    def stop(self) -> None: ...


class Control:
    """Plans from rank 0 to all, small numbers from all to rank 0. Collective: made and called on all ranks alike."""

    def __init__(self, ep: EPGroup | None) -> None:
        self.rank, self.ranks = (0, 1) if ep is None else (ep.rank, ep.num_ranks)
        self._group = None
        if ep is not None:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=ep.timeout))

    def hear(self, plan: Plan | None) -> Plan:
        """Rank 0's plan."""
        box = [plan]
        if self._group is not None:
            dist.broadcast_object_list(box, src=0, group=self._group, device=torch.device("cpu"))
        assert box[0] is not None
        return box[0]

    def report(self, numbers: list[int]) -> list[list[int]]:
        """Every rank's numbers, as many on each, on rank 0; nothing elsewhere."""
        mine = torch.tensor(numbers, dtype=torch.int64)
        if self._group is None:
            return [mine.tolist()]
        gathered = [torch.empty_like(mine) for _ in range(self.ranks)] if self.rank == 0 else None
        dist.gather(mine, gathered, dst=0, group=self._group)
        return [] if gathered is None else [other.tolist() for other in gathered]


class Worker:
    """This rank's part of each step.

    Args:
        decoder: of the model that is parallelized over the ranks, with a row for each slot.
        slots: requests at a time on one rank.
    """

    def __init__(self, decoder: Decoder, rank: int, slots: int) -> None:
        self.decoder, self.rank, self.slots = decoder, rank, slots
        self.batch = Batch(decoder)
        self._samplers: dict[int, Sampler] = {}
        self._newest: dict[int, int] = {}

    def do(self, plan: Plan) -> list[int]:
        """The new token of each slot, or NO_TOKEN."""
        self.batch.leave(plan.leave.get(self.rank, []))
        tokens = [NO_TOKEN] * self.slots
        if plan.decode:
            logits = self.batch.step([self._newest[slot] for slot in self.batch.slots])
            self._choose(logits, self.batch.slots, tokens)
        if plan.start:
            if (start := plan.start.get(self.rank)) is not None:
                self._samplers[start.slot] = Sampler(start.sampling)
                self._choose(self.batch.start(start.slot, start.prompt), [start.slot], tokens)
            else:
                self.decoder.no_prompt()
        return tokens

    def _choose(self, logits: Tensor, slots: list[int], tokens: list[int]) -> None:
        likeliest = logits.argmax(-1).tolist()  # one wait for the device, not one per row
        self.decoder.check()  # before a wrong token leaves
        for row, slot in enumerate(slots):
            sampler = self._samplers[slot]
            tokens[slot] = self._newest[slot] = likeliest[row] if sampler.greedy else sampler(logits[row])


def run(worker: Worker, control: Control, planner: Planner | None, asked_to_stop: Callable[[], bool]) -> None:
    """Steps until the plan says stop. Collective.

    Args:
        planner: on rank 0, None elsewhere.
        asked_to_stop: whether this process was told to end; once it is true on any rank, the planner hears of it.
    """
    while True:
        plan = control.hear(None if planner is None else planner.plan())
        if plan.stop:
            return
        numbers = control.report([*worker.do(plan), int(asked_to_stop())])
        if planner is not None:
            planner.take([tokens for *tokens, _ in numbers])
            if any(asked for *_, asked in numbers):
                planner.stop()
