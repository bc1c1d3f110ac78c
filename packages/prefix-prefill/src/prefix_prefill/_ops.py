"""Operator schemas, their fakes and their CPU kernels.

Importing this module imports torch, but neither triton nor the kernels. CUDA and HIP tensors run
the Triton kernels. CPU tensors run the eager code of :mod:`._eager`, or, in a process started with
``TRITON_INTERPRET=1``, the Triton kernels in the interpreter. Every operator writes into its
arguments and returns nothing.
"""

from typing import Any

from . import _eager
from ._call import Call, Options, Plan, Tensors, WritePlan, WriteTensors
from ._checks import check_slots, check_values
from ._linked.host.forms import interpreted
from ._linked.host.operators import free_namespace, register

__all__ = [
    "attention",
    "interpreted",
    "merge_states",
    "plan_of",
    "reshape_and_cache",
    "write_plan_of",
]


def _attention_triton(*arguments: Any) -> None:
    from ._kernels.plans import launch_attention

    launch_attention(*arguments)


def _check_attention(*arguments: Any) -> None:
    call = Call.of(*arguments)
    check_values(call.tensors, call.options)


def _attention_eager(*arguments: Any) -> None:
    call = Call.of(*arguments)
    # the bounds of the lengths change nothing there
    _eager.attention(call.tensors, call.options)


def _reshape_and_cache_triton(*arguments: Any) -> None:
    from ._kernels.plans import launch_reshape_and_cache

    launch_reshape_and_cache(*arguments)


def _check_slots(*arguments: Any) -> None:
    check_slots(*arguments[2:5])


def _merge_states_triton(*arguments: Any) -> None:
    from ._kernels.plans import launch_merge

    launch_merge(*arguments)


def _nothing(*_: Any) -> None:
    """Return what every operator returns."""


NAMESPACE = free_namespace(__name__, "attention")

attention = register(
    f"{NAMESPACE}::attention",
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? k, Tensor? v, Tensor block_table, "
    "Tensor cu_seqlens_q, Tensor seqlens_k, Tensor? alibi_slopes, Tensor? sinks, "
    "Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, Tensor? out_scale, "
    "Tensor? positions, Tensor(a!) out, Tensor(b!)? lse, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, float softmax_scale, SymInt window_left, SymInt window_right, "
    "float softcap, SymInt num_splits, bool signed_alibi, bool skip_decode, "
    "bool decode_from_cache, bool fill_padding, bool long_only) -> ()",
    fake=_nothing,
    kernels=_attention_triton,
    eager=_attention_eager,
    check=_check_attention,
)
reshape_and_cache = register(
    f"{NAMESPACE}::reshape_and_cache",
    "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
    "Tensor? k_scale, Tensor? v_scale) -> ()",
    fake=_nothing,
    kernels=_reshape_and_cache_triton,
    eager=_eager.reshape_and_cache,
    check=_check_slots,
)
merge_states = register(
    f"{NAMESPACE}::merge_states",
    "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, Tensor? out_scale, Tensor(a!) out, "
    "Tensor(b!)? lse) -> ()",
    fake=_nothing,
    kernels=_merge_states_triton,
    eager=_eager.merge_states,
)


def plan_of(x: Tensors, options: Options) -> Plan | None:
    """Return how to launch calls of this form past the operator, or None."""
    if x.q.device.type != "cuda":
        return None
    from ._kernels.plans import plan_of as plan

    return plan(x, options)


def write_plan_of(x: WriteTensors) -> WritePlan | None:
    """Return how to launch writes of this form past the operator, or None."""
    if x.k.device.type != "cuda":
        return None
    from ._kernels.plans import write_plan_of as plan

    return plan(x)
