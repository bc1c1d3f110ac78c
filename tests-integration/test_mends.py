"""Messages say what to use in place of what is refused; a likely mistake brings a warning."""

import warnings

import blocksparse_attn
import blocksparse_attn._linked.host.arguments as of_blocksparse
import flash_attn_triton._linked.host.arguments as of_flash
import lightning_attn._linked.host.arguments as of_lightning
import prefix_prefill._linked.host.arguments as of_prefix
import pytest
import torch
from blocksparse_attn import BlockSparseLayout
from flash_attn_triton import flash_attn_func, flash_attn_varlen_func
from lightning_attn import lightning_attn_func, lightning_attn_varlen_func
from prefix_prefill import paged_attn_func

LAYOUT = BlockSparseLayout.from_dense(torch.ones(4, 4, dtype=torch.bool), 16)
X = torch.zeros(1, 8, 4, 16)
STARTS = torch.tensor([0, 8], dtype=torch.int32)
DECAY = torch.zeros(4)


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape).to(dtype)


def paged(q=X[0], cache=None, blocks=1, **options):
    cache = zeros(2, 16, 4, 16) if cache is None else cache
    table = torch.zeros(1, blocks, dtype=torch.int32)
    lengths = torch.tensor([8], dtype=torch.int32)
    return paged_attn_func(q, cache, cache.clone(), table, STARTS, lengths, 8, 8, **options)


@pytest.fixture(autouse=True)
def unwarned(monkeypatch):
    for module in (of_blocksparse, of_flash, of_lightning, of_prefix):
        monkeypatch.setattr(module, "_warned", set())


CALLS = {
    "window": (lambda: flash_attn_func(X, X, X, window_size=8), r"got 8; .*\(W - 1, 0\)"),
    "paged window": (lambda: paged(window_size=8), r"got 8; .*\(W - 1, 0\)"),
    "bias": (
        lambda: flash_attn_func(X, X, X, bias=X[..., 0].bool()),
        r"be torch.float32, got",
    ),
    "mask": (lambda: flash_attn_func(X, X, X, bias=X[..., 0].bool()), "of a mask, 0 where a key"),
    "packed q": (lambda: flash_attn_func(X[0], X[0], X[0]), "flash_attn_varlen_func"),
    "fixed q": (lambda: flash_attn_varlen_func(X, X, X, STARTS, STARTS, 8, 8), "flash_attn_func"),
    "dense layout": (
        lambda: blocksparse_attn.blocksparse_attn_func(X, X, X, torch.ones(4, 4)),
        "BlockSparseLayout.from_dense",
    ),
    "packed blocks": (
        lambda: blocksparse_attn.blocksparse_attn_func(X[0], X[0], X[0], LAYOUT),
        "blocksparse_attn_varlen_func",
    ),
    "packed state": (lambda: lightning_attn_func(X[0], X[0], X[0], DECAY), "attn_varlen_func"),
    "fixed state": (lambda: lightning_attn_varlen_func(X, X, X, DECAY, STARTS), "attn_func"),
    "fixed pages": (lambda: paged(X), r"flatten\(0, 1\)"),
    "heads first": (lambda: paged(cache=zeros(2, 2, 4, 16)), r"transpose\(1, 2\)"),
    "too many heads": (
        lambda: paged(cache=zeros(2, 4, 16, 16)),
        "heads stand right before",
    ),
    "slopes": (
        lambda: flash_attn_func(X, X, X, alibi_slopes=torch.ones(4, requires_grad=True)),
        r"alibi_slopes.detach\(\)",
    ),
    "invariant": (
        lambda: flash_attn_func(X, X, X, alibi_slopes=torch.ones(4), invariant=True),
        "leave invariant out",
    ),
    "splits": (lambda: paged(num_splits=2, invariant=True), "leave it out"),
    "gradient": (lambda: paged(X[0].clone().requires_grad_()), r"torch.no_grad\(\)"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_refusal_says_what_to_use(name):
    call, words = CALLS[name]
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=words):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: flash_attn_func(x, x, x),
        lambda x: blocksparse_attn.blocksparse_attn_func(x, x, x, LAYOUT, causal=False),
        lambda x: lightning_attn_func(x, x, x, torch.zeros(x.shape[2])),
    ],
    ids=["flash", "blocksparse", "lightning"],
)
def test_a_call_with_heads_first_warns_once(call):
    x = zeros(1, 4, 32, 16)
    with pytest.warns(UserWarning, match=r"transpose\(1, 2\)") as caught:
        call(x)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(zeros(1, 4, 48, 16))


@pytest.mark.parametrize("shape", [(2, 100, 8, 16), (1, 1, 32, 16), (1, 8, 8, 16), (1, 7, 32, 16)])
def test_usual_shapes_warn_of_nothing(shape):
    x = zeros(*shape)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flash_attn_func(x, x, x)
        # grouped heads
        flash_attn_func(zeros(1, 8, 32, 16), zeros(1, 8, 4, 16), zeros(1, 8, 4, 16))


def test_an_fp8_cache_without_scales_warns():
    cache = zeros(2, 16, 4, 16, dtype=torch.float8_e4m3fn)
    with pytest.warns(UserWarning, match="k_descale and v_descale are None"):
        paged(cache=cache)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        paged(cache=cache.clone(), k_descale=torch.ones(1), v_descale=torch.ones(1))


def test_an_fp8_cache_with_a_scale_of_each_token_warns_of_nothing():
    cache = zeros(2, 16, 4, 16, dtype=torch.float8_e4m3fn)
    scales = {f"{x}_scale_cache": torch.ones(cache.shape[:3]) for x in "kv"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        paged(cache=cache, kv_dtype="fp8_per_token_head", **scales)


def test_decays_that_look_like_factors_warn():
    with pytest.warns(UserWarning, match=r"pass -decay.log\(\)"):
        lightning_attn_func(X, X, X, torch.tensor([0.9, 0.95, 0.97, 0.99]))
