"""vLLM's interface for attention backends: its own where it is installed, else a stand-in.

vLLM brings its build of torch for GPUs, so most environments of these tests do without it. The
stand-in has the names, signatures and defaults of vLLM 0.33 that the backend touches;
``nox -s vllm`` runs the same tests on vLLM's own code, and holds the stand-in to it.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
import os
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

IS_REAL = importlib.util.find_spec("vllm") is not None


class AttentionType(str, enum.Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


@dataclass(frozen=True)
class MultipleOf:
    base: int


class AttentionCGSupport(enum.Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionBackend(ABC):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1)]

    @classmethod
    def is_mla(cls) -> bool:
        return False

    @staticmethod
    @abstractmethod
    def get_name() -> str: ...

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type: ...

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type: ...

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return spec

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return False

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return False

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return False

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        return None


class AttentionMetadata:
    pass


M = TypeVar("M")


@dataclass
class CommonAttentionMetadata:
    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor
    slot_mapping: Tensor
    causal: bool | Tensor = True
    mm_req_doc_ranges: dict[int, list[tuple[int, int]]] | None = None
    rswa_prefix_lens: Tensor | None = None


class AttentionMetadataBuilder(ABC, Generic[M]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    supports_draft_decode_metadata_update: bool = False
    supports_update_block_table: bool = False

    @abstractmethod
    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ):
        self.vllm_config = vllm_config

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        return cls._cudagraph_support

    @abstractmethod
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> M: ...

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> M:
        return self.build(0, common_attn_metadata)

    def update_block_table(self, metadata: M, blk_table: Tensor, slot_mapping: Tensor) -> M:
        raise NotImplementedError

    def update_draft_decode_metadata(self, metadata: M) -> None:
        raise NotImplementedError


class AttentionImpl(ABC, Generic[M]):
    supports_quant_query_input: bool = False

    @abstractmethod
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None: ...

    @abstractmethod
    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: M,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor: ...

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False


def single_rht(x: Tensor, inverse: bool = False) -> Tensor:
    """Rotate rows: every other sign changed, times a Hadamard matrix."""
    sign = torch.ones(x.shape[-1])
    sign[::2] = -1.0
    matrix = torch.ones(1, 1)
    while len(matrix) < x.shape[-1]:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    sign, matrix = sign.to(x), matrix.to(x)
    return x @ matrix * sign if inverse else x * sign @ matrix


_overrides: dict[Any, str] = {}


class AttentionBackendEnum(enum.Enum):
    CUSTOM = None

    def get_path(self, include_classname: bool = True) -> str:
        return _overrides[self]

    def get_class(self) -> type:
        module, name = _overrides[self].rsplit(".", 1)
        return getattr(importlib.import_module(module), name)

    def is_overridden(self) -> bool:
        return self in _overrides

    def clear_override(self) -> None:
        _overrides.pop(self, None)


def register_backend(backend: Any, class_path: str | None = None, is_mamba: bool = False) -> Any:
    if isinstance(backend, str):
        member = object.__new__(AttentionBackendEnum)
        member._name_, member._value_ = backend, class_path
        AttentionBackendEnum._member_map_[backend] = backend = member
        AttentionBackendEnum._value2member_map_[class_path] = member
    _overrides[backend] = class_path
    return lambda x: x


def __getattr__(name: str) -> bool:
    """Read a switch of the environment, as the module of vLLM that this stands in for does."""
    if not name.startswith("VLLM_"):
        raise AttributeError(name)
    return os.environ.get(name, "0") == "1"


class QueryLenSupport(enum.Enum):
    SINGLE_ONLY = "single_only"
    UNIFORM = "uniform"
    VARLEN = "varlen"


class MLACommonMetadata(AttentionMetadata):
    pass


class MLACommonBackend(AttentionBackend):
    @classmethod
    def is_mla(cls) -> bool:
        return True


class MLACommonMetadataBuilder(AttentionMetadataBuilder[M]):
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.SINGLE_ONLY
    supports_non_causal_multi_token_decode: ClassVar[bool] = False
    dcp_world_size = 1

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> M:
        raise NotImplementedError


class MLACommonImpl(ABC, Generic[M]):
    supports_pcp: bool = True

    @abstractmethod
    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: M,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]: ...


LATENT = (
    QueryLenSupport,
    MLACommonMetadata,
    MLACommonBackend,
    MLACommonMetadataBuilder,
    MLACommonImpl,
)
BACKEND = (
    AttentionType,
    MultipleOf,
    AttentionCGSupport,
    AttentionBackend,
    AttentionMetadata,
    CommonAttentionMetadata,
    AttentionMetadataBuilder,
    AttentionImpl,
)
STAND_INS = {
    "vllm.envs": {"__getattr__": __getattr__},
    "vllm.v1.attention.backend": {x.__name__: x for x in BACKEND},
    "vllm.model_executor.layers.attention.mla_attention": {x.__name__: x for x in LATENT},
    "vllm.v1.attention.backends.registry": {
        "AttentionBackendEnum": AttentionBackendEnum,
        "register_backend": register_backend,
    },
    "vllm.v1.attention.ops.int4_per_token_head": {"single_rht": single_rht},
    "vllm.model_executor.layers.quantization.utils.quant_utils": {"kFp8StaticTensorSym": "static"},
}


def stand_in() -> None:
    """Put the stand-in where vLLM would be."""
    for name, content in STAND_INS.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            module = sys.modules.setdefault(".".join(parts[:i]), ModuleType(".".join(parts[:i])))
            if i > 1:
                setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], module)
        vars(sys.modules[name]).update(content)


if not IS_REAL:
    stand_in()
