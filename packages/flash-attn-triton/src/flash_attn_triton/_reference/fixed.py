"""The reference for sequences of one length: eager, any float dtype, differentiable by autograd.

It holds the whole score matrix, ``O(seqlen_q * seqlen_k)`` memory, and shares no code with the
kernels. It computes float64 inputs in float64 and all other inputs in float32, and rounds only the
output.
"""

import math

import torch
from torch import Tensor

from .._linked.host.arguments import FP8_DTYPES, MAX_WINDOW
from .philox import dropout_keep_mask, keep_scale

# With a bias, a row whose scores are all at most this counts as fully masked: in fp32 its LSE would
# have no fraction, so the backward could not recompute its probabilities.
LEAST_SCORE = -1e7


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    rng_state: Tensor | None,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    first_sequence: int = 0,
    position: int | None = None,
    corner: tuple[int, int] = (0, 0),
    spans: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention of sequences of one length; results are in the dtype of the computation.

    ``first_sequence`` is dropout's index of the first sequence of the batch, and ``corner`` its
    index of the first query and of the first key. ``position`` is the position of the first query
    among the keys; by default queries and keys end together. ``spans`` are
    ``[batch or 1, seqlen_q, n, 2]``.
    """
    # under autocast the products below would be rounded to 16 bits
    with torch.autocast(q.device.type, enabled=False):
        batch, seqlen_q, heads_q, _ = q.shape
        seqlen_k = k.shape[1]
        position = seqlen_k - seqlen_q if position is None else position
        visible = visible_keys(
            seqlen_q, seqlen_k, window_left, window_right, q.device, position, spans
        )
        row_sees_any, seen_by_any = that_see_any(visible)

        # unseen rows and keys may hold NaN, and 0 * NaN is NaN in products and in gradients
        q = _scaled(q, q_descale).masked_fill(~row_sees_any, 0.0)
        k = _scaled(k, k_descale).masked_fill(~seen_by_any, 0.0)
        v = _scaled(v, v_descale).masked_fill(~seen_by_any, 0.0)
        v = v.repeat_interleave(heads_q // v.shape[2], dim=2)
        scores = attention_scores(
            q, k, visible, bias, alibi_slopes, softmax_scale, softcap, position
        )

        # the sink is one more column without a value
        sink = q.new_full((heads_q,), -math.inf) if sinks is None else sinks.to(q.dtype)
        sink = sink[:, None, None].expand(batch, heads_q, seqlen_q, 1)
        logits = torch.cat([scores, sink], dim=-1)

        # a constant shift cancels, so it needs no gradient; it must be finite for fully masked rows
        shift = logits.detach().amax(dim=-1, keepdim=True)
        shift = shift.masked_fill(shift == -math.inf, 0.0)
        weights = torch.exp(logits - shift)
        total = weights.sum(dim=-1, keepdim=True)
        empty = total == 0.0
        total = total.masked_fill(empty, 1.0)
        lse = (shift + torch.log(total)).masked_fill(empty, -math.inf).squeeze(-1)

        p = weights[..., :seqlen_k] / total
        if dropout_p > 0.0:
            if rng_state is None:
                raise ValueError("dropout needs rng_state")
            keep = dropout_keep_mask(
                rng_state, dropout_p, batch, heads_q, seqlen_q, seqlen_k, first_sequence, corner
            )
            p = p.masked_fill(~keep, 0.0) * keep_scale(dropout_p)
        out = torch.einsum("bhij,bjhe->bihe", p, v)
        return out.masked_fill(~row_sees_any, 0.0), lse


def attention_scores(
    q: Tensor,
    k: Tensor,
    visible: Tensor,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    softmax_scale: float,
    softcap: float,
    position: int | None = None,
) -> Tensor:
    """Return the scores ``[batch, heads_q, seqlen_q, seqlen_k]``, -inf where a key is hidden.

    With a bias, a row whose scores are all at most ``LEAST_SCORE`` sees no key.
    """
    seqlen_q, seqlen_k = visible.shape[-2:]
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * softmax_scale
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        positions = _positions(seqlen_q, seqlen_k, q.device, position)
        distance = (positions - torch.arange(seqlen_k, device=q.device)).abs()
        scores = scores - alibi_slopes.to(q.dtype)[..., None, None] * distance
    if bias is not None:
        scores = scores + bias.to(q.dtype)
    scores = scores.masked_fill(~visible, -math.inf)
    if bias is not None and seqlen_k > 0:
        scores = scores.masked_fill(scores.amax(-1, keepdim=True) <= LEAST_SCORE, -math.inf)
    return scores


def visible_keys(
    seqlen_q: int,
    seqlen_k: int,
    window_left: int,
    window_right: int,
    device: torch.device,
    position: int | None = None,
    spans: Tensor | None = None,
) -> Tensor:
    """Return True where a query sees a key; -1 is no limit.

    The result is bool ``[seqlen_q, seqlen_k]``, or with ``spans`` ``[batch or 1, 1, seqlen_q,
    seqlen_k]``, to broadcast against scores.
    """
    positions = _positions(seqlen_q, seqlen_k, device, position)
    key = torch.arange(seqlen_k, device=device)
    # the sum of a position and the largest integer would wrap around
    window_left = min(window_left, MAX_WINDOW)
    window_right = min(window_right, MAX_WINDOW)
    visible = torch.ones((seqlen_q, seqlen_k), dtype=torch.bool, device=device)
    if window_left >= 0:
        visible = visible & (key >= positions - window_left)
    if window_right >= 0:
        visible = visible & (key <= positions + window_right)
    if spans is not None:
        # [batch or 1, seqlen_q, n, seqlen_k]
        inside = (key >= spans[..., :1]) & (key < spans[..., 1:])
        visible = (visible & inside.any(dim=2))[:, None]
    return visible


def that_see_any(visible: Tensor) -> tuple[Tensor, Tensor]:
    """Return which queries see a key, and which keys a query sees.

    Both broadcast against queries and keys, ``[batch, tokens, heads, head_dim]``.
    """
    rows, keys = visible.any(dim=-1), visible.any(dim=-2)
    if visible.ndim == 4:
        rows, keys = rows[:, 0], keys[:, 0]
    return rows[..., None, None], keys[..., None, None]


def _positions(seqlen_q: int, seqlen_k: int, device: torch.device, first: int | None) -> Tensor:
    """Return the positions of the queries among the keys, ``[seqlen_q, 1]``."""
    first = seqlen_k - seqlen_q if first is None else first
    return torch.arange(seqlen_q, device=device)[:, None] + first


def round_output(
    out: Tensor, input_dtype: torch.dtype, out_dtype: torch.dtype | None, out_scale: Tensor | None
) -> Tensor:
    """Return ``out`` in the output's dtype; an FP8 output is scaled and saturated first."""
    if out_dtype is None:
        out_dtype = torch.bfloat16 if input_dtype in FP8_DTYPES else input_dtype
    if out_scale is not None:
        out = out / out_scale
    if out_dtype in FP8_DTYPES:
        limits = torch.finfo(out_dtype)
        out = out.clamp(limits.min, limits.max)
    return out.to(out_dtype)


def _scaled(x: Tensor, descale: Tensor | None) -> Tensor:
    """Return ``x`` in the dtype of the computation, times its scale per KV head."""
    x = x.to(compute_dtype(x))
    if descale is None:
        return x
    if descale.numel() == 1:
        return x * descale.to(x.dtype).reshape(())
    group = x.shape[2] // descale.shape[1]
    return x * descale.to(x.dtype).repeat_interleave(group, dim=1)[:, None, :, None]


def compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
