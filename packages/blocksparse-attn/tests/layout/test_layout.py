"""Layouts as values: constructors, conversions, equality, files, pictures, checks."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from blocksparse_attn import (
    BlockSparseLayout,
    LayoutModule,
    blocksparse_attention_reference,
    blocksparse_attn_func,
    blocksparse_attn_varlen_func,
    blocksparse_flash_attn_varlen_fwd,
)

from .._numerics import PATTERNS, layout_of

pytestmark = pytest.mark.eager


def brute_local_strided(num_heads, max_seqlen, block, local, stride, homo, head_range):
    """The pattern from its definition, query by query."""
    block_q, block_k = block
    rows, cols = -(-max_seqlen // block_q), -(-max_seqlen // block_k)
    step = 0 if homo else max(1, stride // num_heads)
    first, last = head_range or (0, num_heads)
    kept = torch.zeros(last - first, rows, cols, dtype=torch.bool)
    for h in range(first, last):
        for row in range(rows):
            end = min((row + 1) * block_q, cols * block_k)
            for qb in {position // block_k for position in range(row * block_q, end)}:
                for kb in range(qb + 1):
                    kept[h - first, row, kb] |= qb - kb < local or (kb + h * step + 1) % stride == 0
    return kept


LOCAL = [
    (4, 1000, (64, 64), 3, 4, False, None),
    (8, 513, (16, 16), 2, 3, True, None),
    (6, 700, (32, 64), 2, 5, False, (2, 5)),
    (3, 900, (128, 32), 3, 2, False, None),
    (5, 0, (16, 16), 1, 1, False, None),
    (2, 16, (16, 16), 1, 1, False, None),
    (32, 2048, (64, 64), 16, 8, False, (8, 16)),
    (2, 300, (16, 128), 1, 9, False, None),
]


@pytest.mark.parametrize("arguments", LOCAL, ids=str)
def test_local_strided_is_its_definition(arguments, device):
    layout = BlockSparseLayout.local_strided(*arguments, device=device)
    layout.validate()
    want = brute_local_strided(*arguments)
    assert torch.equal(layout.to_dense().cpu(), want)
    assert layout.max_row == (int(want.sum(-1).max()) if want.numel() else 0)
    assert layout.num_heads == len(want)
    col = layout.col.cpu()
    assert bool((col[:, 1:] >= -1).all())
    # no longer than the longest head needs
    assert col.shape[1] == max(int(want.sum((1, 2)).max()) if want.numel() else 0, 1)


def test_local_strided_is_fast_to_build(device):
    """128k tokens x 32 heads: a closed form, not a loop over blocks."""
    BlockSparseLayout.local_strided(32, 1024, device=device)
    started = time.perf_counter()
    layout = BlockSparseLayout.local_strided(32, 131072, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    took = time.perf_counter() - started
    # a second on an idle core; the machines of CI are shared
    assert took < (0.1 if device.type == "cuda" else 5.0)
    # memory of the kept blocks, not of all: 8 bytes would be a mask of 2048 x 2048
    assert layout.col.numel() < 0.1 * 32 * 2048 * 2048


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("size", [(1, 5, 3), (3, 1, 8), (2, 0, 4), (2, 4, 0)], ids=str)
def test_dense_and_back(size, pattern, device):
    mask = PATTERNS[pattern](*size).to(device)
    layout = BlockSparseLayout.from_dense(mask, (32, 16))
    layout.validate()
    assert torch.equal(layout.to_dense(), mask)
    assert (layout.num_heads, layout.num_rows, layout.num_cols) == size
    assert layout.max_row == (int(mask.sum(-1).max()) if mask.numel() else 0)
    bounded = BlockSparseLayout.from_dense(mask, (32, 16), max_nnz=size[1] * size[2] + 2)
    bounded.validate()
    assert bounded == layout


def test_a_mask_without_heads_serves_all(device):
    mask = PATTERNS["random"](1, 4, 4)[0].to(device)
    layout = BlockSparseLayout.from_dense(mask, 16)
    assert layout.num_heads == 1
    assert layout.is_shared
    assert torch.equal(layout.to_dense()[0], mask)


def test_rows_alike_is_found(device):
    dense = torch.ones(8, 8, dtype=torch.bool, device=device)
    assert BlockSparseLayout.from_dense(dense, 64).rows_alike
    # a band of four is one of five for two rows together
    assert not BlockSparseLayout.from_dense(dense.tril().triu(-3), 64).rows_alike
    assert not BlockSparseLayout.from_dense(torch.eye(8, device=device).bool(), 64).rows_alike
    # a tile holds one row of blocks of 128
    assert BlockSparseLayout.from_dense(torch.eye(8, device=device).bool(), 128).rows_alike


def test_mask_function(device):
    layout = BlockSparseLayout.from_mask_mod(
        lambda h, r, c: (c <= r) & ((r + c + h) % 2 == 0), 3, 4, 6, 32, device=device
    )
    h, r, c = (torch.arange(n, device=device) for n in (3, 4, 6))
    h, r = h[:, None, None], r[:, None]
    assert torch.equal(layout.to_dense(), (c <= r) & ((r + c + h) % 2 == 0))
    everything = BlockSparseLayout.from_mask_mod(
        lambda h, r, c: torch.ones((), dtype=torch.bool), 1, 2, 2, 16
    )
    assert everything.to_dense().all()


def test_repeats_and_strangers_do_not_count(device):
    """Columns twice in a row count once; those that are not there, not at all."""
    crow = torch.tensor([[0, 4, 6]], device=device)
    col = torch.tensor([[1, 0, 1, 9, -3, 1, 7]], device=device)
    layout = BlockSparseLayout(crow, col, 16)
    assert layout.to_dense().int().tolist() == [[[1, 1], [0, 1]]]
    assert layout == BlockSparseLayout.from_dense(layout.to_dense(), 16)
    # of the three below the diagonal
    assert layout.density() == pytest.approx(2 / 3)


def test_density(device):
    layout = BlockSparseLayout.local_strided(32, 8192, device=device)
    assert layout.density(8192) == pytest.approx(0.329, abs=5e-4)
    other = BlockSparseLayout.local_strided(
        32, 32768, local_blocks=8, vert_stride=16, device=device
    )
    assert other.density(8192) == pytest.approx(0.176, abs=5e-4)
    assert other.density() == pytest.approx(0.092, abs=5e-4)
    full = BlockSparseLayout.from_dense(torch.ones(4, 8, dtype=torch.bool), (32, 16))
    assert [full.density(n) for n in (0, 1, 17, 128, 500)] == [0.0, 1.0, 1.0, 1.0, 1.0]
    # rows of 32 see 2, 4, 6 blocks of 16 keys; of 40 tokens the second row has 8
    one = BlockSparseLayout.from_dense(torch.eye(3, 6, dtype=torch.bool), (32, 16))
    assert one.density(40) == pytest.approx(2 / 5)


def test_layouts_are_values(device):
    mask = PATTERNS["random"](2, 6, 5).to(device)
    layout = BlockSparseLayout.from_dense(mask, 16)
    crow, col = layout.crow, layout.col
    shuffled = layout_of("random", (16, 16), 16, 2, device)  # another
    same = BlockSparseLayout(crow, col, 16, num_cols=5)
    assert layout == same
    assert hash(layout) == hash(same)
    assert {layout: 1}[same] == 1
    assert layout != shuffled
    assert layout != BlockSparseLayout(crow, col, 32, num_cols=5)
    assert layout != BlockSparseLayout(crow, col, 16, num_cols=6)
    assert layout != "layout"
    changed = mask.clone()
    changed[1, 5, 0] ^= True
    assert layout != BlockSparseLayout.from_dense(changed, 16)
    # nothing that it gave or took changes it
    crow.fill_(0)
    col.fill_(0)
    layout.to_dense().fill_(True)
    layout.crow.fill_(0)
    assert torch.equal(layout.to_dense(), mask)
    assert torch.equal(same.to_dense(), mask)


def test_heads_of_one_pattern_are_held_once(device):
    layout = BlockSparseLayout.local_strided(4, 256, 32, 2, 3, True, device=device)
    assert layout.is_shared
    assert layout.num_heads == 4
    assert layout.crow.shape == (4, 9)
    assert layout.to_dense().shape == (4, 8, 8)


def test_save_and_load(device, tmp_path):
    layout = BlockSparseLayout.local_strided(4, 512, (32, 64), 2, 3, device=device)
    layout.save(tmp_path / "layout.pt")
    back = BlockSparseLayout.load(tmp_path / "layout.pt", device)
    assert back == layout
    assert (back.max_row, back.rows_alike) == (layout.max_row, False)
    assert back.device == layout.device


def test_files_of_the_first_version_and_of_others(tmp_path):
    layout, path = BlockSparseLayout.local_strided(4, 512, 32, 2, 3), tmp_path / "layout.pt"
    layout.save(path)
    held = torch.load(path)
    old = {name: x for name, x in held.items() if name not in ("batch", "rule")}
    torch.save(old, path)
    assert BlockSparseLayout.load(path) == layout
    for other in ({**held, "more": 1}, {"crow": held["crow"]}, [held["crow"]]):
        torch.save(other, path)
        with pytest.raises(ValueError, match=r"path must be a file of BlockSparseLayout\.save"):
            BlockSparseLayout.load(path)


def test_to(device):
    layout = BlockSparseLayout.local_strided(4, 128, 32, 2, 3, device=device)
    assert layout.to(device) is layout
    meta = layout.to("meta")
    assert meta.device.type == "meta"
    assert meta.num_cols == 4


def test_repr():
    layout = BlockSparseLayout.from_dense(torch.ones(3, 4, dtype=torch.bool).tril(), (64, 32))
    assert repr(layout) == (
        "BlockSparseLayout(3 x 4 blocks of 64 x 32, heads any, density 0.600, device 'cpu')"
    )
    assert "heads 4" in repr(BlockSparseLayout.local_strided(4, 128))
    assert "density" not in repr(layout.to("meta"))


def test_plot():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    layout = BlockSparseLayout.local_strided(2, 512, 64, 2, 3)
    ax = layout.plot(head=1)
    shown = torch.tensor(ax.images[0].get_array())
    assert torch.equal(shown.bool(), layout.to_dense()[1])
    assert layout.plot(ax=ax) is ax
    pyplot.close("all")
    with pytest.raises(ValueError, match="head must be below 2, got 2"):
        layout.plot(2)


def csr(crow=((0, 1, 2),), col=((0, 1),)):
    return torch.tensor(crow), torch.tensor(col)


WRONG = [
    ("crow must be a torch.Tensor, got list", TypeError, lambda: ([0], csr()[1], 16)),
    ("col must be torch.int32 or torch.int64, got torch.float32", TypeError,
     lambda: (csr()[0], csr()[1].float(), 16)),
    ("crow must be [heads, rows + 1] with one head at least, got [3]", ValueError,
     lambda: (csr()[0][0], csr()[1], 16)),
    ("crow must be [heads, rows + 1], got [1, 0]", ValueError,
     lambda: (csr()[0][:, :0], csr()[1], 16)),
    ("heads of col must be those of crow, 1, got 2", ValueError,
     lambda: (csr()[0], csr()[1].expand(2, -1), 16)),
    ("col must be on the device of crow, cpu, got meta", ValueError,
     lambda: (csr()[0], csr()[1].to("meta"), 16)),
    ("block_size must be 16, 32, 64 or 128, got 48", ValueError, lambda: (*csr(), 48)),
    ("block_size must be an int or a pair (q, k), got 16.0", TypeError, lambda: (*csr(), 16.0)),
    ("block_size must be an int or a pair (q, k), got (16, 16, 16)", TypeError,
     lambda: (*csr(), (16, 16, 16))),
    ("block_size must be an int or a pair (q, k), got (16, '16')", TypeError,
     lambda: (*csr(), (16, "16"))),
]  # fmt: skip


@pytest.mark.parametrize(("message", "error", "make"), WRONG, ids=[m for m, _, _ in WRONG])
def test_wrong_layouts(message, error, make):
    with pytest.raises(error) as caught:
        BlockSparseLayout(*make())
    assert str(caught.value) == message


OPTIONS = [
    ("num_cols must be at least 0, got -1", ValueError,
     lambda: BlockSparseLayout(*csr(), 16, num_cols=-1)),
    ("max_row must be an int, got float", TypeError,
     lambda: BlockSparseLayout(*csr(), 16, max_row=1.0)),
    ("rows_alike must be a bool, got int", TypeError,
     lambda: BlockSparseLayout(*csr(), 16, rows_alike=1)),
    ("mask must be a torch.Tensor, got int", TypeError,
     lambda: BlockSparseLayout.from_dense(1, 16)),
    ("mask must be torch.bool, got torch.int64", TypeError,
     lambda: BlockSparseLayout.from_dense(torch.ones(2, 2).long(), 16)),
    ("mask must be [rows, cols] or [heads, rows, cols], got [2]", ValueError,
     lambda: BlockSparseLayout.from_dense(torch.ones(2).bool(), 16)),
    ("max_nnz must be at least 0, got -1", ValueError,
     lambda: BlockSparseLayout.from_dense(torch.ones(2, 2).bool(), 16, max_nnz=-1)),
    ("num_heads must be at least 1, got 0", ValueError,
     lambda: BlockSparseLayout.local_strided(0, 64)),
    ("max_seqlen must be an int, got float", TypeError,
     lambda: BlockSparseLayout.local_strided(1, 64.0)),
    ("local_blocks must be at least 1, got 0", ValueError,
     lambda: BlockSparseLayout.local_strided(1, 64, local_blocks=0)),
    ("vert_stride must be at least 1, got 0", ValueError,
     lambda: BlockSparseLayout.local_strided(1, 64, vert_stride=0)),
    ("head_range[1] must be at least 3, got 2", ValueError,
     lambda: BlockSparseLayout.local_strided(4, 64, head_range=(2, 2))),
    ("head_range must end at num_heads, 4, or before, got 5", ValueError,
     lambda: BlockSparseLayout.local_strided(4, 64, head_range=(2, 5))),
    ("head_range must be a pair (first, last + 1), got (1,)", TypeError,
     lambda: BlockSparseLayout.local_strided(4, 64, head_range=(1,))),
    ("fn must be a function of head, row and column, got NoneType", TypeError,
     lambda: BlockSparseLayout.from_mask_mod(None, 1, 2, 2, 16)),
    ("fn must return what broadcasts to [2, 3], got [3, 1]", ValueError,
     lambda: BlockSparseLayout.from_mask_mod(lambda h, r, c: torch.ones(3, 1).bool(), 1, 2, 3, 16)),
    ("fn must return a tensor of torch.bool, got torch.int64", TypeError,
     lambda: BlockSparseLayout.from_mask_mod(lambda h, r, c: r + c, 1, 2, 2, 16)),
    ("fn must return a tensor of torch.bool, got bool", TypeError,
     lambda: BlockSparseLayout.from_mask_mod(lambda h, r, c: True, 1, 2, 2, 16)),
    ("seqlen must be at least 0, got -1", ValueError,
     lambda: BlockSparseLayout(*csr(), 16).density(-1)),
    ("dtype must be torch.float16, torch.bfloat16 or torch.float32, got 'float16'", TypeError,
     lambda: BlockSparseLayout(*csr(), 16).prepare(2, 1, 64, "float16")),
    ("causal must be a bool, got str", TypeError,
     lambda: BlockSparseLayout(*csr(), 16).prepare(2, 1, 64, torch.float16, causal="no")),
    ("backward must be a bool, got int", TypeError,
     lambda: BlockSparseLayout(*csr(), 16).prepare(2, 1, 64, torch.float16, backward=1)),
    ("paged must be a bool, got NoneType", TypeError,
     lambda: BlockSparseLayout(*csr(), 16).prepare(2, 1, 64, torch.float16, paged=None)),
    ("heads_k must be at least 1, got 0", ValueError,
     lambda: BlockSparseLayout(*csr(), 16).prepare(2, 0, 64, torch.float16)),
    ("heads_q must be a positive multiple of heads_k, got heads_q 4 and heads_k 3", ValueError,
     lambda: BlockSparseLayout(*csr(), 16).prepare(4, 3, 64, torch.float16)),
    ("heads of layout must be 1, heads_k, 4, or heads_q, 32, got 8", ValueError,
     lambda: BlockSparseLayout.local_strided(8, 64).prepare(32, 4, 64, torch.float16)),
]  # fmt: skip


@pytest.mark.parametrize(("message", "error", "call"), OPTIONS, ids=[m for m, _, _ in OPTIONS])
def test_wrong_options(message, error, call):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message


class Holder(torch.nn.Module):
    def __init__(self, layout):
        super().__init__()
        self.blocks = LayoutModule(layout)
        self.weight = torch.nn.Parameter(torch.ones(2, device=layout.device))


def test_a_layout_moves_with_the_module_that_holds_it(device):
    layout = layout_of("random", (16, 16), 64, 2, device)
    holder = copy.deepcopy(Holder(layout))
    assert holder.half().blocks.layout == layout
    assert holder.weight.dtype == torch.float16
    assert list(holder.state_dict()) == ["weight"]
    assert repr(layout) in repr(holder)
    for target in ("meta", device):
        moved = copy.deepcopy(holder).to(target).blocks.layout
        assert moved.crow.device.type == moved.device.type == torch.device(target).type
        assert moved.col.shape == layout.col.shape
    assert holder.to_empty(device=device).blocks.layout == layout


def test_a_module_holds_nothing_else_than_a_layout():
    with pytest.raises(TypeError, match="layout must be a BlockSparseLayout, got Tensor"):
        LayoutModule(torch.ones(2, 2))


VALUES = [
    ("crow[0, 0] must be 0, got 1", ((1, 1, 2),), ((0, 1),)),
    ("crow[0, 2] must be at least crow[0, 1], 2, got 1", ((0, 2, 1),), ((0, 1),)),
    ("crow[0, 2] must be at most the length of col, 2, got 3", ((0, 1, 3),), ((0, 1),)),
    ("col[0, 1] must be from 0 to 1, a block column, got 2", ((0, 1, 2),), ((0, 2),)),
    ("col[0, 0] must be from 0 to 1, a block column, got -1", ((0, 1, 2),), ((-1, 0),)),
    ("col[0, 2] must not repeat a column of row 0, got 1", ((0, 3, 3),), ((1, 0, 1),)),
    ("col[0, 2] must be -1, being padding, got 0", ((0, 1, 2),), ((0, 1, 0),)),
]


@pytest.mark.parametrize(("message", "crow", "col"), VALUES, ids=[m for m, _, _ in VALUES])
def test_validate_names_the_wrong_entry(message, crow, col):
    with pytest.raises(ValueError, match="must") as caught:
        BlockSparseLayout(*csr(crow, col), 16).validate()
    assert str(caught.value) == message


def attend(layout):
    q = torch.randn(1, 32, 2, 16)
    return blocksparse_attn_func(q, q, q, layout, causal=False)


def attend_packed(layout):
    q, starts = torch.randn(32, 2, 16), torch.tensor([0, 32], dtype=torch.int32)
    return blocksparse_attn_varlen_func(q, q, q, starts, starts, 32, 32, layout)


def attend_by_drop_in(layout):
    q, starts = torch.randn(32, 2, 16), torch.tensor([0, 32], dtype=torch.int32)
    blocks = layout.crow, layout.col
    return blocksparse_flash_attn_varlen_fwd(q, q, q, starts, starts, 0.2, blocks, block_size=16)


def attend_by_reference(layout):
    q = torch.randn(1, 32, 2, 16)
    return blocksparse_attention_reference(q, q, q, layout)


def attend_in_a_graph(layout):
    return torch.compile(attend, backend="eager", fullgraph=True)(layout)


WRONG = [(message, crow, col) for message, crow, col in VALUES[:4]] + [
    ("crow[0, 0] must be 0, got -5", ((-5, 1, 2),), ((0, 1),)),
    ("col[0, 1] must be from 0 to 1, a block column, got -7", ((0, 1, 2),), ((0, -7),)),
    ("col[0, 1] must be from 0 to 1, a block column, got 2147483647", ((0, 1, 2),), ((0, 2**40),)),
]


@pytest.mark.parametrize(
    "call",
    [attend, attend_packed, attend_by_drop_in, attend_by_reference, attend_in_a_graph],
)
@pytest.mark.parametrize(("message", "crow", "col"), WRONG, ids=[m for m, _, _ in WRONG])
def test_calls_on_the_cpu_name_the_wrong_entry(message, crow, col, call):
    layout = BlockSparseLayout(*(torch.tensor(x) for x in (crow, col)), 16)
    with pytest.raises(ValueError, match="must") as caught:
        call(layout)
    assert str(caught.value) == message


def test_calls_take_columns_that_are_no_block_or_repeat():
    layout = BlockSparseLayout(*csr(((0, 2, 5),), ((0, -1, 1, 0, 1),)), 16)
    torch.manual_seed(0)
    got = attend(layout)
    torch.manual_seed(0)
    assert torch.equal(got, attend(BlockSparseLayout(*csr(((0, 1, 3),), ((0, 0, 1),)), 16)))
