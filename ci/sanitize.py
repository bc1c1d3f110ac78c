"""Run every kernel for Hopper under a sanitizer, on a machine with a GPU.

    python ci/sanitize.py --json sanitize.json                  # Triton's concurrency sanitizer
    python ci/sanitize.py --tool memcheck --json memcheck.json  # compute-sanitizer
    python ci/sanitize.py --tool overflow --json overflow.json  # integers wrap nowhere
    python ci/sanitize.py --tool fpsan --json fpsan.json        # FpSan of Triton 3.9
    python ci/sanitize.py --merge all.json some.json others.json

The cases are those of ``device_cases.py``. Each runs in a process of its own with a time limit,
several side by side, as device code that fails leaves its process without a GPU. Outcomes: clean;
finding, with what the tool said; wrong, where results are beyond their bounds; failed, with the
end of the error; timeout; not run, if the time was up before.

Overflow is Triton's own check (``TRITON_DEBUG=1``): no sum, difference or product of integers of
up to 32 bits wraps, but where the kernel says that it is to. ConSan knows copies, products and
barriers in shared memory. It knows no barriers of the hardware by number, which these kernels reach
through inline assembly: what they order looks like a race to it. A kernel stops at its first
finding. FpSan runs each of its cases twice, by the kernel for Hopper and by the portable one, and
the finding is that an output is not the definition's (``payloads.py``). See docs/testing.md.

``--merge`` writes the first file from the others, which several calls wrote. A later file's cases
replace those of earlier ones, and each case names its commit.
"""

from __future__ import annotations

import argparse
import contextvars
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from device_cases import ALGEBRA, CASES, ROOT
from errors import about, is_right, measure
from mutants import commit

TOOLS = ("consan", "fpsan", "memcheck", "overflow")
# what all cases of a file have in common
MACHINE = ("torch", "triton", "device", "capability")
RESULT = "sanitized case: "
# what ConSan's assertions and compute-sanitizer say
FINDINGS = [
    re.compile(r"(?:([\w.]+\.py:\d+): .*?)?Assertion [`'](.+?)[`'] failed"),  # the line, if known
    re.compile(r"=+ (Invalid .+|Uninitialized .+|Misaligned .+|Program hit .+)"),
    re.compile(r"(device-side assert triggered)"),
]


def check_no_overflow() -> None:
    """Leave out Triton's checks of integers, which ConSan turns on and which take minutes to build.

    They are a tool of their own.
    """
    from triton.backends.nvidia.compiler import CUDABackend

    parse = CUDABackend.parse_options
    CUDABackend.parse_options = lambda backend, options: parse(
        backend, {**options, "sanitize_overflow": False}
    )


def hash_of(x: Any) -> str:
    """Return the hash of a tensor's bits."""
    import torch

    return hashlib.sha256(x.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()


def run_case(name: str, device: str, tool: str) -> None:
    """Run one case in this process, and print what is to be said of it."""
    import torch
    import triton
    from triton.runtime import _allocation

    def allocate(size: int, _alignment: int, _stream: Any) -> Any:
        # the sanitizers expect memory that is 0
        return torch.zeros(size, dtype=torch.int8, device=device)

    launched: set[str] = set()
    if tool == "consan":
        check_no_overflow()
    if device != "cpu":
        # a default, since gradients are launched from a thread that has none of what is set here
        allocator: Any = contextvars.ContextVar("allocator", default=allocate)
        for kept in ("_allocator", "_profile_allocator"):
            if hasattr(_allocation, kept):
                setattr(_allocation, kept, allocator)
        hook = triton.knobs.runtime.launch_enter_hook
        hook.add(lambda metadata: launched.add(metadata.get()["name"]))
    if tool == "fpsan":
        case = ALGEBRA[name]
        told: dict[str, Any] = {
            "results": hash_of(case.run(device)),
            "exact": hash_of(case.exact()),
        }
    else:
        told = {"results": measure(CASES[name], device)}
    if device != "cpu":
        torch.cuda.synchronize()
    told.update(launched=sorted(launched), **about())
    print(RESULT + json.dumps(told), flush=True)


def sanitizer() -> str | None:
    """Return the path of compute-sanitizer."""
    usual = Path("/usr/local/cuda/bin/compute-sanitizer")
    return shutil.which("compute-sanitizer") or (str(usual) if usual.exists() else None)


def has_fpsan() -> bool:
    """Say whether the Triton that is installed has FpSan."""
    from triton._C import libtriton

    return hasattr(libtriton.passes.ttgpuir, "add_fp_sanitizer")


def command_of(tool: str, name: str, device: str) -> list[str]:
    own = [sys.executable, str(Path(__file__).resolve()), "--case", name, "--device", device]
    own += ["--tool", tool]
    if tool != "memcheck":
        return own
    options = ("--tool", "memcheck", "--error-exitcode", "99", "--print-limit", "5")
    return [sanitizer() or "compute-sanitizer", *options, *own]


def environment_of(tool: str, cache: Path) -> dict[str, str]:
    """Return what a case's process has in its environment."""
    names = [p.name for p in (ROOT / "packages").iterdir()]
    sources = [str(ROOT / "packages" / name / "src") for name in sorted(names)]
    path = os.pathsep.join([*sources, os.environ.get("PYTHONPATH", "")])
    made = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    made["TRITON_CACHE_DIR"] = str(cache / tool)
    if tool in ("consan", "fpsan"):
        made["TRITON_INSTRUMENTATION_MODE"] = tool
    if tool == "fpsan":
        # a number of 16 bits is the lower half of one of 32, so that sums may round as they go
        made["TRITON_FPSAN_HOMOMORPHIC_CASTS"] = "1"
    if tool == "overflow":
        made["TRITON_DEBUG"] = "1"
    if tool == "memcheck":
        # so that each tensor has an end that the tool knows
        made["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    return made


def outcome_of(status: int, text: str) -> dict[str, Any]:
    """Read what a case's process said."""
    found = (m.groups() for pattern in FINDINGS for m in pattern.finditer(text))
    said = [": ".join(filter(None, groups)) for groups in found]
    findings = dict(Counter(said).most_common(5))
    line = next((x for x in text.splitlines() if x.startswith(RESULT)), None)
    told: dict[str, Any] = json.loads(line[len(RESULT) :]) if line else {}
    if findings:
        return {"outcome": "finding", "findings": findings, **told}
    if status != 0 or line is None:
        return {"outcome": "failed", "status": status, "end": text[-1500:]}
    results = told["results"]
    # the hash of an output under FpSan is ``compared``
    right = isinstance(results, str) or is_right(results)
    return {"outcome": "clean" if right else "wrong", **told}


def compared(hopper: dict[str, Any], portable: dict[str, Any]) -> dict[str, Any]:
    """Return what is to be said of a call that two kernels served under FpSan."""
    for told in (hopper, portable):
        if told["outcome"] != "clean":
            return told
    kernels = {"launched": hopper["launched"], "beside": portable["launched"]}
    told = {**hopper, **kernels}
    if hopper["launched"] == portable["launched"]:
        return {**told, "outcome": "failed", "end": "one kernel served both"}
    findings = {
        f"{', '.join(run['launched'])}: not the definition's output": 1
        for run in (hopper, portable)
        if run["results"] != run["exact"]
    }
    return {**told, "outcome": "finding", "findings": findings} if findings else told


def try_case(tool: str, name: str, device: str, cache: Path, limit: float) -> dict[str, Any]:
    if tool != "fpsan":
        return _try(tool, name, device, cache, limit, {})
    switch = ALGEBRA[name].switch
    both = [_try(tool, name, device, cache, limit, {switch: on}) for on in ("1", "0")]
    return {**compared(*both), "seconds": round(sum(told["seconds"] for told in both), 1)}


def _try(
    tool: str, name: str, device: str, cache: Path, limit: float, changes: dict[str, str]
) -> dict[str, Any]:
    began = time.monotonic()
    try:
        done = subprocess.run(
            command_of(tool, name, device),
            env={**environment_of(tool, cache), **changes},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=limit,
        )
        told = outcome_of(done.returncode, done.stdout)
    except subprocess.TimeoutExpired as slow:
        said: Any = slow.stdout or b""
        text = said.decode(errors="replace") if isinstance(said, bytes) else str(said)
        told = {"outcome": "timeout", "end": text[-500:]}
    return {**told, "seconds": round(time.monotonic() - began, 1)}


def sanitize(
    tool: str, names: list[str], device: str, jobs: int, seconds: float, limit: float
) -> dict[str, Any]:
    """Try cases side by side; return what is said of each."""
    if tool == "memcheck" and sanitizer() is None:
        return {name: {"outcome": "not run", "why": "no compute-sanitizer"} for name in names}
    if tool == "fpsan" and not has_fpsan():
        return {name: {"outcome": "not run", "why": "this Triton has no FpSan"} for name in names}
    end = time.monotonic() + seconds
    found = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:

        def one(name: str) -> dict[str, Any]:
            left = end - time.monotonic()
            if left < 5:
                return {"outcome": "not run", "why": "the time was up"}
            return try_case(tool, name, device, Path(folder), min(limit, left))

        for name, told in zip(names, pool.map(one, names), strict=True):
            found[name] = told
            print(f"{told['outcome']:8} {told.get('seconds', 0):6} s  {name}", flush=True)
            for finding, times in told.get("findings", {}).items():
                print(f"         {times} x {finding}", flush=True)
    return found


def cases_of(tool: str) -> dict[str, Any]:
    return dict(ALGEBRA if tool == "fpsan" else CASES)


def merged(files: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what several calls found with one tool on one machine as that of one call.

    A case is as the last file says that has it, but what was not run, or not in time, replaces
    nothing. What is no case any more is left out.

    Raises:
        ValueError: The files are of several tools, versions or devices.
    """
    head: dict[str, Any] = {}
    cases: dict[str, dict[str, Any]] = {}
    for file in files:
        for key in ("tool", *MACHINE):
            if key in file and head.setdefault(key, file[key]) != file[key]:
                both = f"{head[key]!r} and {file[key]!r}"
                raise ValueError(f"{key} must be the same in files to merge, got {both}")
        for name, told in file["cases"].items():
            if name not in cases or told["outcome"] not in ("not run", "timeout"):
                cases[name] = {"commit": file["commit"], **told}
    found = {name: cases[name] for name in cases_of(head["tool"]) if name in cases}
    (most, _), *others = Counter(told["commit"] for told in found.values()).most_common()
    head["commit"] = ", ".join([most, *(f"{n} of them {commit}" for commit, n in others)])
    return head | {"counts": counts_of(found), "cases": found}


def counts_of(found: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Return how many cases had each outcome."""
    return dict(Counter(told["outcome"] for told in found.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tool", choices=TOOLS, default="consan")
    parser.add_argument("--package", default="", help="cases of one package")
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name has one of these")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--seconds", type=float, default=470, help="of all cases together")
    parser.add_argument("--limit", type=float, default=180, help="seconds of one case")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    parser.add_argument("--case", help="run this one here, as the others do in their processes")
    parser.add_argument("--list", action="store_true", help="print the cases and run none")
    parser.add_argument(
        "--merge", type=Path, nargs="+", metavar="FILE", help="write the first from the others"
    )
    given = parser.parse_args()
    if given.case:
        run_case(given.case, given.device, given.tool)
        return
    if given.merge:
        out, *files = given.merge
        if not files:
            parser.error("--merge takes the file to write, and those to merge")
        write(merged([json.loads(file.read_text()) for file in files]), out)
        return
    names = [
        name
        for name, case in cases_of(given.tool).items()
        if given.package in case.package and any(part in name for part in given.only)
    ]
    if given.list:
        print(*names, sep="\n")
        return
    found = sanitize(given.tool, names, given.device, given.jobs, given.seconds, given.limit)
    first: dict[str, Any] = next((t for t in found.values() if "torch" in t), {})
    head = {"tool": given.tool, "commit": commit()}
    head |= {key: first[key] for key in MACHINE if key in first}
    for told in found.values():
        for key in MACHINE:
            told.pop(key, None)
        if told["outcome"] == "clean":
            # errors.py measures
            told.pop("results", None)
            told.pop("exact", None)
    counts = counts_of(found)
    write({**head, "counts": counts, "cases": found}, given.json)
    sys.exit(bool(set(counts) - {"clean", "not run"}))


def write(told: dict[str, Any], path: Path | None) -> None:
    """Print what was found but for its cases, and write it all to a file, if there is one."""
    if path:
        path.write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps({key: value for key, value in told.items() if key != "cases"}))


if __name__ == "__main__":
    main()
