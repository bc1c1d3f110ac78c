"""What only a GPU can show: graphs, streams, devices, sizes, Inductor."""

from __future__ import annotations

import time
import warnings

import pytest
import torch
from blocksparse_attn import BlockSparseLayout, blocksparse_attn_func

from .._linked.budget import Maker, assert_same, offsets
from .._numerics import (
    Case,
    Packed,
    Shape,
    assert_alike,
    check,
    make_case,
    make_packed,
    paged,
    pairs,
    run,
)

pytestmark = pytest.mark.device

SHAPE = Shape(2, 300, 333, 4, 2, 64)


def step(case):
    """A call and its gradients, into tensors that stay where they are."""
    leaves = {name: t.detach().requires_grad_() for name, t in case.inputs.items()}
    out, lse = case.function(**leaves, **case.options, return_lse=True)
    grads = torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))
    return [out.detach(), lse.detach(), *grads]


def capture(case):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(case)  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(case)
    return graph, results


@pytest.mark.parametrize("form", ["fixed", "packed"])
def test_graph_replays_with_new_inputs(form, device):
    def make(seed):
        if form == "fixed":
            return make_case(SHAPE, torch.bfloat16, device, "local", (64, 64), seed=seed)
        shape = Packed((100, 0, 1, 200), (120, 7, 300, 200), 4, 2, 64, padding=5)
        return make_packed(shape, torch.bfloat16, device, "local", (32, 64), seed=seed)

    static = make(0)
    graph, results = capture(static)
    for seed in (1, 2):
        fresh = make(seed)
        for name, t in fresh.inputs.items():
            static.inputs[name].copy_(t)
        graph.replay()
        assert_alike(results, step(fresh))


def test_graph_with_new_lengths(device):
    """Lengths are device data: one graph serves every split of its tokens, decode among them."""
    shape = Packed((100, 0, 200), (120, 7, 200), 4, 2, 64)
    static = make_packed(shape, torch.bfloat16, device, "local", spare=20, num_splits=2)
    static = static.with_options(max_seqlen_q=300, max_seqlen_k=327)
    graph, results = capture(static)
    for lengths_q, lengths_k in [((1, 298, 1), (300, 20, 7)), ((150, 150, 0), (0, 327, 0))]:
        static.options["cu_seqlens_q"].copy_(offsets(lengths_q, device))
        static.options["cu_seqlens_k"].copy_(offsets(lengths_k, device))
        graph.replay()
        for got, want in zip(results, step(static), strict=True):
            assert torch.equal(got, want)


def test_a_layout_planned_within_a_graph(device):
    """Plans are made on the device: a capture may hold them."""
    case = make_case(SHAPE, torch.bfloat16, device, "local", (64, 64))
    want = step(case)
    layout = case.options["layout"]
    fresh = BlockSparseLayout(layout.crow, layout.col, 64, num_cols=layout.num_cols)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(case.with_options(layout=fresh))
    # what a capture computes is not there before its replay
    assert not fresh._lists.known
    assert not fresh._calls._known
    graph.replay()
    for mine, exact in zip(got, want, strict=True):
        torch.testing.assert_close(mine, exact, rtol=2e-2, atol=2e-2)


def test_second_stream(device):
    case = make_case(SHAPE, torch.bfloat16, device, "local", (64, 64))
    want = run(case)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # the inputs arrive late, on this stream alone
        late = case.with_inputs(**{name: t.clone() for name, t in case.inputs.items()})
        got = run(late)
    stream.synchronize()
    assert_alike(got.values(), want.values())


def test_what_another_stream_has_planned(device):
    """A layout is shared by streams; the one that calls first may be late."""
    case = make_case(SHAPE, torch.bfloat16, device, "local", (64, 64))
    want = run(case)
    layout = case.options["layout"]
    fresh = BlockSparseLayout(layout.crow, layout.col, 64, num_cols=layout.num_cols)
    late, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    results = []
    for stream, cycles in ((late, 100_000_000), (other, 1), (late, 1)):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
            results.append(run(case.with_options(layout=fresh)))
    torch.cuda.synchronize()
    for got in results:
        assert_alike(got.values(), want.values())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_a_device_that_is_not_current(device):
    case = make_case(SHAPE, torch.bfloat16, device, "local", (64, 64))
    other = torch.device("cuda", 1)
    inputs = {name: t.to(other) for name, t in case.inputs.items()}
    moved = Case(inputs, {"layout": case.options["layout"].to(other)})
    assert torch.cuda.current_device() == 0
    got = run(moved)
    assert_alike([t.cpu() for t in got.values()], [t.cpu() for t in run(case).values()])


@pytest.mark.parametrize(
    ("width", "block", "kind"),
    pairs([64, 96, 128, 256], [16, 32, 64, 128], ["alike", "unlike", "shared"]),
    ids=str,
)
def test_every_tile_of_the_backward_against_fp32(width, block, kind, device):
    """Hopper's products of accumulators have been compiled wrongly before."""
    shape = Shape(1, 700, 700, 8, 2, width)
    kinds = {"shared": kind == "shared", "alike": kind != "unlike"}
    check(make_case(shape, torch.bfloat16, device, "local", (block, block), **kinds))


@pytest.mark.parametrize("lengths", [(8192,) * 32, (1, 100, 20000, 64)], ids=["even", "uneven"])
def test_decode_of_long_contexts(lengths, device):
    shape = Packed((1,) * len(lengths), lengths, 32, 8, 128)
    case = make_packed(shape, torch.bfloat16, device)
    layout = BlockSparseLayout.local_strided(32, max(lengths), 64, device=device)
    case = case.with_options(layout=layout)
    results = {
        splits: run(case.with_options(num_splits=splits), grad=False) for splits in (0, 1, 8)
    }
    for splits in (0, 8):
        for name, value in results[splits].items():
            torch.testing.assert_close(value, results[1][name], rtol=2e-2, atol=2e-2)
    assert_same(run(paged(case, 16).with_options(num_splits=8), grad=False), results[8])


def test_building_a_layout_is_fast(device):
    BlockSparseLayout.local_strided(32, 131072, device=device)
    torch.cuda.synchronize()
    started = time.perf_counter()
    BlockSparseLayout.local_strided(32, 131072, device=device)
    torch.cuda.synchronize()
    assert time.perf_counter() - started < 0.1


def test_inductor(device):
    layout = BlockSparseLayout.local_strided(4, 512, 64, 1, 3, device=device)
    fast = torch.compile(
        lambda q, k, v: blocksparse_attn_func(q * 2, k, v, layout).sin(), fullgraph=True
    )
    m = Maker(device, torch.bfloat16)
    leaves = [m.randn(1, 400, 4, 64).requires_grad_() for _ in range(3)]
    with warnings.catch_warnings():
        # dynamo makes an instance of an autograd function, against PyTorch's own advice
        warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
        got = fast(*leaves)
    q, k, v = leaves
    want = blocksparse_attn_func(q * 2, k, v, layout).sin()
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    grads = (torch.autograd.grad(x.sum(), leaves) for x in (got, want))
    for mine, exact in zip(*grads, strict=True):
        torch.testing.assert_close(mine, exact, rtol=2e-2, atol=5e-2)
