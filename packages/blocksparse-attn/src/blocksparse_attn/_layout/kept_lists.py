"""The lists that the kernels of a platform need, and those that a layout keeps."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from attn_common import Platform, detect
from torch import Tensor

from .._attention import tiles
from .._attention.call import ListForm, Pattern
from .._attention.tiles import (
    Shape,
    backward_dkdv_tile,
    backward_dq_shape,
    has_halves,
    hopper_shape,
    short_shape,
    suits_hopper,
    tall_shape,
)
from .._linked.host.forms import interpreted
from .._linked.host.internals import current_stream, is_transformed
from .._linked.host.operators import free_namespace
from .lists import SIDE, Lists, ListSpec, Pairs, by_sequence

NAMESPACE = free_namespace(__name__, "plan")
# a constant, because dynamo does not trace cached functions
_INTERPRETED = interpreted()
# threads that make lists for one layout store them one after the other
_keeping = threading.Lock()


def spec_of(kind: str, platform: Platform, pattern: Pattern, form: ListForm) -> ListSpec:
    """Return the specification of one kernel's lists.

    Args:
        kind: "tall" or "short": the forward's tiles of many queries or of a few. "portable": tiles
            of many queries in calls that ``walks_whole_blocks`` refuses. "dq" or "dkdv": the
            portable backward. "pairs": the Hopper backward.
        platform: where the kernel runs.
        pattern: the properties of the layout.
        form: the properties of the call.
    """
    group, head_dim, itemsize, causal = form
    is_shared, block_q, block_k = pattern.is_shared, pattern.block_q, pattern.block_k
    if kind == "pairs":
        own, turns = (1, group) if is_shared else (group, 1)
        return ListSpec(True, 2 * SIDE, own, turns, causal, True)
    if kind == "dkdv":
        tile = backward_dkdv_tile(platform, head_dim, itemsize, block_q)
        return ListSpec(True, tile.block_n, 1 if is_shared else group, 1, causal)
    shape: Shape
    halves = False
    choice = platform, head_dim, itemsize, block_q, group, is_shared
    if kind == "short":
        shape = short_shape(*choice)
    elif kind == "tall" and suits_hopper(platform, head_dim, itemsize, block_q, block_k, causal):
        shape = hopper_shape(head_dim, block_q, group, is_shared)
        halves = has_halves(shape, pattern, causal)
    else:
        choose = backward_dq_shape if kind == "dq" else tall_shape
        shape = choose(*choice, pattern.rows_alike)
    return ListSpec(False, shape.span, shape.group, shape.pack, causal, halves=halves)


def make_lists(
    crow: Tensor,
    col: Tensor,
    cols: int,
    block_size: tuple[int, int],
    spec: ListSpec,
    rule: Tensor | None = None,
) -> Lists | Pairs:
    from .kernels import planning

    if spec.paired:
        return planning.make_pairs(crow, col, cols, block_size, spec)
    return planning.make_lists(crow, col, cols, block_size, spec, rule)


def walks_lists(device: torch.device) -> bool:
    """Say whether attention on a device runs kernels, which need lists."""
    return device.type == "cuda" or (device.type == "cpu" and _INTERPRETED)


def is_capturing(device: torch.device) -> bool:
    """Say whether a CUDA graph is being captured: its results must not be kept."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def stream_of(q: Any) -> int:
    """Return the number of the stream that a call runs on; 0 if it has none."""
    if torch.compiler.is_compiling() or not (isinstance(q, Tensor) and q.is_cuda):
        return 0
    return current_stream(q.get_device())


class Readiness(NamedTuple):
    """The event after which all lists of a layout are ready, and the streams that wait for it."""

    event: torch.cuda.Event
    streams: set[int]


class KeptLists:
    """The lists that were made of a layout.

    Args:
        crow: row pointers ``[heads, rows + 1]``, of all sequences' heads.
        col: columns ``[heads, nnz]``.
        pattern: the properties of the layout.
        rule: its token rule, see ``TokenRule.bounds``.
    """

    def __init__(self, crow: Tensor, col: Tensor, pattern: Pattern, rule: Tensor | None) -> None:
        self._crow, self._col, self._pattern, self._rule = crow, col, pattern, rule
        self._device = crow.device
        # ``Lists``, or ``Pairs``, by kind and ``ListForm``, and by ``ListSpec``
        self.known: dict[Hashable, tuple[Tensor, ...]] = {}
        self.ready: Readiness | None = None

    def join(self) -> None:
        """Let the current stream wait, once, for the lists that other streams made.

        A capture cannot wait for an event outside it; PyTorch waits for the device before a
        capture.
        """
        ready = self.ready
        if ready is None or is_capturing(self._device):
            return
        stream = torch.cuda.current_stream(self._device)
        if stream.cuda_stream not in ready.streams:
            stream.wait_event(ready.event)
            for lists in list(self.known.values()):
                for part in lists:
                    # the allocator must not reuse the memory while this stream may read it
                    part.record_stream(stream)
            ready.streams.add(stream.cuda_stream)

    def keep(self, keys: tuple[Hashable, ...], lists: tuple[Tensor, ...]) -> None:
        """Keep lists that the current stream has made, and record an event.

        One event covers all lists: each stream waits for the previous event before it records its
        own.
        """
        with _keeping:
            if self._device.type == "cuda":
                self.join()
                stream = torch.cuda.current_stream(self._device)
                self.ready = Readiness(stream.record_event(), {stream.cuda_stream})
            # publish the lists last: whoever sees them must also see the event
            self.known.update(dict.fromkeys(keys, lists))

    def of(self, kind: str, form: ListForm) -> tuple[Tensor, ...]:
        """Return the lists that a kernel walks; the first call makes them.

        Args:
            kind: as in ``spec_of``.
            form: the properties of the call.
        """
        key, pattern = (kind, form), self._pattern
        if not torch.compiler.is_compiling():
            self.join()
        if key in self.known:
            return self.known[key]
        if torch.compiler.is_compiling() or is_transformed():
            # traced tensors must not be kept, and kernels cannot take a transform's tensors
            made = getattr(torch.ops, NAMESPACE).plan.default(
                by_sequence(self._crow, pattern.batch),
                by_sequence(self._col, pattern.batch),
                pattern.cols,
                pattern.block_q,
                pattern.block_k,
                pattern.rows_alike,
                *form,
                kind,
                self._rule,
            )
            return tuple(made)
        spec = spec_of(kind, detect(self._device), pattern, form)
        lists = self.known.get(spec)
        if lists is not None:
            self.known[key] = lists
            return lists
        # a later call with gradients may use these lists
        with torch.inference_mode(False):
            block_size = pattern.block_q, pattern.block_k
            made_of = self._crow, self._col, pattern.cols, block_size
            lists = make_lists(*made_of, spec, self._rule)
        if not is_capturing(self._device):
            self.keep((key, spec), lists)
        return lists

    def prepare(self, form: ListForm, backward: bool, paged: bool, top_left: bool) -> None:
        """Make the lists of later calls."""
        if not walks_lists(self._device):
            return
        is_early = tiles.may_end_early(form.causal, top_left) or self._rule is not None
        kinds = ["portable" if paged or is_early else "tall", "short"]
        if backward:
            kinds += ["dq", "dkdv"]
            pattern, heads = self._pattern, self._crow.shape[0]
            is_taken = tiles.suits_hopper_backward(
                detect(self._device), form.head_dim, form.itemsize
            )
            may_pair = is_taken and not (is_early or pattern.batch)
            if may_pair and tiles.has_few_pieces(pattern, heads):
                kinds.append("pairs")
        for kind in kinds:
            self.of(kind, form)
