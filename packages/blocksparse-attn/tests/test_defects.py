"""What kernels of this family got wrong before: one test, at least, for each."""

from __future__ import annotations

import time
import warnings

import pytest
import torch
from blocksparse_attn import (
    BlockSparseLayout,
    LocalStridedBlockSparseAttn,
    blocksparse_attn_func,
    blocksparse_attn_varlen_func,
    blocksparse_flash_attn_varlen_fwd,
    get_sparse_attn_mask,
    patterns,
)

from ._linked.budget import Maker, offsets
from ._numerics import Packed, Shape, assert_same_sums, check, make_case, make_packed


@pytest.mark.parametrize("block", [(64, 16), (32, 16), (128, 32)], ids=str)
def test_b1_wide_query_blocks_do_not_see_the_future(block, device):
    """The diagonal crosses several key blocks of a row, and the end may cut any."""
    check(make_case(Shape(1, 50, 50, 2, 1, 16), torch.float32, device, "all", block), grad=False)


@pytest.mark.eager
@pytest.mark.parametrize("homo_head", [False, True])
@pytest.mark.parametrize("head_range", [None, (1, 3)], ids=str)
def test_b1_wide_query_blocks_of_the_drop_in(homo_head, head_range, device):
    module = LocalStridedBlockSparseAttn(
        4,
        128,
        1,
        3,
        16,
        device=device,
        homo_head=homo_head,
        active_head_range=head_range,
        q_block_size=32,
    )
    heads = module.layout.num_heads
    assert heads == (4 if head_range is None else 2)
    m = Maker(device, torch.float32)
    q, k, v = (m.randn(50, heads, 16) for _ in range(3))
    cu = offsets([30, 20], device)
    want = make_packed(Packed((30, 20), (30, 20), heads, heads, 16), torch.float32, device)
    want = want.with_inputs(q=q, k=k, v=v).with_options(layout=module.layout)
    check(want, grad=False)
    got = module(q, k, v, cu)
    torch.testing.assert_close(got, want()[0], rtol=1e-5, atol=1e-6)


def test_b2_empty_rows_unsorted_columns_blocks_right_of_the_diagonal(device):
    layout = BlockSparseLayout(
        torch.tensor([[0, 0, 3, 3, 5]]), torch.tensor([[3, 1, 0, 2, 3]]), 16
    ).to(device)
    case = make_case(Shape(1, 60, 60, 2, 1, 16), torch.float32, device).with_options(layout=layout)
    got = check(case)
    # a row of nothing, not its neighbour's
    for rows in (slice(0, 16), slice(32, 48)):
        assert not got["out"][:, rows].any()
        assert (got["lse"][..., rows] == float("-inf")).all()


@pytest.mark.parametrize("kind", ["fixed", "packed"])
def test_b3_nothing_of_the_device_reaches_the_host(kind, device, monkeypatch):
    if kind == "fixed":
        case = make_case(Shape(1, 20, 33, 2, 1, 16), torch.float32, device)
    else:
        case = make_packed(Packed((20, 1), (33, 40), 2, 1, 16), torch.float32, device)
    if device.type == "cuda":
        leaves = [t.requires_grad_() for t in case.inputs.values()]
        out = case.function(*leaves, **case.options)
        dout = torch.ones_like(out)
        torch.autograd.grad(out, leaves, dout)  # compiles
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it tells of itself
                torch.cuda.set_sync_debug_mode("error")
            fresh = BlockSparseLayout.local_strided(2, 64, 16, 2, 3, device=device)
            out = case.function(*leaves, **{**case.options, "layout": fresh})
            torch.autograd.grad(out, leaves, dout)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    # on a CPU the launchers are looked at: they ask no tensor for a number, only the checks do
    from blocksparse_attn._attention import ops
    from blocksparse_attn._attention.portable import form

    def refuse(*_arguments, **_options):
        raise AssertionError("a call looked at a tensor's values")

    monkeypatch.setattr(ops, "check_values", lambda *_: None)
    monkeypatch.setattr(BlockSparseLayout, "_check_values", lambda _: None)
    monkeypatch.setattr(form, "Launch", lambda *_: lambda *_: None)
    leaves = [t.requires_grad_() for t in case.inputs.values()]
    for name in ("item", "tolist", "cpu", "__bool__", "__int__", "__index__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    out = case.function(*leaves, **case.options)
    torch.autograd.grad(out, leaves, torch.ones_like(out))


@pytest.mark.eager
@pytest.mark.parametrize("seqlens", [(5, 40), (40, 41), (2, 3)], ids=str)
def test_b4_any_number_of_queries(seqlens, device):
    check(make_case(Shape(1, *seqlens, 2, 1, 16), torch.float32, device, "local"), grad=False)


@pytest.mark.eager
def test_b4_an_empty_batch(device):
    q = torch.randn(3, 2, 16, device=device)
    layout = BlockSparseLayout.local_strided(2, 64, 16, 1, 2, device=device)
    cu = offsets([], device)
    out, lse = blocksparse_attn_varlen_func(q, q, q, cu, cu, 0, 0, layout, return_lse=True)
    assert not out.any()
    assert (lse == float("-inf")).all()


def test_b5_decode_is_split_over_the_keys(device):
    """Parts of the keys, of all heads of a group at once, and the same result."""
    case = make_packed(Packed((1, 1), (150, 97), 4, 1, 16), torch.float32, device, "local")
    whole = check(case.with_options(num_splits=1), grad=False)
    parts = check(case.with_options(num_splits=4), grad=False)
    assert not torch.equal(whole["out"], parts["out"])
    torch.testing.assert_close(whole["out"], parts["out"], rtol=1e-5, atol=1e-6)


def test_b6_decode_in_a_mixture_takes_the_short_tile(device):
    """Bit for bit: one query is computed alike, whatever shares its batch."""
    case = make_packed(Packed((33, 1), (33, 70), 4, 2, 16), torch.float32, device, num_splits=1)
    out, _ = case()
    alone = blocksparse_attn_func(
        case.inputs["q"][None, 33:],
        case.inputs["k"][None, 33:],
        case.inputs["v"][None, 33:],
        case.options["layout"],
        num_splits=1,
    )
    assert torch.equal(out[33:], alone[0])


@pytest.mark.eager
def test_b7_masks_are_new_and_layouts_do_not_change():
    one = get_sparse_attn_mask(2, 64, 64, torch.float32, "cpu", 16, 1, 2)
    two = get_sparse_attn_mask(2, 64, 64, torch.float32, "cpu", 16, 1, 2)
    one[0][1].fill_(7)
    one[1].fill_(7.0)
    assert int(two[0][1].max()) < 7
    assert float(two[1].max()) == 1.0


@pytest.mark.eager
def test_b7_building_takes_memory_for_the_kept_blocks_alone():
    started = time.perf_counter()
    module = LocalStridedBlockSparseAttn(32, 131072, 16, 8, 64, device="cpu", use_spda=True)
    assert time.perf_counter() - started < 5.0
    assert module.layout.col.numel() < 0.1 * 32 * 2048**2


@pytest.mark.device
def test_b8_addresses_beyond_32_bits(device):
    free, _ = torch.cuda.mem_get_info()
    if free < 40 * 2**30:
        pytest.skip(f"needs 40 GiB of free GPU memory, has {free / 2**30:.0f}")
    tokens, near, heads, width = 262144 + 4096, 4096, 64, 128
    assert tokens * heads * width > 2**31
    q, k, v = (
        torch.randn(1, tokens, heads, width, device=device, dtype=torch.bfloat16) for _ in range(3)
    )
    layout, small = (patterns.sliding_window(n, 3, device=device) for n in (tokens, near))
    for count in (512, 1):
        last = q[:, -count:].clone().requires_grad_()
        got = blocksparse_attn_func(last, k, v, layout, num_splits=1)
        # the same rows against a copy of the keys that they see
        copies = [x[:, -near:].clone() for x in (k, v)]
        want = blocksparse_attn_func(last, *copies, small, num_splits=1)
        assert torch.equal(got, want)
        grads = (torch.autograd.grad(out, last, torch.ones_like(out)) for out in (got, want))
        assert_same_sums(*grads)


@pytest.mark.eager
def test_b9_a_sequence_longer_than_the_layout(device):
    layout = BlockSparseLayout.local_strided(2, 32, 16, 1, 2, device=device)
    x = torch.randn(1, 33, 2, 16, device=device)
    with pytest.raises(ValueError, match="layout must cover the keys, 33, with its rows, got 2"):
        blocksparse_attn_func(x, x, x, layout)


def test_b9_positions_past_the_layout_see_nothing(device):
    """What only the device knows: nothing is read past the layout. A CPU tells."""
    case = make_packed(Packed((50, 1), (50, 50), 2, 1, 16), torch.float32, device, "all")
    small = BlockSparseLayout.from_dense(torch.ones(2, 2, dtype=torch.bool), 16).to(device)
    case = case.with_options(layout=small, max_seqlen_k=32)
    if device.type == "cpu":
        with pytest.raises(ValueError, match=r"cu_seqlens_k\[1\] must be at most max_seqlen_k, 32"):
            case.function(*case.inputs.values(), **case.options)
        return
    got = check(case)
    assert not got["out"][32:].any()


@pytest.mark.eager
def test_b9_scale_lse_and_another_width_of_values(device):
    case = make_case(Shape(1, 20, 20, 2, 1, 16, 24), torch.float32, device, softmax_scale=0.0)
    got = check(case)
    assert got["out"].shape[-1] == 24
    m = Maker(device, torch.float32)
    q, k, v = m.randn(20, 2, 16), m.randn(20, 1, 16), m.randn(20, 1, 24)
    layout = BlockSparseLayout.local_strided(2, 32, 16, 1, 2, device=device)
    arguments = (q, k, v, offsets([20], device), None)
    sparse = (layout.crow, layout.col)
    zero, default, half = (
        blocksparse_flash_attn_varlen_fwd(*arguments, scale, sparse, block_size=16)
        for scale in (0.0, None, 16**-0.5)
    )
    assert torch.equal(default, half)
    assert not torch.equal(zero, half)


@pytest.mark.eager
def test_b10_padding_and_prompts_of_any_form(device):
    """There is no padded path: the same call serves prompts, chunks and decode."""
    module = LocalStridedBlockSparseAttn(2, 64, 1, 3, 16, device=device, use_spda=True)
    m = Maker(device, torch.float32)
    q, k, v = m.randn(4, 2, 16), m.randn(60, 2, 16), m.randn(60, 2, 16)
    out = module(q, k, v, offsets([40, 20], device), offsets([3, 1], device))
    assert out.isfinite().all()
    assert module(q[:2], k, v, offsets([40, 20], device)).shape == (2, 2, 16)


def test_b11_fp32_is_fp32(device):
    """TF32 would be off by 1e-3."""
    check(make_case(Shape(1, 64, 64, 2, 1, 64), torch.float32, device, "local"))
