"""A small inference engine on a paged cache: continuous batching of a dozen requests, on a CPU.

    python examples/engine.py            the trace of the page table, then the check
    python examples/engine.py --quiet    the check alone

The model is a Llama-style decoder with random weights, so its answers mean nothing. But equal
answers with and without a cache, token for token, show that pages, masks and positions are right.
As in real engines, chunks of prompts share steps with decoding sequences, sequences that end give
their pages back, and prompts with a common prefix share its pages. If no sequence gets a page, the
youngest one gives up its pages and starts again later. ``serve.py`` serves it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from prefix_prefill import paged_attn_func, reshape_and_cache, shared_prefix_attn_func
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

VOCABULARY, LAYERS, HEADS_Q, HEADS_K, HEAD_DIM, HIDDEN = 101, 2, 4, 2, 16, 96
WIDTH = HEADS_Q * HEAD_DIM
END = 7  # the token that ends a sequence

PAGE = 8
PAGES = 26  # too few for all requests at once
TOKENS_PER_STEP = 24
SEQUENCES_PER_STEP = 6

# a layer's number, q, k and v, and what paged_attn_func takes by name, such as a window
Attention = Callable[..., Tensor]


class Decoder:
    """RMSNorm, rotary positions, grouped queries, SwiGLU; random weights."""

    # what a cache for it has: layers, heads and their dimension
    cache_shape = LAYERS, HEADS_K, HEAD_DIM
    dtype, device = torch.float32, "cpu"

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=generator) * 1.5 * rows**-0.5

        self.embedding = torch.randn(VOCABULARY, WIDTH, generator=generator)
        heads = HEADS_Q + 2 * HEADS_K
        self.layers = [
            {
                "qkv": matrix(WIDTH, heads * HEAD_DIM),
                "out": matrix(WIDTH, WIDTH),
                "up": matrix(WIDTH, 2 * HIDDEN),
                "down": matrix(HIDDEN, WIDTH),
            }
            for _ in range(LAYERS)
        ]
        self.head = matrix(WIDTH, VOCABULARY)

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Attention) -> Tensor:
        """Return the logits of packed tokens; only ``attend(layer, q, k, v)`` mixes tokens."""
        x = self.embedding[tokens]
        for number, layer in enumerate(self.layers):
            qkv = (rms_norm(x, (WIDTH,)) @ layer["qkv"]).unflatten(1, (-1, HEAD_DIM))
            q, k, v = qkv.split((HEADS_Q, HEADS_K, HEADS_K), dim=1)
            mixed = attend(number, rotate(q, positions), rotate(k, positions), v)
            x = x + mixed.flatten(1) @ layer["out"]
            gate, up = (rms_norm(x, (WIDTH,)) @ layer["up"]).chunk(2, dim=1)
            x = x + (silu(gate) * up) @ layer["down"]
        return rms_norm(x, (WIDTH,)) @ self.head


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate pairs of numbers by angles that grow with the position (RoPE)."""
    half = HEAD_DIM // 2
    angles = positions[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def greedy(logits: Tensor) -> int:
    """Return the likeliest token."""
    return int(logits.argmax())


def without_cache(model: Decoder, prompt: list[int], most: int) -> list[int]:
    """Generate greedily without a cache: every token recomputes the whole sequence."""

    def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    tokens = list(prompt)
    while len(tokens) < len(prompt) + most and (len(tokens) == len(prompt) or tokens[-1] != END):
        logits = model(torch.tensor(tokens), torch.arange(len(tokens)), attend)
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :]


@dataclass(eq=False)
class Request:
    """One sequence: its tokens so far, how many of them are in the cache, and its pages.

    ``pick`` chooses a token by its logits; one of ``ends`` ends the answer.
    """

    name: str
    prompt: list[int]
    most: int
    pick: Callable[[Tensor], int] = greedy
    ends: frozenset[int] = frozenset({END})
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    pages: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def answer(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def is_done(self) -> bool:
        return bool(self.answer) and (self.answer[-1] in self.ends or len(self.answer) == self.most)


class Engine:
    """A pool of pages, a queue of requests, and steps that serve several of them at once."""

    def __init__(
        self,
        model: Decoder,
        log: Callable[[str], None] = lambda _: None,
        pages: int = PAGES,
        page: int = PAGE,
        tokens: int = TOKENS_PER_STEP,
        sequences: int = SEQUENCES_PER_STEP,
    ) -> None:
        self.model, self.log, self.pages = model, log, pages
        self.page, self.tokens_per_step, self.sequences_per_step = page, tokens, sequences
        layers, heads, head_dim = model.cache_shape
        shape = layers, 2, pages, page, heads, head_dim
        self.caches = torch.full(shape, float("nan"), dtype=model.dtype, device=model.device)
        self.free = list(range(pages))
        self.users = [0] * pages
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        # full pages of prompts, by all tokens up to the end of the page
        self.known: dict[tuple[int, ...], int] = {}
        self.steps = self.shared_steps = self.reused = self.preempted = 0
        self.given: list[int] = [0] * pages

    def fits(self, request: Request) -> bool:
        """Return whether the cache could hold a request alone."""
        # the last token of an answer is never written
        return len(request.prompt) + request.most - 1 <= self.pages * self.page

    def add(self, request: Request) -> None:
        """Queue a request."""
        if not self.fits(request):
            raise ValueError(f"request {request.name} is longer than the cache")
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Drop a waiting or running request; its pages are free at once."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.running:
            self.release(request)

    def preempt(self) -> None:
        """Take the pages of the youngest request, which recomputes its tokens later."""
        request = self.running[-1]
        self.release(request)
        request.cached, request.pages = 0, []
        self.waiting.insert(0, request)
        self.preempted += 1

    def take(self, request: Request, tokens: int) -> bool:
        """Give a request pages for its first ``tokens`` tokens; False if too few are free."""
        wanted = -(-tokens // self.page) - len(request.pages)
        if wanted > len(self.free):
            return False
        for _ in range(wanted):
            page = self.free.pop(0)
            self.users[page] = 1
            self.reused += self.given[page] > 0
            self.given[page] += 1
            request.pages.append(page)
        return True

    def admit(self, request: Request) -> None:
        """Let a request share the pages of its prefix, if another sequence holds them."""
        full = (len(request.prompt) - 1) // self.page
        for count in range(1, full + 1):
            page = self.known.get(tuple(request.prompt[: count * self.page]))
            if page is None:
                break
            self.users[page] += 1
            request.pages.append(page)
            request.cached = count * self.page

    def release(self, request: Request) -> None:
        for page in request.pages:
            self.users[page] -= 1
            if self.users[page] == 0:
                self.free.append(page)
                self.known = {key: p for key, p in self.known.items() if p != page}
                # a read before the next write gives NaN
                self.caches[:, :, page] = float("nan")
        self.running.remove(request)

    def plan(self) -> list[tuple[Request, int]]:
        """Choose requests and their numbers of tokens: decoding ones first, then prompts."""
        budget, chosen = self.tokens_per_step, []
        while self.waiting and len(self.running) < self.sequences_per_step and self.free:
            request = self.waiting.pop(0)
            self.admit(request)
            self.running.append(request)
        for request in sorted(self.running, key=lambda r: len(r.tokens) - r.cached):
            count = min(len(request.tokens) - request.cached, budget)
            while count and not self.take(request, request.cached + count):
                count -= 1
            if count:
                chosen.append((request, count))
                budget -= count
        return chosen

    def step(self) -> list[Request]:
        """Run the model once over the chosen tokens; return the requests that got a new one."""
        chosen = self.plan()
        while not chosen:
            if len(self.running) < 2:
                raise RuntimeError("no request can go on: the cache is too small")
            self.preempt()
            chosen = self.plan()
        tokens, positions, slots = [], [], []
        for request, count in chosen:
            for position in range(request.cached, request.cached + count):
                tokens.append(request.tokens[position])
                positions.append(position)
                number, place = divmod(position, self.page)
                slots.append(request.pages[number] * self.page + place)
        counts = [count for _, count in chosen]
        lengths = [request.cached + count for request, count in chosen]
        attend = self.attention(chosen, counts, lengths, torch.tensor(slots))
        logits = self.model(torch.tensor(tokens), torch.tensor(positions), attend)
        self.steps += 1
        self.trace(chosen)
        answered = []
        for (request, count), end in zip(chosen, torch.tensor(counts).cumsum(0), strict=True):
            known = request.cached // self.page
            request.cached += count
            for full in range(known, min(request.cached, len(request.prompt)) // self.page):
                prefix = tuple(request.prompt[: (full + 1) * self.page])
                self.known.setdefault(prefix, request.pages[full])
            if request.cached == len(request.tokens):
                request.tokens.append(request.pick(logits[end - 1]))
                answered.append(request)
                if request.is_done:
                    self.release(request)
        return answered

    def attention(
        self,
        chosen: list[tuple[Request, int]],
        counts: list[int],
        lengths: list[int],
        slots: Tensor,
    ) -> Attention:
        """Return the function that the model's layers call: write new keys, then attend."""
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        shared = self.common_pages([request for request, _ in chosen])
        # rows of unequal length; entries after the last page are not read
        most = max(len(request.pages) for request, _ in chosen)
        rows = [request.pages + [-1] * (most - len(request.pages)) for request, _ in chosen]
        table = torch.tensor(rows, dtype=torch.int32)
        self.shared_steps += bool(shared)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            k_cache, v_cache = self.caches[layer]
            reshape_and_cache(k, v, k_cache, v_cache, slots)
            if not shared:
                seqlens = torch.tensor(lengths, dtype=torch.int32)
                most = max(counts), max(lengths)
                out = paged_attn_func(q, k_cache, v_cache, table, starts, seqlens, *most, **options)
            else:
                own = [length - len(shared) * self.page for length in lengths]
                out = shared_prefix_attn_func(
                    q,
                    k_cache,
                    v_cache,
                    torch.tensor(shared),
                    len(shared) * self.page,
                    table[:, len(shared) :],
                    starts,
                    torch.tensor(own, dtype=torch.int32),
                    max(counts),
                    max(own),
                    **options,
                )
            return out

        return attend

    def common_pages(self, requests: list[Request]) -> list[int]:
        """Return the full pages with which all requests begin, if there are several requests."""
        if len(requests) < 2:
            return []
        common = []
        for pages in zip(*(request.pages for request in requests), strict=False):
            if len(set(pages)) > 1:
                break
            common.append(pages[0])
        full = min(request.cached for request in requests) // self.page
        return common[:full]

    def trace(self, chosen: list[tuple[Request, int]]) -> None:
        parts = []
        for request, count in chosen:
            first, last = request.cached, request.cached + count
            what = f"{first}" if count == 1 else f"{first}..{last - 1}"
            pages = " ".join(f"{page:02d}" for page in request.pages)
            parts.append(f"{request.name}[{what}] -> {pages}")
        self.log(f"step {self.steps:3d}, {len(self.free):2d} pages free | " + " | ".join(parts))

    def run(self, requests: list[Request]) -> None:
        """Serve all requests."""
        for request in requests:
            self.add(request)
        while self.waiting or self.running:
            self.step()


def make_requests(seed: int = 0) -> list[Request]:
    """Make twelve prompts of 1 to 61 tokens; five begin with the same two pages and 3 tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> list[int]:
        return torch.randint(8, VOCABULARY, (count,), generator=generator).tolist()

    system = draw(2 * PAGE + 3)
    prompts = [draw(n) for n in (1, 61, 9, 24, 8, 33, 17)]
    prompts += [system + draw(n) for n in (4, 1, 13, 2, 20)]
    answers = (20, 5, 12, 1, 9, 14, 3, 16, 16, 8, 12, 10)
    names = "abcdefghijkl"
    return [Request(*each) for each in zip(names, prompts, answers, strict=True)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quiet", action="store_true", help="do not print the page table")
    quiet = parser.parse_args(arguments).quiet
    model = Decoder()
    requests = make_requests()
    engine = Engine(model) if quiet else Engine(model, print)
    with torch.no_grad():
        engine.run(requests)
        expected = [without_cache(model, request.prompt, request.most) for request in requests]
    wrong = [r.name for r, want in zip(requests, expected, strict=True) if r.answer != want]
    count = sum(len(request.answer) for request in requests)
    print(
        f"{len(requests)} requests, {count} tokens in {engine.steps} steps; "
        f"{engine.reused} pages given out again, {engine.shared_steps} steps with a shared prefix"
    )
    print(
        f"differ from the model without a cache: {', '.join(wrong)}"
        if wrong
        else "token for token what the model says without a cache"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
