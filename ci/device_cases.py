"""One registry of small calls on a GPU: each kernel for Hopper, each tile, each principal feature.

The sanitizers (``sanitize.py``), the measurement of errors (``errors.py``) and the certificate use
the same cases. A case needs its package and nothing of its tests. On other devices the same calls
run on what serves them there.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Case:
    """A call: which kernel and tile it is about, and how to make it on a device.

    ``make(device)`` returns what was computed by name, what is exact (float64), and the a-priori
    bounds, where they are known.
    """

    package: str
    kernel: str
    tile: str
    feature: str
    make: Callable[..., tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.package}/{self.kernel}/{self.tile}/{self.feature}"

    def run(self, device: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        return self.make(device, **self.options)


def bounds_module() -> ModuleType:
    """Load linked/testing/bounds.py, which is no part of a wheel."""
    name = "attn_error_bounds"
    if name not in sys.modules:
        path = ROOT / "linked" / "testing" / "bounds.py"
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is not there")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _drawer(device: str, dtype: Any = None, seed: int = 0) -> Callable[..., Any]:
    import torch

    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int, dtype: Any = dtype or torch.bfloat16) -> Any:
        return torch.randn(*size, generator=generator).to(device, dtype)

    return draw


# ---- flash-attn-triton


def _flash(
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
) -> Any:
    import torch

    package = _import("flash_attn_triton")
    attention_reference, flash_attn_func = package.attention_reference, package.flash_attn_func

    draw = _drawer(device, getattr(torch, dtype))
    q, k = draw(batch, queries, heads[0], d), draw(batch, keys, heads[1], d)
    v = draw(batch, keys, heads[1], dv or d)
    if options.pop("sinks", False):
        options["sinks"] = draw(heads[0], dtype=torch.float32)
    if options.pop("alibi", False):
        options["alibi_slopes"] = draw(heads[0], dtype=torch.float32).abs() / 4
    if options.pop("bias", False):
        options["bias"] = draw(batch, heads[0], queries, (keys + 7) // 8 * 8)[..., :keys]
    leaves = [x.requires_grad_(grad) for x in (q, k, v)]
    torch.manual_seed(0)
    out, lse = flash_attn_func(*leaves, **options, return_lse=True)
    got = {"out": out.detach(), "lse": lse.detach()}
    dout = draw(*out.shape)
    if grad:
        made = torch.autograd.grad(out, leaves, dout)
        got.update(zip(("dq", "dk", "dv"), made, strict=True))
    rest = {n: x for n, x in options.items() if n != "deterministic"}
    if "dropout_p" not in options:
        truncates = device == "cpu" and _is_interpreted()
        given = {"dout": dout} if grad else {}
        bounds = bounds_module().attention_bounds(
            *(x.detach() for x in leaves), **rest, **given, truncates=truncates
        )
        return got, {name: b.exact for name, b in bounds.items()}, bounds
    wide = [x.detach().double().requires_grad_(grad) for x in leaves]
    torch.manual_seed(0)
    exact_out, exact_lse = attention_reference(*wide, **rest, return_lse=True)
    exact = {"out": exact_out.detach(), "lse": exact_lse.detach()}
    if grad:
        made = torch.autograd.grad(exact_out, wide, dout.double())
        exact.update(zip(("dq", "dk", "dv"), made, strict=True))
    return got, exact, {}


def _import(name: str) -> Any:
    """Import a package when a case of it is run, which may be the only one that is there."""
    return importlib.import_module(name)


def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _flash_fp8(device: str, d: int, **options: Any) -> Any:
    import torch

    package = _import("flash_attn_triton")
    attention_reference, flash_attn_func = package.attention_reference, package.flash_attn_func

    draw = _drawer(device, torch.float8_e4m3fn)
    q, k, v = draw(1, 200, 2, d), draw(1, 333, 1, d), draw(1, 333, 1, d)
    out, lse = flash_attn_func(q, k, v, **options, return_lse=True)
    wide = [x.double() for x in (q, k, v)]
    exact, exact_lse = attention_reference(*wide, **options, return_lse=True)
    return {"out": out, "lse": lse}, {"out": exact, "lse": exact_lse}, {}


def _flash_tree(device: str, d: int, **options: Any) -> Any:
    import torch

    flash_attn_tree_func = _import("flash_attn_triton").flash_attn_tree_func
    reference = _import("flash_attn_triton.tree_reference").tree_attention_reference

    draw = _drawer(device)
    starts = torch.tensor([0, 150, 290, 300, 430], dtype=torch.int32, device=device)
    parents = [-1, 0, 0, 1]
    leaves = [draw(430, heads, d).requires_grad_() for heads in (2, 1, 1)]
    out = flash_attn_tree_func(*leaves, starts, parents, 150, **options)
    dout = draw(*out.shape)
    names = ("dq", "dk", "dv")
    got = dict(zip(names, torch.autograd.grad(out, leaves, dout), strict=True))
    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact = reference(*wide, starts, parents, 150, **options)
    made = dict(zip(names, torch.autograd.grad(exact, wide, dout.double()), strict=True))
    return {"out": out.detach(), **got}, {"out": exact.detach(), **made}, {}


# ---- prefix-prefill


def _paged(device: str, d: int, page: int = 16, queries: int = 200, **options: Any) -> Any:
    import torch

    paged_attn_func = _import("prefix_prefill").paged_attn_func

    draw = _drawer(device)
    heads, keys = (4, 2), queries + 133
    pages = -(-keys // page)
    k_cache, v_cache = (draw(pages + 2, page, heads[1], d) for _ in "kv")
    q = draw(queries, heads[0], d)
    table = torch.arange(pages, device=device, dtype=torch.int32).flip(0)[None] + 1
    if options.pop("sinks", False):
        options["sinks"] = draw(heads[0], dtype=torch.float32)
    if options.pop("alibi", False):
        options["alibi_slopes"] = draw(heads[0], dtype=torch.float32).abs() / 4
    starts, lengths = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, queries], [keys])
    )
    splits = options.pop("num_splits", 1)
    out, lse = paged_attn_func(
        q,
        k_cache,
        v_cache,
        table,
        starts,
        lengths,
        queries,
        keys,
        **options,
        num_splits=splits,
        return_lse=True,
    )
    k, v = (c[table[0].long()].reshape(-1, heads[1], d)[:keys][None] for c in (k_cache, v_cache))
    truncates = device == "cpu" and _is_interpreted()
    rest = {"causal": True, **options}
    bounds = bounds_module().attention_bounds(q[None], k, v, **rest, truncates=truncates)
    got = {"out": out[None], "lse": lse[None]}
    return got, {name: b.exact for name, b in bounds.items()}, bounds


def _latent(device: str, fp8: bool = False, queries: int = 3, **options: Any) -> Any:
    import torch

    package = _import("prefix_prefill")
    mla_attention_reference, mla_attn_func = package.mla_attention_reference, package.mla_attn_func

    draw = _drawer(device)
    keys, page, heads = 300, 64, 16
    cache = draw(7, page, 576).to(torch.float8_e4m3fn if fp8 else torch.bfloat16)
    q = draw(queries, heads, 576)
    table = torch.arange(5, device=device, dtype=torch.int32).flip(0)[None] + 1
    starts, lengths = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, queries], [keys])
    )
    rest = (table, starts, lengths, queries, keys)
    options = {"softmax_scale": 576**-0.5, **options, "return_lse": True}
    out, lse = mla_attn_func(q, cache, *rest, **options)
    options.pop("num_splits", None)
    exact = mla_attention_reference(q.double(), cache.double(), *rest, **options)
    return {"out": out, "lse": lse}, dict(zip(("out", "lse"), exact, strict=True)), {}


# ---- lightning-attn and blocksparse-attn


def _lightning(device: str, d: int, e: int, heads: int = 4, **options: Any) -> Any:
    import torch

    package = _import("lightning_attn")

    draw = _drawer(device)
    leaves = [draw(1, 300, heads, n).requires_grad_() for n in (d, d, e)]
    leaves.append(draw(1, heads, d, e, dtype=torch.float32).requires_grad_())
    decay = draw(heads, dtype=torch.float32).abs() / 4

    def call(function: Any, *x: Any, decay: Any = decay, **more: Any) -> dict[str, Any]:
        q, k, v, state = x
        out, last = function(
            q, k, v, decay, scale=0.6, initial_state=state, output_final_state=True, **more
        )
        dout = _drawer(device, seed=1)(*out.shape).to(out.dtype)
        made = torch.autograd.grad(out, x, dout)
        names = ("out", "state", "dq", "dk", "dv", "dstate")
        return dict(zip(names, (out.detach(), last.detach(), *made), strict=True))

    got = call(package.lightning_attn_func, *leaves, **options)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    return got, call(package.lightning_attention_reference, *wide, decay=decay.double()), {}


def _blocksparse(
    device: str, d: int, block: tuple[int, int], heads: tuple[int, int] = (2, 1), **options: Any
) -> Any:
    import torch

    package = _import("blocksparse_attn")

    draw = _drawer(device)
    tokens = 384
    rows, columns = tokens // block[0], tokens // block[1]
    generator = torch.Generator().manual_seed(0)
    kept = torch.rand(heads[0], rows, columns, generator=generator) < 0.6
    kept[:, :, 0] = True
    layout = package.BlockSparseLayout.from_dense(kept, block).to(device)
    leaves = [draw(1, tokens, n, d).requires_grad_() for n in (heads[0], heads[1], heads[1])]

    def call(function: Any, *x: Any) -> dict[str, Any]:
        out = function(*x, layout, **options)
        dout = _drawer(device, seed=1)(*out.shape).to(out.dtype)
        made = torch.autograd.grad(out, x, dout)
        return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *made), strict=True))

    got = call(package.blocksparse_attn_func, *leaves)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    return got, call(package.blocksparse_attention_reference, *wide), {}


# ---- the list

FLASH, PREFIX = "flash-attn-triton", "prefix-prefill"
_FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "softcap": {"causal": True, "softcap": 1.5},
    "window_alibi_sinks": {"window_size": (90, 20), "alibi": True, "sinks": True},
    "dropout": {"dropout_p": 0.2},
    "bias": {"bias": True, "causal": True},
    "deterministic": {"causal": True, "deterministic": True},
}
_WIDTHS: list[tuple[str, dict[str, Any]]] = [
    ("d64", {"d": 64}),
    ("d96", {"d": 96}),
    ("d128", {"d": 128}),
    ("d192", {"d": 192}),
    ("d192:128", {"d": 192, "dv": 128}),
    ("d256", {"d": 256}),
]


def _cases() -> list[Case]:
    found = []
    for tile, width in _WIDTHS:
        for feature, options in _FEATURES.items():
            given = {**width, **options}
            found.append(Case(FLASH, "forward+backward", tile, feature, _flash, given))
        few = {**width, "queries": 3, "heads": (8, 1), "causal": True, "grad": False}
        found.append(Case(FLASH, "forward", tile, "few queries", _flash, few))
    long = {"d": 64, "queries": 1100, "keys": 1100, "causal": True, "batch": 4, "grad": False}
    found.append(Case(FLASH, "forward", "d64 long", "causal", _flash, long))
    short = {"d": 64, "queries": 100, "keys": 90}
    found.append(Case(FLASH, "short backward", "d64", "plain", _flash, short))
    for d in (64, 128, 256):
        for feature in ("plain", "causal", "softcap"):
            options = {"d": d, **_FEATURES[feature]}
            found.append(Case(FLASH, "fp8 forward", f"d{d}", feature, _flash_fp8, options))
    for d in (64, 128):
        for feature, options in (("plain", {}), ("softcap", {"softcap": 1.5})):
            found.append(Case(FLASH, "tree", f"d{d}", feature, _flash_tree, {"d": d, **options}))
    found += _prefix_cases()
    for d, e in ((64, 64), (128, 128), (96, 192)):
        for schedule in ("sequential", "parallel"):
            options = {"d": d, "e": e, "schedule": schedule}
            tile = f"d{d}:{e}"
            found.append(Case("lightning-attn", "walk", tile, schedule, _lightning, options))
    for d in (64, 128):
        for block in ((64, 64), (128, 128), (16, 16), (128, 64)):
            options = {"d": d, "block": block}
            tile = f"d{d} blocks {block[0]}x{block[1]}"
            sparse = ("blocksparse-attn", "forward+backward", tile)
            found.append(Case(*sparse, "causal", _blocksparse, options))
            if block == (64, 64):
                full = {**options, "causal": False}
                found.append(Case(*sparse, "full", _blocksparse, full))
    return found


def _prefix_cases() -> list[Case]:
    found = []
    for d in (64, 96, 128, 256):
        for feature, options in (
            ("causal", {}),
            ("page 48", {"page": 48}),
            ("softcap", {"softcap": 1.5}),
            ("window_alibi_sinks", {"window_size": (90, 0), "alibi": True, "sinks": True}),
        ):
            given = {"d": d, **options}
            found.append(Case(PREFIX, "prefill", f"d{d}", feature, _paged, given))
        decode = {"d": d, "queries": 1, "num_splits": 3}
        found.append(Case(PREFIX, "decode", f"d{d}", "splits", _paged, decode))
    for name, fp8 in (("latent", False), ("latent fp8", True)):
        for feature, options in (
            ("decode", {"queries": 1}),
            ("few queries", {}),
            ("splits", {"num_splits": 2}),
        ):
            given = {"fp8": fp8, **options}
            found.append(Case(PREFIX, name, "d576:512", feature, _latent, given))
    return found


CASES = {case.name: case for case in _cases()}

# ---- what FpSan can compare: forwards in which no score is hidden, over whole tiles

TILES = 256  # a multiple of every tile of queries or keys


@dataclass(frozen=True)
class Algebra:
    """A call that two kernels serve, the one for Hopper and the portable one.

    Under FpSan (see docs/testing.md) their outputs have the same bits where they are the same
    algebra. What it does to numbers has no infinity, so that every row has a sink, and no score is
    hidden. With the sink, the weights of a row are odd in number, and so is their sum, which a
    division needs.
    """

    package: str
    kernel: str
    tile: str
    feature: str
    make: Callable[..., Any]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.package}/{self.kernel}/{self.tile}/{self.feature}"

    @property
    def switch(self) -> str:
        """The variable that leaves the call to the portable kernel, if it is 0."""
        return f"{self.package.upper().replace('-', '_')}_HOPPER"

    def run(self, device: str) -> Any:
        """Return the output."""
        return self.make(device, **self.options)


def _flash_algebra(device: str, d: int, **options: Any) -> Any:
    import torch

    flash_attn_func = _import("flash_attn_triton").flash_attn_func
    draw = _drawer(device)
    q, k, v = (draw(1, n, heads, d) for n, heads in ((TILES, 2), (2 * TILES, 1), (2 * TILES, 1)))
    return flash_attn_func(q, k, v, sinks=draw(2, dtype=torch.float32), **options)


def _paged_algebra(device: str, d: int, **options: Any) -> Any:
    import torch

    paged_attn_func = _import("prefix_prefill").paged_attn_func
    draw = _drawer(device)
    page, heads, keys = 64, (4, 2), 2 * TILES
    k_cache, v_cache = (draw(keys // page + 2, page, heads[1], d) for _ in "kv")
    table = torch.arange(keys // page, device=device, dtype=torch.int32).flip(0)[None] + 1
    starts, lengths = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, TILES], [keys])
    )
    return paged_attn_func(
        draw(TILES, heads[0], d),
        k_cache,
        v_cache,
        table,
        starts,
        lengths,
        TILES,
        keys,
        sinks=draw(heads[0], dtype=torch.float32),
        causal=False,
        **options,
    )


def _algebra() -> list[Algebra]:
    found = []
    for package, kernel, make in (
        (FLASH, "forward", _flash_algebra),
        (PREFIX, "prefill", _paged_algebra),
    ):
        for d in (64, 128, 256):
            for feature, options in (("plain", {}), ("softcap", {"softcap": 1.5})):
                found.append(Algebra(package, kernel, f"d{d}", feature, make, {"d": d, **options}))
            lawful = {"d": d, "invariant": True}
            found.append(Algebra(package, "invariant", f"d{d}", "plain", make, lawful))
    return found


ALGEBRA = {case.name: case for case in _algebra()}
