"""What one stack of one size saves, with dcp or as safetensors, every other loads; and it trains on the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException

from epmoe import EPGroup, MoEConfig, MoELayer, RouterConfig
from epmoe.integrations.checkpoint import load_checkpoint, save_checkpoint
from epmoe.integrations.dcp import TrainingState, load_distributed, save_distributed
from epmoe.integrations.gradients import clip_grad_norm_, expert_parameters, reduce_expert_gradients
from epmoe.integrations.parallel import MoEMesh, data_parallel, fully_shard_moe, make_mesh
from epmoe.testing import run_ranks

H, I, E, K, ROWS = 8, 6, 6, 2, 8
EXTRA = {"step": 2, "names": ["a"]}
UNEVEN = {1: ((5, 0, 3, 1, 4, 2),), 2: ((4, 1, 0, 5), (2, 3)), 4: ((3,), (0, 5), (1, 2), (4,))}


class Model(nn.Module):
    def __init__(
        self, ep: EPGroup | None, seed: int, placement="contiguous", experts: int = E, device: str = "cpu"
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inward = nn.Linear(H, H, dtype=torch.float64, device=device)
        router = RouterConfig(scoring="sigmoid", selection_bias=True, dtype=torch.float64)
        config = MoEConfig(H, I, experts, K, expert_bias=True, router=router, placement=placement)
        self.moe = MoELayer(config, ep, device=device, dtype=torch.float64)
        self.moe.router.selection_bias.uniform_(-0.1, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inward(x)
        return x + self.moe(x)


def build(mesh: MoEMesh | None, stack: str, seed: int, placement="contiguous"):
    """Model, what to call, optimizer. "meta" is FSDP without ever having had the whole model."""
    model = Model(mesh and mesh.ep, seed, placement, device="meta" if stack == "meta" else "cpu")
    called: nn.Module = model
    if mesh is not None and stack == "ddp":
        called = data_parallel(model, mesh)
    elif mesh is not None:
        called = fully_shard_moe(model, mesh)
    if stack == "meta":
        model.to_empty(device="cpu")
    return model, called, torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.9))


def train(model, called, optimizer, mesh: MoEMesh | None, stack: str, steps) -> list[float]:
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if mesh else (0, 1)
    losses = []
    for number in steps:
        x = torch.randn(ROWS, H, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        loss = (called(x[rank * ROWS // ranks : (rank + 1) * ROWS // ranks]) - 1).square().mean()
        loss.backward()
        if mesh and stack == "ddp":
            reduce_expert_gradients(model, mesh.ep, replicas=mesh.replicas)
        clip_grad_norm_(model, mesh and mesh.ep, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach() / ranks
        if mesh:
            dist.all_reduce(total)
        losses.append(total.item())
    return losses


def save(rank: int, ranks: int, directories: dict[tuple[str, int], Path], seed: int) -> None:
    for (stack, ep_ranks), directory in directories.items():
        mesh = make_mesh(ep_ranks, timeout=60)
        parts = build(mesh, stack, seed)
        train(*parts, mesh, stack, range(2))
        parts[2].param_groups[0]["lr"] = 5e-3
        save_distributed(directory, parts[1], parts[2], EXTRA)
        save_checkpoint(directory / "plain", parts[0], mesh.ep, parts[2], EXTRA, replicas=mesh.replicas)


def load(rank: int, ranks: int, loads: list[tuple[Path, str, int]], seed: int) -> list[tuple]:
    results = []
    for directory, stack, ep_ranks in loads:
        mesh = make_mesh(ep_ranks, timeout=60)
        model, called, optimizer = build(mesh, stack, seed + 1, UNEVEN[ep_ranks])
        if directory.name == "plain":
            extra = load_checkpoint(directory, model, mesh.ep, optimizer, replicas=mesh.replicas)
        else:
            extra = load_distributed(directory, called, optimizer)
        rate = optimizer.param_groups[0]["lr"]
        results.append((extra, rate, train(model, called, optimizer, mesh, stack, range(2, 5))))
    return results


def alone(seed: int) -> list[float]:
    model, called, optimizer = build(None, "", seed)
    train(model, called, optimizer, None, "", range(2))
    optimizer.param_groups[0]["lr"] = 5e-3
    return train(model, called, optimizer, None, "", range(2, 5))


def check_entries(directory: Path) -> None:
    """Each expert is there once, under its own id."""
    saved = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    for name, parameter in expert_parameters(Model(None, 0)).items():
        for expert in range(E):
            state = f"training.optimizer.state.{name}.{expert}"
            for key in (f"training.model.{name}.{expert}", f"{state}.exp_avg", f"{state}.exp_avg_sq"):
                assert saved[key].size == parameter.shape[1:]
                assert sum(torch.Size(c.sizes).numel() for c in saved[key].chunks) == parameter[0].numel()
        assert f"training.model.{name}" not in saved and f"training.model.{name}.{E}" not in saved
    assert "training.model.moe.router.selection_bias" in saved


def test_any_stack_and_size_goes_on_from_what_any_other_saved_with_the_same_losses(tmp_path, seed):
    saved = {("fsdp", 2): tmp_path / "fsdp2", ("ddp", 4): tmp_path / "ddp4", ("fsdp", 1): tmp_path / "fsdp1"}
    run_ranks(save, 4, args=(saved, seed), timeout=120)
    for directory in saved.values():
        check_entries(directory)
    one = tmp_path / "one"
    expected = alone(seed)
    trained = build(None, "", seed)
    train(*trained, None, "", range(2))
    trained[2].param_groups[0]["lr"] = 5e-3
    save_distributed(one, trained[0], trained[2], EXTRA)
    save_checkpoint(one / "plain", trained[0], None, trained[2], EXTRA)
    fsdp2, ddp4, fsdp1 = saved.values()
    loads = {
        4: [
            (one, "fsdp", 2),
            (fsdp2, "ddp", 4),
            (ddp4, "fsdp", 1),
            (one / "plain", "fsdp", 1),
            (fsdp2 / "plain", "ddp", 2),
        ],
        2: [(fsdp2, "meta", 2), (fsdp1, "ddp", 1), (ddp4 / "plain", "meta", 1)],
    }
    for ranks, calls in loads.items():
        for results in run_ranks(load, ranks, args=(calls, seed), timeout=120):
            for call, (extra, rate, losses) in zip(calls, results, strict=True):
                assert extra == EXTRA and rate == 5e-3
                assert losses == pytest.approx(expected, rel=1e-9), call
    for directory in (*saved.values(), fsdp1 / "plain"):  # one process has it all back
        found, called, found_optimizer = build(None, "", seed + 1)
        if directory.name == "plain":
            load_checkpoint(directory, found, None, found_optimizer)
        else:
            load_distributed(directory, found, found_optimizer)
        for (name, a), b in zip(found.state_dict().items(), trained[0].state_dict().values(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, msg=name)
        assert train(found, called, found_optimizer, None, "", range(2, 5)) == pytest.approx(expected, rel=1e-9)


def refusal(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    with pytest.raises((ValueError, CheckpointException)) as caught:
        load_distributed(directory, model, optimizer)
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_missing_misshapen_or_too_much_is_refused_by_name(tmp_path, seed):
    def written(change) -> Path:
        model, called, optimizer = build(None, "", seed)
        train(model, called, optimizer, None, "", range(1))
        state = TrainingState(model, optimizer).state_dict()
        change(state)
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        dcp.save({"training": state}, checkpoint_id=directory)
        return directory

    def fresh():
        model, _, optimizer = build(None, "", seed + 1)
        return model, optimizer

    def misshape(state) -> None:
        state["model"]["moe.down_proj.3"] = torch.zeros(H, I + 1, dtype=torch.float64)

    whole = written(lambda state: None)
    load_distributed(whole, *fresh())
    message = refusal(written(lambda state: state["model"].pop("moe.down_proj.3")), *fresh())
    assert "moe.down_proj.3" in message and "Missing key" in message
    message = refusal(written(misshape), *fresh())
    assert "moe.down_proj.3" in message and "Size mismatch" in message
    message = refusal(written(lambda state: state["optimizer"]["state"]["moe.down_proj.2"].pop("exp_avg")), *fresh())
    assert "moe.down_proj.2.exp_avg" in message and "Missing key" in message
    assert "has 'moe.down_bias.5', which the model here has not" in refusal(whole, Model(None, seed, experts=5))
    sgd = torch.optim.SGD((model := Model(None, seed)).parameters(), lr=0.1, momentum=0.9)
    assert "exp_avg', which the optimizer here has not" in refusal(whole, model, sgd)
    message = refusal(written(lambda state: state.pop("optimizer")), *fresh())
    assert "saved without an optimizer" in message
    assert "no checkpoint" in refusal(tmp_path / "nowhere", Model(None, seed))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_saving_before_the_first_step_changes_nothing(tmp_path, seed):
    parts = build(None, "", seed)
    expected = train(*parts, None, "", range(3))
    saved, loaded = build(None, "", seed), build(None, "", seed + 1)
    save_distributed(tmp_path, saved[0], saved[2])
    load_distributed(tmp_path, loaded[0], loaded[2])
    for again in (saved, loaded):
        assert train(*again, None, "", range(3)) == expected
        for a, b in zip(again[0].parameters(), parts[0].parameters(), strict=True):
            assert torch.equal(a, b)
