"""Bench `routed_mlp`: the experts of one GPU alone, where nothing moves: sort by expert, GEMM1, activation, GEMM2,
weighted sum. Our Triton kernels beside `torch.nn.functional.grouped_mm` with the same sort and sum around it; in fp8
beside `scaled_grouped_mm` (`fp8_mlp.py`).
"""

from __future__ import annotations

import dataclasses

import torch

from epmoe.bench import problem as problems
from epmoe.bench.fp8_mlp import PEER_SCHEME, on_fp8_weights, torch_fp8_forward
from epmoe.bench.problem import OUTCOMES, Forward, Problem
from epmoe.bench.records import Record, make_record
from epmoe.bench.session import Session
from epmoe.bench.shapes import is_train
from epmoe.experts import EXPERTS, QUANTIZED_EXPERTS

PEER = "torch_grouped_mm"
FP8_PEER = f"torch_scaled_grouped_mm ({PEER_SCHEME})"
KERNELS = {"bf16": "grouped", "fp8_block": "grouped_fp8"}  # by scheme, the experts that are our kernels
# relative L2 to float64, and to the peer, which rounds rows and weights in another way
OUTPUT_LIMITS = {"bf16": problems.OUTPUT_LIMIT, "fp8_block": 0.07}
PEER_LIMITS = {"bf16": problems.OUTPUT_LIMIT, "fp8_block": 0.1}


@dataclasses.dataclass(frozen=True)
class RoutedMLPCase:
    """`scheme` is the form of weights and of rows as they are multiplied: `bf16`, or `fp8_block`, only in `infer`. Each
    has experts of its own.

    On CUDA `infer` is timed as a CUDA graph's replay, which is how few tokens are served; `eager` times launches.
    """

    scheme: str
    shape: str
    tokens: int
    mode: str
    experts: str
    routing: str = "uniform"
    eager: bool = False

    def __post_init__(self) -> None:
        shape = problems.check_names(self.shape, self.routing, experts=self.experts, mode=self.mode)
        if self.scheme not in KERNELS:
            raise ValueError(f"scheme={self.scheme!r}: must be one of {', '.join(KERNELS)}")
        kinds = EXPERTS if self.scheme == "bf16" else QUANTIZED_EXPERTS
        if self.experts not in ("auto", *kinds):
            raise ValueError(f"experts={self.experts!r} with scheme={self.scheme!r}: must be auto, {', '.join(kinds)}")
        if self.scheme != "bf16" and is_train(self.mode):
            raise ValueError(f"mode={self.mode!r} with scheme={self.scheme!r}: must be infer")
        if self.eager and is_train(self.mode):
            raise ValueError("eager=True with mode='train': training is never captured")
        if shape.activation.name != "swiglu":
            raise ValueError(f"shape={self.shape!r}: the peer knows no other activation than swiglu")


def standard_cases() -> list[RoutedMLPCase]:
    """What README's table shows."""
    wanted = [
        ("bf16", "qwen3-30b", "infer", (1, 16, 64, 128, 512, 4096, 16384)),
        ("fp8_block", "deepseek-v3-ep8", "infer", (1, 16, 128, 512, 4096)),
        ("bf16", "mixtral", "infer", (1, 128, 1024, 8192)),
        ("bf16", "qwen3-30b", "train", (32768,)),
        ("bf16", "deepseek-v3-ep8", "train", (4096,)),
    ]
    return [
        RoutedMLPCase(scheme, shape, m, mode, KERNELS[scheme]) for scheme, shape, mode, counts in wanted for m in counts
    ]


def measure_routed_mlp(case: RoutedMLPCase, session: Session) -> Record:
    """One record. FLOPs: 6·M·K·H·I forward, three times that for forward and backward (`Shape.flops`). Floor: the
    larger of FLOPs at the scheme's ceiling and the weight bytes of the experts that got rows at the memory's. `gb_s` is
    those bytes over the time: what matters for few tokens. In `infer` no call finds its weights in the L2 cache; few
    tokens are timed as a graph of several calls, each by other experts (`Problem.in_a_row`).

    Raises:
        RuntimeError: epmoe and the peer, or epmoe and float64, disagree.
    """
    assert session.ep.num_ranks == 1, "`layer` is the one for several"
    problem = session.problem(case.shape, case.tokens, case.routing)
    if case.scheme != "bf16":
        problem = on_fp8_weights(problem)
    scheme = None if case.scheme == "bf16" else case.scheme
    kernel, forward = problem.kernel("local", case.experts, scheme)
    others = _peers(case, problem)
    calls = {"epmoe": problem.call(forward, case.mode)}
    calls |= {name: problem.call(peer, case.mode) for name, peer in others.items()}
    ours = calls["epmoe"]()
    problems.check_reference(ours, problem, OUTPUT_LIMITS[case.scheme])
    for name in others:
        theirs, limit = calls[name](), PEER_LIMITS[case.scheme]
        problems.check_agreement(ours, theirs, OUTCOMES[: len(ours)], name, session.ep, limit)
        del theirs
    del ours

    with torch.no_grad():
        rows = kernel.dispatcher.dispatch(problem.x, problem.topk_ids, problem.topk_weights)
    weights = problems.weight_bytes(problem, rows, case.mode)
    if case.scheme != "bf16":
        weights //= problem.x.element_size()  # one byte each; the scales are a 4096th of them
    flops = problem.shape.flops(case.tokens, case.mode)
    captured = session.device.type == "cuda" and not is_train(case.mode) and not case.eager
    if captured:
        times = session.time_in_a_row(problem, {"epmoe": forward} | others)
    else:
        times = session.time(calls, flush_l2=not is_train(case.mode))
    named = dataclasses.asdict(dataclasses.replace(case, experts=kernel.experts.name))
    if not case.eager:
        del named["eager"]
    ours_us = times.pop("epmoe")
    return make_record(
        "routed_mlp",
        named,
        median_us=ours_us,
        floor_us=max(session.ceilings.compute_us(flops, case.scheme), session.ceilings.memory_us(weights)),
        tflops=flops / ours_us * 1e-6,
        gb_s=weights / ours_us * 1e-3,
        peers=times,
        device=session.device,
    )


def _peers(case: RoutedMLPCase, problem: Problem) -> dict[str, Forward]:
    if case.scheme == "bf16":
        return {PEER: problem.kernel("local", "torch_grouped")[1]}
    return {FP8_PEER: torch_fp8_forward(problem)} if problem.x.is_cuda else {}  # it has no kernel for a CPU
