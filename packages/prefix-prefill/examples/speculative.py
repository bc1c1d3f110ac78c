"""Speculative decoding with drafted trees on a paged cache: several tokens a step, the same answer.

    python examples/speculative.py            what each step drafts and accepts, then the check
    python examples/speculative.py --quiet    the check alone

A small draft model proposes a tree: its best few tokens after the last one, and again after each of
those. The model verifies the whole tree in one call of ``paged_attn_func``, whose ``tree_mask``
lets each drafted token see only its ancestors. The path whose tokens all agree with the model is
accepted, and the model's next token after it, so the answer is that of greedy decoding, token for
token. The keys and values of the accepted path move to the slots of its positions; the rest is
overwritten.

The model is the random decoder of ``engine.py``; the draft model has a little noise in its weights,
so it is often right and sometimes wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from prefix_prefill import paged_attn_func, reshape_and_cache
from torch import Tensor

PAGE, PAGES = 8, 16
WIDTHS = (3, 2, 1, 1)  # children of each token of a level
NOISE = 0.03
MOST = 32  # tokens of an answer


def load_engine() -> ModuleType:
    """Load the example next to this one, for its decoder."""
    spec = importlib.util.spec_from_file_location("engine", Path(__file__).parent / "engine.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules.setdefault("engine", importlib.util.module_from_spec(spec))
    if not hasattr(module, "Decoder"):
        spec.loader.exec_module(module)
    return module


engine = load_engine()


class Tree(NamedTuple):
    """Tokens, each after its parent; the root is the last token of the sequence."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]

    def rows(self) -> Tensor:
        """Return ``tree_mask``: each token sees itself and its ancestors."""
        rows: list[int] = []
        for i, parent in enumerate(self.parents):
            rows.append((rows[parent] if parent >= 0 else 0) | 1 << i)
        return torch.tensor(rows, dtype=torch.int64)

    def path(self, token: int) -> list[int]:
        """Return a token's ancestors and itself, from the root."""
        path = [token]
        while self.parents[path[0]] >= 0:
            path.insert(0, self.parents[path[0]])
        return path


class Cached:
    """A model and the paged cache of one sequence."""

    def __init__(self, model: engine.Decoder, seed: int = 0) -> None:
        self.model = model
        shape = (PAGES, PAGE, engine.HEADS_K, engine.HEAD_DIM)
        self.caches = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(engine.LAYERS)]
        order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(seed))
        self.table = order.to(torch.int32)[None]

    def slots(self, positions: Tensor) -> Tensor:
        """Return the cache slots of positions."""
        return self.table[0, positions // PAGE].long() * PAGE + positions % PAGE

    def __call__(self, tree: Tree, cached: int) -> Tensor:
        """Write the keys of new tokens after ``cached`` ones, and return the tokens' logits."""
        count = len(tree.tokens)
        slots = self.slots(cached + torch.arange(count))
        starts, lengths = (
            torch.tensor(x, dtype=torch.int32) for x in ([0, count], [cached + count])
        )
        rows = tree.rows()

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache = self.caches[layer]
            reshape_and_cache(k, v, *cache, slots)
            bounds = count, cached + count
            return paged_attn_func(q, *cache, self.table, starts, lengths, *bounds, tree_mask=rows)

        # the position of a token is its depth, not its slot
        return self.model(torch.tensor(tree.tokens), cached + torch.tensor(tree.depths), attend)

    def keep(self, cached: int, path: list[int]) -> None:
        """Move the keys of the accepted path to the slots of its positions."""
        source = self.slots(cached + torch.tensor(path))
        target = self.slots(cached + torch.arange(len(path)))
        for cache in self.caches:
            k, v = (x.flatten(0, 1)[source] for x in cache)
            reshape_and_cache(k, v, *cache, target)


def chain(tokens: list[int]) -> Tree:
    """Return a tree without branches."""
    return Tree(tokens, [*range(-1, len(tokens) - 1)], [*range(len(tokens))])


def draft(model: Cached, last: int, cached: int) -> Tree:
    """Grow a tree below the last token, a level at a time."""
    tree = Tree([last], [-1], [0])
    level = [0]
    for width in WIDTHS:
        logits = model(tree, cached)
        children = []
        for parent in level:
            for token in logits[parent].topk(width).indices.tolist():
                children.append(len(tree.tokens))
                tree.tokens.append(token)
                tree.parents.append(parent)
                tree.depths.append(tree.depths[parent] + 1)
        level = children
    # writes the keys of the last level
    model(tree, cached)
    return tree


def accept(tree: Tree, logits: Tensor) -> tuple[list[int], int]:
    """Return the longest path whose tokens agree with the model, and the model's next token."""
    said = logits.argmax(-1).tolist()
    path = [0]
    while True:
        after = [
            i
            for i, parent in enumerate(tree.parents)
            if parent == path[-1] and tree.tokens[i] == said[path[-1]]
        ]
        if not after:
            return path, said[path[-1]]
        path.append(after[0])


def speculate(
    model: Cached, drafter: Cached, prompt: list[int], most: int, *, quiet: bool
) -> tuple[list[int], int]:
    """Return the answer to a prompt, and the number of verification steps."""
    # all but the prompt's last token, which is the root of the first tree
    for one in (model, drafter):
        for begin in range(0, len(prompt) - 1, 64):
            one(chain(prompt[begin : min(begin + 64, len(prompt) - 1)]), begin)
    tokens, steps = list(prompt), 0
    while len(tokens) < len(prompt) + most:
        cached = len(tokens) - 1
        tree = draft(drafter, tokens[-1], cached)
        path, token = accept(tree, model(tree, cached))
        for one in (model, drafter):
            one.keep(cached, path)
        steps += 1
        new = [tree.tokens[i] for i in path[1:]] + [token]
        tokens += new
        if not quiet:
            print(
                f"step {steps:3}: {len(tree.tokens) - 1} drafted, {len(path) - 1} accepted -> {new}"
            )
        if engine.END in new:
            break
    answer = tokens[len(prompt) : len(prompt) + most]
    if engine.END in answer:
        answer = answer[: answer.index(engine.END) + 1]
    return answer, steps


def noisy(seed: int) -> engine.Decoder:
    """Return the model with noise in its weights."""
    model, generator = engine.Decoder(), torch.Generator().manual_seed(seed)
    for layer in model.layers:
        for name, x in layer.items():
            layer[name] = x * (1 + NOISE * torch.randn(x.shape, generator=generator))
    return model


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quiet", action="store_true", help="print the last line alone")
    quiet = parser.parse_args(arguments).quiet
    generator = torch.Generator().manual_seed(1)
    total = steps = 0
    for length in (1, 5, 30):
        prompt = torch.randint(8, engine.VOCABULARY, (length,), generator=generator).tolist()
        answer, count = speculate(
            Cached(engine.Decoder()), Cached(noisy(3)), prompt, MOST, quiet=quiet
        )
        want = engine.without_cache(engine.Decoder(), prompt, MOST)
        if answer != want:
            print(f"prompt of {length}: answers {answer}, greedy decoding {want}")
            return 1
        total, steps = total + len(answer), steps + count
    print(f"{total} tokens in {steps} steps, token for token those of greedy decoding")
    return 0


if __name__ == "__main__":
    sys.exit(main())
