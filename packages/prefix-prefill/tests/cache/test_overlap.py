"""What a call writes shares no memory with itself, nor with what else the call takes."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from prefix_prefill import (
    api,
    context_attention_fwd,
    dropin,
    flash_attn_with_kvcache,
    mla_attn_func,
    mla_cache_write,
    paged_attn_func,
    reshape_and_cache,
)
from prefix_prefill._linked.host.forms import Memory
from prefix_prefill._linked.host.overlap import check_apart
from prefix_prefill._paged import ops

from .._linked.tiers import INTERPRETED

pytestmark = pytest.mark.eager

SIZES, STRIDES = (1, 2, 2, 3, 4), (1, 1, 2, 3, 4, 6, 8, 12, 16, 24)


def drawn(draw, memory):
    """Return a view of memory, and the addresses of its elements."""
    dtype = draw.choice((torch.uint8, torch.int16, torch.int32))
    shape = [draw.choice(SIZES) for _ in range(draw.randint(0, 3))]
    strides = [draw.choice(STRIDES) for _ in shape]
    begin = draw.randint(0, 40)
    x = memory.view(dtype).as_strided(shape, strides, begin)
    places = itertools.product(*map(range, shape))
    return x, [
        (begin + sum(i * s for i, s in zip(place, strides, strict=True))) * x.element_size()
        for place in places
    ]


def is_taken(*tensors):
    try:
        check_apart("xy", tensors, [0])
    except ValueError:
        return False
    return True


def test_overlaps_are_told_exactly():
    draw, memory = random.Random(0), torch.zeros(2048, dtype=torch.uint8)
    for _ in range(2000):
        (x, of_x), (y, of_y) = drawn(draw, memory), drawn(draw, memory)
        is_apart = len(set(of_x)) == len(of_x)
        assert is_taken(x) == is_apart, (x.shape, x.stride())
        first, second = (
            {address + i for address in of for i in range(t.element_size())}
            for t, of in ((x, of_x), (y, of_y))
        )
        assert is_taken(x, y) == (is_apart and not first & second), (x.stride(), y.stride())


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def cache(*shape):
    return torch.zeros(*(shape or (2, 4, 1, 8)))


def expanded(dim, *shape):
    return cache(*shape).narrow(dim, 0, 1).expand(*(shape or (2, 4, 1, 8)))


def shifted(*shape):
    """Rows that overlap, although no stride is 0."""
    return torch.zeros(256).as_strided(shape, (*(6,) * (len(shape) - 1), 1))


TABLE = torch.tensor([[0], [1]], dtype=torch.int32), ints(0, 1, 2), ints(3, 4), 1, 4


def attend(**changes):
    given = {"q": torch.randn(2, 2, 8), "k_cache": cache(), "v_cache": cache()} | changes
    q, k_cache, v_cache = (given.pop(name) for name in ("q", "k_cache", "v_cache"))
    return paged_attn_func(q, k_cache, v_cache, *TABLE, **given)


def drop_in(**changes):
    given = {"q": torch.randn(2, 2, 8), "k_cache": cache(), "v_cache": cache()} | changes
    first = given["q"], None, None, given["out"], "auto", given["k_cache"], given["v_cache"]
    table, starts, lengths, most_q, most_k = TABLE
    return context_attention_fwd(*first, table, starts, lengths, most_k, most_q, None, None)


def latent(**changes):
    given = {"q": torch.randn(2, 2, 16), "kv_cache": cache(2, 4, 16)} | changes
    q, kv_cache = given.pop("q"), given.pop("kv_cache")
    return mla_attn_func(q, kv_cache, *TABLE, head_dim_v=8, **given)


def write(**changes):
    given = {"k": torch.randn(2, 1, 8), "k_cache": cache(), "v_cache": cache()} | changes
    given |= {"v": given["k"].clone(), "slot_mapping": torch.tensor([0, 4])}
    reshape_and_cache(**given)


def write_int8(**changes):
    given = {n: cache().to(torch.int8) for n in ("k_cache", "v_cache")} | {"kv_dtype": "int8"}
    given |= {n: cache(2, 4, 1) for n in ("k_scale_cache", "v_scale_cache")}
    write(**given | changes)


def write_latent(**changes):
    new = {n: torch.randn(2, 8) for n in ("kv_c", "k_pe")}
    mla_cache_write(**new | {"slot_mapping": torch.tensor([0, 4])} | changes)


def append(**changes):
    given = {"q": torch.randn(2, 1, 2, 8), "k": torch.randn(2, 1, 1, 8)} | changes
    given = {"k_cache": cache(), "v_cache": cache()} | given
    return flash_attn_with_kvcache(**given, v=torch.randn(2, 1, 1, 8), cache_seqlens=1)


@pytest.fixture(params=["operators", "launchers"])
def way(request, monkeypatch):
    """Calls go through operators, or past them, as a GPU's do."""
    if request.param == "operators":
        return
    if not INTERPRETED:
        pytest.skip("only kernels have launchers")
    from prefix_prefill._cache.kernels import launch as write_launch
    from prefix_prefill._kvcache import api as kvcache_api
    from prefix_prefill._kvcache.kernels import launch as kvcache_launch
    from prefix_prefill._mla import api as mla_api
    from prefix_prefill._mla import launch as mla_launch
    from prefix_prefill._mla import ops as mla_ops
    from prefix_prefill._paged import launch

    for module, name in (
        (api, "_known"),
        (api, "_writes"),
        (dropin, "_known"),
        (kvcache_api, "_known"),
        (mla_api, "_known"),
        (mla_api, "_writes"),
    ):
        monkeypatch.setattr(module, name, Memory())
    monkeypatch.setattr(ops, "plan_of", launch.plan_of)
    monkeypatch.setattr(ops, "write_plan_of", write_launch.write_plan_of)
    monkeypatch.setattr(ops, "kvcache_plans_of", kvcache_launch.plans_of)
    monkeypatch.setattr(mla_ops, "mla_plan_of", mla_launch.plan_of)
    monkeypatch.setattr(mla_ops, "mla_write_plan_of", mla_launch.write_plan_of)


ONE, TWO, LATENT = cache(), cache(2, 4, 1, 16), cache(2, 4, 16)
SCALES = cache(2, 4, 1)
EXPANDED = "must not be expanded, for it is written, got a stride of 0"
ITSELF = "must not overlap itself, for it is written, got"


@pytest.mark.parametrize(
    ("call", "changes", "message"),
    [
        (attend, {"out": expanded(0, 2, 2, 8)}, f"out {EXPANDED}"),
        (attend, {"out": expanded(1, 2, 2, 8)}, f"out {EXPANDED}"),
        (attend, {"out": shifted(2, 2, 8)}, f"out {ITSELF}"),
        (attend, {"out": (q := torch.randn(2, 2, 8)), "q": q}, "out must not share memory with q"),
        (
            attend,
            {"out": ONE[0].view(2, 2, 8), "k_cache": ONE},
            "out must not share memory with k_cache",
        ),
        (drop_in, {"out": expanded(0, 2, 2, 8)}, f"o {EXPANDED}"),
        (drop_in, {"out": q, "q": q}, "o must not share memory with q"),
        (latent, {"out": shifted(2, 2, 8)}, f"out {ITSELF}"),
        (
            latent,
            {"out": LATENT[0, :2].view(2, 2, 8), "kv_cache": LATENT},
            "out must not share memory with kv_cache",
        ),
        (write, {"k_cache": expanded(0)}, f"k_cache {EXPANDED}"),
        (write, {"v_cache": shifted(2, 4, 1, 8)}, f"v_cache {ITSELF}"),
        (write, {"k_cache": ONE, "v_cache": ONE}, "k_cache must not share memory with v_cache"),
        (
            write,
            {"k_cache": TWO[..., :8], "v_cache": TWO[..., 7:15]},
            "k_cache must not share memory with v_cache",
        ),
        (write, {"k_cache": ONE, "k": ONE[0, :2]}, "k_cache must not share memory with k,"),
        (write_int8, {"k_scale_cache": expanded(0, 2, 4, 1)}, f"k_scale_cache {EXPANDED}"),
        (
            write_int8,
            {"k_scale_cache": SCALES, "v_scale_cache": SCALES},
            "k_scale_cache must not share memory with v_scale_cache",
        ),
        (write_latent, {"kv_cache": expanded(0, 2, 4, 16)}, f"kv_cache {EXPANDED}"),
        (
            write_latent,
            {"kv_cache": LATENT, "k_pe": LATENT[0, :2, :8]},
            "kv_cache must not share memory with k_pe",
        ),
        (append, {"k_cache": expanded(0)}, f"k_cache {EXPANDED}"),
        (append, {"k_cache": ONE, "v_cache": ONE}, "k_cache must not share memory with v_cache"),
        (
            append,
            {"k_cache": ONE, "q": ONE[:, :1].expand(2, 1, 2, 8)},
            "k_cache must not share memory with q",
        ),
    ],
)
def test_what_overlaps_is_refused(call, changes, message, way):
    before = {name: x.clone() for name, x in changes.items()}
    with pytest.raises(ValueError, match=message):
        call(**changes)
    for name, x in changes.items():
        assert torch.equal(x, before[name])


@pytest.mark.parametrize(
    "caches",
    [
        lambda: torch.zeros(2, 2, 4, 1, 8).unbind(0),
        lambda: torch.zeros(2, 2, 4, 1, 8).unbind(1),
        lambda: torch.zeros(2, 4, 1, 16).split(8, -1),
        lambda: torch.zeros(2, 1, 4, 16).transpose(1, 2).split(8, -1),
    ],
)
def test_caches_that_lie_in_one_tensor_are_served(caches):
    k, v = torch.randn(2, 1, 8), torch.randn(2, 1, 8)
    k_cache, v_cache = caches()
    slots = torch.tensor([0, 4])
    reshape_and_cache(k, v, k_cache, v_cache, slots)
    for new, written in ((k, k_cache), (v, v_cache)):
        assert torch.equal(written[:, 0], new)
        assert not written[:, 1:].any()
    q = torch.randn(2, 1, 2, 8)
    flash_attn_with_kvcache(q, k_cache, v_cache, k[:, None], v[:, None], cache_seqlens=2)
    assert torch.equal(k_cache[:, 2], k)
    assert torch.equal(v_cache[:, 2], v)


def test_an_output_that_lies_beside_the_queries_is_served():
    both = torch.randn(2, 2, 16)
    want = attend(q=both[..., :8].clone())
    assert torch.equal(attend(q=both[..., :8], out=both[..., 8:]), want)


def test_what_is_only_read_may_overlap():
    k_cache = torch.randn(2, 4, 1, 8)
    attend(q=k_cache[:, :2, 0], k_cache=k_cache, v_cache=k_cache)
    shared = k_cache[:1].expand(2, 4, 1, 8)
    flash_attn_with_kvcache(torch.randn(2, 1, 2, 8), shared, shared, cache_seqlens=3)
