"""The passes of one rank over its runs, with the exchange of states.

Forward: compute the states that the runs write, exchange them, and compute the outputs from the
arrived states. Computing outputs during the exchange and correcting them later, or exchanging heads
in two halves, took longer (benchmarks/NOTES.md). Backward: compute the gradients that the runs
write to their states, exchange them while dq is computed, and start the walks of dk and dv from the
arrived gradients.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._linear.call import BackwardTensors, Inputs
from .._linear.validate import validate_decay
from .._linked.parallel.agreement import agree
from .._linked.parallel.cut import Layout, layout_by
from .._linked.parallel.groups import group_named
from .shards import Table, table_of


class Sharded(NamedTuple):
    """Arguments of the operators besides the tensors that are multiplied, in their order."""

    scale: float
    schedule: str
    # states are returned or differentiated, so they are written in full precision
    is_exact: bool
    has_final: bool
    # how sequences are cut; see ``Cut``
    lengths: Tensor | None
    numbers: list[int]
    # upper bound of the runs of tokens on this rank
    runs: int
    group: str

    @property
    def layout(self) -> Layout:
        """How sequences are cut."""
        return layout_by(self.lengths, self.numbers)

    @property
    def table(self) -> Table:
        """What this rank sends and receives."""
        return table_of(self.layout, self.has_final)

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.numbers[-2] if self.lengths is None else self.lengths.shape[0]

    @property
    def finals(self) -> int:
        """The number of final states that are returned."""
        return self.batch if self.has_final else 0


class CompareCall(NamedTuple):
    """The arguments of the operator that compares calls."""

    q: Tensor
    v: Tensor
    decay: Tensor
    options: Sharded
    has_gradient: bool


class ForwardCall(NamedTuple):
    """The arguments of the forward operator."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    initial_state: Tensor | None
    options: Sharded
    # the result of the comparison, which comes first
    compared: Tensor | None


class BackwardCall(NamedTuple):
    """The arguments of the backward operator."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    states: Tensor  # before the runs
    dfinal_state: Tensor | None
    needs: list[bool]
    options: Sharded


class Exchange:
    """A pending all-gather of states."""

    def __init__(self, message: Tensor, options: Sharded, table: Table) -> None:
        self._work: Any = None
        self._message = message  # keeps it alive until it has been sent
        self._all = message
        if table.group_size == 1:
            return
        self._all = message.new_empty((table.group_size * message.shape[0], *message.shape[1:]))
        # renamed in PyTorch 2.13
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        group = group_named(options.group)
        self._work = gather(self._all, message, group=group, async_op=True)

    def wait(self) -> Tensor:
        """Return the states of all ranks; a GPU's stream waits, the host does not."""
        if self._work is not None:
            self._work.wait()
        return self._all


def forward(backend: Any, call: ForwardCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the states before the runs (for the backward), and the final states."""
    q, k, v, decay, initial_state, options, _ = call
    table = options.table
    on = table.on(q.device)
    runs = len(table.runs)
    before = None
    if initial_state is not None and on.first_rows.numel():
        before = _states(k, v, table.rows).zero_()
        before.index_copy_(0, on.first_rows, initial_state.index_select(0, on.first_sequences))
    first = None if before is None or not table.starts else before[:runs]
    x = Inputs(q, k, v, decay, on.cu_seqlens, first)
    kept = None
    if table.sends:
        message = _states(k, v, table.sends)
        kept = _write(backend, x, message, table, options, reverse=False)
        every = Exchange(message, options, table).wait()
        before = backend.arrive(every, decay, before, on.earlier)
        x = x._replace(first=before[:runs])
    out = backend.read_runs(x, kept, options)
    if before is None:
        before = _states(k, v, table.rows).zero_()
    final = before[runs:].clone()
    missing = options.runs + options.finals - before.shape[0]
    if missing:
        # short sequences may leave a rank with fewer runs than the bound
        before = torch.cat([before, _states(k, v, missing).zero_()])
    return out, before, final


def backward(backend: Any, call: BackwardCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dk, dv, and this rank's share of the gradients of decays and initial states."""
    dout, q, k, v, decay, before, dfinal, needs, options = call
    table = options.table
    on = table.on(k.device)
    needs_q, needs_kv, needs_decay, needs_initial, has_initial = needs
    runs = len(table.runs)
    absent = k.new_empty((0,))
    dq = dk = dv = absent
    x = BackwardTensors(dout, q, k, v, decay, on.cu_seqlens)
    if has_initial or table.arrives_earlier:
        x = x._replace(initial_state=before[:runs])
    exchange = kept = None
    if table.sends + table.finals:
        message = _states(k, v, table.sends + table.finals)
        if table.sends:
            # the walk of dv, started from zero
            gradients = x._replace(dfinal_state=None).walk_of_dv()
            kept = _write(backend, gradients, message[: table.sends], table, options, reverse=True)
        finals = message[table.sends :]
        if dfinal is None:
            finals.zero_()
        else:
            finals.copy_(dfinal)
        exchange = Exchange(message, options, table)
    if needs_q:
        dq = backend.read_gradient(x._replace(q=None), options.scale, options.schedule)
    if exchange is not None:
        every = exchange.wait()
        if table.arrives_later:
            x = x._replace(dfinal_state=backend.arrive(every, decay, None, on.later))
    dfirst = absent
    if needs_kv or needs_initial:
        dk, dv, dfirst = backend.write_gradients_of_runs(x, kept, needs_initial, options)
    ddecay = absent
    if needs_decay:
        ddecay = backend.decay_gradient(x, options.scale)
    dinitial = absent
    if needs_initial:
        dinitial = _states(k, v, table.batch).zero_()
        if table.starts:
            rows, sequences = on.first_rows[: table.starts], on.first_sequences[: table.starts]
            dinitial.index_copy_(0, sequences, dfirst.index_select(0, rows))
        if dfinal is not None and on.tokenless.numel():
            dinitial.index_copy_(0, on.tokenless, dfinal.index_select(0, on.tokenless))
    return dq, dk, dv, ddecay, dinitial


def _write(
    backend: Any, x: Inputs, message: Tensor, table: Table, options: Sharded, *, reverse: bool
) -> Any:
    """Fill the message with the states that the runs write; return what ``read_runs`` reuses."""
    if not table.runs:
        message.zero_()
        return None
    on = table.on(x.key.device)
    slots = None if table.sends_all else on.slots
    if table.sends_first:  # later rows of the message are never read
        return backend.write_runs(x._replace(last=message), slots, reverse, options)
    last = _states(x.key, x.value, len(table.runs))
    kept = backend.write_runs(x._replace(last=last), slots, reverse, options)
    torch.index_select(last, 0, on.sent, out=message)
    return kept


def _states(k: Tensor, v: Tensor, rows: int) -> Tensor:
    size = (rows, k.shape[-2], k.shape[-1], v.shape[-1])
    return torch.empty(size, dtype=torch.float32, device=k.device)


# names of the compared values; the operator adds the values of the decays
NAMES = (
    "the dtype of q",
    "the heads and dimensions of q and v",
    "the shards",
    "scale",
    "schedule",
    "output_final_state",
    "whether a gradient is asked for",
)


class _Shown(str):
    """A compared text whose ``repr`` is the text itself."""

    __slots__ = ()
    __repr__ = str.__str__


def claims_of(call: CompareCall) -> list[str]:
    """Return texts about a call that have to be the same on every rank."""
    q, v, _, options, has_gradient = call
    layout = options.layout
    return [
        str(q.dtype),
        f"{list(q.shape[1:])} and {list(v.shape[1:])}",
        f"{layout.shard} of lengths {layout.lengths}, window {layout.window}",
        str(options.scale),
        options.schedule,
        str(options.has_final),
        str(has_gradient),
    ]


def compare(
    claims: list[str],
    decay: Tensor | None,
    group: str,
    device: torch.device,
    error: Exception | None = None,
) -> None:
    """Compare the claims of all ranks; raise on all of them if they differ."""
    named: dict[str, Any] = dict(zip(NAMES, map(_Shown, claims), strict=True))
    if decay is not None:
        try:
            validate_decay(decay)
        except ValueError as raised:
            error = raised
    named["decay"] = None if decay is None else decay.tolist()
    agree(named, group_named(group), device, error)
