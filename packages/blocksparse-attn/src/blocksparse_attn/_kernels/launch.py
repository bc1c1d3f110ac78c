"""What every launch has in common: the arguments that all kernels take."""

from __future__ import annotations

import functools
from typing import Any

import torch
from attn_common import cdiv
from torch import Tensor

from .._configs import Shape, Tile, padded_head_dim
from .runtime import Launch, is_interpreted, row_bytes

NUMBERS = (
    "batch", "heads_q", "tokens_q", "tokens_k", "tiles", "span", "splits", "list_rows", "extent_k",
    "extent_q", "stride_table",
    *(f"stride_{x}{axis}" for x in ("q", "k", "v", "do") for axis in "bsh"),
)  # fmt: skip
POINTERS = (
    "q_ptr", "k_ptr", "v_ptr", "out_ptr", "lse_ptr", "dout_ptr", "lse2_ptr", "delta_ptr", "dq_ptr",
    "dk_ptr", "dv_ptr", "begin_ptr", "whole_ptr", "items_ptr", "members_ptr", "cu_seqlens_q_ptr",
    "cu_seqlens_k_ptr", "block_table_ptr", "part_out_ptr", "part_lse_ptr",
)  # fmt: skip
# what programs that run at the same time should read together
L2_BYTES = 32 * 2**20
# multiprocessors of a GPU that is not there
PROCESSORS = 132


class Problem:
    """One call's sizes and strides, in the order in which the kernels take them."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        block_table: Tensor | None,
        crow: Tensor,
        cols: int,
        block_size: tuple[int, int],
        rows_alike: bool,
        causal: bool,
    ) -> None:
        self.is_packed = cu_seqlens_q is not None
        self.cu_seqlens = (cu_seqlens_q, cu_seqlens_k)
        self.block_table = block_table
        self.tokens_q, self.heads_q, self.head_dim = q.shape[-3:]
        self.heads_k, self.head_dim_v = v.shape[-2:]
        self.tokens_k = k.shape[-3]
        self.group = self.heads_q // self.heads_k
        self.batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        self.lse_shape = (
            (self.heads_q, self.tokens_q)
            if self.is_packed
            else (self.batch, self.heads_q, self.tokens_q)
        )
        self.itemsize = q.element_size()
        self.is_shared = crow.shape[0] == 1
        self.rows = crow.shape[1] - 1
        self.block_q, self.block_k = block_size
        # tokens that the layout's rows and columns cover
        self.extents = (self.rows * self.block_q, cols * self.block_k)
        self.causal = causal
        # what the choice of a tile of queries asks for
        self.choice = (
            max(self.head_dim, self.head_dim_v), self.itemsize, self.block_q, self.group,
            self.is_shared, rows_alike,
        )  # fmt: skip
        self.sizes = (self.batch, self.heads_q, self.tokens_q, self.tokens_k)
        self.strides = (*token_strides(q), *token_strides(k), *token_strides(v))
        self.constants: dict[str, Any] = {
            "GROUP": self.group,
            "HEAD_DIM": self.head_dim,
            "HEAD_DIM_V": self.head_dim_v,
            "BLOCK_D": padded_head_dim(self.head_dim),
            "BLOCK_DV": padded_head_dim(self.head_dim_v),
            "ROW_BYTES": row_bytes(q),
            "ROW_BYTES_V": row_bytes(v),
            "BLOCK_Q": self.block_q,
            "BLOCK_K": self.block_k,
            "IS_CAUSAL": causal,
            "PER_HEAD": not self.is_shared,
        }

    def constants_of(self, shape: Shape) -> dict[str, Any]:
        """Return the constants of a kernel whose programs own tiles of queries."""
        by_heads = shape.pack > 1
        return {
            **self.constants,
            "POSITIONS": shape.positions,
            "HEADS": shape.heads,
            "PACKS": cdiv(self.group, shape.heads),
            "SPAN": shape.span,
            "ROW_MEMBERS": 1 if by_heads else max(shape.span // self.block_q, 1),
            "HEAD_MEMBERS": shape.pack,
        }

    def units(self, shape: Shape) -> int:
        """Return how many programs share a tile of positions."""
        return self.heads_k * cdiv(self.group, shape.heads)

    def list_rows(self, shape: Shape) -> int:
        """Return how many owners a list of a unit has."""
        return cdiv(self.rows, max(shape.span // self.block_q, 1))

    def tiles_q(self, positions: int) -> int:
        """Return tiles of positions per unit; for packed tensors the slots that hold them."""
        if self.is_packed:
            return self.tokens_q // positions + 2 * self.batch + 4
        if self.tokens_q == 0:
            return 0
        return cdiv(self.tokens_k, positions) - (self.tokens_k - self.tokens_q) // positions

    def tiles_k(self, block: int) -> int:
        """Return tiles of keys per head, likewise."""
        if self.is_packed:
            return self.tokens_k // block + self.batch + 2
        return cdiv(self.tokens_k, block)

    def grid_batch(self) -> int:
        """Return how many times the tiles are to be counted."""
        return 1 if self.is_packed else self.batch

    def span_q(self, shape: Shape) -> int:
        """Return how many units' keys and values the second-level cache holds together."""
        row = (self.head_dim + self.head_dim_v) * self.itemsize
        units = self.units(shape)
        fitting = units // self.heads_k * (L2_BYTES // max(1, self.tokens_k * row))
        return min(max(1, fitting), max(1, self.batch * units))

    def span_k(self) -> int:
        """Return how many key heads' queries, of the whole group, it holds together."""
        row = (self.head_dim + self.head_dim_v) * self.itemsize * self.group
        fitting = L2_BYTES // max(1, self.tokens_q * row)
        return min(max(1, fitting), max(1, self.batch * self.heads_k))


def token_strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of batch (or page), token and head; a packed tensor has no batch."""
    return x.stride()[:3] if x.ndim == 4 else (0, *x.stride()[:2])  # type: ignore[return-value]


@functools.cache
def processors(device: torch.device) -> int:
    """Return how many multiprocessors a device has."""
    if device.type != "cuda":
        return 4 if device.type == "cpu" else PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def run(
    kernel: Any,
    grid: int,
    tile: Tile,
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[float, ...],
    constants: dict[str, Any],
) -> None:
    """Launch a one-dimensional grid of programs that own a tile each."""
    constants = {
        **constants,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "PRECISION": tile.precision,
        "UPCAST": is_interpreted(),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    Launch(kernel, constants)(grid, tensors, numbers)
