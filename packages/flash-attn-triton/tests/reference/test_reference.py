"""The oracle itself: against PyTorch's attention, and against the formulas in a loop of floats."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from flash_attn_triton import attention_reference, varlen_attention_reference
from flash_attn_triton._reference.fixed import visible_keys
from flash_attn_triton._reference.philox import (
    dropout_draws,
    dropout_keep_mask,
    dropout_threshold,
    keep_scale,
    philox_2x32,
    philox_4x32,
)
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .._numerics import FEATURES, Case, Packed, Shape, make_case, make_packed

SHAPE = Shape(2, 4, 6, 4, 2, 5, 3)
SEED = torch.tensor([0x123456789ABCDEF, 77])


def philox_of_ints(counter: list[int], key: list[int], rounds: int = 7) -> list[int]:
    """Philox 4x32 and 2x32 as the paper writes them, on Python's integers."""
    x, k = list(counter), list(key)
    for _ in range(rounds):
        if len(x) == 2:
            product = 0xD256D193 * x[0]
            x = [(product >> 32) ^ k[0] ^ x[1], product & 0xFFFFFFFF]
            k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF]
            continue
        product0, product1 = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [
            (product1 >> 32) ^ x[1] ^ k[0],
            product1 & 0xFFFFFFFF,
            (product0 >> 32) ^ x[3] ^ k[1],
            product0 & 0xFFFFFFFF,
        ]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return x


def draw_of_ints(b: int, h: int, i: int, j: int, heads: int, seed: int, offset: int) -> int:
    """What an element draws, as docs/numerics.md says it."""
    keys = philox_of_ints([b * heads + h, offset, 0, 0], [seed & 0xFFFFFFFF, seed >> 32])
    row, column = (16 * (x // 16) // 2 + x % 8 for x in (i, j))
    word = philox_of_ints([row ^ keys[1], column ^ keys[2]], [keys[0]])[i // 8 % 2]
    return word >> 16 * (j // 8 % 2) & 0xFFFF


def attention_of_floats(case: Case, rng_state: Tensor = SEED) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, element by element, from the formulas."""
    q, k, v = (case.inputs[name].double() for name in ("q", "k", "v"))
    bias, sinks = case.inputs.get("bias"), case.inputs.get("sinks")
    options = case.options
    slopes = options.get("alibi_slopes")
    left, right = options.get("window_size", (-1, -1))
    right = 0 if options.get("causal") else right
    scale = options.get("softmax_scale", q.shape[-1] ** -0.5)
    cap, p_drop = options.get("softcap", 0.0), options.get("dropout_p", 0.0)
    seed, offset = rng_state.tolist()
    (batch, rows, heads, _), columns, group = q.shape, k.shape[1], q.shape[2] // k.shape[2]
    if bias is not None:
        bias = bias.double().expand(batch, heads, rows, columns)
    if slopes is not None:
        slopes = slopes.expand(batch, heads)
    spans = options.get("spans")
    if spans is not None:
        spans = spans.expand(batch, *spans.shape[1:]).tolist()
    out = torch.zeros(batch, rows, heads, v.shape[-1], dtype=torch.float64)
    lse = torch.full((batch, heads, rows), -math.inf, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(rows):
                position, scores = i + columns - rows, {}
                for j in range(columns):
                    if 0 <= left < position - j or 0 <= right < j - position:
                        continue
                    if spans is not None and not any(a <= j < z for a, z in spans[b][i]):
                        continue
                    s = scale * sum((q[b, i, h] * k[b, j, h // group]).tolist())
                    s = cap * math.tanh(s / cap) if cap else s
                    if slopes is not None:
                        s -= float(slopes[b, h]) * abs(position - j)
                    scores[j] = s if bias is None else s + float(bias[b, h, i, j])
                total = sum(map(math.exp, scores.values()))
                total += 0.0 if sinks is None else math.exp(sinks[h])
                if not total:
                    continue
                lse[b, h, i] = math.log(total)
                for j, s in scores.items():
                    p = math.exp(s) / total
                    if p_drop:
                        draw = draw_of_ints(b, h, i, j, heads, seed, offset)
                        dropped = round(p_drop * 2**16)
                        p = p * 2**16 / (2**16 - dropped) if draw >= dropped else 0.0
                    out[b, i, h] += p * v[b, j, h // group]
    return out, lse


def double(case: Case) -> Case:
    return Case({n: t.double() for n, t in case.inputs.items()}, case.options, case.packed)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_known_answers(counter, key, expected):
    got = philox_4x32(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)), 10)
    assert tuple(word.item() for word in got) == expected
    assert tuple(philox_of_ints(list(counter), list(key), 10)) == expected


@pytest.mark.parametrize(
    ("counter", "key", "rounds", "expected"),
    [
        ((0, 0), 0, 7, (0x257A3673, 0xCD26BE2A)),
        ((0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, 7, (0xAB302C4D, 0x3DC9D239)),
        ((0x243F6A88, 0x85A308D3), 0x13198A2E, 7, (0xBEDBBE6B, 0xE4C770B3)),
        ((0x243F6A88, 0x85A308D3), 0x13198A2E, 10, (0xDD7CE038, 0xF62A4C12)),
    ],
    ids=["zeros", "ones", "pi", "pi, ten rounds"],
)
def test_short_philox_gives_the_known_answers(counter, key, rounds, expected):
    first, second = map(torch.tensor, counter)
    got = philox_2x32((first, second), torch.tensor(key), rounds)
    assert tuple(word.item() for word in got) == expected
    assert tuple(philox_of_ints(list(counter), [key], rounds)) == expected


def test_dropout_threshold_fits_a_word():
    assert dropout_threshold(0.0) == 0
    assert dropout_threshold(0.5) == 2**15
    assert dropout_threshold(1 - 2**-53) == 2**16 - 1


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999, 1 - 2**-53])
def test_dropout_keeps_the_mean(p):
    kept = sum(draw >= dropout_threshold(p) for draw in range(2**16))
    assert keep_scale(p) * kept == pytest.approx(2**16)


@pytest.fixture(scope="module")
def draws():
    """``[batch, heads, rows, columns]``, a million of them."""
    return dropout_draws(SEED, 2, 2, 512, 512)


def test_dropout_draws_are_uniform(draws):
    for part in (draws >> 8, draws & 0xFF):
        # each of the four elements of a group, rows and columns eight apart
        for i, j in ((0, 0), (0, 8), (8, 0), (8, 8)):
            one = part.unflatten(3, (32, 16)).unflatten(2, (32, 16))
            one = one[:, :, :, i : i + 8, :, j : j + 8]
            counts = torch.bincount(one.flatten(), minlength=256).double()
            mean = one.numel() / 256
            chi2 = ((counts - mean) ** 2 / mean).sum().item()
            # 255 degrees of freedom; five deviations
            assert abs(chi2 - 255) < 5 * math.sqrt(2 * 255), (i, j)


@pytest.mark.parametrize("dim", [0, 1, 2, 3], ids=["batch", "heads", "rows", "columns"])
def test_dropout_draws_are_independent_along(dim, draws):
    values = (draws.double() + 0.5) / 2**16 - 0.5
    size = values.shape[dim]
    for step in [step for step in (1, 2, 8, 16, 24, 256) if step < size]:
        product = values.narrow(dim, step, size - step) * values.narrow(dim, 0, size - step)
        # the variance of a uniform number is 1 / 12
        assert abs(product.mean()) < 5 / 12 / math.sqrt(product.numel()), step


@pytest.mark.parametrize("step", [[1, 0], [2**40, 0], [0, 1]], ids=["seed", "high", "offset"])
def test_dropout_draws_of_other_calls_are_independent(step, draws):
    others = dropout_draws(SEED + torch.tensor(step), 2, 2, 512, 512)
    product = ((draws.double() + 0.5) / 2**16 - 0.5) * ((others.double() + 0.5) / 2**16 - 0.5)
    assert abs(product.mean()) < 5 / 12 / math.sqrt(product.numel())
    # shifted streams would meet elsewhere, too
    assert (draws == others).double().mean() < 3 / 2**16


def test_dropout_mask_knows_seed_offset_and_sequence():
    mask = dropout_keep_mask(SEED, 0.3, 3, 4, 20, 30)
    assert abs(mask.double().mean() - 0.7) < 0.02
    assert torch.equal(mask[1:], dropout_keep_mask(SEED, 0.3, 2, 4, 20, 30, first_sequence=1))
    assert torch.equal(mask[..., :11, :7], dropout_keep_mask(SEED, 0.3, 3, 4, 11, 7))
    part = dropout_keep_mask(SEED, 0.3, 3, 4, 9, 13, corner=(11, 17))
    assert torch.equal(mask[..., 11:, 17:], part)
    for bit in (0, 31, 32, 62):
        other = SEED ^ torch.tensor([1 << bit, 0])
        assert not torch.equal(mask, dropout_keep_mask(other, 0.3, 3, 4, 20, 30)), bit
    shifted = SEED + torch.tensor([0, 1])
    assert not torch.equal(mask, dropout_keep_mask(shifted, 0.3, 3, 4, 20, 30))
    wrapped = SEED + torch.tensor([0, 2**32])
    assert torch.equal(mask, dropout_keep_mask(wrapped, 0.3, 3, 4, 20, 30))


@pytest.mark.parametrize("lengths", [(4, 6), (6, 4)], ids=["more keys", "more queries"])
@pytest.mark.parametrize("feature", [None, *FEATURES])
def test_each_feature_matches_its_formula(feature, lengths):
    shape = SHAPE._replace(seqlen_q=lengths[0], seqlen_k=lengths[1])
    case = double(make_case(shape, torch.float32, "cpu", [feature] if feature else []))
    got = attention_reference(**case.inputs, **case.options, return_lse=True, rng_state=SEED)
    torch.testing.assert_close(got, attention_of_floats(case), rtol=1e-12, atol=1e-12)


def test_all_features_together_match_their_formulas():
    features = ["causal", "softcap", "alibi_batch", "bias", "sinks", "dropout", "scale_negative"]
    case = double(make_case(SHAPE, torch.float32, "cpu", features)).with_options(window_size=(3, 1))
    got = attention_reference(**case.inputs, **case.options, return_lse=True, rng_state=SEED)
    torch.testing.assert_close(got, attention_of_floats(case), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["full", "causal", "bias", "scale"])
def test_matches_pytorch(kind, dtype):
    case = make_case(Shape(2, 33, 33, 4, 2, 24, 40), torch.float32, "cpu", ["bias"])
    q, k, v, bias = (case.inputs[name].to(dtype) for name in ("q", "k", "v", "bias"))
    ours = {"causal": {"causal": True}, "bias": {"bias": bias}, "scale": {"softmax_scale": 0.3}}
    theirs = {"causal": {"is_causal": True}, "bias": {"attn_mask": bias}, "scale": {"scale": 0.3}}
    leaves = [[t.clone().requires_grad_() for t in (q, k, v)] for _ in range(2)]
    got = attention_reference(*leaves[0], **ours.get(kind, {}))
    want = scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in leaves[1]), **theirs.get(kind, {}), enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(got, want)
    for mine, other in zip(
        *(
            torch.autograd.grad(o.sum(), x)
            for o, x in ((got.sin(), leaves[0]), (want.sin(), leaves[1]))
        ),
        strict=True,
    ):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize(
    "features",
    [
        ("causal",),
        ("window",),
        ("softcap", "alibi"),
        ("bias", "sinks"),
        ("dropout", "causal"),
        ("bias_keys", "scale_negative"),
    ],
    ids=str,
)
@pytest.mark.parametrize("lengths", [(3, 4), (5, 2)], ids=["more keys", "more queries"])
def test_gradients_are_those_of_finite_differences(features, lengths):
    shape = Shape(2, *lengths, 2, 1, 3, 2)
    case = double(make_case(shape, torch.float32, "cpu", features))
    names = list(case.inputs)

    def function(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        inputs = dict(zip(names, tensors, strict=True))
        out, lse = attention_reference(**inputs, **case.options, return_lse=True, rng_state=SEED)
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    assert torch.autograd.gradcheck(function, [t.requires_grad_() for t in case.inputs.values()])


@pytest.mark.parametrize("sink", [None, 0.7])
@pytest.mark.parametrize("why", ["mask", "bias", "no keys"])
def test_rows_without_keys_are_zero_and_so_are_their_gradients(why, sink):
    seqlen_k = {"mask": 2, "bias": 5, "no keys": 0}[why]
    case = make_case(Shape(1, 5, seqlen_k, 2, 1, 4), torch.float64, "cpu")
    inputs = {name: t.requires_grad_() for name, t in case.inputs.items()}
    if sink is not None:
        inputs["sinks"] = torch.full((2,), sink, dtype=torch.float64, requires_grad=True)
    if why == "bias":
        bias = torch.zeros(1, 1, 5, 5, dtype=torch.float64)
        bias[:, :, :3] = -math.inf
        inputs["bias"] = bias.requires_grad_()
    empty = 5 if why == "no keys" else 3
    out, lse = attention_reference(**inputs, causal=why == "mask", return_lse=True)
    assert not out[:, :empty].any()
    assert (lse[..., :empty] == (-math.inf if sink is None else sink)).all()
    # what arrives at such a row is of no account, not even NaN in its output's gradient
    dout = torch.ones_like(out)
    if why != "bias":
        dout[:, :empty] = math.nan
    grads = torch.autograd.grad((out, lse), list(inputs.values()), (dout, torch.ones_like(lse)))
    for name, grad in zip(inputs, grads, strict=True):
        assert grad.isfinite().all(), name
    assert not grads[0][:, :empty].any()
    assert not grads[-1][:, :, :empty].any() if why == "bias" else True


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("options", "unseen"),
    [
        ({"window_size": (1, -1)}, slice(0, 2)),
        ({"window_size": (2, -1), "causal": True}, slice(0, 1)),
        ({"causal": True, "window_size": (0, 0)}, slice(0, 3)),
    ],
    ids=["left", "causal", "both"],
)
def test_what_no_row_sees_may_hold_anything(options, unseen, poison):
    case = double(make_case(Shape(1, 4, 7, 2, 1, 5), torch.float32, "cpu", ["bias", "softcap"]))

    def results(spoil: bool) -> list[Tensor]:
        inputs = {name: t.clone() for name, t in case.inputs.items()}
        if spoil:
            inputs["k"][:, unseen] = poison
            inputs["v"][:, unseen] = poison
            inputs["bias"][..., unseen] = math.nan
        leaves = [t.requires_grad_() for t in inputs.values()]
        arguments = dict(zip(inputs, leaves, strict=True))
        out, lse = attention_reference(**arguments, **{**case.options, **options}, return_lse=True)
        return [out, lse, *torch.autograd.grad((out.sin() * 2).sum() + lse.sum(), leaves)]

    for clean, spoilt in zip(results(False), results(True), strict=True):
        assert torch.equal(clean, spoilt)


@pytest.mark.parametrize("size", [2**31, sys.maxsize, 2**63])
def test_window_larger_than_the_sequence_hides_nothing(size):
    case = make_case(Shape(1, 7, 4, 2, 1, 5), torch.float32, "cpu")
    want = attention_reference(**case.inputs)
    assert torch.equal(attention_reference(**case.inputs, window_size=(size, size)), want)
    # the operators may be called with any window as well
    assert visible_keys(7, 4, sys.maxsize, sys.maxsize, torch.device("cpu")).all()


def test_packed_sequences_are_computed_one_by_one():
    features = ["causal", "bias", "sinks", "alibi_batch"]
    case = make_packed(
        Packed((3, 0, 5), (4, 2, 6), 4, 2, 8, padding=2), torch.float64, "cpu", features
    )
    out, lse = varlen_attention_reference(**case.inputs, **case.options, return_lse=True)
    assert not out[8:].any()
    assert (lse[:, 8:] == -math.inf).all()
    start_q = start_k = 0
    for b, (sq, sk) in enumerate(((3, 4), (0, 2), (5, 6))):
        rows, keys = slice(start_q, start_q + sq), slice(start_k, start_k + sk)
        one_out, one_lse = attention_reference(
            case.inputs["q"][None, rows],
            case.inputs["k"][None, keys],
            case.inputs["v"][None, keys],
            causal=True,
            return_lse=True,
            bias=case.inputs["bias"][b : b + 1, :, :sq, :sk],
            sinks=case.inputs["sinks"],
            alibi_slopes=case.options["alibi_slopes"][b],
        )
        torch.testing.assert_close(out[rows], one_out[0])
        torch.testing.assert_close(lse[:, rows], one_lse[0])
        start_q, start_k = start_q + sq, start_k + sk


def test_seqused_k_shortens_sequences():
    case = make_packed(Packed((3, 5), (4, 6), 2, 1, 8), torch.float64, "cpu", ["causal"])
    q, k, v = (case.inputs[name] for name in ("q", "k", "v"))
    got = varlen_attention_reference(
        **case.inputs, **case.options, seqused_k=torch.tensor([4, 2], dtype=torch.int32)
    )
    want = attention_reference(q[None, 3:], k[None, 4:6], v[None, 4:6], causal=True)
    torch.testing.assert_close(got[3:], want[0])


def test_probabilities_are_marked_where_dropped():
    case = make_case(Shape(2, 5, 7, 4, 2, 8), torch.float64, "cpu", ["causal", "dropout", "bias"])
    p_drop = case.options["dropout_p"]
    out, lse, marked = attention_reference(
        **case.inputs, **case.options, return_attn_probs=True, rng_state=SEED
    )
    plain = attention_reference(**case.inputs, causal=True, return_lse=True)[1]
    torch.testing.assert_close(lse, plain)
    torch.testing.assert_close(marked.abs().sum(-1), torch.ones_like(lse))
    v = case.inputs["v"].repeat_interleave(2, dim=2)
    kept = marked.clamp(min=0.0) * keep_scale(p_drop)
    torch.testing.assert_close(torch.einsum("bhij,bjhe->bihe", kept, v), out)
    hidden = torch.ones(5, 7, dtype=torch.bool).triu(3)
    assert not marked[..., hidden].any()
    assert attention_reference(**case.inputs, return_attn_probs=True)[2] is None


def test_packed_probabilities_are_those_of_each_sequence():
    case = make_packed(Packed((3, 0, 5), (4, 2, 6), 4, 2, 8), torch.float32, "cpu", ["dropout"])
    out, _, marked = varlen_attention_reference(
        **case.inputs, **case.options, return_attn_probs=True, rng_state=SEED
    )
    assert marked.shape == (3, 4, 5, 6)
    kept = marked[2].clamp(min=0.0) / (1 - case.options["dropout_p"])
    v = case.inputs["v"][6:].repeat_interleave(2, dim=1)
    torch.testing.assert_close(torch.einsum("hij,jhe->ihe", kept, v), out[3:])
    assert not marked[0, :, 3:].any()
    assert not marked[0, :, :, 4:].any()


@pytest.mark.parametrize("per_head", [False, True])
def test_fp8_inputs_are_multiplied_by_their_scales(per_head):
    case = make_case(Shape(2, 5, 7, 4, 2, 8), torch.float32, "cpu")
    shape = (2, 2) if per_head else (1,)
    scales = {f"{name}_descale": torch.rand(shape) + 0.5 for name in "qkv"}
    fp8 = {name: t.to(torch.float8_e4m3fn) for name, t in case.inputs.items()}
    got, lse = attention_reference(**fp8, **scales, return_lse=True)
    assert got.dtype == torch.bfloat16
    group = {"q": 2, "k": 1, "v": 1}
    wide = {
        name: t.double()
        * scales[f"{name}_descale"]
        .expand(2, 2)
        .double()
        .repeat_interleave(group[name], dim=1)[:, None, :, None]
        for name, t in fp8.items()
    }
    want, want_lse = attention_reference(**wide, return_lse=True)
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-6)


# PyTorch's own cast saturates in the first format, and gives NaN in the second
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=str)
def test_fp8_output_is_scaled_and_saturates(dtype):
    case = make_case(Shape(1, 5, 7, 2, 1, 8), torch.float32, "cpu")
    scale, limit = torch.tensor([1e-3]), torch.finfo(dtype).max
    got = attention_reference(**case.inputs, out_dtype=dtype, out_scale=scale)
    want = (attention_reference(**case.inputs) / scale).clamp(-limit, limit).to(dtype)
    assert got.dtype == dtype
    assert torch.equal(got.float(), want.float())
    assert (got.float().abs() == limit).any()


def test_autocast_does_not_round_what_is_computed():
    case = make_case(Shape(1, 5, 7, 2, 1, 8), torch.float32, "cpu", ["bias"])
    want = attention_reference(**case.inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attention_reference(**case.inputs), want)
