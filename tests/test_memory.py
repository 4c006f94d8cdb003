"""`MoEKernel.memory_plan`: what it foresees is what the allocator sees."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from epmoe import (
    Activation,
    EPGroup,
    ExpertPlacement,
    ExpertsSpec,
    ExpertWeights,
    MoEKernel,
    make_dispatcher,
    select_experts,
)
from epmoe.capabilities import KINDS
from epmoe.comm.memory import STEPS, MemoryPlan, buffer
from epmoe.comm.workspace import Workspace
from epmoe.dispatch.base import Traffic
from epmoe.quant.formats import FORMATS
from epmoe.testing import run_ranks
from tests.test_kernel import K, local_kernel, make_kernel


def test_the_peak_is_the_step_that_holds_most() -> None:
    plan = MemoryPlan(
        (
            buffer("a", (1000,), torch.uint8, "dispatch", "experts"),
            buffer("b", (3, 100), torch.float32, "experts"),
            buffer("c", (5000,), torch.uint8, "sum"),
            buffer("d", (1,), torch.int64),
            buffer("e", (512,), torch.uint8, "reduce", "combine"),
        )
    )
    assert [plan.during(step) for step in STEPS] == [1536, 3072, 1024, 1024, 5632]
    assert plan.peak == 5632
    for line in ("a (dispatch, experts)", "in all during sum", "peak"):
        assert line in str(plan)


def test_experts_that_plan_nothing_are_refused_and_those_that_do_are_named() -> None:
    for scheme in (None, *FORMATS):
        spec = ExpertsSpec(Activation(), 64, 64, torch.bfloat16, torch.device("cpu"), scheme=scheme)
        named, refused = [], ""
        for kind in KINDS.values():
            if kind.monolithic or scheme not in kind.schemes:
                continue
            moves = make_dispatcher("local", None, ExpertPlacement.contiguous(7, 1), "cpu")
            kernel = MoEKernel(moves, kind(spec))
            try:
                assert kernel.memory_plan(8, K).peak > 0
                named.append(kind.name)
            except ValueError as error:
                refused = str(error)
        assert named, scheme
        way_out = "memory_plan needs experts=" + " or ".join(map(repr, named))
        assert refused.endswith(f" allocate as they go: {way_out}")


def plans(rank: int, ranks: int) -> dict[str, dict[str, int]]:
    """Bytes by buffer, 8 tokens of width 16 in float32, K = 2, two ranks of which this one has 3 or 4 experts."""
    ep = EPGroup()
    found = {}
    for name in ("all_gather", "all_to_all", "all_to_all_fixed"):
        kernel, _ = make_kernel(rank, ranks, name, "grouped", "standard", ep)
        found[name] = {b.name: b.nbytes for b in kernel.memory_plan(8, K).buffers}
        moved = kernel.memory_plan(8, K, traffic=Traffic(9, 9, 12))
        assert moved.peak <= kernel.memory_plan(8, K).peak
        quantized, _ = make_kernel(rank, ranks, name, "grouped", "standard", ep, dispatch_scheme="fp8_row")
        found[name + " fp8_row"] = {b.name: b.nbytes for b in quantized.memory_plan(8, K).buffers}
    return found


def test_every_collective_dispatcher_plans_the_bytes_of_its_messages() -> None:
    found = run_ranks(plans, 2)[0]
    row, values = 16 * 4 + 16, 16 * 4  # with two ids and two weights, padded to 16 bytes; without
    rows = {"all_gather": (8, 16, 16), "all_to_all": (16, 16, 16), "all_to_all_fixed": (18, 18, 18)}
    for name, (sent, received, back) in rows.items():
        want = {"rows sent": sent * row, "rows received": received * row, "rows that came back": back * values}
        want["output"] = 8 * values
        want["reduced rows sent back"] = received * values
        for buffer_name, nbytes in want.items():
            assert found[name][buffer_name] == -(-nbytes // 512) * 512, (name, buffer_name)
        small = 16 + -(-(2 * 2 + 1) * 4 // 16) * 16  # eight-bit values, a scale more
        assert found[f"{name} fp8_row"]["rows received"] == -(-received * small // 512) * 512
        assert found[f"{name} fp8_row"]["rows dequantized"] == -(-received * values // 512) * 512


def test_sizes_that_no_call_can_have_are_refused() -> None:
    kernel, _ = local_kernel("grouped", "standard")
    for sizes in ((-5, 2), (4, 0), (4, 8)):
        with pytest.raises(ValueError, match=rf"num_tokens={sizes[0]}, top_k={sizes[1]}"):
            kernel.memory_plan(*sizes)


# ---- against the allocator


def gpu_kernel(rank: int, ranks: int, dispatcher: str, experts: str, layout: str, tokens: int, **options: Any) -> Any:
    h, i, e, k = 2048, 768, 32, 4
    ep = EPGroup() if ranks > 1 else None
    placement = ExpertPlacement.contiguous(e, ranks)
    moves = make_dispatcher(dispatcher, ep, placement, "cuda", max_tokens_per_rank=tokens)
    spec = ExpertsSpec(Activation(), h, i, torch.bfloat16, torch.device("cuda"))
    kernel = MoEKernel(moves, select_experts(spec, experts, layout).experts, layout=layout, **options)
    local = placement.num_local(rank)
    w1 = torch.randn(local, 2 * i, h, device="cuda", dtype=torch.bfloat16)
    weights = ExpertWeights(w1, torch.randn(local, h, i, device="cuda", dtype=torch.bfloat16))
    x = torch.randn(tokens, h, device="cuda", dtype=torch.bfloat16)
    ids = torch.rand(tokens, e, device="cuda").argsort(1)[:, :k].int()
    return kernel, (x, ids, torch.rand(tokens, k, device="cuda"), weights)


def planned_and_measured(
    rank: int, ranks: int, dispatcher: str, experts: str, layout: str, planned: bool, options: dict[str, Any]
) -> tuple[int, int]:
    tokens = 4096
    kernel, args = gpu_kernel(rank, ranks, dispatcher, experts, layout, tokens, **options)
    with torch.no_grad():
        kernel.workspace = None
        handle = kernel(*args).layout  # compiles
        traffic = None
        if dispatcher == "all_to_all":
            traffic = Traffic(handle.send_index.shape[0], handle.num_rows, handle.max_assignments)
        elif dispatcher == "hierarchical":
            sent = sum(handle.numbers(kernel.dispatcher.ep).passed_on)  # of one node
            traffic = Traffic(sent, handle.num_rows, handle.max_assignments)
        kernel.workspace = Workspace(torch.device("cuda")) if planned else None
        del handle
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        plan = kernel.memory_plan(tokens, args[1].shape[1], traffic=traffic)
        # slots are there already, and not of torch's allocator
        stays = sum(b.nbytes for b in plan.buffers if b.name.startswith("slots"))
        assert (stays > 0) == (dispatcher == "symmetric")
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = kernel(*args)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        del out
    return plan.peak - stays, peak


CASES = [
    ("grouped", "standard", {}),
    ("batched", "batched", {"expert_capacity": 1024}),
    ("grouped", "standard", {"chunk_tokens": 1024}),
]


@pytest.mark.gpu
@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize(("experts", "layout", "options"), CASES)
def test_the_predicted_peak_is_the_allocators_on_one_gpu(
    experts: str, layout: str, options: dict[str, Any], planned: bool
) -> None:
    args = ("local", experts, layout, planned, options)
    ((plan, peak),) = run_ranks(planned_and_measured, 1, args=args, backend="nccl", timeout=120)
    assert abs(plan - peak) <= 0.04 * peak, (plan, peak)


def every_case(rank: int, ranks: int, cases: list[tuple[str, dict[str, Any]]]) -> list[tuple[int, int]]:
    return [planned_and_measured(rank, ranks, name, "grouped", "standard", True, options) for name, options in cases]


@pytest.mark.gpu2
@pytest.mark.parametrize(
    "dispatchers", [["all_to_all", "all_to_all_fixed", "all_gather"], ["symmetric", "hierarchical"]], ids=str
)
def test_the_predicted_peak_is_the_allocators_on_two_gpus(dispatchers: list[str]) -> None:
    manners: list[dict[str, Any]] = [{}, {"chunk_tokens": 1024}, {"dispatch_scheme": "fp8_block"}]
    cases = [(name, options) for name in dispatchers for options in manners]
    for found in run_ranks(every_case, 2, args=(cases,), backend="nccl", timeout=200):
        for case, (plan, peak) in zip(cases, found, strict=True):
            assert abs(plan - peak) <= 0.04 * peak, (case, plan, peak)
