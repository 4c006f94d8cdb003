from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from typing import IO

import pytest
import torch

from epmoe.cli import trials
from epmoe.cli.trials import TOLERANCE, Refusal, Trial, WrongResult, attempt, layer_is_right
from epmoe.experts import ReferenceExperts


def works(rank: int, world_size: int) -> str:
    return f"{world_size} here"


def dies(rank: int, world_size: int) -> str:
    os.write(2, b"noise\nlast words\n")
    os._exit(3)


def segfaults(rank: int, world_size: int) -> str:
    os.kill(os.getpid(), signal.SIGSEGV)
    return "not reached"


def raises(rank: int, world_size: int) -> str:
    raise OSError("first line\nin between\nlast line\nException raised from f.cpp:1\nframe #0: nobody reads")


def hangs(rank: int, world_size: int) -> str:
    if rank == world_size - 1:
        time.sleep(600)
    return "rank 0 had ended"


def refuses(rank: int, world_size: int) -> Refusal:
    return Refusal("too small")


@pytest.fixture
def log() -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as file:
        yield file


def test_each_way_to_fail_is_reported_with_its_reason_and_the_next_trial_still_runs(log: IO[bytes]) -> None:
    for fn, reason in (
        (dies, "exit code 3; last output: last words"),
        (segfaults, "SIGSEGV"),
        (raises, "OSError: first line ... last line"),
    ):
        found = attempt(Trial("bad", fn, advice="do this"), 30, log)
        assert (found.ok, found.advice) == (False, "do this") and found.detail.endswith(reason), found
    assert attempt(Trial("good", works), 30, log).detail == "1 here"


def test_a_trial_that_hangs_ends_at_its_deadline_and_says_where_it_was(log: IO[bytes]) -> None:
    attempt(Trial("warm", works), 30, log)
    started = time.monotonic()
    found = attempt(Trial("stuck", hangs, world_size=2, timeout=1.0), 60, log)
    assert found.ok is False and time.monotonic() - started < 15
    assert "no end after 1 s; rank 1 was at" in found.detail and "hangs" in found.detail, found


def test_the_last_words_of_an_earlier_trial_are_not_blamed_on_a_later_one(log: IO[bytes]) -> None:
    attempt(Trial("loud", dies), 30, log)
    assert "last words" not in attempt(Trial("silent", segfaults), 30, log).detail


def test_a_refusal_is_no_failure_and_a_trial_that_can_not_start_is_one(log: IO[bytes]) -> None:
    refused = attempt(Trial("refused", refuses), 30, log)
    assert refused.ok is None and "too small" in refused.detail
    impossible = attempt(Trial("impossible", works, backend="mpi"), 30, log)
    assert impossible.ok is False and "backend='mpi'" in impossible.detail


def test_what_a_trial_prints_does_not_reach_our_output(log: IO[bytes], capfd: pytest.CaptureFixture[str]) -> None:
    attempt(Trial("loud", dies), 30, log)
    print("ours")
    assert capfd.readouterr() == ("ours\n", "")


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_right_experts_pass(dtype: str) -> None:
    assert "right to" in str(layer_is_right(0, 1, "local", "reference", dtype, "cpu"))


@pytest.mark.parametrize("wrong", ["output", "gradient of x", "gradient of down_proj"])
def test_wrong_results_are_named(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ReferenceExperts.apply

    def apply(self, rows, weights):  # type: ignore[no-untyped-def]
        y = right(self, rows, weights)
        if wrong == "output":
            return y * 1.001
        of = rows.x if wrong == "gradient of x" else weights.down_proj
        return y + 0.01 * (of - of.detach()).sum()  # adds zero, with a gradient

    monkeypatch.setattr(ReferenceExperts, "apply", apply)
    with pytest.raises(WrongResult, match=wrong):
        layer_is_right(0, 1, "local", "reference", "float32", "cpu")


def test_the_formula_counts_an_expert_per_slot_and_none_for_minus_one() -> None:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(1, 4, generator=g, dtype=torch.float64)
    w1 = torch.randn(3, 6, 4, generator=g, dtype=torch.float64)
    w2 = torch.randn(3, 4, 3, generator=g, dtype=torch.float64)
    weights = torch.tensor([[0.5, 2.0]], dtype=torch.float64)
    h = w1[2] @ x[0]
    one = w2[2] @ (h[:3] / (1 + torch.exp(-h[:3])) * h[3:])
    for ids, factor in (([[2, 2]], 2.5), ([[-1, 2]], 2.0), ([[-1, -1]], 0.0)):
        got = trials.reference(x, torch.tensor(ids, dtype=torch.int32), weights, w1, w2)
        torch.testing.assert_close(got[0], one * factor)
