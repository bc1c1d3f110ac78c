"""Lay out the documents of the repository as a site, and build it with MkDocs.

Usage: python ci/pages.py [--site build/docs] [--repository ADDRESS]

The site mirrors the repository: a page is a document, at the path that it has there, so links from
document to document stay as they are. Links to anything else lead to the repository's address, or
become text where none is given. Two kinds of pages are made: the public functions of a package from
their docstrings, and what was measured (``dashboard.py``).
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import dashboard

ROOT = Path(__file__).resolve().parents[1]
STAGE = ROOT / "build" / "pages"
DOCUMENTS = (
    "*.md",
    "docs/*.md",
    "docs/coming-from/*.md",
    "linked/*.md",
    "packages/*/*.md",
    "packages/*/docs/*.md",
    "packages/*/benchmarks/*.md",
)
PICTURES = ("docs/images/*", "packages/*/docs/*.png", "packages/*/**/*.png", "packages/*/**/*.svg")
LINK = re.compile(r"(?<!\\)\[(?P<text>[^\]\n]*(?:\n[^\]\n]+)?)\]\((?P<target>[^)\s]+)\)")
FENCE = re.compile(r"^(```.*?^```)$", re.DOTALL | re.MULTILINE)
# a list that follows a line of text: GitHub begins a list there, Markdown's rules do not
LIST = re.compile(r"^(?P<text>(?![-*|>#]|\d+\. |    )\S.*)\n(?=(?:[-*]|\d+\.) )", re.MULTILINE)
ROLE = re.compile(r":(?:func|class|mod|meth|attr):`[~.]?([\w.]+)`")
BLOCK = re.compile(r"::$", re.MULTILINE)

# in this order, then whatever else a package has
PAGES = {
    "README.md": "Overview",
    "docs/tutorial.md": "Tutorial",
    "docs/api.md": "Guide to the API",
    "docs/reference.md": "Reference",
    "docs/how-it-works.md": "How it works",
}
SHARED = {
    "docs/which-function.md": "Which function do I want?",
    "docs/numerics.md": "Numerics",
    "docs/glossary.md": "Glossary",
    "docs/hopper-tutorial.md": "Hopper: tutorial",
    "docs/hopper-reference.md": "Hopper: reference",
    "docs/hopper-traps.md": "Hopper: traps",
}

Entry = dict[str, Any]


def public_names(package: Path) -> list[str]:
    """Return what a package exports, without importing it."""
    (module,) = package.glob("src/*/__init__.py")
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    raise ValueError(f"{module} has no __all__")


def reference(package: Path) -> str:
    """Return the page of a package's docstrings."""
    (module,) = package.glob("src/*/__init__.py")
    name = module.parent.name
    lines = ["# Reference", "", f"What `{name}` exports, from its docstrings.", ""]
    for export in sorted(public_names(package), key=str.lower):
        if not export.startswith("__"):
            lines += [f"::: {name}.{export}", ""]
    return "\n".join(lines)


def markdown(docstring: str) -> str:
    """Return a docstring with Markdown in place of reStructuredText.

    Roles become code, and of two colons before a block of code one goes.
    """
    return BLOCK.sub(":", ROLE.sub(r"`\1`", docstring))


def rewrite(text: str, document: Path, staged: set[Path], repository: str) -> str:
    """Lead each link to a page, or else to the repository; code is left alone."""

    def lead(match: re.Match[str]) -> str:
        target, _, anchor = match["target"].partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        path = Path(os.path.normpath(document.parent / target))
        for page in (path, path / "README.md"):
            if page in staged:
                to = os.path.relpath(page, document.parent) + (f"#{anchor}" if anchor else "")
                return f"[{match['text']}]({to})"
        if not (ROOT / path).exists():
            raise ValueError(f"{document}: the link to {match['target']} leads nowhere")
        return f"[{match['text']}]({repository}/blob/HEAD/{path})" if repository else match["text"]

    parts = FENCE.split(text)
    for i, part in enumerate(parts):
        if not part.startswith("```"):
            parts[i] = LIST.sub(r"\g<text>\n\n", LINK.sub(lead, part))
    return "".join(parts)


def stage(repository: str) -> set[Path]:
    """Copy documents and pictures to ``build/pages/docs``; return the pages."""
    shutil.rmtree(STAGE, ignore_errors=True)
    sources = {p.relative_to(ROOT) for glob in DOCUMENTS for p in ROOT.glob(glob)}
    pictures = {p.relative_to(ROOT) for glob in PICTURES for p in ROOT.glob(glob)}
    made = {
        p.relative_to(ROOT) / "docs" / "reference.md": reference(p)
        for p in sorted((ROOT / "packages").iterdir())
        if (p / "pyproject.toml").exists()
    }
    made |= {Path("dashboard", name): text for name, text in dashboard.pages(ROOT).items()}
    pages = sources | {path for path in made if path.suffix == ".md"}
    for path in sorted(pages | pictures | set(made)):
        to = STAGE / "docs" / path
        to.parent.mkdir(parents=True, exist_ok=True)
        if path in pictures:
            shutil.copy2(ROOT / path, to)
        elif path in made:
            to.write_text(made[path])
        else:
            text = (ROOT / path).read_text()
            to.write_text(rewrite(text, path, pages | pictures, repository))
    return pages


def title(path: Path) -> str:
    """Return a document's first heading."""
    text = (STAGE / "docs" / path).read_text()
    return next(line[2:] for line in text.splitlines() if line.startswith("# "))


def navigation(pages: set[Path]) -> list[Entry]:
    """Return the tree of pages: shared ones, packages, and how the repository is worked on."""
    left = set(pages)

    def take(path: str, name: str | None = None) -> Entry:
        left.discard(Path(path))
        return {name or title(Path(path)): path}

    def rest(folder: str) -> list[Entry]:
        return [take(str(p)) for p in sorted(left) if str(p).startswith(f"{folder}/")]

    home = take("README.md", "Home")
    guides = [take(path, name) for path, name in SHARED.items()]
    coming = rest("docs/coming-from")
    packages: list[Entry] = []
    for folder in sorted({p.parts[1] for p in pages if p.parts[0] == "packages"}):
        first = [
            take(f"packages/{folder}/{p}", n)
            for p, n in PAGES.items()
            if Path(f"packages/{folder}/{p}") in pages
        ]
        packages.append({folder: first + rest(f"packages/{folder}")})
    measured = [take("dashboard/index.md", "All packages"), *rest("dashboard")]
    work = [take(str(p)) for p in sorted(left)]
    return [
        home,
        {"Guides": guides},
        {"Packages": packages},
        {"Coming from": coming},
        {"Measured": measured},
        {"Working on it": work},
    ]


def configure(pages: set[Path], site: Path, repository: str) -> Path:
    """Write MkDocs' configuration of this build; JSON is YAML."""
    sources = [str(path) for path in sorted(ROOT.glob("packages/*/src"))]
    options = {
        "docstring_style": "google",
        # several parameters may share a line, and types stand in the signature
        # what returns is one thing, of as many lines as it takes
        "docstring_options": {
            "warn_unknown_params": False,
            "warn_missing_types": False,
            "returns_multiple_items": False,
            "returns_named_value": False,
        },
        "heading_level": 2,
        "separate_signature": True,
        "show_root_heading": True,
        "show_root_full_path": False,
        "show_signature_annotations": True,
        "show_source": False,
        "signature_crossrefs": False,
        "extensions": [str(Path(__file__).with_name("docstrings.py"))],
    }
    python = {"paths": sources, "options": options}
    config: Entry = {
        "INHERIT": str(ROOT / "mkdocs.yml"),
        "docs_dir": str(STAGE / "docs"),
        "site_dir": str(site),
        "nav": navigation(pages),
        "plugins": ["search", {"mkdocstrings": {"handlers": {"python": python}}}],
        "extra_javascript": ["dashboard/plots.js"],
    }
    if repository:
        config["repo_url"] = repository
    path = STAGE / "mkdocs.yml"
    path.write_text(json.dumps(config, indent=1))
    return path


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--site", type=Path, default=ROOT / "build" / "docs")
    parser.add_argument("--repository", default=os.environ.get("ATTN_REPOSITORY_URL", ""))
    arguments = parser.parse_args()
    repository = arguments.repository.rstrip("/")
    config = configure(stage(repository), arguments.site.resolve(), repository)
    dashboard.write_scripts(STAGE / "docs" / "dashboard")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config)]
    # for docstrings.py, which the build imports
    here = {"PYTHONPATH": str(Path(__file__).parent)}
    status = subprocess.run(command, env=os.environ | here).returncode
    if status == 0:
        print(f"{arguments.site}: {sum(1 for _ in arguments.site.rglob('*.html'))} pages")
    return status


if __name__ == "__main__":
    sys.exit(main())
