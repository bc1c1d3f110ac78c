"""Benchmark of multi-head latent attention: check first, then time, in turns.

    python benchmarks/bench_mla.py --json mla.json
    python benchmarks/bench_mla.py --cases 128 --providers ours,portable
    python benchmarks/bench_mla.py --dry-run        tiny, on the CPU

A case is told in TFLOP/s, 2 (576 + 512) H for each pair of a query and a key that it sees; in GB/s
of the cache, read once; and as a share of the same run's copy bandwidth (bytes read plus written).
FlashMLA runs where it is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from _linked import report
from _linked.benchmark import Benchmark
from _linked.cases import Case
from _linked.checks import attend, relative_error
from _linked.providers import (
    Portable,
    Prepared,
    Provider,
    UnsupportedError,
    by_name,
    without_hopper,
)
from _linked.results import copy_gbps
from prefix_prefill import mla_attn_func
from prefix_prefill._mla import api
from prefix_prefill._paged import tiles
from torch import Tensor

Row = dict[str, Any]

HEAD_DIM, HEAD_DIM_V = 576, 512
# of DeepSeek's models, whose heads had 128 + 64 columns before the projections were absorbed
SCALE = 192**-0.5
# relative error (Frobenius) of the sequences that are looked at
TOLERANCE = 1e-2
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Problem(Case):
    """One call: sequences with so many new tokens, and keys, each."""

    batch: int
    new: int
    keys: int
    heads: int
    page: int = 64
    cache: torch.dtype = torch.bfloat16

    @property
    def compared(self) -> list[int]:
        """Return the sequences that are looked at: the first and the last."""
        return sorted({0, self.batch - 1})

    def flops(self, one: str) -> float:
        pairs = self.batch * (self.new * (self.keys - self.new) + self.new * (self.new + 1) / 2)
        return 2.0 * (HEAD_DIM + HEAD_DIM_V) * self.heads * pairs

    def bytes(self, one: str) -> float:
        return float(self.batch * self.keys * HEAD_DIM * self.cache.itemsize)

    def shrunk(self) -> Problem:
        return replace(self, batch=2, new=min(self.new, 3), keys=70, heads=4)


def _problem(name: str, *sizes: int, **more: Any) -> Problem:
    return Problem(name, name.split("-")[0], *sizes, **more)


PROBLEMS = (
    _problem("decode-h128-64x8192", 64, 1, 8192, 128),
    _problem("decode-h16-64x8192", 64, 1, 8192, 16),
    _problem("decode-h128-1x65536", 1, 1, 65536, 128),
    _problem("decode-h16-1x65536", 1, 1, 65536, 16),
    _problem("decode-h16-256x2048", 256, 1, 2048, 16),
    _problem("drafts-h128-32x2+8192", 32, 2, 8192, 128),
    _problem("prefill-h128-4x512+3584", 4, 512, 4096, 128),
    _problem("decode-h128-64x8192-p16", 64, 1, 8192, 128, page=16),
    _problem("decode-h128-64x8192-fp8", 64, 1, 8192, 128, cache=FP8),
    _problem("decode-h16-64x8192-fp8", 64, 1, 8192, 16, cache=FP8),
)


@dataclass
class Inputs:
    q: Tensor
    cache: Tensor
    table: Tensor
    starts: Tensor
    lengths: Tensor


class Ours(Provider):
    name, label, module = "ours", "prefix-prefill", "prefix_prefill"
    needs_gpu = False
    compiles = True

    def prepare(self, problem: Problem, x: Inputs, passes: tuple[str, ...]) -> Prepared:
        given = x.q, x.cache, x.table, x.starts, x.lengths, problem.new, problem.keys
        return Prepared({"": lambda: mla_attn_func(*given, softmax_scale=SCALE)})


class PortableOurs(Portable, Ours):
    name, label = "portable", "prefix-prefill, portable"
    kernels = staticmethod(without_hopper(tiles, api))


class FlashMla(Provider):
    name, label, module = "flashmla", "FlashMLA", "flash_mla"

    def prepare(self, problem: Problem, x: Inputs, passes: tuple[str, ...]) -> Prepared:
        from flash_mla import flash_mla_with_kvcache, get_mla_metadata

        if problem.page != 64 or problem.cache != torch.bfloat16:
            raise UnsupportedError("pages of 64 in bf16 alone")
        q = x.q.view(problem.batch, problem.new, problem.heads, HEAD_DIM)
        plan = get_mla_metadata(x.lengths, problem.new * problem.heads, 1)
        given = q, x.cache[:, :, None], x.table, x.lengths, HEAD_DIM_V, *plan
        run: Callable[..., Any] = flash_mla_with_kvcache
        return Prepared(
            {"": lambda: run(*given, softmax_scale=SCALE, causal=True)[0].flatten(0, 1)}
        )


PROVIDERS = by_name(Ours(), PortableOurs(), FlashMla())


class Mla(Benchmark):
    package = "prefix_prefill"
    problems, providers = PROBLEMS, PROVIDERS
    families = dict.fromkeys(("decode", "drafts", "prefill"), tuple(PROVIDERS))
    specials = {}

    @staticmethod
    def make_inputs(problem: Problem, device: str, seed: int = 0) -> Inputs:
        """Draw normal operands, and pages in no order."""
        generator = torch.Generator(device=device).manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)

        pages = -(-problem.keys // problem.page)
        order = torch.randperm(problem.batch * pages, device=device, generator=generator)
        counts = torch.arange(problem.batch + 1, dtype=torch.int32, device=device)
        return Inputs(
            draw(problem.batch * problem.new, problem.heads, HEAD_DIM),
            draw(problem.batch * pages, problem.page, HEAD_DIM).to(problem.cache),
            order.int().view(problem.batch, pages),
            counts * problem.new,
            torch.full((problem.batch,), problem.keys, dtype=torch.int32, device=device),
        )

    @staticmethod
    def reference(problem: Problem, x: Inputs, passes: tuple[str, ...]) -> list[Tensor]:
        """Return fp32 attention of the sequences that are looked at."""
        found = []
        key = torch.arange(problem.keys, device=x.q.device)
        last = torch.arange(problem.new, device=x.q.device) + problem.keys - problem.new
        for b in problem.compared:
            # indexing knows no FP8
            raw = x.cache.view(torch.uint8) if problem.cache == FP8 else x.cache
            keys = raw[x.table[b].long()].view(problem.cache).float()
            keys = keys.flatten(0, 1)[: problem.keys]
            q = x.q[b * problem.new : (b + 1) * problem.new].float().transpose(0, 1)
            hidden = key > last[:, None]
            out = attend(q, keys, keys[:, :HEAD_DIM_V], None, SCALE, hidden=hidden).out
            found.append(out.transpose(0, 1))
        return found

    @staticmethod
    def judge(problem: Problem, one: str, got: Any, expected: Any) -> tuple[bool, float]:
        mine = got.unflatten(0, (problem.batch, problem.new))[problem.compared]
        error = relative_error(mine, torch.stack(expected))
        return error <= TOLERANCE, error

    def numbers(self, problem: Problem, one: str, ms: float) -> Row:
        return {"tflops": problem.flops(one) / ms / 1e9, "gbps": problem.bytes(one) / ms / 1e6}

    def unit(self, family: str) -> str:
        return "gbps" if family == "decode" else "tflops"

    def graph_below(self, problem: Problem, one: str) -> float:
        return 0.05

    def summary(self, found: Row) -> str:
        """Return every number of each case."""
        lines = []
        for row in found["results"]:
            if "ms" in row:
                copy = copy_gbps(found, row)
                share = row["gbps"] / copy if copy else None
                cells = [f"{row['ms']:.3f}", f"{row['tflops']:.1f}", f"{row['gbps']:.0f}"]
                lines.append([row["case"], row["provider"], *cells, report.number(share)])
        return report.markdown(["case", "provider", "ms", "TFLOP/s", "GB/s", "of copy"], lines)


if __name__ == "__main__":
    sys.exit(Mla(__doc__, __file__).main())
