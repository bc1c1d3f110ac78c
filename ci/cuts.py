"""Cut random sequences into chunks and decodes, and hold their bits to a training forward's.

    python ci/cuts.py --json law.json                                # 2,000 cuts on a GPU
    python ci/cuts.py --jobs 10 --json law.json                      # the same, 10 processes
    TRITON_INTERPRET=1 python ci/cuts.py --device cpu --cuts 12      # a few in the interpreter

The law is that of ``invariant=True`` (docs/numerics.md). In each round flash-attn-triton computes a
few whole sequences in one call. Then prefix-prefill computes them in pieces, in random batches, by
one of its functions at a time, from caches whose pages are in no order. Outputs and LSEs have to be
equal to the bit. What a call must not read is NaN. Rounds share dtype, head dimension, options and
page size with some others, as each of these has kernels of its own, which take time to build.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
from device_calls import load
from results import about, commit, parser_of, write

HEADS = 4
# how a round's scores are made
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"window_size": (37, 0)},
    {"softcap": 2.0},
    {"softmax_scale": -0.2},
    {"window_size": (700, 0), "softcap": 30.0},
)
PAGES = (1, 16, 33, 48, 128, 256)


@dataclass(frozen=True)
class Size:
    """How large rounds are: on a GPU some sequences have several segments of keys."""

    longest: tuple[int, ...] = (300, 3000, 10000)
    head_dims: tuple[int, ...] = (64, 80, 128, 192, 256)
    sequences: int = 3
    cuts: int = 120  # of a form
    on_cpu: bool = False


SMALL = Size((40, 100), (16, 24), 2, 8, on_cpu=True)


class Form(NamedTuple):
    """What rounds have in common that share kernels."""

    dtype: str
    fp8: bool  # the cache is
    head_dim: int
    options: dict[str, Any]
    has_sinks: bool
    page: int

    @property
    def names(self) -> list[str]:
        """What it is about, for the counts."""
        also = ["sinks"] * self.has_sinks + ["FP8 cache"] * self.fp8 + [f"page {self.page}"]
        return [self.dtype, f"head_dim {self.head_dim}", *self.options, *also]


def forms(draw: random.Random, size: Size, has_fp8: bool) -> Iterator[Form]:
    """Return forms without end; any few of them have different values of everything."""
    dtypes = [("bfloat16", False), ("float16", False), ("float32", False)]
    if has_fp8:
        # the interpreter cuts numbers off where bf16 rounds
        dtypes.append(("float16" if size.on_cpu else "bfloat16", True))
    lists: list[list[Any]] = [dtypes, list(size.head_dims), list(OPTIONS), list(PAGES)]
    for values in lists:
        draw.shuffle(values)
    for i in itertools.count():
        (dtype, fp8), head_dim, options, page = (values[i % len(values)] for values in lists)
        yield Form(dtype, fp8, head_dim, options, i % 3 == 1, page)


@dataclass
class Round:
    """Sequences, their options, and what a training forward makes of them."""

    device: Any
    form: Form
    sinks: Any
    q: list[Any]
    k: list[Any]
    v: list[Any]
    # keys and values as the cache holds them, and by what they are multiplied, if it is of FP8
    stored: list[list[Any]]
    descales: Sequence[Any]
    out: Any = ()
    lse: Any = ()

    def ints(self, values: Sequence[int]) -> Any:
        import torch

        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def sizes(self, chunks: Sequence[Chunk]) -> tuple[Any, Any, int, int]:
        """Return the starts of chunks' queries, the numbers of their keys, and the largest."""
        lengths, ends = [c.length for c in chunks], [c.end for c in chunks]
        starts = self.ints([0, *itertools.accumulate(lengths)])
        return starts, self.ints(ends), max(lengths), max(ends)


class Chunk(NamedTuple):
    """Queries ``[begin, end)`` of a sequence."""

    which: int
    begin: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.begin


def make_round(draw: random.Random, device: Any, size: Size, form: Form) -> Round:
    import torch

    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    dtype, heads_k = getattr(torch, form.dtype), draw.choice([1, 2, 4])
    sinks = torch.randn(HEADS, generator=generator).to(device) if form.has_sinks else None
    longest = draw.choice(size.longest)
    whole: list[list[Any]] = [[], [], []]
    for _ in range(size.sequences):
        n = draw.randint(1, longest)
        for xs, heads in zip(whole, (HEADS, heads_k, heads_k), strict=True):
            x = torch.randn(n, heads, form.head_dim, generator=generator)
            xs.append(x.to(device, dtype))
    stored, descales = whole[1:], list[Any]([None, None])
    if form.fp8:
        descales = [(torch.rand(heads_k, generator=generator) + 0.3).to(device) for _ in "kv"]
        stored = [[x.to(torch.float8_e4m3fn) for x in xs] for xs in stored]
        scaled = zip(stored, descales, strict=True)
        whole[1:] = [[(x.float() * s[:, None]).to(dtype) for x in xs] for xs, s in scaled]
    q, k, v = whole
    return Round(device, form, sinks, q, k, v, stored, descales)


def train(made: Round) -> None:
    """Compute whole sequences, packed, by flash-attn-triton."""
    whole = [Chunk(which, 0, len(q)) for which, q in enumerate(made.q)]
    starts, _, longest, _ = made.sizes(whole)
    sizes = starts, starts, longest, longest
    options = {**made.form.options, "causal": True, "invariant": True, "return_lse": True}
    function = load("flash_attn_triton").flash_attn_varlen_func
    out, lse = function(*rows(made, whole), *sizes, sinks=made.sinks, **options)
    lengths = [c.length for c in whole]
    made.out, made.lse = out.split(lengths), lse.split(lengths, 1)


def cut(made: Round, draw: random.Random) -> list[Chunk]:
    """Cut sequences into chunks, some of them single tokens, in no order."""
    chunks = []
    for which, q in enumerate(made.q):
        n = len(q)
        ends = sorted({n, max(1, n - 1), *(draw.randint(1, n) for _ in range(2))})
        chunks += [Chunk(which, *cut) for cut in zip([0, *ends], ends, strict=False)]
    draw.shuffle(chunks)
    return chunks


def batches(chunks: list[Chunk], draw: random.Random) -> Iterator[list[Chunk]]:
    """Share chunks out to calls of random sizes; half of the times those of one query first."""
    left = sorted(chunks, key=lambda c: c.length > 1) if draw.random() < 0.5 else chunks
    while left:
        size = draw.randint(1, len(left))
        yield left[:size]
        left = left[size:]


def cache_of(
    made: Round, chunks: list[Chunk], held: list[int], page: int, draw: random.Random
) -> tuple[Any, Any, Any]:
    """Put so many keys of each chunk's sequence into pages in no order; the rest is NaN.

    Returns the pages of keys and of values, and their table, which has an entry for each page that
    a chunk's keys need, new ones included.
    """
    import torch

    counts, ends = ([-(-n // page) for n in ns] for ns in (held, [c.end for c in chunks]))
    total = sum(counts)
    order = draw.sample(range(total + 2), total)
    table = torch.full((len(chunks), max(1, *counts, *ends)), total + 1, dtype=torch.int32)
    slots = []
    for b, n in enumerate(held):
        pages = torch.tensor([order.pop() for _ in range(counts[b])], dtype=torch.int64)
        table[b, : counts[b]] = pages
        keys = torch.arange(n)
        slots.append((pages[keys // page] * page + keys % page).to(made.device))
    caches = []
    for xs in made.stored:
        cache = torch.full((total + 2, page, *xs[0].shape[1:]), float("nan"))
        cache = cache.to(made.device, xs[0].dtype)
        # indexing knows no FP8
        kind = torch.uint8 if made.form.fp8 else cache.dtype
        for chunk, where, n in zip(chunks, slots, held, strict=True):
            cache.view(kind).flatten(0, 1)[where] = xs[chunk.which][:n].view(kind)
        caches.append(cache)
    return caches[0], caches[1], table.to(made.device)


def packed(k: Any, v: Any) -> tuple[Any, Any]:
    """Return a cache in the packed layout."""
    k = k.permute(0, 2, 3, 1).unflatten(2, (-1, 16 // k.element_size()))
    return k.transpose(3, 4).contiguous(), v.permute(0, 2, 3, 1).contiguous()


def rows(made: Round, chunks: list[Chunk]) -> list[Any]:
    """Return the queries, keys and values of chunks."""
    import torch

    whole = made.q, made.k, made.v
    return [torch.cat([x[c.which][c.begin : c.end] for c in chunks]) for x in whole]


# ---- what serves a batch; each returns (out, lse), of which lse may be None


def by_pages(made: Round, chunks: list[Chunk], page: int, draw: random.Random) -> tuple[Any, Any]:
    """``paged_attn_func``, with all keys in the cache or new ones beside it, in either layout."""
    dense = not made.form.fp8 and draw.random() < 0.5
    q, k, v = rows(made, chunks)
    held = [c.begin if dense else c.end for c in chunks]
    *cache, table = cache_of(made, chunks, held, page, draw)
    if q.shape[2] % 16 == 0 and draw.random() < 0.3:
        cache = [*packed(*cache)]
    given: dict[str, Any] = {"k": k, "v": v} if dense else {}
    if made.form.fp8:
        given = dict(zip(("k_descale", "v_descale"), made.descales, strict=True))
    options = {**made.form.options, "invariant": True, "return_lse": True}
    function = load("prefix_prefill").paged_attn_func
    sizes = made.sizes(chunks)
    out, lse = function(q, *cache, table, *sizes, sinks=made.sinks, **given, **options)
    return out, lse


def by_dropin(made: Round, chunks: list[Chunk], page: int, draw: random.Random) -> tuple[Any, None]:
    """One of the two drop-ins; a sequence of one query has its newest key in the cache."""
    import torch

    name = draw.choice(["chunked_prefill_paged_decode", "context_attention_fwd"])
    dense = not made.form.fp8 and draw.random() < 0.5
    q, k, v = rows(made, chunks)
    starts, ends, longest, most = made.sizes(chunks)
    held = [c.end for c in chunks]
    if dense:
        in_cache = name == "chunked_prefill_paged_decode"
        held = [c.end if in_cache and c.length == 1 else c.begin for c in chunks]
    cache = cache_of(made, chunks, held, page, draw)
    left = made.form.options.get("window_size", (-1, 0))[0]
    out = torch.full_like(q, float("nan"))
    getattr(load("prefix_prefill"), name)(
        *(q, k if dense else None, v if dense else None, out),
        "fp8" if made.form.fp8 else "auto",
        *(*cache, starts, ends, draw.choice([None, most]), longest, *made.descales),
        sliding_window=left + 1 if left >= 0 else None,
        sm_scale=made.form.options.get("softmax_scale"),
        sinks=made.sinks,
        invariant=True,
    )
    return out, None


def by_appending(
    made: Round, chunks: list[Chunk], page: int, draw: random.Random
) -> tuple[Any, Any]:
    """``flash_attn_with_kvcache``, over pages or over rows; all chunks have one length."""
    q, k, v = (x.unflatten(0, (-1, chunks[0].length)) for x in rows(made, chunks))
    given: dict[str, Any] = {}
    ends = [c.end for c in chunks]
    if draw.random() < 0.5:
        *caches, given["block_table"] = cache_of(made, chunks, ends, page, draw)
    else:
        slots = max(ends) + draw.randint(0, 3)
        caches = []
        for xs in (made.k, made.v):
            cache = xs[0].new_full((len(chunks), slots, *xs[0].shape[1:]), float("nan"))
            for b, chunk in enumerate(chunks):
                cache[b, : chunk.begin] = xs[chunk.which][: chunk.begin]
            caches.append(cache)
    given["cache_seqlens"] = made.ints([c.begin for c in chunks])
    options = {**made.form.options, "causal": True, "invariant": True}
    function = load("prefix_prefill").flash_attn_with_kvcache
    out, lse = function(q, *caches, k, v, **given, **options, return_softmax_lse=True)
    return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)


def ways(made: Round, chunks: list[Chunk]) -> list[Any]:
    """Return the functions that can serve a batch."""
    found: list[Any] = [by_pages]
    if "softcap" not in made.form.options:
        found.append(by_dropin)
    if made.sinks is None and not made.form.fp8 and len({c.length for c in chunks}) == 1:
        found += 2 * [by_appending]
    return found


# ---- the check


def differing(made: Round, chunks: list[Chunk], out: Any, lse: Any) -> list[Chunk]:
    """Return the chunks of which a bit differs from the training forward."""
    import torch

    found, at = [], 0
    for chunk in chunks:
        part, mine = slice(chunk.begin, chunk.end), slice(at, at + chunk.length)
        same = torch.equal(out[mine], made.out[chunk.which][part])
        if lse is not None:
            same &= torch.equal(lse[:, mine], made.lse[chunk.which][:, part])
        found += [] if same else [chunk]
        at = mine.stop
    return found


def check_cuts(device: str, cuts: int, seconds: float, seed: int, size: Size) -> dict[str, Any]:
    """Make that many cuts, or as many as the time allows; return what was found."""
    from attn_common import detect

    draw = random.Random(seed)
    begin = time.monotonic()
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    done = rounds = until = 0
    drawn = forms(draw, size, size.on_cpu or detect(device).supports_fp8)
    while done < cuts and time.monotonic() - begin < seconds:
        if done >= until:
            form, until = next(drawn), done + size.cuts
            print(f"{done} cuts, {len(wrong)} differ; next {form}", file=sys.stderr, flush=True)
        made = make_round(draw, device, size, form)
        train(made)
        for some in batches(cut(made, draw), draw):
            way = draw.choice(ways(made, some))
            out, lse = way(made, some, form.page, draw)
            for chunk in differing(made, some, out, lse):
                wrong.append(f"round {rounds}: {way.__name__} {form} {chunk}")
            counts.update({name: len(some) for name in [*form.names, way.__name__]})
            done += len(some)
        rounds += 1
    told = {"cuts": done, "differing": len(wrong), "first": wrong[:20], "rounds": rounds}
    return {**told, "seed": seed, "with": dict(counts)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cuts", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no round after these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes, which share the cuts")
    given = parser.parse_args()
    size = SMALL if given.device == "cpu" else Size()
    begin, share = time.monotonic(), -(-given.cuts // given.jobs)
    # a process spends most of its time building kernels
    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as pool:
        asked = given.device, share, given.seconds
        begun = [pool.submit(check_cuts, *asked, given.seed + i, size) for i in range(given.jobs)]
        found = [one.result() for one in begun]
    told: dict[str, Any] = {"commit": commit(), **about(given.device)}
    told |= {name: sum(one[name] for one in found) for name in ("cuts", "differing", "rounds")}
    told["first"] = [wrong for one in found for wrong in one["first"]][:20]
    told |= {"seconds": round(time.monotonic() - begin, 1), "seed": [x["seed"] for x in found]}
    counts = sum((Counter(one["with"]) for one in found), Counter[str]())
    told["with"] = dict(sorted(counts.items()))
    write(told, given.json)
    print(json.dumps(told, indent=1))
    sys.exit(bool(told["differing"]) or told["cuts"] < given.cuts)


if __name__ == "__main__":
    main()
