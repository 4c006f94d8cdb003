"""examples/titan_block.py on two ranks, where torchtitan is installed."""

from __future__ import annotations

import pytest

pytest.importorskip("torchtitan.models.common.moe", reason="needs torchtitan", exc_type=ImportError)

from tests.examples.starting import succeed  # noqa: E402


@pytest.mark.timeout(300)
def test_torchtitans_block_gives_the_same_and_learns_on_two_ranks(seed):
    printed = succeed("titan_block.py", 2, "--check", "--steps", "20", "--seed", str(seed % 1000))
    assert printed.count("output differs from the untouched block's by") == 2 and "step 20/20" in printed
