"""Train a small model with TRL's GRPOTrainer, with each prompt computed once, and without.

    python examples/train_with_trl.py
    python examples/train_with_trl.py --steps 100 --answers 16

It needs trl. The trainer is TRL's own, unchanged: two lines tell it to compute what the rows of a
batch have in common once. The same model is trained without them, with PyTorch's attention, from
the same weights and the same random numbers. The task: answers full of vowels are rewarded. Exits
with 1 if losses deviate.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from typing import Any

import flash_attn_triton.integrations.trl as attention
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed
from trl import GRPOConfig, GRPOTrainer

LETTERS, VOWELS = "abcdefghijklmnopqrstuvwxyz", "aeiou"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each letter."""
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    vocabulary = {name: i for i, name in enumerate([*names.values(), *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def save_model(folder: str) -> None:
    """Write a random model whose attention is no mean of everything."""
    tokenizer = make_tokenizer()
    set_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def share_of_vowels(completions: list[str], **_: Any) -> list[float]:
    return [sum(letter in VOWELS for letter in x) / max(1, len(x)) for x in completions]


def train(
    folder: str, steps: int, answers: int, device: str, shares: bool
) -> tuple[GRPOTrainer, int]:
    """Train the model of a folder; return the trainer, and how many tokens a step computed."""
    draw = random.Random(0)
    prompts = ["".join(draw.choices(LETTERS, k=draw.randint(20, 60))) for _ in range(64)]
    implementation = attention.register() if shares else "sdpa"
    args = GRPOConfig(
        f"{folder}/out",
        per_device_train_batch_size=2 * answers,
        num_generations=answers,
        max_completion_length=12,
        max_steps=steps,
        learning_rate=3e-3,
        beta=0.04,
        seed=1,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=device == "cpu",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=False,
        model_init_kwargs={"attn_implementation": implementation, "dtype": "float32"},
    )
    data = Dataset.from_list([{"prompt": prompt} for prompt in prompts])
    trainer = GRPOTrainer(folder, share_of_vowels, args, data, processing_class=make_tokenizer())
    if shares:
        attention.share_prefixes(trainer)
    tokens = 0

    def count(_: Any, ids: tuple[torch.Tensor, ...]) -> None:
        nonlocal tokens
        # what is generated has no gradient
        tokens += ids[0].numel() * torch.is_grad_enabled()

    trainer.model.get_input_embeddings().register_forward_pre_hook(count)
    trainer.train()
    return trainer, tokens // steps


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--answers", type=int, default=4, help="to each prompt")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        options = folder, args.steps, args.answers, args.device
        found = [train(*options, shares) for shares in (False, True)]
    trainers, tokens = zip(*found, strict=True)
    losses, rewards = (
        [[row[name] for row in x.state.log_history if name in row] for x in trainers]
        for name in ("loss", "reward")
    )
    loss = max(abs(a - b) for a, b in zip(*losses, strict=True))
    weights = zip(*(x.model.parameters() for x in trainers), strict=True)
    weight = max(float((a - b).detach().abs().max()) for a, b in weights)
    print(f"rewards from {rewards[1][0]:.3f} to {rewards[1][-1]:.3f}")
    print(f"tokens of a step: {tokens[0]} in padded rows, {tokens[1]} in a tree")
    print(f"largest difference: of a loss {loss:.1e}, of a weight {weight:.1e}")
    return 0 if loss < 1e-3 and tokens[1] < tokens[0] else 1


if __name__ == "__main__":
    sys.exit(main())
