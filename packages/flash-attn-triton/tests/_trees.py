"""Trees of segments, and calls over them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from attn_common import detect
from flash_attn_triton import flash_attn_tree_func, tree_attention_reference
from flash_attn_triton._linked.host.forms import Memory

from ._linked import numerics
from ._linked.budget import Maker, offsets
from ._linked.numerics import compare, run, run_eager, run_oracle
from ._numerics import only_portable


class Tree(NamedTuple):
    """Segments, and how many tokens of padding follow them."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    heads_q: int = 2
    heads_k: int = 1
    head_dim: int = 16
    head_dim_v: int | None = None
    padding: int = 0

    def __str__(self) -> str:
        tree = "_".join(f"{n}^{p}" for n, p in zip(self.lengths, self.parents, strict=True))
        return f"{tree}-h{self.heads_q}:{self.heads_k}-d{self.head_dim}-p{self.padding}"

    @property
    def starts(self) -> list[int]:
        return [sum(self.lengths[:i]) for i in range(len(self.lengths) + 1)]

    def path(self, segment: int) -> list[int]:
        """Segments from the root down."""
        above = self.parents[segment]
        return [*self.path(above), segment] if above >= 0 else [segment]

    def rows(self, segment: int) -> slice:
        return slice(self.starts[segment], self.starts[segment + 1])


FEATURES: dict[str, numerics.Feature] = {
    "softcap": numerics.fixed(softcap=1.5),
    "sinks": lambda m, t: {"sinks": m.randn(t.heads_q, dtype=torch.float32)},
    "scale_zero": numerics.fixed(softmax_scale=0.0),
    # far enough apart for the lowest score to be no pivot
    "scale_negative": numerics.fixed(softmax_scale=-30.0),
}


class Case(numerics.Case):
    """Arguments of one call."""

    @property
    def function(self) -> Any:
        return flash_attn_tree_func

    @property
    def reference(self) -> Any:
        return tree_attention_reference


def make(
    tree: Tree, dtype: torch.dtype, device: torch.device | str, features: tuple[str, ...] = ()
) -> Case:
    """Make a call with values of order one."""
    m = Maker(device, dtype)
    tokens = sum(tree.lengths) + tree.padding
    width = tree.head_dim if tree.head_dim_v is None else tree.head_dim_v
    inputs = {
        "q": m.randn(tokens, tree.heads_q, tree.head_dim),
        "k": m.randn(tokens, tree.heads_k, tree.head_dim),
        "v": m.randn(tokens, tree.heads_k, width),
    }
    options: dict[str, Any] = {
        "cu_seqlens": offsets(tree.lengths, device),
        "parents": torch.tensor(tree.parents, dtype=torch.int32, device=device),
        "max_seqlen": max(tree.lengths, default=0),
    }
    for name in features:
        options.update(FEATURES[name](m, tree))
    if "sinks" in options:
        inputs["sinks"] = options.pop("sinks")
    return Case(inputs, options, packed=True)


@contextlib.contextmanager
def portable() -> Iterator[None]:
    """Keep calls from the kernels for Hopper."""
    from flash_attn_triton._kernels import tree_plans

    with only_portable(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_plans, "_plans", Memory())
        yield


def check(case: Case) -> None:
    """Hold results and gradients to their budgets; on Hopper also those of the portable kernels."""
    oracle = run_oracle(case)
    eager = run_eager(case, oracle)
    if detect(case.inputs["q"].device).is_hopper:
        with portable():
            compare(case, run(case), oracle, eager)
    compare(case, run(case), oracle, eager)


def random_tree(seed: int, segments: int = 9, longest: int = 20) -> Tree:
    draw = random.Random(seed)
    lengths = tuple(draw.choice((0, 1, draw.randint(2, longest))) for _ in range(segments))
    parents = tuple(draw.randint(max(-1, i - 4), i - 1) for i in range(segments))
    return Tree(lengths, parents)
