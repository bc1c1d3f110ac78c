"""The backward kernel for Hopper: the sums beside it, and its numbers on a GPU."""

from __future__ import annotations

import math
import time

import pytest
import torch
from attn_common import cdiv, detect, next_power_of_2
from blocksparse_attn import BlockSparseLayout
from blocksparse_attn._attention.hopper.backward.launch import PIECE, ROWS, HopperBackward
from blocksparse_attn._attention.portable.arguments import (
    NO_STRIDES,
    RowNumbers,
    RowOptions,
    RowTensors,
)
from blocksparse_attn._attention.portable.backward_rows import row_kernel
from blocksparse_attn._linked.launch.entries import flat
from blocksparse_attn._linked.portable.strides import Strides

from ..._linked.budget import assert_same
from ..._linked.views import VIEWS
from ..._numerics import (
    Packed,
    Shape,
    check,
    make_case,
    make_packed,
    run,
    that_repeats,
    treat_as_short,
)

# ---- sums, which lie in the order of the accumulators' registers

NOTHING = RowTensors(*[None] * 6)


def options_of(head_dim, head_dim_v, width, **others):
    """Return the constants of a launch for blocks of 64 tokens, of one list per key head."""
    wide_v = next_power_of_2(head_dim_v)
    options = RowOptions(
        HEAD_DIM=head_dim,
        HEAD_DIM_V=head_dim_v,
        BLOCK_DV=wide_v,
        ROW_BYTES_V=16,
        BLOCK=ROWS,
        PER_HEAD=True,
        TOKENS=64,
        WIDTH=width,
        WIDTH_V=wide_v,
        PIECE=PIECE,
    )
    return options._replace(**others)


def in_order(sums):
    """Bring the last dimension of a tile into rows and columns, element by element."""
    width = sums.shape[-1] // 64
    lines, cols = torch.arange(64)[:, None], torch.arange(width)[None, :]
    warp, lower, line = lines // 16, lines % 16 // 8, lines % 8
    place = cols // 8 * 512 + warp * 128 + line * 16 + cols % 8 // 2 * 4 + lower * 2 + cols % 2
    return sums[..., place.to(sums.device)]


@pytest.mark.parametrize("waits", [False, True], ids=["at_once", "for_walks"])
@pytest.mark.parametrize("tokens_q", [119, 100, 140])
@pytest.mark.parametrize("block_d", [64, 128])
def test_sums_are_brought_into_their_order(block_d, tokens_q, waits, device):
    """Tiles of dq begin at positions: the first one may hold rows that there are not.

    Blocks of dk and dv are left alone that one program has written.
    """
    tokens_k, heads_q, heads_k, head_dim, head_dim_v = 119, 4, 2, block_d - 8, 128
    first = (tokens_k - tokens_q) // 64
    tiles = 2 - first
    dq_sums = torch.randn(heads_q, tiles, 2, 32 * block_d, device=device)
    sums = [torch.randn(heads_k, 2, 64 * d, device=device) for d in (block_d, head_dim_v)]
    dq, dk, dv = (
        torch.full((1, tokens, heads, width), 7.0, device=device).half()
        for tokens, heads, width in (
            (tokens_q, heads_q, head_dim),
            (tokens_k, heads_k, head_dim),
            (tokens_k, heads_k, head_dim_v),
        )
    )
    parts = torch.tensor([2, 1, 9, 0, 3, 9], device=device)
    # of walks that have ended
    counters = torch.zeros(heads_k, dtype=torch.int32, device=device) if waits else None
    tensors = NOTHING._replace(
        parts_ptr=parts,
        counters_ptr=counters,
        dq_sums_ptr=dq_sums,
        dk_sums_ptr=sums[0],
        dv_sums_ptr=sums[1],
        dq_ptr=dq,
        dk_ptr=dk,
        dv_ptr=dv,
    )
    numbers = RowNumbers(
        tokens_q=tokens_q,
        rows=0,
        dout=NO_STRIDES,
        heads_q=heads_q,
        scale=0.5,
        batch=1,
        heads_k=heads_k,
        tokens_k=tokens_k,
        tiles_q=tiles,
        tiles_k=2,
        list_pieces=3,
        slots_q=heads_q * tiles,
        slots_k=heads_k * 2,
    )
    options = options_of(head_dim, head_dim_v, block_d, ROUNDS=True)
    grid = numbers.slots_q + numbers.slots_k
    row_kernel[(grid,)](*tensors, *flat(numbers), **options._asdict(), num_warps=4)
    want = in_order(dq_sums).transpose(2, 3).reshape(heads_q, tiles * 64, block_d)
    ahead = tokens_k - tokens_q - first * 64
    want = want[:, ahead : ahead + tokens_q, :head_dim].transpose(0, 1)
    assert torch.equal(dq[0], (want * 0.5).half())
    for got, given, scale in zip((dk, dv), sums, (0.5, 1.0), strict=True):
        want = in_order(given).reshape(heads_k, 128, -1)[:, :tokens_k, : got.shape[-1]]
        want = want.transpose(0, 1) * scale
        want[64:, 0] = 7.0
        want[:64, 1] = 0.0  # nobody's
        assert torch.equal(got[0], want.half())


@pytest.mark.device
@pytest.mark.parametrize("pending", range(4))
def test_sums_wait_for_the_walks_of_their_head(pending, device):
    """Those of one key head of one sequence, and no others."""
    batch, tokens, heads_q, heads_k, dim, tiles = 2, 192, 4, 2, 64, 3
    dq_sums = torch.randn(batch, heads_q, tiles, 2, 32 * dim, device=device)
    dq = torch.full((batch, tokens, heads_q, dim), 7.0, device=device).half()
    counters = torch.zeros(batch * heads_k, dtype=torch.int32, device=device)
    counters[pending] += -1  # as it is raised: a kernel is not loaded while another one waits
    slots = batch * heads_q * tiles
    # of keys there are none
    numbers = RowNumbers(
        tokens_q=tokens,
        rows=0,
        dout=NO_STRIDES,
        heads_q=heads_q,
        scale=1.0,
        batch=batch,
        heads_k=heads_k,
        tokens_k=tokens,
        tiles_q=tiles,
        tiles_k=tiles,
        slots_q=slots,
    )
    tensors = NOTHING._replace(
        parts_ptr=counters,
        counters_ptr=counters,
        dq_sums_ptr=dq_sums,
        dk_sums_ptr=dq_sums,
        dv_sums_ptr=dq_sums,
        dq_ptr=dq,
        dk_ptr=dq,
        dv_ptr=dq,
    )
    options = options_of(dim, dim, 64, ROUNDS=True)
    want = in_order(dq_sums).transpose(3, 4).reshape(batch, heads_q, tokens, dim)
    want = want.transpose(1, 2).half()
    waiting, other = torch.cuda.Stream(), torch.cuda.Stream()
    dq.clone()
    torch.cuda.synchronize()
    with torch.cuda.stream(waiting):
        row_kernel[(slots,)](*tensors, *flat(numbers), **options._asdict(), num_warps=4)
    time.sleep(0.1)
    with torch.cuda.stream(other):
        seen = dq.clone()
        other.synchronize()
        assert not waiting.query()
        counters[pending] += 1
    waiting.synchronize()
    assert torch.equal(dq, want)
    sequence, head = divmod(pending, heads_k)
    heads = slice(2 * head, 2 * head + 2)
    assert bool((seen[sequence, :, heads] == 7.0).all())
    seen[sequence, :, heads] = want[sequence, :, heads]
    assert torch.equal(seen, want)


@pytest.mark.parametrize("tokens_q", [8, 150])
def test_sums_are_cleared_of_queries_and_of_keys_that_are_shared(tokens_q, device):
    """Also where there are more blocks of keys than of rows."""
    heads_q, heads_k, tiles_q = 4, 2, 3
    out = torch.zeros(1, tokens_q, heads_q, 64, device=device).half()
    lse = torch.zeros(1, heads_q, tokens_q, device=device)
    delta, lse2 = torch.empty_like(lse), torch.empty_like(lse)
    dq_sums = torch.full((heads_q, tiles_q, 64 * 64), math.nan, device=device)
    sums = [torch.full((heads_k, 3, 64 * d), math.nan, device=device) for d in (64, 128)]
    parts = torch.tensor([2, 1, 0, 9, 0, 3, 1, 9], device=device)
    grid, pieces = max(cdiv(lse.numel(), ROWS), heads_k * 3), dq_sums.numel() // PIECE
    numbers = RowNumbers(
        tokens_q=tokens_q,
        rows=lse.numel(),
        dout=Strides(*out.stride()[:3]),
        heads_q=heads_q,
        scale=1.0,
        batch=1,
        heads_k=heads_k,
        tokens_k=150,
        tiles_k=3,
        list_pieces=4,
        slots_k=heads_k * 3,
        share=cdiv(pieces, grid),
        pieces=pieces,
    )
    tensors = RowTensors(
        out_ptr=out,
        dout_ptr=out,
        lse_ptr=lse,
        dlse_ptr=None,
        delta_ptr=delta,
        lse2_ptr=lse2,
        parts_ptr=parts,
        dq_sums_ptr=dq_sums,
        dk_sums_ptr=sums[0],
        dv_sums_ptr=sums[1],
    )
    options = options_of(64, 64, 64, WIDTH_V=128)
    row_kernel[(grid,)](*tensors, *flat(numbers), **options._asdict(), num_warps=4)
    for filled in (dq_sums, delta, lse2):
        assert not filled.any()
    for given in sums:
        cleared = ~given.isnan().any(2)
        assert cleared.tolist() == [[True, False, False], [False, True, False]]
        assert not given[cleared].any()


# ---- numbers

SHAPES = [
    Shape(2, 128, 128, 2, 2, 128),
    Shape(1, 40, 40, 1, 1, 64),
    Shape(2, 333, 900, 8, 2, 128),  # a chunk: its first block begins ahead of it
    Shape(2, 900, 333, 4, 1, 64),  # rows ahead of the first key
    Shape(2, 129, 257, 2, 1, 96),
    Shape(1, 500, 513, 2, 2, 40, 128),
    Shape(1, 200, 300, 2, 1, 128, 24),
    Shape(2, 3000, 3000, 8, 2, 128),
]
BLOCKS = [(64, 64), (128, 128), (128, 64), (64, 128), (32, 32), (16, 16), (64, 16)]


@pytest.fixture
def served(monkeypatch, device, request):
    """Hold the kernel to the budget of the package, where there is a GPU for it."""
    if not detect(device).is_hopper:
        pytest.skip(f"{detect(device)} is not Hopper")
    # rows are short here, and sums are to be tested
    treat_as_short(monkeypatch, 0)
    calls = []
    real = HopperBackward.__call__

    def launched(*arguments):
        calls.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(HopperBackward, "__call__", launched)

    def serve(case, function=check):
        calls.clear()
        got = function(case)
        assert calls
        return got

    return serve


@pytest.mark.device
@pytest.mark.parametrize("pattern", ["random", "local"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, pattern, device, served):
    served(make_case(shape, torch.bfloat16, device, pattern, (64, 64), spare=1))


@pytest.mark.device
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shared", [False, True], ids=["per_head", "shared"])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_blocks(block, shared, causal, device, served):
    shape = Shape(2, 700, 900, 4, 2, 128)
    case = make_case(
        shape, torch.float16, device, "random", block, shared=shared, causal=causal, spare=2
    )
    served(case)


@pytest.mark.device
@pytest.mark.parametrize("pattern", ["all", "none"])
def test_everything_and_nothing(pattern, device, served):
    shape = Shape(1, 700, 700, 4, 1, 128)
    got = served(make_case(shape, torch.bfloat16, device, pattern, (64, 64)))
    if pattern == "none":
        assert not any(got[name].any() for name in ("dq", "dk", "dv"))


@pytest.mark.device
@pytest.mark.parametrize("shared", [False, True], ids=["per_head", "shared"])
def test_long_walks_and_columns(shared, device, served):
    """The pattern of Phi-3-small: columns are walked by programs of their own, and cut."""
    case = make_case(Shape(1, 6000, 6000, 8, 2, 64), torch.bfloat16, device)
    layout = BlockSparseLayout.local_strided(8, 6016, 64, 4, 8, shared, device=device)
    served(case.with_options(layout=layout))


@pytest.mark.device
@pytest.mark.parametrize("shared", [False, True], ids=["per_head", "shared"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_packed(causal, shared, device, served):
    lengths = 500, 0, 629, 128, 1, 900, 900
    case = make_packed(
        Packed(lengths, lengths, 6, 3, 128, padding=7),
        torch.bfloat16,
        device,
        "random",
        (64, 64),
        shared=shared,
        causal=causal,
        spare=1,
    )
    case = case.with_options(cu_seqlens_k=case.options["cu_seqlens_q"])
    got = served(case)
    for name in ("dq", "dk", "dv"):
        assert not got[name][sum(lengths) :].any()


@pytest.mark.device
@pytest.mark.parametrize("view", sorted(VIEWS))
def test_views(view, device, served):
    case = make_case(Shape(2, 300, 333, 4, 2, 128), torch.bfloat16, device, "local", (64, 64))
    seen = {name: VIEWS[view](t) for name, t in case.inputs.items()}
    served(case.with_inputs(**seen))


@pytest.mark.device
def test_keys_that_nobody_sees(device, served):
    """NaN in blocks kept by rows that the chunk has not, behind the end, and around the inputs."""
    kept = torch.zeros(16, 16, dtype=torch.bool)
    kept[torch.arange(16), torch.arange(16)] = True
    kept[8, 2] = True  # rows from 512 on, which the chunk has not
    layout = BlockSparseLayout.from_dense(kept.expand(2, 16, 16), 64).to(device)
    case = make_case(Shape(1, 400, 980, 2, 2, 128), torch.bfloat16, device)
    case = case.with_options(layout=layout)
    want = served(case)
    bad = {name: t.clone() for name, t in case.inputs.items()}
    for name in "kv":
        bad[name][:, :576] = math.nan
    assert_same(run(case.with_inputs(**bad)), want)
    inside = {name: VIEWS["inside"](t) for name, t in case.inputs.items()}
    assert_same(run(case.with_inputs(**inside)), want)


@pytest.mark.device
def test_results_that_repeat(device):
    """Asked for by PyTorch's switch, of calls that were served without it."""
    case = make_case(Shape(1, 2000, 2000, 8, 2, 128), torch.bfloat16, device, "local", (64, 64))
    run(case)
    torch.use_deterministic_algorithms(True)
    want = run(case)
    for _ in range(20):
        assert_same(run(case), want)


@pytest.mark.device
@pytest.mark.parametrize("shared", [False, True], ids=["per_head", "shared"])
@pytest.mark.parametrize(
    ("block", "asked"), [((64, 64), True), ((16, 16), True), ((64, 64), False)], ids=str
)
def test_gradients_that_repeat(block, asked, shared, device, served, monkeypatch):
    """Of columns that several programs add to; also captured in a graph.

    They are asked for, or rows are short.
    """
    case = make_case(
        Shape(2, 3000, 3000, 8, 2, 128), torch.bfloat16, device, "local", block, shared=shared
    )
    if asked:
        case = that_repeats(case)
    else:
        treat_as_short(monkeypatch, 3000)
    served(case)
    want = run(case)
    for _ in range(20):
        assert_same(run(case), want)
    x = {name: t.detach().requires_grad_() for name, t in case.inputs.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.function(**x, **case.options)
        grads = torch.autograd.grad(out, list(x.values()), torch.ones_like(out))
    graph.replay()
    first = [t.clone() for t in grads]
    for _ in range(5):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(grads, first, strict=True))
