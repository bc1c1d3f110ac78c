"""Other spellings of arguments, and what values on the CPU are checked in every call."""

from __future__ import annotations

import pytest
import torch
from blocksparse_attn import (
    BlockSparseLayout,
    blocksparse_attn_func,
    blocksparse_attn_varlen_func,
    blocksparse_varlen_attention_reference,
    validate_varlen,
)

from .._linked.budget import Maker
from .._linked.tiers import INTERPRETED

pytestmark = pytest.mark.eager


def arguments(device="cpu", dtype=torch.int32, paged=False):
    """Two sequences, of 5 queries and 7 keys, and of 2 and 6."""
    m = Maker(device, torch.float32)
    layout = BlockSparseLayout.local_strided(1, 16, 16, 1, 1, device=device)
    given = {"q": m.randn(7, 4, 16), "layout": layout}
    shape = (4, 4, 2, 16) if paged else (13, 2, 16)
    given |= {name: m.randn(*shape) for name in "kv"}
    if paged:
        table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32, device=device)
        given["block_table"] = table
    for name, ends in (("cu_seqlens_q", (0, 5, 7)), ("cu_seqlens_k", (0, 7, 13))):
        given[name] = torch.tensor(ends, dtype=dtype, device=device)
    return {**given, "max_seqlen_q": 5, "max_seqlen_k": 7}


@pytest.mark.parametrize("paged", [False, True])
def test_offsets_of_64_bits_are_converted(paged, device):
    want = blocksparse_attn_varlen_func(**arguments(device, paged=paged))
    wide = arguments(device, torch.int64, paged)
    for _ in range(2):  # the second call knows the form
        assert torch.equal(blocksparse_attn_varlen_func(**wide), want)
    validate_varlen(**{n: x for n, x in wide.items() if n not in ("v", "layout")})


NAMES = {
    "sm_scale": "use softmax_scale",
    "block_mask": "use layout",
    "cache_seqlens": "use cu_seqlens_k",
    "block_tables": "use block_table",
    "pack_gqa": "leave it out",
    "window_size": "use a layout",
    "nonsense": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_elsewhere_is_told_from_ours(name):
    hint = NAMES[name]
    message = rf"^{name} is no argument here{f': {hint}' if hint else '$'}"
    given = arguments()
    fixed = {name: given[name][None] for name in "qkv"}
    with pytest.raises(TypeError, match=message):
        blocksparse_attn_varlen_func(**given, **{name: 1})
    with pytest.raises(TypeError, match=message):
        blocksparse_attn_func(**fixed, layout=given["layout"], **{name: 1})


# Values. On the CPU the operator looks at them; a GPU's would have to be waited for.

WRONG = {
    "offsets beyond the tokens": (
        {"cu_seqlens_q": [0, 5, 8]},
        r"cu_seqlens_q\[2\] must be from 0 to the number of tokens, 7, got 8",
    ),
    "offsets that decrease": (
        {"cu_seqlens_k": [0, 7, 6]},
        r"cu_seqlens_k\[2\] must be at least cu_seqlens_k\[1\], 7, got 6",
    ),
    "more queries than were told": (
        {"cu_seqlens_q": [0, 1, 7]},
        r"cu_seqlens_q\[2\] must be at most max_seqlen_q, 5, beyond cu_seqlens_q\[1\], 1, got 7",
    ),
    "no such page": (
        {"block_table": [[3, 1], [0, 4]]},
        r"block_table\[1, 1\] must be from 0 to 3, a page, got 4",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values_raise(case):
    changes, message = WRONG[case]
    given = arguments(paged="block_table" in changes)
    wrong = {**given, **{n: torch.tensor(x, dtype=torch.int32) for n, x in changes.items()}}
    for _ in range(2):  # the second call knows the form
        blocksparse_attn_varlen_func(**given)
        for function in (blocksparse_attn_varlen_func, blocksparse_varlen_attention_reference):
            with pytest.raises(ValueError, match=message):
                function(**wrong)


@pytest.mark.skipif(INTERPRETED, reason="tracing sees the operators alone")
def test_a_trace_is_whole_and_its_calls_are_checked():
    compiled = torch.compile(blocksparse_attn_varlen_func, fullgraph=True, backend="eager")
    given = arguments(dtype=torch.int64)
    assert torch.equal(compiled(**given), blocksparse_attn_varlen_func(**given))
    with pytest.raises(ValueError, match=r"cu_seqlens_k\[2\] must be at least"):
        compiled(**{**given, "cu_seqlens_k": torch.tensor([0, 7, 6])})
