"""Masks of ``transformers``: what is recognised, stored, or written out, and what raises."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="the extra [transformers] is absent")

import flash_attn_triton.integrations.transformers as integration
from flash_attn_triton import attention_reference
from flash_attn_triton.integrations import _masks
from transformers import masking_utils

from . import _models as models

pytestmark = pytest.mark.eager


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_custom_mask_of_four_dimensions_is_a_bias(device, dtype):
    inputs = models.batch(device)
    seen = (
        torch.rand(2, 1, models.TOKENS, models.TOKENS, generator=torch.Generator().manual_seed(4))
        < 0.5
    )
    seen = (seen | torch.eye(models.TOKENS, dtype=torch.bool)).to(device)
    additive = torch.zeros(seen.shape, device=device).masked_fill(~seen, -1e30)
    model, eager = models.pair(models.llama, device)
    want = eager(**inputs, attention_mask=additive).logits
    mask = seen if dtype == torch.bool else additive
    models.assert_close(model(**inputs, attention_mask=mask).logits, want)


def test_unknown_patterns_are_written_out(device):
    """A mask function of the model's own, here a prefix that everyone sees."""

    def prefix(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx < 3

    model, eager = models.pair(models.llama, device)
    inputs = models.batch(device, models.RIGHT)
    outputs = []
    for each in (model, eager):
        embeds = each.model.embed_tokens(inputs["input_ids"])
        mask = masking_utils.create_causal_mask(
            config=each.config,
            inputs_embeds=embeds,
            attention_mask=inputs["attention_mask"],
            past_key_values=None,
            or_mask_function=prefix,
        )
        assert mask.ndim == 4
        outputs.append(each(inputs_embeds=embeds, attention_mask=mask).logits)
    keep = models.valid(inputs)
    models.assert_close(outputs[0][keep], outputs[1][keep])


def test_padding_is_packed_and_indices_are_shared(device):
    """No padded token reaches the kernel, and the mask is looked into once per forward pass."""
    model = models.build(models.bert, device, models.NAME)
    inputs = models.batch(device, models.RIGHT)
    tokens = []

    def record(q: Tensor, *args: Any, **kwargs: Any) -> Any:
        tokens.append(q.shape[0])
        return integration_varlen(q, *args, **kwargs)

    integration_varlen = integration.flash_attn_varlen_func
    with (
        mock.patch.object(integration, "flash_attn_varlen_func", record),
        mock.patch.object(_masks, "_sequences", wraps=_masks._sequences) as sequences,
    ):
        model(**inputs)
    assert tokens == [2 * models.TOKENS - sum(models.PADDED)] * 2
    assert sequences.call_count == 1


def test_mask_function_stores_no_more_than_needed(device):
    ones = torch.ones(2, 64, dtype=torch.bool, device=device)
    sizes = {"batch_size": 2, "q_length": 64, "kv_length": 64, "device": device}
    window = masking_utils.sliding_window_causal_mask_function(8)
    assert integration.attention_mask(**sizes) is None
    assert integration.attention_mask(**sizes, attention_mask=ones) is None
    wide = masking_utils.sliding_window_causal_mask_function(64)
    assert integration.attention_mask(**sizes, mask_function=wide) is None
    narrow = integration.attention_mask(**sizes, mask_function=window, attention_mask=ones)
    assert narrow.shape == (2, 64)
    layout = _masks.layout_of(narrow)
    assert layout.pattern == _masks.Pattern(causal=True, left=7)
    assert layout.packing is None
    narrow[0, 0] = False
    assert _masks.layout_of(narrow) is None  # written to: what was found no longer holds
    both = masking_utils.sliding_window_bidirectional_mask_function(3)
    layout = _masks.layout_of(integration.attention_mask(**sizes, mask_function=both))
    assert layout.pattern == _masks.Pattern(causal=False, left=3, right=3)


@pytest.mark.parametrize("make", [models.bert, models.mistral], ids=lambda f: f.__name__)
def test_masks_without_what_was_attached_still_work(device, make):
    """Copies of a mask, as made between devices, lose what the mask function found out."""
    inputs = models.batch(device, models.RIGHT)
    model, eager = models.pair(make, device)
    with mock.patch.object(_masks, "_attach", lambda mask, *_: mask):
        got = models.output_of(model, inputs)
    keep = models.valid(inputs)
    models.assert_close(got[keep], models.output_of(eager, inputs)[keep])


# dynamo instantiates autograd functions, which torch deprecates
@pytest.mark.parametrize("name", ["", "flash_attn_triton", "my_sdpa", "owner/repo", "paged|x"])
def test_names_that_transformers_would_take_for_its_own_are_refused(device, name):
    with pytest.raises(ValueError, match=r"name must not .* take .triton_attention."):
        integration.register(name)


HOLES = torch.tensor([[1, 1, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1, 0]])
SEQUENCES = torch.tensor([[1, 1, 1, 2, 2, 2, 2], [0, 4, 4, 3, 3, 3, 0]])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("sliding_window", [None, 3])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    "mask",
    [HOLES.bool(), HOLES, SEQUENCES.int()],
    ids=["bool", "int64", "sequence numbers"],
)
def test_masks_given_to_the_attention_function(device, mask, is_causal, sliding_window, with_bias):
    """Masks that no mask function made, against the same masks written out."""
    q = torch.randn(2, 2, 7, 8, device=device)
    position_bias = torch.randn(1, 2, 7, 7, device=device) if with_bias else None
    distance = torch.arange(7)[:, None] - torch.arange(7)
    seen = (mask != 0)[:, None, None, :].expand(2, 1, 7, 7)
    if is_causal:
        seen = seen & (distance >= 0)
    if sliding_window is not None:
        seen = seen & (distance.abs() < sliding_window)
    if mask.dtype == torch.int32:
        seen = seen & (mask[:, None, :, None] == mask[:, None, None, :])
    bias = torch.zeros(seen.shape).masked_fill(~seen, float("-inf")).to(device)
    bias = bias if position_bias is None else bias + position_bias
    heads_last = q.transpose(1, 2)
    want = attention_reference(heads_last, heads_last, heads_last, bias=bias)
    got, _ = integration.attention_forward(
        torch.nn.Module(),
        q,
        q,
        q,
        mask.to(device),
        is_causal=is_causal,
        sliding_window=sliding_window,
        position_bias=position_bias,
    )
    keep = (mask != 0).to(device)
    torch.testing.assert_close(got[keep], want[keep])


def test_masks_that_are_written_out_are_cut_at_the_ends_of_packed_sequences(device):
    q = torch.randn(1, 2, 7, 8, device=device)
    seen = (torch.rand(1, 1, 7, 7) < 0.7) | torch.eye(7, dtype=torch.bool)
    number = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    both = seen & (number[:, None] == number)
    ends = torch.tensor([0, 3, 5, 7], dtype=torch.int32, device=device)
    module = torch.nn.Module()
    packed = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 3, "max_length_k": 3}
    got, _ = integration.attention_forward(module, q, q, q, seen.to(device), **packed)
    want, _ = integration.attention_forward(module, q, q, q, both.to(device))
    assert torch.equal(got, want)


@pytest.mark.parametrize("lengths", [(7, 7), (4, 7)])
def test_a_mask_of_keys_keeps_every_query_of_another_sequence(device, lengths):
    queries, keys = lengths
    q, k = torch.randn(2, 2, queries, 8, device=device), torch.randn(2, 2, keys, 8, device=device)
    mask = HOLES.bool().to(device)
    got, _ = integration.attention_forward(torch.nn.Module(), q, k, k, mask, is_causal=False)
    bias = torch.zeros(2, 1, 1, keys, device=device).masked_fill(~mask[:, None, None], -torch.inf)
    heads_last = [t.transpose(1, 2) for t in (q, k, k)]
    torch.testing.assert_close(got, attention_reference(*heads_last, bias=bias))


def attend(device: torch.device, mask: Tensor | None = None, **options: Any) -> Tensor:
    q = torch.randn(2, 2, 4, 8, device=device)
    mask = mask if mask is None else mask.to(device)
    return integration.attention_forward(torch.nn.Module(), q, q, q, mask, **options)[0]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"output_attentions": True}, NotImplementedError, "output_attentions: attention weights"),
        ({"cache": object()}, NotImplementedError, "cache: paged caches"),
        ({"block_indices": torch.ones(1)}, NotImplementedError, "block_indices: attention to"),
        ({"sliding_window": 0}, ValueError, "sliding_window must be at least 1, got 0"),
        ({"cu_seq_lens_q": torch.ones(1)}, ValueError, "must be given together"),
        ({"mask": torch.ones(2, 4)}, TypeError, "must be bool or int, got torch.float32"),
        ({"mask": torch.ones(2, 5).bool()}, ValueError, r"shape \[2, at most 4\], got \[2, 5\]"),
        ({"mask": torch.ones(2, 4, 4)}, ValueError, "must have 2 or 4 dimensions, got 3"),
        ({"mask": torch.ones(2, 1, 4, 4).int()}, TypeError, "must be bool or float, got"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_cannot_be_honoured_raises(device, options, error, message):
    with pytest.raises(error, match=message):
        attend(device, **options)
