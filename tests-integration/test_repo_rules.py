"""Rules of the repository that no linter knows.

A rule is a function of a repository's root that lists what breaks it. Each is also shown to catch
what it is there for, in a small repository made for the purpose.
"""

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest

from ._repository import (
    files,
    holds_kernels,
    import_name,
    imports,
    kernel_packages,
    modules,
    packages,
    sources,
    write,
    write_small_repository,
)

SIBLING = "attn_common"
BANNED = re.compile(r"make_block_ptr|\btl\.advance\b|\btriton\.autotune\b|@autotune\b")
# layer: the others that it may not import, in any folder
LAYERS = {
    "tiles": {"api", "ops", "kernels", "reference"},
    "kernels": {"api", "ops", "reference"},
    "reference": {"api", "ops", "kernels", "tiles"},
    "api": {"kernels"},
    "checks": {"api", "ops", "kernels"},
}
# files whose names are not those of their layers
LAYER_OF = {"hopper_tiles": "tiles"}
LAYER_OF |= {"_reference.fixed": "reference", "_reference.sequences": "reference"}
REQUIRED = ["CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml", "tests"]
REQUIRED_OF_KERNELS = ["benchmarks"]


def public_names(root):
    path = root / "packages" / "attn-common" / "src" / SIBLING / "__init__.py"
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__":
            return set(ast.literal_eval(node.value))
    raise AssertionError(f"{path} has no __all__")


def uses_private_names_of_attn_common(root):
    public = public_names(root)
    for package, path, tree in sources(root):
        if import_name(package) == SIBLING:
            continue
        for _, module, names in imports(tree):
            if module.startswith(f"{SIBLING}."):
                yield f"{package.name}: {path} imports {module}"
            elif module == SIBLING and not set(names) <= public:
                yield f"{package.name}: {path} imports {sorted(set(names) - public)}"
        for node in ast.walk(tree):
            of_sibling = getattr(getattr(node, "value", None), "id", "") == SIBLING
            if isinstance(node, ast.Attribute) and of_sibling and node.attr not in public:
                yield f"{package.name}: {path} uses {SIBLING}.{node.attr}"


def imports_a_sibling_or_itself_by_name(root):
    ours = {import_name(package) for package in packages(root)}
    for package, path, tree in sources(root):
        allowed = {SIBLING} - {import_name(package)}
        for level, module, _ in imports(tree):
            top = module.partition(".")[0]
            if level == 0 and top in ours - allowed:
                yield f"{package.name}: {path} imports {module}"


def layer_of(package, parts):
    """Return the layer of a module, by its path within its package."""
    if holds_kernels(package, parts):
        return "kernels"
    return LAYER_OF.get(parts[-1]) or LAYER_OF.get(".".join(parts), parts[-1])


def imports_against_the_layers(root):
    for package, path, tree in sources(root):
        forbidden = LAYERS.get(layer_of(package, path.with_suffix("").parts), set())
        for level, module, names in imports(tree):
            for reached in modules(package, path, level, module, names) if level else ():
                if layer_of(package, reached) in forbidden:
                    yield f"{package.name}: {path} imports {'.'.join(reached)}"


def imports_kernels_eagerly(root):
    for package, path, tree in sources(root):
        if holds_kernels(package, path.with_suffix("").parts):
            continue
        for level, module, names in imports(tree, top_level_only=True):
            if level == 0 and module.partition(".")[0] == "triton":
                yield f"{package.name}: {path} imports {module} when it is imported"
            for reached in modules(package, path, level, module, names) if level else ():
                if holds_kernels(package, reached):
                    yield f"{package.name}: {path} imports {'.'.join(reached)} when it is imported"


def imports_a_private_name(root):
    """What two files use has no underscore; a module or a dunder name may have some."""
    for package, path, tree in sources(root):
        for level, module, names in imports(tree):
            for name in names if level else ():
                (found,) = modules(package, path, level, module, [name])
                if name[0] == "_" and name[:2] != "__" and found[-1] != name:
                    yield f"{package.name}: {path} imports {name}"


def uses_what_is_banned(root):
    for package in packages(root):
        for path in files(package / "src", "*.py"):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if match := BANNED.search(line):
                    yield f"{path.relative_to(root)}:{number}: {match[0]}"


def packs_what_ruff_formats(root):
    # tables may stand as they are written; what is shipped and linked has none
    for package in packages(root):
        for path in files(package / "src", "*.py"):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if line.endswith("# fmt: skip"):
                    yield f"{path.relative_to(root)}:{number}"


def asserts(root):
    for package, path, tree in sources(root):
        for node in ast.walk(tree):
            if isinstance(node, ast.Assert):
                yield f"{package.name}: {path}:{node.lineno}"


def names_what_is_gone(root):
    """Kernels name code in double backticks; a word is a name if it has an underscore."""
    quoted = re.compile(r"``(\w*_\w*)``")
    of = {path: package for package in packages(root) for path in files(package / "src", "*.py")}
    texts = {path: path.read_text() for path in of}
    known = {word for text in texts.values() for word in re.findall(r"\w+", quoted.sub("", text))}
    for path, text in texts.items():
        for word in set(quoted.findall(text)) - known:
            if holds_kernels(of[path], path.with_suffix("").parts):
                yield f"{path.relative_to(root)}: {word}"


def lacks_a_required_file(root):
    kernels = kernel_packages(root)
    for package in packages(root):
        source = f"src/{import_name(package)}"
        required = [f"{source}/{n}" for n in ("__init__.py", "__main__.py", "py.typed")] + REQUIRED
        for name in required + (REQUIRED_OF_KERNELS if package in kernels else []):
            if not (package / name).exists():
                yield f"{package.name} has no {name}"
    for package in packages(root):
        copy = package / "LICENSE"
        if copy.exists() and copy.read_bytes() != (root / "LICENSE").read_bytes():
            yield f"{package.name}: LICENSE is not the repository's"


def changelog_disagrees_with_version(root):
    for package in packages(root):
        init = (package / "src" / import_name(package) / "__init__.py").read_text()
        version = re.search(r'^__version__ = "(.+)"$', init, re.MULTILINE)[1]
        text = (package / "CHANGELOG.md").read_text()
        headings = re.findall(r"^## (\S+)", text, re.MULTILINE)
        released = [heading for heading in headings if heading != "Unreleased"]
        if headings[:1] != ["Unreleased"] and headings[:1] != [version]:
            yield f"{package.name}: CHANGELOG.md begins with {headings[:1]}"
        if released[:1] != [version]:
            yield f"{package.name}: CHANGELOG.md has {released[:1]}, the version is {version}"


def documents(root):
    places = ("*.md", "docs/*.md", "linked/*.md", "packages/*/*.md", "packages/*/docs/*.md")
    return sorted(path for place in places for path in root.glob(place))


# the shell stops where it is empty
OURS = "${ATTN_INDEX:?}"


def lets_an_index_choose(command):
    """Return whether a command that names one of ours may take a third party of that name.

    Ours come from files, from our index alone and without dependencies, or by hashes. Its address
    must not be empty, and to uv it is the first and the default index: what that lacks, or does
    not answer, uv would take from another.
    """
    words = command.replace('"', "").split()
    if "--no-index" in words:
        return False
    if {"--extra-index-url", "--index-strategy"} & {word.partition("=")[0] for word in words}:
        return True
    ours = {f"{one} {other}" for one, other in pairwise(words) if other == OURS}
    if command.startswith("uv "):
        return (
            not {f"--index {OURS}", f"--default-index {OURS}"} <= ours or "--no-deps" not in words
        )
    is_alone = "--isolated" in words or "--require-hashes" in words
    return not (is_alone and "--no-deps" in words and f"--index-url {OURS}" in ours)


def tells_to_install_from_an_index(root):
    names = "|".join(package.name for package in packages(root))
    command = re.compile(
        rf"(?:uv (?:pip install|add)|pip3? install) [^`\n]*(?<![\w./-])(?:{names})(?![\w/])[^`\n]*"
    )
    python = [*files(root / "packages", "*.py", follow=False), *files(root / "linked", "*.py")]
    for path in [*documents(root), *python]:
        # a command may go on in the next line
        text = path.read_text().replace("\\\n", " ")
        for found in command.finditer(text):
            if lets_an_index_choose(found[0]):
                yield f"{path.relative_to(root)}: {found[0]}"


def links_to_nothing(root):
    for path in documents(root):
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        for address in re.findall(r"\]\(([^)#\s]+)", text):
            if "://" not in address and not (path.parent / address).exists():
                yield f"{path.relative_to(root)}: {address}"


def readme_lists_other_packages(root):
    listed = set(re.findall(r"\]\(packages/([\w-]+)/?\)", (root / "README.md").read_text()))
    there = {package.name for package in packages(root)}
    yield from (f"README.md does not list {name}" for name in sorted(there - listed))
    yield from (f"README.md lists {name}" for name in sorted(listed - there))


RULES = [
    uses_private_names_of_attn_common,
    imports_a_sibling_or_itself_by_name,
    imports_against_the_layers,
    imports_kernels_eagerly,
    imports_a_private_name,
    uses_what_is_banned,
    packs_what_ruff_formats,
    asserts,
    names_what_is_gone,
    lacks_a_required_file,
    changelog_disagrees_with_version,
    tells_to_install_from_an_index,
    links_to_nothing,
    readme_lists_other_packages,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_holds_here(rule, root):
    assert list(rule(root)) == []


@pytest.fixture
def small(tmp_path):
    write_small_repository(tmp_path)
    return tmp_path


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_holds_in_a_small_repository(rule, small):
    assert list(rule(small)) == []


SRC = "packages/a/src/a"
BREACHES = [
    (uses_private_names_of_attn_common, f"{SRC}/api.py", "from attn_common import Vendor"),
    (uses_private_names_of_attn_common, f"{SRC}/api.py", "from attn_common.fp8 import cdiv"),
    (uses_private_names_of_attn_common, f"{SRC}/api.py", "import attn_common\nattn_common._x"),
    (imports_a_sibling_or_itself_by_name, f"{SRC}/api.py", "def f():\n    import b.api"),
    (imports_a_sibling_or_itself_by_name, f"{SRC}/api.py", "from a import _dense"),
    (imports_a_sibling_or_itself_by_name, "packages/attn-common/src/attn_common/x.py", "import a"),
    (imports_against_the_layers, f"{SRC}/_dense/tiles.py", "from .portable import forward"),
    (imports_against_the_layers, f"{SRC}/_dense/portable/forward.py", "from ... import api"),
    (imports_against_the_layers, f"{SRC}/_dense/hopper/forward.py", "from .. import ops"),
    (imports_against_the_layers, f"{SRC}/api.py", "def f():\n    from ._dense.launch import g"),
    (imports_kernels_eagerly, f"{SRC}/_dense/ops.py", "from .portable import forward"),
    (imports_kernels_eagerly, f"{SRC}/_dense/ops.py", "from . import launch"),
    (imports_kernels_eagerly, f"{SRC}/api.py", "import triton.language as tl"),
    (imports_a_private_name, f"{SRC}/api.py", "from ._dense.tiles import _row"),
    (uses_what_is_banned, f"{SRC}/_dense/portable/x.py", "p = tl.make_block_ptr(q)"),
    (uses_what_is_banned, f"{SRC}/_dense/portable/x.py", "p = tl.advance(p)"),
    (uses_what_is_banned, f"{SRC}/_dense/portable/x.py", "@triton.autotune([])"),
    (packs_what_ruff_formats, f"{SRC}/_dense/portable/x.py", "f(\n    x, y,\n)  # fmt: skip"),
    (asserts, f"{SRC}/api.py", "def f(x):\n    assert x"),
    (names_what_is_gone, f"{SRC}/_dense/portable/x.py", '"""See ``round_kernel``."""'),
    (lacks_a_required_file, "packages/c/pyproject.toml", ""),
    (lacks_a_required_file, "packages/a/LICENSE", "another text"),
    (changelog_disagrees_with_version, f"{SRC}/__init__.py", '__version__ = "1.1.0"'),
    (changelog_disagrees_with_version, "packages/a/CHANGELOG.md", "## 0.9.0\n\n## 1.0.0\n"),
    (tells_to_install_from_an_index, "docs/x.md", "pip install attn-common"),
    (tells_to_install_from_an_index, "docs/x.md", "    pip install -c f 'attn-common>=1'"),
    (tells_to_install_from_an_index, f"{SRC}/api.py", '"""pip install "a[extra]" numpy."""'),
    (links_to_nothing, "docs/x.md", "[x](y.md)"),
    (readme_lists_other_packages, "README.md", "[a](packages/a) [b](packages/b)"),
    (readme_lists_other_packages, "packages/c/pyproject.toml", ""),
    # the same in what is linked
    (uses_private_names_of_attn_common, "linked/host/x.py", "from attn_common.fp8 import cdiv"),
    (imports_a_sibling_or_itself_by_name, "linked/host/x.py", "from a import _dense"),
    (imports_against_the_layers, "linked/launch/x.py", "from ..._dense import ops"),
    (imports_kernels_eagerly, "linked/host/x.py", "import triton"),
    (uses_what_is_banned, "linked/portable/x.py", "p = tl.advance(p)"),
    (packs_what_ruff_formats, "linked/hopper/x.py", "f(\n    x, y,\n)  # fmt: skip"),
    (asserts, "linked/hopper/x.py", "assert x"),
    (names_what_is_gone, "linked/hopper/x.py", "# of ``round_kernel``"),
    (tells_to_install_from_an_index, "linked/host/x.py", "# pip install a"),
    (tells_to_install_from_an_index, "linked/testing/x.py", "# pip install a"),
    (links_to_nothing, "linked/README.md", "[x](y.md)"),
]


@pytest.mark.parametrize(("rule", "path", "text"), BREACHES)
def test_catches_a_breach(rule, path, text, small):
    write(small, {path: text})
    assert list(rule(small))


def test_every_rule_is_shown_to_catch_something():
    assert {rule for rule, _, _ in BREACHES} == set(RULES)


ALONE = 'pip install --isolated --no-deps --index-url "${ATTN_INDEX:?}" attn-common a'
HASHED = "pip install --no-deps --index-url ${ATTN_INDEX:?} --require-hashes -r a.txt"
FIRST = (
    'uv pip install --no-config --no-deps --index "${ATTN_INDEX:?}" '
    '--default-index "${ATTN_INDEX:?}" attn-common a'
)


@pytest.mark.parametrize(
    "command",
    [
        "pip install --no-index --find-links dist a==1.0.0",
        ALONE,
        HASHED,
        FIRST,
        "pip install torch",
    ],
)
def test_a_way_that_takes_ours_is_no_breach(command, small):
    write(small, {"docs/x.md": f"```sh\n{command}\n```\nSee `{command}`.\n"})
    assert list(tells_to_install_from_an_index(small)) == []


@pytest.mark.parametrize(
    "command",
    [
        # what each word is there for
        *(ALONE.replace(word, "") for word in ("--isolated ", "--no-deps ", "--index-url ")),
        ALONE.replace("${ATTN_INDEX:?}", "https://elsewhere.example/simple/"),
        ALONE.replace(":?", ""),
        FIRST.replace(":?", ""),
        ALONE.replace("--index-url", "--extra-index-url"),
        f"{ALONE} --extra-index-url https://elsewhere.example/simple/",
        f"{ALONE} --extra-index-url=https://elsewhere.example/simple/",
        HASHED.replace("--require-hashes ", ""),
        FIRST.replace("--index ", "--default-index https://elsewhere.example/ --extra-index-url "),
        f"{FIRST} --index-strategy unsafe-best-match",
        "uv pip install a",
        "uv add a",
        "pip install \\\n  a",
    ],
)
def test_a_way_that_may_take_a_third_party_is_one(command, small):
    write(small, {"docs/x.md": f"```sh\n{command}\n```\n"})
    assert list(tells_to_install_from_an_index(small))


def test_ignored_files_stay_out_of_the_tree(root):
    ignored = (root / ".gitignore").read_text().split()
    assert {"/dist/", "/build/", "/.nox/", "/.bootstrap/"} <= set(ignored)
    assert Path(root / ".ci" / "run").stat().st_mode & 0o111
