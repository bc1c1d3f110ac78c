"""Sample a small policy with prefix-prefill, train it with flash-attn-triton: the same bits.

    python examples/same_bits.py
    python examples/same_bits.py --steps 20 --answers 8 --device cuda

Reinforcement learning weighs each sampled token by the ratio of two probabilities: that of the
trainer, which computes whole sequences at once, and that of the sampler, which computes a prompt
in chunks and then token after token, in a batch with other answers. At the first update of a batch
both have the same weights, so the ratio should be 1. It is not, because attention adds in another
order in either of them. With ``invariant=True`` it is 1 to the last bit.

The task: answers that repeat the letter before are rewarded. What is not attention is computed
token by token here, because a library of matrix products may add in an order that depends on the
number of rows; an engine has kernels for that, too. Exits with 1 if a log-probability differs under
the law.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, NamedTuple

import torch
from flash_attn_triton import flash_attn_varlen_func
from prefix_prefill import paged_attn_func, reshape_and_cache
from torch import Tensor, nn

LETTERS, LAYERS, HEADS, HEADS_K, HEAD_DIM = 8, 2, 4, 2, 16
WIDTH, PAGE = HEADS * HEAD_DIM, 16
PROMPT, ANSWER, CHUNK = 37, 12, 16


def dtype_of(device: torch.device) -> torch.dtype:
    """Return the dtype of attention; on the CPU, bf16 would round most differences away."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def by_token(layer: Any, x: Tensor) -> Tensor:
    """Apply a layer to each row by itself: one shape has one order of sums."""
    return torch.cat([layer(row.clone()) for row in x.split(1)])


class Layer(nn.Module):
    """Attention and two linear maps."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Sequential(
            nn.RMSNorm(WIDTH), nn.Linear(WIDTH, (HEADS + 2 * HEADS_K) * HEAD_DIM, bias=False)
        )
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(
            nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, attend: Any) -> Tensor:
        heads = by_token(self.project, x).view(len(x), -1, HEAD_DIM)
        heads = heads.to(dtype_of(x.device))
        mixed = attend(*heads.split((HEADS, HEADS_K, HEADS_K), 1))
        x = x + by_token(self.out, mixed.float().flatten(1))
        return x + by_token(self.mlp, x)


class Policy(nn.Module):
    """Gives the log-probabilities of the letter behind each token."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, WIDTH), nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Sequential(
            nn.RMSNorm(WIDTH), nn.Linear(WIDTH, LETTERS), nn.LogSoftmax(dim=-1)
        )

    def forward(self, letters: Tensor, places: Tensor, attends: list[Any]) -> Tensor:
        x = self.letters(letters) + self.places(places)
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(x, attend)
        return by_token(self.head, x)


class Step(NamedTuple):
    """New tokens of all sequences, packed, as an engine schedules them."""

    starts: Tensor  # [sequences + 1]
    lengths: Tensor  # [sequences]: keys, new ones included
    slots: Tensor  # [tokens]: where the new keys go
    longest: int


class Sampler:
    """Keeps keys and values in pages, one cache a layer."""

    def __init__(self, policy: Policy, answers: int, device: str, invariant: bool) -> None:
        pages = -(-(PROMPT + ANSWER) // PAGE)
        shape = answers * pages, PAGE, HEADS_K, HEAD_DIM
        self.policy, self.invariant, self.device = policy, invariant, device
        self.caches = [
            [torch.zeros(shape, dtype=dtype_of(torch.device(device)), device=device) for _ in "kv"]
            for _ in range(LAYERS)
        ]
        # pages of the sequences in turns
        self.table = torch.arange(answers * pages, dtype=torch.int32).view(pages, answers).T
        self.table = self.table.contiguous().to(device)

    def run(self, letters: Tensor, first: int) -> Tensor:
        """Return log-probabilities behind new letters, ``[answers, n]``, the first at ``first``."""
        answers, n = letters.shape
        places = torch.arange(first, first + n, device=self.device).expand(answers, n)
        pages = self.table.gather(1, places // PAGE)
        step = Step(
            torch.arange(answers + 1, dtype=torch.int32, device=self.device) * n,
            torch.full((answers,), first + n, dtype=torch.int32, device=self.device),
            (pages * PAGE + places % PAGE).flatten(),
            n,
        )
        attends = [self._attend(caches, step) for caches in self.caches]
        result: Tensor = self.policy(letters.flatten(), places.flatten(), attends)
        return result.view(answers, n, LETTERS)

    def _attend(self, caches: list[Tensor], step: Step) -> Any:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
            reshape_and_cache(k, v, *caches, step.slots)
            rest = self.table, step.starts, step.lengths, step.longest, PROMPT + ANSWER
            return paged_attn_func(q, *caches, *rest, invariant=self.invariant)

        return attend


@torch.no_grad()
def sample(policy: Policy, prompts: Tensor, invariant: bool) -> tuple[Tensor, Tensor]:
    """Return answers, and the log-probability of each of their letters when it was drawn."""
    sampler = Sampler(policy, len(prompts), str(prompts.device), invariant)
    for first in range(0, PROMPT, CHUNK):
        chunk = sampler.run(prompts[:, first : first + CHUNK], first)
    logits, letters, found = chunk[:, -1], [], []
    for place in range(PROMPT, PROMPT + ANSWER):
        letters.append(torch.multinomial(logits.exp(), 1))
        found.append(logits.gather(1, letters[-1]))
        if place < PROMPT + ANSWER - 1:
            logits = sampler.run(letters[-1], place)[:, -1]
    return torch.cat(letters, 1), torch.cat(found, 1)


def score(policy: Policy, prompts: Tensor, answers: Tensor, invariant: bool) -> Tensor:
    """Return the log-probabilities of the answers' letters, from whole sequences at once."""
    letters = torch.cat((prompts, answers), 1)
    count, n = letters.shape
    starts = torch.arange(count + 1, dtype=torch.int32, device=letters.device) * n
    places = torch.arange(n, device=letters.device).repeat(count)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_attn_varlen_func(
            q, k, v, starts, starts, n, n, causal=True, invariant=invariant
        )

    result = policy(letters.flatten(), places, [attend] * LAYERS).view(count, n, LETTERS)
    return result[:, PROMPT - 1 : -1].gather(2, answers[..., None])[..., 0]


def train(steps: int, count: int, device: str, invariant: bool) -> list[float]:
    """Train for some steps; return the largest distance of log-probabilities in each."""
    torch.manual_seed(0)
    policy = Policy().to(device)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    apart = []
    for step in range(steps):
        prompts = torch.randint(LETTERS, (count, PROMPT), device=device)
        answers, sampled = sample(policy, prompts, invariant)
        trained = score(policy, prompts, answers, invariant)
        before = torch.cat((prompts[:, -1:], answers[:, :-1]), 1)
        rewards = (answers == before).float().mean(1)
        advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        ratio = (trained - sampled).exp()
        optimizer.zero_grad()
        (-(ratio * advantage[:, None])).mean().backward()
        optimizer.step()
        apart.append((trained - sampled).abs().max().item())
        equal = torch.equal(trained, sampled)
        verdict = "equal" if equal else f"up to {apart[-1]:.1e} apart"
        print(
            f"invariant={invariant!s:5}  step {step}: reward {rewards.mean():.3f}, "
            f"log-probabilities {verdict}"
        )
    return apart


def main() -> int:
    parser = argparse.ArgumentParser(
        formatter_class=argparse.ArgumentDefaultsHelpFormatter, description=__doc__.splitlines()[0]
    )
    parser.add_argument("--steps", type=int, default=3, help="steps of training")
    parser.add_argument("--answers", type=int, default=4, help="answers to a prompt")
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="where the tensors are",
    )
    options = parser.parse_args()
    train(options.steps, options.answers, options.device, invariant=False)
    apart = train(options.steps, options.answers, options.device, invariant=True)
    return int(any(apart))


if __name__ == "__main__":
    sys.exit(main())
