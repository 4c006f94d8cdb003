"""Whether a batch is split, and into how many parts: ranks agree, or are told which of them does not."""

from __future__ import annotations

import pytest
import torch

from epmoe import EPGroup
from epmoe.overlap import MinTokens, current_microbatch, run_microbatched
from epmoe.testing import RankFailed, run_ranks
from tests.overlap.microbatch_cases import Block, H


def unsplit_when_small(rank: int, ranks: int) -> list[bool]:
    ep = EPGroup(timeout=30)
    split: list[bool] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        split.append(current_microbatch() is not None)
        return x

    cases = ((3, 5, "prefill"), (3, 4, "prefill"), (3, MinTokens(100, 4), "decode"), (3, "auto", "decode"))
    for tokens, limit, phase in cases:
        run_microbatched(fn, torch.zeros(tokens + 2 * rank, 2), ep=ep, min_tokens=limit, phase=phase)  # type: ignore[arg-type]
    return split


def test_all_ranks_agree_on_whether_the_batch_is_worth_it() -> None:
    # 3 and 5 tokens: fewer than 5 per rank, not fewer than 4
    assert run_ranks(unsplit_when_small, 2, timeout=60) == [[False, True, True, True, True, False]] * 2


def disagree(rank: int, ranks: int) -> None:
    run_microbatched(lambda x: x, torch.zeros(4, 2), num_microbatches=2 + rank, ep=EPGroup(timeout=30))


def test_ranks_that_split_differently_are_told_so() -> None:
    with pytest.raises(RankFailed, match=r"num_microbatches differs between ranks, \[2, 3\]"):
        run_ranks(disagree, 2, timeout=60)


def disagree_unasked(rank: int, ranks: int) -> list[str]:
    """Without `ep=`: ranks of layers inside, by every dispatcher; one of them does not split at all."""
    x, told = torch.randn(4, H), []
    for dispatcher in ("all_to_all", "all_to_all_fixed", "symmetric", "all_gather"):
        for parts in ((2, 3), (2, 1)):
            block = Block(EPGroup(timeout=30), dispatcher=dispatcher)
            with pytest.raises(ValueError) as failure:
                run_microbatched(block, x, num_microbatches=parts[rank])
            told.append(str(failure.value).partition("; ")[2])
            run_microbatched(block, x)  # the group is as good as before
            with pytest.raises(ValueError, match=r"min_tokens=3\) around a layer on 2 ranks .* pass ep="):
                run_microbatched(block, x, min_tokens=3)
    return told


def test_ranks_that_split_differently_are_told_so_by_the_first_layer() -> None:
    for told in run_ranks(disagree_unasked, 2, timeout=90):
        told = [text.partition("num_microbatches: ")[2] for text in told]
        assert told == ["rank 0 has 2, rank 1 has 3", "rank 0 has 2, rank 1 has 1"] * 4
