"""A decoding step: one program owns some columns of one head's state, and reads and writes it once.

The step is bound by the memory traffic of the states alone, so the products are plain multiply-adds
in fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from attn_common import cdiv, detect
from torch import Tensor

from .._configs import decode_tile, padded_head_dim
from .._linked.host.forms import ACCESS_BYTES
from .common import NUMBERS, POINTERS
from .launch.runtime import Launch, dense
from .primitives import factor, rate_of


@triton.jit
def _state_pointers(
    base, rows, cols, stride_d, stride_e, BYTES: tl.constexpr, ALONG: tl.constexpr
):  # fmt: skip
    """Return the pointers of a tile of a state; ``ALONG`` says which stride is 1: 1 e, 0 d.

    Rows of that dimension begin on multiples of ``BYTES``.
    """
    rows_64 = rows.to(tl.int64)[:, None]
    cols_64 = cols.to(tl.int64)[None, :]
    if ALONG == 1:
        begin = tl.multiple_of(base + rows_64 * stride_d, [BYTES, BYTES])
        return begin + cols[None, :]
    if ALONG == 0:
        begin = tl.multiple_of(base + cols_64 * stride_e, [BYTES, BYTES])
        return begin + rows[:, None]
    return base + rows_64 * stride_d + cols_64 * stride_e


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def _decode_kernel(
    read_ptr, key_ptr, value_ptr, out_ptr, states_ptr, last_ptr, decay_ptr, slots_ptr,
    scale, tokens, heads,
    stride_rb, stride_rs, stride_rh, stride_rd,
    stride_kb, stride_ks, stride_kh, stride_kd,
    stride_vb, stride_vs, stride_vh, stride_vd,
    stride_ob, stride_os, stride_oh, stride_od,
    stride_states_b, stride_states_h, stride_states_d, stride_states_e,
    stride_last_b, stride_last_s, stride_last_h, stride_last_d, stride_last_e,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BYTES: tl.constexpr,  # alignment of rows of the cache
    ALONG: tl.constexpr,  # which dimension of the cache has stride 1: 1 e, 0 d, -1 neither
    BYTES_LAST: tl.constexpr,
    ALONG_LAST: tl.constexpr,
):  # fmt: skip
    SPLITS: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    pid = tl.program_id(0)
    cols = pid % SPLITS * BLOCK_E + tl.arange(0, BLOCK_E)
    head = (pid // SPLITS % heads).to(tl.int64)
    row = (pid // SPLITS // heads).to(tl.int64)
    rows = tl.arange(0, BLOCK_D)
    inside_d = rows < D
    inside_e = cols < E
    inside = inside_d[:, None] & inside_e[None, :]
    out_base = out_ptr + row * stride_ob + head * stride_oh + cols.to(tl.int64) * stride_od
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        for t in tl.range(0, tokens):
            zeros = tl.zeros([BLOCK_E], out_ptr.dtype.element_ty)
            tl.store(out_base + (tl.zeros([], tl.int64) + t) * stride_os, zeros, mask=inside_e)
        return
    cache = states_ptr + slot * stride_states_b + head * stride_states_h
    pointers = _state_pointers(cache, rows, cols, stride_states_d, stride_states_e, BYTES, ALONG)
    state = tl.load(pointers, mask=inside, other=0.0)  # [D, E]
    kept = factor(rate_of(decay_ptr, head), tl.full([], 1, tl.int32))
    q_base = read_ptr + row * stride_rb + head * stride_rh + rows.to(tl.int64) * stride_rd
    k_base = key_ptr + row * stride_kb + head * stride_kh + rows.to(tl.int64) * stride_kd
    v_base = value_ptr + row * stride_vb + head * stride_vh + cols.to(tl.int64) * stride_vd
    for t in tl.range(0, tokens):
        t_64 = tl.zeros([], tl.int64) + t
        q = tl.load(q_base + t_64 * stride_rs, mask=inside_d, other=0.0).to(tl.float32)
        k = tl.load(k_base + t_64 * stride_ks, mask=inside_d, other=0.0).to(tl.float32)
        v = tl.load(v_base + t_64 * stride_vs, mask=inside_e, other=0.0).to(tl.float32)
        state = state * kept + k[:, None] * v[None, :]
        out = tl.sum(state * q[:, None], 0) * scale
        tl.store(out_base + t_64 * stride_os, out.to(out_ptr.dtype.element_ty), mask=inside_e)
        if last_ptr is not None:
            after = last_ptr + row * stride_last_b + t_64 * stride_last_s + head * stride_last_h
            after_ptrs = _state_pointers(
                after, rows, cols, stride_last_d, stride_last_e, BYTES_LAST, ALONG_LAST
            )
            tl.store(after_ptrs, state, mask=inside)
    if last_ptr is None:
        tl.store(pointers, state, mask=inside)


def _layout(x: Tensor | None) -> tuple[int, int]:
    """Return the alignment of a state's rows in bytes, and the dimension along which they run."""
    if x is None:
        return 0, -1
    *outer, stride_d, stride_e = x.stride()
    if 1 not in (stride_d, stride_e):
        return 0, -1
    along, between = (1, stride_d) if stride_e == 1 else (0, stride_e)
    size = x.element_size()
    starts = (x.data_ptr(), *(stride * size for stride in (*outer, between)))
    return ACCESS_BYTES if all(start % ACCESS_BYTES == 0 for start in starts) else size, along


class DecodePlan:
    """The decoding steps of one form: all but the data."""

    def __init__(
        self,
        out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state_cache: Tensor,
        states_out: Tensor | None,
        scale: float,
    ) -> None:
        batch, tokens, heads, d = q.shape
        e = v.shape[-1]
        tile = decode_tile(detect(q.device), d, e)
        alignment, along = _layout(state_cache)
        alignment_last, along_last = _layout(states_out)
        self._grid = batch * heads * cdiv(e, tile.block_e)
        self._numbers = (
            scale, tokens, heads,
            *q.stride(), *k.stride(), *v.stride(), *out.stride(),
            *state_cache.stride(),
            *((0,) * 5 if states_out is None else states_out.stride()),
        )  # fmt: skip
        self._launch = Launch(
            _decode_kernel,
            {
                "D": d,
                "E": e,
                "BLOCK_D": padded_head_dim(d),
                "BLOCK_E": tile.block_e,
                "BYTES": alignment,
                "ALONG": along,
                "BYTES_LAST": alignment_last,
                "ALONG_LAST": along_last,
                "num_warps": tile.num_warps,
                "num_stages": 1,
            },
        )

    def decode(
        self,
        out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state_cache: Tensor,
        decay: Tensor,
        slot_idx: Tensor,
        states_out: Tensor | None,
    ) -> None:
        """Advance every sequence; ``decay`` and ``slot_idx`` are dense."""
        self._launch(
            self._grid,
            (q, k, v, out, state_cache, states_out, decay, slot_idx),
            self._numbers,
        )


def launch_decode(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state_cache: Tensor,
    decay: Tensor,
    slot_idx: Tensor,
    states_out: Tensor | None,
    scale: float,
) -> None:
    """Run the decode operator on checked inputs; see ``_ops.py`` for its schema."""
    plan = DecodePlan(out, q, k, v, state_cache, states_out, scale)
    plan.decode(out, q, k, v, state_cache, dense(decay), dense(slot_idx), states_out)
