"""Loads a server of completions and says how it bears it: tokens/s, time to the first token, latency.

    python examples/load_test.py --url http://127.0.0.1:8000 --requests 64 --concurrency 16

Talks to examples/serve.py or any server of OpenAI's `POST /v1/completions`; every request streams, and each event of it
counts as one token. Needs nothing but Python and typer.
"""

from __future__ import annotations

import http.client
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

WORDS = "the experts of every layer live on many ranks and each token meets a few of them".split()
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Answer:
    """One request, in seconds from when it was sent."""

    tokens: int
    first: float
    last: float
    error: str | None = None


def ask(url: str, body: dict[str, Any], timeout: float) -> Answer:
    """Sends a request and reads its stream to the end; an error is part of the answer."""
    place = urlsplit(url)
    kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
    assert place.hostname is not None
    sent = time.perf_counter()
    tokens, first, last = 0, math.nan, math.nan
    try:
        connection = kind(place.hostname, place.port, timeout=timeout)
        try:
            path = place.path.rstrip("/") + "/v1/completions"
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                return Answer(0, first, last, f"{response.status}: {response.read().decode(errors='replace')[:200]}")
            for line in response:
                data = line.strip().removeprefix(b"data: ")
                if not data or data == b"[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    return Answer(tokens, first, last, event["error"]["message"])
                tokens, last = tokens + 1, time.perf_counter() - sent
                first = last if tokens == 1 else first
        finally:
            connection.close()
    except (OSError, http.client.HTTPException) as error:
        return Answer(tokens, first, last, f"{type(error).__name__}: {error}")
    return Answer(tokens, first, last, None if tokens else "no tokens came")


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


@app.command()
def load(
    url: Annotated[str, typer.Option(help="Of the server, without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="As the server calls it.")] = "tiny",
    requests: Annotated[int, typer.Option(min=1)] = 32,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 8,
    words: Annotated[int, typer.Option(min=1, help="Of a prompt at most; each has its own number.")] = 32,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 32,
    timeout: Annotated[float, typer.Option(help="Seconds without a byte after which a request has failed.")] = 120.0,
    seed: int = 0,
) -> None:
    """Send many requests and print how they went."""
    draw = random.Random(seed)
    bodies = [
        {
            "model": model,
            "prompt": " ".join(draw.choices(WORDS, k=draw.randint(1, words))),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
        }
        for _ in range(requests)
    ]
    began = time.perf_counter()
    with ThreadPoolExecutor(min(concurrency, requests)) as clients:
        answers = list(clients.map(lambda body: ask(url, body, timeout), bodies))
    seconds = time.perf_counter() - began

    good = [answer for answer in answers if answer.error is None]
    tokens = sum(answer.tokens for answer in answers)
    print(f"{len(good)} of {requests} requests, {concurrency} at a time, {tokens} tokens in {seconds:.2f} s")
    if good:
        between = [(a.last - a.first) / (a.tokens - 1) for a in good if a.tokens > 1] or [math.nan]
        print(f"  {tokens / seconds:,.1f} tokens/s, {len(good) / seconds:,.2f} requests/s")
        for name, values in (
            ("time to first token", [a.first for a in good]),
            ("time per token after", between),
            ("latency", [a.last for a in good]),
        ):
            p50, p95 = (1e3 * percentile(values, percent) for percent in (50, 95))
            print(f"  {name:<21} p50 {p50:9,.1f} ms   p95 {p95:9,.1f} ms")
    for error in sorted({answer.error for answer in answers if answer.error}):
        count = sum(answer.error == error for answer in answers)
        print(f"  {count} failed: {error}")
    if len(good) < requests:
        sys.exit(1)


if __name__ == "__main__":
    app()
