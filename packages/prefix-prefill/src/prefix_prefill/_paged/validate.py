"""Checks of tensor data, which the public functions skip on a GPU because they wait for it."""

from torch import Tensor

from .._cache import checks as cache_checks
from .._cache.layout import cache_sizes
from .._linked.host.arguments import (
    as_int32,
    as_length,
    check_offset_values,
    check_readable,
    check_window,
)
from . import checks as paged_checks
from . import tensor_checks, values


def validate_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    k: Tensor | None = None,
    v: Tensor | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    tree_mask: Tensor | None = None,
    kv_dtype: str | None = None,
) -> None:
    """Check the values of offsets, lengths and pages, which :func:`paged_attn_func` trusts.

    For debugging and tests: the function copies the values to the host, so it waits for the device,
    and a CUDA graph cannot capture it.

    Args:
        q: queries; only the shapes of ``q``, ``k_cache``, ``v_cache``, ``k`` and ``v`` are read.
        k_cache: this and all later arguments as in :func:`paged_attn_func`.
        block_table: entries of the pages that a query may see must be from 0 to ``num_blocks``.
        cu_seqlens_q: must not decrease, nor leave 0 to ``tokens``, nor step by more than
            ``max_seqlen_q``.
        seqlens_k: from 0 to ``max_seqlen_k``, and at most the slots of a row of ``block_table``;
            with ``k``, at least the number of the sequence's queries.
        tree_mask: an entry may only have bits of new tokens of its own sequence.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range, and on the first wrong value: the message has
            the argument, the index of the entry, the expected range and the value.
    """
    cache_checks.check_kv_dtype(kv_dtype)
    k_cache = cache_checks.stored_view(q, k_cache, kv_dtype)
    v_cache = cache_checks.stored_view(q, v_cache, kv_dtype)
    paged_checks.check_paged(q, k_cache, v_cache, k, v, kv_dtype)
    cu_seqlens_q, seqlens_k = as_int32(cu_seqlens_q), as_int32(seqlens_k)
    paged_checks.check_table(q, block_table, cu_seqlens_q, seqlens_k)
    tensors = {"block_table": block_table, "cu_seqlens_q": cu_seqlens_q, "seqlens_k": seqlens_k}
    check_readable(**tensors)
    max_seqlen_q = as_length("max_seqlen_q", max_seqlen_q)
    max_seqlen_k = as_length("max_seqlen_k", max_seqlen_k)
    left, _ = check_window(window_size)
    starts = cu_seqlens_q.tolist()
    check_offset_values("cu_seqlens_q", starts, q.shape[0], "max_seqlen_q", max_seqlen_q)
    lengths = seqlens_k.tolist()
    values.check_pages(
        starts,
        lengths,
        values.first_keys(starts, lengths, left),
        block_table,
        cache_sizes(k_cache),
        has_new=k is not None,
        max_seqlen_k=max_seqlen_k,
    )
    if tree_mask is not None:
        paged_checks.check_tree(q, tree_mask, max_seqlen_q, causal, None)
        values.check_trees(starts, tree_mask)


def validate_slot_mapping(slot_mapping: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Check the slots that :func:`reshape_and_cache` trusts; this waits for the device.

    Args:
        slot_mapping: int32 or int64 ``[tokens]``: below 0, or a slot of the cache that no other
            token has.
        k_cache: keys; only the shapes of ``k_cache`` and ``v_cache`` are read.
        v_cache: values.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape or a device, and on the first value that is wrong.
    """
    cache_checks.check_caches(k_cache, v_cache)
    tensor_checks.check_indices("slot_mapping", slot_mapping, "k_cache", k_cache, 1)
    check_readable(slot_mapping=slot_mapping)
    values.check_slots(k_cache, slot_mapping)
