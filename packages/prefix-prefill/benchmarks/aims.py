"""What the package aims at, and how far it is: shares and ratios of one run."""

from __future__ import annotations

from typing import Any, NamedTuple

from _linked import report
from _linked.results import copy_gbps
from cases import BY_NAME, in_bf16

Row = dict[str, Any]

# a case, and those whose times together it is compared with
SUMS = {
    "mixed-32x8192,4x512+4096": ("mixed-32x8192", "mixed-4x512+4096"),
    "window-8x65536-w4096": ("window-8x4096",),
    "window-8x512+65024-w4096": ("window-8x512+3584",),
}
FORMATS = ("fp8", "int8", "int4")
FULL = ("decode-64x8192", "decode-256x2048", "decode-16x32768")
CHUNKS = (
    "prefill-8x1024+7168",
    "prefill-8x512+4096",
    "prefill-1x2048+14336",
    "prefill-4x1024+0",
)
SMALL, LARGE = "prefill-16x256+2000", "prefill-8x1024+7168"
INVARIANT = ("decode-64x8192", "decode-256x2048", "decode-1x65536")


class Aim(NamedTuple):
    """Something that each of some cases has to reach.

    ``of`` is ``copy``, the share of a copy's bandwidth; ``fa3`` or ``bf16``, the speed over that of
    FlashAttention-3 or over the same work from a bf16 cache; ``parts``, the time over that of
    ``SUMS``; or ``us``, the host's microseconds. Of the last two less is better. What has no gate
    is told beside the others.
    """

    what: str
    of: str
    gate: float | None
    goal: float | None
    cases: tuple[str, ...]


def _each(names: tuple[str, ...], *suffixes: str) -> tuple[str, ...]:
    return tuple(name + suffix for name in names for suffix in suffixes)


def _formats(name: str) -> tuple[str, ...]:
    return tuple(f"{name}-{cache}" for cache in FORMATS)


def _narrow(page: int) -> tuple[str, ...]:
    return _each((SMALL, LARGE), f"-d64-p{page}")


AIMS = (
    Aim("FP8 cache, decode", "copy", 0.75, 0.90, _each(FULL, "-fp8")),
    Aim("int8 cache, decode", "copy", 0.75, 0.90, _each(FULL, "-int8")),
    Aim("int4 cache, decode", "bf16", 2.0, 2.8, _each(FULL, "-int4")),
    Aim("decode, 1 x 65536", "copy", 0.80, 0.90, ("decode-1x65536",)),
    Aim("decode, 4 x 32768", "copy", 0.92, 0.96, ("decode-4x32768",)),
    Aim("decode, packed layout", "copy", 0.90, 0.95, ("decode-64x8192-packed",)),
    Aim("decode, window of 4096 in 64k", "copy", 0.75, 0.85, ("window-8x65536-w4096",)),
    Aim("chunks, d128, page 16", "fa3", 1.0, 1.10, (*CHUNKS, f"{SMALL}-d128-p16")),
    Aim("chunks, d128, page 64", "fa3", 1.0, 1.10, (*_each(CHUNKS, "-p64"), f"{SMALL}-d128-p64")),
    Aim("chunks, d64, page 16", "fa3", 1.0, 1.10, _narrow(16)),
    Aim("chunks, d64, page 64", "fa3", 1.0, 1.10, _narrow(64)),
    Aim("FP8 / int8 / int4, 1 x 65536", "copy", None, None, _formats("decode-1x65536")),
    Aim("FP8 / int8 / int4, 4 x 32768", "copy", None, None, _formats("decode-4x32768")),
    Aim("FP8 / int8 / int4, 64 x 8192", "bf16", None, None, _formats("decode-64x8192")),
    Aim("chunks over FP8 / int8 / int4", "bf16", None, None, _formats(LARGE)),
    Aim(
        *("chunks, new keys beside bf16 / FP8", "bf16", None, None),
        _each((LARGE,), "-dense", "-dense-fp8"),
    ),
    Aim("chunks, packed layout", "bf16", None, None, ("prefill-8x512+4096-packed",)),
    Aim("chunks, d192:128", "fa3", None, None, ("prefill-8x512+4096-d192:128",)),
    Aim(
        *("decode, d192:128 / d512", "copy", None, None),
        _each(FULL[:1], "-d192:128", "-d512"),
    ),
    Aim(
        *("`invariant=True`, prefill", "bf16", 0.90, 0.97),
        (*_each(CHUNKS, "-invariant"), f"{LARGE}-d64-invariant"),
    ),
    Aim("`invariant=True`, decode", "bf16", 0.80, 0.92, _each(INVARIANT, "-invariant")),
    # of the rounds before
    Aim("decode, 64 x 8192", "copy", 0.91, None, ("decode-64x8192",)),
    Aim("decode, 256 x 2048", "copy", 0.87, None, ("decode-256x2048",)),
    Aim("mixed batch", "parts", 1.1, None, ("mixed-32x8192,4x512+4096",)),
    Aim("window of 4096 in 64k", "parts", 1.3, None, tuple(SUMS)[1:]),
    Aim("writing 1000 tokens", "copy", 0.8, None, ("write-1000",)),
    Aim("host, a decoding call, us", "us", 30.0, None, ("host",)),
)
BESIDE = {
    "copy": "copy",
    "fa3": "FlashAttention-3",
    "bf16": "bf16 cache",
    "parts": "time of its parts",
    "us": "-",
}


class Values:
    """What was measured, by case and provider; ``key`` is ``ms``, or ``ms_graph``, in a graph."""

    def __init__(self, bench: Any, found: Row) -> None:
        self.found = found
        self.cases = report.by_case(bench, found["results"] + found["host"])

    def time(self, case: str, provider: str = "ours", key: str = "ms") -> float | None:
        """Return the time of a case, or None."""
        return self.cases.get(case, {}).get(provider, {}).get(key)

    def of_copy(self, case: str, provider: str = "ours", key: str = "ms") -> float | None:
        """Return the share of the bandwidth of a copy in the same run."""
        row = self.cases.get(case, {}).get(provider, {})
        copy = copy_gbps(self.found, row)
        # gbps is that of ms
        return row["gbps"] * row["ms"] / row[key] / copy if copy and key in row else None

    def value(self, of: str, case: str, key: str = "ms") -> float | None:
        """Return what ``Aim.of`` names, if all of it was measured."""
        if of == "us":
            return self.time(case, key="median_us") if key == "ms" else None
        if of == "copy":
            return self.of_copy(case, key=key)
        mine = self.time(case, key=key)
        if of == "parts":
            parts = [self.time(part, key=key) for part in SUMS[case]]
            return None if mine is None or None in parts else mine / sum(parts)
        usual = in_bf16(BY_NAME[case]) if of == "bf16" else None
        if of == "bf16" and usual is None:
            return None
        rival = self.time(usual.name, key=key) if usual else self.time(case, of, key)
        return None if mine is None or rival is None else rival / mine


def table(values: Values) -> str:
    """Return every aim of which a case was measured, with what came out, as Markdown."""
    lines = []
    for aim in AIMS:
        found = [values.value(aim.of, case) for case in aim.cases]
        if all(value is None for value in found):
            continue
        cells = [_named(aim), BESIDE[aim.of]]
        cells += ["-" if number is None else f"{number:g}" for number in (aim.gate, aim.goal)]
        cells += [_shown(found), _verdict(aim, found)]
        graphs = [values.value(aim.of, case, "ms_graph") for case in aim.cases]
        if any(value is not None for value in graphs):
            # longer ones have no time of a graph: theirs is what it is
            both = [a if b is None else b for a, b in zip(found, graphs, strict=True)]
            cells += [_shown(graphs), _verdict(aim, both)]
        else:
            cells += ["", ""]
        lines.append(cells)
    head = ["what", "beside", "gate", "goal", "measured", "", "in a graph", ""]
    return report.markdown(head, lines)


def _named(aim: Aim) -> str:
    """Return what an aim is about, with the lengths of its cases where these differ."""
    lengths = {case.split("-")[1] for case in aim.cases if "-" in case}
    if len(lengths) < 2:
        return aim.what
    return f"{aim.what} ({' / '.join(case.split('-')[1] for case in aim.cases)})"


def _shown(values: list[float | None]) -> str:
    return " / ".join("-" if v is None else f"{v:.1f}" if v > 10 else f"{v:.3f}" for v in values)


def _verdict(aim: Aim, values: list[float | None]) -> str:
    if aim.gate is None:
        return ""
    return report.verdict(values, aim.gate, aim.goal, less=aim.of in ("parts", "us"))
