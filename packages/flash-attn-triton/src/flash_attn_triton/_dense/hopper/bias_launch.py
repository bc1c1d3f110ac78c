"""The host side of an additive bias for Hopper: its tensor maps, and the sum of its gradient."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from attn_common import cdiv, round_up
from torch import Tensor

from ..._linked.hopper.sizes import ROWS
from ..._linked.hopper.tma import MapForm
from ..._linked.host.forms import ACCESS_BYTES
from ..._linked.launch.kernels import Kernel
from ..._linked.launch.runtime import Launch, has_whole_rows, is_aligned, whole_rows
from ..call import Tensors
from ..hopper_tiles import HopperBackwardTile
from ..portable.form import Form
from .backward.arguments import BiasSumNumbers, BiasSumOptions, BiasSumTensors

sum_bias_kernel = Kernel(__package__, ".backward.sum_bias", "sum_bias_kernel")

# rows of a map: more than a GPU holds, and still an int32
MOST_ROWS = 0x7FFF0000
# most bytes of stored gradients of scores
MOST_DS_BYTES = 1 << 32
# queries, and keys, per program that sums
BLOCK = 64
# most gradients of scores that are added up in the dtype of q: each addition rounds
MOST_TOGETHER = 4
# a backward may be divided into launches that take at most so many times the rounds of one launch
MOST_ROUNDS = 1.05


class BiasForm(MapForm):
    """The tensor map of a bias, in boxes of ``rows`` queries and ``columns`` keys.

    The map is ``[batch, heads, queries, keys]``, with size 1 where the bias is broadcast. A bias
    that TMA cannot read is copied: its rows are no multiple of 16 bytes, or its keys not adjacent.
    """

    def __init__(self, bias: Tensor, rows: int, columns: int) -> None:
        single = once(bias)
        self.has_batch, self.has_heads, self.has_rows, _ = (n > 1 for n in single.shape)
        self._is_whole = has_whole_rows(single) and is_aligned(single)
        super().__init__(_mappable(single), rows if self.has_rows else 1, columns, ragged=False)

    @property
    def is_in_place(self) -> bool:
        return self._is_whole and super().is_in_place

    def base_of(self, bias: Tensor) -> Tensor:
        return super().base_of(_mappable(once(bias)))


def dimensions_of(bias: BiasForm | None) -> dict[str, bool]:
    """Return the constants ``BIAS_*``: the dimensions over which a bias is not broadcast."""
    return {
        "BIAS_BATCH": bias is not None and bias.has_batch,
        "BIAS_HEADS": bias is not None and bias.has_heads,
        "BIAS_ROWS": bias is not None and bias.has_rows,
    }


def once(bias: Tensor) -> Tensor:
    """Return a bias with size 1 in each dimension that is broadcast, by size or by stride."""
    for axis, stride in enumerate(bias.stride()):
        if stride == 0:
            bias = bias.narrow(axis, 0, 1)
    return bias


def _mappable(bias: Tensor) -> Tensor:
    """Return a bias with whole rows, in the order of dimensions of ``MapForm``."""
    return whole_rows(bias).transpose(1, 2)


class Together(NamedTuple):
    """The number of neighbouring sequences, or key heads, that share a bias and run together."""

    sequences: int = 1
    heads: int = 1


def side_by_side(form: Form, bias: BiasForm | None) -> Together:
    """Return how many sequences or heads run side by side: the largest divisor to MOST_TOGETHER.

    Then a tile of the bias is read from memory once, and is still in the L2 cache when gradients of
    scores are added up.
    """
    if bias is None or not bias.has_rows or form.is_packed:
        return Together()
    if not bias.has_batch and form.batch > 1:
        return Together(sequences=_even_part(form.batch))
    return Together() if bias.has_heads else Together(heads=_even_part(form.heads_k))


def _even_part(count: int) -> int:
    return max(n for n in range(1, MOST_TOGETHER + 1) if count % n == 0)


class BiasSum:
    """The gradient of a bias, from the gradients of scores that a backward stores.

    Up to ``MOST_TOGETHER`` sequences or heads that share a bias add up their gradients by TMA, in
    the dtype of q. Their programs run side by side, so the sums are in the L2 cache. One program
    stores and the rest add, in the order of their arrival; see ``shared_bias``. If more sequences
    or heads share the bias, ``sum_bias_kernel`` adds up the sums.

    With ordered additions, each such sequence or head has its own launch of the backward: the first
    launch stores its gradients, later launches add theirs. If the launches did not add up
    everything they were slower, so all gradients are then stored and summed by the kernel.
    """

    def __init__(
        self,
        form: Form,
        x: Tensors,
        tile: HopperBackwardTile,
        processors: int,
        together: Together | None = None,
    ) -> None:
        """Prepare the launch of the sum for a GPU with ``processors`` multiprocessors.

        ``together`` is the result of ``side_by_side``, or None with ordered additions.
        """
        self._form = form
        self._tokens = tokens_q, tokens_k = x.q.shape[1], x.k.shape[1]
        planes = x.bias.shape[0], x.bias.shape[1]
        programs = form.batch * form.heads_k * cdiv(tokens_k, tile.block_n)
        # into how many launches sequences or heads are divided
        self.parts = Together()
        if together is None:
            together = self.parts = self._divide(planes, programs, processors)
        self.together = together
        is_shared = max(together) > max(self.parts)
        self._planes = form.batch // together.sequences, form.heads_q // together.heads
        # whole rows, as TMA writes them
        columns = round_up(tokens_k, ACCESS_BYTES // x.q.element_size())
        self._shape = *self._planes, tokens_q, columns
        self._is_direct = self._shape == x.bias.shape and form.options.dropout_p == 0.0
        # the backward skips fully masked tiles, but here they are part of the result
        clears = self._is_direct and form.constants.HAS_RIGHT
        self.constants = {"SHARES_DS": is_shared, "CLEARS_DS": is_shared and clears}
        # how many first rows are cleared here: all, or the rows before the first whole tile of
        # queries that see no key, which ``clear_hidden`` skips
        blind = max(tokens_q - tokens_k - form.scalars.window_right, 0)
        rows = blind % tile.block_m if is_shared else tokens_q
        self._rows_set_to_zero = rows if clears else 0
        # two for each block of keys of a shared bias
        self.counters = 2 * programs // max(together) if is_shared else 0
        self.fits = self._is_direct or math.prod(self._shape) * x.q.element_size() <= MOST_DS_BYTES
        ds = torch.empty(self._shape, dtype=x.q.dtype, device="meta")
        # queries first; boxes of a step's queries and 64 keys
        self.map_of = MapForm(ds.transpose(1, 2), tile.block_m, ROWS, ragged=False)
        options = BiasSumOptions(
            HAS_RIGHT=form.constants.HAS_RIGHT,
            BIAS_BATCH=planes[0] > 1,
            BIAS_HEADS=planes[1] > 1,
            ACCESS=ACCESS_BYTES // x.q.element_size(),
            BLOCK_M=BLOCK,
            BLOCK_N=BLOCK,
        )
        self._launch = Launch(sum_bias_kernel, {"OPTIONS": options, "num_warps": 4})

    def _divide(self, planes: tuple[int, int], programs: int, processors: int) -> Together:
        """Divide the backward into few launches whose sum is dbias, or not at all.

        Divided launches may take at most ``MOST_ROUNDS`` times the rounds of one launch.
        ``planes``: batch and heads of the bias.
        """
        form = self._form
        for parts in (Together(sequences=form.batch), Together(heads=form.heads_k)):
            count = max(parts)
            left = form.batch // parts.sequences, form.heads_q // parts.heads
            rounds = count * cdiv(programs, count * processors)
            is_full = rounds <= MOST_ROUNDS * cdiv(programs, processors)
            if 1 < count <= MOST_TOGETHER and left == planes and is_full:
                return parts
        return Together()

    def new_gradients(self, dbias: Tensor) -> Tensor:
        """Return the memory for gradients of scores: ``dbias``, if they are the result."""
        ds = dbias if self._is_direct else dbias.new_empty(self._shape)
        if self._rows_set_to_zero:
            ds[:, :, : self._rows_set_to_zero].zero_()
        return ds

    def __call__(self, ds: Tensor, dbias: Tensor) -> None:
        """Fill ``dbias`` with sums of ``ds``, unless ``ds`` is ``dbias``."""
        if self._is_direct:
            return
        tiles_q, tiles_k = (cdiv(n, BLOCK) for n in self._tokens)
        scalars = self._form.scalars
        batch, heads_q = self._planes
        tokens_q, tokens_k = self._tokens
        numbers = BiasSumNumbers(
            keep_scale=scalars.keep_scale,
            window_right=scalars.window_right,
            batch=batch,
            heads_q=heads_q,
            tokens_q=tokens_q,
            tokens_k=tokens_k,
            tiles_q=tiles_q,
            tiles_k=tiles_k,
        )
        programs = dbias.shape[0] * dbias.shape[1] * tiles_q * tiles_k
        self._launch(programs, BiasSumTensors(ds, dbias), numbers)
