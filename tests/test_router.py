"""The `Router` module: its linear map, what a forward computes and saves, selection bias, casts and meta tensors."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from epmoe.config import RouterConfig
from epmoe.ops import route as ops_route
from epmoe.router import Router, router_z_loss, update_selection_bias
from tests.router_cases import NAN, SCORINGS, E, K, relative


@pytest.mark.parametrize("bias", [False, True])
def test_router_is_a_full_precision_linear_map_under_autocast(bias, seed):
    torch.manual_seed(seed)
    router = Router(RouterConfig(bias=bias), 64, 10, 3, dtype=torch.bfloat16)
    assert (router.bias is not None) == bias and router.selection_bias is None
    if bias:
        nn.init.normal_(router.bias)
    x = torch.randn(33, 64, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing = router(x)
    want = x.double() @ router.weight.double().T + (router.bias.double() if bias else 0)
    assert routing.logits.dtype == routing.topk_weights.dtype == torch.float32
    assert relative(routing.logits, want) < 1e-6
    (routing.topk_weights.square().sum()).backward()
    assert all(p.grad.dtype == torch.bfloat16 and p.grad.norm() > 0 for p in router.parameters())
    assert routing.logits.shape == (33, 10)
    assert router(x, topk_ids=routing.topk_ids.flip(-1)).topk_ids.tolist() == routing.topk_ids.flip(-1).tolist()


def test_the_linear_map_and_one_kernel_are_all_that_a_forward_computes(monkeypatch):
    """Scores and logits wait until they are read."""

    class Computed(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket not in (torch.ops.aten.t, torch.ops.aten.detach):
                names.append(func.overloadpacket._qualified_op_name)
            return func(*args, **(kwargs or {}))

    monkeypatch.setenv("EPMOE_CPU_KERNELS", "triton")
    launches, names = [], []
    monkeypatch.setattr(
        ops_route, "_route_triton", lambda *a: launches.append(a) or (torch.zeros(5, K), torch.ones(5, K))
    )
    router = Router(RouterConfig(scoring="sigmoid", selection_bias=True), 8, E, K)
    with torch.no_grad(), Computed():
        routing = router(torch.randn(5, 8))
    names.remove("aten::randn")
    assert names == ["aten::mm", "epmoe::route"] and len(launches) == 1
    torch.testing.assert_close(routing.scores, routing.logits.sigmoid())


@pytest.mark.parametrize("scoring", SCORINGS)
def test_a_forced_forward_saves_the_tensors_that_the_free_one_saved(scoring):
    """What torch.utils.checkpoint demands of a recomputation."""
    router = Router(RouterConfig(scoring=scoring, selection_bias=True, num_groups=4, topk_groups=2), 8, E, K)
    x, saved = torch.randn(5, 8), []
    ids = router(x).topk_ids
    for forced in (None, ids):
        shapes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=shapes: s.append((t.shape, t.dtype)), lambda t: t):
            router(x, topk_ids=forced, token_mask=torch.ones(5, dtype=torch.bool))
        saved.append(shapes)
    assert saved[0] == saved[1] and saved[0]


def test_nan_padding_under_a_token_mask_reaches_no_gradient(seed):
    torch.manual_seed(seed)
    router = Router(RouterConfig(bias=True), 8, 6, 2)
    x = torch.randn(5, 8)
    x[3] = NAN
    x.requires_grad_()
    routing = router(x, token_mask=torch.arange(5) != 3)
    assert routing.topk_ids[3].tolist() == [-1, -1]
    (routing.topk_weights.square().sum() + router_z_loss(routing)).backward()
    assert all(p.grad.isfinite().all() for p in router.parameters())
    assert x.grad.isfinite().all() and (x.grad[3] == 0).all() and x.grad[0].norm() > 0


def test_bias_update_moves_by_the_sign_of_exact_integer_differences():
    router = Router(RouterConfig(scoring="sigmoid", selection_bias=True), 4, 4, 1)
    big = 2**40  # fp32 would see four equal counts
    update_selection_bias(router, torch.tensor([big + 1, big - 1, big, big]), 0.5)
    assert router.selection_bias.tolist() == [-0.5, 0.5, 0.0, 0.0]
    update_selection_bias(router, torch.tensor([0, 9, 1, 1], dtype=torch.int32), 0.25)
    assert router.selection_bias.tolist() == [-0.25, 0.25, 0.25, 0.25]
    update_selection_bias(router, torch.zeros(4, dtype=torch.int64), 0.25)
    assert router.selection_bias.tolist() == [-0.25, 0.25, 0.25, 0.25]


def test_bias_updates_balance_a_lopsided_router(seed):
    generator = torch.Generator().manual_seed(seed)
    router = Router(RouterConfig(scoring="sigmoid", selection_bias=True), 16, 8, 2)
    x = torch.randn(512, 16, generator=generator) + 0.5
    first = router(x).tokens_per_expert()
    for _ in range(200):
        update_selection_bias(router, router(x).tokens_per_expert(), 0.01)
    last = router(x).tokens_per_expert()
    assert last.max() - last.min() < (first.max() - first.min()) / 2 or last.max() - last.min() < 24


def test_selection_bias_keeps_its_fp32_bits_through_casts_and_loads():
    router = Router(RouterConfig(scoring="sigmoid", selection_bias=True), 8, 6, 2)
    exact = torch.arange(6) * 0.1 + 1e-6
    router.selection_bias.copy_(exact)
    model = nn.Sequential(router)
    for cast in (lambda m: m.to(torch.bfloat16), nn.Module.half, nn.Module.double, copy.deepcopy, nn.Module.bfloat16):
        model = cast(model)
        assert model[0].selection_bias.dtype == torch.float32 and torch.equal(model[0].selection_bias, exact)
        assert "selection_bias" in dict(model[0].named_buffers())
    assert model[0].weight.dtype == torch.bfloat16
    state = model.state_dict()
    assert torch.equal(state["0.selection_bias"], exact)
    half = {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}
    model.load_state_dict(half, assign=True)
    assert model[0].selection_bias.dtype == torch.float32
    model.load_state_dict(state)
    assert torch.equal(model[0].selection_bias, exact)


def test_meta_construction_materialises_into_the_same_kind_of_router():
    with torch.device("meta"):
        router = Router(RouterConfig(scoring="sigmoid", bias=True, selection_bias=True), 400, 32, 2)
    assert router.weight.is_meta and router(torch.empty(3, 400, device="meta")).topk_ids.shape == (3, 2)
    router.to(torch.bfloat16).to_empty(device="cpu")
    for tensor in (*router.parameters(), *router.buffers()):
        tensor.data.fill_(NAN)
    router.reset_parameters()
    assert router.selection_bias.dtype == torch.float32 and router.weight.dtype == torch.bfloat16
    assert router.selection_bias.tolist() == router.bias.tolist() == [0.0] * 32
    assert router.weight.float().std().item() == pytest.approx(400**-0.5, rel=0.1)


SOFTMAX = RouterConfig()


def biased_router() -> Router:
    return Router(RouterConfig(selection_bias=True), 4, 4, 1)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Router(SOFTMAX, 0, 4, 1), r"hidden_size=0: must be an int > 0"),
        (lambda: Router(SOFTMAX, 4, 4, 5), r"top_k=5: must be in \[1, 4\]"),
        (lambda: Router(SOFTMAX, 4, 4, 1)(torch.zeros(2, 3)), r"x has shape \[2, 3\]: must be \[M, H=4\]"),
        (lambda: Router(SOFTMAX, 4, 4, 1)(torch.zeros(1, 2, 4)), r"x has shape \[1, 2, 4\]: must be \[M, H=4\]"),
        (
            lambda: Router(SOFTMAX, 4, 4, 1)(torch.zeros(2, 4), token_mask=torch.ones(1, dtype=torch.bool)),
            r"token_mask is torch.bool \[1\]",
        ),
        (
            lambda: update_selection_bias(Router(SOFTMAX, 4, 4, 1), torch.zeros(4).long(), 0.1),
            r"router has no selection_bias: set RouterConfig.selection_bias=True",
        ),
        (
            lambda: update_selection_bias(biased_router(), torch.zeros(3).long(), 0.1),
            r"tokens_per_expert has shape \[3\]: must be \[E=4\]",
        ),
        (
            lambda: update_selection_bias(biased_router(), torch.zeros(4), 0.1),
            r"tokens_per_expert has dtype torch.float32: must be int32 or int64",
        ),
        (
            lambda: update_selection_bias(biased_router(), torch.zeros(4).long(), NAN),
            r"rate=nan: must be finite and at least 0",
        ),
    ],
)
def test_a_mistake_is_a_value_error_that_names_it(make, message):
    with pytest.raises(ValueError, match=message):
        make()
