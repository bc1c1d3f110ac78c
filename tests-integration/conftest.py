"""The repository, its wheels and its noxfile, for tests that run with every package installed."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def load_noxfile():
    spec = importlib.util.spec_from_file_location("noxfile", ROOT / "noxfile.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NOXFILE = load_noxfile()


def pytest_generate_tests(metafunc):
    """Give a test that asks for ``package`` one run for each package."""
    if "package" in metafunc.fixturenames:
        metafunc.parametrize("package", NOXFILE.PACKAGES)


@pytest.fixture(scope="session")
def root():
    return ROOT


@pytest.fixture(scope="session")
def noxfile():
    return NOXFILE


@pytest.fixture
def python():
    """Run a program text in a fresh interpreter, and return what it printed."""

    def run(code, **options):
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    return run
