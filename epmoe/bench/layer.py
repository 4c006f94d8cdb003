"""Bench `layer`: the whole routed path from `topk_ids` to `[M, H]`, over all ranks, beside plain torch.

    x, topk_ids, topk_weights ─ dispatch ─ experts ─ combine ──► y        (train: and back to x, topk_weights, w1, w2)

The router is not part of it: ids and weights stand ready. Dispatch is: its count exchange and its host's wait count.
"""

from __future__ import annotations

import dataclasses

import torch

from epmoe.bench import problem as problems
from epmoe.bench.peers import all_to_all_grouped_mm
from epmoe.bench.problem import OUTCOMES
from epmoe.bench.records import Record, make_record
from epmoe.bench.session import Session

PEER = "all_to_all+grouped_mm"


@dataclasses.dataclass(frozen=True)
class LayerCase:
    """`tokens` is per rank; `dispatcher` and `experts` are names, `auto` chooses and is recorded by what it chose."""

    shape: str
    dispatcher: str
    ranks: int
    tokens: int
    mode: str
    experts: str
    routing: str = "uniform"

    def __post_init__(self) -> None:
        shape = problems.check_names(
            self.shape, self.routing, dispatcher=self.dispatcher, experts=self.experts, mode=self.mode
        )
        if shape.num_experts % self.ranks:
            raise ValueError(f"ranks={self.ranks}: the peer needs equal shares of {shape.num_experts} experts")
        if shape.activation.name != "swiglu":
            raise ValueError(f"shape={self.shape!r}: the peer knows no other activation than swiglu")


def measure_layer(case: LayerCase, session: Session) -> Record:
    """One record. FLOPs: 6·M·K·H·I forward, three times that for forward and backward (`Shape.flops`), of one rank at
    balanced load. Floor: `problem.floor_us`. The peer runs in the same rounds, in turn with epmoe.

    Raises:
        RuntimeError: epmoe and the peer, or epmoe and float64, disagree.
    """
    problem = session.problem(case.shape, case.tokens, case.routing)
    assert case.ranks == session.ep.num_ranks
    kernel, forward = problem.kernel(case.dispatcher, case.experts)
    group = session.ep.process_group
    calls = {
        "epmoe": problem.call(forward, case.mode),
        PEER: problem.call(lambda x, ids, p, w1, w2: all_to_all_grouped_mm(x, ids, p, w1, w2, group), case.mode),
    }
    ours = calls["epmoe"]()
    problems.check_reference(ours, problem)
    problems.check_agreement(ours, calls[PEER](), OUTCOMES[: len(ours)], PEER, session.ep)
    del ours

    with torch.no_grad():
        rows = kernel.dispatcher.dispatch(problem.x, problem.topk_ids, problem.topk_weights)
    wires, weights = problems.of_busiest_rank(
        problems.wire_bytes(kernel.dispatcher, rows, problem, case.mode),
        problems.weight_bytes(problem, rows, case.mode),
        session.ep,
    )
    del rows
    flops, wire = problem.shape.flops(case.tokens, case.mode), sum(wires.values())
    times = session.time(calls)
    named = dataclasses.replace(case, dispatcher=kernel.dispatcher.name, experts=kernel.experts.name)
    return make_record(
        "layer",
        dataclasses.asdict(named),
        median_us=times["epmoe"],
        floor_us=problems.floor_us(session.ceilings, flops, weights, wire),
        tflops=flops / times["epmoe"] * 1e-6,
        wire_bytes=wire,
        wire_bytes_by_step=wires,
        peers={PEER: times[PEER]},
        device=session.device,
    )
