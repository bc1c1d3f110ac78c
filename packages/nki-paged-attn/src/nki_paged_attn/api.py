"""The public function: attention of new tokens to a paged cache and to themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NoReturn, ParamSpec, Protocol, overload

import numpy as np

from ._paged.backends import choose_backend
from ._paged.call import Batch, Options
from ._paged.checks import (
    check_apart,
    check_flag,
    check_lengths,
    check_number,
    check_packed,
    check_packing,
    check_scales,
    check_sinks,
    check_table,
    check_target,
    check_transposes,
    check_window,
    check_writes,
)
from ._paged.devices import Described, describe, find_device, launch_prepared, prepare
from ._paged.forms import Buckets, check_buckets
from ._paged.launch import launch_form
from .sim.arrays import check_no_gradient, is_tensor, like, to_array

P = ParamSpec("P")


class _WithLse(Protocol):
    """What ``return_lse`` adds to a result."""

    @overload
    def __call__(self, *args: Any, return_lse: Literal[False] = False, **kwargs: Any) -> Any: ...
    @overload
    def __call__(self, *args: Any, return_lse: Literal[True], **kwargs: Any) -> tuple[Any, Any]: ...
    @overload
    def __call__(self, *args: Any, return_lse: bool, **kwargs: Any) -> Any | tuple[Any, Any]: ...


def _returns_lse(function: Callable[P, object]) -> Callable[P, NoReturn] | _WithLse:
    """Type the result; a type checker holds each call to both members of the union."""
    return function  # type: ignore[return-value]


@_returns_lse
def paged_attention(
    q: Any,
    k: Any,
    v: Any,
    kv_cache: Any,
    block_table: Any,
    query_lens: Any,
    context_lens: Any,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: Any = None,
    softcap: float | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    return_lse: bool = False,
    backend: str = "auto",
    buckets: Buckets | None = None,
    packed_keys: bool = False,
    transposes: str = "tensor",
    write_cache: bool = False,
    target: str | None = None,
) -> Any:
    """Attend new tokens to their sequence's cached context and, causally, to each other.

    Sequences lie one after the other; prefill, chunks and decode mix freely. Key ``j`` of a
    sequence is visible to its new token ``i`` iff ``j <= context + i``, and with a window also
    ``j > context + i - window``.

    Args:
        q: ``[tokens, heads, head_dim]``, fp16, bf16 (``ml_dtypes.bfloat16``) or fp32, which is also
            the precision of the products; NumPy arrays, PyTorch tensors on the CPU, or all four
            tensors on a Neuron device, of PyTorch or JAX, where they stay.
        k, v: the new tokens' keys and values, ``[tokens, kv_heads, head_dim]``, in q's dtype.
        kv_cache: ``[2, blocks, kv_heads, block_size, head_dim]``, keys and values of the context,
            in fp16, bf16, fp32 or FP8 (e4m3, e4m3fn, e5m2). On a device also a tuple of two, keys
            and values: a part of a JAX array is a copy, so one array of both is copied whole with
            each call.
        block_table: block numbers of each sequence, ``[batch, max_blocks]``, integers. Entries past
            a context are not read.
        query_lens: new tokens of each sequence, ``[batch]``; rows of q after their sum give 0.
        context_lens: tokens of each sequence that the cache holds, ``[batch]``.
        scale: factor of the scores; any finite number. Default: ``head_dim ** -0.5``.
        window: the most keys that a token sees, its own included. Default: all.
        sinks: ``[heads]``, one more logit in each denominator, in natural units.
        softcap: ``c`` makes scores ``c * tanh(s / c)``. Default: none.
        k_scale, v_scale: factors of cached keys and values; a number or ``[kv_heads]``.
        return_lse: also return the natural logarithm of the denominators, fp32 ``[heads, tokens]``.
        backend: ``auto``, ``nki`` (a device), ``nki-sim`` (AWS's simulator) or ``sim`` (the
            simulator of this package).
        buckets: the sizes that the kernel is compiled for; the call runs the smallest that holds
            it. The result does not depend on the bucket. Default: powers of two.
        packed_keys: whether a page of ``kv_cache[0]``, in FP8, is ``[block_size // 2, head_dim,
            2]`` in the same bytes: two tokens interleaved, as in AWS's kernels.
        transposes: the engine that transposes the probabilities of prompts: ``tensor`` (TensorE),
            or ``dma`` with q in 16 bits. The result is the same.
        write_cache: also write ``k`` and ``v`` into ``kv_cache``, in place, divided by ``k_scale``
            and ``v_scale``, in FP8 limited to the target's largest number. ``block_table`` then
            also has the blocks of the new tokens, and each token goes to its position in them.
            Nothing waits for these writes, so no sequence may have in its context a token that
            another one writes in the same call.
        target: the generation that an FP8 cache is written for: ``trn2``, whose e4m3 ends at 240,
            ``trn3``, where e4m3fn ends at 448, and others. Default: the device's, as
            ``NEURON_PLATFORM_TARGET_OVERRIDE`` or the instance type says it; else ``trn2``, whose
            numbers both read.

    Returns:
        ``out`` in q's shape and dtype, or ``(out, lse)``. A row that sees no key gives 0 and -inf.

    Raises:
        TypeError: a dtype that is not offered.
        ValueError: a shape or a number out of range, a block that is not in the cache, a batch that
            no bucket holds, or with ``write_cache`` a cache that shares memory.
        ImportError: the backend's package is not installed.
    """
    device = find_device(q)
    halves = kv_cache if isinstance(kv_cache, tuple) and device is not None else None
    caches = (("kv_cache", kv_cache),) if halves is None else name_halves(halves)
    named = (("q", q), ("k", k), ("v", v), *caches)
    tensors: list[Any]
    if device is None:
        tensors = [to_array(name, x) for name, x in named]
    else:
        check_placement(named, backend)
        tensors = [describe(x) for _, x in named]
        if halves is not None:
            tensors[3:] = [join_halves(*tensors[3:])]
    queries, keys, values, cache = tensors
    check_packed(queries, keys, values, cache)
    tokens, heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    lens, contexts = check_lengths(query_lens, context_lens, tokens)
    write_cache = check_flag("write_cache", write_cache)
    stored = contexts + lens if write_cache else contexts
    table = check_table(block_table, stored, cache.shape[3], cache.shape[1])
    if write_cache:
        check_writable(kv_cache, packed_keys)
        if device is None:
            check_apart("kv_cache", cache, q=queries, k=keys, v=values)
        elif halves is not None and halves[0] is halves[1]:
            raise ValueError("kv_cache must be two tensors for write_cache, got one twice")
        check_writes(lens, contexts, table, cache.shape[3])
    options = Options(
        scale=head_dim**-0.5 if scale is None else check_number("scale", scale),
        softcap=0.0 if softcap is None else check_number("softcap", softcap, positive=True),
        sinks=check_sinks(sinks, heads),
        k_scales=check_scales("k_scale", k_scale, kv_heads),
        v_scales=check_scales("v_scale", v_scale, kv_heads),
        has_lse=check_flag("return_lse", return_lse),
        dtype=np.dtype(queries.dtype).name,
        is_packed=check_packing(packed_keys, cache.dtype, cache.shape[3]),
        turns_by_dma=check_transposes(transposes, np.dtype(queries.dtype).name),
        target=check_target(target),
    )
    batch = Batch(lens, contexts, table, tokens, check_window(window), writes=write_cache)
    packed = batch.pack(cache.shape[3])
    sizes = check_buckets(buckets)
    if device is not None:
        prepared = prepare(device, packed, options, sizes, heads, cache.shape[3:])
        new = tuple(device.by_head(x, prepared.order) for x in (k, v))
        out, lse = launch_prepared(device, q, new, (kv_cache[0], kv_cache[1]), prepared)
        return (out, lse) if return_lse else out
    chosen = choose_backend(backend)
    out, lse = launch_form(queries, keys, values, cache, packed, options, sizes, chosen)
    return (like(out, q), like(lse, q)) if lse is not None else like(out, q)


def check_writable(kv_cache: Any, packed_keys: bool) -> None:
    """Check that the kernel can write a cache in place."""
    if packed_keys:
        raise NotImplementedError(
            "write_cache writes whole tokens, got packed_keys; use reshape_and_cache"
        )
    if isinstance(kv_cache, np.ndarray):
        if not kv_cache.flags.writeable:
            raise ValueError("kv_cache must be writable for write_cache, got a read-only array")
        return
    for name, x in (
        name_halves(kv_cache) if isinstance(kv_cache, tuple) else (("kv_cache", kv_cache),)
    ):
        check_no_gradient(name, x)
    if not is_tensor(kv_cache[0] if isinstance(kv_cache, tuple) else kv_cache):
        raise NotImplementedError(
            f"write_cache needs a cache that changes in place, got {type(kv_cache).__name__}"
        )


def name_halves(kv_cache: tuple[Any, ...]) -> tuple[tuple[str, Any], ...]:
    """Name the tensors of a cache in two parts."""
    if len(kv_cache) != 2:
        raise ValueError(f"kv_cache must be a tensor or two, keys and values, got {len(kv_cache)}")
    return tuple((f"kv_cache[{n}]", x) for n, x in enumerate(kv_cache))


def join_halves(keys: Described, values: Described) -> Described:
    """Return the cache that two parts, keys and values, form."""
    if keys != values:
        raise ValueError(
            "kv_cache[1] must have the shape and dtype of kv_cache[0], "
            f"{list(keys.shape)} of {keys.dtype}, got {list(values.shape)} of {values.dtype}"
        )
    return Described((2, *keys.shape), keys.dtype)


def check_placement(named: Any, backend: str) -> None:
    """Check that all tensors are on q's device, and that the backend runs there."""
    if not isinstance(backend, str) or backend not in ("auto", "nki"):
        raise ValueError(f"backend must be auto or nki for tensors of a device, got {backend!r}")
    q = named[0][1]
    for name, x in named:
        if type(find_device(x)) is not type(find_device(q)) or (
            is_tensor(x) and x.device != q.device
        ):
            where = x.device if is_tensor(x) else f"a {type(x).__name__}"
            raise ValueError(f"{name} must be on q's device, {q.device}, got {where}")
