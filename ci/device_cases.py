"""One registry of small calls on a GPU: each kernel for Hopper, each tile, each principal feature.

The sanitizers (``sanitize.py``), the measurement of errors (``errors.py``) and the certificate use
the same cases. A case needs its package and nothing of its tests. On other devices the same calls
run on what serves them there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from device_calls import (
    ROOT,
    blocksparse,
    drawer,
    flash,
    flash_fp8,
    flash_tree,
    latent,
    lightning,
    load,
    one_sequence,
    paged,
    paged_codes,
)

__all__ = ["ALGEBRA", "CASES", "ROOT", "Algebra", "Case"]


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


# ---- the list

FLASH, PREFIX = "flash-attn-triton", "prefix-prefill"
_FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "softcap": {"causal": True, "softcap": 1.5},
    "window_alibi_sinks": {"window_size": (90, 20), "alibi": True, "sinks": True},
    "dropout": {"dropout_p": 0.2},
    "bias": {"bias": "own", "causal": True},
    "shared bias": {"bias": "shared", "batch": 2},
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
            found.append(Case(FLASH, "forward+backward", tile, feature, flash, given))
        few = {**width, "queries": 3, "heads": (8, 1), "causal": True, "grad": False}
        found.append(Case(FLASH, "forward", tile, "few queries", flash, few))
    long = {"d": 64, "queries": 1100, "keys": 1100, "causal": True, "batch": 4, "grad": False}
    found.append(Case(FLASH, "forward", "d64 long", "causal", flash, long))
    short = {"d": 64, "queries": 100, "keys": 90}
    found.append(Case(FLASH, "short backward", "d64", "plain", flash, short))
    for d in (64, 128, 256):
        for feature in ("plain", "causal", "softcap"):
            options = {"d": d, **_FEATURES[feature]}
            found.append(Case(FLASH, "fp8 forward", f"d{d}", feature, flash_fp8, options))
    for d in (64, 128):
        for feature, options in (("plain", {}), ("softcap", {"softcap": 1.5})):
            found.append(Case(FLASH, "tree", f"d{d}", feature, flash_tree, {"d": d, **options}))
    for d in (64, 128, 256):
        lawful = {"d": d, "causal": True, "grad": False, "invariant": True}
        found.append(Case(FLASH, "invariant", f"d{d}", "causal", flash, lawful))
    found += _prefix_cases()
    for d, e in ((64, 64), (128, 128), (96, 192)):
        for schedule in ("sequential", "parallel"):
            options = {"d": d, "e": e, "schedule": schedule}
            tile = f"d{d}:{e}"
            found.append(Case("lightning-attn", "walk", tile, schedule, lightning, options))
    for d in (64, 128):
        for block in ((64, 64), (128, 128), (16, 16), (128, 64)):
            options = {"d": d, "block": block}
            tile = f"d{d} blocks {block[0]}x{block[1]}"
            sparse = ("blocksparse-attn", "forward+backward", tile)
            found.append(Case(*sparse, "causal", blocksparse, options))
            if block == (64, 64):
                full = {**options, "causal": False}
                found.append(Case(*sparse, "full", blocksparse, full))
            if block == (64, 64) and d > 64:
                # for which the backward for Hopper makes dq in a launch of its own
                short = {**options, "short": True}
                found.append(Case(*sparse, "short rows", blocksparse, short))
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
            found.append(Case(PREFIX, "prefill", f"d{d}", feature, paged, given))
        decode = {"d": d, "queries": 1, "num_splits": 3}
        found.append(Case(PREFIX, "decode", f"d{d}", "splits", paged, decode))
        if d != 96:
            given = {"d": d, "invariant": True}
            found.append(Case(PREFIX, "invariant", f"d{d}", "causal", paged, given))
        if d in (64, 128):
            given = {"d": d, "new": True}
            found.append(Case(PREFIX, "prefill", f"d{d}", "new keys", paged, given))
            for kind in ("int8", "int4"):
                given = {"d": d, "kind": kind}
                found.append(Case(PREFIX, f"{kind} cache", f"d{d}", "causal", paged_codes, given))
                one = {**given, "queries": 1}
                found.append(Case(PREFIX, f"{kind} cache", f"d{d}", "decode", paged_codes, one))
            for name, narrow in (("fp8 cache", ("cache",)), ("fp8 queries", ("cache", "q"))):
                found.append(Case(PREFIX, name, f"d{d}", "causal", paged, {"d": d, "fp8": narrow}))
                one = {"d": d, "fp8": narrow, "queries": 1}
                found.append(Case(PREFIX, name, f"d{d}", "decode", paged, one))
    for name, fp8 in (("latent", False), ("latent fp8", True)):
        for feature, options in (
            ("decode", {"queries": 1}),
            ("few queries", {}),
            ("splits", {"num_splits": 2}),
        ):
            given = {"fp8": fp8, **options}
            found.append(Case(PREFIX, name, "d576:512", feature, latent, given))
    return found


CASES = {case.name: case for case in _cases()}

# ---- what FpSan can compare: forwards in which no score is hidden, over whole tiles

TILES = 256  # a multiple of every tile of queries or keys


@dataclass(frozen=True)
class Algebra:
    """A call that two kernels serve, the one for Hopper and the portable one.

    Under FpSan (see docs/testing.md) their outputs have the bits of ``payloads.attention`` if they
    are the same algebra. What it does to numbers has no infinity, so that every row has a sink, and
    no score is hidden. With the sink, the weights of a row are odd in number, and so is their sum,
    which a division needs.

    ``make(device)`` returns a function that makes the call, and ``q``, ``k``, ``v`` and the sinks
    as the definition takes them.
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
        return self.make(device, **self.options)[0]()

    def exact(self) -> Any:
        """Return the output that the definition has under FpSan."""
        from payloads import attention

        _, (q, k, v, sinks) = self.make("cpu", **self.options)
        return attention(q, k, v, sinks, self.options.get("softcap", 0.0))


def _flash_algebra(device: str, d: int, **options: Any) -> Any:
    import torch

    draw = drawer(device)
    q, k, v = (draw(1, n, heads, d) for n, heads in ((TILES, 2), (2 * TILES, 1), (2 * TILES, 1)))
    sinks = draw(2, dtype=torch.float32)

    def run() -> Any:
        return load("flash_attn_triton").flash_attn_func(q, k, v, sinks=sinks, **options)

    return run, (q[0], k[0], v[0], sinks)


def _paged_algebra(device: str, d: int, **options: Any) -> Any:
    import torch

    draw = drawer(device)
    page, heads, keys = 64, (4, 2), 2 * TILES
    k_cache, v_cache = (draw(keys // page + 2, page, heads[1], d) for _ in "kv")
    rest = one_sequence(device, keys // page, TILES, keys)
    q, sinks = draw(TILES, heads[0], d), draw(heads[0], dtype=torch.float32)

    def run() -> Any:
        return load("prefix_prefill").paged_attn_func(
            q,
            k_cache,
            v_cache,
            *rest,
            sinks=sinks,
            causal=False,
            # the kernel for Hopper does not cut sequences
            **{"num_splits": 0 if "invariant" in options else 1, **options},
        )

    k, v = (cache[rest[0][0].long()].flatten(0, 1) for cache in (k_cache, v_cache))
    return run, (q, k, v, sinks)


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
