"""vLLM's backend for multi-head latent attention; see :mod:`prefix_prefill.integrations.vllm`."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import vllm.envs
from attn_common import cdiv
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

from .._mla.api import mla_attn_func
from .._mla.checks import check_head_dims
from ._vllm_backend import FP8, PagedAttentionBackend


class LatentAttentionBackend(MLACommonBackend):  # type: ignore[misc]
    """The capabilities that vLLM asks a backend for."""

    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]

    @staticmethod
    def get_name() -> str:
        return "PREFIX_PREFILL_MLA"

    @staticmethod
    def get_impl_cls() -> type[LatentAttentionImpl]:
        return LatentAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[LatentMetadataBuilder]:
        return LatentMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_combination(cls, *asked: Any, **named: Any) -> str | None:
        """Return why the backend does not support this combination, or None if it does."""
        reason: str | None = PagedAttentionBackend.supports_combination(*asked, **named)
        return reason


class LatentMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):  # type: ignore[misc]
    """vLLM's own, for decodes of equally many queries."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    query_len_support = QueryLenSupport.UNIFORM
    supports_non_causal_multi_token_decode = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # lengths of the keys of a rank do not advance between the steps of a draft
        self.supports_draft_decode_metadata_update = self.dcp_world_size == 1

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """Make metadata for a graph that serves sequences of any length."""
        metadata = super().build_for_cudagraph_capture(common_attn_metadata)
        most = self.vllm_config.model_config.max_model_len
        metadata.max_seq_len = max(metadata.max_seq_len, most)
        return metadata

    def update_draft_decode_metadata(self, metadata: Any) -> None:
        """Do nothing, because the metadata holds no computed tensors."""


class LatentAttentionImpl(MLACommonImpl[MLACommonMetadata]):  # type: ignore[misc]
    """The attention of one layer: decoding here, prefill and writes by vLLM.

    Under ``VLLM_BATCH_INVARIANT=1`` keys are not split.

    Args:
        num_heads: heads of the queries.
        head_size: width of the cache, that of the latent vectors and of the rotary columns.
        scale: factor of the scores.
        num_kv_heads: 1.
        alibi_slopes: must be None.
        sliding_window: must be None.
        kv_cache_dtype: "auto", the model's dtype, "fp8" or "fp8_e4m3".
        logits_soft_cap: must be None or 0.
        attn_type: must be that of a decoder.
        kv_sharing_target_layer_name: must be None.
        mla_args: vLLM's further arguments of multi-head latent attention.

    Raises:
        NotImplementedError: on what must be None; on widths that the kernels have no tiles for.
    """

    can_return_lse_for_decode = True
    supports_dcp = True
    # prompts that are cut over ranks: vLLM's base class says that it can
    supports_pcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        for name, given in (
            ("alibi_slopes", alibi_slopes),
            ("sliding_window", sliding_window),
            ("logits_soft_cap", logits_soft_cap or None),
        ):
            if given is not None:
                raise NotImplementedError(f"{name} must be None for latent attention, got {given}")
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(
                f"attn_type must be 'decoder' for latent attention, got {attn_type!r}"
            )
        check_head_dims(head_size, mla_args["kv_lora_rank"])
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_args,
        )
        # an FP8 cache is widened where it is read
        self.supports_quant_query_input = False

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with the queries of decoding sequences.

        Args:
            q: ``[tokens, num_heads, kv_lora_rank + qk_rope_head_dim]``, or its two parts.
            kv_c_and_k_pe_cache: ``[blocks, block_size, kv_lora_rank + qk_rope_head_dim]``.
            attn_metadata: metadata of the step.
            layer: vLLM's layer, which has the scale of an FP8 cache, ``_k_scale``.

        Returns:
            The output, ``[tokens, num_heads, kv_lora_rank]``, and, where keys are spread over
            ranks, the natural logarithm of the denominators, fp32 ``[tokens, num_heads]``.
        """
        if isinstance(q, tuple):
            q = torch.cat(q, -1)
        decode = attn_metadata.decode
        sequences, shares_keys = len(decode.seq_lens), self.dcp_world_size > 1
        result = mla_attn_func(
            q,
            kv_c_and_k_pe_cache,
            decode.block_table,
            attn_metadata.query_start_loc[: sequences + 1],
            decode.seq_lens,
            # all have equally many, but for padding, which vLLM counts in both
            cdiv(len(q), sequences),
            attn_metadata.max_seq_len,
            head_dim_v=self.kv_lora_rank,
            softmax_scale=self.scale,
            # a rank that has some of the keys has one query of each sequence, which sees them all
            causal=bool(attn_metadata.causal) and not shares_keys,
            kv_descale=layer._k_scale if self.kv_cache_dtype in FP8 else None,
            num_splits=1 if vllm.envs.VLLM_BATCH_INVARIANT else 0,
            return_lse=shares_keys,
        )
        if isinstance(result, tuple):
            return result[0], result[1].T.contiguous()
        return result, None
