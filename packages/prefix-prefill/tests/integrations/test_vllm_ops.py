"""vLLM's Triton entry points: what they compute, against float64, and what they refuse."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch
from attn_common import detect, fp8_dtype
from prefix_prefill.integrations import vllm_ops
from prefix_prefill.integrations.vllm_ops import (
    decode_attention_fwd,
    merge_attn_states,
    triton_reshape_and_cache_flash,
    triton_reshape_and_cache_flash_per_token_head_quant,
    unified_attention,
)
from torch import Tensor

from .._linked.budget import DTYPES, Maker, offsets
from .._linked.tiers import INTERPRETED
from . import _vllm

pytestmark = pytest.mark.eager

HEADS, KV_HEADS, HEAD_DIM, PAGE, BLOCKS = 4, 2, 16, 16, 16
QUERIES, KEYS = (17, 1, 3), (36, 21, 9)


def reference(q: Tensor, k: Tensor, v: Tensor, **o: Any) -> tuple[Tensor, Tensor]:
    """Attend with the last queries of a sequence in float64; the log-sum-exp is ``[q, heads]``."""
    q, k, v = (x.double().cpu().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    s = q @ k.mT * o.get("scale", 0.3)
    if o.get("softcap"):
        s = o["softcap"] * torch.tanh(s / o["softcap"])
    i = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    j = torch.arange(k.shape[1])
    if "alibi_slopes" in o:
        s = s - o["alibi_slopes"].double().cpu()[:, None, None] * (i - j).abs()
    causal, left = o.get("causal", True), o.get("window", -1)
    if causal:
        s = s.masked_fill(j > i, -torch.inf)
    if left >= 0:
        hidden = i - j > left if causal else (i - j).abs() > left
        s = s.masked_fill(hidden, -torch.inf)
    if "sinks" in o:
        s = torch.cat([s, o["sinks"].double().cpu()[:, None, None].expand(*s.shape[:2], 1)], -1)
    return (s.softmax(-1)[..., : k.shape[1]] @ v).transpose(0, 1), s.logsumexp(-1).T


class Step:
    """Sequences whose keys lie in pages, and what the functions take of them."""

    def __init__(self, dtype: torch.dtype, device: torch.device, heads_k: int = KV_HEADS) -> None:
        m = Maker(device, dtype)
        self.function = unified_attention
        self.q = m.randn(sum(QUERIES), HEADS, HEAD_DIM)
        self.k, self.v = (m.randn(sum(KEYS), heads_k, HEAD_DIM) for _ in "kv")
        shape = BLOCKS, PAGE, heads_k, HEAD_DIM
        self.caches = [torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in "kv"]
        order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(2))
        self.table = order[:9].view(3, 3).int().to(device)
        token = torch.arange(3 * PAGE, device=device)
        slots = self.table[:, token // PAGE] * PAGE + token % PAGE
        self.slots = torch.cat([slots[b, :n] for b, n in enumerate(KEYS)])
        self.starts = offsets(QUERIES, device)
        self.lengths = torch.tensor(KEYS, dtype=torch.int32, device=device)

    def attend(self, caches: list[Tensor], out: Tensor, **changes: Any) -> None:
        """Call ``unified_attention`` as vLLM does."""
        given = {
            "q": self.q,
            "k": caches[0],
            "v": caches[1],
            "out": out,
            "cu_seqlens_q": self.starts,
            "max_seqlen_q": max(QUERIES),
            "seqused_k": self.lengths,
            "max_seqlen_k": max(KEYS),
            "softmax_scale": 0.3,
            "causal": True,
            "window_size": (-1, -1),
            "block_table": self.table,
            "softcap": 0,
            "q_descale": None,
            # vLLM passes scales for every cache
            "k_descale": torch.full((3, KV_HEADS), 7.0, device=out.device),
            "v_descale": torch.full((3, KV_HEADS), 7.0, device=out.device),
        }
        self.function(**{**given, **changes})

    def close(self, out: Tensor, tolerance: float, **options: Any) -> None:
        """Hold an output to the reference."""
        keys, starts = offsets(KEYS, "cpu").tolist(), self.starts.tolist()
        k, v = options.pop("k", self.k), options.pop("v", self.v)
        for b in range(len(KEYS)):
            rows, of = slice(starts[b], starts[b + 1]), slice(keys[b], keys[b + 1])
            want, _ = reference(self.q[rows], k[of], v[of], **options)
            error = (out[rows].double().cpu() - want).abs().max()
            assert error <= tolerance * want.abs().max()


EPS = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-6}


OPTIONS = ["plain", "window", "softcap", "alibi", "sinks", "full", "band"]


def asked_of(option: str, device: torch.device) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what ``unified_attention`` is given for an option, and the reference."""
    slopes = torch.tensor([0.5, 0.25, 0.125, 1.0], device=device)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device=device)
    return {
        "plain": ({}, {}),
        "window": ({"window_size": (6, 0)}, {"window": 6}),
        "softcap": ({"softcap": 2.0}, {"softcap": 2.0}),
        "alibi": ({"alibi_slopes": slopes}, {"alibi_slopes": slopes}),
        "sinks": ({"sinks": sinks}, {"sinks": sinks}),
        "full": ({"causal": False}, {"causal": False}),
        "band": ({"causal": False, "window_size": (6, 0)}, {"causal": False, "window": 6}),
    }[option]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unified_attention(dtype, option, device):
    step = Step(dtype, device)
    triton_reshape_and_cache_flash(
        step.k, step.v, *step.caches, step.slots, "auto", torch.ones(1), torch.ones(1)
    )
    asked, means = asked_of(option, device)
    out = torch.full_like(step.q, torch.nan)
    step.attend(step.caches, out, **asked)
    step.close(out, EPS[dtype], **means)


@pytest.mark.skipif(INTERPRETED, reason="interpreted FP8 stores round wrongly")
def test_a_cache_of_fp8(device):
    if not detect(device).supports_fp8:
        pytest.skip("no FP8")
    stored = getattr(torch, fp8_dtype(detect(device)))
    step = Step(torch.bfloat16, device)
    caches = [torch.zeros(x.shape, dtype=torch.uint8, device=device) for x in step.caches]
    scales = torch.tensor([0.5], device=device), torch.tensor([2.0], device=device)
    triton_reshape_and_cache_flash(step.k, step.v, *caches, step.slots, "fp8", *scales)
    out = torch.zeros(step.q.shape, dtype=stored, device=device)
    of_out = torch.tensor([0.25], device=device)
    wide = [x.expand(3, KV_HEADS) for x in scales]
    descales = {"k_descale": wide[0], "v_descale": wide[1]}
    step.attend([x.view(stored) for x in caches], out, output_scale=of_out, **descales)
    k, v = (
        (x.float() / scale).to(stored).float() * scale
        for x, scale in zip((step.k, step.v), scales, strict=True)
    )
    step.close(out.float() * of_out, 0.07, k=k, v=v)


@pytest.mark.parametrize(("mode", "error"), [(2, 0.01), (3, 0.15), (4, 0.2)])
def test_caches_with_a_scale_of_each_token(mode, error, device):
    if mode == 3 and not detect(device).supports_fp8:
        pytest.skip("no FP8")
    stored = {2: torch.int8, 3: getattr(torch, fp8_dtype(detect(device))), 4: torch.uint8}[mode]
    step = Step(torch.float16, device)
    width = HEAD_DIM // 2 if mode == 4 else HEAD_DIM
    caches = [torch.zeros(BLOCKS, PAGE, KV_HEADS, width, device=device).to(stored) for _ in "kv"]
    scales = [torch.full((BLOCKS, PAGE, KV_HEADS), torch.nan, device=device) for _ in "kv"]
    triton_reshape_and_cache_flash_per_token_head_quant(
        step.k, step.v, *caches, *scales, step.slots, mode
    )
    out = torch.full_like(step.q, torch.nan)
    named = {"k_scale_cache": scales[0], "v_scale_cache": scales[1]}
    step.attend(caches, out, kv_quant_mode=mode, **named)
    step.close(out, error)


def test_batch_invariance_is_that_of_the_process(device, monkeypatch):
    step = Step(torch.bfloat16, device)
    triton_reshape_and_cache_flash(step.k, step.v, *step.caches, step.slots, "auto", None, None)
    monkeypatch.setattr(vllm_ops, "BATCH_INVARIANT", True)
    whole, one = torch.empty_like(step.q), torch.empty_like(step.q[17:18])
    step.attend(step.caches, whole)
    step.attend(
        step.caches,
        one,
        q=step.q[17:18],
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32, device=device),
        seqused_k=step.lengths[1:2],
        block_table=step.table[1:2],
    )
    assert torch.equal(one, whole[17:18])
    slopes = torch.ones(HEADS, device=device)
    with pytest.raises(NotImplementedError, match=r"alibi_slopes .* VLLM_BATCH_INVARIANT=1"):
        step.attend(step.caches, whole, alibi_slopes=slopes)


@pytest.mark.parametrize("count", [None, 0, 5, 9, 20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_attn_states(dtype, count, device):
    m = Maker(device, dtype)
    parts = [m.randn(9, 3, 24) for _ in range(2)]
    # as a backend makes them: [tokens, heads], turned
    lses = [m.randn(9, 3, dtype=torch.float32).T for _ in range(2)]
    lses[0][0, 1], lses[0][1, 2], lses[1][1, 2] = torch.inf, -torch.inf, torch.inf
    parts[0][1, 0] = torch.nan
    out, lse = torch.empty_like(parts[0]), torch.empty(9, 3, device=device).T
    merge_attn_states(out, parts[0], lses[0], parts[1], lses[1], lse, count)
    first = torch.arange(9, device=device) < (9 if count is None else count)
    weights = torch.stack([x.double().masked_fill(x.isinf(), -torch.inf) for x in lses])
    weights[0] = weights[0].masked_fill(~first, -torch.inf)
    total = weights.logsumexp(0)
    share = (weights - total).exp().nan_to_num(0.0).transpose(1, 2)[..., None]
    want = sum(s * x.double().nan_to_num(0.0) for s, x in zip(share, parts, strict=True))
    torch.testing.assert_close(lse.double(), total, rtol=1e-6, atol=1e-6)
    assert (out.double() - want).abs().max() <= EPS[dtype] * want.abs().max()
    again = torch.empty_like(out)
    merge_attn_states(again, parts[0], lses[0], parts[1], lses[1], None, count)
    assert torch.equal(again, out)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("heads_k", [1, 2, 4])
def test_decode_attention_fwd(heads_k, page, splits, device):
    step = Step(torch.float32, device, heads_k)
    triton_reshape_and_cache_flash(step.k, step.v, *step.caches, step.slots, "auto", None, None)
    q, keys = step.q[:3], offsets(KEYS, "cpu").tolist()
    out, lse = torch.empty_like(q), torch.empty(3, HEADS, device=device)
    logits = torch.empty(3, HEADS, splits, HEAD_DIM + 1, device=device)
    table, buffers = step.table, step.caches
    if page == 1:
        buffers = [x.flatten(0, 1) for x in buffers]
        slot = torch.arange(PAGE, device=device)
        table = (table[..., None] * PAGE + slot).flatten(1).int()
    decode_attention_fwd(
        q, *buffers, out, lse, table, step.lengths, logits, splits, 0.3, page, logit_cap=2.0
    )
    for b in range(3):
        of = slice(keys[b], keys[b + 1])
        want, wanted = reference(q[b : b + 1], step.k[of], step.v[of], softcap=2.0)
        torch.testing.assert_close(out[b].double().cpu(), want[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[b].double().cpu(), wanted[0], rtol=1e-5, atol=1e-5)


def test_decode_of_latent_attention(device):
    m = Maker(device, torch.bfloat16)
    cache = m.randn(6, PAGE, 1, 576)
    q, lengths = m.randn(2, 16, 576), torch.tensor([20, 33], dtype=torch.int32, device=device)
    table = torch.tensor([[4, 1, 0], [5, 2, 3]], dtype=torch.int32, device=device)
    out, lse = m.randn(2, 16, 512), torch.empty(2, 16, device=device)
    logits = torch.empty(2, 16, 2, 513, device=device)
    call = q, cache, cache[..., :512], out, lse, table, lengths, logits, 2, 0.04, PAGE
    decode_attention_fwd(*call, is_mla=True)
    for b in range(2):
        keys = cache[table[b].long()].flatten(0, 1)[: int(lengths[b])]
        want, wanted = reference(q[b : b + 1], keys, keys[..., :512], scale=0.04)
        assert (out[b].double().cpu() - want[0]).abs().max() < 3e-2 * want.abs().max()
        torch.testing.assert_close(lse[b].double().cpu(), wanted[0], rtol=1e-3, atol=1e-3)
    with pytest.raises(NotImplementedError, match=r"logit_cap must be 0\.0"):
        decode_attention_fwd(*call, logit_cap=2.0, is_mla=True)
    with pytest.raises(ValueError, match="v_buffer must be the first columns"):
        decode_attention_fwd(*call[:2], cache[..., :512].clone(), *call[3:], is_mla=True)


SOME = torch.ones(1)
REFUSED = {
    "qq_bias": {"qq_bias": SOME},
    "mm_prefix_range": {"mm_prefix_range": SOME},
    "rswa_prefix_lens": {"rswa_prefix_lens": SOME, "rswa_window": 4},
    "use_alibi_sqrt": {"use_alibi_sqrt": True},
    "chunk_lookback": {"chunk_lookback": 1, "window_size": (7, 0)},
    "causal": {"causal": torch.ones(3, dtype=torch.bool)},
    "alibi_slopes": {"alibi_slopes": torch.ones(HEADS), "causal": False},
    "kv_quant_mode": {"kv_quant_mode": 5},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_by_name(name, device):
    step = Step(torch.float32, device)
    out = torch.full_like(step.q, 7.0)
    with pytest.raises(NotImplementedError, match=rf"^{name} must be"):
        step.attend(step.caches, out, **REFUSED[name])
    assert (out == 7.0).all()
    # what changes nothing is taken
    triton_reshape_and_cache_flash(step.k, step.v, *step.caches, step.slots, "auto", SOME, SOME)
    step.attend(step.caches, out, chunk_lookback=1, rswa_window=4, use_td=True)
    step.close(out, EPS[torch.float32])


def test_messages_name_the_arguments_of_vllm(device):
    step = Step(torch.float32, device)
    out = torch.empty_like(step.q)
    with pytest.raises(TypeError, match=r"^k must have the dtype of q"):
        step.attend([x.half() for x in step.caches], out)
    with pytest.raises(ValueError, match=r"^seqused_k must be"):
        step.attend(step.caches, out, seqused_k=step.lengths[:2])
    write = step.k, step.v, *step.caches, step.slots
    with pytest.raises(NotImplementedError, match=r"^interleaved_v_pack_factor must be 0"):
        triton_reshape_and_cache_flash(*write, "auto", None, None, 8)
    with pytest.raises(ValueError, match=r"^kv_cache_dtype must be"):
        triton_reshape_and_cache_flash(*write, "nvfp4", None, None)
    with pytest.raises(TypeError, match=r"^key_cache must have the dtype of key"):
        triton_reshape_and_cache_flash(step.k.half(), step.v.half(), *write[2:], "auto", None, None)
    with pytest.raises(NotImplementedError, match=r"^kv_quant_mode must be"):
        triton_reshape_and_cache_flash_per_token_head_quant(*write[:4], SOME, SOME, step.slots, 1)
    lse = torch.zeros(HEADS, len(out), device=device)
    with pytest.raises(ValueError, match=r"^suffix_lse must be"):
        merge_attn_states(out, step.q, lse, step.q, lse[:1])
    with pytest.raises(ValueError, match=r"^prefill_tokens_with_context must be"):
        merge_attn_states(out, step.q, lse, step.q, lse, None, -1)
    with pytest.raises(ValueError, match=r"^output must be"):
        merge_attn_states(out[1:], step.q, lse, step.q, lse)


@pytest.mark.skipif(not _vllm.IS_REAL, reason="vLLM is not installed: nox -s vllm")
def test_the_signatures_are_those_of_vllm():
    of = "vllm.v1.attention.ops."
    for module, name in (
        ("triton_unified_attention", "unified_attention"),
        ("triton_reshape_and_cache_flash", "triton_reshape_and_cache_flash"),
        (
            "triton_reshape_and_cache_flash",
            "triton_reshape_and_cache_flash_per_token_head_quant",
        ),
        ("merge_attn_states", "merge_attn_states"),
        ("triton_decode_attention", "decode_attention_fwd"),
    ):
        theirs = inspect.signature(getattr(importlib.import_module(of + module), name))
        ours = inspect.signature(getattr(vllm_ops, name))
        assert list(ours.parameters) == list(theirs.parameters), name
        for mine, real in zip(ours.parameters.values(), theirs.parameters.values(), strict=True):
            assert mine.kind == real.kind, (name, mine)
            assert mine.default == real.default, (name, mine)


def theirs(module: str, name: str) -> Any:
    """Return a function of vLLM."""
    return getattr(importlib.import_module(f"vllm.v1.attention.ops.{module}"), name)


INTERPRETED_VLLM = pytest.mark.skipif(
    not (_vllm.IS_REAL and INTERPRETED), reason="vLLM's own kernels are needed, interpreted"
)


@INTERPRETED_VLLM
@pytest.mark.parametrize("mode", [0, 2, 3, 4])
@pytest.mark.parametrize("option", OPTIONS)
def test_results_of_unified_attention_are_those_of_vllm(option, mode, device):
    if mode == 4 and option in ("full", "band"):
        pytest.skip("vLLM has causal attention alone over int4")
    if option == "band":
        pytest.skip("vLLM's own kernel agrees with its mask in the first row of each tile alone")
    step, given = Step(torch.float32, device), {}
    caches = [x.nan_to_num(0.0) for x in step.caches]
    if mode == 0:
        triton_reshape_and_cache_flash(step.k, step.v, *caches, step.slots, "auto", None, None)
    else:
        stored = {2: torch.int8, 3: torch.float8_e4m3fn, 4: torch.uint8}[mode]
        width = HEAD_DIM // 2 if mode == 4 else HEAD_DIM
        caches = [torch.zeros(BLOCKS, PAGE, KV_HEADS, width).to(stored) for _ in "kv"]
        scales = [torch.ones(BLOCKS, PAGE, KV_HEADS) for _ in "kv"]
        write = step.k, step.v, *caches, *scales, step.slots, mode
        triton_reshape_and_cache_flash_per_token_head_quant(*write)
        given = {"k_scale_cache": scales[0], "v_scale_cache": scales[1]}
        kinds = importlib.import_module("vllm.v1.kv_cache_interface").KVQuantMode
        given["kv_quant_mode"] = kinds(mode)
    asked, _ = asked_of(option, device)
    ours, out = torch.zeros_like(step.q), torch.zeros_like(step.q)
    step.attend(caches, ours, **asked, **given)
    step.function = theirs("triton_unified_attention", "unified_attention")
    step.attend(caches, out, **asked, **given)
    torch.testing.assert_close(ours, out, rtol=1e-4, atol=1e-5)


@INTERPRETED_VLLM
@pytest.mark.parametrize("count", [None, 0, 5])
def test_results_of_merging_are_those_of_vllm(count, device):
    m = Maker(device, torch.float32)
    parts, lses = [m.randn(9, 3, 24) for _ in "ab"], [m.randn(3, 9) for _ in "ab"]
    lses[0][0, 1] = torch.inf
    found = []
    for merge in (merge_attn_states, theirs("triton_merge_attn_states", "merge_attn_states")):
        out, lse = torch.zeros(9, 3, 24), torch.zeros(3, 9)
        merge(out, parts[0], lses[0], parts[1], lses[1], lse, count)
        found += [out, lse]
    torch.testing.assert_close(found[:2], found[2:])


@INTERPRETED_VLLM
@pytest.mark.parametrize("heads_k", [1, 2, 4])
def test_results_of_decoding_are_those_of_vllm(heads_k, device):
    step = Step(torch.float32, device, heads_k)
    caches = [x.nan_to_num(0.0) for x in step.caches]
    triton_reshape_and_cache_flash(step.k, step.v, *caches, step.slots, "auto", None, None)
    found = []
    for decode in (
        decode_attention_fwd,
        theirs("triton_decode_attention", "decode_attention_fwd"),
    ):
        out, lse = torch.zeros(3, HEADS, HEAD_DIM), torch.zeros(3, HEADS)
        logits = torch.zeros(3, HEADS, 2, HEAD_DIM + 1)
        decode(step.q[:3], *caches, out, lse, step.table, step.lengths, logits, 2, 0.3, PAGE, 2.0)
        found += [out, lse]
    torch.testing.assert_close(found[:2], found[2:], rtol=1e-4, atol=1e-5)
