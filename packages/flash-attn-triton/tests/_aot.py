"""Build the kernels that a call would launch, for a GPU that is not there.

The launchers run on meta tensors, with the platform named in the environment variable of
``attn_common``; what they would launch is compiled for that platform instead, with the very
arguments, so with the specialization that the GPU would see.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton
from attn_common import detect
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import KernelInterface

KIB = 1024


class Gpu(NamedTuple):
    target: GPUTarget
    shared_limit: int  # bytes that one block may use


GPUS = {
    "nvidia:sm_80": Gpu(GPUTarget("cuda", 80, 32), 163 * KIB),
    "nvidia:sm_90": Gpu(GPUTarget("cuda", 90, 32), 227 * KIB),
    "nvidia:sm_100": Gpu(GPUTarget("cuda", 100, 32), 227 * KIB),
    "amd:gfx90a": Gpu(GPUTarget("hip", "gfx90a", 64), 64 * KIB),
    "amd:gfx942": Gpu(GPUTarget("hip", "gfx942", 64), 64 * KIB),
    "amd:gfx950": Gpu(GPUTarget("hip", "gfx950", 64), 160 * KIB),
    "amd:gfx1100": Gpu(GPUTarget("hip", "gfx1100", 32), 64 * KIB),
}


class _Driver:
    """As much of a Triton driver as a launch looks at before it compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        # kernels keep what they compiled per device: no context sees another's
        return f"absent {self.target} {id(self)}"

    def get_current_stream(self, _device: Any) -> int:
        return 0


@contextlib.contextmanager
def absent_gpu(name: str) -> Iterator[None]:
    """Let Triton and ``attn_common`` believe in a GPU."""
    runtime = triton.runtime.driver
    before = runtime._active
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTN_COMMON_PLATFORM", name)
        # a meta tensor has no device index, so this is "the current device" to a launcher
        patch.setattr(torch.cuda, "current_device", lambda: None)
        detect.cache_clear()
        runtime.set_active(_Driver(GPUS[name].target))
        try:
            yield
        finally:
            runtime._active = before
    detect.cache_clear()


@dataclass
class Build:
    """One compiled kernel and what it takes."""

    kernel: str
    shared: int
    registers: int
    spilled: int  # bytes of local memory per thread (NVIDIA), vector registers (AMD)

    def __str__(self) -> str:
        return (
            f"{self.kernel}: {self.registers} registers, {self.spilled} spilled, "
            f"{self.shared / KIB:g} KiB shared"
        )


@contextlib.contextmanager
def compiling(name: str, folder: Path) -> Iterator[list[Build]]:
    """Compile every launch within for a GPU, instead of launching it."""
    builds: list[Build] = []

    def launcher(kernel: Any, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            binary = kernel.warmup(*args, grid=grid, **kwargs)
            builds.append(_inspect(kernel.__name__, binary, folder))

        return launch

    with absent_gpu(name), pytest.MonkeyPatch.context() as patch:
        patch.setattr(KernelInterface, "__getitem__", launcher)
        yield builds


@contextlib.contextmanager
def counting(name: str) -> Iterator[dict[str, set[str]]]:
    """Collect the variants of each kernel that the launches within would compile; none is."""
    variants: dict[str, set[str]] = {}

    def hook(*, key: Any, fn: Any, **_: Any) -> bool:
        variants.setdefault(fn.name, set()).add(str(key))
        return True  # do not compile

    with absent_gpu(name), pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "jit_cache_hook", hook)
        yield variants


class Launch(NamedTuple):
    kernel: str
    grid: tuple[int, ...]
    options: dict[str, Any]


@contextlib.contextmanager
def recording(name: str) -> Iterator[list[Launch]]:
    """Collect the launches within; nothing is compiled."""
    launches: list[Launch] = []

    def launcher(kernel: Any, grid: Any) -> Callable[..., None]:
        return lambda *_, **options: launches.append(Launch(kernel.__name__, grid, options))

    with absent_gpu(name), pytest.MonkeyPatch.context() as patch:
        patch.setattr(KernelInterface, "__getitem__", launcher)
        yield launches


def _inspect(kernel: str, binary: Any, folder: Path) -> Build:
    shared = binary.metadata.shared
    if "cubin" in binary.asm:
        path = folder / f"{kernel}.cubin"
        path.write_bytes(binary.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        command = [str(tool), "-res-usage", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        # stack holds what ptxas spills; local memory proper is not used by these kernels
        numbers = {key: int(n) for key, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
        return Build(kernel, shared, numbers["REG"], numbers["STACK"] + numbers["LOCAL"])
    assert binary.asm["hsaco"]
    text = binary.asm["amdgcn"]
    numbers = {key: int(n) for key, n in re.findall(r"\.(vgpr_\w*count):\s+(\d+)", text)}
    return Build(kernel, shared, numbers["vgpr_count"], numbers["vgpr_spill_count"])


@dataclass(frozen=True)
class Config:
    """What a build depends on; sizes of tensors are those of a typical call."""

    head_dim: int
    dtype: str = "bfloat16"
    head_dim_v: int | None = None
    causal: bool = True
    rich: bool = False  # every feature at once, packed
    heads_first: bool = False  # memory in the order of [batch, heads, tokens, head_dim]

    def __str__(self) -> str:
        dims = f"{self.head_dim}" + (f":{self.head_dim_v}" if self.head_dim_v else "")
        kind = "rich" if self.rich else "causal" if self.causal else "full"
        kind += "-heads_first" if self.heads_first else ""
        return f"d{dims}-{self.dtype}-{kind}"

    @property
    def is_fp8(self) -> bool:
        return self.dtype.startswith("float8")

    def tensors(self, seqlen: int = 1024) -> dict[str, Any]:
        """Meta tensors: q, k, v and the optional ones."""
        dtype, batch, heads = getattr(torch, self.dtype), 2, 8
        leading = (batch * seqlen,) if self.rich else (batch, seqlen)

        def meta(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device="meta")

        def tokens(heads: int, width: int) -> torch.Tensor:
            if self.heads_first:
                return meta(*leading[:-1], heads, leading[-1], width, dtype=dtype).transpose(-2, -3)
            return meta(*leading, heads, width, dtype=dtype)

        made: dict[str, Any] = {
            "q": tokens(heads, self.head_dim),
            "k": tokens(2, self.head_dim),
            "v": tokens(2, self.head_dim_v or self.head_dim),
        }
        names = ["cu_seqlens_q", "cu_seqlens_k", "seqused_k", "bias", "alibi_slopes", "sinks"]
        made.update(dict.fromkeys([*names, "rng_state"]))
        if self.rich:
            offsets = meta(batch + 1, dtype=torch.int32)
            wide = torch.float32 if self.is_fp8 else dtype
            made.update(
                cu_seqlens_q=offsets,
                cu_seqlens_k=offsets,
                seqused_k=meta(batch, dtype=torch.int32),
                bias=meta(batch, heads, seqlen, seqlen, dtype=wide),
                alibi_slopes=meta(batch, heads),
                sinks=meta(heads),
            )
            if not self.is_fp8:
                made["rng_state"] = meta(2, dtype=torch.int64)
        return made

    def options(self, seqlen: int = 1024) -> tuple[Any, ...]:
        """Return the operators' scalar arguments, from ``max_seqlen_q`` to ``dropout_p``."""
        left, right = (500, 0) if self.rich else (-1, 0 if self.causal else -1)
        capped, dropped = (30.0, 0.0 if self.is_fp8 else 0.1) if self.rich else (0.0, 0.0)
        return seqlen, seqlen, self.head_dim**-0.5, left, right, capped, dropped


def launch_forward(config: Config, seqlen: int = 1024) -> None:
    """Run the forward launcher on meta tensors."""
    from flash_attn_triton._kernels.forward import launch_forward as launch

    t = config.tensors(seqlen)
    rng_state = t.pop("rng_state")
    descales = [torch.empty(2, 2, device="meta")] * 3 if config.is_fp8 else [None] * 3
    out_dtype = torch.bfloat16 if config.is_fp8 else t["q"].dtype
    launch(*t.values(), *descales, None, rng_state, *config.options(seqlen), out_dtype)


def launch_backward(config: Config, seqlen: int = 1024) -> None:
    """Run the backward launcher on meta tensors."""
    from flash_attn_triton._kernels.backward import launch_backward as launch

    t = config.tensors(seqlen)
    q, k, v = t.pop("q"), t.pop("k"), t.pop("v")
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    packed = t["cu_seqlens_q"] is not None
    lse_size = q.shape[1::-1] if packed else (q.shape[0], q.shape[2], q.shape[1])
    lse = torch.empty(lse_size, device="meta")
    launch(out, q, k, v, out, lse, lse, *t.values(), *config.options(seqlen), config.rich)
