"""FlashAttention in Triton: forward and backward, for NVIDIA and AMD GPUs."""

from ._reference.merge import merge_attn_states
from ._reference.reference import attention_reference, varlen_attention_reference
from ._reference.validate import validate_varlen
from ._tree.api import flash_attn_tree_func, validate_tree
from ._tree.reference import tree_attention_reference
from .ahead import prepare
from .api import flash_attn_func, flash_attn_varlen_func
from .dropin import triton_attention
from .packed import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .padding import pad_input, unpad_input
from .spans import attention_spans, varlen_attention_spans

__version__ = "1.0.0"
__all__ = [
    "attention_reference",
    "attention_spans",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_tree_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "merge_attn_states",
    "pad_input",
    "prepare",
    "tree_attention_reference",
    "triton_attention",
    "unpad_input",
    "validate_tree",
    "validate_varlen",
    "varlen_attention_reference",
    "varlen_attention_spans",
]
