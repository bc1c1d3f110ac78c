"""How a head dimension is cut into panels on Hopper."""

from __future__ import annotations

import itertools

import pytest
from attn_common import is_power_of_2, next_power_of_2
from flash_attn_triton._dense.hopper_tiles import (
    VALUE_STAGES,
    ForwardPanels,
    forward_panels,
    hopper_backward_bias_tile,
    hopper_backward_tile,
    hopper_bias_tile,
    hopper_panel_tile,
    hopper_tile,
    panels_of,
)

from ..._linked.gpus import GPUS

pytestmark = pytest.mark.eager


@pytest.mark.parametrize(
    ("head_dim", "panels"),
    [
        (8, (16, 0)),
        (48, (64, 0)),
        (64, (64, 0)),
        (65, (64, 16)),
        (72, (64, 16)),
        (80, (64, 16)),
        (96, (64, 32)),
        (104, (128, 0)),
        (128, (128, 0)),
        (136, (128, 16)),
        (160, (128, 32)),
        (192, (128, 64)),
        (200, (256, 0)),
        (256, (256, 0)),
    ],
)
def test_panels_of(head_dim, panels):
    assert panels_of(head_dim) == panels


def test_panels_are_tiles_and_no_wider_than_one_tile():
    for head_dim in range(1, 257):
        wide, narrow = panels_of(head_dim)
        assert is_power_of_2(wide)
        assert narrow == 0 or (is_power_of_2(narrow) and 16 <= narrow < wide)
        assert head_dim <= wide + narrow <= max(16, next_power_of_2(head_dim))
        # the second panel is not empty
        assert narrow == 0 or head_dim > wide


def test_forward_is_cut_where_the_tile_has_room():
    whole = ForwardPanels((256, 0), (128, 0))
    assert forward_panels(192, 128, 2, False) == ForwardPanels((128, 64), (128, 0))
    assert forward_panels(256, 96, 2, False) == whole
    assert forward_panels(192, 96, 1, False) == whole
    # one panel of the output lies in that of the queries, of the same width
    assert forward_panels(96, 96, 2, True).is_cut
    assert forward_panels(192, 128, 2, True).is_cut
    assert forward_panels(96, 128, 2, True) == ForwardPanels((128, 0), (128, 0))


HEAD_DIMS = range(8, 257, 8)
# barriers, numbers of a block of queries, the producer's scratch
SMALL = 1024


@pytest.mark.parametrize("bias_bytes", [0, 2, 4])
@pytest.mark.parametrize("is_causal", [False, True])
def test_tiles_of_the_forward_fit(is_causal, bias_bytes):
    for head_dim, head_dim_v in itertools.product(HEAD_DIMS, HEAD_DIMS):
        panels = forward_panels(head_dim, head_dim_v, 2, bias_bytes > 0)
        widest = max(head_dim, head_dim_v)
        if bias_bytes:
            tile = hopper_bias_tile(widest, bias_bytes, is_causal)
        elif panels.is_cut:
            tile = hopper_panel_tile(panels)
        else:
            tile = hopper_tile(widest, is_causal)
        width, width_v = map(sum, panels)
        rows = tile.buffers_q * width
        if not (tile.share and panels.can_share):
            rows += width_v
        keys = tile.stages_k * width + tile.stages_v * width_v
        size = 2 * (tile.block_m * rows + tile.block_n * keys)
        size += tile.stages_b * tile.block_m * tile.block_n * bias_bytes
        limit = GPUS["nvidia:sm_90"].shared_limit - SMALL
        assert size <= limit, (head_dim, head_dim_v, tile)
        assert tile.stages_k + tile.stages_v + tile.stages_b <= 8, (head_dim, head_dim_v)


@pytest.mark.parametrize("bias_bytes", [0, 2, 4])
@pytest.mark.parametrize("is_ordered", [False, True])
def test_tiles_of_the_backward_fit(is_ordered, bias_bytes):
    for head_dim, head_dim_v in itertools.product(HEAD_DIMS, HEAD_DIMS):
        widest = max(head_dim, head_dim_v)
        tile = hopper_backward_tile(widest, False, not is_ordered)
        if bias_bytes:
            tile = hopper_backward_bias_tile(widest, bias_bytes)
        width, width_v = sum(panels_of(head_dim)), sum(panels_of(head_dim_v))
        # q, k, v, dout, and gradients of scores, or above head dim 128 probabilities besides
        size = 2 * (tile.block_n + tile.stages_q * tile.block_m) * width
        size += 2 * (tile.block_n + tile.stages_o * tile.block_m) * width_v
        size += 2 * 2 * max(tile.block_n, 128) * tile.block_m
        size += tile.stages_b * tile.block_m * tile.block_n * bias_bytes
        if tile.block_n == 128 and not tile.is_apart:
            size += 4 * tile.block_m * width
        limit = GPUS["nvidia:sm_90"].shared_limit - 2 * SMALL
        assert size <= limit, (head_dim, head_dim_v, tile)
        size = 2 * (128 * width + VALUE_STAGES * 64 * (width + width_v))
        assert not tile.is_apart or size <= limit
