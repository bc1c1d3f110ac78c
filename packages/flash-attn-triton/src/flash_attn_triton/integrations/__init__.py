"""Adapters through which other libraries use these kernels.

``import flash_attn_triton`` neither imports nor registers any of them: import a module by name and
call its ``register()``.

* :mod:`flash_attn_triton.integrations.transformers`: an ``attn_implementation`` for Hugging Face
  models (needs the extra ``flash-attn-triton[transformers]``).
* :mod:`flash_attn_triton.integrations.trl`: trainers of TRL whose rows share prefixes.
* :mod:`flash_attn_triton.integrations.torch`: PyTorch's own flash attention, so that
  ``scaled_dot_product_attention`` runs these kernels.
"""
