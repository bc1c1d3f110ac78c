"""The reference of attention over a tree of segments: every path is written out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from .._linked.host.arguments import check_readable
from .._linked.host.results import returns_lse
from .._reference.reference import varlen_attention_reference
from .checks import check_tree, check_tree_reference, check_tree_values


@returns_lse
def tree_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    parents: Sequence[int] | Tensor,
    max_seqlen: int,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute what :func:`flash_attn_tree_func` computes, in plain PyTorch.

    The keys and values of each path from a root to a segment are copied into one sequence. The
    segment's queries are its last tokens, and attend to it causally. Autograd sums the gradients of
    the paths. The tree is read on the host.

    Args:
        q: queries, ``[tokens, heads_q, head_dim]``; any float dtype, float64 included.
        k: keys, ``[tokens, heads_k, head_dim]``.
        v: values, ``[tokens, heads_k, head_dim_v]``.
        cu_seqlens: as in :func:`flash_attn_tree_func`; so are all further arguments.

    Returns:
        ``out`` or ``(out, lse)`` as :func:`flash_attn_tree_func` does; the log-sum-exp is float64
        for float64 inputs, else float32.

    Raises:
        TypeError: on an argument's type, or a dtype that is not a float.
        ValueError: on a shape or a range, and on offsets or parents that are not a tree.
    """
    check_tree_reference(q, k, v, sinks)
    max_seqlen = check_tree(q, cu_seqlens, parents, max_seqlen)
    check_readable(cu_seqlens=cu_seqlens)
    if isinstance(parents, Tensor):
        check_readable(parents=parents)
    starts = cu_seqlens.tolist()
    tree = parents.tolist() if isinstance(parents, Tensor) else list(parents)
    check_tree_values(starts, tree, q.shape[0], max_seqlen)
    tokens, path_starts = write_out_paths(starts, tree)
    # paths share keys: add their gradients before rounding
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    index = torch.tensor(tokens, dtype=torch.int64, device=q.device)
    return varlen_attention_reference(
        q.to(wide),
        k.to(wide)[index],
        v.to(wide)[index],
        cu_seqlens,
        torch.tensor(path_starts, dtype=torch.int32, device=q.device),
        max_seqlen,
        max(map(int.__sub__, path_starts[1:], path_starts), default=0),
        softmax_scale=softmax_scale,
        causal=True,
        softcap=softcap,
        deterministic=deterministic,
        sinks=sinks,
        out_dtype=q.dtype,
        return_lse=return_lse,
    )  # type: ignore[return-value]


def write_out_paths(starts: list[int], parents: list[int]) -> tuple[list[int], list[int]]:
    """Return the tokens of each segment's path, root first, joined, and the paths' offsets."""
    tokens: list[int] = []
    path_starts = [0]
    for segment in range(len(parents)):
        path = [segment]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        pieces = (range(starts[s], starts[s + 1]) for s in reversed(path))
        tokens += itertools.chain.from_iterable(pieces)
        path_starts.append(len(tokens))
    return tokens, path_starts
