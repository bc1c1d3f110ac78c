"""Implementations under measurement; an absent one says so and is skipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import prefix_prefill
import torch
from _linked.providers import (
    Portable,
    Prepared,
    Provider,
    UnsupportedError,
    by_name,
    without_hopper,
)
from cases import FEW, Problem
from checks import Inputs
from prefix_prefill import api
from prefix_prefill._paged import tiles

Run = Callable[[], torch.Tensor]


class Call(Provider):
    """One whose problems are one call each."""

    def call(self, problem: Problem, x: Inputs) -> Run:
        """Return the call, or raise ``UnsupportedError``."""
        raise NotImplementedError

    def prepare(self, problem: Problem, x: Inputs, passes: tuple[str, ...] = ("",)) -> Prepared:
        return Prepared({"": self.call(problem, x)})


class Ours(Call):
    name, label, module = "ours", "prefix-prefill", "prefix_prefill"
    compiles = True
    needs_gpu = False
    splits: ClassVar[int] = 0

    def call(self, problem: Problem, x: Inputs) -> Run:
        return lambda: prefix_prefill.paged_attn_func(
            *x.given,
            problem.max_new,
            problem.max_keys,
            k=x.k,
            v=x.v,
            window_size=(problem.window, -1),
            num_splits=self.splits,
            invariant=problem.invariant,
            **x.scales,
        )


class OursUnsplit(Ours):
    """The setting that makes a sequence independent of its batch."""

    name, label = "ours-unsplit", "prefix-prefill, num_splits=1"
    splits = 1

    def call(self, problem: Problem, x: Inputs) -> Run:
        if problem.max_new >= FEW or problem.cache != "bf16" or problem.invariant:
            raise UnsupportedError("measured with few queries and bf16 alone")
        return super().call(problem, x)


class PortableOurs(Portable, Ours):
    name, label = "portable", "prefix-prefill, portable"
    kernels = staticmethod(without_hopper(tiles, api))

    def call(self, problem: Problem, x: Inputs) -> Run:
        if problem.layout != "nhd" or problem.max_new == 1 or problem.invariant:
            raise UnsupportedError("the portable kernels serve it in any case")
        return super().call(problem, x)


class Fa3(Call):
    """The raw operators of FlashAttention-3, through a thin module ``fa3`` on the path."""

    name, label, module = "fa3", "FlashAttention-3", "fa3"

    def call(self, problem: Problem, x: Inputs) -> Run:
        import fa3

        if not problem.is_plain:
            raise UnsupportedError("only everything in a bf16 NHD cache")
        if problem.head_dim > 256:
            raise UnsupportedError("head dimensions to 256")
        window = (problem.window, 0 if problem.window >= 0 else -1)
        return lambda: fa3.fwd(
            x.q,
            x.k_cache,
            x.v_cache,
            causal=True,
            cu_q=x.starts,
            used_k=x.lengths,
            max_q=problem.max_new,
            max_k=problem.max_keys,
            page_table=x.table,
            window=window,
            num_splits=0,
        )[0]


class Vllm(Call):
    """The kernel whose name the drop-in continues."""

    name, label = "vllm", "vLLM context_attention_fwd"
    module = "vllm.attention.ops.prefix_prefill"

    def call(self, problem: Problem, x: Inputs) -> Run:
        from vllm.attention.ops.prefix_prefill import context_attention_fwd

        if problem.layout != "packed" or not problem.dense or problem.cache != "bf16":
            raise UnsupportedError("only new keys beside a packed bf16 cache")
        out = torch.empty_like(x.q)
        one = torch.ones(1, device=x.q.device)

        def run() -> torch.Tensor:
            context_attention_fwd(
                *(x.q, x.k, x.v, out, "auto"),
                *x.given[1:],
                *(problem.max_keys, problem.max_new, one, one),
                sliding_window=problem.window + 1 if problem.window >= 0 else None,
            )
            return out

        return run


class Flashinfer(Call):
    name, label, module = "flashinfer", "FlashInfer", "flashinfer"

    def call(self, problem: Problem, x: Inputs) -> Run:
        import flashinfer

        if not problem.is_plain:
            raise UnsupportedError("only everything in a bf16 NHD cache")
        counts = [-(-(new + old) // problem.page) for new, old in problem.lengths]
        ends = [sum(counts[:b]) for b in range(len(counts) + 1)]
        pages = torch.cat([x.table[b, :n] for b, n in enumerate(counts)])
        last = [(new + old - 1) % problem.page + 1 for new, old in problem.lengths]
        workspace = torch.empty(512 * 2**20, dtype=torch.uint8, device=x.q.device)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")

        def on_device(numbers: list[int]) -> torch.Tensor:
            return torch.tensor(numbers, dtype=torch.int32, device=x.q.device)

        wrapper.plan(
            x.starts,
            on_device(ends),
            pages,
            on_device(last),
            *(problem.heads_q, problem.heads_k, problem.head_dim, problem.page),
            head_dim_vo=problem.head_dim_v or None,
            causal=True,
            window_left=problem.window,
            q_data_type=x.q.dtype,
            kv_data_type=x.k_cache.dtype,
        )
        return lambda: wrapper.run(x.q, (x.k_cache, x.v_cache))


PROVIDERS = by_name(Ours(), OursUnsplit(), PortableOurs(), Fa3(), Flashinfer(), Vllm())
