"""Build the kernels that a call would launch, for an absent GPU.

The launchers run on meta tensors, with the platform set by the environment variable of
``attn_common``. Each launch is compiled for that platform instead, with its arguments and so with
the same specialisation as on the GPU. A merge builds the principal configurations of each kernel;
``ATTN_AOT=all`` builds every shipped one. With ``ATTN_AOT=parse`` only Triton's front end runs,
which is quick, and a test ends after it. With ``ATTN_AOT_ASM`` set to a folder, the normalised
assembly of every build is written there, to compare two checkouts.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton
from attn_common import detect
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler import code_generator
from triton.runtime.jit import KernelInterface

from .tiers import Parsed

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


def chosen(everything: Iterable[Any], principal: Iterable[Any]) -> list[Any]:
    """Return the cases to build: the principal ones, or all with ``ATTN_AOT=all``."""
    rest = everything if os.environ.get("ATTN_AOT") == "all" else ()
    return list(dict.fromkeys([*principal, *rest]))


def _parse_only() -> bool:
    return os.environ.get("ATTN_AOT") == "parse"


def _stop_after_parsing(patch: pytest.MonkeyPatch) -> None:
    """End each build before Triton's own passes."""

    def stop(*_: Any) -> None:
        raise Parsed

    def add_stages(_backend: Any, stages: dict[str, Any], *_: Any, **__: Any) -> None:
        stages.update(ttir=stop, ttgir=stop, glir=stop)  # Triton's first stage, and Gluon's

    for backend in backends.values():
        patch.setattr(backend.compiler, "add_stages", add_stages)


class _Driver:
    """The part of a Triton driver that a launch uses before it compiles."""

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


@contextlib.contextmanager
def absent_gpu(name: str) -> Iterator[None]:
    """Make Triton and ``attn_common`` use an absent GPU."""
    runtime = triton.runtime.driver
    before = runtime._active
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTN_COMMON_PLATFORM", name)
        # the device index of a meta tensor is None: a launcher takes it for the current device
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
    """One compiled kernel and its resources."""

    kernel: str
    shared: int
    registers: int
    spilled: int  # bytes of local memory per thread (NVIDIA), vector registers (AMD)
    unset: tuple[str, ...] = ()  # instructions that read a uniform register before it is set
    sass: str = ""  # the disassembly (NVIDIA)
    products: frozenset[str] = frozenset()  # see ``products_of``

    def __str__(self) -> str:
        return (
            f"{self.kernel}: {self.registers} registers, {self.spilled} spilled, "
            f"{self.shared / KIB:g} KiB shared"
        )


def _structure(value: Any) -> Any:
    """Return the fields of a structure and of nested structures."""
    if not isinstance(value, triton.language.tuple):
        return None
    return tuple(value.type.fields or ()), tuple(map(_structure, value.values))


def refuse_mixed_structures(patch: pytest.MonkeyPatch) -> None:
    """Raise if one body of a jit function would serve structures with different fields.

    Triton caches bodies by the types of their arguments, without the names of fields. A second
    structure with the same types but other fields gets the body of the first, which then reads the
    wrong fields.
    """
    module, bodies, given = None, {}, []
    call, mangle = code_generator.CodeGenerator.call_JitFunction, code_generator.mangle_fn

    def checked_call(self: Any, fn: Any, args: Any, kwargs: Any, *rest: Any, **more: Any) -> Any:
        nonlocal module
        if self.module is not module:
            module = self.module
            bodies.clear()
        args = tuple(args)  # read twice
        bound = inspect.signature(fn.fn).bind(*args, **kwargs).arguments
        given.append({name: _structure(value) for name, value in bound.items()})
        return call(self, fn, args, kwargs, *rest, **more)

    def checked_mangle(name: str, *rest: Any) -> str:
        mangled = mangle(name, *rest)
        if given:
            structures = given.pop()
            if bodies.setdefault(mangled, structures) != structures:
                raise TypeError(f"{name}: one body for {bodies[mangled]} and for {structures}")
        return mangled

    patch.setattr(code_generator.CodeGenerator, "call_JitFunction", checked_call)
    patch.setattr(code_generator, "mangle_fn", checked_mangle)


@contextlib.contextmanager
def compiling(name: str, folder: Path) -> Iterator[list[Build]]:
    """Compile every launch in this context for a GPU instead of launching."""
    builds: list[Build] = []

    def launcher(kernel: Any, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            try:
                binary = kernel.warmup(*args, grid=grid, **kwargs)
            except Parsed:
                return
            builds.append(_inspect(kernel.__name__, binary, folder))

        return launch

    with absent_gpu(name), pytest.MonkeyPatch.context() as patch:
        patch.setattr(KernelInterface, "__getitem__", launcher)
        refuse_mixed_structures(patch)
        if _parse_only():
            _stop_after_parsing(patch)
        yield builds
        if _parse_only():
            raise Parsed


@contextlib.contextmanager
def counting(name: str) -> Iterator[dict[str, set[str]]]:
    """Collect the variants of each kernel that launches would compile; compile nothing."""
    variants: dict[str, set[str]] = {}

    def hook(*, key: Any, fn: Any, **_: Any) -> bool:
        variants.setdefault(fn.name, set()).add(str(key))
        return True  # do not compile

    with absent_gpu(name), pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "jit_cache_hook", hook)
        yield variants


@contextlib.contextmanager
def compiled_forms() -> Iterator[dict[tuple[str, str], set[str]]]:
    """Collect the compiled variants by kernel, constants and dtypes.

    Variants differ in integer widths and alignment, which change with the lengths of calls.
    """
    variants: dict[tuple[str, str], set[str]] = {}

    def hook(*, key: Any, fn: Any, **_: Any) -> None:
        form = re.sub(r"\('i(32|64)', [^)]*\)", "integer", str(key))
        form = re.sub(r"\('\*(\w+)', '\w*'\)", r"pointer to \1", form)
        variants.setdefault((fn.name, form), set()).add(str(key))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "jit_cache_hook", hook)
        yield variants


class Launch(NamedTuple):
    kernel: str
    grid: tuple[int, ...]
    options: dict[str, Any]


@contextlib.contextmanager
def recording(name: str) -> Iterator[list[Launch]]:
    """Collect the launches in this context; compile nothing."""
    launches: list[Launch] = []

    def launcher(kernel: Any, grid: Any) -> Callable[..., None]:
        def launch(*_: Any, **options: Any) -> None:
            # list the fields of structures of constants by name
            named: dict[str, Any] = {}
            for name, value in options.items():
                named |= value._asdict() if hasattr(value, "_asdict") else {name: value}
            launches.append(Launch(kernel.__name__, grid, named))

        return launch

    with absent_gpu(name), pytest.MonkeyPatch.context() as patch:
        patch.setattr(KernelInterface, "__getitem__", launcher)
        yield launches


def _inspect(kernel: str, binary: Any, folder: Path) -> Build:
    shared = binary.metadata.shared
    if keep := os.environ.get("ATTN_AOT_ASM"):
        _keep_assembly(kernel, binary.asm, Path(keep))
    if "cubin" in binary.asm:
        path = folder / f"{kernel}.cubin"
        path.write_bytes(binary.asm["cubin"])
        text = _run("cuobjdump", "-res-usage", path)
        # ptxas spills to the stack; these kernels do not use other local memory
        numbers = {key: int(n) for key, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
        spilled, sass = numbers["STACK"] + numbers["LOCAL"], _run("nvdisasm", "-c", path)
        unset, products = reads_of_unset(sass), products_of(binary.asm["ttgir"])
        return Build(kernel, shared, numbers["REG"], spilled, unset, sass, products)
    assert binary.asm["hsaco"]
    text = binary.asm["amdgcn"]
    numbers = {key: int(n) for key, n in re.findall(r"\.(vgpr_\w*count):\s+(\d+)", text)}
    registers, spilled = numbers["vgpr_count"], numbers["vgpr_spill_count"]
    products = products_of(binary.asm["ttgir"])
    return Build(kernel, shared, registers, spilled, products=products)


def products_of(ttgir: str) -> frozenset[str]:
    """Return the types of matrix products and of sums of floats, with their layouts written out.

    Two builds with equal types multiply by the same instructions and sum rows in the same order.
    """
    layouts = dict(re.findall(r"^(#\w+) = (#ttg.*)$", ttgir, re.MULTILINE))
    found = re.findall(r"(?:dot|dot_scaled) [^\n]* : ([^\n]*?)(?: loc|$)", ttgir, re.MULTILINE)
    found += re.findall(r"^ *\}\) : \((tensor<[0-9x]+f.*?>)\) -> ", ttgir, re.MULTILINE)
    # the layout of operands in shared memory does not change results
    kept = (re.sub(r"!ttg\.memdesc<(\w+).*?(?:>|$)", r"\1", x) for x in found)
    return frozenset(re.sub(r"#\w+\b(?!\.)", lambda m: layouts.get(m[0], m[0]), x) for x in kept)


def _run(tool: str, *arguments: str | Path) -> str:
    """Run one of the NVIDIA tools that Triton includes; return its output."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    command = [str(path), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _keep_assembly(kernel: str, asm: dict[str, Any], folder: Path) -> None:
    """Write a build's PTX or AMD assembly without kernel name, line data and comments."""
    kind = "ptx" if "ptx" in asm else "amdgcn"
    test = os.environ.get("PYTEST_CURRENT_TEST", "").split(" (")[0].split("/")[-1]
    name = f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', test)}-{kernel.strip('_')}"
    lines = (re.split("//| ; ", x)[0].rstrip() for x in asm[kind].split(".section")[0].splitlines())
    noise = re.compile(r"\s*(\.loc|\.file|;|$|\$L__tmp|\.?Ltmp|\.?Lfunc_|\.cfi|\.?Linfo)")
    text = "\n".join(x for x in lines if not noise.match(x)).replace(kernel, "KERNEL")
    folder.mkdir(parents=True, exist_ok=True)
    paths = (folder / f"{name}-{n}.{kind}" for n in itertools.count())
    next(path for path in paths if not path.exists()).write_text(text)


def reads_of_unset(code: str) -> tuple[str, ...]:
    """Return the instructions that compute with a uniform register that was never set before.

    ptxas 12.8 sometimes emits them for the addresses of Hopper's products in loops whose loads are
    not asynchronous: wrong numbers, and reads out of range. Only arithmetic is checked: products
    name registers that they do not read, and one half of a copied pair may be unused.
    """
    found, known = [], set()
    for line in code.splitlines():
        if line.startswith(".text."):
            known = set()
        matched = re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T0-9]+ )?([A-Z0-9_.]+) (.*?);", line)
        if not matched:
            continue
        operation, arguments = matched.groups()
        registers = [int(number) for number in re.findall(r"\bUR(\d+)", arguments)]
        if not registers:
            continue
        sets = re.match(r"(U?P\w+, )*UR\d", arguments) and operation.startswith(
            ("U", "R2UR", "S2UR", "CS2UR", "LDCU", "VOTEU", "REDUX")
        )
        reads = registers[1:] if sets else registers
        if sets and not set(reads) <= known:
            if operation == "UMOV":
                known.discard(registers[0])
                continue
            found.append(f"{operation} {arguments}")
        if sets:
            width = 4 if ".128" in operation else 2 if re.search(r"\.(64|WIDE)", operation) else 1
            known.update(range(registers[0], registers[0] + width))
    return tuple(found)
