"""What the calls of one form have in common: flags, strides, tiles, and the kernels' arguments."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from attn_common import cdiv, detect
from torch import Tensor

from .._call import Options, Pattern, Tensors
from .._configs import Shape, Tile, backward_dkdv_tile, backward_dq_shape, padded_head_dim
from .._linked.host.forms import ACCESS_BYTES, interpreted
from .launch.runtime import (
    Launch,
    dense,
    has_whole_rows,
    is_aligned,
    row_bytes,
    token_strides,
    whole_rows,
)

NUMBERS = (
    "batch", "heads_q", "tokens_q", "tokens_k", "tiles", "span", "splits", "fills", "list_rows",
    "extent_k", "extent_q", "stride_table",
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


class Plan:
    """All of a call's launches that depends on its form alone: on no data, and on no token count.

    Made from one call's tensors, which went through ``readable``, and good for every call whose
    tensors differ in data only, or, packed, in the number of tokens.
    """

    def __init__(self, x: Tensors, pattern: Pattern, options: Options) -> None:
        q, k, v = x.q, x.k, x.v
        self.options, self.pattern = options, pattern
        self.platform = detect(q.device)
        self.itemsize = q.element_size()
        self.is_packed = x.cu_seqlens_q is not None
        self.heads_q, head_dim = q.shape[-2:]
        self.heads_k, self.head_dim_v = v.shape[-2:]
        self.group = self.heads_q // self.heads_k
        self.batch = q.shape[0] if x.cu_seqlens_q is None else x.cu_seqlens_q.shape[0] - 1
        # a packed grid counts tiles of all sequences at once
        self.grid_batch = 1 if self.is_packed else self.batch
        # tokens that the layout's rows and columns cover
        self.extent_q = pattern.rows * pattern.block_q
        self.extent_k = pattern.cols * pattern.block_k
        # what the choice of a tile of queries asks for
        self.choice = (
            max(head_dim, self.head_dim_v), self.itemsize, pattern.block_q, self.group,
            pattern.is_shared, pattern.rows_alike,
        )  # fmt: skip
        self.token_bytes = (head_dim + self.head_dim_v) * self.itemsize
        self.strides = (*token_strides(q), *token_strides(k), *token_strides(v))
        self.constants: dict[str, Any] = {
            "GROUP": self.group,
            "HEAD_DIM": head_dim,
            "HEAD_DIM_V": self.head_dim_v,
            "BLOCK_D": padded_head_dim(head_dim),
            "BLOCK_DV": padded_head_dim(self.head_dim_v),
            "ROW_BYTES": row_bytes(q),
            "ROW_BYTES_V": row_bytes(v),
            "BLOCK_Q": pattern.block_q,
            "BLOCK_K": pattern.block_k,
            "IS_CAUSAL": options.causal,
            "PER_HEAD": not pattern.is_shared,
        }
        self._launches: dict[Any, Launch] = {}
        # of the backward for Hopper: how the output's gradient lies, and the tensor maps
        self.maps: tuple[Any, list[Any]] = (None, [])
        self._layout = layout_of(x)

    def fits(self, x: Tensors) -> bool:
        """Say whether tensors that were put away since still lie in memory as they did."""
        return layout_of(x) == self._layout

    def launch(
        self,
        kernel: Any,
        kind: Any,
        constants: dict[str, Any],
        names: tuple[str, ...] | None,
        tile: Tile | None,
        of: type[Launch] = Launch,
        **further: Any,
    ) -> Launch:
        """Return the launch of a kernel.

        Args:
            kernel: a jit function.
            kind: tells apart calls whose tensors differ.
            constants: its constants.
            names: which of these it takes; None means all.
            tile: on what each program works, if on tiles of scores.
            of: the kind of launch.
            further: more constants, and compiler options.
        """
        key = kernel.__name__, kind
        known = self._launches.get(key)
        if known is not None:
            return known
        constants = {name: constants[name] for name in names or constants} | further
        if tile is not None:
            constants |= {
                "BLOCK_M": tile.block_m,
                "BLOCK_N": tile.block_n,
                "PRECISION": tile.precision,
                "UPCAST": interpreted(),
                "num_warps": tile.num_warps,
                "num_stages": tile.num_stages,
            }
        return self._launches.setdefault(key, of(kernel, constants))

    @functools.cached_property
    def backward_tiles(self) -> QueryTiles:
        """The tiles of the pass that makes dq."""
        return QueryTiles(self, backward_dq_shape(self.platform, *self.choice))

    @functools.cached_property
    def backward_tile(self) -> Tile:
        """The tile of the pass that makes dk and dv."""
        return backward_dkdv_tile(self.platform, *self.choice[:3])

    def sizes(self, q: Tensor, k: Tensor) -> tuple[int, int, int, int]:
        """Return the sizes with which every kernel's numbers begin."""
        return self.batch, self.heads_q, q.shape[-3], k.shape[-3]

    def tiles_k(self, tokens_k: int, block: int) -> int:
        """Return tiles of keys per head; for packed tensors the slots that hold them."""
        return tokens_k // block + self.batch + 2 if self.is_packed else cdiv(tokens_k, block)

    def span_k(self, tokens_q: int) -> int:
        """Return how many key heads' queries, of the whole group, the second-level cache holds."""
        fitting = L2_BYTES // max(1, tokens_q * self.token_bytes * self.group)
        return min(max(1, fitting), max(1, self.batch * self.heads_k))


class QueryTiles:
    """How programs share the queries of a form, in tiles of one shape."""

    def __init__(self, plan: Plan, shape: Shape) -> None:
        self.shape, self.tile, self._plan = shape, shape.tile, plan
        pattern = plan.pattern
        packs = cdiv(plan.group, shape.heads)
        # programs that share a tile of positions
        self.units = plan.heads_k * packs
        # owners that a list of a unit has
        self.list_rows = cdiv(pattern.rows, max(shape.span // pattern.block_q, 1))
        self.constants = {
            **plan.constants,
            "POSITIONS": shape.positions,
            "HEADS": shape.heads,
            "PACKS": packs,
            "SPAN": shape.span,
            "ROW_MEMBERS": 1 if shape.pack > 1 else max(shape.span // pattern.block_q, 1),
            "HEAD_MEMBERS": shape.pack,
        }

    def count(self, tokens_q: int, tokens_k: int) -> int:
        """Return tiles of positions per unit; for packed tensors the slots that hold them."""
        positions = self.shape.positions
        if self._plan.is_packed:
            return tokens_q // positions + 2 * self._plan.batch + 4
        if tokens_q == 0:
            return 0
        return cdiv(tokens_k, positions) - (tokens_k - tokens_q) // positions

    def programs(self, tiles: int) -> int:
        """Return how many programs own so many tiles of each unit."""
        return tiles * self.units * self._plan.grid_batch

    def span(self, tokens_k: int) -> int:
        """Return how many units' keys and values the second-level cache holds together."""
        plan = self._plan
        per_head = self.units // plan.heads_k
        fitting = per_head * (L2_BYTES // max(1, tokens_k * plan.token_bytes))
        return min(max(1, fitting), max(1, plan.batch * self.units))


class BackwardInputs(NamedTuple):
    """What every backward kernel reads, in the order in which they take it."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    lse2: Tensor
    delta: Tensor
    # those that come last
    offsets: tuple[Tensor | None, Tensor | None]

    @property
    def dout_strides(self) -> tuple[int, int, int]:
        return token_strides(self.dout)


def layout_of(x: Tensors) -> list[Any]:
    """Return how the large tensors lie in memory, and where between two accesses they begin."""
    return [(t.stride(), t.data_ptr() % ACCESS_BYTES) for t in (x.q, x.k, x.v)]


def is_served_as_is(x: Tensors) -> bool:
    """Say whether the kernels may read tensors of this form where they are."""
    return all(has_whole_rows(t) and is_aligned(t) for t in (x.q, x.k, x.v))


def readable(x: Tensors) -> Tensors:
    """Return the tensors as the kernels may read them; heads may have become wider."""
    return Tensors(whole_rows(x.q), whole_rows(x.k), whole_rows(x.v), *map(dense, x[3:]))


@functools.cache
def processors(device: torch.device) -> int:
    """Return how many multiprocessors a device has."""
    if device.type != "cuda":
        return 4 if device.type == "cpu" else PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
