"""Three products of matrices as AWS's tutorial walks them: tiled, with blocks, with K in blocks."""

from __future__ import annotations

import numpy as np
from nki_paged_attn.sim import ArraySpec, simulate

from ._nki import hbm, nisa, nl, psum, sbuf

M_TILE, K_TILE, N_TILE = 128, 128, 512


def loaded(x, row, column, width):
    tile = sbuf((K_TILE, width), nl.float32)
    nisa.dma_copy(tile, x[row : row + K_TILE, column : column + width])
    return tile


def tiled(a, b):
    """Load both operands for each product."""
    out = hbm((a.shape[1], b.shape[1]), nl.float32)
    for m in range(0, a.shape[1], M_TILE):
        for n in range(0, b.shape[1], N_TILE):
            total = psum((M_TILE, N_TILE))
            for k in range(0, a.shape[0], K_TILE):
                nisa.nc_matmul(total, loaded(a, k, m, M_TILE), loaded(b, k, n, N_TILE))
            result = sbuf((M_TILE, N_TILE), nl.float32)
            nisa.tensor_copy(result, total)
            nisa.dma_copy(out[m : m + M_TILE, n : n + N_TILE], result)
    return out


def blocked(a, b, rows=2, columns=2, again=False):
    """Keep all of K for a block of 256 x 1024; ``again``: load the right one for each row of it."""
    depth = a.shape[0]
    out = hbm((a.shape[1], b.shape[1]), nl.float32)
    for m in range(0, a.shape[1], rows * M_TILE):
        left = [
            [loaded(a, k, m + i * M_TILE, M_TILE) for k in range(0, depth, K_TILE)]
            for i in range(rows)
        ]
        for n in range(0, b.shape[1], columns * N_TILE):
            right = [
                []
                if again
                else [loaded(b, k, n + j * N_TILE, N_TILE) for k in range(0, depth, K_TILE)]
                for j in range(columns)
            ]
            for i in range(rows):
                for j in range(columns):
                    total = psum((M_TILE, N_TILE))
                    for d, x in enumerate(left[i]):
                        column = n + j * N_TILE
                        y = loaded(b, d * K_TILE, column, N_TILE) if again else right[j][d]
                        nisa.nc_matmul(total, x, y)
                    result = sbuf((M_TILE, N_TILE), nl.float32)
                    nisa.tensor_copy(result, total)
                    row, column = m + i * M_TILE, n + j * N_TILE
                    nisa.dma_copy(out[row : row + M_TILE, column : column + N_TILE], result)
    return out


def blocked_again(a, b):
    """``blocked`` as a compiler has to place it where all of K does not fit."""
    return blocked(a, b, again=True)


def blocked_in_all(a, b, rows=16, columns=2, deep=8):
    """Blocks of 2048 x 1024 x 1024, whose partial sums stay in SBUF."""
    out = hbm((a.shape[1], b.shape[1]), nl.float32)
    for n in range(0, b.shape[1], columns * N_TILE):
        for m in range(0, a.shape[1], rows * M_TILE):
            sums = [sbuf((M_TILE, columns * N_TILE)) for _ in range(rows)]
            for k in range(0, a.shape[0], deep * K_TILE):
                right = [loaded(b, k + d * K_TILE, n, columns * N_TILE) for d in range(deep)]
                left = [loaded(a, k + d * K_TILE, m, rows * M_TILE) for d in range(deep)]
                for i in range(rows):
                    for j in range(columns):
                        total = psum((M_TILE, N_TILE))
                        for d in range(deep):
                            nisa.nc_matmul(
                                total,
                                left[d][:, i * M_TILE : (i + 1) * M_TILE],
                                right[d][:, j * N_TILE : (j + 1) * N_TILE],
                            )
                        part = sums[i][:, j * N_TILE : (j + 1) * N_TILE]
                        if k == 0:
                            nisa.tensor_copy(part, total)
                        else:
                            nisa.tensor_tensor(part, part, total, nl.add)
            for i in range(rows):
                result = sbuf((M_TILE, columns * N_TILE), nl.float32)
                nisa.tensor_copy(result, sums[i])
                row = m + i * M_TILE
                nisa.dma_copy(out[row : row + M_TILE, n : n + columns * N_TILE], result)
    return out


def trace(body, m, k, n):
    """Log a product of ``[m, k]`` and ``[k, n]`` in fp32."""
    run = simulate(body, "trn2", execute=False)
    run(ArraySpec((k, m), np.float32), ArraySpec((k, n), np.float32))
    return run.trace
