"""Train a small Llama with transformers' Trainer, each pack of documents cut over all ranks.

    torchrun --nproc-per-node=2 examples/train_with_trainer.py

It needs transformers and accelerate. Three things change in a script that trains with ``Trainer``:
the model's attention has a name of ours, the collator hands each rank its shard of a pack with the
plan, and the loader gives all ranks the same packs; Trainer's own gives each rank others.

A copy of the model is trained without any of this, by one rank. Exits with 1 if losses deviate.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from flash_attn_triton import distributed
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

LETTERS, RATE = 32, 0.1


def parallel_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    plan: distributed.ShardPlan | None = None,
    group: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend across ranks; heads come first, ``[1, heads, tokens, head_dim]``."""
    if plan is None or attention_mask is not None:
        raise ValueError("a plan is needed, and no mask: packed documents have none")
    q, k, v = (x.transpose(1, 2)[0] for x in (query, key, value))
    out = distributed.flash_attn_varlen_func(q, k, v, plan, softmax_scale=scaling, group=group)
    assert isinstance(out, Tensor)
    return out[None], None


AttentionInterface.register("attention_over_ranks", parallel_attention)


def collate(packs: list[list[Tensor]], ranks: int, rank: int) -> dict[str, Any]:
    """Return this rank's tokens of one pack: targets are shifted before anything is cut."""
    (texts,) = packs
    offsets = [0, *torch.tensor([len(text) for text in texts]).cumsum(0).tolist()]
    plan = distributed.ShardPlan(offsets, ranks, causal=True)
    targets = torch.cat([torch.cat([text[1:], text.new_tensor([-100])]) for text in texts])
    own = plan.shard(targets, rank)[None]
    return {
        "input_ids": plan.shard(torch.cat(texts), rank)[None],
        "position_ids": plan.positions(rank)[None],
        "labels": own,
        "shift_labels": own,
        "plan": plan,
    }


class ParallelTrainer(Trainer):
    """A trainer whose ranks all read the same packs."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return packs in their order, each cut for this rank."""
        ranks, rank = dist.get_world_size(), dist.get_rank()
        data: Any = self.train_dataset
        return DataLoader(data, batch_size=1, collate_fn=lambda x: collate(x, ranks, rank))


def draw(count: int) -> list[list[Tensor]]:
    """Return packs of documents that repeat a row of letters, one of them long."""
    g = torch.Generator().manual_seed(1)
    packs = []
    for _ in range(count):
        lengths = [120, *torch.randint(2, 40, (5,), generator=g).tolist()]
        rows = [torch.randint(LETTERS, (8,), generator=g) for _ in lengths]
        packs.append([row.repeat(16)[:n] for row, n in zip(rows, lengths, strict=True)])
    return packs


def train_alone(
    model: nn.Module, packs: list[list[Tensor]], device: str, group: Any
) -> list[float]:
    """Return the loss of each step, with whole packs on this rank."""
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    losses = []
    for pack in packs:
        batch = collate([pack], 1, 0)
        moved = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in batch.items()}
        loss = model(**moved, group=group).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description=(__doc__ or "").split("\n")[0],
    )
    parser.add_argument("--steps", type=int, default=8, help="steps of training")
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="where the tensors are",
    )
    args = parser.parse_args()
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    config = LlamaConfig(
        vocab_size=LETTERS, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, attn_implementation="attention_over_ranks",
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    packs = draw(args.steps)
    want = train_alone(copy.deepcopy(model).to(args.device), packs, args.device, alone)
    with tempfile.TemporaryDirectory() as folder:
        given = TrainingArguments(
            folder, per_device_train_batch_size=1, max_steps=args.steps, learning_rate=RATE,
            lr_scheduler_type="constant", optim="sgd", max_grad_norm=0.0, logging_steps=1,
            save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=args.device == "cpu",
        )  # fmt: skip
        trainer = ParallelTrainer(model, given, train_dataset=packs)
        trainer.train()
    got = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    apart = max(abs(x - y) for x, y in zip(got, want, strict=True))
    if dist.get_rank() == 0:
        print(f"losses from {want[0]:.4f} to {want[-1]:.4f}; largest difference {apart:.1e}")
    dist.destroy_process_group()
    return 0 if apart < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
