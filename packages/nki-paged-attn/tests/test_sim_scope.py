"""What the simulator does not model raises; what the limits allow runs."""

from __future__ import annotations

import numpy as np
import pytest
from nki_paged_attn.sim import NotModelledError

from ._limits import matmul
from ._nki import draw, hbm, loaded, nisa, nl, psum, run, sbuf, zeros


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (lambda: nisa.nc_matmul_mx(), "nisa.nc_matmul_mx is not modelled"),
        (lambda: nl.softmax, "nl.softmax is not modelled"),
        (lambda: nl.add(zeros((1, 1)), 1.0), "value-style calls"),
        (lambda: matmul(is_transpose=True), "perf_mode and is_transpose"),
        (lambda: nl.ndarray((1, 1), nl.float32, address=(0, 0)), "an explicit address"),
        (lambda: hbm((4, 4)).select(0, zeros((1, 1), "int32")), "known at run time only"),
    ],
)
def test_what_is_not_modelled_raises(body, text):
    with pytest.raises(NotModelledError, match=text.replace("(", r"\(")):
        run(body)


def test_what_the_limits_allow():
    def body(x):
        matmul(k=128, m=128, n=512)
        matmul(k=33, m=8, n=8, tile_position=(64, 0), tile_size=(64, 128))
        nisa.memset(sbuf((128, 4))[96:128, :], 0)
        nisa.memset(sbuf((128, 4))[64:128, :], 0)
        nisa.nc_transpose(sbuf((32, 32)), zeros((32, 32)))
        tile = loaded(x)
        banks = [psum((128, 512)) for _ in range(8)]
        return (len(banks), *tile.shape)

    assert run(body, draw(128, 4)) == (8, 128, 4)


def test_large_moving_operands_on_gen4():
    def body():
        matmul(n=4096)
        matmul(dst=psum((8, 8), "bfloat16"), dtypes=("float8_e4m3fn", "bfloat16"))
        matmul(dst=zeros((8, 8), buffer="psum"), accumulate=True)

    run(body, target="trn3")


def test_calls_outside_of_a_kernel_say_so():
    with pytest.raises(RuntimeError, match="need a running kernel"):
        nl.ndarray((1, 1), np.float32)
