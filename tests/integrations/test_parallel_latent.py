"""Layers with `latent_size` under FSDP2: projections sharded over all ranks, the experts between over their column."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from epmoe import EPGroup, MoEConfig, MoELayer, RouterConfig
from epmoe.integrations.gradients import clip_grad_norm_, expert_parameters
from epmoe.integrations.parallel import fully_shard_moe, make_mesh
from epmoe.testing import run_ranks

H, I, E, K, LATENT, ROWS, STEPS, NORM = 8, 6, 6, 2, 4, 5, 3, 0.5


class Model(nn.Module):
    def __init__(self, ep: EPGroup | None, seed: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inward = nn.Linear(H, H, dtype=dtype)
        router = RouterConfig(dtype=torch.promote_types(dtype, torch.float32))
        config = MoEConfig(H, I, E, K, router=router, latent_size=LATENT, num_shared_experts=1, expert_bias=True)
        self.moe = MoELayer(config, ep, device="cpu", dtype=dtype)
        self.outward = nn.Linear(H, 3, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inward(x)
        return self.outward(x + self.moe(x))


def tokens(rank: int, step: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed + 10 * step + rank)
    x = torch.randn(ROWS, H, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (ROWS,), generator=generator)


def whole(model: nn.Module) -> dict[str, Tensor]:
    experts, out = expert_parameters(model), {}
    for name, parameter in model.named_parameters():
        value = (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()
        ids = model.get_submodule("moe").local_experts if name in experts else [None]
        out |= {f"{name}[{id_}]": value if id_ is None else value[row] for row, id_ in enumerate(ids)}
    return out


def train(model: nn.Module, ep: EPGroup | None, ranks: list[int], seed: int) -> tuple[list[float], list[float]]:
    optimizer, losses, norms = torch.optim.AdamW(model.parameters(), lr=1e-2), [], []
    for step in range(STEPS):
        x, y = (torch.cat(parts) for parts in zip(*(tokens(rank, step, seed) for rank in ranks), strict=True))
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        norms.append(float(clip_grad_norm_(model, ep, NORM)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def sharded(rank: int, ranks: int, seed: int) -> Any:
    mesh = make_mesh(2, timeout=60)
    model = Model(mesh.ep, seed)
    fsdp = fully_shard_moe(model, mesh)
    assert model.moe.latent_down is not None and model.moe.latent_up is not None
    sizes = [p.to_local().shape[0] for p in (model.moe.latent_down.weight, model.moe.latent_up.weight)]
    losses, norms = train(fsdp, mesh.ep, [rank], seed)

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mixed = fully_shard_moe(Model(mesh.ep, seed, torch.float32), mesh, mp_policy=policy)
    assert isinstance(mixed, Model) and mixed.moe.latent_up is not None
    out = mixed(torch.randn(3, H))
    out.float().square().mean().backward()
    gradients = [p.grad for p in mixed.parameters()]
    fine = out.dtype == torch.bfloat16 and all(g is not None and g.to_local().isfinite().all() for g in gradients)
    return losses, norms, whole(fsdp), sizes, fine


def test_four_ranks_train_as_one_process_does(seed: int) -> None:
    model = Model(None, seed)
    losses, norms = train(model, None, [0, 1, 2, 3], seed)
    assert min(norms) > NORM / 20
    expected = whole(model)
    results = run_ranks(sharded, 4, args=(seed,), timeout=120)
    for step, loss in enumerate(losses):
        assert abs(sum(each[0][step] for each in results) / 4 - loss) < 1e-9
    for _, found, parameters, sizes, fine in results:
        assert sizes == [LATENT // 4, H // 4] and fine
        assert torch.allclose(torch.tensor(found), torch.tensor(norms), rtol=1e-9)
        assert parameters and all(torch.allclose(p, expected[name], atol=1e-9) for name, p in parameters.items())
