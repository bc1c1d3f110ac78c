"""The host side of the Hopper backward: tensor maps, sums of dq, the launches."""

from __future__ import annotations

from typing import NamedTuple

import torch
from attn_common import cdiv, round_up
from torch import Tensor

from ...._linked.hopper.sizes import ROWS
from ...._linked.hopper.tma import MapForm, MappingLaunch
from ...._linked.host.forms import Memory
from ...._linked.launch.kernels import Kernel
from ...._linked.launch.runtime import MAX_COUNTS
from ...call import Tensors
from ...hopper_tiles import (
    VALUE_STAGES,
    HopperBackwardTile,
    hopper_backward_bias_tile,
    hopper_backward_tile,
    panels_of,
)
from ...portable.arguments import Extras, Inputs
from ...portable.form import Form
from ..bias_launch import BiasForm, BiasSum, Together, dimensions_of, side_by_side
from ..forward import launch as forward_launch
from .arguments import Numbers, Options, Tile
from .cut import choose_shares, filling_planes, possible_shares
from .maps import BackwardMaps, Six
from .sums.launch import Sums, count_sums, round_launches

backward_kernel = Kernel(__package__, ".kernel", "backward_kernel")

# with ordered additions to dq, the least number of heads that are walked together: then only few
# blocks of one head begin side by side, each of which waits for the block before it. More heads
# would leave fewer blocks to share the data in the L2 cache
ORDERED_SPAN = 32
# registers per thread at the start of the backward
REGISTERS = 168
# elements that share a draw of dropout lie within so many queries, and so many keys
DRAWN_TOGETHER = 16


def draws_apart(form: Form, x: Tensors) -> dict[str, bool]:
    """Tell whether tiles of queries, or of keys, may begin inside a group with one draw.

    Windows decide how many leading tokens are cut (``Block``). The host does not know the lengths
    of a packed call.
    """
    windows = form.scalars.window_right, form.scalars.window_left
    longer = x.q.shape[-3] - x.k.shape[-3]  # if lengths are fixed
    ahead = [
        window >= 0 and (form.is_packed or max(more - window, 0) % DRAWN_TOGETHER != 0)
        for window, more in zip(windows, (longer, -longer), strict=True)
    ]
    has_dropout = form.options.dropout_p > 0.0
    return dict(zip(("APART_Q", "APART_K"), (has_dropout and a for a in ahead), strict=True))


def _backward_tile(form: Form, x: Tensors, ordered: bool) -> HopperBackwardTile:
    """Return the tile of calls with a signature."""
    if x.bias is not None:
        return hopper_backward_bias_tile(form.widest_head, x.bias.element_size())
    has_dropout = form.options.dropout_p > 0.0
    is_heavy = form.constants.HAS_SOFTCAP or has_dropout
    # a second launch would have to draw again
    return hopper_backward_tile(form.widest_head, is_heavy, not (ordered or has_dropout))


class Work(NamedTuple):
    """Arguments of the launches that depend on the token counts of queries and keys."""

    shares: int  # programs that share a key head
    grid: int
    numbers: Numbers
    # one for each launch that stores gradients of scores; these launches divide the grid
    parts: tuple[Numbers, ...]
    sums: Sums
    has_unseen: bool  # keys may lie ahead of all windows, and no rounding writes their gradients


class Launches(NamedTuple):
    """The launches for one set of strides of the output's gradient."""

    plain: MappingLaunch
    # also stores gradients of scores, and adds up shared ones
    keeping: MappingLaunch
    # adds gradients of scores to stored ones
    adding: MappingLaunch
    # makes dv, if dv has its own launch
    values: MappingLaunch | None


class HopperBackward:
    """The launcher of dq, dk and dv for a signature for which ``takes_hopper_backward`` is true."""

    def __init__(
        self,
        form: Form,
        x: Tensors,
        tile: HopperBackwardTile | None = None,
        *,
        ordered: bool = False,
        shares: int | None = None,
    ) -> None:
        """Prepare the launches of a signature.

        ``ordered``: dq must repeat bit for bit. ``shares``: how many programs share the query heads
        of a key head, instead of what ``cut.py`` chooses; it divides their number.
        """
        self._form = form
        self._ordered = ordered
        self._processors = forward_launch.multiprocessors(x.q.device)
        self._choices = [shares or 1]
        if shares is None and x.bias is None:
            self._choices = possible_shares(form, ordered)
        # by token counts, which the signature of a packed call does not fix
        self._work: Memory[Work] = Memory(MAX_COUNTS)
        self._tile = tile = tile or _backward_tile(form, x, ordered)
        keys, ragged = ROWS, form.is_packed
        bias = self._map_bias = None
        if x.bias is not None:
            bias = self._map_bias = BiasForm(x.bias, tile.block_m, keys)
        options = Options(
            GROUP=form.group,
            HAS_LEFT=form.constants.HAS_LEFT,
            HAS_RIGHT=form.constants.HAS_RIGHT,
            HAS_SOFTCAP=form.constants.HAS_SOFTCAP,
            RAGGED=ragged,
            ORDERED=ordered,
            **draws_apart(form, x),
            **dimensions_of(bias),
        )
        (wide, narrow), (wide_v, narrow_v) = panels_of(form.head_dim), panels_of(form.head_dim_v)
        shape = Tile(
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            HEAD_DIM=wide,
            NARROW=narrow,
            HEAD_DIM_V=wide_v,
            NARROW_V=narrow_v,
            STAGES_Q=tile.stages_q,
            STAGES_O=tile.stages_o,
            STAGES_B=tile.stages_b,
            MAKES_DK=True,
            MAKES_DV=not tile.is_apart,
        )
        self._options, self._shape = options, shape
        self._values_shape: Tile | None = None
        if tile.is_apart:
            stages = VALUE_STAGES
            self._values_shape = shape._replace(
                STAGES_Q=stages, STAGES_O=stages, MAKES_DK=False, MAKES_DV=True
            )
        # by strides of the output's gradient, which the signature does not fix, and by shares
        self._launches: Memory[Launches] = Memory(MAX_COUNTS)
        # with a softcap, the kernel's ds is not the gradient of the logits
        keeps = x.bias is not None and bias.has_rows and x.bias.dtype == x.q.dtype
        keeps = keeps and 0 not in x.bias.stride() and not form.constants.HAS_SOFTCAP
        is_plain = x.seqused_k is None and not form.is_packed
        can_keep = keeps and tile.block_n > keys and is_plain
        self._bias_sum = None
        self._together = Together() if ordered else side_by_side(form, bias)
        if can_keep:
            together = None if ordered else self._together
            summed = BiasSum(form, x, tile, self._processors, together)
            self._bias_sum = summed if summed.fits else None
        self._round = round_launches(
            form,
            tile,
            has_left=form.constants.HAS_LEFT,
            has_right=form.constants.HAS_RIGHT,
            shares=self._choices[0] if ordered else 1,
        )
        self._maps = BackwardMaps(form, tile, ragged=ragged)

    def is_worth_it(self, tokens_q: int) -> bool:
        """Tell whether a sequence of fixed length fills half of a tile of queries.

        With fewer queries most of a tile, and of its fp32 sums of dq, would be padding. Packed
        calls always run here: the lengths of other sequences must not decide.
        """
        return self._form.is_packed or tokens_q >= self._tile.block_m // 2

    def new_sums(self, q: Tensor, k: Tensor) -> Tensor:
        """Allocate the sums of dq, by tiles of queries; the caller sets them to 0.

        After them come the sums of dk and dv if programs share keys, then the counters of ordered
        additions or of a shared bias.
        """
        tokens = q.shape[-3], k.shape[-3]
        work = self._work.get(tokens) or self._work.keep(tokens, self._count_work(*tokens))
        return q.new_empty(*work.sums.shape, dtype=torch.float32)

    @property
    def makes_dbias(self) -> bool:
        """Whether ``__call__`` fills dbias."""
        return self._bias_sum is not None

    def __call__(
        self,
        inputs: Inputs,
        extras: Extras,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        sums: Tensor,
        dbias: Tensor | None = None,
    ) -> None:
        """Fill the gradients, and dbias if ``makes_dbias``; ``sums`` are ``new_sums``, set to 0."""
        q, k, v, dout, lse2, delta = inputs
        tokens = q.shape[-3], k.shape[-3]
        work = self._work.get(tokens) or self._work.keep(tokens, self._count_work(*tokens))
        places = work.sums
        is_shared = work.shares > 1
        if work.has_unseen:
            # for the keys that no query sees
            dk.zero_()
            dv.zero_()
        ds = None
        has_counters = self._ordered
        if dbias is not None and self._bias_sum is not None:
            ds = self._bias_sum.new_gradients(dbias)
            has_counters = has_counters or self._bias_sum.counters > 0
        mapped = q, k, v, dout, dk, dv
        key = dout.stride(), work.shares
        launches = self._launches.get(key) or self._launches.keep(
            key, self._launches_of(mapped, work.shares)
        )
        tensors = (  # the fields of Maps and arguments.Tensors
            *self._maps(mapped, sums, extras.bias_ptr, None if ds is None else ds.transpose(1, 2)),
            lse2,
            delta,
            extras.alibi_slopes_ptr,
            extras.rng_state_ptr,
            extras.cu_seqlens_q_ptr,
            extras.cu_seqlens_k_ptr,
            extras.seqused_k_ptr,
            sums[places.counters_at :].view(torch.int32) if has_counters else None,
            sums[places.dk_at :] if is_shared else None,
            sums[places.dv_at :] if is_shared else None,
        )
        if ds is None:
            launches.plain(work.grid, tensors, work.numbers)
        else:
            for number, numbers in enumerate(work.parts):
                launch = launches.adding if number > 0 else launches.keeping
                launch(work.grid // len(work.parts), tensors, numbers)
        if launches.values is not None:
            launches.values(work.grid, tensors, work.numbers)
        if ds is not None:
            self._bias_sum(ds, dbias)
        # the fields of RoundingTensors
        lengths = extras.cu_seqlens_q_ptr, extras.cu_seqlens_k_ptr, extras.seqused_k_ptr
        self._round.dq(places.slots, (sums, dq, *lengths), places.of_queries)
        if is_shared:
            lengths = extras.cu_seqlens_k_ptr, extras.cu_seqlens_q_ptr, extras.seqused_k_ptr
            of_dk, of_dv = (sums[places.dk_at :], dk), (sums[places.dv_at :], dv)
            self._round.dk(places.key_slots, (*of_dk, *lengths), places.of_keys)
            self._round.dv(places.key_slots, (*of_dv, *lengths), places.of_keys)

    def _launches_of(self, mapped: Six, shares: int) -> Launches:
        """Return the launches for tensors with these strides."""
        bias, summed = self._map_bias, self._bias_sum
        ds = summed.map_of if summed else None
        options, shape = self._options, self._shape
        options = options._replace(GROUP=self._form.group // shares, SHARES=shares)

        def launch(options: Options, shape: Tile, ds: MapForm | None = None) -> MappingLaunch:
            constants = {"OPTIONS": options, "TILE": shape, "num_warps": 4, "maxnreg": REGISTERS}
            return MappingLaunch(backward_kernel, constants, self._maps.forms(mapped, bias, ds))

        return Launches(
            plain=launch(options, shape),
            keeping=launch(options._replace(**summed.constants) if summed else options, shape, ds),
            adding=launch(options._replace(ADDS_DS=True), shape, ds),
            values=launch(options, self._values_shape) if self._values_shape else None,
        )

    def _span(self, tokens_q: int, blocks: int, shares: int) -> int:
        """Return how many heads are walked together, each once for each of its ``shares``."""
        span = self._form.span_sums(tokens_q, shares)
        if self._ordered:
            return max(span, ORDERED_SPAN)
        # with a bias every call is walked in this order; without a mask all walks are equally long
        is_equal = self._map_bias is not None and not self._form.constants.HAS_RIGHT
        span = 1 if is_equal else max(span, filling_planes(blocks, self._processors))
        return round_up(span, max(self._together))

    def _shares(self, tokens_q: int, tokens_k: int) -> int:
        """Return how many programs share a key head, for these token counts."""
        form, scalars = self._form, self._form.scalars
        # packed: as if all sequences were equally long
        sequences = form.batch // form.grid_batch
        tokens = cdiv(tokens_q, sequences), cdiv(tokens_k, sequences)
        window = scalars.window_left, scalars.window_right
        return choose_shares(
            self._choices, form, self._tile, form.batch, tokens, window, self._processors
        )

    def _count_work(self, tokens_q: int, tokens_k: int) -> Work:
        """Return the ``Work`` for these token counts."""
        form, tile, scalars = self._form, self._tile, self._form.scalars
        tiles_k = form.tiles(tokens_k, tile.block_n)
        tiles_q = form.tiles(tokens_q, tile.block_m)
        shares = self._shares(tokens_q, tokens_k)
        together = self._bias_sum.together if self._bias_sum else Together()
        numbers = Numbers(
            scale=scalars.scale,
            softcap=scalars.softcap,
            window_left=scalars.window_left,
            window_right=scalars.window_right,
            batch=form.batch,
            heads_k=form.heads_k * shares,
            tokens_q=tokens_q,
            tokens_k=tokens_k,
            tiles=tiles_k,
            tiles_q=tiles_q,
            span=self._span(tokens_q, tiles_k, shares),
            keep_scale=scalars.keep_scale,
            dropout_threshold=scalars.dropout_threshold,
            stride_alibi_b=form.strides.alibi,
            first_sequence=0,
            first_head=0,
            heads_here=form.heads_k,
            sequences_together=together.sequences,
            heads_together=together.heads,
        )
        division = self._bias_sum.parts if self._bias_sum else Together()
        parts = tuple(
            numbers._replace(
                first_sequence=sequences * (form.batch // division.sequences),
                first_head=heads * (form.heads_k // division.heads),
                heads_here=form.heads_k // division.heads,
            )
            for sequences in range(division.sequences)
            for heads in range(division.heads)
        )
        places = 0
        if shares > 1:
            places = shares if self._ordered else 1
        counters = self._bias_sum.counters if self._bias_sum else 0
        if self._ordered:
            counters += 1 + 2 * tiles_q * form.heads_q * form.grid_batch
        sums = count_sums(form, tile, (tokens_q, tokens_k), places, counters)
        ahead = tokens_k - tokens_q - scalars.window_left
        has_unseen = form.constants.HAS_LEFT and (form.is_packed or ahead > 0) and shares == 1
        return Work(shares, sums.key_slots * shares, numbers, parts, sums, has_unseen)
