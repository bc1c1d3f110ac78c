"""Calls with spans by the kernels: against float64, with every option, and against other masks."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
import triton.language as tl
from flash_attn_triton import attention_spans, varlen_attention_spans
from flash_attn_triton._dense.portable.arguments import HullTile
from flash_attn_triton._dense.portable.hulls import hull_kernel
from flash_attn_triton._dense.portable.spans import (
    hulls_of,
    load_spans,
    run_of_tiles,
    span_walk,
    walk_of_run,
)
from flash_attn_triton._linked.portable.mask import count_steps, step_start

from .._linked.budget import DTYPES, assert_same
from .._numerics import Packed, Shape, check, make_case, make_packed, run

# lengths are against the interpreter's 16 x 16 tiles
SHAPES = [
    Shape(2, 40, 75, 4, 2, 24),
    Shape(2, 75, 40, 2, 1, 16, 40),
    Shape(1, 1, 50, 2, 2, 16),
    Shape(1, 16, 16, 1, 1, 80),
    Shape(2, 0, 5, 2, 1, 16),
    Shape(2, 5, 0, 2, 1, 16),
    Shape(0, 5, 5, 2, 1, 16),
]
PACKED = Packed((18, 0, 33, 1), (33, 4, 0, 40), 2, 1, 16, padding=4)
SPANS = ["spans", "spans_batch", "spans_two"]
OTHERS = [(), ("softcap",), ("sinks",), ("dropout",), ("scale_negative",)]
OTHERS += itertools.combinations(["softcap", "sinks", "dropout"], 2)


@pytest.mark.eager
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spans", SPANS)
def test_shapes(spans, shape, device):
    check(make_case(shape, torch.float32, device, [spans]))


@pytest.mark.eager
@pytest.mark.parametrize("others", OTHERS, ids="-".join)
@pytest.mark.parametrize("spans", SPANS)
def test_options(spans, others, device):
    case = make_case(Shape(2, 40, 50, 4, 2, 16), torch.float32, device, [spans, *others])
    check(case.with_options(deterministic=len(others) == 1))


@pytest.mark.eager
@pytest.mark.parametrize("others", OTHERS, ids="-".join)
@pytest.mark.parametrize("spans", SPANS)
def test_packed(spans, others, device):
    case = make_packed(PACKED, torch.float32, device, [spans, *others])
    check(case)
    used = torch.tensor([21, 4, 0, 17], dtype=torch.int32, device=device)
    check(case.with_options(seqused_k=used))


@pytest.mark.eager
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype, device):
    check(make_case(Shape(1, 33, 47, 2, 1, 64), dtype, device, ["spans_two"]))


# ---- beside other masks


@pytest.mark.parametrize("mask", [{"causal": True}, {"window_size": (20, 5)}, {}], ids=str)
@pytest.mark.parametrize("lengths", [(40, 75), (75, 40)], ids=str)
def test_spans_of_a_window_give_its_results(lengths, mask, device):
    shape = Shape(2, *lengths, 4, 2, 16)
    case = make_case(shape, torch.float32, device, ["softcap", "sinks"])
    spans = attention_spans(*lengths, **mask, device=device)
    got, want = run(case.with_options(spans=spans)), run(case.with_options(**mask))
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_spans_of_packed_windows_give_their_results(device):
    case = make_packed(PACKED, torch.float32, device, ["dropout"])
    lengths = (case.options[name] for name in ("cu_seqlens_q", "cu_seqlens_k"))
    spans = varlen_attention_spans(*lengths, case.inputs["q"].shape[0], causal=True)
    got, want = run(case.with_options(spans=spans)), run(case.with_options(causal=True))
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_a_sequence_does_not_depend_on_its_neighbours(device):
    case = make_case(Shape(3, 40, 50, 4, 2, 16), torch.float32, device, ["spans_two", "sinks"])
    spans, want = case.options["spans"], run(case)
    case = case.with_options(spans=spans[1:2])
    alone = {name: x if name == "sinks" else x[1:2].contiguous() for name, x in case.inputs.items()}
    got = run(case.with_inputs(**alone), grad=False)
    for name, value in got.items():
        assert torch.equal(value, want[name][1:2]), name


def test_strides_change_no_bit(device):
    case = make_case(Shape(2, 40, 50, 2, 1, 16), torch.float32, device, ["spans_two"])
    spans = case.options["spans"]
    apart = spans.transpose(1, 3).contiguous().transpose(1, 3)
    assert not apart.is_contiguous()
    assert_same(run(case.with_options(spans=apart)), run(case))


# ---- what must not be read


@pytest.mark.eager
@pytest.mark.parametrize("poison", [float("nan"), float("-inf")], ids=str)
@pytest.mark.parametrize("features", [(), ("softcap", "sinks"), ("dropout",)], ids=str)
def test_keys_outside_of_the_hull(features, poison, device):
    """Two spans with a gap between; a row without a span hulls nothing."""
    case = make_case(Shape(1, 40, 90, 2, 1, 16), torch.float32, device, features)
    rows = torch.arange(40, dtype=torch.int32, device=device)
    spans = torch.stack([7 + rows // 8, 14 + rows // 8, 40 + rows // 2, 55 + rows // 2], -1)
    spans = spans.view(1, 40, 2, 2).int()
    spans[0, 5] = torch.tensor([[3, 3], [88, 80]])
    case = case.with_options(spans=spans)
    want = run(case)
    for name in ("k", "v"):
        changed = case.inputs[name].clone()
        changed[:, :7] = changed[:, 74:] = poison
        case = case.with_inputs(**{name: changed})
    assert_same(run(case), want)
    assert not want["dk"][:, :7].any()
    assert not want["out"][:, 5].any()


@pytest.mark.eager
@pytest.mark.parametrize("spans", SPANS)
def test_gradients_of_rows_that_see_nothing_are_ignored(spans, device):
    case = make_case(Shape(2, 40, 50, 2, 1, 16), torch.float32, device, [spans])
    leaves = {name: x.clone().requires_grad_() for name, x in case.inputs.items()}
    out, lse = case.function(**leaves, **case.options, return_lse=True)
    blind = (lse == float("-inf")).any(1)  # [batch, seqlen_q]
    assert blind.any()
    assert not blind.all()
    found = []
    for value in (0.0, float("nan")):
        dout = torch.ones_like(out).masked_fill(blind[..., None, None], value)
        found.append(torch.autograd.grad(out, list(leaves.values()), dout, retain_graph=True))
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


# ---- which tiles are visited

BLOCK, SLOTS = 16, 6


@triton.jit
def _walk_kernel(
    spans_ptr,
    hulls_ptr,
    visits_ptr,
    seqlen_q,
    seqlen_k,
    COUNT: tl.constexpr,
    BY_KEY: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Count the visits to each tile, [tile of queries, tile of keys, masked]."""
    own = tl.program_id(0)
    rows = own * BLOCK + tl.arange(0, BLOCK)
    hulls = hulls_of(
        load_spans(spans_ptr, rows, seqlen_q, seqlen_k, COUNT), rows, seqlen_q, seqlen_k
    )
    tiles = tl.cdiv(seqlen_q, BLOCK)
    for masked in tl.static_range(2):
        if BY_KEY:
            begin = tiles * 0
            while begin < tiles:
                start, begin = run_of_tiles(
                    hulls_ptr, begin, tiles, own * BLOCK, seqlen_q, masked == 1, COUNT, BLOCK, BLOCK
                )
                walk = walk_of_run(start, begin, masked == 1, BLOCK)
                for step in tl.range(0, count_steps(walk, BLOCK, masked == 1)):
                    tile = step_start(step, walk, BLOCK, masked == 1) // BLOCK
                    at = visits_ptr + (tile * SLOTS + own) * 2 + masked
                    tl.store(at, tl.load(at) + 1)
        else:
            for part in tl.static_range(COUNT):
                walk = span_walk(hulls, part, BLOCK)
                for step in tl.range(0, count_steps(walk, BLOCK, masked == 1)):
                    tile = step_start(step, walk, BLOCK, masked == 1) // BLOCK
                    at = visits_ptr + (own * SLOTS + tile) * 2 + masked
                    tl.store(at, tl.load(at) + 1)


def drawn(generator, count, seqlen_q, seqlen_k):
    """Spans of all sorts: of few ends, so that tiles are whole, at edges of tiles, and empty."""
    kind = int(torch.randint(0, 4, (), generator=generator))
    ends = torch.randint(0, 100, (3,), generator=generator)
    ends[kind % 3] = int(ends[kind % 3]) // BLOCK * BLOCK
    index = torch.randint(0, 3, (seqlen_q // (BLOCK + kind) + 1, count, 2), generator=generator)
    spans = ends[index].repeat_interleave(BLOCK + kind, 0)[:seqlen_q]
    if kind == 3:
        spans = spans.sort(-1).values + torch.arange(seqlen_q)[:, None, None] // 4
    return spans.int()


@pytest.mark.parametrize("by_key", [False, True], ids=["keys_of_queries", "queries_of_keys"])
@pytest.mark.parametrize("count", [1, 2])
def test_each_tile_of_the_hulls_is_visited_once(count, by_key, device):
    generator = torch.Generator().manual_seed(count)
    lengths = [(64, 96), (37, 75), (5, 90), (90, 17), (96, 96)]
    for seqlen_q, seqlen_k in lengths * 12:
        spans = drawn(generator, count, seqlen_q, seqlen_k)
        tiles_q, tiles_k = (-(-n // BLOCK) for n in (seqlen_q, seqlen_k))
        hulls = torch.zeros(tiles_q, count, 4, dtype=torch.int32, device=device)
        tensors = hulls, spans.to(device), None, None, None
        constants = HullTile(SPANS=count, BLOCK=BLOCK)._asdict()
        numbers = 1, seqlen_q, seqlen_k, tiles_q
        hull_kernel[(tiles_q,)](*tensors, *numbers, **constants, enable_fp_fusion=True)
        visits = torch.zeros(SLOTS, SLOTS, 2, dtype=torch.int32, device=device)
        _walk_kernel[(tiles_k if by_key else tiles_q,)](
            tensors[1],
            hulls,
            visits,
            seqlen_q,
            seqlen_k,
            count,
            by_key,
            BLOCK,
            SLOTS,
            enable_fp_fusion=True,
        )
        starts, ends = spans.clamp(0, seqlen_k).unbind(-1)
        cols = torch.arange(SLOTS * BLOCK)
        seen = ((cols >= starts[..., None]) & (cols < ends[..., None])).any(1)
        want = torch.zeros(SLOTS, SLOTS, dtype=torch.bool)
        whole = torch.zeros_like(want)
        for tile in range(tiles_q):
            block = slice(tile * BLOCK, (tile + 1) * BLOCK)
            for n in range(count):
                some = starts[block, n] < ends[block, n]
                if some.any():
                    first = int(starts[block, n][some].min())
                    last = int(ends[block, n][some].max())
                    want[tile, first // BLOCK : -(-last // BLOCK)] = True
            whole[tile] = seen[block].view(-1, SLOTS, BLOCK).all(2).all(0)
            if by_key and (tile + 1) * BLOCK > seqlen_q:
                whole[tile] = False
        visits = visits.cpu()
        message = f"{lengths=} {spans.tolist()=}"
        assert torch.equal(visits.sum(2), want.int()), message
        assert not (visits[..., 0].bool() & ~whole).any(), message
        if count == 1:
            assert torch.equal(visits[..., 0].bool(), whole & want), message
