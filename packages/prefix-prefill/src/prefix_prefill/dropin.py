"""The functions under which inference engines know this kernel."""

import torch
from torch import Tensor

from ._cache import checks as cache_checks
from ._cache.layout import cache_sizes, head_dim_of_values
from ._linked.host.arguments import (
    ERRORS,
    as_int32,
    as_length,
    check_choice,
    check_flag,
    check_tensor,
    is_flag,
    is_int,
    kind,
    renamed,
    shown,
)
from ._linked.host.forms import Memory, form_of
from ._linked.host.operators import check_written
from ._paged import checks as paged_checks
from ._paged import ops
from ._paged import options as paged_options
from ._paged.call import Checked, Tensors

_known: Memory[Checked] = Memory()

# engines' names of FP8 dtypes; "auto" is the dtype of the queries
_FP8_NAMES = {"fp8": 0, "fp8_e4m3": 0, "fp8_e5m2": 1}
# argument names of the checks: names in these functions
_CONTEXT = {
    "block_table": "b_loc",
    "cu_seqlens_q": "b_start_loc",
    "seqlens_k": "b_seq_len",
    "max_seqlen_q": "max_input_len",
    "softmax_scale": "sm_scale",
    "k_descale": "k_scale",
    "v_descale": "v_scale",
    "out": "o",
    "out_scale": "fp8_out_scale",
}
_CHUNKED = {
    "q": "query",
    "k": "key",
    "v": "value",
    "k_cache": "key_cache",
    "v_cache": "value_cache",
    "cu_seqlens_q": "query_start_loc",
    "seqlens_k": "seq_lens",
    "max_seqlen_q": "max_query_len",
    "softmax_scale": "sm_scale",
    "k_descale": "k_scale",
    "v_descale": "v_scale",
    "out": "output",
    "out_scale": "output_scale",
}


def context_attention_fwd(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    o: Tensor,
    kv_cache_dtype: str,
    k_cache: Tensor,
    v_cache: Tensor,
    b_loc: Tensor,
    b_start_loc: Tensor,
    b_seq_len: Tensor,
    max_seq_len: int | None,
    max_input_len: int,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    alibi_slopes: Tensor | None = None,
    sliding_window: int | None = None,
    sm_scale: float | None = None,
    skip_decode: bool = False,
    fp8_out_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    is_block_table_ptr: bool = False,
    interleaved_v_pack_factor: int = 0,
    causal: bool = True,
    *,
    invariant: bool = False,
) -> None:
    """Attend to cached and to new keys; a drop-in for engines.

    Args:
        q: queries, ``[tokens, heads_q, head_dim]``.
        k: new keys, ``[tokens, heads_k, head_dim]``, not quantised. None: they are in the cache.
        v: new values, ``[tokens, heads_k, head_dim_v]``, not quantised; None if ``k`` is.
        o: output tensor, ``[tokens, heads_q, head_dim_v]``. Rows outside every sequence, and rows
            of skipped sequences, keep their values.
        kv_cache_dtype: "auto" for the dtype of ``q``; "fp8", "fp8_e4m3" or "fp8_e5m2".
        k_cache: keys, ``[num_blocks, heads_k, head_dim // x, block_size, x]``, or
            ``[num_blocks, block_size, heads_k, head_dim]``. An FP8 cache may be stored as uint8.
        v_cache: values, ``[num_blocks, heads_k, head_dim_v, block_size]``, or
            ``[num_blocks, block_size, heads_k, head_dim_v]``; ``head_dim_v`` may differ from
            ``head_dim``.
        b_loc: the pages of each sequence, ``[batch, max_blocks]``.
        b_start_loc: offsets of the sequences, int32 or int64 ``[batch + 1]``.
        b_seq_len: keys of each sequence, cached and new, int32 or int64 ``[batch]``.
        max_seq_len: the most keys of a sequence, from which the number of splits is chosen; None or
            a number that is too small is no error.
        max_input_len: the most queries of a sequence.
        k_scale: factor of keys in an FP8 cache: fp32, one element, ``[heads_k]`` or
            ``[batch, heads_k]``. Ignored for other caches.
        v_scale: factor of values in an FP8 cache, shaped like ``k_scale``.
        alibi_slopes: fp32 ``[heads_q]``; the bias is ``slope * (key_position - query_position)``.
            Default: None.
        sliding_window: number of keys that a query sees, its own included. None, 0 and negative
            numbers: no window. Default: None.
        sm_scale: factor of the scores. Default: ``head_dim ** -0.5``.
        skip_decode: keep the rows of sequences with one query. Default: False.
        fp8_out_scale: fp32, one element: ``o`` is FP8 and stores ``out / scale``, saturated.
            Default: None.
        sinks: as in :func:`paged_attn_func`. Default: None.
        is_block_table_ptr: ``b_loc`` holds addresses. Not supported: must be False.
        interleaved_v_pack_factor: interleaving of values. Not supported: must be 0.
        causal: as in :func:`paged_attn_func`. Default: True.
        invariant: as in :func:`paged_attn_func`. An FP8 cache must then hold the new keys: ``k``
            and ``v`` are None. Default: False.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range, or if ``o`` shares memory with itself or an
            input; on the CPU also on a ``max_input_len`` that is too small.
        NotImplementedError: on FP8 if the hardware lacks it; on an input that requires a gradient;
            on unsupported arguments; with ``invariant``, as :func:`paged_attn_func` does.
    """
    _refuse("is_block_table_ptr", is_block_table_ptr, False)
    _refuse("interleaved_v_pack_factor", interleaved_v_pack_factor, 0)
    check_flag("skip_decode", skip_decode)
    cache = k_cache, v_cache, k_scale, v_scale
    table = b_loc, b_start_loc, b_seq_len
    extras = alibi_slopes, sinks, fp8_out_scale
    asked = kv_cache_dtype, sliding_window, sm_scale, causal, skip_decode, False, invariant
    try:
        _attend((q, k, v, o), cache, table, extras, asked, max_input_len, max_seq_len)
    except ERRORS as error:
        raise renamed(error, _CONTEXT) from error


def chunked_prefill_paged_decode(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    output: Tensor,
    kv_cache_dtype: str,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_seq_len: int | None,
    max_query_len: int,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    alibi_slopes: Tensor | None = None,
    sliding_window: int | None = None,
    sm_scale: float | None = None,
    output_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    is_block_table_ptr: bool = False,
    use_interleaved_v_cache: bool = False,
    causal: bool = True,
    *,
    invariant: bool = False,
) -> None:
    """Attend as :func:`context_attention_fwd` does, except in sequences with one query.

    They read their newest key and value from the cache, where the engine has written them, not from
    ``key`` and ``value``. The arguments are those of :func:`context_attention_fwd` under other
    names; ``output_scale`` is ``fp8_out_scale``.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range, or if what is written shares memory.
        NotImplementedError: as :func:`context_attention_fwd` does.
    """
    _refuse("is_block_table_ptr", is_block_table_ptr, False)
    _refuse("use_interleaved_v_cache", use_interleaved_v_cache, False)
    cache = key_cache, value_cache, k_scale, v_scale
    table = block_table, query_start_loc, seq_lens
    extras = alibi_slopes, sinks, output_scale
    asked = kv_cache_dtype, sliding_window, sm_scale, causal, False, True, invariant
    packed = query, key, value, output
    try:
        _attend(packed, cache, table, extras, asked, max_query_len, max_seq_len)
    except ERRORS as error:
        raise renamed(error, _CHUNKED) from error


def _attend(
    packed: tuple[Tensor, Tensor | None, Tensor | None, Tensor],
    cache: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    table: tuple[Tensor, Tensor, Tensor],
    extras: tuple[Tensor | None, Tensor | None, Tensor | None],
    asked: tuple[str, int | None, float | None, bool, bool, bool, bool],
    max_input_len: int,
    max_seq_len: int | None,
) -> None:
    q, k, v, o = packed
    check_tensor("q", q)
    check_tensor("out", o)
    k_cache, v_cache, k_scale, v_scale = cache
    block_table, *lengths = table
    cu_seqlens_q, seqlens_k = map(as_int32, lengths)
    table = block_table, cu_seqlens_q, seqlens_k
    alibi_slopes, sinks, out_scale = extras
    kv_cache_dtype, sliding_window, sm_scale, causal = asked[:4]
    skip_decode, decode_from_cache, invariant = asked[4:]
    rows = [x for x in packed if x is not None]
    form = form_of(rows, cache + table + extras, (*asked, k is None, v is None), packed=True)
    if form is not None and any(x.shape[:1] != q.shape[:1] for x in rows):
        form = None
    known = None if form is None else _known.get(form)
    if known is None:
        for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
            check_tensor(name, x)
    k_cache = as_stored("k_cache", k_cache, kv_cache_dtype)
    v_cache = as_stored("v_cache", v_cache, kv_cache_dtype)
    if known is None:
        paged_checks.check_paged(q, k_cache, v_cache, k, v)
        window = _window(sliding_window)
        options = paged_options.check_options(
            q, sm_scale, causal, (window, -1), 0.0, 0, False, invariant
        )
        batch = paged_checks.check_table(q, *table)
    max_seq_len = 0 if max_seq_len is None else max_seq_len
    max_seq_len = as_length("max_seq_len", max_seq_len)
    max_input_len = as_length("max_seqlen_q", max_input_len)
    if k_cache.element_size() != 1:
        # engines pass scales for every cache
        k_scale = v_scale = None
    if known is None:
        heads_k = cache_sizes(k_cache).heads_k
        paged_checks.check_extras(q, batch, heads_k, alibi_slopes, sinks, None, k_scale, v_scale)
        head_dim_v = head_dim_of_values(k_cache, v_cache)
        dtype = paged_checks.check_out(q, head_dim_v, o, out_scale)
        paged_checks.check_no_gradients(
            q=q,
            k_cache=k_cache,
            v_cache=v_cache,
            k=k,
            v=v,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            # also those that are ignored
            k_descale=cache[2],
            v_descale=cache[3],
            out=o,
            out_scale=out_scale,
        )
        if invariant:
            rounds_new = k is not None and k_cache.dtype != k.dtype
            paged_checks.check_invariant(
                q, head_dim_v, dtype, None, alibi_slopes, rounds_new=rounds_new
            )
        options = options._replace(
            signed_alibi=True,
            skip_decode=skip_decode,
            decode_from_cache=decode_from_cache,
            fill_padding=False,
        )
        known = Checked(options, dtype, head_dim_v)
    descales = None, k_scale, v_scale
    tensors = Tensors(
        q,
        k_cache,
        v_cache,
        k,
        v,
        *table,
        alibi_slopes,
        sinks,
        *descales,
        None,
        None,
        out_scale,
        None,
        None,
        o,
        None,
    )
    if known.plan is None and form is not None and _known.get(form) is None:
        known = _known.keep(form, known._replace(plan=ops.plan_of(tensors, known.options)))
    with torch.no_grad():
        if known.plan is None:
            ops.attention(*tensors, max_input_len, max_seq_len, *known.options)
        else:
            check_written(tensors)
            known.plan.run(tensors, max_input_len, max_seq_len)


def _refuse(name: str, given: object, offered: object) -> None:
    """Raise unless an argument has the only supported value."""
    if (not isinstance(given, (int, bool)) and not is_flag(given)) or given != offered:
        raise NotImplementedError(
            f"{name} must be {offered}: no more is offered, got {shown(given)}"
        )


def as_stored(name: str, cache: Tensor, kv_cache_dtype: str) -> Tensor:
    """Return a cache as a view in the dtype that ``kv_cache_dtype`` names."""
    if isinstance(kv_cache_dtype, str) and kv_cache_dtype == "auto":
        if cache.dtype == torch.uint8:
            raise ValueError(
                f"kv_cache_dtype must be fp8, fp8_e4m3 or fp8_e5m2 for a {name} of torch.uint8, "
                "got auto"
            )
        return cache
    check_choice("kv_cache_dtype", kv_cache_dtype, ("auto", *_FP8_NAMES))
    dtype = cache_checks.fp8_dtypes_of(cache.device, name)[_FP8_NAMES[kv_cache_dtype]]
    if cache.dtype not in (torch.uint8, dtype):
        raise TypeError(
            f"{name} must be torch.uint8 or {dtype} for kv_cache_dtype {kv_cache_dtype}, "
            f"got {cache.dtype}"
        )
    return cache.view(dtype)


def _window(sliding_window: int | None) -> int:
    """Return the left side of a window; -1: no limit."""
    if sliding_window is None:
        return -1
    if not is_int(sliding_window):
        raise TypeError(f"sliding_window must be an int or None, got {kind(sliding_window)}")
    return sliding_window - 1 if sliding_window > 0 else -1
