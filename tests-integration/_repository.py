"""What the rules of the repository read: packages, their sources with what is linked, imports."""

from __future__ import annotations

import ast
import functools
import os
from collections.abc import Iterator
from pathlib import Path

# each folder of linked/, and its place in a package whose import name is {name}
PLACES = {
    "host": "src/{name}/_linked/host",
    "parallel": "src/{name}/_linked/parallel",
    "launch": "src/{name}/_linked/launch",
    "portable": "src/{name}/_linked/portable",
    "invariant": "src/{name}/_linked/invariant",
    "hopper": "src/{name}/_linked/hopper",
    "testing": "tests/_linked",
    "benchmarks": "benchmarks/_linked",
}
# folders and files of kernels and their launches, the only ones that import Triton
KERNELS = {"portable", "hopper", "kernels", "launch", "invariant"}
# where kernels are not Triton's, and nothing is linked
OTHER_KERNELS = {"_kernels"}

# a file is read once for all rules, wherever it is linked
parse = functools.cache(ast.parse)


def packages(root: Path) -> list[Path]:
    return sorted(p.parent for p in root.glob("packages/*/pyproject.toml"))


def import_name(package: Path) -> str:
    return package.name.replace("-", "_")


def kernel_packages(root: Path) -> list[Path]:
    return [p for p in packages(root) if p.name != "attn-common"]


def holds_kernels(package: Path, parts: tuple[str, ...]) -> bool:
    """Say whether a path within a package, without its suffix, is one of kernels or launches."""
    rooms = KERNELS if place(package, "launch").exists() else OTHER_KERNELS
    return not rooms.isdisjoint(parts)


def place(package: Path, folder: str) -> Path:
    """Return where a package holds its link to a folder of linked/."""
    return package / PLACES[folder].format(name=import_name(package))


def files(base: Path, pattern: str = "*", *, follow: bool = True) -> list[Path]:
    """List the files below a folder; unlike ``Path.rglob`` it enters linked directories."""
    found = []
    for folder, below, names in os.walk(base, followlinks=follow):
        below[:] = [name for name in below if name[0] != "." and name != "__pycache__"]
        found += [p for p in (Path(folder, name) for name in names) if p.match(pattern)]
    return sorted(found)


def sources(root: Path) -> Iterator[tuple[Path, Path, ast.Module]]:
    """Yield (package, module path within it, syntax tree) of every source file.

    What is linked is there once for each package that links it, at its place.
    """
    for package in packages(root):
        base = package / "src" / import_name(package)
        for path in files(base, "*.py"):
            yield package, path.relative_to(base), parse(path.read_text())


def imports(
    tree: ast.Module, *, top_level_only: bool = False
) -> Iterator[tuple[int, str, list[str]]]:
    """Yield (level, module, names) of every import statement."""
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield 0, alias.name, []
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or "", [alias.name for alias in node.names]


def target(path: Path, level: int, module: str) -> tuple[str, ...]:
    """Return the path, within its package, of what a module imports by a relative import."""
    folder = path.parent.parts
    parts = tuple(module.split(".")) if module else ()
    return folder[: len(folder) - (level - 1)] + parts


def modules(
    package: Path, path: Path, level: int, module: str, names: list[str]
) -> Iterator[tuple[str, ...]]:
    """Yield the paths, without suffix, of the modules that one relative import reaches.

    Where no module has the name of what is imported, it is a name of the module or of the folder.
    """
    base = package / "src" / import_name(package)
    folder = target(path, level, module)
    for parts in [(*folder, name) for name in names]:
        for known in (parts, folder):
            there = base.joinpath(*known)
            if there.with_suffix(".py").is_file():
                yield known
                break
            if (there / "__init__.py").is_file():
                yield (*known, "__init__")
                break
        else:
            yield parts


def write(root: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def write_small_repository(root: Path) -> None:
    """Write a repository that keeps every rule: attn-common, and two kernel packages a and b."""
    texts = {"README.md": "", "LICENSE": "text"}
    for name in ("attn-common", "a", "b"):
        base, module = f"packages/{name}", name.replace("-", "_")
        init = f'"""{name}."""\n__version__ = "1.0.0"\n__all__ = ["cdiv"]\n'
        texts |= {f"{base}/src/{module}/{n}": "" for n in ("__main__.py", "py.typed", "api.py")}
        texts |= {
            f"{base}/src/{module}/__init__.py": init,
            f"{base}/pyproject.toml": f"# {name}",
            f"{base}/README.md": "",
            f"{base}/LICENSE": "text",
            f"{base}/CHANGELOG.md": f"# {name}\n\n## Unreleased\n\n## 1.0.0\n",
            f"{base}/tests/conftest.py": "x = 1",
        }
        texts["README.md"] += f"[{name}](packages/{name})\n"
        if name != "attn-common":
            kernel = (
                f"import triton\nfrom . import tile\nfrom ..._linked.launch.run import {name}\n"
            )
            dense = f"{base}/src/{module}/_dense"
            texts |= {
                f"{dense}/portable/forward.py": kernel,
                f"{dense}/portable/tile.py": f"# {name}",
                f"{dense}/portable/__init__.py": "",
                f"{dense}/launch.py": f"from .portable import forward as {name}",
                f"{dense}/ops.py": f"def {name}():\n    from . import launch",
                f"{dense}/tiles.py": f"from attn_common import cdiv as {name}\n",
                f"{base}/benchmarks/bench_a.py": "",
            }
    texts |= {f"linked/{folder}/__init__.py": "" for folder in PLACES}
    texts["linked/host/form.py"] = "import torch\n"
    texts["linked/launch/run.py"] = "import triton\nfrom ..host.form import f\n"
    write(root, texts)
    for package in kernel_packages(root):
        for folder in PLACES:
            link(place(package, folder), root / "linked" / folder)


def link(path: Path, folder: Path) -> None:
    """Make a relative link to a folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(os.path.relpath(folder, path.parent), target_is_directory=True)
