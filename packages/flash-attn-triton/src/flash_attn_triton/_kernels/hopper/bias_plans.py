"""The host side of an additive bias for Hopper: its tensor maps, and the sum of its gradient."""

from __future__ import annotations

import torch
from attn_common import cdiv
from torch import Tensor

from ..._call import Tensors
from ..._hopper_configs import HopperBackwardTile
from ..form import Form
from ..launch.runtime import Launch, has_whole_rows, is_aligned, whole_rows
from ._linked.compat import gl
from ._linked.gradients import ROWS
from ._linked.tma import MapForm
from .parameters import BiasSumConstants, BiasSumNumbers, BiasSumTensors
from .sum_bias import sum_bias_kernel

# rows of a map: more than a GPU holds, and no more than int32 counts
MOST_ROWS = 0x7FFF0000
# bytes that the gradients of all scores may take, on the way to that of a bias
MOST_DS_BYTES = 1 << 32


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


class ScoresForm(MapForm):
    """How gradients of scores are mapped: rows of the queries of a step, those of 64 keys a box."""

    def __init__(self, x: Tensor, columns: int) -> None:
        # in place of the base class's, as in ``SumsForm``
        self._copies = False
        self.shape = [MOST_ROWS, columns]
        self.strides = [columns, 1]
        self.block_shape = [ROWS.value, columns]
        names = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
        self.layout = gl.NVMMASharedLayout.get_default_for(self.block_shape, names[x.dtype])
        self.encoded = {}


class BiasSum:
    """The gradient of a bias, summed from the gradients of all scores that a backward keeps."""

    def __init__(self, form: Form, x: Tensors, tile: HopperBackwardTile) -> None:
        self._form = form
        self._tile = tile
        self.map_of = ScoresForm(x.q, tile.block_m)
        constants = BiasSumConstants(
            HAS_RIGHT=form.constants.HAS_RIGHT,
            BIAS_BATCH=x.bias.shape[0] > 1,
            BIAS_HEADS=x.bias.shape[1] > 1,
            BLOCK_M=tile.block_m,
            BLOCK_N=ROWS.value,
        )
        self._launch = Launch(sum_bias_kernel, {**constants._asdict(), "num_warps": 4})

    def _tiles(self, tokens_q: int, tokens_k: int) -> tuple[int, int]:
        """Return how many tiles of queries there are, and boxes of 64 keys."""
        parts = self._tile.block_n // ROWS.value
        return cdiv(tokens_q, self._tile.block_m), cdiv(tokens_k, self._tile.block_n) * parts

    def _numel(self, tokens_q: int, tokens_k: int) -> int:
        tiles_q, tiles_k = self._tiles(tokens_q, tokens_k)
        planes = self._form.batch * self._form.heads_q
        return planes * tiles_q * tiles_k * self._tile.block_m * ROWS.value

    def is_worth_it(self, q: Tensor, k: Tensor) -> bool:
        """Say whether the gradients of all scores take no more than ``MOST_DS_BYTES``."""
        return self._numel(q.shape[1], k.shape[1]) * q.element_size() <= MOST_DS_BYTES

    def new_gradients(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the memory for them."""
        return q.new_empty(self._numel(q.shape[1], k.shape[1]))

    def __call__(self, ds: Tensor, dbias: Tensor, tokens_q: int, tokens_k: int) -> None:
        """Fill ``dbias`` with sums of ``ds``."""
        scalars = self._form.scalars
        if self._form.constants.HAS_RIGHT:
            # queries that see no key, and keys that no query sees
            dbias.zero_()
        tiles_q, tiles_k = self._tiles(tokens_q, tokens_k)
        numbers = BiasSumNumbers(
            scalars.keep_scale,
            scalars.window_right,
            self._form.batch,
            self._form.heads_q,
            tokens_q,
            tokens_k,
            tiles_q,
            tiles_k,
        )
        planes = dbias.shape[0] * dbias.shape[1]
        self._launch(planes * tiles_q * tiles_k, BiasSumTensors(ds, dbias), numbers)
