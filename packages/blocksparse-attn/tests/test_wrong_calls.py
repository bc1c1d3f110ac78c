"""One argument of a right call is wrong: the call works all the same, or names an argument."""

from __future__ import annotations

import blocksparse_attn as package
import pytest
import torch
from blocksparse_attn import BlockSparseLayout

from ._linked.wrong_calls import arguments_of, check_wrong_calls

pytestmark = pytest.mark.eager

X4, X3 = torch.randn(2, 4, 2, 16), torch.randn(9, 2, 16)
STARTS = torch.tensor([0, 4, 9], dtype=torch.int32)
LAYOUT = BlockSparseLayout.from_dense(torch.ones(2, 2, dtype=torch.bool), 16)
LISTS = LAYOUT.crow.expand(2, -1), LAYOUT.col.expand(2, -1)
OFFSETS = {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS}
CALLS = {
    "blocksparse_attn_func": {"q": X4, "k": X4, "v": X4, "layout": LAYOUT},
    "blocksparse_attn_varlen_func": {
        "q": X3,
        "k": X3,
        "v": X3,
        **OFFSETS,
        "max_seqlen_q": 5,
        "max_seqlen_k": 5,
        "layout": LAYOUT,
    },
    "blocksparse_flash_attn_varlen_fwd": {
        "q": X3,
        "k": X3,
        "v": X3,
        **OFFSETS,
        "sm_scale": None,
        "sparse_layout": LISTS,
        "block_size": 16,
        "max_seqlen": 9,
    },
}
CALLS |= {
    "blocksparse_attention_reference": CALLS["blocksparse_attn_func"],
    "blocksparse_varlen_attention_reference": CALLS["blocksparse_attn_varlen_func"],
    "validate_varlen": {"q": X3, "k": X3, **OFFSETS, "max_seqlen_q": 5, "max_seqlen_k": 5},
}
ARGUMENTS = [(name, x) for name in CALLS for x in arguments_of(getattr(package, name))]


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_a_wrong_argument(name, argument):
    check_wrong_calls(getattr(package, name), CALLS[name], argument)
