"""Helpers of forward tests that other tests use too."""

from __future__ import annotations

from .._numerics import Shape

# lengths are against the interpreter's tiles: 32 x 32, and 16 x 32 for up to 8 queries
SMALL = [
    Shape(1, 32, 32, 1, 1, 16),  # one tile exactly
    Shape(2, 33, 33, 2, 2, 32),  # a tail of one; two sequences
    Shape(1, 17, 40, 4, 2, 24),  # a later chunk: it begins within a block
    Shape(1, 40, 17, 2, 1, 64),  # more queries than keys: causal hides rows
    Shape(2, 1, 50, 4, 1, 80),  # decode
    Shape(2, 1, 1, 2, 1, 16),  # one token
    Shape(1, 9, 7, 1, 1, 1),  # one number per head
    Shape(1, 20, 33, 2, 1, 192, 128),  # v narrower
    Shape(1, 17, 17, 1, 1, 16, 40),  # v wider
    Shape(1, 17, 17, 1, 1, 256),  # widest
    Shape(2, 0, 5, 2, 1, 16),  # no query
    Shape(2, 5, 0, 2, 1, 16),  # no key
    Shape(0, 5, 5, 2, 1, 16),  # no sequence
]


# with their gradients, in test_backward.py
LARGE = [
    Shape(2, 1024, 1024, 8, 2, 128),
    Shape(1, 2000, 2000, 4, 4, 256),
    Shape(1, 1000, 4096, 4, 1, 64),
    Shape(1, 1500, 1500, 2, 2, 192, 128),
    Shape(4, 1, 4096, 8, 1, 128),
    Shape(1, 1100, 1030, 2, 2, 96),
    Shape(3, 129, 257, 2, 1, 65),
    Shape(1, 513, 777, 6, 2, 80),
]
