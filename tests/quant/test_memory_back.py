"""`memory_plan` of rows that go back quantized: buffers by name and byte, and against the tensors that a forward on CPU
makes and sends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from epmoe import EPGroup, ExpertWeights
from epmoe.comm.memory import BLOCK
from epmoe.dispatch.base import Traffic
from epmoe.testing import run_ranks
from tests.dispatch.test_quantized_training import CAP, H, K, batch_of, kernel_of
from tests.test_kernel import local_kernel
from tests.test_memory import every_case, planned_and_measured

NAMES = ("all_gather", "all_to_all", "all_to_all_fixed", "hierarchical")


def rounded_up(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK


class Made(TorchDispatchMode):
    """Shapes and dtypes of the tensors that operations give, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[tuple[tuple[int, ...], torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor):
                self.tensors.append((tuple(t.shape), t.dtype))
        return out


def planned(rank: int, ranks: int, seed: int, scheme: str) -> dict[str, Any]:
    """By dispatcher: bytes by buffer of the plan for the rows that moved, a peak for any routing, what was sent
    back, and the tensors that combine made."""
    ep, found = EPGroup(timeout=60), {}
    honest = EPGroup.all_to_all_async
    sent: list[tuple[int, ...]] = []

    def exchange(self: EPGroup, buffer: Tensor, *args: Any, **options: Any) -> Any:
        if buffer.dtype == torch.uint8:
            sent.append(tuple(buffer.shape))
        return honest(self, buffer, *args, **options)

    EPGroup.all_to_all_async = exchange  # type: ignore[method-assign]
    try:
        for name in NAMES:
            kernel, weights = kernel_of(rank, ranks, name, "grouped", "standard", ep, seed, combine_scheme=scheme)
            x, ids, p = batch_of(rank, seed)
            with torch.no_grad():
                rows = kernel.dispatcher.dispatch(x, ids, p)
                output = kernel.experts.output(rows, ExpertWeights(**weights))
                sent.clear()
                with Made() as made:
                    kernel.dispatcher.combine_async(output, rows.handle, scheme=scheme).wait()
            handle, tokens = rows.handle, CAP
            moved = Traffic(tokens, handle.num_rows, handle.max_assignments)
            found[name] = {
                "moved": {b.name: (b.nbytes, b.steps) for b in kernel.memory_plan(tokens, K, traffic=moved).buffers},
                "any": kernel.memory_plan(tokens, K).peak,
                "rows": handle.num_rows,
                "sent": list(sent),
                "made": made.tensors,
            }
    finally:
        EPGroup.all_to_all_async = honest  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("scheme", ["fp8_block", "int8_row"])
def test_every_buffer_of_rows_that_go_back_quantized_is_named_and_counted(scheme: str, seed: int) -> None:
    dtype, scales = (torch.float8_e4m3fn, -(-H // 128)) if scheme == "fp8_block" else (torch.int8, 1)
    message = -(-H // 16) * 16 + -(-4 * scales // 16) * 16
    for found in run_ranks(planned, 2, args=(seed, scheme)):
        for name, case in found.items():
            rows, plan = case["rows"], case["moved"]
            want = {
                "reduced rows": (rows * H * 4, ("reduce", "combine")),
                "reduced rows, quantized": (rows * H, ("combine", "sum")),
                "scales of reduced rows": (rows * scales * 4, ("combine", "sum")),
                "reduced rows sent back": (rows * message, ("combine",)),
            }
            for buffer, (nbytes, steps) in want.items():
                assert plan[buffer] == (rounded_up(nbytes), steps), (name, buffer)
            assert plan["rows that came back"][0] % BLOCK == 0 and case["any"] > 0
            # what was there on CPU, where the same code ran
            assert case["sent"] == [(rows, message)], name
            for made in (((rows, H), dtype), ((rows, scales), torch.float32)):
                assert made in case["made"], (name, made)


def test_wide_rows_are_planned_as_messages_as_they_lie(seed: int) -> None:
    kernel, _ = local_kernel("grouped", "standard")
    assert {b.name for b in kernel.memory_plan(8, 2).buffers}.isdisjoint({"reduced rows", "reduced rows, quantized"})


def test_one_process_plans_the_rounding_of_its_rows(seed: int) -> None:
    kernel, _ = kernel_of(0, 1, "local", "grouped", "standard", None, seed, combine_scheme="fp8_row")
    plan = {b.name: (b.nbytes, b.steps) for b in kernel.memory_plan(8, K).buffers}
    assert plan["reduced rows"] == (rounded_up(8 * H * 4), ("combine",))
    assert plan["reduced rows, quantized"] == (rounded_up(8 * H), ("combine",))
    assert plan["scales of reduced rows"] == (rounded_up(8 * 4), ("combine",))


# ---- against the allocator


BACK = ("grouped", "standard", True, {"combine_scheme": "fp8_block"})


@pytest.mark.gpu2
def test_the_predicted_peak_is_the_allocators_where_rows_go_back_quantized() -> None:
    cases = [(name, BACK[3] | sent) for name in NAMES for sent in ({}, {"dispatch_scheme": "fp8_block"})]
    for found in run_ranks(every_case, 2, args=(cases,), backend="nccl", timeout=200):
        for case, (plan, peak) in zip(cases, found, strict=True):
            assert abs(plan - peak) <= 0.04 * peak, (case, plan, peak)


@pytest.mark.gpu
def test_the_predicted_peak_is_the_allocators_on_one_gpu_too() -> None:
    ((plan, peak),) = run_ranks(planned_and_measured, 1, args=("local", *BACK), backend="nccl", timeout=120)
    assert abs(plan - peak) <= 0.04 * peak, (plan, peak)
