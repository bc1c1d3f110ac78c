"""Multi-head latent attention on Hopper: what its kernel takes, and what it builds into."""

from __future__ import annotations

import pytest
import torch
from prefix_prefill._mla.call import MlaOptions, MlaTensors
from prefix_prefill._mla.tiles import takes_hopper_mla
from prefix_prefill._paged.tiles import MIN_PIECE
from torch import Tensor

from .._linked.gpus import absent_gpu, chosen, compiling, counting, recording
from .._linked.spills import check_builds
from ..paged._aot import Config, launch_mla

HOPPER = "nvidia:sm_90"
FP8 = torch.float8_e4m3fn
OPTIONS = MlaOptions(0.1, True, 0)


def meta(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


def call(page: int = 64, dtype: torch.dtype = torch.bfloat16, head_dim: int = 576) -> MlaTensors:
    small = [meta(2, 3, dtype=torch.int32), *(meta(n, dtype=torch.int32) for n in (3, 2))]
    q, out = (meta(2, 16, d, dtype=dtype) for d in (head_dim, 512))
    return MlaTensors(q, meta(5, page, head_dim, dtype=dtype), *small, None, None, out, None)


@pytest.mark.eager
def test_what_it_takes():
    with absent_gpu(HOPPER):
        for page in (16, 48, 64, 544):
            assert takes_hopper_mla(call(page), OPTIONS)
        assert takes_hopper_mla(call(dtype=torch.float16), OPTIONS)
        assert takes_hopper_mla(call(), OPTIONS._replace(causal=False, num_splits=7))
        fp8 = call(7)._replace(kv_cache=meta(5, 7, 576, dtype=torch.float8_e4m3fn))
        assert takes_hopper_mla(fp8, OPTIONS._replace(softmax_scale=-1.0))
        assert takes_hopper_mla(fp8._replace(q=meta(2, 16, 576, dtype=FP8)), OPTIONS)
    with absent_gpu("nvidia:sm_80"):
        assert not takes_hopper_mla(call(), OPTIONS)


@pytest.mark.eager
def test_what_it_leaves_to_the_portable_kernel():
    plain = call()
    cache = plain.kv_cache
    with absent_gpu(HOPPER):
        assert not takes_hopper_mla(call(MIN_PIECE // 2), OPTIONS)
        assert not takes_hopper_mla(call(dtype=torch.float32), OPTIONS)
        assert not takes_hopper_mla(call(head_dim=512), OPTIONS)
        for scale in (0.0, -1.0, 1e-60):
            assert not takes_hopper_mla(plain, OPTIONS._replace(softmax_scale=scale))
        for wrong in (
            meta(5, 64, 576, dtype=torch.float32),
            meta(5, 576, 64).mT,
            meta(0, 64, 576),
            cache.as_strided(cache.shape, (576 * 64, 577, 1)),
        ):
            assert not takes_hopper_mla(plain._replace(kv_cache=wrong), OPTIONS)
        eight = meta(2, 16, 576, dtype=FP8)
        assert not takes_hopper_mla(plain._replace(q=eight), OPTIONS)
        on_cpu = plain._replace(q=torch.empty_like(plain.q, device="cpu"))
        assert not takes_hopper_mla(on_cpu, OPTIONS)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("config", "tokens", "most"),
    chosen(
        [
            (Config(576, page=64, group=128), 64, 1),
            (Config(576, page=64, group=16, splits=4), 64, 1),
            (Config(576, group=16), 512, 128),
            (Config(576, cache="float8_e4m3fn", page=64, group=128), 64, 1),
        ],
        [
            (Config(576, "float16", "float8_e5m2", page=1, group=16, splits=4), 512, 128),
            (Config(576, "float16", page=48, group=24), 64, 1),
        ],
    ),
    ids=str,
)
def test_builds(config, tokens, most, tmp_path):
    with compiling(HOPPER, tmp_path) as builds:
        launch_mla(config, tokens, 64 if most == 1 else 4, most, hopper=True)
    build = builds[0]
    assert build.kernel == ("mla_fp8_kernel" if config.cache else "mla_kernel")
    check_builds(HOPPER, config, builds)
    for instruction in ("HGMMA", "F2FP" if config.cache else "UTMALDG", "USETMAXREG"):
        assert instruction in build.sass, instruction
    # five products and three waits: the assembler has added none of its own
    assert build.sass.count("WARPGROUP.ARRIVE") == 5
    assert build.sass.count("WARPGROUP.DEPBAR") == 3
    assert len(builds) == (2 if config.splits > 1 else 1)


@pytest.mark.aot
def test_lengths_make_one_variant():
    with counting(HOPPER) as variants:
        for tokens in (3, 64, 500, 2049):
            launch_mla(Config(576, page=64, group=16), tokens, 2, 2049, hopper=True)
    (name,) = (name for name in variants if "mla" in name)
    assert len(variants[name]) == 1


@pytest.mark.aot
def test_few_sequences_are_split():
    with recording(HOPPER) as launches:
        launch_mla(Config(576, page=64, group=128, splits=0), 1, 1, 1, hopper=True)
    assert [launch.kernel for launch in launches] == ["mla_kernel", "split_merge_kernel"]
    assert launches[0].grid[0] > 16
