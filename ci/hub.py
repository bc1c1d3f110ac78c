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

from index import File, newest
from packaging.utils import canonicalize_name
from results import ROOT

COMMON = "attn-common"
# what runs the same files: kernels on GPUs, the reference on a CPU
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


def export(file: File, common: File, hub: Path) -> str:
    """Write one package's folder, in place of an earlier export, and return a line for it.

    Raises:
        ValueError: the folder holds something else.
    """
    required = {canonicalize_name(name) for name in file.requirements}
    if beyond := required - GIVEN - NAMED - {COMMON}:
        asked = ", ".join(sorted(beyond))
        return f"{file.project} is not exported: the hub's metadata cannot ask for {asked}"
    folder = hub / file.project
    if folder.exists():
        if not folder.is_dir() or {path.name for path in folder.iterdir()} - {"build", "README.md"}:
            raise ValueError(f"{folder} is no earlier export: it is not deleted")
        shutil.rmtree(folder)
    licence = str(file.metadata["License-Expression"])
    found = {path: inward(path, source) for path, source in modules(file).items()}
    found |= {f"{VENDORED}/{path}": source for path, source in modules(common).items()}
    digest = hashlib.sha256()
    for path in sorted(found):
        digest.update(path.encode() + b"\0" + found[path] + b"\0")
    for backend in BACKENDS:
        name = file.project.replace("-", "_")
        metadata = {
            "name": file.project,
            "id": f"_{name}_{backend}_{digest.hexdigest()[:12]}",
            "version": file.version.major,
            "license": licence,
            "python-depends": sorted(required & NAMED),
            "backend": {"type": backend},
        }
        text = json.dumps(metadata, indent=2) + "\n"
        for path, source in {**found, "metadata.json": text.encode()}.items():
            to = folder / "build" / f"torch-{backend}" / path
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(source)
    card = f"---\nlibrary_name: kernels\nlicense: {licence.lower()}\n---\n\n"
    (folder / "README.md").write_text(card + str(file.metadata.get_payload() or ""))
    return f"{file.project}: {folder}"


def main() -> None:
    parser = argparse.ArgumentParser(
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="Write our wheels as kernels for the hub.",
    )
    parser.add_argument("--files", type=Path, default=ROOT / "dist", help="folder of our wheels")
    parser.add_argument("--hub", type=Path, default=ROOT / "hub", help="folder to write into")
    given = parser.parse_args()
    try:
        wheels = [File(path) for path in sorted(given.files.glob("*.whl"))]
        common = newest(wheels, COMMON)
        for project in sorted({file.project for file in wheels} - {COMMON}):
            print(export(newest(wheels, project), common, given.hub))
    except ValueError as error:
        sys.exit(f"hub: {error}")


if __name__ == "__main__":
    main()
