"""Strategies of weighting and summing: what experts declare, what combine makes of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from epmoe import MoEKernel
from epmoe.capabilities import LAYOUTS
from epmoe.comm.workspace import Workspace
from epmoe.dispatch.base import DispatcherCapabilities
from epmoe.dispatch.inputs import Pending
from epmoe.dispatch.local import LocalDispatcher
from epmoe.dispatch.reduce import ExpertOutput, weight_and_reduce
from epmoe.experts import EXPERTS
from epmoe.testing import poisoned_empty
from tests.test_kernel import H, K, batch_of, local_kernel, relative


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("on_input", [False, True])
def test_every_experts_output_reduces_to_what_calling_them_gives(layout: str, on_input: bool, seed: int) -> None:
    for name, cls in EXPERTS.items():
        if layout not in cls.layouts or cls.monolithic or None not in cls.schemes:
            continue
        kernel, weights = local_kernel(name, layout)
        spec = dataclasses.replace(kernel.experts.spec, weight_on_input=on_input)
        experts = cls(spec)
        batch = batch_of(0, 1, "uneven", seed)
        joined = MoEKernel(kernel.dispatcher, experts, layout=layout)
        want = MoEKernel(kernel.dispatcher, EXPERTS["reference"](spec))(*batch, weights).routed
        for grad in (True, False):
            with torch.set_grad_enabled(grad), poisoned_empty():
                assert relative(joined(*batch, weights).routed, want) < 1e-5, (name, grad)


class SummingDispatcher(LocalDispatcher):
    """A local dispatcher that weights and sums by itself, and remembers what it was asked to."""

    name = "local"
    capabilities = DispatcherCapabilities(exact_pairs=True, reduces=True)

    def combine_async(self, rows: Any, handle: Any, *, out: torch.Tensor | None = None) -> Pending[torch.Tensor]:
        self.asked = rows.strategy
        return Pending.done(weight_and_reduce(rows))


@pytest.mark.parametrize(("experts", "layout"), [("grouped", "standard"), ("batched", "batched")])
def test_a_dispatcher_that_sums_is_given_the_pairs_where_no_gradient_needs_them(
    experts: str, layout: str, seed: int
) -> None:
    kernel, weights = local_kernel(experts, layout)
    plain = kernel.dispatcher
    summing = SummingDispatcher(None, plain.owner, plain.expert_map, plain.num_local)
    joined = MoEKernel(summing, kernel.experts, layout=layout, workspace=Workspace(torch.device("cpu")))
    batch = batch_of(0, 1, "uneven", seed)
    with torch.no_grad():
        assert torch.equal(joined(*batch, weights).routed, kernel(*batch, weights).routed)
    assert summing.asked == "delegate"


def test_an_output_that_contradicts_itself_is_refused() -> None:
    rows, slot = torch.randn(3, H), torch.zeros(2, K, dtype=torch.int32)
    for kwargs, message in [
        ({"strategy": "sum"}, "strategy='sum': must be no_op, contiguous, batched, delegate"),
        ({"strategy": "contiguous"}, "'contiguous' without slot"),
        ({"slot": slot}, "'no_op' with slot"),
        ({"topk_weights": torch.ones(2, K)}, "weighted already"),
        ({"strategy": "batched", "slot": slot}, r"rows have shape \(3, 16\), must be \(3,\)-D"),
    ]:
        with pytest.raises(ValueError, match=message):
            ExpertOutput(rows, **kwargs)  # type: ignore[arg-type]
