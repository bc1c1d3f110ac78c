"""Paged attention for AWS Trainium, in NKI, and a simulator on which anyone can run it."""

from . import _needs  # noqa: F401 - first: what is missing is named
from ._paged.forms import Bucket, Buckets
from ._paged.masks import (
    load_block_tables,
    reorder_context_mask,
    transform_block_tables_for_indirect_load,
)
from .api import paged_attention
from .cache import reshape_and_cache
from .dropin import flash_attn_varlen_nkifunc, flash_paged_attention
from .estimate import count_instructions, estimate_cost, trace_form, trace_plan
from .plan import Plan, build_plan
from .reference import paged_attention_reference
from .sim import cost, simulate

__version__ = "1.0.0"
__all__ = [
    "Bucket",
    "Buckets",
    "Plan",
    "build_plan",
    "cost",
    "count_instructions",
    "estimate_cost",
    "flash_attn_varlen_nkifunc",
    "flash_paged_attention",
    "load_block_tables",
    "paged_attention",
    "paged_attention_reference",
    "reorder_context_mask",
    "reshape_and_cache",
    "simulate",
    "trace_form",
    "trace_plan",
    "transform_block_tables_for_indirect_load",
]
