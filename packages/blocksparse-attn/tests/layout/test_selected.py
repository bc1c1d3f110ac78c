"""Layouts from what selectors return, and layouts of single sequences of a batch."""

from __future__ import annotations

import pytest
import torch
from blocksparse_attn import (
    BlockSparseLayout,
    blocksparse_attn_func,
    blocksparse_attn_varlen_func,
    patterns,
)

from .._linked.budget import assert_same
from .._numerics import Packed, Shape, check, layout_of, make_case, make_packed, run
from ..attention._operators import compiled, traced_alike

__all__ = ["compiled"]  # a fixture


def random_indices(*size, cols, device, dtype=torch.int64):
    """Columns of each row, some repeated, some -1."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-1, cols, size, generator=generator).to(device, dtype)


def dense_of_indices(indices, cols, counts=None):
    k = indices.shape[-1]
    listed = indices >= 0
    if counts is not None:
        listed &= torch.arange(k, device=indices.device) < counts[..., None]
    dense = torch.zeros(*indices.shape[:-1], cols + 1, dtype=torch.bool, device=indices.device)
    return dense.scatter_(-1, torch.where(listed, indices, cols).long(), True)[..., :cols]


@pytest.mark.eager
@pytest.mark.parametrize("leading", [(3,), (2, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_rows_keep_their_indices(leading, dtype, device):
    indices = random_indices(*leading, 4, 5, cols=7, device=device, dtype=dtype)
    counts = torch.arange(4, device=device).expand(*leading, 4).to(dtype)
    for number in (None, counts):
        layout = BlockSparseLayout.from_indices(indices, 16, num_cols=7, counts=number)
        assert torch.equal(layout.to_dense(), dense_of_indices(indices, 7, number))
        assert (layout.crow.ndim, layout.batch) == ((3, 2) if len(leading) == 2 else (2, None))
        # compressed rows that make the same layout
        again = BlockSparseLayout(layout.crow, layout.col, 16, num_cols=7)
        assert again == layout
        assert hash(again) == hash(layout)
    whole = torch.arange(6, device=device).expand(1, 2, 6)
    BlockSparseLayout.from_indices(whole, 16, num_cols=6).validate()


@pytest.mark.eager
def test_columns_that_there_are_not(device):
    indices = torch.tensor([[[0, 2, -1], [1, 7, 2**33]]], device=device)
    if device.type == "cpu":
        with pytest.raises(ValueError, match=r"indices\[0, 1, 1\] must be from 0 to 2.* got 7"):
            BlockSparseLayout.from_indices(indices, 16, num_cols=3)
        counts = torch.tensor([[4, 1]])
        with pytest.raises(ValueError, match=r"counts\[0, 0\] must be from 0 to 3, got 4"):
            BlockSparseLayout.from_indices(indices, 16, num_cols=3, counts=counts)
        # what does not count is not looked at
        counts = torch.tensor([[3, 1]])
        BlockSparseLayout.from_indices(indices, 16, num_cols=3, counts=counts).validate()
        return
    layout = BlockSparseLayout.from_indices(indices, 16, num_cols=3)
    assert layout.to_dense().sum() == 3
    with pytest.raises(ValueError, match=r"col\[0, 3\] must be from 0 to 2, a block column"):
        layout.validate()


WRONG = [
    ("indices must be a torch.Tensor, got list", TypeError, [0], None),
    ("indices must be torch.int32 or torch.int64, got torch.float32", TypeError,
     torch.zeros(1, 2, 3), None),
    ("indices must be [heads, rows, k] or [batch, heads, rows, k] with one head at least, got "
     "[2, 3]", ValueError, torch.zeros(2, 3, dtype=torch.int32), None),
    ("counts must have the shape of indices without the last dimension, [1, 2], got [2]",
     ValueError, torch.zeros(1, 2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)),
]  # fmt: skip


@pytest.mark.eager
@pytest.mark.parametrize(("message", "error", "indices", "counts"), WRONG, ids=str)
def test_wrong_indices(message, error, indices, counts):
    with pytest.raises(error) as caught:
        BlockSparseLayout.from_indices(indices, 16, num_cols=3, counts=counts)
    assert str(caught.value) == message


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_indices_of_heads(heads, device):
    """One pattern for all heads, one per head of keys, or one per query head."""
    case = make_case(Shape(1, 40, 40, 4, 2, 16), torch.float32, device)
    indices = random_indices(heads, 3, 2, cols=3, device=device)
    layout = BlockSparseLayout.from_indices(indices, 16, num_cols=3)
    dense = layout.to_dense().repeat_interleave(4 // heads, 0)
    written = case.with_options(layout=BlockSparseLayout.from_dense(dense, 16))
    if heads == 1:  # other tiles: the oracle compares them
        check(case.with_options(layout=layout))
    else:
        assert_same(run(case.with_options(layout=layout)), run(written))


@pytest.mark.parametrize("heads", [1, 4])
def test_a_layout_per_sequence(heads, device):
    case = make_case(Shape(2, 40, 50, 4, 2, 16), torch.float32, device)
    indices = random_indices(2, heads, 4, 2, cols=4, device=device)
    layout = BlockSparseLayout.from_indices(indices, 16, num_cols=4)
    got = check(case.with_options(layout=layout))
    for b in range(2):
        one = BlockSparseLayout.from_indices(indices[b], 16, num_cols=4)
        alone = case.with_inputs(**{n: x[b : b + 1] for n, x in case.inputs.items()})
        for name, x in run(alone.with_options(layout=one), grad=False).items():
            assert torch.equal(x[0], got[name][b])


def test_a_layout_per_packed_sequence(device):
    """Of another density each, joined; as many queries as keys, and a decode."""
    shape = Packed((33, 3, 20), (33, 48, 20), 4, 2, 16, padding=3)
    case = make_packed(shape, torch.float32, device)
    layouts = [layout_of(name, (16, 16), 48, 4, device) for name in ("local", "all", "random")]
    joined = BlockSparseLayout.batched(layouts)
    check(case.with_options(layout=joined))
    assert torch.equal(joined.to_dense(), torch.stack([one.to_dense() for one in layouts]))


@pytest.mark.eager
def test_layouts_that_are_joined_are_alike(device):
    one = layout_of("local", (16, 16), 48, 4, device)
    with pytest.raises(ValueError, match=r"num_heads of layouts\[1\] must be .* 4, got 2"):
        BlockSparseLayout.batched([one, layout_of("local", (16, 16), 48, 2, device)])
    joined = BlockSparseLayout.batched([one, one])
    with pytest.raises(ValueError, match=r"layouts\[0\] must not be of a batch itself"):
        BlockSparseLayout.batched([joined])
    q = torch.zeros(3, 20, 4, 16, device=device)
    with pytest.raises(ValueError, match="batch of layout must be that of q, 3, got 2"):
        blocksparse_attn_func(q, q, q, joined)
    starts = torch.tensor([0, 20], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="batch of layout must be that of q, 1, got 2"):
        blocksparse_attn_varlen_func(q[0], q[0], q[0], starts, starts, 20, 20, joined)


@pytest.mark.eager
def test_a_batch_is_a_value(device, tmp_path):
    shared = BlockSparseLayout.local_strided(4, 64, 16, 1, 3, homo_head=True, device=device)
    own = BlockSparseLayout.local_strided(4, 64, 16, 1, 3, device=device)
    joined = BlockSparseLayout.batched([shared, own])
    assert torch.equal(joined.to_dense()[0], shared.to_dense())
    joined.save(tmp_path / "layout")
    assert BlockSparseLayout.load(tmp_path / "layout", device) == joined
    assert joined != BlockSparseLayout.batched([own, shared])
    assert BlockSparseLayout.batched([shared, shared]).is_shared
    assert joined.batch == 2


@pytest.mark.eager
def test_a_pattern_held_once_equals_the_same_written_out(device):
    once = BlockSparseLayout.local_strided(4, 200, 16, 1, 3, homo_head=True, device=device)
    written = BlockSparseLayout(once.crow, once.col, 16)
    assert once == written
    assert hash(once) == hash(written)
    other = written.to_dense()
    other[3, 5, 0] ^= True
    assert once != BlockSparseLayout.from_dense(other, 16)


@pytest.mark.eager
def test_a_layout_of_inference_mode_can_be_trained_with(device):
    with torch.inference_mode():
        indices = torch.zeros(4, 4, 1, dtype=torch.int64, device=device)
        layouts = [
            BlockSparseLayout.local_strided(4, 64, 16, 1, 3, device=device),
            BlockSparseLayout.from_indices(indices, 16, num_cols=4),
        ]
    q = torch.randn(1, 50, 4, 16, device=device, requires_grad=True)
    for layout in layouts:
        blocksparse_attn_func(q, q, q, layout).sum().backward()
        assert q.grad.isfinite().all()


@traced_alike
@pytest.mark.eager
def test_indices_trace_whole(device, compiled):
    def attend(q, indices):
        layout = BlockSparseLayout.from_indices(indices, 16, num_cols=3)
        return blocksparse_attn_func(q, q[:, :, :2], q[:, :, 2:], layout)

    q = torch.randn(2, 40, 4, 16, device=device, requires_grad=True)
    for rows in (3, 4):
        indices = random_indices(2, 2, rows, 2, cols=3, device=device)
        got = compiled(attend)(q, indices)
        want = attend(q, indices)
        assert torch.equal(got, want)
        (grad,) = torch.autograd.grad(got.square().sum(), q)
        (exact,) = torch.autograd.grad(want.square().sum(), q)
        torch.testing.assert_close(grad, exact)


@pytest.mark.eager
def test_the_default_device_changes_nothing_on_the_host(device):
    layout = BlockSparseLayout.local_strided(4, 64, 16, 1, 3, device=device)
    want = hash(layout.to(device))
    fresh = BlockSparseLayout(layout.crow, layout.col, 16)
    with torch.device("meta"):
        assert hash(fresh) == want
        fresh.validate()
        drawn = patterns.bigbird(2, 64, 1, 1, 1, 16, device=device)
    assert drawn == patterns.bigbird(2, 64, 1, 1, 1, 16, device=device)
