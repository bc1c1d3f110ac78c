"""A platform for vLLM's engine without a GPU: its CPU, with the attention backend asked for.

vLLM's own platform answers each choice with its attention in C++, and calls operators of its
extension at start; the build on the index has them for CUDA alone.
"""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum


def platform() -> str:
    """Return the class of the platform; the entry point calls this."""
    return f"{__name__}.EnginePlatform"


class EnginePlatform(CpuPlatform):
    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, **_: Any
    ) -> str:
        backend = selected_backend or AttentionBackendEnum["PREFIX_PREFILL"]
        reasons = backend.get_class().validate_configuration(
            device_capability=None, **attn_selector_config._asdict()
        )
        if reasons:
            raise ValueError(f"{backend.name} is not valid for this configuration: {reasons}")
        return backend.get_path()

    @classmethod
    def import_kernels(cls) -> None:
        if hasattr(torch.ops._C, "init_cpu_memory_env"):
            return
        cls._library = torch.library.Library("_C", "FRAGMENT")
        for schema, function in (
            ("init_cpu_memory_env(int[] nodes) -> ()", lambda nodes: None),
            ("greedy_argmax(Tensor logits) -> Tensor", lambda logits: logits.argmax(-1)),
        ):
            cls._library.define(schema)
            name = schema.partition("(")[0]
            cls._library.impl(name, function, "CompositeExplicitAutograd")

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        if os.environ.get("TRITON_INTERPRET") == "1":
            return  # vLLM's own Triton kernels run in Triton's interpreter
        from vllm.triton_utils.dispatcher import register_kernels

        name = "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel"
        register_kernels({name: slot_mapping})


def slot_mapping(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc_ptr: Tensor,
    positions_ptr: Tensor,
    block_table_ptr: Tensor,
    block_table_stride: int,
    slot_mapping_ptr: Tensor,
    KV_CACHE_BLOCK_SIZE: int,
    TOTAL_CP_WORLD_SIZE: int,
    TOTAL_CP_RANK: int,
    CP_KV_CACHE_INTERLEAVE_SIZE: int,
    PAD_ID: int,
    BLOCK_SIZE: int,
) -> None:
    """Compute the slots of new tokens; vLLM passes arguments by these names."""
    starts = query_start_loc_ptr.tolist()
    slot_mapping_ptr[:max_num_tokens].fill_(PAD_ID)
    for row, (first, last) in enumerate(pairwise(starts)):
        last = min(last, num_tokens)
        if first < last and row < len(block_table_ptr):
            position = positions_ptr[first:last]
            pages = block_table_ptr[row][position // KV_CACHE_BLOCK_SIZE].long()
            slot_mapping_ptr[first:last] = (
                pages * KV_CACHE_BLOCK_SIZE + position % KV_CACHE_BLOCK_SIZE
            )
