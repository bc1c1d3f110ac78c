"""Docstrings as Markdown: an extension of Griffe, which reads them for the documentation."""

from __future__ import annotations

from typing import Any

import griffe
from pages import markdown


class Docstrings(griffe.Extension):  # type: ignore[misc]
    """Rewrites each docstring as it is read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
