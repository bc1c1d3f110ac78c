"""Batches, shapes and features drawn together.

30 examples by default, the same in every run; ``NKI_PAGED_ATTN_EXAMPLES=500`` for a long run,
which also has what takes too long for every change. A failure prints the smallest example found and
the line that reproduces it.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from nki_paged_attn import Buckets, paged_attention, paged_attention_reference

from . import _vllm
from ._cases import BF16, F16, F32, make_case, poisoned

EXAMPLES = int(os.environ.get("NKI_PAGED_ATTN_EXAMPLES", "30"))
# a merge sees the same examples every time; a number asked for draws anew
DERANDOMIZE = "NKI_PAGED_ATTN_EXAMPLES" not in os.environ
long_run = pytest.mark.skipif(EXAMPLES < 100, reason="takes a minute: NKI_PAGED_ATTN_EXAMPLES=100")

bounded = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=DERANDOMIZE,
    print_blob=True,
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)

QUERIES = st.one_of(st.sampled_from([0, 1, 1, 1]), st.integers(0, 140))
CONTEXTS = st.one_of(st.sampled_from([0, 1, 127, 128, 1024]), st.integers(0, 1300))
HEADS = st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1), (5, 1)])


@st.composite
def cases(draw):
    batch = draw(st.integers(0, 4))
    queries = [draw(QUERIES) for _ in range(batch)]
    # with one that is cut, or merged, now and then
    longest = draw(st.sampled_from([0, 0, 0, 0, 0, 5000]))
    contexts = [draw(CONTEXTS) + (longest if n == 0 else 0) for n in range(batch)]
    heads, kv_heads = draw(HEADS)
    options = {}
    if draw(st.booleans()):
        options["window"] = draw(st.integers(1, 400))
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([0.5, 3.0, 50.0]))
    if draw(st.booleans()):
        options["sinks"] = np.array(
            draw(st.lists(st.floats(-5, 5), min_size=heads, max_size=heads))
        )
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.0, -1.0, 0.01, 4.0]))
    return make_case(
        queries,
        contexts,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw(st.one_of(st.integers(1, 40), st.sampled_from([128, 192, 256]))),
        block_size=draw(st.integers(1, 70)),
        dtype=draw(st.sampled_from([F32, BF16, F16])),
        seed=draw(st.integers(0, 2**16)),
        extra=draw(st.sampled_from([0, 0, 3])),
        **options,
    )


@st.composite
def buckets(draw):
    """Return what to make of the sizes of a call: those themselves, powers of two, or far more."""
    factor = draw(st.sampled_from([0, 1, 3]))

    def find(case):
        longest = max(case.context_lens, default=0)
        sizes = [max(1, n) for n in (len(case.query_lens), len(case.q), longest)]
        return Buckets(*(factor * n for n in sizes)) if factor else None

    return find


@bounded
@given(
    case=cases(),
    target=st.sampled_from(["trn2", "trn3"]),
    programs=st.integers(1, 2),
    bucket=buckets(),
)
def test_matches_the_reference(case, target, programs, bucket):
    old = {
        n: os.environ.get(n)
        for n in ("NEURON_PLATFORM_TARGET_OVERRIDE", "NEURON_LOGICAL_NC_CONFIG")
    }
    os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"] = target
    os.environ["NEURON_LOGICAL_NC_CONFIG"] = str(programs)
    try:
        out, _ = case.check()
        # nor does it depend on its bucket
        again, _ = poisoned(case, np.nan).run(buckets=bucket(case))
        np.testing.assert_array_equal(again, out)
    finally:
        for name, value in old.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@long_run
@pytest.mark.parametrize("setting", [s for s in _vllm.SETTINGS if s[-1] and s[5] != 16], ids=str)
def test_the_old_bf16_settings_in_fp32(setting):
    """Point 1 at 1e-5, for the settings that test_acceptance.py leaves out."""
    call = _vllm.draw(setting)
    exact, _ = paged_attention_reference(*call.packed)
    np.testing.assert_allclose(
        paged_attention(*call.packed, backend="sim"), exact, atol=1e-5, rtol=0
    )
