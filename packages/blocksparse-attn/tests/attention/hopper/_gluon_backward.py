"""Helpers of gluon backward tests that other tests use too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attn_common import Platform
from blocksparse_attn._attention import ops, tiles
from blocksparse_attn._attention.eager import attention_forward
from blocksparse_attn._attention.hopper.arguments import BackwardNumbers, BackwardTensors
from blocksparse_attn._attention.tiles import suits_hopper_backward
from blocksparse_attn._layout import lists

from ..._linked import gluon_language
from ..._linked.gluon import Kernel
from ..._numerics import Packed, make_packed


@pytest.fixture
def eager_forward(monkeypatch):
    """Serve forward calls by eager code: the kernel has its own tests, and is slow to interpret."""
    from blocksparse_attn._attention import launch as attention_launch

    function = ops._Planned
    real = function.forward

    def forward(ctx, q, k, v, x, layout, bounds, known):
        def serve(_plan, x, *_):
            return attention_forward(x, ops._call_of(x, layout, bounds, known.options))

        with monkeypatch.context() as patch:
            patch.setattr(attention_launch.Plan, "forward", serve)
            return real(ctx, q, k, v, x, layout, bounds, known)

    monkeypatch.setattr(function, "forward", staticmethod(forward))
    monkeypatch.setattr(
        attention_launch,
        "launch_forward",
        lambda x: attention_forward(x.tensors, x.common),
    )


class Counted(Kernel):
    """The backward kernel, of which counters say when all of a head's dq is added."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        launch = super().__getitem__(grid)

        def counted(*given: Any, **options: Any) -> None:
            x = BackwardTensors(*given[: len(BackwardTensors._fields)])
            numbers = BackwardNumbers(*given[len(x) :])
            if not options["MAKES_DQ"]:
                launch(*given, **options)
                return
            owners = x.owners_ptr[: int(x.real_ptr), 0]
            programs = [
                int((owners == head).sum()) if options["PER_HEAD"] else len(owners)
                for head in range(numbers.heads_k)
            ]
            assert x.counters_ptr.tolist() == [-n for n in programs] * numbers.batch
            raised = []

            def add(pointer: Any, *values: Any) -> Any:
                old = real(pointer, *values)
                if pointer.base is x.counters_ptr and not x.counters_ptr.any():
                    raised.append(x.dq_ptr.view(torch.int32).clone())
                return old

            real = gluon_language._add
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(gluon_language, "_add", add)
                launch(*given, **options)
            assert not x.counters_ptr.any()
            # nothing is added behind what says so
            assert all(torch.equal(dq, x.dq_ptr.view(torch.int32)) for dq in raised)
            assert raised or not any(programs)

        return counted


@pytest.fixture
def both_ways(monkeypatch):
    """Return a function that has one kernel serve every backward call."""
    from blocksparse_attn._attention.hopper.backward import launch as backward_launch

    hopper = Platform.parse("nvidia:sm_90")
    real = backward_launch.hopper_backward_kernel
    monkeypatch.setattr(
        tiles, "suits_hopper_backward", lambda _, *form: suits_hopper_backward(hopper, *form)
    )
    monkeypatch.setattr(tiles, "repeats", lambda: False)
    # so that few blocks make several programs, and some of them share a block
    for name, value in ("KEPT", 2), ("LONGEST", 8), ("SHORTER", 3):
        monkeypatch.setattr(lists, name, value)
    kernels = []

    def serve(reverse=True):
        kernels.append(Counted(real, reverse))
        monkeypatch.setattr(backward_launch, "hopper_backward_kernel", kernels[-1])
        return kernels[-1]

    yield serve
    assert all(kernel.launches for kernel in kernels)


def self_attention(lengths, *shape, **options):
    """A packed case whose queries and keys have the same offsets, as the kernel wants them."""
    dims, rest = shape[:3], shape[3:]
    case = make_packed(Packed(lengths, lengths, *dims, padding=70), *rest, **options)
    return case.with_options(cu_seqlens_k=case.options["cu_seqlens_q"])
