"""The signature of a call as numbers and constants, which all its launches share."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from attn_common import cdiv, detect
from torch import Tensor

from ..._linked.host.arguments import MAX_WINDOW
from ..._linked.host.forms import ACCESS_BYTES, Memory, interpreted
from ..._linked.host.tiles import Tile, padded_head_dim
from ..._linked.launch.runtime import (
    MAX_COUNTS,
    Launch,
    dense,
    has_whole_rows,
    is_aligned,
    token_strides,
    whole_rows,
)
from ..._linked.portable.strides import Strides
from ..._reference.philox import dropout_threshold, keep_scale
from ..call import Options, Tensors
from ..hopper_tiles import panels_of
from . import arguments

# most bytes that concurrent programs should read
L2_BYTES = 32 * 2**20
# programs and numbers of a launch
Work = tuple[int, tuple[float, ...]]


class Counted:
    """A launch whose grid and numbers are kept by what a signature leaves open.

    Calls with one signature differ in the strides of dout and, if packed, in numbers of tokens.
    """

    def __init__(self, launch: Launch, count: Callable[..., Work]) -> None:
        """Take a launch, and the function that returns its programs and numbers."""
        self.launch = launch
        self._count = count
        self._work: Memory[Work] = Memory(MAX_COUNTS)

    def work(self, key: Hashable, *counted: Any) -> Work:
        """Return grid and numbers; ``count`` takes ``counted`` if there is no such key yet."""
        return self._work.get(key) or self._work.keep(key, self._count(*counted))

    def __call__(self, key: Hashable, tensors: tuple[Tensor | None, ...], *counted: Any) -> None:
        """Launch with the work of a key."""
        grid, numbers = self.work(key, *counted)
        self.launch(grid, tensors, numbers)


class Form:
    """The signature of a call: everything its launches depend on except its data.

    It is made from one call's tensors, which have passed ``readable``. It holds for every call
    whose tensors differ only in data, or, if packed, in the numbers of tokens.
    """

    def __init__(self, x: Tensors, options: Options) -> None:
        q, v, alibi_slopes = x.q, x.v, x.alibi_slopes
        self.options = options
        self.platform = detect(q.device)
        self.itemsize = q.element_size()
        self.is_packed = x.cu_seqlens_q is not None
        # whether calls have only q, k and v; dropout's state is drawn after this is made
        self.is_plain = all(t is None for t in x[3:]) and options.dropout_p == 0.0
        self.heads_q, self.head_dim = q.shape[-2:]
        self.heads_k, self.head_dim_v = v.shape[-2:]
        self.group = self.heads_q // self.heads_k
        self.batch = q.shape[0] if x.cu_seqlens_q is None else x.cu_seqlens_q.shape[0] - 1
        # a packed grid counts blocks of all sequences at once
        self.grid_batch = 1 if self.is_packed else self.batch
        self.widest_head = max(self.head_dim, self.head_dim_v)
        self.block_d = padded_head_dim(self.head_dim, self.itemsize)
        self.block_dv = padded_head_dim(self.head_dim_v)
        self._token_bytes = (self.head_dim + self.head_dim_v) * self.itemsize
        self.scalars = arguments.Scalars(
            options.softmax_scale,
            options.softcap,
            keep_scale(options.dropout_p),
            dropout_threshold(options.dropout_p),
            # direct callers of the operators may pass wider windows than the functions do
            min(options.window_left, MAX_WINDOW),
            min(options.window_right, MAX_WINDOW),
            self.batch,
            self.heads_q,
        )
        has_slopes_by_sequence = alibi_slopes is not None and alibi_slopes.ndim == 2
        self.strides = arguments.InputStrides(
            *(Strides(*token_strides(t)) for t in (q, x.k, v)),
            arguments.BiasStrides(*bias_strides(x.bias)),
            self.heads_q if has_slopes_by_sequence else 0,
        )
        self.constants = arguments.Options(
            GROUP=self.group,
            HAS_LEFT=options.window_left >= 0,
            HAS_RIGHT=options.window_right >= 0,
            HAS_SOFTCAP=options.softcap != 0.0,
            BIAS_BYTES=0 if x.bias is None else bias_bytes(x.bias),
            SPANS=0 if x.spans is None else x.spans.shape[-2],
            SPANS_BATCH=x.spans is not None and not self.is_packed and x.spans.shape[0] > 1,
        )
        self._layout = layout_of(x)

    def fits(self, x: Tensors) -> bool:
        """Tell whether saved tensors still have the layout that the launcher was made for."""
        return layout_of(x) == self._layout

    def launch(
        self,
        kernel: Any,
        tile: Tile,
        options: arguments.Options | None = None,
        settle: bool = False,
    ) -> Launch:
        """Return the launch of a kernel that works on tiles of scores."""
        shape = arguments.Tile(
            HEAD_DIM=self.head_dim,
            HEAD_DIM_V=self.head_dim_v,
            BLOCK_D=self.block_d,
            BLOCK_DV=self.block_dv,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            PRECISION=tile.precision,
            UPCAST=interpreted(),
            SETTLE=settle and self.platform.is_hopper and not interpreted(),
        )
        kind = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        return Launch(kernel, {"OPTIONS": options or self.constants, "TILE": shape, **kind})

    def tiles(self, tokens: int, block: int) -> int:
        """Blocks of tokens per head; packed: slots for them."""
        return tokens // block + self.batch + 2 if self.is_packed else cdiv(tokens, block)

    def span_q(self, tokens_k: int) -> int:
        """The number of query heads whose keys and values fit into the L2 cache."""
        fitting = self.group * (L2_BYTES // max(1, tokens_k * self._token_bytes))
        return min(max(1, fitting), max(1, self.batch * self.heads_q))

    def span_k(self, tokens_q: int) -> int:
        """The number of key heads whose queries, of the whole group, fit into the L2 cache."""
        fitting = L2_BYTES // max(1, tokens_q * self.group * self._token_bytes)
        return min(max(1, fitting), max(1, self.batch * self.heads_k))

    def span_sums(self, tokens_q: int, shares: int = 1) -> int:
        """``span_k`` with the sums of dq, which are read and written: a power of two, at least 2.

        ``shares`` programs share the query heads of a key head, and each counts as a head. Numbers
        that are no power of two often leave a small remainder, whose longest walks begin last. With
        one head all programs would add to the same sums.
        """
        fitting = L2_BYTES // max(1, self.group // shares * self.walked_bytes(tokens_q))
        return 1 << max(1, fitting.bit_length() - 1)

    def walked_bytes(self, tokens_q: int) -> int:
        """The bytes of a query head that the Hopper backward reads, and those of its sums of dq."""
        return tokens_q * (self._token_bytes + 2 * 4 * sum(panels_of(self.head_dim)))


def layout_of(x: Tensors) -> tuple[Any, ...]:
    """Return the strides of the large tensors, and their alignment."""
    q, k, v, bias = x.q, x.k, x.v, x.bias
    # 0 if all addresses are aligned
    begin = (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ACCESS_BYTES
    if bias is None:
        return begin, q.stride(), k.stride(), v.stride()
    return begin | bias.data_ptr() % ACCESS_BYTES, q.stride(), k.stride(), v.stride(), bias.stride()


def bias_bytes(bias: Tensor) -> int:
    """Return how many bytes of a bias's row can be read at once: a whole access, or one element."""
    *rows, columns = bias_strides(bias)
    begins = (bias.data_ptr(), *(stride * bias.element_size() for stride in rows))
    whole = columns == 1 and all(begin % ACCESS_BYTES == 0 for begin in begins)
    return ACCESS_BYTES if whole else bias.element_size()


def bias_strides(bias: Tensor | None) -> tuple[int, ...]:
    """Return the strides of a four-dimensional bias, 0 where it is broadcast."""
    if bias is None:
        return (0, 0, 0, 0)
    return tuple(
        0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride(), strict=True)
    )


def is_served_as_is(x: Tensors) -> bool:
    """Tell whether the kernels can read the tensors without a copy."""
    return all(has_whole_rows(t) and is_aligned(t) for t in (x.q, x.k, x.v))


def readable(x: Tensors) -> Tensors:
    """Return tensors that the kernels can read, copied with wider heads where necessary."""
    return x._replace(q=whole_rows(x.q), k=whole_rows(x.k), v=whole_rows(x.v))


def expand_descales(
    descales: tuple[Tensor | None, ...], shape: tuple[int, int]
) -> tuple[Tensor | None, ...]:
    """Bring the descales to one shape: one element each, or ``[batch, heads_k]`` each."""
    if all(d is None or d.numel() == 1 for d in descales):
        return tuple(map(dense, descales))
    full = (d if d is None or d.ndim == 2 else d.reshape(1, 1) for d in descales)
    return tuple(d if d is None else d.expand(shape).contiguous() for d in full)
