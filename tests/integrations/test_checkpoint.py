"""What one set of ranks saves, any other loads bit for bit; what is not whole is refused by file and tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from epmoe import EPGroup, MoEConfig, MoELayer, RouterConfig
from epmoe.integrations import checkpoint
from epmoe.integrations.checkpoint import load_checkpoint, read_extra, save_checkpoint
from epmoe.integrations.dcp import save_distributed
from epmoe.integrations.gradients import expert_parameters, reduce_gradients
from epmoe.testing import run_ranks

H, I, E, K, ROWS = 8, 6, 6, 2, 8
UNEVEN = {
    1: ((5, 0, 3, 1, 4, 2),),
    2: ((4, 1, 0, 5), (2, 3)),
    3: ((1,), (5, 4, 0), (3, 2)),
    4: ((3,), (0, 5), (1, 2), (4,)),
}


class Model(nn.Module):
    def __init__(self, ep: EPGroup | None, seed: int, placement: Any = "contiguous") -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inward = nn.Linear(H, H)
        router = RouterConfig(scoring="sigmoid", selection_bias=True)
        self.blocks = nn.ModuleList(
            MoELayer(
                MoEConfig(H, I, E, K, expert_bias=True, router=router, placement=spec), ep, device="cpu", name=f"moe{n}"
            )
            for n, spec in enumerate((placement, "contiguous"))
        )
        self.outward = nn.Linear(H, H, bias=False)
        self.outward.weight = self.inward.weight  # tied
        for block in self.blocks:
            block.router.selection_bias.normal_()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inward(x)
        for block in self.blocks:
            x = x + block(x)
        return self.outward(x)


def optimizer_for(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    groups = [{"params": list(model.blocks.parameters()), "lr": 3e-3}, {"params": list(model.inward.parameters())}]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9), fused=kind == "fused")


def train(model: nn.Module, ep: EPGroup | None, optimizer: torch.optim.Optimizer, rank: int, ranks: int, steps) -> None:
    for number in steps:
        x = torch.randn(ROWS, H, generator=torch.Generator().manual_seed(number))
        mine = x[rank * ROWS // ranks : (rank + 1) * ROWS // ranks]
        optimizer.zero_grad()
        ((model(mine) - 1).square().sum() / ROWS).backward()
        reduce_gradients(model, ep, average=False)
        optimizer.step()


def by_expert(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """Everything this rank has; one entry for each row of an expert."""
    out: dict[str, Tensor] = {}
    named = dict(model.state_dict())
    if optimizer is not None:
        names = {id(p): name for name, p in model.named_parameters()}
        for parameter, state in optimizer.state.items():
            named |= {f"{names[id(parameter)]}@{key}": value for key, value in state.items()}
    experts = expert_parameters(model)
    for name, value in named.items():
        parameter = name.partition("@")[0]
        if parameter in experts and value.dim() > 0:
            ids = model.get_submodule(parameter.rpartition(".")[0]).local_experts
            out |= {f"{name}[{expert}]": value[row].clone() for row, expert in enumerate(ids)}
        else:
            out[name] = value.clone()
    return out


def save(rank: int, ranks: int, directory: Path, seed: int, kind: str, alone: bool = False) -> dict[str, Tensor]:
    ep = None if alone else EPGroup(device="cpu", timeout=30)
    model = Model(ep, seed)
    optimizer = optimizer_for(model, kind)
    train(model, ep, optimizer, rank, ranks, range(2))
    optimizer.param_groups[1]["lr"] = 5e-3
    save_checkpoint(directory, model, ep, optimizer, {"step": 2, "names": ["a"]})
    return by_expert(model, optimizer)


def load(rank: int, ranks: int, directory: Path, seed: int, kind: str) -> tuple[dict, dict, dict, list]:
    ep = EPGroup(device="cpu", timeout=30)
    model = Model(ep, seed + 1, UNEVEN[ranks])
    optimizer = optimizer_for(model, kind)
    extra = load_checkpoint(directory, model, ep, optimizer)
    found = by_expert(model, optimizer)
    settings = [(group["lr"], group.get("betas")) for group in optimizer.param_groups]
    train(model, ep, optimizer, rank, ranks, range(2, 4))
    return extra, found, by_expert(model), settings


@pytest.mark.parametrize(
    ("saved_by", "loaded_by", "kind"),
    [(1, 2, "adamw"), (2, 1, "adamw"), (2, 4, "fused"), (4, 3, "adamw"), (4, 2, "sgd"), (2, 2, "fused")],
)
def test_any_number_of_ranks_and_any_placement_loads_it_bit_for_bit_and_trains_on(
    saved_by, loaded_by, kind, tmp_path, seed
):
    saved: dict[str, Tensor] = {}
    for part in run_ranks(save, saved_by, args=(tmp_path, seed, kind)):
        saved |= part
    model = Model(None, seed)
    optimizer = optimizer_for(model, kind)
    train(model, None, optimizer, 0, 1, range(2))
    optimizer.param_groups[1]["lr"] = 5e-3
    train(model, None, optimizer, 0, 1, range(2, 4))
    later = by_expert(model)

    seen: set[str] = set()
    for extra, found, trained, settings in run_ranks(load, loaded_by, args=(tmp_path, seed, kind)):
        assert extra == {"step": 2, "names": ["a"]}
        assert settings == [(lr, None if kind == "sgd" else (0.8, 0.9)) for lr in (3e-3, 5e-3)]
        for name, value in found.items():
            assert torch.equal(value, saved[name]), name
        for name, value in trained.items():
            assert torch.allclose(value, later[name], rtol=1e-3, atol=2e-5), name
        seen |= found.keys()
    assert seen == saved.keys()


@pytest.fixture
def whole(tmp_path: Path, seed: int) -> Path:
    """A checkpoint by two ranks."""
    run_ranks(save, 2, args=(tmp_path, seed, "adamw"))
    return tmp_path


def files(directory: Path) -> list[Path]:
    return [directory / file["file"] for file in json.loads((directory / "index.json").read_text())["files"]]


def rewrite(path: Path, change) -> None:
    """Applies `change(tensors, experts)` to a file, and its new size to the index."""
    with safe_open(path, "pt") as file:
        experts = json.loads(file.metadata()["experts"])
    tensors = load_file(path)
    change(tensors, experts)
    save_file(tensors, path, {"experts": json.dumps(experts)})
    index = json.loads((path.parent / "index.json").read_text())
    for entry in index["files"]:
        entry["bytes"] = (path.parent / entry["file"]).stat().st_size
    (path.parent / "index.json").write_text(json.dumps(index))


def refusal(directory: Path, optimizer: bool = False) -> str:
    model = Model(None, 0)
    with pytest.raises(ValueError) as caught:
        load_checkpoint(directory, model, None, optimizer_for(model, "adamw") if optimizer else None)
    return str(caught.value)


def test_a_missing_or_double_expert_is_refused_by_layer_and_number(whole):
    second = files(whole)[1]

    def take_away(tensors, experts):
        experts["blocks.1"] = experts["blocks.1"][:-1]
        for name in tensors:
            if name.startswith("blocks.1.") and tensors[name].dim() > 0:
                tensors[name] = tensors[name][:-1].clone()

    def double(tensors, experts):
        experts["blocks.1"][0] = 1

    rewrite(second, take_away)
    message = refusal(whole)
    assert "experts [5] of layer 'blocks.1' are missing" in message and second.name in message
    rewrite(second, double)
    message = refusal(whole)
    assert "expert 1 of layer 'blocks.1' is there twice" in message and second.name in message


@pytest.mark.parametrize("name", ["outward.weight", "blocks.0.down_proj", "blocks.1.router.selection_bias"])
def test_a_missing_misshapen_or_unexpected_tensor_is_refused_by_file_and_name(name, whole):
    path = files(whole)[0]

    def misshape(tensors, experts):
        tensors[name] = tensors[name][..., :-1].clone()

    def rename(tensors, experts):
        tensors[f"{name}.other"] = tensors.pop(name)

    rewrite(path, misshape)
    message = refusal(whole)
    assert path.name in message and repr(name) in message and "has shape" in message
    rewrite(path, rename)
    message = refusal(whole)
    assert path.name in message and repr(f"{name}.other") in message and "not in the model" in message
    rewrite(path, lambda tensors, experts: tensors.pop(f"{name}.other"))
    message = refusal(whole)
    assert path.name in message and repr(name) in message and "is missing" in message


def test_optimizer_state_that_is_missing_or_does_not_agree_is_refused(whole):
    def older(tensors, experts):
        tensors["blocks.0.down_proj@step"] -= 1

    rewrite(files(whole)[1], older)
    assert "'blocks.0.down_proj@step'" in refusal(whole, optimizer=True)
    rewrite(files(whole)[1], lambda tensors, experts: tensors.pop("blocks.0.down_proj@exp_avg"))
    message = refusal(whole, optimizer=True)
    assert files(whole)[1].name in message and "'blocks.0.down_proj@exp_avg' is missing" in message
    load_checkpoint(whole, Model(None, 0), None)  # the model itself is whole
    save_checkpoint(whole, Model(None, 0), None)
    assert "saved without an optimizer" in refusal(whole, optimizer=True)


def test_a_file_that_is_cut_short_gone_or_no_index_is_refused(whole):
    first, second = files(whole)
    data = second.read_bytes()
    second.write_bytes(data[:-1])
    assert f"{second} has {len(data) - 1} bytes, must have {len(data)}" in refusal(whole)
    second.unlink()
    assert f"{second} is missing" in refusal(whole)
    second.write_bytes(b"\xff" * len(data))
    assert f"{second}: no file of a checkpoint" in refusal(whole)
    (whole / "index.json").write_text("{")
    assert "index.json: no JSON" in refusal(whole)
    (whole / "index.json").unlink()
    assert "index.json is not there" in refusal(whole)
    with pytest.raises(ValueError, match="index.json is not there"):
        read_extra(whole)


@pytest.mark.parametrize("broken", ["save_file", "_replace"])
def test_a_save_that_breaks_off_leaves_the_checkpoint_before_it_and_the_next_one_clears_up(
    broken, whole, seed, monkeypatch
):
    before = by_expert(Model(None, 0))
    load_checkpoint(whole, (model := Model(None, 0)), None)
    before = by_expert(model)

    def die(*args: Any) -> None:
        raise KeyboardInterrupt

    kept = files(whole)
    (whole / "rank-00007-of-00008-0123456789ab.safetensors").write_bytes(b"of a run that was killed")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint, broken, die)
        save_checkpoint(whole, Model(None, seed + 5), None, extra={"step": 3})
    assert files(whole) == kept
    assert load_checkpoint(whole, (model := Model(None, 0)), None)["step"] == 2
    for name, value in by_expert(model).items():
        assert torch.equal(value, before[name]), name
    save_checkpoint(whole, model, None, extra={"step": 4})
    assert read_extra(whole) == {"step": 4}
    assert {path.name for path in whole.iterdir()} == {"index.json", *(path.name for path in files(whole))}


def failing(rank: int, ranks: int, directory: Path) -> tuple[str, str]:
    ep = EPGroup(device="cpu", timeout=30)
    model = Model(ep, 0)
    messages = []
    if rank == 1:
        checkpoint.save_file = lambda *args: (_ for _ in ()).throw(OSError("no space left"))
    try:
        save_checkpoint(directory, model, ep)
    except Exception as error:
        messages.append(f"{type(error).__name__}: {error}")
    if rank == 1:
        checkpoint.safe_open = lambda *args, **kwargs: (_ for _ in ()).throw(OSError("no such disk"))
    try:
        load_checkpoint(directory, model, ep)
    except Exception as error:
        messages.append(f"{type(error).__name__}: {error}")
    dist.barrier()
    return tuple(messages)


def test_a_rank_that_fails_makes_every_rank_fail_and_leaves_the_checkpoint_before_it(whole):
    kept = {path.name for path in whole.iterdir()}
    first, second = run_ranks(failing, 2, args=(whole,))
    assert "rank 1 failed: OSError: no space left" in first[0] and second[0] == "OSError: no space left"
    assert "rank 1 failed: OSError: no such disk" in first[1] and second[1] == "OSError: no such disk"
    assert {path.name for path in whole.iterdir()} == kept


def reads(rank: int, ranks: int, directory: Path) -> tuple[set[str], dict[str, int]]:
    """Tensors read whole, and the rows read of others."""
    names: set[str] = set()
    rows: dict[str, int] = {}

    class Watched:
        def __init__(self, path, framework):
            self.file = safe_open(path, framework)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *args):
            return self.file.__exit__(*args)

        def __getattr__(self, name):
            return getattr(self.file, name)

        def get_tensor(self, name):
            names.add(name)
            return self.file.get_tensor(name)

        def get_slice(self, name):
            found = self.file.get_slice(name)

            class Slice:
                get_shape = staticmethod(found.get_shape)

                def __getitem__(self, row):
                    rows[name] = rows.get(name, 0) + 1
                    return found[row]

            return Slice()

    checkpoint.safe_open = Watched
    ep = EPGroup(device="cpu", timeout=30)
    model = Model(ep, 0, UNEVEN[ranks])
    load_checkpoint(directory, model, ep, optimizer_for(model, "adamw"))
    return names, rows


def test_a_rank_reads_no_rows_but_its_own_experts(whole):
    for rank, (names, rows) in enumerate(run_ranks(reads, 3, args=(whole,))):
        assert not {
            name for name in names if name.split(".")[-1].startswith(("gate_up", "down_")) and "@step" not in name
        }
        assert rows["blocks.0.gate_up_proj"] == len(UNEVEN[3][rank])
        assert rows["blocks.0.down_bias@exp_avg_sq"] == len(UNEVEN[3][rank])


def test_state_that_is_neither_of_the_parameters_shape_nor_a_scalar_is_refused(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.state[model.weight]["history"] = torch.zeros(5)
    with pytest.raises(ValueError, match=r"'history' of 'weight' is a tensor \(5,\)"):
        save_checkpoint(tmp_path, model, None, optimizer)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(4, 7))], lr=1.0)
    with pytest.raises(ValueError, match=r"shape \(4, 7\) that is not the model's"):
        save_checkpoint(tmp_path, model, None, optimizer)
    assert not list(tmp_path.iterdir())


def test_extra_that_is_no_plain_data_and_other_kinds_of_arguments_are_refused_by_name(tmp_path):
    model = nn.Linear(3, 2)
    for call, said in (
        (lambda: save_checkpoint(tmp_path, model, None, extra={"x": torch.ones(2)}), r"extra\['x'\] is a Tensor"),
        (lambda: save_checkpoint(tmp_path, model, None, extra=[1]), r"extra=\[1\]: must be a dict"),
        (lambda: save_checkpoint(tmp_path, model, 3), "ep=3: must be the EPGroup"),
        (lambda: load_checkpoint(tmp_path, model, "ep"), "ep='ep': must be the EPGroup"),
        (lambda: save_distributed(tmp_path, model, extra={"x": {1, 2}}), r"extra\['x'\]={1, 2}: must be plain JSON"),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    assert not list(tmp_path.iterdir())
