"""Implementations under measurement behind one interface; an absent one says so and is skipped."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from cases import Problem

FP8 = torch.float8_e4m3fn
# a cache's dtype, by its format
STORED = {"bf16": torch.bfloat16, "fp8": FP8, "int8": torch.int8, "int4": torch.uint8}
# of an FP8 cache: its largest number, 448, stands for 7 standard deviations
FP8_SCALE = 2.0**-6
# new tokens of a sequence that are no chunk
FEW = 16
# rows of every sequence that a result is judged by
ROWS = 64
# largest relative error (Frobenius) of all these rows, and of the worst sequence
TOLERANCES = (1.5e-2, 3e-2)

Run = Callable[[], torch.Tensor]


class UnsupportedError(Exception):
    """The provider does not offer the problem; it is skipped, not failed."""


@dataclass
class Inputs:
    """Tensors of one problem; ``k`` and ``v`` lie beside the cache, or are None.

    ``scales`` are arguments of ``paged_attn_func`` that say what numbers of the cache mean.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    table: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    scales: dict[str, Any]


def make_inputs(problem: Problem, device: str, seed: int = 0) -> Inputs:
    """Draw bf16 normal operands, and pages in no order."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)

    cached = [old if problem.dense else new + old for new, old in problem.lengths]
    counts = [-(-n // problem.page) for n in cached]
    order = torch.randperm(max(1, sum(counts)), device=device, generator=generator)
    table = torch.zeros((len(counts), max(1, *counts)), dtype=torch.int32, device=device)
    for b, count in enumerate(counts):
        table[b, :count] = order[sum(counts[:b]) : sum(counts[: b + 1])]
    head_dims = problem.head_dim, problem.head_dim_v or problem.head_dim
    caches = [draw(len(order), problem.page, problem.heads_k, d) for d in head_dims]
    scales: dict[str, Any] = {}
    if problem.cache != "bf16":
        caches, scales = _stored(caches, problem.cache)
    if problem.layout == "packed":
        x = 16 // caches[0].element_size()
        caches[0] = caches[0].unflatten(3, (-1, x)).permute(0, 2, 3, 1, 4).contiguous()
        caches[1] = caches[1].permute(0, 2, 3, 1).contiguous()
    q = draw(problem.tokens, problem.heads_q, problem.head_dim)
    new = [None, None]
    if problem.dense:
        new = [draw(problem.tokens, problem.heads_k, d) for d in head_dims]
    ends = [sum(n for n, _ in problem.lengths[:b]) for b in range(len(counts) + 1)]
    keys = [new + old for new, old in problem.lengths]
    return Inputs(
        q,
        caches[0],
        caches[1],
        new[0],
        new[1],
        table,
        torch.tensor(ends, dtype=torch.int32, device=device),
        torch.tensor(keys, dtype=torch.int32, device=device),
        scales,
    )


def _stored(drawn: list[torch.Tensor], kind: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Let the package write keys and values into caches of a format; return its scales, too."""
    from prefix_prefill import reshape_and_cache

    device, (pages, page, heads_k, _) = drawn[0].device, drawn[0].shape
    per_byte = 2 if kind == "int4" else 1
    caches = [torch.empty_like(t[..., ::per_byte], dtype=STORED[kind]) for t in drawn]
    slots = torch.arange(pages * page, device=device)
    rows = [t.flatten(0, 1) for t in drawn]
    if kind == "fp8":
        scale = torch.full((1,), FP8_SCALE, device=device)
        reshape_and_cache(*rows, *caches, slots, k_scale=scale, v_scale=scale)
        return caches, {"k_descale": scale, "v_descale": scale}
    scales: dict[str, Any] = {
        name: torch.empty(pages, page, heads_k, dtype=torch.float16, device=device)
        for name in ("k_scale_cache", "v_scale_cache")
    }
    scales["kv_dtype"] = kind
    reshape_and_cache(*rows, *caches, slots, **scales)
    return caches, scales


def _in_order(x: Inputs, problem: Problem, b: int) -> list[torch.Tensor]:
    """Return the keys and values of one sequence, fp32 ``[heads_k, keys, D]``."""
    new, old = problem.lengths[b]
    cached = old if problem.dense else new + old
    pages = x.table[b, : -(-cached // problem.page)].long()
    found = []
    for name, cache, fresh in (("k", x.k_cache, x.k), ("v", x.v_cache, x.v)):
        # indexing knows no FP8
        raw = cache.view(torch.uint8) if cache.dtype == FP8 else cache
        part = raw[pages].view(cache.dtype)
        if part.ndim == 5:
            part = part.permute(0, 3, 1, 2, 4).flatten(3)
        elif problem.layout == "packed":
            part = part.permute(0, 3, 1, 2)
        if problem.cache == "int4":
            part = torch.stack([part & 15, part >> 4], -1).flatten(3).to(torch.int8)
            part = (part ^ 8) - 8  # in two's complement
        part = part.float()
        if problem.cache == "fp8":
            part = part * x.scales[f"{name}_descale"]
        elif problem.cache != "bf16":
            part = part * x.scales[f"{name}_scale_cache"][pages].float()[..., None]
        part = part.flatten(0, 1)[:cached]
        if fresh is not None:
            at = int(x.starts[b])
            part = torch.cat([part, fresh[at : at + new].float()])
        found.append(part.transpose(0, 1))
    return found


class Expected(NamedTuple):
    """Some rows of a sequence, and what fp32 attention makes of them, ``[rows, heads_q, Dv]``."""

    rows: torch.Tensor
    out: torch.Tensor


@torch.no_grad()
def reference(problem: Problem, x: Inputs) -> list[Expected]:
    """Return fp32 attention over the numbers that the cache stands for, of every sequence."""
    found = []
    group = problem.heads_q // problem.heads_k
    for b, (new, old) in enumerate(problem.lengths):
        k, v = _in_order(x, problem, b)
        rows = torch.linspace(0, new - 1, min(new, ROWS), device=x.q.device).long()
        at = int(x.starts[b]) + rows
        q = x.q[at].float().unflatten(1, (-1, group)).permute(1, 2, 0, 3)  # [heads_k, group, n, D]
        s = torch.matmul(q, k[:, None].transpose(2, 3)) * problem.head_dim**-0.5
        key = torch.arange(new + old, device=x.q.device)
        position = (rows + old)[:, None]
        hidden = key > position
        if problem.window >= 0:
            hidden |= key < position - problem.window
        p = s.masked_fill_(hidden, -math.inf).softmax(-1)
        found.append(Expected(at, torch.matmul(p, v[:, None]).permute(2, 0, 1, 3).flatten(1, 2)))
    return found


def judge(expected: list[Expected], out: torch.Tensor) -> tuple[bool, float]:
    """Compare an output with the reference; return the error of the worst sequence."""
    wrong = [(out[one.rows].float() - one.out).square().sum() for one in expected]
    right = [one.out.square().sum() for one in expected]
    errors, sizes = torch.stack([torch.stack(wrong), torch.stack(right)]).cpu().double()
    whole = math.sqrt(errors.sum() / sizes.sum())
    worst = math.sqrt((errors / sizes).max())
    # NaN passes no comparison
    return whole <= TOLERANCES[0] and worst <= TOLERANCES[1], worst


class Provider:
    """Base: a name for tables and files, a label for plots."""

    name: ClassVar[str]
    label: ClassVar[str]
    module: ClassVar[str]
    # whether its first calls compile
    compiles: ClassVar[bool] = False

    def unavailable(self, device: str) -> str | None:
        """Return why the provider cannot run here, or None."""
        if device != "cuda":
            return "needs a CUDA device"
        try:
            __import__(self.module)
        except Exception as error:  # loading a rival's library may fail in any way
            return f"cannot import {self.module}: {type(error).__name__}: {error}"
        return None

    def prepare(self, problem: Problem, x: Inputs) -> Run:
        """Return the call, or raise ``UnsupportedError``."""
        raise NotImplementedError


class Ours(Provider):
    name, label, module = "ours", "prefix-prefill", "prefix_prefill"
    compiles = True
    splits: ClassVar[int] = 0

    def unavailable(self, device: str) -> str | None:
        return super().unavailable("cuda")

    def prepare(self, problem: Problem, x: Inputs) -> Run:
        import prefix_prefill

        return lambda: prefix_prefill.paged_attn_func(
            x.q,
            x.k_cache,
            x.v_cache,
            x.table,
            x.starts,
            x.lengths,
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

    def prepare(self, problem: Problem, x: Inputs) -> Run:
        if problem.max_new >= FEW or problem.cache != "bf16" or problem.invariant:
            raise UnsupportedError("measured with few queries and bf16 alone")
        return super().prepare(problem, x)


class Portable(Ours):
    """What GPUs other than Hopper run, where Hopper has a kernel of its own."""

    name, label = "portable", "prefix-prefill, portable"

    def prepare(self, problem: Problem, x: Inputs) -> Run:
        if problem.layout != "nhd" or problem.max_new == 1 or problem.invariant:
            raise UnsupportedError("the portable kernels serve it in any case")
        run = super().prepare(problem, x)

        def portable() -> torch.Tensor:
            with _portable_kernels():
                return run()

        return portable


# what calls of each form are known to come to with the portable kernels
_portable_calls: list[Any] = []


@contextlib.contextmanager
def _portable_kernels() -> Iterator[None]:
    from prefix_prefill import api
    from prefix_prefill._linked.host.forms import Memory
    from prefix_prefill._paged import tiles

    if not _portable_calls:
        _portable_calls.append(Memory())
    before = tiles.HOPPER, api._known
    tiles.HOPPER, api._known = False, _portable_calls[0]
    try:
        yield
    finally:
        tiles.HOPPER, api._known = before


class Fa3(Provider):
    """The raw operators of FlashAttention-3, through a thin module ``fa3`` on the path."""

    name, label, module = "fa3", "FlashAttention-3", "fa3"

    def prepare(self, problem: Problem, x: Inputs) -> Run:
        import fa3

        if problem.layout != "nhd" or problem.dense or problem.cache != "bf16":
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


class Vllm(Provider):
    """The kernel whose name the drop-in continues."""

    name, label = "vllm", "vLLM context_attention_fwd"
    module = "vllm.attention.ops.prefix_prefill"

    def prepare(self, problem: Problem, x: Inputs) -> Run:
        from vllm.attention.ops.prefix_prefill import context_attention_fwd

        if problem.layout != "packed" or not problem.dense or problem.cache != "bf16":
            raise UnsupportedError("only new keys beside a packed bf16 cache")
        out = torch.empty_like(x.q)
        one = torch.ones(1, device=x.q.device)

        def run() -> torch.Tensor:
            context_attention_fwd(
                x.q,
                x.k,
                x.v,
                out,
                "auto",
                x.k_cache,
                x.v_cache,
                x.table,
                x.starts,
                x.lengths,
                problem.max_keys,
                problem.max_new,
                one,
                one,
                sliding_window=problem.window + 1 if problem.window >= 0 else None,
            )
            return out

        return run


class Flashinfer(Provider):
    name, label, module = "flashinfer", "FlashInfer", "flashinfer"

    def prepare(self, problem: Problem, x: Inputs) -> Run:
        import flashinfer

        if problem.layout != "nhd" or problem.dense or problem.cache != "bf16":
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
            problem.heads_q,
            problem.heads_k,
            problem.head_dim,
            problem.page,
            head_dim_vo=problem.head_dim_v or None,
            causal=True,
            window_left=problem.window,
            q_data_type=x.q.dtype,
            kv_data_type=x.k_cache.dtype,
        )
        return lambda: wrapper.run(x.q, (x.k_cache, x.v_cache))


PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (Ours(), OursUnsplit(), Portable(), Fa3(), Flashinfer(), Vllm())
}
LABELS = {name: provider.label for name, provider in PROVIDERS.items()}
