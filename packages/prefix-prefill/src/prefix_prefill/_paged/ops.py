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
from .._linked.host.operators import free_namespace, register, schema_of, structured
from . import eager as paged_eager
from .call import (
    AppendCall,
    AppendOptions,
    AppendPlan,
    AppendTensors,
    Call,
    CheckedAppend,
    Options,
    Plan,
    RowCall,
    RowOptions,
    RowPlan,
    RowTensors,
    Tensors,
    WriteCall,
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


def _attention_eager(*arguments: Any) -> None:
    call = structured(Call, arguments)
    # eager code needs no bounds of the lengths
    paged_eager.attention(call.tensors, call.options)


def _reshape_and_cache_triton(*arguments: Any) -> None:
    from .._cache.kernels.launch import launch_reshape_and_cache

    launch_reshape_and_cache(*arguments)


def _check_slots(*arguments: Any) -> None:
    x = structured(WriteCall, arguments).tensors
    check_slots(x.k_cache, x.slot_mapping)


def _merge_states_triton(*arguments: Any) -> None:
    from .launch import launch_merge

    launch_merge(*arguments)


def _append_triton(*arguments: Any) -> None:
    from .._kvcache.kernels.launch import launch_append

    launch_append(*arguments)


def _rows_triton(*arguments: Any) -> None:
    from .._kvcache.kernels.launch import launch_attend

    launch_attend(*arguments)


def _nothing(*_: Any) -> None:
    """Stand in for every operator under fake tensors: operators return nothing."""


NAMESPACE = free_namespace(__name__, "attention")

attention = register(
    f"{NAMESPACE}::attention",
    f"({schema_of(Call)}) -> ()",
    fake=_nothing,
    kernels=_attention_triton,
    eager=_attention_eager,
    check=lambda *x: check_values(structured(Call, x)),
)
reshape_and_cache = register(
    f"{NAMESPACE}::reshape_and_cache",
    f"({schema_of(WriteCall)}) -> ()",
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
    f"({schema_of(AppendCall)}, Tensor? cache_leftpad=None, SymInt window_left=-1) -> ()",
    fake=_nothing,
    kernels=_append_triton,
    eager=lambda *x: kvcache_eager.append(*structured(AppendCall, x)),
    check=lambda *x: check_append_values(structured(CheckedAppend, x)),
)
attend_kvcache = register(
    f"{NAMESPACE}::attend_kvcache",
    f"({schema_of(RowCall)}) -> ()",
    fake=_nothing,
    kernels=_rows_triton,
    eager=lambda *x: kvcache_eager.attend(*structured(RowCall, x)),
    check=lambda *x: check_row_values(*structured(RowCall, x)),
)


def plan_of(x: Tensors, options: Options) -> Plan | None:
    """Return a launcher that bypasses the operator, or None: see ``Plan``."""
    if x.q.device.type != "cuda":
        return None
    from .launch import plan_of as plan

    return plan(x, options)


def write_plan_of(x: WriteTensors, per_token_head: bool = False) -> WritePlan | None:
    """Return a launcher that bypasses the operator, or None: see ``WritePlan``."""
    if x.k.device.type != "cuda":
        return None
    from .._cache.kernels.launch import write_plan_of as plan

    return plan(x, per_token_head)


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
