"""The ``nki.isa`` namespace of the simulator."""

from __future__ import annotations

from typing import Any

from ..errors import Missing, NkiValidationError, NotModelledError
from ..memory.machine import machine
from ..memory.virtual import VirtualRegister
from . import enums as constants
from .copy import memset, tensor_copy
from .cores import core_barrier, sendrecv
from .dma import dma_copy, dma_transpose
from .elementwise import reciprocal, scalar_tensor_tensor, tensor_scalar, tensor_tensor
from .enums import dge_mode, dma_engine, engine, matmul_perf_mode, nc_version, oob_mode, reduce_cmd
from .reduce import exponential, tensor_reduce, tensor_scalar_reduce
from .register import register_alloc, register_load, register_move, register_store
from .scalar import activation, activation_reduce
from .scan import (
    bn_aggr,
    bn_stats,
    max8,
    nc_n_gather,
    nc_stream_shuffle,
    tensor_partition_reduce,
    tensor_tensor_scan,
)
from .search import nc_find_index8, nc_match_replace8, nonzero_with_count
from .select import (
    affine_select,
    iota,
    range_select,
    select_reduce,
    tensor_copy_predicated,
)
from .tensor import nc_matmul, nc_transpose

tensor_engine = engine.tensor
vector_engine = engine.vector
scalar_engine = engine.scalar
gpsimd_engine = engine.gpsimd
unknown_engine = engine.unknown


def get_nc_version() -> nc_version:
    """Return the generation that the kernel runs on."""
    return nc_version(machine().target.generation)


# names of AWS's stubs that are not modelled
MISSING = frozenset(
    {
        "NkiInstruction",
        "activate2",
        "dma_compute",
        "dropout",
        "get_nc_sub_version",
        "local_gather",
        "nc_matmul_mx",
        "quantize_mx",
        "rand2",
        "rand_get_state",
        "rand_set_state",
        "rng",
        "sequence_bounds",
        "set_rng_seed",
        "tensor_scalar_cumulative",
        "topk",
    }
)


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    if name in MISSING:
        return Missing(f"nisa.{name}", f"nki.isa.{name}")
    raise NotModelledError(f"nisa.{name} is not modelled [nki.isa.{name}]")


__all__ = [
    "NkiValidationError",
    "VirtualRegister",
    "activation",
    "activation_reduce",
    "affine_select",
    "bn_aggr",
    "bn_stats",
    "constants",
    "core_barrier",
    "dge_mode",
    "dma_copy",
    "dma_engine",
    "dma_transpose",
    "engine",
    "exponential",
    "get_nc_version",
    "gpsimd_engine",
    "iota",
    "matmul_perf_mode",
    "max8",
    "memset",
    "nc_find_index8",
    "nc_match_replace8",
    "nc_matmul",
    "nc_n_gather",
    "nc_stream_shuffle",
    "nc_transpose",
    "nc_version",
    "nonzero_with_count",
    "oob_mode",
    "range_select",
    "reciprocal",
    "reduce_cmd",
    "register_alloc",
    "register_load",
    "register_move",
    "register_store",
    "scalar_engine",
    "scalar_tensor_tensor",
    "select_reduce",
    "sendrecv",
    "tensor_copy",
    "tensor_copy_predicated",
    "tensor_engine",
    "tensor_partition_reduce",
    "tensor_reduce",
    "tensor_scalar",
    "tensor_scalar_reduce",
    "tensor_tensor",
    "tensor_tensor_scan",
    "unknown_engine",
    "vector_engine",
]
