"""The cases that every numerics test is made of, and what they are held to."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from blocksparse_attn import (
    BlockSparseLayout,
    _configs,
    blocksparse_attention_reference,
    blocksparse_attn_func,
    blocksparse_attn_varlen_func,
    blocksparse_varlen_attention_reference,
)
from blocksparse_attn._call import Options, Tensors
from torch import Tensor

from ._linked.budget import TF32X3_UNIT, Maker, assert_no_worse_than_eager, offsets

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


class Shape(NamedTuple):
    """A fixed-length problem."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int | None = None

    def __str__(self) -> str:
        text = "b{}-q{}-k{}-h{}:{}-d{}".format(*self[:6])
        return text if self.head_dim_v is None else f"{text}:{self.head_dim_v}"


class Packed(NamedTuple):
    """A packed problem; ``padding`` tokens follow the last sequence on both sides."""

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int | None = None
    padding: int = 0

    def __str__(self) -> str:
        text = "q{}-k{}".format(*("_".join(map(str, n)) for n in self[:2]))
        return f"{text}-h{self.heads_q}:{self.heads_k}-d{self.head_dim}-p{self.padding}"


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
) -> BlockSparseLayout:
    """Make a layout that covers so many positions, and ``spare`` rows and columns more.

    Its columns are not sorted.
    """
    rows, cols = (-(-seqlen // side) + spare for side in block)
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


@dataclass
class Case:
    """Arguments of one call: what may require grad, and everything else."""

    inputs: dict[str, Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    packed: bool = False

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

    def with_inputs(self, **changes: Tensor) -> Case:
        return Case({**self.inputs, **changes}, self.options, self.packed)

    def with_options(self, **changes: Any) -> Case:
        return Case(self.inputs, {**self.options, **changes}, self.packed)


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
    layout = layout_of(pattern, block, sk, heads, device, spare=spare, alike=alike)
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
    made["layout"] = layout_of(pattern, block, longest_k, heads, device, spare=spare)
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


def run(
    case: Case,
    function: Callable[..., Any] | None = None,
    *,
    grad: bool = True,
    unrounded_out: Tensor | None = None,
    nudge: float = 0.0,
) -> dict[str, Tensor]:
    """Call and differentiate: ``out``, ``lse`` and, with ``grad``, ``dq``, ``dk`` and ``dv``.

    The gradients that arrive at ``out`` and ``lse`` are random and the same whatever the dtype of
    ``case``, as they are rounded to bf16 first. With ``unrounded_out`` the softmax is
    differentiated through the rounded output, as a kernel must that keeps ``out`` alone for its
    backward: ``ds = p * (dp - dout @ out)``, and an error there is one in ``dlse``. ``nudge`` moves
    all that enters by that relative amount, up or down, and ``dout @ out`` by a quarter of it, as
    a sum is not rounded like its like in ``dp``, with which it cancels.
    """
    function = function or case.function
    m = Maker(case.inputs["q"].device, torch.float32, seed=2)

    def moved(t: Tensor) -> Tensor:
        return t * (1 + nudge * m.randn(*t.shape).sign()) if nudge else t

    inputs = {name: moved(t.detach()) for name, t in case.inputs.items()}
    if not grad:
        with torch.no_grad():
            out, lse = function(**inputs, **case.options, return_lse=True)
        return {"out": out, "lse": lse}
    leaves = {name: t.requires_grad_() for name, t in inputs.items()}
    out, lse = function(**leaves, **case.options, return_lse=True)
    names = [f"d{name}" for name in leaves]
    if not out.requires_grad and function is case.reference:  # nothing was computed: no sequence
        zeros = map(torch.zeros_like, inputs.values())
        return {"out": out, "lse": lse, **dict(zip(names, zeros, strict=True))}
    dout, dlse = (moved(t) for t in incoming(out, lse))
    if nudge:
        terms = (dout * out.detach()).abs().sum(-1).transpose(-1, -2)
        dlse = dlse + nudge / 4 * terms * m.randn(*terms.shape).sign()
    if unrounded_out is not None:
        slip = (dout.double() * (unrounded_out - out.detach().double())).sum(-1)
        dlse = dlse + slip.transpose(-1, -2).to(dlse.dtype)
    grads = torch.autograd.grad((out, lse), list(leaves.values()), (dout, dlse))
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(names, grads, strict=True))}


def incoming(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients that arrive at the two outputs of a call."""
    m = Maker(out.device, torch.bfloat16, seed=1)
    return m.randn(*out.shape).to(out.dtype), m.randn(*lse.shape).to(lse.dtype)


def run_oracle(case: Case, *, grad: bool = True, nudge: float = 0.0) -> dict[str, Tensor]:
    """Do the same in float64, on the same, already rounded, inputs."""
    wide = Case({name: t.double() for name, t in case.inputs.items()}, case.options, case.packed)
    return run(wide, case.reference, grad=grad, nudge=nudge)


def run_eager(case: Case, oracle: dict[str, Tensor], *, grad: bool = True) -> dict[str, Tensor]:
    """Do the same in plain PyTorch: inputs and output in the dtype, scores and LSE in fp32.

    Results are sums, at times of few terms that nearly cancel, and eager is exact by luck there.
    So where float64 on inputs that are slightly off is further from the oracle, it takes the
    place of an eager element. Slightly is four units of fp32 for the LSE, which is exact
    otherwise, and for all else half a unit of a 16-bit dtype, to which a kernel rounds
    probabilities and their gradients as it multiplies them. An fp32 product on a GPU is three of
    TF32, and there it is two of their units.
    """
    eager = run(case, case.reference, grad=grad, unrounded_out=oracle["out"])
    q = case.inputs["q"]
    is_tf32 = q.device.type == "cuda" and q.dtype == torch.float32
    fine = 2 * TF32X3_UNIT if is_tf32 else 4 * torch.finfo(torch.float32).eps
    coarse = max(fine, torch.finfo(q.dtype).eps / 2)
    nudged = run_oracle(case, grad=grad, nudge=coarse)
    if coarse > fine:
        nudged["lse"] = run_oracle(case, grad=False, nudge=fine)["lse"]
    for name, value in eager.items():
        error, moved = (value.double() - oracle[name]).abs(), (nudged[name] - oracle[name]).abs()
        eager[name] = torch.where(moved > error, nudged[name], value.double())
    return eager


@contextlib.contextmanager
def only_portable() -> Iterator[None]:
    """Keep calls from the kernel for Hopper; their layouts must not have been planned for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_configs, "HOPPER", False)
        yield


def takes_hopper(case: Case) -> bool:
    """Say whether the kernel for Hopper serves a case."""
    q, k, v = (case.inputs[name] for name in "qkv")
    given = case.options
    x = Tensors(q, k, v, given.get("cu_seqlens_q"), None, given.get("block_table"))
    scale = given.get("softmax_scale")
    options = Options(1.0 if scale is None else scale, given.get("causal", True), 0)
    return _configs.takes_hopper_forward(x, given["layout"]._pattern, options)


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
            _compare(case, run(afresh, grad=grad), oracle, eager)
    return _compare(case, got, oracle, eager)


def _compare(
    case: Case, got: dict[str, Tensor], oracle: dict[str, Tensor], eager: dict[str, Tensor]
) -> dict[str, Tensor]:
    dtype = case.inputs["q"].dtype
    assert got["out"].dtype == dtype
    assert got["lse"].dtype == torch.float32
    for name, value in got.items():
        if name in ("out", "lse"):
            assert_no_worse_than_eager(name, value, eager[name], oracle[name])
            continue
        assert value.dtype == dtype
        eps = torch.finfo(dtype).eps
        eps = max(eps, TF32X3_UNIT) if value.device.type == "cuda" else eps
        assert_no_worse_than_eager(name, value, eager[name], oracle[name], 3.0, eps)
    return got


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
