"""Kernels compiled into a folder, for a GPU that need not be here; see ``shipped/folders.py``."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import triton
from attn_common import Platform, detect
from triton.backends.compiler import GPUTarget

from ..builds import WORKERS, Build
from ..shipped.folders import FORMAT, MANIFEST, Folder, hash_of, read, this_build
from .workers import cores

# CUDA's numbers of a tensor map's dtypes, where Triton's differ
DTYPES = {8: 10, 9: 8, 10: 9}
NUMBERS = "i32", "i64", "fp32"


class _AbsentDriver:
    """The part of a Triton driver that is used before a launch."""

    _count = itertools.count()

    def __init__(self, target: GPUTarget) -> None:
        self.target = target
        # kernels cache compilations per device: every context needs its own device
        self._device = f"absent {target} {next(self._count)}"

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return self._device

    def get_current_stream(self, _device: Any) -> int:
        return 0


@contextmanager
def compiling_for(target: GPUTarget) -> Iterator[None]:
    """Make Triton compile for a GPU that is not here."""
    runtime = triton.runtime.driver
    before = runtime._active
    runtime.set_active(_AbsentDriver(target))
    try:
        yield
    finally:
        runtime._active = before


def target_of(gpu: str) -> GPUTarget:
    """Return Triton's name of a GPU such as ``sm_90``."""
    return GPUTarget("cuda", int(gpu.removeprefix("sm_")), 32)


def ship(
    noted: list[Build],
    device: torch.device,
    out: Path,
    say: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[int, int]:
    """Compile noted launches, and add them to a folder; return how many, and how many it holds.

    Args:
        noted: the launches; those that the folder holds are not compiled again.
        device: a GPU, or meta: then the GPU that ``ATTN_COMMON_PLATFORM`` names.
        out: the folder, made where there is none.
        say: called with the numbers of kernels compiled and to compile, after each.

    Raises:
        NotImplementedError: the GPU is not NVIDIA's.
        ValueError: the folder holds kernels of another build.
    """
    platform = detect(device)
    if platform.vendor != "nvidia":
        raise NotImplementedError(f"out: kernels are shipped for NVIDIA's GPUs, not for {platform}")
    folder = _opened(out, platform)
    missing = {hash_of(x.form): x for x in noted}
    missing = {key: x for key, x in missing.items() if key not in folder.kernels}
    absent = device.type == "meta"
    with (
        compiling_for(target_of(platform.arch)) if absent else nullcontext(),
        ThreadPoolExecutor(min(WORKERS, cores())) as pool,
    ):
        built = pool.map(lambda x: x.launch.build(x.tensors, x.numbers, True), missing.values())
        pairs = zip(missing.items(), built, strict=True)
        for done, ((key, build), compiled) in enumerate(pairs, 1):
            code = compiled.asm["cubin"]
            digest = hashlib.sha256(code).hexdigest()
            name = f"{compiled.metadata.name}-{digest[:16]}.cubin"
            (out / name).write_bytes(code)
            kernel, *rest = build.form
            form = repr((kernel.path, *rest))
            entry = {"form": form, "code": name, "sha256": digest, **_needs_of(compiled)}
            folder.kernels[key] = entry
            say(done, len(missing))
    held = {"format": FORMAT, "build": folder.build._asdict(), "kernels": folder.kernels}
    (out / MANIFEST).write_text(json.dumps(held, indent=1, sort_keys=True) + "\n")
    return len(missing), len(folder.kernels)


def _opened(out: Path, platform: Platform) -> Folder:
    build = this_build(platform.arch)
    if not (out / MANIFEST).exists():
        out.mkdir(parents=True, exist_ok=True)
        return Folder(out, build, {})
    folder = read(out)
    if folder.build != build:
        raise ValueError(
            f"out: {out} holds kernels of {' '.join(folder.build)}, "
            f"these are of {' '.join(build)}: take another folder"
        )
    return folder


def _needs_of(compiled: Any) -> dict[str, Any]:
    """Return what a launch of a compiled kernel needs to know."""
    asked = compiled.metadata
    scratch = asked.global_scratch_size + asked.profile_scratch_size
    if scratch or asked.num_ctas != 1 or asked.launch_cooperative_grid:
        raise NotImplementedError(f"{asked.name} cannot be shipped: it needs more than a launch")
    parameters = list(_parameters(compiled.src.signature.values()))
    header = compiled.asm["ptx"].partition(".entry")[2].partition(")")[0]
    return {
        "symbol": asked.name,
        "shared": asked.shared,
        "threads": 32 * asked.num_warps,
        "early": bool(asked.launch_pdl),
        "parameters": parameters,
        # pointers to scratch memory behind them
        "scratch": header.count(".param") - len(parameters),
        "maps": [
            {
                "swizzle": x["swizzle"],
                "elem_size": x["elem_size"],
                "elem_type": DTYPES.get(x["elem_type"], x["elem_type"]),
                "block_size": list(x["block_size"]),
            }
            for x in asked.tensordesc_meta or ()
        ],
    }


def _parameters(signature: Any) -> Iterator[tuple[int, str]]:
    """Yield a kernel's parameters: the place among a launch's arguments, and the type."""
    place = 0
    for kind in signature:
        if kind.startswith("tensordesc"):  # the map, its shape and its strides
            shape = re.match(r"tensordesc<[^[>]*\[([^]]*)\]", kind)
            rank = shape[1].count(",") + 1
            kinds = ["map", *["i32"] * rank, *["i64"] * rank]
        else:
            kinds = ["pointer" if kind.startswith("*") else kind]
        for name in kinds:
            if name in ("pointer", "map", *NUMBERS):
                yield place, name
            elif name != "constexpr":
                raise NotImplementedError(
                    f"kernels with a parameter of type {name} are not shipped"
                )
            place += 1
