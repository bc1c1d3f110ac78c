"""Packed sequences: against the reference, against the fixed-length form, and independence."""

from __future__ import annotations

import pytest
import torch
from flash_attn_triton import flash_attn_func, flash_attn_varlen_func, validate_varlen

from .._linked.budget import DTYPES, assert_same, offsets
from .._numerics import FEATURES, Case, Packed, Shape, check, make_case, make_packed, run

SHAPES = [
    Packed((17, 0, 5), (17, 0, 20), 2, 1, 16),  # an empty one in the middle
    Packed((0, 20), (3, 9), 2, 2, 24),  # no query in the first, more queries than keys
    Packed((33, 1, 0), (0, 40, 0), 1, 1, 16),  # no key in the first, nothing in the last
    Packed((1, 1, 1), (19, 1, 33), 4, 2, 32),  # decode
    Packed((16, 16), (32, 16), 2, 1, 16, padding=3),  # whole tiles, then padding tokens
    Packed((5, 18), (21, 18), 2, 1, 16, 24, padding=17),  # a tile of padding
    Packed((7,), (7,), 1, 1, 80),
    Packed((0,), (0,), 2, 1, 16),
    Packed((0, 0), (5, 0), 2, 1, 16, padding=2),
    Packed((), (), 2, 1, 16),
    Packed((), (), 2, 1, 16, padding=4),
]
LARGE = [
    Packed((1000, 1, 0, 513, 2048), (1000, 700, 3, 2000, 100), 8, 2, 128, padding=77),
    Packed((900, 31), (1200, 31), 2, 2, 192, 128),
    Packed(tuple(range(150)), tuple(range(150, 0, -1)), 4, 1, 64),
]
SHAPE = Packed((17, 0, 5), (18, 7, 20), 2, 1, 16, padding=2)

causal = pytest.mark.parametrize("features", [(), ("causal",)], ids=["full", "causal"])


@causal
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, features, device):
    check(make_packed(shape, torch.float32, device, features))


@pytest.mark.device
@causal
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES + LARGE, ids=str)
def test_matches_reference_at_length(shape, dtype, features, device):
    check(make_packed(shape, dtype, device, features))


# those of which the packed form has something of its own to get wrong
@pytest.mark.parametrize(
    "feature",
    ["window", "window_left", "alibi_batch", "bias", "bias_fp32", "bias_keys", "sinks", "dropout"],
)
def test_each_feature(feature, device):
    check(make_packed(SHAPE, torch.float32, device, (feature,)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("features", [("causal", "bias", "sinks"), ("window", "alibi_batch")])
def test_half_precision(dtype, features, device):
    check(make_packed(SHAPE, dtype, device, features))


@pytest.mark.device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_at_length(feature, dtype, device):
    check(make_packed(LARGE[0], dtype, device, (feature,)))


def sequence(case: Case, index: int) -> Case:
    """One sequence of a packed case as a fixed-length case of its own."""
    options = dict(case.options)
    starts_q, starts_k = (options.pop(f"cu_seqlens_{x}").tolist() for x in "qk")
    del options["max_seqlen_q"], options["max_seqlen_k"]
    rows, cols = slice(*starts_q[index : index + 2]), slice(*starts_k[index : index + 2])
    lengths = rows.stop - rows.start, cols.stop - cols.start
    inputs = dict(case.inputs)
    inputs["q"] = inputs["q"][None, rows]
    inputs["k"], inputs["v"] = inputs["k"][None, cols], inputs["v"][None, cols]
    if "bias" in inputs:
        bias = inputs["bias"]
        bias = bias[index : index + 1] if bias.shape[0] > 1 else bias
        inputs["bias"] = bias[:, :, : lengths[0], : lengths[1]]
    slopes = options.get("alibi_slopes")
    if slopes is not None and slopes.ndim == 2:
        options["alibi_slopes"] = slopes[index : index + 1]
    return Case(inputs, options)


@pytest.mark.parametrize(
    "features",
    [(), ("causal",), ("window", "bias"), ("softcap", "alibi_batch", "sinks"), ("bias_fp32",)],
    ids=lambda f: "+".join(f) or "plain",
)
def test_sequences_are_bitwise_those_of_the_fixed_form(features, device):
    case = make_packed(SHAPE, torch.float16, device, features)
    got = run(case, grad=False)
    begins = case.options["cu_seqlens_q"].tolist()
    for i in range(len(SHAPE.lengths_q)):
        rows = slice(begins[i], begins[i + 1])
        want = run(sequence(case, i), flash_attn_func, grad=False)
        assert torch.equal(got["out"][rows], want["out"][0])
        assert torch.equal(got["lse"][:, rows], want["lse"][0])


def gradients(case: Case, dout: torch.Tensor, dlse: torch.Tensor) -> list[torch.Tensor]:
    leaves = {name: t.detach().requires_grad_() for name, t in case.inputs.items()}
    out, lse = case.function(**leaves, **case.options, return_lse=True)
    return list(torch.autograd.grad((out, lse), list(leaves.values()), (dout, dlse)))


@pytest.mark.parametrize("features", [(), ("causal", "alibi")], ids=["plain", "causal+alibi"])
def test_gradients_do_not_depend_on_the_neighbours(features, device):
    shape = Packed((18, 21), (20, 37), 2, 1, 16, padding=2)
    case = make_packed(shape, torch.float32, device, features)
    dout, dlse = torch.randn_like(case.inputs["q"]), torch.randn(2, 41, device=device)
    both = gradients(case, dout, dlse)
    for i, (rows, cols) in enumerate(
        [(slice(0, 18), slice(0, 20)), (slice(18, 39), slice(20, 57))]
    ):
        alone = sequence(case, i)
        want = gradients(alone, dout[None, rows], dlse[None, :, rows])
        for got, part, expected in zip(both, (rows, cols, cols), want, strict=True):
            assert torch.equal(got[part], expected[0])
    assert not both[0][39:].any()
    assert not both[1][57:].any()
    assert not both[2][57:].any()


def test_a_sequence_does_not_depend_on_its_batch(device):
    big = make_packed(Packed((18, 9, 21), (20, 40, 37), 2, 1, 16), torch.float16, device)
    for keep in [(1,), (1, 2), (2, 0), (0, 1, 2)]:
        lengths_q, lengths_k = (18, 9, 21), (20, 40, 37)
        starts_q, starts_k = (0, 18, 27), (0, 20, 60)

        def take(t, starts, lengths, keep=keep):
            return torch.cat([t[starts[i] : starts[i] + lengths[i]] for i in keep])

        inputs = {
            "q": take(big.inputs["q"], starts_q, lengths_q),
            "k": take(big.inputs["k"], starts_k, lengths_k),
            "v": take(big.inputs["v"], starts_k, lengths_k),
        }
        options = {
            **big.options,
            "cu_seqlens_q": offsets([lengths_q[i] for i in keep], device),
            "cu_seqlens_k": offsets([lengths_k[i] for i in keep], device),
        }
        want = run(big, grad=False)
        got = run(Case(inputs, options, packed=True), grad=False)
        assert torch.equal(got["out"], take(want["out"], starts_q, lengths_q))
        want_lse = take(want["lse"].T, starts_q, lengths_q).T
        assert torch.equal(got["lse"], want_lse)


@pytest.mark.eager
def test_padding_tokens_give_nothing(device):
    case = make_packed(Packed((5, 18), (21, 18), 2, 1, 16, padding=20), torch.float16, device)
    got = run(case.with_inputs(sinks=torch.ones(2, device=device)))
    assert not got["out"][23:].any()
    assert got["out"][:23].any()
    assert (got["lse"][:, 23:] == float("-inf")).all()
    for name in ("dq", "dk", "dv"):
        valid = 23 if name == "dq" else 39
        assert not got[name][valid:].any(), name
        assert got[name][:valid].any(), name


@pytest.mark.eager
def test_padding_does_not_change_a_bit(device):
    short, long = (
        make_packed(
            Packed((5, 18), (21, 18), 2, 1, 16, padding=p), torch.float32, device, ("causal",)
        )
        for p in (0, 40)
    )
    for name, valid in (("q", 23), ("k", 39), ("v", 39)):
        long.inputs[name][:valid] = short.inputs[name]
    got, want = run(long, grad=False), run(short, grad=False)
    assert torch.equal(got["out"][:23], want["out"])
    assert torch.equal(got["lse"][:, :23], want["lse"])


@pytest.mark.eager
@pytest.mark.parametrize("features", [(), ("causal",), ("bias", "sinks")], ids=str)
def test_max_seqlen_may_be_an_upper_bound(features, device):
    case = make_packed(SHAPE, torch.float32, device, features)
    if "bias" in case.inputs:  # the bias has the size of the bounds
        wide = torch.full((3, 2, 40, 64), float("nan"), device=device)
        wide[:, :, :17, :20] = case.inputs["bias"]
        got = run(case.with_inputs(bias=wide).with_options(max_seqlen_q=40, max_seqlen_k=64))
        assert not got["dbias"][:, :, 17:].any()
        assert not got["dbias"][..., 20:].any()
        got["dbias"] = got["dbias"][:, :, :17, :20]
    else:
        got = run(case.with_options(max_seqlen_q=1000, max_seqlen_k=1000))
    assert_same(got, run(case))


@pytest.mark.parametrize(
    "features",
    [(), ("causal",), ("window", "bias"), ("dropout", "sinks"), ("alibi",)],
    ids=lambda f: "+".join(f) or "plain",
)
def test_seqused_k(features, device):
    shape = Packed((18, 3, 5), (20, 7, 37), 2, 1, 16)
    case = make_packed(shape, torch.float32, device, features)
    used = torch.tensor([20, 0, 17], dtype=torch.int32, device=device)
    check(case.with_options(seqused_k=used))


@pytest.mark.parametrize("features", [(), ("causal", "alibi")], ids=["plain", "causal+alibi"])
def test_seqused_k_is_bitwise_a_shorter_sequence(features, device):
    shape = Packed((18, 5), (20, 37), 2, 1, 16)
    case = make_packed(shape, torch.float16, device, features)
    used = torch.tensor([13, 17], dtype=torch.int32, device=device)
    got = run(case.with_options(seqused_k=used))
    kept = torch.cat([torch.arange(13), 20 + torch.arange(17)]).to(device)
    cut = case.with_inputs(k=case.inputs["k"][kept], v=case.inputs["v"][kept])
    want = run(cut.with_options(cu_seqlens_k=offsets((13, 17), device)))
    for name in ("out", "lse", "dq"):
        assert torch.equal(got[name], want[name]), name
    for name in ("dk", "dv"):
        assert torch.equal(got[name][kept], want[name]), name
        rest = torch.ones(57, dtype=torch.bool, device=device)
        rest[kept] = False
        assert not got[name][rest].any(), name


@pytest.mark.eager
@pytest.mark.parametrize("features", [(), ("causal",)], ids=["full", "causal"])
def test_seqused_k_has_no_entry_for_padding(features, device):
    """Two sequences amid padding, and lengths that have neighbours in memory, too."""
    case = make_packed(Packed((18, 5), (20, 37), 2, 1, 16, padding=40), torch.float32, device)
    ahead, options = 20, dict.fromkeys(features, True)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        options[name] = case.options[name] + ahead
    used = torch.tensor([7, 13, 30, 9], dtype=torch.int32, device=device)[1:3]
    got = check(case.with_options(**options, seqused_k=used))
    for rows in (slice(0, ahead), slice(ahead + 23, None)):
        assert not got["out"][rows].any()
        assert (got["lse"][:, rows] == -torch.inf).all()


@pytest.mark.parametrize("view", ["inside", "heads_first", "last_dim_strided"])
def test_strides_do_not_change_a_bit(view, device):
    from .._linked.views import VIEWS

    case = make_packed(SHAPE, torch.float16, device, ("causal",))
    viewed = {name: VIEWS[view](t) for name, t in case.inputs.items()}
    assert_same(run(case.with_inputs(**viewed)), run(case))


@pytest.mark.parametrize("count", [127, 128, 129])
def test_more_sequences_than_one_search_step(count, device):
    """Programs find their sequence in steps of 128; all but a few are empty."""
    lengths = [0] * count
    for i in (0, 126, count - 1):
        lengths[i] = i % 3 + 1
    shape = Packed(tuple(lengths), tuple(lengths), 1, 1, 16, padding=1)
    check(make_packed(shape, torch.float32, device, ("causal",)), grad=False)


@pytest.mark.eager
def test_tokens_ahead_of_the_first_sequence_are_padding(device):
    """As with a slice of somebody's ``cu_seqlens``."""
    case = make_case(Shape(1, 16, 16, 2, 1, 16), torch.float32, device)
    ahead, behind = 20, 5
    leaves = [
        torch.cat([t[0].new_full((ahead, *t.shape[2:]), float("nan")), t[0], t[0, :behind]])
        for t in case.inputs.values()
    ]
    leaves = [t.requires_grad_() for t in leaves]
    offsets = torch.tensor([ahead, ahead + 16], dtype=torch.int32, device=device)
    out, lse = flash_attn_varlen_func(*leaves, offsets, offsets, 16, 16, return_lse=True)
    inside = slice(ahead, ahead + 16)
    want = run(case)
    assert torch.equal(out[inside], want["out"][0])
    assert torch.equal(lse[:, inside], want["lse"][0])
    for part in (slice(0, ahead), slice(ahead + 16, None)):
        assert (out[part] == 0).all()
        assert (lse[:, part] == -torch.inf).all()
    for t, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert grad.isfinite().all()
        assert (grad[:ahead] == 0).all(), t.shape
        assert (grad[ahead + 16 :] == 0).all(), t.shape


def validate(**changes):
    call = {
        "q": torch.zeros(10, 4, 8),
        "k": torch.zeros(14, 2, 8),
        "cu_seqlens_q": (0, 3, 3, 8),
        "cu_seqlens_k": (2, 9, 12, 14),
        "max_seqlen_q": 5,
        "max_seqlen_k": 7,
        "seqused_k": (7, 0, 1),
        **changes,
    }
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"):
        if isinstance(call[name], tuple):
            call[name] = torch.tensor(call[name], dtype=torch.int32)
    validate_varlen(**call)


@pytest.mark.eager
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"seqused_k": None},
        {"max_seqlen_q": 100, "max_seqlen_k": 100},
        {"cu_seqlens_q": (0,), "cu_seqlens_k": (0,), "seqused_k": ()},
    ],
    ids=str,
)
def test_validation_passes_what_is_right(changes):
    validate(**changes)


@pytest.mark.eager
@pytest.mark.parametrize(
    ("message", "error", "changes"),
    [
        (
            "cu_seqlens_q[2] must be at least cu_seqlens_q[1], 3, got 2",
            ValueError,
            {"cu_seqlens_q": (0, 3, 2, 7)},
        ),
        (
            "cu_seqlens_q[3] must be from 0 to the number of tokens, 10, got 11",
            ValueError,
            {"cu_seqlens_q": (0, 3, 7, 11)},
        ),
        (
            "cu_seqlens_q[0] must be from 0 to the number of tokens, 10, got -1",
            ValueError,
            {"cu_seqlens_q": (-1, 3, 3, 8)},
        ),
        (
            "cu_seqlens_q[3] must be at most max_seqlen_q, 4, beyond cu_seqlens_q[2], 3, got 8",
            ValueError,
            {"max_seqlen_q": 4},
        ),
        (
            "cu_seqlens_k[1] must be at least cu_seqlens_k[0], 2, got 0",
            ValueError,
            {"cu_seqlens_k": (2, 0, 7, 14)},
        ),
        (
            "cu_seqlens_k[3] must be from 0 to the number of tokens, 14, got 15",
            ValueError,
            {"cu_seqlens_k": (2, 9, 12, 15)},
        ),
        (
            "cu_seqlens_k[1] must be at most max_seqlen_k, 6, beyond cu_seqlens_k[0], 2, got 9",
            ValueError,
            {"max_seqlen_k": 6},
        ),
        (
            "seqused_k[2] must be from 0 to the length of the sequence, 2, got 3",
            ValueError,
            {"seqused_k": (7, 0, 3)},
        ),
        (
            "seqused_k[1] must be from 0 to the length of the sequence, 3, got -1",
            ValueError,
            {"seqused_k": (7, -1, 3)},
        ),
        ("q must be a torch.Tensor, got int", TypeError, {"q": 10}),
        (
            "k must be [tokens_k, heads_k, head_dim], got [1, 14, 2, 8]",
            ValueError,
            {"k": torch.zeros(1, 14, 2, 8)},
        ),
        ("seqused_k must be [3], got [2]", ValueError, {"seqused_k": (7, 0)}),
        ("max_seqlen_k must be at least 0, got -1", ValueError, {"max_seqlen_k": -1}),
    ],
    ids=lambda x: None,
)
def test_message_of_validation(message, error, changes):
    with pytest.raises(error) as caught:
        validate(**changes)
    assert str(caught.value) == message
