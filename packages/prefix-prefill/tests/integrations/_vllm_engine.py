"""Serve a model of random weights by vLLM's engine; print its tokens beside those of transformers.

    python _vllm_engine.py FOLDER '{"kv_cache_dtype": ..., ...}'

The arguments of ``LLM`` are JSON. The last line is JSON, too.
"""

from __future__ import annotations

import json
import os
import random
import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

VOCABULARY, NEW = 512, 8
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def make(folder: str) -> str:
    """Save a Llama whose greedy tokens vary."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), dtype=torch.float32)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if x.ndim == 2:
                x.normal_().mul_(0.5 if "embed" in name else 1.1 / x.shape[1] ** 0.5)
    model.save_pretrained(folder)
    return folder


def main(folder: str, asked: str) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    made = random.Random(3)
    prompts = [[made.randrange(3, VOCABULARY) for _ in range(n)] for n in (7, 33, 70)]
    model = AutoModelForCausalLM.from_pretrained(make(folder), attn_implementation="eager").eval()
    wanted = []
    for prompt in prompts:
        x = torch.tensor([prompt])
        options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
        out = model.generate(x, attention_mask=torch.ones_like(x), pad_token_id=0, **options)
        wanted.append(out[0, len(prompt) :].tolist())

    from vllm import LLM, SamplingParams

    given = {
        "attention_backend": "PREFIX_PREFILL",
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 4,
        # chunks: the longest prompt is cut
        "max_num_batched_tokens": 48,
        "kv_cache_memory_bytes": 2**25,
        "block_size": 16,
        "skip_tokenizer_init": True,
        "compilation_config": {"mode": 0, "custom_ops": ["none"]},
    }
    llm = LLM(model=folder, **{**given, **json.loads(asked)})
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    found = llm.generate([{"prompt_token_ids": x} for x in prompts], sampling, use_tqdm=False)
    tokens = [list(x.outputs[0].token_ids) for x in found]
    print(json.dumps({"tokens": tokens, "wanted": wanted}), flush=True)
    # the engine's threads need no farewell
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
