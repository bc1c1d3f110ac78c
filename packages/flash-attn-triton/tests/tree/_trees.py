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
from torch import Tensor

from .._linked import numerics
from .._linked.bounds import attention_bounds
from .._linked.budget import Maker, offsets
from .._linked.numerics import compare, incoming, run, run_eager, run_oracle
from .._linked.rounding import Bounded, assert_within
from .._numerics import only_portable, truncates


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
    from flash_attn_triton._tree import launch

    with only_portable(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_plans", Memory())
        yield


def check(case: Case) -> None:
    """Hold results and gradients to their budgets; on Hopper also those of the portable kernels."""
    oracle = run_oracle(case)
    eager = run_eager(case, oracle)
    if detect(case.inputs["q"].device).is_hopper:
        with portable():
            compare(case, run(case), oracle, eager)
    got = compare(case, run(case), oracle, eager)
    assert_within(got, bounds_of(case, got))


def bounds_of(case: Case, got: dict[str, Tensor]) -> dict[str, Bounded]:
    """Return the a-priori bounds of a tree whose results and gradients are given."""
    device = case.inputs["q"].device
    starts, parents = case.options["cu_seqlens"].tolist(), case.options["parents"].tolist()
    tokens = case.inputs["q"].shape[0]
    visible = torch.zeros(tokens, tokens, dtype=torch.bool)
    # of the keys above each segment and its own, which are there, and in how many tiles
    above, tiles = [torch.zeros(tokens, dtype=torch.bool)], [0]
    for segment, parent in enumerate(parents):
        rows = slice(starts[segment], starts[segment + 1])
        length = rows.stop - rows.start
        visible[rows] = above[parent + 1]
        visible[rows, rows] = torch.ones(length, length, dtype=torch.bool).tril()
        seen = above[parent + 1].clone()
        seen[rows] = True
        above.append(seen)
        tiles.append(tiles[parent + 1] - (-length // 16))
    dout, dlse = incoming(got["out"], got["lse"])
    options = {n: x for n, x in case.options.items() if n in ("softmax_scale", "softcap")}
    inputs = {n: x if n == "sinks" else x[None] for n, x in case.inputs.items()}
    options |= {"dout": dout[None], "dlse": dlse[None], "truncates": truncates(got["out"])}
    found = attention_bounds(**inputs, **options, visible=visible.to(device), tiles=max(tiles))
    # tokens of no segment have no sink either
    nothing = torch.arange(tokens, device=device) >= (starts[-1] if starts else 0)
    exact = found["lse"].exact.masked_fill(nothing, -torch.inf)
    found["lse"] = found["lse"]._replace(exact=exact)
    return {name: Bounded(x.exact[0], x.bound[0]) for name, x in found.items()}


def random_tree(seed: int, segments: int = 9, longest: int = 20) -> Tree:
    draw = random.Random(seed)
    lengths = tuple(draw.choice((0, 1, draw.randint(2, longest))) for _ in range(segments))
    parents = tuple(draw.randint(max(-1, i - 4), i - 1) for i in range(segments))
    return Tree(lengths, parents)
