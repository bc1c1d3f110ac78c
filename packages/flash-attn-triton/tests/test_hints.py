"""Wrong calls that other libraries' habits lead to: the error says what to use."""

from __future__ import annotations

import flash_attn_triton as package
import pytest
import torch

pytestmark = pytest.mark.eager

FIXED = [
    ("num_splits", 1, "leave it out"),
    ("pack_gqa", True, "leave it out"),
    ("sm_scale", 0.5, "use softmax_scale"),
    ("block_tables", None, "paged_attn_func of the package prefix-prefill"),
    ("cache_seqlens", None, "seqused_k"),
    ("learnable_sink", None, "use sinks"),
    ("s_aux", None, "use sinks"),
]


@pytest.mark.parametrize(("name", "value", "hint"), FIXED)
@pytest.mark.parametrize("function", ["flash_attn_func", "attention_reference"])
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
        with pytest.raises(TypeError, match=r"causl is no argument here$"):
            call(causl=True)


@pytest.mark.parametrize("function", ["flash_attn_func", "attention_reference"])
def test_a_window_of_none_is_refused_with_a_hint(function):
    q = torch.zeros(1, 3, 2, 8)
    with pytest.raises(TypeError, match=r"two ints, -1 for no limit, got \(None, None\)"):
        getattr(package, function)(q, q, q, window_size=(None, None))


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k", "seqused_k"])
def test_int64_offsets_are_refused_with_a_hint(name):
    q, ends = torch.zeros(3, 2, 8), torch.tensor([0, 3], dtype=torch.int32)
    given = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "seqused_k": ends[1:]}
    given[name] = given[name].long()
    with pytest.raises(TypeError, match=rf"{name} must be torch.int32, .*: use {name}.int\(\)"):
        package.flash_attn_varlen_func(q, q, q, max_seqlen_q=3, max_seqlen_k=3, **given)


@pytest.mark.parametrize("name", ["bias", "sinks", "alibi_slopes", "v_descale", "rng_state"])
def test_the_reference_names_what_is_no_tensor(name):
    q = torch.zeros(1, 3, 2, 8)
    with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor, got float"):
        package.attention_reference(q, q, q, **{name: 1.0})


def test_the_packed_reference_names_what_is_no_tensor():
    q, ends = torch.zeros(3, 2, 8), torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(TypeError, match=r"cu_seqlens_q must be a torch\.Tensor, got list"):
        package.varlen_attention_reference(q, q, q, [0, 3], ends, 3, 3)
