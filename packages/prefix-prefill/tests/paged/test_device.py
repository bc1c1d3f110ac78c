"""What only a GPU can show: graphs, streams, devices, sizes, Inductor."""

from __future__ import annotations

import pytest
import torch
from attn_common import detect, fp8_dtype
from prefix_prefill import paged_attention_reference, paged_attn_func, reshape_and_cache

from .._linked.budget import assert_no_worse_than_eager, assert_same, offsets
from .._numerics import Case, Problem, check, make_case, run
from ..mla import _mla

pytestmark = pytest.mark.device

PROBLEM = Problem(((300, 700), (1, 2000), (3, 40)), 8, 2, 64, dense=True)
GIB = 2**30


def needs(gib):
    """Skip on a GPU with less free memory."""
    free, _ = torch.cuda.mem_get_info()
    if free < gib * GIB:
        pytest.skip(f"needs {gib} GiB of free GPU memory, has {free / GIB:.0f}")


def capture(step):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


# splits by load, a fixed number of them, and none: scratch is captured with the call
@pytest.mark.parametrize("splits", [0, 4, 1])
def test_graph_replays_with_new_inputs(splits, device):
    static = make_case(PROBLEM, torch.bfloat16, device).with_options(num_splits=splits)
    graph, results = capture(lambda: run(static))
    for seed in (1, 2):
        fresh = make_case(PROBLEM, torch.bfloat16, device, seed=seed)
        for name, t in fresh.inputs.items():
            static.inputs[name].copy_(t)
        static.options["block_table"].copy_(fresh.options["block_table"])
        graph.replay()
        assert_same(results, run(static))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page", [7, 16, 128])
def test_graph_of_chunks_over_an_fp8_cache(page, head_dim, device):
    """On the kernel for Hopper that widens; its counter of tiles is ready for the next replay."""
    platform = detect(device)
    if not platform.supports_fp8:
        pytest.skip(f"{platform} has no FP8")
    problem = Problem(((300, 700), (1, 2000), (130, 140)), 8, 2, head_dim, page)
    stored = getattr(torch, fp8_dtype(platform))
    static = make_case(problem, torch.bfloat16, device, cache_dtype=stored)
    scale = torch.tensor([0.75, -1.5], device=device)
    static = static.with_options(num_splits=1, k_descale=scale, v_descale=scale)
    graph, results = capture(lambda: run(static))
    check(static)
    for keys in (650, 300):
        static.options["seqlens_k"].copy_(torch.tensor([keys, 1500, 135], dtype=torch.int32))
        for _ in range(3):
            graph.replay()
        assert_same(results, run(static))


def test_graph_of_a_decode_step_with_new_lengths_and_fewer_sequences(device):
    """Lengths are device data; sequences that are gone have no query, their rows are padding."""
    lengths = ((1, 500), (1, 70), (1, 1500), (1, 16))
    case = make_case(Problem(lengths, 8, 2, 128), torch.bfloat16, device)
    graph, results = capture(lambda: run(case))
    case.options["seqlens_k"].copy_(torch.tensor([300, 12, 1400, 1], dtype=torch.int32))
    case.options["cu_seqlens_q"].copy_(offsets([1, 1, 0, 0], device))
    graph.replay()
    want = run(case)
    assert_same(results, want)
    assert not results["out"][2:].any()


@pytest.mark.parametrize(("heads", "page"), [(128, 64), (16, 16), (16, 1)])
def test_latent_attention_in_a_graph_with_new_lengths(heads, page, device):
    """Decoding, on the kernel for Hopper and, with pages of one token, on the portable one."""
    lengths = ((1, 500), (1, 70), (1, 3000), (1, 64))
    case = _mla.make_case(_mla.Problem(lengths, heads, page), torch.bfloat16, device)
    graph, results = capture(case)
    _mla.check(case)
    case.options["seqlens_k"].copy_(torch.tensor([300, 12, 2900, 1], dtype=torch.int32))
    case.options["cu_seqlens_q"].copy_(offsets([1, 1, 1, 0], device))
    graph.replay()
    assert_same(results, case())
    assert not results["out"][3:].any()


@pytest.mark.parametrize("splits", [0, 1, 5])
def test_latent_attention_repeats_bit_for_bit(splits, device):
    lengths = ((1, 8192), (70, 4000), (3, 3), (1, 65))
    case = _mla.make_case(_mla.Problem(lengths, 64, 64), torch.bfloat16, device)
    case = case.with_options(num_splits=splits)
    want = _mla.check(case)
    for _ in range(50):
        assert_same(case(), want)


def test_second_stream(device):
    case = make_case(PROBLEM, torch.bfloat16, device)
    want = run(case)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # the inputs arrive late, on this stream alone
        late = case.with_inputs(**{name: t.clone() for name, t in case.inputs.items()})
        got = run(late)
    stream.synchronize()
    assert_same(got, want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_a_device_that_is_not_current(device):
    case = make_case(PROBLEM, torch.bfloat16, device)
    other = torch.device("cuda", 1)
    inputs = {name: t.to(other) for name, t in case.inputs.items()}
    options = {
        n: t.to(other) if isinstance(t, torch.Tensor) else t for n, t in case.options.items()
    }
    got = run(Case(inputs, options))
    assert all(t.device == other for t in got.values())
    assert_same({name: t.to(device) for name, t in got.items()}, run(case))
    assert torch.cuda.current_device() == 0


def long_table(tokens, page, device):
    """A sequence over the pages of a cache in reversed order."""
    table = torch.arange(tokens // page, dtype=torch.int32, device=device).flip(0)[None]
    starts = torch.tensor([0, 512], dtype=torch.int32, device=device)
    lengths = torch.tensor([tokens], dtype=torch.int32, device=device)
    return table, starts, lengths


def test_a_cache_beyond_2_to_the_31_elements(device):
    """64 heads x 128 x 262,400 tokens in one cache; a window keeps the reference small."""
    needs(30)
    tokens, page = 262_400, 16
    shape = (tokens // page, page, 64, 128)
    k_cache, v_cache = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in "kv")
    assert k_cache.numel() > 2**31
    q = torch.randn(512, 64, 128, dtype=torch.bfloat16, device=device)
    table, starts, lengths = long_table(tokens, page, device)
    arguments = table, starts, lengths, 512, tokens
    out = paged_attn_func(q, k_cache, v_cache, *arguments, window_size=(1000, 0))
    heads = slice(62, 64)
    part = q[:, heads], k_cache[:, :, heads], v_cache[:, :, heads]
    results = [
        paged_attention_reference(*(t.to(dtype) for t in part), *arguments, window_size=(1000, 0))
        for dtype in (torch.bfloat16, torch.float64)
    ]
    assert_no_worse_than_eager("out", out[:, heads], *results)


def test_queries_beyond_2_to_the_31_elements(device):
    """New keys and queries at offsets that 32 bits do not hold."""
    needs(30)
    tokens = 262_400
    q = torch.randn(tokens, 64, 128, dtype=torch.bfloat16, device=device)
    k, v = (torch.randn(tokens, 1, 128, dtype=torch.bfloat16, device=device) for _ in "kv")
    cache = torch.full((2, 16, 1, 128), float("nan"), dtype=torch.bfloat16, device=device)
    table = torch.zeros(2, 1, dtype=torch.int32, device=device)
    starts = torch.tensor([0, tokens - 300, tokens], dtype=torch.int32, device=device)
    lengths = torch.tensor([0, 300], dtype=torch.int32, device=device)
    lengths[0] = tokens - 300
    options = {"window_size": (100, 0), "k": k, "v": v}
    out = paged_attn_func(q, cache, cache, table, starts, lengths, tokens, tokens, **options)
    small = {
        "table": table[1:],
        "starts": torch.tensor([0, 300], dtype=torch.int32, device=device),
        "lengths": lengths[1:],
    }
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        last = {name: options[name][-300:].to(dtype) for name in "kv"}
        results.append(
            paged_attention_reference(
                q[-300:].to(dtype),
                cache.to(dtype),
                cache.to(dtype),
                *small.values(),
                300,
                300,
                window_size=(100, 0),
                **last,
            )
        )
    assert_no_worse_than_eager("out", out[-300:], *results)


def test_writing_beyond_2_to_the_31_elements(device):
    needs(20)
    k_cache, v_cache = (
        torch.zeros(17_000, 16, 64, 128, dtype=torch.bfloat16, device=device) for _ in "kv"
    )
    assert k_cache.numel() > 2**31
    k = torch.randn(3, 64, 128, dtype=torch.bfloat16, device=device)
    slots = torch.tensor([17_000 * 16 - 1, 0, 16_999 * 16], device=device)
    reshape_and_cache(k, k, k_cache, v_cache, slots)
    assert torch.equal(k_cache.flatten(0, 1)[slots], k)
    assert torch.equal(v_cache.flatten(0, 1)[slots], k)


def test_many_sequences(device):
    lengths = ((1, 5), (2, 3)) * 20_000
    problem = Problem(lengths, 2, 1, 16, page=8)
    case = make_case(problem, torch.float32, device)
    got = run(case)
    # every sequence of these was drawn by itself: the last by hand
    part = make_case(Problem(lengths[:2], 2, 1, 16, page=8), torch.float32, device)
    check(part)
    assert got["out"].isfinite().all()


def test_a_window_costs_no_more_than_what_it_shows(device):
    """A window of 4096 at a context of 65,536 visits the tiles of a context of 4096."""
    problem = Problem(((1, 65_536),) * 8, 32, 8, 128)
    case = make_case(problem, torch.bfloat16, device).with_options(window_size=(4095, 0))
    short = make_case(Problem(((1, 4096),) * 8, 32, 8, 128), torch.bfloat16, device)
    from triton.testing import do_bench

    times = [do_bench(lambda one=one: run(one), return_mode="median") for one in (case, short)]
    assert times[0] <= 1.3 * times[1], times


def test_inductor(device):
    torch._dynamo.reset()

    def function(q, inputs, options):
        # nothing that eager code rounds to 16 bits, and Inductor does not
        return paged_attn_func(q=q * 2, **inputs, **options).float().square()

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for length in (64, 100, 333):
        problem = Problem(((length, length + 7), (1, length)), 8, 2, 64)
        case = make_case(problem, torch.float16, device)
        inputs = dict(case.inputs)
        q = inputs.pop("q")
        arguments = q, inputs, case.options
        torch.testing.assert_close(compiled(*arguments), function(*arguments))


def test_inductor_keeps_what_is_written_into_views_of_a_static_cache(device):
    """With sizes that are dynamic it loses the second view, for every operator; docs/api.md."""
    torch._dynamo.reset()

    def step(k, v, kv, slots):
        reshape_and_cache(k * 1, v * 1, *kv.unbind(0), slots)

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    caches = [torch.zeros(2, 4, 16, 2, 64, device=device) for _ in range(2)]
    torch._dynamo.mark_static(caches[0])
    k, v = (torch.randn(5, 2, 64, device=device) for _ in "kv")
    slots = torch.tensor([3, -1, 40, 0, 63], device=device)
    compiled(k, v, caches[0], slots)
    step(k, v, caches[1], slots)
    assert caches[1][1].any()
    assert torch.equal(*caches)
