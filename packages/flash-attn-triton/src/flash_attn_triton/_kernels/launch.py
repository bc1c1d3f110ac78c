"""What every launch has in common: the arguments that all kernels take, and the call itself."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
from attn_common import cdiv
from torch import Tensor
from triton.compiler import CompiledKernel

from .._configs import Tile, padded_head_dim

# windows beyond any length are the same window; keeps the kernels' int32 sums from wrapping
MAX_WINDOW = 2**30
# The kernels take numbers and pointers as they come. A variant per value or alignment would give a
# stride its own rounding and a length its own compilation, and would have to be looked up per call.
NUMBERS = (
    "batch", "heads_q", "tokens_q", "tokens_k", "tiles", "span",
    "window_left", "window_right", "dropout_threshold",
    *(f"stride_{x}{axis}" for x in ("q", "k", "v", "do") for axis in "bsh"),
    *(f"stride_bias_{axis}" for axis in "bhmn"), "stride_alibi_b",
)  # fmt: skip
POINTERS = (
    "q_ptr", "k_ptr", "v_ptr", "dout_ptr", "bias_ptr", "alibi_slopes_ptr", "sinks_ptr",
    "q_descale_ptr", "k_descale_ptr", "v_descale_ptr", "out_scale_ptr", "rng_state_ptr",
    "cu_seqlens_q_ptr", "cu_seqlens_k_ptr", "seqused_k_ptr",
)  # fmt: skip
MAX_INT32 = 2**31 - 1
# widest access to memory, in bytes
ACCESS = 16
# what programs that run at the same time should read together
L2_BYTES = 32 * 2**20


class Problem:
    """One call's sizes, flags and strides, in the order in which the kernels take them."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        seqused_k: Tensor | None,
        bias: Tensor | None,
        alibi_slopes: Tensor | None,
        sinks: Tensor | None,
        rng_state: Tensor | None,
        softmax_scale: float,
        window_left: int,
        window_right: int,
        softcap: float,
        dropout_p: float,
    ) -> None:
        self.is_packed = cu_seqlens_q is not None
        self.tokens_q, self.heads_q, head_dim = q.shape[-3:]
        self.tokens_k, self.heads_k, head_dim_v = v.shape[-3:]
        self.group = self.heads_q // self.heads_k
        self.batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        self.lse_shape = (
            (self.heads_q, self.tokens_q)
            if self.is_packed
            else (self.batch, self.heads_q, self.tokens_q)
        )
        self.widest_head = max(head_dim, head_dim_v)
        # a packed grid counts blocks of all sequences at once
        self.grid_batch = 1 if self.is_packed else self.batch
        self._token_bytes = (head_dim + head_dim_v) * q.element_size()
        # nothing between the products and the softmax but the scale
        self.is_plain = bias is None and alibi_slopes is None and softcap == 0.0
        self.tensors = (
            bias, dense(alibi_slopes), dense(sinks), rng_state,
            dense(cu_seqlens_q), dense(cu_seqlens_k), dense(seqused_k),
        )  # fmt: skip
        # the sinks are in the LSE
        self.backward_tensors = (*self.tensors[:2], *self.tensors[3:])
        self.scalars = (
            softmax_scale, softcap, 1.0 / (1.0 - dropout_p),
            min(round(dropout_p * 2**32), 2**32 - 1),
            min(window_left, MAX_WINDOW), min(window_right, MAX_WINDOW),
            self.batch, self.heads_q, self.tokens_q, self.tokens_k,
        )  # fmt: skip
        self.strides = (
            *token_strides(q), *token_strides(k), *token_strides(v),
            *bias_strides(bias),
            self.heads_q if alibi_slopes is not None and alibi_slopes.ndim == 2 else 0,
        )  # fmt: skip
        self.constants: dict[str, Any] = {
            "GROUP": self.group,
            "HEAD_DIM": head_dim,
            "HEAD_DIM_V": head_dim_v,
            "BLOCK_D": padded_head_dim(head_dim),
            "BLOCK_DV": padded_head_dim(head_dim_v),
            "ROW_BYTES": row_bytes(q),
            "ROW_BYTES_V": row_bytes(v),
            "HAS_LEFT": window_left >= 0,
            "HAS_RIGHT": window_right >= 0,
            "HAS_SOFTCAP": softcap != 0.0,
            "BIAS_BYTES": 0 if bias is None else bias_bytes(bias),
        }

    def tiles_q(self, block: int) -> int:
        """Blocks of queries per head; for packed tensors the slots that hold them."""
        return self._tiles(self.tokens_q, block)

    def tiles_k(self, block: int) -> int:
        """Blocks of keys per head, likewise."""
        return self._tiles(self.tokens_k, block)

    def span_q(self) -> int:
        """How many query heads' keys and values the second-level cache holds together."""
        fitting = self.group * (L2_BYTES // max(1, self.tokens_k * self._token_bytes))
        return min(max(1, fitting), max(1, self.batch * self.heads_q))

    def span_k(self) -> int:
        """How many key heads' queries, of the whole group, it holds together."""
        fitting = L2_BYTES // max(1, self.tokens_q * self.group * self._token_bytes)
        return min(max(1, fitting), max(1, self.batch * self.heads_k))

    def _tiles(self, tokens: int, block: int) -> int:
        return tokens // block + self.batch + 2 if self.is_packed else cdiv(tokens, block)


class BackwardInputs(NamedTuple):
    """What every backward kernel reads."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    lse2: Tensor
    delta: Tensor

    @property
    def dout_strides(self) -> tuple[int, int, int]:
        return token_strides(self.dout)


def row_bytes(x: Tensor) -> int:
    """Return the alignment of every row of a tensor that went through ``aligned``."""
    return math.gcd(x.shape[-1] * x.element_size(), ACCESS)


def aligned(x: Tensor) -> Tensor:
    """Return the tensor with unit column stride and aligned rows, a copy if it has to be."""
    unit = row_bytes(x) // x.element_size()
    fits = x.data_ptr() % ACCESS == 0 and (x.stride(-1) == 1 or x.shape[-1] == 1)
    for size, stride in zip(x.shape[:-1], x.stride(), strict=False):
        fits = fits and (stride % unit == 0 or size <= 1)
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def token_strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of batch, token and head; a packed tensor has no batch."""
    return x.stride()[:3] if x.ndim == 4 else (0, *x.stride()[:2])  # type: ignore[return-value]


def dense(x: Tensor | None) -> Tensor | None:
    """Return a small tensor as the kernels index it."""
    return None if x is None else x.contiguous()


def bias_bytes(bias: Tensor) -> int:
    """Return how much of a row can be read at once: a whole access, or one element."""
    *rows, columns = bias_strides(bias)
    begins = (bias.data_ptr(), *(stride * bias.element_size() for stride in rows))
    whole = columns == 1 and all(begin % ACCESS == 0 for begin in begins)
    return ACCESS if whole else bias.element_size()


def bias_strides(bias: Tensor | None) -> tuple[int, ...]:
    """Strides of a four-dimensional bias, 0 where it is broadcast."""
    if bias is None:
        return (0, 0, 0, 0)
    return tuple(
        0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride(), strict=True)
    )


def expand_descales(
    *descales: Tensor | None, problem: Problem
) -> tuple[tuple[Tensor | None, ...], bool]:
    """Bring the descales to one form: one element each, or ``[batch, heads_k]`` each."""
    if all(d is None or d.numel() == 1 for d in descales):
        return tuple(map(dense, descales)), False
    shape = (problem.batch, problem.heads_k)
    full = (d if d is None or d.ndim == 2 else d.reshape(1, 1) for d in descales)
    return tuple(d if d is None else d.expand(shape).contiguous() for d in full), True


def is_interpreted() -> bool:
    """Whether this process runs kernels in Triton's interpreter."""
    return bool(triton.knobs.runtime.interpret)


def on_device_of(x: Tensor) -> Any:
    """Make ``x``'s device the current one: Triton launches on that."""
    if x.device.type == "cpu" or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


# kernels that were launched before, by all that a compilation depends on
_compiled: dict[tuple[Any, ...], Any] = {}


def run(
    kernel: Any,
    grid: int,
    tile: Tile,
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[float, ...],
    constants: dict[str, Any],
) -> None:
    """Launch a one-dimensional grid on the first tensor's device; an empty grid is no launch.

    A second launch goes to the compiled kernel itself: Triton's own look-up reads every argument
    anew, which for as many as these takes several times as long as the rest of the call.
    """
    if grid == 0:
        return
    first = tensors[0]
    with on_device_of(first):
        key = (
            kernel.__name__, first.device.index, tile, *constants.values(),
            *[None if t is None else t.dtype for t in tensors],
            # an int's width follows its value
            max(numbers) > MAX_INT32 and tuple(n > MAX_INT32 for n in numbers),
        )  # fmt: skip
        compiled = _compiled.get(key)
        if compiled is not None:
            # what was constant then is not read now
            missing = len(kernel.params) - len(tensors) - len(numbers)
            compiled[grid, 1, 1](*tensors, *numbers, *(None,) * missing)
            return
        compiled = kernel[(grid,)](
            *tensors,
            *numbers,
            **constants,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            PRECISION=tile.precision,
            UPCAST=is_interpreted(),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            enable_fp_fusion=True,  # triton 3.10 turns the default round
        )
        if isinstance(compiled, CompiledKernel):
            _compiled[key] = compiled
