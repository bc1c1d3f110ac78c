"""One of several processes that share sequences: ``_attention_rank.py RANK RANKS HEADS FOLDER``.

``HEADS`` of the ranks share the heads of the same tokens. Each process compares what it has with
the reference over all tokens, and raises if it is not that.
"""

from __future__ import annotations

import datetime
import sys

import pytest
import torch
import torch.distributed as dist
from flash_attn_triton import attention_reference, distributed, varlen_attention_reference
from torch.distributed.device_mesh import init_device_mesh

HEADS_Q, HEADS_K, D, DV = 8, 4, 16, 24
# of one length: tokens, cut, mask
DENSE = [
    (167, "zigzag", {"causal": True}),
    (64, "zigzag", {"softcap": 3.0}),
    (5, "contiguous", {"causal": True}),
    (131, "zigzag", {"causal": True, "window_size": (40, 0)}),
    (131, "contiguous", {"window_size": (9, 4)}),
]
# packed: lengths, cut, mask
PACKED = [
    ((170, 0, 15, 31, 2), "balanced", {"causal": True}),
    ((60, 61, 1), "zigzag", {"window_size": (9, 4)}),
    ((33, 40), "contiguous", {}),
]


def differentiate(function, made, *rest, **options):
    """Return output, LSE and gradients of a call."""
    q, k, v, sinks = (made[name].clone().requires_grad_() for name in ("q", "k", "v", "sinks"))
    out, lse = function(q, k, v, *rest, sinks=sinks, return_lse=True, **options)
    arriving = made["dout"], made["dlse"]
    return [out, lse, *torch.autograd.grad((out, lse), (q, k, v, sinks), arriving)]


def problem(*tokens: int) -> dict[str, torch.Tensor]:
    """Return inputs and the gradients that arrive, the same values in every process."""
    g = torch.Generator().manual_seed(sum(tokens))
    shapes = {"q": (HEADS_Q, D), "k": (HEADS_K, D), "v": (HEADS_K, DV), "dout": (HEADS_Q, DV)}
    made = {name: torch.randn(*tokens, *n, generator=g) for name, n in shapes.items()}
    made["sinks"] = torch.randn(HEADS_Q, generator=g)
    made["dlse"] = torch.randn(*tokens[:-1], HEADS_Q, tokens[-1], generator=g)
    return made


def compare(name, got, made, reference, cut, *rest, **options):
    """Hold results to three times the error of the reference in fp32, and two last bits."""
    narrow, wide = (
        differentiate(reference, {n: x.to(t) for n, x in made.items()}, *rest, **options)
        for t in (torch.float32, torch.float64)
    )
    dist.all_reduce(got[5])
    for i, (found, eager, oracle) in enumerate(zip(got, narrow, wide, strict=True)):
        finite = oracle.isfinite()
        error = (eager - oracle)[finite].abs().max()
        budget = 3 * error + 2 * torch.finfo(torch.float32).eps * oracle[finite].abs().max()
        if i == 5:
            own = oracle
        else:
            own = cut(oracle.transpose(-1, -2) if i == 1 else oracle)
            own = own.transpose(-1, -2) if i == 1 else own
        assert found.shape == own.shape, f"{name}, result {i}: {found.shape}"
        missed = (found - own).abs().nan_to_num(0.0).max() if own.numel() else 0.0
        assert missed <= budget, f"{name}, result {i}: {missed} over {budget}"


def main(rank: int, ranks: int, heads: int, folder: str) -> None:
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=120)  # a hang is a failure
    dist.init_process_group("gloo", f"file://{folder}/meeting", limit, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks // heads, heads), mesh_dim_names=("tokens", "heads"))
    groups = {"group": mesh.get_group("tokens")}
    if heads > 1:
        groups["head_group"] = mesh.get_group("heads")
    n, r, j = ranks // heads, rank // heads, rank % heads

    for seqlen, rule, options in DENSE:
        made = problem(2, seqlen)

        def cut(x, rule=rule):
            own = distributed.shard(x, n, r, shard=rule)
            return distributed.shard(own, heads, j, shard="contiguous")

        own = {name: cut(made[name]) for name in ("q", "k", "v", "dout")}
        own |= {"sinks": made["sinks"], "dlse": cut(made["dlse"].mT).mT}
        rest = {"shard": rule, "seqlen": seqlen, **groups, **options}
        got = differentiate(distributed.flash_attn_func, own, **rest)
        compare(f"{seqlen} {rule}", got, made, attention_reference, cut, **options)

    for lengths, rule, options in PACKED:
        made = problem(sum(lengths))
        offsets = [sum(lengths[:b]) for b in range(len(lengths) + 1)]
        plan = distributed.ShardPlan(offsets, n, shard=rule, **options)

        def cut(x, plan=plan):
            return distributed.shard(plan.shard(x, r), heads, j, dim=0, shard="contiguous")

        own = {name: cut(made[name]) for name in ("q", "k", "v", "dout")}
        own |= {"sinks": made["sinks"], "dlse": cut(made["dlse"].T).T}
        got = differentiate(distributed.flash_attn_varlen_func, own, plan, **groups)
        starts = torch.tensor(offsets, dtype=torch.int32)
        rest = starts, starts, max(lengths), max(lengths)
        name, reference = f"{lengths} {rule}", varlen_attention_reference
        compare(name, got, made, reference, cut, *rest, **options)
    if ranks > 1:
        # of all ranks one differs, and all say so
        x = torch.ones(1, 1, heads, 16)
        with pytest.raises(ValueError, match="softcap must be the same"):
            distributed.flash_attn_func(x, x, x, softcap=float(rank == ranks - 1), **groups)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), sys.argv[4])
