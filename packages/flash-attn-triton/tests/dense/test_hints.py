"""Wrong calls that other libraries' habits lead to: the error says what to use."""

from __future__ import annotations

import flash_attn_triton as package
import pytest
import torch

from .._linked.tiers import INTERPRETED

pytestmark = pytest.mark.eager

FIXED = [
    ("num_splits", 1, "leave it out"),
    ("pack_gqa", True, "leave it out"),
    ("sm_scale", 0.5, "use softmax_scale"),
    ("block_tables", None, "paged_attn_func of the package prefix-prefill"),
    ("cache_seqlens", None, "seqused_k"),
]
SINKS = [("learnable_sink", None, "use sinks"), ("s_aux", None, "use sinks")]


@pytest.mark.parametrize(
    ("function", "name", "value", "hint"),
    [
        *(("flash_attn_func", *case) for case in FIXED),
        *(("attention_reference", *case) for case in FIXED + SINKS),
    ],
)
def test_an_argument_of_another_library_is_refused_with_a_hint(function, name, value, hint):
    q = torch.zeros(1, 3, 2, 8)
    with pytest.raises(TypeError, match=f"{name} is no argument here: .*{hint}"):
        getattr(package, function)(q, q, q, **{name: value})


def test_packed_forms_refuse_likewise():
    x, ends = torch.zeros(3, 3, 2, 8), torch.tensor([0, 3], dtype=torch.int32)
    q, kv = x[:, 0], x[:, :2]
    for call in (
        lambda **o: package.flash_attn_varlen_func(q, q, q, ends, ends, 3, 3, **o),
        lambda **o: package.varlen_attention_reference(q, q, q, ends, ends, 3, 3, **o),
        lambda **o: package.flash_attn_varlen_qkvpacked_func(x, ends, 3, **o),
        lambda **o: package.flash_attn_varlen_kvpacked_func(q, kv, ends, ends, 3, 3, **o),
        lambda **o: package.flash_attn_qkvpacked_func(x[None], **o),
        lambda **o: package.flash_attn_kvpacked_func(q[None], kv[None], **o),
    ):
        call()
        with pytest.raises(TypeError, match="sm_scale is no argument here: use softmax_scale"):
            call(sm_scale=0.5)
        with pytest.raises(TypeError, match=r"causl is no argument here: did you mean causal\?$"):
            call(causl=True)
        with pytest.raises(TypeError, match=r"nothing_like_it is no argument here$"):
            call(nothing_like_it=True)


@pytest.mark.parametrize("function", ["flash_attn_func", "attention_reference"])
@pytest.mark.parametrize("window", [(None, None), (3, None), (None, 0)])
def test_none_in_a_window_is_no_limit(function, window):
    q = torch.randn(1, 20, 2, 8)
    attend = getattr(package, function)
    same = tuple(-1 if side is None else side for side in window)
    assert torch.equal(attend(q, q, q, window_size=window), attend(q, q, q, window_size=same))
    if window != (None, None):
        assert not torch.equal(attend(q, q, q, window_size=window), attend(q, q, q))


@pytest.mark.parametrize("name", ["s_aux", "learnable_sink"])
def test_sinks_have_other_names(name):
    q, sinks = torch.randn(1, 7, 2, 8), torch.randn(2)
    starts = torch.tensor([0, 7], dtype=torch.int32)
    want = package.flash_attn_func(q, q, q, sinks=sinks)
    assert not torch.equal(want, package.flash_attn_func(q, q, q))
    assert torch.equal(package.flash_attn_func(q, q, q, **{name: sinks}), want)
    args = *q.expand(3, -1, -1, -1), starts, starts, 7, 7
    assert torch.equal(package.flash_attn_varlen_func(*args, **{name: sinks}), want[0])
    with pytest.raises(ValueError, match=f"sinks and {name} are names of one argument"):
        package.flash_attn_func(q, q, q, sinks=sinks, **{name: sinks + 1})


def packed(dtype=torch.int32):
    q = torch.randn(20, 2, 8, generator=torch.Generator().manual_seed(0))
    starts = {f"cu_seqlens_{x}": torch.tensor([0, 7, 20], dtype=dtype) for x in "qk"}
    used = torch.tensor([5, 13], dtype=dtype)
    return {
        "q": q,
        "k": q,
        "v": q,
        "max_seqlen_q": 13,
        "max_seqlen_k": 13,
        "seqused_k": used,
        **starts,
    }


def test_offsets_of_64_bits_are_converted():
    want = package.flash_attn_varlen_func(**packed())
    for _ in range(2):  # the second call knows the form
        assert torch.equal(package.flash_attn_varlen_func(**packed(torch.int64)), want)
    package.validate_varlen(**{n: x for n, x in packed(torch.int64).items() if n != "v"})


def test_a_tree_takes_64_bits():
    x = packed()
    q, starts, parents = x["q"], x["cu_seqlens_q"], torch.tensor([-1, 0], dtype=torch.int32)
    want = package.flash_attn_tree_func(q, q, q, starts, parents, 13)
    got = package.flash_attn_tree_func(q, q, q, starts.long(), parents.long(), 13)
    assert torch.equal(got, want)


@pytest.mark.skipif(INTERPRETED, reason="tracing sees the operators alone")
def test_a_trace_is_whole_and_its_calls_are_checked():
    compiled = torch.compile(package.flash_attn_varlen_func, fullgraph=True, backend="aot_eager")
    want = package.flash_attn_varlen_func(**packed())
    assert torch.equal(compiled(**packed(torch.int64)), want)
    with pytest.raises(ValueError, match=r"cu_seqlens_q\[1\] must be from 0 to"):
        compiled(**{**packed(torch.int64), "cu_seqlens_q": torch.tensor([0, 21, 20])})


@pytest.mark.parametrize("name", ["bias", "sinks", "alibi_slopes", "v_descale", "rng_state"])
def test_the_reference_names_what_is_no_tensor(name):
    q = torch.zeros(1, 3, 2, 8)
    with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor, got float"):
        package.attention_reference(q, q, q, **{name: 1.0})


def test_the_packed_reference_names_what_is_no_tensor():
    q, ends = torch.zeros(3, 2, 8), torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(TypeError, match=r"cu_seqlens_q must be a torch\.Tensor, got list"):
        package.varlen_attention_reference(q, q, q, [0, 3], ends, 3, 3)
