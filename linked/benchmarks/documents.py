"""The tables of the documents, written from a file of results: no figure is typed by hand.

A table stands between ``<!-- table: name -->`` and ``<!-- end of table -->``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_TABLE = re.compile(r"(<!-- table: ([\w -]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def filled(text: str, made: dict[str, str]) -> str:
    """Return a document with its tables; a name that is unknown is a ``KeyError``."""
    return _TABLE.sub(lambda found: f"{found[1]}\n{made[found[2]]}\n\n{found[3]}", text)


def write(made: dict[str, str], paths: Iterable[Path]) -> list[Path]:
    """Write the tables into documents; return those that changed."""
    changed = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        if filled(text, made) != text:
            path.write_text(filled(text, made), encoding="utf-8")
            changed.append(path)
    return changed
