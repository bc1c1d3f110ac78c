"""The two bounds of each case: floating-point operations over a rate, bytes over a bandwidth."""

from __future__ import annotations

from blocksparse_attn import BlockSparseLayout
from cases import Case, everything

# measured on one NVIDIA H200: the best 8192^3 bf16 product, and a copy, bytes read plus written
FLOPS_PER_SECOND = 788e12
BYTES_PER_SECOND = 4.27e12


def table() -> str:
    """Return the bounds of every case but those of the curve, as a table."""
    lines = [
        "| case | density | GFLOP | FLOPs / rate, ms | MB | bytes / bandwidth, ms | binding |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    lines += [_row(case) for case in everything() if case.family != "curve"]
    return "\n".join(lines)


def _row(case: Case) -> str:
    group = case.heads_q // case.heads_k
    layout, density = None, 1.0
    if case.local:
        layout = BlockSparseLayout.local_strided(
            case.heads_q, case.seqlen, case.block, case.local, case.stride, case.homo
        )
        density = layout.density(case.seqlen)
    if case.seqlen_q and layout is not None:  # one query of each sequence: the last row of blocks
        last = layout.to_dense()[:, -1]
        flops = 4 * case.batch * int(last.sum()) * case.block * case.head_dim
        needed = int(last.view(case.heads_k, group, -1).any(1).sum())
        moved = needed * case.block * case.head_dim * 4 * case.batch
    else:
        flops = 2 * case.heads_q * case.head_dim * case.seqlen**2 * density
        row, heads = 2 * case.head_dim * case.seqlen, case.heads_q + case.heads_k
        # q, k, v and out, in the backward their gradients too, and the fp32 LSE
        moved = row * 2 * heads * (1 if case.way == "fwd" else 2) + 4 * case.heads_q * case.seqlen
        flops *= 1 if case.way == "fwd" else 2.5
    by_flops, by_bytes = flops / FLOPS_PER_SECOND * 1e3, moved / BYTES_PER_SECOND * 1e3
    binding = "FLOPs" if by_flops > by_bytes else "bytes"
    return (
        f"| {case.name} | {density:.3f} | {flops / 1e9:.1f} | {by_flops:.3f} | {moved / 1e6:.1f} "
        f"| {by_bytes:.3f} | {binding} |"
    )
