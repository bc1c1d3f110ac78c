"""Calls that differ in length alone share their kernels."""

from __future__ import annotations

import pytest
import torch

from .._linked.gpus import compiled_forms, counting
from .._numerics import Problem, make_case, run
from ._aot import (
    Config,
    launch_append,
    launch_attention,
    launch_cache,
    launch_decode,
    launch_merge,
    launch_rows,
)

# one, odd, even, powers of two, multiples of 16 and not, in no order
LENGTHS = [1, 16, 17, 33, 1024, 48, 2, 100, 128, 127, 129, 512, 4096, 31, 64, 250, 3, 2000, 8, 1001]


@pytest.mark.aot
@pytest.mark.parametrize("config", [Config(128), Config(64, rich=True, dense=True)], ids=str)
@pytest.mark.parametrize("gpu", ["nvidia:sm_90", "amd:gfx942"])
def test_twenty_lengths_make_two_variants_of_a_tile_at_most(gpu, config):
    # splits by load: with and without are the two variants
    config = Config(**{**vars(config), "splits": 0})
    with counting(gpu) as decode:
        for batch in LENGTHS:
            launch_decode(config, batch)
    assert len(decode["paged_kernel"]) <= 2
    with counting(gpu) as mixed:
        for tokens in LENGTHS:
            launch_attention(config, tokens, 3, tokens)
    # the tile for few queries, and the one for many
    assert len(mixed["paged_kernel"]) <= 4
    assert len(mixed["split_merge_kernel"]) <= 2


@pytest.mark.aot
@pytest.mark.parametrize("launch", [launch_cache, launch_merge])
def test_twenty_lengths_of_the_other_kernels(launch):
    with counting("nvidia:sm_90") as variants:
        for tokens in LENGTHS:
            launch(Config(128), tokens)
    assert [len(keys) for keys in variants.values()] == [1]


@pytest.mark.aot
def test_twenty_batches_over_a_cache_of_rows():
    """Nor does the length of a row, or how many there are, compile anew."""
    with counting("nvidia:sm_90") as variants:
        for batch in LENGTHS:
            launch_append(Config(128), batch, batch % 3 + 1)
            launch_rows(Config(128), batch)
    assert {name: len(keys) for name, keys in variants.items()} == {
        "append_kernel": 1,
        "pages_kernel": 1,
        "paged_kernel": 1,
    }


@pytest.mark.aot
def test_a_variant_is_counted():
    with counting("nvidia:sm_90") as variants:
        for head_dim in (64, 80, 128):
            launch_decode(Config(head_dim))
    assert [len(keys) for keys in variants.values()] == [3]


@pytest.mark.device
def test_twenty_lengths_on_the_device(device):
    # a head dimension of its own, so that no other test has compiled for it
    with compiled_forms() as variants:
        for i, length in enumerate(LENGTHS):
            if i == len(LENGTHS) - 5:
                early = set(variants)
            problem = Problem(((length, length + 5), (1, length)), 4, 2, 72, page=32)
            run(make_case(problem, torch.float16, device, ("window",)))
    # the last lengths are of kinds that came before: no kernel and no constant is of one length
    assert early
    assert early == set(variants)
    for (kernel, _), keys in variants.items():
        assert len(keys) <= 2, f"{kernel}: {len(keys)} variants"
