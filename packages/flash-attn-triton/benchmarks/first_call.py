"""Seconds of a process's first forward and backward: compiled on the spot, and shipped compiled.

Usage: python first_call.py [--runs 5]

Each run is a process of its own. It uses the GPU by a product of PyTorch's first, then calls. The
shipped kernels are built here by ``python -m flash_attn_triton compile``; their process has no
Triton. Results of both are compared bit for bit. Triton's cache is empty in the first compiled run
and holds the kernels in the others.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CALL = {"q": [2, 1024, 16, 128], "k": [2, 1024, 4, 128], "v": [2, 1024, 4, 128]}
OPTIONS = {"causal": True, "deterministic": True}
SCRIPT = """
import json, sys, time
call, options, out, is_shipped = json.loads(sys.argv[1])
if is_shipped:
    sys.modules["triton"] = None
import torch
(torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")).sum().item()
times = [time.perf_counter()]
def lap():
    torch.cuda.synchronize()
    times.append(time.perf_counter())
from flash_attn_triton import flash_attn_func
lap()
random = torch.Generator("cuda").manual_seed(0)
x = [torch.randn(s, generator=random, device="cuda").bfloat16().requires_grad_()
     for s in call.values()]
torch.cuda.synchronize()
times.append(time.perf_counter())
found = [flash_attn_func(*x, **options)]
lap()
found += torch.autograd.grad(found[0], x, found[0].detach())
lap()
torch.save([t.detach().cpu() for t in found], out)
print(json.dumps([times[1] - times[0], times[3] - times[2], times[4] - times[3]]))
"""


def run(folder: Path, name: str, *, kernels: Path | None = None) -> list[float]:
    """Return the seconds of import, forward and backward in a process of its own."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(folder / "triton")}
    environment["ATTN_KERNELS"] = "" if kernels is None else str(kernels)
    told = json.dumps([CALL, OPTIONS, str(folder / f"{name}.pt"), kernels is not None])
    command = [sys.executable, "-c", SCRIPT, told]
    ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


def main() -> None:
    """Build, run, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    import torch

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = {k: ["bfloat16", shape] for k, shape in CALL.items()} | OPTIONS
        call = {"function": "flash_attn_func", "backward": True, "arguments": arguments}
        (folder / "calls.jsonl").write_text(json.dumps(call))
        gpu = "sm_{}{}".format(*torch.cuda.get_device_capability())
        command = [sys.executable, "-m", "flash_attn_triton", "compile", f"--gpu={gpu}"]
        command += [f"--calls={folder / 'calls.jsonl'}", f"--out={folder / 'kernels'}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        print(f"{torch.cuda.get_device_name()}, seconds: import, forward, backward; all")
        rows = [("compiled, cold", [run(folder, "compiled")])]
        rows.append(("compiled, Triton's cache", [run(folder, "compiled") for _ in range(runs)]))
        shipped = [run(folder, "shipped", kernels=folder / "kernels") for _ in range(runs)]
        rows.append(("shipped", shipped))
        pairs = zip(*(torch.load(folder / f"{x}.pt") for x in ("compiled", "shipped")), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)
        for title, times in rows:
            median = [statistics.median(x) for x in zip(*times, strict=True)]
            shown = ", ".join(f"{x:.3f}" for x in median)
            print(f"{title}: {shown}; {statistics.median(map(sum, times)):.3f}")


if __name__ == "__main__":
    main()
