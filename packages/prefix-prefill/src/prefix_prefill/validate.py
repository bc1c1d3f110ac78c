"""The checks that the public functions leave out: they read what only the device knows."""

from torch import Tensor

from . import _checks
from ._layout import cache_sizes
from ._linked.host.arguments import check_length, check_window


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
) -> None:
    """Check the values of offsets, lengths and pages, which :func:`paged_attn_func` trusts.

    For debugging and for tests: it copies them to the host, so it waits for the device, and a CUDA
    graph cannot capture it.

    Args:
        q: queries; of this and of ``k_cache``, ``v_cache``, ``k`` and ``v`` only shapes are read.
        k_cache: this and all others as in :func:`paged_attn_func`.
        block_table: entries of the pages that a query may see must be from 0 to ``num_blocks``.
        cu_seqlens_q: must not decrease, nor leave 0 to ``tokens``, nor step by more than
            ``max_seqlen_q``.
        seqlens_k: from 0 to ``max_seqlen_k`` and to what ``block_table`` has room for; with ``k``,
            at least as many as the sequence has queries.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range, and on the first value that is wrong: with the
            argument, the index of the entry, what was expected and what came.
    """
    k_cache, v_cache = _checks.fp8_view(q, k_cache), _checks.fp8_view(q, v_cache)
    _checks.check_paged(q, k_cache, v_cache, k, v)
    _checks.check_table(q, block_table, cu_seqlens_q, seqlens_k)
    check_length("max_seqlen_q", max_seqlen_q)
    check_length("max_seqlen_k", max_seqlen_k)
    left, _ = check_window(window_size)
    sizes = cache_sizes(k_cache)
    starts = cu_seqlens_q.tolist()
    _check_offsets(starts, q.shape[0], max_seqlen_q)
    room = block_table.shape[1] * sizes.block_size
    table = block_table.tolist()
    for b, length in enumerate(seqlens_k.tolist()):
        queries = starts[b + 1] - starts[b]
        least = queries if k is not None else 0
        if not least <= length <= max_seqlen_k:
            raise ValueError(
                f"seqlens_k[{b}] must be from {least} to max_seqlen_k, {max_seqlen_k}, got {length}"
            )
        cached = length - queries if k is not None else length
        if cached > room:
            raise ValueError(
                f"seqlens_k[{b}] must be at most what block_table has room for, {room}, "
                f"got {cached} cached keys"
            )
        first = max(0, length - queries - left) if left >= 0 else 0
        if queries == 0:
            continue
        for i in range(first // sizes.block_size, -(-cached // sizes.block_size)):
            if not 0 <= table[b][i] < sizes.num_blocks:
                raise ValueError(
                    f"block_table[{b}, {i}] must be from 0 to num_blocks - 1, "
                    f"{sizes.num_blocks - 1}, got {table[b][i]}"
                )


def validate_slot_mapping(slot_mapping: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Check the slots that :func:`reshape_and_cache` trusts; it reads them on the host.

    Args:
        slot_mapping: int32 or int64 ``[tokens]``: below 0, or a slot of the cache that no other
            token has.
        k_cache: keys; of this and ``v_cache`` only shapes are read.
        v_cache: values.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape or a device, and on the first value that is wrong.
    """
    sizes = _checks.check_caches(k_cache, v_cache)
    _checks.check_indices("slot_mapping", slot_mapping, "k_cache", k_cache, 1)
    slots = sizes.num_blocks * sizes.block_size
    taken: dict[int, int] = {}
    for i, slot in enumerate(slot_mapping.tolist()):
        if slot >= slots:
            raise ValueError(
                f"slot_mapping[{i}] must be below the number of slots, {slots}, got {slot}"
            )
        if slot >= 0 and slot in taken:
            raise ValueError(
                f"slot_mapping[{i}] must be a slot of its own, got {slot}, which is "
                f"slot_mapping[{taken[slot]}]"
            )
        taken[slot] = i


def _check_offsets(offsets: list[int], tokens: int, max_seqlen: int) -> None:
    last = offsets[0]
    for i, offset in enumerate(offsets):
        if not 0 <= offset <= tokens:
            raise ValueError(
                f"cu_seqlens_q[{i}] must be from 0 to the number of tokens, {tokens}, got {offset}"
            )
        if offset < last:
            raise ValueError(
                f"cu_seqlens_q[{i}] must be at least cu_seqlens_q[{i - 1}], {last}, got {offset}"
            )
        if offset - last > max_seqlen:
            raise ValueError(
                f"cu_seqlens_q[{i}] must be at most max_seqlen_q, {max_seqlen}, beyond "
                f"cu_seqlens_q[{i - 1}], {last}, got {offset}"
            )
        last = offset
