"""Bench `routed_mlp`: the experts of one GPU alone, where nothing moves: sort by expert, GEMM1, activation, GEMM2,
weighted sum. Our Triton kernels beside `torch.nn.functional.grouped_mm` with the same sort and sum around it.
"""

from __future__ import annotations

import dataclasses

import torch

from epmoe.bench import problem as problems
from epmoe.bench.problem import OUTCOMES
from epmoe.bench.records import Record, make_record
from epmoe.bench.session import Session
from epmoe.bench.shapes import is_train

PEER = "torch_grouped_mm"


@dataclasses.dataclass(frozen=True)
class RoutedMLPCase:
    """`scheme` is the form of weights and rows: `bf16`. With `graph` each call is a CUDA graph's replay, which is how
    few tokens are served; only in `infer`."""

    scheme: str
    shape: str
    tokens: int
    mode: str
    experts: str = "grouped"
    routing: str = "uniform"
    graph: bool = False

    def __post_init__(self) -> None:
        problems.check_names(self.shape, self.routing, experts=self.experts, mode=self.mode)
        if self.scheme != "bf16":
            raise ValueError(f"scheme={self.scheme!r}: must be bf16")
        if self.graph and is_train(self.mode):
            raise ValueError("graph=True with mode='train': only infer is captured")


def measure_routed_mlp(case: RoutedMLPCase, session: Session) -> Record:
    """One record. FLOPs: 6·M·K·H·I forward, three times that for forward and backward (`Shape.flops`). Floor: the
    larger of FLOPs at the bf16 ceiling and the weight bytes of the experts that got rows at the memory's. `gb_s` is
    those bytes over the time: what matters for few tokens. In `infer` the L2 cache is overwritten before each call.

    Raises:
        RuntimeError: epmoe and the peer, or epmoe and float64, disagree.
    """
    assert session.ep.num_ranks == 1, "`layer` is the one for several"
    problem = session.problem(case.shape, case.tokens, case.routing)
    kernel, forward = problem.kernel("local", case.experts)
    calls = {
        "epmoe": problem.call(forward, case.mode),
        PEER: problem.call(problem.kernel("local", "torch_grouped")[1], case.mode),
    }
    ours = calls["epmoe"]()
    problems.check_reference(ours, problem)
    problems.check_agreement(ours, calls[PEER](), OUTCOMES[: len(ours)], PEER, session.ep)
    del ours

    with torch.no_grad():
        rows = kernel.dispatcher.dispatch(problem.x, problem.topk_ids, problem.topk_weights)
    weights = problems.weight_bytes(problem, rows, case.mode)
    flops = problem.shape.flops(case.tokens, case.mode)
    times = session.time(calls, flush_l2=not is_train(case.mode), graph=case.graph)
    named = dataclasses.asdict(dataclasses.replace(case, experts=kernel.experts.name))
    if not case.graph:
        del named["graph"]
    return make_record(
        "routed_mlp",
        named,
        median_us=times["epmoe"],
        floor_us=problems.floor_us(session.ceilings, flops, weights, 0),
        tflops=flops / times["epmoe"] * 1e-6,
        gb_s=weights / times["epmoe"] * 1e-3,
        peers={PEER: times[PEER]},
        device=session.device,
    )
