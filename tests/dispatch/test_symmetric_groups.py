"""Several groups over symmetric memory in one process: in any order of their operations, over other sets of ranks, and
at the same time in threads that begin with another group on each rank."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from epmoe import EPGroup
from epmoe.dispatch.inputs import ExpertInput
from epmoe.dispatch.symmetric import SymmetricDispatcher
from epmoe.testing import run_ranks
from tests.dispatch.test_symmetric import C, E, H, K, make, owned

MEMBERS = {"a": (0, 1, 2), "b": (0, 2), "c": (2, 1)}  # of the groups over three ranks


def made(ranks: int) -> dict[str, Any]:
    """This rank's dispatcher of each group that it is in."""
    dispatchers = {}
    for n, (name, members) in enumerate(MEMBERS.items()):
        everyone = sorted(members) if ranks == 3 else list(range(ranks))
        group = dist.new_group(everyone)
        if dist.get_rank() in everyone:
            ep = EPGroup(group, device="cpu", timeout=60)
            dispatchers[name] = make(SymmetricDispatcher, ep, capacity=C + n, layer=name)
    return dispatchers


def brought(name: str, source: int, step: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Tokens that say where they come from, whole numbers that float32 adds exactly, and ids with holes."""
    code = 1000 * ord(name) + 100 * step + 10 * source
    g = torch.Generator().manual_seed(code)
    ids = torch.rand(tokens, E, generator=g).argsort(1)[:, :K].int()
    ids[torch.rand(ids.shape, generator=g) < 0.2] = -1
    return code + torch.arange(tokens)[:, None] + torch.zeros(1, H), ids


def dispatched(name: str, d: Any, step: int) -> tuple[ExpertInput, Tensor, Tensor]:
    """Checked against what every source brought."""
    x, ids = brought(name, d.ep.rank, step, (d.ep.rank + step) % (C + 1))
    rows = d.dispatch(x, ids, torch.ones(ids.shape))
    here = owned(rows).any(1).view(d.ep.num_ranks, -1)
    for source in range(d.ep.num_ranks):
        tokens = (source + step) % (C + 1)
        sent, theirs = brought(name, source, step, tokens)
        owner = torch.where(theirs >= 0, d.owner[theirs.clamp_min(0).long()], -1)
        assert torch.equal(here[source, :tokens], (owner == d.ep.rank).any(1)) and not here[source, tokens:].any()
        kept = rows.x.view(d.ep.num_ranks, -1, H)[source, :tokens][here[source, :tokens]]
        assert torch.equal(kept, sent[here[source, :tokens]]), (name, step, source)
    return rows, x, ids


def combined(name: str, d: Any, held: tuple[ExpertInput, Tensor, Tensor]) -> None:
    rows, x, ids = held
    out = d.combine(rows.x, rows.handle)
    owner = torch.where(ids >= 0, d.owner[ids.clamp_min(0).long()], -1)
    visited = sum((owner == r).any(1).int() for r in range(d.ep.num_ranks))
    assert torch.equal(out, x * visited[:, None]), name  # type: ignore[index]


def interleaved(rank: int, ranks: int, mode: str, orders: list[str]) -> int:
    """`orders`: names of groups, in capitals where they combine."""
    os.environ["EPMOE_CPU_KERNELS"] = mode
    dispatchers = made(ranks)
    for step, order in enumerate(orders):
        held: dict[str, list[Any]] = {name: [] for name in dispatchers}
        for what in order:
            name = what.lower()
            if name not in dispatchers:
                continue
            if what == name:
                held[name].append(dispatched(name, dispatchers[name], step + len(held[name])))
            else:
                combined(name, dispatchers[name], held[name].pop(0))
    return max(d.ep.at_once for d in dispatchers.values())


ORDERS = ["abcABC", "abcCBA", "abBcAC", "aabbAABB", "aabBcAbCAB", "ccbbaaABCABC"]


@pytest.mark.parametrize("mode, ranks, orders", [("torch", 3, ORDERS), ("triton", 2, ["abcCAB", "aabBAcCA"])])
def test_operations_of_three_groups_interleave_in_any_order(mode: str, ranks: int, orders: list[str]) -> None:
    counted = run_ranks(interleaved, ranks, args=(mode, orders), timeout=120)
    assert counted == ([2, 2, 3] if ranks == 3 else [3, 3]), "each rank counts the groups that it is in"


def at_once(rank: int, ranks: int, steps: int) -> None:
    os.environ["EPMOE_CPU_KERNELS"] = "torch"
    dispatchers, failed = made(ranks), list[BaseException]()
    for name, d in dispatchers.items():  # making memory is collective: in one order
        combined(name, d, dispatched(name, d, 0))

    def work(name: str) -> None:
        try:
            with torch.no_grad():
                for step in range(1, steps):
                    d = dispatchers[name]
                    held = [dispatched(name, d, step), dispatched(name, d, step + 1)]
                    for one in held:
                        combined(name, d, one)
        except BaseException as error:
            failed.append(error)

    names = list(dispatchers)
    threads = [threading.Thread(target=work, args=(name,)) for name in names[rank % len(names) :] + names[:rank]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def test_three_groups_at_the_same_time_begun_in_another_order_on_each_rank() -> None:
    run_ranks(at_once, 3, args=(6,), timeout=120)
