"""Ours come from dist/ by path, from no index; a third party of the same name is noticed.

The index here is a small server on this machine. It offers stubs of the third parties that the
noxfile asks for, and third parties by the names of our packages, older and newer than ours.
"""

import base64
import contextlib
import hashlib
import importlib.metadata
import inspect
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ._servers import Index

OLD, NEW = "0.1.1", "99.0"


@pytest.fixture
def index(tmp_path):
    (tmp_path / "index").mkdir()
    index = Index(tmp_path / "index")
    yield index
    index.close()


@pytest.fixture
def pip(index, tmp_path):
    """Run ``pip install`` with that index alone, and return what is installed by then."""
    target = tmp_path / "target"

    def run(*arguments):
        if "--force-reinstall" in arguments:
            # into a folder pip leaves the metadata of what it replaces
            shutil.rmtree(target, ignore_errors=True)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
        environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index.url}
        environment |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "no_proxy": "127.0.0.1"}
        command = [sys.executable, "-m", "pip", "install", "--no-cache-dir", "--upgrade"]
        command += ["--target", str(target), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        found = importlib.metadata.distributions(path=[str(target)])
        return {canonicalize_name(d.metadata["Name"]): d for d in found}

    return run


def why_foreign(distribution, wheel):
    """List what shows that an installed distribution is not the given wheel of ours."""
    reasons = []
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if origin.get("url") != Path(wheel).as_uri():
        reasons.append(f"its origin is {origin.get('url', 'not recorded')}")
    installed = {str(f): f for f in distribution.files or ()}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if ".dist-info/" in name:
                continue
            file = installed.get(name)
            if file is None or not file.locate().is_file():
                reasons.append(f"{name} is missing")
            elif file.locate().read_bytes() != archive.read(name):
                reasons.append(f"{name} differs")
        ours = {name.split("/")[0] for name in archive.namelist()}
    for top in sorted({name.split("/")[0] for name in installed if "__pycache__" not in name}):
        if top not in ours and not top.endswith(".dist-info"):
            reasons.append(f"it installs {top}, too")
    return reasons


def offer_third_parties(index, noxfile, first_step):
    """Put a stub of everything that a call of pip asks for on the index."""
    pinned = {}
    for line in noxfile.CONSTRAINTS.read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            (specifier,) = requirement.specifier
            pinned[canonicalize_name(requirement.name)] = specifier.version
    asked = {canonicalize_name(Requirement(x).name) for x in first_step[: first_step.index("-c")]}
    for name in asked:
        index.offer(name, pinned.get(name, "1000"))
    return asked


def test_installed_packages_are_the_wheels_of_dist(noxfile, package):
    distribution = importlib.metadata.distribution(package)
    wheel = noxfile.wheel(package)
    assert why_foreign(distribution, wheel) == []
    hashes = json.loads(distribution.read_text("direct_url.json"))["archive_info"]["hashes"]
    assert hashes["sha256"] == hashlib.sha256(Path(wheel).read_bytes()).hexdigest()


def test_installed_files_are_as_recorded(package):
    for file in importlib.metadata.distribution(package).files:
        if file.hash:
            digest = hashlib.new(file.hash.mode, file.locate().read_bytes()).digest()
            assert base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == file.hash.value


def test_our_steps_never_ask_the_index_for_ours(noxfile, package, index, pip):
    first, *rest = noxfile.install_steps([package], also=noxfile.group("integration"))
    third_parties = offer_third_parties(index, noxfile, first)
    for name in noxfile.PACKAGES:
        index.offer(name, OLD, [name.replace("-", "_")])
        index.offer(name, NEW, [name.replace("-", "_"), "flash_attn"])
    pip(*first)
    for step in rest:
        installed = pip(*step)
    assert index.asked == third_parties
    assert not index.asked & set(noxfile.PACKAGES)
    assert why_foreign(installed[package], noxfile.wheel(package)) == []


def test_a_third_party_taken_by_name_is_noticed(noxfile, package, index, pip):
    # older ones as well as newer, which is the same for every package
    version = OLD if package == noxfile.PACKAGES[0] else NEW
    index.offer(package, version, [package.replace("-", "_"), "flash_attn"])
    installed = pip(package)
    assert index.asked == {package}
    reasons = why_foreign(installed[package], noxfile.wheel(package))
    assert "its origin is not recorded" in reasons
    assert "it installs flash_attn, too" in reasons
    assert any(reason.endswith(("is missing", "differs")) for reason in reasons)


def test_ours_outrank_the_third_parties_of_today_though_no_index_is_forbidden(
    noxfile, package, index, pip
):
    index.offer(package, OLD, [package.replace("-", "_")])
    installed = pip("--no-deps", f"--find-links={noxfile.DIST}", package)
    assert installed[package].version != OLD


def test_only_no_index_keeps_a_newer_third_party_out(noxfile, package, index, pip):
    index.offer(package, NEW, [package.replace("-", "_")])
    installed = pip("--no-deps", f"--find-links={noxfile.DIST}", package)
    assert installed[package].version == NEW
    index.asked.clear()
    options = ("--no-deps", "--force-reinstall", "--no-index", f"--find-links={noxfile.DIST}")
    installed = pip(*options, package)
    # pip records an origin for a path only; the files are ours to the byte
    reasons = why_foreign(installed[package], noxfile.wheel(package))
    assert reasons == ["its origin is not recorded"]
    assert index.asked == set()


class Refused(Exception):
    pass


class Recorder:
    """Stands in for nox's session, and keeps what would have been run."""

    def __init__(self):
        self.calls = []
        self.posargs = []

    def install(self, *arguments, **_):
        self.calls.append(["pip", "install", *arguments])

    def run(self, *arguments, **_):
        self.calls.append(list(arguments))
        return ""

    def log(self, *_):
        pass

    chdir = warn = log

    def error(self, message):
        raise Refused(message)

    skip = error


def pip_installs(calls):
    for call in calls:
        if "install" in call and any(Path(word).name == "pip" for word in call):
            yield call[call.index("install") + 1 :]


def our_names(arguments, packages):
    """Return which of our packages an argument list names as a requirement, not as a path."""
    found = set()
    for word in arguments:
        if word.startswith("-") or "/" in word or word.endswith(".whl"):
            continue
        found |= {canonicalize_name(Requirement(word).name)} & set(packages)
    return found


def all_sessions(noxfile):
    for value in vars(noxfile).values():
        if hasattr(value, "func") and hasattr(value, "venv_backend"):
            parameters = inspect.signature(value.func).parameters
            each = noxfile.PACKAGES if "package" in parameters else [None]
            for package in each:
                yield value, [] if package is None else [package]


def test_no_session_asks_an_index_for_ours(noxfile, monkeypatch, tmp_path):
    monkeypatch.setattr(noxfile.shutil, "rmtree", lambda *_, **__: None)
    monkeypatch.setattr(noxfile, "LOCK", noxfile.FileLock(tmp_path / "lock"))
    seen = {}
    for session, arguments in all_sessions(noxfile):
        recorder = Recorder()
        with contextlib.suppress(Refused):  # a release says what it lacks
            session.func(recorder, *arguments)
        for call in pip_installs(recorder.calls):
            seen.setdefault(session.func.__name__, []).append(call)
            if "--no-index" not in call:
                assert our_names(call, noxfile.PACKAGES) == set()
                # a path would be built or installed with its dependencies from the index
                words = [w for w in call if w != str(noxfile.CONSTRAINTS)]
                assert not any("/" in w for w in words), call
    sessions = {"lint", "types", "build", "tests", "integration", "downstream", "demo", "dev"}
    assert sessions <= set(seen)
    assert any(our_names(["flash-attn-triton>=1"], noxfile.PACKAGES))
    assert not set(noxfile.LAYERS) & set(noxfile.PACKAGES)


def test_constraints_name_none_of_ours(noxfile):
    lines = noxfile.CONSTRAINTS.read_text().splitlines()
    names = {canonicalize_name(Requirement(x).name) for x in lines if x and x[0] != "#"}
    assert not names & set(noxfile.PACKAGES)
    assert {"torch", "triton"} <= names
