"""Small kernels on the simulator, written as their bodies alone."""

from __future__ import annotations

import numpy as np
from nki_paged_attn.sim import NkiTensor, isa, language, simulate  # type: ignore[attr-defined]

nl, nisa = language, isa


def run(body, *arrays, target="trn2", strict=False, programs=1, execute=True):
    """Run ``body(*tensors)`` as a kernel; return the tensors that it returns, as arrays."""
    kernel = simulate(body, target, strict=strict, execute=execute)
    kernel.kernel.programs = programs
    return kernel(*arrays)


def trace(body, *arrays, target="trn2", programs=1, execute=True):
    """Run a body, and return its trace."""
    kernel = simulate(body, target, execute=execute)
    kernel.kernel.programs = programs
    kernel(*arrays)
    return kernel.trace


def sbuf(shape, dtype="float32", name=""):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf, name=name)


def psum(shape, dtype="float32", name=""):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.psum, name=name)


def hbm(shape, dtype="float32", name=""):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.shared_hbm, name=name)


def zeros(shape, dtype="float32", buffer="sbuf"):
    """Return a tile that a memset wrote."""
    tile = nl.ndarray(shape, dtype=dtype, buffer=buffer)
    nisa.memset(dst=tile, value=0.0 if "float" in dtype else 0)
    return tile


def loaded(x):
    """Return a tensor of HBM as a tile."""
    tile = sbuf(x.shape, x.dtype)
    nisa.dma_copy(dst=tile, src=x)
    return tile


def stored(tile):
    """Return a tile as an output."""
    if tile.buffer == "psum":
        copy = sbuf(tile.shape, tile.dtype)
        nisa.tensor_copy(dst=copy, src=tile)
        tile = copy
    out = hbm(tile.shape, tile.dtype)
    nisa.dma_copy(dst=out, src=tile)
    return out


def draw(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


__all__ = [
    "NkiTensor",
    "draw",
    "hbm",
    "loaded",
    "nisa",
    "nl",
    "psum",
    "run",
    "sbuf",
    "stored",
    "trace",
    "zeros",
]
