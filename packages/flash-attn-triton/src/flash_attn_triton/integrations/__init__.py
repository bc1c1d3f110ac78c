"""Adapters that put these kernels under other libraries.

Nothing here is imported, and nothing registered, by ``import flash_attn_triton``: each module is
imported by name and has one function, ``register()``.

* :mod:`flash_attn_triton.integrations.transformers`: an ``attn_implementation`` for Hugging Face
  models (needs the extra ``flash-attn-triton[transformers]``).
* :mod:`flash_attn_triton.integrations.torch`: PyTorch's own flash attention, so that
  ``scaled_dot_product_attention`` runs these kernels.
"""
