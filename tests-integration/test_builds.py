"""What is linked is in sdists, wheels, editable installs and clones; without links a build stops.

The wheels in dist/ were built from the sdists beside them, so they serve here, too. Of runs of nox:
one waits for another, and arguments that select no test are an error.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from ._repository import PLACES, files, import_name, place

# for each folder that wheels hold, a module that imports other linked ones
MODULES = {"host": "forms", "launch": "runtime", "portable": "", "hopper": "tma"}
FIX = "git config core.symlinks true"
OFFLINE = ("--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")


def linked(package):
    """Return the folders that a package links."""
    return [folder for folder in PLACES if place(package, folder).exists()]


@pytest.fixture(
    params=["blocksparse-attn", "flash-attn-triton", "lightning-attn", "prefix-prefill"]
)
def linking(request, root):
    return root / "packages" / request.param


@pytest.fixture
def one(root):
    """One of them, for what takes a build."""
    return root / "packages" / "lightning-attn"


def contents(base, prefix):
    """Return the files below a folder by their names, as an archive has them."""
    return {f"{prefix}/{p.relative_to(base).as_posix()}": p.read_bytes() for p in files(base)}


def test_sdist_holds_the_linked_files(linking, noxfile):
    (path,) = noxfile.DIST.glob(f"{import_name(linking)}-*.tar.gz")
    with tarfile.open(path) as archive:
        members = {m.name.partition("/")[2]: m for m in archive.getmembers()}
        assert not [m.name for m in members.values() if m.issym() or m.islnk()]
        for folder in linked(linking):
            where = place(linking, folder)
            for name, text in contents(where, where.relative_to(linking).as_posix()).items():
                assert archive.extractfile(members[name]).read() == text, name


def test_wheel_from_the_sdist_holds_the_linked_files(linking, noxfile):
    assert linked(linking)
    with zipfile.ZipFile(noxfile.wheel(linking.name)) as archive:
        for folder in linked(linking):
            where = place(linking, folder)
            if (linking / "src") in where.parents:
                for name, text in contents(where, where.relative_to(linking / "src")).items():
                    assert archive.read(name) == text, name


def import_linked(source, package, python):
    """Import a package and its linked modules from a folder of sources."""
    name = import_name(package)
    modules = [
        ".".join(filter(None, [*place(source.parent, folder).relative_to(source).parts, module]))
        for folder, module in MODULES.items()
        if place(source.parent, folder).exists()
    ]
    code = f"import {name}, {', '.join(modules)}\nprint({name}.__file__)"
    found = python(code, env={**os.environ, "PYTHONPATH": str(source)})
    assert found.startswith(str(source))


def test_editable_install_imports_what_is_linked(one, python, tmp_path):
    command = [sys.executable, "-m", "pip", "install", "--quiet", *OFFLINE, "--ignore-installed"]
    command += ["--prefix", str(tmp_path), "--editable", str(one)]
    subprocess.run(command, check=True)
    (path,) = tmp_path.rglob("*.pth")
    assert path.read_text().split() == [str(one / "src")]
    import_linked(one / "src", one, python)


def git(*arguments):
    subprocess.run(["git", *map(str, arguments)], check=True, capture_output=True)


def clone(root, to, *options):
    if not (root / ".git").exists():
        pytest.skip("no git repository to clone")
    git("clone", "--quiet", "--depth=1", *options, root.as_uri(), to)
    return to / "packages"


def test_clone_has_the_links(root, one, python, tmp_path):
    packages = clone(root, tmp_path)
    for package in packages.iterdir():
        for folder in linked(root / "packages" / package.name):
            assert place(package, folder).is_symlink()
            assert place(package, folder).resolve() == tmp_path / "linked" / folder
    import_linked(packages / one.name / "src", one, python)


def test_checkout_without_links_stops_every_build(root, one, tmp_path):
    package = clone(root, tmp_path / "clone", "-c", "core.symlinks=false") / one.name
    out = tmp_path / "out"
    commands = {
        "wheel": ["build", "--no-isolation", "--wheel", f"--outdir={out}", package],
        "sdist": ["build", "--no-isolation", "--sdist", f"--outdir={out}", package],
        "pip": ["pip", "install", *OFFLINE, f"--target={out}", package],
        "editable": ["pip", "install", *OFFLINE, f"--prefix={out}", "--editable", package],
    }
    for name, command in commands.items():
        done = subprocess.run(
            [sys.executable, "-m", *map(str, command)], capture_output=True, text=True
        )
        text = done.stdout + done.stderr
        assert done.returncode, name
        assert text.count(FIX) == 1, text
        assert "Traceback" not in text
        assert re.search(r"src/lightning_attn/_\S* is not the folder", text)
    assert not out.exists() or not list(out.rglob("*.whl"))
    # what the message says helps
    git("-C", tmp_path / "clone", *FIX.split()[1:])
    git("-C", tmp_path / "clone", "checkout", "--", "packages")
    command = [sys.executable, "-m", *map(str, commands["wheel"])]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert "lightning_attn/_linked/host/forms.py" in archive.namelist()


@pytest.mark.parametrize("folder", ["host", "testing", "benchmarks"])
def test_link_to_nothing_stops_a_build(folder, root, one, tmp_path):
    # a copy of one package, and beside it linked/ without this folder
    package = tmp_path / "packages" / one.name
    shutil.copytree(one, package, symlinks=True)
    shutil.copytree(root / "linked", tmp_path / "linked")
    shutil.rmtree(tmp_path / "linked" / folder)
    command = [sys.executable, "-m", "build", "--no-isolation", "--sdist", str(package)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode
    text = done.stdout + done.stderr
    assert f"{place(package, folder).relative_to(package)} is not the folder" in text
    assert FIX in text


ADDRESSES = {
    "ATTN_REPOSITORY_URL": "https://git.example/attention/",
    "ATTN_PAGES_URL": "https://pages.example/attention",
}


def build(package, out, *options, **env):
    command = [sys.executable, "-m", "build", "--no-isolation", f"--outdir={out}", *options]
    environment = {k: v for k, v in os.environ.items() if k not in ADDRESSES} | env
    subprocess.run([*command, str(package)], check=True, capture_output=True, env=environment)
    return {path.name: path.read_bytes() for path in out.iterdir()}


def test_what_is_built_twice_is_the_same_to_the_bit(one, noxfile, tmp_path):
    given = {name: os.environ[name] for name in ADDRESSES if name in os.environ}
    # other times and permissions, another place
    copy = tmp_path / "elsewhere" / "packages" / one.name
    shutil.copytree(one, copy)
    for path in copy.rglob("*"):
        os.utime(path, (1e9, 1e9))
        path.chmod(path.stat().st_mode & 0o700)
    found = build(copy, tmp_path / "out", **given)
    assert len(found) == 2
    for name, data in found.items():
        assert data == (noxfile.DIST / name).read_bytes(), name


def test_addresses_are_those_of_who_publishes(one, tmp_path):
    (tmp_path / "first").mkdir()
    found = build(one, tmp_path / "first", **ADDRESSES)
    (sdist,) = (tmp_path / "first").glob("*.tar.gz")
    shutil.unpack_archive(sdist, tmp_path, filter="data")
    # an sdist tells what it was made with, wherever a wheel is built from it
    again = build(next(tmp_path.glob(f"{import_name(one)}-*")), tmp_path / "second", "--wheel")
    (wheel,) = again
    assert again[wheel] == found[wheel]
    with zipfile.ZipFile(tmp_path / "second" / wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    folder = f"https://git.example/attention/blob/HEAD/packages/{one.name}"
    assert dict(x.split(", ") for x in metadata.get_all("Project-URL")) == {
        "Repository": "https://git.example/attention",
        "Issues": "https://git.example/attention/issues",
        "Documentation": f"{folder}/README.md",
        "Changelog": f"{folder}/CHANGELOG.md",
        "Package index": "https://pages.example/attention/simple/",
    }


# sessions in a folder of their own, made of the noxfile's functions
SESSIONS = """
import importlib.util
import time
from pathlib import Path

import nox

spec = importlib.util.spec_from_file_location("noxfile", NOXFILE)
noxfile = importlib.util.module_from_spec(spec)
spec.loader.exec_module(noxfile)
here = Path(__file__).parent
noxfile.BUILD = here / "build"
noxfile.LOCK = noxfile.FileLock(here / "run.lock")
alone, selected = noxfile.alone, noxfile.selected


@nox.session(venv_backend="none")
@nox.parametrize("name", ["one", "other"])
def check(session, name):
    noxfile.pytest(session, here / name, "device", name)


@nox.session(venv_backend="none", requires=["alone"])
@nox.parametrize("name", ["one", "other"])
def use_dist(session, name):
    (here / "dist").mkdir()  # no other run has it
    (here / f"{name}-builds").touch()
    while not (here / "go").exists():
        time.sleep(0.01)
    (here / "dist").rmdir()
"""


@pytest.fixture
def nox(root, tmp_path):
    """Begin nox in a folder with two folders of tests, and return its process."""
    text = f"import time\nNOXFILE = {str(root / 'noxfile.py')!r}\n{SESSIONS}"
    (tmp_path / "noxfile.py").write_text(text)
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"test_{name}.py").write_text(f"def test_{name}(): pass\n")
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": tools, "PYTHONUNBUFFERED": "1"}
    begun = []

    def begin(*arguments):
        command = [sys.executable, "-m", "nox", "--noxfile", tmp_path / "noxfile.py", *arguments]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        begun.append(subprocess.Popen(command, cwd=tmp_path, env=environment, **options))
        return begun[-1]

    yield begin
    for process in begun:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("arguments", "status"), [("-k other", 0), ("-k neither", 1), ("-k one --collect-only", 0)]
)
def test_arguments_that_select_no_test_anywhere_fail(arguments, status, nox):
    process = nox("-s", "check", "--", *arguments.split())
    text, _ = process.communicate(timeout=120)
    assert process.returncode == status, text
    assert ("no test was selected by: -k neither" in text) == (status == 1)


def test_runs_in_one_clone_wait_for_each_other(nox, tmp_path):
    first = nox("-s", "use_dist(name='one')")
    while not (tmp_path / "one-builds").exists():
        assert first.poll() is None, first.stdout.read()
    second = nox("-s", "use_dist(name='other')")
    lines = []
    while not lines or "waiting until it ends" not in lines[-1]:
        lines.append(second.stdout.readline())
        assert lines[-1], lines
    assert not (tmp_path / "other-builds").exists()
    (tmp_path / "go").touch()
    assert first.wait(60) == 0
    assert second.wait(60) == 0, second.stdout.read()


@pytest.mark.parametrize("dashes", [[], ["--"]])
@pytest.mark.parametrize(("job", "before"), [("nox", []), ("tests", ["--"])])
def test_bootstrap_takes_dashes_before_the_arguments(job, before, dashes, root, monkeypatch):
    spec = importlib.util.spec_from_file_location("bootstrap", root / "bootstrap.py")
    bootstrap = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bootstrap)
    commands = []

    def run(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(bootstrap, "prepare", lambda: "python")
    monkeypatch.setattr(bootstrap, "REPORTS", root / "nowhere")
    monkeypatch.setattr(bootstrap.subprocess, "run", run)
    bootstrap.main([job, *dashes, "-s", "x", "--", "-k", "y"])
    (command,) = commands
    assert command[5:] == [*before, "-s", "x", "--", "-k", "y"]
