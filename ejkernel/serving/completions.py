"""OpenAI's completions API over HTTP: an application that answers the requests that `parsing` reads.

`POST /v1/completions` continues a text, in one response or as server-sent events; `GET /v1/models` names the model.
Every error is JSON with its status: 400 for invalid requests, 404, 405, 413 for a body that is too long, 429 while the
queue is full, 503 when the engine has stopped. No option is ignored: unsupported ones are refused by name.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from .parsing import Refused, Wanted, wanted_by
from .text import Stops, decode
from .worker import QueueFull, Stopped, Worker

MOST_BYTES = 1 << 20
# Why a request ends before its text does.
_ENDED = {"cancelled": "the request was cancelled", "failed": "the engine failed"}
_HUNG_UP = Response(status_code=499)  # nobody reads it


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
            Refused: lambda request, refused: _refusal(refused),
            ClientDisconnect: lambda request, error: _HUNG_UP,
            HTTPException: lambda request, error: _refusal(Refused(error.status_code, error.detail)),
            Exception: lambda request, error: _refusal(Refused(500, "the server failed")),
        }
        return Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)

    async def _models(self, request: HTTPRequest) -> Response:
        model = dict(id=self.model, object="model", created=self.created, owned_by="ejkernel")
        return JSONResponse({"object": "list", "data": [model]})

    async def _completions(self, request: HTTPRequest) -> Response:
        wanted = wanted_by(await self._body(request), self.model)
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
            return _Stream(_events(news, answer, wanted), lambda: self.worker.cancel(ticket))
        try:
            return await self._whole(request, news, answer, wanted)
        finally:
            self.worker.cancel(ticket)  # no effect if it has ended

    async def _whole(self, request: HTTPRequest, news: asyncio.Queue, answer: dict, wanted: Wanted) -> Response:
        """The whole response; an empty one with status 499 if the client disconnects."""

        async def collected() -> Response:
            pieces = [piece async for piece in _pieces(news, wanted)]
            if (reason := pieces[-1].reason) in _ENDED:
                raise Refused(503, _ENDED[reason])
            choice = _choice("".join(piece.text for piece in pieces), reason)
            used = wanted.used(sum(piece.tokens for piece in pieces))
            return JSONResponse({**answer, "choices": [choice], "usage": used})

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


# --- Responses --------------------------------------------------------------------------------------------------------


class _Piece(NamedTuple):
    """The text of a step, its number of tokens, and the finish reason or None."""

    text: str
    tokens: int
    reason: str | None


async def _pieces(news: asyncio.Queue, wanted: Wanted) -> AsyncIterator[_Piece]:
    """The pieces of a continuation, of which the last has a reason."""
    stops, reason = Stops(wanted.stop), None
    while reason is None:
        new, reason = await news.get()
        text = decode(new[:-1] if reason == "stop" else new)  # the end token is not part of the text
        text, found = stops.add(text, is_last=reason is not None)
        reason = "stop" if found else reason
        yield _Piece(text, len(new), reason)


async def _events(news: asyncio.Queue, answer: dict[str, Any], wanted: Wanted) -> AsyncIterator[str]:
    """The response as server-sent events, one for the text of each step."""
    count, no_usage = 0, {"usage": None} if wanted.usage else {}
    async for text, tokens, reason in _pieces(news, wanted):
        count += tokens
        if reason in _ENDED:
            yield _event({"error": dict(message=_ENDED[reason], type="server_error")})
        elif text or reason:
            yield _event({**answer, "choices": [_choice(text, reason)], **no_usage})
    if wanted.usage:
        yield _event({**answer, "choices": [], "usage": wanted.used(count)})
    yield "data: [DONE]\n\n"


def _refusal(refused: Refused) -> Response:
    """An error as OpenAI's clients expect it."""
    kinds = {429: "rate_limit_error", 503: "server_error", 500: "server_error"}
    kind = kinds.get(refused.status, "invalid_request_error")
    error = dict(message=refused.message, type=kind, param=refused.param, code=None)
    headers = {"Retry-After": "1"} if refused.status == 429 else None
    # Escaped to ASCII, since a name that a client sends may have surrogates, which UTF-8 does not have.
    return Response(json.dumps({"error": error}), refused.status, headers, "application/json")


def _choice(text: str, reason: str | None) -> dict[str, Any]:
    return dict(index=0, text=text, logprobs=None, finish_reason=reason)


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"
