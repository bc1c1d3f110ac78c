"""Run an example kernel on the simulator, check it, and draw its timeline.

python examples/run.py [tiled_matmul | softmax | rms_norm] [--html FILE] [--target trn2]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from nki_paged_attn.sim import cost, load, simulate, write_timeline

HERE = Path(__file__).parent


def example(name: str, rng: np.random.Generator):
    """Return the kernel of an example, its arguments, and the result in NumPy."""
    module = load(HERE / f"{name}.py")
    x = rng.standard_normal((256, 384)).astype(np.float32)
    if name == "tiled_matmul":
        b = rng.standard_normal((256, 640)).astype(np.float32)
        return module.tiled_matmul_kernel, (x, b), x.T @ b
    if name == "softmax":
        powers = np.exp(x - x.max(axis=1, keepdims=True))
        return module.softmax_kernel, (x,), powers / powers.sum(axis=1, keepdims=True)
    weight = rng.standard_normal((1, 384)).astype(np.float32)
    norm = np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-6)
    return module.rms_norm_kernel, (x, weight, 1e-6), x / norm * weight


def main(default: str = "tiled_matmul") -> None:
    parser = argparse.ArgumentParser(
        formatter_class=argparse.ArgumentDefaultsHelpFormatter, description=__doc__.splitlines()[0]
    )
    names = ("tiled_matmul", "softmax", "rms_norm")
    parser.add_argument("name", nargs="?", default=default, choices=names)
    parser.add_argument("--target", default="trn2", help="trn1, trn2 or trn3")
    parser.add_argument("--html", help="where to write the timeline")
    arguments = parser.parse_args()
    kernel, inputs, expected = example(arguments.name, np.random.default_rng(0))
    run = simulate(kernel, arguments.target)
    error = np.abs(run(*inputs) - expected).max()
    print(f"{arguments.name}: largest error {error:.1e}")
    print(cost(run.trace))
    if arguments.html:
        write_timeline(run.trace, arguments.html)


if __name__ == "__main__":
    main()
