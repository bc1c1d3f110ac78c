"""Other repositories' kernels: what judges them, and that pages say what came of them."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from nki_paged_attn.sim import NotModelledError

PACKAGE = Path(__file__).parents[2]
UPSTREAM = PACKAGE / "benchmarks" / "upstream"


@pytest.fixture
def tools(monkeypatch):
    """Return the scripts of the folder, as modules."""
    if not UPSTREAM.is_dir():
        pytest.skip("an sdist lacks benchmarks/upstream")
    monkeypatch.syspath_prepend(str(UPSTREAM))
    found = {}
    for name in ("run", "recorder"):
        spec = importlib.util.spec_from_file_location(f"upstream_{name}", UPSTREAM / f"{name}.py")
        found[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found[name])
    return found


def refuse():
    raise NotModelledError("nisa.rng is not modelled [nki.isa.rng]")


def differ():
    np.testing.assert_allclose(1, 2)


def own_assertion():
    compile_and_run("assert False, 'a limit of the kernel'")


def compile_and_run(text):
    exec(compile(text, "kernel.py", "exec"))


@pytest.mark.parametrize(
    ("call", "status", "why"),
    [
        (lambda: None, "right", ""),
        (refuse, "refused", "nisa.rng is not modelled [nki.isa.rng]"),
        (differ, "wrong", "Not equal to tolerance"),
        (own_assertion, "error", "AssertionError: a limit of the kernel"),
        (lambda: [][0], "error", "IndexError: list index out of range"),
    ],
)
def test_a_call_is_judged(tools, call, status, why):
    found = tools["recorder"].judge(call)
    assert found[0] == status
    assert why in found[1]


def test_a_call_that_takes_too_long_ends(tools):
    found = tools["recorder"].guarded(lambda: [0 for _ in iter(int, 1)], 0.5)
    assert found["status"] == "slow"


def test_one_wrong_call_makes_a_kernel_wrong(tools):
    describe = tools["run"].describe
    calls = [{"status": s, "why": w} for s, w in (("right", ""), ("refused", "a"), ("wrong", "b"))]
    assert describe(calls) == ("wrong", "1 of 3 calls; wrong: b; refused: a")
    assert describe(calls[:2]) == ("right", "1 of 2 calls; refused: a")
    assert describe([]) == ("none", "")


def test_kernels_are_found_in_order_of_path(tools, tmp_path):
    for name in ("b.py", "a.py", "test_c.py"):
        (tmp_path / name).write_text("import nki\n@nki.jit(mode='x')\ndef kernel(x):\n    pass\n")
    (tmp_path / "d.py").write_text("import nki\ndef kernel(:\n")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run(["git", "-C", str(tmp_path), "add", "."], check=True)
    kernels = [("a.py", "kernel"), ("b.py", "kernel"), ("d.py", "(a syntax error)")]
    assert tools["run"].find_kernels(tmp_path) == kernels


def test_a_checkout_that_is_missing_is_named(tools, tmp_path):
    command = [sys.executable, str(UPSTREAM / "run.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "a checkout of autocomp at dd26a56 is missing" in done.stderr


def test_the_readme_says_what_the_table_says():
    """Every number of the README on other repositories' kernels is one of the table's page."""
    page = (PACKAGE / "docs" / "upstream.md").read_text()
    readme = " ".join((PACKAGE / "README.md").read_text().split())
    right, refused, wrong = map(
        int, re.search(r"(\d+) kernels are right, (\d+) refused, (\d+)", page).groups()
    )
    modules = re.search(r"(\d+) of nki-library's (\d+) modules", " ".join(page.split())).groups()
    assert wrong == 0
    assert f"{right} run right and {refused} are refused; none gives wrong numbers" in readme
    assert "{} of its {} modules import".format(*modules) in readme
    rows = [x for x in page.splitlines() if "`attention_cte`" in x]
    assert rows
    assert all("| right |" in x for x in rows)
