"""No function has a gradient: each float tensor that requires one is refused by its name."""

from __future__ import annotations

import pytest
import torch
from prefix_prefill import (
    chunked_prefill_paged_decode,
    context_attention_fwd,
    flash_attn_with_kvcache,
    merge_attn_states,
    mla_attn_func,
    mla_cache_write,
    paged_attn_func,
    reshape_and_cache,
    shared_prefix_attn_func,
)

pytestmark = pytest.mark.eager

FP8 = torch.float8_e4m3fn


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def floats(**shapes):
    return {name: torch.rand(shape) for name, shape in shapes.items()}


def cast(given, dtype, *names):
    return given | {name: given[name].to(dtype) for name in names}


CACHES = {"k_cache": (2, 4, 1, 8), "v_cache": (2, 4, 1, 8)}
SCALE_CACHES = {"k_scale_cache": (2, 4, 1), "v_scale_cache": (2, 4, 1)}
NEW = {"k": (2, 1, 8), "v": (2, 1, 8)}
DESCALES = {"q_descale": (1,), "k_descale": (1,), "v_descale": (1,)}
TABLE = {
    "block_table": ints(0, 1).view(2, 1),
    "cu_seqlens_q": ints(0, 1, 2),
    "seqlens_k": ints(3, 4),
    "max_seqlen_q": 1,
    "max_seqlen_k": 4,
}
ENGINE = {
    "b_loc": TABLE["block_table"],
    "b_start_loc": TABLE["cu_seqlens_q"],
    "b_seq_len": TABLE["seqlens_k"],
    "max_seq_len": 4,
    "max_input_len": 1,
    "kv_cache_dtype": "auto",
}
ENGINE_NAMES = {
    "b_loc": "block_table",
    "b_start_loc": "query_start_loc",
    "b_seq_len": "seq_lens",
    "max_input_len": "max_query_len",
    "q": "query",
    "k": "key",
    "v": "value",
    "o": "output",
    "k_cache": "key_cache",
    "v_cache": "value_cache",
}
SHARED = {"shared_pages": ints(0), "shared_len": 4}
SLOTS = {"slot_mapping": torch.tensor([0, 4])}
Q = {"q": (2, 2, 8)}
PAGED = floats(**Q, **CACHES, **NEW, alibi_slopes=(2,), sinks=(2,), out=(2, 2, 8)) | TABLE
PAGED_FP8 = cast(
    floats(**Q, **CACHES, **DESCALES, out=(2, 2, 8), out_scale=(1,)) | TABLE,
    FP8,
    *("q", "out", *CACHES),
)
PAGED_INT8 = cast(floats(**Q, **CACHES, **SCALE_CACHES) | TABLE, torch.int8, *CACHES)
PAGED_INT8["kv_dtype"] = "int8"
WRITE_FP8 = cast(floats(**NEW, **CACHES, k_scale=(1,), v_scale=(1,)) | SLOTS, FP8, *CACHES)
WRITE_INT8 = cast(floats(**NEW, **CACHES, **SCALE_CACHES) | SLOTS, torch.int8, *CACHES)
WRITE_INT8["kv_dtype"] = "int8"
CONTEXT = floats(
    **Q, **CACHES, **NEW, o=(2, 2, 8), k_scale=(1,), v_scale=(1,), alibi_slopes=(2,), sinks=(2,)
)
CONTEXT |= ENGINE
APPEND = floats(
    **CACHES,
    q=(2, 1, 2, 8),
    k=(2, 1, 1, 8),
    v=(2, 1, 1, 8),
    rotary_cos=(4, 4),
    rotary_sin=(4, 4),
    alibi_slopes=(2,),
)
APPEND["cache_seqlens"] = 1
LATENT_FP8 = floats(q=(2, 2, 16), kv_cache=(2, 4, 16), out=(2, 2, 8), q_descale=(1,))
LATENT_FP8 = cast(LATENT_FP8 | floats(kv_descale=(1,)), FP8, "q", "kv_cache")
LATENT_FP8 |= TABLE | {"head_dim_v": 8}
WRITE_LATENT = floats(kv_c=(2, 8), k_pe=(2, 8), kv_cache=(2, 4, 16), scale=(1,))
WRITE_LATENT = cast(WRITE_LATENT | SLOTS, FP8, "kv_cache")

CALLS = {
    "paged": (paged_attn_func, PAGED),
    "paged fp8": (paged_attn_func, PAGED_FP8),
    "paged int8": (paged_attn_func, PAGED_INT8),
    "shared": (shared_prefix_attn_func, PAGED | SHARED),
    "shared fp8": (shared_prefix_attn_func, PAGED_FP8 | SHARED),
    "shared int8": (shared_prefix_attn_func, PAGED_INT8 | SHARED),
    "write fp8": (reshape_and_cache, WRITE_FP8),
    "write int8": (reshape_and_cache, WRITE_INT8),
    "context": (context_attention_fwd, CONTEXT),
    "chunked": (
        chunked_prefill_paged_decode,
        {ENGINE_NAMES.get(name, name): x for name, x in CONTEXT.items()},
    ),
    "append": (flash_attn_with_kvcache, APPEND),
    "latent": (mla_attn_func, LATENT_FP8),
    "write latent": (mla_cache_write, WRITE_LATENT),
    "merge": (
        merge_attn_states,
        floats(out_a=(2, 2, 8), lse_a=(2, 2), out_b=(2, 2, 8), lse_b=(2, 2)),
    ),
}
CASES = [
    (call, name)
    for call, (_, given) in CALLS.items()
    for name, x in given.items()
    if isinstance(x, torch.Tensor) and x.is_floating_point()
]


@pytest.mark.parametrize("call", CALLS)
def test_without_gradients_it_is_served(call):
    function, given = CALLS[call]
    function(**{n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in given.items()})


@pytest.mark.parametrize(("call", "name"), CASES)
def test_the_argument_is_named(call, name):
    function, given = CALLS[call]
    x = given[name].clone().requires_grad_()
    before = x.detach().clone()
    message = f"has no gradient: {name} must not require one, got requires_grad=True"
    with pytest.raises(NotImplementedError, match=message):
        function(**given | {name: x})
    assert torch.equal(x.detach().view(torch.uint8), before.view(torch.uint8))
    with torch.no_grad():
        function(**given | {name: x})
