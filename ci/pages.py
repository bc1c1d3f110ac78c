"""Lay out the documents of the repository as a site: a hook of MkDocs, which mkdocs.yml names.

The site mirrors the repository: a page is a document, at the path that it has there, so links from
document to document stay as they are. Links to anything else lead to the repository's address
(``ATTN_REPOSITORY_URL``), or become text where none is given. Two kinds of pages are made: the
public functions of a package from their docstrings, and what was measured (``dashboard.py``).
"""

from __future__ import annotations

import ast
import os
import re
import shutil
from pathlib import Path
from typing import Any

import dashboard
from results import OURS, ROOT

STAGE = ROOT / "build" / "pages"
DOCUMENTS = ["*.md", "docs/**/*.md", "linked/*.md"]
DOCUMENTS += [f"packages/*/{folder}*.md" for folder in ("", "docs/", "benchmarks/")]
PICTURES = ["docs/images/*", "packages/*/**/*.png", "packages/*/**/*.svg"]
LINK = re.compile(r"(?<!\\)\[(?P<text>[^\]\n]*(?:\n[^\]\n]+)?)\]\((?P<target>[^)\s]+)\)")
FENCE = re.compile(r"^(```.*?^```)$", re.DOTALL | re.MULTILINE)
# a list that follows a line of text: GitHub begins a list there, Markdown's rules do not
LIST = re.compile(r"^(?P<text>(?![-*|>#]|\d+\. |    )\S.*)\n(?=(?:[-*]|\d+\.) )", re.MULTILINE)
ROLE = re.compile(r":(?:func|class|mod|meth|attr):`[~.]?([\w.]+)`")
BLOCK = re.compile(r"::$", re.MULTILINE)

# in this order, then whatever else there is
SHARED = {
    "docs/which-function.md": "Which function do I want?",
    "docs/installing.md": "Installing",
    "docs/troubleshooting.md": "Questions and troubles",
    "docs/numerics.md": "Numerics",
    "docs/glossary.md": "Glossary",
    "docs/hopper-tutorial.md": "Hopper: tutorial",
    "docs/hopper-reference.md": "Hopper: reference",
    "docs/hopper-traps.md": "Hopper: traps",
}
OF_A_PACKAGE = {
    "README.md": "Overview",
    "docs/tutorial.md": "Tutorial",
    "docs/api.md": "Guide to the API",
    "docs/reference.md": "Reference",
    "docs/how-it-works.md": "How it works",
}


def reference(package: str) -> str:
    """Return the page of a package's docstrings: of what it exports, without importing it.

    What the package's README names comes first, in its order.
    """
    name = package.replace("-", "_")
    init = ROOT / "packages" / package / "src" / name / "__init__.py"
    readme = (ROOT / "packages" / package / "README.md").read_text()
    values = {
        ast.unparse(node.targets[0]): node.value
        for node in ast.parse(init.read_text()).body
        if isinstance(node, ast.Assign)
    }
    exports = sorted(ast.literal_eval(values["__all__"]), key=str.lower)
    places = {export: re.search(rf"\b{export}\b", readme) for export in exports}
    exports.sort(key=lambda x: place.start() if (place := places[x]) else len(readme))
    lines = [f"::: {name}.{export}\n" for export in exports if not export.startswith("__")]
    return "\n".join(["# Reference\n", f"What `{name}` exports, from its docstrings.\n", *lines])


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
    sources, pictures = (
        {p.relative_to(ROOT) for glob in globs for p in ROOT.glob(glob)}
        for globs in (DOCUMENTS, PICTURES)
    )
    texts = {Path("packages", p, "docs", "reference.md"): reference(p) for p in OURS}
    texts |= {Path("dashboard", name): text for name, text in dashboard.pages(ROOT).items()}
    staged = sources | pictures | texts.keys()
    texts |= {p: rewrite((ROOT / p).read_text(), p, staged, repository) for p in sources}
    for path in {*texts, *pictures}:
        to = STAGE / "docs" / path
        to.parent.mkdir(parents=True, exist_ok=True)
        if path in texts:
            to.write_text(heading(path) + texts[path])
        else:
            shutil.copy2(ROOT / path, to)
    return {path for path in texts if path.suffix == ".md"}


def heading(path: Path) -> str:
    """Return what titles a package's page in the browser and in search: its name goes first."""
    parts = path.parts
    if path.suffix != ".md" or parts[0] != "packages" or parts[2:] == ("README.md",):
        return ""
    inner = Path(*parts[2:]).as_posix()
    word = OF_A_PACKAGE.get(inner) or path.stem.replace("-", " ").lower()
    return f'---\ntitle: "{parts[1]}: {word}"\n---\n'


def title(path: str) -> str:
    """Return a document's first heading."""
    text = (STAGE / "docs" / path).read_text()
    return next(line[2:] for line in text.splitlines() if line.startswith("# "))


def navigation(pages: set[Path]) -> list[dict[str, Any]]:
    """Return the tree of pages: shared ones, packages, and how the repository is worked on."""
    left = sorted(map(str, pages))

    def take(path: str, name: str = "") -> dict[str, str]:
        left.remove(path)
        return {name or title(path): path}

    def below(folder: str, names: dict[str, str]) -> list[dict[str, str]]:
        """Take the pages of a folder, those with names first."""
        named = [take(f"{folder}/{p}", n) for p, n in names.items() if f"{folder}/{p}" in left]
        return named + [take(path) for path in list(left) if path.startswith(f"{folder}/")]

    return [
        take("README.md", "Home"),
        {"Guides": [take(path, name) for path, name in SHARED.items() if path in left]},
        {"Packages": [{name: below(f"packages/{name}", OF_A_PACKAGE)} for name in OURS]},
        {"Coming from": below("docs/coming-from", {})},
        {"Measured": below("dashboard", {"index.md": "All packages"})},
        {"Working on it": [take(path) for path in list(left)]},
    ]


def on_config(config: Any) -> Any:
    """Stage the documents before MkDocs looks for them."""
    repository = os.environ.get("ATTN_REPOSITORY_URL", "").rstrip("/")
    pages = stage(repository)
    config.docs_dir = str(STAGE / "docs")
    config.nav = navigation(pages)
    config.repo_url = repository or None
    dashboard.write_scripts(STAGE / "docs" / "dashboard")
    return config
