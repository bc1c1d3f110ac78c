"""The packed forms: the same function on views, and gradients of the one tensor."""

from __future__ import annotations

import inspect

import flash_attn_triton as package
import pytest
import torch
from flash_attn_triton import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

from ._linked.budget import Maker, offsets

COMMON = [
    "dropout_p",
    "softmax_scale",
    "causal",
    "window_size",
    "softcap",
    "alibi_slopes",
    "deterministic",
    "return_attn_probs",
]
LENGTH_ARGUMENTS = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
SIGNATURES = {
    "flash_attn_func": ["q", "k", "v", *COMMON],
    "flash_attn_qkvpacked_func": ["qkv", *COMMON],
    "flash_attn_kvpacked_func": ["q", "kv", *COMMON],
    "flash_attn_varlen_func": ["q", "k", "v", *LENGTH_ARGUMENTS, *COMMON, "block_table"],
    "flash_attn_varlen_qkvpacked_func": ["qkv", "cu_seqlens", "max_seqlen", *COMMON],
    "flash_attn_varlen_kvpacked_func": ["q", "kv", *LENGTH_ARGUMENTS, *COMMON],
}
LENGTHS = (5, 0, 12)


def results(function, leaves, **options):
    torch.manual_seed(0)
    out, lse = function(*leaves, return_lse=True, **options)
    loss = out.sin().sum() + lse.masked_fill(lse.isinf(), 0.0).cos().sum()
    tensors = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
    return out, lse, torch.autograd.grad(loss, tensors)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_flash_attn_2(name):
    parameters = inspect.signature(getattr(package, name)).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional] == SIGNATURES[name]
    defaults = {p.name: p.default for p in positional if p.name in COMMON}
    assert list(defaults.values()) == [0.0, None, False, (-1, -1), 0.0, None, False, False]
    extras = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    expected = {
        "bias": None,
        "sinks": None,
        "q_descale": None,
        "k_descale": None,
        "v_descale": None,
        "out_dtype": None,
        "out_scale": None,
        "return_lse": False,
        "invariant": False,
        "spans": None,
    }
    if "varlen" in name:
        expected["seqused_k"] = None
    if "packed" not in name:
        # transformers looks for these in the signatures of a module's functions
        expected |= {"s_aux": None, "learnable_sink": None}
    assert extras == expected


def test_reference_takes_the_arguments_of_the_function():
    for ours, theirs in (
        (flash_attn_func, package.attention_reference),
        (flash_attn_varlen_func, package.varlen_attention_reference),
    ):
        want = dict(inspect.signature(ours).parameters)
        # the last changes how sums are taken, and no definition
        for name in ("block_table", "s_aux", "learnable_sink", "invariant"):
            want.pop(name, None)
        got = dict(inspect.signature(theirs).parameters)
        assert got.pop("rng_state").default is None
        assert [(p.name, p.kind, p.default) for p in got.values()] == [
            (p.name, p.kind, p.default) for p in want.values()
        ]


@pytest.mark.eager
@pytest.mark.parametrize("options", [{}, {"causal": True, "dropout_p": 0.3}], ids=str)
def test_qkvpacked(options, device):
    qkv = Maker(device, torch.float32).randn(2, 9, 3, 4, 16).requires_grad_()
    out, lse, (grad,) = results(flash_attn_qkvpacked_func, [qkv], **options)
    parts = [t.detach().contiguous().requires_grad_() for t in qkv.unbind(2)]
    want_out, want_lse, grads = results(flash_attn_func, parts, **options)
    assert torch.equal(out, want_out)
    assert torch.equal(lse, want_lse)
    assert torch.equal(grad, torch.stack(grads, dim=2))


@pytest.mark.eager
def test_kvpacked(device):
    m = Maker(device, torch.float32)
    q, kv = m.randn(2, 5, 4, 16).requires_grad_(), m.randn(2, 9, 2, 2, 16).requires_grad_()
    out, lse, (dq, dkv) = results(flash_attn_kvpacked_func, [q, kv], window_size=(3, 1))
    parts = [t.detach().contiguous().requires_grad_() for t in (q, *kv.unbind(2))]
    want_out, want_lse, grads = results(flash_attn_func, parts, window_size=(3, 1))
    assert torch.equal(out, want_out)
    assert torch.equal(lse, want_lse)
    assert torch.equal(dq, grads[0])
    assert torch.equal(dkv, torch.stack(grads[1:], dim=2))


@pytest.mark.eager
def test_varlen_qkvpacked(device):
    qkv = Maker(device, torch.float32).randn(19, 3, 4, 16).requires_grad_()
    cu_seqlens = offsets(LENGTHS, device)
    used = torch.tensor([4, 0, 12], dtype=torch.int32, device=device)
    out, lse, (grad,) = results(
        flash_attn_varlen_qkvpacked_func, [qkv, cu_seqlens, 12], causal=True, seqused_k=used
    )
    parts = [t.detach().contiguous().requires_grad_() for t in qkv.unbind(1)]
    want_out, want_lse, grads = results(
        flash_attn_varlen_func,
        [*parts, cu_seqlens, cu_seqlens, 12, 12],
        causal=True,
        seqused_k=used,
    )
    assert torch.equal(out, want_out)
    assert torch.equal(lse, want_lse)
    assert torch.equal(grad, torch.stack(grads, dim=1))


@pytest.mark.eager
def test_varlen_kvpacked(device):
    m = Maker(device, torch.float32)
    q, kv = m.randn(19, 4, 16).requires_grad_(), m.randn(21, 2, 2, 16).requires_grad_()
    lengths = [offsets(LENGTHS, device), offsets((7, 3, 11), device), 12, 11]
    out, lse, (dq, dkv) = results(flash_attn_varlen_kvpacked_func, [q, kv, *lengths], softcap=2.0)
    parts = [t.detach().contiguous().requires_grad_() for t in (q, *kv.unbind(1))]
    want_out, want_lse, grads = results(flash_attn_varlen_func, [*parts, *lengths], softcap=2.0)
    assert torch.equal(out, want_out)
    assert torch.equal(lse, want_lse)
    assert torch.equal(dq, grads[0])
    assert torch.equal(dkv, torch.stack(grads[1:], dim=1))


@pytest.mark.eager
def test_parts_are_views(device, monkeypatch):
    seen = []

    def record(q, k, v, *_args, **_kwargs):
        seen.extend((q, k, v))

    monkeypatch.setattr("flash_attn_triton.packed.flash_attn_func", record)
    qkv = Maker(device, torch.float16).randn(2, 9, 3, 4, 16)
    flash_attn_qkvpacked_func(qkv)
    assert all(x._base is qkv for x in seen)


@pytest.mark.parametrize(
    ("function", "arguments", "error", "message"),
    [
        (flash_attn_qkvpacked_func, [None], TypeError, "qkv must be a torch.Tensor, got NoneType"),
        (
            flash_attn_qkvpacked_func,
            [torch.zeros(2, 9, 4, 16)],
            ValueError,
            "qkv must be [batch, seqlen, 3, heads, head_dim], got [2, 9, 4, 16]",
        ),
        (
            flash_attn_qkvpacked_func,
            [torch.zeros(2, 9, 2, 4, 16)],
            ValueError,
            "qkv must be [batch, seqlen, 3, heads, head_dim], got [2, 9, 2, 4, 16]",
        ),
        (
            flash_attn_kvpacked_func,
            [torch.zeros(2, 9, 4, 16), torch.zeros(2, 9, 3, 4, 16)],
            ValueError,
            "kv must be [batch, seqlen_k, 2, heads_k, head_dim], got [2, 9, 3, 4, 16]",
        ),
        (
            flash_attn_varlen_qkvpacked_func,
            [torch.zeros(9, 3, 16), None, 9],
            ValueError,
            "qkv must be [tokens, 3, heads, head_dim], got [9, 3, 16]",
        ),
        (
            flash_attn_varlen_kvpacked_func,
            [torch.zeros(9, 4, 16), torch.zeros(9, 4, 16), None, None, 9, 9],
            ValueError,
            "kv must be [tokens_k, 2, heads_k, head_dim], got [9, 4, 16]",
        ),
    ],
    ids=lambda x: None,
)
def test_message(function, arguments, error, message):
    with pytest.raises(error) as caught:
        function(*arguments)
    assert str(caught.value) == message
