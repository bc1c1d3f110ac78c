"""Operator schemas, their fakes and their CPU kernels.

Importing this module imports torch, but neither triton nor the kernels. CUDA and HIP tensors run
the Triton kernels. CPU tensors run the eager code of :mod:`._eager`, or, in a process started with
``TRITON_INTERPRET=1``, the Triton kernels in the interpreter. Every operator writes into its
arguments and returns nothing.
"""

from typing import Any

import torch

from . import _eager
from ._call import Call, Options, Plan, Tensors, WritePlan, WriteTensors
from ._linked.host.arguments import on_one_device
from ._linked.host.forms import interpreted

__all__ = [
    "attention",
    "interpreted",
    "merge_states",
    "plan_of",
    "reshape_and_cache",
    "write_plan_of",
]

torch.library.define(
    "prefix_prefill::attention",
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? k, Tensor? v, Tensor block_table, "
    "Tensor cu_seqlens_q, Tensor seqlens_k, Tensor? alibi_slopes, Tensor? sinks, "
    "Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, Tensor? out_scale, "
    "Tensor? positions, Tensor(a!) out, Tensor(b!)? lse, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, float softmax_scale, SymInt window_left, SymInt window_right, "
    "float softcap, SymInt num_splits, bool signed_alibi, bool skip_decode, "
    "bool decode_from_cache, bool fill_padding, bool long_only) -> ()",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    "prefix_prefill::reshape_and_cache",
    "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
    "Tensor? k_scale, Tensor? v_scale) -> ()",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    "prefix_prefill::merge_states",
    "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, Tensor? out_scale, Tensor(a!) out, "
    "Tensor(b!)? lse) -> ()",
    tags=torch.Tag.pt2_compliant_tag,
)


def _attention_triton(*arguments: Any) -> None:
    from ._kernels.plans import launch_attention

    launch_attention(*arguments)


def _attention_cpu(*arguments: Any) -> None:
    if interpreted():
        _attention_triton(*arguments)
        return
    # the bounds of the lengths change nothing there
    call = Call.of(*arguments)
    _eager.attention(call.tensors, call.options)


def _reshape_and_cache_triton(*arguments: Any) -> None:
    from ._kernels.plans import launch_reshape_and_cache

    launch_reshape_and_cache(*arguments)


def _reshape_and_cache_cpu(*arguments: Any) -> None:
    (_reshape_and_cache_triton if interpreted() else _eager.reshape_and_cache)(*arguments)


def _merge_states_triton(*arguments: Any) -> None:
    from ._kernels.plans import launch_merge

    launch_merge(*arguments)


def _merge_states_cpu(*arguments: Any) -> None:
    (_merge_states_triton if interpreted() else _eager.merge_states)(*arguments)


def _nothing(*_: Any) -> None:
    """Return what every operator returns."""


for _name, _triton, _cpu in (
    ("attention", _attention_triton, _attention_cpu),
    ("reshape_and_cache", _reshape_and_cache_triton, _reshape_and_cache_cpu),
    ("merge_states", _merge_states_triton, _merge_states_cpu),
):
    torch.library.register_fake(f"prefix_prefill::{_name}", _nothing)
    torch.library.impl(f"prefix_prefill::{_name}", "cuda", on_one_device(_triton))
    torch.library.impl(f"prefix_prefill::{_name}", "cpu", _cpu)

attention = torch.ops.prefix_prefill.attention.default
reshape_and_cache = torch.ops.prefix_prefill.reshape_and_cache.default
merge_states = torch.ops.prefix_prefill.merge_states.default


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
