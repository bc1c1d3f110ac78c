"""The check of values on the device, which the public functions leave out on a GPU."""

from torch import Tensor

from .._linked.host import arguments
from . import checks
from .call import Bounds, Tensors


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

    For debugging and for tests: it copies the values to the host, so it waits for the device, and a
    CUDA graph cannot capture it. :meth:`BlockSparseLayout.validate` checks a layout's values.

    Args:
        q: queries, ``[tokens_q, heads_q, head_dim]``. Of ``q`` and ``k`` only the shapes are read.
        k: keys, ``[tokens_k, heads_k, head_dim]``; paged ``[pages, page_size, heads_k, head_dim]``.
        cu_seqlens_q: offsets of the sequences in ``q``, int32 or int64 ``[batch + 1]``. They must
            not decrease and must lie from 0 to ``tokens_q``.
        cu_seqlens_k: offsets of the sequences in ``k``, under the same conditions; with a
            ``block_table`` only their differences matter.
        max_seqlen_q: upper bound of the number of queries per sequence.
        max_seqlen_k: upper bound of the number of keys per sequence.
        block_table: page numbers, ``[batch, max_pages]``; those of pages that hold keys must be
            from 0 to ``pages - 1``. Default: None.

    Raises:
        TypeError: if an argument has a wrong type or dtype.
        ValueError: if a shape, a device or a range is wrong, and on the first wrong value: the
            message has the argument, the index of the entry, and the expected and found values.
    """
    arguments.check_tensor("q", q)
    arguments.check_tensor("k", k)
    checks.check_dimensions(q, k, block_table is not None)
    cu_seqlens_q, cu_seqlens_k = map(arguments.as_int32, (cu_seqlens_q, cu_seqlens_k))
    batch = arguments.check_cu_seqlens(cu_seqlens_q, cu_seqlens_k, q)
    arguments.check_readable(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    max_seqlen_q = arguments.as_length("max_seqlen_q", max_seqlen_q)
    max_seqlen_k = arguments.as_length("max_seqlen_k", max_seqlen_k)
    if block_table is not None:
        checks.check_block_table(q.detach(), k.detach(), k.detach(), batch, block_table)
        arguments.check_readable(block_table=block_table)
        checks.check_pages(k, max_seqlen_k, block_table)
    x = Tensors(q, k, k, cu_seqlens_q, cu_seqlens_k, block_table)
    checks.check_values(x, Bounds(max_seqlen_q, max_seqlen_k))
