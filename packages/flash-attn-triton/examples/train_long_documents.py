"""Train a small GPT on packed documents, each pack cut over several ranks.

    python examples/train_long_documents.py
    torchrun --nproc-per-node=4 examples/train_long_documents.py
    torchrun --nproc-per-node=4 examples/train_long_documents.py --data 2

A step is a batch of four packs of documents of any lengths. The ranks form a mesh: ``--data``
groups take packs of their own, and the ranks of a group share each of theirs: a ``ShardPlan`` cuts
long documents over them and leaves short ones whole, so that all have as many visible pairs of
query and key. Weights and gradients are sharded by FSDP2 (``fully_shard``), which adds gradients up
over the whole mesh.

Every rank also trains a second copy alone, on all packs, from the same weights. Each step has the
same loss either way. Exits with 1 if losses or weights deviate.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from flash_attn_triton import distributed, flash_attn_varlen_func
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

LETTERS, LAYERS, HEADS, HEADS_K, HEAD_DIM = 26, 2, 4, 2, 16
WIDTH = HEADS * HEAD_DIM
# packs of a step
PACKS = 4

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Pack(NamedTuple):
    """Documents one behind the other."""

    tokens: Tensor  # [tokens]
    targets: Tensor  # [tokens]: the next letter; -100 at the end of a document
    lengths: list[int]

    @property
    def cu_seqlens(self) -> list[int]:
        return [0, *torch.tensor(self.lengths).cumsum(0).tolist()]

    @property
    def positions(self) -> Tensor:
        return torch.cat([torch.arange(length) for length in self.lengths])


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

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        heads = self.project(self.norm(x)).view(len(x), -1, HEAD_DIM)
        mixed = attention(*heads.split((HEADS, HEADS_K, HEADS_K), 1))
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
        self.head = nn.Linear(WIDTH, LETTERS, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Return the logits of the letter after each token, ``[tokens, letters]``."""
        x = self.letters(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x, attention)
        return self.head(self.norm(x))


def draw(generator: torch.Generator, longest: int) -> Pack:
    """Return documents that repeat a row of letters, one long, the others of any length."""
    short = torch.randint(1, longest // 2, (6,), generator=generator).tolist()
    lengths = [longest, *short]
    texts = []
    for length in lengths:
        row = torch.randint(LETTERS, (8,), generator=generator)
        texts.append(row.repeat(length // 8 + 1)[:length])
    targets = [torch.cat([text[1:], text.new_tensor([-100])]) for text in texts]
    return Pack(torch.cat(texts), torch.cat(targets), lengths)


def loss_of(model: nn.Module, pack: Pack, device: str) -> Tensor:
    """Return the sum over the tokens of a pack, on one rank."""
    starts = torch.tensor(pack.cu_seqlens, dtype=torch.int32, device=device)
    longest = max(pack.lengths)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_varlen_func(q, k, v, starts, starts, longest, longest, causal=True)
        assert isinstance(out, Tensor)
        return out

    logits = model(pack.tokens.to(device), pack.positions.to(device), attention)
    return functional.cross_entropy(logits, pack.targets.to(device), reduction="sum")


def loss_of_shard(model: nn.Module, pack: Pack, mesh: DeviceMesh, device: str) -> Tensor:
    """Return the sum over this rank's tokens of a pack."""
    group, rank = mesh.get_group("tokens"), mesh.get_local_rank("tokens")
    plan = distributed.ShardPlan(pack.cu_seqlens, mesh["tokens"].size(), causal=True)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = distributed.flash_attn_varlen_func(q, k, v, plan, group=group)
        assert isinstance(out, Tensor)
        return out

    tokens = plan.shard(pack.tokens, rank).to(device)
    targets = plan.shard(pack.targets, rank).to(device)
    logits = model(tokens, plan.positions(rank).to(device), attention)
    # a rank without tokens takes part all the same: its sum is 0
    return functional.cross_entropy(logits, targets, reduction="sum")


def train(steps: int, longest: int, mesh: DeviceMesh, device: str) -> tuple[float, float]:
    """Train both ways; return the largest deviation of a loss, and of a weight."""
    torch.manual_seed(0)
    alone = Model(longest).to(device)
    model = copy.deepcopy(alone)
    # parameters are sharded over the ranks that share tokens, and replicated over the others
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    both = alone, model
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in both]
    generator = torch.Generator().manual_seed(1)
    first, groups = mesh.get_local_rank("data"), mesh["data"].size()
    apart = 0.0
    for step in range(steps):
        packs = [draw(generator, longest) for _ in range(PACKS)]
        count = sum(int((pack.targets >= 0).sum()) for pack in packs)
        for optimizer in optimizers:
            optimizer.zero_grad()
        whole = shares = 0.0
        for pack in packs:
            loss = loss_of(alone, pack, device) / count
            loss.backward()
            whole += float(loss.detach())
        for pack in packs[first::groups]:
            loss = loss_of_shard(model, pack, mesh, device) / count
            # FSDP divides by the number of ranks
            (loss * mesh.size()).backward()
            shares += float(loss.detach())
        for optimizer in optimizers:
            optimizer.step()
        total = torch.tensor(shares, device=device)
        dist.all_reduce(total)
        apart = max(apart, abs(whole - float(total)))
        if dist.get_rank() == 0 and (step % max(1, steps // 10) == 0 or step == steps - 1):
            print(f"step {step:4}: loss {whole:.6f} alone, {total:.6f} together", flush=True)
    weights = zip(alone.parameters(), model.parameters(), strict=True)
    distances = []
    for mine, shared in weights:
        full = shared.full_tensor() if isinstance(shared, DTensor) else shared
        distances.append(float((mine - full).detach().abs().max()))
    return apart, max(distances)


def main() -> int:
    parser = argparse.ArgumentParser(
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description=(__doc__ or "").split("\n")[0],
    )
    parser.add_argument("--steps", type=int, default=20, help="steps of training")
    parser.add_argument("--longest", type=int, default=200, help="tokens of the long document")
    parser.add_argument("--data", type=int, default=1, help="groups with packs of their own")
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="where the tensors are",
    )
    args = parser.parse_args()
    if "RANK" in os.environ:
        if args.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    else:
        backend = "nccl" if args.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        shape = args.data, dist.get_world_size() // args.data
        mesh = init_device_mesh(args.device, shape, mesh_dim_names=("data", "tokens"))
        loss, weight = train(args.steps, args.longest, mesh, args.device)
        if dist.get_rank() == 0:
            print(f"largest difference: of a loss {loss:.1e}, of a weight {weight:.1e}")
    finally:
        dist.destroy_process_group()
    # fp32, and steps that add up
    return 0 if max(loss, weight) < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
