"""vLLM's attention backend: steps of a batch over its caches, against float64 attention."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
from dataclasses import dataclass, fields, replace
from importlib.metadata import distributions, entry_points
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attn_common import detect, fp8_dtype
from prefix_prefill.integrations import vllm as integration
from torch import Tensor

from .._linked.budget import DTYPES
from .._linked.tiers import INTERPRETED
from . import _vllm

pytestmark = pytest.mark.eager

HEADS, KV_HEADS, HEAD_DIM, PAGE, PAGES = 4, 2, 16, 16, 24
SEQUENCES = 3
# queries of each sequence in a step: prompts; a chunk beside a decode and one that waits; decodes
STEPS = [(5, 17, 33), (20, 1, 0), (1, 1, 1)]


@pytest.fixture
def backend():
    integration.register()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum.CUSTOM.get_class()


@dataclass
class Layer:
    """What vLLM's layer has of an FP8 cache."""

    _k_scale: Tensor
    _v_scale: Tensor


ONES = Layer(torch.tensor(1.0), torch.tensor(1.0))


class Cache:
    """A cache as vLLM allots it, with its sequences' pages in a random order."""

    def __init__(self, dtype: torch.dtype, device: torch.device, is_nhd: bool) -> None:
        size = (PAGES, KV_HEADS, PAGE, 2 * HEAD_DIM)
        if is_nhd:
            kv = torch.empty(PAGES, PAGE, KV_HEADS, 2 * HEAD_DIM, dtype=dtype, device=device)
            self.kv = kv.transpose(1, 2)
        else:
            self.kv = torch.empty(size, dtype=dtype, device=device)
        # NaN in every dtype: what no token was written to must not be read
        self.kv.fill_(0x7F if dtype is torch.uint8 else torch.nan)
        order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(5))
        self.table = order.view(SEQUENCES, -1).to(torch.int32)
        self.lengths = torch.zeros(SEQUENCES, dtype=torch.int32)

    def step(self, queries: tuple[int, ...], padding: int = 2, causal: bool = True) -> Any:
        """Return vLLM's metadata for so many new tokens of each sequence."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        slots = [
            int(self.table[b, t // PAGE]) * PAGE + t % PAGE
            for b, count in enumerate(queries)
            for t in range(int(self.lengths[b]), int(self.lengths[b]) + count)
        ]
        self.lengths = self.lengths + torch.tensor(queries, dtype=torch.int32)
        starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
        device = self.kv.device
        return CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=self.lengths.to(device),
            num_reqs=SEQUENCES,
            num_actual_tokens=sum(queries),
            max_query_len=max(queries),
            max_seq_len=int(self.lengths.max()),
            block_table_tensor=self.table.to(device),
            slot_mapping=torch.tensor(slots + [-1] * padding, device=device),
            causal=causal,
        )


def builder(backend: Any) -> Any:
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=100))
    return backend.get_builder_cls()(None, ["layer"], config, torch.device("cpu"))


def tokens(count: int, heads: int, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(count, heads, HEAD_DIM, generator=made).to(dtype).to(device)


# what a layer is made with, and what attention then is: window, softcap and further arguments
LAYERS = {
    "plain": {},
    "window": {"sliding_window": 7},
    "softcap": {"logits_soft_cap": 2.0},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 1.0]},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


def expected(q: Tensor, k: Tensor, v: Tensor, layer: dict[str, Any], causal: bool = True) -> Tensor:
    """Compute attention of a sequence's last tokens in float64, ``[queries, heads, head_dim]``."""
    left = layer.get("sliding_window", 0) - 1
    q, k, v = (x.double().cpu().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, v))
    s = q @ k.mT * 0.3  # [heads, queries, keys]
    if "logits_soft_cap" in layer:
        s = layer["logits_soft_cap"] * torch.tanh(s / layer["logits_soft_cap"])
    i = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    j = torch.arange(k.shape[1])
    if "alibi_slopes" in layer:
        s = s - torch.tensor(layer["alibi_slopes"])[:, None, None] * (i - j).abs()
    if causal:
        s = s.masked_fill(j > i, -torch.inf)
    if left >= 0:
        s = s.masked_fill(i - j > left, -torch.inf)
        if not causal:
            s = s.masked_fill(j - i > left, -torch.inf)
    if "sinks" in layer:
        s = torch.cat([s, layer["sinks"].double()[:, None, None].expand(*s.shape[:2], 1)], -1)
    return (s.softmax(-1)[..., : k.shape[1]] @ v).transpose(0, 1)


def close(actual: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Hold rows to a few roundings of the dtype, of numbers as large as the values."""
    bound = 8 * torch.finfo(dtype).eps * wanted.abs().max()
    assert (actual.double().cpu() - wanted).abs().max() <= bound


@pytest.mark.parametrize("is_nhd", [True, False], ids=["nhd", "hnd"])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps_of_a_batch(backend, dtype, layer, is_nhd, device):
    options = LAYERS[layer]
    if "sinks" in options:
        options = {"sinks": options["sinks"].to(device)}
    with device:
        impl = backend.get_impl_cls()(HEADS, HEAD_DIM, 0.3, KV_HEADS, **options)
    cache, metadata = Cache(dtype, device, is_nhd), builder(backend)
    kept: list[tuple[Tensor, Tensor]] = [()] * SEQUENCES
    for number, queries in enumerate(STEPS):
        count = sum(queries)
        q, k, v = (
            tokens(count + 2, heads, dtype, device, 10 * number + i)
            for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
        )
        step = cache.step(queries)
        impl.do_kv_cache_update(ONES, k, v, cache.kv, step.slot_mapping)
        out = torch.full_like(q, 7.0)
        assert impl.forward(ONES, q, k, v, cache.kv, metadata.build(0, step), out) is out
        assert (out[count:] == 7.0).all()  # padding is not touched
        ends = step.query_start_loc.tolist()
        for b in range(SEQUENCES):
            rows = slice(ends[b], ends[b + 1])
            new = k[rows], v[rows]
            kept[b] = tuple(map(torch.cat, zip(kept[b], new, strict=True))) if kept[b] else new
            if rows.start < rows.stop:
                close(out[rows], expected(q[rows], *kept[b], LAYERS[layer]), dtype)


@pytest.mark.skipif(INTERPRETED, reason="interpreted FP8 stores round wrongly")
@pytest.mark.parametrize("scales", [(0.5, 2.0), ([0.5, 0.25], [1.0, 2.0])], ids=["one", "heads"])
@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
def test_a_cache_of_fp8(backend, name, scales, device):
    platform = detect(device)
    if not platform.supports_fp8:
        pytest.skip(f"{platform} has no FP8")
    impl = backend.get_impl_cls()(HEADS, HEAD_DIM, 0.3, KV_HEADS, kv_cache_dtype=name)
    layer = Layer(*(torch.tensor(x, device=device) for x in scales))
    cache = Cache(torch.uint8, device, True)
    q, k, v = (tokens(55, n, torch.bfloat16, device, n) for n in (HEADS, KV_HEADS, KV_HEADS))
    step = cache.step(STEPS[0], padding=0)
    impl.do_kv_cache_update(layer, k, v, cache.kv, step.slot_mapping)
    out = torch.empty_like(q)
    impl.forward(layer, q, k, v, cache.kv, builder(backend).build(0, step), out)
    stored = torch.float8_e5m2 if name == "fp8_e5m2" else getattr(torch, fp8_dtype(platform))

    def rounded(x: Tensor, scale: Tensor) -> Tensor:
        scale = scale.view(-1, 1)
        return (x.float() / scale).to(stored).double() * scale

    start = 0
    for queries in STEPS[0]:
        rows = slice(start, start + queries)
        wanted = expected(
            q[rows], rounded(k[rows], layer._k_scale), rounded(v[rows], layer._v_scale), {}
        )
        close(out[rows], wanted, torch.bfloat16)
        start += queries


# bytes of a key; roundings of a number, in parts of the largest of its row
PER_TOKEN_HEAD = {
    "int8_per_token_head": (HEAD_DIM, 0.5 / 127),
    "int4_per_token_head": (HEAD_DIM // 2, 1.5 / 15),
    "fp8_per_token_head": (HEAD_DIM, 2**-4),
}


@pytest.mark.parametrize("is_nhd", [True, False], ids=["nhd", "hnd"])
@pytest.mark.parametrize("name", PER_TOKEN_HEAD)
def test_caches_with_a_scale_of_each_token(backend, name, is_nhd, device):
    if name == "fp8_per_token_head" and not detect(device).supports_fp8:
        pytest.skip("no FP8")
    width, error = PER_TOKEN_HEAD[name]
    assert name in backend.supported_kv_cache_dtypes
    with device:
        impl = backend.get_impl_cls()(HEADS, HEAD_DIM, 0.3, KV_HEADS, kv_cache_dtype=name)
    cache, metadata = Cache(torch.float32, device, is_nhd), builder(backend)
    size = PAGES, PAGE, KV_HEADS, 2 * (width + 4)
    stored = torch.int8 if name == "int8_per_token_head" else torch.uint8
    in_bytes = torch.full(size, 0x7F, dtype=stored, device=device).transpose(1, 2)
    cache.kv = in_bytes if is_nhd else in_bytes.contiguous()
    kept: list[tuple[Tensor, Tensor]] = [()] * SEQUENCES
    for number, queries in enumerate(STEPS):
        count = sum(queries)
        q, k, v = (
            tokens(count + 2, heads, torch.float32, device, 10 * number + i)
            for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
        )
        step = cache.step(queries)
        impl.do_kv_cache_update(ONES, k, v, cache.kv, step.slot_mapping)
        out = torch.full_like(q, 7.0)
        impl.forward(ONES, q, k, v, cache.kv, metadata.build(0, step), out)
        assert (out[count:] == 7.0).all()
        ends = step.query_start_loc.tolist()
        for b in range(SEQUENCES):
            rows = slice(ends[b], ends[b + 1])
            new = k[rows], v[rows]
            kept[b] = tuple(map(torch.cat, zip(kept[b], new, strict=True))) if kept[b] else new
            if rows.start < rows.stop:
                far = (out[rows].double().cpu() - expected(q[rows], *kept[b], {})).abs().max()
                assert far < 3 * error * kept[b][1].abs().max()


@pytest.mark.skipif(
    not (_vllm.IS_REAL and INTERPRETED), reason="vLLM's own kernels are needed, interpreted"
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PER_TOKEN_HEAD)
def test_the_bits_that_vllm_writes(backend, name, dtype, device, monkeypatch):
    from vllm.v1.attention.backends import triton_attn

    monkeypatch.setattr(triton_attn.current_platform, "fp8_dtype", lambda: torch.float8_e4m3fn)
    stored = torch.int8 if name == "int8_per_token_head" else torch.uint8
    width = PER_TOKEN_HEAD[name][0]
    size = PAGES, PAGE, KV_HEADS, 2 * (width + 4)
    k, v = (tokens(60, KV_HEADS, dtype, device, n) + n / 2 for n in (1, 2))
    k[3], v[4] = 0.0, 1.0
    step = Cache(torch.float32, device, True).step((20, 20, 20), padding=0)
    half, found = width + 4, []
    for cls in (backend.get_impl_cls(), triton_attn.TritonAttentionImpl):
        cache = torch.zeros(size, dtype=stored).transpose(1, 2)
        impl = cls(HEADS, HEAD_DIM, 0.3, KV_HEADS, None, None, name)
        # vLLM's are filled with ones where they are first needed
        for which, end in (("_k_scale_cache", half), ("_v_scale_cache", 2 * half)):
            scale = cache.transpose(1, 2)[..., end - 4 : end]
            setattr(impl, which, scale.view(torch.float32)[..., 0])
        impl.do_kv_cache_update(ONES, k, v, cache, step.slot_mapping)
        found.append(cache)
    assert torch.equal(*found)


def test_room_for_the_scales(backend):
    @dataclass
    class Spec:
        kv_quant_mode: Any
        state_content_bytes: int | None = None
        head_size: int = 128
        head_size_v: int = 64

    for name, size in (("INT8", 200), ("INT4", 104), ("FP8", 200)):
        mode = SimpleNamespace(name=f"{name}_PER_TOKEN_HEAD", is_per_token_head=True)
        assert backend.customize_spec(Spec(mode)).state_content_bytes == size
    plain = Spec(SimpleNamespace(name="NONE", is_per_token_head=False))
    assert backend.customize_spec(plain) is plain


@pytest.mark.parametrize("layer", ["plain", "window"])
@pytest.mark.parametrize("kind", ["encoder", "encoder_only"])
def test_encoders_have_no_cache(backend, kind, layer, device):
    impl = backend.get_impl_cls()(HEADS, HEAD_DIM, 0.3, KV_HEADS, attn_type=kind, **LAYERS[layer])
    cache = Cache(torch.float32, device, True)
    q, k, v = (tokens(57, n, torch.float32, device, n) for n in (HEADS, KV_HEADS, KV_HEADS))
    step = cache.step(STEPS[0])
    impl.do_kv_cache_update(ONES, k, v, cache.kv, step.slot_mapping)
    assert cache.kv.isnan().all()
    out = torch.empty_like(q)
    empty = torch.tensor([], device=device)
    impl.forward(ONES, q, k, v, empty, builder(backend).build(0, step), out)
    start = 0
    for queries in STEPS[0]:
        rows = slice(start, start + queries)
        wanted = expected(q[rows], k[rows], v[rows], LAYERS[layer], causal=False)
        close(out[rows], wanted, torch.float32)
        start += queries


def test_cross_attention_sees_every_key(backend, device):
    impl = backend.get_impl_cls()(HEADS, HEAD_DIM, 0.3, KV_HEADS, attn_type="encoder_decoder")
    cache = Cache(torch.float32, device, False)
    k, v = (tokens(sum(STEPS[0]), KV_HEADS, torch.float32, device, n) for n in (1, 2))
    step = cache.step(STEPS[0], padding=0, causal=False)
    impl.do_kv_cache_update(ONES, k, v, cache.kv, step.slot_mapping)
    step.query_start_loc = torch.tensor([0, 2, 3, 4], dtype=torch.int32, device=device)
    step.num_actual_tokens, step.max_query_len = 4, 2
    q = tokens(4, HEADS, torch.float32, device, 3)
    out = torch.empty_like(q)
    impl.forward(ONES, q, None, None, cache.kv, builder(backend).build(0, step), out)
    starts = [0, *torch.tensor(STEPS[0]).cumsum(0).tolist()]
    for b, rows in enumerate((slice(0, 2), slice(2, 3), slice(3, 4))):
        keys = slice(starts[b], starts[b + 1])
        close(out[rows], expected(q[rows], k[keys], v[keys], {}, causal=False), torch.float32)


def steps_in_one_sequence(backend: Any, cuts: list[int], beside: int, device: Any) -> Tensor:
    """Return a sequence's outputs, computed in chunks beside decodes of other sequences."""
    with device:
        impl = backend.get_impl_cls()(HEADS, HEAD_DIM, 0.3, KV_HEADS, sliding_window=40)
    cache, metadata = Cache(torch.bfloat16, device, True), builder(backend)
    whole = [
        tokens(sum(cuts), heads, torch.bfloat16, device, i)
        for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
    ]
    outs, done = [], 0
    for cut in cuts:
        others = [
            tokens(2 * beside, heads, torch.bfloat16, device, 90 + done)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        ]
        q, k, v = (
            torch.cat([y[:beside], x[done : done + cut], y[beside:]])
            for x, y in zip(whole, others, strict=True)
        )
        step = cache.step((beside, cut, beside), padding=0)
        impl.do_kv_cache_update(ONES, k, v, cache.kv, step.slot_mapping)
        out = torch.empty_like(q)
        impl.forward(ONES, q, k, v, cache.kv, metadata.build(0, step), out)
        outs.append(out[beside : beside + cut])
        done += cut
    return torch.cat(outs)


def test_batch_invariance_is_kept_bit_for_bit(backend, device, monkeypatch):
    assert backend.supports_batch_invariance()
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    alone = steps_in_one_sequence(backend, [70], 0, device)
    for cuts, beside in (([70], 3), ([33, 36, 1], 1), ([1] * 4 + [65, 1], 0)):
        assert torch.equal(steps_in_one_sequence(backend, cuts, beside, device), alone), cuts
    monkeypatch.delenv("VLLM_BATCH_INVARIANT")
    assert (steps_in_one_sequence(backend, [70], 0, device) - alone).abs().max() < 0.05


def test_what_batch_invariance_excludes_is_refused(backend, monkeypatch):
    cls = backend.get_impl_cls()
    assert cls(HEADS, HEAD_DIM, 0.3).fused_output_quant_supported(static_scale())
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert not cls(HEADS, HEAD_DIM, 0.3).fused_output_quant_supported(static_scale())
    with pytest.raises(NotImplementedError, match=r"alibi_slopes .* VLLM_BATCH_INVARIANT=1"):
        cls(HEADS, HEAD_DIM, 0.3, alibi_slopes=[0.5] * HEADS)
    for name in PER_TOKEN_HEAD:
        said = backend.supports_combination(
            64, torch.bfloat16, name, 16, False, False, False, False, (9, 0)
        )
        assert said == f"kv_cache_dtype {name} is not served under VLLM_BATCH_INVARIANT=1"


def static_scale() -> Any:
    name = "vllm.model_executor.layers.quantization.utils.quant_utils"
    return importlib.import_module(name).kFp8StaticTensorSym


def test_while_memory_is_measured_the_output_is_zero(backend):
    impl = backend.get_impl_cls()(HEADS, HEAD_DIM, 0.3)
    out = torch.full((3, HEADS, HEAD_DIM), torch.nan)
    assert impl.forward(ONES, out, out, out, torch.tensor([]), None, out) is out
    assert (out == 0).all()


def test_a_graph_serves_the_longest_sequence(backend):
    cache = Cache(torch.float32, torch.device("cpu"), True)
    step = cache.step((1, 1, 1))
    assert builder(backend).build(0, step).max_seq_len == 1
    assert builder(backend).build_for_cudagraph_capture(step).max_seq_len == 100
    step.max_seq_len = 1500  # of an encoder
    assert builder(backend).build_for_cudagraph_capture(step).max_seq_len == 1500


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("queries", [(40, 0, 0), (1, 36, 3), (1, 1, 1), (0, 0, 2)], ids=str)
def test_a_graph_of_mixed_batches_serves_any_lengths(
    backend, queries, invariant, device, monkeypatch
):
    if invariant:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with device:
        impl = backend.get_impl_cls()(HEADS, HEAD_DIM, 0.3, KV_HEADS)
    cache, count = Cache(torch.float32, device, True), 40
    k, v = (tokens(60, KV_HEADS, torch.float32, device, n) for n in (1, 2))
    step = cache.step((20, 20, 20), padding=0)
    impl.do_kv_cache_update(ONES, k, v, cache.kv, step.slot_mapping)
    keys = [(k[20 * b : 20 * b + 20], v[20 * b : 20 * b + 20]) for b in range(SEQUENCES)]
    # what vLLM captures with: so many tokens, spread evenly, perhaps all in one sequence
    dummy = Cache(torch.float32, device, True).step((14, 13, 13), padding=0)
    dummy.max_query_len = count
    build = builder(backend)
    assert build.get_cudagraph_support(None, None).name == "ALWAYS"
    kept = build.build_for_cudagraph_capture(dummy)
    # a replay has the same numbers and the same memory with other contents
    step = cache.step(queries, padding=count - sum(queries))
    dummy.query_start_loc.copy_(step.query_start_loc)
    dummy.seq_lens.copy_(step.seq_lens)
    dummy.block_table_tensor.copy_(step.block_table_tensor)
    q, k, v = (
        tokens(count, heads, torch.float32, device, 7 + i)
        for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
    )
    impl.do_kv_cache_update(ONES, k, v, cache.kv, step.slot_mapping)
    out = torch.full_like(q, torch.nan)
    impl.forward(ONES, q, k, v, cache.kv, kept, out)
    start = 0
    for queried, (old_k, old_v) in zip(queries, keys, strict=True):
        rows = slice(start, start + queried)
        found = torch.cat([old_k, k[rows]]), torch.cat([old_v, v[rows]])
        if queried:
            close(out[rows], expected(q[rows], *found, {}), torch.float32)
        start += queried
    assert (out[start:] == 0).all()


def test_layers_with_other_pages_share_the_rest_of_a_step(backend):
    step = Cache(torch.float32, torch.device("cpu"), True).step((1, 1, 1))
    build = builder(backend)
    assert build.supports_update_block_table
    first, table = build.build(0, step), torch.zeros(3, 2, dtype=torch.int32)
    second = build.update_block_table(first, table, step.slot_mapping)
    assert second.block_table is table is not first.block_table
    assert replace(second, block_table=first.block_table) == first


def test_what_is_not_served_is_refused(backend):
    cls, cache = backend.get_impl_cls(), Cache(torch.float32, torch.device("cpu"), True)
    out = torch.empty(3, HEADS, HEAD_DIM)
    with pytest.raises(NotImplementedError, match="output_block_scale must be None"):
        cls(HEADS, HEAD_DIM, 0.3).forward(
            ONES, out, out, out, cache.kv, None, out, output_block_scale=torch.ones(1)
        )
    with pytest.raises(NotImplementedError, match="kv_cache_dtype must be 'auto' for an encoder"):
        cls(HEADS, HEAD_DIM, 0.3, kv_cache_dtype="fp8", attn_type="encoder")
    step = cache.step((1, 1, 1))
    step.causal = torch.tensor([True, False, True])
    with pytest.raises(NotImplementedError, match="causal must be one bool"):
        builder(backend).build(0, step)
    step.causal, step.mm_req_doc_ranges = True, {0: [(0, 2)]}
    with pytest.raises(NotImplementedError, match="mm_req_doc_ranges"):
        builder(backend).build(0, step)
    with pytest.raises(TypeError, match="chunk_lookback"):
        cls(HEADS, HEAD_DIM, 0.3, chunk_lookback=3)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ((64, torch.bfloat16, "fp8", (9, 0)), None),
        ((64, torch.float32, "auto", (8, 0)), None),
        ((64, torch.float32, "auto", (7, 5)), "compute capability 8.0"),
        ((64, torch.bfloat16, "fp8_e5m2", (8, 6)), "capability 8.9"),
        ((64, torch.float32, "fp8", (9, 0)), "fp16 or bf16"),
        ((64, torch.bfloat16, "int4_per_token_head", (8, 0)), None),
        ((64, torch.bfloat16, "fp8_per_token_head", (8, 6)), "capability 8.9"),
        ((64, torch.bfloat16, "auto", None), None),
        ((64, torch.bfloat16, "fp8", None), None),
    ],
)
def test_what_vllm_asks(backend, asked, reason):
    head_size, dtype, cache, capability = asked
    said = backend.supports_combination(
        head_size, dtype, cache, 16, False, True, False, False, capability
    )
    assert said is None if reason is None else reason in said
    assert [d for d in range(4, 300, 4) if backend.supports_head_size(d)] == list(range(8, 257, 8))
    assert dtype in backend.supported_dtypes
    assert cache in backend.supported_kv_cache_dtypes


@pytest.mark.parametrize(
    ("arch", "cache", "reason"),
    [
        ("gfx90a", "auto", None),
        ("gfx90a", "fp8", "got amd:gfx90a"),
        ("gfx942", "fp8", None),
        ("gfx1201", "fp8_e5m2", None),
    ],
)
def test_amd_gpus_are_asked_by_their_name(backend, arch, cache, reason, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setenv("ATTN_COMMON_PLATFORM", f"amd:{arch}")
    detect.cache_clear()
    try:
        said = backend.supports_combination(
            64, torch.bfloat16, cache, 16, False, False, False, False, (9, 0)
        )
    finally:
        detect.cache_clear()
    assert said is None if reason is None else reason in said


@pytest.mark.parametrize("name", integration.NAMES)
def test_registering_twice_and_beside_another(backend, name):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    integration.register()
    registered = AttentionBackendEnum[name].get_class()
    assert registered.is_mla() == (name == "PREFIX_PREFILL_MLA")
    assert AttentionBackendEnum[registered.get_name()].get_class() is registered
    assert AttentionBackendEnum["CUSTOM"].get_class() is backend
    register_backend(AttentionBackendEnum[name], "another.Backend")
    try:
        with pytest.warns(RuntimeWarning, match=rf"{name}: another\.Backend"):
            integration.register()
        assert AttentionBackendEnum[name].get_path() == "another.Backend"
    finally:
        AttentionBackendEnum[name].clear_override()


def test_a_process_without_plugins_unpickles_the_name(backend):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    member = AttentionBackendEnum["PREFIX_PREFILL"]
    assert copy.deepcopy(member) is pickle.loads(pickle.dumps(member)) is member
    sent = pickle.dumps(member)
    del AttentionBackendEnum._member_map_["PREFIX_PREFILL"]
    del AttentionBackendEnum._value2member_map_[member.value]
    if hasattr(AttentionBackendEnum, "PREFIX_PREFILL"):
        delattr(AttentionBackendEnum, "PREFIX_PREFILL")
    found = pickle.loads(sent)
    assert found is AttentionBackendEnum["PREFIX_PREFILL"] is not member
    assert found.get_class() is backend


@pytest.fixture
def latent():
    integration.register()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum["PREFIX_PREFILL_MLA"].get_class()


def latent_layer(latent: Any, ranks: int = 1, kv_cache_dtype: str = "auto") -> Any:
    """Return a layer without what vLLM's own part of it needs."""
    cls = latent.get_impl_cls()
    impl = cls.__new__(cls)
    impl.kv_lora_rank, impl.scale, impl.dcp_world_size = 512, 0.04, ranks
    impl.kv_cache_dtype = kv_cache_dtype
    return impl


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(
    ("queries", "causal", "ranks"), [(1, True, 1), (3, True, 1), (3, False, 1), (1, True, 2)]
)
def test_decoding_of_latent_attention(
    latent, queries, causal, ranks, invariant, device, monkeypatch
):
    if invariant:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert latent.is_mla()
    made = torch.Generator().manual_seed(4)
    cache = torch.randn(6, PAGE, 576, generator=made).to(device, torch.bfloat16)
    q = torch.randn(3 * queries, 4, 576, generator=made).to(device, torch.bfloat16)
    table = torch.tensor([[4, 1, 0], [5, 2, 3], [0, 0, 0]], dtype=torch.int32, device=device)
    lengths = torch.tensor([20, 33, 0], dtype=torch.int32, device=device)
    # the third sequence is padding
    starts = torch.tensor([0, queries, 2 * queries, 2 * queries, 99], dtype=torch.int32)
    metadata = SimpleNamespace(
        decode=SimpleNamespace(block_table=table, seq_lens=lengths),
        query_start_loc=starts.to(device),
        max_seq_len=40,
        causal=causal,
    )
    impl = latent_layer(latent, ranks)
    parts = q[..., :512], q[..., 512:]
    out, lse = impl.forward_mqa(parts, cache, metadata, ONES)
    assert (lse is None) == (ranks == 1)
    for b in range(2):
        keys = cache[table[b].long()].flatten(0, 1)[: int(lengths[b])].double()
        rows = slice(b * queries, (b + 1) * queries)
        s = torch.einsum("qhd,kd->qhk", q[rows].double(), keys) * 0.04
        if causal:
            ahead = torch.arange(queries, device=device) + len(keys) - queries
            hidden = torch.arange(len(keys), device=device) > ahead[:, None]
            s = s.masked_fill(hidden[:, None], -torch.inf)
        close(out[rows], (s.softmax(-1) @ keys[:, :512]).cpu(), torch.bfloat16)
        if lse is not None:
            torch.testing.assert_close(lse[rows].double(), s.logsumexp(-1), rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(INTERPRETED, reason="interpreted FP8 stores round wrongly")
def test_decoding_of_latent_attention_over_fp8(latent, device):
    if not detect(device).supports_fp8:
        pytest.skip("no FP8")
    stored = getattr(torch, fp8_dtype(detect(device)))
    made = torch.Generator().manual_seed(4)
    cache = torch.randn(3, PAGE, 576, generator=made).to(device).to(stored)
    q = torch.randn(1, 4, 576, generator=made).to(device, torch.bfloat16)
    metadata = SimpleNamespace(
        decode=SimpleNamespace(
            block_table=torch.tensor([[2, 0, 1]], dtype=torch.int32, device=device),
            seq_lens=torch.tensor([40], dtype=torch.int32, device=device),
        ),
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32, device=device),
        max_seq_len=40,
        causal=True,
    )
    layer = Layer(*(torch.tensor(x, device=device) for x in (0.5, 9.0)))
    impl = latent_layer(latent, kv_cache_dtype="fp8")
    out, _ = impl.forward_mqa(q, cache.view(torch.uint8), metadata, layer)
    keys = cache.double()[[2, 0, 1]].flatten(0, 1)[:40] * 0.5
    s = torch.einsum("qhd,kd->qhk", q.double(), keys) * 0.04
    close(out, (s.softmax(-1) @ keys[:, :512]).cpu(), torch.bfloat16)


def test_what_latent_attention_does_not_serve(latent):
    cls, given = latent.get_impl_cls(), [4, 576, 0.04, 1, None, None, "auto", None, "decoder", None]
    for place, name, value in (
        (4, "alibi_slopes", [0.5] * 4),
        (5, "sliding_window", 7),
        (7, "logits_soft_cap", 2.0),
        (8, "attn_type", "encoder"),
    ):
        wrong = given[:place] + [value] + given[place + 1 :]
        with pytest.raises(NotImplementedError, match=f"{name} must be"):
            cls(*wrong, kv_lora_rank=512)
    with pytest.raises(NotImplementedError, match="head_dim_v must be"):
        cls(*given, kv_lora_rank=571)
    assert cls.supports_dcp
    assert not cls.supports_pcp
    assert latent.supports_batch_invariance()
    builder_cls = latent.get_builder_cls()
    assert builder_cls.query_len_support.name == builder_cls._cudagraph_support.name[:7]


@pytest.mark.skipif(
    all(x.name != "prefix-prefill" for x in distributions()),
    reason="the package is not installed: sources have no entry points",
)
def test_vllm_finds_the_entry_point():
    (found,) = (x for x in entry_points(group="vllm.general_plugins") if x.name == "prefix_prefill")
    assert found.load() is integration.register


@pytest.mark.skipif(not _vllm.IS_REAL, reason="vLLM is not installed: nox -s vllm")
def test_the_stand_in_has_the_signatures_of_vllm():
    for module, content in _vllm.STAND_INS.items():
        for name, ours in content.items():
            theirs = getattr(importlib.import_module(module), name)
            if name == "CommonAttentionMetadata":
                known = {x.name: (x.default, x.type) for x in fields(theirs)}
                assert {x.name for x in fields(ours)} <= set(known)
                assert all(x.default == known[x.name][0] for x in fields(ours))
            elif inspect.isclass(ours):
                for method, function in vars(ours).items():
                    if inspect.isroutine(function) and not method.startswith("__"):
                        mine, real = (inspect.signature(getattr(x, method)) for x in (ours, theirs))
                        assert list(mine.parameters) == list(real.parameters), (name, method)
            elif callable(ours):
                mine, real = inspect.signature(ours), inspect.signature(theirs)
                assert list(mine.parameters) == list(real.parameters), name
