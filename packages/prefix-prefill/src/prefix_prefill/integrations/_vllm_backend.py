"""The classes of vLLM's attention backend; see :mod:`prefix_prefill.integrations.vllm`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import vllm.envs
from attn_common import detect, fp8_dtype
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

from ..api import paged_attn_func, reshape_and_cache

FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")
# caches with a scale of each token and head, which follows the numbers
SCALED = ("int8_per_token_head", "int4_per_token_head", "fp8_per_token_head")
_INT4 = "int4_per_token_head"
_SCALE_BYTES = 4
_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
_LARGEST_HEAD_DIM = 256


class PagedAttentionBackend(AttentionBackend):  # type: ignore[misc]
    """The capabilities that vLLM asks a backend for."""

    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar = ["auto", "float16", "bfloat16", *FP8, *SCALED]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        # vLLM looks up the member of its registry by this name
        return "PREFIX_PREFILL"

    @staticmethod
    def get_impl_cls() -> type[PagedAttentionImpl]:
        return PagedAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[PagedMetadataBuilder]:
        return PagedMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        # other sizes work, but then a tile of keys may begin inside a page
        return [MultipleOf(16)]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Make room for the two scales of a token and head, in bytes beside their numbers."""
        if spec.state_content_bytes is not None or not spec.kv_quant_mode.is_per_token_head:
            return spec
        numbers = spec.head_size + spec.head_size_v
        if spec.kv_quant_mode.name == _INT4.upper():
            numbers //= 2
        return replace(spec, state_content_bytes=numbers + 2 * _SCALE_BYTES)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= _LARGEST_HEAD_DIM

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (*_ENCODERS, AttentionType.DECODER, AttentionType.ENCODER_DECODER)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Return why the backend does not support this combination, or None if it does."""
        if kv_cache_dtype in SCALED and vllm.envs.VLLM_BATCH_INVARIANT:
            return f"kv_cache_dtype {kv_cache_dtype} is not served under VLLM_BATCH_INVARIANT=1"
        is_fp8 = kv_cache_dtype in (*FP8, "fp8_per_token_head")
        if device_capability is not None and torch.version.hip is None:
            capability = tuple(device_capability)
            if capability < (8, 0):
                return f"compute capability 8.0 or newer is needed, got {capability}"
            if is_fp8 and capability < (8, 9):
                return f"an FP8 cache needs compute capability 8.9 or newer, got {capability}"
        elif is_fp8 and not detect().supports_fp8:
            # what vLLM calls the capability of an AMD GPU says nothing of FP8: an MI200's is (9, 0)
            return f"an FP8 cache needs a GPU with FP8 (gfx942 or newer), got {detect()}"
        if kv_cache_dtype in FP8 and dtype is torch.float32:
            return "an FP8 cache is for models in fp16 or bf16"
        return None


@dataclass
class PagedMetadata(AttentionMetadata):  # type: ignore[misc]
    """The metadata of a step, which its layers share.

    Attributes:
        num_actual_tokens: the tokens of the step, without the padding after them.
        max_query_len: the most queries of a sequence.
        max_seq_len: an upper bound of the keys of a sequence.
        query_start_loc: offsets of the sequences, int32 ``[batch + 1]``.
        seq_lens: keys of each sequence, int32 ``[batch]``.
        block_table: pages of each sequence, int32 ``[batch, max_blocks]``.
        causal: hide later keys from a query.
    """

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    causal: bool


class PagedMetadataBuilder(AttentionMetadataBuilder[PagedMetadata]):  # type: ignore[misc]
    """Passes a step's tensors on unchanged."""

    # A graph fixes the counts of tokens and sequences, which bound the grids, and max_query_len,
    # which tells whether the kernel for many queries is launched. vLLM captures mixed batches with
    # all tokens in one sequence for max_query_len; which sequence has how many is device data.
    _cudagraph_support = AttentionCGSupport.ALWAYS
    # the metadata holds vLLM's own tensors, which it updates in place
    supports_draft_decode_metadata_update = True
    supports_update_block_table = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PagedMetadata:
        """Make the metadata of one step."""
        x = common_attn_metadata
        if not isinstance(x.causal, bool):
            raise NotImplementedError("causal must be one bool for all sequences, got a tensor")
        if x.mm_req_doc_ranges is not None or x.rswa_prefix_lens is not None:
            raise NotImplementedError(
                "mm_req_doc_ranges and rswa_prefix_lens must be None: multimodal prefixes and "
                "reference windows are not served"
            )
        return PagedMetadata(
            num_actual_tokens=x.num_actual_tokens,
            max_query_len=x.max_query_len,
            max_seq_len=x.max_seq_len,
            query_start_loc=x.query_start_loc,
            seq_lens=x.seq_lens,
            block_table=x.block_table_tensor,
            causal=x.causal,
        )

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> PagedMetadata:
        """Make metadata for a graph that serves sequences of any length."""
        metadata = self.build(0, common_attn_metadata)
        most = self.vllm_config.model_config.max_model_len
        # cross-attention may have more keys than the model has positions
        metadata.max_seq_len = max(metadata.max_seq_len, most)
        return metadata

    def update_block_table(
        self, metadata: PagedMetadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> PagedMetadata:
        """Make the metadata of layers whose pages are others, for the same step."""
        return replace(metadata, block_table=blk_table)

    def update_draft_decode_metadata(self, metadata: PagedMetadata) -> None:
        """Do nothing, because the metadata holds no computed tensors."""


class PagedAttentionImpl(AttentionImpl[PagedMetadata]):  # type: ignore[misc]
    """The attention of one layer.

    Under ``VLLM_BATCH_INVARIANT=1`` it computes with ``invariant=True``: the bits of a token's
    output depend on its own sequence alone.

    Args:
        num_heads: heads of the queries.
        head_size: the head dimension, a multiple of 8 up to 256.
        scale: factor of the scores.
        num_kv_heads: heads of keys and values. Default: None, ``num_heads``.
        alibi_slopes: a slope per head. Default: None.
        sliding_window: keys that a query sees, its own included. Default: None, all.
        kv_cache_dtype: "auto", the model's dtype, an FP8 dtype, or one with a scale of each token
            and head: "int8_per_token_head", "int4_per_token_head" or "fp8_per_token_head".
            Default: "auto".
        logits_soft_cap: cap of the scores. Default: None.
        attn_type: decoder, encoder or cross-attention. Default: decoder.
        kv_sharing_target_layer_name: the layer whose cache this one reads. Default: None.
        sinks: an extra logit per head in the denominator, ``[num_heads]``. Default: None.

    Raises:
        NotImplementedError: on a quantised cache of an encoder, and under
            ``VLLM_BATCH_INVARIANT=1`` on ``alibi_slopes``.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.attn_type = attn_type
        self.sinks = sinks
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.alibi_slopes = None
        if alibi_slopes is not None:
            # on the default device, where vLLM makes the model's parameters
            self.alibi_slopes = torch.tensor(alibi_slopes, dtype=torch.float32)
        self.invariant = bool(vllm.envs.VLLM_BATCH_INVARIANT)
        if self.invariant and alibi_slopes is not None:
            raise NotImplementedError(
                "alibi_slopes must be None under VLLM_BATCH_INVARIANT=1: invariant attention has "
                "no ALiBi"
            )
        self.is_encoder = attn_type in _ENCODERS
        self.window = (-1, -1)
        if sliding_window is not None:
            left = sliding_window - 1
            self.window = left, left if self.is_encoder else 0
        self.fp8_dtype = _fp8_dtype(kv_cache_dtype)
        self.scaled = kv_cache_dtype if kv_cache_dtype in SCALED else None
        # int4: queries, keys and values are rotated, and their product has this factor
        self.rotate: Callable[..., Tensor] | None = None
        self.rotated = 1
        if kv_cache_dtype == _INT4:
            from vllm.v1.attention.ops.int4_per_token_head import single_rht

            self.rotate, self.rotated = single_rht, head_size & -head_size
        if self.is_encoder and (self.fp8_dtype or self.scaled) is not None:
            raise NotImplementedError(
                f"kv_cache_dtype must be 'auto' for an encoder, which has no cache, got "
                f"{kv_cache_dtype!r}"
            )

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Return whether the output may have this quantisation: FP8 with one static scale."""
        if self.invariant or self.rotate is not None:
            return False
        from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym

        return bool(quant_key == kFp8StaticTensorSym)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PagedMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Compute attention of a step's tokens into ``output``.

        Args:
            layer: vLLM's layer, which has the scales of an FP8 cache, ``_k_scale`` and ``_v_scale``
                (fp32, one element or ``[num_kv_heads]``).
            query: ``[tokens, num_heads, head_size]``; the step's tokens, then padding.
            key: ``[tokens, num_kv_heads, head_size]``; only read in an encoder, which has no cache.
            value: ``[tokens, num_kv_heads, head_size]``; only read in an encoder.
            kv_cache: ``[blocks, num_kv_heads, block_size, 2 * head_size]``, any strides: a token's
                key, then its value. With a scale of each token and head, bytes: the key, its scale,
                the value, its scale.
            attn_metadata: metadata of the step; None while vLLM measures memory: zeros.
            output: ``[tokens, num_heads, head_size]``.
            output_scale: fp32, one element, for an FP8 ``output``. Default: None.
            output_block_scale: not supported. Default: None.

        Returns:
            ``output``.

        Raises:
            NotImplementedError: if ``output_block_scale`` is given.
        """
        if output_block_scale is not None:
            raise NotImplementedError("output_block_scale must be None: outputs have one scale")
        if attn_metadata is None:
            return output.fill_(0)
        tokens = attn_metadata.num_actual_tokens
        given: dict[str, Any] = {}
        if self.is_encoder:
            given["k"], given["v"] = key[:tokens], value[:tokens]
            k_cache, v_cache = _no_pages(key), _no_pages(value)
        else:
            k_cache, v_cache = self._pages(kv_cache)
        if self.fp8_dtype is not None:
            given["k_descale"], given["v_descale"] = layer._k_scale, layer._v_scale
        elif self.scaled is not None:
            given |= self._scales(kv_cache)
        query, out = query[:tokens], output[:tokens]
        if self.rotate is not None:
            query = self.rotate(query.float()).to(query.dtype)
            out = torch.empty_like(query)
        paged_attn_func(
            query,
            k_cache,
            v_cache,
            attn_metadata.block_table,
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            attn_metadata.max_query_len,
            attn_metadata.max_seq_len,
            softmax_scale=self.scale / self.rotated,
            causal=attn_metadata.causal and not self.is_encoder,
            window_size=self.window,
            softcap=self.logits_soft_cap,
            alibi_slopes=self.alibi_slopes,
            sinks=self.sinks,
            out=out,
            out_scale=output_scale,
            invariant=self.invariant,
            **given,
        )
        if self.rotate is not None:
            output[:tokens] = self.rotate(out.float(), inverse=True) / self.rotated
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write a step's keys and values into the cache; an encoder has none."""
        if self.is_encoder:
            return
        scales: dict[str, Any] = {}
        if self.fp8_dtype is not None:
            scales = {"k_scale": layer._k_scale, "v_scale": layer._v_scale}
        elif self.scaled is not None:
            scales = self._scales(kv_cache)
        if self.rotate is not None:
            key, value = (self.rotate(x.float()).to(x.dtype) for x in (key, value))
        reshape_and_cache(key, value, *self._pages(kv_cache), slot_mapping, **scales)

    def _pages(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, each ``[blocks, block_size, num_kv_heads, head_size]``."""
        pages = kv_cache.transpose(1, 2)
        if self.fp8_dtype is not None:
            pages = pages.view(self.fp8_dtype)
        if self.scaled is None:
            return pages[..., : self.head_size], pages[..., self.head_size :]
        half = pages.shape[3] // 2
        return pages[..., : half - _SCALE_BYTES], pages[..., half:-_SCALE_BYTES]

    def _scales(self, kv_cache: Tensor) -> dict[str, Any]:
        """Return the scales of keys and values, each ``[blocks, block_size, num_kv_heads]``."""
        pages, half = kv_cache.transpose(1, 2), kv_cache.shape[3] // 2
        k, v = (
            pages[..., end - _SCALE_BYTES : end].view(torch.float32)[..., 0]
            for end in (half, 2 * half)
        )
        return {"kv_dtype": self.scaled, "k_scale_cache": k, "v_scale_cache": v}


def _fp8_dtype(kv_cache_dtype: str) -> torch.dtype | None:
    """Return the platform's dtype of an FP8 cache, or None for a cache of the model's dtype."""
    if kv_cache_dtype not in FP8:
        return None
    e4m3 = fp8_dtype(detect())
    name = e4m3.replace("e4m3fn", "e5m2") if kv_cache_dtype == "fp8_e5m2" else e4m3
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _no_pages(x: Tensor) -> Tensor:
    """Return a cache of one page of one token, for calls that read no page."""
    return x[:1].unsqueeze(0)
