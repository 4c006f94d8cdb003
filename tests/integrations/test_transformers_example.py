"""examples/hf_generate.py on two ranks."""

from __future__ import annotations

import pytest

from tests.examples.starting import succeed

pytest.importorskip("transformers", minversion="5.17")


def test_two_ranks_generate_what_the_untouched_model_generates():
    output = succeed("hf_generate.py", 2, "--check", "--new-tokens", "4")
    for rank in range(2):
        assert f"rank {rank}: the same tokens as the untouched model's" in output
    assert "8 experts here" in output
