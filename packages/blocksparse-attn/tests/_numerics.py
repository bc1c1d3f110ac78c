"""The cases that every numerics test is made of, and what they are held to."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from blocksparse_attn import (
    BlockSparseLayout,
    blocksparse_attention_reference,
    blocksparse_attn_func,
    blocksparse_attn_varlen_func,
    blocksparse_varlen_attention_reference,
)
from blocksparse_attn._attention import tiles
from blocksparse_attn._attention.call import Options, Tensors
from blocksparse_attn._attention.reference import visible_keys
from blocksparse_attn._linked.host.forms import interpreted
from torch import Tensor

from ._linked import numerics
from ._linked.bounds import attention_bounds
from ._linked.budget import Maker, offsets
from ._linked.numerics import Packed, Shape, compare, run, run_eager, run_oracle
from ._linked.numerics import incoming as incoming  # for tests
from ._linked.rounding import Bounded, assert_within

Block = tuple[int, int]
BLOCKS: list[Block] = list(itertools.product((16, 32, 64, 128), repeat=2))


def pairs(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return some of a product, such that each pair of two factors' values is there.

    A GPU compiles for seconds what each combination takes; ``BLOCKSPARSE_ATTN_DEVICE=all`` asks
    for the whole product.
    """
    whole = list(itertools.product(*(range(len(factor)) for factor in factors)))
    chosen = whole
    if os.environ.get("BLOCKSPARSE_ATTN_DEVICE") != "all":
        chosen = []
        held = {one: set(itertools.combinations(enumerate(one), 2)) for one in whole}
        missing = set().union(*held.values())
        while missing:
            chosen.append(max(whole, key=lambda one: len(held[one] & missing)))
            missing -= held[chosen[-1]]
    return [tuple(factor[i] for factor, i in zip(factors, one, strict=True)) for one in chosen]


# what a layout may be like: rows and columns beyond the sequence, rows of every kind
Pattern = Callable[[int, int, int], Tensor]


def _random(share: float) -> Pattern:
    def make(heads: int, rows: int, cols: int) -> Tensor:
        generator = torch.Generator().manual_seed(heads * 10000 + rows * 100 + cols)
        kept = torch.rand(heads, rows, cols, generator=generator) < share
        kept[::2, :1, :1] = True  # of a problem of one block some heads see something
        kept[:, 1:2] = False  # a row of nothing
        return kept

    return make


def _local(heads: int, rows: int, cols: int) -> Tensor:
    """A band and strided columns, others for every head."""
    row, col = torch.arange(rows)[:, None], torch.arange(cols)
    head = torch.arange(heads)[:, None, None]
    return (col <= row) & ((row - col < 2) | ((col + head + 1) % 3 == 0))


PATTERNS: dict[str, Pattern] = {
    "all": lambda *size: torch.ones(size, dtype=torch.bool),
    "none": lambda *size: torch.zeros(size, dtype=torch.bool),
    "random": _random(0.5),
    "local": _local,
}


def layout_of(
    pattern: str,
    block: Block,
    seqlen: int,
    heads: int,
    device: torch.device | str,
    *,
    spare: int = 0,
    alike: bool | None = None,
    positions: int | None = None,
) -> BlockSparseLayout:
    """Make a layout that covers so many keys, and ``spare`` rows and columns more.

    Its columns are not sorted. Its rows cover as many positions, unless they are given.
    """
    covered = seqlen if positions is None else positions, seqlen
    rows, cols = (-(-n // side) + spare for n, side in zip(covered, block, strict=True))
    dense = PATTERNS[pattern](heads, rows, cols)
    sorted_layout = BlockSparseLayout.from_dense(dense, block)
    crow, col = sorted_layout.crow, sorted_layout.col
    for head in range(heads):
        for row in range(rows):
            begin, end = crow[head, row : row + 2].tolist()
            col[head, begin:end] = col[head, begin:end].flip(0)
    chosen = sorted_layout.rows_alike if alike is None else alike
    layout = BlockSparseLayout(crow, col, block, num_cols=cols, rows_alike=chosen)
    return layout.to(device)


class Case(numerics.Case):
    """Arguments of one call: what may require grad, and everything else."""

    @property
    def function(self) -> Callable[..., Any]:
        return blocksparse_attn_varlen_func if self.packed else blocksparse_attn_func

    @property
    def reference(self) -> Callable[..., Any]:
        packed = self.packed
        return blocksparse_varlen_attention_reference if packed else blocksparse_attention_reference

    def __call__(self, **changes: Any) -> tuple[Tensor, Tensor]:
        """Call the function under test: ``(out, lse)``."""
        return self.function(**self.inputs, **{**self.options, "return_lse": True, **changes})


class Repeating(Case):
    """A case that asks for gradients that repeat, of what takes the argument."""

    @property
    def function(self) -> Callable[..., Any]:
        return functools.partial(super().function, deterministic=True)


def that_repeats(case: Case) -> Case:
    """Return the case with gradients that repeat asked for."""
    return Repeating(case.inputs, case.options, packed=case.packed)


def treat_as_short(monkeypatch: pytest.MonkeyPatch, keys: int) -> None:
    """Let rows of up to so many keys be short, on every GPU and with any heads."""
    for name in ("SHORT_ROWS", "SHORT_ROWS_FAST"):
        monkeypatch.setattr(tiles, name, tiles.ShortRows(keys, keys))


def make_case(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device | str,
    pattern: str = "random",
    block: Block = (16, 16),
    *,
    shared: bool = False,
    spare: int = 0,
    alike: bool | None = None,
    seed: int = 0,
    **options: Any,
) -> Case:
    """Make a fixed-length case with values of order one."""
    m = Maker(device, dtype, seed)
    b, sq, sk, hq, hk, d, dv = shape
    inputs = {"q": m.randn(b, sq, hq, d), "k": m.randn(b, sk, hk, d)}
    inputs["v"] = m.randn(b, sk, hk, d if dv is None else dv)
    heads = 1 if shared else hq
    positions = sq if options.get("align") == "top-left" else sk
    layout = layout_of(
        pattern, block, sk, heads, device, spare=spare, alike=alike, positions=positions
    )
    return Case(inputs, {"layout": layout, **options})


def make_packed(
    shape: Packed,
    dtype: torch.dtype,
    device: torch.device | str,
    pattern: str = "random",
    block: Block = (16, 16),
    *,
    shared: bool = False,
    spare: int = 0,
    seed: int = 0,
    **options: Any,
) -> Case:
    """Make a packed case."""
    m = Maker(device, dtype, seed)
    tq, tk = sum(shape.lengths_q) + shape.padding, sum(shape.lengths_k) + shape.padding
    hq, hk, d = shape.heads_q, shape.heads_k, shape.head_dim
    inputs = {"q": m.randn(tq, hq, d), "k": m.randn(tk, hk, d)}
    inputs["v"] = m.randn(tk, hk, d if shape.head_dim_v is None else shape.head_dim_v)
    longest_k = max(shape.lengths_k, default=0)
    made: dict[str, Any] = {
        "cu_seqlens_q": offsets(shape.lengths_q, device),
        "cu_seqlens_k": offsets(shape.lengths_k, device),
        "max_seqlen_q": max(shape.lengths_q, default=0),
        "max_seqlen_k": longest_k,
    }
    heads = 1 if shared else hq
    positions = made["max_seqlen_q"] if options.get("align") == "top-left" else longest_k
    made["layout"] = layout_of(
        pattern, block, longest_k, heads, device, spare=spare, positions=positions
    )
    return Case(inputs, {**made, **options}, packed=True)


def paged(case: Case, page_size: int, seed: int = 0) -> Case:
    """The same packed case with its keys in pages; what no page table names is NaN."""
    starts = case.options["cu_seqlens_k"].tolist()
    lengths = [b - a for a, b in itertools.pairwise(starts)]
    counts = [-(-n // page_size) for n in lengths]
    generator = torch.Generator().manual_seed(seed)
    # scattered, and more than there is need for
    order = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    table = torch.full((len(lengths), max([*counts, 1])), 2**31 - 1, dtype=torch.int32)
    k, v = case.inputs["k"], case.inputs["v"]
    pools = [x.new_full((len(order), page_size, *x.shape[1:]), float("nan")) for x in (k, v)]
    for b, length in enumerate(lengths):
        for i in range(counts[b]):
            table[b, i] = page = order.pop()
            first = starts[b] + i * page_size
            here = min(page_size, length - i * page_size)
            for pool, x in zip(pools, (k, v), strict=True):
                pool[page, :here] = x[first : first + here]
    inputs = {**case.inputs, "k": pools[0], "v": pools[1]}
    return Case(inputs, {**case.options, "block_table": table.to(k.device)}, packed=True)


@contextlib.contextmanager
def only_portable() -> Iterator[None]:
    """Keep calls from the kernel for Hopper; their layouts must not have been planned for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "HOPPER", False)
        yield


def takes_hopper(case: Case) -> bool:
    """Say whether the kernel for Hopper serves a case."""
    q, k, v = (case.inputs[name] for name in "qkv")
    given = case.options
    x = Tensors(q, k, v, given.get("cu_seqlens_q"), None, given.get("block_table"))
    scale = given.get("softmax_scale")
    options = Options(
        1.0 if scale is None else scale,
        given.get("causal", True),
        0,
        given.get("align") == "top-left",
    )
    return tiles.takes_hopper_forward(x, given["layout"]._pattern, options)


def check(case: Case, *, grad: bool = True) -> dict[str, Tensor]:
    """Run function, eager and oracle, and compare all results; returns the function's.

    On Hopper the portable kernels, which serve what the others do not, are held to the same.
    """
    got = run(case, grad=grad)
    oracle = run_oracle(case, grad=grad)
    eager = run_eager(case, oracle, grad=grad)
    if takes_hopper(case):
        with only_portable():
            afresh = case.with_options(layout=copy.copy(case.options["layout"]))
            compare(case, run(afresh, grad=grad), oracle, eager)
    return compare(case, got, oracle, eager)


def bounds_of(case: Case, got: dict[str, Tensor]) -> dict[str, Bounded]:
    """Return the a-priori bounds of a fixed-length case whose results are given; {} if packed.

    Its layout is one for all sequences.
    """
    if case.packed:
        return {}
    (queries, heads), keys = case.inputs["q"].shape[1:3], case.inputs["k"].shape[1]
    layout, options = case.options["layout"], case.options
    top_left = options.get("align") == "top-left"
    dense, block = layout._for_heads(heads).to_dense(), layout.block_size
    rule = None if layout._rule is None else layout._rule[0]
    causal = options.get("causal", True)
    visible = visible_keys(dense, block, queries, keys, causal, top_left, rule)
    given: dict[str, Any] = {"visible": visible.expand(heads, -1, -1)}
    given["softmax_scale"] = options.get("softmax_scale")
    given["truncates"] = interpreted() and got["out"].device.type == "cpu"
    if "dq" in got:
        given["dout"], given["dlse"] = incoming(got["out"], got["lse"])
    return attention_bounds(**case.inputs, **given)


def check_bounds(case: Case, got: dict[str, Tensor]) -> None:
    """Hold results to their a-priori bounds, element by element."""
    assert_within(got, bounds_of(case, got))


def assert_same_sums(got: Iterable[Tensor], want: Iterable[Tensor]) -> None:
    """Require sums of the same fp32 numbers, in any order, rounded once: a unit in the last place.

    What cancels keeps an error of fp32, by the largest element.
    """
    for mine, exact in zip(got, want, strict=True):
        eps = torch.finfo(exact.dtype).eps
        atol = 2.0**-16 * float(exact.abs().max()) if exact.numel() else 0.0
        torch.testing.assert_close(mine, exact, rtol=eps, atol=atol)


def assert_alike(got: Iterable[Tensor], want: Iterable[Tensor]) -> None:
    """Require the same bits of output and LSE, and gradients that on Hopper are the same sums."""
    got, want = list(got), list(want)
    for mine, exact in zip(got[:2], want[:2], strict=True):
        assert torch.equal(mine, exact)
    assert_same_sums(got[2:], want[2:])
