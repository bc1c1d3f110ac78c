"""Write a package index of our wheels and sdists as static files.

Usage: python ci/index.py [--files dist] [--site site] [--url ADDRESS] [--docs build/docs]

The site holds the simple repository API (PEP 503 in HTML, PEP 691 in JSON) with hashes, required
versions of Python and metadata files (PEP 714), requirements with hashes for each package, and a
start page with the commands. Any static host serves it.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import re
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from email.message import Message
from email.parser import BytesParser
from functools import cached_property
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from results import OURS, ROOT

HEAD = '<!DOCTYPE html>\n<html>\n<head>\n<meta charset="utf-8">\n'
API = "1.1"
# says that a folder is an index; and GitHub's pages serve its files as they are
MARK = ".nojekyll"
# puts the page's own address into its commands, and gives each a button that copies it
SCRIPT = """<script>
for (const place of document.querySelectorAll(".index"))
  place.textContent = new URL("simple/", location.href).href;
for (const text of document.querySelectorAll("pre")) {
  const button = document.createElement("button");
  button.textContent = "copy";
  button.onclick = () => navigator.clipboard.writeText(text.textContent);
  text.before(button);
}
</script>"""
WARNING = """<p>Never add this index by --extra-index-url: pip then takes the highest version that
any index offers, and other projects have these names elsewhere.</p>"""


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def is_ours(project: str) -> bool:
    """Return whether a project is a package of this repository, or one of compiled kernels."""
    return re.sub(r"-kernels-[a-z0-9]+$", "", project) in OURS


class File:
    """A wheel or an sdist, and what it says of itself."""

    def __init__(self, path: Path) -> None:
        self.path, self.is_wheel = path, path.suffix == ".whl"
        if self.is_wheel:
            with zipfile.ZipFile(path) as wheel:
                names = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
                self.raw = wheel.read(min(names, key=len))
        else:
            with tarfile.open(path) as sdist:
                member = sdist.extractfile(f"{path.name.removesuffix('.tar.gz')}/PKG-INFO")
                self.raw = member.read() if member else b""
        self.metadata: Message = BytesParser().parsebytes(self.raw)
        self.project = str(canonicalize_name(str(self.metadata["Name"])))
        self.version = Version(str(self.metadata["Version"]))
        if not is_ours(self.project):
            of = f"{path.name} is of {self.project}"
            raise ValueError(f"{of}, which is no package of this repository")

    @cached_property
    def requirements(self) -> list[str]:
        """The names of what it requires, but for extras."""
        asked = self.metadata.get_all("Requires-Dist", [])
        return [Requirement(text).name for text in asked if "extra ==" not in text]

    @cached_property
    def entry(self) -> dict[str, Any]:
        """What the JSON form says of it."""
        found: dict[str, Any] = {
            "filename": self.path.name,
            "url": f"../../files/{self.path.name}",
            "hashes": {"sha256": sha256(self.path.read_bytes())},
            "size": self.path.stat().st_size,
            "requires-python": str(self.metadata["Requires-Python"]),
            "yanked": False,
        }
        if self.is_wheel:
            # installers know the metadata's hash by either name
            for key in ("core-metadata", "dist-info-metadata"):
                found[key] = {"sha256": sha256(self.raw)}
        return found

    @property
    def anchor(self) -> str:
        """Its line in the HTML form."""
        hashes = {k: f"sha256={x['sha256']}" for k, x in self.entry.items() if isinstance(x, dict)}
        href = f"{self.entry['url']}#{hashes.pop('hashes')}"
        data = {"requires-python": self.entry["requires-python"], **hashes}
        text = "".join(f' data-{key}="{html.escape(x)}"' for key, x in data.items())
        return f'<a href="{href}"{text}>{html.escape(self.path.name)}</a><br>'


def page(folder: Path, title: str, lines: Iterable[str], **data: Any) -> None:
    """Write both forms of a page of the API."""
    folder.mkdir(parents=True, exist_ok=True)
    head = f'{HEAD}<meta name="pypi:repository-version" content="{API}">\n<title>{title}</title>\n'
    text = "\n".join([f"{head}</head>\n<body>", *lines, "</body>\n</html>\n"])
    (folder / "index.html").write_text(text)
    data = {"meta": {"api-version": API}, **data}
    (folder / "index.json").write_text(json.dumps(data, indent=1) + "\n")


def newest(files: Iterable[File], project: str) -> File:
    """Return the wheel of a project's newest version."""
    wheels = [file for file in files if file.project == project and file.is_wheel]
    if not wheels:
        raise ValueError(f"a wheel of {project} is missing: offered or required, but not there")
    return max(wheels, key=lambda file: file.version)


def needs(files: list[File], project: str) -> list[File]:
    """Return the newest wheels of what a project requires of ours, and its own, which is last."""
    own, found = newest(files, project), dict[str, File]()
    for name in map(canonicalize_name, own.requirements):
        if is_ours(name):
            found |= {file.project: file for file in needs(files, name)}
    return [*found.values(), own]


def pinned(wheels: list[File]) -> str:
    """Return requirements with hashes: whatever an index offers, pip takes these files or none."""
    hashes = [(file, file.entry["hashes"]["sha256"]) for file in wheels]
    return "".join(f"{f.project}=={f.version} --hash=sha256:{digest}\n" for f, digest in hashes)


def start_page(offered: dict[str, list[File]], url: str, docs: bool) -> str:
    """Return the page at the root: the commands, with the address of the index in them.

    Without a ``url`` the page fills in its own address where it is opened.
    """
    index = f"{url}/simple/" if url else '<span class="index">ADDRESS/simple/</span>'
    lines = [f"{HEAD}<title>Attention kernels</title>\n</head>\n<body>\n<h1>Attention kernels</h1>"]
    lines += ['<p><a href="docs/">Documentation</a></p>'] if docs else []
    lines += ["<p>A package index of these wheels alone. Install third parties first:</p>"]
    for project, wheels in offered.items():
        asked = {name for file in wheels for name in file.requirements}
        theirs = sorted(x for x in asked if not is_ours(canonicalize_name(x)))
        commands = [html.escape(f"pip install {' '.join(theirs)}")] if theirs else []
        ours = " ".join(file.project for file in wheels)
        commands.append(f"pip install --isolated --no-deps --index-url {index} {ours}")
        lines += [f"<h2>{project}</h2>", f"<pre>{chr(10).join(commands)}</pre>"]
        lines.append(f'<p>With hashes: <a href="requirements/{project}.txt">{project}.txt</a></p>')
    return "\n".join([*lines, WARNING, SCRIPT, "</body>\n</html>\n"])


def write(folder: Path, site: Path, url: str = "", docs: Path | None = None) -> None:
    """Write the index of all wheels and sdists in a folder.

    Args:
        folder: of the files; any that is not of a package of this repository is an error.
        site: a folder to make; an index that stands there is deleted first.
        url: of the site, for the start page.
        docs: the documentation as pages, which the site then holds, too.

    Raises:
        ValueError: nothing to offer, a wheel is missing, the site holds something else, or the
            documentation has no start page.
    """
    paths = [*folder.glob("*.whl"), *folder.glob("*.tar.gz")]
    files = sorted(map(File, paths), key=lambda file: (file.project, file.version, file.path))
    if not files:
        raise ValueError(f"{folder} holds neither wheels nor sdists")
    if docs is not None and not (docs / "index.html").is_file():
        raise ValueError(f"{docs} has no index.html: build it by `nox -s docs`")
    if site.exists() and not (site / MARK).is_file() and (site.is_file() or any(site.iterdir())):
        raise ValueError(f"{site} must be new, empty or an index: it is not deleted")
    offered = {project: needs(files, project) for project in sorted({f.project for f in files})}
    shutil.rmtree(site, ignore_errors=True)
    for name in ("files", "requirements"):
        (site / name).mkdir(parents=True)
    (site / MARK).touch()
    for file in files:
        shutil.copyfile(file.path, site / "files" / file.path.name)
        if file.is_wheel:
            (site / "files" / f"{file.path.name}.metadata").write_bytes(file.raw)
    for project, wheels in offered.items():
        own = [file for file in files if file.project == project]
        versions = list(dict.fromkeys(str(file.version) for file in own))
        told = {"name": project, "versions": versions, "files": [file.entry for file in own]}
        page(site / "simple" / project, project, [file.anchor for file in own], **told)
        (site / "requirements" / f"{project}.txt").write_text(pinned(wheels))
    links = [f'<a href="{project}/">{project}</a><br>' for project in offered]
    page(site / "simple", "Simple index", links, projects=[{"name": p} for p in offered])
    if docs is not None:
        shutil.copytree(docs, site / "docs")
    (site / "index.html").write_text(start_page(offered, url.rstrip("/"), docs is not None))


def main() -> None:
    parser = argparse.ArgumentParser(
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="Write a package index as static files.",
    )
    parser.add_argument("--files", type=Path, default=ROOT / "dist", help="our wheels and sdists")
    parser.add_argument(
        "--site", type=Path, default=ROOT / "site", help="to make; an index there is deleted first"
    )
    parser.add_argument("--url", default="", help="address of the site, for its start page")
    parser.add_argument("--docs", type=Path, help="documentation to publish beside the index")
    found = parser.parse_args()
    try:
        write(found.files, found.site, found.url, found.docs)
    except ValueError as error:
        sys.exit(f"index: {error}")
    wheels = sorted(path.name for path in (found.site / "files").glob("*.whl"))
    print(f"index: {found.site} offers {', '.join(wheels)}")


if __name__ == "__main__":
    main()
