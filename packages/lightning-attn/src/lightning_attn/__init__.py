"""Linear attention with decay (lightning attention) in Triton, for NVIDIA and AMD GPUs."""

from . import fla
from ._linear.reference import (
    lightning_attention_decode_reference,
    lightning_attention_reference,
    lightning_attention_varlen_reference,
)
from ._linear.validate import validate_decay, validate_slots, validate_varlen
from .api import lightning_attn_decode, lightning_attn_func, lightning_attn_varlen_func
from .dropin import lightning_attention, linear_decode_forward_triton
from .slopes import build_slopes

__version__ = "1.0.0"
__all__ = [
    "build_slopes",
    "fla",
    "lightning_attention",
    "lightning_attention_decode_reference",
    "lightning_attention_reference",
    "lightning_attention_varlen_reference",
    "lightning_attn_decode",
    "lightning_attn_func",
    "lightning_attn_varlen_func",
    "linear_decode_forward_triton",
    "validate_decay",
    "validate_slots",
    "validate_varlen",
]
