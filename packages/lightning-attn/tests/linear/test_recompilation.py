"""Calls that differ in length or batch alone share their kernels."""

from __future__ import annotations

import pytest
import torch

from .._linked.gpus import GPUS, compiled_forms, counting
from .._numerics import MEDIUM, Packed, make_case, make_packed, run
from ._aot import Config, launch_backward, launch_cached, launch_decode, launch_forward

# one, odd, even, powers of two, multiples of 16 and not, in no order
LENGTHS = [1, 16, 17, 33, 1024, 48, 2, 100, 128, 127, 129, 512, 4096, 31, 64, 250, 3, 2000, 8, 1001]


@pytest.mark.aot
@pytest.mark.parametrize("launch", [launch_forward, launch_backward])
@pytest.mark.parametrize(
    "config",
    [Config(128), Config(80, e=48, packed=True), Config(64, schedule="parallel")],
    ids=str,
)
@pytest.mark.parametrize("gpu", ["nvidia:sm_90", "amd:gfx942"])
def test_twenty_lengths_make_two_variants_at_most(gpu, config, launch):
    assert gpu in GPUS
    with counting(gpu) as variants:
        for length in LENGTHS:
            launch(config, length)
    assert variants
    # one for each kind of walk: dv, dk and dq, those over segments without reads, each twice
    kinds = {launch_forward: 1, launch_backward: 3}[launch]
    if config.schedule == "parallel":
        kinds *= 2
    for kernel, keys in variants.items():
        assert len(keys) <= 2 * kinds, f"{kernel}: {len(keys)} variants"


@pytest.mark.aot
def test_caches_and_decoding_make_two_variants_at_most():
    with counting("nvidia:sm_90") as variants:
        for length in LENGTHS:
            launch_cached(Config(128, packed=True), length)
        for tokens in range(1, 9):
            launch_decode(Config(128), tokens)
    assert variants
    for kernel, keys in variants.items():
        assert len(keys) <= 2, f"{kernel}: {len(keys)} variants"


@pytest.mark.aot
def test_a_variant_is_counted():
    with counting("nvidia:sm_90") as variants:
        for d in (64, 80, 128):
            launch_forward(Config(d))
    assert [len(keys) for keys in variants.values()] == [3]


@pytest.mark.device
@pytest.mark.parametrize("form", ["fixed", "packed"])
def test_twenty_lengths_on_the_device(form, device):
    # a dimension of its own, so that no other test has compiled for it
    with compiled_forms() as variants:
        for i, length in enumerate(LENGTHS):
            if i == len(LENGTHS) - 5:
                early = set(variants)
            if form == "fixed":
                case = make_case(MEDIUM._replace(seqlen=length, d=208), torch.float16, device)
            else:
                case = make_packed(Packed((length, 3), 1, 208, 16), torch.float16, device)
            run(case.on("sequential"), grad=False)
    # the last lengths are of kinds that came before: no kernel and no constant is of one length
    assert early
    assert early == set(variants)
    for (kernel, _), keys in variants.items():
        assert len(keys) <= 2, f"{kernel}: {len(keys)} variants"
