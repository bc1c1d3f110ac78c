"""What only a GPU can show: graphs, streams, devices, sizes, Inductor."""

from __future__ import annotations

import pytest
import torch
from flash_attn_triton import attention_reference, flash_attn_func, flash_attn_varlen_func

from .._linked.budget import Maker, assert_no_worse_than_eager, assert_same, offsets
from .._numerics import Case, Packed, Shape, check, make_case, make_packed, run

pytestmark = pytest.mark.device

SHAPE = Shape(2, 300, 333, 4, 2, 64)
GIB = 2**30


def needs(gib):
    """Skip on a GPU with less free memory."""
    free, _ = torch.cuda.mem_get_info()
    if free < gib * GIB:
        pytest.skip(f"needs {gib} GiB of free GPU memory, has {free / GIB:.0f}")


# ---- graphs


def step(case):
    """A call and its gradients, into tensors that stay where they are."""
    leaves = {name: t.detach().requires_grad_() for name, t in case.inputs.items()}
    out, lse = case.function(**leaves, **case.options, return_lse=True)
    grads = torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))
    return [out.detach(), lse.detach(), *grads]


def capture(case):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(case)  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(case)
    return graph, results


@pytest.mark.parametrize("features", [("causal",), ("window", "bias", "sinks")], ids=str)
@pytest.mark.parametrize("form", ["fixed", "packed"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_graph_replays_with_new_inputs(deterministic, form, features, device):
    def make(seed):
        if form == "fixed":
            case = make_case(SHAPE, torch.bfloat16, device, features, seed)
        else:
            shape = Packed((100, 0, 200), (120, 7, 200), 4, 2, 64, padding=5)
            case = make_packed(shape, torch.bfloat16, device, features, seed)
        return case.with_options(deterministic=deterministic)

    static = make(0)
    graph, results = capture(static)
    for seed in (1, 2):
        fresh = make(seed)
        for name, t in fresh.inputs.items():
            static.inputs[name].copy_(t)
        graph.replay()
        assert_repeats(results, step(fresh), deterministic)


def assert_repeats(got, want, deterministic):
    """Hold ``(out, lse, dq, ...)`` to be the same; gradients up to the order of their sums."""
    for i, (one, other) in enumerate(zip(got, want, strict=True)):
        if i >= 2 and not deterministic:
            # one rounding, of sums that differ in the last bits of fp32
            unit = torch.finfo(one.dtype).eps * other.abs() + 2.0**-20 * other.abs().max()
            assert ((one.float() - other.float()).abs() <= unit).all()
        else:
            assert torch.equal(one, other)


def test_graph_with_new_lengths(device):
    """Lengths are device data: one graph serves every split of its tokens."""
    shape = Packed((100, 0, 200), (120, 7, 200), 4, 2, 64)
    static = make_packed(shape, torch.bfloat16, device, ("causal",))
    static = static.with_options(max_seqlen_q=300, max_seqlen_k=327, deterministic=True)
    graph, results = capture(static)
    for lengths_q, lengths_k in [((1, 298, 1), (300, 20, 7)), ((150, 150, 0), (0, 327, 0))]:
        static.options["cu_seqlens_q"].copy_(offsets(lengths_q, device))
        static.options["cu_seqlens_k"].copy_(offsets(lengths_k, device))
        graph.replay()
        for got, want in zip(results, step(static), strict=True):
            assert torch.equal(got, want)


def test_dropout_advances_with_every_replay(device):
    case = make_case(SHAPE, torch.bfloat16, device, ("dropout",))
    graph, results = capture(case)
    outputs = []
    torch.manual_seed(11)
    for _ in range(3):
        graph.replay()
        outputs.append([t.clone() for t in results])
    assert not torch.equal(outputs[0][0], outputs[1][0])
    assert not torch.equal(outputs[1][0], outputs[2][0])
    torch.manual_seed(11)
    graph.replay()
    for got, want in zip(results, outputs[0], strict=True):
        assert torch.equal(got, want)


# ---- streams and devices


@pytest.mark.parametrize("deterministic", [True, False])
def test_second_stream(deterministic, device):
    case = make_case(SHAPE, torch.bfloat16, device, ("causal",))
    case = case.with_options(deterministic=deterministic)
    want = run(case)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # the inputs arrive late, on this stream alone
        late = case.with_inputs(**{name: t.clone() for name, t in case.inputs.items()})
        got = run(late)
    stream.synchronize()
    assert_repeats(got.values(), want.values(), deterministic)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_a_device_that_is_not_current(device):
    case = make_case(SHAPE, torch.bfloat16, device, ("causal", "bias", "sinks"))
    other = torch.device("cuda", 1)
    moved = Case({name: t.to(other) for name, t in case.inputs.items()}, case.options)
    assert torch.cuda.current_device() == 0
    got = run(moved)
    assert all(t.device == other for t in got.values())
    assert_same({name: t.to(device) for name, t in got.items()}, run(case))
    assert torch.cuda.current_device() == 0


# ---- sizes


@pytest.mark.parametrize("form", ["fixed", "packed"])
def test_tensors_beyond_2_to_the_31_elements(form, device):
    """64 heads x 128 x 262,400 tokens; a window keeps the reference to a slice at the end."""
    needs(70)
    tokens, left = 262_400, 100
    q, k, v, dout = (
        torch.randn(1, tokens, 64, 128, dtype=torch.bfloat16, device=device) for _ in range(4)
    )
    assert q.numel() > 2**31
    leaves = [t.requires_grad_() for t in (q, k, v)]
    if form == "fixed":
        out = flash_attn_func(*leaves, window_size=(left, 0))
    else:
        starts = torch.tensor([0, 5, tokens], dtype=torch.int32, device=device)
        flat = (t[0] for t in leaves)
        out = flash_attn_varlen_func(*flat, starts, starts, tokens, tokens, window_size=(left, 0))[
            None
        ]
    grads = torch.autograd.grad(out, leaves, dout)
    # the last rows of a slice see their whole window; its later keys see all their queries
    for heads in (slice(0, 1), slice(63, 64)):
        part = [t.detach()[:, -512:, heads] for t in leaves]
        results = {}
        for kind, dtype in (("eager", torch.bfloat16), ("oracle", torch.float64)):
            small = [t.to(dtype).requires_grad_() for t in part]
            ref = attention_reference(*small, window_size=(left, 0))
            gradient = dout[:, -512:, heads].to(dtype).clone()
            gradient[:, :left] = 0  # rows whose window the slice cuts
            results[kind] = [ref, *torch.autograd.grad(ref, small, gradient)]
        for i, got in enumerate((out, *grads)):
            inner = slice(2 * left, None)
            assert_no_worse_than_eager(
                f"result {i}",
                got.detach()[:, -512:, heads][:, inner],
                results["eager"][i].detach()[:, inner],
                results["oracle"][i].detach()[:, inner],
                3.0,
            )


def test_gradient_of_more_queries_than_offsets_have_bits(device):
    """More than 2**31 elements of one head: a program of keys walks all of its queries."""
    needs(40)
    k, v = (torch.randn(1, 128, 1, 128, dtype=torch.bfloat16, device=device) for _ in "kv")
    q = torch.randn(1, 2**24 + 64, 1, 128, dtype=torch.bfloat16, device=device).requires_grad_()
    dout = torch.randn_like(q)
    (dq,) = torch.autograd.grad(flash_attn_func(q, k, v), q, dout)
    for rows in (slice(0, 64), slice(2**24, None)):
        grads = []
        for dtype in (torch.bfloat16, torch.float64):
            part = q.detach()[:, rows].to(dtype).requires_grad_()
            ref = attention_reference(part, k.to(dtype), v.to(dtype))
            grads.append(torch.autograd.grad(ref, part, dout[:, rows].to(dtype))[0])
        assert_no_worse_than_eager("dq", dq[:, rows], *grads, 3.0)


def rows_of(q, k, v, rows, bias=None):
    """Causal attention of some rows, in float64: ``(out, lse)``."""
    keys = torch.arange(k.shape[0], device=k.device)
    scores = q[rows].double() @ k.double().T * q.shape[1] ** -0.5
    if bias is not None:
        scores = scores + bias[rows].double()
    diagonal = k.shape[0] - q.shape[0]
    scores = scores.masked_fill(keys[None] > rows[:, None] + diagonal, float("-inf"))
    return torch.softmax(scores, -1) @ v.double(), torch.logsumexp(scores, -1)


@pytest.mark.parametrize("seqlen_q", [1, 1_100_003])
def test_more_than_a_million_tokens(seqlen_q, device):
    m = Maker(device, torch.float16)
    keys = 1_200_001
    q, k, v = m.randn(1, seqlen_q, 1, 16), m.randn(1, keys, 1, 16), m.randn(1, keys, 1, 16)
    out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
    rows = torch.tensor([0, seqlen_q // 2, seqlen_q - 1], device=device)
    want, want_lse = rows_of(q[0, :, 0], k[0, :, 0], v[0, :, 0], rows)
    assert_no_worse_than_eager("out", out[0, rows, 0], want.half(), want)
    assert_no_worse_than_eager("lse", lse[0, 0, rows], want_lse.float(), want_lse, eps=1e-6)


def test_gradients_of_a_million_tokens(device):
    m = Maker(device, torch.bfloat16)
    tokens, left = 1_050_000, 100
    leaves = [m.randn(1, tokens, 1, 16).requires_grad_() for _ in range(3)]
    out = flash_attn_func(*leaves, window_size=(left, 0))
    grads = torch.autograd.grad(out.float().square().sum(), leaves)
    part = [t.detach()[:, -512:].double().requires_grad_() for t in leaves]
    ref = attention_reference(*part, window_size=(left, 0))
    want = torch.autograd.grad(ref.square().sum(), part)
    for got, expected in zip(grads, want, strict=True):
        got, expected = got[:, -200:], expected[:, -200:]
        assert_no_worse_than_eager("gradient", got, expected.bfloat16(), expected, eps=2**-6)


def test_bias_beyond_2_to_the_31_elements(device):
    needs(30)
    tokens = 24_000
    q, k, v = (torch.randn(1, tokens, 4, 64, device=device, dtype=torch.float16) for _ in "qkv")
    bias = torch.randn(1, 4, tokens, tokens, device=device, dtype=torch.float16)
    assert bias.numel() > 2**31
    out, lse = flash_attn_func(q, k, v, causal=True, bias=bias, return_lse=True)
    rows = torch.tensor([0, 13_000, tokens - 1], device=device)
    for h in (0, 3):
        want, want_lse = rows_of(q[0, :, h], k[0, :, h], v[0, :, h], rows, bias[0, h])
        assert_no_worse_than_eager("out", out[0, rows, h], want.half(), want)
        assert_no_worse_than_eager("lse", lse[0, h, rows], want_lse.float(), want_lse, eps=1e-6)


def test_more_sequences_than_a_grid_axis(device):
    shape = Shape(70_000, 3, 5, 2, 1, 16)
    case = make_case(shape, torch.float32, device, ("causal", "sinks"))
    got = check(case)
    packed = make_packed(Packed((3,), (5,), 2, 1, 16), torch.float32, device, ("causal",))
    starts = torch.arange(70_001, dtype=torch.int32, device=device)
    options = {**packed.options, "cu_seqlens_q": starts * 3, "cu_seqlens_k": starts * 5}
    flat = {n: t.flatten(0, 1) if n in "qkv" else t for n, t in case.inputs.items()}
    want = run(Case(flat, options, packed=True), grad=False)
    assert torch.equal(want["out"], got["out"].flatten(0, 1))


def test_many_heads_times_batch(device):
    check(make_case(Shape(1100, 2, 3, 64, 8, 16), torch.float32, device, ("causal",)))


# ---- Inductor


# Inductor captures an empty graph to warm up its pool, and PyTorch warns of that
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_graphs_of_inductor(device):
    """What a compiled graph allocates it wants back: nothing of a call may stay in its pool."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: flash_attn_func(q, k, v, causal=True) * 2, mode="reduce-overhead"
    )
    case = make_case(SHAPE, torch.bfloat16, device)
    q, k, v = (case.inputs[name] for name in "qkv")
    with torch.no_grad():
        want = flash_attn_func(q, k, v, causal=True) * 2
        for _ in range(4):
            assert torch.equal(compiled(q, k, v), want)


# torch.compile makes an instance of the autograd function, and warns about it
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("features", [("causal",), ("bias", "sinks", "window")], ids=str)
def test_inductor(features, device):
    torch._dynamo.reset()

    def function(leaves, options):
        scaled = {name: t * 2 for name, t in leaves.items()}
        return (flash_attn_func(**scaled, **options) + 1).float().square().mean()

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for seqlen in (64, 100, 333):
        shape = SHAPE._replace(seqlen_q=seqlen, seqlen_k=seqlen + 7)
        case = make_case(shape, torch.float32, device, features)
        results = []
        for f in (compiled, function):
            leaves = {name: t.detach().requires_grad_() for name, t in case.inputs.items()}
            loss = f(leaves, case.options)
            results.append([loss, *torch.autograd.grad(loss, list(leaves.values()))])
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
