"""``ATTN_VALIDATE=1`` checks values in the operators' CUDA kernels, which run on the CPU here."""

import os

import pytest

BEGIN = """
import torch

# CPU tensors run what is registered for a GPU; its kernels would fail, so a check is what raises
registered, ran = torch.library.impl, []

def impl(name, device, function):
    def run(*arguments):
        ran.append(name)
        return function(*arguments)
    if device == "cuda":
        registered(name, "cpu", run)

torch.library.impl = impl

def ints(*values):
    return torch.tensor(values, dtype=torch.int32)

def refused(words, call):
    ran.clear()
    try:
        call()
    except ValueError as error:
        assert words in str(error), str(error)
        assert ran, "the check of a CPU kernel raised"
        return
    raise AssertionError(f"not refused: {words}")

x = torch.zeros(8, 4, 16)
"""
CALLS = {
    "flash-attn-triton": """
from flash_attn_triton import flash_attn_varlen_func
refused("cu_seqlens_q[1]", lambda: flash_attn_varlen_func(x, x, x, ints(0, 9), ints(0, 8), 8, 8))
from flash_attn_triton import flash_attn_tree_func
refused("parents[0]", lambda: flash_attn_tree_func(x, x, x, ints(0, 8), ints(3), 8))
""",
    "prefix-prefill": """
from prefix_prefill import paged_attn_func
cache = torch.zeros(2, 16, 4, 16)
table = torch.full((1, 1), 7, dtype=torch.int32)
call = lambda: paged_attn_func(x, cache, cache.clone(), table, ints(0, 8), ints(8), 8, 8)
refused("block_table[0, 0]", call)
from prefix_prefill import reshape_and_cache
cache = torch.zeros(2, 16, 4, 16)
slots = torch.full((8,), 3)
refused("slot_mapping[1]", lambda: reshape_and_cache(x, x, cache, cache.clone(), slots))
from prefix_prefill import flash_attn_with_kvcache
cache = torch.zeros(1, 16, 4, 16)
call = lambda: flash_attn_with_kvcache(x[None], cache, cache.clone(), cache_seqlens=ints(99))
refused("cache_seqlens[0]", call)
from prefix_prefill import mla_attn_func
q, cache, table = torch.zeros(8, 2, 24), torch.zeros(2, 16, 24), ints(9)[None]
call = lambda: mla_attn_func(q, cache, table, ints(0, 8), ints(8), 8, 8, head_dim_v=16)
refused("block_table[0, 0]", call)
""",
    "blocksparse-attn": """
from blocksparse_attn import BlockSparseLayout, blocksparse_attn_varlen_func
layout = BlockSparseLayout.from_dense(torch.ones(1, 1, dtype=torch.bool), 16)
call = lambda: blocksparse_attn_varlen_func(x, x, x, ints(0, 9), ints(0, 8), 8, 8, layout)
refused("cu_seqlens_q[1]", call)
""",
    "lightning-attn": """
from lightning_attn import lightning_attn_varlen_func
call = lambda: lightning_attn_varlen_func(x, x, x, torch.zeros(4), ints(0, 9))
refused("cu_seqlens[1]", call)
from lightning_attn import lightning_attn_decode
q, cache = x[:, None], torch.zeros(8, 4, 16, 16)
slots = torch.full((8,), 3)
refused("slot_idx[1]", lambda: lightning_attn_decode(q, q, q, cache, torch.zeros(4), slots))
""",
}


@pytest.mark.parametrize("name", CALLS)
def test_cuda_kernels_check_values(name, python):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    python(BEGIN + CALLS[name], env=environment | {"ATTN_VALIDATE": "1"})
