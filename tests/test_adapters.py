"""`MoELayer.add_lora`: adapters as parameters, chosen per token, equal at any EP size, saved and reduced as experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import epmoe
from epmoe import EPGroup, MoEConfig, MoELayer
from epmoe.experts.lora import merge_adapter
from epmoe.integrations.checkpoint import load_checkpoint, save_checkpoint
from epmoe.integrations.gradients import clip_grad_norm_, expert_parameters, reduce_gradients, replicated_parameters
from epmoe.testing import RankFailed, run_ranks

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_experts": 6, "top_k": 2}
NAMES, RANK, ALPHA = ["french", "german", "short"], [3, 2, 1], [6.0, 1.0, 0.5]


def make(ep: EPGroup | None = None, seed: int = 0, filled: bool = True, **options: Any) -> MoELayer:
    """A layer with three adapters; `filled`, with updates that are not zero, the same at any EP size."""
    torch.manual_seed(seed)
    layer = MoELayer(MoEConfig(**SMALL, **options), ep, device="cpu")
    layer.add_lora(NAMES, RANK, ALPHA)
    if filled:
        g = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for parameter in (layer.lora_gate_up_b, layer.lora_down_b):
                assert parameter is not None
                whole = torch.randn(6, *parameter.shape[1:], generator=g) * 0.5
                for adapter, rank in enumerate(RANK):
                    whole[:, adapter, :, rank:] = 0
                parameter.copy_(whole[list(layer.local_experts)])
    return layer


def test_without_adapters_nothing_is_there_and_new_ones_change_nothing(seed: int) -> None:
    torch.manual_seed(seed)
    layer = MoELayer(MoEConfig(**SMALL))
    names = set(layer.state_dict())
    x = torch.randn(7, 16)
    plain = layer(x)
    assert not layer.lora_parameters() and layer.expert_lora() is None
    with pytest.raises(ValueError, match="layer 'moe': adapter_ids is given and there are no adapters: call add_lora"):
        layer(x, adapter_ids=0)
    layer.add_lora(2, 4, 8.0)
    assert layer.kernel(x.device, x.dtype).experts.spec.lora  # chosen anew: not every kind takes adapters
    assert set(layer.state_dict()) - names == set(layer.lora_parameters()) and len(layer.lora_parameters()) == 4
    torch.testing.assert_close(layer(x, adapter_ids=1), plain)
    assert layer.lora_gate_up_a is not None and layer.lora_gate_up_a.std() > 0.1
    assert [tuple(adapter) for adapter in layer.lora_adapters] == [("0", 4, 8.0), ("1", 4, 8.0)]


@pytest.mark.parametrize("experts", ["reference", "grouped"])
def test_each_token_meets_its_own_adapter(experts: str, seed: int) -> None:
    layer = make(seed=seed, experts=experts, num_shared_experts=1, latent_size=8)
    x = torch.randn(2, 4, 16)
    ids = torch.tensor([[-1, 0, 1, 2], [2, 1, 0, -1]], dtype=torch.int32)
    y = layer(x, adapter_ids=ids)
    for adapter in range(-1, 3):
        alone = layer(x, adapter_ids=adapter)
        torch.testing.assert_close(y[ids == adapter], alone[ids == adapter])
        if adapter >= 0:
            assert (alone - layer(x)).norm() / alone.norm() > 0.01
    torch.testing.assert_close(layer(x), layer(x, adapter_ids=-1), rtol=0, atol=0)
    assert layer(torch.randn(0, 16), adapter_ids=0).shape == (0, 16)


def test_one_adapter_equals_the_layer_it_is_merged_into(seed: int) -> None:
    layer, merged = make(seed=seed), MoELayer(MoEConfig(**SMALL))
    weights = merge_adapter(layer.expert_weights(), 0)
    merged.load_experts({"gate_up_proj": weights.gate_up_proj, "down_proj": weights.down_proj})
    merged.router.load_state_dict(layer.router.state_dict())
    x = torch.randn(9, 16)
    torch.testing.assert_close(layer(x, adapter_ids=0), merged(x))


def test_training_adapters_alone_leaves_frozen_parameters_without_a_gradient(seed: int) -> None:
    for experts in ("grouped", "reference"):
        layer = make(seed=seed, filled=False, experts=experts)
        layer.requires_grad_(False)
        for parameter in layer.lora_parameters().values():
            parameter.requires_grad_()
        optimizer = torch.optim.Adam(layer.lora_parameters().values(), lr=0.02)
        x, target = torch.randn(40, 16), torch.randn(40, 16)
        losses = []
        for _ in range(30):
            optimizer.zero_grad()
            loss = (layer(x, adapter_ids=1) - target).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.8 * losses[0], experts
        for name, parameter in layer.named_parameters():
            assert (parameter.grad is None) == (name not in layer.lora_parameters()), name
        for name, parameter in layer.lora_parameters().items():
            untouched = parameter[:, [0, 2]]
            assert name.endswith("_a") or not untouched.any(), name
            assert parameter.grad is not None and not parameter.grad[:, [0, 2]].any(), name
        a, b = layer.lora_down_a, layer.lora_down_b
        assert a is not None and b is not None  # rank 2 of 3: padding stays zero, whatever the optimizer
        assert a[:, 1, :2].all() and not a[:, 1, 2:].any() and b[:, 1, :, :2].any() and not b[:, 1, :, 2:].any()


# ---- over ranks


def batch(rank: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed + 10 + rank)
    tokens = [5, 0, 6, 2][rank]
    ids = torch.randint(-1, 3, (tokens,), generator=g).int()
    return torch.randn(tokens, 16, generator=g), torch.full_like(ids, -1) if rank == 2 else ids


def step(rank: int, ranks: int, seed: int, dispatcher: str, experts: str, together: int) -> dict[str, Any]:
    """Gradients of one step and the clipped norm; `together` ranks' batches are in one process when there is one."""
    ep = EPGroup(timeout=60) if dispatcher != "local" else None
    layer = make(ep, seed, dispatcher=dispatcher, experts=experts, max_tokens_per_rank=13)
    if ranks == 1:
        x, ids = (torch.cat(parts) for parts in zip(*(batch(r, seed) for r in range(together)), strict=True))
        y = layer(x, adapter_ids=ids)
    else:
        x, ids = batch(rank, seed)
        y = layer(x, adapter_ids=None if rank == 2 else ids)  # a rank whose requests have no adapter need not know
    y.square().sum().backward()
    reduce_gradients(layer, ep, average=False)
    norm = clip_grad_norm_(layer, ep, 1.0)
    experts_here = {n: p.grad for n, p in expert_parameters(layer).items()}
    assert set(layer.lora_parameters()) < set(experts_here)
    assert not set(layer.lora_parameters()) & set(replicated_parameters(layer))
    return {"local": list(layer.local_experts), "y": y.detach(), "norm": norm, "grads": experts_here}


@pytest.mark.parametrize(("dispatcher", "experts"), [("all_to_all", "grouped"), ("all_to_all_fixed", "reference")])
@pytest.mark.parametrize("ranks", [2, 4])
def test_any_number_of_ranks_gives_the_step_of_one(ranks: int, dispatcher: str, experts: str, seed: int) -> None:
    want = step(0, 1, seed, "local", "reference", ranks)
    parts = run_ranks(step, ranks, args=(seed, dispatcher, experts, ranks), timeout=120)
    y = torch.cat([part["y"] for part in parts])
    assert (y - want["y"]).norm() <= 1e-5 * want["y"].norm()
    for part in parts:
        torch.testing.assert_close(part["norm"], want["norm"], rtol=1e-4, atol=0)
    for name, whole in want["grads"].items():
        got = torch.empty_like(whole)
        for part in parts:
            got[part["local"]] = part["grads"][name]
        assert (got - whole).norm() <= 2e-5 * whole.norm(), name


def disagree(rank: int, ranks: int) -> None:
    MoELayer(MoEConfig(**SMALL), EPGroup(timeout=20), device="cpu").add_lora(2, 4 + rank, 8.0)


def test_ranks_that_add_other_adapters_are_told() -> None:
    with pytest.raises(RankFailed, match="add_lora of MoELayer 'moe'.*rank"):
        run_ranks(disagree, 2, timeout=60)


def build(rank: int, ranks: int, seed: int) -> tuple[list[int], dict[str, Tensor]]:
    layer = make(EPGroup() if ranks > 1 else None, seed, filled=False)
    return list(layer.local_experts), {n: p.detach() for n, p in layer.expert_parameters().items()}


def test_ranks_seeded_alike_begin_with_the_same_adapters_at_any_ep_size(seed: int) -> None:
    _, whole = build(0, 1, seed)
    assert not torch.equal(whole["lora_down_a"][0], whole["lora_down_a"][1])
    for experts, part in run_ranks(build, 2, args=(seed,)):
        for name, tensor in part.items():
            assert torch.equal(tensor, whole[name][experts]), name


def save(rank: int, ranks: int, directory: Path, seed: int) -> None:
    ep = EPGroup(device="cpu", timeout=30)
    layer = make(ep, seed)
    optimizer = torch.optim.AdamW(layer.lora_parameters().values())
    x, ids = batch(rank, seed)
    layer(x, adapter_ids=ids).square().sum().backward()
    optimizer.step()
    save_checkpoint(directory, layer, ep, optimizer)


def load(rank: int, ranks: int, directory: Path, seed: int) -> tuple[list[int], dict[str, Tensor]]:
    ep = EPGroup(device="cpu", timeout=30)
    layer = make(ep, seed + 1, placement="strided")
    optimizer = torch.optim.AdamW(layer.lora_parameters().values())
    load_checkpoint(directory, layer, ep, optimizer)
    tensors = {n: p.detach() for n, p in layer.lora_parameters().items()}
    tensors |= {f"{n}@exp_avg": optimizer.state[p]["exp_avg"] for n, p in layer.lora_parameters().items()}
    return list(layer.local_experts), tensors


def test_adapters_and_their_optimizer_state_load_at_any_ep_size(tmp_path: Path, seed: int) -> None:
    run_ranks(save, 2, args=(tmp_path, seed), timeout=60)
    ((order, whole),) = run_ranks(load, 1, args=(tmp_path, seed), timeout=60)
    assert order == list(range(6)) and whole["lora_down_b"].any() and whole["lora_down_b@exp_avg"].any()
    for experts, part in run_ranks(load, 4, args=(tmp_path, seed), timeout=60):
        for name, tensor in part.items():
            assert torch.equal(tensor, whole[name][experts]), name


# ---- dtypes, meta, graphs of torch


def test_adapters_of_another_dtype_are_converted_and_the_scaling_is_not(seed: int) -> None:
    torch.manual_seed(seed)
    layer = MoELayer(MoEConfig(**SMALL), dtype=torch.bfloat16)
    layer.add_lora(1, 3, 1.0, dtype=torch.float32)
    assert all(p.dtype == torch.float32 for p in layer.lora_parameters().values())
    x = torch.randn(5, 16).bfloat16()
    layer(x, adapter_ids=0).float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.lora_parameters().values())
    layer.to(torch.bfloat16)
    lora = layer.expert_lora()
    assert lora is not None and torch.equal(lora.scaling, torch.tensor([1.0 / 3]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert make(seed=seed)(torch.randn(5, 16), adapter_ids=0).dtype == torch.float32


def test_the_first_call_may_be_in_inference_mode() -> None:
    layer = make(experts="reference")
    x = torch.randn(5, 16)
    with torch.inference_mode():
        layer(x, adapter_ids=0)
    layer(x, adapter_ids=0).sum().backward()


def test_meta_construction_then_materialised_is_the_same_layer(seed: int) -> None:
    layer = MoELayer(MoEConfig(**SMALL), device="meta")
    layer.add_lora(NAMES, RANK, ALPHA)
    layer.to_empty(device="cpu")
    torch.manual_seed(seed)
    layer.reset_parameters()
    direct = MoELayer(MoEConfig(**SMALL))
    direct.add_lora(NAMES, RANK, ALPHA)
    torch.manual_seed(seed)
    direct.reset_parameters()
    for (name, a), (_, b) in zip(layer.named_parameters(), direct.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_checkpointing_recomputes_with_the_same_adapters(seed: int) -> None:
    layer = make(seed=seed)
    x, ids = torch.randn(6, 16), torch.tensor([0, 1, 2, -1, 0, 1], dtype=torch.int32)
    grads = []
    for how in (lambda f, x: f(x), epmoe.checkpoint):
        layer.zero_grad()
        how(lambda x: layer(x, adapter_ids=ids), x.clone().requires_grad_()).square().sum().backward()
        grads.append({name: p.grad.clone() for name, p in layer.named_parameters()})
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad)


def test_one_graph_holds_a_layer_with_adapters(seed: int) -> None:
    layer = make(seed=seed, experts="grouped")
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for tokens in (5, 8):
        x, ids = torch.randn(tokens, 16), torch.randint(-1, 3, (tokens,), dtype=torch.int32)
        results = []
        for f in (layer, compiled):
            layer.zero_grad()
            y = f(x, adapter_ids=ids)
            y.square().sum().backward()
            results.append([y.detach(), *(p.grad.clone() for p in layer.parameters())])
        for a, b in zip(*results, strict=True):
            assert (a - b).norm() <= 1e-5 * b.norm()


def test_mistakes_are_named() -> None:
    for match, args in [
        (r"adapters=\['a', 'a'\]: must be a number > 0, or distinct names", (["a", "a"], 4, 8.0)),
        ("adapters=0: must be", (0, 4, 8.0)),
        (r"rank=\[4, 0\]: must be > 0, one for each of 2 adapters", (2, [4, 0], 8.0)),
        (r"alpha=\[1.0\]: must be > 0, one for each of 2 adapters", (2, 4, [1.0])),
    ]:
        with pytest.raises(ValueError, match=match):
            MoELayer(MoEConfig(**SMALL)).add_lora(*args)
    layer = MoELayer(MoEConfig(**SMALL, experts="torch_grouped"))
    with pytest.raises(ValueError, match="experts='torch_grouped': no LoRA adapters here; use experts='"):
        layer.add_lora(1, 4, 8.0)
    layer(torch.randn(3, 16))  # as before
    layer = make()
    with pytest.raises(ValueError, match=r"has adapters already \(french, german, short\)"):
        layer.add_lora(1, 4, 8.0)
    x = torch.randn(3, 16)
    for match, ids in [
        (r"adapter_ids=3: must be in \[-1, 3\)", 3),
        (r"adapter_ids is torch.int64 \(3,\).*must be int32 \(3,\)", torch.zeros(3, dtype=torch.int64)),
        (r"adapter_ids is torch.int32 \(2,\)", torch.zeros(2, dtype=torch.int32)),
    ]:
        with pytest.raises(ValueError, match=match):
            layer(x, adapter_ids=ids)
