"""Kernels that were compiled before, on a GPU: without a compiler, and bit for bit."""

from __future__ import annotations

import flash_attn_triton
import pytest
import torch

from ._linked.bare import compile_kernels, run_bare


@pytest.mark.device
def test_both_passes_need_no_compiler(device, tmp_path):
    pytest.importorskip("cuda.bindings", reason="launches of shipped kernels go through it")

    def draw(*shape, dtype=torch.bfloat16):
        return torch.randn(shape, device=device).to(dtype)

    starts = torch.tensor([0, 300, 700], dtype=torch.int32, device=device)
    lengths = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    lengths |= {"max_seqlen_q": 400, "max_seqlen_k": 400}
    ordered = {"causal": True, "deterministic": True}
    calls = [
        ("flash_attn_func", {x: draw(2, 300, 4, 128) for x in "qkv"} | ordered, True),
        ("flash_attn_func", {x: draw(2, 90, 2, 40, dtype=torch.float32) for x in "qkv"}, True),
        ("flash_attn_varlen_func", {x: draw(700, 4, 64) for x in "qkv"} | lengths | ordered, True),
    ]
    compile_kernels("flash_attn_triton", calls, tmp_path / "kernels")
    for _ in range(2):  # the first run reads cold files
        results, seconds = run_bare("flash_attn_triton", calls, tmp_path / "kernels", tmp_path)
    assert seconds < 2
    for got, (name, arguments, _) in zip(results, calls, strict=True):
        leaves = [arguments[x].requires_grad_() for x in "qkv"]
        out = getattr(flash_attn_triton, name)(**arguments)
        want = [out, *torch.autograd.grad(out, leaves, out.detach())]
        assert all(torch.equal(x, y.cpu()) for x, y in zip(got, want, strict=True))
