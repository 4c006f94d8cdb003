"""Routers that ignore what the tokens say: known loads for tests and benchmarks.

Each is a callable `x [M, *] -> Routing` that can stand where a `Router` stands. Nothing is kept between calls except by
`replay`: token i of a seed always gets the same experts, whatever M, the device and the number of calls, so give each
rank its own seed. The experts in a row are distinct. Letters: M tokens, E logical experts, K experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from epmoe.placement import ExpertPlacement
from epmoe.routing import Routing, as_routing, validate_routing


class SimulatedRouter:
    """Draws K distinct experts per token with chances in proportion to `popularity [E]`, without replacement.

    Experts of popularity 0 are never drawn; slots that then stay empty hold id -1 and weight 0. Weights are random, in
    (0, 1), and sum to 1 over a token's experts. Tensors are made on x's device; the first call on a CUDA device copies
    `popularity` there, so make it before capturing a graph.
    """

    def __init__(self, name: str, top_k: int, popularity: Sequence[float], seed: int) -> None:
        if not 1 <= top_k <= len(popularity):
            raise ValueError(f"top_k={top_k}: must be in [1, num_experts={len(popularity)}]")
        self.name, self.num_experts, self.top_k, self.seed = name, len(popularity), top_k, seed
        self.popularity = torch.tensor(popularity, dtype=torch.float64, device="cpu")

    def __call__(self, x: torch.Tensor) -> Routing:
        self.popularity = self.popularity.to(x.device)
        num_tokens = x.shape[0]
        # Expert e arrives after an exponential time of rate popularity[e]; the first K to arrive are a draw without
        # replacement, in order.
        arrival = -_random(self.seed, num_tokens, self.num_experts, x.device).log() / self.popularity
        first, ids = arrival.topk(self.top_k, dim=-1, largest=False)
        drawn = first.isfinite()
        weights = torch.where(drawn, _random(~self.seed, num_tokens, self.top_k, x.device), 0.0)
        weights = weights / weights.sum(-1, keepdim=True)
        return Routing(torch.where(drawn, ids, -1).to(torch.int32), weights.float(), num_experts=self.num_experts)

    def __repr__(self) -> str:
        return f"SimulatedRouter({self.name}, num_experts={self.num_experts}, top_k={self.top_k}, seed={self.seed})"


def uniform(num_experts: int, top_k: int, seed: int = 0) -> SimulatedRouter:
    """Every expert equally likely."""
    return SimulatedRouter("uniform", top_k, [1.0] * num_experts, seed)


def zipf(num_experts: int, top_k: int, exponent: float, seed: int = 0) -> SimulatedRouter:
    """The n-th most popular expert has popularity n^-exponent; which expert is n-th is a shuffle by `seed`, so that the
    load is skewed over experts and not over a contiguous placement's ranks. Exponent 0 is `uniform`."""
    if not 0 <= exponent < math.inf:
        raise ValueError(f"exponent={exponent}: must be finite and at least 0")
    order = _random(seed, 1, num_experts, torch.device("cpu"))[0].argsort().argsort()
    return SimulatedRouter(f"zipf {exponent}", top_k, [(n + 1) ** -exponent for n in order.tolist()], seed)


def one_expert(num_experts: int, top_k: int, expert: int) -> SimulatedRouter:
    """Every token to `expert`, in slot 0 with weight 1; the other slots hold -1."""
    if not 0 <= expert < num_experts:
        raise ValueError(f"expert={expert}: must be in [0, num_experts={num_experts})")
    return SimulatedRouter(f"one expert {expert}", top_k, [float(e == expert) for e in range(num_experts)], 0)


def one_rank(placement: ExpertPlacement, top_k: int, rank: int, seed: int = 0) -> SimulatedRouter:
    """Every token to experts that `rank` owns, equally likely; if it owns fewer than K, the slots left hold -1."""
    owned = set(placement.local_experts(rank))
    popularity = [float(e in owned) for e in range(placement.num_experts)]
    return SimulatedRouter(f"one rank {rank}", top_k, popularity, seed)


class Replay:
    """Recorded routings, one per call, in order. See `replay`."""

    def __init__(self, records: list[Routing]) -> None:
        self.records = records
        self.calls = 0

    def __call__(self, x: torch.Tensor) -> Routing:
        if self.calls == len(self.records):
            raise ValueError(f"replay: call {self.calls + 1} but only {len(self.records)} routings were recorded")
        record = self.records[self.calls]
        recorded = record.topk_ids.shape[0]
        if x.shape[0] != recorded:
            raise ValueError(f"replay: call {self.calls + 1} has M={x.shape[0]} tokens but its record holds {recorded}")
        self.calls += 1
        ids, weights = record.topk_ids.to(x.device), record.topk_weights.to(x.device)
        return Routing(ids, weights, num_experts=record.num_experts)


def replay(
    ids: Sequence[torch.Tensor], weights: Sequence[torch.Tensor] | None = None, num_experts: int | None = None
) -> Replay:
    """A router that gives `ids[0]` on its first call, `ids[1]` on its second, and so on.

    Args:
        ids: int32 or int64 `[M_i, K]` each, distinct in a row apart from -1.
        weights: floating `[M_i, K]` each; None gives a token's n experts 1/n each.
        num_experts: E; None takes one more than the largest id recorded.
    Raises ValueError here for records that are no routing; at a call, when the records are used up or M differs.
    """
    if weights is not None and len(weights) != len(ids):
        raise ValueError(f"replay: {len(ids)} records of ids but {len(weights)} of weights; give one per record")
    if num_experts is None:
        num_experts = 1 + max((int(record.max()) for record in ids if record.numel()), default=0)
        num_experts = max(num_experts, 1)
    records = []
    for number, record in enumerate(ids):
        if record.dim() != 2:
            raise ValueError(f"replay: ids[{number}] has shape {list(record.shape)}: must be [M, K]")
        used = record >= 0
        given = used / used.sum(-1, keepdim=True).clamp(min=1) if weights is None else weights[number]
        try:
            routing = as_routing((record, given), record.shape[0], record.shape[1], num_experts)
            validate_routing(routing.topk_ids, routing.topk_weights, num_experts)
        except ValueError as error:
            raise ValueError(f"replay: record {number}: {error}") from error
        in_order = record.sort(dim=-1).values
        twice = (in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0)
        if twice.any():
            row, slot = twice.nonzero()[0].tolist()
            raise ValueError(
                f"replay: record {number}: row {row} names expert {int(in_order[row, slot])} twice: must be distinct"
            )
        records.append(routing)
    return Replay(records)


def _random(seed: int, rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """fp64 `[rows, columns]` uniform in (0, 1), a hash of (seed, row, column): the same on every device, no state."""
    start = torch.full((), seed, dtype=torch.int64, device=device)
    row = _mix(_mix(start) + torch.arange(rows, device=device))
    bits = _mix(row[:, None] + torch.arange(columns, device=device))
    return ((bits >> 12 & (1 << 52) - 1) + 0.5) * 2.0**-52  # 52 bits and a half: neither 0 nor 1 after rounding


def _mix(z: torch.Tensor) -> torch.Tensor:
    """The step of splitmix64 (Steele, Lea, Flood 2014) on int64 that wraps around."""

    def shifted(bits: int) -> torch.Tensor:
        return z >> bits & (1 << 64 - bits) - 1  # >> keeps the sign; the mask makes it a logical shift

    z = z + (0x9E3779B97F4A7C15 - (1 << 64))
    z = (z ^ shifted(30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    z = (z ^ shifted(27)) * (0x94D049BB133111EB - (1 << 64))
    return z ^ shifted(31)
