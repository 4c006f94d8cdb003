"""What callers of `MoEKernel` may pass, what they get, and what is refused: dispatch arguments, destinations, hooks."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from epmoe import EPGroup, MoEKernel
from epmoe.capabilities import LAYOUTS
from epmoe.comm.workspace import Workspace
from epmoe.dispatch import DISPATCHERS
from epmoe.dispatch.base import Dispatcher, DispatcherCapabilities
from epmoe.dispatch.inputs import ExpertInput, Pending
from epmoe.dispatch.local import LocalDispatcher
from epmoe.dispatch.reduce import ExpertOutput
from epmoe.experts import QUANTIZED_EXPERTS, ExpertWeights
from epmoe.kernel import split
from epmoe.quant.rows import ROW_SCHEMES, dequantize_rows, quantize_rows
from epmoe.quant.weights import quantize_weights
from epmoe.testing import poisoned_empty, run_ranks
from tests.test_kernel import batch_of, local_kernel, make_kernel, relative

# ---- dispatch arguments


def sent_as(rank: int, ranks: int, seed: int) -> list[Any]:
    """For every dispatcher and scheme, quantized by caller or kernel: what arrived, and whether it was computed."""
    ep = EPGroup(timeout=60)
    seen = []
    for name, scheme, by_caller in itertools.product(DISPATCHERS, ROW_SCHEMES, (True, False)):
        if (name == "local") != (ranks == 1):
            continue
        options = {} if by_caller else {"dispatch_scheme": scheme}
        kernel, weights = make_kernel(rank, ranks, name, "grouped", "standard", None if ranks == 1 else ep, **options)
        x, ids, p = batch_of(rank, ranks, "uneven", seed)
        x = x * torch.logspace(-3, 3, x.shape[0])[:, None]
        arrived: list[ExpertInput] = []
        honest = kernel._compute

        def watch(rows: ExpertInput, weights: ExpertWeights, honest=honest, arrived=arrived) -> ExpertOutput:  # type: ignore[no-untyped-def]
            arrived.append(rows)
            return honest(rows, weights)

        kernel._compute = watch  # type: ignore[method-assign]
        with torch.no_grad(), poisoned_empty():
            out = kernel(quantize_rows(x, scheme) if by_caller else x, ids, p, weights).routed
            plain, _ = make_kernel(rank, ranks, name, "grouped", "standard", None if ranks == 1 else ep)
            want = plain(dequantize_rows(quantize_rows(x, scheme), x.dtype), ids, p, weights).routed
        rows = arrived[0]
        assert rows.x_scale is not None
        seen.append(
            (name, scheme, rows.scheme, rows.x.dtype, rows.x_scale.shape, torch.equal(out, want), float(out.norm()))
        )
    return seen


@pytest.mark.parametrize("ranks", [1, 2])
def test_quantized_rows_travel_as_values_and_scales_and_are_computed_as_such(ranks: int, seed: int) -> None:
    for per_rank in run_ranks(sent_as, ranks, args=(seed,), timeout=90):
        assert len(per_rank) == 2 * len(ROW_SCHEMES) * (1 if ranks == 1 else len(DISPATCHERS) - 1)
        for name, scheme, sent, values, scales, equal, norm in per_rank:
            dtype = torch.int8 if scheme == "int8_row" else torch.float8_e4m3fn
            assert sent == scheme and values == dtype and scales[1] == 1 and equal and norm > 0, name


def adapters_arrive(rank: int, ranks: int, seed: int) -> list[Any]:
    ep = EPGroup(timeout=60)
    seen = []
    for name in DISPATCHERS:
        if (name == "local") != (ranks == 1):
            continue
        kernel, _ = make_kernel(rank, ranks, name, "reference", "standard", None if ranks == 1 else ep)
        x, ids, p = batch_of(rank, ranks, "uneven", seed)
        x[:, 0] = tag = 100 * rank + torch.arange(len(x)).float()
        rows = kernel.dispatcher.dispatch(x, ids, p, adapter_ids=tag.int())
        assert rows.adapter_ids is not None
        real = (rows.topk_ids >= 0).any(1)
        seen.append((name, bool((rows.adapter_ids[real] == rows.x[real, 0].int()).all()), int(real.sum())))
    return seen


@pytest.mark.parametrize("ranks", [1, 2])
def test_adapter_ids_stay_with_their_rows(ranks: int, seed: int) -> None:
    for per_rank in run_ranks(adapters_arrive, ranks, args=(seed,), timeout=60):
        for name, right, rows in per_rank:
            assert right and rows > 0, name


def test_ids_are_given_to_the_dispatcher_in_the_dtype_it_wants(seed: int) -> None:
    kernel, weights = local_kernel("reference", "standard")
    x, ids, p = batch_of(0, 1, "uneven", seed)
    want = kernel(x, ids, p, weights).routed
    assert torch.equal(kernel(x, ids.long(), p, weights).routed, want)
    with pytest.raises(ValueError, match="topk_ids.dtype=torch.float32: must be torch.int32"):
        kernel(x, ids.float(), p, weights)


def test_a_scheme_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="fp9"):
        local_kernel("grouped", "standard", dispatch_scheme="fp9")


def test_dispatchers_say_how_many_they_are_and_whether_their_output_is_reduced() -> None:
    kernel, _ = local_kernel("reference", "standard")
    assert kernel.dispatcher.num_dispatchers == 1 and kernel.output_is_reduced
    partial = type("Partial", (LocalDispatcher,), {"capabilities": DispatcherCapabilities(output_is_reduced=False)})
    d = kernel.dispatcher
    assert not MoEKernel(partial(None, d.owner, d.expert_map, d.num_local), kernel.experts).output_is_reduced


@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_row"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_of_a_scheme_get_rows_of_it_as_they_arrived_and_quantize_others_themselves(
    scheme: str, layout: str, seed: int
) -> None:
    kernel, weights = local_kernel("reference", "standard")
    spec = dataclasses.replace(kernel.experts.spec, dtype=torch.bfloat16, scheme=scheme)
    experts = QUANTIZED_EXPERTS["grouped_fp8"](spec)
    w1, w2 = (quantize_weights(w.detach(), scheme) for w in (weights.gate_up_proj, weights.down_proj))
    quantized = ExpertWeights(w1.values, w2.values, gate_up_scale=w1.scales, down_scale=w2.scales)
    seen: list[str | None] = []
    honest = experts.output

    def watch(rows: Any, *args: Any, **kwargs: Any) -> ExpertOutput:
        seen.append(getattr(rows, "scheme", None))
        return honest(rows, *args, **kwargs)

    experts.output = watch  # type: ignore[method-assign]
    x, ids, p = batch_of(0, 1, "uneven", seed)
    x = x.bfloat16()
    other = "fp8_row" if scheme == "fp8_block" else "fp8_block"
    with torch.no_grad():
        sent, deferred, foreign = (
            MoEKernel(kernel.dispatcher, experts, layout=layout, dispatch_scheme=s)(x, ids, p, quantized).routed
            for s in (scheme, None, other)
        )
    assert seen == [scheme, None, None]
    assert torch.equal(sent, deferred)
    assert relative(foreign, deferred) < 0.07


# ---- where the result goes


@pytest.mark.parametrize(
    ("experts", "layout"), [("grouped", "standard"), ("batched", "batched"), ("reference", "standard")]
)
@pytest.mark.parametrize("planned", [True, False])
def test_the_result_goes_where_the_caller_says(experts: str, layout: str, planned: bool, seed: int) -> None:
    workspace = Workspace(torch.device("cpu")) if planned else None
    kernel, weights = local_kernel(experts, layout, workspace=workspace)
    x, ids, p = batch_of(0, 1, "uneven", seed)
    with torch.no_grad():
        want = kernel(x, ids, p, weights).routed
        out = torch.full_like(x, float("nan"))
        assert kernel(x, ids, p, weights, out=out).routed is out and torch.equal(out, want)
        shared = kernel(x, ids, p, weights, out=out, shared_experts=lambda: x.clone()).shared
        given = x.clone()
        result = kernel(given, ids, p, weights, inplace=True, shared_experts=lambda: given.clone())
        assert result.routed is given and torch.equal(given, want)
        assert torch.equal(result.shared, x) and torch.equal(shared, x)  # shared experts saw x, not the result


def into_out(rank: int, ranks: int, seed: int) -> bool:
    ep = EPGroup(timeout=60)
    same = True
    for name in DISPATCHERS:
        if name != "local":
            kernel, weights = make_kernel(rank, ranks, name, "grouped", "standard", ep)
            x, ids, p = batch_of(rank, ranks, "uneven", seed)
            with torch.no_grad(), poisoned_empty():
                want = kernel(x, ids, p, weights).routed
                result = kernel(x, ids, p, weights, inplace=True).routed
            same &= result is x and torch.equal(x, want)
    return same


def test_the_result_replaces_x_over_two_ranks(seed: int) -> None:
    assert run_ranks(into_out, 2, args=(seed,), timeout=60) == [True, True]


def test_a_destination_that_does_not_fit_is_refused(seed: int) -> None:
    kernel, weights = local_kernel("grouped", "standard")
    x, ids, p = batch_of(0, 1, "uneven", seed)
    for options, message in [
        ({"out": x[:2]}, "out: torch.float32 .2, 16. .* must be contiguous torch.float32 .9, 16."),
        ({"out": x.double()}, "must be contiguous torch.float32"),
        ({"out": x, "inplace": True}, "give one"),
    ]:
        with torch.no_grad(), pytest.raises(ValueError, match=message):
            kernel(x, ids, p, weights, **options)
    with pytest.raises(ValueError, match="inplace while gradients are recorded"):
        kernel(x.requires_grad_(), ids, p, weights, inplace=True)
    with torch.no_grad(), pytest.raises(ValueError, match="give out="):
        kernel(quantize_rows(x, "fp8_row"), ids, p, weights, inplace=True)


# ---- hooks


def test_hooks_run_between_launch_and_wait(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def traced(self: Dispatcher, pending: Pending[Any], name: str) -> Pending[Any]:
        def finish() -> Any:
            events.append(f"{name} waited for")
            return pending.wait()

        events.append(f"{name} launched")
        return Pending(finish, lambda: events.append(f"{name} hook"))

    dispatch, combine = LocalDispatcher.dispatch_async, LocalDispatcher.combine_async
    monkeypatch.setattr(
        LocalDispatcher, "dispatch_async", lambda s, *a, **k: traced(s, dispatch(s, *a, **k), "dispatch")
    )
    monkeypatch.setattr(LocalDispatcher, "combine_async", lambda s, *a, **k: traced(s, combine(s, *a, **k), "combine"))
    kernel, weights = local_kernel("reference", "standard", shared_experts_order="during")
    compute = kernel._compute
    kernel._compute = lambda *a: (events.append("experts"), compute(*a))[1]  # type: ignore[method-assign]
    kernel(*batch_of(0, 1, "uneven", seed), weights, shared_experts=lambda: events.append("shared"))  # type: ignore[arg-type,return-value]
    assert events == [
        *("dispatch launched", "dispatch hook", "dispatch waited for", "experts"),
        *("combine launched", "shared", "combine hook", "combine waited for"),
    ]


def hooked(rank: int, ranks: int, seed: int) -> list[bool]:
    ep = EPGroup(timeout=60)
    same = []
    for name in DISPATCHERS:
        if name == "local":
            continue
        kernel, weights = make_kernel(rank, ranks, name, "reference", "standard", ep)
        x, ids, p = batch_of(rank, ranks, "uneven", seed)
        want = kernel(x, ids, p, weights).routed
        pending = kernel.dispatcher.dispatch_async(x, ids, p)
        assert pending.hook is not None
        pending.hook()
        pending.hook()  # as often as one likes
        rows = pending.wait()
        returning = kernel.dispatcher.combine_async(kernel.experts.output(rows, weights), rows.handle)
        assert returning.hook is not None
        returning.hook()
        same.append(torch.equal(returning.wait(), want))
    return same


def test_every_asynchronous_dispatcher_has_hooks_that_change_nothing(seed: int) -> None:
    assert run_ranks(hooked, 2, args=(seed,), timeout=60) == [[True] * (len(DISPATCHERS) - 1)] * 2


# ---- what no gradient, no host and no wild number may slip through


def gradient_refused(rank: int, ranks: int, seed: int) -> list[str]:
    ep = EPGroup(timeout=60)
    said = []
    for name, scheme in itertools.product(DISPATCHERS, ROW_SCHEMES):
        if name == "local":
            continue
        kernel, weights = make_kernel(rank, ranks, name, "grouped", "standard", ep, dispatch_scheme=scheme)
        x, ids, p = batch_of(rank, ranks, "uneven", seed)
        try:
            kernel(quantize_rows(x, scheme), ids, p.clone().requires_grad_(), weights)
        except ValueError as error:
            said.append(str(error))
    return said


def test_rows_quantized_by_the_caller_never_lose_a_router_s_gradient_in_silence(seed: int) -> None:
    for said in run_ranks(gradient_refused, 2, args=(seed,), timeout=60):
        assert len(said) == len(ROW_SCHEMES) * (len(DISPATCHERS) - 1)
        assert all("need" in text and "torch.no_grad()" in text for text in said)


@pytest.mark.parametrize("experts", ["grouped", "torch_grouped", "reference"])
def test_a_destination_is_refused_whoever_needs_the_gradient(experts: str, seed: int) -> None:
    kernel, weights = local_kernel(experts, "standard")
    frozen = ExpertWeights(weights.gate_up_proj.detach(), weights.down_proj.detach())
    x, ids, p = batch_of(0, 1, "uneven", seed)
    for args in ((x, ids, p, weights), (x, ids, p.clone().requires_grad_(), frozen)):
        with pytest.raises(ValueError, match="out while gradients are recorded"):
            kernel(*args, out=torch.empty_like(x))
        with pytest.raises(ValueError, match="inplace while gradients are recorded"):
            kernel(*args, inplace=True)
    assert torch.equal(kernel(x.clone(), ids, p, frozen, inplace=True).routed, kernel(x, ids, p, frozen).routed)


def test_out_in_the_memory_of_x_lets_the_shared_experts_see_x(seed: int) -> None:
    kernel, weights = local_kernel("grouped", "standard", shared_experts_order="after")
    x, ids, p = batch_of(0, 1, "uneven", seed)
    given = x.clone()
    with torch.no_grad():
        result = kernel(given, ids, p, weights, out=given.view(given.shape), shared_experts=lambda: given.clone())
    assert torch.equal(result.shared, x)


def test_a_wild_id_of_64_bits_is_no_expert(seed: int) -> None:
    kernel, weights = local_kernel("reference", "standard")
    x, ids, p = batch_of(0, 1, "uneven", seed)
    wild = torch.full_like(ids, 3, dtype=torch.int64) + 2**32
    assert bool((kernel(x, wild, p, weights).routed == 0).all())
    with pytest.raises(ValueError, match="topk_ids.dtype=torch.bool"):
        kernel(x, ids.bool(), p, weights)


def test_the_smaller_of_two_limits_on_rows_at_a_time_counts() -> None:
    both = {"overflow": "chunk", "expert_capacity": 8}
    assert local_kernel("batched", "batched", chunk_tokens=2, **both)[0].chunk_tokens == 2
    assert local_kernel("batched", "batched", chunk_tokens=9, **both)[0].chunk_tokens == 8
    with pytest.raises(ValueError, match="overflow='chunk' without expert_capacity"):
        local_kernel("batched", "batched", overflow="chunk")


def test_experts_called_by_hand_refuse_rows_they_would_misread(seed: int) -> None:
    kernel, weights = local_kernel("reference", "standard")
    x, ids, p = batch_of(0, 1, "uneven", seed)
    with torch.no_grad():
        for scheme in ROW_SCHEMES:
            rows = kernel.dispatcher.dispatch(x, ids, p, scheme=scheme)
            with pytest.raises(ValueError, match=rf"quantized \({scheme}\).*rows.dequantized\(torch.float32\)"):
                kernel.experts(rows, weights)
            kernel.experts(rows.dequantized(x.dtype), weights)
    with pytest.raises(ValueError, match="rows are torch.bfloat16, made for torch.float32"):
        kernel.experts(kernel.dispatcher.dispatch(x.bfloat16(), ids, p), weights)


def test_what_serving_leaves_behind_does_not_hinder_training(seed: int) -> None:
    space = Workspace(torch.device("cpu"))
    kernel, weights = local_kernel("batched", "batched", expert_capacity=9, overflow="drop", workspace=space)
    batch = batch_of(0, 1, "uneven", seed)
    with torch.inference_mode():
        kernel(*batch, weights)
    kernel(*batch, weights).routed.sum().backward()
    with torch.no_grad():
        kernel(*batch, weights)


def test_rounds_are_computed_as_the_whole_would_be(seed: int) -> None:
    kernel, _ = local_kernel("grouped", "standard")
    rows = kernel.dispatcher.dispatch(*batch_of(0, 1, "uneven", seed))
    parts = split(rows, 4)
    assert [part.x.shape[0] for part in parts] == [4, 4, 1]
    assert {part.expected_m for part in parts} == {-(-rows.max_assignments // rows.num_local)}
