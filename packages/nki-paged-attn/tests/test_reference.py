"""The definition against a loop over single scores, and against itself in other layouts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from nki_paged_attn import paged_attention_reference

from ._cases import make_case, poisoned


def one_by_one(case):
    """Attention with Python numbers: every token, head and key by itself."""
    q, k, v, cache, table, lens, contexts = case.tensors
    options = case.options
    out = np.zeros(q.shape)
    lse = np.full((q.shape[1], q.shape[0]), -math.inf)
    first = 0
    for sequence, (count, context) in enumerate(zip(lens, contexts, strict=True)):
        for i in range(count):
            for h in range(q.shape[1]):
                g = h // (q.shape[1] // k.shape[1])
                terms = []
                for j in range(context + i + 1):
                    if options.get("window") and j <= context + i - options["window"]:
                        continue
                    if j < context:
                        block = table[sequence, j // cache.shape[3]]
                        key, value = cache[:, block, g, j % cache.shape[3]].astype(float)
                        key = key * options.get("k_scale", 1.0)
                        value = value * options.get("v_scale", 1.0)
                    else:
                        key, value = k[first + j - context, g], v[first + j - context, g]
                    s = options.get("scale", q.shape[2] ** -0.5) * float(q[first + i, h] @ key)
                    if options.get("softcap"):
                        s = options["softcap"] * math.tanh(s / options["softcap"])
                    terms.append((s, value.astype(float)))
                sink = options["sinks"][h] if "sinks" in options else None
                total = sum(math.exp(s) for s, _ in terms) + (
                    math.exp(sink) if sink is not None else 0
                )
                out[first + i, h] = sum(math.exp(s) * value for s, value in terms) / total
                lse[h, first + i] = math.log(total)
        first += count
    return out, lse


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 3},
        {"softcap": 0.5, "scale": 2.0},
        {"sinks": np.array([0.5, -1.0, 2.0, 0.0])},
        {"k_scale": 0.5, "v_scale": 3.0, "scale": -1.0},
    ],
    ids=lambda o: "-".join(o) or "plain",
)
def test_matches_a_loop_over_single_scores(options):
    case = make_case(
        [3, 0, 1, 4], [7, 2, 5, 0], head_dim=5, block_size=3, dtype=np.float64, **options
    )
    for got, expected in zip(case.oracle(), one_by_one(case), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


def test_tokens_behind_the_last_sequence_see_nothing():
    case = make_case([3], [4], extra=2)
    out, lse = case.oracle()
    assert (out[3:] == 0).all()
    assert np.isneginf(lse[:, 3:]).all()
    assert np.isfinite(lse[:, :3]).all()


def test_a_sequence_in_chunks_is_the_sequence():
    """What was new in the first chunk lies in the cache for the second."""
    whole = make_case([20], [0], block_size=4, spare=5, seed=3)
    expected, _ = whole.oracle()
    cache = whole.kv_cache.copy()
    table = np.array([[4, 1, 3]])
    for j in range(12):
        cache[0, table[0, j // 4], :, j % 4] = whole.k[j]
        cache[1, table[0, j // 4], :, j % 4] = whole.v[j]
    rest, _ = paged_attention_reference(
        whole.q[12:], whole.k[12:], whole.v[12:], cache, table, [8], [12]
    )
    np.testing.assert_allclose(rest, expected[12:], rtol=1e-12)


def test_poison_stays_where_it_is():
    case = make_case([3, 1], [7, 5], block_size=4)
    np.testing.assert_array_equal(poisoned(case, np.nan).oracle()[0], case.oracle()[0])
