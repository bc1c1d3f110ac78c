"""The host side of an additive bias for Hopper: its tensor maps, and the sum of its gradient."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from attn_common import cdiv, round_up
from torch import Tensor

from ..._linked.hopper.gradients import ROWS
from ..._linked.hopper.tma import MapForm
from ..._linked.host.forms import ACCESS_BYTES
from ..._linked.launch.runtime import Launch, has_whole_rows, is_aligned, whole_rows
from ..call import Tensors
from ..hopper_tiles import HopperBackwardTile
from ..portable.form import Form
from .backward.sum_bias import sum_bias_kernel
from .parameters import BiasSumConstants, BiasSumNumbers, BiasSumTensors

# rows of a map: more than a GPU holds, and no more than int32 counts
MOST_ROWS = 0x7FFF0000
# bytes that gradients of scores may take, on the way to that of a bias
MOST_DS_BYTES = 1 << 32
# queries, and keys, of a program that sums
BLOCK = 64
# gradients of scores that are added up in the dtype of q: each addition rounds
MOST_TOGETHER = 4
# how much longer such launches may keep a GPU than one launch, for all of which it has programs
MOST_ROUNDS = 1.05


class BiasForm(MapForm):
    """How biases of one form are mapped, in boxes of ``rows`` queries and ``columns`` keys.

    ``[batch, heads, queries, keys]`` without the dimensions over which a bias is broadcast. What
    TMA cannot read is copied: rows that are no multiple of 16 bytes, keys that are no neighbours.
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
    """Return the constants that say over which dimensions a bias is not broadcast."""
    return {
        "BIAS_BATCH": bias is not None and bias.has_batch,
        "BIAS_HEADS": bias is not None and bias.has_heads,
        "BIAS_ROWS": bias is not None and bias.has_rows,
    }


def once(bias: Tensor) -> Tensor:
    """Return a bias with one element of each dimension that is broadcast, by size or by stride."""
    for axis, stride in enumerate(bias.stride()):
        if stride == 0:
            bias = bias.narrow(axis, 0, 1)
    return bias


def _mappable(bias: Tensor) -> Tensor:
    """Return a bias with whole rows, in the order in which ``MapForm`` takes dimensions."""
    return whole_rows(bias).transpose(1, 2)


class Together(NamedTuple):
    """How many neighbouring sequences, or key heads, that share a bias are taken together."""

    sequences: int = 1
    heads: int = 1


def side_by_side(form: Form, bias: BiasForm | None) -> Together:
    """Return whose programs run side by side: of up to ``MOST_TOGETHER``, as many as come out even.

    Then a tile of the bias is read from memory once, and is still in the L2 cache as gradients of
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
    """The gradient of a bias, from the gradients of scores that a backward keeps.

    Up to ``MOST_TOGETHER`` sequences or heads that share a bias add theirs up by TMA, in the dtype
    of q: programs that run side by side, so that the sums are in the L2 cache. One stores, and the
    others add, in whatever order they come; see ``shared_bias``. Where more share the bias,
    ``sum_bias_kernel`` adds up the sums.

    If additions are ordered, the backward is a launch for each of them. The first stores its
    gradients, the others add theirs. Launches that left something to be summed were slower: there
    all gradients are stored, and summed by the kernel.
    """

    def __init__(
        self,
        form: Form,
        x: Tensors,
        tile: HopperBackwardTile,
        processors: int,
        together: Together | None = None,
    ) -> None:
        """Take a call, its tile, and how many multiprocessors the GPU has.

        ``together``, of ``side_by_side``, is None if additions are ordered.
        """
        self._form = form
        self._tokens = tokens_q, tokens_k = x.q.shape[1], x.k.shape[1]
        planes = x.bias.shape[0], x.bias.shape[1]
        programs = form.batch * form.heads_k * cdiv(tokens_k, tile.block_n)
        # launches, of each of which some sequences or heads are
        self.parts = Together()
        if together is None:
            together = self.parts = self._divide(planes, programs, processors)
        self.together = together
        is_shared = max(together) > max(self.parts)
        self._planes = form.batch // together.sequences, form.heads_q // together.heads
        # whole rows, which TMA writes
        columns = round_up(tokens_k, ACCESS_BYTES // x.q.element_size())
        self._shape = *self._planes, tokens_q, columns
        self._is_direct = self._shape == x.bias.shape and form.options.dropout_p == 0.0
        # tiles that nobody sees are not summed, but here they are part of the result
        clears = self._is_direct and form.constants.HAS_RIGHT
        self.constants = {"SHARES_DS": is_shared, "CLEARS_DS": is_shared and clears}
        # how many first rows are set to zero here: all, or those ahead of whole tiles of queries
        # that see no key, which ``clear_hidden`` leaves out
        blind = max(tokens_q - tokens_k - form.scalars.window_right, 0)
        rows = blind % tile.block_m if is_shared else tokens_q
        self._rows_set_to_zero = rows if clears else 0
        # two for each block of keys of those that share a bias
        self.counters = 2 * programs // max(together) if is_shared else 0
        self.fits = self._is_direct or math.prod(self._shape) * x.q.element_size() <= MOST_DS_BYTES
        ds = torch.empty(self._shape, dtype=x.q.dtype, device="meta")
        # queries first; in boxes of those of a step and 64 keys
        self.map_of = MapForm(ds.transpose(1, 2), tile.block_m, ROWS.value, ragged=False)
        constants = BiasSumConstants(
            HAS_RIGHT=form.constants.HAS_RIGHT,
            BIAS_BATCH=planes[0] > 1,
            BIAS_HEADS=planes[1] > 1,
            ACCESS=ACCESS_BYTES // x.q.element_size(),
            BLOCK_M=BLOCK,
            BLOCK_N=BLOCK,
        )
        self._launch = Launch(sum_bias_kernel, {**constants._asdict(), "num_warps": 4})

    def _divide(self, planes: tuple[int, int], programs: int, processors: int) -> Together:
        """Return how the backward is divided: into few launches whose sum is dbias, or not at all.

        They must leave the GPU no emptier than one does. ``planes``: batch and heads of the bias.
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
        """Return the memory for gradients of scores, perhaps that of ``dbias``."""
        ds = dbias if self._is_direct else dbias.new_empty(self._shape)
        if self._rows_set_to_zero:
            ds[:, :, : self._rows_set_to_zero].zero_()
        return ds

    def __call__(self, ds: Tensor, dbias: Tensor) -> None:
        """Fill ``dbias`` with sums of ``ds``, if it is not filled."""
        if self._is_direct:
            return
        tiles_q, tiles_k = (cdiv(n, BLOCK) for n in self._tokens)
        scalars = self._form.scalars
        numbers = BiasSumNumbers(
            scalars.keep_scale,
            scalars.window_right,
            *self._planes,
            *self._tokens,
            tiles_q,
            tiles_k,
        )
        programs = dbias.shape[0] * dbias.shape[1] * tiles_q * tiles_k
        self._launch(programs, BiasSumTensors(ds, dbias), numbers)
