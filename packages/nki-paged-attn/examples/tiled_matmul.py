"""A product of matrices larger than a tile: a walk over tiles, sums kept in PSUM.

Run it on the simulator: ``python examples/tiled_matmul.py``.
"""

from nki_paged_attn.sim import install

install()

import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def tiled_matmul_kernel(a, b):
    """Return ``a.T @ b`` for a ``[k, m]`` and b ``[k, n]``, all multiples of 128."""
    k, m = a.shape
    n = b.shape[1]
    out = nl.ndarray((m, n), dtype=a.dtype, buffer=nl.shared_hbm)
    width = min(n, nl.tile_size.gemm_moving_fmax)
    for i in range(0, m, 128):
        for j in range(0, n, width):
            size = min(width, n - j)
            # one bank of PSUM collects the sum over k
            total = nl.ndarray((128, size), dtype=nl.float32, buffer=nl.psum)
            for p in range(0, k, 128):
                stationary = nl.ndarray((128, 128), dtype=a.dtype, buffer=nl.sbuf)
                nisa.dma_copy(dst=stationary, src=a[p : p + 128, i : i + 128])
                moving = nl.ndarray((128, size), dtype=b.dtype, buffer=nl.sbuf)
                nisa.dma_copy(dst=moving, src=b[p : p + 128, j : j + size])
                nisa.nc_matmul(dst=total, stationary=stationary, moving=moving, accumulate=p > 0)
            result = nl.ndarray((128, size), dtype=a.dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=result, src=total)
            nisa.dma_copy(dst=out[i : i + 128, j : j + size], src=result)
    return out


if __name__ == "__main__":
    from run import main

    main("tiled_matmul")
