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
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from email.message import Message
from email.parser import BytesParser
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
OURS = {path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")}
HEAD = '<!DOCTYPE html>\n<html>\n<head>\n<meta charset="utf-8">\n'
API = "1.1"
# says that a folder is an index; and GitHub's pages serve its files as they are
MARK = ".nojekyll"


class File(NamedTuple):
    """A wheel or an sdist, and what it says of itself."""

    path: Path
    project: str
    metadata: Message
    raw: bytes

    @property
    def version(self) -> Version:
        return Version(str(self.metadata["Version"]))

    @property
    def is_wheel(self) -> bool:
        return self.path.suffix == ".whl"


def read(path: Path) -> File:
    """Read a file's metadata; a project that is not ours is an error."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            names = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
            raw = wheel.read(min(names, key=len))
    else:
        with tarfile.open(path) as sdist:
            member = sdist.extractfile(f"{path.name.removesuffix('.tar.gz')}/PKG-INFO")
            raw = member.read() if member else b""
    metadata = BytesParser().parsebytes(raw)
    project = canonicalize_name(str(metadata["Name"]))
    if project not in OURS:
        raise ValueError(f"{path.name} is of {project}, which is no package of this repository")
    return File(path, project, metadata, raw)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def entry(file: File) -> dict[str, object]:
    """Return what the JSON form says of a file."""
    digest = sha256(file.path.read_bytes())
    found: dict[str, object] = {
        "filename": file.path.name,
        "url": f"../../files/{file.path.name}",
        "hashes": {"sha256": digest},
        "size": file.path.stat().st_size,
        "requires-python": str(file.metadata["Requires-Python"]),
        "yanked": False,
    }
    if file.is_wheel:
        known = {"sha256": sha256(file.raw)}
        # installers know the metadata's hash by either name
        found |= {"core-metadata": known, "dist-info-metadata": known}
    return found


def anchor(found: dict[str, object]) -> str:
    """Return a file's line in the HTML form."""
    name, url = str(found["filename"]), f"{found['url']}#sha256={_hash(found['hashes'])}"
    attributes = {"href": url, "data-requires-python": str(found["requires-python"])}
    for key in ("core-metadata", "dist-info-metadata"):
        if key in found:
            attributes[f"data-{key}"] = f"sha256={_hash(found[key])}"
    text = " ".join(f'{key}="{html.escape(value)}"' for key, value in attributes.items())
    return f"<a {text}>{html.escape(name)}</a><br>"


def _hash(hashes: object) -> str:
    if not isinstance(hashes, dict):
        raise TypeError(f"hashes must be a dict, got {type(hashes).__name__}")
    return str(hashes["sha256"])


def page(folder: Path, title: str, lines: Iterable[str], data: dict[str, object]) -> None:
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


def needs(files: list[File], project: str) -> list[str]:
    """Return a project and those of ours that it requires, what is required first."""
    found: list[str] = []
    for text in newest(files, project).metadata.get_all("Requires-Dist", []):
        name = canonicalize_name(Requirement(text).name)
        if name in OURS:
            found += [x for x in needs(files, name) if x not in found]
    return [*found, project]


def pinned(files: list[File], project: str) -> str:
    """Return requirements with hashes: whatever an index offers, pip takes these files or none."""
    lines = []
    for name in needs(files, project):
        file = newest(files, name)
        digest = sha256(file.path.read_bytes())
        lines.append(f"{name}=={file.version} --hash=sha256:{digest}\n")
    return "".join(lines)


def start_page(files: list[File], projects: list[str], url: str, docs: bool) -> str:
    """Return the page at the root: the commands, with the address of the index in them."""
    index = f"{url}/simple/" if url else "simple/"
    head = f"{HEAD}<title>Attention kernels</title>\n</head>\n<body>\n<h1>Attention kernels</h1>"
    lines = [head, '<p><a href="docs/">Documentation</a></p>'] if docs else [head]
    lines += ["<p>A package index of these wheels alone. Install third parties first:</p>"]
    for project in projects:
        ours = needs(files, project)
        asked = {
            str(Requirement(text).name)
            for name in ours
            for text in newest(files, name).metadata.get_all("Requires-Dist", [])
            if "extra ==" not in text
        }
        theirs = " ".join(sorted(x for x in asked if canonicalize_name(x) not in OURS))
        commands = [f"pip install {theirs}"] if theirs else []
        commands.append(f"pip install --isolated --no-deps --index-url {index} {' '.join(ours)}")
        lines += [f"<h2>{project}</h2>", f"<pre>{html.escape(chr(10).join(commands))}</pre>"]
        lines.append(f'<p>With hashes: <a href="requirements/{project}.txt">{project}.txt</a></p>')
    warning = (
        "Never add this index by --extra-index-url: pip then takes the highest version that any"
    )
    lines.append(f"<p>{warning} index offers, and other projects have these names elsewhere.</p>")
    return "\n".join([*lines, "</body>\n</html>\n"])


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
    files = sorted(map(read, paths), key=lambda file: (file.project, file.version, file.path))
    if not files:
        raise ValueError(f"{folder} holds neither wheels nor sdists")
    if docs is not None and not (docs / "index.html").is_file():
        raise ValueError(f"{docs} has no index.html: build it by `nox -s docs`")
    if site.exists() and not (site / MARK).is_file() and (site.is_file() or any(site.iterdir())):
        raise ValueError(f"{site} must be new, empty or an index: it is not deleted")
    for project in {file.project for file in files}:
        needs(files, project)
    shutil.rmtree(site, ignore_errors=True)
    (site / "files").mkdir(parents=True)
    (site / MARK).touch()
    (site / "requirements").mkdir()
    projects = sorted({file.project for file in files})
    for project in projects:
        mine = [file for file in files if file.project == project]
        for file in mine:
            shutil.copyfile(file.path, site / "files" / file.path.name)
            if file.is_wheel:
                (site / "files" / f"{file.path.name}.metadata").write_bytes(file.raw)
        found = [entry(file) for file in mine]
        versions = list(dict.fromkeys(str(file.version) for file in mine))
        data: dict[str, object] = {"name": project, "versions": versions, "files": found}
        page(site / "simple" / project, project, map(anchor, found), data)
        (site / "requirements" / f"{project}.txt").write_text(pinned(files, project))
    links = [f'<a href="{project}/">{project}</a><br>' for project in projects]
    page(site / "simple", "Simple index", links, {"projects": [{"name": p} for p in projects]})
    if docs is not None:
        shutil.copytree(docs, site / "docs")
    (site / "index.html").write_text(start_page(files, projects, url.rstrip("/"), docs is not None))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Write a package index as static files.")
    parser.add_argument(
        "--files", type=Path, default=ROOT / "dist", help="folder of our wheels and sdists"
    )
    parser.add_argument(
        "--site",
        type=Path,
        default=ROOT / "site",
        help="folder to make; an index there is deleted first",
    )
    parser.add_argument("--url", default="", help="address of the site, for its start page")
    parser.add_argument("--docs", type=Path, help="documentation to publish beside the index")
    found = parser.parse_args(arguments)
    try:
        write(found.files, found.site, found.url, found.docs)
    except ValueError as error:
        print(f"index: {error}", file=sys.stderr)
        return 1
    wheels = sorted(path.name for path in (found.site / "files").glob("*.whl"))
    print(f"index: {found.site} offers {', '.join(wheels)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
