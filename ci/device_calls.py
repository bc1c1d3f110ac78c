"""The calls that the cases of ``device_cases.py`` consist of.

Each returns what was computed by name, what is exact (float64), and the a-priori bounds of
docs/numerics.md where they are known. A call needs its package and nothing of its tests.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from results import ROOT

# results by name, exact ones, bounds
Found = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


def bounds_module(name: str) -> ModuleType:
    """Load a module of linked/testing/, which is no part of a wheel."""
    if (folder := str(ROOT / "linked")) not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(f"testing.{name}")


def load(name: str) -> Any:
    """Import a package when a case of it is run, which may be the only one that is there."""
    return importlib.import_module(name)


def _bounded(got: dict[str, Any], device: str, *given: Any, of: str = "", **options: Any) -> Found:
    """Return results with their bounds, which know what is exact.

    ``of``: the module of bounds, if the results are not softmax attention's.
    """
    # results are cut off where others round
    truncates = device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    module = bounds_module(f"{of}_bounds" if of else "bounds")
    function = module.lightning_bounds if of else module.attention_bounds
    found = function(*given, **options, truncates=truncates)
    bounds = {name: found[name] for name in got}
    return got, {name: b.exact for name, b in bounds.items()}, bounds


def drawer(device: str, dtype: Any = None, seed: int = 0) -> Callable[..., Any]:
    import torch

    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int, dtype: Any = dtype or torch.bfloat16) -> Any:
        return torch.randn(*size, generator=generator).to(device, dtype)

    return draw


def _draw_per_head(options: dict[str, Any], draw: Callable[..., Any], heads: int) -> None:
    """Put tensors in the place of what is asked for by name."""
    import torch

    if options.pop("sinks", False):
        options["sinks"] = draw(heads, dtype=torch.float32)
    if options.pop("alibi", False):
        options["alibi_slopes"] = draw(heads, dtype=torch.float32).abs() / 4


def _with_gradients(
    out: Any, lse: Any, leaves: dict[str, Any], draw: Callable[..., Any]
) -> tuple[dict[str, Any], Any]:
    """Return outputs and gradients by name, and the gradient of the output."""
    import torch

    dout = draw(*out.shape)
    made = torch.autograd.grad(out, list(leaves.values()), dout)
    got = {"out": out.detach(), "lse": lse.detach()}
    return got | dict(zip(leaves, made, strict=True)), dout


def _detached(leaves: dict[str, Any]) -> list[Any]:
    return [leaves[name].detach() for name in ("dq", "dk", "dv")]


# ---- flash-attn-triton


def flash(
    device: str,
    d: int,
    dv: int | None = None,
    queries: int = 200,
    keys: int = 333,
    heads: tuple[int, int] = (2, 1),
    grad: bool = True,
    dtype: str = "bfloat16",
    batch: int = 1,
    **options: Any,
) -> Found:
    import torch

    draw = drawer(device, getattr(torch, dtype))
    leaves = {"dq": draw(batch, queries, heads[0], d), "dk": draw(batch, keys, heads[1], d)}
    leaves["dv"] = draw(batch, keys, heads[1], dv or d)
    _draw_per_head(options, draw, heads[0])
    if sharing := options.pop("bias", ""):
        own = 1 if sharing == "shared" else batch
        bias = draw(own, heads[0], queries, (keys + 7) // 8 * 8)[..., :keys]
        options["bias"] = leaves["dbias"] = bias
    q, k, v, *_ = (x.requires_grad_(grad) for x in leaves.values())
    torch.manual_seed(0)
    out, lse = load("flash_attn_triton").flash_attn_func(q, k, v, **options, return_lse=True)
    ways = "deterministic", "dropout_p", "invariant"
    rest = {n: x for n, x in options.items() if n not in ways}
    if grad:
        got, rest["dout"] = _with_gradients(out, lse, leaves, draw)
    else:
        got = {"out": out, "lse": lse}
    if "bias" in rest:
        rest["bias"] = rest["bias"].detach()
    if "dropout_p" in options:
        # a call draws seed and offset, once
        torch.manual_seed(0)
        state = torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device)
        philox, p = load("flash_attn_triton._reference.philox"), options["dropout_p"]
        rest["kept"] = philox.dropout_keep_mask(state, p, batch, heads[0], queries, keys)
        rest["keep_scale"] = philox.keep_scale(p)
    return _bounded(got, device, *_detached(leaves), **rest)


def flash_tree(device: str, d: int, **options: Any) -> Found:
    import torch

    draw = drawer(device)
    lengths, parents = [150, 140, 10, 130], [-1, 0, 0, 1]
    starts = [sum(lengths[:s]) for s in range(len(lengths) + 1)]
    sizes = {"dq": 2, "dk": 1, "dv": 1}
    leaves = {name: draw(430, heads, d).requires_grad_() for name, heads in sizes.items()}
    given = torch.tensor(starts, dtype=torch.int32, device=device)
    function = load("flash_attn_triton").flash_attn_tree_func
    out, lse = function(*leaves.values(), given, parents, 150, **options, return_lse=True)
    got, dout = _with_gradients(out, lse, leaves, draw)
    visible = torch.zeros(430, 430, dtype=torch.bool)
    for segment, parent in enumerate(parents):
        rows = slice(starts[segment], starts[segment + 1])
        visible[rows, rows] = torch.ones(lengths[segment], lengths[segment]).tril().bool()
        while parent >= 0:
            visible[rows, starts[parent] : starts[parent + 1]] = True
            parent = parents[parent]
    # tiles of a path, and one more for each segment that ends within one
    more = {"visible": visible.to(device), "tiles": 430 / 16 + len(lengths), "dout": dout[None]}
    got = {name: x[None] for name, x in got.items()}
    return _bounded(got, device, *(x[None] for x in _detached(leaves)), **options, **more)


# ---- prefix-prefill


def one_sequence(device: str, pages: int, queries: int, keys: int) -> tuple[Any, ...]:
    """Return what a call takes of one sequence in pages that do not lie in order, after page 0.

    Its block table, the starts of queries and the keys' number, and the largest of either.
    """
    import torch

    table = torch.arange(pages, device=device, dtype=torch.int32).flip(0)[None] + 1
    starts, lengths = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, queries], [keys])
    )
    return table, starts, lengths, queries, keys


def paged(
    device: str,
    d: int,
    page: int = 16,
    queries: int = 200,
    fp8: tuple[str, ...] = (),
    new: bool = False,
    **options: Any,
) -> Found:
    """``fp8``: what has 8 bits, ``"cache"`` or that and ``"q"``; all have descales.

    ``new``: the keys of the queries' tokens lie beside the cache.
    """
    import torch

    draw = drawer(device)
    heads, keys = (4, 2), queries + 133
    pages = -(-keys // page)
    caches = [draw(pages + 2, page, heads[1], d) for _ in "kv"]
    q = draw(queries, heads[0], d)
    rest = one_sequence(device, pages, queries, keys)
    _draw_per_head(options, draw, heads[0])
    if fp8:
        caches = [x.to(torch.float8_e4m3fn) for x in caches]
        for name in ("k_descale", "v_descale"):
            options[name] = torch.tensor([0.7, 1.3], device=device)
    if "q" in fp8:
        q = q.to(torch.float8_e4m3fn)
        options["q_descale"] = torch.tensor([1.2, 0.9], device=device)
    splits = options.pop("num_splits", 0 if "invariant" in options else 1)
    beside = {name: draw(queries, heads[1], d) for name in ("k", "v")} if new else {}
    out, lse = load("prefix_prefill").paged_attn_func(
        q, *caches, *rest, **beside, **options, num_splits=splits, return_lse=True
    )
    options.pop("invariant", None)
    # indexing knows no FP8
    plain = [x.view(torch.uint8) if fp8 else x for x in caches]
    k, v = (x[rest[0][0].long()].view(caches[0].dtype) for x in plain)
    k, v = (x.reshape(-1, heads[1], d)[:keys][None].double() for x in (k, v))
    if new:
        for x, name in ((k, "k"), (v, "v")):
            x[0, keys - queries :] = beside[name].double()
    if fp8 and "q" not in fp8:
        options["cache"] = caches[0].dtype
    options = {"causal": True, **options}
    return _bounded({"out": out[None], "lse": lse[None]}, device, q[None], k, v, **options)


def paged_codes(device: str, d: int, kind: str, queries: int = 200) -> Found:
    """A cache of integers, ``kind`` "int8" or "int4", with a scale a key; no bound is known."""
    import torch

    package, draw = load("prefix_prefill"), drawer(device)
    heads, keys, page = (4, 2), queries + 133, 16
    pages = -(-keys // page)
    size = (pages + 2, page, heads[1])
    dtype, width = (torch.int8, d) if kind == "int8" else (torch.uint8, d // 2)
    caches = [torch.zeros(*size, width, dtype=dtype, device=device) for _ in "kv"]
    scales = [torch.zeros(*size, dtype=torch.float16, device=device) for _ in "kv"]
    options: dict[str, Any] = {"kv_dtype": kind}
    options.update(k_scale_cache=scales[0], v_scale_cache=scales[1])
    rest = one_sequence(device, pages, queries, keys)
    slots = rest[0][0].long()[:, None] * page + torch.arange(page, device=device)
    k, v = (draw(keys, heads[1], d) for _ in "kv")
    package.reshape_and_cache(k, v, *caches, slots.flatten()[:keys], **options)
    q = draw(queries, heads[0], d)
    found = package.paged_attn_func(q, *caches, *rest, **options, num_splits=1, return_lse=True)
    wide = {name: x if name == "kv_dtype" else x.double() for name, x in options.items()}
    exact = package.paged_attention_reference(q.double(), *caches, *rest, **wide, return_lse=True)
    names = "out", "lse"
    return dict(zip(names, found, strict=True)), dict(zip(names, exact, strict=True)), {}


def latent(device: str, fp8: bool = False, queries: int = 3, **options: Any) -> Found:
    import torch

    draw = drawer(device)
    keys, page, heads = 300, 64, 16
    cache = draw(7, page, 576).to(torch.float8_e4m3fn if fp8 else torch.bfloat16)
    q = draw(queries, heads, 576)
    options = {"softmax_scale": 576**-0.5, **options}
    rest = one_sequence(device, 5, queries, keys)
    out, lse = load("prefix_prefill").mla_attn_func(q, cache, *rest, **options, return_lse=True)
    options.pop("num_splits", None)
    if fp8:
        options["cache"] = cache.dtype
    k = cache.double()[rest[0][0].long()].reshape(1, -1, 1, 576)[:, :keys]
    given = q[None], k, k[..., :512]
    return _bounded({"out": out[None], "lse": lse[None]}, device, *given, causal=True, **options)


# ---- lightning-attn and blocksparse-attn


def lightning(device: str, d: int, e: int, heads: int = 4, **options: Any) -> Found:
    import torch

    draw = drawer(device)
    leaves = [draw(1, 300, heads, n).requires_grad_() for n in (d, d, e)]
    first = draw(1, heads, d, e, dtype=torch.float32).requires_grad_()
    decay = draw(heads, dtype=torch.float32).abs() / 4
    out, last = load("lightning_attn").lightning_attn_func(
        *leaves, decay, scale=0.6, initial_state=first, output_final_state=True, **options
    )
    dout = drawer(device, seed=1)(*out.shape)
    made = torch.autograd.grad(out, (*leaves, first), dout)
    got = {"o": out.detach(), "state": last.detach()}
    got.update(zip(("dq", "dk", "dv", "dinitial_state"), made, strict=True))
    rest = {"scale": 0.6, "initial_state": first.detach(), "dout": dout}
    return _bounded(got, device, *(x.detach() for x in leaves), decay, of="walk", **rest)


def blocksparse(
    device: str,
    d: int,
    block: tuple[int, int],
    heads: tuple[int, int] = (2, 1),
    short: bool = False,
    causal: bool = True,
) -> Found:
    """Call with a layout that has more slots than blocks, unless its rows are to count as short."""
    import torch

    package, draw = load("blocksparse_attn"), drawer(device)
    tokens = 384
    rows, columns = tokens // block[0], tokens // block[1]
    generator = torch.Generator().manual_seed(0)
    kept = torch.rand(heads[0], rows, columns, generator=generator) < 0.6
    kept[:, :, 0] = True
    slots = None if short else max(256, rows * columns)
    layout = package.BlockSparseLayout.from_dense(kept, block, max_nnz=slots).to(device)
    sizes = {"dq": heads[0], "dk": heads[1], "dv": heads[1]}
    leaves = {name: draw(1, tokens, n, d).requires_grad_() for name, n in sizes.items()}
    out, lse = package.blocksparse_attn_func(
        *leaves.values(), layout, causal=causal, return_lse=True
    )
    got, dout = _with_gradients(out, lse, leaves, drawer(device, seed=1))
    visible = kept.repeat_interleave(block[0], 1).repeat_interleave(block[1], 2).to(device)
    return _bounded(got, device, *_detached(leaves), causal=causal, visible=visible, dout=dout)
