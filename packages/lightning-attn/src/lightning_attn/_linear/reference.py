"""The reference: lightning attention token by token, eager, differentiable by plain autograd.

This is the oracle of the kernels' tests. It shares no code with the kernels or the chunked CPU
implementation. float64 inputs are computed in float64, all others in float32, and only the output
is rounded to the output's dtype.
"""

import torch
from torch import Tensor

from .._linked.host.arguments import check_flag, check_given, check_no_gradient, check_tensor
from .._linked.host.internals import is_watched
from .._linked.host.operators import check_written
from .call import CachedTensors, StepTensors
from .checks import check_has_initial_state, check_reference, check_scale_of
from .results import returns_state
from .validate import validate_decay, validate_slots, validate_varlen


@returns_state
def lightning_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    *,
    scale: float | None = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute what :func:`lightning_attn_func` computes, one token after the other.

    Args:
        q: queries, ``[batch, seqlen, heads, d]``; any float dtype, float64 included.
        k: keys, ``[batch, seqlen, heads, d]``.
        v: values, ``[batch, seqlen, heads, e]``.
        decay: ``[heads]``, ``[heads, 1, 1]`` or ``[1, heads, 1, 1]``, any float dtype.
        scale: factor of the queries; None is ``d ** -0.5``. Default: 1.0.
        initial_state: ``[batch, heads, d, e]``. Default: None (zeros).
        output_final_state: return the state after the last token. Default: False.

    Returns:
        ``(o, state)``: ``o`` in the dtype of ``q``; the state in float64 for float64 inputs, else
        float32, or None.

    Raises:
        TypeError: if ``q``, ``k`` or ``v`` is no tensor of a float dtype.
        ValueError: if the shape of ``q``, ``k`` or ``v`` is wrong.
    """
    check_reference(q, k, v, 4)
    batch, seqlen, heads, d = q.shape
    check_tensor("decay", decay)
    check_given("decay", decay, q, (heads,), (heads, 1, 1), (1, heads, 1, 1))
    check_given("initial_state", initial_state, q, (batch, heads, d, v.shape[-1]))
    if decay.is_cpu and not is_watched():
        validate_decay(decay)
    scale = check_scale_of(q, scale)
    check_flag("output_final_state", output_final_state)
    dtype = compute_dtype(q)
    state = q.new_zeros((batch, heads, d, v.shape[-1]), dtype=dtype)
    if initial_state is not None:
        state = initial_state.to(dtype)
    # under autocast the products below would be rounded to 16 bits
    with torch.autocast(q.device.type, enabled=False):
        kept = torch.exp(-decay.to(dtype).reshape(heads, 1, 1))
        outputs = []
        for t in range(seqlen):
            key, value = k[:, t, :, :, None].to(dtype), v[:, t, :, None, :].to(dtype)
            state = kept * state + key * value
            read = torch.einsum("bhd,bhde->bhe", q[:, t].to(dtype), state)
            outputs.append(scale * read)
    shape = (*q.shape[:-1], v.shape[-1])
    o = torch.stack(outputs, dim=1) if outputs else q.new_zeros(shape, dtype=dtype)
    return o.to(q.dtype), state if output_final_state else None


@returns_state
def lightning_attention_varlen_reference(
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
) -> tuple[Tensor, Tensor | None]:
    """Compute what :func:`lightning_attn_varlen_func` computes, one sequence after the other.

    The arguments are those of :func:`lightning_attn_varlen_func`; dtypes are as in
    :func:`lightning_attention_reference`, and ``state_cache`` may be of any float dtype. Offsets,
    indices and flags are read on the host.
    """
    check_reference(q, k, v, 3)
    check_scale_of(q, scale)
    check_flag("output_final_state", output_final_state)
    validate_varlen(q, cu_seqlens)
    if has_initial_state is not None:
        check_has_initial_state(has_initial_state, len(cu_seqlens) - 1, q)
    of_a_state = q.shape[1], q.shape[2], v.shape[-1]
    check_tensor("decay", decay)
    check_given("decay", decay, q, q.shape[1:2], (q.shape[1], 1, 1), (1, q.shape[1], 1, 1))
    check_given("initial_state", initial_state, q, (len(cu_seqlens) - 1, *of_a_state))
    if state_cache is not None:
        if state_indices is not None:
            validate_slots(state_indices, state_cache, "state_indices")
            if state_indices.shape != (len(cu_seqlens) - 1,):
                raise ValueError(
                    f"state_indices must be [batch], [{len(cu_seqlens) - 1}], "
                    f"got {list(state_indices.shape)}"
                )
        check_tensor("state_cache", state_cache)
        check_given("state_cache", state_cache, q, (*state_cache.shape[:1], *of_a_state))
        given = decay, cu_seqlens, state_cache, state_indices, has_initial_state
        check_written(CachedTensors(q, k, v, *given))
        check_no_gradient("state_cache", state_cache)
    batch = cu_seqlens.shape[0] - 1
    starts = cu_seqlens.tolist()
    slots = list(range(batch)) if state_indices is None else state_indices.tolist()
    used = [True] * batch if has_initial_state is None else has_initial_state.tolist()
    dtype = compute_dtype(q)
    shape = (q.shape[1], q.shape[2], v.shape[-1])
    # tokens before the first and after the last sequence are padding
    zeros = q.new_zeros((q.shape[0], q.shape[1], v.shape[-1]))
    outputs = [zeros[: starts[0] if batch else None]]
    states = []
    for b in range(batch):
        rows = slice(starts[b], starts[b + 1])
        is_padding = state_cache is not None and slots[b] < 0
        if is_padding:
            outputs.append(zeros[rows])
            states.append(q.new_zeros(shape, dtype=dtype))
            continue
        state = q.new_zeros(shape, dtype=dtype)
        if used[b] and state_cache is not None:
            state = state_cache[slots[b]].to(dtype)
        elif used[b] and initial_state is not None:
            state = initial_state[b].to(dtype)
        o, final = lightning_attention_reference(
            q[rows][None],
            k[rows][None],
            v[rows][None],
            decay,
            scale=scale,
            initial_state=state[None],
            output_final_state=True,
        )
        if final is None:
            raise RuntimeError("a state was asked for")
        outputs.append(o[0])
        states.append(final[0])
        if state_cache is not None:
            state_cache[slots[b]] = final[0].detach().to(state_cache.dtype)
    if batch:
        outputs.append(zeros[starts[-1] :])
    if not output_final_state:
        return torch.cat(outputs), None
    return torch.cat(outputs), torch.stack(states) if states else q.new_zeros(
        (0, *shape), dtype=dtype
    )


def lightning_attention_decode_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state_cache: Tensor,
    decay: Tensor,
    slot_idx: Tensor,
    *,
    scale: float | None = 1.0,
    states_out: Tensor | None = None,
) -> Tensor:
    """Compute what :func:`lightning_attn_decode` computes, one sequence after the other.

    The arguments are those of :func:`lightning_attn_decode`; dtypes are as in
    :func:`lightning_attention_reference`, and ``state_cache`` may be of any float dtype. The slots
    are read on the host.
    """
    check_reference(q, k, v, 4)
    check_scale_of(q, scale)
    of_a_state = *q.shape[2:], v.shape[-1]
    check_tensor("decay", decay)
    check_given("decay", decay, q, q.shape[2:3], (q.shape[2], 1, 1), (1, q.shape[2], 1, 1))
    validate_slots(slot_idx, state_cache, "slot_idx")
    check_given("state_cache", state_cache, q, (state_cache.shape[0], *of_a_state))
    check_given("states_out", states_out, q, (*q.shape[:2], *of_a_state))
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    check_written(StepTensors(out, q, k, v, state_cache, decay, slot_idx, states_out))
    for name, x in (("state_cache", state_cache), ("states_out", states_out)):
        if x is not None:
            check_no_gradient(name, x)
    for b, slot in enumerate(slot_idx.tolist()):
        if slot < 0:
            continue
        state = state_cache[slot][None]
        for t in range(q.shape[1]):
            now = slice(t, t + 1)
            o, after = lightning_attention_reference(
                q[b : b + 1, now],
                k[b : b + 1, now],
                v[b : b + 1, now],
                decay,
                scale=scale,
                initial_state=state,
                output_final_state=True,
            )
            out[b, now] = o[0]
            if after is not None:
                state = after
            if states_out is not None:
                states_out[b, t] = state[0]
        if states_out is None:
            state_cache[slot] = state[0].to(state_cache.dtype)
    return out


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of the computation for inputs like ``x``."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
