"""The Python in every README runs as it stands, block after block, on a machine without a GPU."""

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
RUN = """
names = {"__name__": "__main__"}
for text in TEXTS:
    exec(compile(text, NAME, "exec"), names)
"""


def blocks(path):
    """Return each block marked ``python``, after as many lines as stand before it in the file."""
    text = path.read_text()
    return ["\n" * text[: m.start(1)].count("\n") + m[1] for m in BLOCK.finditer(text)]


DOCUMENTS = [
    path
    for pattern in ("*.md", "docs/*.md", "docs/*/*.md", "packages/*/*.md", "packages/*/docs/*.md")
    for path in sorted(ROOT.glob(pattern))
    if blocks(path)
]
# a merge runs the first; the rest have a session of their own
CASES = [
    pytest.param(path, id=str(path.relative_to(ROOT)), marks=[pytest.mark.site] * (i > 0))
    for i, path in enumerate(DOCUMENTS)
]


@pytest.mark.parametrize("path", CASES)
def test_code_blocks_run(path, python, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    code = f"TEXTS = {blocks(path)!r}\nNAME = {path.name!r}\n{RUN}"
    python(code, cwd=tmp_path, env=environment)


def test_every_package_shows_a_first_call(package):
    assert any("import" in text for text in blocks(ROOT / "packages" / package / "README.md"))
