"""One test for each message of ``paged_attention``; a wrong call never reaches the kernel."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from nki_paged_attn import build_plan, paged_attention, paged_attention_reference
from nki_paged_attn._paged import backends

from ._cases import BF16, make_case


@pytest.fixture(autouse=True)
def no_kernel(monkeypatch):
    def run(*_):
        raise AssertionError("the kernel ran")

    monkeypatch.setattr(backends, "run", run)


NAMES = ("q", "k", "v", "kv_cache", "block_table", "query_lens", "context_lens")


def call(**changes):
    case = make_case([3, 1], [20, 40])
    arguments = dict(zip(NAMES, case.tensors, strict=True)) | changes
    return paged_attention(**{"backend": "sim", **arguments})


def f(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"q": [1.0]}, TypeError, "q must be a NumPy array or a PyTorch tensor, got list"),
        ({"q": f(4, 4, 32, dtype=np.float64)}, TypeError, "q must be one of float16, bfloat16"),
        ({"k": f(4, 2, 32, dtype=BF16)}, TypeError, "k must have the dtype of q, float32, got bf"),
        ({"v": f(4, 2, 32, dtype=BF16)}, TypeError, "v must have the dtype of q, float32, got bf"),
        ({"kv_cache": f(2, 9, 2, 16, 32, dtype=np.int8)}, TypeError, "kv_cache must be one of"),
        ({"q": f(4, 32)}, ValueError, r"q must be \[tokens, heads, head_dim\], got \[4, 32\]"),
        ({"q": f(4, 4, 257)}, ValueError, "head_dim must be from 1 to 256, got 257"),
        ({"k": f(3, 2, 32)}, ValueError, r"k must be \[4, kv_heads, 32\], got \[3, 2, 32\]"),
        ({"v": f(4, 1, 32)}, ValueError, r"v must have the shape of k, \[4, 2, 32\]"),
        ({"q": f(4, 3, 32)}, ValueError, "heads of q must be a multiple of those of k, 2, got 3"),
        ({"q": f(4, 258, 32)}, NotImplementedError, "at most 128 heads for one of k, got 129"),
        ({"kv_cache": f(2, 9, 3, 16, 32)}, ValueError, r"kv_cache must be \[2, blocks, 2, block"),
        (
            {"kv_cache": f(2, 9, 2, 257, 32)},
            ValueError,
            "block_size must be from 1 to 256, got 257",
        ),
        ({"query_lens": [[3]]}, ValueError, r"query_lens must be \[batch\], got \[1, 1\]"),
        ({"query_lens": [3.0, 1.0]}, TypeError, "query_lens must be of integers, got float64"),
        ({"query_lens": [3, -1]}, ValueError, "query_lens must be at least 0, got -1"),
        ({"context_lens": [3]}, ValueError, r"context_lens must be as long as query_lens, \[2\]"),
        ({"query_lens": [4, 1]}, ValueError, "query_lens must sum to at most q's 4 rows, got 5"),
        ({"block_table": [0, 1]}, ValueError, r"block_table must be \[2, max_blocks\], got \[2\]"),
        ({"block_table": f(2, 3)}, TypeError, "block_table must be of integers, got float32"),
        ({"block_table": [[0], [1]]}, ValueError, "block_table must have 3 columns for a context"),
        ({"block_table": [[0, 1, 2], [3, 99, 4]]}, ValueError, r"block_table\[1, 1\] must be from"),
        ({"scale": "1"}, TypeError, "scale must be a number, got str"),
        ({"scale": np.nan}, ValueError, "scale must be finite in fp32, got nan"),
        ({"scale": 1e39}, ValueError, "scale must be finite in fp32, got 1e\\+39"),
        ({"k_scale": 1e-40}, ValueError, "k_scale must be from 9.09e-13 to 1.1e\\+12, got 1e-40"),
        ({"softcap": 0.0}, ValueError, "softcap must be positive and finite in fp32, got 0.0"),
        ({"window": 0}, ValueError, "window must be at least 1, a token's own key, got 0"),
        ({"window": 2.5}, TypeError, "window must be an integer or None, got float"),
        ({"sinks": [0.0]}, ValueError, r"sinks must be \[4\], got \[1\]"),
        ({"sinks": [np.nan] * 4}, ValueError, "sinks must be below infinity and no NaN"),
        ({"k_scale": [1.0] * 3}, ValueError, r"k_scale must be a number or \[2\], got \[3\]"),
        ({"v_scale": -1.0}, ValueError, "v_scale must be from 9.09e-13 to 1.1e\\+12, got -1.0"),
        ({"transposes": "pe"}, ValueError, "transposes must be tensor or dma, got 'pe'"),
        ({"transposes": "dma"}, ValueError, "transposes='dma' needs queries of 2 bytes an element"),
        ({"context_lens": [2**31, 0]}, ValueError, "context_lens must be at most 2147483647, got"),
        (
            {"context_lens": np.array([2**64 - 1, 0], np.uint64)},
            ValueError,
            "context_lens must be at most 2147483647, got 18446744073709551615",
        ),
        ({"query_lens": [2**62] * 4}, ValueError, "query_lens must be at most 2147483647, got"),
        ({"block_table": [[0, 1], [2]]}, ValueError, "block_table must have rows of one length"),
        ({"return_lse": "no"}, TypeError, "return_lse must be True or False, got 'no'"),
        ({"packed_keys": 1}, TypeError, "packed_keys must be True or False, got 1"),
        (
            {"packed_keys": True},
            TypeError,
            "packed_keys needs a kv_cache of float8_e4m3",
        ),
        (
            {"packed_keys": True, "kv_cache": f(2, 99, 2, 17, 32, dtype=ml_dtypes.float8_e4m3)},
            ValueError,
            "packed_keys needs blocks of an even number of tokens, got 17",
        ),
        ({"backend": "gpu"}, ValueError, "backend must be one of auto, nki, nki-sim, sim"),
    ],
)
def test_message(changes, error, text):
    with pytest.raises(error, match=text):
        call(**changes)


def test_tensors_must_be_on_the_cpu():
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="q must be on the CPU, got meta"):
        call(q=torch.zeros(4, 4, 32, device="meta"))


def test_plans_refuse_groups_that_do_not_divide():
    with pytest.raises(ValueError, match="heads must be 1 to 128 times kv_heads, 2, got 3"):
        build_plan([1], [0], [[]], 16, heads=3, kv_heads=2)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"window": 0}, ValueError, "window must be at least 1, a token's own key, got 0"),
        ({"window": 1.5}, TypeError, "window must be an integer or None, got float"),
        ({"query_lens": [-1]}, ValueError, "query_lens must be at least 0, got -1"),
        ({"query_lens": [1.5]}, TypeError, "query_lens must be of integers, got float64"),
        ({"context_lens": [1, 2]}, ValueError, r"context_lens must be as long as query_lens"),
        ({"block_table": [[-1]]}, ValueError, r"block_table\[0, 0\] must be from 0"),
        ({"block_table": [[]]}, ValueError, "block_table must have 1 columns for a context of 5"),
        ({"block_size": 0}, ValueError, "block_size must be at least 1, got 0"),
        ({"block_size": 257}, ValueError, "block_size must be from 1 to 256, got 257"),
        ({"heads": 0}, ValueError, "heads must be at least 1, got 0"),
        ({"kv_heads": 1.0}, TypeError, "kv_heads must be an integer, got float"),
        ({"heads": 129}, ValueError, "heads must be 1 to 128 times kv_heads, 1, got 129"),
        ({"tokens": 0}, ValueError, "query_lens must sum to at most q's 0 rows, got 1"),
        ({"tokens": 3.5}, TypeError, "tokens must be an integer, got float"),
        ({"joint": "no"}, TypeError, "joint must be True or False, got 'no'"),
    ],
)
def test_plans_check_what_they_are_given(changes, error, text):
    given = {"query_lens": [1], "context_lens": [5], "block_table": [[0]], "block_size": 16}
    given |= {"heads": 1, "kv_heads": 1} | changes
    with pytest.raises(error, match=text):
        build_plan(**given)


def test_what_plans_had_and_have_no_more():
    with pytest.warns(DeprecationWarning, match="joint has no effect"):
        plan = build_plan([1], [5], [[0]], 16, heads=1, kv_heads=1, joint=False)
    with pytest.raises(AttributeError, match=r"Plan.structure went .*; Plan.form, Plan.tables"):
        plan.structure  # noqa: B018
    assert not hasattr(plan, "x")


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"window": 0}, ValueError, "window must be at least 1"),
        ({"softcap": 0.0}, ValueError, "softcap must be positive and finite in fp32, got 0.0"),
        ({"scale": np.inf}, ValueError, "scale must be finite in fp32, got inf"),
        ({"sinks": [0.0]}, ValueError, r"sinks must be \[4\], got \[1\]"),
        ({"sinks": ["a"] * 4}, TypeError, "sinks must be of numbers"),
        ({"k_scale": ["a"]}, TypeError, "k_scale must be a number or numbers"),
    ],
)
def test_the_reference_checks_its_options_like_the_kernel(changes, error, text):
    with pytest.raises(error, match=text):
        paged_attention_reference(*make_case([3, 1], [20, 40]).tensors, **changes)
    with pytest.raises(error, match=text):
        call(**changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"k": f(5, 2, 32), "v": f(5, 2, 32)}, r"k must be \[4, kv_heads, 32\], got \[5, 2, 32\]"),
        ({"v": f(4, 2, 16)}, r"v must have the shape of k, \[4, 2, 32\], got \[4, 2, 16\]"),
        ({"q": f(4, 3, 32)}, "heads of q must be a multiple of those of k, 2, got 3"),
        ({"kv_cache": f(2, 9, 1, 16, 32)}, r"kv_cache must be \[2, blocks, 2, block_size, 32\]"),
        ({"kv_cache": f(2, 9), "packed_keys": True}, r"kv_cache must be \[2, blocks, 2, block"),
    ],
)
def test_the_reference_takes_no_tensors_that_the_kernel_refuses(changes, text):
    case = make_case([3, 1], [20, 40])
    with pytest.raises(ValueError, match=text):
        paged_attention_reference(**dict(zip(NAMES, case.tensors, strict=True)) | changes)


def test_plans_refuse_positions_that_fp32_cannot_count():
    blocks = 2**24 // 256 + 1
    table = np.zeros((1, blocks), int)
    with pytest.raises(NotImplementedError, match="may have at most 16777216 keys"):
        build_plan([1], [2**24 + 1], table, 256, heads=1, kv_heads=1)


def test_plans_refuse_caches_whose_rows_do_not_count():
    with pytest.raises(NotImplementedError, match="the cache may have at most 1073741824 rows"):
        build_plan([1], [1], [[2**30]], 1, heads=1, kv_heads=1)


def test_an_empty_batch_needs_no_kernel():
    case = make_case([], [])
    out, lse = paged_attention(*case.tensors, backend="sim", return_lse=True)
    assert out.shape == (0, 4, 32)
    assert lse.shape == (4, 0)
