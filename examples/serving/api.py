"""OpenAI-style completions over HTTP: `POST /v1/completions`, `GET /v1/models`, `GET /health`.

A request is checked here, wholly, before the engine hears of it. Beside what OpenAI's answers hold, a choice has
`token_ids`, the new tokens.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from serving.batch import Sampling
from serving.scheduler import Piece, QueueFull, Refused, Request, Scheduler
from serving.text import GrowingText, Tokenizer

MOST_STOPS = 4
LOOK_EVERY = 0.5  # seconds between looks whether the client is still there


@dataclasses.dataclass(frozen=True)
class Served:
    """What the server answers for."""

    name: str
    tokenizer: Tokenizer
    vocabulary: int
    max_length: int  # tokens of prompt and answer together
    end_tokens: frozenset[int]


class CompletionRequest(BaseModel):
    """The fields that are known; any other is refused rather than ignored."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    prompt: str | list[int]
    max_tokens: int = Field(16, ge=1)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    ignore_eos: bool = False  # go on to max_tokens
    stream: bool = False
    n: Literal[1] = 1
    echo: Literal[False] = False
    user: str | None = None


class Refusal(Exception):
    """An answer of OpenAI's error form."""

    def __init__(self, status: int, message: str, parameter: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.parameter, self.code = status, message, parameter, code

    def response(self) -> JSONResponse:
        """With Retry-After where trying again helps."""
        retry = {"Retry-After": "1"} if self.status == 429 else None
        return JSONResponse(self.body(), self.status, retry)

    def body(self) -> dict[str, Any]:
        """OpenAI's form."""
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.parameter, "code": self.code}}


def build_app(served: Served, scheduler: Scheduler) -> FastAPI:
    """The application that hands requests to `scheduler`."""
    app = FastAPI(title="epmoe", docs_url=None, redoc_url=None)

    @app.exception_handler(Refusal)
    async def refused(_: HttpRequest, refusal: Refusal) -> JSONResponse:
        return refusal.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(_: HttpRequest, error: RequestValidationError) -> JSONResponse:
        return _explained(error).response()

    @app.exception_handler(HTTPException)
    async def no_such_path(http: HttpRequest, error: HTTPException) -> JSONResponse:
        return Refusal(error.status_code, f"{http.method} {http.url.path}: {error.detail}").response()

    @app.get("/health")
    async def health() -> JSONResponse:
        running, waiting = scheduler.load()
        load = {"running": running, "done": list(scheduler.done), "waiting": waiting}
        if scheduler.stopping:
            return JSONResponse({"status": "stopping", **load}, 503)
        return JSONResponse({"status": "ok", **load})

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        card = {"id": served.name, "object": "model", "owned_by": "epmoe", "max_model_len": served.max_length}
        return {"object": "list", "data": [card]}

    @app.post("/v1/completions", response_model=None)
    async def completions(asked: CompletionRequest, http: HttpRequest) -> StreamingResponse | dict[str, Any]:
        pieces: asyncio.Queue[Piece] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        request = _checked(served, asked, lambda piece: loop.call_soon_threadsafe(pieces.put_nowait, piece))
        try:
            scheduler.submit(request)
        except QueueFull as error:
            raise Refusal(429, str(error)) from None
        except Refused as error:
            raise Refusal(503, str(error)) from None
        head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": served.name,
        }
        if asked.stream:
            return StreamingResponse(_events(head, request, pieces, scheduler), media_type="text/event-stream")
        return await _whole(head, request, pieces, scheduler, http)

    return app


async def _events(
    head: dict[str, Any], request: Request, pieces: asyncio.Queue[Piece], scheduler: Scheduler
) -> AsyncIterator[str]:
    """One event per token; `[DONE]` after the last."""
    try:
        while True:
            piece = await pieces.get()
            if piece.error is not None:
                yield _event(Refusal(503, piece.error).body())
                return
            yield _event({**head, "choices": [_choice(piece.text, [piece.token], piece.finish)]})
            if piece.finish is not None:
                yield "data: [DONE]\n\n"
                return
    finally:  # a client that has gone away ends up here too
        scheduler.cancel(request)


async def _whole(
    head: dict[str, Any], request: Request, pieces: asyncio.Queue[Piece], scheduler: Scheduler, http: HttpRequest
) -> dict[str, Any]:
    """All of the answer at once."""
    text, tokens = "", []
    try:
        while True:
            try:
                piece = await asyncio.wait_for(pieces.get(), LOOK_EVERY)
            except TimeoutError:
                if await http.is_disconnected():
                    raise Refusal(499, "the client has gone away") from None
                continue
            if piece.error is not None:
                raise Refusal(503, piece.error)
            text += piece.text
            tokens.append(piece.token)
            if piece.finish is not None:
                break
            if len(tokens) % 16 == 0 and await http.is_disconnected():
                raise Refusal(499, "the client has gone away")
    finally:
        scheduler.cancel(request)
    usage = {"prompt_tokens": len(request.prompt), "completion_tokens": len(tokens)}
    usage["total_tokens"] = sum(usage.values())
    return {**head, "choices": [_choice(text, tokens, piece.finish)], "usage": usage}


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _choice(text: str, tokens: list[int | None], finish: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "token_ids": tokens, "finish_reason": finish, "logprobs": None}


def _checked(served: Served, asked: CompletionRequest, emit: Any) -> Request:
    """The request as the scheduler takes it.

    Raises:
        Refusal: it can't be served; says why.
    """
    if asked.model != served.name:
        raise Refusal(
            404, f"model {asked.model!r} is not served here: this is {served.name!r}", "model", "model_not_found"
        )
    prompt = served.tokenizer.encode(asked.prompt) if isinstance(asked.prompt, str) else asked.prompt
    if not prompt:
        raise Refusal(400, "prompt: must have at least one token", "prompt")
    if wrong := [token for token in prompt if not 0 <= token < served.vocabulary]:
        raise Refusal(400, f"prompt: token id {wrong[0]} is not in [0, {served.vocabulary})", "prompt")
    if (length := len(prompt) + asked.max_tokens) > served.max_length:
        raise Refusal(
            400,
            f"{len(prompt)} tokens of prompt and max_tokens={asked.max_tokens} are {length} together: must be at most "
            f"{served.max_length}",
            "max_tokens",
            "context_length_exceeded",
        )
    stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
    if len(stops) > MOST_STOPS or "" in stops:
        raise Refusal(400, f"stop={stops!r}: must be at most {MOST_STOPS} texts, none of them empty", "stop")
    seed = secrets.randbits(63) if asked.seed is None else asked.seed
    return Request(
        prompt,
        asked.max_tokens,
        Sampling(asked.temperature, asked.top_p, seed),
        GrowingText(served.tokenizer, stops),
        frozenset() if asked.ignore_eos else served.end_tokens,
        emit,
    )


def _explained(error: RequestValidationError) -> Refusal:
    """What pydantic found, said of the field that the client wrote."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return Refusal(400, f"the body is no JSON: {first['ctx']['error']}")
    if first["type"] in ("model_attributes_type", "model_type"):
        return Refusal(400, "the body must be a JSON object, sent with Content-Type: application/json")
    place = [str(part) for part in first["loc"] if part != "body"]
    field = place[0] if place else None
    if field == "prompt" and first["type"] != "missing":
        return Refusal(400, "prompt: must be one text or one list of token ids", field)
    known = ", ".join(CompletionRequest.model_fields)
    if first["type"] == "extra_forbidden":
        return Refusal(400, f"{field}: not known here; known are {known}", field)
    given = "" if first["type"] == "missing" or field is None else f"={str(first['input'])[:40]!r}"
    return Refusal(400, f"{field or 'the body'}{given}: {first['msg'].lower()}", field)
