"""Hugging Face ``transformers``: an attention implementation that any model can ask for.

Example::

    import flash_attn_triton.integrations.transformers as attention
    from transformers import AutoModelForCausalLM

    name = attention.register()  # "triton_attention"
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=name)

Name the implementation when you create the model: ``set_attn_implementation`` on an encoder-decoder
does not reach its two halves.

Two functions are registered under the name. The *mask function* runs once per forward pass. It
recognises causal, bidirectional, sliding-window and packed patterns, for which no mask is stored,
and passes the layers ``None`` or a two-dimensional mask with the pattern and the packing attached.
Any other pattern (chunked attention, image blocks, prefix language models) becomes a boolean mask
``[batch, 1, queries, keys]``, which the kernel takes as an additive bias. The *attention function*
runs once per layer.

================================  =================================================================
input                             what runs
================================  =================================================================
no padding                        the fixed-length kernel, without copies
padding on either side            ``flash_attn_varlen_func`` on the packed valid tokens, padded back
                                  with zeros; all layers use the same indices
packed sequences                  ``flash_attn_varlen_func``, from ``position_ids`` that restart or
                                  from ``cu_seq_lens_q`` ... ``max_length_k``
decoding with padding, a static   the fixed-length kernel with a bias ``[batch, 1, queries, keys]``:
cache, or past a window           no copy of the cache, and no wait for its content
a tree of rows (``tree_inputs``)  ``flash_attn_tree_func``: what rows share is computed once
any other mask                    the fixed-length kernel with the mask as bias
================================  =================================================================

``share_prefixes(model)`` makes a tree of each batch that the model trains on.

The host waits for the device in two places: once per forward pass, to find the padding of a given
mask, as ``transformers`` does for its own implementations; and to find packed sequences in
``position_ids`` if the batch is one. While ``torch.compile`` traces, or a CUDA graph is captured,
masks are not read; a given mask then becomes a bias.

Scaling, dropout, soft-capping (``softcap``), attention sinks (``s_aux``, ``learnable_sink`` or
``sinks``), relative position biases (``position_bias``), grouped-query attention and a different
head dimension of values are passed to the kernel. Attention weights, paged caches, sparse indices
and unknown keywords raise.
"""

from __future__ import annotations

import os
from typing import Any, cast

import torch
from torch import Tensor

from .._linked.host.arguments import one_of, refuse_others
from .._linked.host.versions import need

try:
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.utils import TransformersKwargs
    from transformers.utils.import_utils import is_tracing
except ImportError:
    need("transformers", (5, 8), __name__)
    raise

from ..api import flash_attn_func, flash_attn_varlen_func
from ._masks import (
    Layout,
    Packing,
    Pattern,
    attention_mask,
    expand,
    has_holes,
    layout_of,
    may_be_narrower,
    pack,
    packing_of_positions,
)
from ._trees import SharedPrefixes, attend_tree, check_layers, is_tree, tree_inputs

__all__ = ["attention_forward", "attention_mask", "register", "share_prefixes", "tree_inputs"]

_NAME = "triton_attention"
# transformers interprets these substrings of a name
_RESERVED = ("flash", "sdpa", "flex_attention", "eager", "paged", "|", "/")

# arguments that raise, and the reason
_UNSUPPORTED = {
    "output_attentions": "attention weights are never materialised; load the model with "
    'attn_implementation="eager" to see them',
    "cache": "paged caches of continuous batching are not supported",
    "block_table": "paged caches are not supported",
    "indices": "attention to a list of key indices is not supported",
    "block_indices": "attention to a list of key blocks is not supported",
}

# arguments that models pass to all their layers, and that do not affect attention
_IGNORED = frozenset(TransformersKwargs.__annotations__) | {
    "cache_params",
    "cache_position",
    "cross_attention_states",
    "cu_seqlens",
    "encoder_attention_mask",
    "encoder_hidden_states",
    "encoder_position_embeddings",
    "hidden_states",
    "input_ids",
    "inputs_embeds",
    "key_value_states",
    "labels",
    "layer_idx",
    "level_start_index",
    "logits_to_keep",
    "max_seqlen",
    "object_queries_position_embeddings",
    "past_key_values",
    "position_embeddings",
    "prev_topk_indices",
    "query_length",
    "query_position_embeddings",
    "query_sine_embed",
    "reference_points",
    "relative_position_embeddings",
    "return_dict",
    "shared_kv_states",
    "spatial_position_embeddings",
    "spatial_shapes",
    "spatial_shapes_list",
    "token_type_ids",
    "use_cache",
}


def register(name: str = _NAME) -> str:
    """Make the kernels available to every model as ``attn_implementation=name``.

    Registering again, or under a second name, does no harm.

    Args:
        name: The name to register. It must not contain "flash", because ``transformers`` treats
            such a name as its own flash path, nor "sdpa", "flex_attention", "eager", "paged", "|"
            or "/". Default: ``"triton_attention"``.

    Returns:
        The name.

    Raises:
        ValueError: If ``transformers`` would take the name for one of its own.
    """
    taken = next((word for word in _RESERVED if word in name), None)
    if not name or taken is not None:
        what = "be empty" if taken is None else f"contain {taken!r}, which transformers interprets"
        raise ValueError(f"name must not {what}; take {_NAME!r}, got {name!r}")
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)
    return name


def share_prefixes(*models: PreTrainedModel) -> SharedPrefixes:
    """Let models compute what the rows of a batch have in common once.

    From then on a call with ``use_cache=False``, as trainers call models, packs its rows,
    ``input_ids`` and ``attention_mask``, by ``flash_attn_triton.trees.pack``. What is below the
    model's head runs once over the tree, and each row gets its own hidden states, zeros where it is
    padded. The caller sees the results and gradients of each row alone. Rows may also be packed,
    ``position_ids`` that restart at 0 separate them. Other calls, those of generation among them,
    are left alone. Packing reads the tokens: the host waits for the device.

    Args:
        *models: decoders, also with adapters of PEFT, whose ``attn_implementation`` is a name that
            :func:`register` returned.

    Returns:
        A handle; its ``remove()`` ends this.

    Raises:
        ValueError: if a model has another attention. Calls raise as :func:`attention_forward`
            does; a NotImplementedError on arguments that are not known to leave the result alone;
            and a ValueError on ``position_ids`` that do not count each row's tokens from 0.
    """
    return SharedPrefixes([_backbone_of(model) for model in models])


def _backbone_of(model: Any) -> torch.nn.Module:
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    found = model.config._attn_implementation
    if ALL_ATTENTION_FUNCTIONS.get(found) is not attention_forward:
        raise ValueError(
            "models that share prefixes must have these kernels as their attention, "
            f"attn_implementation=register(), got {found!r}"
        )
    return cast(torch.nn.Module, model.base_model)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    deterministic: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention for a layer of a ``transformers`` model.

    Args:
        module: The calling layer; its ``is_causal`` is used if none is given (default True).
        query: ``[batch, heads_q, queries, head_dim]``.
        key: ``[batch, heads_k, keys, head_dim]``; static caches may be longer than the mask.
        value: ``[batch, heads_k, keys, head_dim_v]``.
        attention_mask: None; or ``[batch, keys]``, True for valid keys (bool), or the number of
            each key's sequence (int32, 0 for padding), where the last columns are the queries; or
            ``[batch or 1, heads_q or 1, queries, keys]``, bool or additive, which replaces all
            other masking; or what :func:`tree_inputs` returned.
        dropout: Probability with which a weight is dropped. Default: ``0.0``.
        scaling: Factor of the scores. Default: ``head_dim ** -0.5``.
        is_causal: Whether a query sees only keys up to its own. Default: ``module.is_causal``.
        sliding_window: Number of keys that a causal query sees, including its own; a bidirectional
            query sees one less on either side.
        softcap: ``softcap * tanh(scores / softcap)`` replaces the scores.
        s_aux: Sinks ``[heads_q]``: one more logit per head in the softmax denominator.
        learnable_sink: Another name of ``s_aux``.
        sinks: Another name of ``s_aux``.
        position_bias: Added to the scores, broadcastable to ``[batch, heads_q, queries, keys]``.
        position_ids: ``[1, tokens]``; restarts separate packed sequences.
        cu_seq_lens_q: Cumulative lengths of packed sequences ``[sequences + 1]``.
        cu_seq_lens_k: The same for keys.
        max_length_q: The longest sequence.
        max_length_k: The same for keys.
        deterministic: Whether gradients have to repeat bit for bit. Default: True if
            ``torch.use_deterministic_algorithms`` is on, or if the environment has
            ``FLASH_ATTENTION_DETERMINISTIC=1``, which ``transformers`` sets.
        **kwargs: Arguments that models pass to all their layers are ignored; all others raise.

    Returns:
        The output ``[batch, queries, heads_q, head_dim_v]`` (zeros for padding), and None in place
        of the weights.

    Raises:
        TypeError: For a two-dimensional mask that is neither boolean nor integer.
        ValueError: For a mask of the wrong shape, masks that contradict each other, or sinks under
            several names.
        NotImplementedError: For attention weights, paged caches, sparse indices, and any unknown
            argument; over a tree also for dropout, windows, biases and bidirectional attention.
    """
    refuse_others(kwargs, _UNSUPPORTED, _IGNORED, "triton attention", "eager")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled() or (
            os.environ.get("FLASH_ATTENTION_DETERMINISTIC") == "1"
        )
    q, k, v = (t.transpose(1, 2) for t in _autocast(query, key, value))
    options: dict[str, Any] = {
        "dropout_p": dropout,
        "softmax_scale": scaling,
        "softcap": softcap or 0.0,
        "sinks": one_of(s_aux=s_aux, learnable_sink=learnable_sink, sinks=sinks),
        "deterministic": bool(deterministic),
    }
    pattern = _pattern_of_call(bool(is_causal), sliding_window)

    if attention_mask is not None and is_tree(attention_mask):
        check_layers(getattr(module, "config", None), sliding_window, q.shape[1])
        unsupported = {
            "dropout": options.pop("dropout_p"),
            "bidirectional attention": not is_causal,
            "position_bias": position_bias is not None,
            "cu_seq_lens_q": cu_seq_lens_q is not None or cu_seq_lens_k is not None,
        }
        return attend_tree(q, k, v, attention_mask, unsupported, **options), None

    packing = _packing_of_call(q, k, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    if packing is not None:
        if position_bias is not None:
            raise NotImplementedError(
                "position_bias must be None beside cu_seq_lens_q, got Tensor; pad the sequences"
            )
        # a mask of sequence numbers comes from position_ids and repeats the packing
        if attention_mask is None or attention_mask.dtype == torch.int32:
            return _attend_packed(q, k, v, packing, pattern, options), None
        if attention_mask.ndim != 4:
            raise ValueError("give either attention_mask or cu_seq_lens_q and cu_seq_lens_k")
        attention_mask = _apart(attention_mask, q, k, packing)

    if attention_mask is None:
        if position_bias is None:
            packing = packing_of_positions(position_ids, q, k)
            if packing is not None:
                return _attend_packed(q, k, v, packing, pattern, options), None
        return _attend(q, k, v, pattern, position_bias, options), None

    if attention_mask.ndim == 2:
        mask, layout = attention_mask, layout_of(attention_mask)
        k, v = _check_mask(mask, layout, q, k, v)
        if layout is not None:
            pattern, packing = layout.pattern, layout.packing
        if position_bias is None and not is_tracing(mask):
            if layout is None:
                packing = _pack_unannounced(mask, q.shape[1], pattern)
            elif packing is None:
                packing = packing_of_positions(position_ids, q, k)
            if packing is not None:
                return _attend_packed(q, k, v, packing, pattern, options), None
            if layout is not None:
                return _attend(q, k, v, pattern, None, options), None
        attention_mask = expand(mask, q.shape[1], pattern)
    if attention_mask.ndim != 4:
        raise ValueError(f"attention_mask must have 2 or 4 dimensions, got {attention_mask.ndim}")
    bias = _as_bias(attention_mask, position_bias, q.dtype)
    return _attend(q, k, v, Pattern(causal=False), bias, options), None


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast does for PyTorch's own attention."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t.dtype.is_floating_point else t for t in tensors)


def _pattern_of_call(is_causal: bool, sliding_window: int | None) -> Pattern:
    if sliding_window is None:
        return Pattern(is_causal)
    if sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, got {sliding_window}")
    side = sliding_window - 1
    return Pattern(is_causal, side, -1 if is_causal else side)


def _packing_of_call(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_q: int | None,
    max_k: int | None,
) -> Packing | None:
    """Return the packing of given cumulative lengths; all tokens belong to some sequence."""
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return None
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k must be given together")
    return Packing(
        None,
        None,
        cu_seqlens_q.to(torch.int32),
        cu_seqlens_k.to(torch.int32),
        q.shape[0] * q.shape[1] if max_q is None else int(max_q),
        k.shape[0] * k.shape[1] if max_k is None else int(max_k),
    )


def _apart(mask: Tensor, q: Tensor, k: Tensor, packing: Packing) -> Tensor:
    """Hide, in a written-out mask, packed sequences from each other."""
    rows, cols = (
        torch.searchsorted(
            ends, torch.arange(x.shape[0] * x.shape[1], device=ends.device), right=True
        ).view(x.shape[:2])
        for ends, x in ((packing.cu_seqlens_q, q), (packing.cu_seqlens_k, k))
    )
    other = (rows[:, None, :, None] != cols[:, None, None, :]).to(mask.device)
    return mask.masked_fill(other, False if mask.dtype == torch.bool else float("-inf"))


def _check_mask(
    mask: Tensor, layout: Layout | None, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Check a mask ``[batch, keys]``, and drop the keys of a static cache after the mask's end."""
    if mask.dtype.is_floating_point or mask.dtype.is_complex:
        raise TypeError(f"a two-dimensional attention_mask must be bool or int, got {mask.dtype}")
    if mask.shape[0] != q.shape[0] or mask.shape[1] > k.shape[1]:
        raise ValueError(
            f"attention_mask must have shape [{q.shape[0]}, at most {k.shape[1]}], "
            f"got {list(mask.shape)}"
        )
    if mask.shape[1] < k.shape[1] and not may_be_narrower(mask, layout, q.shape[1], k.shape[1]):
        raise ValueError(
            f"attention_mask must say of each of the {k.shape[1]} keys whether it is seen, got "
            f"{list(mask.shape)}: it was made for a layer with another cache"
        )
    return k[:, : mask.shape[1]], v[:, : mask.shape[1]]


def _pack_unannounced(mask: Tensor, q_length: int, pattern: Pattern) -> Packing | None:
    """Pack by a mask that the mask function did not make, or that was changed since.

    None if the mask must be written out: a window across padding in the middle.
    """
    ids = mask if mask.dtype == torch.int32 else mask != 0
    if pattern.bites(mask.shape[1]) and bool(has_holes(mask != 0)):
        return None
    is_itself = pattern.is_positional or mask.dtype == torch.int32
    return pack(ids, q_length, pack_queries=is_itself and q_length <= mask.shape[1])


def _as_bias(mask: Tensor, position_bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=dtype, device=mask.device)
        mask = torch.where(mask, zero, float("-inf"))
    elif not mask.dtype.is_floating_point:
        raise TypeError(f"a 4-dimensional attention_mask must be bool or float, got {mask.dtype}")
    bias = mask if position_bias is None else position_bias + mask
    return bias if bias.dtype in (dtype, torch.float32) else bias.to(dtype)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    bias: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    if bias is not None and bias.dtype not in (q.dtype, torch.float32):
        bias = bias.to(q.dtype)
    out = flash_attn_func(
        q, k, v, causal=pattern.causal, window_size=pattern.window, bias=bias, **options
    )
    return cast(Tensor, out)


def _attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    pattern: Pattern,
    options: dict[str, Any],
) -> Tensor:
    batch, q_length = q.shape[:2]
    out: Any = flash_attn_varlen_func(
        _gather(q, packing.indices_q),
        _gather(k, packing.indices_k),
        _gather(v, packing.indices_k),
        packing.cu_seqlens_q,
        packing.cu_seqlens_k,
        packing.max_seqlen_q,
        packing.max_seqlen_k,
        causal=pattern.causal,
        window_size=pattern.window,
        **options,
    )
    if packing.indices_q is not None:
        padded = out.new_zeros(batch * q_length, *out.shape[1:])
        out = padded.index_copy(0, packing.indices_q, out)
    return cast(Tensor, out.unflatten(0, (batch, q_length)))


def _gather(padded: Tensor, indices: Tensor | None) -> Tensor:
    flat = padded.flatten(0, 1)
    return flat if indices is None else flat.index_select(0, indices)
