"""What was learned from a call serves the calls of its form, and no other."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from blocksparse_attn import (
    BlockSparseLayout,
    LocalStridedBlockSparseAttn,
    blocksparse_attn_func,
    blocksparse_attn_varlen_func,
)
from blocksparse_attn._attention import ops
from blocksparse_attn._linked.host.forms import interpreted
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .._linked.budget import Maker, assert_same
from .._numerics import Packed, Shape, make_case, make_packed, paged, run

pytestmark = pytest.mark.eager

SHAPE = Shape(2, 9, 13, 4, 2, 16, 8)
PACKED = Packed((5, 0, 9), (6, 3, 9), 4, 2, 16, padding=2)
SHORT = Packed((5, 0, 2), (6, 3, 9), 4, 2, 16, padding=2)
CASES = [
    pytest.param(lambda device: make_case(SHAPE, torch.float32, device), id="fixed"),
    pytest.param(lambda device: make_case(SHAPE, torch.float32, device, shared=True), id="shared"),
    pytest.param(lambda device: make_packed(PACKED, torch.float32, device), id="packed"),
    pytest.param(lambda device: make_packed(SHORT, torch.float32, device, num_splits=2), id="few"),
]


class Watcher(TorchDispatchMode):
    """Sees operators, so that calls go through them."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", CASES)
def test_operators_and_what_goes_past_them_agree(make, device):
    case = make(device)
    past = [run(case), run(case)]  # the second call finds what the first one learned
    with Watcher():
        through = run(case)
    for results in past:
        assert_same(results, through)


@pytest.mark.parametrize("make", CASES[2:])
def test_pages_go_past_operators_too(make, device):
    case = paged(make(device), 4)
    past = [run(case, grad=False), run(case, grad=False)]
    with Watcher():
        through = run(case, grad=False)
    for results in past:
        assert_same(results, through)


def test_a_table_of_pages_may_have_any_strides(device):
    case = paged(make_packed(PACKED, torch.float32, device), 4)
    want = run(case, grad=False)
    table = case.options["block_table"]
    wide = torch.full((*table.shape, 2), 2**31 - 1, dtype=table.dtype, device=device)
    wide[..., 0] = table
    for view in (wide[..., 0], table.t().contiguous().t()):
        assert not view.is_contiguous()
        viewed = case.with_options(block_table=view)
        for _ in range(2):
            assert_same(run(viewed, grad=False), want)


def test_memory_of_forms_tells_calls_apart(device):
    base = make_case(SHAPE, torch.float16, device)
    inputs = base.inputs
    calls = [
        base,
        base.with_options(causal=False),
        base.with_options(softmax_scale=0.5),
        base.with_options(softmax_scale=-0.5),
        base.with_inputs(k=inputs["k"][:, :5], v=inputs["v"][:, :5]),
        base.with_inputs(q=inputs["q"][:, :3]),
        base.with_inputs(k=inputs["k"][:, :, :1], v=inputs["v"][:, :, :1]),
        base.with_inputs(q=inputs["q"].transpose(1, 2).contiguous().transpose(1, 2)),
        base.with_inputs(**{name: t.float() for name, t in inputs.items()}),
    ]
    first = [run(call, grad=False) for call in calls]
    with Watcher():
        through = [run(call, grad=False) for call in calls]
    for call, before, want in zip(calls, first, through, strict=True):
        assert_same(before, want)
        assert_same(run(call, grad=False), want)


def test_lengths_of_packed_calls_are_told_apart_where_they_matter(device):
    """One form serves any numbers of tokens; few queries are another one."""
    layout = BlockSparseLayout.local_strided(2, 64, 16, 1, 3, device=device)
    m = Maker(device, torch.float32)

    def call(lengths: tuple[int, ...]) -> int:
        tokens = sum(lengths)
        q, k, v = m.randn(tokens, 2, 16), m.randn(tokens, 2, 16), m.randn(tokens, 2, 16)
        ends = torch.tensor([0, lengths[0], tokens], dtype=torch.int32, device=device)
        arguments = q, k, v, ends, ends, max(lengths), max(lengths), layout
        got = blocksparse_attn_varlen_func(*arguments)
        with Watcher():
            want = blocksparse_attn_varlen_func(*arguments)
        assert torch.equal(got, want)
        return len(layout._calls._known)

    assert [call(n) for n in ((20, 30), (9, 40), (40, 41), (3, 5), (8, 9))] == [1, 1, 1, 2, 2]


def test_bounds_are_checked_in_every_call(device):
    case = make_packed(PACKED, torch.float32, device)
    case()
    with pytest.raises(ValueError, match="layout must cover the keys, 17, with its rows, got 1"):
        case(max_seqlen_k=17)
    pages = paged(case, 4)
    pages()
    with pytest.raises(ValueError, match="block_table must hold max_seqlen_k, 16, in pages of 4"):
        pages(max_seqlen_k=16)


def test_equal_options_of_another_type_are_refused_after_a_good_call(device):
    case = make_case(SHAPE, torch.float32, device, causal=True, num_splits=1)
    case()
    with pytest.raises(TypeError, match="causal must be a bool, got int"):
        case(causal=1)
    with pytest.raises(TypeError, match="num_splits must be an int, got bool"):
        case(num_splits=True)


def test_addresses_between_two_accesses_do_not_reach_a_plan(device):
    case = make_case(SHAPE, torch.float16, device)
    want = run(case)
    room = torch.empty(case.inputs["q"].numel() + 1, dtype=torch.float16, device=device)
    q = room[1:].view(case.inputs["q"].shape).copy_(case.inputs["q"])
    assert q.stride() == case.inputs["q"].stride()
    assert_same(run(case.with_inputs(q=q)), want)


def test_tensors_put_away_and_laid_out_otherwise_are_differentiated(device):
    case = make_case(SHAPE, torch.float32, device)
    want = run(case)

    def put_away(t: Tensor) -> Tensor:
        return t.detach().clone()

    def take_back(t: Tensor) -> Tensor:
        return t.transpose(0, -1).contiguous().transpose(0, -1) if t.ndim == 4 else t

    with torch.autograd.graph.saved_tensors_hooks(put_away, take_back):
        assert_same(run(case), want)


def test_layouts_are_copied_without_what_was_planned(device):
    case = make_case(SHAPE, torch.float32, device)
    want = run(case)
    layout = case.options["layout"]
    for twin in (copy.deepcopy(layout), pickle.loads(pickle.dumps(layout))):
        assert twin == layout
        assert twin._calls is not layout._calls
        assert not twin._calls._known
        assert_same(run(case.with_options(layout=twin)), want)
    module = LocalStridedBlockSparseAttn(4, 64, 1, 3, 16, device=device)
    q = torch.zeros(20, 4, 16, device=device)
    ends = torch.tensor([0, 20], dtype=torch.int32, device=device)
    module(q, q, q, ends)
    assert copy.deepcopy(module).layout == module.layout


def test_a_layout_that_is_gone_takes_its_calls_along(device):
    """Nothing outside of a layout knows of its lists, or of plans that hold them."""
    import gc
    import weakref

    layout = BlockSparseLayout.local_strided(4, 64, 16, 1, 3, device=device)
    x = torch.zeros(1, 20, 4, 16, device=device)
    blocksparse_attn_func(x, x, x, layout)
    seen = weakref.ref(layout)
    gc.disable()
    try:
        del layout
        assert seen() is None
    finally:
        gc.enable()


@pytest.mark.skipif(not interpreted(), reason="on a CPU only the interpreter launches")
@pytest.mark.parametrize("make", CASES)
def test_a_warm_call_passes_five_frames_and_makes_no_launch(make, monkeypatch):
    """Counted from the public function, or from the derivative, to the launch; PyTorch's aside."""
    from blocksparse_attn._linked.launch.runtime import Launch

    package = str(Path(ops.__file__).parent)
    case = make("cpu")
    run(case)
    depths, made = [], []

    def launched(*_arguments: Any) -> None:
        frame, depth = sys._getframe(1), 1  # the launch itself
        while frame is not None:
            depth += frame.f_code.co_filename.startswith(package)
            frame = frame.f_back
        depths.append(depth)

    monkeypatch.setattr(Launch, "__call__", launched)
    monkeypatch.setattr(Launch, "__init__", lambda *arguments: made.append(arguments))
    run(case)
    assert depths
    assert max(depths) <= 5, depths
    assert not made
