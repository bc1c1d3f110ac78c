"""Walks of the tree kernels: up from a segment to its root, or down to all segments below it.

Every run of keys or queries on the way is one segment, walked from its first token. So the result
of a path depends neither on where its segments lie nor on the rest of the tree.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..._dense.portable.schedule import find_sequence
from ..._dense.portable.structures import Keys
from ..._linked.launch.entries import Number, entry
from .arguments import CountTensors, LinkTensors


@triton.jit
def locate_segment(cu_seqlens_ptr, slot, segments, tokens, BLOCK: tl.constexpr):
    """Return ``(block, segment, start, length)`` of a slot; ``block`` is -1 for an empty slot.

    Padding before and after the segments counts as two more segments, -1 and ``segments``.
    """
    segment = find_sequence(cu_seqlens_ptr, slot, segments, BLOCK)
    begin = tl.load(cu_seqlens_ptr + segment, mask=segment >= 0, other=0)
    end = tl.load(cu_seqlens_ptr + segment + 1, mask=segment < segments, other=tokens)
    block = slot - (begin // BLOCK + segment + 1)
    length = end - begin
    block = tl.where(block < tl.cdiv(length, BLOCK), block, -1)
    return block, segment, begin.to(tl.int64), length


@triton.jit
def start_of(segment, segments):
    """Return the first segment of a walk; -1, so none, for padding."""
    return tl.where(segment < segments, segment, -1)


@triton.jit
def bounds_of(cu_seqlens_ptr, segment):
    """Return the first token of a segment, and its length."""
    begin = tl.load(cu_seqlens_ptr + segment)
    return begin.to(tl.int64), tl.load(cu_seqlens_ptr + segment + 1) - begin


@triton.jit
def parent_of(parents_ptr, segment):
    """Return the parent of a segment, -1 for a root; a wrong value only ends the walk."""
    parent = tl.load(parents_ptr + segment)
    return tl.where(parent < segment, parent, -1)


@triton.jit
def keys_above(tensors, cu_seqlens_ptr, numbers, above, segment, head_k):
    """Return ``(Keys, length, diagonal)`` of a segment on the path of ``segment``."""
    start, length = bounds_of(cu_seqlens_ptr, above)
    source = Keys(
        tensors.k_ptr + head_k * numbers.k.head + start * numbers.k.token,
        tensors.v_ptr + head_k * numbers.v.head + start * numbers.v.token,
        numbers.k.token,
        numbers.v.token,
    )
    # causal within the own segment; a segment above is visible as a whole
    return source, length, tl.where(above == segment, 0, length)


@triton.jit
def next_below(parents_ptr, links_ptr, segments, segment, root):
    """Return the segment after this one in the preorder of all below ``root``; -1 at the end."""
    found = tl.load(links_ptr + segment)  # first child
    while (found < 0) & (segment != root):
        found = tl.load(links_ptr + segments + segment)  # next sibling
        segment = tl.load(parents_ptr + segment)
    return found


@entry(triton.jit)
def link_kernel(tensors: LinkTensors, segments: Number, BLOCK: tl.constexpr):
    """``links[0, s] = first child of s``, ``links[1, s] = next sibling of s``; -1 for none."""
    begin = tl.program_id(0) * BLOCK
    own = begin + tl.arange(0, BLOCK)  # [BLOCK]
    inside = own < segments
    parent = tl.load(tensors.parents_ptr + own, mask=inside, other=-1)
    child = tl.zeros([BLOCK], tl.int32) + segments  # [BLOCK]
    sibling = child
    # both come after the segment itself
    for first in range(begin, segments, BLOCK):
        other = first + tl.arange(0, BLOCK)  # [BLOCK]
        above = tl.load(tensors.parents_ptr + other, mask=other < segments, other=-1)
        above = tl.where(above < other, above, -1)
        # [BLOCK, BLOCK]
        is_child = above[None, :] == own[:, None]
        is_sibling = (above[None, :] == parent[:, None]) & (other[None, :] > own[:, None])
        child = tl.minimum(child, tl.min(tl.where(is_child, other[None, :], segments), 1))
        sibling = tl.minimum(sibling, tl.min(tl.where(is_sibling, other[None, :], segments), 1))
    # the siblings of roots are never read: no walk goes from root to root
    tl.store(tensors.links_ptr + own, tl.where(child < segments, child, -1), mask=inside)
    sibling = tl.where(sibling < segments, sibling, -1)
    tl.store(tensors.links_ptr + segments + own, sibling, mask=inside)


@entry(triton.jit)
def count_below_kernel(
    tensors: CountTensors, segments: Number, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr
):
    """``below[s] += sum(ceil(length_t / BLOCK_M))`` over all segments t below s.

    ``below`` is 0 before the launch.
    """
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = own < segments
    begin = tl.load(tensors.cu_seqlens_ptr + own, mask=inside, other=0)
    end = tl.load(tensors.cu_seqlens_ptr + own + 1, mask=inside, other=0)
    tiles = tl.cdiv(tl.maximum(end - begin, 0), BLOCK_M)  # [BLOCK]
    parent = tl.load(tensors.parents_ptr + own, mask=inside, other=-1)
    above = tl.where(parent < own, parent, -1)  # [BLOCK]
    while tl.max(above, 0) >= 0:
        is_real = above >= 0
        tl.atomic_add(tensors.below_ptr + above, tiles, mask=is_real, sem="relaxed")
        parent = tl.load(tensors.parents_ptr + above, mask=is_real, other=-1)
        above = tl.where(parent < above, parent, -1)
