"""Registers and loops of the device in the simulator."""

from __future__ import annotations

import numpy as np
import pytest
from nki_paged_attn.sim import ArraySpec, cost, simulate

from ._limits import Limits
from ._nki import draw, hbm, nisa, nl, run, sbuf, stored, zeros

limit = Limits()


def add_rows(x, bounds):
    """Add up rows of x from the first to the end that a tensor says."""
    total = zeros((1, x.shape[1]))
    limits = sbuf((1, 2), "int32")
    nisa.dma_copy(dst=limits, src=bounds)
    first, end = nisa.register_alloc(), nisa.register_alloc()
    nisa.register_load(first, limits[0:1, 0:1])
    nisa.register_load(end, limits[0:1, 1:2])

    def body(i):
        row = sbuf((1, x.shape[1]))
        width = x.shape[1]
        nisa.dma_copy(dst=row, src=x.ap([[width, 1], [1, width]], scalar_offset=i, indirect_dim=0))
        nisa.tensor_tensor(dst=total, data1=total, data2=row, op=nl.add)

    nl.fori_loop(first, end, body)
    return stored(total)


@pytest.mark.parametrize(("first", "end"), [(0, 5), (3, 4), (2, 2)])
def test_a_loop_has_bounds_that_are_data(first, end):
    x = draw(5, 4)
    got = run(add_rows, x, np.array([[first, end]], np.int32))
    np.testing.assert_allclose(got[0], x[first:end].sum(axis=0), rtol=1e-6)


@pytest.mark.parametrize("times", [0, 1, 4])
def test_a_loop_ends_when_its_register_is_0(times):
    """As AWS's own example counts down; what the body returns decides."""

    def kernel(count):
        left, turns, one = sbuf((1, 1), "int32"), zeros((1, 1), "int32"), zeros((1, 1), "int32")
        nisa.memset(one, 1)
        nisa.dma_copy(left, count)

        def body(r):
            nisa.tensor_tensor(turns, turns, one, nl.add)
            nisa.tensor_tensor(left, left, one, nl.subtract)
            nisa.register_load(r, left)
            return r

        condition = nisa.register_alloc()
        nisa.register_load(condition, left)
        nl.while_loop(condition, body)
        return stored(turns)

    assert run(kernel, np.array([[times]], np.int32), strict=True) == times


def test_a_condition_that_is_not_known_is_compiled_once():
    def kernel(count):
        condition, tile = nisa.register_alloc(), sbuf((1, 1), "int32")
        nisa.dma_copy(tile, count)
        nisa.register_load(condition, tile)
        nl.while_loop(condition, lambda r: nisa.memset(zeros((1, 1)), 1.0))

    runs = simulate(kernel, execute=False)
    runs.samples = 0
    runs(ArraySpec((1, 1), np.int32))
    assert runs.trace.count("memset") == 2


@limit("nki.language.while_loop", "nl.while_loop: the condition must be a register, got None")
def a_body_that_returns_no_condition():
    nl.while_loop(nisa.register_alloc(1), lambda r: None)


@limit("nki.language.while_loop", "nl.while_loop: body_fun must be a function, got 1")
def a_body_that_is_no_function():
    nl.while_loop(nisa.register_alloc(1), 1)


@limit("nki.language.no_reorder", "nl.fori_loop: a loop must not be within nl.no_reorder, got one")
def a_loop_of_the_device_in_order():
    with nl.no_reorder():
        nl.fori_loop(0, 2, print)


def test_loops_nest_and_step():
    def body():
        seen = hbm((1, 12), "int32")
        one = sbuf((1, 1), "int32")

        def outer(i):
            def inner(j):
                nisa.register_store(one, j)
                nisa.dma_copy(
                    dst=seen.ap([[12, 1], [1, 1]], scalar_offset=j, indirect_dim=1), src=one
                )

            nl.fori_loop(i, 12, inner, step=4)

        nl.fori_loop(0, 4, outer)
        return seen

    np.testing.assert_array_equal(run(body)[0], np.arange(12))


def test_registers_move_and_store():
    def body():
        a, b = nisa.register_alloc(7), nisa.register_alloc()
        nisa.register_move(b, a)
        nisa.register_move(a, 3)
        found = sbuf((1, 2), "int32")
        nisa.register_store(found[0:1, 0:1], a)
        nisa.register_store(found[0:1, 1:2], b)
        return stored(found)

    np.testing.assert_array_equal(run(body)[0], [3, 7])


@pytest.mark.parametrize("use", [int, range, lambda r: r + 1], ids=["int", "range", "+"])
def test_python_cannot_steer_by_a_register(use):
    with pytest.raises(TypeError, match="a register's value is not known"):
        run(lambda: use(nisa.register_alloc(3)))


@limit("nki.isa.register_load", "nisa.register_load: src must be (1, 1), got (1, 2)")
def a_load_of_two():
    nisa.register_load(nisa.register_alloc(), zeros((1, 2), "int32"))


@limit("nki.isa.register_load", "nisa.register_load: src must be int32 or uint32, got float32")
def a_load_of_a_float():
    nisa.register_load(nisa.register_alloc(), zeros((1, 1)))


@limit("nki.tensor", "nisa.register_load: src must be a tensor, got 3")
def a_load_of_a_number():
    nisa.register_load(nisa.register_alloc(), 3)


@limit("nki.isa.register_load", "nisa.register_load: dst must be a register, got int")
def a_load_into_a_number():
    nisa.register_load(3, zeros((1, 1), "int32"))


@limit("nki.isa.register_store", "nisa.register_store: dst must be (1, 1), got (1, 2)")
def a_store_to_two():
    nisa.register_store(zeros((1, 2), "int32"), nisa.register_alloc(1))


@limit("nki.language.fori_loop", "nl.fori_loop: upper must be an integer or a register, got 1.5")
def a_bound_that_is_no_integer():
    nl.fori_loop(0, 1.5, print)


@limit("nki.language.fori_loop", "nl.fori_loop: step must be an integer from 1, got 0")
def a_step_of_zero():
    nl.fori_loop(0, 3, print, step=0)


OUTLIVES = (
    "must not outlive its iteration; carry state in a tensor from before, "
    "got a tensor that an earlier iteration of a loop of the device made"
)


@limit("nki.language.fori_loop", f"nisa.tensor_tensor: data1 total {OUTLIVES}")
def a_sum_that_each_iteration_makes_anew():
    """A device traces the body once: each iteration would begin with the zeros."""
    sums = [zeros((1, 4))]

    def body(_):
        total = sbuf((1, 4), name="total")
        nisa.tensor_tensor(dst=total, data1=sums[0], data2=sums[0], op=nl.add)
        sums[0] = total

    nl.fori_loop(0, 2, body)


@limit("nki.language.fori_loop", f"nisa.tensor_copy: src last {OUTLIVES}")
def a_tile_of_the_last_iteration():
    found = []

    def body(_):
        found.append(sbuf((1, 4), name="last"))
        nisa.memset(found[-1], 1.0)

    nl.fori_loop(0, 2, body)
    nisa.tensor_copy(dst=sbuf((1, 4)), src=found[-1])


@pytest.mark.parametrize("name", limit.names())
def test_limit(name):
    limit.check(name)


@pytest.mark.parametrize("name", limit.names(of_values=False))
def test_limit_without_computing(name):
    limit.check_without_computing(name)


def dry(samples, end):
    kernel = simulate(add_rows, execute=False)
    kernel.samples = samples
    kernel(draw(64, 4), np.array([[0, end]], np.int32))
    return kernel.trace


def test_an_iteration_may_stand_for_several():
    every, some = dry(None, 64), dry(2, 64)
    assert len(every.instructions) == 3 + 2 * 64
    assert len(some.instructions) == 3 + 2 * 2
    assert cost(some).cycles == cost(every).cycles
    assert some.dma_bytes() == every.dma_bytes()
    assert cost(some).makespan == pytest.approx(cost(every).makespan, rel=1e-6)


@pytest.mark.parametrize("end", [2, 3, 4, 7, 32])
def test_what_grows_evenly_is_counted_exactly(end):
    def body():
        tile = zeros((1, 64))

        def outer(i):
            def inner(_):
                nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)

            nl.fori_loop(0, i, inner)

        nl.fori_loop(0, end, outer)
        return stored(tile)

    kernel = simulate(body, execute=False)
    kernel.samples = 2
    kernel()
    times = sum(i.times for i in kernel.trace.instructions if i.op == "tensor_scalar")
    assert times == end * (end - 1) / 2


def test_a_body_that_does_not_run_is_compiled_all_the_same():
    log = dry(0, 0)
    assert len(log.instructions) == 3 + 2
    assert cost(log).cycles == cost(dry(None, 0)).cycles
    assert log.dma_bytes() == dry(None, 0).dma_bytes()


def test_iterations_are_apart():
    """No engine begins one before all have ended the one before."""
    from nki_paged_attn.sim import schedule

    log = dry(None, 3)
    times = [(a, b) for _, a, b in schedule(log, "trn2")]
    for first, _, _ in log.loops[1:]:
        assert times[first][0] >= max(end for _, end in times[:first])
