"""examples/hf_trainer.py on two ranks, and plain `transformers` with what it saved."""

from __future__ import annotations

import math
import re

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.17")
pytest.importorskip("accelerate")

from tests.examples.starting import succeed  # noqa: E402


@pytest.mark.timeout(300)
def test_two_ranks_learn_a_text_under_the_trainer_and_plain_transformers_knows_it_afterwards(seed, tmp_path):
    text, out = tmp_path / "text", tmp_path / "out"
    text.write_text(f"{seed % 97} quick brown foxes jumped over the lazy dogs.\n" * 40)
    settings = ["--data", str(text), "--out", str(out), "--steps", "20", "--context", "32", "--save-every", "20"]
    printed = succeed("hf_trainer.py", 2, *settings, "--seed", str(seed % 1000))
    assert "4 experts here" in printed and f"saved: {out}" in printed and (out / "step-20").is_dir()
    losses = [float(found) for found in re.findall(r"'loss': '?([\d.]+)", printed)]
    assert len(losses) >= 10 and losses[-1] < 0.8 * losses[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(out, output_router_logits=False)
    tokens = torch.tensor([list(text.read_bytes()[:64])])
    with torch.no_grad():
        assert model(input_ids=tokens, labels=tokens).loss.item() < 0.8 * math.log(256)
