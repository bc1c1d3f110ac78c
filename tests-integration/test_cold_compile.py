"""The first call of a process may be a compiled one: nothing has been asked or planned before."""

import os

import pytest

# for each package: tensors of sizes that torch.compile takes for symbols, and a call with others
CALLS = {
    "flash-attn-triton": """
from flash_attn_triton import flash_attn_func

tensors = [torch.randn(3, 20, 4, 16, requires_grad=True) for _ in "qkv"]
bias, slopes, sinks = torch.randn(3, 1, 1, 20), torch.rand(4), torch.randn(4)

def call(q, k, v):
    return flash_attn_func(q, k, v, causal=True, bias=bias, alibi_slopes=slopes, sinks=sinks)
""",
    "blocksparse-attn": """
from blocksparse_attn import BlockSparseLayout, blocksparse_attn_func

tensors = [torch.randn(3, 40, 4, 16, requires_grad=True) for _ in "qkv"]
layout = BlockSparseLayout.local_strided(4, 64, 16, 1, 2)

def call(q, k, v):
    return blocksparse_attn_func(q, k, v, layout)
""",
    "lightning-attn": """
from lightning_attn import lightning_attn_func

tensors = [torch.randn(2, 40, 4, 16, requires_grad=True) for _ in "qkv"]
decay = torch.rand(4)

def call(q, k, v):
    return lightning_attn_func(q, k, v, decay)
""",
    "prefix-prefill": """
from prefix_prefill import paged_attn_func

tensors = [
    torch.randn(7, 4, 16), torch.randn(6, 16, 2, 16), torch.randn(6, 16, 2, 16),
    *(torch.tensor(x, dtype=torch.int32) for x in ([[0, 1], [3, 4]], [0, 3, 7], [20, 9])),
]

def call(*tensors):
    return paged_attn_func(*tensors, 4, 20)
""",
}
CHECK = """
compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
torch.testing.assert_close(compiled(*tensors), call(*tensors))
"""


@pytest.mark.parametrize("interpret", ["0", "1"], ids=["eager", "kernels"])
@pytest.mark.parametrize("kernel", CALLS)
def test_first_call(kernel, interpret, python):
    code = f"import torch\n{CALLS[kernel]}{CHECK}"
    python(code, env=os.environ | {"TRITON_INTERPRET": interpret})
