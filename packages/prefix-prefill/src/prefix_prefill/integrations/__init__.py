"""Adapters that run these kernels in other libraries.

``import prefix_prefill`` imports and registers none of them: each module is imported by name.

* :mod:`prefix_prefill.integrations.torch`: ``torch.nn.attention.varlen`` with pages.
* :mod:`prefix_prefill.integrations.transformers`: continuous batching of Hugging Face models
  (needs the extra ``prefix-prefill[transformers]``).
* :mod:`prefix_prefill.integrations.vllm`: vLLM's attention backend ``PREFIX_PREFILL``. vLLM's
  plugin entry point registers it; the user selects it.
* :mod:`prefix_prefill.integrations.vllm_ops`: functions under vLLM's names, with its signatures.
"""
