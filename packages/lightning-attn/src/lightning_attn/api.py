"""The main public functions: check the arguments, then call the operator."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from ._linear import checks, ops
from ._linear.call import CachedTensors, Checked, CheckedStep, Options, StepTensors, Tensors
from ._linear.results import returns_state
from ._linked.host.arguments import as_int32, check_tensor
from ._linked.host.forms import Memory, form_of
from ._linked.host.results import refuses_unknown

_forward: Memory[Checked] = Memory()
_packed: Memory[Checked] = Memory()
_decode: Memory[CheckedStep] = Memory()


@returns_state
def lightning_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    *,
    scale: float | None = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    schedule: str = "auto",
    **unknown: NoReturn,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with decay over sequences of one length, forward and backward.

    For every head, with its decay s and a state S of ``d x e`` numbers in fp32::

        S_t = exp(-s) * S_(t-1) + k_t^T v_t
        o_t = scale * q_t S_t

    computed chunk by chunk (Qin et al. 2024), in memory linear in the sequence length. A sequence
    may be cut anywhere, with the state passed across the cut: this changes only the rounding.

    Args:
        q: queries, ``[batch, seqlen, heads, d]``; fp16, bf16 or fp32. ``d`` is a multiple of 16 up
            to 256. Strides are free.
        k: keys, the shape and dtype of ``q``.
        v: values, ``[batch, seqlen, heads, e]``, dtype of ``q``; ``e`` is a multiple of 16 up to
            256, and may differ from ``d``.
        decay: s, fp32, ``[heads]``, ``[heads, 1, 1]`` or ``[1, heads, 1, 1]``. At least 0; 0 is no
            decay, ``inf`` forgets all earlier tokens. On a GPU the values are not checked
            (:func:`validate_decay` does).
        scale: factor of the queries, at most 2.36e38 in size; None is ``d ** -0.5``. Default: 1.0.
        initial_state: S before the first token, fp32 ``[batch, heads, d, e]``, any strides.
            Default: None (zeros).
        output_final_state: return S after the last token. Default: False.
        schedule: ``"sequential"`` walks a sequence in one program per head and block of columns,
            with the state in registers; ``"parallel"`` computes the states of segments first and
            then all segments at once; ``"auto"`` chooses by the number of programs. With
            ``"sequential"`` or ``"parallel"``, a sequence's result does not depend on its batch,
            bit for bit. Default: ``"auto"``.

    Returns:
        ``(o, state)``: ``o`` ``[batch, seqlen, heads, e]`` in the dtype of ``q``, contiguous; the
        final state, fp32 ``[batch, heads, d, e]``, contiguous, or None. Both are differentiable in
        q, k, v, ``initial_state`` and ``decay``.

    Raises:
        TypeError: if an argument has a wrong type or dtype.
        ValueError: if a shape, a device or a range is wrong.
        NotImplementedError: on forward-mode differentiation.
    """
    if unknown:
        checks.refuse_unknown(unknown, lightning_attn_func)
    form = form_of(
        (q, k, v), (decay, initial_state), (scale, output_final_state, schedule), packed=False
    )
    known = None if form is None else _forward.get(form)
    is_new = known is None
    if known is None:
        checks.check_qkv(q, k, v, 4)
        checks.check_decay(decay, q)
        scale = checks.check_options(q, scale, output_final_state, schedule)
        if initial_state is not None:
            checks.check_initial_state("initial_state", initial_state, q.shape[0], q, v)
        known = Checked(Options(scale, schedule, bool(output_final_state)))
    rates = decay if decay.ndim == 1 else decay.reshape(-1)
    x = Tensors(q, k, v, rates, None, initial_state)
    if is_new and form is not None:
        known = _forward.keep(form, ops.planned(x, known.options))
    out, state = ops.attention(x, known)
    return out, state if output_final_state else None


@returns_state
def lightning_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float | None = 1.0,
    state_cache: Tensor | None = None,
    state_indices: Tensor | None = None,
    initial_state: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    output_final_state: bool = False,
    schedule: str = "auto",
    **unknown: NoReturn,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with decay over packed sequences of different lengths.

    The mathematics, and the arguments not listed here, are those of :func:`lightning_attn_func`.
    There are two ways to pass states: ``initial_state`` and ``output_final_state``, with gradients;
    or ``state_cache``, which is read and written in place, for inference.

    Args:
        q: queries, ``[tokens, heads, d]``: sequence b is the rows ``cu_seqlens[b]`` to
            ``cu_seqlens[b + 1]``. Rows of no sequence are padding: output and gradient are 0.
        k: keys, ``[tokens, heads, d]``.
        v: values, ``[tokens, heads, e]``.
        cu_seqlens: starts of the sequences, int32 ``[batch + 1]``, contiguous; int64 is converted.
            On a GPU the host does not read or check the values (:func:`validate_varlen` does).
        state_cache: states of all sequences of an engine, fp32 ``[slots, heads, d, e]``, any
            strides. A sequence's slot holds its first state and receives its final state.
            Default: None.
        state_indices: the slot of each sequence, int32 or int64 ``[batch]``. A negative slot is
            padding: the cache is not written, and the output is 0. Default: None (slot b).
        initial_state: fp32 ``[batch, heads, d, e]``; not with ``state_cache``. Default: None.
        has_initial_state: bool ``[batch]``; False: the sequence starts from zeros, and its slot is
            not read. Default: None (every state is used).
        output_final_state: return the states after the last tokens. Default: False.

    Returns:
        ``(o, state)``: ``o`` ``[tokens, heads, e]`` in the dtype of ``q``; the final states, fp32
        ``[batch, heads, d, e]`` (zeros for padding), or None. Both are differentiable in q, k, v,
        ``initial_state`` and ``decay``, without ``state_cache``.

    Raises:
        TypeError: if an argument has a wrong type or dtype.
        ValueError: if a shape, a device or a range is wrong, or if what is written shares memory.
        NotImplementedError: on a gradient together with ``state_cache``, and on forward-mode
            differentiation.
    """
    if unknown:
        checks.refuse_unknown(unknown, lightning_attn_varlen_func)
    cu_seqlens = as_int32(cu_seqlens)
    form = form_of(
        (q, k, v),
        (decay, cu_seqlens, state_cache, state_indices, initial_state, has_initial_state),
        (scale, output_final_state, schedule),
        packed=True,
    )
    if form is not None and not len(q) == len(k) == len(v):
        form = None
    known = None if form is None else _packed.get(form)
    is_new = known is None
    if known is None:
        checks.check_qkv(q, k, v, 3)
        checks.check_decay(decay, q)
        scale = checks.check_options(q, scale, output_final_state, schedule)
        checks.check_sequences(
            q, v, cu_seqlens, state_cache, state_indices, initial_state, has_initial_state
        )
        if state_cache is not None:
            given = {"q": q, "k": k, "v": v, "decay": decay, "state_cache": state_cache}
            checks.check_no_gradient("state_cache", **given)
        known = Checked(Options(scale, schedule, bool(output_final_state)))
    rates = decay if decay.ndim == 1 else decay.reshape(-1)
    if state_cache is None:
        if initial_state is not None and has_initial_state is not None:
            starts = has_initial_state[:, None, None, None]
            initial_state = torch.where(starts, initial_state, 0.0)
        x = Tensors(q, k, v, rates, cu_seqlens, initial_state)
        if is_new and form is not None:
            known = _packed.keep(form, ops.planned(x, known.options))
        out, state = ops.attention(x, known)
        return out, state if output_final_state else None
    c = CachedTensors(q, k, v, rates, cu_seqlens, state_cache, state_indices, has_initial_state)
    if is_new and form is not None:
        known = _packed.keep(form, ops.planned(c, known.options))
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    ops.advance(out, c, known)
    if not output_final_state:
        return out, None
    return out, _states_of(state_cache, state_indices, cu_seqlens.shape[0] - 1)


@refuses_unknown
def lightning_attn_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state_cache: Tensor,
    decay: Tensor,
    slot_idx: Tensor,
    *,
    scale: float | None = 1.0,
    out: Tensor | None = None,
    states_out: Tensor | None = None,
    **unknown: NoReturn,
) -> Tensor:
    """Advance each sequence by its new tokens, in place on a cache of states; one launch.

    Args:
        q: queries, ``[batch, tokens, heads, d]`` with 1 to 8 tokens; fp16, bf16 or fp32. Strides
            are free.
        k: keys, the shape and dtype of ``q``.
        v: values, ``[batch, tokens, heads, e]``, dtype of ``q``.
        state_cache: fp32 ``[slots, heads, d, e]``, any strides. Updated in place, unless
            ``states_out`` is given.
        decay: as in :func:`lightning_attn_func`.
        slot_idx: the slot of each sequence, int32 or int64 ``[batch]``, all different. A negative
            slot is padding: the cache is not written, and the output is 0. On a GPU the values are
            not checked (:func:`validate_slots` does).
        scale: factor of the queries; None is ``d ** -0.5``. Default: 1.0.
        out: receives the output, ``[batch, tokens, heads, e]``, dtype of ``q``, any strides.
            Default: None (allocated).
        states_out: fp32 ``[batch, tokens, heads, d, e]``, any strides: receives the state after
            each token, and the cache is not written, so that an engine that verifies drafted tokens
            can commit the state of the last accepted token. Rows of padding are not written.
            Default: None.

    Returns:
        ``o``, ``[batch, tokens, heads, e]``, in the dtype of ``q``: ``out``, if given.

    Raises:
        TypeError: if an argument has a wrong type or dtype.
        ValueError: if a shape, a device or a range is wrong, or if what is written shares memory.
        NotImplementedError: if an input requires a gradient.
    """
    if unknown:
        checks.refuse_unknown(unknown, lightning_attn_decode)
    form = form_of(
        (q, k, v), (state_cache, decay, slot_idx, out, states_out), (scale,), packed=False
    )
    known = None if form is None else _decode.get(form)
    is_new = known is None
    if known is None:
        checks.check_decode(q, k, v, out, states_out)
        checks.check_decay(decay, q)
        known = CheckedStep(checks.check_scale_of(q, scale))
        check_tensor("slot_idx", slot_idx)
        checks.check_state_cache(state_cache, slot_idx, q.shape[0], q, v, "slot_idx")
        given = {"q": q, "k": k, "v": v, "state_cache": state_cache, "decay": decay}
        checks.check_no_gradient("lightning_attn_decode", **given, out=out, states_out=states_out)
    rates = decay if decay.ndim == 1 else decay.reshape(-1)
    target = q.new_empty((*q.shape[:-1], v.shape[-1])) if out is None else out
    x = StepTensors(target, q, k, v, state_cache, rates, slot_idx, states_out)
    if is_new and form is not None:
        known = _decode.keep(form, ops.planned_step(x, known.scale))
    ops.step(x, known)
    return target


def _states_of(cache: Tensor, slots: Tensor | None, batch: int) -> Tensor:
    """Return the states of the sequences, zeros for padding."""
    if slots is None:
        return cache[:batch].clone(memory_format=torch.contiguous_format)
    if cache.shape[0] == 0:  # every sequence is padding
        return cache.new_zeros((batch, *cache.shape[1:]))
    states = cache.index_select(0, slots.clamp(min=0))
    return torch.where((slots >= 0)[:, None, None, None], states, 0.0)
