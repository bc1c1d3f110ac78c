"""Train a small model on groups of answers to one prompt, with the prompt computed once.

    python examples/train_grouped_answers.py
    python examples/train_grouped_answers.py --steps 100 --answers 16 --device cuda

Reinforcement learning of language models samples a group of answers to each prompt. Written out,
each answer has a copy of its prompt, so a long prompt is computed once per answer. As a tree it is
one segment, and the answers hang below it: ``flash_attn_tree_func``. Here one model is trained
either way, from the same weights on the same groups: each step has the same loss, and in the end
the weights are the same but for rounding.

A prompt is a row of random letters. An answer begins with one of them and goes on as the prompt
does from there. The loss is that of a policy gradient with made-up rewards. Exits with 1 if losses
or weights deviate.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from typing import NamedTuple

import torch
from flash_attn_triton import flash_attn_tree_func, flash_attn_varlen_func
from torch import Tensor, nn
from torch.nn import functional

LETTERS, LAYERS, HEADS, HEADS_K, HEAD_DIM = 26, 2, 4, 2, 16
WIDTH = HEADS * HEAD_DIM


class Batch(NamedTuple):
    """Packed tokens, and which sees which."""

    tokens: Tensor  # [tokens]
    positions: Tensor  # [tokens]: along the path from the root, or within the sequence
    cu_seqlens: Tensor  # [segments + 1]
    parents: Tensor | None  # [segments]; None: every segment is a sequence of its own
    longest: int
    answers: Tensor  # [answers, length]: where the answers' tokens stand
    ahead: Tensor  # likewise: where the token ahead of each one stands, which predicts it


class Block(nn.Module):
    """One layer: attention, then two linear maps."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_mlp = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.project = nn.Linear(WIDTH, (HEADS + 2 * HEADS_K) * HEAD_DIM, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        heads = self.project(self.norm(x)).view(len(x), -1, HEAD_DIM)
        q, k, v = heads.split((HEADS, HEADS_K, HEADS_K), 1)
        cu_seqlens, longest = batch.cu_seqlens, batch.longest
        if batch.parents is None:
            mixed = flash_attn_varlen_func(
                q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True
            )
        else:
            mixed = flash_attn_tree_func(q, k, v, cu_seqlens, batch.parents, longest)
        x = x + self.out(mixed.flatten(1))
        return x + self.mlp(self.norm_mlp(x))


class Model(nn.Module):
    """A decoder over letters."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, WIDTH)
        self.places = nn.Embedding(longest, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        for embedding in (self.letters, self.places):
            nn.init.normal_(embedding.weight, std=WIDTH**-0.5)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of the letter after each token, ``[tokens, letters]``."""
        x = self.letters(batch.tokens) + self.places(batch.positions)
        for block in self.blocks:
            x = block(x, batch)
        return self.norm(x) @ self.letters.weight.T


def as_tree(prompt: Tensor, answers: Tensor) -> Batch:
    """Pack a prompt and its answers, ``[answers, length]``: the prompt once."""
    count, length = answers.shape
    device = prompt.device
    starts = len(prompt) + length * torch.arange(count + 1, device=device)
    positions = len(prompt) + torch.arange(length, device=device).repeat(count)
    places = len(prompt) + torch.arange(answers.numel(), device=device).view(count, length)
    ahead = places - 1
    # the last token of the prompt predicts the first one of every answer
    ahead[:, 0] = len(prompt) - 1
    return Batch(
        torch.cat((prompt, answers.flatten())),
        torch.cat((torch.arange(len(prompt), device=device), positions)),
        functional.pad(starts, (1, 0)).int(),
        functional.pad(torch.zeros(count, device=device), (1, 0), value=-1).int(),
        max(len(prompt), length),
        places,
        ahead,
    )


def written_out(prompt: Tensor, answers: Tensor) -> Batch:
    """Pack each answer behind a copy of its prompt."""
    count, length = answers.shape
    device, whole = prompt.device, len(prompt) + length
    tokens = torch.cat((prompt.expand(count, -1), answers), 1)
    places = torch.arange(count * whole, device=device).view(count, whole)[:, len(prompt) :]
    return Batch(
        tokens.flatten(),
        torch.arange(whole, device=device).repeat(count),
        (whole * torch.arange(count + 1, device=device)).int(),
        None,
        whole,
        places,
        places - 1,
    )


def loss_of(model: Model, batch: Batch, advantages: Tensor) -> Tensor:
    """Return the mean of ``-advantage * log p(answer)``, per token."""
    logits = model(batch)[batch.ahead]  # [answers, length, letters]
    chosen = batch.tokens[batch.answers]  # [answers, length]
    nll = functional.cross_entropy(logits.flatten(0, 1), chosen.flatten(), reduction="none")
    return (advantages[:, None] * nll.view(chosen.shape)).mean()


def draw_group(
    count: int, prompt_length: int, length: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a prompt, its answers, and how good each of them is: more than 0 in the mean."""
    prompt = torch.randint(LETTERS, (prompt_length,), generator=generator)
    first = torch.randint(prompt_length - length, (count, 1), generator=generator)
    answers = prompt[first + torch.arange(length)]
    return prompt, answers, 0.5 + torch.rand(count, generator=generator)


def train(
    steps: int, count: int, prompt_length: int, length: int, device: str
) -> tuple[float, float]:
    """Train both ways; return the largest deviation of a loss, and of a weight."""
    torch.manual_seed(0)
    first = Model(prompt_length + length).to(device)
    models = {"tree": first, "written out": copy.deepcopy(first)}
    packs = {"tree": as_tree, "written out": written_out}
    optimizers = {
        name: torch.optim.SGD(model.parameters(), lr=0.3) for name, model in models.items()
    }
    generator = torch.Generator().manual_seed(1)
    seconds, tokens = dict.fromkeys(models, 0.0), dict.fromkeys(models, 0)
    apart = 0.0
    for step in range(steps):
        prompt, answers, advantages = (
            x.to(device) for x in draw_group(count, prompt_length, length, generator)
        )
        losses = {}
        for name, model in models.items():
            start = time.perf_counter()
            batch = packs[name](prompt, answers)
            loss = loss_of(model, batch, advantages)
            optimizers[name].zero_grad()
            loss.backward()
            optimizers[name].step()
            losses[name] = float(loss.detach())
            seconds[name] += time.perf_counter() - start
            tokens[name] += len(batch.tokens)
        apart = max(apart, abs(losses["tree"] - losses["written out"]))
        if step % max(1, steps // 10) == 0 or step == steps - 1:
            both = ", ".join(f"{name} {loss:.6f}" for name, loss in losses.items())
            print(f"step {step:4}: loss {both}", flush=True)
    for name in models:
        print(f"{name}: {tokens[name] // steps} tokens a step, {seconds[name]:.1f} s")
    weights = zip(*(model.parameters() for model in models.values()), strict=True)
    return apart, max(float((a - b).detach().abs().max()) for a, b in weights)


def main() -> int:
    parser = argparse.ArgumentParser(
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description=(__doc__ or "").split("\n")[0],
    )
    parser.add_argument("--steps", type=int, default=40, help="steps of training")
    parser.add_argument("--answers", type=int, default=8, help="to each prompt")
    parser.add_argument("--prompt-length", type=int, default=96, help="tokens of a prompt")
    parser.add_argument("--answer-length", type=int, default=12, help="tokens of an answer")
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="where the tensors are",
    )
    args = parser.parse_args()
    loss, weight = train(
        args.steps, args.answers, args.prompt_length, args.answer_length, args.device
    )
    print(f"largest difference: of a loss {loss:.1e}, of a weight {weight:.1e}")
    # fp32, and steps that add up
    return 0 if max(loss, weight) < 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
