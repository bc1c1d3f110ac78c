"""Attention over a paged KV cache in Triton: prefill, decode, and both in one call."""

from ._kvcache.api import flash_attn_with_kvcache
from ._mla.api import mla_attn_func, mla_cache_write
from ._mla.reference import mla_attention_reference
from ._paged.merge import merge_attn_states
from ._paged.reference import paged_attention_reference
from ._paged.validate import validate_paged, validate_slot_mapping
from .api import paged_attn_func, reshape_and_cache
from .cascade import shared_prefix_attn_func
from .dropin import chunked_prefill_paged_decode, context_attention_fwd

__version__ = "1.0.0"
__all__ = [
    "chunked_prefill_paged_decode",
    "context_attention_fwd",
    "flash_attn_with_kvcache",
    "merge_attn_states",
    "mla_attention_reference",
    "mla_attn_func",
    "mla_cache_write",
    "paged_attention_reference",
    "paged_attn_func",
    "reshape_and_cache",
    "shared_prefix_attn_func",
    "validate_paged",
    "validate_slot_mapping",
]
