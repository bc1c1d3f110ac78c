"""Our package index beside one that offers other packages by all our names, newer than ours."""

import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import pytest
import uv
from packaging.utils import canonicalize_name

from ._servers import Index, Site, make_wheel

NEW = "99.0"
COMMAND = re.compile(r"^(?:pip|uv pip) install .*$", re.MULTILINE)


def write_index(root, files, site, *options):
    command = [sys.executable, str(root / "ci" / "index.py"), f"--files={files}", f"--site={site}"]
    return subprocess.run([*command, *options], capture_output=True, text=True)


@pytest.fixture(scope="module")
def folder(root, noxfile, tmp_path_factory):
    site = tmp_path_factory.mktemp("index") / "site"
    done = write_index(root, noxfile.DIST, site, "--url=https://pages.example/attention/")
    assert done.returncode == 0, done.stderr
    return site


@pytest.fixture(params=["html", "json"])
def ours(request, folder):
    server = Site(folder, has_json=request.param == "json")
    yield server
    server.close()


@pytest.fixture
def theirs(noxfile, tmp_path):
    """An index of stubs of third parties, and of newer packages by all our names."""
    (tmp_path / "theirs").mkdir()
    index = Index(tmp_path / "theirs")
    for package in noxfile.PACKAGES:
        index.offer(package, NEW, [package.replace("-", "_"), "flash_attn"])
    for requirement in noxfile.requirements(noxfile.PACKAGES, ()):
        name = canonicalize_name(requirement.name)
        if name not in noxfile.PACKAGES:
            index.offer(name, "1000" if name != "torch" else "2.11", [name.replace("-", "_")])
    yield index
    index.close()


@pytest.fixture
def shell(ours, theirs, tmp_path):
    """Run a command as a README has it, and return what is installed by then.

    The other index is the one that pip and uv are configured with.
    """
    target = tmp_path / "target"

    def run(command, **also):
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))}
        environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": theirs.url}
        environment |= {"UV_NO_CONFIG": "1", "UV_DEFAULT_INDEX": theirs.url, "UV_NO_CACHE": "1"}
        environment |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        environment |= {
            "no_proxy": "127.0.0.1",
            "ATTN_INDEX": ours.url,
            "THEIRS": theirs.url,
            **also,
        }
        tools = {"pip": [sys.executable, "-m", "pip"], "uv": [uv.find_uv_bin()]}
        functions = (f'{name}() {{ {" ".join(words)} "$@"; }}\n' for name, words in tools.items())
        to = f"--target {target}" + (" --no-cache-dir" if command.startswith("pip") else "")
        text = "".join([*functions, f"{command} {to}\n"])
        done = subprocess.run(["sh", "-c", text], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        found = importlib.metadata.distributions(path=[str(target)])
        return {canonicalize_name(d.metadata["Name"]): d for d in found}

    return run


def readme_commands(root, package):
    """Return the commands of a README's section on installing: pip's two lines, and uv's."""
    text = (root / "packages" / package / "README.md").read_text()
    section = text.partition("## Install\n")[2].partition("\n## ")[0]
    found = COMMAND.findall(section)
    last = next(i for i, line in enumerate(found) if line.startswith("uv"))
    return found[:last], found[last]


def is_ours(distribution, wheel):
    """Say whether what is installed is the wheel's files."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        files = {str(file): file.locate() for file in distribution.files}
        return all(n in files and files[n].read_bytes() == archive.read(n) for n in names)


def test_pip_installs_one_package_by_the_two_lines(root, noxfile, ours, theirs, shell):
    lines, _ = readme_commands(root, "flash-attn-triton")
    shell(lines[0])
    assert theirs.asked == {"torch", "triton"}
    theirs.asked.clear()
    # an index that the environment adds stays out, too
    installed = shell(lines[1], PIP_EXTRA_INDEX_URL=theirs.url)
    assert set(installed) == {"attn-common", "flash-attn-triton", "torch", "triton"}
    for name in ("attn-common", "flash-attn-triton"):
        assert is_ours(installed[name], noxfile.wheel(name))
    assert theirs.asked == set()
    # metadata came from the files beside the wheels
    assert any(path.endswith(".whl.metadata") for path in ours.asked)


def test_uv_installs_one_package_by_the_two_steps(root, noxfile, theirs, shell):
    _, line = readme_commands(root, "flash-attn-triton")
    installed = shell(line, UV_INDEX=theirs.url)
    assert set(installed) == {"attn-common", "flash-attn-triton"}
    for name in ("attn-common", "flash-attn-triton"):
        assert is_ours(installed[name], noxfile.wheel(name))
    assert theirs.asked == set()


def test_uv_takes_no_third_party_where_ours_lacks_a_package(root, theirs, shell):
    _, line = readme_commands(root, "flash-attn-triton")
    theirs.offer("absent", NEW, ["absent"])
    with pytest.raises(AssertionError, match="absent was not found"):
        shell(line.replace("flash-attn-triton", "absent"))
    assert theirs.asked == set()


PROJECT = """
[project]
name = "user"
version = "1"
requires-python = ">=3.10"
dependencies = ["attn-common", "flash-attn-triton"]
[tool.uv.sources]
attn-common = { index = "attn" }
flash-attn-triton = { index = "attn" }
[[tool.uv.index]]
name = "attn"
url = "URL"
explicit = true
"""


def test_a_project_of_uv_has_ours_from_an_explicit_index(noxfile, ours, theirs, shell, tmp_path):
    (tmp_path / "pyproject.toml").write_text(PROJECT.replace("URL", ours.url))
    installed = shell(f"uv pip install -r {tmp_path}/pyproject.toml", UV_NO_CONFIG="0")
    for name in ("attn-common", "flash-attn-triton"):
        assert is_ours(installed[name], noxfile.wheel(name))
    assert theirs.asked == {"torch", "triton"}
    assert not any("torch" in path for path in ours.asked)


def test_hashes_keep_a_third_party_out_of_any_index(root, noxfile, folder, theirs, shell):
    (line,) = re.findall(
        r"`(pip install [^`]*--require-hashes[^`]*)`", (root / "README.md").read_text()
    )
    version = Path(noxfile.wheel("flash-attn-triton")).name.split("-")[1]
    theirs.offer("flash-attn-triton", version, ["flash_attn_triton"])
    line = line.replace("flash-attn-triton.txt", f"{folder}/requirements/flash-attn-triton.txt")
    installed = shell(line, PIP_EXTRA_INDEX_URL=theirs.url)
    assert "flash-attn-triton" in theirs.asked
    assert set(installed) == {"attn-common", "flash-attn-triton"}
    for name, distribution in installed.items():
        assert is_ours(distribution, noxfile.wheel(name))


def test_an_extra_index_brings_the_third_party(noxfile, shell):
    """What the READMEs warn of happens, and this is why."""
    command = "pip install --no-deps --index-url {} --extra-index-url {} flash-attn-triton"
    for first, second in (("${ATTN_INDEX:?}", "$THEIRS"), ("$THEIRS", "${ATTN_INDEX:?}")):
        installed = shell(command.format(first, second) + " --upgrade")
        assert installed["flash-attn-triton"].version == NEW
        assert not is_ours(installed["flash-attn-triton"], noxfile.wheel("flash-attn-triton"))


def test_readmes_have_the_two_lines_and_the_warning(root, noxfile, package):
    lines, of_uv = readme_commands(root, package)
    needed = noxfile.requirements([package], ())
    theirs = sorted({canonicalize_name(r.name) for r in needed} - set(noxfile.PACKAGES))
    ours = sorted({package, *(r.name for r in needed if r.name in noxfile.PACKAGES)})
    names = ours if package == "attn-common" else ["attn-common", package]
    assert sorted(names) == ours
    options = '--isolated --no-deps --index-url "${ATTN_INDEX:?}"'
    first = [f"pip install {' '.join(theirs)}"] if theirs else []
    assert lines == [*first, f"pip install {options} {' '.join(names)}"]
    both = '--index "${ATTN_INDEX:?}" --default-index "${ATTN_INDEX:?}"'
    assert of_uv == f"uv pip install --no-config --no-deps {both} {' '.join(names)}"
    for path in (root / "packages" / package / "README.md", root / "README.md"):
        assert "**Never add our index by `--extra-index-url`" in path.read_text()


class Anchors(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        if tag == "a":
            self.found.append(dict(attrs))


def anchors(path):
    parser = Anchors()
    parser.feed(path.read_text())
    return parser.found


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_pages_tell_the_truth_about_the_files(noxfile, folder, package):
    base = folder / "simple" / package
    page = json.loads((base / "index.json").read_text())
    assert page["name"] == package
    listed = {file["filename"]: file for file in page["files"]}
    stem = package.replace("-", "_")
    built = {p.name: p for p in noxfile.DIST.iterdir() if p.name.startswith(f"{stem}-")}
    assert set(listed) == set(built)
    for anchor, (name, file) in zip(anchors(base / "index.html"), listed.items(), strict=True):
        path = (base / file["url"]).resolve()
        assert sha256(path) == sha256(built[name]) == file["hashes"]["sha256"]
        assert anchor["href"] == f"{file['url']}#sha256={sha256(path)}"
        assert file["size"] == path.stat().st_size
        assert anchor["data-requires-python"] == file["requires-python"] == ">=3.10"
        if path.suffix == ".whl":
            beside = path.with_name(f"{name}.metadata")
            with zipfile.ZipFile(path) as archive:
                inside = f"{'-'.join(name.split('-')[:2])}.dist-info/METADATA"
                assert beside.read_bytes() == archive.read(inside)
            assert file["core-metadata"] == file["dist-info-metadata"] == {"sha256": sha256(beside)}
            for key in ("data-core-metadata", "data-dist-info-metadata"):
                assert anchor[key] == f"sha256={sha256(beside)}"


def test_the_root_lists_our_packages_and_nothing_else(noxfile, folder):
    root = json.loads((folder / "simple" / "index.json").read_text())
    names = [project["name"] for project in root["projects"]]
    assert names == noxfile.PACKAGES
    assert [a["href"] for a in anchors(folder / "simple" / "index.html")] == [
        f"{n}/" for n in names
    ]


def test_start_page_has_the_commands_with_the_address(root, folder, package):
    text = (folder / "index.html").read_text()
    lines, _ = readme_commands(root, package)
    for line in lines:
        assert line.replace('"${ATTN_INDEX:?}"', "https://pages.example/attention/simple/") in text


def test_documentation_is_published_beside_it(root, noxfile, tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    done = write_index(root, noxfile.DIST, tmp_path / "site", f"--docs={docs}")
    assert done.returncode == 1
    assert "has no index.html: build it by `nox -s docs`" in done.stderr
    (docs / "index.html").write_text("pages")
    assert write_index(root, noxfile.DIST, tmp_path / "site", f"--docs={docs}").returncode == 0
    assert (tmp_path / "site" / "docs" / "index.html").read_text() == "pages"
    assert 'href="docs/"' in (tmp_path / "site" / "index.html").read_text()


def test_newest_version_is_what_is_pinned(root, tmp_path):
    for version in ("1.9.0", "1.10.0", "1.2.0"):
        make_wheel(tmp_path, "attn-common", version, [])
    assert write_index(root, tmp_path, tmp_path / "site").returncode == 0
    pin = (tmp_path / "site" / "requirements" / "attn-common.txt").read_text()
    assert pin.startswith("attn-common==1.10.0 --hash=sha256:")
    page = json.loads((tmp_path / "site" / "simple" / "attn-common" / "index.json").read_text())
    assert page["versions"] == ["1.2.0", "1.9.0", "1.10.0"]


def test_what_is_not_ours_is_refused(root, tmp_path):
    make_wheel(tmp_path, "flash-attn", "1.0", [])
    done = write_index(root, tmp_path, tmp_path / "site")
    assert done.returncode == 1
    assert "flash-attn, which is no package of this repository" in done.stderr
    assert not (tmp_path / "site").exists()


def test_a_folder_that_is_no_index_is_not_deleted(root, tmp_path):
    make_wheel(tmp_path, "attn-common", "1.0", [])
    site = tmp_path / "site"
    site.mkdir()
    (site / "thesis.txt").touch()
    done = write_index(root, tmp_path, site)
    assert done.returncode == 1
    assert f"{site} must be new, empty or an index" in done.stderr
    (site / "thesis.txt").unlink()
    for _ in range(2):
        assert write_index(root, tmp_path, site).returncode == 0


def test_a_wheel_that_ours_require_may_not_be_missing(root, tmp_path):
    make_wheel(tmp_path, "flash-attn-triton", "1.0", [], requires=["attn-common>=1.0"])
    done = write_index(root, tmp_path, tmp_path / "site")
    assert done.returncode == 1
    assert "index: a wheel of attn-common is missing" in done.stderr
    assert not (tmp_path / "site").exists()
