"""Adapters to other libraries; none is imported by ``import blocksparse_attn``."""
