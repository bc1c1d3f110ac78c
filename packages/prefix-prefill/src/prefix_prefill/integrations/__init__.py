"""Adapters that put these kernels under other libraries.

Nothing here is imported, and nothing registered, by ``import prefix_prefill``: each module is
imported by name.

* :mod:`prefix_prefill.integrations.torch`: ``torch.nn.attention.varlen`` with pages.
* :mod:`prefix_prefill.integrations.transformers`: continuous batching of Hugging Face models
  (needs the extra ``prefix-prefill[transformers]``).
* :mod:`prefix_prefill.integrations.vllm`: vLLM's attention backend ``CUSTOM``. vLLM's entry point
  for plugins registers it, and selects nothing.
"""
