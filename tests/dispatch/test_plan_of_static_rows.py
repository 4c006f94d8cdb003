"""`memory_plan` of rows that come to dispatch quantized, by a scale fixed before: buffers by name and byte for every
dispatcher, against the tensors that a forward of a layer makes and holds, and against the slots that peers write to."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch

from epmoe import EPGroup, MoEConfig, MoELayer, QuantConfig
from epmoe.comm.memory import BLOCK, STEPS
from epmoe.comm.workspace import Workspace
from epmoe.dispatch import DISPATCHERS, Dispatcher, HierarchicalDispatcher
from epmoe.dispatch.base import Traffic
from epmoe.kernel import KernelOutput
from epmoe.quant.rows import QuantizedRows, quantize_rows_by, row_dtype
from epmoe.testing import run_ranks
from tests.test_memory import gpu_kernel

H, I, E, K, M, C = 48, 32, 6, 2, 5, 7  # noqa: E741


def rounded_up(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK


def forward_of(name: str, scheme: str, scales: str, ep: EPGroup | None) -> dict[str, Any]:
    """The plan of a layer, and its quantized rows as dispatch got them and as they are when combine begins."""
    quant = QuantConfig(scheme, scales=scales, experts="grouped_fp8" if scheme == "fp8_row" else "grouped_int8")
    kind, _, one_sided = name.partition(", ")
    config = MoEConfig(H, I, E, K, dispatcher=kind, max_tokens_per_rank=C, quant=quant)
    layer = MoELayer(config, ep, dtype=torch.bfloat16)
    if scales == "static":
        layer.set_input_scale(0.02)
    kernel = layer.kernel(torch.device("cpu"), torch.bfloat16)
    if one_sided:
        assert isinstance(kernel.dispatcher, HierarchicalDispatcher)
        kernel.dispatcher.one_sided = True
    stored_in = ep.node_group() if ep is not None and one_sided else ep
    plan = kernel.memory_plan(M, K)
    given: list[Any] = []
    alive: list[tuple[tuple[int, ...], torch.dtype]] = []
    honest = kernel.dispatcher.dispatch_async, kernel.dispatcher.combine_async

    def dispatch(x: Any, *args: Any, **options: Any) -> Any:
        given.append((x.values.shape, x.values.dtype, x.scales.shape) if isinstance(x, QuantizedRows) else None)
        return honest[0](x, *args, **options)

    def combine(*args: Any, **options: Any) -> Any:
        gc.collect()
        rows = [o for o in gc.get_objects() if isinstance(o, QuantizedRows) and o.values.shape == (M, H)]
        alive.extend((tuple(o.values.shape), o.values.dtype) for o in rows)
        return honest[1](*args, **options)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(kernel.dispatcher, "dispatch_async", dispatch)
        patch.setattr(kernel.dispatcher, "combine_async", combine)
        layer(torch.randn(M, H).bfloat16())
    return {
        "plan": {b.name.partition(", latency")[0]: (b.nbytes, b.steps) for b in plan.buffers},
        "given": given,
        "alive": alive,
        "received": kernel.dispatcher.traffic(M, K).received,
        "slots": [] if stored_in is None else [c.buffers[stored_in.rank].numel() for c in stored_in.channels],
    }


def every_plan(rank: int, ranks: int) -> dict[tuple[str, str, str], Any]:
    flat, nodes = EPGroup(timeout=60), EPGroup(timeout=60, nodes=[0, 0, 1])
    found = {}
    for name, scheme in itertools.product((*DISPATCHERS, "hierarchical, one-sided"), ("fp8_row", "int8_row")):
        ep = None if name == "local" else nodes if name.startswith("hierarchical") else flat
        for scales in ("static", "dynamic"):
            flat.channels.clear(), nodes.node_group().channels.clear()
            found[name, scheme, scales] = forward_of(name, scheme, scales, ep)
    return found


def test_every_dispatcher_plans_rows_of_a_fixed_scale() -> None:
    for rank, found in enumerate(run_ranks(every_plan, 3, timeout=120)):
        message = H + rounded(4 * (2 * K + 1), 16)  # eight-bit values, ids, weights and a scale
        for (name, scheme, scales), case in found.items():
            plan, static, where = case["plan"], scales == "static", (name, scheme, scales)
            values, of_rows = (rounded_up(M * H), plan.get("quantized rows")), plan.get("their scales")
            if static:  # an argument of the call, in all of it
                assert values[1] == (values[0], STEPS) and of_rows == (rounded_up(4 * M), STEPS), where
                assert case["given"] == [((M, H), row_dtype(scheme), (M, 1))], where
                assert case["alive"] == [((M, H), row_dtype(scheme))], where
            elif name == "symmetric":
                assert values[1] is None and of_rows is None and case["given"] == [None], "quantized in flight"
            else:  # in one process the experts read them as they are
                held = ("dispatch", "experts", "reduce") if name == "local" else ("dispatch",)
                assert values[1] == (values[0], held) and of_rows == (rounded_up(4 * M), held), where
                assert case["alive"] == [], where
            if name != "local":
                nbytes, steps = plan["rows received"]
                assert nbytes == rounded_up(case["received"] * message), where
                assert steps == ("dispatch", "experts", "reduce"), where
            if name == "symmetric" or (name == "hierarchical, one-sided" and rank < 2):
                slots = next(nbytes for buffer, (nbytes, _) in plan.items() if buffer.startswith("slots"))
                assert case["slots"] == [slots], "to the byte"


def rounded(number: int, step: int) -> int:
    return -(-number // step) * step


# ---- against the allocator


def planned_and_measured(rank: int, ranks: int, name: str) -> tuple[int, int]:
    tokens = 4096
    kernel, (x, ids, p, weights) = gpu_kernel(
        rank, ranks, name, "grouped", "standard", tokens, dispatch_scheme="fp8_row", quantized_before=True
    )
    scale = torch.full((1,), 0.01, device="cuda")

    def call() -> KernelOutput:
        return kernel(quantize_rows_by(x, scale, "fp8_row"), ids, p, weights)

    with torch.no_grad():
        kernel.workspace = None
        handle: Any = call().layout
        traffic = None
        if name == "all_to_all":
            traffic = Traffic(handle.send_index.shape[0], handle.num_rows, handle.max_assignments)
        kernel.workspace = Workspace(torch.device("cuda"))
        del handle
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        plan = kernel.memory_plan(tokens, ids.shape[1], traffic=traffic)
        dispatcher: Dispatcher = kernel.dispatcher
        assert any(b.name == "quantized rows" and b.steps == STEPS for b in plan.buffers)
        # slots are there already, and not of torch's allocator
        stays = sum(b.nbytes for b in plan.buffers if b.name.startswith("slots"))
        assert (stays > 0) == (dispatcher.name == "symmetric")
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = call()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        del out
    return plan.peak - stays, peak


@pytest.mark.gpu
def test_the_predicted_peak_of_static_rows_is_the_allocators_on_one_gpu() -> None:
    ((plan, peak),) = run_ranks(planned_and_measured, 1, args=("local",), backend="nccl", timeout=120)
    assert abs(plan - peak) <= 0.04 * peak, (plan, peak)


@pytest.mark.gpu2
@pytest.mark.parametrize("name", ["all_to_all", "all_to_all_fixed", "symmetric"])
def test_the_predicted_peak_of_static_rows_is_the_allocators_on_two_gpus(name: str) -> None:
    for plan, peak in run_ranks(planned_and_measured, 2, args=(name,), backend="nccl", timeout=120):
        assert abs(plan - peak) <= 0.04 * peak, (plan, peak)
