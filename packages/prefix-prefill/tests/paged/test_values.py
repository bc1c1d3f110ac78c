"""Other spellings of arguments, and what values on the CPU are checked in every call."""

from __future__ import annotations

import pytest
import torch
from prefix_prefill import (
    context_attention_fwd,
    mla_attention_reference,
    paged_attention_reference,
    paged_attn_func,
    reshape_and_cache,
    shared_prefix_attn_func,
    validate_paged,
)

from .._linked.budget import Maker
from .._linked.tiers import INTERPRETED

pytestmark = pytest.mark.eager


def arguments(device="cpu", dtype=torch.int32):
    """Two sequences: 5 queries of 9 keys, and 2 of 8, in pages of 8."""
    m = Maker(device, torch.float32)

    def ints(*values):
        return torch.tensor(values, dtype=dtype, device=device)

    caches = {f"{x}_cache": m.randn(6, 8, 2, 16) for x in "kv"}
    table = torch.tensor([[4, 1, 0], [2, 5, 3]], dtype=torch.int32, device=device)
    lengths = {"cu_seqlens_q": ints(0, 5, 7), "seqlens_k": ints(9, 8)}
    bounds = {"max_seqlen_q": 5, "max_seqlen_k": 9}
    return {"q": m.randn(7, 4, 16), **caches, "block_table": table, **lengths, **bounds}


def cascade(given, **options):
    pages = torch.tensor([0, 3], device=given["q"].device)
    return shared_prefix_attn_func(**given, shared_pages=pages, shared_len=12, **options)


def dropin(given, rows=7, most=5, **options):
    out = torch.full_like(given["q"], -1.0)
    caches, starts = (given["k_cache"], given["v_cache"]), given["cu_seqlens_q"]
    context_attention_fwd(
        given["q"],
        None,
        None,
        out,
        "auto",
        *caches,
        given["block_table"],
        starts,
        given["seqlens_k"],
        9,
        most,
        None,
        None,
        **options,
    )
    return out[:rows] if rows < 7 else out


@pytest.mark.parametrize("window", [(None, None), (3, None), (None, 0)])
def test_none_in_a_window_is_no_limit(window, device):
    given = {**arguments(device), "causal": False}
    same = tuple(-1 if side is None else side for side in window)
    got = paged_attn_func(**given, window_size=window)
    assert torch.equal(got, paged_attn_func(**given, window_size=same))
    assert torch.equal(got, paged_attn_func(**given)) == (window == (None, None))


@pytest.mark.parametrize(
    "call", [lambda given: paged_attn_func(**given), cascade, dropin], ids=["paged", "shared", "in"]
)
def test_lengths_of_64_bits_are_converted(call, device):
    want = call(arguments(device))
    for _ in range(2):  # the second call knows the form
        assert torch.equal(call(arguments(device, torch.int64)), want)


@pytest.mark.parametrize("wrong", [2**32 + 5, -(2**32) + 5])
def test_what_32_bits_do_not_hold_is_out_of_range(wrong):
    given = arguments(dtype=torch.int64)
    given["cu_seqlens_q"][1] = wrong  # its lower half is 5, which is right
    with pytest.raises(ValueError, match=r"cu_seqlens_q\[1\] must be from 0 to"):
        paged_attn_func(**given)


def test_validation_takes_64_bits():
    validate_paged(**arguments(dtype=torch.int64))


NAMES = {
    "sm_scale": "use softmax_scale",
    "cache_seqlens": "use seqlens_k",
    "block_tables": "use block_table",
    "page_table": "use block_table",
    "pack_gqa": "leave it out",
    "seqused_k": "use seqlens_k",
    "sliding_window": r"use window_size: a window of W tokens is \(W - 1, 0\)",
    "nonsense": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_elsewhere_is_told_from_ours(name):
    hint = NAMES[name]
    message = rf"^{name} is no argument here{f': {hint}' if hint else '$'}"
    for call in (lambda given, **more: paged_attn_func(**given, **more), cascade):
        with pytest.raises(TypeError, match=message):
            call(arguments(), **{name: 1})


# Values. On the CPU the operators look at them; a GPU's would have to be waited for.


WRONG = {
    "offsets that decrease": (
        {"cu_seqlens_q": [0, 8, 7]},
        r"cu_seqlens_q\[1\] must be from 0 to the number of tokens, 7, got 8",
    ),
    "more queries than announced": (
        {"cu_seqlens_q": [0, 0, 7]},
        r"cu_seqlens_q\[2\] must be at most max_seqlen_q, 5, beyond cu_seqlens_q\[1\], 0, got 7",
    ),
    "a length below 0": (
        {"seqlens_k": [-1, 8]},
        r"seqlens_k\[0\] must be from 0 to max_seqlen_k, 9, got -1",
    ),
    "more keys than announced": (
        {"seqlens_k": [9, 10]},
        r"seqlens_k\[1\] must be from 0 to max_seqlen_k, 9, got 10",
    ),
    "no page for a key": (
        {"block_table": [[4], [2]]},
        r"seqlens_k\[0\] must be at most what block_table has room for, 8, got 9 cached keys",
    ),
    "no such page": (
        {"block_table": [[4, 6, 0], [2, 5, 3]]},
        r"block_table\[0, 1\] must be from 0 to num_blocks - 1, 5, got 6",
    ),
    "a page below 0": ({"block_table": [[4, 1, 0], [-1, 5, 3]]}, r"block_table\[1, 0\] must be"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values_raise(case):
    (changes, message) = WRONG[case]
    wrong = {n: torch.tensor(x, dtype=torch.int32) for n, x in changes.items()}
    names = {"block_table": "b_loc", "cu_seqlens_q": "b_start_loc", "seqlens_k": "b_seq_len"}
    names |= {"max_seqlen_q": "max_input_len", "to max_seqlen_k, 9,": "up,"}
    for function in (paged_attn_func, paged_attention_reference):
        with pytest.raises(ValueError, match=message):
            function(**{**arguments(), **wrong})
    given = {**arguments(), **wrong}
    latent, _ = given.pop("k_cache")[:, :, 0], given.pop("v_cache")
    with pytest.raises(ValueError, match=message):
        mla_attention_reference(kv_cache=latent, head_dim_v=8, **given)
    if case == "more keys than announced":
        dropin({**arguments(), **wrong})  # whose number is a hint
        return
    for ours, theirs in names.items():
        message = message.replace(ours, theirs)
    with pytest.raises(ValueError, match=message):
        dropin({**arguments(), **wrong})


def test_entries_that_no_query_sees_may_be_anything():
    given = {**arguments(), "window_size": (0, -1), "max_seqlen_k": 20}
    given["seqlens_k"] = torch.tensor([20, 8], dtype=torch.int32)
    want = paged_attn_func(**given)
    table = given["block_table"].clone()
    # the first page of the first sequence is ahead of the window, and the second has one page
    table[0, 0] = table[1, 1] = table[1, 2] = 99
    assert torch.equal(paged_attn_func(**{**given, "block_table": table}), want)


def test_the_bound_of_the_drop_ins_is_held_to_what_it_says():
    given = arguments()
    assert torch.equal(dropin(given, rows=5), dropin(given)[:5])
    with pytest.raises(
        ValueError, match=r"b_start_loc\[1\] must be at most max_input_len, 4, beyo"
    ):
        dropin(given, most=4)


def test_rows_of_padding_are_left_alone():
    """With the true bound: padding is no sequence, however much of it there is."""
    given = arguments()
    want = dropin(given)
    given["q"] = torch.cat([given["q"], torch.full((20, 4, 16), torch.nan)])
    got = dropin(given)
    assert torch.equal(got[:7], want)
    assert (got[7:] == -1.0).all()


@pytest.mark.parametrize("slots", [1, 2])
def test_an_unseen_page_s_entry_may_be_anything_behind_the_last_cached_key(slots, device):
    """A window over new keys alone, whose first is in the middle of a page."""
    m = Maker(device, torch.float32)
    cache, k = m.randn(4, 4, 1, 8), m.randn(slots, 1, 8)
    table = torch.tensor([[99, 99]], dtype=torch.int32, device=device)
    ints = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, slots], [6 + slots])]
    given = [m.randn(slots, 1, 8), cache, cache, table, *ints, slots, 8]
    validate_paged(*given, k=k, v=k, window_size=(0, 0))
    out = paged_attn_func(*given, k=k, v=k, window_size=(0, 0))
    torch.testing.assert_close(out, k)


def test_sequences_that_are_skipped_may_hold_anything():
    given = arguments()
    given["cu_seqlens_q"] = torch.tensor([0, 5, 6], dtype=torch.int32)
    want = dropin(given, skip_decode=True)
    given["block_table"][1] = 99
    assert torch.equal(dropin(given, skip_decode=True), want)
    given["seqlens_k"][1] = 10**6
    assert torch.equal(dropin(given, skip_decode=True), want)
    with pytest.raises(ValueError, match=r"b_seq_len\[1\]"):
        dropin(given)


@pytest.mark.parametrize("extra", ["window", "alibi", "none"])
def test_shared_pages_are_checked(extra):
    given = arguments()
    options = {
        "window": {"window_size": (30, 0)},
        "alibi": {"alibi_slopes": torch.ones(4)},
        "none": {},
    }[extra]
    bad = {"shared_pages": torch.tensor([0, 6]), "shared_len": 12}
    with pytest.raises(ValueError, match=r"shared_pages\[1\] must be from 0 to num_blocks - 1, 5"):
        shared_prefix_attn_func(**given, **bad, **options)
    # the first of them lies before every window
    bad["shared_pages"] = torch.tensor([99, 0])
    near = {"window_size": (7, 0)}
    want = cascade_of(given, [3, 0], **near)
    assert torch.equal(shared_prefix_attn_func(**given, **bad, **near), want)


@pytest.mark.parametrize("causal", [True, False])
def test_fewer_own_keys_than_queries_beside_a_shared_prefix(causal):
    """Such queries stand among the shared keys, of which they would see all."""
    given = arguments()
    given["seqlens_k"][0] = 4
    with pytest.raises(ValueError, match=r"seqlens_k\[0\] must be from 5 to max_seqlen_k, 9"):
        cascade(given, causal=causal)
    assert paged_attn_func(**given, causal=causal).isfinite().all()
    given["seqlens_k"][0] = 5
    assert cascade(given, causal=causal).isfinite().all()


def cascade_of(given, pages, **options):
    pages = torch.tensor(pages)
    return shared_prefix_attn_func(**given, shared_pages=pages, shared_len=12, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_torch_s_default_dtype_changes_nothing(dtype, device):
    want = cascade(arguments(device), return_lse=True)
    before = torch.get_default_dtype()
    given = arguments(device)
    torch.set_default_dtype(dtype)
    try:
        got = cascade(given, return_lse=True)
        paged = paged_attn_func(**given, return_lse=True)
    finally:
        torch.set_default_dtype(before)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert [x.dtype for x in paged] == [torch.float32] * 2


def test_slots_beyond_the_cache_raise():
    given = arguments()
    new = torch.zeros(2, 2, 16)
    with pytest.raises(ValueError, match=r"slot_mapping\[1\] must be below .* slots, 48, got 48"):
        reshape_and_cache(new, new, given["k_cache"], given["v_cache"], torch.tensor([-1, 48]))


@pytest.mark.skipif(INTERPRETED, reason="tracing sees the operators alone")
def test_a_trace_is_whole_and_its_calls_are_checked():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(given):
        return paged_attn_func(**given)

    given = arguments(dtype=torch.int64)
    assert torch.equal(compiled(given), paged_attn_func(**given))
    with pytest.raises(ValueError, match=r"seqlens_k\[1\] must be from 0 to max_seqlen_k, 9"):
        compiled({**given, "seqlens_k": torch.tensor([9, -8])})
