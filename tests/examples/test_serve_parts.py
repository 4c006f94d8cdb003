"""The parts of examples/serve.py one by one: rows that come and go, text as it grows, who runs where."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

from epmoe.integrations.transformers import parallelize  # noqa: E402
from epmoe.integrations.transformers.decode import Decoder  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def parts(monkeypatch):
    """Imports a module of examples/serving by name."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "integrations"))
    yield importlib.import_module
    for name in [name for name in sys.modules if name.split(".")[0] in ("serving", "transformers_families")]:
        del sys.modules[name]


def alone(model: Any, prompt: list[int], new: int) -> list[int]:
    """What the model generates greedily for one prompt by itself."""
    out = model.generate(torch.tensor([prompt]), max_new_tokens=new, min_new_tokens=new, do_sample=False)
    return out[0, len(prompt) :].tolist()


def test_rows_that_come_and_go_get_the_tokens_that_each_gets_alone(parts, seed):
    batch_module, families = parts("serving.batch"), parts("transformers_families")
    untouched = families.tiny_model("gpt-oss", seed).eval()  # sliding windows in one layer of two
    untouched.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(seed)
    #            slot: prompt, first step, tokens
    asked = {5: (9, 0, 7), 2: (1, 0, 12), 7: (14, 2, 5), 6: (3, 3, 9), 1: (6, 9, 4), 4: (2, 14, 3)}
    prompts = {slot: torch.randint(3, 64, (n,), generator=generator).tolist() for slot, (n, _, _) in asked.items()}
    expected = {slot: alone(untouched, prompts[slot], new) for slot, (_, _, new) in asked.items()}

    decoder = Decoder(parallelize(families.tiny_model("gpt-oss", seed).eval()), 4, 20, column_sizes=(4, 12, 20))
    shapes = set()
    run = decoder._run
    decoder._run = lambda shape: (shapes.add(shape), run(shape))[1]
    batch = batch_module.Batch(decoder)
    got: dict[int, list[int]] = {slot: [] for slot in asked}
    most = 0
    for step in range(20):
        batch.leave([slot for slot, (_, _, new) in asked.items() if len(got[slot]) == new])
        logits = batch.step([got[slot][-1] for slot in batch.slots])
        most = max(most, len(batch.slots))
        for slot, row in zip(batch.slots, logits, strict=True):
            got[slot].append(int(row.argmax()))
        for slot, (_, first, _) in asked.items():
            if first == step:
                got[slot].append(int(batch.start(slot, prompts[slot])[0].argmax()))
    assert most == 4 and batch.slots == [] and {rows for rows, _ in shapes} == {0, 1, 2, 4}
    assert {columns for _, columns in shapes} == {0, 4, 12, 20}
    assert got == expected


# ---- text


@pytest.mark.parametrize("written", ["plain", "grüße, 世界 😀!", "a\n\n  b\tc "])
def test_text_grows_to_what_all_tokens_decode_to(parts, written):
    text = parts("serving.text")
    growing = text.GrowingText(text.ByteTokenizer())
    pieces = [growing.push(token) for token in written.encode()]
    assert "".join(pieces) + growing.finish() == written
    assert "\ufffd" not in "".join(pieces)  # no character is shown by halves


def test_any_bytes_grow_to_what_they_decode_to(parts, seed):
    text = parts("serving.text")
    generator = torch.Generator().manual_seed(seed)
    character = "😀".encode()
    for _ in range(50):
        noise = torch.randint(256, (12,), generator=generator).tolist()
        cut = int(torch.randint(12, (), generator=generator))
        tokens = [*noise[:cut], *character[: cut % 5], *noise[cut:], *character]
        growing = text.GrowingText(text.ByteTokenizer())
        assert "".join(map(growing.push, tokens)) + growing.finish() == bytes(tokens).decode(errors="replace")


def test_bytes_that_are_no_text_do_not_hold_it_back(parts):
    text = parts("serving.text")
    growing = text.GrowingText(text.ByteTokenizer())
    shown = "".join(growing.push(token) for token in bytes([0xFF] * 8))
    assert len(shown) >= 5
    assert shown + growing.finish() == "\ufffd" * 8


def test_spaces_between_words_survive_a_tokenizer_that_writes_them_before_all_but_the_first(parts):
    text = parts("serving.text")

    class Words:
        def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
            return " ".join(f"w{token}" for token in token_ids)

    growing = text.GrowingText(Words())
    assert "".join(growing.push(token) for token in (1, 2, 3)) + growing.finish() == "w1 w2 w3"


@pytest.mark.parametrize(
    ("written", "stops", "shown", "stopped"),
    [
        ("one END two", ["END"], "one ", True),
        ("one END two", ["two", "END"], "one ", True),  # the first in the text
        ("a EN EMD", ["END"], "a EN EMD", False),
        ("ends in EN", ["END"], "ends in EN", False),
        ("aaab", ["aab"], "a", True),
        ("ünd", ["ü"], "", True),
    ],
)
def test_text_ends_before_a_stop_and_shows_nothing_of_it(parts, written, stops, shown, stopped):
    text = parts("serving.text")
    growing = text.GrowingText(text.ByteTokenizer(), stops)
    got = ""
    for token in written.encode():
        got += growing.push(token)
        assert shown.startswith(got)
        if growing.stopped:
            break
    assert (got + growing.finish(), growing.stopped) == (shown, stopped)


# ---- sampling


def test_sampling_follows_the_distribution_its_limits_and_its_seed(parts, seed):
    batch_module = parts("serving.batch")
    logits = torch.tensor([0.0, 2.0, 1.0, -9.0])  # probabilities about 0.09, 0.67, 0.24, 0

    def drawn(**settings: float) -> list[int]:
        sampler = batch_module.Sampler(batch_module.Sampling(**settings))
        return [sampler(logits) for _ in range(600)]

    def share(tokens: list[int]) -> torch.Tensor:
        return torch.bincount(torch.tensor(tokens), minlength=4) / len(tokens)

    assert set(drawn(temperature=0)) == {1}
    assert set(drawn(top_p=1e-9, seed=seed)) == {1}
    assert set(drawn(top_p=0.7, seed=seed)) == {1, 2}
    assert (share(drawn(seed=seed)) - logits.softmax(-1)).abs().max() < 0.1  # five standard deviations
    assert (share(drawn(temperature=3, seed=seed)) - (logits / 3).softmax(-1)).abs().max() < 0.1
    assert drawn(seed=seed) == drawn(seed=seed) != drawn(seed=seed + 1)


# ---- who runs where


class Desk:
    """A scheduler, and requests that write down what they get. Every token is its request's number."""

    def __init__(self, parts: Any, **settings: Any) -> None:
        self.batch, self.text, self.scheduling = (
            parts("serving.batch"),
            parts("serving.text"),
            parts("serving.scheduler"),
        )
        self.scheduler = self.scheduling.Scheduler(
            **{"ranks": 2, "slots": 2, "max_waiting": 9, "grace": 60.0, **settings}
        )
        self.got: dict[int, list[Any]] = {}
        self.requests: dict[int, Any] = {}
        self.slots: dict[tuple[int, int], int] = {}  # (rank, slot): the number of who is there

    def ask(self, number: int, max_tokens: int = 2) -> None:
        text = self.text.GrowingText(self.text.ByteTokenizer())
        pieces = self.got.setdefault(number, [])
        self.requests[number] = self.scheduling.Request(
            [number], max_tokens, self.batch.Sampling(), text, frozenset([99]), pieces.append
        )
        self.scheduler.submit(self.requests[number])

    def step(self, token: int | None = None) -> Any:
        plan = self.scheduler.plan()
        for rank, slots in plan.leave.items():
            for slot in slots:
                del self.slots[rank, slot]
        assert plan.decode == bool(self.slots)
        for rank, start in plan.start.items():
            assert (rank, start.slot) not in self.slots
            self.slots[rank, start.slot] = start.prompt[0]
        rows = [[self.slots.get((rank, slot), -1) for slot in range(2)] for rank in range(2)]
        if not plan.stop:
            self.scheduler.take([[t if t < 0 or token is None else token for t in row] for row in rows])
        return plan

    def on(self, rank: int) -> set[int]:
        return {number for (where, _), number in self.slots.items() if where == rank}

    def ended(self, number: int) -> Any:
        return self.got[number][-1].finish


def test_requests_spread_over_ranks_and_take_turns_in_the_slots(parts):
    desk = Desk(parts)
    for number in range(5):
        desk.ask(number, max_tokens=3)
    desk.step()
    assert len(desk.on(0)) == len(desk.on(1)) == 1
    desk.step()
    assert desk.on(0) | desk.on(1) == {0, 1, 2, 3} and desk.scheduler.load() == ([2, 2], 1)
    assert desk.step().start == {}  # no room: 0 and 1 get their last token
    assert len(desk.step().start) == 1 and 4 in desk.slots.values()
    for _ in range(3):
        desk.step()
    assert all([piece.token for piece in desk.got[n]] == [n] * 3 and desk.ended(n) == "length" for n in range(5))
    assert sum(desk.scheduler.done) == 5 and desk.scheduler.load() == ([0, 0], 0)


def test_requests_one_by_one_go_to_one_rank_after_the_other(parts):
    desk = Desk(parts)
    ranks = []
    for number in range(4):
        desk.ask(number, max_tokens=1)
        ranks += desk.step().start
    assert ranks == [0, 1, 0, 1]


def test_an_end_token_ends_a_request_and_is_no_text(parts):
    desk = Desk(parts)
    desk.ask(65, max_tokens=9)
    desk.step()
    desk.step(token=99)
    assert desk.ended(65) == "stop" and "".join(piece.text for piece in desk.got[65]) == "A"
    assert desk.step().leave


def test_a_full_queue_and_a_stopping_server_refuse(parts):
    desk = Desk(parts, max_waiting=1)
    desk.ask(1, max_tokens=3)
    with pytest.raises(desk.scheduling.QueueFull, match="1 requests wait already"):
        desk.ask(2)
    desk.step()
    desk.ask(3)
    desk.scheduler.stop()
    with pytest.raises(desk.scheduling.Refused, match="stopping"):
        desk.ask(4)
    plans = [desk.step() for _ in range(3)]
    assert [plan.stop for plan in plans] == [False, False, True]
    assert desk.ended(1) == "length" and [piece.error for piece in desk.got[3]] == ["the server is stopping"]


def test_running_requests_end_when_the_grace_is_over(parts):
    desk = Desk(parts, grace=0.0)
    desk.ask(1, max_tokens=1000)
    desk.step()
    desk.scheduler.stop()
    assert desk.step().stop
    assert desk.got[1][-1].error == "the server is stopping"


def test_a_cancelled_request_leaves_its_slot(parts):
    desk = Desk(parts)
    for number in (1, 2, 3):
        desk.ask(number, max_tokens=1000)
    desk.step()
    desk.scheduler.cancel(desk.requests[3])  # waits
    desk.scheduler.cancel(desk.requests[1])  # runs
    plan = desk.step()
    assert list(plan.leave) == [0] and plan.start == {} and desk.scheduler.load() == ([0, 1], 0)
    assert desk.got[3] == []


def test_nothing_to_do_is_a_plan_as_well(parts):
    desk = Desk(parts)
    assert desk.step() == parts("serving.engine").Plan()
