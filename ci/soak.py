"""Serve random requests for minutes, check every answer, and watch memory; repeat what repeats.

    python ci/soak.py --seconds 480 --repeats 10000 --json soak.json       # on a GPU
    python ci/soak.py --device cpu --seconds 20 --repeats 50

The server is prefix-prefill's examples/serve.py, on a port of this machine; it needs httpx,
pydantic, uvicorn and starlette. Clients draw prompts, some stream, and some of those go away. Every
answer is compared with the model without a cache; where the two best tokens are closer than fp32
tells apart, an answer counts as a tie. Then calls that are to repeat bit for bit do so. Memory is
compared with that after the first tenth of the time.
"""

from __future__ import annotations

import importlib
import json
import random
import resource
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from device_calls import drawer, load, one_sequence
from results import ROOT, commit, parser_of, write

EXAMPLES = ROOT / "packages" / "prefix-prefill" / "examples"
PROMPTS = 60
CLIENTS = 12
PAGES = 40
# logits of order one, in fp32: what two ways of computing them may differ by
TIE = 1e-3
# what a process may grow by: Python's and the allocator's own
GROWTH = 64 * 2**20


class Load:
    """Random requests, the answers they ought to have, and what came of them."""

    def __init__(self, serve: ModuleType, model: Any, device: str, seed: int) -> None:
        engine, self.letters = serve.engine, serve.Letters()
        self.torch = importlib.import_module("torch")
        self.model, self.device, self.seed = model, device, seed
        draw = random.Random(seed)

        def tokens(count: int) -> list[int]:
            return [draw.randrange(8, engine.VOCABULARY) for _ in range(count)]

        system = tokens(20)
        prompts = [tokens(draw.randint(1, 60)) for _ in range(PROMPTS)]
        prompts[::3] = [system + prompt for prompt in prompts[::3]]
        self.asked = [(prompt, draw.randint(1, 24)) for prompt in prompts]
        with self.torch.no_grad(), self.torch.device(device):
            self.expected = [engine.without_cache(model, *one) for one in self.asked]
        self.counts: Counter[str] = Counter()
        self.failed: list[str] = []
        self.lock = threading.Lock()

    def count(self, **what: int) -> None:
        with self.lock:
            self.counts.update(what)

    def check(self, number: int, text: str, reason: str | None) -> None:
        ended = self.letters.ends if reason == "stop" else ()
        answer = [*self.letters.encode(text), *ended]
        is_right = answer == self.expected[number]
        is_tie = not is_right and self._is_tie(number, answer)
        self.count(requests=1, ties=is_tie, wrong=not is_right and not is_tie)

    def _is_tie(self, number: int, answer: list[int]) -> bool:
        """Say whether the first token that differs is as good as the one without a cache."""
        right, prompt = self.expected[number], self.asked[number][0]
        pairs = enumerate(zip(answer, right, strict=False))
        at, torch = next((i for i, (a, b) in pairs if a != b), None), self.torch
        if at is None:
            return False
        tokens = [*prompt, *right[:at]]

        def attend(_: int, q: Any, k: Any, v: Any) -> Any:
            q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
            sdpa = torch.nn.functional.scaled_dot_product_attention
            return sdpa(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

        with torch.no_grad(), torch.device(self.device):
            logits = self.model(torch.tensor(tokens), torch.arange(len(tokens)), attend)[-1]
            gap = (logits[right[at]] - logits[answer[at]]).abs().item()
        return bool(gap < TIE)

    def ask(self, http: Any, draw: random.Random) -> None:
        """Ask for one answer, as a whole or as a stream, of which some are left early."""
        number = draw.randrange(PROMPTS)
        prompt, most = self.asked[number]
        stream, leave = draw.random() < 0.5, draw.random() < 0.1
        body = {"model": "tiny", "prompt": prompt, "max_tokens": most, "temperature": 0}
        with http.stream("POST", "/v1/completions", json={**body, "stream": stream}) as response:
            response.raise_for_status()
            if not stream:
                self.check(number, *self.said(json.loads(response.read())))
                return
            text, reason = "", None
            for line in response.iter_lines():
                if leave:
                    self.count(left=1)
                    return
                if line and line != "data: [DONE]":
                    piece, reason = self.said(json.loads(line.removeprefix("data: ")))
                    text += piece
            self.check(number, text, reason)

    def said(self, told: dict[str, Any]) -> tuple[str, str | None]:
        choice = told["choices"][0]
        return choice["text"], choice["finish_reason"]

    def client(self, url: str, end: float, number: int) -> None:
        """Ask one request after the other until the time is up."""
        httpx = importlib.import_module("httpx")
        draw = random.Random(self.seed * 1000 + number)
        try:
            with httpx.Client(base_url=url, timeout=120) as http:
                while time.monotonic() < end:
                    self.ask(http, draw)
        except Exception as error:
            self.failed.append(f"{type(error).__name__}: {error}")


def move(engine: Any, device: str) -> None:
    """Bring an engine to a device; its server makes the tensors of a step where the caches are."""
    model = engine.model
    model.embedding, model.head = model.embedding.to(device), model.head.to(device)
    model.layers = [{n: x.to(device) for n, x in layer.items()} for layer in model.layers]
    engine.caches = engine.caches.to(device)


def memory(device: str) -> dict[str, int]:
    """Return the bytes that the device and the process have."""
    torch = importlib.import_module("torch")
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    reserved = 0 if device == "cpu" else torch.cuda.memory_reserved()
    return {"process": pages * resource.getpagesize(), "device": reserved}


def serve(app: Any, requests: Load, end: float) -> None:
    """Serve an application, and ask it from several threads."""
    uvicorn = importlib.import_module("uvicorn")
    with socket.socket() as listening, ThreadPoolExecutor(CLIENTS) as pool:
        listening.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none"))
        serving = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        serving.start()
        while not server.started:
            time.sleep(0.01)
        list(pool.map(lambda number: requests.client(url, end, number), range(CLIENTS)))
        server.should_exit = True
        serving.join()


def repeated_calls(device: str) -> list[Callable[[], tuple[Any, ...]]]:
    """Return calls that are to give the same bits each time."""
    torch = importlib.import_module("torch")
    flash, paged = load("flash_attn_triton"), load("prefix_prefill")
    draw, size = drawer(device), 64 if device == "cpu" else 1000
    caches = draw(size // 16 + 2, 16, 2, 128), draw(size // 16 + 2, 16, 2, 128)
    q, one = draw(size, 8, 128), draw(1, 8, 128)
    many, few = (one_sequence(device, size // 16 + 1, n, size) for n in (size, 1))
    dense = [draw(1, size, heads, 128).requires_grad_() for heads in (4, 2, 2)]
    dout = draw(1, size, 4, 128)

    def train() -> tuple[Any, ...]:
        out = flash.flash_attn_func(*dense, causal=True, deterministic=True)
        return (out.detach(), *torch.autograd.grad(out, dense, dout))

    return [
        lambda: (paged.paged_attn_func(q, *caches, *many),),
        lambda: (paged.paged_attn_func(one, *caches, *few, num_splits=4),),
        train,
    ]


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
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--repeats", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)  # tensors are small
    sys.path.insert(0, str(EXAMPLES))
    server = importlib.import_module("serve")
    app = server.make_app(PAGES)
    engine = app.state.batcher.engine
    move(engine, given.device)
    requests = Load(server, engine.model, given.device, given.seed)
    began = time.monotonic()
    before: dict[str, int] = {}
    watching = threading.Timer(given.seconds / 10, lambda: before.update(memory(given.device)))
    watching.start()
    serve(app, requests, began + given.seconds)
    watching.join()
    took, after = time.monotonic() - began, memory(given.device)
    grown = {name: after[name] - before[name] for name in after}
    free = len(engine.free)
    differing = repeat(given.device, given.repeats)
    told = {
        "commit": commit(),
        "torch": torch.__version__,
        "device": "cpu" if given.device == "cpu" else torch.cuda.get_device_name(),
        "seconds": took,
        **{name: requests.counts[name] for name in ("requests", "wrong", "ties", "left")},
        "failed": requests.failed,
        "steps": engine.steps,
        "preempted": engine.preempted,
        "free_pages": free,
        "pages": PAGES,
        "grown_bytes": max(grown.values()),
        "grown": grown,
        "repeats": given.repeats,
        "differing": differing,
    }
    write(told, given.json)
    print(json.dumps(told))
    is_right = requests.counts["requests"] > 0 and not requests.counts["wrong"]
    is_right = is_right and not (requests.failed or differing) and free == PAGES
    sys.exit(not (is_right and max(grown.values()) < GROWTH))


if __name__ == "__main__":
    main()
