"""Serve random requests for minutes, check every answer, and watch memory; repeat what repeats.

    python ci/soak.py --seconds 480 --repeats 10000 --json soak.json       # on a GPU
    python ci/soak.py --device cpu --seconds 20 --repeats 50

The server is prefix-prefill's examples/serve.py, on a port of this machine; it needs uvicorn and
starlette. ``--front engine`` drives its engine without HTTP. Clients draw prompts, some stream, and
some of those go away. Every answer is compared with the model without a cache; where the two best
tokens are closer than fp32 tells apart, an answer counts as a tie. Then calls that are to repeat
bit for bit do so. Memory is compared with that after the first tenth of the time.
"""

from __future__ import annotations

import argparse
import http.client
import importlib
import json
import random
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from results import ROOT, commit

EXAMPLES = ROOT / "packages" / "prefix-prefill" / "examples"
PROMPTS = 60
CLIENTS = 12
PAGES = 40
# logits of order one, in fp32: what two ways of computing them may differ by
TIE = 1e-3
# what a process may grow by: Python's and the allocator's own
GROWTH = 64 * 2**20


def example(name: str) -> ModuleType:
    sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


class Load:
    """Random requests, the answers they ought to have, and what came of them."""

    def __init__(self, engine: ModuleType, model: Any, device: str, seed: int) -> None:
        self.engine, self.model, self.device = engine, model, device
        draw = random.Random(seed)
        system = [draw.randrange(8, engine.VOCABULARY) for _ in range(20)]
        self.asked = []
        for number in range(PROMPTS):
            prompt = [draw.randrange(8, engine.VOCABULARY) for _ in range(draw.randint(1, 60))]
            prompt = system + prompt if number % 3 == 0 else prompt
            self.asked.append((prompt, draw.randint(1, 24)))
        self.expected: list[list[int]] = []
        self.requests = self.wrong = self.ties = self.cancelled = 0
        self.lock = threading.Lock()

    def prepare(self) -> None:
        """Compute all answers without a cache."""
        torch = importlib.import_module("torch")
        with torch.no_grad(), torch.device(self.device):
            self.expected = [self.engine.without_cache(self.model, *one) for one in self.asked]

    def check(self, number: int, answer: list[int]) -> None:
        is_right = answer == self.expected[number]
        is_tie = not is_right and self._is_tie(number, answer)
        with self.lock:
            self.requests += 1
            self.ties += is_tie
            self.wrong += not is_right and not is_tie

    def _is_tie(self, number: int, answer: list[int]) -> bool:
        """Say whether the first token that differs is as good as the one without a cache."""
        torch = importlib.import_module("torch")
        right, prompt = self.expected[number], self.asked[number][0]
        pairs = enumerate(zip(answer, right, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), None)
        if at is None:
            return False
        tokens = [*prompt, *right[:at]]
        with torch.no_grad(), torch.device(self.device):
            sdpa = torch.nn.functional.scaled_dot_product_attention

            def attend(_: int, q: Any, k: Any, v: Any) -> Any:
                q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
                return sdpa(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

            logits = self.model(torch.tensor(tokens), torch.arange(len(tokens)), attend)[-1]
            gap = (logits[right[at]] - logits[answer[at]]).abs().item()
        return bool(gap < TIE)


def move(engine: Any, device: str) -> None:
    """Bring an engine to a device, and have its steps make their tensors there."""
    torch = importlib.import_module("torch")
    model = engine.model
    model.embedding, model.head = model.embedding.to(device), model.head.to(device)
    model.layers = [{n: x.to(device) for n, x in layer.items()} for layer in model.layers]
    engine.caches = engine.caches.to(device)
    step = engine.step

    def on_device() -> Any:
        with torch.no_grad(), torch.device(device):
            return step()

    engine.step = on_device


def memory(device: str) -> dict[str, int]:
    """Return the bytes that the device and the process have."""
    torch = importlib.import_module("torch")
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    told = {"process": pages * resource.getpagesize(), "device": 0}
    if device != "cpu":
        torch.cuda.synchronize()
        told["device"] = torch.cuda.memory_reserved()
    return told


# ---- fronts


def serve_by_engine(engine: Any, module: ModuleType, load: Load, end: float, seed: int) -> None:
    """Add random requests to an engine and step it until the time is up and all are done."""
    draw = random.Random(seed)
    alive: dict[Any, int] = {}
    while time.monotonic() < end or alive:
        while len(alive) < CLIENTS and time.monotonic() < end and draw.random() < 0.7:
            number = draw.randrange(PROMPTS)
            request = module.Request(str(number), *load.asked[number])
            alive[request] = number
            engine.add(request)
        if alive:
            engine.step()
        for request in [r for r in alive if r.is_done]:
            load.check(alive.pop(request), request.answer)
        if alive and draw.random() < 0.01:
            request = draw.choice(list(alive))
            engine.cancel(request)
            del alive[request]
            load.cancelled += 1


def _ask(port: int, load: Load, draw: random.Random) -> None:
    """Ask for one answer, as a whole or as a stream, of which some are left early."""
    number = draw.randrange(PROMPTS)
    prompt, most = load.asked[number]
    stream, leave = draw.random() < 0.5, draw.random() < 0.1
    body = json.dumps({"prompt": prompt, "max_tokens": most, "stream": stream})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("POST", "/generate", body)
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {response.read()!r}")
        if not stream:
            load.check(number, json.loads(response.read())["tokens"])
            return
        if leave:
            response.readline()
            with load.lock:
                load.cancelled += 1
            return
        events = [x[6:] for x in response.read().split(b"\n") if x.startswith(b"data: ")]
        load.check(number, json.loads(events[-1])["tokens"])
    finally:
        connection.close()


def serve_by_http(app: Any, load: Load, end: float, seed: int) -> list[str]:
    """Serve an application, and ask it from several threads; return what failed."""
    uvicorn = importlib.import_module("uvicorn")
    failed: list[str] = []
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none"))
        serving = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        serving.start()
        while not server.started:
            time.sleep(0.01)

        def ask(client: int) -> None:
            draw = random.Random(seed * 1000 + client)
            try:
                while time.monotonic() < end:
                    _ask(port, load, draw)
            except Exception as error:
                failed.append(f"{type(error).__name__}: {error}")

        clients = [threading.Thread(target=ask, args=(n,)) for n in range(CLIENTS)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        server.should_exit = True
        serving.join()
    return failed


# ---- repeats


def repeated_calls(device: str) -> list[Callable[[], tuple[Any, ...]]]:
    """Return calls that are to give the same bits each time."""
    torch = importlib.import_module("torch")
    flash, paged = map(importlib.import_module, ("flash_attn_triton", "prefix_prefill"))
    generator = torch.Generator().manual_seed(0)
    size = 64 if device == "cpu" else 1000

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)

    def ints(*values: int) -> Any:
        return torch.tensor(values, dtype=torch.int32, device=device)

    caches = draw(size // 16 + 1, 16, 2, 128), draw(size // 16 + 1, 16, 2, 128)
    table = torch.arange(size // 16 + 1, dtype=torch.int32, device=device)[None]
    q, one = draw(size, 8, 128), draw(1, 8, 128)
    many = (ints(0, size), ints(size), size, size)
    few = (ints(0, 1), ints(size), 1, size)
    dense = [draw(1, size, heads, 128).requires_grad_() for heads in (4, 2, 2)]
    dout = draw(1, size, 4, 128)

    def prefill() -> tuple[Any, ...]:
        return (paged.paged_attn_func(q, *caches, table, *many),)

    def decode() -> tuple[Any, ...]:
        return (paged.paged_attn_func(one, *caches, table, *few, num_splits=4),)

    def train() -> tuple[Any, ...]:
        out = flash.flash_attn_func(*dense, causal=True, deterministic=True)
        return (out.detach(), *torch.autograd.grad(out, dense, dout))

    return [prefill, decode, train]


def repeat(device: str, times: int) -> int:
    """Make that many calls, and return how many results differ from the first of their kind."""
    torch = importlib.import_module("torch")
    calls = repeated_calls(device)
    first = [call() for call in calls]
    differing = 0
    for number in range(times):
        which = number % len(calls)
        pairs = zip(calls[which](), first[which], strict=True)
        differing += not all(torch.equal(a, b) for a, b in pairs)
    return differing


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--repeats", type=int, default=10_000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--front", choices=("http", "engine"), default="http")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write what was found")
    given = parser.parse_args()
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)  # tensors are small
    failed: list[str] = []
    module = example("engine")
    app = example("serve").make_app(PAGES) if given.front == "http" else None
    engine = app.state.batcher.engine if app else module.Engine(module.Decoder(), pages=PAGES)
    move(engine, given.device)
    load = Load(module, engine.model, given.device, given.seed)
    load.prepare()
    began = time.monotonic()
    before: dict[str, int] = {}
    watching = threading.Timer(given.seconds / 10, lambda: before.update(memory(given.device)))
    watching.start()
    end = began + given.seconds
    if app:
        failed = serve_by_http(app, load, end, given.seed)
    else:
        serve_by_engine(engine, module, load, end, given.seed)
    watching.join()
    took, after = time.monotonic() - began, memory(given.device)
    grown = {name: after[name] - before[name] for name in after}
    free = len(engine.free)
    differing = repeat(given.device, given.repeats)
    name = "cpu" if given.device == "cpu" else torch.cuda.get_device_name()
    told = {
        "commit": commit(),
        "torch": torch.__version__,
        "device": name,
        "front": given.front,
        "seconds": took,
        "requests": load.requests,
        "wrong": load.wrong,
        "ties": load.ties,
        "left": load.cancelled,
        "failed": failed,
        "steps": engine.steps,
        "preempted": engine.preempted,
        "free_pages": free,
        "pages": PAGES,
        "grown_bytes": max(grown.values()),
        "grown": grown,
        "repeats": given.repeats,
        "differing": differing,
    }
    if given.json:
        given.json.write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps(told))
    is_flat = grown["process"] < GROWTH and grown["device"] < GROWTH
    is_right = not (load.wrong or failed or differing) and load.requests > 0
    sys.exit(not (is_right and is_flat and free == PAGES))


if __name__ == "__main__":
    main()
