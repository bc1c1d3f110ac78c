"""Calls in a process without a compiler: no Triton, nothing on the path, a home without writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

# reads a module's functions and their calls, and writes results and the time of all calls
SCRIPT = """
import importlib, sys, time
sys.modules["triton"] = None
import torch
calls = torch.load("calls.pt", map_location="cuda")
(torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")).sum().item()
start = time.perf_counter()
package = importlib.import_module(sys.argv[1])
results = []
for name, arguments, backward in calls:
    leaves = [x.requires_grad_() for x in arguments.values() if backward and hasattr(x, "grad")
              and x.is_floating_point()]
    out = getattr(package, name)(**arguments)
    results.append([out, *(torch.autograd.grad(out, leaves, out.detach()) if backward else ())])
torch.cuda.synchronize()
print(time.perf_counter() - start)
torch.save([[x.detach().cpu() for x in found] for found in results], "results.pt")
"""


def compile_kernels(package: str, calls: list[tuple[str, dict[str, Any], bool]], out: Path) -> None:
    """Compile the kernels of calls into a folder, for the GPU of this machine."""
    lines = []
    for name, given, backward in calls:
        arguments = {
            key: [str(x.dtype).partition(".")[2], [*x.shape]] if hasattr(x, "shape") else x
            for key, x in given.items()
        }
        lines.append(json.dumps({"function": name, "backward": backward, "arguments": arguments}))
    path = out.parent / "calls.jsonl"
    path.write_text("\n".join(lines))
    gpu = "sm_{}{}".format(*torch.cuda.get_device_capability())
    command = [sys.executable, "-m", package, "compile", f"--gpu={gpu}", f"--calls={path}"]
    subprocess.run([*command, f"--out={out}"], check=True)


def run_bare(
    package: str, calls: list[tuple[str, dict[str, Any], bool]], kernels: Path, folder: Path
) -> tuple[list[list[torch.Tensor]], float]:
    """Run calls with the kernels of a folder alone; return results with gradients, and seconds.

    Each call is the name of a function, its arguments, and whether to take gradients.
    """
    torch.save(calls, folder / "calls.pt")
    home = folder / "home"
    home.mkdir(mode=0o555, exist_ok=True)
    kept = {k: v for k, v in os.environ.items() if k in ("LD_LIBRARY_PATH", "PYTHONPATH")}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, package],
        cwd=folder,
        env={**kept, "ATTN_KERNELS": str(kernels), "HOME": str(home), "PATH": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return torch.load(folder / "results.pt"), float(ran.stdout.split()[-1])
