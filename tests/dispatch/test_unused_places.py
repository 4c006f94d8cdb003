"""What places without a row hold changes no bit of outputs or gradients: capacities of fixed sizes, slots of peers,
places of the batched layout. Filled with NaN, which spreads, and with a number, which a maximum does not pass over."""

from __future__ import annotations

import itertools
import math
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epmoe.kernel
from epmoe import Activation, EPGroup, ExpertPlacement, ExpertsSpec, MoEKernel, make_dispatcher, select_experts
from epmoe.experts.base import Experts
from epmoe.testing import poison_, poisoned_empty, run_ranks
from tests.quant import test_every_dispatcher as quantized
from tests.test_kernel import batch_of, local_kernel, make_kernel

FILLS = (0.0, math.nan, 1e4)
SITUATIONS = ("a rank without tokens", "uneven")
MOVERS = (("all_to_all_fixed", False), ("symmetric", False), ("hierarchical", False), ("hierarchical", True))


def fill_slots(ep: EPGroup, value: float) -> None:
    """Every slot that this rank's peers may write to, between two operations. Kernels ask a slot's words whether they
    have arrived, so only the twins' slots may hold anything."""
    for group in dict.fromkeys((ep, ep.node_group())):  # in the same order on every rank
        dist.barrier(group=group.process_group)  # nobody is inside an operation, or has begun the next
        for channel in group.channels:
            assert not channel.words
            for half in (0, 1):
                poison_(channel.half(group.rank, half), value)
        dist.barrier(group=group.process_group)


def through_every_dispatcher(
    rank: int, ranks: int, kernels: str, movers: tuple[tuple[str, bool], ...], situations: tuple[str, ...], seed: int
) -> None:
    ep = EPGroup(timeout=60, nodes=[0, 0, 1][:ranks])
    twins = kernels == "torch"
    layouts = (("grouped", "standard"), ("batched", "batched")) if twins else (("reference", "standard"),)
    os.environ["EPMOE_CPU_KERNELS"] = kernels
    for (name, one_sided), (experts, layout) in itertools.product(movers, layouts):
        kernel, weights = make_kernel(rank, ranks, name, experts, layout, ep)
        if name == "hierarchical":
            kernel.dispatcher.one_sided = one_sided  # type: ignore[attr-defined]
        for situation in situations:
            results = []
            x, ids, p = batch_of(rank, ranks, situation, seed)
            for value in FILLS:
                leaves = [x.clone().requires_grad_(), p.clone().requires_grad_()]
                leaves += [weights.gate_up_proj, weights.down_proj]
                with poisoned_empty(value):
                    if twins:
                        fill_slots(ep, value)
                    out = kernel(leaves[0], ids, leaves[1], weights).routed
                    if twins:
                        fill_slots(ep, value)
                    results.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
            for n, (zero, nan, large) in enumerate(zip(*results, strict=True)):
                case = (name, one_sided, experts, situation, n)
                assert torch.equal(nan, zero) and torch.equal(large, zero), case
    if twins:
        groups = (ep, ep.node_group()) if ep.nodes.beside(rank) != (rank,) else (ep,)
        assert all(group.channels for group in groups), "slots were there to be filled"


def test_capacities_and_slots_without_a_row_may_hold_anything(seed: int) -> None:
    run_ranks(through_every_dispatcher, 3, args=("torch", MOVERS, SITUATIONS, seed), timeout=90)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run compiled here")
def test_rows_of_slots_that_kernels_leave_unwritten_may_hold_anything(seed: int) -> None:
    args = ("triton", MOVERS[1:2], SITUATIONS[:1], seed)
    run_ranks(through_every_dispatcher, 2, args=args, timeout=90)


# ---- places of the batched layout


def filled(tensor: torch.Tensor, unused: torch.Tensor, value: float) -> None:
    """In place, unseen by autograd, and by its counts of versions too."""
    flat = tensor.data.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor.data  # there are kernels for bytes
    flat[unused] = poison_(torch.zeros((), dtype=tensor.dtype), value).view(flat.dtype)


@pytest.fixture
def fill(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what unused places hold from here on: rows and scales before experts, their output, gradients of both."""

    def install(kernel: MoEKernel, value: float, met: list[int]) -> None:
        honest_batch, honest_output = epmoe.kernel.batch, type(kernel.experts).output

        def batch(*args: Any, **options: Any) -> Any:
            made = honest_batch(*args, **options)
            rows = made.rows
            unused = torch.arange(rows.x.shape[1]) >= rows.expert_num_tokens[:, None]
            met.append(int(unused.sum()))
            for tensor in (rows.x, rows.x_scale, rows.topk_weights):
                if tensor is not None:
                    filled(tensor, unused, value)
            if rows.x.requires_grad:
                rows.x.register_hook(lambda g: torch.where(unused[..., None], value, g))
            return made

        def output(experts: Experts, rows: Any, *args: Any, **options: Any) -> Any:
            result = honest_output(experts, rows, *args, **options)
            unused = torch.arange(rows.x.shape[1]) >= rows.expert_num_tokens[:, None]
            if result.rows.dim() == 3:
                filled(result.rows, unused, value)
            return result

        monkeypatch.setattr(epmoe.kernel, "batch", batch)
        monkeypatch.setattr(type(kernel.experts), "output", output)

    return install


@pytest.mark.parametrize("experts", ["batched", "reference"])
@pytest.mark.parametrize("weight_on_input", [False, True], ids=["", "weight on input"])
def test_places_of_the_batched_layout_without_a_row_may_hold_anything(
    experts: str, weight_on_input: bool, fill: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, ids, p = batch_of(0, 1, "uneven", seed)
    plain, weights = local_kernel(experts, "batched")
    spec = plain.experts.spec
    if weight_on_input:
        spec = ExpertsSpec(spec.activation, spec.hidden_size, spec.intermediate_size, spec.dtype, spec.device,
                           weight_on_input=True)  # fmt: skip
    results, met = [], list[int]()
    for value in FILLS:
        with monkeypatch.context():
            kernel = MoEKernel(plain.dispatcher, select_experts(spec, experts, "batched").experts, layout="batched")
            fill(kernel, value, met)
            leaves = [x.clone().requires_grad_(), p.clone().requires_grad_(), weights.gate_up_proj, weights.down_proj]
            out = kernel(leaves[0], ids, leaves[1], weights).routed
            results.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
            monkeypatch.undo()
    assert len(met) == len(FILLS) and all(met)
    for n, (zero, nan, large) in enumerate(zip(*results, strict=True)):
        assert torch.equal(nan, zero) and torch.equal(large, zero), n


@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_row", "int8_row", "int4_g32"])
def test_places_of_quantized_rows_without_a_row_may_hold_anything(
    scheme: str, fill: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    E, H, I = quantized.E, quantized.H, quantized.I  # noqa: E741
    rows = quantized.FORMATS[scheme].rows
    spec = ExpertsSpec(Activation(), H, I, torch.bfloat16, torch.device("cpu"), scheme=scheme)
    weights = quantized.quantized_weights(scheme, seed, list(range(E)))
    moves = make_dispatcher("local", None, ExpertPlacement.contiguous(E, 1), "cpu")
    results, met = [], list[int]()
    for value in FILLS:
        experts = select_experts(spec, quantized.kinds_of(scheme)[0], "batched").experts
        kernel = MoEKernel(moves, experts, layout="batched", dispatch_scheme=rows)
        fill(kernel, value, met)
        with torch.no_grad(), poisoned_empty(value):
            results.append(kernel(*quantized.batch_of(0, seed), weights).routed)
        monkeypatch.undo()
    assert len(met) == len(FILLS) and all(met)
    assert torch.equal(results[1], results[0]) and torch.equal(results[2], results[0])
