"""The cases that every numerics test is made of, and what they are held to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from attn_common import detect
from prefix_prefill import api, dropin, paged_attention_reference, paged_attn_func
from prefix_prefill._cache.layout import gather_pages
from prefix_prefill._linked.host.forms import Memory, interpreted
from prefix_prefill._mla import api as mla_api
from prefix_prefill._paged import tiles
from torch import Tensor

from ._linked import numerics
from ._linked.bounds import attention_bounds
from ._linked.budget import Maker, assert_no_worse_than_eager, offsets
from ._linked.numerics import Feature, fixed, further, nudges
from ._linked.rounding import TINY, Bounded, assert_within

NHD, PACKED = "nhd", "packed"
NAN = float("nan")
# what has a number for each head
EXTRAS = ("alibi_slopes", "sinks")
# fewer rows than these may all be lucky at once; how often they are nudged
FEW, NUDGES = 100, 4


class Problem(NamedTuple):
    """Sequences with (queries, keys), and a cache; ``padding`` tokens follow the last sequence."""

    lengths: tuple[tuple[int, int], ...]
    heads_q: int
    heads_k: int
    head_dim: int
    page: int = 16
    layout: str = NHD
    dense: bool = False
    padding: int = 0
    head_dim_v: int | None = None

    def __str__(self) -> str:
        text = "_".join(f"{q}of{k}" for q, k in self.lengths) or "none"
        text += f"-h{self.heads_q}:{self.heads_k}-d{self.head_dim}"
        text += "" if self.head_dim_v is None else f":{self.head_dim_v}"
        text += f"-p{self.page}-{self.layout}"
        text += "-dense" if self.dense else ""
        return text + (f"-pad{self.padding}" if self.padding else "")

    @property
    def queries(self) -> list[int]:
        return [q for q, _ in self.lengths]

    @property
    def widths(self) -> dict[str, int]:
        """The head dimensions of keys and of values."""
        return {"k": self.head_dim, "v": self.head_dim_v or self.head_dim}

    @property
    def tokens(self) -> int:
        return sum(self.queries) + self.padding

    def cached(self, b: int) -> int:
        """How many keys of a sequence are in the cache."""
        queries, keys = self.lengths[b]
        return keys - queries if self.dense else keys


# lengths are against the interpreter's tiles: 16 rows, which are queries times the group, x 16 keys
SMALL = [
    Problem(((16, 16),), 1, 1, 16),  # one tile exactly, one page exactly
    Problem(((17, 33), (33, 33)), 2, 2, 32, page=8),  # a tail of one; pages smaller than a tile
    Problem(((5, 40),), 4, 2, 24, page=48),  # GQA, head_dim no power of two, nor the page
    Problem(((7, 19),), 5, 1, 80, page=1, padding=3),  # MQA of five, one slot a page
    Problem(((1, 50), (1, 1), (1, 16)), 4, 1, 80, page=5),  # decode; one token
    Problem(((1, 40), (19, 35), (0, 7), (2, 2), (1, 17)), 4, 2, 16, page=7, padding=2),  # mixed
    Problem(((40, 17),), 2, 1, 64),  # more queries than keys: causal hides whole tiles
    Problem(((1, 20), (2, 30)), 20, 1, 16),  # a group wider than a tile
    Problem(((9, 20),), 6, 2, 8, page=32),  # three heads a group; smallest head
    Problem(((5, 7),), 1, 1, 256, page=3),  # widest
    Problem(((17, 20),), 2, 1, 96, page=544),
    Problem(((3, 0), (0, 0), (0, 5)), 2, 1, 16),  # no key; nothing; no query
    Problem((), 2, 1, 16, padding=3),  # no sequence
    Problem(((0, 5),), 2, 1, 16),  # no token
    Problem(((17, 33), (1, 20)), 4, 2, 16, page=7, head_dim_v=40),  # values wider than keys
]
PACKED_SMALL = [
    Problem(((17, 33), (1, 20)), 4, 2, 24, page=16, layout=PACKED),
    Problem(((3, 37), (1, 5)), 2, 1, 80, page=6, layout=PACKED),
    Problem(((20, 20),), 2, 2, 16, page=1, layout=PACKED),
    Problem(((17, 33), (1, 20)), 4, 2, 40, page=16, layout=PACKED, head_dim_v=24),
]
DENSE_SMALL = [
    Problem(((17, 33), (1, 20), (5, 5), (0, 3)), 4, 2, 24, page=16, dense=True),
    Problem(((1, 1), (33, 33), (2, 40)), 2, 1, 32, page=5, dense=True, padding=4),
    Problem(((18, 50), (1, 18)), 4, 1, 16, page=7, layout=PACKED, dense=True),
    Problem(((17, 33), (1, 20), (5, 5)), 4, 2, 48, page=16, dense=True, head_dim_v=16),
]
# sequences of both tiles, GQA, pages that tiles do not divide: for what is tried one by one
MEDIUM = Problem(((17, 36), (1, 21), (3, 9)), 4, 2, 16, page=7)
MEDIUM_DENSE = MEDIUM._replace(dense=True)
LARGE = [
    Problem(((700, 1500), (1, 3000), (300, 300), (1, 17)), 32, 8, 128),
    Problem(((700, 1500), (1, 3000), (300, 300), (1, 17)), 32, 8, 128, dense=True),
    Problem(((700, 1500), (1, 3000), (2, 100)), 32, 8, 128, layout=PACKED),
    Problem(((300, 1100), (4, 3000)), 16, 4, 64, page=1056),
    Problem(((300, 1100), (1, 3000)), 8, 8, 256, page=32, dense=True),
    Problem(((513, 777), (1, 9000)), 10, 2, 80, page=544),
    Problem(((130, 1030), (1, 1000), (1, 2000)), 64, 1, 128, page=48, layout=PACKED, dense=True),
    Problem(((64, 512),) * 5 + ((1, 512),) * 40, 12, 4, 96, page=1),
    Problem(((1000, 1000), (5, 1024)), 8, 2, 24, page=128),
    Problem(((700, 1500), (1, 3000), (2, 100)), 16, 4, 192, head_dim_v=128),
]


class Case(numerics.Case):
    """Arguments of one call: what holds values, and everything else."""

    def __call__(self, **changes: Any) -> dict[str, Tensor]:
        """Call the function under test."""
        arguments = {**self.inputs, **self.options, "return_lse": True, **changes}
        out, lse = paged_attn_func(**arguments)
        return {"out": out, "lse": lse}


# name: arguments of a call, made for a problem. Two features go together when they set different
# arguments; values are of an order at which a kernel that ignored them would be far off.
FEATURES: dict[str, Feature] = {
    "full": fixed(causal=False),
    "window": fixed(window_size=(9, -1)),
    "window_self": fixed(window_size=(0, 0)),
    "window_both": fixed(causal=False, window_size=(7, 2)),
    "window_right": fixed(causal=False, window_size=(-1, 3)),
    "window_wide": fixed(window_size=(5000, 5000)),
    "softcap": fixed(softcap=1.5),
    "alibi": lambda m, s: {"alibi_slopes": m.uniform(s.heads_q, low=0.05, high=0.5)},
    "alibi_batch": lambda m, s: {
        "alibi_slopes": m.uniform(len(s.lengths), s.heads_q, low=0.05, high=0.5)
    },
    "sinks": lambda m, s: {"sinks": m.randn(s.heads_q, dtype=torch.float32)},
    "scale_zero": fixed(softmax_scale=0.0),
    "scale_negative": fixed(softmax_scale=-0.7),
    "split": fixed(num_splits=3),
    "unsplit": fixed(num_splits=1),
}


def compatible(names: Iterable[str]) -> bool:
    """Say whether these features set different arguments."""
    return numerics.compatible(FEATURES, names, MEDIUM)


def make_case(
    problem: Problem,
    dtype: torch.dtype,
    device: torch.device | str,
    features: Sequence[str] = (),
    seed: int = 0,
    cache_dtype: torch.dtype | None = None,
) -> Case:
    """Make a case with values of order one, and NaN in every slot that holds no key."""
    m = Maker(device, dtype, seed)
    heads_q, heads_k, head_dim, page = problem[1:5]
    widths = problem.widths
    batch = len(problem.lengths)
    counts = [-(-problem.cached(b) // page) for b in range(batch)]
    # first, so that the same problem on other pages has the same values
    values = [
        [torch.randn(problem.cached(b), heads_k, widths[n], generator=m.generator) for n in "kv"]
        for b in range(batch)
    ]
    q = m.randn(problem.tokens, heads_q, head_dim)
    # pages that nobody has, the last of which ends every row of the table
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks - 1, generator=m.generator).tolist()
    table = torch.full((batch, max(counts, default=0) + 2), num_blocks - 1, dtype=torch.int32)
    k, v = (torch.full((num_blocks, page, heads_k, widths[name]), NAN) for name in "kv")
    for b, count in enumerate(counts):
        pages = [order.pop() for _ in range(count)]
        table[b, :count] = torch.tensor(pages, dtype=torch.int32)
        keys = torch.arange(problem.cached(b))
        where = torch.tensor(pages, dtype=torch.int64)[keys // page], keys % page
        k[where], v[where] = values[b]
    k_cache, v_cache = (
        in_layout(t.to(cache_dtype or dtype), problem.layout, which)
        for which, t in (("k", k), ("v", v))
    )
    inputs = {
        "q": q,
        "k_cache": k_cache.to(device),
        "v_cache": v_cache.to(device),
    }
    if problem.dense:
        for name in "kv":
            new = m.randn(problem.tokens, heads_k, widths[name])
            new[sum(problem.queries) :] = NAN
            inputs[name] = new
    options: dict[str, Any] = {
        "block_table": table.to(device),
        "cu_seqlens_q": offsets(problem.queries, device),
        "seqlens_k": torch.tensor([n for _, n in problem.lengths], dtype=torch.int32).to(device),
        "max_seqlen_q": max(problem.queries, default=0),
        "max_seqlen_k": max((n for _, n in problem.lengths), default=0),
    }
    for name in features:
        options.update(FEATURES[name](m, problem))
    for name in ("alibi_slopes", "sinks"):
        if name in options:
            inputs[name] = options.pop(name)
    return Case(inputs, options)


def in_layout(cache: Tensor, layout: str, which: str) -> Tensor:
    """Bring an NHD cache to a layout."""
    if layout == NHD:
        return cache
    if which == "v":
        return cache.permute(0, 2, 3, 1).contiguous()
    x = 16 // cache.element_size()
    x = x if cache.shape[3] % x == 0 else 8
    return cache.unflatten(3, (-1, x)).permute(0, 2, 3, 1, 4).contiguous()


def run(case: Case) -> dict[str, Tensor]:
    return case()


def run_oracle(case: Case, *, nudge: float = 0.0, seed: int = 0) -> dict[str, Tensor]:
    """Compute in float64, on the same, already rounded, inputs; ``nudge`` moves them a little."""
    device = case.inputs["q"].device
    generator = torch.Generator(device).manual_seed(seed)

    def moved(t: Tensor) -> Tensor:
        wide = t.double()
        if not nudge:
            return wide
        # signs are drawn where they are needed: on the CPU, large ones took most of a test's time
        up = torch.randint(2, t.shape, generator=generator, dtype=torch.int8, device=device).bool()
        return torch.where(up, wide * (1 + nudge), wide * (1 - nudge))

    inputs = {name: moved(t) for name, t in case.inputs.items()}
    options = {name: x for name, x in case.options.items() if name not in ("out", "out_scale")}
    out, lse = paged_attention_reference(**inputs, **options, return_lse=True)
    return {"out": out, "lse": lse}


def run_eager(case: Case, oracle: dict[str, Tensor]) -> dict[str, Tensor]:
    """Do the same in plain PyTorch: inputs and output in the dtype, scores and LSE in fp32.

    Where float64 on inputs that are slightly off (``nudges``) is further from the oracle, it takes
    the place of an eager element (``further``). Of few results the nudge itself may be lucky, too,
    and the furthest of several counts.
    """
    inputs = case.inputs
    options = {name: x for name, x in case.options.items() if name != "out"}
    out, lse = paged_attention_reference(**inputs, **options, return_lse=True)
    eager = {"out": out, "lse": lse}
    fine, coarse = nudges(inputs["q"])
    for seed in range(NUDGES if lse.numel() < FEW else 1):
        moved = run_oracle(case, nudge=coarse, seed=seed)
        if coarse > fine:
            moved["lse"] = run_oracle(case, nudge=fine, seed=seed)["lse"]
        eager = further(eager, moved, oracle)
    return eager


def bounds_of(case: Case) -> dict[str, Bounded]:
    """Return the a-priori bounds of a case, one sequence after the other.

    Caches may be FP8, and then scaled if all keys are in them.
    """
    inputs, options = case.inputs, {"causal": True, **case.options}
    q, caches = inputs["q"], [inputs["k_cache"], inputs["v_cache"]]
    starts, lengths = (options[n].tolist() for n in ("cu_seqlens_q", "seqlens_k"))
    table, is_packed = options["block_table"].long(), caches[0].ndim == 5
    page = caches[0].shape[-2] if is_packed else caches[0].shape[1]
    names = ("softmax_scale", "causal", "window_size", "softcap")
    given = {name: options[name] for name in names if name in options}
    given["truncates"] = interpreted() and q.device.type == "cpu"
    if caches[0].element_size() == 1 and q.element_size() > 1:
        given["cache"] = caches[0].dtype
    found: list[dict[str, Bounded]] = []
    for b, keys in enumerate(lengths):
        rows = slice(starts[b], starts[b + 1])
        cached = max(0, keys - (starts[b + 1] - starts[b])) if "k" in inputs else keys
        pages = table[b, : -(-cached // page)]
        parts = []
        for cache, name in zip(caches, "kv", strict=True):
            part = gather_pages(cache, pages, is_packed)[:cached].double()
            if name in inputs:
                part = torch.cat((part, inputs[name][rows].double()))
            parts.append(part[None])
        own = {n: x if x.ndim == 1 else x[b : b + 1] for n, x in inputs.items() if n in EXTRAS}
        for name in ("q_descale", "k_descale", "v_descale"):
            if options.get(name) is not None:
                own[name] = options[name][b : b + 1] if options[name].ndim == 2 else options[name]
        found.append(attention_bounds(q[rows][None], *parts, **given, **own))
    return in_one(q, found, caches[1].shape[2 if is_packed else 3])


def in_one(q: Tensor, found: list[dict[str, Bounded]], width: int) -> dict[str, Bounded]:
    """Put the bounds of sequences side by side; tokens behind them are 0, and their LSE -inf."""
    tokens, heads = q.shape[:2]
    rest = tokens - sum(x["out"].exact.shape[1] for x in found)
    fill = q.new_zeros((rest, heads, width), dtype=torch.float64)
    nothing = q.new_full((heads, rest), -torch.inf, dtype=torch.float64)
    out = torch.cat([*(x["out"].exact[0] for x in found), fill])
    out_bound = torch.cat([*(x["out"].bound[0] for x in found), fill + TINY])
    lse = torch.cat([*(x["lse"].exact[0] for x in found), nothing], 1)
    lse_bound = torch.cat([*(x["lse"].bound[0] for x in found), torch.zeros_like(nothing)], 1)
    return {"out": Bounded(out, out_bound), "lse": Bounded(lse, lse_bound)}


def check_bounds(case: Case, got: dict[str, Tensor]) -> None:
    """Hold results to their a-priori bounds, element by element."""
    assert_within(got, bounds_of(case))


@contextlib.contextmanager
def only_portable() -> Iterator[None]:
    """Keep calls from the kernel for Hopper."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "HOPPER", False)
        for module in (api, dropin, mla_api):
            patch.setattr(module, "_known", Memory())
        yield


def check(case: Case, *, portable: bool = True) -> dict[str, Tensor]:
    """Run function, eager and oracle, and compare; returns the function's results.

    On Hopper the portable kernel, which serves what its own does not, is held to the same, unless
    ``portable`` says that it is not asked for.
    """
    got = run(case)
    oracle = run_oracle(case)
    eager = run_eager(case, oracle)
    results = [got]
    if portable and detect(case.inputs["q"].device).is_hopper:
        with only_portable():
            results.append(run(case))
    for result in results:
        assert result["out"].dtype == case.inputs["q"].dtype
        assert result["lse"].dtype == torch.float32
        for name, value in result.items():
            assert_no_worse_than_eager(name, value, eager[name], oracle[name])
    return got
