"""A user of flash-attn-triton."""
