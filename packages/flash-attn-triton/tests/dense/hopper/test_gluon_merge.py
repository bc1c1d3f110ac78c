"""The forward for Hopper that merges into results over other keys, run on a CPU by ``_gluon``."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from flash_attn_triton._dense import ops
from flash_attn_triton._dense.call import Options, Tensors
from flash_attn_triton._linked.host.forms import Memory
from flash_attn_triton._parallel import passes, shards
from flash_attn_triton._parallel.pieces import MERGED

from ..._linked.budget import Maker, offsets
from ._gluon import TILES, forward, reverse

__all__ = ["forward", "reverse"]  # fixtures

pytestmark = pytest.mark.skipif(not ops.interpreted(), reason="about the interpreter")

HEADS_K = 2


class Sizes(NamedTuple):
    """Numbers of a case; the merged rows are ``size`` from ``begin`` on."""

    tokens: int
    begin: int
    size: int
    keys: tuple[int, int]
    head_dim: int = 64
    head_dim_v: int = 64
    group: int = 2


class Rows:
    """Queries of some tokens, and keys in two parts.

    ``seen`` says of each part which keys a token sees, ``[tokens, keys]``.
    """

    def __init__(self, sizes):
        m = Maker("cpu", torch.float16)
        self.begin, self.size, self.group = sizes.begin, sizes.size, sizes.group
        self.q = m.randn(sizes.tokens, HEADS_K * sizes.group, sizes.head_dim)
        self.k = [m.randn(n, HEADS_K, sizes.head_dim) for n in sizes.keys]
        self.v = [m.randn(n, HEADS_K, sizes.head_dim_v) for n in sizes.keys]
        self.scale = sizes.head_dim**-0.5

    def define(self, parts, seen):
        """Return output and LSE over the keys of some parts, in float64."""
        k, v = (torch.cat([x[i] for i in parts]).double() for x in (self.k, self.v))
        k, v = (x.repeat_interleave(self.group, 1) for x in (k, v))
        s = torch.einsum("qhd,khd->hqk", self.q.double(), k) * self.scale
        s = s.masked_fill(~torch.cat([seen[i] for i in parts], 1), -torch.inf)
        lse = s.logsumexp(-1)
        p = torch.exp(s - lse.masked_fill(lse.isinf(), 0.0)[..., None])
        return torch.einsum("hqk,khd->qhd", p, v), lse

    def merge(self, first, window=(-1, -1), cu_seqlens=None):
        """Merge results over the second part into those over the first one; return both."""
        out, lse = first[0].half(), first[1].float().contiguous()
        here = slice(self.begin, self.begin + self.size)
        parts = [self.q[here], self.k[1], self.v[1]]
        own = out[here], lse[:, here]
        if cu_seqlens is None:
            parts, own = [x.unsqueeze(0) for x in parts], tuple(x.unsqueeze(0) for x in own)
        x = Tensors(*parts, *(cu_seqlens or ()))
        options = Options(self.scale, *window, 0.0, 0.0)
        plan = ops.plan_of(x, options, torch.float16, False, needs_gradient=False)
        assert plan.merge(x, *own)
        return out, lse


def assert_merged(rows, got, first, seen):
    """Hold merged results to the definition; other rows are as they were."""
    here = slice(rows.begin, rows.begin + rows.size)
    others = torch.ones(len(rows.q), dtype=torch.bool)
    others[here] = False
    (out, lse), (want, want_lse) = got, rows.define((0, 1), seen)
    assert torch.equal(out[others], first[0].half()[others])
    assert torch.equal(lse[:, others], first[1].float()[:, others])
    want, want_lse = want[here], want_lse[:, here]
    assert torch.equal(lse[:, here].isinf(), want_lse.isinf())
    assert (lse[:, here] - want_lse).abs().nan_to_num(0.0).max() <= 1e-5
    # two roundings of the output, and one of the weights, whose errors are independent
    eps = torch.finfo(torch.float16).eps
    off = (out[here].double() - want).abs().max()
    assert off <= 2 * eps * rows.v[0].abs().max().clamp(min=1.0), off


CASES = [
    ("plain", Sizes(150, 0, 150, (40, 70))),
    ("pipeline", Sizes(400, 100, 300, (40, 70))),
    ("stages", Sizes(60, 50, 3, (40, 33), group=4)),  # heads share a tile
    ("share", Sizes(200, 7, 130, (40, 70), 48, 48)),
    ("stages", Sizes(150, 2, 140, (40, 70), 96, 96)),  # two panels
    ("stages", Sizes(100, 2, 90, (9, 70), 64, 80)),
]


@pytest.mark.parametrize(("tile", "sizes"), CASES, ids=str)
def test_results_over_two_parts_of_the_keys(tile, sizes, forward, reverse):
    forward(TILES[tile], reverse)
    check_two_parts(sizes)


def check_two_parts(sizes):
    """Of the first part some rows see a key, and some of these none of the second."""
    rows = Rows(sizes)
    seen = [torch.ones(len(rows.q), len(k), dtype=torch.bool) for k in rows.k]
    seen[0][::3] = False
    size, keys = rows.size, len(rows.k[1])
    # the last query at the last key, to the left of it alone
    row, col = torch.arange(size)[:, None], torch.arange(keys)
    seen[1][rows.begin : rows.begin + size] = col <= row + keys - size
    first = rows.define((0,), seen)
    got = rows.merge(first, window=(-1, 0))
    assert_merged(rows, got, first, seen)


@pytest.mark.parametrize("scale", [4.0, 5e3])
def test_weights_of_large_logits_add_up_to_one(scale, forward):
    """Log-sum-exps of some ten thousands are rounded to 1e-3, and the weights not with them."""
    forward(TILES["pipeline"])
    rows = Rows(Sizes(150, 0, 150, (40, 40)))
    rows.k[1] = rows.k[0].clone()
    rows.v = [torch.ones_like(v) for v in rows.v]
    rows.scale = scale
    seen = [torch.ones(150, 40, dtype=torch.bool)] * 2
    out, _ = rows.merge(rows.define((0,), seen))
    assert torch.equal(out, torch.ones_like(out))


def test_outputs_that_tma_cannot_reach_are_left_alone(forward):
    """A map would be one of a copy."""
    forward(TILES["stages"])
    rows = Rows(Sizes(20, 0, 20, (9, 9)))
    x = Tensors(*(t.unsqueeze(0) for t in (rows.q, rows.k[1], rows.v[1])))
    plan = ops.plan_of(
        x, Options(rows.scale, -1, -1, 0.0, 0.0), torch.float16, False, needs_gradient=False
    )
    out, lse = plan.forward(x)
    memory = torch.zeros(out.numel() + 1, dtype=out.dtype)
    shifted, before = memory[1:].view_as(out).copy_(out), lse.clone()
    assert not plan.merge(x, shifted, lse)
    assert torch.equal(shifted, out)
    assert torch.equal(lse, before)


def test_roundings_of_many_ranks_do_not_add_up(forward, monkeypatch):
    """Values grow from rank to rank by less than a rounding of what has been merged before."""
    forward(TILES["stages"])
    monkeypatch.setattr(passes, "_plans", Memory())
    m, ranks, tokens = Maker("cpu", torch.bfloat16), 40, 5
    q, k = m.randn(tokens, 2, 64), m.randn(ranks, 8, 1, 64)
    v = (1.0 + 0.2 * torch.arange(ranks)[:, None, None, None] / ranks).expand(-1, 8, 1, 64)
    v = v.to(torch.bfloat16).contiguous()
    options = passes.Sharded(0.125, 0.0, False, None, [], "")
    known = passes.Pass.of(q, k[0], v[0], None, options)
    product = shards.Product([shards.Rectangle((-1, -1), 0, tokens, 0, 8)])
    pieces = passes.Pieces(tokens, torch.bfloat16)
    for keys, values in zip(k, v, strict=True):
        passes._attend(passes.Part(product, q, keys, values, None, known), pieces)
    out, lse = pieces.result()
    s = 0.125 * torch.einsum("qhd,khd->hqk", q.double(), k.double().flatten(0, 1).expand(-1, 2, -1))
    want = torch.einsum("hqk,kd->qhd", s.softmax(-1), v.double().flatten(0, 2))
    assert (lse - s.logsumexp(-1)).abs().max() <= 1e-5
    # those of the products in a piece, and that of all pieces: half an eps each
    bound = (MERGED + 1) * torch.finfo(torch.bfloat16).eps / 2
    assert ((out.double() - want).abs() / want).max() <= bound


@pytest.mark.parametrize("tile", ["plain", "pipeline"])
def test_results_of_packed_sequences(tile, forward, reverse):
    """Of three sequences one has no key: NaN in the values of the others stay where they are."""
    forward(TILES[tile], reverse)
    rows = Rows(Sizes(260, 20, 230, (30, 110)))
    lengths = (70, 50, 110), (40, 0, 70)
    rows.v[1][39] = torch.nan
    seen = [torch.ones(260, 30, dtype=torch.bool), torch.zeros(260, 110, dtype=torch.bool)]
    seen[0][25:100] = False
    seen[1][20:90, :40] = True
    seen[1][140:250, 40:] = True
    first = rows.define((0,), seen)
    got = rows.merge(first, cu_seqlens=tuple(offsets(n, "cpu") for n in lengths))
    assert got[0][20:90].isnan().all()
    rows.v[1][39] = 0.0
    want, want_lse = rows.define((0, 1), seen)
    eps = torch.finfo(torch.float16).eps
    assert (got[0][90:] - want[90:]).abs().max() <= 8 * eps
    assert torch.equal(got[1].isinf(), want_lse.isinf())
    assert (got[1] - want_lse).abs().nan_to_num(0.0).max() <= 1e-5


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("function", "right", "wrong"),
    [
        ("_lse_at", "numbers.stride_lse_h", "numbers.tokens_q"),
        ("finish_block", "W * (TILE.ROWS // PACK)", "W * TILE.ROWS"),
        ("finish_block", "other=NEG_INF) * LOG2E", "other=NEG_INF)"),
        ("close_softmax", "of_sink / safe", "of_sink"),
        ("close_softmax", "lse, of_sink", "lse, 1.0 - shrink"),
        ("write_block", "mbarrier.wait(full, count & 1)", "pass"),
        ("write_block", "count & 1", "count + 1 & 1"),
        ("write_block", "copy_tile(maps.out_descs, where, full, pipeline.out_s, W)", "pass"),
        ("add_tile", "gl.static_range(1, len(o))", "gl.static_range(0)"),
    ],
)
def test_merging_with_a_mistake(function, right, wrong, forward):
    sizes = Sizes(90, 5, 70, (40, 70), 96, 96, group=4)
    for copies_last in (True, False):
        forward(TILES["stages"], copies_last).plant(function, right, wrong)
        try:
            check_two_parts(sizes)
        except (AssertionError, RuntimeError):
            return
    raise AssertionError("the mistake was not noticed")
