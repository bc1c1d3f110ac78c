"""Checks of tensor data: offsets, lengths, pages, slots, trees.

On CPU tensors the operators make them. On a GPU they would wait for the device, so only the
functions of :mod:`.validate` make them.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from .._cache.layout import CacheSizes, cache_sizes
from .._linked.host.arguments import check_offset_values
from .call import Call
from .checks import TREE_BITS


def check_values(call: Call) -> None:
    """Check the tensor data of an attention call on the CPU."""
    x, options = call.tensors, call.options
    starts, tokens = x.cu_seqlens_q.tolist(), x.q.shape[0]
    check_offset_values("cu_seqlens_q", starts, tokens, "max_seqlen_q", call.max_seqlen_q)
    lengths = x.seqlens_k.tolist()
    firsts = first_keys(starts, lengths, options.window_left)
    if x.positions is not None and options.window_left >= 0:
        # the window of a row is relative to its position, not to the end of the keys
        at = x.positions.tolist()
        least = [min(at[start:end], default=0) for start, end in pairwise(starts)]
        firsts = [max(0, position - options.window_left) for position in least]
    check_pages(
        starts,
        lengths,
        firsts,
        x.block_table,
        cache_sizes(x.k_cache),
        has_new=x.k is not None,
        # drop-ins, which keep padding rows, accept a max_seqlen_k that is too small
        max_seqlen_k=call.max_seqlen_k if options.fill_padding else None,
        decode_from_cache=options.decode_from_cache,
        skip_decode=options.skip_decode,
        own_keys=options.own_keys,
    )
    if x.tree_mask is not None:
        check_trees(starts, x.tree_mask)


def first_keys(starts: list[int], lengths: list[int], left: int) -> list[int]:
    """Return the first key of each sequence that one of its queries may see."""
    if left < 0:
        return [0] * len(lengths)
    queries = [end - start for start, end in pairwise(starts)]
    return [max(0, n - q - left) for n, q in zip(lengths, queries, strict=True)]


def check_pages(
    starts: list[int],
    lengths: list[int],
    firsts: list[int],
    block_table: Tensor,
    sizes: CacheSizes,
    *,
    has_new: bool,
    max_seqlen_k: int | None = None,
    decode_from_cache: bool = False,
    skip_decode: bool = False,
    own_keys: bool = False,
) -> None:
    """Check the number of keys of each sequence, and the pages from its first visible key on.

    ``has_new``: the call has keys of the queries' tokens, but with ``decode_from_cache`` not of
    sequences with one query, which ``skip_decode`` does not check. ``own_keys``: a sequence has at
    least as many keys as queries.
    """
    room = block_table.shape[1] * sizes.block_size
    table = block_table.tolist()
    for b, length in enumerate(lengths):
        queries = starts[b + 1] - starts[b]
        if skip_decode and queries == 1:
            continue
        is_new = has_new and not (decode_from_cache and queries == 1)
        least = queries if is_new or own_keys else 0
        if length < least or (max_seqlen_k is not None and length > max_seqlen_k):
            most = " up" if max_seqlen_k is None else f" to max_seqlen_k, {max_seqlen_k}"
            raise ValueError(f"seqlens_k[{b}] must be from {least}{most}, got {length}")
        cached = length - queries if is_new else length
        if cached > room:
            raise ValueError(
                f"seqlens_k[{b}] must be at most what block_table has room for, {room}, "
                f"got {cached} cached keys{_hint(sizes)}"
            )
        if queries == 0 or firsts[b] >= cached:
            continue
        for i in range(firsts[b] // sizes.block_size, -(-cached // sizes.block_size)):
            check_entry(f"block_table[{b}, {i}]", table[b][i], sizes.num_blocks, "num_blocks")


def _hint(sizes: CacheSizes) -> str:
    """Return what to do where a cache looks as if its heads came before the slots of a page."""
    if sizes.block_size >= sizes.heads_k:
        return ""
    return (
        f"; k_cache has {sizes.heads_k} heads and pages of {sizes.block_size}: if its heads come "
        "first, pass k_cache.transpose(1, 2), and v_cache likewise"
    )


def check_entry(name: str, entry: int, count: int, count_name: str) -> None:
    """Check a page number, or the index of a sequence in a cache."""
    if not 0 <= entry < count:
        raise ValueError(f"{name} must be from 0 to {count_name} - 1, {count - 1}, got {entry}")


def check_trees(starts: list[int], tree_mask: Tensor) -> None:
    """Check that an entry has only bits of its own sequence's new tokens, at most 64."""
    rows = tree_mask.tolist()
    for b, (start, end) in enumerate(pairwise(starts)):
        queries = end - start
        for i in range(start, end):
            beyond = (rows[i] & (1 << TREE_BITS) - 1) >> queries
            if beyond:
                bit = queries + (beyond & -beyond).bit_length() - 1
                raise ValueError(
                    f"tree_mask[{i}] must have bits below {queries}, the new tokens of sequence "
                    f"{b}, got bit {bit}"
                )


def check_slots(k_cache: Tensor, slot_mapping: Tensor) -> None:
    """Check that slots are in the cache and that no two tokens share one; this waits for a GPU."""
    sizes = cache_sizes(k_cache)
    slots = sizes.num_blocks * sizes.block_size
    taken: dict[int, int] = {}
    for i, slot in enumerate(slot_mapping.tolist()):
        if slot >= slots:
            raise ValueError(
                f"slot_mapping[{i}] must be below the number of slots, {slots}, got {slot}"
            )
        if slot >= 0 and slot in taken:
            raise ValueError(
                f"slot_mapping[{i}] must be a slot of its own, got {slot}, which is "
                f"slot_mapping[{taken[slot]}]"
            )
        taken[slot] = i
