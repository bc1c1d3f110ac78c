"""An HTTP server with streaming in front of the engine of ``engine.py``: continuous batching.

    python examples/serve.py --port 8000
    curl -N localhost:8000/generate -d '{"prompt": [8, 15, 22], "max_tokens": 20, "stream": true}'

=================  ==============================================================================
``POST /generate`` ``prompt``, a list of tokens; ``max_tokens``, 16 by default; ``stream``. The
                   answer is ``{"tokens": [...]}``; with ``stream``, server-sent events: one
                   ``{"token": n}`` per token, then ``{"tokens": [...]}``
``GET /health``    the numbers of waiting and running requests, and of free pages
=================  ==============================================================================

Requests join the batch of the next step and leave it with their last token. If a client
disconnects, its request is dropped and its pages are free at once. A request that the cache could
never hold is refused (413), and so is one that finds the queue full (503).

A step runs in a thread of its own; the event loop exchanges requests and tokens between steps. The
model is the one of ``engine.py``, with random weights.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import itertools
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request as HttpRequest
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
except ModuleNotFoundError as error:
    sys.exit(f"serve.py needs {error.name}: pip install starlette uvicorn")

import torch

MAX_WAITING = 1000
# seconds between checks that a client is still connected
PATIENCE = 0.2


def load_engine() -> ModuleType:
    """Load the example next to this one."""
    spec = importlib.util.spec_from_file_location("engine", Path(__file__).parent / "engine.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules.setdefault("engine", importlib.util.module_from_spec(spec))
    if not hasattr(module, "Engine"):
        spec.loader.exec_module(module)
    return module


engine = load_engine()


class Refused(Exception):
    """A refused request, with its HTTP status."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Batcher:
    """Runs steps of an engine while there are requests, and exchanges requests between steps."""

    def __init__(self, pages: int, max_waiting: int = MAX_WAITING) -> None:
        self.engine = engine.Engine(engine.Decoder(), pages=pages)
        self.max_waiting = max_waiting
        self.names = itertools.count()
        self.answers: dict[Any, asyncio.Queue[int | RuntimeError | None]] = {}
        # for the engine, before its next step
        self.new: list[Any] = []
        self.gone: list[Any] = []
        self.work = asyncio.Event()
        self.failed: Exception | None = None

    def submit(self, prompt: list[int], most: int) -> Any:
        """Take a request, or raise ``Refused``."""
        if self.failed is not None:
            raise Refused(500, f"the engine has failed: {self.failed}")
        request = engine.Request(f"{next(self.names)}", prompt, most)
        if not self.engine.fits(request):
            room = self.engine.pages * engine.PAGE
            raise Refused(
                413, f"prompt and answer may have {room + 1} tokens, got {len(prompt) + most}"
            )
        if len(self.engine.waiting) + len(self.new) >= self.max_waiting:
            raise Refused(503, f"{self.max_waiting} requests are waiting already")
        self.answers[request] = asyncio.Queue()
        self.new.append(request)
        self.work.set()
        return request

    def forget(self, request: Any) -> None:
        """Drop a request whose client is gone, if it is not done."""
        if self.answers.pop(request, None) is not None:
            self.gone.append(request)
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
                    self.hand_on(request)
        except Exception as error:
            self.failed = error
            for queue in self.answers.values():
                queue.put_nowait(RuntimeError(f"the engine has failed: {error}"))

    def take_over(self) -> None:
        """Pass new and dropped requests to the engine; no step runs meanwhile."""
        for request in self.new:
            self.engine.add(request)
        for request in self.gone:
            self.engine.cancel(request)
        self.new, self.gone = [], []

    def step(self) -> list[Any]:
        with torch.no_grad():
            found: list[Any] = self.engine.step()
        return found

    def hand_on(self, request: Any) -> None:
        queue = self.answers.get(request)
        if queue is not None:
            queue.put_nowait(request.tokens[-1])
            if request.is_done:
                queue.put_nowait(None)
                del self.answers[request]

    async def tokens(self, request: Any, http: HttpRequest) -> AsyncIterator[int]:
        """Yield the tokens of an answer until it ends or the client disconnects."""
        queue = self.answers[request]
        while not await http.is_disconnected():
            try:
                token = await asyncio.wait_for(queue.get(), PATIENCE)
            except asyncio.TimeoutError:
                continue
            if token is None:
                return
            if isinstance(token, RuntimeError):
                raise token
            yield token


class Stream(StreamingResponse):
    """Server-sent events of an answer; however they end, the request is dropped."""

    def __init__(self, batcher: Batcher, request: Any, http: HttpRequest) -> None:
        self.batcher, self.request = batcher, request
        super().__init__(self.events(http), media_type="text/event-stream")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.batcher.forget(self.request)

    async def events(self, http: HttpRequest) -> AsyncIterator[str]:
        found = []
        try:
            async for token in self.batcher.tokens(self.request, http):
                found.append(token)
                yield f"data: {json.dumps({'token': token})}\n\n"
            yield f"data: {json.dumps({'tokens': found})}\n\n"
        except RuntimeError as error:
            yield f"data: {json.dumps({'error': str(error)})}\n\n"


def check(body: Any) -> tuple[list[int], int, bool]:
    """Return prompt, max_tokens and stream of a request, or raise ``Refused``."""
    if not isinstance(body, dict) or (unknown := body.keys() - {"prompt", "max_tokens", "stream"}):
        what = sorted(unknown) if isinstance(body, dict) else type(body).__name__
        raise Refused(400, f"an object of prompt, max_tokens and stream is expected, got {what}")
    prompt, most, stream = body.get("prompt"), body.get("max_tokens", 16), body.get("stream", False)

    def is_int(x: Any) -> bool:
        return isinstance(x, int) and not isinstance(x, bool)

    if not isinstance(prompt, list) or not prompt or not all(map(is_int, prompt)):
        raise Refused(400, "prompt must be a list of at least one token, whole numbers")
    wrong = [token for token in prompt if not 0 <= token < engine.VOCABULARY]
    if wrong:
        raise Refused(400, f"prompt: tokens are from 0 to {engine.VOCABULARY - 1}, got {wrong[0]}")
    if not is_int(most) or most < 1:
        raise Refused(400, f"max_tokens must be a whole number of at least 1, got {most!r}")
    if not isinstance(stream, bool):
        raise Refused(400, f"stream must be true or false, got {stream!r}")
    return prompt, most, stream


def make_app(pages: int = engine.PAGES, max_waiting: int = MAX_WAITING) -> Starlette:
    """Return the application; ``app.state.batcher`` has the engine."""
    batcher = Batcher(pages, max_waiting)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(batcher.run())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def generate(http: HttpRequest) -> Response:
        try:
            prompt, most, stream = check(json.loads(await http.body()))
            request = batcher.submit(prompt, most)
        except ValueError as error:
            return JSONResponse({"error": f"no JSON: {error}"}, 400)
        except Refused as refused:
            return JSONResponse({"error": str(refused)}, refused.status)
        if stream:
            return Stream(batcher, request, http)
        try:
            return JSONResponse({"tokens": [x async for x in batcher.tokens(request, http)]})
        except RuntimeError as error:
            return JSONResponse({"error": str(error)}, 500)
        finally:
            batcher.forget(request)

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

    routes = [
        Route("/generate", generate, methods=["POST"]),
        Route("/health", health, methods=["GET"]),
    ]
    app = Starlette(routes=routes, lifespan=lifespan)
    app.state.batcher = batcher
    return app


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    parser.add_argument("--pages", type=int, default=engine.PAGES, help="of the cache")
    options = parser.parse_args(arguments)
    uvicorn.run(make_app(options.pages), host=options.host, port=options.port)
    return 0


if __name__ == "__main__":
    sys.exit(main())
