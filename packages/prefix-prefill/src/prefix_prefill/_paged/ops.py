"""The operators: schemas, fake implementations, CPU and GPU implementations.

Importing this module imports torch, but neither triton nor the kernels. CUDA and HIP tensors run
the Triton kernels. CPU tensors run the eager code of :mod:`.eager`, or, in a process started with
``TRITON_INTERPRET=1``, the Triton kernels in the interpreter. Every operator writes into its
arguments and returns nothing.
"""

from typing import Any

from .._kvcache import eager as kvcache_eager
from .._kvcache.checks import check_append_values, check_row_values
from .._linked.host.forms import interpreted
from .._linked.host.operators import free_namespace, register
from . import eager as paged_eager
from .call import (
    AppendOptions,
    AppendPlan,
    AppendTensors,
    Call,
    Options,
    Plan,
    RowOptions,
    RowPlan,
    RowTensors,
    Tensors,
    WritePlan,
    WriteTensors,
)
from .values import check_slots, check_values

__all__ = [
    "append_kvcache",
    "attend_kvcache",
    "attention",
    "interpreted",
    "kvcache_plans_of",
    "merge_states",
    "plan_of",
    "reshape_and_cache",
    "write_plan_of",
]


def _attention_triton(*arguments: Any) -> None:
    from .launch import launch_attention

    launch_attention(*arguments)


def _check_attention(*arguments: Any) -> None:
    check_values(Call.of(*arguments))


def _attention_eager(*arguments: Any) -> None:
    call = Call.of(*arguments)
    # eager code needs no bounds of the lengths
    paged_eager.attention(call.tensors, call.options)


def _reshape_and_cache_triton(*arguments: Any) -> None:
    from .._cache.kernels.launch import launch_reshape_and_cache

    launch_reshape_and_cache(*arguments)


def _check_slots(*arguments: Any) -> None:
    x = WriteTensors(*arguments)
    check_slots(x.k_cache, x.slot_mapping)


def _merge_states_triton(*arguments: Any) -> None:
    from .launch import launch_merge

    launch_merge(*arguments)


def _append_triton(*arguments: Any) -> None:
    from .._kvcache.kernels.launch import launch_append

    launch_append(*arguments)


def _append_of(arguments: tuple[Any, ...]) -> tuple[AppendTensors, AppendOptions]:
    count = len(AppendTensors._fields)
    return AppendTensors(*arguments[:count]), AppendOptions(*arguments[count:])


def _check_append(*arguments: Any) -> None:
    check_append_values(*_append_of(arguments))


def _append_eager(*arguments: Any) -> None:
    kvcache_eager.append(*_append_of(arguments))


def _rows_triton(*arguments: Any) -> None:
    from .._kvcache.kernels.launch import launch_attend

    launch_attend(*arguments)


def _rows_of(arguments: tuple[Any, ...]) -> tuple[RowTensors, RowOptions]:
    count = len(RowTensors._fields)
    return RowTensors(*arguments[:count]), RowOptions(*arguments[count:])


def _check_rows(*arguments: Any) -> None:
    check_row_values(*_rows_of(arguments))


def _rows_eager(*arguments: Any) -> None:
    kvcache_eager.attend(*_rows_of(arguments))


def _nothing(*_: Any) -> None:
    """Stand in for every operator under fake tensors: operators return nothing."""


NAMESPACE = free_namespace(__name__, "attention")

attention = register(
    f"{NAMESPACE}::attention",
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? k, Tensor? v, Tensor block_table, "
    "Tensor cu_seqlens_q, Tensor seqlens_k, Tensor? alibi_slopes, Tensor? sinks, "
    "Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, Tensor? k_scale_cache, "
    "Tensor? v_scale_cache, Tensor? out_scale, Tensor? positions, Tensor? tree_mask, "
    "Tensor(a!) out, Tensor(b!)? lse, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "float softmax_scale, SymInt window_left, SymInt window_right, float softcap, "
    "SymInt num_splits, bool signed_alibi, bool skip_decode, bool decode_from_cache, "
    "bool fill_padding, bool long_only, bool invariant=False, "
    "bool own_keys=False) -> ()",
    fake=_nothing,
    kernels=_attention_triton,
    eager=_attention_eager,
    check=_check_attention,
)
reshape_and_cache = register(
    f"{NAMESPACE}::reshape_and_cache",
    "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
    "Tensor? k_scale, Tensor? v_scale, Tensor(c!)? k_scale_cache, Tensor(d!)? v_scale_cache) -> ()",
    fake=_nothing,
    kernels=_reshape_and_cache_triton,
    eager=paged_eager.reshape_and_cache,
    check=_check_slots,
)
merge_states = register(
    f"{NAMESPACE}::merge_states",
    "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, Tensor? out_scale, Tensor(a!) out, "
    "Tensor(b!)? lse) -> ()",
    fake=_nothing,
    kernels=_merge_states_triton,
    eager=paged_eager.merge_states,
)
append_kvcache = register(
    f"{NAMESPACE}::append_kvcache",
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor cache_seqlens, "
    "Tensor? cache_batch_idx, Tensor? block_table, Tensor? rotary_cos, Tensor? rotary_sin, "
    "Tensor(c!)? rotated, Tensor(d!)? k_scale_cache, Tensor(e!)? v_scale_cache, bool interleaved, "
    "bool moving) -> ()",
    fake=_nothing,
    kernels=_append_triton,
    eager=_append_eager,
    check=_check_append,
)
attend_kvcache = register(
    f"{NAMESPACE}::attend_kvcache",
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cache_seqlens, Tensor? cache_batch_idx, "
    "Tensor? cache_leftpad, Tensor? block_table, Tensor? alibi_slopes, Tensor? k_scale_cache, "
    "Tensor? v_scale_cache, Tensor(a!) out, Tensor(b!)? lse, SymInt new, float softmax_scale, "
    "SymInt window_left, SymInt window_right, float softcap, SymInt num_splits, "
    "bool invariant=False) -> ()",
    fake=_nothing,
    kernels=_rows_triton,
    eager=_rows_eager,
    check=_check_rows,
)


def plan_of(x: Tensors, options: Options) -> Plan | None:
    """Return a launcher that bypasses the operator, or None: see ``Plan``."""
    if x.q.device.type != "cuda":
        return None
    from .launch import plan_of as plan

    return plan(x, options)


def write_plan_of(x: WriteTensors) -> WritePlan | None:
    """Return a launcher that bypasses the operator, or None: see ``WritePlan``."""
    if x.k.device.type != "cuda":
        return None
    from .._cache.kernels.launch import write_plan_of as plan

    return plan(x)


def kvcache_plans_of(
    append: AppendTensors | None,
    append_options: AppendOptions,
    attend: RowTensors,
    options: RowOptions,
) -> tuple[AppendPlan | None, RowPlan] | None:
    """Return launchers that bypass the operators, or None: see ``AppendPlan`` and ``RowPlan``."""
    if attend.q.device.type != "cuda":
        return None
    from .._kvcache.kernels.launch import plans_of

    return plans_of(append, append_options, attend, options)
