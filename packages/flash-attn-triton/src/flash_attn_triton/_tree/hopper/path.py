"""Walks of the tree kernels on Hopper; the same as in ``portable/walk.py``."""

from ..._linked.hopper.compat import gl, gluon
from .structures import Run


@gluon.jit
def run_of(segment, segments, cu_seqlens_ptr):
    """Return the ``Run`` of a segment; it is empty if ``segment`` is not a segment."""
    is_real = (segment >= 0) & (segment < segments)
    start = gl.load(cu_seqlens_ptr + segment, mask=is_real, other=0)
    end = gl.load(cu_seqlens_ptr + segment + 1, mask=is_real, other=0)
    return Run(segment, start, end - start)


@gluon.jit
def parent_of(segment, segments, parents_ptr):
    """Return the parent of a segment, -1 for none; a wrong value only ends the walk."""
    is_real = (segment >= 0) & (segment < segments)
    parent = gl.load(parents_ptr + segment, mask=is_real, other=-1)
    return gl.where(parent < segment, parent, -1)


@gluon.jit
def next_below(segment, root, descent):
    """Return the segment after this one in the preorder of all below ``root``; -1 at the end."""
    links_ptr, segments = descent.tensors.links_ptr, descent.numbers.segments
    found = gl.load(links_ptr + segment)  # first child
    while (found < 0) & (segment != root):
        found = gl.load(links_ptr + segments + segment)  # next sibling
        segment = gl.load(descent.tensors.parents_ptr + segment)
    return found
