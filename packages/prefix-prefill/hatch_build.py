"""Stop a build where a link to shared source is broken, before it makes a wheel without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MESSAGE = """\
{path} is not the folder that it should link to: this checkout has no symbolic links.
Turn them on and check out again:
    git config core.symlinks true
    git checkout -- packages
On Windows, turn on developer mode first."""


class LinkedSource(BuildHookInterface):  # type: ignore[type-arg]
    """Runs before sdists, wheels and editable installs; an sdist holds folders, and no links."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        for path in sorted([*root.glob("src/**/*"), *root.glob("tests/*")]):
            if is_broken(path):
                self.app.abort(MESSAGE.format(path=path.relative_to(root)))


def is_broken(path: Path) -> bool:
    """Return whether git wrote the target of a link as a text, or the link leads to nothing."""
    if path.is_symlink():
        return not path.exists()
    return path.is_file() and not path.suffix and path.read_bytes().startswith(b"../")
