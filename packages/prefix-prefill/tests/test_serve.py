"""The HTTP server of the examples, under load from a real client.

``PREFIX_PREFILL_EXAMPLES`` makes the load heavier, as in the soak session: ten requests an example.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from prefix_prefill._paged import ops

SCRIPT = Path(__file__).parent.parent / "examples" / "serve.py"
REQUESTS = max(200, 10 * int(os.environ.get("PREFIX_PREFILL_EXAMPLES", "0")))
PAGES = 14

pytestmark = [
    pytest.mark.eager,
    pytest.mark.skipif(ops.interpreted(), reason="an interpreted model takes minutes"),
]


@pytest.fixture
def serve(monkeypatch) -> ModuleType:
    monkeypatch.delitem(sys.modules, "engine", raising=False)
    spec = importlib.util.spec_from_file_location("serve", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "engine", module.engine)
    return module


@contextlib.contextmanager
def served(app: Any) -> Iterator[str]:
    """Serve an application from a thread; yield its address."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="warning", ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


@pytest.fixture
def client(serve):
    """A server whose cache holds a few sequences, and how to ask it."""
    app = serve.make_app(PAGES)
    with served(app) as url, httpx.Client(base_url=url, timeout=60) as http:
        yield SimpleNamespace(http=http, url=url, batcher=app.state.batcher)


def wait_until_idle(client: Any) -> dict[str, int]:
    """Wait until no request is left, and return the server's counts."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        health = client.http.get("/health").json()
        if health["waiting"] == health["running"] == 0:
            return health
        time.sleep(0.05)
    raise AssertionError(f"requests are left: {health}")


async def ask(http: Any, body: dict[str, Any], leave_after: int | None) -> Any:
    """Return an answer, ``"left"`` where the client goes after some tokens, or a status."""
    if not body["stream"]:
        if leave_after is not None:
            patience = httpx.Timeout(300, read=0.02 * (1 + leave_after))
            with contextlib.suppress(httpx.ReadTimeout):
                reply = await http.post("/generate", json=body, timeout=patience)
                return reply.json()["tokens"] if reply.status_code == 200 else reply.status_code
            return "left"
        reply = await http.post("/generate", json=body)
        return reply.json()["tokens"] if reply.status_code == 200 else reply.status_code
    tokens = []
    async with http.stream("POST", "/generate", json=body) as reply:
        if reply.status_code != 200:
            return reply.status_code
        async for line in reply.aiter_lines():
            if not line:
                continue
            found = json.loads(line.removeprefix("data: "))
            if "tokens" in found:
                # what came token by token is the answer
                assert found["tokens"] == tokens
                return tokens
            tokens.append(found["token"])
            if leave_after is not None and len(tokens) > leave_after:
                return "left"
    raise AssertionError(f"the stream broke off after {tokens}")


def test_nothing_is_lost_under_load(serve, client):
    engine, rng = serve.engine, random.Random(4)
    system = [rng.randrange(8, engine.VOCABULARY) for _ in range(2 * engine.PAGE + 1)]
    prompts = [[rng.randrange(8, engine.VOCABULARY) for _ in range(1 + i)] for i in range(16)]
    prompts += [system + prompt for prompt in prompts[::4]]
    # of which some need several chunks, and the last more than any other leaves room for
    prompts += [(prompts[-1] * 4)[: 3 * engine.TOKENS_PER_STEP]]
    room = PAGES * engine.PAGE
    bodies, leaves = [], []
    for i in range(REQUESTS):
        body = {"prompt": rng.choice(prompts), "max_tokens": rng.randint(1, 6)}
        if i % 20 == 7:
            body["prompt"] = [8] * (room + i)
        bodies.append({**body, "stream": i % 3 != 0})
        leaves.append(rng.randrange(4) if i % 5 == 1 else None)

    async def all_at_once() -> list[Any]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=client.url, timeout=300, limits=limits) as http:
            asked = (ask(http, *each) for each in zip(bodies, leaves, strict=True))
            return await asyncio.gather(*asked)

    answers = asyncio.run(all_at_once())
    health = wait_until_idle(client)

    model = engine.Decoder()
    known: dict[str, list[int]] = {}
    counts = {"left": 0, 413: 0, "answered": 0}
    for body, leave, answer in zip(bodies, leaves, answers, strict=True):
        if len(body["prompt"]) > room:
            assert answer == 413
            counts[413] += 1
        elif answer == "left":
            assert leave is not None
            counts["left"] += 1
        else:
            key = str(body["prompt"])
            if key not in known:
                known[key] = engine.without_cache(model, body["prompt"], 6)
            assert answer == known[key][: body["max_tokens"]]
            counts["answered"] += 1
    assert counts[413] == REQUESTS // 20
    assert counts["left"] > REQUESTS // 20
    assert counts["answered"] > REQUESTS // 2
    # every page is back, and nobody is remembered
    of = client.batcher.engine
    assert health["free_pages"] == health["pages"] == PAGES
    assert sorted(of.free) == list(range(PAGES))
    assert not any(of.users)
    assert not of.known
    assert not client.batcher.answers
    assert health["steps"] < sum(len(body["prompt"]) + 6 for body in bodies) // 4


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_ends_when_its_client_goes(stream, serve, client, monkeypatch):
    engine = serve.engine
    most = 60
    prompts = ([8 + i] for i in range(50))
    answers = ((p, engine.without_cache(engine.Decoder(), p, most)) for p in prompts)
    prompt = next(p for p, answer in answers if len(answer) == most)
    step = client.batcher.engine.step
    # slow enough for a client to go meanwhile
    monkeypatch.setattr(client.batcher.engine, "step", lambda: (time.sleep(0.05), step())[1])
    body = {"prompt": prompt, "max_tokens": most, "stream": stream}

    async def leave() -> Any:
        async with httpx.AsyncClient(base_url=client.url, timeout=60) as http:
            return await ask(http, body, 2)

    assert asyncio.run(leave()) == "left"
    health = wait_until_idle(client)
    assert health["steps"] < most // 2
    assert health["free_pages"] == PAGES
    assert not client.batcher.answers


def test_what_cannot_be_served_is_refused(serve, client, monkeypatch):
    good = {"prompt": [8, 9], "max_tokens": 2}
    for change, what in (
        ({"prompt": []}, "prompt must be a list of at least one token"),
        ({"prompt": "hello"}, "prompt must be a list"),
        ({"prompt": [8, True]}, "prompt must be a list"),
        ({"prompt": [serve.engine.VOCABULARY]}, "tokens are from 0 to 100, got 101"),
        ({"max_tokens": 0}, "max_tokens must be a whole number of at least 1, got 0"),
        ({"stream": 1}, "stream must be true or false, got 1"),
        ({"temperature": 1.0}, "temperature"),
    ):
        reply = client.http.post("/generate", json={**good, **change})
        assert reply.status_code == 400
        assert what in reply.json()["error"]
    assert client.http.post("/generate", content=b"{").status_code == 400
    assert client.http.post("/generate", json=[1]).status_code == 400
    assert client.http.get("/generate").status_code == 405
    assert client.http.get("/nothing").status_code == 404
    # the longest that there is room for, and one token more
    longest = {"prompt": [8] * (PAGES * serve.engine.PAGE), "max_tokens": 1}
    assert len(client.http.post("/generate", json=longest).json()["tokens"]) == 1
    reply = client.http.post("/generate", json={**longest, "max_tokens": 2})
    assert reply.status_code == 413
    assert "113 tokens, got 114" in reply.json()["error"]
    monkeypatch.setattr(client.batcher, "max_waiting", 0)
    assert client.http.post("/generate", json=good).status_code == 503
    assert wait_until_idle(client)["free_pages"] == PAGES


def test_everybody_is_told_where_a_step_fails(client, monkeypatch):
    def fail() -> None:
        raise RuntimeError("no more memory")

    monkeypatch.setattr(client.batcher.engine, "step", fail)
    body = {"prompt": [8, 9], "max_tokens": 2}
    for _ in "then, and afterwards":
        reply = client.http.post("/generate", json=body)
        assert reply.status_code == 500
        assert reply.json()["error"] == "the engine has failed: no more memory"
    assert client.http.get("/health").status_code == 500


@pytest.mark.parametrize("library", ["starlette", "uvicorn"])
def test_a_missing_library_is_named_in_one_line(library):
    code = f"import runpy, sys; sys.modules[{library!r}] = None; runpy.run_path({str(SCRIPT)!r})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 1
    assert len(found.stderr.splitlines()) == 1
    assert found.stderr.startswith(f"serve.py needs {library}")
    assert "pip install starlette uvicorn" in found.stderr
