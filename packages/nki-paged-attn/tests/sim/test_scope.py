"""What the simulator does not model raises; what the limits allow runs."""

from __future__ import annotations

import re

import numpy as np
import pytest
from nki_paged_attn.sim import ArraySpec, NotModelledError

from ._limits import matmul
from ._nki import draw, hbm, loaded, nisa, nl, psum, run, sbuf, zeros


# body, message, and how it runs
def load_sum():
    x = zeros((1, 1), "int32")
    nisa.tensor_tensor(x, x, x, nl.add)
    return nisa.register_alloc(x)


NOT_MODELLED = [
    (lambda: nisa.nc_matmul_mx(), "nisa.nc_matmul_mx is not modelled", {}),
    (lambda: nl.softmax, "nl.softmax is not modelled", {}),
    (lambda: nl.tile_size.rotten, "nl.tile_size.rotten is not modelled", {}),
    (lambda: nl.arange, "nl.arange is of neuronxcc.nki; use slices, nl.ds or .ap()", {}),
    (lambda: sbuf((1, 1)).indirect, "NkiTensor.indirect is not modelled", {}),
    (lambda: sbuf((1, 1)) * 2.0, "operators on tensors are of neuronxcc.nki; use nki.isa", {}),
    (lambda: matmul(is_transpose=True), "nisa.nc_matmul: is_transpose", {}),
    (
        lambda: zeros((4, 4, 4))[:, unknown_scalar()],
        "select: an index that is not there without execution",
        {"execute": False},
    ),
    (
        lambda: bool(nisa.register_alloc(unknown_scalar())),
        "while: a register that is not known without execution",
        {"execute": False},
    ),
    (lambda: hbm((4, 4))["a"], "NkiTensor[]: an index of type str", {}),
    (lambda: hbm((4, 4)).ap([[4, 4]], dtype="int32"), "ap: another dtype; use view first", {}),
    (
        lambda: nl.fori_loop(0, load_sum(), print),
        "nl.fori_loop: a register that is not known without execution",
        {"execute": False},
    ),
    (
        lambda: nisa.tensor_scalar_reduce(
            sbuf((1, 2)), zeros((1, 2)), nl.add, 1.0, nl.add, sbuf((1, 1)), reduce_init=0.0
        ),
        "nisa.tensor_scalar_reduce: commands other than reset_reduce",
        {},
    ),
    (
        lambda: nisa.dma_transpose(sbuf((4, 8)), hbm((8, 4)), priority=1),
        "nisa.dma_transpose: priority and oob_mode",
        {},
    ),
    (
        lambda: nisa.dma_transpose(
            sbuf((8, 1, 16), "bfloat16"),
            hbm((16, 1, 8), "bfloat16").vector_select(0, zeros((16, 1), "uint32")),
        ),
        "nisa.dma_transpose: an indirect source but of rows in 2 dimensions",
        {},
    ),
    (
        lambda: nisa.dma_copy(sbuf((4, 4)), hbm((4, 4)).vector_select(0, unknown())),
        "nisa.dma_copy: indices that are not there without execution",
        {"execute": False},
    ),
]


def unknown():
    """Return indices that come from values, which a run that only logs does not have."""
    index = sbuf((4, 1), "int32")
    nisa.tensor_copy(index, zeros((4, 1)))
    return index


def unknown_scalar():
    """Return an index that comes from values."""
    index = sbuf((1, 1), "int32")
    nisa.tensor_copy(index, zeros((1, 1)))
    return index


def test_every_refusal_names_a_page():
    for body, _, how in NOT_MODELLED:
        with pytest.raises(NotModelledError, match=r"\[nki[./].*\]$|without execution$"):
            run(body, **how)


def test_indices_of_a_spec_are_unknown():
    """Not 4, which is what memory that nothing wrote holds."""

    def body(x, i):
        nisa.dma_copy(sbuf((4, 8)), x.vector_select(0, loaded(i)))

    specs = ArraySpec((9, 8), np.float32), ArraySpec((4, 1), np.int32)
    with pytest.raises(NotModelledError, match="indices that are not there without execution"):
        run(body, *specs, execute=False)


@pytest.mark.parametrize(("body", "text", "how"), NOT_MODELLED, ids=[t for _, t, _ in NOT_MODELLED])
def test_what_is_not_modelled_raises(body, text, how):
    with pytest.raises(NotModelledError, match=re.escape(text)):
        run(body, **how)


def test_what_the_limits_allow():
    def body(x):
        matmul(k=128, m=128, n=512)
        matmul(k=33, m=8, n=8, tile_position=(64, 0), tile_size=(64, 128))
        nisa.memset(sbuf((128, 4))[96:128, :], 0.0)
        nisa.memset(sbuf((128, 4))[64:128, :], 0.0)
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
