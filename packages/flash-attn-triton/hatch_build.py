"""Stop a build where a link to shared source is broken; add the project's addresses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

MESSAGE = """\
{path} is not the folder that it should link to: this checkout has no symbolic links.
Turn them on and check out again:
    git config core.symlinks true
    git checkout -- packages
On Windows, turn on developer mode first."""


class Sources(BuildHookInterface):  # type: ignore[type-arg]
    """Runs before sdists, wheels and editable installs; an sdist holds folders, and no links."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        # hatchling adds the repository's to every sdist
        included = build_data.get("force_include", {})
        for name in [name for name in included if Path(name).name == ".gitignore"]:
            del included[name]
        for places in ("src/**/*", "tests/*", "benchmarks/*"):
            for path in sorted(root.glob(places)):
                if is_broken(path):
                    self.app.abort(MESSAGE.format(path=path.relative_to(root)))


def is_broken(path: Path) -> bool:
    """Return whether git wrote the target of a link as a text, or the link leads to nothing."""
    if path.is_symlink():
        return not path.exists()
    return path.is_file() and not path.suffix and path.read_bytes().startswith(b"../")


class Addresses(MetadataHookInterface):
    """Writes the project's URLs, which whoever publishes a build states in the environment.

    ``ATTN_REPOSITORY_URL`` is the address of the repository, ``ATTN_PAGES_URL`` that of its pages.
    An sdist holds what it was made with, so a wheel built from it has the same metadata anywhere.
    """

    def update(self, metadata: dict[str, Any]) -> None:
        if Path(self.root, "PKG-INFO").exists():
            return
        repository = os.environ.get("ATTN_REPOSITORY_URL", "").rstrip("/")
        pages = os.environ.get("ATTN_PAGES_URL", "").rstrip("/")
        urls = {}
        if repository:
            folder = f"{repository}/blob/HEAD/packages/{metadata['name']}"
            urls |= {"Repository": repository, "Issues": f"{repository}/issues"}
            urls |= {"Documentation": f"{folder}/README.md", "Changelog": f"{folder}/CHANGELOG.md"}
        if pages:
            urls["Package index"] = f"{pages}/simple/"
        metadata["urls"] = urls
