"""Writing new keys and values into the pages of a cache."""

from __future__ import annotations

import pytest
import torch
from prefix_prefill import api, reshape_and_cache
from prefix_prefill._linked.host.forms import Memory
from prefix_prefill._paged import ops

from .._linked.budget import DTYPES, Maker
from .._linked.fences import run_fenced
from .._linked.tiers import INTERPRETED
from .._linked.views import VIEWS
from .._numerics import PACKED, in_layout

LAYOUTS = pytest.mark.parametrize("layout", ["nhd", PACKED])
FP8_DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2]


def make(layout, dtype, device, page=5, heads=2, head_dim=24, tokens=21, blocks=6):
    m = Maker(device, dtype)
    k, v = m.randn(tokens, heads, head_dim), m.randn(tokens, heads, head_dim)
    slots = torch.randperm(blocks * page, generator=m.generator)[:tokens].to(device)
    frame = torch.full((blocks, page, heads, head_dim), 7.0).to(dtype)
    caches = (in_layout(frame, layout, which).to(device, copy=True) for which in "kv")
    return k, v, *caches, slots


def expected(new, cache, slots, layout):
    """The NHD form of a cache of sevens after the write, as written by a loop."""
    blocks, page = cache.shape[0], cache.shape[3] if layout == PACKED else cache.shape[1]
    want = torch.full((blocks, page, *new.shape[1:]), 7.0).to(new.dtype)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            want[slot // page, slot % page] = new[token].cpu()
    return want


def as_nhd(cache, layout):
    if layout != PACKED:
        return cache.cpu()
    if cache.ndim == 5:
        return cache.cpu().permute(0, 3, 1, 2, 4).flatten(3)
    return cache.cpu().permute(0, 3, 1, 2)


@pytest.mark.eager
@LAYOUTS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_token_goes_to_its_slot(dtype, layout, device):
    k, v, k_cache, v_cache, slots = make(layout, dtype, device)
    reshape_and_cache(k, v, k_cache, v_cache, slots)
    assert torch.equal(as_nhd(k_cache, layout), expected(k, k_cache, slots, layout))
    assert torch.equal(as_nhd(v_cache, layout), expected(v, v_cache, slots, layout))


@pytest.mark.eager
@LAYOUTS
@pytest.mark.parametrize("page", [1, 16, 48])
def test_page_sizes(page, layout, device):
    k, v, k_cache, v_cache, slots = make(layout, torch.float32, device, page, blocks=30)
    reshape_and_cache(k, v, k_cache, v_cache, slots.int())
    assert torch.equal(as_nhd(k_cache, layout), expected(k, k_cache, slots, layout))
    assert torch.equal(as_nhd(v_cache, layout), expected(v, v_cache, slots, layout))


@pytest.mark.eager
@LAYOUTS
def test_negative_slots_are_skipped(layout, device):
    k, v, k_cache, v_cache, slots = make(layout, torch.float32, device)
    slots[::3] = -1
    slots[1] = -2
    k[::3], v[1] = float("nan"), float("nan")
    reshape_and_cache(k, v, k_cache, v_cache, slots)
    assert torch.equal(as_nhd(k_cache, layout), expected(k, k_cache, slots, layout))
    assert torch.equal(as_nhd(v_cache, layout), expected(v, v_cache, slots, layout))


@pytest.mark.eager
@LAYOUTS
@pytest.mark.parametrize("count", [0, 1, 17])
def test_tokens_beyond_the_slots_are_padding(count, layout, device):
    k, v, k_cache, v_cache, slots = make(layout, torch.float32, device)
    reshape_and_cache(k, v, k_cache, v_cache, slots[:count])
    assert torch.equal(as_nhd(k_cache, layout), expected(k, k_cache, slots[:count], layout))
    reshape_and_cache(k, v, k_cache, v_cache, torch.full_like(slots, -1))
    assert torch.equal(as_nhd(k_cache, layout), expected(k, k_cache, slots[:count], layout))


@pytest.mark.eager
@LAYOUTS
@pytest.mark.parametrize("view", VIEWS)
def test_strides_are_free(view, layout, device):
    k, v, k_cache, v_cache, slots = make(layout, torch.float32, device)
    caches = [VIEWS[view](t) for t in (k_cache, v_cache)]
    strided = torch.stack([slots, slots], 1)[:, 0]
    reshape_and_cache(VIEWS[view](k), VIEWS[view](v), *caches, strided)
    reshape_and_cache(k, v, k_cache, v_cache, slots)
    assert torch.equal(caches[0], k_cache)
    assert torch.equal(caches[1], v_cache)


@pytest.mark.eager
def test_two_halves_of_one_tensor(device):
    k, v, *_, slots = make("nhd", torch.float32, device)
    both = torch.full((2, 6, 5, 2, 24), 7.0, device=device)
    reshape_and_cache(k, v, both[0], both[1], slots)
    assert torch.equal(both[0].cpu(), expected(k, both[0], slots, "nhd"))
    assert torch.equal(both[1].cpu(), expected(v, both[1], slots, "nhd"))


def representable(*shape, device):
    """Numbers that both FP8 formats hold, four times as large as a scale of 4 makes them."""
    values = torch.tensor([-6.0, -1.5, -0.25, 0.0, 0.5, 1.0, 3.0, 12.0])
    index = torch.randint(0, 8, shape, generator=torch.Generator().manual_seed(0))
    return (values[index] * 4).to(device)


@pytest.mark.eager
@LAYOUTS
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("per_head", [False, True])
def test_fp8_scales_and_saturates(per_head, dtype, layout, device):
    _, _, k_cache, v_cache, slots = make(layout, dtype, device, head_dim=32)
    k, v = representable(21, 2, 32, device=device), representable(21, 2, 32, device=device)
    k[0], k[1] = 1e9, -1e9
    scales = torch.tensor([4.0, 2.0] if per_head else [4.0], device=device)
    reshape_and_cache(k, v, k_cache, v_cache, slots, k_scale=scales, v_scale=scales)
    wide = scales.expand(2)[None, :, None]
    limit = torch.finfo(dtype).max
    for new, cache in ((k, k_cache), (v, v_cache)):
        want = (new / wide).clamp(-limit, limit)
        want = expected(want, cache, slots, layout)
        assert torch.equal(as_nhd(cache.float(), layout), want)


@pytest.mark.eager
def test_bytes_are_e4m3(device):
    _, _, k_cache, v_cache, slots = make("nhd", torch.float8_e4m3fn, device, head_dim=32)
    k = representable(21, 2, 32, device=device)
    stored = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    reshape_and_cache(k, k, *stored, slots)
    assert torch.equal(k_cache.float().cpu(), expected(k, k_cache, slots, "nhd"))


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=str)
def test_writes_of_a_known_form_go_past_the_operator(dtype, layout, device, monkeypatch):
    from prefix_prefill._cache.kernels.launch import write_plan_of

    def operator(*_):
        raise AssertionError("the operator was called")

    monkeypatch.setattr(api, "_writes", Memory())
    # plans are for GPUs, but what they launch is the same in the interpreter
    monkeypatch.setattr(ops, "write_plan_of", write_plan_of)
    monkeypatch.setattr(ops, "reshape_and_cache", operator)
    stored = torch.float8_e4m3fn if dtype == torch.uint8 else dtype
    scale = torch.tensor([4.0], device=device) if dtype == torch.uint8 else None
    for count in (21, 9, 1, 0):
        _, _, k_cache, v_cache, slots = make(layout, stored, device, head_dim=32)
        k, v = representable(21, 2, 32, device=device), -representable(21, 2, 32, device=device)
        caches = k_cache.view(dtype), v_cache.view(dtype)
        reshape_and_cache(k, v, *caches, slots[:count], k_scale=scale, v_scale=scale)
        for new, cache in ((k, k_cache), (v, v_cache)):
            values = new if scale is None else new / scale
            want = expected(values, cache, slots[:count], layout)
            assert torch.equal(as_nhd(cache.float(), layout), want)
    # with and without several tokens, whose strides matter
    assert len(api._writes._known) == 2
    with pytest.raises(ValueError, match="slot_mapping"):
        reshape_and_cache(k[:1], v[:1], *caches, slots[:9], k_scale=scale, v_scale=scale)


@pytest.mark.skipif(INTERPRETED, reason="interpreted FP8 stores round wrongly")
@pytest.mark.eager
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_fp8_rounds_as_torch_does(dtype, device):
    k, v, k_cache, v_cache, slots = make("nhd", torch.float32, device)
    k_cache, v_cache = k_cache.to(dtype), v_cache.to(dtype)
    scale = torch.tensor([0.37], device=device)
    reshape_and_cache(k, v, k_cache, v_cache, slots, k_scale=scale)
    want = expected((k / scale).to(dtype).float(), k_cache, slots, "nhd")
    assert torch.equal(k_cache.float().cpu(), want)
    assert torch.equal(v_cache.float().cpu(), expected(v.to(dtype).float(), v_cache, slots, "nhd"))


@pytest.mark.device
@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_many_tokens(dtype, layout, device):
    made = make(layout, dtype, device, page=16, heads=8, head_dim=128, tokens=5000, blocks=400)
    k, v, k_cache, v_cache, slots = made
    reshape_and_cache(k, v, k_cache, v_cache, slots)
    assert torch.equal(as_nhd(k_cache, layout), expected(k, k_cache, slots, layout))
    assert torch.equal(as_nhd(v_cache, layout), expected(v, v_cache, slots, layout))


@pytest.mark.device
def test_writes_wait_for_the_kernels_before_them(device):
    """Programs that are set up early read and write no earlier, also behind another write."""
    k, _, k_cache, v_cache, slots = make(
        "nhd", torch.float32, device, page=16, heads=8, head_dim=128, tokens=1000, blocks=100
    )
    k.zero_()
    other = torch.full_like(k, -1.0)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for step in range(1, 201):
        k += 1
        reshape_and_cache(other, k, k_cache, v_cache, slots)
        reshape_and_cache(k, other, k_cache, v_cache, slots)
        for cache, value in ((k_cache, step), (v_cache, -1)):
            wrong += (cache.flatten(0, 1)[slots] != value).sum()
    assert not wrong


@pytest.mark.device
def test_writes_in_a_graph_wait_for_what_is_no_kernel(device):
    """For a copy, for another stream, and for another write."""
    k, v, k_cache, v_cache, slots = make(
        "nhd", torch.float32, device, page=16, heads=8, head_dim=128, tokens=1000, blocks=100
    )
    source, stream, graph = k.clone(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    reshape_and_cache(k, v, k_cache, v_cache, slots)  # compiles
    with torch.cuda.graph(graph):
        k.copy_(source)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.mul(source, 2, out=v)
        torch.cuda.current_stream().wait_stream(stream)
        reshape_and_cache(v, k, k_cache, v_cache, slots)
        reshape_and_cache(k, v, k_cache, v_cache, slots)
    for step in range(1, 20):
        source.fill_(step)
        graph.replay()
        assert (k_cache.flatten(0, 1)[slots] == step).all()
        assert (v_cache.flatten(0, 1)[slots] == 2 * step).all()


@pytest.mark.skipif(not INTERPRETED, reason="needs memory that faults on a CPU")
def test_no_read_beyond_a_tensor():
    code = """
import torch
from prefix_prefill._cache.kernels.launch import launch_reshape_and_cache
for d in (16, 24):
    k, v = (fenced(torch.randn(6, 2, d)) for _ in range(2))
    caches = [fenced(torch.zeros(4, 4, 2, d)) for _ in range(2)]
    slots = torch.tensor([15, 0, 16, -1, 3, 7])  # the third is none of the cache's
    launch_reshape_and_cache(k, v, *caches, fenced(slots), *[None] * 4)
    for x, cache in zip((k, v), caches):
        assert torch.equal(cache.flatten(0, 1)[[15, 0, 3, 7]], x[[0, 1, 4, 5]])
        assert cache.count_nonzero() == 4 * 2 * d
"""
    run_fenced(code, __file__)
