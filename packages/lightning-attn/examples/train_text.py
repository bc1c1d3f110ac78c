"""Train a small language model of lightning attention on a text, then let it write.

    python examples/train_text.py                     under two minutes of one core, or a GPU
    python examples/train_text.py --short             a few steps, to try the script
    python examples/train_text.py --text FILE --plot loss.png

The model reads bytes. Its layers are a small version of MiniMax-Text-01: seven of lightning
attention for one of softmax attention. The default text is this package's README. After training,
the model continues a prompt in two ways that have to agree: by a full forward over all bytes so
far, and token by token with the decode kernel, from the states after prefill.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from lightning_attn import build_slopes, lightning_attn_decode, lightning_attn_func
from torch import Tensor, nn
from torch.nn import functional

LAYERS, HEADS, HEAD_DIM = 8, 4, 16
WIDTH = HEADS * HEAD_DIM
# every eighth layer has softmax attention
SOFTMAX_EVERY = 8


@dataclass
class Memory:
    """The cache of generation: a state per lightning layer, keys and values per softmax layer."""

    states: dict[int, Tensor] = field(default_factory=dict)
    keys: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


class Attention(nn.Module):
    """One layer's attention, of either kind."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.is_softmax = (layer + 1) % SOFTMAX_EVERY == 0
        self.project = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.RMSNorm(HEAD_DIM)
        self.register_buffer("decay", build_slopes(HEADS, layer, LAYERS))

    def forward(self, x: Tensor, memory: Memory | None) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v, gate = self.project(x).view(batch, tokens, 4, HEADS, HEAD_DIM).unbind(2)
        if self.is_softmax:
            mixed = self._softmax(q, k, v, memory)
        else:
            mixed = self._lightning(functional.silu(q), functional.silu(k), v, memory)
        mixed = self.norm(mixed) * torch.sigmoid(gate)
        return self.out(mixed.reshape(batch, tokens, WIDTH))

    def _lightning(self, q: Tensor, k: Tensor, v: Tensor, memory: Memory | None) -> Tensor:
        scale = HEAD_DIM**-0.5
        if memory is not None and self.layer in memory.states:
            slots = torch.arange(q.shape[0], device=q.device)
            cache = memory.states[self.layer]
            return lightning_attn_decode(q, k, v, cache, self.decay, slots, scale=scale)
        out, state = lightning_attn_func(
            q, k, v, self.decay, scale=scale, output_final_state=memory is not None
        )
        if memory is not None and state is not None:
            memory.states[self.layer] = state
        return out

    def _softmax(self, q: Tensor, k: Tensor, v: Tensor, memory: Memory | None) -> Tensor:
        is_step = memory is not None and self.layer in memory.keys
        if memory is not None:
            if is_step:
                old_k, old_v = memory.keys[self.layer]
                k, v = torch.cat([old_k, k], 1), torch.cat([old_v, v], 1)
            memory.keys[self.layer] = (k, v)
        turned = (t.transpose(1, 2) for t in (q, k, v))
        out = functional.scaled_dot_product_attention(*turned, is_causal=not is_step)
        return out.transpose(1, 2)


class Block(nn.Module):
    """Attention and a gated feed-forward layer, each after a norm."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.attention = Attention(layer)
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)])
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, memory: Memory | None) -> Tensor:
        x = x + self.attention(self.norms[0](x), memory)
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


class Model(nn.Module):
    """A language model of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList([Block(layer) for layer in range(LAYERS)])
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor, memory: Memory | None = None) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, memory)
        return self.head(self.norm(x))


def train(model: Model, data: Tensor, steps: int, batch: int, length: int) -> list[float]:
    """Train on random excerpts of the text; return the loss of every step, in nats per byte."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    losses = []
    began = time.monotonic()
    for step in range(steps):
        starts = torch.randint(len(data) - length - 1, (batch,))
        pieces = torch.stack([data[s : s + length + 1] for s in starts.tolist()])
        logits = model(pieces[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        losses.append(loss.item())
        if step % 20 == 0 or step == steps - 1:
            took = time.monotonic() - began
            print(f"step {step:4d}  loss {losses[-1]:.3f}  {took:.0f} s", flush=True)
    return losses


@torch.no_grad()
def generate(model: Model, prompt: Tensor, tokens: int) -> tuple[Tensor, float]:
    """Continue a prompt greedily with the decode kernel.

    Return the bytes, and the largest difference of their logits from those of a full forward.
    """
    memory = Memory()
    logits = [model(prompt, memory)]
    written = [prompt]
    for _ in range(tokens):
        written.append(logits[-1][:, -1:].argmax(-1))
        logits.append(model(written[-1], memory))
    whole = torch.cat(written, 1)
    difference = (model(whole) - torch.cat(logits, 1)).abs().max()
    return whole, difference.item()


def draw(losses: list[float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 3.5))
    axis.plot(losses)
    axis.set(xlabel="step", ylabel="loss, nats per byte", title="seven lightning : one softmax")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")


def main() -> int:
    parser = argparse.ArgumentParser(
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description=__doc__.partition("\n")[0],
    )
    readme = Path(__file__).resolve().parent.parent / "README.md"
    parser.add_argument("--text", type=Path, default=readme, help="a file to learn")
    parser.add_argument("--steps", type=int, default=300, help="steps of training")
    # whole chunks of 64 tokens
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step")
    parser.add_argument("--plot", type=Path, help="draw the loss there (needs matplotlib)")
    parser.add_argument("--short", action="store_true", help="a few steps, to try the script")
    arguments = parser.parse_args()
    if arguments.short:
        arguments.steps, arguments.batch, arguments.length = 6, 2, 64
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # the tensors are so small that a second thread would wait more than it computes
    torch.set_num_threads(1)
    data = torch.tensor(list(arguments.text.read_bytes()), device=device)
    model = Model().to(device)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {len(data)} bytes, {device}")
    losses = train(model, data, arguments.steps, arguments.batch, arguments.length)
    prompt = data[None, :64]
    whole, difference = generate(model, prompt, 40 if arguments.short else 200)
    print(bytes(whole[0].tolist()).decode(errors="replace"))
    print(f"decoding and the parallel form differ by {difference:.1e} at most, in logits")
    if arguments.plot is not None:
        draw(losses, arguments.plot)
    if losses[-1] >= losses[0]:
        print("the loss did not fall", file=sys.stderr)
        return 1
    return int(not difference < 1e-3)


if __name__ == "__main__":
    sys.exit(main())
