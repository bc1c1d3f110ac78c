"""Block-sparse attention in Triton: any block layout, prefill, decode and training."""

from . import patterns, selectors
from ._attention.reference import (
    blocksparse_attention_reference,
    blocksparse_varlen_attention_reference,
)
from ._attention.validate import validate_varlen
from .api import blocksparse_attn_func, blocksparse_attn_varlen_func
from .dropin import (
    LocalStridedBlockSparseAttn,
    blocksparse_flash_attn_varlen_fwd,
    get_sparse_attn_mask,
)
from .layout import BlockSparseLayout
from .module import LayoutModule
from .token_rule import TokenRule

__version__ = "1.0.0"
__all__ = [
    "BlockSparseLayout",
    "LayoutModule",
    "LocalStridedBlockSparseAttn",
    "TokenRule",
    "blocksparse_attention_reference",
    "blocksparse_attn_func",
    "blocksparse_attn_varlen_func",
    "blocksparse_flash_attn_varlen_fwd",
    "blocksparse_varlen_attention_reference",
    "get_sparse_attn_mask",
    "patterns",
    "selectors",
    "validate_varlen",
]
