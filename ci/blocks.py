"""Write the Python in READMEs and in the documentation to files, which type checkers then read.

python ci/blocks.py FOLDER
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PATTERNS = ("*.md", "docs/*.md", "docs/*/*.md", "packages/*/*.md", "packages/*/docs/*.md")


def blocks(path: Path) -> list[str]:
    """Return each block marked ``python``, after as many lines as stand before it in the file."""
    text = path.read_text()
    return ["\n" * text[: m.start(1)].count("\n") + m[1] for m in BLOCK.finditer(text)]


def documents() -> list[Path]:
    """Return the documents that hold Python."""
    return [path for pattern in PATTERNS for path in sorted(ROOT.glob(pattern)) if blocks(path)]


def write(folder: Path) -> None:
    """Write a file for each document: its blocks one after the other, at the lines they have."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in documents():
        lines: list[str] = []
        for block in blocks(path):
            lines += block.splitlines()[len(lines) :]
        name = re.sub(r"\W", "_", str(path.relative_to(ROOT).with_suffix("")))
        (folder / f"{name}.py").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
