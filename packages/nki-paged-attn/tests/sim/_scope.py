"""Helpers of scope tests that other tests use too."""

from __future__ import annotations

from nki_paged_attn.sim.loader import MODULES

from ._limits import matmul
from ._nki import hbm, nisa, nl, sbuf, zeros


# body, message, and how it runs
def load_sum():
    x = zeros((1, 1), "int32")
    nisa.tensor_tensor(x, x, x, nl.add)
    return nisa.register_alloc(x)


NOT_MODELLED = [
    (lambda: nisa.nc_matmul_mx(), "nisa.nc_matmul_mx is not modelled", {}),
    (lambda: nl.rms_norm(zeros((1, 8))), "nl.rms_norm is not modelled", {}),
    (lambda: nl.rotten, "nl.rotten is not modelled", {}),
    (lambda: nisa.rotten, "nisa.rotten is not modelled", {}),
    (
        lambda: nisa.activation(zeros((1, 8)), nl.prelu, zeros((1, 8))),
        "nl.prelu is not modelled",
        {},
    ),
    (
        lambda: sbuf((1, 8), nl.float8_e4m3fn_x4),
        "dtype float8_e4m3fn_x4 is not modelled [nki.language.float8_e4m3fn_x4]",
        {},
    ),
    (lambda: MODULES["nki.collectives"].rank_id(), "nki.collectives.rank_id is not modelled", {}),
    (lambda: nl.tile_size.rotten, "nl.tile_size.rotten is not modelled", {}),
    (lambda: nl.arange, "nl.arange is of neuronxcc.nki; use slices, nl.ds or .ap()", {}),
    (lambda: sbuf((1, 1)).indirect, "NkiTensor.indirect is not modelled", {}),
    (lambda: sbuf((1, 1)) * 2.0, "operators on tensors are of neuronxcc.nki; use nki.isa", {}),
    (
        lambda: matmul(dtypes=["float8_e4m3"] * 2, is_transpose=True),
        "nisa.nc_matmul: is_transpose of float8_e4m3",
        {},
    ),
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
