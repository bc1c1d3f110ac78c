"""Programs of the language guide, the quick starts and the pages about loops and logical cores."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import pytest
from nki_paged_attn.sim import jit

from ._nki import draw, hbm, loaded, nisa, nl, run, sbuf, stored, zeros
from ._programs import Programs

program = Programs()
GUIDE = "nki/get-started/nki-language-guide"
LOOPS = "nki/deep-dives/nki-dynamic-loops"
LNC = "nki/get-started/about/lnc"
A, B = draw(128, 64), draw(128, 64, seed=1)
CUBE = draw(8, 6, 4)


def number(value, dtype=np.int32):
    return np.array([[value]], dtype)


@program("nki/get-started/quickstart-implement-run-kernel", A, B, expected=np.add)
def tensor_add(a, b):
    assert a.shape == b.shape
    assert a.shape[0] <= nl.tile_size.pmax
    x, y = (nl.ndarray(t.shape, dtype=t.dtype, buffer=nl.sbuf) for t in (a, b))
    nisa.dma_copy(dst=x, src=a)
    nisa.dma_copy(dst=y, src=b)
    total = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=total, data1=x, data2=y, op=nl.add)
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=total)
    return out


@program("nki/guides/nki_simulator, quick start", A, B, expected=np.add)
def add_by_values(a, b):
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    nl.store(out, value=nl.add(nl.load(a), nl.load(b)))
    return out


@program(f"{GUIDE}, tensor indexing", CUBE, expected=lambda x: (x[:, 2, 3:4], x[0:1], x[..., 3]))
def indexing(x):
    t = loaded(x)
    assert (t[0, 0, 1].shape, t[:, 0].shape, t[:, 0, 1].shape) == ((1, 1), (8, 4), (8, 1))
    assert t[0, ..., :].shape == (1, 6, 4)
    assert t[:, :, ::2].shape == (8, 6, 2)
    assert (x[0].shape, x[0, 1].shape) == ((6, 4), (4,))
    return stored(t[:, 2, 3]), stored(t[0]), stored(t[..., -1])


@program(f"{GUIDE}, views share storage", A, expected=lambda a: np.where(np.arange(64) < 8, 1, a))
def views_of_one_storage(a):
    t = loaded(a)
    assert (t.strides, t.offset, t.ndim) == ((64, 1), 0, 2)
    u = t.reshape((128, 8, 8))
    nisa.memset(dst=u[:, 0, :], value=1.0)
    assert u[:, 1, 2:].offset == 10
    return stored(t)


@program(f"{GUIDE}, rearrange", CUBE, expected=lambda x: x.reshape(8, 2, 3, 4).swapaxes(1, 2))
def rearranged(x):
    t = loaded(x)
    return stored(t.rearrange(("p", ("a", "b"), "c"), ("p", "b", "a", "c"), {"a": 2}))


@program(f"{GUIDE}, select", CUBE, number(3), expected=lambda x, i: x[3])
def select_at_run_time(x, i):
    index = loaded(i)
    tile = sbuf((6, 4))
    nisa.dma_copy(tile, x.select(dim=0, index=index))
    return stored(tile)


@program(f"{GUIDE}, select on the chip", CUBE, number(3), expected=lambda x, i: x[:, 3])
def select_on_the_chip(x, i):
    return stored(loaded(x).select(1, loaded(i)))


@program(f"{GUIDE}, a dynamic slice", CUBE, number(2), expected=lambda x, i: x[2:5])
def slice_at_run_time(x, i):
    register = nisa.register_alloc(loaded(i))
    tile = sbuf((3, 6, 4))
    nisa.dma_copy(tile, x[nl.ds(register, 3)])
    return stored(tile)


class Scale(nl.NKIObject):
    factor: float
    offset: float = 1.0


class Buffers(nl.NKIObject):
    scale: float
    tile = None
    op = nl.add

    @property
    def double(self):
        return 2 * self.scale


@dataclass
class Tile(nl.NKIObject):
    rows: int
    step = 1


@program(f"{GUIDE}, class support", A, expected=lambda a: 2 * a + 1)
def classes(a):
    scale = Scale(2.0)
    assert scale == Scale(factor=2.0, offset=1.0) != Scale(3.0)
    assert Tile(128) == Tile(rows=a.shape[0], step=1) != Tile(128, 2)
    buffers = Buffers(3.0, tile=1)
    assert (buffers.double, buffers.tile, buffers.op) == (6.0, 1, nl.add)
    assert buffers != Buffers(3.0)
    t = loaded(a)
    nisa.tensor_scalar(t, t, nl.multiply, scale.factor, op1=nl.add, operand1=scale.offset)
    return stored(t)


class Mode(Enum):
    double = 1
    square = 2


@program(f"{GUIDE}, enumerations", A, expected=np.square)
def enumerations(a):
    mode, t = Mode.square, loaded(a)
    if mode == Mode.square:
        nisa.activation(t, nl.square, t)
    return stored(t)


def tiles(x, out, function):
    for start in range(0, x.shape[0], 64):
        t = loaded(x[start : start + 64])
        function(dst=t, src=t)
        nisa.dma_copy(out[start : start + 64], t)


@program(f"{GUIDE}, composable kernels", A, expected=lambda a: np.maximum(a, 0))
def composition(a):
    out = hbm(a.shape)
    tiles(a, out, lambda dst, src: nisa.activation(dst=dst, op=nl.relu, data=src))
    return out


@jit
def relu_of_tiles(x, dst):
    tiles(x, dst, lambda dst, src: nisa.activation(dst=dst, op=nl.relu, data=src))
    return dst


@program(f"{GUIDE}, composable kernels", A, expected=lambda a: np.maximum(a, 0))
def composition_of_decorated_kernels(a):
    """A decorated kernel within a kernel runs on the same memory."""
    return relu_of_tiles(a, dst=hbm(a.shape))


@program(f"{LOOPS}, runtime trip count", A, number(3), expected=lambda a, n: 8 * a)
def loop_with_a_bound_from_a_tensor(a, n):
    t, count = loaded(a), nisa.register_alloc()
    nisa.register_load(count, loaded(n))
    for _ in nl.dynamic_range(count):
        nisa.tensor_scalar(t, t, nl.multiply, 2.0)
    return stored(t)


@program(f"{LOOPS}, start, stop and step", A, expected=lambda a: a + 2)
def loop_over_rows(a):
    out = hbm(a.shape)
    start, stop = nisa.register_alloc(0), nisa.register_alloc(128)
    for i in nl.dynamic_range(start, stop, 32):
        t = sbuf((32, 64))
        nisa.dma_copy(t, a.ap([[64, 32], [1, 64]], scalar_offset=i))
        nisa.tensor_scalar(t, t, nl.add, 2.0)
        nisa.dma_copy(out.ap([[64, 32], [1, 64]], scalar_offset=i), t)
    return out


@program(f"{LOOPS}, while", A, number(3), expected=lambda a, n: a + 3)
def loop_while_a_register_holds(a, n):
    t, left = loaded(a), loaded(n)
    register = nisa.register_alloc(left)
    while register:
        nisa.tensor_scalar(t, t, nl.add, 1.0)
        nisa.tensor_scalar(left, left, nl.subtract, 1.0)
        nisa.register_load(register, left)
    return stored(t)


@program("nki.language.fori_loop", A, expected=lambda a: a * 2.0**4)
def loop_of_a_body(a):
    t = loaded(a)
    nl.fori_loop(0, 4, lambda i: nisa.tensor_scalar(t, t, nl.multiply, 2.0))
    return stored(t)


@program("nki.isa.register_store", number(5), expected=lambda n: n + 2)
def register_to_a_tile(n):
    register, t = nisa.register_alloc(loaded(n)), zeros((1, 1), "int32")
    nisa.register_store(t, register)
    nisa.tensor_scalar(t, t, nl.add, 2.0)
    return stored(t)


PAIR = np.abs(draw(2, 64, 32)) + 1


@program(f"{LNC}, programming for multiple cores", PAIR, expected=lambda x: 1 / x, programs=2)
def a_tile_for_each_core(x):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    assert nl.num_programs() == nl.num_programs(axes=0) == 2
    i = nl.program_id(0)
    t = loaded(x[i])
    nisa.reciprocal(t, t)
    nisa.dma_copy(out[i], t)
    return out


@program("nki.isa.core_barrier", PAIR, expected=lambda x: x[::-1], programs=2)
def a_barrier_between_cores(x):
    middle, out = hbm(x.shape), hbm(x.shape)
    i = nl.program_id(0)
    nisa.dma_copy(middle[i], loaded(x[i]))
    nisa.core_barrier(middle, (0, 1))
    nisa.dma_copy(out[i], loaded(middle[1 - i]))
    return out


@program("nki.isa.sendrecv", PAIR, expected=lambda x: np.stack([x.sum(axis=0)] * 2), programs=2)
def a_message_between_cores(x):
    out, i = hbm(x.shape), nl.program_id(0)
    own, other = loaded(x[i]), sbuf((64, 32))
    nisa.sendrecv(src=own, dst=other, send_to_rank=1 - i, recv_from_rank=1 - i, pipe_id=0)
    nisa.tensor_tensor(own, own, other, nl.add)
    nisa.dma_copy(out[i], own)
    return out


@program(
    "nki.isa.dma_copy, scatter",
    A[:4],
    np.array([[5], [0], [3], [1]], np.uint32),
    np.zeros((6, 64), np.float32),
    expected=lambda x, i, y: np.stack([x[1], x[3], y[2], x[2], y[4], x[0]]),
)
def a_written_argument_returned(x, i, out):
    rows = loaded(i)
    nisa.dma_copy(
        dst=out.ap(pattern=[[64, 4], [1, 64]], vector_offset=rows, indirect_dim=0), src=loaded(x)
    )
    return out


@program("nki.language.ndarray, address", A, expected=lambda a: a * 2)
def two_buffers_at_addresses(a):
    out = hbm(a.shape)
    for i in range(4):
        t = nl.ndarray((128, 16), nl.float32, buffer=nl.sbuf, address=(0, 64 * (i % 2)))
        nisa.dma_copy(t, a[:, 16 * i : 16 * i + 16])
        nisa.tensor_scalar(t, t, nl.multiply, 2.0)
        nisa.dma_copy(out[:, 16 * i : 16 * i + 16], t)
    return out


@program(
    "nki.isa.sendrecv", PAIR, expected=lambda x: np.stack([x[::-1], 2 * x[::-1]], 1), programs=2
)
def two_messages_one_after_the_other(x):
    """On one pipe: the first is not overwritten before the other core takes it."""
    out, i = hbm((2, 2, 64, 32)), nl.program_id(0)
    own = loaded(x[i])
    for turn in range(2):
        other = sbuf((64, 32))
        nisa.sendrecv(src=own, dst=other, send_to_rank=1 - i, recv_from_rank=1 - i, pipe_id=0)
        nisa.dma_copy(out[i, turn], other)
        nisa.tensor_scalar(own, own, nl.multiply, 2.0)
    return out


@pytest.mark.parametrize("name", program.cases)
def test_program(name):
    program.check(name)


def test_one_core_may_issue_instructions_that_the_other_does_not():
    """As AWS's library stores the result of both: no register decides."""

    def body(x):
        out = hbm((64, 32))
        if nl.program_id(0) == 0:
            nisa.dma_copy(out, loaded(x[0]))
        return out

    assert (run(body, PAIR, programs=2, strict=True) == PAIR[0]).all()


def test_both_cores_may_write_the_same():
    """As AWS's cumsum does; each may read what it wrote itself."""

    def body(x):
        out = hbm((64, 32))
        nisa.dma_copy(out, loaded(x[0]))
        return stored(loaded(out))

    with pytest.warns(UserWarning, match="both programs of a logical core write the same values"):
        assert (run(body, PAIR, programs=2, strict=True) == PAIR[0]).all()
    assert run(body, PAIR, programs=2, execute=False).shape == (64, 32)
