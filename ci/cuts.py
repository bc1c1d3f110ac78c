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

import argparse
import itertools
import json
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

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


@dataclass(frozen=True)
class Form:
    """What rounds have in common that share kernels."""

    dtype: str
    fp8: bool  # the cache is
    head_dim: int
    options: dict[str, Any]
    has_sinks: bool
    page: int


def forms(draw: random.Random, size: Size, has_fp8: bool) -> Iterator[Form]:
    """Return forms without end; any few of them have different values of everything."""
    dtypes = [("bfloat16", False), ("float16", False), ("float32", False)]
    if has_fp8:
        # the interpreter cuts numbers off where bf16 rounds
        dtypes.append(("float16" if size.on_cpu else "bfloat16", True))
    lists: list[list[Any]] = [list(dtypes), list(size.head_dims), list(OPTIONS), list(PAGES)]
    for values in lists:
        draw.shuffle(values)
    for i in itertools.count():
        (dtype, fp8), head_dim, options, page = (values[i % len(values)] for values in lists)
        yield Form(dtype, fp8, head_dim, options, i % 3 == 1, page)


@dataclass
class Round:
    """Sequences, their options, and what a training forward makes of them."""

    device: Any
    dtype: Any
    options: dict[str, Any]
    sinks: Any
    fp8: bool
    q: list[Any] = field(default_factory=list)
    k: list[Any] = field(default_factory=list)
    v: list[Any] = field(default_factory=list)
    # keys and values as an FP8 cache holds them, and by what they are multiplied
    stored: tuple[list[Any], list[Any]] | None = None
    descales: tuple[Any, Any] | None = None
    out: Any = ()
    lse: Any = ()

    @property
    def names(self) -> list[str]:
        """What the round is about, for the counts."""
        made = [str(self.dtype).removeprefix("torch."), f"head_dim {self.q[0].shape[2]}"]
        made += [*self.options, *(["sinks"] if self.sinks is not None else [])]
        return [*made, *(["FP8 cache"] if self.fp8 else [])]


@dataclass(frozen=True)
class Chunk:
    """Queries ``[begin, end)`` of a sequence."""

    which: int
    begin: int
    end: int


def make_round(draw: random.Random, device: Any, size: Size, form: Form) -> Round:
    import torch

    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    dtype, heads_k = getattr(torch, form.dtype), draw.choice([1, 2, 4])

    def randn(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    sinks = torch.randn(HEADS, generator=generator).to(device) if form.has_sinks else None
    made = Round(device, dtype, form.options, sinks, form.fp8)
    longest = draw.choice(size.longest)
    for _ in range(size.sequences):
        n = draw.randint(1, longest)
        made.q.append(randn(n, HEADS, form.head_dim))
        made.k.append(randn(n, heads_k, form.head_dim))
        made.v.append(randn(n, heads_k, form.head_dim))
    if form.fp8:
        scales = [(torch.rand(heads_k, generator=generator) + 0.3).to(device) for _ in "kv"]
        made.descales = scales[0], scales[1]
        made.stored = [], []
        for xs, stored, scale in zip((made.k, made.v), made.stored, scales, strict=True):
            stored += [x.to(torch.float8_e4m3fn) for x in xs]
            xs[:] = [(x.float() * scale[:, None]).to(dtype) for x in stored]
    return made


def train(made: Round) -> None:
    """Compute whole sequences, packed, by flash-attn-triton."""
    import torch
    from flash_attn_triton import flash_attn_varlen_func

    lengths = [len(q) for q in made.q]
    starts = offsets(lengths, made.device)
    q, k, v = (torch.cat(x) for x in (made.q, made.k, made.v))
    options = {**made.options, "causal": True, "invariant": True, "return_lse": True}
    result: Any = flash_attn_varlen_func(
        q, k, v, starts, starts, max(lengths), max(lengths), sinks=made.sinks, **options
    )
    out, lse = result
    made.out, made.lse = out.split(lengths), lse.split(lengths, 1)


def offsets(lengths: Sequence[int], device: Any) -> Any:
    import torch

    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


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
    left = sorted(chunks, key=lambda c: c.end - c.begin > 1) if draw.random() < 0.5 else chunks
    while left:
        size = draw.randint(1, len(left))
        yield left[:size]
        left = left[size:]


@dataclass(frozen=True)
class Cache:
    """Pages, and a table of them for each chunk."""

    k: Any
    v: Any
    table: Any


def cache_of(made: Round, chunks: list[Chunk], held: list[int], page: int, draw: Any) -> Cache:
    """Put so many keys of each chunk's sequence into pages in no order; the rest is NaN."""
    import torch

    counts = [-(-n // page) for n in held]
    order = draw.sample(range(sum(counts) + 2), sum(counts))
    table = torch.full((len(chunks), max(1, *counts)), sum(counts) + 1, dtype=torch.int32)
    slots = []
    for b, n in enumerate(held):
        pages = torch.tensor([order.pop() for _ in range(counts[b])], dtype=torch.int64)
        table[b, : counts[b]] = pages
        keys = torch.arange(n)
        slots.append((pages[keys // page] * page + keys % page).to(made.device))
    caches = []
    for xs in made.stored or (made.k, made.v):
        cache = torch.full((sum(counts) + 2, page, *xs[0].shape[1:]), float("nan"))
        cache = cache.to(made.device, xs[0].dtype)
        # indexing knows no FP8
        flat, kind = (cache.view(torch.uint8), torch.uint8) if made.fp8 else (cache, made.dtype)
        for chunk, where, n in zip(chunks, slots, held, strict=True):
            flat.flatten(0, 1)[where] = xs[chunk.which][:n].view(kind)
        caches.append(cache)
    return Cache(caches[0], caches[1], table.to(made.device))


def packed(cache: Cache, itemsize: int) -> Cache:
    """Return a cache in the packed layout."""
    x = 16 // itemsize
    k = cache.k.permute(0, 2, 3, 1).unflatten(2, (-1, x)).transpose(3, 4).contiguous()
    return Cache(k, cache.v.permute(0, 2, 3, 1).contiguous(), cache.table)


def rows(made: Round, chunks: list[Chunk]) -> tuple[Any, Any, Any]:
    """Return the queries, keys and values of chunks."""
    import torch

    q, k, v = (
        torch.cat([x[c.which][c.begin : c.end] for c in chunks]) for x in (made.q, made.k, made.v)
    )
    return q, k, v


# ---- what serves a batch; each returns (out, lse), of which lse may be None


def by_pages(made: Round, chunks: list[Chunk], page: int, draw: random.Random) -> tuple[Any, Any]:
    """``paged_attn_func``, with all keys in the cache or new ones beside it, in either layout."""
    import torch
    from prefix_prefill import paged_attn_func

    dense = not made.fp8 and draw.random() < 0.5
    q, k, v = rows(made, chunks)
    ends = [c.end for c in chunks]
    cache = cache_of(made, chunks, [c.begin for c in chunks] if dense else ends, page, draw)
    if q.shape[2] % 16 == 0 and draw.random() < 0.3:
        cache = packed(cache, cache.k.element_size())
    lengths = [c.end - c.begin for c in chunks]
    given: dict[str, Any] = {"k": k, "v": v} if dense else {}
    if made.descales is not None:
        given |= {"k_descale": made.descales[0], "v_descale": made.descales[1]}
    out, lse = paged_attn_func(
        q,
        cache.k,
        cache.v,
        cache.table,
        offsets(lengths, made.device),
        torch.tensor(ends, dtype=torch.int32, device=made.device),
        max(lengths),
        max(ends),
        sinks=made.sinks,
        **given,
        **made.options,
        invariant=True,
        return_lse=True,
    )
    return out, lse


def by_dropin(made: Round, chunks: list[Chunk], page: int, draw: random.Random) -> tuple[Any, None]:
    """One of the two drop-ins; a sequence of one query has its newest key in the cache."""
    import torch
    from prefix_prefill import chunked_prefill_paged_decode, context_attention_fwd

    functions: list[Any] = [chunked_prefill_paged_decode, context_attention_fwd]
    function = draw.choice(functions)
    dense = not made.fp8 and draw.random() < 0.5
    q, k, v = rows(made, chunks)
    lengths, ends = [c.end - c.begin for c in chunks], [c.end for c in chunks]
    held = ends
    if dense:
        in_cache = function is functions[0]
        held = [c.end if in_cache and c.end - c.begin == 1 else c.begin for c in chunks]
    cache = cache_of(made, chunks, held, page, draw)
    if held != ends:
        # every chunk needs as many entries as its keys, new ones included
        more = max(-(-end // page) for end in ends) - cache.table.shape[1]
        table = torch.nn.functional.pad(cache.table, (0, max(0, more)), value=len(cache.k) - 1)
        cache = Cache(cache.k, cache.v, table)
    left = made.options.get("window_size", (-1, 0))[0]
    out = torch.full_like(q, float("nan"))
    function(
        q,
        k if dense else None,
        v if dense else None,
        out,
        "fp8" if made.fp8 else "auto",
        cache.k,
        cache.v,
        cache.table,
        offsets(lengths, made.device),
        torch.tensor(ends, dtype=torch.int32, device=made.device),
        draw.choice([None, max(ends)]),
        max(lengths),
        *(made.descales or (None, None)),
        sliding_window=left + 1 if left >= 0 else None,
        sm_scale=made.options.get("softmax_scale"),
        sinks=made.sinks,
        invariant=True,
    )
    return out, None


def by_appending(
    made: Round, chunks: list[Chunk], page: int, draw: random.Random
) -> tuple[Any, Any]:
    """``flash_attn_with_kvcache``, over pages or over rows; all chunks have one length."""
    import torch
    from prefix_prefill import flash_attn_with_kvcache

    q, k, v = rows(made, chunks)
    length = chunks[0].end - chunks[0].begin
    begins = torch.tensor([c.begin for c in chunks], dtype=torch.int32, device=made.device)
    given: dict[str, Any] = {}
    ends = [c.end for c in chunks]
    if draw.random() < 0.5:
        pages = cache_of(made, chunks, ends, page, draw)
        caches, given["block_table"] = [pages.k, pages.v], pages.table
    else:
        slots = max(ends) + draw.randint(0, 3)
        caches = [
            x[0].new_full((len(chunks), slots, *x[0].shape[1:]), float("nan"))
            for x in (made.k, made.v)
        ]
        for cache, xs in zip(caches, (made.k, made.v), strict=True):
            for b, chunk in enumerate(chunks):
                cache[b, : chunk.begin] = xs[chunk.which][: chunk.begin]
    q, k, v = (x.unflatten(0, (-1, length)) for x in (q, k, v))
    out, lse = flash_attn_with_kvcache(
        q,
        caches[0],
        caches[1],
        k,
        v,
        cache_seqlens=begins,
        causal=True,
        **given,
        **made.options,
        invariant=True,
        return_softmax_lse=True,
    )
    return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)


def ways(made: Round, chunks: list[Chunk]) -> list[Any]:
    """Return the functions that can serve a batch."""
    found: list[Any] = [by_pages]
    if "softcap" not in made.options:
        found.append(by_dropin)
    same = len({c.end - c.begin for c in chunks}) == 1
    if made.sinks is None and not made.fp8 and same:
        found += 2 * [by_appending]
    return found


# ---- the check


def differing(made: Round, chunks: list[Chunk], out: Any, lse: Any) -> list[Chunk]:
    """Return the chunks of which a bit differs from the training forward."""
    import torch

    found, at = [], 0
    for chunk in chunks:
        part, mine = slice(chunk.begin, chunk.end), slice(at, at + chunk.end - chunk.begin)
        same = torch.equal(out[mine], made.out[chunk.which][part])
        if lse is not None:
            same &= torch.equal(lse[:, mine], made.lse[chunk.which][:, part])
        found += [] if same else [chunk]
        at = mine.stop
    return found


def check_cuts(
    device: str, cuts: int, seconds: float, seed: int, size: Size, *, tell: bool = False
) -> dict[str, Any]:
    """Make that many cuts, or as many as the time allows; return what was found."""
    from attn_common import detect

    draw = random.Random(seed)
    begin = time.monotonic()
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    done = rounds = until = 0
    has_fp8 = size.on_cpu or detect(device).supports_fp8
    drawn = forms(draw, size, has_fp8)
    while done < cuts and time.monotonic() - begin < seconds:
        if done >= until:
            form, until = next(drawn), done + size.cuts
            if tell:
                print(f"{done} cuts, {len(wrong)} differ; next {form}", flush=True)
        made = make_round(draw, device, size, form)
        train(made)
        for some in batches(cut(made, draw), draw):
            way = draw.choice(ways(made, some))
            out, lse = way(made, some, form.page, draw)
            for chunk in differing(made, some, out, lse):
                wrong.append(f"round {rounds}: {way.__name__} {form} {chunk}")
            counts.update({name: len(some) for name in [*made.names, way.__name__]})
            counts[f"page {form.page}"] += len(some)
            done += len(some)
        rounds += 1
    took = time.monotonic() - begin
    told = {"cuts": done, "differing": len(wrong), "first": wrong[:20], "rounds": rounds}
    return {**told, "seconds": round(took, 1), "seed": seed, "with": dict(sorted(counts.items()))}


def side_by_side(
    jobs: int, device: str, cuts: int, seconds: float, seed: int, size: Size
) -> dict[str, Any]:
    """Share the cuts among processes, whose seeds follow ``seed``; return what all found.

    A process spends most of its time building kernels.
    """
    share = -(-cuts // jobs)
    begin = time.monotonic()
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        begun = [
            pool.submit(check_cuts, device, share, seconds, seed + i, size) for i in range(jobs)
        ]
        found = [one.result() for one in begun]
    counts: Counter[str] = Counter()
    for one in found:
        counts.update(one["with"])
    told = {name: sum(one[name] for one in found) for name in ("cuts", "differing", "rounds")}
    told["first"] = [wrong for one in found for wrong in one["first"]][:20]
    took = round(time.monotonic() - begin, 1)
    seeds = [one["seed"] for one in found]
    return {**told, "seconds": took, "seed": seeds, "with": dict(sorted(counts.items()))}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cuts", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no round after these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes, which share the cuts")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    given = parser.parse_args(arguments)
    from results import about, commit

    size = SMALL if given.device == "cpu" else Size()
    asked = given.device, given.cuts, given.seconds, given.seed, size
    if given.jobs > 1:
        told = side_by_side(given.jobs, *asked)
    else:
        told = check_cuts(*asked, tell=True)
    told = {"commit": commit(), **about(), **told}
    if given.device == "cpu":
        told["device"] = "cpu"
    if given.json:
        given.json.write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps(told, indent=1))
    sys.exit(bool(told["differing"]) or told["cuts"] < given.cuts)


if __name__ == "__main__":
    main()
