"""examples/serve.py: one server on two ranks, one alone, and clients of both."""

from __future__ import annotations

import contextlib
import http.client
import importlib
import io
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("transformers", minversion="5.17")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from epmoe import EPGroup  # noqa: E402
from epmoe.testing import run_ranks  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
HEADERS = {"Content-Type": "application/json"}


class Client:
    """Asks a server on this host, at `port`."""

    port: int

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body if isinstance(body, str | None) else json.dumps(body), HEADERS)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    def complete(self, prompt: Any, max_tokens: int, **settings: Any) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **settings}
        status, answer = self.ask("POST", "/v1/completions", body)
        assert status == 200, answer
        assert answer["usage"]["completion_tokens"] == len(answer["choices"][0]["token_ids"])
        return answer["choices"][0]

    def stream(self, prompt: Any, max_tokens: int, **settings: Any) -> Iterator[dict[str, Any]]:
        """The events; the connection is closed with the iterator."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **settings}
        connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}), HEADERS)
        answer = connection.getresponse()
        try:
            assert answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream")
            for line in answer:
                if line.strip():
                    assert line.startswith(b"data: ")
                    data = line.removeprefix(b"data: ").strip()
                    yield {"done": True} if data == b"[DONE]" else json.loads(data)
        finally:
            answer.close()
            connection.close()

    def health(self) -> dict[str, Any]:
        return self.ask("GET", "/health")[1]

    def wait(self, alive: Callable[[], bool]) -> None:
        """Until it answers."""
        while True:
            try:
                self.health()
                return
            except OSError:
                assert alive(), "the server has ended"
                time.sleep(0.02)


def serve_on_a_rank(rank: int, ranks: int, folder: Path, settings: dict[str, Any]) -> str:
    """serve.py's command in this rank, which writes down its process and the port; what it has printed."""
    sys.path.insert(0, str(ROOT / "examples"))
    serving = importlib.import_module("serve")
    (folder / f"process-{rank}").write_text(str(os.getpid()))
    listen = serving.listen

    def listening(host: str, port: int) -> Any:
        socket = listen(host, port)
        (folder / "port.part").write_text(str(socket.getsockname()[1]))
        (folder / "port.part").rename(folder / "port")
        return socket

    if ranks > 1:  # run_ranks has joined them
        serving.join_ranks = lambda: (EPGroup(timeout=60), torch.device("cpu"))
    serving.listen = listening
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        serving.serve(tiny=True, port=0, **settings)
    return printed.getvalue()


class Server(Client):
    """A server on ranks, started without torchrun, whose own start would be the longest part of a test."""

    def __init__(self, ranks: int, folder: Path, **settings: Any) -> None:
        self._pool = ThreadPoolExecutor(1)
        self.folder, arguments = folder, {"args": (folder, settings), "timeout": 150}
        self._ranks = self._pool.submit(run_ranks, serve_on_a_rank, ranks, **arguments)
        while not (folder / "port").exists():
            if self._ranks.done():
                self._ranks.result()
            time.sleep(0.02)
        self.port = int((folder / "port").read_text())
        self.wait(lambda: not self._ranks.done())

    def signal(self, rank: int, number: int) -> None:
        os.kill(int((self.folder / f"process-{rank}").read_text()), number)

    def printed(self) -> list[str]:
        """By every rank, once all have ended well."""
        return self._ranks.result()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: Any) -> None:
        if not self._ranks.done():
            with contextlib.suppress(ProcessLookupError):
                self.signal(0, signal.SIGTERM)
        self._pool.shutdown()


@pytest.fixture
def tiny_model(monkeypatch, seed):
    """As `transformers` makes it."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("hf_generate").tiny_model(seed % 1000)


def alone(model: Any, prompt: list[int], new: int) -> list[int]:
    """What the model generates greedily for one prompt by itself."""
    return model.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False)[0, len(prompt) :].tolist()


def refused(server: Client, status: int, says: str, body: Any, path: str = "/v1/completions") -> None:
    got, answer = server.ask("POST", path, body)
    assert got == status and re.search(says, answer["error"]["message"]), (got, answer)


def test_two_ranks_answer_as_the_untouched_model_would_each_request_alone(tiny_model, seed, tmp_path):
    with Server(2, tmp_path, seed=seed % 1000, max_batch=3, grace=120.0) as server:
        # One request at a time: the other rank has none, and serves it with its experts. Each has its turn.
        for n in (1, 2):
            assert server.complete([7 * n], 6)["token_ids"] == alone(tiny_model, [7 * n], 6)
            assert sum(server.health()["done"]) == n
        assert server.health() == {"status": "ok", "running": [0, 0], "done": [1, 1], "waiting": 0}

        # More than there are slots, of all lengths: they come and go at different steps.
        generator = torch.Generator().manual_seed(seed)
        asked = [(torch.randint(256, (n,), generator=generator).tolist(), new) for n, new in
                 ((1, 30), (40, 3), (13, 17), (5, 1), (2, 24), (70, 9), (8, 12), (21, 20), (3, 5))]  # fmt: skip
        expected = [alone(tiny_model, prompt, new) for prompt, new in asked]
        with ThreadPoolExecutor(len(asked)) as clients:
            answers = list(clients.map(lambda each: server.complete(*each), asked))
        assert [answer["token_ids"] for answer in answers] == expected
        texts = [bytes(tokens).decode(errors="replace") for tokens in expected]
        assert [answer["text"] for answer in answers] == texts
        assert {answer["finish_reason"] for answer in answers} == {"length"}
        assert min(server.health()["done"]) >= 4

        # Token by token, beside another request.
        with ThreadPoolExecutor(2) as clients:
            beside = clients.submit(server.complete, *asked[0])
            *events, done = list(server.stream(*asked[2]))
            assert beside.result()["token_ids"] == expected[0]
        choices = [event["choices"][0] for event in events]
        assert done == {"done": True} and [choice["token_ids"] for choice in choices] == [[t] for t in expected[2]]
        assert "".join(choice["text"] for choice in choices) == texts[2]
        assert [choice["finish_reason"] for choice in choices] == [None] * 16 + ["length"]

        # Text in; an end of one's own; draws that a seed repeats.
        prompt = "grüße"
        text = bytes(alone(tiny_model, list(prompt.encode()), 20)).decode(errors="replace")
        answer = server.complete(prompt, 20, stop=["never there", text[4]])
        assert (answer["text"], answer["finish_reason"]) == (text[: text.index(text[4])], "stop")
        draw, another = ({"temperature": 1.5, "top_p": 0.9, "seed": n} for n in (seed, seed + 1))
        with ThreadPoolExecutor(3) as clients:
            drawn = list(clients.map(lambda _: server.complete(prompt, 20, **draw)["token_ids"], range(3)))
        assert drawn[0] == drawn[1] == drawn[2] != server.complete(prompt, 20, **another)["token_ids"]

        # Under load.
        url = f"http://127.0.0.1:{server.port}"
        load = ["--url", url, "--requests", "10", "--concurrency", "8", "--max-tokens", "7"]
        loaded = CliRunner().invoke(importlib.import_module("load_test").app, load)
        assert loaded.exit_code == 0 and "10 of 10 requests, 8 at a time, 70 tokens" in loaded.stdout, loaded
        assert re.search(r"[\d.]+ tokens/s.*first token +p50.*p95.*latency +p50.*p95", loaded.stdout, re.S)

        # What can't be served says why, and harms nobody.
        good = {"model": "tiny", "prompt": "a"}
        refused(server, 404, "'gpt' is not served here: this is 'tiny'", {**good, "model": "gpt"})
        refused(server, 400, r"1 tokens of prompt and max_tokens=4096 .* at most 4096", {**good, "max_tokens": 4096})
        refused(server, 400, "at least one token", {**good, "prompt": ""})
        refused(server, 400, r"token id 256 is not in \[0, 256\)", {**good, "prompt": [1, 256]})
        refused(server, 400, "one text or one list of token ids", {**good, "prompt": ["a", "b"]})
        refused(server, 400, "max_tokens=.0.: .*greater than or equal to 1", {**good, "max_tokens": 0})
        refused(server, 400, "temperature=", {**good, "temperature": -1})
        refused(server, 400, "none of them empty", {**good, "stop": ""})
        refused(server, 400, "n=", {**good, "n": 2})
        refused(server, 400, "best_of: not known here; known are model, prompt", {**good, "best_of": 2})
        refused(server, 400, "prompt: field required", {"model": "tiny"})
        refused(server, 400, "no JSON", "{")
        refused(server, 400, "a JSON object", "[]")
        refused(server, 404, "/v1/edits", good, "/v1/edits")
        assert server.ask("GET", "/v1/models")[1]["data"][0]["id"] == "tiny"
        assert server.complete(*asked[1])["token_ids"] == expected[1]

        # A client that goes away frees its slot.
        events_ = server.stream("a", 4000)
        next(events_)
        assert sum(server.health()["running"]) == 1
        events_.close()
        deadline = time.monotonic() + 20
        while sum(server.health()["running"]):
            assert time.monotonic() < deadline
            time.sleep(0.05)

        # Told to stop, on whichever rank, it lets what runs finish and takes nothing new; all processes end, and well.
        events_ = server.stream([1, 2, 3], 150)
        next(events_)
        server.signal(1, signal.SIGTERM)
        while server.health()["status"] != "stopping":
            time.sleep(0.02)
        refused(server, 503, "stopping", good)
        *_, last, done = events_
        assert last["choices"][0]["finish_reason"] == "length" and done == {"done": True}
        first, second = server.printed()
        assert f"serving 'tiny' on http://127.0.0.1:{server.port}, 2 ranks on cpu" in first and "stopped after" in first
        for rank, text in enumerate((first, second)):
            assert f"rank {rank} decodes without CUDA graphs: the model is on cpu" in text


class Here(Client):
    """A server in this process, whose main thread serves while `use` asks from another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.serving = importlib.import_module("serve")
        listen = self.serving.listen

        def listening(host: str, port: int) -> Any:
            socket = listen(host, port)
            self.port = socket.getsockname()[1]
            return socket

        monkeypatch.setattr(self.serving, "listen", listening)

    def run(self, use: Callable[[Here], None], **settings: Any) -> str:
        """Serves until a signal comes; what it has written."""
        written = io.StringIO()

        def client() -> None:
            try:
                while not hasattr(self, "port"):
                    time.sleep(0.01)
                self.wait(lambda: True)
                use(self)
            except BaseException:
                os.kill(os.getpid(), signal.SIGINT)
                raise

        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with contextlib.redirect_stdout(written), ThreadPoolExecutor(1) as pool:
                used = pool.submit(client)
                self.serving.serve(**settings)
                used.result()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return written.getvalue()


@pytest.mark.timeout(120)
def test_a_checkpoint_on_one_rank_ends_at_its_end_tokens_refuses_what_has_no_room_and_stops_on_ctrl_c(
    tiny_model, seed, tmp_path, monkeypatch
):
    prompt = [5, 6, seed % 256]
    expected = alone(tiny_model, prompt, 12)
    tiny_model.generation_config.eos_token_id = [expected[7]]
    expected = alone(tiny_model, prompt, 12)
    tiny_model.save_pretrained(tmp_path / "tiny")

    def use(server: Here) -> None:
        answer = server.complete(prompt, 12)
        assert answer["token_ids"] == expected and answer["finish_reason"] == "stop"
        assert answer["text"] == bytes(expected[:-1]).decode(errors="replace")
        runs = server.stream("a", 4000, ignore_eos=True)
        next(runs)
        with ThreadPoolExecutor(1) as clients:
            waits = clients.submit(server.ask, "POST", "/v1/completions", {"model": "tiny", "prompt": "b"})
            while not server.health()["waiting"]:
                time.sleep(0.02)
            refused(server, 429, "1 requests wait already", {"model": "tiny", "prompt": "c"})
            os.kill(os.getpid(), signal.SIGINT)
            status, answer = waits.result()
            assert status == 503 and "stopping" in answer["error"]["message"]
        *_, last = runs
        assert "stopping" in last["error"]["message"]

    settings = {"max_batch": 1, "max_waiting": 1, "grace": 0.0}
    written = Here(monkeypatch).run(use, path=tmp_path / "tiny", port=0, **settings)
    assert "rank 0 decodes without CUDA graphs: the model is on cpu" in written
    assert f"process {os.getpid()}" in written and "stopped after 1 requests" in written
