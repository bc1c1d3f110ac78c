"""The paged kernel for Trainium, simulated, against dense attention on the gathered pages."""

import numpy as np
import pytest
import torch
from flash_attn_triton import varlen_attention_reference
from nki_paged_attn import paged_attention, paged_attention_reference


@pytest.mark.parametrize("options", [{}, {"window": 9}, {"softcap": 2.0}, {"scale": 0.3}], ids=str)
def test_nki_reference_is_flash_attention_on_gathered_pages(options):
    rng = np.random.default_rng(0)
    lens, contexts, block_size = [5, 1, 40], [20, 33, 0], 16
    tokens, heads, kv_heads, d = sum(lens), 4, 2, 16
    q = rng.uniform(-1, 1, (tokens, heads, d))
    k, v = rng.uniform(-1, 1, (2, tokens, kv_heads, d))
    cache = rng.uniform(-1, 1, (2, 9, kv_heads, block_size, d))
    table = rng.permutation(9).reshape(3, 3)
    keys, values, first = [], [], 0
    for row, n, c in zip(table, lens, contexts, strict=True):
        flat = cache[:, row].transpose(0, 1, 3, 2, 4).reshape(2, -1, kv_heads, d)[:, :c]
        keys += [flat[0], k[first : first + n]]
        values += [flat[1], v[first : first + n]]
        first += n
    totals = np.cumsum([0, *(n + c for n, c in zip(lens, contexts, strict=True))])
    starts = torch.tensor(np.cumsum([0, *lens]), dtype=torch.int32)
    ends = torch.tensor(totals, dtype=torch.int32)
    window = options.get("window")
    expected = varlen_attention_reference(
        torch.from_numpy(q),
        torch.from_numpy(np.concatenate(keys)),
        torch.from_numpy(np.concatenate(values)),
        starts,
        ends,
        max(lens),
        int(max(np.diff(totals))),
        causal=True,
        window_size=(window - 1, 0) if window else (-1, -1),
        softcap=options.get("softcap", 0.0),
        softmax_scale=options.get("scale"),
    )
    batch = (q, k, v, cache, table, lens, contexts)
    exact, _ = paged_attention_reference(*batch, **options)
    np.testing.assert_allclose(exact, expected.numpy(), atol=1e-12)
    low = [x.astype(np.float32) for x in batch[:4]]
    out = paged_attention(*low, *batch[4:], backend="sim", **options)
    np.testing.assert_allclose(out, exact, atol=1e-5)
