"""Models of ``transformers`` with our attention beside their own eager one.

Each architecture is a tiny random model; nothing is downloaded. Run all, or those that are named::

    python tests-integration/architectures.py [llama t5 ...]

A line for each architecture says what ran, and the exit status is 1 if anything differs. What eager
attention itself refuses, a static cache for instance, is left out and named.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections.abc import Callable, Iterator

import flash_attn_triton.integrations.transformers as attention
import torch
import transformers
from flash_attn_triton import trees
from transformers.models.auto import modeling_auto

CAUSAL = """
    apertus arcee bart biogpt bitnet blenderbot cohere cohere2 diffllama doge ernie4_5 exaone4
    flex_olmo gemma gemma2 gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox gpt_oss granite
    granitemoe helium hunyuan_v1_dense jetmoe lfm2 llama llama4_text marian mbart minimax_m2 mistral
    mixtral modernbert-decoder nanochat nemotron olmo olmo2 olmo3 olmoe opt pegasus persimmon
    phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2
    vaultgemma
"""
SEQUENCES = "m2m_100 mt5 pegasus_x t5 umt5"
ENCODERS = """
    albert bert camembert distilbert electra esm eurobert layoutlm modernbert nomic_bert roberta
    xlm-roberta
"""
# no interface for attention implementations: they raise, for they would ignore ours
REFUSED = """
    big_bird bloom gpt_neox_japanese ibert led longformer longt5 megatron-bert mpnet mpt mvp
    nllb-moe rembert roformer squeezebert switch_transformers trocr xglm
"""
# their positions are counted from their tokens, or their layers do not see all tokens
TREELESS = {"bart", "blenderbot", "doge", "llama4_text", "marian", "mbart", "pegasus"}
KINDS = {
    "causal": (CAUSAL, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "sequences": (SEQUENCES, modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    "encoder": (ENCODERS, modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
}
ARCHITECTURES = {name: kind for kind, (names, _) in KINDS.items() for name in names.split()}

# one size under all the names that configurations have for it
_HIDDEN = ("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "emb_dim")
_INNER = ("intermediate_size", "d_ff", "n_inner", "hidden_dim", "ffn_dim")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_TOKENS = ("max_position_embeddings", "n_positions", "max_seq_len")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok")
_GATED = ("moe_intermediate_size", "shared_expert_intermediate_size")
SIZES = {
    **dict.fromkeys(_HIDDEN, 32),
    **dict.fromkeys((*_INNER, "encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys((*_LAYERS, "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys((*_HEADS, "encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(_TOKENS, 64),
    # every expert is chosen: which of them are is no matter of rounding
    **dict.fromkeys(_EXPERTS, 2),
    **dict.fromkeys(_GATED, 16),
    **dict.fromkeys(("head_dim", "d_kv"), 8),
    **dict.fromkeys(("dropout", "attention_dropout"), 0.0),
    "vocab_size": 48,
    "num_key_value_heads": 2,
    "sliding_window": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
TOKENS, PADDING = 11, (4, 0)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class EagerRefusesError(Exception):
    """What is asked of a model, it cannot do with its own attention either."""


def build(name: str, kind: str, implementation: str, **sizes: int) -> torch.nn.Module:
    """Make a model whose scores are of order one, the same for every implementation."""
    config_class = transformers.CONFIG_MAPPING[name]
    # caches have a window wherever a configuration does, known or not
    unknown = set() if hasattr(config_class, "sliding_window") else {"sliding_window"}
    config = config_class(**{key: x for key, x in (SIZES | sizes).items() if key not in unknown})
    model_class = getattr(transformers, KINDS[kind][1][name])
    model = model_class._from_config(config, attn_implementation=implementation).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.2 if parameter.ndim > 1 else 1.0 + 0.1 * noise)
    return model


def inputs_of(kind: str, padding: str) -> dict[str, torch.Tensor]:
    """Return tokens and a mask; in both rows of a padded batch a token is seen."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 48, (2, TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    for row, count in enumerate(PADDING if padding else ()):
        mask[row, slice(count) if padding == "left" else slice(TOKENS - count, None)] = 0
    inputs = {"input_ids": ids * mask, "attention_mask": mask}
    if kind == "sequences":
        inputs["decoder_input_ids"] = torch.randint(3, 48, (2, 7), generator=generator)
    return inputs


def logits_of(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the logits of tokens that are no padding."""
    logits = model(**inputs).logits
    return logits if "decoder_input_ids" in inputs else logits[inputs["attention_mask"].bool()]


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Compare two orders of summation in fp32."""
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def outputs(name: str, kind: str, padding: str, dtype: str) -> None:
    """Compare logits: in bf16 ours may be twice as far from fp32 as eager attention, on average."""
    inputs = inputs_of(kind, padding)
    models = [build(name, kind, x) for x in ("eager", attention.register())]
    with torch.no_grad():
        exact = logits_of(models[0], inputs)
        if dtype == "fp32":
            near(logits_of(models[1], inputs), exact)
            return
        eager, ours = (logits_of(model.to(DTYPES[dtype]), inputs).float() for model in models)
    budget = 2 * (eager - exact).abs().mean() + torch.finfo(DTYPES[dtype]).eps * exact.abs().mean()
    error = (ours - exact).abs().mean()
    assert error <= budget, f"an error of {error:.1e} where {budget:.1e} is allowed"


def gradients(name: str, kind: str) -> None:
    """Compare the gradients of all parameters, in fp32 and with padding."""
    inputs, found = inputs_of(kind, "left"), []
    for implementation in ("eager", attention.register()):
        model = build(name, kind, implementation)
        logits = logits_of(model, inputs)
        # the sum of many logits' losses would hide a token's among the others'
        weights = torch.linspace(-1.0, 1.0, logits.numel()).view_as(logits)
        (logits.float().log_softmax(-1) * weights).sum().backward()
        found.append(gradients_of(model))
    near_all(*found)


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {x: p.grad for x, p in model.named_parameters() if p.grad is not None}


def near_all(want: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> None:
    """Compare gradients."""
    assert got.keys() == want.keys(), f"gradients of {sorted(got.keys() ^ want.keys())}"
    # where one is zero in exact arithmetic, as of a bias of all keys, rounding is all there is
    largest = max(float(x.abs().max()) for x in want.values())
    for parameter, x in want.items():
        error = float((got[parameter] - x).abs().max())
        budget = 2e-4 * float(x.abs().max()) + 2e-6 * largest
        assert error <= budget, f"{parameter}: {error:.1e} off where {budget:.1e} is allowed"


def tree(name: str, kind: str) -> None:
    """Compare a tree of rows with each row alone: log-probabilities and gradients, in fp32."""
    prompt = [5, 6, 7, 8, 9]
    rows = [prompt + x for x in ([10, 11, 12], [10, 13], [], [10, 11, 12, 4])] + [[20, 21, 22]]
    labels = [torch.tensor([*row[1:], trees.IGNORED]) for row in rows]
    # no window is narrower than a row
    models = [build(name, kind, x, sliding_window=64) for x in ("eager", attention.register())]
    alone = []
    for row, following in zip(rows, labels, strict=True):
        logits = models[0](input_ids=torch.tensor([row]), use_cache=False).logits
        alone.append(trees.log_probs(logits, trees.pack([row]), following))
    batch = trees.pack(rows)
    try:
        logits = models[1](**attention.tree_inputs(batch)).logits
    except (NotImplementedError, RuntimeError):
        if name in TREELESS:
            return
        raise
    assert name not in TREELESS, "a tree is served"
    want, got = torch.cat(alone), trees.log_probs(logits, batch, torch.cat(labels))
    near(got, want)
    weights = torch.linspace(-1.0, 1.0, len(want))
    for x in (want, got):
        (x * weights).sum().backward()
    near_all(*map(gradients_of, models))


def generated(name: str, kind: str, **options: object) -> None:
    """Compare four tokens and their scores, after padding on the left."""
    inputs = inputs_of(kind, "left")
    inputs.pop("decoder_input_ids", None)
    results = []
    for implementation in ("eager", attention.register()):
        model = build(name, kind, implementation)
        try:
            result = model.generate(
                **inputs,
                **options,
                min_new_tokens=4,
                max_new_tokens=4,
                do_sample=False,
                disable_compile=True,
                output_scores=True,
                return_dict_in_generate=True,
            )
        except Exception as error:
            if implementation == "eager":
                raise EagerRefusesError(error) from error
            raise
        results.append((result.sequences, torch.stack(result.scores).clamp(min=-1e4)))
    (want, want_scores), (got, got_scores) = results
    assert torch.equal(got, want), f"{got.tolist()} is not {want.tolist()}"
    near(got_scores, want_scores)


def compiled(name: str, kind: str) -> None:
    """Trace the model as one graph, and compare what it computes with what it computed before."""
    try:
        traced(name, kind, attention.register())
    except AssertionError:
        raise
    except Exception as failure:
        try:
            traced(name, kind, "eager")
        except Exception as error:
            raise EagerRefusesError(error) from failure
        raise


def traced(name: str, kind: str, implementation: str) -> None:
    """Trace a model of one implementation."""
    torch.compiler.reset()
    inputs, model = inputs_of(kind, "left"), build(name, kind, implementation)
    whole = torch.compile(copy.copy(model), backend="eager", fullgraph=True)
    with torch.no_grad():
        want = logits_of(model, inputs)
        near(logits_of(whole, inputs), want)


def cases(kind: str) -> Iterator[tuple[str, Callable[[str, str], None]]]:
    """Yield what is tried with each architecture of a kind, by name."""
    for dtype in DTYPES:
        for padding in ("", "left", "right"):

            def compare(name: str, kind: str, padding: str = padding, dtype: str = dtype) -> None:
                outputs(name, kind, padding, dtype)

            yield f"{dtype} {padding}".strip(), compare
    yield "gradients", gradients
    if kind == "causal":
        yield "tree", tree
    if kind != "encoder":
        yield "generate", generated
        yield "static cache", lambda *x: generated(*x, cache_implementation="static")
        yield "beams", lambda *x: generated(*x, num_beams=2)
    yield "compiled", compiled


def run(name: str) -> tuple[list[str], list[str], list[str]]:
    """Return what of one architecture agrees, what eager attention refuses, and what fails."""
    kind = ARCHITECTURES[name]
    agree, refused, failed = [], [], []
    for label, check in cases(kind):
        try:
            check(name, kind)
            agree.append(label)
        except EagerRefusesError:
            refused.append(label)
        except Exception as error:
            said = next((line for line in str(error).splitlines() if line.strip()), "")
            failed.append(f"{label}: {type(error).__name__}: {said[:300]}")
    return agree, refused, failed


def refuses(name: str) -> None:
    """Check that a model whose attention cannot be replaced raises."""
    kind = next(kind for kind, (_, mapping) in KINDS.items() if name in mapping)
    try:
        logits_of(build(name, kind, attention.register()), inputs_of(kind, ""))
    except ValueError as error:
        if "no interface for attention implementations" not in str(error):
            raise
    else:
        raise AssertionError(f"{name} ran, and ignored its attention implementation")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="name", help="of architectures; default: all")
    asked = parser.parse_args(arguments).names
    unknown = [name for name in asked if name not in (*ARCHITECTURES, *REFUSED.split())]
    if unknown:
        parser.error(f"not known: {', '.join(unknown)}")
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    failures = 0
    for name in asked or ARCHITECTURES:
        if name not in ARCHITECTURES:
            continue
        agree, refused, failed = run(name)
        failures += len(failed)
        note = f"; eager refuses {', '.join(refused)}" if refused else ""
        print(f"{name}: {len(agree)} agree{note}", *failed, sep="\n    ", flush=True)
    for name in [x for x in REFUSED.split() if not asked or x in asked]:
        try:
            refuses(name)
            print(f"{name}: refused", flush=True)
        except Exception as error:
            failures += 1
            print(f"{name}: {error}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
