"""What a type checker has to say of calls; the types session reads this file, and nothing runs it.

A line that ends in ``# type: ignore`` is wrong, and mypy reports it if it finds no fault there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import blocksparse_attn
import flash_attn_triton
import flash_attn_triton.distributed
import lightning_attn
import lightning_attn.distributed
import lightning_attn.fla
import nki_paged_attn
import prefix_prefill
import prefix_prefill.distributed
from blocksparse_attn import BlockSparseLayout
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import assert_type

    Pair = tuple[Tensor, Tensor]
    Three = tuple[Tensor, Tensor, Tensor | None]


def flash(q: Tensor, qkv: Tensor, starts: Tensor, flag: bool) -> None:
    f = flash_attn_triton.flash_attn_func
    assert_type(f(q, q, q), Tensor)
    assert_type(f(q, k=q, v=q, causal=True, return_attn_probs=False, return_lse=False), Tensor)
    assert_type(f(q, q, q, return_lse=True), Pair)
    assert_type(f(q, q, q, return_attn_probs=True), Three)
    assert_type(f(q, q, q, return_attn_probs=True, return_lse=True), Three)
    assert_type(f(q, q, q, return_attn_probs=True, return_lse=flag), Three)
    assert_type(f(q, q, q, return_lse=flag), Tensor | Pair | Three)
    assert_type(f(q, q, q, return_attn_probs=flag), Tensor | Pair | Three)
    assert_type(f(q, q, q, 0.0, None, True, (-1, -1), 0.0, None, False), Tensor)
    assert_type(f(q, q, q, 0.0, None, True, (-1, -1), 0.0, None, False, True), Three)
    unsure = f(q, q, q, 0.0, None, True, (-1, -1), 0.0, None, False, flag)
    assert_type(unsure, Tensor | Pair | Three)
    assert_type(flash_attn_triton.attention_reference(q, q, q, return_lse=True), Pair)
    g = flash_attn_triton.flash_attn_varlen_func
    assert_type(g(q, q, q, starts, starts, 8, 8, 0.0, None, True), Tensor)
    assert_type(g(q, q, q, starts, starts, 8, 8, causal=True, return_lse=True), Pair)
    assert_type(flash_attn_triton.flash_attn_qkvpacked_func(qkv), Tensor)
    assert_type(flash_attn_triton.flash_attn_qkvpacked_func(qkv, return_lse=True), Pair)
    assert_type(flash_attn_triton.flash_attn_kvpacked_func(q, qkv, return_attn_probs=True), Three)
    h = flash_attn_triton.flash_attn_varlen_qkvpacked_func
    assert_type(h(qkv, starts, 8, return_lse=flag), Tensor | Pair | Three)
    i = flash_attn_triton.flash_attn_varlen_kvpacked_func
    assert_type(i(q, qkv, starts, starts, 8, 8, return_lse=True), Pair)
    tree = flash_attn_triton.flash_attn_tree_func
    assert_type(tree(q, q, q, starts, [-1], 8), Tensor)
    assert_type(tree(q, q, q, starts, [-1], 8, return_lse=True), Pair)
    assert_type(tree(q, q, q, starts, [-1], 8, return_lse=flag), Tensor | Pair)
    assert_type(flash_attn_triton.distributed.flash_attn_func(q, q, q, return_lse=True), Pair)
    f(q, q, q, softmax_sclae=1.0)  # type: ignore
    f(q, q, q, causl=True, return_lse=True)  # type: ignore
    f(q, q, return_lse=True)  # type: ignore
    f(q, q, q, causal="yes", return_attn_probs=True)  # type: ignore
    tree(q, q, q, starts, [-1], return_lse=True)  # type: ignore


def paged(q: Tensor, cache: Tensor, table: Tensor, starts: Tensor, flag: bool) -> None:
    given = q, cache, cache, table, starts, starts, 8, 8
    f = prefix_prefill.paged_attn_func
    assert_type(f(*given), Tensor)
    assert_type(f(*given, return_lse=True), Pair)
    assert_type(f(*given, return_lse=flag), Tensor | Pair)
    assert_type(prefix_prefill.paged_attention_reference(*given, return_lse=True), Pair)
    assert_type(prefix_prefill.distributed.paged_attn_func(*given), Tensor)
    shared = prefix_prefill.shared_prefix_attn_func
    assert_type(shared(q, cache, cache, table, 4, *given[3:], return_lse=True), Pair)
    latent = q, cache, *given[3:]
    assert_type(prefix_prefill.mla_attn_func(*latent), Tensor)
    assert_type(prefix_prefill.mla_attn_func(*latent, return_lse=True), Pair)
    assert_type(prefix_prefill.mla_attention_reference(*latent, return_lse=True), Pair)
    append = prefix_prefill.flash_attn_with_kvcache
    assert_type(append(q, cache, cache), Tensor)
    assert_type(append(q, cache, cache, return_softmax_lse=True), Pair)
    assert_type(append(q, cache, cache, return_softmax_lse=flag), Tensor | Pair)
    f(*given, windw_size=(4, 0), return_lse=True)  # type: ignore


def blocks(q: Tensor, starts: Tensor, layout: BlockSparseLayout, flag: bool) -> None:
    f = blocksparse_attn.blocksparse_attn_func
    assert_type(f(q, q, q, layout), Tensor)
    assert_type(f(q, q, q, layout, return_lse=True), Pair)
    assert_type(f(q, q, q, layout, return_lse=flag), Tensor | Pair)
    g = blocksparse_attn.blocksparse_attn_varlen_func
    assert_type(g(q, q, q, starts, starts, 8, 8, layout, return_lse=True), Pair)
    assert_type(blocksparse_attn.blocksparse_attention_reference(q, q, q, layout), Tensor)
    f(q, q, q, starts, return_lse=True)  # type: ignore


def linear(q: Tensor, decay: Tensor, starts: Tensor, flag: bool) -> None:
    f = lightning_attn.lightning_attn_func
    assert_type(f(q, q, q, decay), tuple[Tensor, None])
    assert_type(f(q, q, q, decay, output_final_state=True), Pair)
    assert_type(f(q, q, q, decay, output_final_state=flag), tuple[Tensor, Tensor | None])
    g = lightning_attn.lightning_attn_varlen_func
    assert_type(g(q, q, q, decay, starts, output_final_state=True), Pair)
    assert_type(lightning_attn.lightning_attention_reference(q, q, q, decay), tuple[Tensor, None])
    assert_type(lightning_attn.fla.chunk_simple_gla(q, q, q, output_final_state=True), Pair)
    whole = lightning_attn.distributed.lightning_attn_func
    assert_type(whole(q, q, q, decay, output_final_state=True), Pair)
    f(q, q, q, decay, scal=1.0)  # type: ignore


def neuron(q: Any, table: Any) -> None:
    given = q, q, q, q, table, table, table
    assert_type(nki_paged_attn.paged_attention(*given, return_lse=True), tuple[Any, Any])
    nki_paged_attn.paged_attention(*given, scal=1.0)  # type: ignore
