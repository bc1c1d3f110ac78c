"""Forward results against the float64 reference, on a GPU or in the interpreter."""

from __future__ import annotations

import pytest
import torch
from blocksparse_attn import blocksparse_attn_func
from blocksparse_attn._attention import tiles

from .._linked.budget import DTYPES, assert_same
from .._linked.views import VIEWS
from .._numerics import BLOCKS, PATTERNS, Shape, check, make_case, pairs, run
from ._forward import SMALL

causal = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@causal
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_matches_reference(shape, causal, device):
    check(make_case(shape, torch.float32, device, causal=causal), grad=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SMALL[1:5], ids=str)
def test_half_precision(shape, dtype, device):
    check(make_case(shape, dtype, device), grad=False)


@causal
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_block_size(block, causal, device):
    shape = Shape(1, 50, 70, 1, 1, 16)
    check(make_case(shape, torch.float32, device, block=block, causal=causal), grad=False)


@causal
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_pattern(pattern, causal, device):
    shape = Shape(1, 40, 50, 2, 1, 16)
    case = make_case(shape, torch.float32, device, pattern, (16, 32), spare=2, causal=causal)
    check(case, grad=False)


# a tile of 32 holds two heads of one row of blocks, or one head of two
@pytest.mark.parametrize("shared", [False, True], ids=["per_head", "shared"])
@pytest.mark.parametrize("heads", [(4, 1), (3, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("seqlen_q", [3, 37])
def test_heads_of_a_group(seqlen_q, heads, shared, device):
    shape = Shape(1, seqlen_q, 37, *heads, 16)
    check(make_case(shape, torch.float32, device, shared=shared), grad=False)


@pytest.mark.parametrize("block", [(16, 16), (64, 32)], ids=str)
@pytest.mark.parametrize("seqlens", [(16, 48), (13, 48), (20, 45), (31, 33), (10, 150)], ids=str)
def test_chunks_of_a_prefill(seqlens, block, device):
    """The last queries of a longer one: the same rows, and the same bits."""
    seqlen_q, seqlen_k = seqlens
    whole = make_case(Shape(1, seqlen_k, seqlen_k, 2, 1, 16), torch.float32, device, "local", block)
    chunk = whole.with_inputs(q=whole.inputs["q"][:, seqlen_k - seqlen_q :])
    got = check(chunk, grad=False)
    want = run(whole, grad=False)
    assert torch.equal(got["out"], want["out"][:, seqlen_k - seqlen_q :])
    assert torch.equal(got["lse"], want["lse"][..., seqlen_k - seqlen_q :])


@pytest.mark.parametrize("tile", [(16, 16), (16, 64), (64, 16), (128, 32)], ids=str)
@causal
def test_other_tiles(tile, causal, device, monkeypatch):
    if device.type != "cpu":
        pytest.skip("a GPU has tiles of its own")
    row = ((256, tiles.Tile(*tile, 1, 1)),)
    for table in (tiles._TALL, tiles._BACKWARD_DQ, tiles._BACKWARD_DKDV):
        monkeypatch.setitem(table, "cpu", row)
    for cached in (tiles.tall_shape, tiles.backward_dq_shape, tiles.backward_dkdv_tile):
        cached.cache_clear()
    try:
        shape = Shape(1, 40, 70, 2, 1, 16)
        check(make_case(shape, torch.float32, device, causal=causal))
    finally:
        for cached in (
            tiles.tall_shape,
            tiles.backward_dq_shape,
            tiles.backward_dkdv_tile,
        ):
            cached.cache_clear()


@pytest.mark.device
@pytest.mark.parametrize(
    ("block", "dtype", "shared", "causal"),
    pairs(BLOCKS, DTYPES, [False, True], [True, False]),
    ids=str,
)
def test_every_block_size_at_length(block, dtype, shared, causal, device):
    shape = Shape(2, 700, 900, 8, 2, 128)
    case = make_case(shape, dtype, device, "local", block, shared=shared, causal=causal)
    check(case, grad=False)


@pytest.mark.parametrize("view", VIEWS)
def test_strides_do_not_change_a_bit(view, device):
    case = make_case(Shape(1, 17, 20, 4, 2, 24), torch.float16, device)
    viewed = {name: VIEWS[view](t) for name, t in case.inputs.items()}
    for name, t in viewed.items():
        assert torch.equal(t, case.inputs[name])
    assert_same(run(case.with_inputs(**viewed)), run(case))


@pytest.mark.eager
@pytest.mark.parametrize("requires_grad", [False, True])
def test_what_is_returned(requires_grad, device):
    case = make_case(Shape(1, 9, 9, 2, 1, 16), torch.float32, device)
    q, k, v = (t.requires_grad_(requires_grad) for t in case.inputs.values())
    layout = case.options["layout"]
    out = blocksparse_attn_func(q, k, v, layout)
    assert isinstance(out, torch.Tensor)
    pair = blocksparse_attn_func(q, k, v, layout, return_lse=True)
    assert torch.equal(out, pair[0])
    assert pair[1].shape == (1, 2, 9)
    assert out.requires_grad == requires_grad
