"""`MoEKernel.memory_plan` against what a forward on CPU holds at any moment: bytes of the storages that are alive.

A mode sees every tensor made, but for those inside operations of our own, whose torch twins are not what runs on GPUs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from epmoe import (
    DISPATCHERS,
    Activation,
    EPGroup,
    ExpertPlacement,
    ExpertsSpec,
    ExpertWeights,
    MoEKernel,
    make_dispatcher,
    select_experts,
)
from epmoe.comm.workspace import Workspace
from epmoe.dispatch import Dispatcher, HierarchicalDispatcher
from epmoe.dispatch.all_to_all import AllToAllLayout
from epmoe.dispatch.base import Traffic
from epmoe.dispatch.inputs import Layout
from epmoe.dispatch.node_layout import HierarchicalLayout
from epmoe.quant import quantize_narrow, quantize_weights
from epmoe.quant.rows import QuantizedRows, quantize_rows
from epmoe.testing import run_ranks

TOKENS, H, I, L = 200, 512, 128, 2  # rows are what counts beside indices, of which plans do not list every one


class Live(TorchDispatchMode):
    """Attributes: `peak`, the most bytes alive after any operation, of storages made since the mode was entered."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def meet(self, tensors: Any, made: bool) -> None:
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                reference, _ = self.known.get(storage._cdata, (None, 0))
                if reference is None or reference.expired():
                    self.known[storage._cdata] = (StorageWeakRef(storage), storage.nbytes() if made else 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.meet((args, kwargs), made=False)
        out = func(*args, **(kwargs or {}))
        self.note(out)
        return out

    def note(self, made: Any) -> None:
        self.meet(vars(made) if dataclasses.is_dataclass(made) else made, made=True)
        self.known = {key: (ref, nbytes) for key, (ref, nbytes) in self.known.items() if not ref.expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.known.values()))


SEEN_FROM_OUTSIDE = (
    ("ops.symmetric_send", "send_rows_reference"),
    ("ops.symmetric_give_back", "give_back_reference"),
    ("dispatch.reduce", "gather_sum"),
)
WRITERS = (
    ("ops.grouped_gemm", "_gemm_twin"),
    ("ops.grouped_gemm", "_gemm_act_twin"),
    ("ops.narrow_gemm", "_twin"),
    ("experts._inference", "quantize_into"),
    ("experts._inference", "scaled_grouped_gemm_act_into"),
    ("experts._inference", "scaled_grouped_gemm_into"),
)


@contextlib.contextmanager
def as_operations(live: Live) -> Iterator[None]:
    """Of what no `torch.library` operation wraps, only results are seen; what writes into memory that is there already
    is left out."""

    def seen_from_outside(twin: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(twin)
        def call(*args: Any, **options: Any) -> Any:
            with _disable_current_modes():
                result = twin(*args, **options)
            live.note(result)
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for place, name in (*SEEN_FROM_OUTSIDE, *WRITERS):
            module = importlib.import_module(f"epmoe.{place}")
            honest = getattr(module, name)
            seen = seen_from_outside(honest) if (place, name) in SEEN_FROM_OUTSIDE else lambda *_, **__: None
            patch.setattr(module, name, seen)
        wait = EPGroup.wait

        def wait_for_threads_too(self: EPGroup, work: Any, operation: str) -> None:
            wait(self, work, operation)
            time.sleep(0.001)  # a collective's thread lets go of its tensors a little later

        patch.setattr(EPGroup, "wait", wait_for_threads_too)
        yield


class Case(NamedTuple):
    """`top_k`: None: every token has an expert on each rank, so that as many rows move as a plan must allow for;
    `scheme`: of weights; `workspace`: one that is there already, as slots are."""

    dispatcher: str
    options: dict[str, Any] = {}
    top_k: int | None = None
    scheme: str | None = None
    layout: str = "standard"
    one_sided: bool = False
    workspace: bool = True
    width: int = H


def kernel_of(case: Case, rank: int, ranks: int, ep: EPGroup | None) -> tuple[MoEKernel, ExpertWeights]:
    placement = ExpertPlacement.contiguous(L * ranks, ranks)
    moves = make_dispatcher(case.dispatcher, ep, placement, "cpu", max_tokens_per_rank=TOKENS)
    if case.one_sided:
        assert isinstance(moves, HierarchicalDispatcher)
        moves.one_sided = True
    dtype = torch.float32 if case.scheme is None else torch.bfloat16
    w1, w2 = torch.randn(L, 2 * I, case.width), torch.randn(L, case.width, I)
    if case.scheme is None:
        weights, kind = ExpertWeights(w1, w2), "batched" if case.layout == "batched" else "grouped"
    elif case.scheme.startswith("fp8"):
        q1, q2 = (quantize_weights(w, case.scheme) for w in (w1, w2))
        weights, kind = (
            ExpertWeights(q1.values, q2.values, gate_up_scale=q1.scales, down_scale=q2.scales),
            "grouped_fp8",
        )
    else:
        n1, n2 = (quantize_narrow(w, case.scheme) for w in (w1, w2))
        scales = {"gate_up_scale": n1.scales, "down_scale": n2.scales}
        weights, kind = ExpertWeights(n1.values, n2.values, **scales), "weight_only"
    spec = ExpertsSpec(Activation(), case.width, I, dtype, torch.device("cpu"), scheme=case.scheme)
    return MoEKernel(
        moves, select_experts(spec, kind, case.layout).experts, layout=case.layout, **case.options
    ), weights


def traffic_of(moves: Dispatcher, layout: Layout, top_k: int) -> Traffic:
    """What moved by `layout`, over nodes of which some have several ranks."""
    if isinstance(layout, HierarchicalLayout):
        assert moves.ep is not None and moves.ep.nodes.two_levels
        splits = layout.numbers(moves.ep)
        passed_on = sum(splits.passed_on) if layout.slots is None and len(splits.passed_on) > 1 else 0
        return Traffic(sum(splits.sent), layout.num_rows, layout.max_assignments, sum(splits.relayed), passed_on)
    if isinstance(layout, AllToAllLayout):
        return Traffic(layout.send_index.shape[0], layout.num_rows, layout.max_assignments)
    return moves.traffic(TOKENS, top_k)._replace(pairs=layout.max_assignments)


def planned_and_measured(rank: int, ranks: int, seed: int, cases: list[Case]) -> list[tuple[int, int]]:
    """Of each case the plan's peak and that of a forward."""
    torch.manual_seed(seed + rank)
    ep = EPGroup(timeout=60, nodes=[0, 0, 1][:ranks]) if ranks > 1 else None
    found = []
    gc.collect()
    gc.freeze()  # what was there before is not looked through again each time
    for case in cases:
        kernel, weights = kernel_of(case, rank, ranks, ep)
        k = case.top_k or ranks
        x: Tensor | QuantizedRows = torch.randn(TOKENS, case.width, dtype=kernel.experts.spec.dtype)
        p, there = torch.rand(TOKENS, k), 0
        if case.options.get("quantized_before"):
            x = quantize_rows(x, case.options["dispatch_scheme"])
            there = x.values.nbytes + x.scales.nbytes
        ids = torch.rand(TOKENS, L * ranks).argsort(1)[:, :k].int()
        if case.top_k is None:
            ids = (L * torch.arange(ranks) + torch.randint(0, L, (TOKENS, ranks))).int()
        kernel.workspace = Workspace(torch.device("cpu")) if case.workspace else None
        with torch.no_grad():
            layout = kernel(x, ids, p, weights).layout
            assert layout is not None
            traffic = traffic_of(kernel.dispatcher, layout, k)
            if case.top_k is None:
                most = kernel.dispatcher.traffic(TOKENS, k)
                assert traffic == most._replace(pairs=traffic.pairs), (case, traffic, most)
            del layout
            peaks = []
            for _ in range(3):  # it may be later still
                gc.collect()
                with Live() as live, as_operations(live):
                    out = kernel(x, ids, p, weights)
                del out
                peaks.append(live.peak)
            plan = kernel.memory_plan(TOKENS, k, traffic=traffic)
        there += sum(buffer.nbytes for buffer in plan.buffers if buffer.name.startswith("slots"))
        there += 0 if kernel.workspace is None else kernel.workspace.nbytes
        found.append((plan.peak, min(peaks) + there))
    return found


CHUNK, BACK, SENT = {"chunk_tokens": 64}, {"combine_scheme": "fp8_row"}, {"dispatch_scheme": "fp8_row"}
STATIC = {**SENT, "quantized_before": True}
ALONE = [
    *(Case("local", options) for options in ({}, CHUNK, BACK, SENT, CHUNK | SENT, CHUNK | BACK, STATIC)),
    *(Case("local", options, top_k=2) for options in ({}, CHUNK)),
    *(Case("local", options, top_k=2, workspace=False) for options in ({}, CHUNK, SENT)),
    *(Case("local", options, layout="batched") for options in ({}, CHUNK, SENT)),
    Case("local", layout="batched", workspace=False),
    *(Case("local", {}, scheme=scheme) for scheme in ("fp8_block", "fp8_row", "int4_g32")),
    Case("local", {"dispatch_scheme": "fp8_row"}, scheme="fp8_row", layout="batched"),
    Case("local", {"dispatch_scheme": "fp8_row"}, scheme="int4_g32", layout="batched"),
]
REMOTE = [name for name in DISPATCHERS if name != "local"]
BY_COLLECTIVES = [name for name in REMOTE if DISPATCHERS[name].capabilities.quantized_back]
OVER_RANKS = [
    *(Case(name, options) for name in REMOTE for options in ({}, CHUNK, SENT)),
    *(Case(name, BACK) for name in BY_COLLECTIVES),
    *(Case(name, SENT | BACK) for name in ("all_to_all", "hierarchical")),
    *(Case(name, {}, top_k=1) for name in ("all_to_all", "hierarchical", "symmetric")),
    *(Case("hierarchical", {}, top_k, one_sided=True) for top_k in (None, 1)),
    *(Case(name, {"expert_capacity": 500}, layout="batched") for name in ("all_to_all", "symmetric")),
    *(Case(name, SENT, scheme="fp8_row") for name in ("all_to_all", "symmetric")),
    *(Case(name, CHUNK, scheme="int4_g32") for name in ("all_to_all", "symmetric")),
    *(Case(name, STATIC) for name in ("all_to_all_fixed", "symmetric")),
    *(Case(name, {}, width=H - 1) for name in ("all_gather", "all_to_all")),
    *(Case("all_to_all", options, workspace=False) for options in ({}, CHUNK)),
    Case("all_to_all", SENT, scheme="int4_g32", workspace=False),
]


@pytest.mark.parametrize(("ranks", "cases"), [(1, ALONE), (3, OVER_RANKS)], ids=["alone", "over-ranks"])
def test_what_a_forward_holds_is_what_its_plan_says(ranks: int, cases: list[Case], seed: int) -> None:
    for found in run_ranks(planned_and_measured, ranks, args=(seed, cases), timeout=120):
        for case, (plan, peak) in zip(cases, found, strict=True):
            assert abs(plan - peak) <= 0.01 * peak, (case, plan, peak)
