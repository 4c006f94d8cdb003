"""Under the transformers `Trainer`, two ranks of experts take the steps of one process; their checkpoint is whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from epmoe import EPGroup, MoEConfig, MoELayer
from epmoe.integrations.dcp import load_distributed
from epmoe.testing import run_ranks

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

H, ROWS, STEPS = 8, 8, 4


class Model(nn.Module):
    def __init__(self, ep: EPGroup | None, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inward = nn.Linear(H, H)
        self.moe = MoELayer(MoEConfig(H, 6, 4, 2), ep, device="cpu")

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        out = x + self.moe(self.inward(x))
        return {"loss": (out - y).square().mean(), "out": out}


def rows(seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [{"x": torch.randn(H, generator=generator), "y": torch.randn(H, generator=generator)} for _ in range(64)]


def train(rank: int, ranks: int, seed: int, folder: Path, **settings) -> tuple[list[float], list[float]]:
    """Losses and norms by step."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    from epmoe.integrations.parallel import make_mesh
    from epmoe.integrations.trainer import ExpertCallback

    mesh = make_mesh(ranks, timeout=60)
    model = Model(mesh.ep, seed)
    callback = ExpertCallback(model, mesh, max_norm=0.1, save_every=2)

    class Norms(transformers.TrainerCallback):
        found: list[float] = []

        def on_step_end(self, *_, **__) -> None:
            self.found.append(callback.norm.item())

    norms = Norms()
    arguments = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": ROWS // ranks // 2,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0,
        "save_strategy": "no",
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "ddp_find_unused_parameters": False,
        "seed": 7,
    }
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(**arguments | settings),
        train_dataset=rows(seed),
        callbacks=[callback, norms],
    )
    assert trainer.args.world_size == ranks
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], norms.found


def alone(rank: int, ranks: int, seed: int, folder: Path) -> tuple[list[float], list[float], list[str]]:
    """The same on one process, and what settings that do not fit are told."""
    messages = []
    for settings in ({"max_grad_norm": 1.0}, {"save_strategy": "steps"}):
        with pytest.raises(ValueError) as caught:
            train(rank, ranks, seed, folder, **settings)
        messages.append(str(caught.value))
    return *train(rank, ranks, seed, folder), messages


def test_two_ranks_take_the_steps_of_one_and_their_checkpoint_is_whole(tmp_path, seed):
    ((expected, expected_norms, messages),) = run_ranks(alone, 1, args=(seed, tmp_path / "one"), timeout=120)
    assert len(expected) == STEPS and min(expected_norms) > 0.1
    for losses, norms in run_ranks(train, 2, args=(seed, tmp_path / "two"), timeout=120):
        assert norms == pytest.approx(expected_norms, rel=1e-4)
        assert losses == pytest.approx(expected, rel=1e-3)  # the log rounds to four digits
    one, two = Model(None, seed + 1), Model(None, seed + 2)
    for model, folder in ((one, "one"), (two, "two")):
        assert load_distributed(tmp_path / folder / f"step-{STEPS}", model) == {"step": STEPS}
    for (name, a), b in zip(one.state_dict().items(), two.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)
    assert "max_grad_norm=1.0: must be 0" in messages[0] and "must be 'no'" in messages[1]
