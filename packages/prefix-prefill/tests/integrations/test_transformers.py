"""Continuous batching of ``transformers`` on our pages, against ``generate`` of the same model.

Written for 5.17 and for what it became since; ``nox -s transformers`` runs it with the newest.
"""

from __future__ import annotations

import importlib
import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from prefix_prefill._paged import ops
from prefix_prefill.integrations import _transformers_flash as flash
from prefix_prefill.integrations import transformers as integration
from transformers.generation import ContinuousBatchingConfig

pytestmark = pytest.mark.eager

NAME = integration.register()
# names of 5.17, which hands on pages
HAS_PREFIX = NAME.startswith("paged|")
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    # answers that change from token to token
    "initializer_range": 0.3,
}


def llama(attention: str) -> Any:
    config = transformers.LlamaConfig(**SIZES, attn_implementation=attention)
    return transformers.LlamaForCausalLM(config)


def mistral(attention: str) -> Any:
    """A window in every layer."""
    config = transformers.MistralConfig(**SIZES, sliding_window=6, attn_implementation=attention)
    return transformers.MistralForCausalLM(config)


def gemma(attention: str) -> Any:
    """Layers with a window, layers without, and capped scores."""
    config = transformers.Gemma2Config(
        **SIZES,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
        attn_logit_softcapping=4.0,
        query_pre_attn_scalar=8,
        attn_implementation=attention,
    )
    return transformers.Gemma2ForCausalLM(config)


def gpt_oss(attention: str) -> Any:
    """Sinks."""
    config = transformers.GptOssConfig(
        **SIZES,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
        num_local_experts=2,
        num_experts_per_tok=1,
        pad_token_id=0,
        attn_implementation=attention,
    )
    return transformers.GptOssForCausalLM(config)


def seeded(make: Any, attention: str, device: torch.device) -> Any:
    torch.manual_seed(3)
    model = make(attention).eval().to(device)
    for name, x in model.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(x)
    return model


def generation(tokens: int) -> transformers.GenerationConfig:
    # no token ends an answer, so that all have the same length
    return transformers.GenerationConfig(
        max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )


def prompts_of(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    # two begin with the same blocks
    shared = torch.randint(8, 97, (9,), generator=generator).tolist()
    found = [torch.randint(8, 97, (n,), generator=generator).tolist() for n in lengths]
    return [*found, shared, shared + found[0]]


def batched(model: Any, prompts: list[list[int]], tokens: int, **options: Any) -> list[list[int]]:
    size = {"block_size" if HAS_PREFIX else "page_size": 4}
    config = ContinuousBatchingConfig(**size, **options)
    found = model.generate_batch(
        prompts, generation_config=generation(tokens), continuous_batching_config=config
    )
    assert [x.error for x in found.values()] == [None] * len(prompts)
    return [list(x.generated_tokens) for x in found.values()]


@pytest.fixture
def calls(monkeypatch):
    """What the attention function was called with: new keys beside the cache? a window?"""
    found = set()
    attend = integration.paged_attn_func

    def paged_attn_func(*args: Any, **options: Any) -> Any:
        found.add((options.get("k") is not None, options["window_size"] != (-1, -1)))
        return attend(*args, **options)

    for module in (integration, flash):
        monkeypatch.setattr(module, "paged_attn_func", paged_attn_func)
    return found


# an interpreted model takes long: these two have all that the others have, but for sinks
MODELS = [llama, gemma] if ops.interpreted() else [llama, gemma, mistral]
if HAS_PREFIX and not ops.interpreted():
    # later it lists its flash implementations, and takes no other
    MODELS.append(gpt_oss)


@pytest.mark.parametrize("make", MODELS)
def test_generate_batch_says_what_generate_says(make, device, calls):
    small = ops.interpreted()
    lengths, tokens = ([1, 11], 2) if small else ([1, 11, 29, 5], 8)
    prompts = prompts_of(lengths)
    # chunks of prompts beside sequences that decode
    options = {"max_batch_tokens": 8 if small else 12, "num_blocks": 40}
    got = batched(seeded(make, NAME, device), prompts, tokens, **options)
    plain = seeded(make, "eager", device)
    for prompt, answer in zip(prompts, got, strict=True):
        ids = torch.tensor([prompt], device=device)
        with torch.no_grad():
            out = plain.generate(ids, generation_config=generation(tokens))
        assert answer == out[0, len(prompt) :].tolist()
    windows = {window for _, window in calls}
    assert windows == {llama: {False}, mistral: {True}}.get(make, {False, True})
    if make is llama and HAS_PREFIX:
        # a step of prompts alone, and steps that read the cache
        assert calls == {(True, False), (False, False)}


def test_without_a_cache_it_says_what_to_do(device):
    model = seeded(llama, NAME, device)
    with pytest.raises(ValueError, match="must be that of continuous batching, got None"):
        model(torch.tensor([[1, 2, 3]], device=device))


WITH_PREFIX = ["prefix_prefill", "paged|", "paged|my_flash", "paged|sdpa", "paged|a/b", "paged|a|b"]
WITH_FLASH = [
    "prefix_prefill",
    "paged|prefix_prefill",
    "flash_attn_triton",
    "a/flash2",
    "sdpa_flash3",
]
WITH_FLASH += ["flash_attention_2", "flash|2"]


@pytest.mark.parametrize("name", WITH_PREFIX if HAS_PREFIX else WITH_FLASH)
def test_names_that_mean_something_else_are_answered_with_the_right_one(name):
    with pytest.raises(ValueError, match="name must") as told:
        integration.register(name)
    assert repr(integration.register()) in str(told.value)
    assert integration.register(NAME) == NAME


@pytest.mark.skipif(HAS_PREFIX, reason="5.17 hands on pages in every step")
@pytest.mark.skipif(ops.interpreted(), reason="an interpreted model takes long")
def test_a_step_that_decodes_reads_pages(device, monkeypatch):
    """Which the library hands on for GPUs only, unless it is told otherwise."""
    initialization = "transformers.generation.continuous_batching.initialization"
    path = f"{initialization}.ensure_decode_fast_path_is_available"
    monkeypatch.setattr(path, lambda *_: None)
    found, append = [], flash._append
    monkeypatch.setattr(flash, "_append", lambda *x: found.append(x) or append(*x))
    prompts = prompts_of([1, 11, 29, 5])
    options = {"max_batch_tokens": 64, "num_blocks": 40, "max_blocks_per_request": 16}
    got = batched(seeded(llama, NAME, device), prompts, 8, **options)
    plain = seeded(llama, "eager", device)
    for prompt, answer in zip(prompts, got, strict=True):
        ids = torch.tensor([prompt], device=device)
        with torch.no_grad():
            out = plain.generate(ids, generation_config=generation(8))
        assert answer == out[0, len(prompt) :].tolist()
    assert found


@pytest.mark.skipif(HAS_PREFIX, reason="5.17 imports nothing for a name of its own")
def test_another_flash_implementation_does_not_take_its_place(device):
    """The library keeps the functions of the last one that was asked for."""
    importing = importlib.import_module("transformers.modeling_flash_attention_utils")
    integration.register("my_flash_3")
    seeded(llama, "my_flash_3", device)
    assert importing.lazy_import_flash_attention(NAME)[0][2] is not None
    with pytest.raises(ValueError, match="Could not find the currently requested"):
        importing.lazy_import_flash_attention("flash_of_nobody")


def in_step(**options: Any) -> torch.Tensor:
    """Attend with three sequences, of which the last has no token, as from 5.19 on."""
    ints = {"dtype": torch.int32}
    given = {
        "cu_seq_lens_q": torch.tensor([0, 1, 3, 3], **ints),
        "cu_seq_lens_k": torch.tensor([0, 5, 9, 9], **ints),
        "max_length_q": 2,
        "max_length_k": 5,
        "read_index": [],
        "write_index": [],
    } | options
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(1, heads, n, 8, generator=generator) for heads, n in ((4, 3), (2, 9), (2, 9))
    )
    given = {"q": q, "k": k, "v": v} | given
    q, k, v = (given.pop(name) for name in "qkv")
    out, weights = flash.attention_forward(SimpleNamespace(layer_idx=0), q, k, v, **given)
    assert weights is None
    return out


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])])
def test_gathered_keys_are_those_of_their_sequence(window, sinks):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, h, n, 8, generator=generator) for h, n in ((4, 3), (2, 9), (2, 9)))
    out = in_step(sliding_window=window, sinks=sinks, scaling=0.7)
    assert out.shape == (1, 3, 4, 8)
    for row, first, last in ((0, 0, 5), (1, 5, 8), (2, 5, 9)):
        seen = slice(first if window is None else max(first, last - window), last)
        keys, values = (x[0, :, seen].repeat_interleave(2, 0).double() for x in (k, v))
        scores = torch.einsum("hd,hkd->hk", q[0, :, row].double(), keys) * 0.7
        extra = torch.full((4, 1), -math.inf) if sinks is None else sinks[:, None]
        weights = torch.cat([scores, extra.double()], 1).softmax(1)[:, :-1]
        want = torch.einsum("hk,hkd->hd", weights, values)
        torch.testing.assert_close(out[0, row].double(), want, rtol=1e-5, atol=1e-5)


def test_a_new_key_is_written_to_its_page_and_padding_to_none():
    """Two sequences of 5 and 4 keys, and one of none, whose table has no page."""
    flat = torch.randn(12 * 4, 2, 8, generator=torch.Generator().manual_seed(2))
    # pages of keys and of values in turn, as the library has them
    pages = flat.view(12, 4, 2, 8)
    k_cache, v_cache = pages[:-1], pages[1:]
    before = flat.clone()
    k, v = torch.randn(2, 1, 2, 3, 8, generator=torch.Generator().manual_seed(3)).unbind()
    step = {
        "cu_seq_lens_q": torch.tensor([0, 1, 2, 2], dtype=torch.int32),
        "max_length_q": 1,
        # what it is in such a step
        "max_length_k": 1,
        "block_table": torch.tensor([[4, 8], [2, -1], [-1, -1]], dtype=torch.int32),
    }
    out = in_step(k=k, v=v, k_cache=k_cache, v_cache=v_cache, **step)
    written = {8 * 4: k[0, :, 0], 9 * 4: v[0, :, 0], 2 * 4 + 3: k[0, :, 1], 3 * 4 + 3: v[0, :, 1]}
    for at, want in written.items():
        assert torch.equal(flat[at], want)
    # the first page is a place for what belongs to nobody
    changed = (flat != before).flatten(1).any(1).nonzero().flatten().tolist()
    assert set(changed) == {*written, 0, 4}
    at = [*range(16, 20), 32, *range(8, 12)]
    keys, values = (flat[[i + j for i in at]].transpose(0, 1)[None] for j in (0, 4))
    q_lens = torch.tensor([0, 1, 2, 2], dtype=torch.int32)
    want = in_step(k=keys, v=values, cu_seq_lens_q=q_lens)
    torch.testing.assert_close(out[0, :2], want[0, :2])
    assert not out[0, 2:].any()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attention_mask", torch.zeros(1, 1, 1, 1)),
        ("head_mask", torch.ones(4)),
        ("dropout", 0.1),
        ("is_causal", False),
    ],
)
def test_what_a_later_step_does_not_know_raises(name, value):
    def update(**_: Any) -> None:
        raise AssertionError("the cache was changed")

    with pytest.raises(NotImplementedError, match=name):
        in_step(cache=SimpleNamespace(update=update), **{name: value})
    for options, what in (
        ({"softcap": -1.0}, "softcap must be finite"),
        ({"sinks": torch.zeros(3)}, r"sinks must be \[heads_q\]"),
        ({"sliding_window": 0}, "sliding_window must be from 1, got 0"),
    ):
        with pytest.raises(ValueError, match=what):
            in_step(cache=SimpleNamespace(update=update), **options)
    with pytest.raises(ValueError, match="cu_seq_lens_q must be that of continuous batching"):
        in_step(cu_seq_lens_q=None)


@pytest.mark.parametrize("version", ["5.16.2", "5.25.0"])
def test_other_versions_are_refused_with_what_to_install(version, monkeypatch):
    # the library puts another module in its own place while it runs
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    monkeypatch.delitem(sys.modules, integration.__name__)
    with pytest.raises(ImportError) as told:
        importlib.import_module(integration.__name__)
    needed = "needs transformers 5.17 or newer, before 5.25"
    install = 'pip install "transformers>=5.17,<5.25"'
    assert str(told.value) == f"{integration.__name__} {needed}, got {version}: {install}"


def test_one_version_between_is_refused_as_well(monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.18.0")
    monkeypatch.delitem(sys.modules, integration.__name__)
    with pytest.raises(ImportError, match=r"needs transformers 5\.17, or 5\.19 to 5\.24"):
        importlib.import_module(integration.__name__)


def test_a_version_without_what_is_imported_is_named(monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.25.0")
    monkeypatch.setitem(sys.modules, "transformers.utils", None)
    monkeypatch.delitem(
        sys.modules, integration.__name__.replace("transformers", "_transformers_step")
    )
    monkeypatch.delitem(sys.modules, integration.__name__)
    with pytest.raises(ImportError, match=r"before 5\.25, got 5\.25\.0: pip"):
        importlib.import_module(integration.__name__)


class Cache:
    """What the adapter reads of the library's cache: two layers, the second with a ring."""

    def __init__(self, device: torch.device, ring: int = 1) -> None:
        self.block_size, self.write_trash_index = 4, 60
        values = torch.linspace(-1, 1, 64 * 2 * 8, device=device).sin().view(64, 2, 8)
        self.key_cache = [values.clone() for _ in range(2)]
        self.value_cache = [values.flip(0) for _ in range(2)]
        self.layer_index_to_group_indices = {0: (0, 0), 1: (0, 1)}
        self.sliding_windows = dict.fromkeys((0, 1), ring)


def step(device: torch.device, slots: list[int], layer: int = 0, **options: Any) -> Any:
    """Attend as a layer does with the last of a sequence's slots as that of its new token."""
    torch.manual_seed(len(slots) + layer)
    ints = {"dtype": torch.int32, "device": device}
    given = {
        "cache": options.pop("cache", None) or Cache(device),
        "cu_seq_lens_q": torch.tensor([0, 1], **ints),
        "cu_seq_lens_k": torch.tensor([0, len(slots)], **ints),
        "max_seqlen_q": 1,
        "max_seqlen_k": len(slots),
        "read_index": [torch.tensor(slots, device=device)],
        "write_index": [torch.tensor(slots[-1:], device=device)],
    } | options
    q, k = (torch.randn(1, heads, 1, 8, device=device) for heads in (4, 2))
    module = SimpleNamespace(layer_idx=layer)
    out, weights = integration.attention_forward(module, q, k, k.clone(), **given)
    assert weights is None
    return out


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("head_mask", torch.ones(4)),
        ("output_attentions", True),
        ("attention_mask", torch.zeros(1, 1, 1, 1)),
        ("position_bias", torch.zeros(1)),
        ("block_table", torch.zeros(1, 1, 1, dtype=torch.int32)),
        ("dropout", 0.1),
        ("is_causal", False),
    ],
)
def test_what_it_does_not_know_raises(name, value, device):
    step(device, [8, 9], **{"use_cache": False, "position_ids": torch.zeros(1), "head_mask": None})
    with pytest.raises(NotImplementedError, match=name):
        step(device, [8, 9], **{name: value})


def test_a_window_wider_than_the_ring_raises(device):
    with pytest.raises(ValueError, match="sliding_window must be from 1 to the 6"):
        step(device, [8, 9], cache=Cache(device, ring=6), sliding_window=7)


def test_the_window_is_that_of_the_ring(device):
    """Where a layer does not say it; three keys of a ring of three, and a new one."""
    found = [
        step(device, [8, 9, 10, 61], cache=Cache(device, ring=ring), **window)
        for ring, window in ((3, {}), (3, {"sliding_window": 3}), (4, {}), (4, {}))
    ]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert torch.equal(found[2], found[3])


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("scaling", [None, 2.0])
def test_scores_are_scaled_and_capped(softcap, scaling, device):
    cache, slots = Cache(device), [8, 9, 10, 11, 40]
    out = step(device, slots, cache=cache, softcap=softcap, scaling=scaling)
    torch.manual_seed(len(slots))
    q = torch.randn(1, 4, 1, 8, device=device)[0, :, 0].double()
    # the step has written the new key and value
    k, v = (x[0][slots].double() for x in (cache.key_cache, cache.value_cache))
    scores = torch.einsum("hd,khd->hk", q, k.repeat_interleave(2, 1))
    scores = scores * (8**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    want = torch.einsum("hk,khd->hd", scores.softmax(1), v.repeat_interleave(2, 1))
    torch.testing.assert_close(out[0, 0].double(), want, rtol=1e-5, atol=1e-5)


def test_sinks_have_three_names(device):
    sinks = torch.randn(4, device=device)
    outs = [step(device, [8, 9], **{n: sinks}) for n in ("s_aux", "learnable_sink", "sinks")]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    assert not torch.equal(outs[0], step(device, [8, 9]))
    with pytest.raises(ValueError, match="s_aux and sinks are names of one argument"):
        step(device, [8, 9], s_aux=sinks, sinks=sinks.clone())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"s_aux": torch.zeros(4), "sinks": torch.zeros(4)}, "s_aux and sinks are names of one"),
        ({"sinks": torch.zeros(3)}, r"sinks must be \[heads_q\], \[4\], got \[3\]"),
        ({"sinks": torch.zeros(4, requires_grad=True)}, "sinks must not require one"),
        ({"softcap": -1.0}, "softcap must be finite and at least 0.0, got -1.0"),
        ({"scaling": math.nan}, "softmax_scale must be finite, got nan"),
    ],
)
def test_a_step_that_raises_has_written_nothing(options, message):
    cpu = torch.device("cpu")
    cache, fresh = Cache(cpu), Cache(cpu)
    with pytest.raises((ValueError, NotImplementedError), match=message):
        step(cpu, [8, 9], cache=cache, **options)
    assert torch.equal(cache.key_cache[0], fresh.key_cache[0])


def test_a_step_that_comes_again_makes_its_tables_again(device, monkeypatch):
    """As one that runs, and then is captured with the same tensors."""
    made = []
    make = integration._make_pages
    monkeypatch.setattr(integration, "_make_pages", lambda *x: made.append(x) or make(*x))
    cache, indices = Cache(device), [torch.tensor([8, 9, 10, 11, 40], device=device)]
    for _ in range(2):
        for layer in range(2):
            step(device, [8, 9, 10, 11, 40], layer, cache=cache, read_index=indices)
    assert len(made) == 2
    step(device, [8, 9], 1, cache=cache)
    assert len(made) == 3
    # of another model
    step(device, [8, 9, 10, 11, 40], 1, cache=Cache(device), read_index=indices)
    assert len(made) == 4


def test_padding_is_not_written(device):
    """As behind the tokens of a step that is captured into a CUDA graph."""
    cache = Cache(device)
    before = cache.key_cache[0][60:].clone()
    ints = {"dtype": torch.int32, "device": device}
    q = torch.randn(1, 4, 3, 8, device=device)
    k = torch.randn(1, 2, 3, 8, device=device)
    out, _ = integration.attention_forward(
        SimpleNamespace(layer_idx=0),
        q,
        k,
        k,
        cache=cache,
        # a sequence of one token, two that are empty
        cu_seq_lens_q=torch.tensor([0, 1, 1, 1], **ints),
        cu_seq_lens_k=torch.tensor([0, 2, 2, 2], **ints),
        max_seqlen_q=3,
        max_seqlen_k=16,
        read_index=[torch.tensor([8, 9, 60, 60], device=device)],
        write_index=[torch.tensor([9, 60, 60], device=device)],
    )
    assert out.shape == (1, 3, 4, 8)
    assert not out[0, 1:].any()
    assert torch.equal(cache.key_cache[0][9], k[0, :, 0])
    assert torch.equal(cache.key_cache[0][60:], before)
