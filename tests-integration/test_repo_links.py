"""Rules about what is linked, about imports, and about parameters, each shown a breach."""

from __future__ import annotations

import ast
import graphlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from ._repository import (
    PLACES,
    files,
    import_name,
    imports,
    link,
    modules,
    packages,
    parse,
    place,
    sources,
    target,
    write,
    write_small_repository,
)

MAX_PARAMETERS = 12
# what may be the same file in two packages
SAME = {"LICENSE", "__init__.py", "conftest.py", "hatch_build.py", "py.typed"}


def links_to_no_linked_folder(root):
    """Links are relative and lead to a folder of linked/, at its place and once per package."""
    for package in packages(root):
        linked = Counter()
        for folder, below, names in os.walk(package):
            for path in (Path(folder, name) for name in [*below, *names]):
                name = path.relative_to(root)
                if not path.is_symlink():
                    continue
                if path.readlink().is_absolute():
                    yield f"{name} is an absolute link"
                found = path.resolve()
                if found.parent != root.resolve() / "linked" or not found.is_dir():
                    yield f"{name} leads to {path.readlink()}, which is no folder of linked/"
                    continue
                linked[found.name] += 1
                if found.name not in PLACES or path != place(package, found.name):
                    yield f"{name} is not the place of linked/{found.name}"
        yield from (f"{package.name} links {x} {n} times" for x, n in linked.items() if n > 1)
        for folder in PLACES:
            path = place(package, folder)
            if path.exists() and not path.is_symlink():
                yield f"{path.relative_to(root)} is no link"


def linked_files_reach_into_a_package(root):
    """Linked files import the libraries, attn_common, and linked folders at their places."""
    ours = {import_name(package) for package in packages(root)} - {"attn_common"}
    for folder in PLACES:
        base, parts = _within(PLACES[folder])
        places = [other for top, other in map(_within, PLACES.values()) if top == base]
        for path in files(root / "linked" / folder, "*.py"):
            here = Path(*parts) / path.relative_to(root / "linked" / folder)
            for level, module, names in imports(parse(path.read_text())):
                if level == 0:
                    if module.partition(".")[0] in ours:
                        yield f"{path.relative_to(root)} imports {module}"
                    continue
                for reached in [(*target(here, level, module), name) for name in names]:
                    if not any(reached[: len(other)] == other for other in places):
                        yield f"{path.relative_to(root)} imports {'.'.join(reached)}"


def _within(pattern):
    """Split a place into the folder that imports count from, and the rest."""
    parts = Path(pattern).parts
    depth = 2 if parts[0] == "src" else 1
    return parts[:depth], parts[depth:]


def imports_in_a_circle(root):
    """No module imports itself by way of others, in a function or for type checkers either."""
    graphs = {package.name: {} for package in packages(root)}
    for package, path, tree in sources(root):
        reached = set()
        for level, module, names in imports(tree):
            if level:
                found = modules(package, path, level, module, names)
                reached |= {f"{'/'.join(parts)}.py" for parts in found}
        graphs[package.name][path.as_posix()] = reached - {path.as_posix()}
    for name, graph in graphs.items():
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            yield f"{name}: {' <- '.join(error.args[1])}"


def same_file_twice(root):
    """What two packages share stands in linked/."""
    seen = {}
    for base in [*packages(root), root / "linked"]:
        for path in files(base, follow=False):
            if path.is_symlink() or path.name in SAME:
                continue
            if text := path.read_bytes():
                seen.setdefault(text, {}).setdefault(base, path.relative_to(root).as_posix())
    for places in seen.values():
        if len(places) > 1:
            yield ", ".join(places.values())


def takes_many_parameters(root):
    """Kernels and device functions take few parameters: structures hold what belongs together."""
    for package, path, tree in sources(root):
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef):
                continue
            decorators = [ast.unparse(x) for x in node.decorator_list]
            if not any(x.startswith(("triton.jit", "gluon.jit", "entry(")) for x in decorators):
                continue
            count = sum(map(len, (node.args.posonlyargs, node.args.args, node.args.kwonlyargs)))
            if count > MAX_PARAMETERS:
                yield f"{package.name}: {path}:{node.lineno}: {node.name} takes {count}"


RULES = [
    links_to_no_linked_folder,
    linked_files_reach_into_a_package,
    imports_in_a_circle,
    same_file_twice,
    takes_many_parameters,
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
DEVICE = f"({', '.join(f'x{i}' for i in range(13))}):\n    pass\n"
BREACHES = [
    (linked_files_reach_into_a_package, "linked/host/x.py", "from ...api import f"),
    (linked_files_reach_into_a_package, "linked/host/x.py", "from ... import api"),
    (
        linked_files_reach_into_a_package,
        "linked/launch/x.py",
        "def f():\n    from ..._dense.tiles import g",
    ),
    (linked_files_reach_into_a_package, "linked/hopper/x.py", "from ..._dense import forward"),
    (linked_files_reach_into_a_package, "linked/testing/x.py", "from .._numerics import f"),
    (linked_files_reach_into_a_package, "linked/testing/x.py", "import a.api"),
    (linked_files_reach_into_a_package, "linked/benchmarks/x.py", "from .. import cases"),
    (imports_in_a_circle, f"{SRC}/_dense/portable/tile.py", "from . import forward"),
    (imports_in_a_circle, f"{SRC}/_dense/portable/tile.py", "def f():\n    from .forward import g"),
    (
        imports_in_a_circle,
        f"{SRC}/_dense/portable/tile.py",
        "if TYPE_CHECKING:\n    from .forward import g",
    ),
    (
        imports_in_a_circle,
        f"{SRC}/_dense/tiles.py",
        "from . import ops, portable",
    ),
    (imports_in_a_circle, f"{SRC}/__init__.py", "from .api import f"),
    (imports_in_a_circle, "linked/host/form.py", "from ..launch.run import f"),
    (same_file_twice, "packages/b/tests/helpers.py", "import triton\nx = 1\n"),
    (same_file_twice, "linked/testing/helpers.py", "import triton\nx = 1\n"),
    (takes_many_parameters, f"{SRC}/_dense/portable/x.py", f"@triton.jit\ndef f{DEVICE}"),
    (
        takes_many_parameters,
        f"{SRC}/_dense/portable/x.py",
        f"@gluon.jit(noinline=True)\ndef f{DEVICE}",
    ),
    (takes_many_parameters, "linked/portable/x.py", f"@triton.jit\ndef f{DEVICE}"),
    (takes_many_parameters, f"{SRC}/_dense/portable/x.py", f"@entry(triton.jit)\ndef f{DEVICE}"),
]
# what makes some of them one
FURTHER = {
    f"{SRC}/_dense/tiles.py": {f"{SRC}/_dense/ops.py": "from . import tiles"},
    f"{SRC}/__init__.py": {f"{SRC}/api.py": "from . import __version__"},
    "packages/b/tests/helpers.py": {"packages/a/tests/x.py": "import triton\nx = 1\n"},
    "linked/testing/helpers.py": {"packages/a/tests/x.py": "import triton\nx = 1\n"},
}


@pytest.mark.parametrize(("rule", "path", "text"), BREACHES)
def test_catches_a_breach(rule, path, text, small):
    write(small, {path: text, **FURTHER.get(path, {})})
    assert list(rule(small))


def _absolute(path, root):
    path.unlink()
    path.symlink_to(root / "linked" / "host", target_is_directory=True)


def _elsewhere(path, root):
    path.unlink()
    link(path, root / "packages" / "b" / "tests")


def _below_a_folder(path, root):
    write(root, {"linked/host/below/x.py": ""})
    path.unlink()
    link(path, root / "linked" / "host" / "below")


def _to_nothing(path, root):
    path.unlink()
    link(path, root / "linked" / "gone")


def _to_another_folder(path, root):
    path.unlink()
    link(path, root / "linked" / "launch")


def _twice(path, root):
    link(path.parent / "again", root / "linked" / "host")


def _copied(path, root):
    path.unlink()
    path.mkdir()


def _text_file(path, root):
    to = path.readlink()
    path.unlink()
    path.write_text(str(to))


def _of_a_file(path, root):
    link(path.parent / "form.py", root / "linked" / "host" / "form.py")


BROKEN = [
    _absolute,
    _elsewhere,
    _below_a_folder,
    _to_nothing,
    _to_another_folder,
    _twice,
    _copied,
    _text_file,
    _of_a_file,
]


@pytest.mark.parametrize("breach", BROKEN, ids=lambda breach: breach.__name__.strip("_"))
def test_catches_a_wrong_link(breach, small):
    breach(place(small / "packages" / "a", "host"), small)
    assert list(links_to_no_linked_folder(small))


def test_every_rule_is_shown_to_catch_something():
    assert {rule for rule, _, _ in BREACHES} | {links_to_no_linked_folder} == set(RULES)


def test_what_is_no_circle(small):
    texts = {
        f"{SRC}/api.py": "from ._dense import tiles",
        f"{SRC}/__init__.py": "from .api import f",
    }
    write(small, texts)
    assert list(imports_in_a_circle(small)) == []


def test_every_folder_of_linked_has_a_place_and_serves_two_packages(root):
    folders = {path.name for path in (root / "linked").iterdir() if path.is_dir()}
    assert folders == set(PLACES)
    for folder in folders:
        assert sum(place(p, folder).is_symlink() for p in packages(root)) >= 2, folder


def test_linked_files_import_known_libraries(root):
    """Nothing but the standard library and what every package that links them asks for."""
    known = sys.stdlib_module_names | {"attn_common", "numpy", "pytest", "torch", "triton"}
    known |= {"cuda", "matplotlib"}  # of the extra kernels, and of the group bench
    for path in files(root / "linked", "*.py"):
        for level, module, _ in imports(parse(path.read_text())):
            assert level or module.partition(".")[0] in known, f"{path}: {module}"


def git(root, *arguments):
    command = ["git", "-C", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def last_tag(root, package):
    """Return the tag of a package's last release that the checkout descends from."""
    return git(root, "describe", "--tags", "--abbrev=0", "--match", f"{package.name}-v*")


def linked_changes_that_no_changelog_tells(root, package):
    """Yield what changed in linked/ since a package's last tag, if its changelog did not."""
    tag = last_tag(root, package)
    if git(root, "diff", "--name-only", tag, "--", f"packages/{package.name}/CHANGELOG.md"):
        return
    for folder in PLACES:
        if place(package, folder).is_symlink():
            changed = git(root, "diff", "--name-only", tag, "--", f"linked/{folder}")
            new = git(root, "ls-files", "--others", "--exclude-standard", f"linked/{folder}")
            yield from (f"{package.name}: {name}" for name in f"{changed}\n{new}".split())


def test_a_linked_change_is_in_the_changelogs(root, package):
    path = root / "packages" / package
    if not any(place(path, folder).is_symlink() for folder in PLACES):
        return
    if not last_tag(root, path):
        pytest.skip(f"no tag {package}-v* to compare with: nothing is released from this history")
    assert list(linked_changes_that_no_changelog_tells(root, path)) == []


@pytest.mark.parametrize("change", ["edited", "added", "committed"])
def test_catches_a_linked_change_without_a_changelog(change, small):
    a = small / "packages" / "a"
    author = ("-c", "user.name=x", "-c", "user.email=x@y")

    def commit():
        git(small, "add", "--all")
        git(small, *author, "commit", "--quiet", "--message=x")

    git(small, "init", "--quiet")
    commit()
    assert last_tag(small, a) == ""
    git(small, *author, "tag", "--annotate", "--message=x", "a-v1.0.0")
    assert list(linked_changes_that_no_changelog_tells(small, a)) == []
    write(small, {f"linked/host/{'new' if change == 'added' else 'form'}.py": "x = 1\n"})
    if change == "committed":
        commit()
    assert list(linked_changes_that_no_changelog_tells(small, a))
    write(small, {"packages/a/CHANGELOG.md": "## Unreleased\n\n- It differs.\n\n## 1.0.0\n"})
    assert list(linked_changes_that_no_changelog_tells(small, a)) == []
