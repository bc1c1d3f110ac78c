"""The code in README and in the pages of the documentation runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent
TUTORIAL = PACKAGE / "docs" / "tutorial.md"
PAGES = [PACKAGE / "README.md", *sorted({*(PACKAGE / "docs").glob("*.md")} - {TUTORIAL})]


def blocks_of(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.S)


BLOCKS = {f"{page.name}-{i}": block for page in PAGES for i, block in enumerate(blocks_of(page))}


def run(code: str, folder: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_a_block_runs_on_its_own(block, tmp_path):
    run(block, tmp_path)


def test_a_tutorial_runs_from_its_first_block_to_its_last(tmp_path):
    run("\n".join(blocks_of(TUTORIAL)), tmp_path)
