"""Inputs of a case, and the comparison that every provider has to pass.

The arbiter is fp32 attention over the mask of tokens, written out head by head and in chunks:
deliberately apart from the package under test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from blocksparse_attn import BlockSparseLayout
from cases import Case

# rows of queries at a time
CHUNK = 2048
# largest relative error (Frobenius) of the heads that are compared
TOLERANCE = 2e-2
# tokens up to which every head is compared; of longer sequences the first and the last group
ALL_HEADS = 4096
# what dense providers are held to, by what it depends on: cases differ in their layout alone
_dense: dict[tuple[Any, ...], dict[str, torch.Tensor]] = {}


@dataclass
class Inputs:
    """Operands, the layout and what is known of it."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    layout: BlockSparseLayout
    density: float
    needed_bytes: int
    first: int  # see ``first_keys``
    expected: dict[str, torch.Tensor] | None = None


def make_layout(case: Case, device: str) -> BlockSparseLayout:
    """Return the kept blocks: the local and strided pattern, or random ones below the diagonal."""
    if case.local:
        return BlockSparseLayout.local_strided(
            case.heads_q, case.seqlen, case.block, case.local, case.stride, case.homo, device=device
        )
    # drawn in squares of 128 positions, so that blocks of 64 and 128 keep the same tokens
    side = max(128 // case.block, 1)
    blocks = math.ceil(case.seqlen / (case.block * side))
    generator = torch.Generator().manual_seed(0)
    size = (1 if case.family == "dense" else case.heads_q, blocks, blocks)
    kept = torch.rand(size, generator=generator) < case.density
    kept |= torch.eye(blocks, dtype=torch.bool)  # no row sees nothing
    kept = kept.repeat_interleave(side, 1).repeat_interleave(side, 2)
    count = math.ceil(case.seqlen / case.block)
    return BlockSparseLayout.from_dense(kept[:, :count, :count].tril().to(device), case.block)


def first_keys(density: float, seqlen: int) -> int:
    """Return how many keys come to about as many products: steps of 128, as of tiles."""
    return max(round(density * seqlen / 2 / 128), 1) * 128


def make_inputs(case: Case, device: str, seed: int = 0) -> Inputs:
    """Draw bf16 normal operands."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(tokens: int, heads: int) -> torch.Tensor:
        shape = (case.batch, tokens, heads, case.head_dim)
        return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)

    queries = case.seqlen_q or case.seqlen
    layout = make_layout(case, device)
    dense = layout.to_dense()
    group = case.heads_q // case.heads_k
    # of the last row: the blocks that some head of a group keeps, keys and values
    last = dense[:, (case.seqlen - 1) // case.block]
    needed = int(last.view(case.heads_k, group, -1).any(1).sum())
    needed_bytes = needed * case.block * case.head_dim * 2 * 2 * case.batch
    density = layout.density(case.seqlen)
    return Inputs(
        draw(queries, case.heads_q),
        draw(case.seqlen, case.heads_k),
        draw(case.seqlen, case.heads_k),
        draw(queries, case.heads_q),
        layout,
        density,
        needed_bytes,
        first_keys(density, case.seqlen),
    )


def compared(case: Case) -> tuple[list[int], list[int]]:
    """Return the heads that are compared, of queries and of keys."""
    group = case.heads_q // case.heads_k
    of_keys = list(range(case.heads_k))
    if case.seqlen > ALL_HEADS:
        of_keys = [0, case.heads_k - 1]
    return [h * group + i for h in of_keys for i in range(group)], of_keys


@torch.no_grad()
def reference(case: Case, inputs: Inputs, sees: str) -> dict[str, torch.Tensor]:
    """Return ``out``, and for the backward ``dq``, ``dk`` and ``dv``, in fp32."""
    q, k, v, dout = (x.float() for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    names = ["out"] if case.way == "fwd" else ["out", "dq", "dk", "dv"]
    results = {name: torch.zeros_like(x) for name, x in zip(names, (dout, q, k, v), strict=False)}
    scale = case.head_dim**-0.5
    blocks = inputs.layout.to_dense()
    key = torch.arange(case.seqlen, device=q.device)
    offset = case.seqlen - q.shape[1]
    for b in range(case.batch):
        for h in compared(case)[0]:
            hk = h // (case.heads_q // case.heads_k)
            kept = blocks[h % blocks.shape[0]]
            for first in range(0, q.shape[1], CHUNK):
                rows = slice(first, min(first + CHUNK, q.shape[1]))
                position = torch.arange(rows.start, rows.stop, device=q.device) + offset
                seen = key <= position[:, None]
                if sees == "first":
                    seen = (key < inputs.first).expand_as(seen)
                if sees == "layout":
                    seen &= kept[position // case.block][:, key // case.block]
                scores = (q[b, rows, h] @ k[b, :, hk].t()).mul_(scale)
                p = torch.softmax(scores.masked_fill_(~seen, -math.inf), -1)
                out = p @ v[b, :, hk]
                results["out"][b, rows, h] = out
                if case.way == "fwd":
                    continue
                do = dout[b, rows, h]
                results["dv"][b, :, hk] += p.t() @ do
                ds = (do @ v[b, :, hk].t()).sub_((do * out).sum(-1, keepdim=True))
                ds.mul_(p).mul_(scale)
                results["dq"][b, rows, h] = ds @ k[b, :, hk]
                results["dk"][b, :, hk] += ds.t() @ q[b, rows, h]
    return results


def check(
    case: Case, inputs: Inputs, got: tuple[torch.Tensor, ...], sees: str
) -> tuple[str, float]:
    """Return whether a result is right, and its largest relative error; NaN never passes."""
    if sees == "first":
        expected = reference(case, inputs, sees)
    elif sees == "causal" and inputs.density < 1.0:
        key = case.seqlen, case.seqlen_q, case.batch, case.heads_q, case.heads_k, case.way
        if key not in _dense:
            _dense[key] = reference(case, inputs, "causal")
        expected = _dense[key]
    else:
        if inputs.expected is None:
            inputs.expected = reference(case, inputs, "layout")
        expected = inputs.expected
    names = ("out",) if case.way == "fwd" else ("dq", "dk", "dv")
    worst = 0.0
    heads_q, heads_k = compared(case)
    for name, x in zip(names, got, strict=True):
        heads = heads_k if name in ("dk", "dv") else heads_q
        want = expected[name][:, : x.shape[1], heads]
        error = float((x[:, :, heads].float() - want).norm() / want.norm())
        worst = max(worst, error if error == error else math.inf)
    return ("ok" if worst <= TOLERANCE else "wrong"), worst
