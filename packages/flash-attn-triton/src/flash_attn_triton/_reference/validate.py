"""The check of values that only the device knows, which the public functions leave out."""

from torch import Tensor

from .._dense import checks
from .._linked.host.arguments import (
    as_int32,
    as_length,
    check_offset_values,
    check_readable,
    check_tensor,
)


def validate_varlen(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: Tensor | None = None,
) -> None:
    """Check the values of offsets and lengths, which :func:`flash_attn_varlen_func` trusts.

    Use it for debugging and in tests: it copies the offsets to the host, so it waits for the
    device, and a CUDA graph cannot capture it.

    Args:
        q: queries, ``[tokens_q, heads_q, head_dim]``; only the shape is read.
        k: keys, ``[tokens_k, heads_k, head_dim]``; only the shape is read.
        cu_seqlens_q: offsets of the sequences of queries, int32 or int64 ``[batch + 1]``: must not
            decrease, and must be from 0 to ``tokens_q``.
        cu_seqlens_k: offsets of the sequences of keys, to ``tokens_k``.
        max_seqlen_q: no sequence of queries may be longer.
        max_seqlen_k: no sequence of keys may be longer.
        seqused_k: int32 ``[batch]``, from 0 to the length of each sequence. Default: None.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range, and on the first wrong value: the message gives
            the argument, the index of the entry, what was expected and what was given.
    """
    for name, x, form in (
        ("q", q, "[tokens_q, heads_q, head_dim]"),
        ("k", k, "[tokens_k, heads_k, head_dim]"),
    ):
        check_tensor(name, x)
        if x.ndim != 3:
            raise ValueError(f"{name} must be {form}, got {list(x.shape)}")
    checks.check_packed(q, *map(as_int32, (cu_seqlens_q, cu_seqlens_k, seqused_k)))
    check_readable(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k)
    max_seqlen_q = as_length("max_seqlen_q", max_seqlen_q)
    max_seqlen_k = as_length("max_seqlen_k", max_seqlen_k)

    check_offset_values(
        "cu_seqlens_q", cu_seqlens_q.tolist(), q.shape[0], "max_seqlen_q", max_seqlen_q
    )
    starts_k = cu_seqlens_k.tolist()
    check_offset_values("cu_seqlens_k", starts_k, k.shape[0], "max_seqlen_k", max_seqlen_k)
    checks.check_used(starts_k, seqused_k)
