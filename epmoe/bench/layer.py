"""Bench `layer`: the whole routed path from `topk_ids` to `[M, H]`, over all ranks, beside plain torch.

    x, topk_ids, topk_weights ─ dispatch ─ experts ─ combine ──► y        (train: and back to x, topk_weights, w1, w2)

The router is not part of it: ids and weights stand ready. Dispatch is: its count exchange and its host's wait count.

What moving costs inside the layer is the layer's time minus its experts': the same experts on the same rows, which came
once and lie there, to rows in expert order. The rest is dispatch, the weighted sum and combine, which is what bench
`dispatch_combine` times by itself. With `symmetric` both are CUDA graphs, of several layers for as few tokens as one
decodes (`LATENCY_TOKENS`); for more, the layer is also launched as a prefill is, which is its time then, and that of
the graph stands beside it as `graph_us`. The peer is always launched.
"""

from __future__ import annotations

import dataclasses

import torch

from epmoe.bench import problem as problems
from epmoe.bench.peers import all_to_all_grouped_mm
from epmoe.bench.problem import OUTCOMES, Problem
from epmoe.bench.records import Record, make_record
from epmoe.bench.session import Session
from epmoe.bench.shapes import is_train
from epmoe.bench.timing import Call, repeated
from epmoe.dispatch import ExpertInput
from epmoe.experts import EXPERTS as KINDS
from epmoe.experts import ExpertWeights
from epmoe.kernel import MoEKernel
from epmoe.ops.symmetric_configs import LATENCY_TOKENS

PEER = "all_to_all+grouped_mm"
EXPERTS = "experts"
WIDE = tuple(name for name, kind in KINDS.items() if not kind.monolithic and "standard" in kind.layouts)
"""Experts on bf16 weights that take ids and weights, as they stand ready here, and rows as dispatch gives them."""


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
            self.shape, self.routing, dispatcher=self.dispatcher, ranks=self.ranks, mode=self.mode
        )
        if self.experts not in ("auto", *WIDE):
            raise ValueError(
                f"experts={self.experts!r}: the layer's weights are bf16, its ids given: must be auto, "
                f"{', '.join(WIDE)}; epmoe bench quantized measures experts on quantized weights"
            )
        if shape.num_experts % self.ranks:
            raise ValueError(f"ranks={self.ranks}: the peer needs equal shares of {shape.num_experts} experts")
        if shape.activation.name != "swiglu":
            raise ValueError(f"shape={self.shape!r}: the peer knows no other activation than swiglu")


def measure_layer(case: LayerCase, session: Session) -> Record:
    """One record. FLOPs: 6·M·K·H·I forward, three times that for forward and backward (`Shape.flops`), of one rank at
    balanced load. Floor: `problem.floor_us`. In training the peer runs in the same rounds, in turn with epmoe; else the
    experts alone do, and `experts_us` and `moving_us`, the rest, stand in the record. All: `problem.link_figures`.

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
        rows = kernel.dispatcher.dispatch(problem.x.detach(), problem.topk_ids, problem.topk_weights.detach())
    wires, weights = problems.of_busiest_rank(
        problems.wire_bytes(kernel.dispatcher, rows, problem, case.mode),
        problems.weight_bytes(problem, rows, case.mode),
        session.ep,
    )
    flops, wire = problem.shape.flops(case.tokens, case.mode), sum(wires.values())
    captures = not is_train(case.mode) and session.device.type == "cuda" and kernel.dispatcher.name == "symmetric"
    decodes = case.tokens <= LATENCY_TOKENS
    figures = {}
    if is_train(case.mode):
        times = session.time(calls)
    else:
        alone = {"epmoe": calls["epmoe"], EXPERTS: _experts_alone(kernel, rows, problem)}
        turns = problems.turns_of(case.tokens) if captures else 1
        several = {name: repeated(call, turns) for name, call in alone.items()}
        inside = {name: time / turns for name, time in session.time(several, graph=captures).items()}
        figures = {"experts_us": inside[EXPERTS], "moving_us": inside["epmoe"] - inside[EXPERTS]}
        if captures and not decodes:
            times = session.time(calls)
            figures["graph_us"] = inside["epmoe"]
        else:
            times = {"epmoe": inside["epmoe"]} | session.time({PEER: calls[PEER]})
    messages = problems.row_messages(problem, case.mode)
    link = problems.link_figures(kernel.dispatcher, rows, messages, times["epmoe"], session.ceilings)
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
        timed="graph" if captures and decodes else "eager",
        **figures,
        **link,
    )


def _experts_alone(kernel: MoEKernel, rows: ExpertInput, problem: Problem) -> Call:
    """Both GEMMs and what is between them, on rows that came once."""
    weights = ExpertWeights(problem.weights.gate_up_proj.detach(), problem.weights.down_proj.detach())

    def experts() -> object:
        with torch.no_grad():
            return kernel.experts.output(rows, weights, delegate=True, workspace=kernel.workspace)

    return experts
