"""examples/hf_finetune.py on two ranks, and plain `transformers` with what it saved."""

from __future__ import annotations

import math
import re

import pytest
import torch

from tests.examples.starting import succeed

transformers = pytest.importorskip("transformers", minversion="5.17")


@pytest.mark.timeout(300)
def test_two_ranks_learn_a_text_and_plain_transformers_knows_it_afterwards(seed, tmp_path):
    text = tmp_path / "text"
    text.write_text(f"{seed % 97} quick brown foxes jumped over the lazy dogs.\n" * 40)
    output = succeed(
        "hf_finetune.py", 2, "--data", str(text), "--out", str(tmp_path / "out"), "--steps", "30", "--batch", "4",
        "--context", "32", "--check", "--seed", str(seed % 1000), timeout=250,
    )  # fmt: skip
    assert "4 experts here" in output and "read back by transformers alone" in output
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) == 11 and losses[-1] < 0.8 * losses[0]

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_router_logits=False)
    tokens = torch.tensor([list(text.read_bytes()[:64])])
    with torch.no_grad():
        loss = model(input_ids=tokens, labels=tokens).loss.item()
    assert loss < 0.7 * math.log(256)
