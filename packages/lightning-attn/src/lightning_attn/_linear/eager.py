"""The CPU implementation: the chunked form, one sequence after the other, and its derivative.

Sequences run one by one because the products of a batch may round differently from those of one
sequence. The functions have the names of the operators in :mod:`.ops`, and take their arguments in
structures. The derivative is written out because an operator may run with autograd switched off, as
below a dispatch mode; tests compare it with autograd of the reference.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from einops import einsum
from torch import Tensor

from .call import (
    LARGEST_RATE,
    BackwardTensors,
    CachedTensors,
    Inputs,
    Options,
    StepTensors,
    Tensors,
)

# tokens per chunk
CHUNK = 64


class Rule(NamedTuple):
    """A walk's direction, and the factors of its reads and writes."""

    reverse: bool = False
    read_scale: float = 1.0
    write_scale: float = 1.0


def forward(x: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    """Return the output and the final states (without elements if not needed)."""
    out, final = all_sequences(Inputs(*x), Rule(read_scale=options.scale))
    return out, final if options.output_final_state else _absent(x.q)


def forward_cached(x: CachedTensors, out: Tensor, scale: float, schedule: str) -> None:
    """Fill ``out``, and advance the sequences' slots of the cache."""
    out.zero_()
    q, k, v, decay, cu_seqlens, cache, slots, has_first = x
    decay = decay.clamp(max=LARGEST_RATE)
    for b, rows in enumerate(_rows(cu_seqlens)):
        slot = b if slots is None else int(slots[b])
        if slot < 0:
            continue
        used = has_first is None or bool(has_first[b])
        carry = cache[slot] if used else torch.zeros_like(cache[slot])
        one, final = _walk(q[rows], k[rows], v[rows], decay, carry, Rule(read_scale=scale))
        out[rows] = one.to(out.dtype)
        cache[slot] = final


def forward_with_states(x: Tensors, scale: float, block_size: int) -> tuple[Tensor, Tensor]:
    """Return the output, and the states before every block and after the last."""
    q, k, v = x.q, x.k, x.v
    batch, seqlen, heads, d = q.shape
    outputs = [q.new_empty((batch, 0, heads, v.shape[-1]))]
    states = [q.new_zeros((batch, heads, d, v.shape[-1]), dtype=torch.float32)]
    if x.initial_state is not None:
        states = [x.initial_state]
    for begin in range(0, seqlen, block_size):
        block = slice(begin, begin + block_size)
        given = Inputs(q[:, block], k[:, block], v[:, block], x.decay, None, states[-1])
        out, final = all_sequences(given, Rule(read_scale=scale))
        outputs.append(out)
        states.append(final)
    return torch.cat(outputs, dim=1), torch.stack(states, dim=2)


def final_state(x: Tensors, scale: float, reverse: bool, schedule: str) -> Tensor:
    """Return the states after the last tokens; without queries."""
    return all_sequences(Inputs(*x), Rule(reverse, write_scale=scale))[1]


def read_gradient(x: BackwardTensors, scale: float, schedule: str) -> Tensor:
    """Return dq."""
    return all_sequences(x.walk_of_dq(), Rule(read_scale=scale))[0]


def write_gradients(
    x: BackwardTensors, scale: float, schedule: str, needs_dinitial: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dk, dv and, if needed, the gradient of the initial states."""
    rule = Rule(reverse=True, write_scale=scale)
    dk, _ = all_sequences(x.walk_of_dk(), rule)
    dv, dinitial = all_sequences(x.walk_of_dv(), rule)
    return dk, dv, dinitial if needs_dinitial else _absent(x.q)


def decay_gradient(x: BackwardTensors, scale: float) -> Tensor:
    """Return the gradient of the decays; see ``portable/decay_gradient.py``."""
    dout, q, k, v, decay, cu_seqlens, initial_state, dfinal_state = x
    total = torch.zeros_like(decay)
    decay = decay.clamp(max=LARGEST_RATE)
    rates, back = decay[:, None], Rule(reverse=True, write_scale=scale)
    for b, parts in _sequences(cu_seqlens, dout, q, k, v):
        dout_b, q_b, k_b, v_b = map(dense, parts)
        shape = (q.shape[-2], q.shape[-1], v.shape[-1])
        state = q.new_zeros(shape, dtype=torch.float32)
        state = state if initial_state is None else dense(initial_state[b])
        carry = torch.zeros_like(state) if dfinal_state is None else dense(dfinal_state[b])
        chunks = list(zip(*(torch.split(x, CHUNK) for x in (dout_b, q_b, k_b, v_b)), strict=True))
        # gradients of the states after each chunk, from the last to the first
        arriving = []
        for dout_c, q_c, _, _ in reversed(chunks):
            arriving.append(carry)
            carry = _walk(None, q_c, dout_c, decay, carry, back)[1]
        for (dout_c, q_c, k_c, v_c), later in zip(chunks, reversed(arriving), strict=True):
            n = q_c.shape[0]
            index = torch.arange(n, device=q.device)
            apart = (index[:, None] - index).clamp(min=0)
            weights = apart * torch.exp(-rates[..., None] * apart)
            scores = einsum(q_c, k_c, "i h d, j h d -> h i j") * scale
            values = einsum(dout_c, v_c, "i h e, j h e -> h i j")
            total -= (weights * scores * values).sum(dim=(1, 2))
            # from the state before the chunk to each token
            reads = einsum(q_c, state, dout_c, "i h d, h d e, i h e -> h i") * scale
            total -= ((index + 1) * torch.exp(-rates * (index + 1)) * reads).sum(dim=1)
            # from each token to the state after the chunk
            left = n - 1 - index
            writes = einsum(k_c, later, v_c, "j h d, h d e, j h e -> h j")
            total -= (left * torch.exp(-rates * left) * writes).sum(dim=1)
            # from the state before the chunk to the state after it
            total -= n * torch.exp(-decay * n) * (state * later).sum(dim=(1, 2))
            state = _walk(None, k_c, v_c, decay, state, Rule())[1]
    return total


def decode(x: StepTensors, scale: float) -> None:
    """Fill ``out``, and advance the slots, or fill ``states_out``."""
    out, q, k, v, state_cache, decay, slot_idx, states_out = x
    out.zero_()
    kept = torch.exp(-decay)[:, None, None]
    for b, slot in enumerate(slot_idx.tolist()):
        if slot < 0:
            continue
        state = dense(state_cache[slot])
        for t in range(q.shape[1]):
            added = einsum(dense(k[b, t]), dense(v[b, t]), "h d, h e -> h d e")
            state = kept * state + added
            read = einsum(dense(q[b, t]), state, "h d, h d e -> h e")
            out[b, t] = (scale * read).to(out.dtype)
            if states_out is not None:
                states_out[b, t] = state
        if states_out is None:
            state_cache[slot] = state


def dense(x: Tensor) -> Tensor:
    """Return a contiguous fp32 copy: products' sums depend on strides and addresses."""
    return torch.empty(x.shape, dtype=torch.float32, device=x.device).copy_(x)


def _walk(
    read: Tensor | None, key: Tensor, value: Tensor, decay: Tensor, carry: Tensor, rule: Rule
) -> tuple[Tensor, Tensor]:
    """Walk the chunks of one sequence; return the reads and the final state, in fp32.

    ``read`` and ``key`` are ``[tokens, heads, d]``, ``value`` ``[tokens, heads, e]``, ``carry``
    ``[heads, d, e]``. Each token adds ``write_scale * key^T value`` to the state, and then reads
    ``read_scale * read . state``. Forward, the state decays before a token writes. In ``reverse``,
    from the last token to the first, it decays after a token reads: the transposed operation.
    """
    reverse, read_scale, write_scale = rule
    tokens, heads = key.shape[:2]
    before = 0 if reverse else 1
    reads = read is not None
    read = key if read is None else read
    read_f, key_f, value_f = (dense(x.flip(0) if reverse else x) for x in (read, key, value))
    carry = dense(carry)
    out = value_f.new_empty((tokens if reads else 0, heads, value.shape[-1]))
    for begin in range(0, tokens, CHUNK):
        rows = slice(begin, min(begin + CHUNK, tokens))
        n = rows.stop - begin
        k, v = key_f[rows], value_f[rows]
        index = torch.arange(n, device=key.device)
        if reads:
            q = read_f[rows]
            apart = (index[:, None] - index).clamp(min=0)
            weights = torch.exp(-decay[:, None, None] * apart).tril()
            scores = einsum(q, k, "i h d, j h d -> h i j") * weights
            within = einsum(scores, v, "h i j, j h e -> i h e")
            arrived = einsum(q, carry, "i h d, h d e -> i h e")
            faded = torch.exp(-decay * (index + before)[:, None])[..., None]
            out[rows] = read_scale * (write_scale * within + faded * arrived)
        fading = torch.exp(-decay * (n - before - index)[:, None])[..., None]
        added = einsum(k * fading, v, "j h d, j h e -> h d e")
        carry = torch.exp(-decay * n)[:, None, None] * carry + write_scale * added
    return out.flip(0) if reverse else out, carry


def all_sequences(x: Inputs, rule: Rule) -> tuple[Tensor, Tensor]:
    """Walk every sequence; return reads in the dtype of ``key``, and final states in fp32."""
    key, value = x.key, x.value
    batch = key.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    shape = (batch, key.shape[-2], key.shape[-1], value.shape[-1])
    states = key.new_zeros(shape, dtype=torch.float32)
    if x.first is not None:
        states.copy_(x.first)
    out = key.new_zeros((*key.shape[:-1], value.shape[-1]))
    decay = x.decay.clamp(max=LARGEST_RATE)
    sources = (key, value, out) if x.read is None else (key, value, out, x.read)
    for b, (k, v, rows, *q) in _sequences(x.cu_seqlens, *sources):
        one, states[b] = _walk(q[0] if q else None, k, v, decay, states[b], rule)
        if q:
            rows.copy_(one)
    return out, states


def _sequences(
    cu_seqlens: Tensor | None, *tensors: Tensor
) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Yield each sequence's number and its rows of each tensor."""
    if cu_seqlens is None:
        yield from enumerate(zip(*tensors, strict=True))
        return
    for b, rows in enumerate(_rows(cu_seqlens)):
        yield b, tuple(x[rows] for x in tensors)


def _rows(cu_seqlens: Tensor) -> list[slice]:
    starts = cu_seqlens.tolist()
    return [slice(*bounds) for bounds in itertools.pairwise(starts)]


def _absent(q: Tensor) -> Tensor:
    return q.new_empty((0,), dtype=torch.float32)
