"""The host side of the Hopper kernels: which calls they take, tiles, tensor maps, the launch."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from attn_common import cdiv, detect
from torch import Tensor

from .._configs import padded_head_dim
from .runtime import aligned, dense, on_device_of

MAX_HEAD_DIM = 256
# queries of a sequence of which a large part lies on the diagonal's tiles
SHORT = 2048
# windows beyond any length are the same window; keeps the kernels' int32 sums from wrapping
MAX_WINDOW = 2**30
# what programs that run at the same time should read together
L2_BYTES = 32 * 2**20
# coordinates of a ragged tensor map; see ``hopper.coordinates``
RAGGED_ROWS = 1 << 30
RAGGED_EXTENT = 0x7FFF0000
RAGGED_STRIDE = 1 << 34


@dataclass(frozen=True)
class HopperTile:
    """How a program divides its work; every warpgroup has 64 rows."""

    warpgroups: int
    block_n: int
    stages_k: int
    stages_v: int
    share: bool = False  # the output leaves through the queries' memory
    buffers_q: int = 1
    pipeline: bool = False  # the walk does not stop between tiles of queries
    hold: bool = False  # keys are kept until their softmax is done
    rows: int = 64

    @property
    def block_m(self) -> int:
        return self.warpgroups * self.rows

    @property
    def registers(self) -> int:
        """Registers a thread, at the start."""
        return 65536 // (128 * (self.warpgroups + 1)) // 8 * 8


@functools.cache
def hopper_tile(head_dim: int, is_causal: bool, is_short: bool = False) -> HopperTile:
    """Return the tile for the wider of the two head dimensions.

    ``is_short`` is about sequences that all have one length: where they differ, a sequence's
    result may not depend on its neighbours.
    """
    width = padded_head_dim(head_dim)
    if width <= 64:
        if not is_causal:
            return HopperTile(3, 128, 2, 2)
        # three warpgroups have more rows that see nothing of a tile
        return HopperTile(2 if is_short else 3, 128, 3, 3, hold=True)
    if width <= 128:
        if is_causal:
            return HopperTile(2, 128, 3, 2, hold=True)
        return HopperTile(2, 128, 2, 2, buffers_q=2, pipeline=True)
    if is_causal:
        return HopperTile(2, 64, 3, 2, share=True, hold=True)
    return HopperTile(2, 64, 2, 3, share=True)


def serves_forward(
    q: Tensor, v: Tensor, bias: Tensor | None, rng_state: Tensor | None, softmax_scale: float
) -> bool:
    """Say whether the Hopper kernel takes a call, on a Hopper GPU with a Triton that has Gluon."""
    head_dim, head_dim_v = q.shape[-1], v.shape[-1]
    return (
        q.dtype in (torch.float16, torch.bfloat16)
        and bias is None
        and rng_state is None
        and softmax_scale > 0
        and 32 < max(head_dim, head_dim_v) <= MAX_HEAD_DIM
        and head_dim % 8 == 0
        and head_dim_v % 8 == 0
        and v.numel() > 0
        and detect(q.device).is_hopper
        and has_gluon()
    )


@functools.cache
def has_gluon() -> bool:
    """Whether this Triton has the language that the kernels are written in."""
    try:
        from . import gluon_compat  # noqa: F401
    except (ImportError, AttributeError):
        return False
    return True


# the counters from which programs take their tiles, zero between launches, one a stream
_tickets: dict[tuple[int | None, int], Tensor] = {}


def _ticket(device: torch.device) -> Tensor:
    if device.type == "meta":
        return torch.empty(1, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        # the graph may be replayed on any stream
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = device.index, torch.cuda.current_stream(device).cuda_stream
    ticket = _tickets.get(key)
    if ticket is None:
        ticket = _tickets[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return ticket


def _strides(x: Tensor) -> tuple[int, ...]:
    """Strides of batch, head and token; those that are never taken as if the tensor were dense."""
    *sizes, width = x.shape
    strides = list(x.stride()[:-1])
    dense = width
    for axis in reversed(range(len(sizes))):
        if sizes[axis] == 1:
            strides[axis] = dense
        dense *= sizes[axis]
    batch, token, head = strides if x.ndim == 4 else (dense, *strides)
    return batch, head, token


def _mappable(x: Tensor, ragged: bool) -> Tensor:
    """Return the tensor as the copy engine can read it, a copy if it has to be."""
    x = aligned(x)
    batch, head, token = _strides(x)
    # a ragged map finds a sequence by a number of tokens
    fits = min(batch, head, token) > 0 and not (ragged and batch % token)
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def tensor_map(x: Tensor, rows: int, ragged: bool) -> Any:
    """Describe a tensor to the copy engine: tiles of ``rows`` tokens of one head."""
    from .gluon_compat import TensorDescriptor

    *_, tokens, heads, width = x.shape
    batch, head, token = _strides(x)
    if ragged:
        shape = [RAGGED_EXTENT, RAGGED_EXTENT, heads, RAGGED_ROWS, width]
        strides = [RAGGED_STRIDE - token, token, head, token, 1]
    else:
        shape = [1, x.shape[0], heads, tokens, width]
        strides = [batch * x.shape[0], batch, head, token, 1]
    block = (1, 1, 1, rows, padded_head_dim(width))
    return TensorDescriptor(x, shape, strides, list(block), _layout(block, x.dtype))


@functools.cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    from .gluon_compat import gl

    names = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
    return gl.NVMMASharedLayout.get_default_for(list(block), names[dtype])


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "meta":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch_forward_hopper(
    q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, bias, alibi_slopes, sinks,
    q_descale, k_descale, v_descale, out_scale, rng_state, max_seqlen_q, max_seqlen_k,
    softmax_scale, window_left, window_right, softcap, dropout_p, out_dtype, tile=None,
):  # fmt: skip
    """Run the forward operator on inputs that ``serves_forward`` took; see ``_ops.py``."""
    from .hopper_forward import forward_kernel

    ragged_q = cu_seqlens_q is not None
    ragged_k = ragged_q or seqused_k is not None
    q, k, v = _mappable(q, ragged_q), _mappable(k, ragged_k), _mappable(v, ragged_k)
    cu_seqlens_q, cu_seqlens_k = dense(cu_seqlens_q), dense(cu_seqlens_k)
    alibi_slopes, sinks, seqused_k = dense(alibi_slopes), dense(sinks), dense(seqused_k)
    is_packed = cu_seqlens_q is not None
    batch = cu_seqlens_q.shape[0] - 1 if is_packed else q.shape[0]
    tokens_q, heads_q, head_dim = q.shape[-3:]
    tokens_k, heads_k, head_dim_v = v.shape[-3:]
    group = heads_q // heads_k
    out = torch.empty((*q.shape[:-1], head_dim_v), dtype=out_dtype or q.dtype, device=q.device)
    lse_shape = (heads_q, tokens_q) if is_packed else (batch, heads_q, tokens_q)
    lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
    if batch == 0:  # a packed call may hold nothing but padding
        return out.zero_(), lse.fill_(-math.inf)
    is_short = not is_packed and tokens_q <= SHORT
    tile = tile or hopper_tile(max(head_dim, head_dim_v), window_right >= 0, is_short)
    if is_packed:
        tiles = tokens_q // tile.block_m + batch + 2  # slots
        total = tiles * heads_q
    else:
        tiles = cdiv(tokens_q, tile.block_m)
        total = tiles * heads_q * batch
    if total == 0:
        return out, lse
    token_bytes = (head_dim + head_dim_v) * q.element_size()
    heads = batch * heads_q
    span = min(max(1, group * (L2_BYTES // max(1, tokens_k * token_bytes))), heads)
    last = span + heads % span
    pitches = [_strides(x)[0] // _strides(x)[2] for x in (k, v)]
    with on_device_of(q):
        programs = min(_multiprocessors(q.device), total)
        forward_kernel[(programs,)](
            tensor_map(q, tile.rows, ragged_q),
            tensor_map(k, tile.block_n, ragged_k),
            tensor_map(v, tile.block_n, ragged_k),
            tensor_map(out, tile.rows, ragged_q),
            lse, _ticket(q.device), alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, seqused_k,
            softmax_scale, softcap, min(window_left, MAX_WINDOW), min(window_right, MAX_WINDOW),
            batch, heads_q, tokens_q, tokens_k, tiles, span, last, total, *pitches,
            heads_q if alibi_slopes is not None and alibi_slopes.ndim == 2 else 0,
            GROUP=group,
            HAS_LEFT=window_left >= 0,
            HAS_RIGHT=window_right >= 0,
            HAS_SOFTCAP=softcap != 0.0,
            RAGGED_Q=ragged_q,
            RAGGED_K=ragged_k,
            WARPGROUPS=tile.warpgroups,
            ROWS=tile.rows,
            BLOCK_N=tile.block_n,
            HEAD_DIM=padded_head_dim(head_dim),
            HEAD_DIM_V=padded_head_dim(head_dim_v),
            STAGES_K=tile.stages_k,
            STAGES_V=tile.stages_v,
            BUFFERS_Q=tile.buffers_q,
            SHARE=tile.share and padded_head_dim(head_dim) == padded_head_dim(head_dim_v),
            PIPELINE=tile.pipeline,
            HOLD=tile.hold,
            num_warps=4,
            maxnreg=tile.registers,
            enable_fp_fusion=True,  # triton 3.10 turns the default round
        )  # fmt: skip
    return out, lse
