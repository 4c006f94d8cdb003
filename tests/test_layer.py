"""`MoELayer` as a module: shared experts, latent width, masks, loading, meta, autocast, equal models at any EP size."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from epmoe import EPGroup, MoEConfig, MoELayer, Routing
from epmoe.testing import run_ranks
from tests import naive

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_experts": 6, "top_k": 2}


def expected(layer: MoELayer, x: torch.Tensor, routing: Routing) -> torch.Tensor:
    """The layer in float64, written out."""
    c, act = layer.config, layer.config.activation_function
    p = {name: t.detach().double() for name, t in layer.named_parameters()}
    x = x.detach().double().reshape(-1, c.hidden_size)
    inner = x @ p["latent_down.weight"].T if c.latent_size else x
    experts = {name: p[name] for name in ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias") if name in p}
    constants = (act.name, act.alpha, act.limit)
    y = naive.routed(
        inner, routing.topk_ids, routing.topk_weights.double(), experts, constants, c.router_weight_on_input
    )
    y = y @ p["latent_up.weight"].T if c.latent_size else y
    for s in range(c.num_shared_experts):
        for m in range(x.shape[0]):
            h = naive.activation(p["shared_experts.gate_up_proj"][s] @ x[m], *constants)
            gate = torch.sigmoid(p["shared_experts.gate"][s] @ x[m]) if c.shared_expert_gate else 1.0
            y[m] += gate * (p["shared_experts.down_proj"][s] @ h)
    return y


@pytest.mark.parametrize("options", [
    {},
    {"num_shared_experts": 1},
    {"num_shared_experts": 2, "shared_expert_gate": True, "shared_intermediate_size": 40},
    {"latent_size": 8, "num_shared_experts": 1},
    {"activation": "relu2", "num_shared_experts": 1, "latent_size": 8, "expert_bias": True},
], ids=str)  # fmt: skip
def test_shared_experts_and_latent_width_match_float64(options: dict, seed: int) -> None:
    torch.manual_seed(seed)
    layer = MoELayer(MoEConfig(**SMALL, **options))
    x = torch.randn(2, 5, 16)
    y, routing = layer(x, return_routing=True)
    want = expected(layer, x, routing)
    assert (y.double().reshape(-1, 16) - want).norm() / want.norm() < 1e-5


def test_shape_and_dtype_of_x_are_kept() -> None:
    layer = MoELayer(MoEConfig(**SMALL), dtype=torch.bfloat16)
    for shape in [(16,), (3, 16), (2, 3, 16), (2, 0, 16), (0, 16)]:
        y = layer(torch.randn(shape).bfloat16())
        assert y.shape == shape and y.dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(3, 16), (2, 3, 16)], ids=str)
def test_nothing_that_is_returned_is_a_view(shape: tuple[int, ...]) -> None:
    """FSDP2 sets a hook on each output that has a gradient, and a view loses its hooks when it is written to."""
    for options in ({}, {"num_shared_experts": 1}, {"latent_size": 8}):
        y, routing = MoELayer(MoEConfig(**SMALL, **options))(torch.randn(shape), return_routing=True)
        tensors = [y, *(t for t in vars(routing).values() if isinstance(t, torch.Tensor))]
        assert sum(t.requires_grad for t in tensors) >= 2
        assert not [t for t in tensors if t.requires_grad and t._base is not None]


def test_rows_that_do_not_lie_dense_are_taken() -> None:
    layer = MoELayer(MoEConfig(**SMALL))
    x = torch.randn(16, 7).t()
    torch.testing.assert_close(layer(x), layer(x.contiguous()))


def test_masked_tokens_get_the_shared_experts_only_and_cost_no_expert(seed: int) -> None:
    torch.manual_seed(seed)
    layer = MoELayer(MoEConfig(**SMALL, num_shared_experts=1))
    x, mask = torch.randn(4, 3, 16), torch.rand(4, 3) < 0.5
    mask[0, 0], mask[0, 1] = True, False
    y, routing = layer(x, token_mask=mask, return_routing=True)
    unmasked = layer(x)
    assert layer.shared_experts is not None
    torch.testing.assert_close(y[mask], unmasked[mask])
    torch.testing.assert_close(y[~mask], layer.shared_experts(x[~mask]))
    assert int(routing.tokens_per_expert().sum()) == int(mask.sum()) * 2


def test_a_router_of_ones_own_is_asked(seed: int) -> None:
    torch.manual_seed(seed)
    ids = torch.tensor([[0, 5], [3, -1]])
    weights = torch.tensor([[0.25, 0.5], [2.0, 9.0]])
    layer = MoELayer(MoEConfig(**SMALL), router=lambda x: (ids, weights))
    x = torch.randn(2, 16)
    y, routing = layer(x, return_routing=True)
    want = expected(layer, x, routing)
    assert (y.double() - want).norm() / want.norm() < 1e-5
    masked = layer(x, token_mask=torch.tensor([False, True]))
    assert not masked[0].any() and torch.equal(masked[1], y[1])


def test_a_router_module_of_ones_own_is_a_submodule() -> None:
    class Mine(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projection = torch.nn.Linear(16, 6)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            weights, ids = self.projection(x).softmax(-1).topk(2)
            return ids, weights

    layer = MoELayer(MoEConfig(**SMALL), router=Mine())
    layer(torch.randn(3, 16)).sum().backward()
    assert "router.projection.weight" in dict(layer.named_parameters())
    assert layer.router.projection.weight.grad.abs().sum() > 0


def test_load_experts_keeps_the_local_ones_of_full_and_sharded_tensors(seed: int) -> None:
    torch.manual_seed(seed)
    layer = MoELayer(MoEConfig(**SMALL, expert_bias=True))
    full = {name: torch.randn_like(p) for name, p in layer.expert_parameters().items()}
    assert layer.load_experts(full) == list(range(6))
    for name, parameter in layer.expert_parameters().items():
        assert torch.equal(parameter, full[name])
    shard = {"down_proj": torch.randn(2, 16, 24)}
    assert layer.load_experts(shard, expert_ids=[4, 1]) == [4, 1]
    assert torch.equal(layer.down_proj[4], shard["down_proj"][0])
    assert torch.equal(layer.down_proj[1], shard["down_proj"][1])
    assert torch.equal(layer.down_proj[0], full["down_proj"][0])


def load_on_rank(
    rank: int, world: int, full: dict[str, torch.Tensor]
) -> tuple[tuple[int, ...], list[int], torch.Tensor]:
    layer = MoELayer(MoEConfig(**SMALL, placement="strided"), EPGroup())
    loaded = layer.load_experts(full)
    return layer.local_experts, loaded, layer.down_proj.detach().clone()


def test_each_rank_loads_its_own_experts() -> None:
    full = {"gate_up_proj": torch.randn(6, 48, 16), "down_proj": torch.randn(6, 16, 24)}
    results = run_ranks(load_on_rank, 4, args=(full,))
    assert sorted(e for ids, _, _ in results for e in ids) == list(range(6))
    for ids, loaded, down in results:
        assert sorted(loaded) == sorted(ids)
        assert torch.equal(down, full["down_proj"][list(ids)])


def test_meta_construction_then_materialised_is_the_same_layer(seed: int) -> None:
    config = MoEConfig(**SMALL, num_shared_experts=1, latent_size=8)
    layer = MoELayer(config, device="meta")
    assert all(p.device.type == "meta" for p in layer.parameters())
    layer.to_empty(device="cpu")
    torch.manual_seed(seed)
    layer.reset_parameters()
    direct = MoELayer(config)
    torch.manual_seed(seed)
    direct.reset_parameters()
    for (name, a), (_, b) in zip(layer.named_parameters(), direct.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    x = torch.randn(3, 16)
    assert torch.equal(layer(x), direct(x))


def build(rank: int, world: int, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    layer = MoELayer(MoEConfig(**SMALL, num_shared_experts=1), EPGroup() if world > 1 else None)
    tensors = {name: p.detach() for name, p in layer.named_parameters()}
    return tensors | {"experts": torch.tensor(layer.local_experts)}


def test_ranks_seeded_alike_build_the_same_model_at_any_ep_size(seed: int) -> None:
    (whole,) = run_ranks(build, 1, args=(seed,))
    assert not torch.equal(whole["down_proj"][0], whole["down_proj"][1])
    for world in (2, 4):
        for part in run_ranks(build, world, args=(seed,)):
            experts = part.pop("experts").tolist()
            for name, tensor in part.items():
                local = name in ("gate_up_proj", "down_proj")
                assert torch.equal(tensor, whole[name][experts] if local else whole[name]), name


def test_autocast_computes_in_its_dtype_and_leaves_fp32_gradients(seed: int) -> None:
    torch.manual_seed(seed)
    layer = MoELayer(MoEConfig(**SMALL, num_shared_experts=1))
    x = torch.randn(9, 16, requires_grad=True)
    exact = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, routing = layer(x, return_routing=True)
    assert y.dtype == torch.float32 and routing.topk_weights.dtype == torch.float32
    assert 1e-5 < (y - exact).norm() / exact.norm() < 2e-2  # rounded to bf16, but only once or twice
    y.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


def test_experts_without_tokens_get_zero_gradients() -> None:
    def only_the_third(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([[2, -1]]).expand(len(x), 2), torch.ones(len(x), 2)

    for experts in ("reference", "grouped", "torch_grouped"):
        layer = MoELayer(MoEConfig(**SMALL, experts=experts), router=only_the_third)
        layer(torch.randn(4, 16)).sum().backward()
        for name, p in layer.expert_parameters().items():
            assert p.grad is not None, (experts, name)
            assert p.grad[2].any() and not p.grad[[0, 1, 3, 4, 5]].any(), (experts, name)


def test_zero_tokens_give_zero_gradients_to_everything() -> None:
    for experts in ("reference", "grouped", "torch_grouped"):
        layer = MoELayer(MoEConfig(**SMALL, experts=experts, num_shared_experts=1, expert_bias=True))
        x = torch.randn(0, 16, requires_grad=True)
        layer(x).sum().backward()
        assert x.grad is not None and x.grad.shape == (0, 16)
        for name, p in layer.named_parameters():
            assert p.grad is not None and not p.grad.any(), (experts, name)


def test_moving_and_converting_the_layer_keeps_it_working() -> None:
    layer = MoELayer(MoEConfig(**SMALL)).to(torch.bfloat16)
    assert layer(torch.randn(3, 16).bfloat16()).dtype == torch.bfloat16
    layer = layer.double()
    x = torch.randn(3, 16, dtype=torch.float64)
    y, routing = layer(x, return_routing=True)
    assert (y - expected(layer, x, routing)).norm() / y.norm() < 1e-6  # weights of the router are fp32


def test_state_dict_names_are_the_documented_ones() -> None:
    layer = MoELayer(MoEConfig(**SMALL, expert_bias=True, num_shared_experts=1, shared_expert_gate=True, latent_size=8))
    assert set(layer.state_dict()) == {
        "router.weight", "gate_up_proj", "down_proj", "gate_up_bias", "down_bias", "latent_down.weight",
        "latent_up.weight",
        "shared_experts.gate_up_proj", "shared_experts.down_proj", "shared_experts.gate",
    }  # fmt: skip
    assert F.linear(torch.ones(16), layer.router.weight).shape == (6,)
