"""Spans: what they hide by the reference, what their makers make, and which calls are refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from flash_attn_triton import (
    attention_reference,
    attention_spans,
    flash_attn_func,
    flash_attn_varlen_func,
    varlen_attention_reference,
    varlen_attention_spans,
)
from flash_attn_triton._reference.fixed import visible_keys

from ._linked.budget import Maker, offsets

pytestmark = pytest.mark.eager

SIZES = [(9, 9), (9, 14), (14, 9), (1, 6), (0, 4), (5, 0)]
WINDOWS = [(-1, -1), (3, -1), (-1, 2), (2, 1), (0, 0)]
# segments of up to 14 queries: neighbours of two numbers, a number that comes twice, none
IDS = [-1, 5, 5, 5, -1, -1, 2, 2, 7, -1, 5, 5, -1, 2]


def seen_by(spans, seqlen_k):
    """Return which keys rows see by their spans, ``[..., rows, keys]``, key by key."""
    rows = []
    for row in spans.flatten(0, -3).tolist():
        seen = {key for start, end in row for key in range(max(start, 0), min(end, seqlen_k))}
        rows.append([key in seen for key in range(seqlen_k)])
    return torch.tensor(rows, dtype=torch.bool).view(*spans.shape[:-2], seqlen_k)


def wanted(seqlen_q, seqlen_k, causal, window, prefix, ids):
    """Return which keys rows see by the definition of the makers."""
    left, right = window[0], 0 if causal else window[1]
    seen = visible_keys(seqlen_q, seqlen_k, left, right, torch.device("cpu"))
    seen[:, :prefix] = True
    for i, j in itertools.product(range(seqlen_q), repeat=2):
        key, (low, high) = j + seqlen_k - seqlen_q, sorted((i, j))
        is_one = ids and ids[i] >= 0 and set(ids[low : high + 1]) == {ids[i]}
        if is_one and 0 <= key < seqlen_k:
            seen[i, key] = True
    return seen


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("prefix", [None, 0, 4, 40])
@pytest.mark.parametrize("ids", [None, IDS], ids=["plain", "segments"])
def test_made_spans_show_the_keys_of_the_definition(ids, prefix, window, causal):
    options = {"causal": causal, "window_size": window, "prefix": prefix}
    for lengths in SIZES:
        own = None if ids is None else ids[: lengths[0]]
        segments = None if own is None else torch.tensor(own, dtype=torch.int32)
        spans = attention_spans(*lengths, segments=segments, **options)
        assert spans.dtype == torch.int32
        assert spans.shape == (1, lengths[0], 2 if prefix is not None and window[0] >= 0 else 1, 2)
        assert spans.numel() == 0 or (spans.min() >= 0 and spans.max() <= lengths[1])
        want = wanted(*lengths, causal, window, prefix or 0, own)
        assert torch.equal(seen_by(spans, lengths[1])[0], want), lengths

    packed = [offsets([size[side] for size in SIZES], "cpu") for side in (0, 1)]
    tokens = int(packed[0][-1]) + 3
    segments = None
    if ids is not None:
        own = [ids[i] for size in SIZES for i in range(size[0])]
        segments = torch.tensor([*own, 5, 5, 5], dtype=torch.int32)
    spans = varlen_attention_spans(*packed, tokens, segments=segments, **options)
    assert not spans[-3:].any()
    for at, lengths in zip(packed[0].tolist(), SIZES, strict=False):
        own = None if ids is None else ids[: lengths[0]]
        want = wanted(*lengths, causal, window, prefix or 0, own)
        got = seen_by(spans[at : at + lengths[0]], lengths[1])
        assert torch.equal(got, want), lengths


def test_segments_end_with_their_sequence():
    cu_seqlens = offsets([3, 2], "cpu")
    ids = torch.full((5,), 1, dtype=torch.int32)
    spans = varlen_attention_spans(cu_seqlens, cu_seqlens, 5, causal=True, segments=ids)
    assert spans.tolist() == [[[0, 3]]] * 3 + [[[0, 2]]] * 2


def test_makers_take_a_value_for_each_sequence():
    prefix = torch.tensor([2, 0], dtype=torch.int32)
    spans = attention_spans(3, 3, causal=True, prefix=prefix)
    assert spans.tolist() == [[[[0, 2]], [[0, 2]], [[0, 3]]], [[[0, 1]], [[0, 2]], [[0, 3]]]]
    ids = torch.tensor([[4, 4, -1], [-1, 3, 3]], dtype=torch.int32)
    spans = attention_spans(3, 3, causal=True, segments=ids)
    assert spans[..., 0, 1].tolist() == [[2, 2, 3], [1, 3, 3]]
    assert attention_spans(3, 4, batch=5).shape == (5, 3, 1, 2)
    cu_seqlens = offsets([2, 2], "cpu")
    spans = varlen_attention_spans(cu_seqlens, cu_seqlens, 4, causal=True, prefix=prefix)
    assert spans[:, 0, 1].tolist() == [2, 2, 1, 2]


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"seqlen_q": -1}, ValueError, "seqlen_q must be at least 0"),
        ({"seqlen_k": 2.5}, TypeError, "seqlen_k must be an int"),
        ({"causal": 1}, TypeError, "causal must be a bool"),
        ({"window_size": (1, 2, 3)}, TypeError, "window_size must be a tuple of two ints"),
        ({"prefix": -3}, ValueError, "prefix must be at least 0"),
        ({"prefix": torch.ones(2)}, TypeError, "prefix must be an int or torch.int32"),
        (
            {"prefix": torch.ones(2, dtype=torch.int32), "batch": 3},
            ValueError,
            r"prefix must be an int or \[batch\], \[3\], got \[2\]",
        ),
        ({"segments": [1, 2]}, TypeError, "segments must be a torch.Tensor"),
        ({"segments": torch.ones(4)}, TypeError, "segments must be torch.int32"),
        (
            {"segments": torch.ones(3, dtype=torch.int32)},
            ValueError,
            r"segments must be \[seqlen_q\] or \[batch, seqlen_q\], with seqlen_q 4, got \[3\]",
        ),
        ({"segments": torch.ones(2, 4, dtype=torch.int32), "batch": 3}, ValueError, "batch 3"),
        ({"batch": -1}, ValueError, "batch must be at least 0"),
        ({"prefix": torch.ones(2, dtype=torch.int32), "device": "meta"}, ValueError, "device"),
    ],
    ids=str,
)
def test_makers_refuse(changes, kind, words):
    with pytest.raises(kind, match=words):
        attention_spans(**{"seqlen_q": 4, "seqlen_k": 4, **changes})


def made(device="cpu"):
    m = Maker(device, torch.float32)
    q, k, v = m.randn(2, 6, 2, 16), m.randn(2, 7, 1, 16), m.randn(2, 7, 1, 16)
    return {"q": q, "k": k, "v": v, "spans": attention_spans(6, 7, causal=True, device=device)}


@pytest.mark.parametrize("function", [flash_attn_func, attention_reference])
@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"spans": [[0, 1]]}, TypeError, "spans must be a torch.Tensor"),
        ({"spans": torch.ones(1, 6, 1, 2)}, TypeError, "spans must be torch.int32"),
        ({"spans": torch.ones(1, 6, 1, 2).long()}, TypeError, "spans must be torch.int32"),
        ({"spans": torch.ones(3, 6, 1, 2).int()}, ValueError, r"spans must be \[batch or 1"),
        ({"spans": torch.ones(6, 1, 2).int()}, ValueError, r"here \[2, 6, n, 2\]"),
        ({"spans": torch.ones(1, 5, 1, 2).int()}, ValueError, "spans must be"),
        ({"spans": torch.ones(1, 6, 3, 2).int()}, ValueError, "n 1 or 2, got n 3"),
        ({"spans": torch.ones(1, 6, 0, 2).int()}, ValueError, "n 1 or 2, got n 0"),
        ({"spans": torch.ones(1, 6, 1, 2, device="meta").int()}, ValueError, "spans must be on"),
        ({"causal": True}, ValueError, "causal must be False beside spans"),
        ({"window_size": (3, -1)}, ValueError, r"window_size must be \(-1, -1\) beside spans"),
        ({"window_size": (-1, 0)}, ValueError, r"window_size must be \(-1, -1\) beside spans"),
        ({"bias": torch.zeros(7)}, NotImplementedError, "bias must be None beside spans"),
        ({"alibi_slopes": torch.ones(2)}, NotImplementedError, "alibi_slopes must be None"),
    ],
    ids=str,
)
def test_calls_refuse(changes, kind, words, function):
    with pytest.raises(kind, match=words):
        function(**made() | changes)


def test_calls_refuse_options_of_the_kernels():
    with pytest.raises(NotImplementedError, match="invariant must be False beside spans"):
        flash_attn_func(**made(), invariant=True)
    x = made()
    rows = [x[name][0] for name in ("q", "k", "v")]
    lengths = offsets([6], "cpu"), offsets([7], "cpu"), 6, 7
    with pytest.raises(ValueError, match=r"spans must be \[tokens_q, n, 2\]"):
        flash_attn_varlen_func(*rows, *lengths, spans=x["spans"])


def test_a_wrong_number_of_rows_is_found_after_a_right_one():
    """Calls with one signature are checked once; the number of tokens is no part of it."""
    m, cu_seqlens = Maker("cpu", torch.float32), offsets([6], "cpu")
    q = m.randn(6, 2, 16)
    spans = torch.ones(6, 1, 2, dtype=torch.int32)
    flash_attn_varlen_func(q, q, q, cu_seqlens, cu_seqlens, 6, 6, spans=spans)
    with pytest.raises(ValueError, match="spans must be"):
        flash_attn_varlen_func(q, q, q, cu_seqlens, cu_seqlens, 6, 6, spans=spans[:5])


@pytest.mark.parametrize("n", [1, 2])
def test_the_reference_hides_what_no_span_shows(n):
    """Against the softmax over the keys that are seen, row by row; any values are legal."""
    m = Maker("cpu", torch.float64)
    q, k, v = m.randn(2, 9, 2, 16), m.randn(2, 7, 1, 16), m.randn(2, 7, 1, 16)
    generator = torch.Generator().manual_seed(n)
    spans = torch.randint(-4, 12, (2, 9, n, 2), dtype=torch.int32, generator=generator)
    spans[0, 3] = torch.tensor([-(2**31), 2**31 - 1])
    spans[1, 4] = torch.tensor([2**31 - 1, -(2**31)])
    out, lse = attention_reference(q, k, v, spans=spans, return_lse=True)
    for b, i, head in itertools.product(range(2), range(9), range(2)):
        seen = seen_by(spans[b, i][None], 7)[0]
        scores = (k[b, seen, 0] @ q[b, i, head]) / 4
        torch.testing.assert_close(out[b, i, head], torch.softmax(scores, 0) @ v[b, seen, 0])
        torch.testing.assert_close(lse[b, head, i], torch.logsumexp(scores, 0))
    assert not out[1, 4].any()
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    lengths = offsets([9, 9], "cpu"), offsets([7, 7], "cpu"), 9, 7
    packed = varlen_attention_reference(*rows, *lengths, spans=spans.flatten(0, 1))
    torch.testing.assert_close(packed.view_as(out), out)


def test_spans_mean_what_other_masks_do():
    m = Maker("cpu", torch.float32)
    q, k, v = m.randn(2, 40, 2, 16), m.randn(2, 50, 1, 16), m.randn(2, 50, 1, 16)
    for mask in ({}, {"causal": True}, {"window_size": (7, 3)}, {"window_size": (-1, 5)}):
        got = attention_reference(q, k, v, spans=attention_spans(40, 50, **mask))
        assert torch.equal(got, attention_reference(q, k, v, **mask))
