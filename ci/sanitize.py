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

FpSan runs each of its cases twice, by the kernel for Hopper and by the portable one, and the
finding is that an output is not the reference's (``payloads.py``). docs/testing.md says what each
tool can see. ``--merge`` writes the first file from the others, which several calls wrote.
"""

from __future__ import annotations

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
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from device_cases import ALGEBRA, CASES, Case
from errors import is_right, measure
from results import OURS, ROOT, about, chosen, commit, parser_of, write

# what a case's process has in its environment, by tool
TOOLS = {
    "consan": {"TRITON_INSTRUMENTATION_MODE": "consan"},
    # a number of 16 bits is the lower half of one of 32, so that sums may round as they go
    "fpsan": {"TRITON_INSTRUMENTATION_MODE": "fpsan", "TRITON_FPSAN_HOMOMORPHIC_CASTS": "1"},
    # so that each tensor has an end that the tool knows
    "memcheck": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    "overflow": {"TRITON_DEBUG": "1"},
}
COMPUTE_SANITIZER = shutil.which(
    "compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
)
# what all cases of a file have in common
MACHINE = ("torch", "triton", "device", "capability")
RESULT = "sanitized case: "
# what ConSan's assertions and compute-sanitizer say
FINDINGS = [
    re.compile(r"(?:([\w.]+\.py:\d+): .*?)?Assertion [`'](.+?)[`'] failed"),  # the line, if known
    re.compile(r"=+ (Invalid .+|Uninitialized .+|Misaligned .+|Program hit .+)"),
    re.compile(r"(device-side assert triggered)"),
]


# ---- one case, in a process of its own


def hash_of(x: Any) -> str:
    """Return the hash of a tensor's bits."""
    import torch

    return hashlib.sha256(x.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()


def _prepare(device: str, tool: str, launched: set[str]) -> None:
    """Give kernels memory that is 0, as sanitizers expect, and keep the names of those launched."""
    import torch
    import triton
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime import _allocation

    def allocate(size: int, _alignment: int, _stream: Any) -> Any:
        return torch.zeros(size, dtype=torch.int8, device=device)

    # a default, since gradients are launched from a thread that has none of what is set here
    allocator: Any = contextvars.ContextVar("allocator", default=allocate)
    for kept in ("_allocator", "_profile_allocator"):
        if hasattr(_allocation, kept):
            setattr(_allocation, kept, allocator)
    triton.knobs.runtime.launch_enter_hook.add(lambda told: launched.add(told.get()["name"]))
    if tool == "consan":
        # checks of integers, which it turns on, take minutes to build; they are a tool of their own
        parse, off = CUDABackend.parse_options, {"sanitize_overflow": False}
        CUDABackend.parse_options = lambda backend, options: parse(backend, {**options, **off})


def run_case(name: str, device: str, tool: str) -> None:
    """Run one case in this process, and print what is to be said of it."""
    import torch

    launched: set[str] = set()
    if device != "cpu":
        _prepare(device, tool, launched)
    told: dict[str, Any]
    if tool == "fpsan":
        case = ALGEBRA[name]
        told = {"results": hash_of(case.run(device)), "exact": hash_of(case.exact())}
    else:
        told = {"results": measure(CASES[name], device)}
    if device != "cpu":
        torch.cuda.synchronize()
    told.update(launched=sorted(launched), **about())
    print(RESULT + json.dumps(told), flush=True)


# ---- all cases


def has_fpsan() -> bool:
    """Say whether the Triton that is installed has FpSan."""
    from triton._C import libtriton

    return hasattr(libtriton.passes.ttgpuir, "add_fp_sanitizer")


def outcome_of(status: int, text: str) -> dict[str, Any]:
    """Read what a case's process said."""
    found = (m.groups() for pattern in FINDINGS for m in pattern.finditer(text))
    said = [": ".join(filter(None, groups)) for groups in found]
    line = next((x for x in text.splitlines() if x.startswith(RESULT)), None)
    told: dict[str, Any] = json.loads(line[len(RESULT) :]) if line else {}
    if said:
        return {"outcome": "finding", "findings": dict(Counter(said).most_common(5)), **told}
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
    told = {**hopper, "beside": portable["launched"]}
    if hopper["launched"] == portable["launched"]:
        return {**told, "outcome": "failed", "end": "one kernel served both"}
    findings = {
        f"{', '.join(run['launched'])}: not the reference's output": 1
        for run in (hopper, portable)
        if run["results"] != run["exact"]
    }
    return {**told, "outcome": "finding", "findings": findings} if findings else told


def _try(
    name: str, tool: str, device: str, cache: str, limit: float, changes: dict[str, str]
) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).resolve()), "--case", name]
    command += ["--device", device, "--tool", tool]
    if tool == "memcheck":
        options = ("--tool", "memcheck", "--error-exitcode", "99", "--print-limit", "5")
        command = [str(COMPUTE_SANITIZER), *options, *command]
    sources = [str(ROOT / "packages" / package / "src") for package in OURS]
    path = os.pathsep.join([*sources, os.environ.get("PYTHONPATH", "")])
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": f"{cache}/{tool}"}
    began = time.monotonic()
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **own, **TOOLS[tool], **changes},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit,
        )
        told = outcome_of(done.returncode, done.stdout.decode(errors="replace"))
    except subprocess.TimeoutExpired as slow:
        told = {"outcome": "timeout", "end": (slow.stdout or b"").decode(errors="replace")[-500:]}
    return {**told, "seconds": round(time.monotonic() - began, 1)}


def sanitize(
    tool: str, names: list[str], device: str, jobs: int, seconds: float, limit: float
) -> dict[str, Any]:
    """Try cases side by side; return what is said of each."""
    why = "no compute-sanitizer" if tool == "memcheck" and COMPUTE_SANITIZER is None else ""
    why = "this Triton has no FpSan" if tool == "fpsan" and not has_fpsan() else why
    if why:
        return {name: {"outcome": "not run", "why": why} for name in names}
    end = time.monotonic() + seconds
    found = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:

        def one(name: str) -> dict[str, Any]:
            left = end - time.monotonic()
            if left < 5:
                return {"outcome": "not run", "why": "the time was up"}
            given = name, tool, device, folder, min(limit, left)
            if tool != "fpsan":
                return _try(*given, {})
            both = [_try(*given, {ALGEBRA[name].switch: on}) for on in ("1", "0")]
            return {**compared(*both), "seconds": round(sum(x["seconds"] for x in both), 1)}

        for name, told in zip(names, pool.map(one, names), strict=True):
            found[name] = told
            print(f"{told['outcome']:8} {told.get('seconds', 0):6} s  {name}", flush=True)
            for finding, times in told.get("findings", {}).items():
                print(f"         {times} x {finding}", flush=True)
    return found


# ---- files


def _cases_of(tool: str) -> Mapping[str, Case]:
    return ALGEBRA if tool == "fpsan" else CASES


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
    found = {name: cases[name] for name in _cases_of(head["tool"]) if name in cases}
    (most, _), *others = Counter(told["commit"] for told in found.values()).most_common()
    return with_counts(head, ", ".join([most, *(f"{n} of them {x}" for x, n in others)]), found)


def with_counts(head: dict[str, Any], commit: str, cases: dict[str, Any]) -> dict[str, Any]:
    """Return what is written: the machine, how many cases had each outcome, and the cases."""
    counts = Counter(told["outcome"] for told in cases.values())
    return {**head, "commit": commit, "counts": dict(counts), "cases": cases}


def main() -> None:
    parser = parser_of(__doc__, has_cases=True)
    parser.add_argument("--tool", choices=TOOLS, default="consan")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--seconds", type=float, default=470, help="of all cases together")
    parser.add_argument("--limit", type=float, default=180, help="seconds of one case")
    parser.add_argument("--case", help="run this one here, as the others do in their processes")
    parser.add_argument("--list", action="store_true", help="print the cases and run none")
    parser.add_argument(
        "--merge", type=Path, nargs="+", metavar="FILE", help="write the first from the others"
    )
    given = parser.parse_args()
    names = [case.name for case in chosen(_cases_of(given.tool).values(), given)]
    if given.case:
        run_case(given.case, given.device, given.tool)
        return
    if given.list:
        print(*names, sep="\n")
        return
    if given.merge:
        given.json, *files = given.merge
        if not files:
            parser.error("--merge takes the file to write, and those to merge")
        told = merged([json.loads(file.read_text()) for file in files])
    else:
        found = sanitize(given.tool, names, given.device, given.jobs, given.seconds, given.limit)
        first: dict[str, Any] = next((t for t in found.values() if "torch" in t), {})
        head = {"tool": given.tool} | {key: first[key] for key in MACHINE if key in first}
        for one in found.values():
            # errors.py measures what is clean
            gone = (*MACHINE, *(("results", "exact") if one["outcome"] == "clean" else ()))
            for key in gone:
                one.pop(key, None)
        told = with_counts(head, commit(), found)
    write(told, given.json)
    print(json.dumps({key: value for key, value in told.items() if key != "cases"}))
    if not given.merge:
        sys.exit(bool(set(told["counts"]) - {"clean", "not run"}))


if __name__ == "__main__":
    main()
