"""Shapes that are drawn: what is likely, within what a GPU has room and time for."""

from __future__ import annotations

import re

from _linked.shapes import FAMILY, Dice
from cases import Problem

# head dims of q and k, and of v: usual ones are more likely
_OFTEN = ((64, 64), (128, 128))
_DIMS = (*_OFTEN * 3, *((d, d) for d in (40, 72, 80, 96, 96, 112, 160, 160, 192, 256, 256)))
_DIMS += ((192, 128), (192, 128))
_GROUPS, _HEADS_K = (1, 1, 2, 4, 4, 5, 7, 8, 8, 16), (1, 2, 3, 4, 5, 6, 8, 8, 10, 12, 16)
_MASKS = ("causal", "causal", "full", "window")
_WINDOWS = (127, 255, 511, 1000, 1023, 4095)
_FORMS = ("", "", "-packed", "ragged", "ragged")
# exponents of the number of tokens, and of the length of a sequence
_TOKENS, _LENGTH = (9.0, 15.0), (7.0, 15.0)
# most operations of a forward, and most bytes of a backward
_MOST_FLOPS, _MOST_BYTES = 4e12, 2**31
# one sequence of so many is empty
_EMPTY = 1 / 8

_NAME = re.compile(
    r"d(?P<d>\d+)(:(?P<dv>\d+))?-h(?P<q>\d+):(?P<k>\d+)-(?P<count>\d+)x(?P<length>\d+)"
    r"(r(?P<seed>\d+))?(?P<packed>-packed)?-(?P<mask>full|causal)(-w(?P<window>\d+))?(-fwd|-bwd)?"
)


def ragged(count: int, length: int, seed: int) -> tuple[int, ...]:
    """Return lengths from 0 to twice a length, some of them 0."""
    dice = Dice(seed)
    shares = [(dice.share(), dice.share()) for _ in range(count)]
    return tuple(0 if none < _EMPTY else int(2 * length * share) for none, share in shares)


def named(name: str) -> Problem | None:
    """Return the problem of a name, which may end with a pass, or None.

    ``d192:128-h16:4-9x2205r831-packed-causal-w1023``: head dims of q and k and of v, heads of
    queries and of keys, 9 sequences of lengths that ``ragged`` draws around 2205 by the seed 831,
    packed, and the keys that a query sees before its own. Without ``r`` all have the length.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    keys = ("d", "dv", "q", "k", "count", "length", "seed", "window")
    d, values, q, k, count, length, seed, window = (int(found[key] or 0) for key in keys)
    lengths = (length,) * count if found["seed"] is None else ragged(count, length, seed)
    return Problem(
        name.removesuffix("-fwd").removesuffix("-bwd"),
        FAMILY,
        lengths,
        q,
        k,
        d,
        found["mask"] == "causal",
        found["packed"] is not None,
        values=values,
        window=window,
    )


def roll(dice: Dice) -> Problem | None:
    """Draw a shape; None if it has no room, takes too long or has too few tokens."""
    (d, dv), heads_k = dice.one_of(_DIMS), dice.one_of(_HEADS_K)
    heads_q = heads_k * dice.one_of(_GROUPS)
    form, mask, window = dice.one_of(_FORMS), dice.one_of(_MASKS), dice.one_of(_WINDOWS)
    # the larger of two: few tokens are the host's work alone
    tokens = max(dice.power(*_TOKENS), dice.power(*_TOKENS))
    count = max(1, tokens // dice.power(*_LENGTH))
    # as many draws in any case: what a shape is does not move the next
    seed = int(1000 * dice.share())
    if form == "ragged":
        form = f"r{seed}-packed"
    dims = f"d{d}" if d == dv else f"d{d}:{dv}"
    mask = f"causal-w{window}" if mask == "window" else mask
    problem = named(f"{dims}-h{heads_q}:{heads_k}-{count}x{tokens // count}{form}-{mask}")
    low, high = (2**exponent for exponent in _TOKENS)
    if problem is None or not low <= problem.tokens <= high:
        return None
    fits = problem.bytes("bwd") <= _MOST_BYTES and problem.flops("fwd") <= _MOST_FLOPS
    return problem if fits else None
