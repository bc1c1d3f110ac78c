"""Paged attention against dense attention on the gathered pages."""

import pytest
import torch

flash_attn_triton = pytest.importorskip("flash_attn_triton")
prefix_prefill = pytest.importorskip("prefix_prefill")


def make(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def paged(k, starts, page, seed):
    """Scatter packed keys into pages in no order: ``(cache, table)``."""
    lengths = (starts[1:] - starts[:-1]).tolist()
    counts = [-(-n // page) for n in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed))
    cache = torch.full((sum(counts), page, *k.shape[1:]), float("nan"))
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for b, n in enumerate(lengths):
        pages = order[sum(counts[:b]) : sum(counts[: b + 1])]
        table[b, : counts[b]] = pages
        keys = torch.arange(n)
        cache[pages[keys // page], keys % page] = k[starts[b] : starts[b + 1]]
    return cache, table


@pytest.mark.parametrize(
    ("options", "head_dim_v"),
    [
        ({}, 16),
        ({"window_size": (9, 0)}, 16),
        ({"softcap": 2.0}, 16),
        ({"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])}, 16),
        ({}, 40),
        ({"window_size": (9, 0)}, 8),
    ],
    ids=["plain", "window", "softcap", "alibi", "wide values", "narrow values"],
)
def test_paged_attention_agrees_with_packed_attention(options, head_dim_v):
    starts_q = torch.tensor([0, 17, 18, 21], dtype=torch.int32)
    starts_k = torch.tensor([0, 36, 57, 66], dtype=torch.int32)
    q, k, v = make(21, 4, 16, seed=1), make(66, 2, 16, seed=2), make(66, 2, head_dim_v, seed=3)
    (k_cache, table), (v_cache, _) = paged(k, starts_k, 7, 4), paged(v, starts_k, 7, 4)
    lengths = starts_k.diff()
    got = prefix_prefill.paged_attn_func(
        q, k_cache, v_cache, table, starts_q, lengths, 17, 36, return_lse=True, **options
    )
    want = flash_attn_triton.flash_attn_varlen_func(
        q, k, v, starts_q, starts_k, 17, 36, causal=True, return_lse=True, **options
    )
    exact = flash_attn_triton.varlen_attention_reference(
        *(t.double() for t in (q, k, v)),
        starts_q,
        starts_k,
        17,
        36,
        causal=True,
        return_lse=True,
        **options,
    )
    for mine, other, truth in zip(got, want, exact, strict=True):
        budget = (
            2 * (other - truth).abs().max() + 4 * torch.finfo(torch.float32).eps * truth.abs().max()
        )
        assert (mine - truth).abs().max() <= budget


def test_the_definitions_agree_in_float64():
    starts = torch.tensor([0, 9, 20], dtype=torch.int32)
    q, k, v = (make(20, h, 16, seed=i) for i, h in enumerate((4, 2, 2)))
    (k_cache, table), (v_cache, _) = paged(k, starts, 4, 4), paged(v, starts, 4, 4)
    q, k, v, k_cache, v_cache = (t.double() for t in (q, k, v, k_cache, v_cache))
    got = prefix_prefill.paged_attention_reference(
        q, k_cache, v_cache, table, starts, starts.diff(), 11, 11
    )
    want = flash_attn_triton.varlen_attention_reference(
        q, k, v, starts, starts, 11, 11, causal=True
    )
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
