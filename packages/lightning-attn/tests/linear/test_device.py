"""What only a GPU can show: graphs, streams, devices, sizes, Inductor, NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning_attn import (
    lightning_attention_reference,
    lightning_attn_decode,
    lightning_attn_func,
    lightning_attn_varlen_func,
)

from .._linked.budget import Maker, assert_no_worse_than_eager, assert_same, offsets
from .._numerics import SCHEDULES, Packed, Shape, check, make_case, make_packed, run

pytestmark = pytest.mark.device

SHAPE = Shape(2, 700, 4, 64, 64)
GIB = 2**30
schedules = pytest.mark.parametrize("schedule", SCHEDULES)


def needs(gib):
    """Skip on a GPU with less free memory."""
    free, _ = torch.cuda.mem_get_info()
    if free < gib * GIB:
        pytest.skip(f"needs {gib} GiB of free GPU memory, has {free / GIB:.0f}")


# ---- graphs


def capture(call):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


def step(case):
    """A call and its gradients, into tensors that stay where they are."""
    leaves = {name: t.detach().requires_grad_() for name, t in case.inputs.items()}
    out, state = case.function(**leaves, **case.options, output_final_state=True)
    ones = torch.ones_like(out), torch.ones_like(state)
    grads = torch.autograd.grad((out, state), list(leaves.values()), ones)
    return [out.detach(), state.detach(), *grads]


@schedules
@pytest.mark.parametrize("form", ["fixed", "packed"])
def test_graph_replays_with_new_inputs(form, schedule, device):
    def make(seed):
        if form == "fixed":
            return make_case(SHAPE, torch.bfloat16, device, seed=seed).on(schedule)
        shape = Packed((100, 0, 900), 4, 64, 64, padding=5)
        return make_packed(shape, torch.bfloat16, device, seed=seed).on(schedule)

    static = make(0)
    graph, results = capture(lambda: step(static))
    for seed in (1, 2):
        fresh = make(seed)
        for name, t in fresh.inputs.items():
            static.inputs[name].copy_(t)
        graph.replay()
        for got, want in zip(results, step(fresh), strict=True):
            assert torch.equal(got, want)


def test_graph_with_new_lengths(device):
    """Lengths are device data: one graph serves every split of its tokens."""
    static = make_packed(Packed((100, 0, 900), 4, 64, 64), torch.bfloat16, device)
    graph, results = capture(lambda: step(static))
    for lengths in [(1, 998, 1), (500, 500, 0), (0, 0, 1000)]:
        static.options["cu_seqlens"].copy_(offsets(lengths, device))
        graph.replay()
        for got, want in zip(results, step(static), strict=True):
            assert torch.equal(got, want)


def test_graph_of_decoding_with_new_slots(device):
    m = Maker(device, torch.bfloat16)
    q, k, v = (m.randn(3, 1, 4, 128) for _ in range(3))
    cache, decay = m.randn(8, 4, 128, 128, dtype=torch.float32), m.uniform(4, low=0.1, high=1.0)
    slots, out = torch.tensor([0, 1, 2], device=device), torch.empty_like(v)
    mine = cache.clone()
    graph, _ = capture(lambda: lightning_attn_decode(q, k, v, mine, decay, slots, out=out))
    for chosen in ([7, -1, 3], [0, 5, 6]):
        mine.copy_(cache)
        slots.copy_(torch.tensor(chosen))
        graph.replay()
        other = cache.clone()
        assert torch.equal(out, lightning_attn_decode(q, k, v, other, decay, slots))
        assert torch.equal(mine, other)


# ---- streams and devices


def test_second_stream(device):
    case = make_case(SHAPE, torch.bfloat16, device)
    want = run(case)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # the inputs arrive late, on this stream alone
        got = run(case.with_inputs(**{name: t.clone() for name, t in case.inputs.items()}))
    stream.synchronize()
    assert_same(got, want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_a_device_that_is_not_current(device):
    case = make_case(SHAPE, torch.bfloat16, device)
    other = torch.device("cuda", 1)
    moved = case.with_inputs(**{name: t.to(other) for name, t in case.inputs.items()})
    assert torch.cuda.current_device() == 0
    got = run(moved)
    assert all(t.device == other for t in got.values())
    assert_same({name: t.to(device) for name, t in got.items()}, run(case))
    assert torch.cuda.current_device() == 0


# ---- sizes


@schedules
@pytest.mark.parametrize("form", ["fixed", "packed"])
def test_tensors_beyond_2_to_the_31_elements(form, schedule, device):
    """64 heads x 128 x 262,400 tokens; a strong decay keeps the reference to the last tokens."""
    needs(60)
    tokens = 262_400
    q, k, v, dout = (
        torch.randn(1, tokens, 64, 128, dtype=torch.bfloat16, device=device) for _ in range(4)
    )
    assert q.numel() > 2**31
    decay = torch.full((64,), 0.5, device=device)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    if form == "fixed":
        out, _ = lightning_attn_func(*leaves, decay, schedule=schedule)
    else:
        starts = torch.tensor([0, 5, tokens], dtype=torch.int32, device=device)
        flat = (t[0] for t in leaves)
        out = lightning_attn_varlen_func(*flat, decay, starts, schedule=schedule)[0][None]
    grads = torch.autograd.grad(out, leaves, dout)
    for heads in (slice(0, 1), slice(63, 64)):
        part = [t.detach()[:, -256:, heads] for t in leaves]
        results = {}
        for kind, dtype in (("eager", torch.bfloat16), ("oracle", torch.float64)):
            small = [t.to(dtype).requires_grad_() for t in part]
            ref, _ = lightning_attention_reference(*small, decay[heads].to(dtype))
            arriving = dout[:, -256:, heads].to(dtype)
            results[kind] = [ref, *torch.autograd.grad(ref, small, arriving)]
        for i, got in enumerate((out, *grads)):
            # 100 tokens on, exp(-50) is left of what the slice cuts
            inner = slice(100, None)
            assert_no_worse_than_eager(
                f"result {i}",
                got.detach()[:, -256:, heads][:, inner],
                results["eager"][i].detach()[:, inner],
                results["oracle"][i].detach()[:, inner],
                3.0,
            )


def test_a_cache_beyond_2_to_the_31_elements(device):
    needs(20)
    slots, heads, d = 2100, 64, 128
    cache = torch.zeros(slots, heads, d, d, device=device)
    assert cache.numel() > 2**31
    m = Maker(device, torch.bfloat16)
    q, k, v = (m.randn(2, 1, heads, d) for _ in range(3))
    where = torch.tensor([slots - 1, 0], device=device)
    lightning_attn_decode(q, k, v, cache, torch.zeros(heads, device=device), where)
    want = k[:, 0, :, :, None].float() * v[:, 0, :, None].float()
    assert torch.equal(cache[where], want)


def test_a_million_tokens_without_decay(device):
    """The state holds the sum of all tokens; memory beyond inputs and output stays small."""
    m = Maker(device, torch.bfloat16)
    tokens = 1_048_576
    q, k, v = (m.randn(1, tokens, 2, 64) for _ in range(3))
    decay = torch.zeros(2, device=device)
    for schedule in SCHEDULES:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out, state = lightning_attn_func(q, k, v, decay, output_final_state=True, schedule=schedule)
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before - 2 * out.numel()
        assert extra <= out.numel()  # half the bytes of the output
        want = torch.einsum("bthd,bthe->bhde", k.double(), v.double())
        assert_no_worse_than_eager("state", state, want.float(), want, eps=2.0**-15)
        last = torch.einsum("bhd,bhde->bhe", q[:, -1].double(), want)
        assert_no_worse_than_eager("o", out[:, -1], last.bfloat16(), last, 4.0)


def test_more_sequences_than_a_grid_axis(device):
    case = make_case(Shape(70_000, 3, 2, 16, 16), torch.float32, device)
    got = run(case.on("sequential"), grad=False)
    starts = torch.arange(70_001, dtype=torch.int32, device=device) * 3
    flat = {n: t.flatten(0, 1) if n in "qkv" else t for n, t in case.inputs.items()}
    out, state = lightning_attn_varlen_func(
        **flat, **case.options, cu_seqlens=starts, output_final_state=True, schedule="sequential"
    )
    assert torch.equal(out, got["o"].flatten(0, 1))
    assert torch.equal(state, got["state"])


@pytest.mark.parametrize("e", [64, 128, 256])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_every_tile_backward_against_fp32(d, e, device):
    """Transposed operands have been miscompiled on Hopper: every tile, every gradient."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for schedule in SCHEDULES:
            check(make_case(Shape(1, 333, 2, d, e), dtype, device, "slopes").on(schedule))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_columns_of_a_program_change_no_bit(dtype, device):
    """ "auto" gives a program all columns once programs are enough, and half of them before."""
    case = make_case(Shape(4, 500, 64, 128, 128), dtype, device)
    wide, narrow = run(case.on("auto")), run(case.on("sequential"))
    assert_same(wide, narrow)


# ---- Inductor and NCCL


# torch.compile makes an instance of the autograd function, and warns about it
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_inductor(device):
    torch._dynamo.reset()

    def function(leaves, options):
        scaled = {name: t * 0.5 for name, t in leaves.items()}
        return (lightning_attn_func(**scaled, **options)[0] + 1).float().square().mean()

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for seqlen in (64, 100, 333):
        case = make_case(SHAPE._replace(seqlen=seqlen), torch.float32, device)
        results = []
        for f in (compiled, function):
            leaves = {name: t.detach().requires_grad_() for name, t in case.inputs.items()}
            loss = f(leaves, case.options)
            results.append([loss, *torch.autograd.grad(loss, list(leaves.values()))])
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_sequence_parallelism_over_nccl(tmp_path, device, monkeypatch):
    import torch.multiprocessing as mp

    from ..parallel._distributed import SIZES, judge, judge_errors, one_rank_of

    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    mp.spawn(one_rank_of, ("nccl", 2, str(tmp_path), tuple(SIZES)), nprocs=2)
    left = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for name, case in SIZES.items():
        judge(case, [found[name] for found in left])
    judge_errors(left)
