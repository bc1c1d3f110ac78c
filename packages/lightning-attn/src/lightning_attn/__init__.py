"""Linear attention with decay (lightning attention) in Triton, for NVIDIA and AMD GPUs."""

from . import fla
from .api import lightning_attn_decode, lightning_attn_func, lightning_attn_varlen_func
from .dropin import lightning_attention, linear_decode_forward_triton
from .reference import (
    lightning_attention_decode_reference,
    lightning_attention_reference,
    lightning_attention_varlen_reference,
)
from .slopes import build_slopes
from .validate import validate_decay, validate_slots, validate_varlen

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
