"""The backward kernel for Hopper: what it takes, and its numbers on a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from attn_common import detect
from flash_attn_triton._dense.call import Options, Tensors
from flash_attn_triton._dense.hopper.backward.arguments import (
    RoundingNumbers,
    RoundingOptions,
    RoundingTensors,
)
from flash_attn_triton._dense.hopper.backward.launch import HopperBackward, draws_apart
from flash_attn_triton._dense.hopper.backward.sums.kernel import round_kernel
from flash_attn_triton._dense.hopper_tiles import HopperBackwardTile, hopper_backward_tile
from flash_attn_triton._dense.portable.arguments import PIECE, Inputs
from flash_attn_triton._dense.portable.backward_launch import RowSums
from flash_attn_triton._dense.portable.form import Form
from flash_attn_triton._dense.tiles import takes_hopper_backward
from flash_attn_triton._linked.launch.runtime import aligned

from ..._linked.budget import assert_no_worse_than_eager, assert_same
from ..._linked.gpus import absent_gpu
from ..._numerics import Packed, Shape, make_case, make_packed, run, run_eager, run_oracle
from ._hopper_backward import HOPPER, extras_of

# optional tensors of a call
OPTIONAL = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "alibi_slopes", "rng_state")
DEFAULTS = [(d, hopper_backward_tile(d)) for d in (64, 128, 192, 256)]
TILES = [
    *DEFAULTS,
    (64, HopperBackwardTile(64, 3, 3)),
    (64, HopperBackwardTile(128, 2, 2)),
    (128, HopperBackwardTile(64, 3, 2)),
    (128, HopperBackwardTile(64, 2, 2, block_n=64)),
    (80, hopper_backward_tile(80)),
    (96, hopper_backward_tile(96)),
    (160, hopper_backward_tile(160, False, True)),
    (192, hopper_backward_tile(192, False, True)),
    (256, HopperBackwardTile(64, 2, 1, block_n=64)),
]


@pytest.fixture(autouse=True)
def on_hopper(request):
    """Skip what runs on a GPU where that is another one: the kernel is launched past the rules."""
    if request.node.get_closest_marker("device"):
        platform = detect(request.getfixturevalue("device"))
        if not platform.is_hopper:
            pytest.skip(f"{platform} is not Hopper")


class _Backward(torch.autograd.Function):
    """The reference's forward, and the launcher's backward."""

    @staticmethod
    def forward(ctx, q, k, v, reference, options, tile, ordered, shares):
        out, lse = reference(q, k, v, **options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options, ctx.tile = options, tile
        ctx.cut = {"ordered": ordered, "shares": shares}
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        options = ctx.options
        left, right = options.get("window_size", (-1, -1))
        right = 0 if options.get("causal") else right
        scale = options.get("softmax_scale") or q.shape[-1] ** -0.5
        x = Tensors(q, k, v, **{name: options.get(name) for name in OPTIONAL})
        dropout_p = options.get("dropout_p", 0.0)
        form = Form(x, Options(scale, left, right, options.get("softcap", 0.0), dropout_p))
        plan = HopperBackward(form, x, ctx.tile, **ctx.cut)
        dout, lse = aligned(dout), lse.float().contiguous()
        sums = plan.new_sums(q, k).fill_(math.nan)
        delta, lse2 = RowSums(form, out.dtype)(out.contiguous(), dout, dlse, lse, sums)
        inputs = Inputs(q, k, v, dout, lse2, delta)
        grads = tuple(torch.empty_like(t) for t in (q, k, v))
        plan(inputs, extras_of(x), *grads, sums)
        return *grads, None, None, None, None, None


def hopper(case, tile=None, *, ordered=False, shares=1):
    """Return a function like the public ones, whose backward is the launcher's."""

    def call(q, k, v, **options):
        return _Backward.apply(q, k, v, case.reference, options, tile, ordered, shares)

    return call


# ---- what it takes


def _served(head_dim=64, head_dim_v=64, dtype=torch.bfloat16, dropout_p=0.0, **others):
    q, v = (torch.empty(1, 8, 2, d, dtype=dtype, device="meta") for d in (head_dim, head_dim_v))
    one = torch.empty(1, device="meta")
    x = Tensors(q, q, v)._replace(**dict.fromkeys(others, one))
    with absent_gpu(HOPPER):
        return takes_hopper_backward(x, Options(0.1, -1, 0, 0.0, dropout_p))


@pytest.mark.eager
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "dtype", "taken"),
    [
        (64, 64, torch.bfloat16, True),
        (128, 128, torch.float16, True),
        (96, 40, torch.bfloat16, True),
        (128, 64, torch.bfloat16, True),
        (256, 256, torch.bfloat16, True),
        (192, 128, torch.float16, True),
        (32, 64, torch.bfloat16, False),
        (100, 64, torch.bfloat16, False),  # rows that TMA does not read
        (64, 64, torch.float32, False),
    ],
)
def test_takes_what_it_has_a_tile_for(head_dim, head_dim_v, dtype, taken):
    assert _served(head_dim, head_dim_v, dtype) == taken


@pytest.mark.eager
def test_takes_a_bias_that_differs_from_key_to_key():
    q = torch.empty(1, 8, 2, 64, dtype=torch.bfloat16, device="meta")
    options = Options(0.0, -1, 0, 0.0, 0.0)
    with absent_gpu(HOPPER):
        for size, taken in (((1, 2, 8, 8), True), ((1, 1, 1, 8), True), ((1, 2, 8, 1), False)):
            bias = torch.empty(size, device="meta")
            assert takes_hopper_backward(Tensors(q, q, q, bias=bias), options) == taken


@pytest.mark.eager
@pytest.mark.parametrize(
    "feature",
    [{"dropout_p": 0.1, "rng_state": True}, {"alibi_slopes": True}, {"seqused_k": True}],
    ids=str,
)
def test_takes_features(feature):
    assert _served(**feature)


@pytest.mark.eager
@pytest.mark.parametrize(
    ("lengths", "window", "apart"),
    [
        ((64, 64), (-1, -1), (False, False)),
        ((80, 64), (-1, 0), (False, False)),
        ((81, 64), (-1, 0), (True, False)),
        ((81, 64), (-1, 17), (False, False)),
        ((64, 81), (7, 0), (False, True)),
        ((64, 87), (7, -1), (False, False)),
        (None, (-1, -1), (False, False)),
        (None, (7, -1), (False, True)),
        (None, (-1, 0), (True, False)),
    ],
)
def test_draws_are_shared_where_tiles_begin_at_sixteens(lengths, window, apart):
    """Tiles begin behind what windows leave out; packed, nobody knows how much that is."""
    tokens_q, tokens_k = lengths or (64, 64)
    starts = None if lengths else torch.empty(2, dtype=torch.int32, device="meta")
    sizes = ((1, n, 2, 64)[lengths is None :] for n in (tokens_q, tokens_k))
    q, k = (torch.empty(size, dtype=torch.bfloat16, device="meta") for size in sizes)
    with absent_gpu(HOPPER):
        for dropout_p in (0.0, 0.1):
            x = Tensors(q, k, k, starts, starts)
            got = draws_apart(Form(x, Options(0.1, *window, 0.0, dropout_p)), x)
            assert tuple(got.values()) == (apart if dropout_p else (False, False))


@pytest.mark.eager
@pytest.mark.parametrize(
    ("tokens", "head_dim", "worth"),
    [(31, 128, False), (32, 128, True), (63, 64, False), (64, 64, True), (31, 256, False)],
)
def test_leaves_few_queries_to_the_portable_kernels(tokens, head_dim, worth):
    """Most of a tile would be padding. Packed, other sequences may not decide."""
    starts = torch.empty(4, dtype=torch.int32, device="meta")
    with absent_gpu(HOPPER):
        for size, cu_seqlens in (((3, tokens, 2, head_dim), None), ((tokens, 2, head_dim), starts)):
            q = torch.empty(size, dtype=torch.bfloat16, device="meta")
            x = Tensors(q, q, q, cu_seqlens, cu_seqlens)
            plan = HopperBackward(Form(x, Options(0.1, -1, 0, 0.0, 0.0)), x)
            assert plan.is_worth_it(tokens) == (worth or cu_seqlens is not None)


@pytest.mark.eager
@pytest.mark.parametrize(
    ("tokens", "head_dim", "group", "span"),
    [
        (1024, 64, 1, 32),
        (1024, 128, 1, 16),
        (1024, 256, 1, 8),
        (1024, 128, 4, 4),
        (4096, 128, 1, 4),
        (16384, 128, 1, 2),
        (1 << 20, 256, 1, 2),
    ],
)
def test_cache_holds_the_sums_of_heads_that_are_walked_together(tokens, head_dim, group, span):
    q = torch.empty(1, tokens, 4, head_dim, dtype=torch.bfloat16, device="meta")
    with absent_gpu(HOPPER):
        k = q[:, :, : 4 // group]
        form = Form(Tensors(q, k, k), Options(0.1, -1, 0, 0.0, 0.0))
        assert form.span_sums(tokens) == span


@pytest.mark.eager
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_counters_follow_the_sums(head_dim, ordered):
    """One of programs, and one of each half of a tile; the row kernel sets whole pieces to 0."""
    q = torch.empty(2, 1000, 6, head_dim, dtype=torch.bfloat16, device="meta")
    with absent_gpu(HOPPER):
        x = Tensors(q, q, q)
        plan = HopperBackward(Form(x, Options(0.1, -1, 0, 0.0, 0.0)), x, ordered=ordered)
        sums = plan.new_sums(q, q)
    assert sums.numel() % PIECE == 0
    block_m = hopper_backward_tile(head_dim).block_m
    tiles = 2 * 6 * -(-1000 // block_m)
    counters = sums.numel() - tiles * block_m * head_dim
    assert (counters >= 1 + 2 * tiles) if ordered else (counters == 0)


@pytest.mark.parametrize("dlse", [False, True])
@pytest.mark.parametrize("pieces", [1, 3, 40])
def test_rows_are_numbered_and_sums_cleared(pieces, dlse, device):
    out = torch.randn(2, 50, 2, 64, device=device)
    lse = torch.randn(2, 2, 50, device=device)
    lse[0, 0, 3] = -math.inf  # a row that sees no key
    form = Form(Tensors(out, out, out), Options(0.1, -1, -1, 0.0, 0.0))
    sums = torch.full((pieces + 1, PIECE), math.nan, device=device)
    shift = lse if dlse else None
    delta, lse2 = RowSums(form, out.dtype)(out, out, shift, lse, sums[:pieces])
    assert not sums[:pieces].any()
    assert sums[pieces].isnan().all()
    want = (out * out).sum(-1).transpose(1, 2) - (lse if dlse else 0.0)
    want[0, 0, 3] = 0.0
    torch.testing.assert_close(delta, want)
    assert lse2[0, 0, 3] == math.inf


# ---- dq, which arrives in the order of the accumulators' registers


def places(width):
    """Where an accumulator of 64 rows has each of its elements."""
    lines, cols = torch.arange(64)[:, None], torch.arange(width)[None, :]
    warp, lower, line = lines // 16, lines % 16 // 8, lines % 8
    return cols // 8 * 512 + warp * 128 + line * 16 + cols % 8 // 2 * 4 + lower * 2 + cols % 2


def round_sums(sums, gradient, shift, scale, tiles, panels, **options):
    """Round the sums of a sequence whose first ``shift`` rows have none."""
    _, tokens, heads, head_dim = gradient.shape
    round_kernel[(heads * tiles,)](
        *RoundingTensors(sums, gradient, None, None, None),
        *RoundingNumbers(
            scale=scale,
            window=0,
            batch=1,
            heads=heads,
            tokens_own=tokens,
            tokens_other=tokens - shift,
            tiles=tiles,
        ),
        **RoundingOptions(
            HAS_WINDOW=True, HEAD_DIM=head_dim, WIDE=panels[0], NARROW=panels[1], **options
        )._asdict(),
        num_warps=4,
    )


@pytest.mark.parametrize(
    ("block_m", "panels"),
    [
        (64, (64, 0)),
        (128, (64, 0)),
        (64, (128, 0)),
        (64, (256, 0)),
        (64, (64, 16)),
        (128, (64, 32)),
        (64, (128, 64)),
    ],
)
@pytest.mark.parametrize("shift", [0, 5])
def test_dq_is_brought_into_its_order(block_m, panels, shift, device):
    """Element by element, by the layout of the instruction's accumulators."""
    tokens, heads, head_dim = 2 * block_m - 9, 2, sum(panels) - 8
    tiles = -(-tokens // block_m)
    parts = block_m // 64
    sums = torch.randn(heads, tiles, 2, 32 * parts * sum(panels), device=device)
    dq = torch.full((1, tokens, heads, head_dim), math.nan, dtype=torch.float16, device=device)
    options = {"COLUMN_PARTS": 2 if block_m == 64 else 1, "BLOCK": block_m}
    round_sums(sums, dq, shift, 0.5, tiles, panels, **options)
    found, first = [], 0
    for width in (n * parts // 2 for n in panels if n):
        halves = sums[..., first + places(width).to(device)]  # [heads, tiles, 2, 64, width]
        if block_m == 128:
            found.append(halves.reshape(heads, tiles * 128, width))
        else:
            found.append(halves.transpose(2, 3).reshape(heads, tiles * 64, 2 * width))
        first += 64 * width
    want = torch.cat(found, -1)
    want = (want[:, : tokens - shift, :head_dim].transpose(0, 1) * 0.5).half()
    # rows ahead of the first that sees a key
    want = torch.cat(
        [torch.zeros(shift, heads, head_dim, dtype=torch.float16, device=device), want]
    )
    assert torch.equal(dq[0], want)


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("panels", [(64, 0), (64, 32), (128, 64)], ids=str)
@pytest.mark.parametrize(("shift", "shares"), [(0, 1), (5, 1), (5, 3)])
def test_dk_is_brought_into_its_order(block, panels, shift, shares, device):
    """Element by element, added up over the places of a key head's shares."""
    tokens, heads, head_dim = 2 * block - 9, 2, sum(panels) - 8
    tiles, parts = 2, block // 64
    sums = torch.randn(heads, shares, tiles, parts, 64 * sum(panels), device=device)
    dk = torch.full((1, tokens, heads, head_dim), math.nan, dtype=torch.float16, device=device)
    options = {"OF_KEYS": True, "BLOCK": block, "SHARES": shares}
    round_sums(sums, dk, shift, 1.0, tiles, panels, **options)
    found, first = [], 0
    for width in (n for n in panels if n):
        # [heads, shares, tiles, parts, 64, width]
        found.append(sums[..., first + places(width).to(device)])
        first += 64 * width
    want = torch.cat(found, -1)
    want = sum(want[:, share] for share in range(shares)).reshape(heads, tiles * block, -1)
    want = want[:, : tokens - shift, :head_dim].transpose(0, 1).half()
    assert torch.equal(dk[0, shift:], want)
    # keys ahead of the first that a query sees
    assert not dk[0, :shift].any()


# ---- numbers


def check(case, tile=None, *, ordered=False, shares=1):
    """Hold the gradients to the budget of the package."""
    got = run(case, hopper(case, tile, ordered=ordered, shares=shares))
    oracle = run_oracle(case)
    eager = run_eager(case, oracle)
    for name in ("dq", "dk", "dv"):
        assert_no_worse_than_eager(name, got[name], eager[name], oracle[name])


SHAPES = [(128, 128), (1, 1), (300, 333), (333, 300), (700, 1024), (64, 65)]


@pytest.mark.device
@pytest.mark.parametrize("features", [(), ("causal",), ("window",), ("softcap",)], ids=str)
@pytest.mark.parametrize("lengths", SHAPES, ids=str)
@pytest.mark.parametrize(("head_dim", "tile"), TILES, ids=str)
def test_gradients(head_dim, tile, lengths, features, device):
    shape = Shape(2, *lengths, 4, 2, head_dim)
    check(make_case(shape, torch.bfloat16, device, features), tile)


@pytest.mark.device
@pytest.mark.parametrize("features", [(), ("causal",), ("window",)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_packed_gradients(head_dim, features, device):
    shape = Packed((128, 1, 300, 0, 700), (128, 1, 333, 9, 600), 4, 2, head_dim, padding=40)
    check(make_packed(shape, torch.bfloat16, device, features))


@pytest.mark.device
@pytest.mark.parametrize("ordered", [False, True], ids=["any_order", "in_order"])
@pytest.mark.parametrize("features", [(), ("causal",), ("window",), ("window_left",)], ids=str)
@pytest.mark.parametrize("shares", [2, 3, 6])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 160, 192, 256])
def test_gradients_of_shared_keys(head_dim, shares, features, ordered, device):
    """Neither lengths nor heads nor cuts divide each other."""
    shape = Shape(2, 333, 700, 12, 2, head_dim)
    check(make_case(shape, torch.bfloat16, device, features), ordered=ordered, shares=shares)
    shape = Packed((128, 1, 300, 0, 700), (128, 1, 333, 9, 600), 6, 1, head_dim, padding=40)
    case = make_packed(shape, torch.bfloat16, device, features)
    check(case, ordered=ordered, shares=shares)
    used = torch.tensor([128, 0, 90, 0, 555]).int().to(device)
    check(case.with_options(seqused_k=used), ordered=ordered, shares=shares)


EXTRAS = [("dropout",), ("alibi",), ("alibi_batch", "dropout")]
MASKS = [(), ("causal",), ("window",), ("window_left",), ("causal", "softcap")]


@pytest.mark.device
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("extras", EXTRAS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("lengths", [(300, 333), (333, 300), (700, 1024)], ids=str)
def test_gradients_with_features(lengths, head_dim, extras, mask, device):
    shape = Shape(2, *lengths, 4, 2, head_dim)
    check(drawn(make_case(shape, torch.bfloat16, device, (*mask, *extras))))


@pytest.mark.device
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("extras", EXTRAS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_packed_gradients_with_features(head_dim, extras, mask, device):
    shape = Packed((128, 1, 300, 0, 700), (128, 1, 333, 9, 600), 4, 2, head_dim, padding=40)
    case = drawn(make_packed(shape, torch.bfloat16, device, (*mask, *extras)))
    check(case)
    check(case.with_options(seqused_k=torch.tensor([128, 0, 90, 0, 555]).int().to(device)))


def drawn(case):
    """Return a case whose dropout has its draw, for the launcher to use that of the reference."""
    if "dropout_p" not in case.options:
        return case
    state = torch.tensor([1234567890123, 42], device=case.inputs["q"].device)
    return case.with_options(rng_state=state)


@pytest.mark.device
@pytest.mark.parametrize("lengths", [(300, 333), (333, 300)], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(192, 192), (192, 128), (136, 40), (64, 256), (256, 64)], ids=str
)
def test_gradients_of_values_that_have_their_own_head_dim(head_dim, head_dim_v, lengths, device):
    shape = Shape(2, *lengths, 4, 2, head_dim, head_dim_v)
    check(make_case(shape, torch.bfloat16, device, ("causal",)))


@pytest.mark.device
@pytest.mark.parametrize(
    "features", [(), ("causal",), ("window",), ("window_left",), ("softcap",)], ids=str
)
@pytest.mark.parametrize("lengths", SHAPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_gradients_in_order(head_dim, lengths, features, device):
    shape = Shape(2, *lengths, 4, 2, head_dim)
    check(make_case(shape, torch.bfloat16, device, features), ordered=True)


@pytest.mark.device
@pytest.mark.parametrize("features", [(), ("causal",), ("window",)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_packed_gradients_in_order(head_dim, features, device):
    shape = Packed((128, 1, 300, 0, 700), (128, 1, 333, 9, 600), 4, 2, head_dim, padding=40)
    check(make_packed(shape, torch.bfloat16, device, features), ordered=True)


@pytest.mark.device
@pytest.mark.parametrize("features", [(), ("causal",), ("window_left",)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_gradients_in_order_repeat_bit_for_bit(head_dim, features, device):
    """Of more programs than run together, beside work of another stream."""
    shape = Shape(3, 3000, 3000, 16, 8, head_dim)
    case = make_case(shape, torch.bfloat16, device, features)
    case = case.with_options(deterministic=True)
    first = run(case)
    other = torch.cuda.Stream()
    square = torch.ones(2048, 2048, dtype=torch.bfloat16, device=device)
    for i in range(20):
        with torch.cuda.stream(other):
            for _ in range(4 * (i % 5)):
                torch.mm(square, square)
        assert_same(run(case), first)


@pytest.mark.device
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_bits_in_order_are_those_of_a_sequence_alone(head_dim, device):
    case = make_case(Shape(6, 700, 900, 8, 4, head_dim), torch.bfloat16, device, ("causal",))
    got, alone = (_ordered(case, slice(b, e)) for b, e in ((0, 6), (4, 5)))
    assert_same({name: t[4:5] for name, t in got.items()}, alone)


def _ordered(case, sequences):
    """Return the gradients of the squares of the output."""
    leaves = {name: t[sequences].requires_grad_() for name, t in case.inputs.items()}
    out, _ = case.with_inputs(**leaves).with_options(deterministic=True)()
    found = torch.autograd.grad(out.float().square().sum(), list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


@pytest.mark.device
@pytest.mark.parametrize(("head_dim", "tile"), TILES, ids=str)
def test_dk_and_dv_repeat_bit_for_bit(head_dim, tile, device):
    case = make_case(Shape(3, 1500, 1500, 8, 4, head_dim), torch.bfloat16, device, ("causal",))
    first = run(case, hopper(case, tile))
    for _ in range(20):
        again = run(case, hopper(case, tile))
        assert torch.equal(first["dk"], again["dk"])
        assert torch.equal(first["dv"], again["dv"])
