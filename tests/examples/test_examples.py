"""Each example from its command line, in processes of its own with tiny settings."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.examples.starting import ROOT, start, succeed

TINY = "--hidden 16 --intermediate 16 --layers 2 --experts 4 --context 32 --global-batch 2 --eval-bytes 64 --steps 6"


def curve(out: Path) -> list[float]:
    return [json.loads(line)["bits_per_byte"] for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.mark.timeout(300)
def test_training_resuming_and_sampling_do_not_depend_on_the_number_of_ranks(tmp_path, seed):
    data = tmp_path / "text"
    data.mkdir()
    for number in range(40):
        (data / f"{number}.txt").write_text(f"file {number}: the {seed % 97} quick brown foxes jumped over it.\n" * 5)
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    common = ["--data", str(data), "--seed", str(seed % 1000), *TINY.split()]

    output = succeed("train_lm.py", 1, "--out", str(alone), *common)
    assert "held out; 1 rank on cpu" in output
    # two ranks stop half-way, with a loss that --check must find too high ...
    ended = start(
        "train_lm.py", 2, "--out", str(shared), "--stop-at", "3", "--check", "--dispatcher", "all_gather", *common
    )
    assert ended.returncode != 0 and "not below 0.8 x unigram" in ended.stdout, ended.stdout + ended.stderr
    # ... and three go on from there, one of them without a sequence in the batch of two
    output = succeed(
        "train_lm.py", 3, "--out", str(shared), "--resume", "--activation-checkpoint", "--prompt", "file", *common
    )
    assert "3 ranks on cpu" in output and "resumed at step 3" in output and re.search("a sample: ['\"]file", output)
    assert len(curve(alone)) == 6
    assert curve(shared) == pytest.approx(curve(alone), rel=1e-4)
    assert curve(alone)[-1] < curve(alone)[0]

    flags = ["--checkpoint", str(shared), "--prompt", "the ", "--new-bytes", "40", "--num-samples", "2", "--seed", "5"]
    by_one = succeed("generate.py", 1, *flags, "--top-k", "50")
    assert by_one.count("---- sample") == 2
    assert succeed("generate.py", 3, *flags, "--top-k", "50", "--dispatcher", "all_to_all") == by_one
    live = succeed("generate.py", 1, *flags[:6], "--num-samples", "1", "--seed", "5", "--top-k", "50")
    assert live.strip() and f"---- sample 0 ----\n{live}" in by_one


def test_the_cache_gives_what_the_whole_sequence_gives(seed, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import model as example
    import torch

    config = example.ModelConfig(2, 32, 4, 4, 2, 16, context=12)
    model = example.ByteModel(config, None, torch.device("cpu"), seed % 1000).double()
    tokens = torch.randint(256, (3, 12), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        whole = model(tokens)[0]
        cache = example.Cache(2)
        pieces = [model(tokens[:, :5], cache)[0]]
        pieces += [model(tokens[:, t : t + 1], cache)[0] for t in range(5, 12)]
    cached = torch.cat(pieces, dim=1)
    assert (cached - whole).norm() < 1e-5 * whole.norm()  # the rotation and the router are fp32


def test_sampling_keeps_only_the_likeliest_bytes(seed, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import model as example
    import torch

    logits = torch.full((1, 256), -9.0)
    logits[0, [7, 8, 9]] = torch.tensor([2.0, 1.0, 0.0])  # probabilities about 0.65, 0.24, 0.09, and 0.0002 each

    def drawn(temperature: float, top_k: int, top_p: float) -> set[int]:
        generator = [torch.Generator().manual_seed(seed)]
        return {int(example.sample(logits, temperature, top_k, top_p, generator)) for _ in range(400)}

    assert drawn(0.0, 0, 1.0) == {7}
    assert drawn(1.0, 1, 1.0) == {7}
    assert drawn(1.0, 2, 1.0) == {7, 8}
    assert drawn(1.0, 0, 0.5) == {7}
    assert drawn(1.0, 0, 0.8) == {7, 8}
    assert {7, 8, 9} <= drawn(1.0, 0, 1.0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_parts_joined_by_hand_agree_with_a_float64_loop(ranks):
    output = succeed("modular.py", ranks)
    assert output.count("relative error against float64") == ranks


def test_generating_without_a_checkpoint_says_what_is_missing(tmp_path):
    ended = start("generate.py", 1, "--checkpoint", str(tmp_path))
    assert ended.returncode != 0
    assert "index.json is not there" in ended.stderr


@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        ("train_lm.py", ["--data", "/nope"], "--data /nope: 0 files"),
        ("train_lm.py", ["--top-k", "9", "--experts", "3"], "MoEConfig.top_k=9: must be at most"),
        ("train_lm.py", ["--dispatch", "x"], "MoEConfig.dispatch_scheme='x': must be one of"),
        ("hf_generate.py", ["--path", "/nope"], "path='/nope' is no directory"),
        ("hf_finetune.py", ["--data", "/nope"], "[Errno 2] No such file or directory: '/nope'"),
        ("serve.py", ["--path", "/nope"], "path='/nope' is no directory"),
    ],
    ids=lambda value: value.removesuffix(".py") if isinstance(value, str) and value.endswith(".py") else "",
)
def test_what_cannot_work_is_told_in_one_line(script, arguments, said, tmp_path, monkeypatch, capsys):
    if script != "train_lm.py":
        pytest.importorskip("transformers", minversion="5.17")
    if script == "serve.py":
        pytest.importorskip("fastapi"), pytest.importorskip("uvicorn")
    path = ROOT / "examples" / script
    out = ["--out", str(tmp_path)] if script == "train_lm.py" else []
    monkeypatch.syspath_prepend(path.parent)
    monkeypatch.setattr(sys, "argv", [str(path), *arguments, *out])
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    lines = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and lines[-1].startswith(f"{script}: {said}"), lines
    assert not any("Traceback" in line for line in lines)
