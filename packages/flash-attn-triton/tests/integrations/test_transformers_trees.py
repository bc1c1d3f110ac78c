"""Models of ``transformers`` over trees of rows: each row as it is alone."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="the extra [transformers] is absent")

import flash_attn_triton.integrations.transformers as integration
import transformers
from flash_attn_triton import trees
from flash_attn_triton._linked.host.forms import interpreted

from . import _models as models

pytestmark = pytest.mark.eager

PROMPT = [5, 6, 7, 8, 9]
ROWS = [[*PROMPT, 10, 11, 12], [*PROMPT, 10, 13], PROMPT, [20, 21], [4], [*PROMPT, 10, 11, 14, 15]]


def qwen3():
    config = transformers.Qwen3Config(**models.GROUPED, head_dim=8)
    return transformers.Qwen3ForCausalLM, config


def wide(name):
    """No window is narrower than a row."""

    def make():
        model_class, config = models.DECODERS[name]()
        config.sliding_window = 64
        return model_class, config

    return make


SERVED = {"llama": models.llama, "qwen3": qwen3, **{x: wide(x) for x in ("gemma2", "gpt_oss")}}


def labels_of(rows, device):
    labels = [torch.tensor([*row[1:], trees.IGNORED]) for row in rows]
    return torch.cat(labels).to(device)


def alone(model, rows, device) -> Tensor:
    """Log-probabilities of each row by itself."""
    found = []
    for row in rows:
        ids = torch.tensor([row], device=device)
        logits = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        found += [logits[:-1].gather(1, ids[0, 1:, None])[:, 0], logits.new_zeros(1)]
    return torch.cat(found)


def gradients(model, loss):
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.autograd.grad(loss, parameters, allow_unused=True)


def padded(rows, side, device):
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    for i, row in enumerate(rows):
        start = longest - len(row) if side == models.LEFT else 0
        ids[i, start : start + len(row)] = torch.tensor(row, dtype=torch.int64)
    return {"input_ids": ids.to(device), "attention_mask": (ids != 0).long().to(device)}


@pytest.mark.parametrize("checkpoints", [False, True], ids=["plain", "checkpoints"])
@pytest.mark.parametrize("name", SERVED)
def test_each_row_has_what_it_has_alone(name, checkpoints, device):
    ours, eager = models.pair(SERVED[name], device)
    if checkpoints:
        ours.train().gradient_checkpointing_enable({"use_reentrant": False})
    batch = trees.pack(ROWS).to(device)
    logits = ours(**integration.tree_inputs(batch)).logits
    got, want = trees.log_probs(logits, batch, labels_of(ROWS, device)), alone(eager, ROWS, device)
    models.assert_close(got, want, name)
    weights = torch.linspace(-1.0, 1.0, len(got), device=device)
    found = (gradients(m, (x * weights).sum()) for m, x in ((ours, got), (eager, want)))
    for x, y in zip(*found, strict=True):
        if y is not None:
            models.assert_close(x, y, name)


@pytest.mark.parametrize("side", [models.LEFT, models.RIGHT])
def test_a_model_that_shares_prefixes_gives_each_row_its_own(side, device, monkeypatch):
    ours, eager = models.pair(models.llama, device)
    inputs = padded([*ROWS, []], side, device)
    valid = inputs["attention_mask"].bool()
    called = []
    real = integration.attend_tree
    monkeypatch.setattr(
        integration, "attend_tree", lambda q, *x, **y: called.append(q.shape[1]) or real(q, *x, **y)
    )
    handle = integration.share_prefixes(ours)
    got, want = (m(**inputs, use_cache=False).logits[valid] for m in (ours, eager))
    assert called == [14, 14]  # tokens, in each of two layers
    models.assert_close(got, want)
    for x, y in zip(
        *(gradients(m, z.sin().sum()) for m, z in ((ours, got), (eager, want))), strict=True
    ):
        models.assert_close(x, y)
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    again = ours(**inputs, position_ids=positions, use_cache=False).logits[valid]
    assert torch.equal(again, got)
    packed = {"input_ids": inputs["input_ids"][valid][None], "position_ids": positions[valid][None]}
    assert torch.equal(ours(**packed, use_cache=False).logits[0], got)
    # a cache is a call of generation
    ours(**inputs)
    ids = padded([PROMPT], side, device)
    tokens = [m.generate(**ids, max_new_tokens=3, do_sample=False) for m in (ours, eager)]
    assert torch.equal(*tokens)
    assert len(called) == 6
    handle.remove()
    ours(**inputs, use_cache=False)
    assert len(called) == 6


@pytest.mark.skipif(interpreted(), reason="tracing sees the operators alone")
def test_a_compiled_model_takes_new_trees(device):
    torch.compiler.reset()
    model = models.build(models.llama, device, models.NAME)
    fast = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (ROWS, ROWS[:3], [*ROWS, [5, 6], [4, 4, 4, 4]]):
        inputs = integration.tree_inputs(trees.pack(rows).to(device))
        with torch._dynamo.config.patch(error_on_recompile=rows is not ROWS):
            got, want = fast(**inputs).logits, model(**inputs).logits
        models.assert_close(got, want)
        found = (gradients(model, x.sin().sum()) for x in (got, want))
        for x, y in zip(*found, strict=True):
            models.assert_close(x, y)
    torch.compiler.reset()


def bart():
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "decoder_ffn_dim": 24}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    return transformers.BartForCausalLM, transformers.BartConfig(**sizes, **heads, vocab_size=48)


def lfm2():
    config = transformers.Lfm2Config(**models.GROUPED, layer_types=["conv", "full_attention"])
    return transformers.Lfm2ForCausalLM, config


REFUSED = {
    "a sliding window over a tree of rows": models.mistral,
    "a sliding window": models.qwen2_moe,  # only the configuration knows
    "layers of the kind conv": lfm2,
    "a decoder of an encoder-decoder": bart,
}


@pytest.mark.parametrize("message", REFUSED)
def test_models_that_see_other_tokens_are_refused(message, device):
    model = models.build(REFUSED[message], device, models.NAME)
    with pytest.raises(NotImplementedError, match=message):
        model(**integration.tree_inputs(trees.pack(ROWS).to(device)))


def test_what_a_tree_does_not_take_raises(device):
    mask = integration.tree_inputs(trees.pack([[1, 2], [1, 3]]))["attention_mask"].to(device)
    x = torch.randn(1, 2, 3, 8, device=device)
    module = torch.nn.Module()
    for options, message in (
        ({"dropout": 0.5}, "dropout over a tree of rows"),
        ({"is_causal": False}, "bidirectional attention over a tree"),
        ({"position_bias": x[..., :3]}, "position_bias over a tree"),
        ({"cu_seq_lens_q": mask, "cu_seq_lens_k": mask}, "cu_seq_lens_q over a tree"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            integration.attention_forward(module, x, x, x, mask, **options)
    message = re.escape("a batch of one without a cache, got queries [1, 3] and keys [1, 6]")
    with pytest.raises(ValueError, match=message):
        integration.attention_forward(module, x, *[torch.cat((x, x), 2)] * 2, mask)
    with pytest.raises(TypeError, match="batch must be a TreeBatch, which"):
        integration.tree_inputs({})


def test_what_shared_prefixes_do_not_take_raises(device):
    ours, eager = models.pair(models.llama, device)
    with pytest.raises(ValueError, match="must have these kernels as their attention"):
        integration.share_prefixes(eager)
    integration.share_prefixes(ours)
    inputs = padded(ROWS, models.LEFT, device)
    ids, mask = inputs.values()
    embedded = {"inputs_embeds": torch.zeros(6, 9, 16, device=device), "attention_mask": mask}
    positions = torch.arange(9, device=device)[None]
    # a row that seems to go on the one ahead of it
    behind = {"input_ids": torch.tensor([[3, 4], [0, 5]], device=device)}
    behind |= {"attention_mask": behind["input_ids"] != 0}
    behind["position_ids"] = torch.tensor([[0, 1], [1, 2]], device=device)
    for given, error, message in (
        (
            {**inputs, "output_hidden_states": True},
            NotImplementedError,
            "output_hidden_states: not",
        ),
        (embedded, NotImplementedError, "inputs_embeds: not known where rows share prefixes"),
        ({"input_ids": ids, "attention_mask": mask[:2]}, ValueError, "the shape of input_ids"),
        ({**inputs, "position_ids": positions}, ValueError, "position_ids must count the tokens"),
        (behind, ValueError, "got 2 for a row's token 0"),
    ):
        with pytest.raises(error, match=message):
            ours(**given, use_cache=False)
