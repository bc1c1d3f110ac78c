"""Train a small model on groups of answers to one prompt, with the prompt computed once.

    python examples/train_grouped_answers.py
    python examples/train_grouped_answers.py --steps 100 --answers 16 --device cuda

Reinforcement learning of language models samples a group of answers to each prompt. Written out,
each answer has a copy of its prompt, so a long prompt is computed once per answer. ``trees.pack``
makes a tree of the same rows, in which what they have in common stands once,
``flash_attn_tree_func`` attends over it, and ``trees.log_probs`` gives each row its own
probabilities. Here one model is trained either way, from the same weights on the same groups: each
step has the same loss, and in the end the weights are the same but for rounding.

A prompt is a row of random letters. An answer begins with one of them and goes on as the prompt
does from there. The loss is that of a policy gradient with made-up rewards. Exits with 1 if losses
or weights deviate.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time

import torch
from flash_attn_triton import flash_attn_tree_func, flash_attn_varlen_func, trees
from torch import Tensor, nn

LETTERS, LAYERS, HEADS, HEADS_K, HEAD_DIM = 26, 2, 4, 2, 16
WIDTH = HEADS * HEAD_DIM


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

    def forward(self, x: Tensor, batch: trees.TreeBatch, is_tree: bool) -> Tensor:
        heads = self.project(self.norm(x)).view(len(x), -1, HEAD_DIM)
        q, k, v = heads.split((HEADS, HEADS_K, HEADS_K), 1)
        cu_seqlens, longest = batch.cu_seqlens, batch.max_seqlen
        if is_tree:
            mixed = flash_attn_tree_func(q, k, v, cu_seqlens, batch.parents, longest)
        else:
            mixed = flash_attn_varlen_func(
                q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True
            )
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

    def forward(self, batch: trees.TreeBatch, is_tree: bool) -> Tensor:
        """Return the logits of the letter after each token, ``[tokens, letters]``."""
        x = self.letters(batch.tokens) + self.places(batch.positions)
        for block in self.blocks:
            x = block(x, batch, is_tree)
        return self.norm(x) @ self.letters.weight.T


def pack(prompt: Tensor, answers: Tensor, is_tree: bool) -> tuple[trees.TreeBatch, Tensor]:
    """Pack a prompt and its answers, ``[answers, length]``, and what each token should predict."""
    rows = torch.cat((prompt.expand(len(answers), -1), answers), 1)
    labels = rows.roll(-1, 1)
    # the prompt is given, and after the last token there is nothing
    labels[:, : len(prompt) - 1] = labels[:, -1] = trees.IGNORED
    # rows of different groups share nothing
    batch = trees.pack(list(rows), group=None if is_tree else list(range(len(rows))))
    return batch, labels.flatten()


def loss_of(
    model: Model, batch: trees.TreeBatch, labels: Tensor, advantages: Tensor, is_tree: bool
) -> Tensor:
    """Return the mean of ``-advantage * log p(answer)``, per token."""
    found = trees.log_probs(model(batch, is_tree), batch, labels).view(len(advantages), -1)
    return -(advantages[:, None] * found).sum() / (labels != trees.IGNORED).sum()


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
    optimizers = {
        name: torch.optim.SGD(model.parameters(), lr=0.3) for name, model in models.items()
    }
    generator = torch.Generator().manual_seed(1)
    seconds, tokens = dict.fromkeys(models, 0.0), dict.fromkeys(models, 0)
    apart = 0.0
    for step in range(steps):
        prompt, answers, advantages = draw_group(count, prompt_length, length, generator)
        losses = {}
        for name, model in models.items():
            start, is_tree = time.perf_counter(), name == "tree"
            batch, labels = pack(prompt, answers, is_tree)
            given = batch.to(device), labels.to(device), advantages.to(device)
            loss = loss_of(model, *given, is_tree)
            optimizers[name].zero_grad()
            loss.backward()
            optimizers[name].step()
            losses[name] = float(loss.detach())
            seconds[name] += time.perf_counter() - start
            tokens[name] += len(batch.tokens)
        apart = max(apart, abs(losses["tree"] - losses["written out"]))
        both = ", ".join(f"{name} {loss:.6f}" for name, loss in losses.items())
        draw_bar(step + 1, steps, f"loss: {both}")
    for name in models:
        print(f"{name}: {tokens[name] // steps} tokens a step, {seconds[name]:.1f} s")
    weights = zip(*(model.parameters() for model in models.values()), strict=True)
    return apart, max(float((a - b).detach().abs().max()) for a, b in weights)


def draw_bar(done: int, total: int, text: str) -> None:
    """Draw one line again and again on a terminal; elsewhere a line per tenth."""
    bar = ("#" * (30 * done // total)).ljust(30, ".")
    is_terminal, is_last = sys.stdout.isatty(), done == total
    if is_terminal or is_last or done % max(1, total // 10) == 0:
        line = f"[{bar}] {done}/{total}  {text}"
        start, end = ("\r", "\n" if is_last else "") if is_terminal else ("", "\n")
        print(f"{start}{line}", end=end, flush=True)


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
