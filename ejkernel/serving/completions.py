"""OpenAI's completions API over HTTP: parsing of requests, responses and errors.

`POST /v1/completions` continues a text, in one response or as server-sent events; `GET /v1/models` names the model.
Every error is JSON with its status: 400 for invalid requests, 404, 405, 413 for a body that is too long, 429 while the
queue is full, 503 when the engine has stopped. No option is ignored: unsupported ones are refused by name.
"""

import asyncio
import json
import math
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ..errors import shown
from .sampling import Sampling
from .text import decode, encode
from .worker import QueueFull, Stopped, Worker

MOST_BYTES = 1 << 20
# Options of the protocol that are not supported, and the values that are accepted as they change nothing.
_NEUTRAL = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (),
    "suffix": (),
    "stop": ([],),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "stream_options": (),
}


# Why a request ends before its text does.
_ENDED = {"cancelled": "the request was cancelled", "failed": "the engine failed"}
_HUNG_UP = Response(status_code=499)  # nobody reads it


class Refused(Exception):
    """A request that is answered by an error."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param

    def response(self) -> Response:
        """The error as OpenAI's clients expect it."""
        kinds = {429: "rate_limit_error", 503: "server_error", 500: "server_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        error = dict(message=self.message, type=kind, param=self.param, code=None)
        headers = {"Retry-After": "1"} if self.status == 429 else None
        # Escaped to ASCII, since a name that a client sends may have surrogates, which UTF-8 does not have.
        return Response(json.dumps({"error": error}), self.status, headers, "application/json")


@dataclass(frozen=True)
class Wanted:
    """A parsed and valid request."""

    prompt: list[int]
    sampling: Sampling
    stream: bool


class Completions:
    """The HTTP application of a worker and the name of its model."""

    def __init__(self, worker: Worker, model: str, most_bytes: int = MOST_BYTES) -> None:
        self.worker, self.model, self.most_bytes = worker, model, most_bytes
        self.created = int(time.time())

    def application(self) -> Starlette:
        """The ASGI application for a server; the worker is closed with it."""

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            yield
            await asyncio.to_thread(self.worker.close)

        routes = [
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
        ]
        handlers = {
            Refused: lambda request, refused: refused.response(),
            ClientDisconnect: lambda request, error: _HUNG_UP,
            HTTPException: lambda request, error: Refused(error.status_code, error.detail).response(),
            Exception: lambda request, error: Refused(500, "the server failed").response(),
        }
        return Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)

    async def _models(self, request: HTTPRequest) -> Response:
        model = dict(id=self.model, object="model", created=self.created, owned_by="ejkernel")
        return JSONResponse({"object": "list", "data": [model]})

    async def _completions(self, request: HTTPRequest) -> Response:
        wanted = self._understood(await self._body(request))
        loop, news = asyncio.get_running_loop(), asyncio.Queue()

        def listener(*told: Any) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(news.put_nowait, told)

        try:
            ticket = self.worker.submit(wanted.prompt, wanted.sampling, listener)
        except ValueError as error:
            raise Refused(400, str(error), "prompt") from None
        except QueueFull as error:
            raise Refused(429, str(error)) from None
        except Stopped as error:
            raise Refused(503, str(error)) from None
        answer = dict(id=f"cmpl-{secrets.token_hex(12)}", object="text_completion", created=int(time.time()))
        answer["model"] = self.model
        if wanted.stream:
            return _Stream(self._events(news, answer), lambda: self.worker.cancel(ticket))
        try:
            return await self._whole(request, news, answer, wanted)
        finally:
            self.worker.cancel(ticket)  # no effect if it has ended

    async def _whole(self, request: HTTPRequest, news: asyncio.Queue, answer: dict, wanted: Wanted) -> Response:
        """The whole response; an empty one with status 499 if the client disconnects."""

        async def collected() -> Response:
            tokens, reason = [], None
            while reason is None:
                new, reason = await news.get()
                tokens += new
            if reason not in ("stop", "length"):
                raise Refused(503, _ENDED[reason])
            usage = dict(prompt_tokens=len(wanted.prompt), completion_tokens=len(tokens))
            usage["total_tokens"] = sum(usage.values())
            return JSONResponse({**answer, "choices": [_choice(tokens, reason)], "usage": usage})

        async def hung_up() -> Response:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            return _HUNG_UP

        tasks = [asyncio.ensure_future(collected()), asyncio.ensure_future(hung_up())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in tasks:
                task.cancel()

    async def _events(self, news: asyncio.Queue, answer: dict) -> AsyncIterator[str]:
        """The response as server-sent events, one for the tokens of each step."""
        reason = None
        while reason is None:
            new, reason = await news.get()
            if reason in (None, "stop", "length"):
                yield _event({**answer, "choices": [_choice(new, reason)]})
            else:
                yield _event({"error": dict(message=_ENDED[reason], type="server_error")})
        yield "data: [DONE]\n\n"

    # --- Parsing of requests

    async def _body(self, request: HTTPRequest) -> dict[str, Any]:
        """The JSON object in the body, of which at most `most_bytes` are read."""
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self.most_bytes:
                raise Refused(413, f"the body is longer than {self.most_bytes} bytes")
        try:
            sent = json.loads(bytes(body))
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the body is not JSON: {error}") from None
        if not isinstance(sent, dict):
            raise Refused(400, "the body must be a JSON object")
        return sent

    def _understood(self, sent: dict[str, Any]) -> Wanted:
        sent = {name: value for name, value in sent.items() if value is not None}
        if "prompt" not in sent:
            raise Refused(400, "there is no prompt", "prompt")
        if (model := _get(sent, "model", str, self.model)) != self.model:
            raise Refused(404, f"there is no model {shown(model)} here, but {self.model!r}", "model")
        _get(sent, "user", str, "")  # an id of the end user, which has no effect
        end = _get(sent, "stop_token_ids", list, [])
        if not all(type(token) is int for token in end):
            raise Refused(400, "stop_token_ids must be integers", "stop_token_ids")
        options = dict(
            max_tokens=_get(sent, "max_tokens", int, 16),
            temperature=_number(sent, "temperature", 1.0),
            top_k=_get(sent, "top_k", int, 0),
            top_p=_number(sent, "top_p", 1.0),
            seed=_get(sent, "seed", int, secrets.randbits(32)),
            end=tuple(end),
        )
        wanted = dict(prompt=_prompt(sent.pop("prompt")), stream=_get(sent, "stream", bool, False))
        for name, value in sent.items():
            if name not in _NEUTRAL:
                raise Refused(400, f"there is no option {shown(name)}", name)
            if not any((value, type(value) is bool) == (x, type(x) is bool) for x in _NEUTRAL[name]):
                raise Refused(400, f"{name} is not supported", name)
        try:
            return Wanted(sampling=Sampling(**options), **wanted)
        except ValueError as error:
            raise Refused(400, str(error)) from None


class _Stream(StreamingResponse):
    """Server-sent events. When the stream ends, also because the client disconnects, the request is cancelled."""

    def __init__(self, events: AsyncIterator[str], cancel: Any) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._cancel = cancel

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._cancel()


def _get(sent: dict[str, Any], name: str, kind: Any, default: Any) -> Any:
    """Removes an option from the sent object and returns it; raises if its type is wrong (a bool is no number)."""
    value = sent.pop(name, default)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise Refused(400, f"{name} is {json.dumps(value)[:40]}, which is of the wrong type", name)
    return value


def _number(sent: dict[str, Any], name: str, default: float) -> float:
    value = _get(sent, name, (int, float), default)
    return float(value) if abs(value) < 1e30 else math.inf  # an integer may exceed the range of floats


def _prompt(sent: Any) -> list[int]:
    """One prompt, as text or as tokens."""
    if isinstance(sent, str):
        try:
            return encode(sent)
        except ValueError as error:
            raise Refused(400, str(error), "prompt") from None
    if isinstance(sent, list) and all(type(token) is int for token in sent):
        return sent
    raise Refused(400, "prompt must be one text, or a list of tokens", "prompt")


def _choice(tokens: list[int], reason: str | None) -> dict[str, Any]:
    text = decode(tokens[:-1] if reason == "stop" else tokens)  # the end token is not part of the text
    return dict(index=0, text=text, logprobs=None, finish_reason=reason)


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"
