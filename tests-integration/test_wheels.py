"""What each wheel holds and asks for, read from the wheel itself."""

import os
import re
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

# other people own these names on the public index; their newest versions when last looked at
FOREIGN = {"flash-attn-triton": Version("0.1.1"), "lightning-attn": Version("0.0.5")}


@pytest.fixture
def wheel(noxfile, package):
    path = Path(noxfile.wheel(package))
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        (info,) = {n.split("/")[0] for n in names if n.split("/")[0].endswith(".dist-info")}
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        license_text = archive.read(f"{info}/licenses/LICENSE").decode()
    return SimpleNamespace(
        path=path,
        info=info,
        metadata=metadata,
        license=license_text,
        files=[n for n in names if not n.startswith(f"{info}/")],
    )


def test_holds_one_typed_import_package(wheel, package):
    name = package.replace("-", "_")
    assert {file.split("/")[0] for file in wheel.files} == {name}
    assert {f"{name}/__init__.py", f"{name}/__main__.py", f"{name}/py.typed"} <= set(wheel.files)


def test_holds_the_sources_and_nothing_else(wheel, package, root):
    source = root / "packages" / package / "src"
    # rglob does not enter linked directories
    folders = os.walk(source, followlinks=True)
    ours = {Path(base, f).relative_to(source).as_posix() for base, _, fs in folders for f in fs}
    assert set(wheel.files) == {p for p in ours if "__pycache__" not in p}
    assert not [file for file in wheel.files if "test" in file.split("/")[1]]


def test_serves_any_python_and_machine(wheel):
    assert wheel.path.name.endswith("-py3-none-any.whl")
    assert wheel.metadata["Requires-Python"] == ">=3.10"


def test_carries_the_license(wheel, root):
    assert wheel.license == (root / "LICENSE").read_text()
    assert wheel.metadata["License-Expression"] == "Apache-2.0"


def test_is_refused_by_the_public_index(wheel):
    assert "Private :: Do Not Upload" in wheel.metadata.get_all("Classifier")


def test_says_what_it_is_for(wheel, package, root):
    assert wheel.metadata["Summary"]
    assert wheel.metadata["Author"]
    assert "attention" in wheel.metadata["Keywords"].split(",")
    classifiers = set(wheel.metadata.get_all("Classifier"))
    # what the workflow tests, the floor, and no other
    workflow = (root / ".github" / "workflows" / "ci.yml").read_text()
    tested = re.findall(r"3\.\d+", re.search(r"python: \[(.*)\]", workflow)[1])
    listed = [x.split(" :: ")[-1] for x in classifiers if "Python :: 3." in x]
    assert {"3.10", *tested} <= set(listed)
    assert wheel.metadata["Requires-Python"] == f">={min(listed, key=Version)}"


def test_interpreter_is_an_extra_of_packages_with_triton(wheel):
    needs = wheel.metadata.get_all("Requires-Dist", [])
    has_triton = any(x.startswith("triton") for x in needs)
    assert ("numpy; extra == 'interpreter'" in needs) == has_triton


def test_asks_for_what_is_declared(wheel, package, noxfile):
    project = noxfile.PROJECTS[package]["project"]
    got = {str(Requirement(r)) for r in wheel.metadata.get_all("Requires-Dist", [])}
    want = {str(Requirement(r)) for r in project["dependencies"]}
    for extra, needs in project.get("optional-dependencies", {}).items():
        want |= {str(Requirement(f"{need}; extra == '{extra}'")) for need in needs}
    assert got == want


def test_depends_on_no_sibling_but_attn_common(wheel, noxfile):
    needs = {r.name: r for r in map(Requirement, wheel.metadata.get_all("Requires-Dist", []))}
    assert set(needs) & set(noxfile.PACKAGES) <= {"attn-common"}
    if "attn-common" in needs:
        assert {s.operator for s in needs["attn-common"].specifier} == {">=", "<"}


def test_version_is_above_every_foreign_one(wheel, package):
    version = Version(wheel.metadata["Version"])
    assert version >= Version("1.0.0")
    assert version > FOREIGN.get(package, Version("0"))


def test_sdist_holds_the_tests(package, noxfile):
    (path,) = noxfile.DIST.glob(f"{package.replace('-', '_')}-*.tar.gz")
    with tarfile.open(path) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"} <= set(names)
    assert any(name.startswith("tests/test_") for name in names)
    assert not [name for name in names if name.rpartition("/")[2] == ".gitignore"]


def test_sdist_holds_the_images_of_its_readme(package, noxfile):
    (path,) = noxfile.DIST.glob(f"{package.replace('-', '_')}-*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        top = archive.getnames()[0].partition("/")[0]
        readme = archive.extractfile(f"{top}/README.md").read().decode()
    images = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", readme)
    assert {image for image in images if "://" not in image} <= names
