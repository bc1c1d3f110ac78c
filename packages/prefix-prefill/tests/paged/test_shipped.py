"""Kernels that were compiled before, on a GPU: decode and chunks without a compiler."""

from __future__ import annotations

import pytest
import torch
from prefix_prefill import paged_attn_func

from .._linked.bare import compile_kernels, run_bare


@pytest.mark.device
def test_decode_and_chunks_need_no_compiler(device, tmp_path):
    pytest.importorskip("cuda.bindings", reason="launches of shipped kernels go through it")
    caches = {f"{x}_cache": torch.randn(200, 16, 2, 128, device=device) for x in "kv"}
    caches = {name: x.bfloat16() for name, x in caches.items()}

    def call(batch, queries, keys):
        ends = torch.arange(batch + 1, dtype=torch.int32, device=device) * queries
        pages = torch.randperm(200, device=device)[: batch * keys // 16].int()
        arguments = {
            "q": torch.randn(batch * queries, 16, 128, device=device).bfloat16(),
            **caches,
            "block_table": pages.view(batch, -1),
            "cu_seqlens_q": ends,
            "seqlens_k": torch.full((batch,), keys - 3, dtype=torch.int32, device=device),
            "max_seqlen_q": queries,
            "max_seqlen_k": keys,
        }
        return "paged_attn_func", arguments, False

    calls = [call(4, 1, 512), call(1, 1, 3200), call(2, 300, 512)]
    compile_kernels("prefix_prefill", calls, tmp_path / "kernels")
    for _ in range(2):  # the first run reads cold files
        results, seconds = run_bare("prefix_prefill", calls, tmp_path / "kernels", tmp_path)
    assert seconds < 2
    for (got,), (_, arguments, _) in zip(results, calls, strict=True):
        assert torch.equal(got, paged_attn_func(**arguments).cpu())
