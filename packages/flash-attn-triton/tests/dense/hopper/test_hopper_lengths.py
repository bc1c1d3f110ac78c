"""What lengths decide about the forward kernel for Hopper: how many compilations there are."""

from __future__ import annotations

import pytest
import torch
from flash_attn_triton._dense.hopper_tiles import LONG, hopper_pack

from ..._linked.gpus import counting, recording
from ._hopper import HOPPER, features, hopper


@pytest.mark.eager
@pytest.mark.parametrize(
    ("tokens", "group", "pack"),
    [
        (1, 1, 1),
        (1, 8, 8),
        (1, 12, 4),
        (1, 32, 16),
        (64, 2, 2),
        (65, 2, 1),
        (60, 4, 4),
        (100, 8, 1),
        (130, 8, 8),
        (4096, 8, 1),
    ],
)
def test_heads_share_a_tile_where_that_saves_tiles(tokens, group, pack):
    assert hopper_pack(tokens, group, 128) == pack


@pytest.mark.aot
@pytest.mark.parametrize(
    ("tokens_q", "tokens_k", "head_dim", "options", "warpgroups"),
    [
        (LONG, LONG, 64, {"causal": True}, 3),
        (2 * LONG, LONG + 1, 48, {"window_size": (-1, 9), "sinks": torch.empty(2)}, 3),
        (LONG - 1, LONG, 64, {"causal": True}, 2),
        (LONG, LONG - 1, 64, {"causal": True}, 2),
        (16, 4 * LONG, 64, {"causal": True}, 2),
        (LONG, LONG, 64, {"window_size": (LONG, 0)}, 2),
        (LONG, LONG, 64, {"causal": True, "softcap": 5.0}, 2),
        (LONG, LONG, 64, {"causal": True, "alibi_slopes": torch.empty(2)}, 2),
        (LONG, LONG, 128, {"causal": True}, 2),
        (16, 16, 64, {}, 3),
    ],
)
def test_lengths_decide_where_rows_above_the_diagonal_count(
    tokens_q, tokens_k, head_dim, options, warpgroups
):
    q, kv = (
        torch.empty(1, tokens, 2, head_dim, dtype=torch.bfloat16, device="meta")
        for tokens in (tokens_q, tokens_k)
    )
    with recording(HOPPER) as launches:
        hopper(q, kv, kv, **options)
    (launch,) = launches
    assert launch.options["WARPGROUPS"] == warpgroups


@pytest.mark.aot
def test_lengths_of_packed_calls_decide_nothing():
    q = torch.empty(2 * LONG, 2, 64, dtype=torch.bfloat16, device="meta")
    with recording(HOPPER) as launches:
        hopper(q, q, q, **features("packed"))
    (launch,) = launches
    assert launch.options["WARPGROUPS"] == 2


@pytest.mark.aot
@pytest.mark.parametrize("kind", ["causal", "packed"])
def test_lengths_make_few_variants(kind):
    """One, and where lengths are known on the host one for few queries, one for long sequences."""
    options = features(kind)
    with counting(HOPPER) as variants:
        for length in (1, 129, 4096, 5000, 16_384, 70_001):
            leading = (length,) if kind == "packed" else (2, length)
            q, kv = (
                torch.empty(*leading, heads, 64, dtype=torch.bfloat16, device="meta")
                for heads in (4, 2)
            )
            hopper(q, kv, kv, **options)
    assert [len(keys) for keys in variants.values()] == [1 if kind == "packed" else 3]
