"""``torch.nn.attention.varlen`` with both packages registered, in either order."""

import pytest

CODE = """
import flash_attn_triton.integrations.torch as packed
import prefix_prefill.integrations.torch as paged
import torch
from flash_attn_triton import flash_attn_varlen_func
from torch.nn.attention.varlen import varlen_attn

held = [module._Overrides("CPU") for module in (ORDER)]
q, k, v = (torch.randn(9, 2, 16) for _ in range(3))
ends = torch.tensor([0, 4, 9], dtype=torch.int32)
want = flash_attn_varlen_func(q, k, v, ends, ends, 5, 5, causal=True)
assert torch.equal(varlen_attn(q, k, v, ends, ends, 5, 5, window_size=(-1, 0)), want)

pages = torch.zeros(2, 2, 16, 2, 16)  # [keys and values, pages, page size, heads, head_dim]
for x, dense in zip(pages, (k, v)):
    x[1, :4], x[0, :5] = dense[:4], dense[4:]
table, used = torch.tensor([[1], [0]], dtype=torch.int32), torch.tensor([4, 5], dtype=torch.int32)
got = varlen_attn(
    q, *pages, ends, None, 5, 16, window_size=(-1, 0), seqused_k=used, block_table=table
)
torch.testing.assert_close(got, want)
"""


@pytest.mark.parametrize("order", ["packed, paged", "paged, packed"])
def test_each_serves_its_calls(python, order):
    python(CODE.replace("ORDER", order))
