"""One registry of small calls on a GPU: each kernel for Hopper, each tile, each principal feature.

The sanitizers (``sanitize.py``), the measurement of errors (``errors.py``), the tests and the
certificate use the same cases. A case needs its package and nothing of its tests. On other devices
the same calls run on what serves them there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import device_calls as calls
from device_calls import drawer, load, one_sequence

__all__ = ["ALGEBRA", "CASES", "Algebra", "Case"]

FLASH, PREFIX, SPARSE = "flash-attn-triton", "prefix-prefill", "blocksparse-attn"


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
    make: Callable[..., Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.package}/{self.kernel}/{self.tile}/{self.feature}"

    def run(self, device: str) -> Any:
        return self.make(device, **self.options)


def _case(package: str, kernel: str, tile: str, feature: str, make: Any, /, **options: Any) -> Case:
    return Case(package, kernel, tile, feature, make, options)


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
_SOFTCAP: dict[str, dict[str, Any]] = {"plain": {}, "softcap": {"softcap": 1.5}}
_WIDTHS: dict[str, dict[str, int]] = {f"d{d}": {"d": d} for d in (64, 96, 128, 192)}
_WIDTHS |= {"d192:128": {"d": 192, "dv": 128}, "d256": {"d": 256}}


def _flash_cases() -> Iterator[Case]:
    for tile, width in _WIDTHS.items():
        for feature, options in _FEATURES.items():
            both = {**width, **options}
            yield _case(FLASH, "forward+backward", tile, feature, calls.flash, **both)
        few: dict[str, Any] = {"queries": 3, "heads": (8, 1), "causal": True, "grad": False}
        yield _case(FLASH, "forward", tile, "few queries", calls.flash, **width, **few)
    long: dict[str, Any] = {"queries": 1100, "keys": 1100, "causal": True, "batch": 4}
    yield _case(FLASH, "forward", "d64 long", "causal", calls.flash, d=64, **long, grad=False)
    short = {"queries": 100, "keys": 90}
    yield _case(FLASH, "short backward", "d64", "plain", calls.flash, d=64, **short)
    for d in (64, 128, 256):
        for feature in ("plain", "causal", "softcap"):
            fp8 = {"dtype": "float8_e4m3fn", "grad": False, **_FEATURES[feature]}
            yield _case(FLASH, "fp8 forward", f"d{d}", feature, calls.flash, d=d, **fp8)
    for d in (64, 128):
        for feature, options in _SOFTCAP.items():
            yield _case(FLASH, "tree", f"d{d}", feature, calls.flash_tree, d=d, **options)
    for d in (64, 128, 256):
        lawful = {"causal": True, "grad": False, "invariant": True}
        yield _case(FLASH, "invariant", f"d{d}", "causal", calls.flash, d=d, **lawful)


def _prefix_cases() -> Iterator[Case]:
    features: dict[str, dict[str, Any]] = {
        "causal": {},
        "page 48": {"page": 48},
        "softcap": {"softcap": 1.5},
        "window_alibi_sinks": {"window_size": (90, 0), "alibi": True, "sinks": True},
    }
    for d in (64, 96, 128, 256):
        tile = f"d{d}"
        for feature, options in features.items():
            yield _case(PREFIX, "prefill", tile, feature, calls.paged, d=d, **options)
        yield _case(PREFIX, "decode", tile, "splits", calls.paged, d=d, queries=1, num_splits=3)
        if d != 96:
            yield _case(PREFIX, "invariant", tile, "causal", calls.paged, d=d, invariant=True)
        if d in (64, 128):
            yield _case(PREFIX, "prefill", tile, "new keys", calls.paged, d=d, new=True)
            caches: list[tuple[str, Any, dict[str, Any]]] = [
                ("int8 cache", calls.paged_codes, {"kind": "int8"}),
                ("int4 cache", calls.paged_codes, {"kind": "int4"}),
                ("fp8 cache", calls.paged, {"fp8": ("cache",)}),
                ("fp8 queries", calls.paged, {"fp8": ("cache", "q")}),
            ]
            for kernel, make, options in caches:
                yield _case(PREFIX, kernel, tile, "causal", make, d=d, **options)
                yield _case(PREFIX, kernel, tile, "decode", make, d=d, **options, queries=1)
    for kernel, fp8 in (("latent", False), ("latent fp8", True)):
        some = {"decode": {"queries": 1}, "few queries": {}, "splits": {"num_splits": 2}}
        for feature, options in some.items():
            yield _case(PREFIX, kernel, "d576:512", feature, calls.latent, fp8=fp8, **options)


def _other_cases() -> Iterator[Case]:
    for d, e in ((64, 64), (128, 128), (96, 192)):
        for way in ("sequential", "parallel"):
            sizes = {"d": d, "e": e}
            place = "lightning-attn", "walk", f"d{d}:{e}", way
            yield _case(*place, calls.lightning, **sizes, schedule=way)
    for d in (64, 128):
        for block in ((64, 64), (128, 128), (16, 16), (128, 64)):
            features: dict[str, dict[str, Any]] = {"causal": {}}
            if block == (64, 64):
                features["full"] = {"causal": False}
                # for which the backward for Hopper makes dq in a launch of its own
                features |= {"short rows": {"short": True}} if d > 64 else {}
            for feature, options in features.items():
                place = SPARSE, "forward+backward", f"d{d} blocks {block[0]}x{block[1]}", feature
                yield _case(*place, calls.blocksparse, d=d, block=block, **options)


CASES = {case.name: case for case in (*_flash_cases(), *_prefix_cases(), *_other_cases())}

# ---- what FpSan can compare: forwards in which no score is hidden, over whole tiles

TILES = 256  # a multiple of every tile of queries or keys


class Algebra(Case):
    """A call that two kernels serve, the one for Hopper and the portable one.

    Under FpSan (see docs/testing.md) their outputs have the bits of ``payloads.attention`` if they
    are the same algebra. What it does to numbers has no infinity, so that every row has a sink, and
    no score is hidden. With the sink, the weights of a row are odd in number, and so is their sum,
    which a division needs.

    ``make(device)`` returns a function that makes the call, and ``q``, ``k``, ``v`` and the sinks
    as the reference takes them.
    """

    @property
    def switch(self) -> str:
        """The variable that leaves the call to the portable kernel, if it is 0."""
        return f"{self.package.upper().replace('-', '_')}_HOPPER"

    def run(self, device: str) -> Any:
        """Return the output."""
        return self.make(device, **self.options)[0]()

    def exact(self) -> Any:
        """Return the output that the reference has under FpSan."""
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
    caches = [draw(keys // page + 2, page, heads[1], d) for _ in "kv"]
    rest = one_sequence(device, keys // page, TILES, keys)
    q, sinks = draw(TILES, heads[0], d), draw(heads[0], dtype=torch.float32)
    # the kernel for Hopper does not cut sequences
    options = {"num_splits": 0 if "invariant" in options else 1, "causal": False, **options}

    def run() -> Any:
        return load("prefix_prefill").paged_attn_func(q, *caches, *rest, sinks=sinks, **options)

    k, v = (cache[rest[0][0].long()].flatten(0, 1) for cache in caches)
    return run, (q, k, v, sinks)


ALGEBRA = {
    case.name: case
    for package, kernel, make in (
        (FLASH, "forward", _flash_algebra),
        (PREFIX, "prefill", _paged_algebra),
    )
    for d in (64, 128, 256)
    for case in (
        *(Algebra(package, kernel, f"d{d}", f, make, {"d": d, **x}) for f, x in _SOFTCAP.items()),
        Algebra(package, "invariant", f"d{d}", "plain", make, {"d": d, "invariant": True}),
    )
}
