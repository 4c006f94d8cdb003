"""Bench `model` on CPU: both modes beside their peers, a peer that fails or disagrees named, floors counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("transformers.distributed.expert_parallel", reason="transformers before 5.23")

from epmoe.bench import model as bench  # noqa: E402
from epmoe.bench.cli import bench_app  # noqa: E402
from epmoe.bench.model import ModelCase, floors, make_model, measure_model  # noqa: E402
from epmoe.bench.records import load  # noqa: E402
from epmoe.bench.session import Session, Settings  # noqa: E402
from epmoe.bench.shapes import named_shape  # noqa: E402
from epmoe.bench.table import tables  # noqa: E402
from epmoe.bench.timing import Ceilings  # noqa: E402
from epmoe.testing import RankFailed, run_ranks  # noqa: E402

TINY = named_shape("tiny")


def measured(tmp_path: Path, *options: str, device: str = "cpu") -> list[Any]:
    arguments = ["model", *options, "--quick", "--device", device, "--out", str(tmp_path), "--timeout", "170"]
    result = CliRunner().invoke(bench_app, arguments)
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    return [record for path in tmp_path.iterdir() for record in load(path)]


def test_training_and_decoding_are_measured_beside_all_peers(tmp_path: Path) -> None:
    options = ["--shape", "tiny", "--layers", "1", "--tokens", "24", "--rows", "3", "--context", "20"]
    train, decode = measured(tmp_path, *options)
    assert (decode["case"]["mode"], train["case"]["mode"]) == ("decode", "train")
    for record, tokens in ((decode, 3), (train, 24)):
        failed = record.get("peers_failed", {})  # torch 2.11 has no all-to-all with gradients on CPU
        assert all(n == bench.READS_COUNTS and "NotImplementedError" in why for n, why in failed.items())
        assert tuple(record["peers"]) == tuple(n for n in bench.PEERS[record["case"]["mode"]] if n not in failed)
        assert record["tokens_per_s"] == pytest.approx(2 * tokens / record["median_us"] * 1e6, rel=0.01)
        assert record["case"]["dispatcher"] == "all_to_all" and 0 < record["floor_us"]
    assert decode["graphs"] == [] and set(decode["no_graph"]) == {"epmoe", *decode["peers"]}
    assert "only CUDA has graphs" in decode["no_graph"]["epmoe"] and "graphs" not in train
    assert "tokens/s" in tables([decode, train], "2 × cpu")[0].header


def with_peers_that_fail(rank: int, ranks: int) -> Any:
    arranged = bench._arranged

    def some(name: str, model: Any, case: Any, session: Any) -> Any:
        if name == "transformers_all_to_all" and rank == 1:
            raise NotImplementedError("not on this rank\nand more")
        model = arranged(name, model, case, session)
        if name == "grouped_mm":
            with torch.no_grad():
                model.lm_head.weight[:, :8] *= -1
        return model

    bench._arranged = some
    session = Session(Settings(0, 1), Ceilings(1.0, 1.0, 1.0))
    record = measure_model(ModelCase("tiny", 1, ranks, "decode", 2, 5), session)
    try:
        measure_model(ModelCase("tiny", 1, ranks, "train", 8), session)
    except RuntimeError as error:
        return record, str(error)
    return record, ""


def test_a_peer_that_fails_on_one_rank_or_gives_something_else_is_named_and_the_others_are_timed() -> None:
    for record, refused in run_ranks(with_peers_that_fail, 2):
        assert tuple(record["peers"]) == ("transformers_all_reduce",)
        failed = record["peers_failed"]
        assert failed["transformers_all_to_all"] == "NotImplementedError: not on this rank"
        assert "its results and epmoe's differ by" in failed["grouped_mm"]
        assert "no peer agrees with epmoe" in refused


def failing(rank: int, ranks: int) -> None:
    bench._decoding = lambda *_: (_ for _ in ()).throw(ValueError("no"))  # type: ignore[assignment]
    measure_model(ModelCase("tiny", 1, ranks, "decode", 2, 5), Session(Settings(0, 1), Ceilings(1.0, 1.0, None)))


def test_epmoe_itself_may_not_fail() -> None:
    with pytest.raises(RankFailed, match="epmoe: ValueError: no"):
        run_ranks(failing, 1)


def test_floors_count_weights_rows_and_what_is_cached() -> None:
    train, decode = ModelCase("tiny", 3, 2, "train", 10), ModelCase("tiny", 3, 2, "decode", 4, 7)
    model = make_model(train, torch.device("cpu"))
    assert {module.config._experts_implementation for module in [model]} == {"grouped_mm"}
    heads, kv, size = 4, 2, 16
    dense = 3 * (64 * size * (2 * heads + 2 * kv) + 2 * 64 + 2 * size + 64 * 8) + 64 + 64 * 256
    expert = TINY.expert_parameters
    flops, weights, wire = floors(train, model)
    assert flops == 10 * 3 * (2 * (dense + 3 * 2 * expert) + 4 * heads * size * 5 * 3)
    missed = 4 / 8 * 3 / 7
    assert wire == pytest.approx(3 * 10 * (1 - missed) * 64 * 2 * 4)
    flops, weights, wire = floors(decode, model)
    hit = 4 * (1 - (6 / 8) ** 8)
    assert weights == pytest.approx(2 * (dense + 3 * hit * expert + 2 * 4 * 8 * kv * size * 3))
    assert wire == pytest.approx(3 * 4 * (1 - missed) * 64 * 2 * 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "gpt-oss-20b"], "knows swiglu alone"),
        (["--mode", "infer"], "mode='infer': must be train or decode"),
        (["--dispatcher", "fast"], "dispatcher='fast'"),
        (["--dispatcher", "local"], "dispatcher='local' with ranks=2: it moves nothing"),
        (["--rows", "0"], "rows='0'"),
        (["--tokens", "1"], "tokens=1"),
    ],
)
def test_a_mistake_is_named_before_any_rank_starts(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epmoe.bench.session.run_ranks", lambda *a, **k: pytest.fail("ranks were started"))
    result = CliRunner().invoke(bench_app, ["model", *arguments], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 2 and message in result.output


@pytest.mark.gpu2
def test_it_runs_on_two_gpus_and_decodes_in_graphs(tmp_path: Path) -> None:
    options = ["--shape", "qwen3-30b", "--layers", "1", "--tokens", "256", "--rows", "4", "--context", "63"]
    train, decode = measured(tmp_path, *options, device="cuda")
    assert "epmoe" in decode["graphs"] and decode["case"]["dispatcher"] == "symmetric"
    assert "grouped_mm" in decode["peers"] and "grouped_mm" in train["peers"]
