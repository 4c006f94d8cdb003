"""`MoEKernel.from_logits`: routing and then the kernel, or both in one by monolithic experts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from epmoe import MoEConfig, MoEKernel, MoELayer, RouterConfig, route
from epmoe.experts import EXPERTS
from epmoe.testing import poisoned_empty
from tests.test_kernel import E, H, K, batch_of, local_kernel, relative


@pytest.mark.parametrize("name", [name for name, cls in EXPERTS.items() if None in cls.schemes])
@pytest.mark.parametrize("on_input", [False, True])
def test_from_logits_is_routing_and_then_the_kernel(name: str, on_input: bool, seed: int) -> None:
    kernel, weights = local_kernel("reference", "standard")
    spec = dataclasses.replace(kernel.experts.spec, weight_on_input=on_input)
    experts = EXPERTS[name](spec)
    g = torch.Generator().manual_seed(seed)
    x, logits = torch.randn(11, H, generator=g), torch.randn(11, E, generator=g)
    logits[3] = float("nan")  # a token without a usable expert
    bias = torch.randn(E, generator=g)
    router = RouterConfig(scoring="sigmoid", renormalize=True, scaling_factor=2.5)
    routing = route(logits, router, K, selection_bias=bias)
    reference = MoEKernel(kernel.dispatcher, EXPERTS["reference"](spec))
    with torch.no_grad(), poisoned_empty():
        want = reference(x, routing.topk_ids, routing.topk_weights, weights).routed
        result = MoEKernel(kernel.dispatcher, experts).from_logits(
            x, logits, weights, router=router, top_k=K, selection_bias=bias, shared_experts=lambda: x + 1
        )
    assert relative(result.routed, want) < 1e-5 and torch.equal(result.shared, x + 1)
    assert bool((result.routed[3] == 0).all()) and (result.layout is None) == experts.monolithic


def test_monolithic_kernels_refuse_what_they_cannot_do(seed: int) -> None:
    kernel, weights = local_kernel("reference", "standard")
    alone = MoEKernel(kernel.dispatcher, EXPERTS["monolithic"](kernel.experts.spec))
    x, ids, p = batch_of(0, 1, "uneven", seed)
    rules: Any = {"router": RouterConfig(), "top_k": K}
    with pytest.raises(ValueError, match=r"'monolithic' route by themselves: call from_logits\(x, logits"):
        alone(x, ids, p, weights)
    with torch.no_grad(), pytest.raises(ValueError, match="show no routing, so layout can't apply"):
        alone.from_logits(x, torch.randn(len(x), E), weights, layout=None, **rules)
    with pytest.raises(ValueError, match="dispatch_scheme='fp8_row'.*get no rows sent"):
        MoEKernel(kernel.dispatcher, alone.experts, dispatch_scheme="fp8_row")


def test_a_layer_of_monolithic_experts_equals_one_that_shows_its_routing(seed: int) -> None:
    torch.manual_seed(seed)
    config = MoEConfig(H, 24, E, K, num_shared_experts=1, latent_size=8, router=RouterConfig(selection_bias=True))
    plain = MoELayer(config, dtype=torch.float32)
    fused = MoELayer(dataclasses.replace(config, experts="monolithic"), dtype=torch.float32)
    fused.load_state_dict(plain.state_dict())
    x = torch.randn(2, 5, H)
    mask = torch.rand(2, 5) < 0.7
    with torch.no_grad():
        assert relative(fused(x, token_mask=mask), plain(x, token_mask=mask)) < 1e-5
        with pytest.raises(ValueError, match="experts='monolithic' show no routing.*return_routing=True"):
            fused(x, return_routing=True)
    with pytest.raises(ValueError, match="gradient"):
        fused(x)
    with pytest.raises(ValueError, match="router of your own"):
        MoELayer(fused.config, router=lambda x: (x, x))
