"""Build the wheel that carries a package's compiled kernels.

Usage: python ci/companions.py PACKAGE GPU KERNELS DIST

KERNELS holds folders that ``python -m <package> compile`` wrote, one for each Triton. The wheel
``<package>-kernels-<gpu>`` has an import package of its own, which the package finds by the entry
point group ``attn_kernels``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from results import ROOT

PROJECT = """[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "{package}-kernels-{short}"
version = "{version}"
description = "Compiled kernels of {package} {version} for {gpu}"
requires-python = ">=3.10"
license = "Apache-2.0"
license-files = ["LICENSE"]
classifiers = ["Private :: Do Not Upload"]
dependencies = ["{package}=={version}", "cuda-bindings>=12.9"]

[project.entry-points.attn_kernels]
{name} = "{own}"

[tool.hatch.build.targets.wheel]
packages = ["{own}"]
"""
# bytes that a wheel may have
MOST = 30 * 2**20


def build(package: str, gpu: str, kernels: Path, dist: Path) -> Path:
    """Build the wheel of a folder of kernels; return its path.

    Raises:
        ValueError: the kernels are not all of one version of the package and of the GPU, or the
            wheel would be larger than ``MOST``.
    """
    name, short = package.replace("-", "_"), gpu.replace("_", "")
    builds = [json.loads(x.read_text())["build"] for x in kernels.glob("*/manifest.json")]
    found = {(x["package"], x["version"], x["files"], x["gpu"]) for x in builds}
    if len(found) != 1 or {(x[0], x[3]) for x in found} != {(name, gpu)}:
        raise ValueError(f"{kernels} must hold kernels of one {package} for {gpu}, got {found}")
    version = found.pop()[1]
    own = f"{name}_kernels_{short}"
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder)
        shutil.copytree(kernels, project / own)
        shutil.copy(ROOT / "LICENSE", project)
        (project / own / "__init__.py").write_text(f'"""Kernels of {package} for {gpu}."""\n')
        text = PROJECT.format(
            package=package, short=short, version=version, gpu=gpu, name=name, own=own
        )
        (project / "pyproject.toml").write_text(text)
        command = [sys.executable, "-m", "build", "--no-isolation", "--wheel"]
        subprocess.run([*command, f"--outdir={dist}", str(project)], check=True)
    made = dist / f"{own}-{version}-py3-none-any.whl"
    if made.stat().st_size > MOST:
        raise ValueError(f"{made.name} has {made.stat().st_size} bytes, the most are {MOST}")
    return made


def main() -> None:
    """Build the wheel that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package")
    parser.add_argument("gpu")
    parser.add_argument("kernels", type=Path)
    parser.add_argument("dist", type=Path)
    given = parser.parse_args()
    made = build(given.package, given.gpu, given.kernels, given.dist)
    print(f"{made}: {made.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
