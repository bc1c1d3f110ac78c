"""A server of OpenAI's API in front of the engine of ``engine.py``: continuous batching.

    python examples/serve.py --port 8000                         the tiny model of engine.py
    python examples/serve.py --model Qwen/Qwen3-0.6B --device cuda    a model of transformers
    curl localhost:8000/v1/completions -d '{"model": "tiny", "prompt": "Hello", "temperature": 0}'

============================  ====================================================================
``GET /v1/models``            the one model that is served, by the name that requests have to give
``POST /v1/completions``      continues ``prompt``, a text or a list of tokens
``POST /v1/chat/completions`` answers ``messages`` of texts
``GET /health``               the numbers of waiting and running requests, and of free pages
============================  ====================================================================

Both take ``max_tokens``, ``temperature``, ``top_p``, ``seed``, ``stop``, ``stream`` and
``stream_options``; ``serving/protocol.py`` has all fields, and refuses the others by name.

Requests join the batch of the next step and leave it with their last token. If a client
disconnects, its request is dropped and its pages are free at once. A request that the cache could
never hold is refused (400), and so is one that finds the queue full (503).

A step runs in a thread of its own; the event loop exchanges requests and tokens between steps.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

try:
    import uvicorn
    from pydantic import ValidationError
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request as HttpRequest
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
except ModuleNotFoundError as error:
    sys.exit(f"serve.py needs {error.name}: pip install pydantic starlette uvicorn")

import engine
import torch
from serving.protocol import Asked, Chat, Completion, RefusedError, Reply, refusal_of
from serving.text import Letters, Writer, sampler

MAX_WAITING = 1000
# of the engine, for a model of transformers
LARGE = {"page": 16, "tokens": 2048, "sequences": 64}
PAGES = 2048
# seconds between checks that a client is still connected
PATIENCE = 0.2


class Answer:
    """What a request is given: pieces of text, the last of them with the reason of its end."""

    def __init__(self, request: Any, writer: Writer) -> None:
        self.request, self.writer = request, writer
        self.pieces: asyncio.Queue[tuple[str, str | None] | RuntimeError] = asyncio.Queue()

    @property
    def tokens(self) -> int:
        return len(self.request.answer)

    def hand_on(self) -> bool:
        """Hand on the text of the newest token; return whether it was the last one."""
        token = self.request.tokens[-1]
        has_ended = token in self.request.ends
        if not has_ended:
            self.writer.write(token)
        is_done = self.request.is_done
        text, is_stopped = self.writer.rest() if is_done else self.writer.certain()
        reason = "stop" if is_stopped or has_ended else "length" if is_done else None
        if text or reason:
            self.pieces.put_nowait((text, reason))
        return reason is not None


class Batcher:
    """Runs steps of an engine while there are requests, and exchanges requests between steps."""

    def __init__(self, of: Any, tokenizer: Any, max_waiting: int) -> None:
        self.engine, self.tokenizer, self.max_waiting = of, tokenizer, max_waiting
        self.names = itertools.count()
        self.answers: dict[Any, Answer] = {}
        # for the engine, before its next step
        self.new: list[Any] = []
        self.gone: list[Any] = []
        self.work = asyncio.Event()
        self.failed: Exception | None = None

    @property
    def room(self) -> int:
        """The most tokens that a prompt and its answer may have."""
        # the last token of an answer is never written
        room = self.engine.pages * self.engine.page + 1
        return min(room, getattr(self.engine.model, "longest", room))

    def submit(self, asked: Asked) -> Answer:
        """Take a request, or raise ``RefusedError``."""
        if self.failed is not None:
            raise RefusedError(500, f"the engine has failed: {self.failed}")
        prompt, param = self.read(asked)
        most = asked.max_tokens or getattr(asked, "max_completion_tokens", None)
        if most is None:
            most = max(1, self.room - len(prompt)) if isinstance(asked, Chat) else 16
        if len(prompt) + most > self.room:
            what = f"{param} and answer may have {self.room} tokens, got {len(prompt)} and {most}"
            raise RefusedError(400, what, param, "context_length_exceeded")
        if len(self.engine.waiting) + len(self.new) >= self.max_waiting:
            raise RefusedError(503, f"{self.max_waiting} requests are waiting already")
        temperature, top_p = (1.0 if x is None else x for x in (asked.temperature, asked.top_p))
        pick = sampler(temperature, top_p, asked.seed)
        name, ends = f"{next(self.names)}", self.tokenizer.ends
        request = engine.Request(name, prompt, most, pick, ends)
        answer = Answer(request, Writer(self.tokenizer.decode, asked.stops))
        self.answers[request] = answer
        self.new.append(request)
        self.work.set()
        return answer

    def read(self, asked: Asked) -> tuple[list[int], str]:
        """Return the tokens of what was asked, and the name of the field that has them."""
        if isinstance(asked, Chat):
            try:
                return self.tokenizer.chat(
                    [message.plain for message in asked.messages]
                ), "messages"
            except ValueError as error:
                raise RefusedError(400, f"messages: {error}", "messages") from error
        assert isinstance(asked, Completion)
        tokens = (
            self.tokenizer.encode(asked.prompt) if isinstance(asked.prompt, str) else asked.prompt
        )
        if not tokens:
            raise RefusedError(400, "prompt: at least one token is needed, got none", "prompt")
        if max(tokens) >= (count := self.tokenizer.vocabulary):
            what = f"prompt: tokens are from 0 to {count - 1}, got {max(tokens)}"
            raise RefusedError(400, what, "prompt")
        return tokens, "prompt"

    def forget(self, answer: Answer) -> None:
        """Drop a request whose client is gone, if it is not done."""
        if self.answers.pop(answer.request, None) is not None:
            self.gone.append(answer.request)
            self.work.set()

    async def run(self) -> None:
        """Serve until cancelled. If a step fails, all waiting requests get an error."""
        try:
            while True:
                await self.work.wait()
                self.take_over()
                if not self.engine.waiting and not self.engine.running:
                    self.work.clear()
                    continue
                # cancelling waits for a running step
                answered = await asyncio.shield(asyncio.to_thread(self.step))
                for request in answered:
                    answer = self.answers.get(request)
                    if answer is not None and answer.hand_on():
                        # a stop string ends what the engine would go on with
                        self.forget(answer)
        except Exception as error:
            self.failed = error
            for answer in self.answers.values():
                answer.pieces.put_nowait(RuntimeError(f"the engine has failed: {error}"))

    def take_over(self) -> None:
        """Pass new and dropped requests to the engine; no step runs meanwhile."""
        for request in self.new:
            self.engine.add(request)
        for request in self.gone:
            self.engine.cancel(request)
        self.new, self.gone = [], []

    def step(self) -> list[Any]:
        with torch.no_grad(), self.engine.caches.device:
            found: list[Any] = self.engine.step()
        return found

    async def pieces(self, answer: Answer, http: HttpRequest) -> AsyncIterator[tuple[str, Any]]:
        """Yield an answer's text until it ends or the client disconnects."""
        try:
            while not await http.is_disconnected():
                try:
                    piece = await asyncio.wait_for(answer.pieces.get(), PATIENCE)
                except asyncio.TimeoutError:
                    continue
                if isinstance(piece, RuntimeError):
                    raise RefusedError(500, str(piece))
                yield piece
                if piece[1] is not None:
                    return
        finally:
            self.forget(answer)


class Stream(StreamingResponse):
    """Server-sent events of an answer; however they end, the request is dropped."""

    def __init__(self, batcher: Batcher, answer: Answer, reply: Reply, http: HttpRequest) -> None:
        self.batcher, self.answer, self.reply = batcher, answer, reply
        super().__init__(self.events(http), media_type="text/event-stream")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.batcher.forget(self.answer)

    async def events(self, http: HttpRequest) -> AsyncIterator[str]:
        async for piece in self.forms(http):
            yield f"data: {json.dumps(piece)}\n\n"
        yield "data: [DONE]\n\n"

    async def forms(self, http: HttpRequest) -> AsyncIterator[Any]:
        is_first = True
        try:
            async for text, reason in self.batcher.pieces(self.answer, http):
                yield self.reply.piece(text, reason, is_first=is_first)
                is_first = False
            if self.reply.has_usage:
                yield self.reply.last(self.answer.tokens)
        except RefusedError as refused:
            yield refused.body


def make_app(
    pages: int = engine.PAGES,
    max_waiting: int = MAX_WAITING,
    model: Any = None,
    name: str = "tiny",
    **sizes: int,
) -> Starlette:
    """Return the application; ``app.state.batcher`` has the engine.

    ``model`` is both model and tokenizer; without one it is that of ``engine.py``, with letters.
    ``sizes`` are those of the engine: of a page, and how many tokens and sequences a step has.
    """
    made = engine.Engine(model or engine.Decoder(), pages=pages, **sizes)
    batcher = Batcher(made, model or Letters(), max_waiting)
    told = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "you"}

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(batcher.run())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    def check_name(asked: str) -> None:
        if asked != name:
            what = f"model: {name!r} is served here, got {asked!r}"
            raise RefusedError(404, what, "model", "model_not_found")

    async def answer(http: HttpRequest, form: type[Asked]) -> Response:
        asked = form.model_validate_json(await http.body())
        check_name(asked.model)
        found = batcher.submit(asked)
        reply = Reply(asked, len(found.request.prompt))
        if asked.stream:
            return Stream(batcher, found, reply, http)
        pieces = [piece async for piece in batcher.pieces(found, http)]
        # a client that has gone reads nothing of this
        reason = pieces[-1][1] if pieces else None
        text = "".join(text for text, _ in pieces)
        return JSONResponse(reply.whole(text, reason, found.tokens))

    async def complete(http: HttpRequest) -> Response:
        return await answer(http, Completion)

    async def chat(http: HttpRequest) -> Response:
        return await answer(http, Chat)

    async def models(_: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [told]})

    async def one_model(http: HttpRequest) -> Response:
        check_name(http.path_params["name"])
        return JSONResponse(told)

    async def health(_: HttpRequest) -> Response:
        of = batcher.engine
        counts = {
            "waiting": len(of.waiting) + len(batcher.new),
            "running": len(of.running),
            "pages": of.pages,
            "free_pages": len(of.free),
            "steps": of.steps,
            "preempted": of.preempted,
        }
        return JSONResponse(counts, 500 if batcher.failed else 200)

    async def refuse(_: HttpRequest, error: Any) -> Response:
        if isinstance(error, ValidationError):
            error = refusal_of(error)
        elif isinstance(error, HTTPException):
            error = RefusedError(error.status_code, error.detail)
        return JSONResponse(error.body, error.status)

    routes = [
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", one_model),
        Route("/health", health),
    ]
    refused = dict.fromkeys((RefusedError, ValidationError, HTTPException), refuse)
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=refused)
    app.state.batcher = batcher
    return app


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        formatter_class=argparse.ArgumentDefaultsHelpFormatter, description=__doc__.splitlines()[0]
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    parser.add_argument("--pages", type=int, help="of the cache")
    parser.add_argument("--model", help="a folder or a name on the hub; needs transformers")
    parser.add_argument("--device", default="cpu", help="of the --model")
    options = parser.parse_args(arguments)
    if options.model is None:
        app = make_app(options.pages or engine.PAGES)
    else:
        from serving.pretrained import Pretrained

        model = Pretrained(options.model, options.device)
        app = make_app(options.pages or PAGES, model=model, name=options.model, **LARGE)
    uvicorn.run(app, host=options.host, port=options.port)
    return 0


if __name__ == "__main__":
    sys.exit(main())
