"""Write our wheels as universal kernels for Hugging Face's library ``kernels``.

Usage: python ci/hub.py [--files dist] [--hub hub]

Each package becomes a folder that can be pushed as a repository of the hub, or be loaded where it
lies: build/torch-<backend>/ holds the package with attn_common inside and a metadata.json. The
library imports it by the name that metadata.json has as its id, which is unique to the content, so
that a wheel and any copies share a process, each with operators of its own.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import shutil
import sys
import zipfile
from pathlib import Path

from index import File, newest, read
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
COMMON = "attn-common"
# what runs the same files: kernels on GPUs, the definition on a CPU
BACKENDS = ("cpu", "cuda", "rocm")
# what comes with the library's environment, and what metadata may ask for beside it
GIVEN = {"torch", "triton"}
NAMED = {"einops"}
VENDORED = "_attn_common"


def modules(file: File) -> dict[str, bytes]:
    """Return the modules of a wheel by their path below the package."""
    root = file.project.replace("-", "_")
    with zipfile.ZipFile(file.path) as wheel:
        names = [n for n in wheel.namelist() if n.startswith(f"{root}/") and n.endswith(".py")]
        return {name.removeprefix(f"{root}/"): wheel.read(name) for name in sorted(names)}


def inward(path: str, source: bytes) -> bytes:
    """Rewrite a module's imports of attn_common to the copy inside the package."""
    dots = "." * (path.count("/") + 1)
    absolute = re.compile(r"^(\s*)from attn_common import", re.MULTILINE)
    text = absolute.sub(rf"\1from {dots}{VENDORED} import", source.decode())
    for node in ast.walk(ast.parse(text)):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if any(name.split(".")[0] == "attn_common" for name in names):
            raise ValueError(f"{path} must import attn_common by 'from attn_common import ...'")
    return text.encode()


def requirements(file: File) -> set[str]:
    """Return the names of what a wheel requires."""
    return {
        canonicalize_name(Requirement(text).name)
        for text in file.metadata.get_all("Requires-Dist", [])
        if "extra ==" not in text
    }


def export(file: File, common: File, hub: Path) -> Path:
    """Write one package's folder and return it."""
    depends, licence = sorted(requirements(file) & NAMED), str(file.metadata["License-Expression"])
    found = {path: inward(path, source) for path, source in modules(file).items()}
    found |= {f"{VENDORED}/{path}": source for path, source in modules(common).items()}
    digest = hashlib.sha256()
    for path in sorted(found):
        digest.update(path.encode() + b"\0" + found[path] + b"\0")
    folder = hub / file.project
    for backend in BACKENDS:
        variant = folder / "build" / f"torch-{backend}"
        for path, source in found.items():
            (variant / path).parent.mkdir(parents=True, exist_ok=True)
            (variant / path).write_bytes(source)
        name = file.project.replace("-", "_")
        metadata = {
            "name": file.project,
            "id": f"_{name}_{backend}_{digest.hexdigest()[:12]}",
            "version": file.version.major,
            "license": licence,
            "python-depends": depends,
            "backend": {"type": backend},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    card = f"---\nlibrary_name: kernels\nlicense: {licence.lower()}\n---\n\n"
    (folder / "README.md").write_text(card + str(file.metadata.get_payload() or ""))
    return folder


def clear(folder: Path) -> None:
    """Delete what an earlier export wrote.

    Raises:
        ValueError: the folder holds something else.
    """
    if not folder.exists():
        return
    if not folder.is_dir() or {path.name for path in folder.iterdir()} - {"build", "README.md"}:
        raise ValueError(f"{folder} is no earlier export: it is not deleted")
    shutil.rmtree(folder)


def write(files: Path, hub: Path) -> list[str]:
    """Write the folders of all packages, and return a line for each."""
    wheels = [read(path) for path in sorted(files.glob("*.whl"))]
    common = newest(wheels, COMMON)
    lines = []
    for project in sorted({file.project for file in wheels} - {COMMON}):
        file = newest(wheels, project)
        if beyond := requirements(file) - GIVEN - NAMED - {COMMON}:
            asked = ", ".join(sorted(beyond))
            lines.append(f"{project} is not exported: the hub's metadata cannot ask for {asked}")
            continue
        clear(hub / project)
        lines.append(f"{project}: {export(file, common, hub)}")
    return lines


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Write our wheels as kernels for the hub.")
    parser.add_argument("--files", type=Path, default=ROOT / "dist", help="folder of our wheels")
    parser.add_argument("--hub", type=Path, default=ROOT / "hub", help="folder to write into")
    found = parser.parse_args(arguments)
    try:
        lines = write(found.files, found.hub)
    except ValueError as error:
        print(f"hub: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
