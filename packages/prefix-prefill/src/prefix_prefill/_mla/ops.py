"""Operators of multi-head latent attention; see :mod:`.._paged.ops`."""

from __future__ import annotations

from typing import Any

from .._linked.host.operators import register, schema_of, structured
from .._paged.ops import NAMESPACE
from . import eager
from .call import MlaCall, MlaOptions, MlaPlan, MlaTensors, MlaWritePlan, MlaWriteTensors
from .checks import check_mla_slots, check_mla_values

__all__ = ["mla_attention", "mla_cache_write", "mla_plan_of", "mla_write_plan_of"]


def _triton(*arguments: Any) -> None:
    from .launch import launch_mla

    launch_mla(*structured(MlaCall, arguments))


def _eager(*arguments: Any) -> None:
    call = structured(MlaCall, arguments)
    eager.mla_attention(call.tensors, call.options)


def _check(*arguments: Any) -> None:
    call = structured(MlaCall, arguments)
    check_mla_values(call.tensors, call.max_seqlen_q, call.max_seqlen_k)


def _write_triton(*arguments: Any) -> None:
    from .launch import launch_mla_write

    launch_mla_write(MlaWriteTensors(*arguments))


def _nothing(*_: Any) -> None:
    """Stand in for every operator under fake tensors: operators return nothing."""


mla_attention = register(
    f"{NAMESPACE}::mla_attention",
    f"({schema_of(MlaCall)}) -> ()",
    fake=_nothing,
    kernels=_triton,
    eager=_eager,
    check=_check,
)
mla_cache_write = register(
    f"{NAMESPACE}::mla_cache_write",
    f"({schema_of(MlaWriteTensors)}) -> ()",
    fake=_nothing,
    kernels=_write_triton,
    eager=lambda *x: eager.mla_cache_write(MlaWriteTensors(*x)),
    check=lambda *x: check_mla_slots(MlaWriteTensors(*x)),
)


def mla_plan_of(x: MlaTensors, options: MlaOptions) -> MlaPlan | None:
    """Return a launcher that bypasses the operator, or None: see ``MlaPlan``."""
    if x.q.device.type != "cuda":
        return None
    from .launch import plan_of

    return plan_of(x, options)


def mla_write_plan_of(x: MlaWriteTensors) -> MlaWritePlan | None:
    """Return a launcher that bypasses the operator, or None: see ``MlaWritePlan``."""
    if x.kv_c.device.type != "cuda":
        return None
    from .launch import write_plan_of

    return write_plan_of(x)
