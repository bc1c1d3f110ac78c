"""Limits of a kernel as a whole: its arguments, its outputs, its two programs, strict mode.

Each case cites the documentation page on which the limit rests; the error carries it, too.
"""

from __future__ import annotations

import numpy as np
import pytest
from nki_paged_attn.sim import jit

from .._limits import Limits
from .._nki import hbm, loaded, nisa, nl, sbuf, zeros

limit = Limits()
LNC = "nki/get-started/about/lnc"


def constant():
    x = np.zeros((8, 8), np.float32)
    x.flags.writeable = False
    return x


@limit(LNC, "kernel[...]: the grid must be 1 or 2 programs, got 3")
def a_grid_of_three():
    jit(lambda: None)[3]


@limit(LNC, "kernel[...]: the grid within a kernel must be the kernel's, 1, got 2")
def a_kernel_of_two_programs_in_a_kernel_of_one():
    jit(lambda: None)[2]()


@limit(LNC, "nl.num_programs: axes must be 0, got 1")
def a_second_axis_of_programs():
    nl.num_programs(axes=1)


@limit(
    "nki.language.ndarray",
    "nisa.tensor_copy: src half must be written before it is read, got 4 unwritten elements",
    strict=True,
    of_values=True,
)
def a_read_of_what_nothing_wrote():
    half = sbuf((2, 4), name="half")
    nisa.memset(half[:, :2], 0.0)
    nisa.tensor_copy(sbuf((2, 4)), half)


@limit(
    "nki.jit",
    "nki.jit: the output result must be written as a whole, got unwritten elements",
    strict=True,
    of_values=True,
)
def an_output_of_which_half_is_written():
    out = hbm((2, 2), name="result")
    nisa.dma_copy(out[:1, :], zeros((1, 2)))
    return out


@limit(
    "nki.simulate",
    "nisa.dma_copy: dst x must be an array that may be written, got a read-only one",
    arrays=[constant()],
)
def a_write_into_a_constant(x):
    nisa.dma_copy(x, zeros((8, 8)))


# two programs


@limit(
    LNC,
    "nl.ndarray: shared_hbm must be the same in both programs: float32 (2, 4), got float32 (2, 5)",
    programs=2,
)
def outputs_of_different_shapes():
    hbm((2, 4 + nl.program_id(0)))


@limit(
    LNC,
    "nisa.dma_copy: dst shared: programs of a logical core must write apart, got an element that "
    "the other program wrote",
    programs=2,
    of_values=True,
)
def two_writes_of_one_place():
    tile = zeros((1, 4))
    nisa.memset(tile, float(nl.program_id(0)))
    nisa.dma_copy(hbm((2, 4), name="shared")[0:1, :], tile)


@limit(
    LNC,
    "nisa.dma_copy: dst shared: programs of a logical core must write apart, got an element that "
    "the other program read",
    programs=2,
)
def a_write_of_what_the_other_read():
    out = hbm((2, 4), name="shared")
    if nl.program_id(0) == 0:
        loaded(out)
    else:
        nisa.dma_copy(out[1:2, :], zeros((1, 4)))


@limit(
    LNC,
    "nisa.dma_copy: src shared: programs of a logical core must not read what the other writes, "
    "got an element that the other program wrote",
    programs=2,
)
def a_read_of_what_the_other_wrote():
    out = hbm((2, 4), name="shared")
    if nl.program_id(0) == 0:
        nisa.dma_copy(out[1:2, :], zeros((1, 4)))
    else:
        loaded(out)


@limit(
    LNC,
    "nisa.dma_copy: src shared: programs of a logical core must not read what the other writes, "
    "got an element that the other program wrote",
    programs=2,
)
def a_read_of_what_the_other_wrote_and_read():
    out = hbm((2, 4), name="shared")
    if nl.program_id(0) == 0:
        nisa.dma_copy(out, zeros((2, 4)))
    loaded(out)


@limit(
    LNC,
    "nisa.dma_copy: src x: programs of a logical core must not read what the other writes, got an "
    "element that the other program wrote",
    programs=2,
    arrays=[np.zeros((4, 8), np.float32)],
)
def a_gather_of_a_row_that_the_other_wrote(x):
    if nl.program_id(0) == 0:
        nisa.dma_copy(x[2:3], zeros((1, 8)))
    else:
        rows = zeros((1, 1), "int32")
        nisa.memset(rows, 2)
        nisa.dma_copy(sbuf((1, 8)), x.vector_select(0, rows))


@pytest.mark.parametrize("name", limit.names())
def test_limit(name):
    limit.check(name)


@pytest.mark.parametrize("name", limit.names(of_values=False))
def test_limit_without_computing(name):
    limit.check_without_computing(name)
