"""The check that the public functions leave out on a GPU: it reads what only the device knows."""

from torch import Tensor

from .._linked.host import arguments
from . import checks


def validate_varlen(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    block_table: Tensor | None = None,
) -> None:
    """Check the values that :func:`blocksparse_attn_varlen_func` trusts.

    For debugging and for tests: it copies them to the host, so it waits for the device, and a CUDA
    graph cannot capture it. A layout's values are checked by :meth:`BlockSparseLayout.validate`.

    Args:
        q: queries, ``[tokens_q, heads_q, head_dim]``; of ``q`` and ``k`` only shapes are read.
        k: keys, ``[tokens_k, heads_k, head_dim]``; paged ``[pages, page_size, heads_k, head_dim]``.
        cu_seqlens_q: where sequences begin, int32 or int64 ``[batch + 1]``: must not decrease, nor
            leave 0 to ``tokens_q``.
        cu_seqlens_k: likewise for keys; with pages its differences alone count.
        max_seqlen_q: what no sequence of queries may exceed.
        max_seqlen_k: likewise for keys.
        block_table: pages, ``[batch, max_pages]``: those that hold keys must be of ``k``.
            Default: None.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range, and on the first value that is wrong: with the
            argument, the index of the entry, what was expected and what came.
    """
    arguments.check_tensor("q", q)
    arguments.check_tensor("k", k)
    cu_seqlens_q, cu_seqlens_k = map(arguments.as_int32, (cu_seqlens_q, cu_seqlens_k))
    batch = arguments.check_cu_seqlens(cu_seqlens_q, cu_seqlens_k, q)
    arguments.check_length("max_seqlen_q", max_seqlen_q)
    arguments.check_length("max_seqlen_k", max_seqlen_k)
    if block_table is not None:
        checks.check_block_table(q.detach(), k.detach(), k.detach(), batch, block_table)
        checks.check_pages(k, max_seqlen_k, block_table)
    checks.check_values(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table)
