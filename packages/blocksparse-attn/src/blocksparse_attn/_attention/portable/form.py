"""Flags, sizes, strides and tiles of queries that all calls of one signature share."""

from __future__ import annotations

import functools
from typing import Any

import torch
from attn_common import cdiv, detect
from torch import Tensor

from ..._linked.host.forms import ACCESS_BYTES, Memory, interpreted
from ..._linked.launch.entries import flat
from ..._linked.launch.runtime import (
    MAX_COUNTS,
    Launch,
    dense,
    has_whole_rows,
    is_aligned,
    row_bytes,
    token_strides,
    whole_rows,
)
from ..._linked.portable.strides import Strides
from ..call import Options, Pattern, Tensors
from ..tiles import Shape, Tile, padded_head_dim
from . import arguments

# bytes that programs which run at the same time should read together
L2_BYTES = 32 * 2**20
# multiprocessors that are assumed if there is no GPU
PROCESSORS = 132


class Form:
    """The signature of a call, as its launches need it: no data, and no token count.

    It is made from the tensors of one call, as ``readable`` returns them. It holds for every call
    whose tensors differ only in data or, if packed, in the number of tokens.
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
        # a packed grid counts the tiles of all sequences together
        self.grid_batch = 1 if self.is_packed else self.batch
        # tokens that the layout's rows and columns cover
        self.extent_q = pattern.rows * pattern.block_q
        self.extent_k = pattern.cols * pattern.block_k
        self.widest = max(head_dim, self.head_dim_v)
        # the arguments of the functions that choose a tile of queries
        sizes = self.platform, self.widest, self.itemsize, pattern.block_q
        self.choice = *sizes, self.group, pattern.is_shared
        self.token_bytes = (head_dim + self.head_dim_v) * self.itemsize
        of_q, of_k, of_v = (Strides(*token_strides(t)) for t in (q, k, v))
        self._strides = {"q": of_q, "k": of_k, "v": of_v}
        self.constants = arguments.Options(
            GROUP=self.group,
            HEAD_DIM=head_dim,
            HEAD_DIM_V=self.head_dim_v,
            BLOCK_D=padded_head_dim(head_dim),
            BLOCK_DV=padded_head_dim(self.head_dim_v),
            ROW_BYTES=row_bytes(q),
            ROW_BYTES_V=row_bytes(v),
            BLOCK_Q=pattern.block_q,
            BLOCK_K=pattern.block_k,
            IS_CAUSAL=options.causal,
            PER_HEAD=not pattern.is_shared,
            TOP_LEFT=options.top_left,
        )
        self._layout = layout_of(x)

    def numbers(self, tokens_q: int, tokens_k: int, **others: Any) -> tuple[float, ...]:
        """Return the numbers of a launch of ``attention_kernel``; ``others`` are further fields."""
        return flat(
            arguments.Numbers(
                scale=self.options.softmax_scale,
                batch=self.batch,
                heads_q=self.heads_q,
                tokens_q=tokens_q,
                tokens_k=tokens_k,
                **self._strides,
                **others,
            )
        )

    def fits(self, x: Tensors) -> bool:
        """Say whether saved tensors still have the strides and the alignment of the forward."""
        return layout_of(x) == self._layout

    def tiles_k(self, tokens_k: int, block: int) -> int:
        """Return the number of tiles of keys per head; for packed tensors, an upper bound."""
        return tokens_k // block + self.batch + 2 if self.is_packed else cdiv(tokens_k, block)

    def lists_apart(self, of_heads: int, of_all: int) -> int:
        """Return the number of list owners per sequence; 0 if all sequences share their lists."""
        if not self.pattern.batch:
            return 0
        return of_all if self.pattern.is_shared else of_heads

    def span_k(self, tokens_q: int) -> int:
        """Return for how many key heads the second-level cache holds the queries of their group."""
        fitting = L2_BYTES // max(1, tokens_q * self.token_bytes * self.group)
        return min(max(1, fitting), max(1, self.batch * self.heads_k))


def diagonal_of(options: Options, tokens_q: int, tokens_k: int) -> int:
    """Return the position of the first query of sequences of one length."""
    return 0 if options.top_left else tokens_k - tokens_q


class QueryTiles:
    """How programs divide the queries of a call into tiles of one shape."""

    def __init__(self, form: Form, shape: Shape) -> None:
        self.shape, self.tile, self._form = shape, shape.tile, form
        self._numbers: Memory[tuple[float, ...]] = Memory(MAX_COUNTS)
        pattern = form.pattern
        packs = cdiv(form.group, shape.heads)
        # programs that share a tile of positions
        self.units = form.heads_k * packs
        # owners in the lists of a unit
        self.list_rows = cdiv(pattern.rows, max(shape.span // pattern.block_q, 1))
        self.list_stride = form.lists_apart(self.units * self.list_rows, self.list_rows)
        self.constants = form.constants._replace(
            POSITIONS=shape.positions,
            HEADS=shape.heads,
            PACKS=packs,
            SPAN=shape.span,
            ROW_MEMBERS=1 if shape.pack > 1 else max(shape.span // pattern.block_q, 1),
            HEAD_MEMBERS=shape.pack,
        )

    def numbers(
        self,
        x: Tensors,
        tiles: int,
        splits: int = 1,
        fills: bool = False,
        table: Tensor | None = None,
        dout: Strides = arguments.NO_STRIDES,
    ) -> tuple[float, ...]:
        """Return the numbers of a launch: the same object for the same arguments.

        Args:
            x: tensors of a call.
            tiles: number of tiles of positions per unit.
            splits: number of programs that share a tile.
            fills: whether the launch also writes the rows of padding.
            table: pages of a cache.
            dout: strides of dout.
        """
        tokens_q, tokens_k = x.q.shape[-3], x.k.shape[-3]
        apart = 0 if table is None else table.stride(0), rule_stride(x)
        form = tokens_q, tokens_k, tiles, splits, fills, apart, dout
        known = self._numbers.get(form)
        if known is None:
            numbers = self._form.numbers(
                tokens_q,
                tokens_k,
                tiles=tiles,
                span=self.span(tokens_k),
                list_rows=self.list_rows,
                list_stride=self.list_stride,
                extent=self._form.extent_k,
                dout=dout,
                splits=splits,
                fills=int(fills),
                table_stride=apart[0],
                rule_stride=apart[1],
            )
            known = self._numbers.keep(form, numbers)
        return known

    def count(self, tokens_q: int, tokens_k: int) -> int:
        """Return the number of tiles of positions per unit; for packed tensors, an upper bound."""
        positions = self.shape.positions
        if self._form.is_packed:
            return tokens_q // positions + 2 * self._form.batch + 4
        if tokens_q == 0:
            return 0
        diagonal = diagonal_of(self._form.options, tokens_q, tokens_k)
        return cdiv(diagonal + tokens_q, positions) - diagonal // positions

    def programs(self, tiles: int) -> int:
        """Return the number of programs for ``tiles`` tiles per unit."""
        return tiles * self.units * self._form.grid_batch

    def span(self, tokens_k: int) -> int:
        """Return for how many units the second-level cache holds the keys and values."""
        form = self._form
        per_head = self.units // form.heads_k
        fitting = per_head * (L2_BYTES // max(1, tokens_k * form.token_bytes))
        return min(max(1, fitting), max(1, form.batch * self.units))


def launch_of(kernel: Any, options: Any, of: type[Launch] = Launch, **compiler: int) -> Launch:
    return of(kernel, {"OPTIONS": options, **compiler})


def launch_on(kernel: Any, tile: Tile, constants: arguments.Options) -> Launch:
    """Return the launch of a kernel on tiles of scores."""
    options = constants._replace(
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        PRECISION=tile.precision,
        UPCAST=interpreted(),
    )
    return launch_of(kernel, options, num_warps=tile.num_warps, num_stages=tile.num_stages)


def layout_of(x: Tensors) -> list[Any]:
    """Return the strides of q, k and v, and their offsets from an aligned address."""
    return [(t.stride(), t.data_ptr() % ACCESS_BYTES) for t in (x.q, x.k, x.v)]


def is_served_as_is(x: Tensors) -> bool:
    """Say whether the kernels can read these tensors without a copy."""
    return all(has_whole_rows(t) and is_aligned(t) for t in (x.q, x.k, x.v))


def readable(x: Tensors) -> Tensors:
    """Return the tensors, copied where the kernels cannot read them; heads may become wider."""
    q, k, v, *others = x
    return Tensors(*map(whole_rows, (q, k, v)), *map(dense, others))


def rule_stride(x: Tensors) -> int:
    """Return the stride between the rules of two sequences; 0 if all share one."""
    return 0 if x.rule is None or len(x.rule) == 1 else x.rule.stride(0)


@functools.cache
def processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4 if device.type == "cpu" else PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
