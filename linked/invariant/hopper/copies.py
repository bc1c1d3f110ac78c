"""Which keys TMA can copy in place."""

from __future__ import annotations

from torch import Tensor

from ..arguments import Scores
from ..call import Call, KeyForm

# the fewest keys per copy, and a limit of the rows of a cache's tensor map
MIN_PIECE = 16
MAX_ROWS = 2**30


def is_copied(x: Call, scores: Scores, keys: KeyForm) -> bool:
    """Return whether TMA copies the keys of a form of calls of the Hopper kernel."""
    page = keys.page or MIN_PIECE
    if copied_keys(page, scores.window_left, MIN_PIECE) < MIN_PIECE:
        return False
    return keys.page == 0 or (
        x.new_k is None and x.k.dtype == x.q.dtype and _is_mappable(x.k) and _is_mappable(x.v)
    )


def copied_keys(page: int, window_left: int, most: int) -> int:
    """Return the number of keys per copy: a power of two that divides the page size.

    A copy can leave out keys at one end only: those before the first row's window, or those past
    the end. At least ``window_left + 1`` keys lie between the two.
    """
    piece = min(page & -page, most)
    if window_left >= 0:
        piece = min(piece, 1 << (window_left + 2).bit_length() - 1)
    return piece


def _is_mappable(cache: Tensor) -> bool:
    """Return whether TMA can read a cache in place, as rows of one head each."""
    if cache.ndim != 4:
        return False
    page, slot, head, inner = cache.stride()
    heads = head if cache.shape[2] > 1 else slot
    unit = 16 // cache.element_size()
    return (
        cache.numel() > 0
        and cache.data_ptr() % 16 == 0
        and (inner == 1 and slot > 0 and heads > 0)
        and slot % unit == heads % unit == 0
        and (cache.shape[0] == 1 or (page > 0 and page % slot == 0))
        and cache.shape[0] * cache.shape[1] < MAX_ROWS
    )
