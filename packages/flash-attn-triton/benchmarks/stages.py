"""What bounds the forward in FP8 on Hopper: the kernel with a stage of its loop left out.

    python benchmarks/stages.py --json results/h200-fp8-stages.json

Results without a stage are wrong; only their time is of interest. Each variant is a copy of the
package in which lines of the loop over keys are replaced, and runs in a process of its own. All
compile at once, then each in turn runs for a while, long enough for clock and power to settle.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]

TOKENS, HEADS, HEAD_DIM = 16384, 16, 128
KERNEL = Path("_kernels", "hopper", "fp8.py")
EXPONENTIAL = "        e = gl.exp2(s * factor - (pivot - SHIFT)[:, None])  # [ROWS, BLOCK_N]\n"
MAXIMUM = "        m_new = gl.maximum(m, gl.max(s, 1) * factor)  # [ROWS]\n"
ADDITION = "        o = o * gl.convert_layout(shrink, gl.SliceLayout(1, LAYOUT))[:, None] + part\n"
SUMS = "        l = l * gl.convert_layout(alpha, L)[:, None] + row_sums(e)  # [ROWS, 4]\n"
NO_EXPONENTIAL = (EXPONENTIAL, EXPONENTIAL.replace("gl.exp2(", "("))
NO_MAXIMUM = (MAXIMUM, "        m_new = m\n")
NO_ADDITION = (ADDITION, "        o = part\n")
VARIANTS: dict[str, list[tuple[str, str]]] = {
    "bf16": [],
    "whole": [],
    "without the exponentials": [NO_EXPONENTIAL],
    "without the maxima": [NO_MAXIMUM],
    "without adding products in fp32": [NO_ADDITION],
    "without all of these": [NO_EXPONENTIAL, NO_MAXIMUM, NO_ADDITION],
    "products and rounding alone": [
        (EXPONENTIAL, "        e = s\n"),
        NO_MAXIMUM,
        NO_ADDITION,
        (SUMS, ""),
    ],
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="turns that the variants take")
    add("--seconds", type=float, default=0.7, help="how long a variant runs in its turn")
    add("--json", type=Path, help="write all numbers there")
    add("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def write_variant(folder: Path, replacements: list[tuple[str, str]]) -> None:
    """Copy the package, and replace lines of its loop."""
    found = importlib.util.find_spec("flash_attn_triton")
    assert found is not None
    assert found.origin is not None
    package = folder / "flash_attn_triton"
    shutil.copytree(Path(found.origin).parent, package)
    text = (package / KERNEL).read_text()
    for old, new in replacements:
        if old not in text:
            raise LookupError(f"the kernel has no longer {old!r}")
        text = text.replace(old, new)
    (package / KERNEL).write_text(text)


class Child:
    """A process that has a variant compiled, and runs it when it is asked to."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.runs: list[Row] = []
        paths = [str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child", "bf16" if name == "bf16" else "fp8"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, request: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def run_child(kind: str) -> int:
    """Answer each line, a number of seconds, with the milliseconds of a call."""
    from flash_attn_triton import flash_attn_func

    size = (1, TOKENS, HEADS, HEAD_DIM)
    dtype = torch.bfloat16 if kind == "bf16" else torch.float8_e4m3fn
    q, k, v = (torch.randn(size, device="cuda").to(dtype) for _ in range(3))
    flash_attn_func(q, k, v)
    torch.cuda.synchronize()
    for line in sys.stdin:
        end = time.monotonic() + float(line)
        took = []
        while time.monotonic() < end:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(10):
                flash_attn_func(q, k, v)
            stop.record()
            stop.synchronize()
            took.append(start.elapsed_time(stop) / 10)
        print(statistics.median(took), flush=True)
    return 0


@contextlib.contextmanager
def sampled() -> Iterator[Row]:
    """Sample clock and power within."""
    row: Row = {}
    query = ["--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "20"]
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = ["nvidia-smi", "-i", device, *query]
    sampler = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert sampler.stdout is not None
    sampler.stdout.readline()  # it has begun
    try:
        yield row
    finally:
        sampler.terminate()
        lines = sampler.communicate()[0].splitlines()
    numbers = [[float(x) for x in line.split(",")] for line in lines if line.count(",") == 1]
    # what the GPU does at first is not what it goes on with
    numbers = numbers[len(numbers) // 2 :]
    if numbers:
        clocks, watts = zip(*numbers, strict=True)
        row |= {"mhz": statistics.median(clocks), "watts": statistics.median(watts)}


def main() -> int:
    arguments = parse_arguments()
    if arguments.child:
        return run_child(arguments.child)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        children = []
        for i, (name, replacements) in enumerate(VARIANTS.items()):
            write_variant(Path(temporary, str(i)), replacements)
            children.append(Child(name, Path(temporary, str(i))))
            stack.callback(children[-1].close)
        for child in children:
            child.ask("0.01")  # returns when it has compiled
        for _ in range(arguments.rounds):
            for child in children:
                with sampled() as row:
                    row["ms"] = float(child.ask(str(arguments.seconds)))
                child.runs.append(row)
    flops = 4 * TOKENS**2 * HEADS * HEAD_DIM
    for child in children:
        names = set.intersection(*(set(run) for run in child.runs))
        row = {name: statistics.median(run[name] for run in child.runs) for name in sorted(names)}
        rows.append({"variant": child.name, **row, "tflops": flops / row["ms"] / 1e9})
        print(json.dumps(rows[-1]))
    if arguments.json:
        found = {
            "device": torch.cuda.get_device_name(),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "torch": torch.__version__,
            "tokens": TOKENS,
            "heads": HEADS,
            "head_dim": HEAD_DIM,
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
