"""Which of PyTorch's calls come to our kernels, and what registering them changes and leaves."""

from __future__ import annotations

from collections.abc import Iterator

import flash_attn_triton.integrations.torch as integration
import pytest
import torch
from flash_attn_triton import attention_reference, varlen_attention_reference
from flash_attn_triton._dense import ops
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from .._linked.budget import Maker, offsets
from ._torch_integration import compare, heads_first, overrides

__all__ = ["overrides"]  # a fixture


@pytest.fixture
def registered() -> Iterator[integration.Handle]:
    with integration.register() as handle:
        yield handle
    assert integration.current_implementation() is None


@pytest.fixture
def selection(monkeypatch):
    """Which backend ``varlen_attn`` chooses where cuDNN would take every call."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    if not hasattr(varlen, "_select_backend"):
        pytest.skip("this torch does not choose among backends in varlen_attn")
    monkeypatch.setattr(varlen, "_cudnn_rejection_reasons", lambda *_: [])

    def choose(block_table: Tensor | None = None) -> SDPBackend:
        q, ends = torch.zeros(4, 2, 8), offsets((4,), "cpu")
        number = varlen._select_backend(q, q, q, ends, ends, 4, [-1, 0], None, block_table, None)
        return next(x for x in SDPBackend.__members__.values() if x.value == number)

    return choose


@pytest.mark.eager
def test_varlen_attn_comes_here_before_it_goes_to_cudnn(device, overrides, selection):
    cudnn, flash = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
    assert selection() == flash
    assert selection(torch.zeros(1, 1, dtype=torch.int32)) == cudnn
    with sdpa_kernel(cudnn):
        assert selection() == cudnn
    with sdpa_kernel([cudnn, flash], set_priority=True):
        assert selection() == cudnn
    with sdpa_kernel([flash, cudnn], set_priority=True):
        assert selection() == flash
    # traced, too
    q, ends = torch.zeros(4, 2, 8, device=device), offsets((4,), device)
    attend = torch.compile(varlen_attn, backend="eager", fullgraph=True)
    assert attend(q, q, q, ends, ends, 4, 4, window_size=(-1, 0)).shape == q.shape
    overrides.remove()
    assert selection() == cudnn


@pytest.mark.eager
def test_varlen_attn_of_torch_2_14_comes_here_before_it_goes_to_cudnn(device, monkeypatch):
    varlen = pytest.importorskip("torch.nn.attention.varlen")

    def can_use_cudnn(
        query,
        key,
        value,
        max_q,
        window_size,
        enable_gqa=False,
        seqused_k=None,
        block_table=None,
        num_splits=None,
    ):
        return True

    monkeypatch.delattr(varlen, "_select_backend", raising=False)
    monkeypatch.setattr(varlen, "_can_use_cudnn", can_use_cudnn, raising=False)
    table = torch.zeros(1, 1, dtype=torch.int32)
    held = integration._Overrides("CUDA" if device.type == "cuda" else "CPU")
    assert not varlen._can_use_cudnn(None, None, None, 4, [-1, -1])
    assert not varlen._can_use_cudnn(None, None, None, 4, [-1, -1], False, None, None, None)
    assert varlen._can_use_cudnn(None, None, None, 4, [-1, -1], False, None, table, None)
    held.remove()
    assert varlen._can_use_cudnn is can_use_cudnn


@pytest.mark.eager
def test_an_unknown_choice_of_backends_is_left_alone(device, monkeypatch):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    unknown = lambda query: 0  # noqa: E731
    monkeypatch.setattr(varlen, "_select_backend", unknown, raising=False)
    with pytest.warns(RuntimeWarning, match="use sdpa_kernel"):
        held = integration._Overrides("CPU")
    assert varlen._select_backend is unknown
    held.remove()


@pytest.mark.eager
def test_registration_comes_and_goes(device):
    attention = torch.nn.attention

    assert attention.current_flash_attention_impl() is None
    before = torch._C._dispatch_dump("aten::_flash_attention_forward")
    handle = integration.register()
    try:
        assert attention.current_flash_attention_impl() == "flash_attn_triton"
        assert "flash_attn_triton" in attention.list_flash_attention_impls()
        active = torch._C._dispatch_dump("aten::_flash_attention_forward")
        assert active != before
        integration.register()  # a second time does nothing
        assert torch._C._dispatch_dump("aten::_flash_attention_forward") == active
    finally:
        handle.remove()
    assert attention.current_flash_attention_impl() is None
    assert torch._C._dispatch_dump("aten::_flash_attention_forward") == before
    handle.remove()  # a second time does nothing
    integration.register()
    attention.restore_flash_attention_impl()
    assert torch._C._dispatch_dump("aten::_flash_attention_forward") == before


@pytest.mark.eager
def test_old_pytorch_is_refused(device, monkeypatch):
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl")
    with pytest.raises(RuntimeError, match=r"needs PyTorch 2\.11 or newer, got"):
        integration.register()


@pytest.mark.device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads_k", [8, 2])
def test_sdpa_runs_our_kernels(device, registered, monkeypatch, dtype, is_causal, heads_k):
    calls = []
    original = ops.forward
    monkeypatch.setattr(ops, "forward", lambda *args: calls.append(1) or original(*args))
    m = Maker(device, dtype)
    inputs = [m.randn(2, 517, 8, 64), m.randn(2, 517, heads_k, 64), m.randn(2, 517, heads_k, 64)]

    def run(*leaves: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = scaled_dot_product_attention(
                *heads_first(*leaves), is_causal=is_causal, enable_gqa=heads_k != 8
            )
        return out.transpose(1, 2)

    compare(run, lambda *leaves: attention_reference(*leaves, causal=is_causal), inputs)
    assert calls == [1]


@pytest.mark.device
def test_odd_head_dim_and_lower_right_bias(device, registered):
    bias = pytest.importorskip("torch.nn.attention.bias")
    m = Maker(device, torch.bfloat16)
    inputs = [m.randn(2, 100, 4, 60), m.randn(2, 260, 4, 60), m.randn(2, 260, 4, 60)]

    def run(*leaves: Tensor) -> Tensor:
        mask = bias.causal_lower_right(100, 260)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(*heads_first(*leaves), mask).transpose(1, 2)

    compare(run, lambda *leaves: attention_reference(*leaves, causal=True), inputs)


@pytest.mark.device
def test_compiled_sdpa_agrees(device, registered):
    m = Maker(device, torch.bfloat16)
    for tokens_first in (True, False):
        leaves = [m.randn(2, 256, 4, 64) if tokens_first else m.randn(2, 4, 256, 64) for _ in "qkv"]
        leaves = [t.requires_grad_() for t in leaves]

        def run(*leaves: Tensor, swap: bool = tokens_first) -> Tensor:
            inputs = heads_first(*leaves) if swap else leaves
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return scaled_dot_product_attention(*inputs, is_causal=True) * 2

        want = run(*leaves)
        got = torch.compile(run, fullgraph=True)(*leaves)
        assert torch.equal(got, want)
        dout = m.randn(*want.shape)
        grads = [torch.autograd.grad(out, leaves, dout) for out in (got, want)]
        for got_grad, want_grad in zip(*grads, strict=True):
            torch.testing.assert_close(got_grad, want_grad)


@pytest.mark.device
def test_varlen_attn_on_the_device(device, registered):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    m = Maker(device, torch.bfloat16)
    lengths = (100, 1, 0, 399)
    inputs = [m.randn(500, 4, 128) for _ in "qkv"]
    ends = offsets(lengths, device), offsets(lengths, device), 399, 399

    def run(*leaves: Tensor) -> Tensor:
        return varlen.varlen_attn(*leaves, *ends, window_size=(-1, 0))

    def reference(*leaves: Tensor) -> Tensor:
        return varlen_attention_reference(*leaves, *ends, causal=True)

    compare(run, reference, inputs)


@pytest.mark.device
def test_native_kernels_are_back_after_removal(device):
    q = Maker(device, torch.float16).randn(1, 2, 300, 64)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        before = scaled_dot_product_attention(q, q, q)
        with integration.register():
            ours = scaled_dot_product_attention(q, q, q)
        after = scaled_dot_product_attention(q, q, q)
    assert torch.equal(before, after)
    torch.testing.assert_close(ours, before, atol=2e-3, rtol=2e-3)
