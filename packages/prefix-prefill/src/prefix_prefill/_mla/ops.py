"""Operators of multi-head latent attention; see :mod:`.._paged.ops`."""

from __future__ import annotations

from typing import Any

from .._linked.host.operators import register
from .._paged.ops import NAMESPACE
from . import eager
from .call import MlaOptions, MlaPlan, MlaTensors, MlaWritePlan, MlaWriteTensors
from .checks import check_mla_slots, check_mla_values

__all__ = ["mla_attention", "mla_cache_write", "mla_plan_of", "mla_write_plan_of"]


def _call_of(arguments: tuple[Any, ...]) -> tuple[MlaTensors, tuple[int, int], MlaOptions]:
    """Return the operator's arguments as structures."""
    count = len(MlaTensors._fields)
    bounds = arguments[count], arguments[count + 1]
    return MlaTensors(*arguments[:count]), bounds, MlaOptions(*arguments[count + 2 :])


def _triton(*arguments: Any) -> None:
    from .launch import launch_mla

    x, bounds, options = _call_of(arguments)
    launch_mla(x, *bounds, options)


def _eager(*arguments: Any) -> None:
    x, _, options = _call_of(arguments)
    eager.mla_attention(x, options)


def _check(*arguments: Any) -> None:
    x, bounds, _ = _call_of(arguments)
    check_mla_values(x, *bounds)


def _write_triton(*arguments: Any) -> None:
    from .launch import launch_mla_write

    launch_mla_write(MlaWriteTensors(*arguments))


def _write_eager(*arguments: Any) -> None:
    eager.mla_cache_write(MlaWriteTensors(*arguments))


def _check_write(*arguments: Any) -> None:
    check_mla_slots(MlaWriteTensors(*arguments))


def _nothing(*_: Any) -> None:
    """Stand in for every operator under fake tensors: operators return nothing."""


mla_attention = register(
    f"{NAMESPACE}::mla_attention",
    "(Tensor q, Tensor kv_cache, Tensor block_table, Tensor cu_seqlens_q, Tensor seqlens_k, "
    "Tensor? q_descale, Tensor? kv_descale, Tensor(a!) out, Tensor(b!)? lse, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, bool causal, "
    "SymInt num_splits) -> ()",
    fake=_nothing,
    kernels=_triton,
    eager=_eager,
    check=_check,
)
mla_cache_write = register(
    f"{NAMESPACE}::mla_cache_write",
    "(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping, Tensor? scale) -> ()",
    fake=_nothing,
    kernels=_write_triton,
    eager=_write_eager,
    check=_check_write,
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
