"""epmoe under the names of transformers' own registries computes what transformers' eager experts compute."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", minversion="5.17")

from torch import Tensor, nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

from epmoe.integrations.transformers import PRESETS, register  # noqa: E402
from epmoe.integrations.transformers.registry import experts_forward  # noqa: E402
from epmoe.testing import run_ranks  # noqa: E402
from tests.integrations.transformers_families import batch, tiny_model  # noqa: E402

# Llama 4's experts do not go through the registry.
FAMILIES = [preset.family for preset in PRESETS if preset.family != "Llama 4"]


def close(found: Tensor, expected: Tensor) -> bool:
    found, expected = found.detach().double(), expected.detach().double()
    return bool((found - expected).norm() <= 1e-5 * expected.norm())


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if type(module).__name__.endswith("Experts")}


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_implementation_gives_eager_logits_and_gradients(family, seed):
    register()
    x, results = batch(0, seed), {}
    for implementation in ("eager", "epmoe"):
        model = tiny_model(family, seed)
        model.set_experts_implementation(implementation)
        out = model(x, labels=x)
        out.loss.backward()
        results[implementation] = out.logits, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert all(("_epmoe_kernels" in vars(e)) == (implementation == "epmoe") for e in experts_of(model).values())
    (eager, expected), (ours, found) = results["eager"], results["epmoe"]
    assert close(ours, eager)
    assert found.keys() == expected.keys()
    assert not [name for name in found if not close(found[name], expected[name])]


def with_its_own_ep(rank: int, ranks: int, seed: int, shared: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients of one model under transformers' expert parallelism, the ranks sharing a batch or not."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    register()
    mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("ep", "alone"))
    plan = {}
    model = tiny_model("Qwen2-MoE", seed)
    model.set_experts_implementation("epmoe")
    for name in experts_of(model):
        plan |= {f"{name}.gate_up_proj": "grouped_gemm", f"{name}.down_proj": "grouped_gemm"}
        plan[name] = "ep_dispatch_experts"
    tp_mesh = mesh["ep"] if shared else mesh["alone"]
    apply_expert_parallelism(model, mesh["ep"], tp_mesh, plan, ep_implementation="epmoe")
    x = batch(0 if shared else rank, seed)[:, :2]  # 4 tokens over 3 ranks: one has none of a shared batch
    out = model(x, labels=x)
    (out.loss / (1 if shared else ranks)).backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if any(name.startswith(experts) for experts in experts_of(model)):
            gradients[name] = parameter.grad.full_tensor()
        else:
            gradients[name] = parameter.grad
            if not shared:
                dist.all_reduce(gradients[name])
    return out.logits.detach(), gradients


def as_documented(rank: int, ranks: int, seed: int, path: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The same of the model in `path`, loaded with a configuration of transformers alone; each rank has a batch."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    register()
    spread = DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation="epmoe")
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=spread, attn_implementation="eager")
    x = batch(rank, seed)[:, :2]
    out = model(x, labels=x)
    assert all("_epmoe_kernels" in vars(experts) for experts in experts_of(model).values())
    out.loss.backward()
    gradients = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    return out.logits.detach(), gradients


def on_two_ranks(rank: int, ranks: int, seed: int, path: str) -> list[tuple[Tensor, dict[str, Tensor]]]:
    return [with_its_own_ep(rank, ranks, seed, False), as_documented(rank, ranks, seed, path)]


def test_ep_implementation_trains_as_one_process_from_a_distributed_config_too(seed, tmp_path):
    pytest.importorskip("transformers.distributed.expert_parallel", reason="transformers before 5.23")
    tiny_model("Qwen2-MoE", seed).save_pretrained(tmp_path)
    results = run_ranks(on_two_ranks, 2, args=(seed, str(tmp_path)), timeout=90)
    model = tiny_model("Qwen2-MoE", seed)
    for rank in range(2):
        x = batch(rank, seed)[:, :2]
        out = model(x, labels=x)
        assert all(close(logits, out.logits) for logits, _ in results[rank])
        (out.loss / 2).backward()
    for _, gradients in (way for ways in results for way in ways):
        for name, parameter in model.named_parameters():
            assert close(gradients[name], parameter.grad), name


@pytest.mark.parametrize(("ranks", "shared"), [(3, True)])
def test_ep_implementation_trains_as_one_process(ranks, shared, seed):
    pytest.importorskip("transformers.distributed.expert_parallel", reason="transformers before 5.23")
    results = run_ranks(with_its_own_ep, ranks, args=(seed, shared), timeout=90)
    model = tiny_model("Qwen2-MoE", seed)
    for rank in range(1 if shared else ranks):
        x = batch(rank, seed)[:, :2]
        out = model(x, labels=x)
        assert all(close(logits, out.logits) for logits, _ in (results if shared else results[rank : rank + 1]))
        (out.loss / (1 if shared else ranks)).backward()
    for _, gradients in results:
        for name, parameter in model.named_parameters():
            assert close(gradients[name], parameter.grad), name


def test_gates_that_are_not_known_are_refused(seed):
    experts = next(iter(experts_of(tiny_model("Qwen3-MoE", seed)).values()))
    x, ids, weights = torch.randn(3, 16), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    for changed, what in (({"has_gate": False}, "no gate"), ({"has_post_expert_norm": True}, "a norm")):
        vars(experts).update({"has_gate": True, "has_post_expert_norm": False} | changed)
        with pytest.raises(ValueError, match=f"Qwen3MoeExperts has {what}"):
            experts_forward(experts, x, ids, weights)

    class Clamped(type(experts)):  # type: ignore[misc]
        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            return gate_up.clamp(max=1)

    experts.__class__ = Clamped
    vars(experts).update(has_gate=True, has_post_expert_norm=False)
    with pytest.raises(ValueError, match="Clamped has a gate of its own"):
        experts_forward(experts, x, ids, weights)
