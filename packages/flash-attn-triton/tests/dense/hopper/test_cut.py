"""How the backward on Hopper cuts its work: what every cut must keep, whatever the shape."""

from __future__ import annotations

import math

import pytest
import torch
from flash_attn_triton._dense.call import Options, Tensors
from flash_attn_triton._dense.hopper.backward.cut import (
    choose_shares,
    divisors,
    filling_planes,
    possible_shares,
    seen_tiles,
)
from flash_attn_triton._dense.hopper_tiles import HopperBackwardTile, hopper_backward_tile
from flash_attn_triton._dense.portable.form import Form
from hypothesis import given
from hypothesis import strategies as st

from ..._linked.gpus import absent_gpu
from ._hopper_backward import HOPPER

pytestmark = pytest.mark.eager

PROCESSORS = 132
WINDOWS = [(-1, -1), (-1, 0), (100, 0), (64, 64), (-1, 300)]


def form_of(batch, tokens, heads_q, heads_k, head_dim=128, *, packed=False):
    shape = (batch * tokens,) if packed else (batch, tokens)
    q, k = (
        torch.empty(*shape, heads, head_dim, dtype=torch.bfloat16, device="meta")
        for heads in (heads_q, heads_k)
    )
    starts = torch.empty(batch + 1, dtype=torch.int32, device="meta") if packed else None
    with absent_gpu(HOPPER):
        return Form(Tensors(q, k, k, starts, starts), Options(0.1, -1, 0, 0.0, 0.0))


def chosen(form, tokens, window=(-1, 0), ordered=False):
    tile = hopper_backward_tile(form.widest_head, False, True)
    choices = possible_shares(form, ordered)
    shares = choose_shares(choices, form, tile, form.batch, (tokens, tokens), window, PROCESSORS)
    return shares, form.batch * form.heads_k * shares * math.ceil(tokens / tile.block_n)


@given(
    batch=st.integers(1, 9),
    tokens=st.integers(1, 40_000),
    group=st.integers(1, 24),
    heads_k=st.integers(1, 16),
    head_dim=st.sampled_from([64, 96, 128, 192, 256]),
    packed=st.booleans(),
    ordered=st.booleans(),
    window=st.sampled_from(WINDOWS),
)
def test_a_cut_divides_the_group(batch, tokens, group, heads_k, head_dim, packed, ordered, window):
    form = form_of(batch, tokens, group * heads_k, heads_k, head_dim, packed=packed)
    shares, _ = chosen(form, tokens, window, ordered)
    assert group % shares == 0
    assert shares in divisors(group)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("heads_k", [1, 2, 4])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1024), (1, 4096), (2, 4096), (1, 16384)])
def test_few_key_heads_fill_the_processors(batch, tokens, heads_k, head_dim):
    form = form_of(batch, tokens, 16, heads_k, head_dim)
    shares, programs = chosen(form, tokens)
    # or there is nothing left to share
    assert programs >= 1.5 * PROCESSORS or shares == form.group


@pytest.mark.parametrize(("batch", "heads_k"), [(8, 8), (64, 1)])
def test_nothing_is_shared_without_need(batch, heads_k):
    form = form_of(batch, 4096, 4 * heads_k, heads_k)
    assert chosen(form, 4096)[0] == 1


@pytest.mark.parametrize("heads_k", [1, 2, 8])
def test_a_cut_in_order_depends_on_heads_alone(heads_k):
    shares = {
        chosen(form_of(batch, tokens, 8 * heads_k, heads_k, packed=packed), tokens, ordered=True)[0]
        for batch in (1, 3, 40)
        for tokens in (100, 5000)
        for packed in (False, True)
    }
    assert len(shares) == 1


def test_packed_calls_of_a_signature_have_at_most_three_cuts():
    for heads_k in (1, 2, 3, 8, 16):
        form = form_of(3, 1000, 12 * heads_k, heads_k, packed=True)
        assert len(possible_shares(form, False)) <= 3


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (300, 0), (64, 64)], ids=str)
@pytest.mark.parametrize("tokens", [(700, 700), (300, 1000), (1000, 300), (4096, 4096)], ids=str)
def test_seen_tiles_are_those_of_the_mask(tokens, window):
    """Against the mask itself: the mean up to the tiles that the diagonal cuts."""
    tile = HopperBackwardTile(64, 2, 2)
    rows = torch.arange(tokens[0])[:, None] + tokens[1] - tokens[0]
    keys = torch.arange(tokens[1])[None, :]
    left, right = window
    seen = torch.ones(tokens, dtype=torch.bool)
    if left >= 0:
        seen &= keys >= rows - left
    if right >= 0:
        seen &= keys <= rows + right
    counts = []
    for first in range(0, tokens[1], tile.block_n):
        of_rows = seen[:, first : first + tile.block_n].any(1)
        counts.append(sum(bool(part.any()) for part in of_rows.split(tile.block_m)))
    longest, mean = seen_tiles(tokens, window, tile)
    assert abs(longest - max(counts)) <= 2
    assert abs(mean - sum(counts) / len(counts)) <= 2


@pytest.mark.parametrize("blocks", [1, 7, 32, 132, 1000])
def test_planes_fill_the_processors(blocks):
    planes = filling_planes(blocks, PROCESSORS)
    assert planes & (planes - 1) == 0
    assert planes == 1 or planes * blocks <= PROCESSORS < 2 * planes * blocks
