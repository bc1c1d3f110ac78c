"""What the simulator does not model raises; what the limits allow runs."""

from __future__ import annotations

import re

import numpy as np
import pytest
from nki_paged_attn.sim import ArraySpec, NotModelledError, UnwrittenError, jit, simulate

from ._limits import matmul
from ._nki import draw, hbm, loaded, nisa, nl, psum, run, sbuf, zeros
from ._scope import NOT_MODELLED


def test_every_refusal_names_a_page():
    for body, _, how in NOT_MODELLED:
        with pytest.raises(NotModelledError, match=r"(?m)\[nki[./].*\]$|without execution$"):
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
        # contiguous dimensions are one to the hardware
        nisa.memset(sbuf((128, 2, 3, 4, 5))[:, :, 1:2, :, :], 0.0)
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


def test_sizes_of_the_hardware_are_known_outside_of_a_kernel(monkeypatch):
    names = [n for n in dir(nl.tile_size) if not n.startswith("_")]
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn3")
    outside = [getattr(nl.tile_size, n) for n in names]
    assert run(lambda: [getattr(nl.tile_size, n) for n in names], target="trn3") == tuple(outside)
    assert nl.tile_size.gemm_moving_fmax == 4096


def test_unwritten_memory_is_refused_by_default(monkeypatch):
    def body(x):
        tile, out = sbuf((4, 4), name="half"), hbm((4, 4))
        nisa.dma_copy(tile[0:2, :], x[0:2, :])
        nisa.dma_copy(out, tile)
        return out

    x = np.ones((4, 4), np.float32)
    with pytest.raises(UnwrittenError, match="src half must be written before it is read"):
        simulate(body)(x)
    with pytest.raises(UnwrittenError, match="src half must be written before it is read"):
        jit(body)(x)
    assert np.isnan(simulate(body, strict=False)(x)[2:]).all()
    monkeypatch.setenv("NKI_SIM_STRICT", "0")
    assert np.isnan(jit(body)(x)[2:]).all()


def test_calls_outside_of_a_kernel_say_so():
    with pytest.raises(RuntimeError, match="need a running kernel"):
        nl.ndarray((1, 1), np.float32)
