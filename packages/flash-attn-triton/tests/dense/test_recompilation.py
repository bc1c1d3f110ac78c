"""Calls that differ in length alone share their kernels."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from .._linked.gpus import GPUS, compiled_forms, counting
from .._numerics import MEDIUM, Packed, make_case, make_packed, run
from ._aot import Config, launch_backward, launch_forward

# one, odd, even, powers of two, multiples of 16 and not, in no order
LENGTHS = [1, 16, 17, 33, 1024, 48, 2, 100, 128, 127, 129, 512, 4096, 31, 64, 250, 3, 2000, 8, 1001]


@pytest.mark.aot
@pytest.mark.parametrize("launch", [launch_forward, launch_backward])
@pytest.mark.parametrize(
    "config",
    [
        Config(128),
        Config(80, causal=False),
        Config(64, rich=True),
        Config(24, heads_first=True),
        Config(64, spans=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("gpu", ["nvidia:sm_90", "amd:gfx942"])
def test_twenty_lengths_make_one_variant(gpu, config, launch):
    assert gpu in GPUS
    with counting(gpu) as variants:
        for length in LENGTHS:
            launch(config, length)
    assert variants
    for kernel, keys in variants.items():
        # a row of the bias is read by whole accesses, or by elements where its length forbids it
        reads_bias = config.rich and kernel != "row_kernel"
        assert len(keys) == (2 if reads_bias else 1), f"{kernel}: {len(keys)} variants"


@pytest.mark.aot
@pytest.mark.parametrize("launch", [launch_forward, launch_backward])
@pytest.mark.parametrize(
    "config", [Config(128), Config(80, causal=False), Config(64, rich=True), Config(24)], ids=str
)
@pytest.mark.parametrize("gpu", ["nvidia:sm_90", "amd:gfx942"])
def test_layouts_make_one_variant(gpu, config, launch):
    """Tokens or heads first, strides of 16 elements and of fewer, small tensors at odd places."""
    with counting(gpu) as variants:
        for heads_first, apart in itertools.product((False, True), repeat=2):
            launch(dataclasses.replace(config, heads_first=heads_first, apart=apart))
    assert variants
    for kernel, keys in variants.items():
        assert len(keys) == 1, f"{kernel}: {len(keys)} variants"


@pytest.mark.aot
def test_a_variant_is_counted():
    with counting("nvidia:sm_90") as variants:
        for head_dim in (64, 80, 128):
            launch_forward(Config(head_dim))
    assert [len(keys) for keys in variants.values()] == [3]


@pytest.mark.device
@pytest.mark.parametrize("form", ["fixed", "packed"])
def test_twenty_lengths_on_the_device(form, device):
    # a head dimension of its own, so that no other test has compiled for it
    with compiled_forms() as variants:
        for i, length in enumerate(LENGTHS):
            if i == len(LENGTHS) - 5:
                early = set(variants)
            if form == "fixed":
                shape = MEDIUM._replace(seqlen_q=length, seqlen_k=length + 1, head_dim=72)
                case = make_case(shape, torch.float16, device, ("causal", "window_left"))
            else:
                shape = Packed((length, 3), (5, length), 2, 1, 72)
                case = make_packed(shape, torch.float16, device, ("causal",))
            run(case)
    # the last lengths are of kinds that came before: no kernel and no constant is of one length
    assert early
    assert early == set(variants)
    for (kernel, _), keys in variants.items():
        assert len(keys) <= 2, f"{kernel}: {len(keys)} variants"
