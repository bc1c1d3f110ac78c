"""Point 12: the kernel's source keeps to what every front end reads, and needs ``nki`` alone."""

from __future__ import annotations

import ast
import functools
import importlib
import subprocess
import sys
import types
from pathlib import Path

import nki_paged_attn
import pytest
from nki_paged_attn.sim import isa, lint

KERNELS = Path(nki_paged_attn.__file__).parent / "_kernels"
EXAMPLES = Path(__file__).parents[2] / "examples"
SOURCES = sorted(KERNELS.glob("*.py")) + [
    EXAMPLES / f"{name}.py" for name in ("rms_norm", "softmax", "tiled_matmul")
]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_12_kernels_keep_to_the_subset(path):
    assert lint(path.read_text()) == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_12_kernels_import_nki_and_each_other_alone(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert {alias.name for alias in node.names} <= {"nki", "nki.isa", "nki.language"}
        elif isinstance(node, ast.ImportFrom):
            # an example that is run as a file asks for the simulator, and for what checks it
            beside = {"nki_paged_attn.sim", "run"} if path.parent == EXAMPLES else set()
            assert node.level == 1 or node.module in beside


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("def f(x):\n    return x is None", "line 2: uses is"),
        ("def f(x):\n    return x is not None", "uses is"),
        ("def f(x, *, y):\n    return x", "keyword-only"),
        ("y = np.exp(x)", "uses np.exp"),
        ("nl.load(x, mask=m)", "passes mask="),
        ("i = nl.arange(4)", "uses arange"),
        ("@nki.jit\ndef f(x):\n    return x\n\ndef g(x):\n    return f(x)", "the helper f"),
        ("y = nl.exp(x)", "calls nl.exp for its value"),
        ("try:\n    x = 1\nexcept ValueError:\n    pass", "uses try"),
        ("with x:\n    pass", "uses with"),
        ("f = lambda x: x", "uses lambda"),
        ("class A:\n    pass", "uses classdef"),
        ("x = y.pop(0)", "pops by an index"),
        ("x = sum(i for i in y)", "uses generatorexp"),
        ("def f():\n    yield 1", "uses yield"),
    ],
)
def test_the_lint_finds(text, what):
    found = lint(text)
    assert any(what in line for line in found), found


@pytest.mark.parametrize(
    "text",
    ["x = y.pop()", "nisa.activation(dst=x, op=nl.exp, data=y)", "for i in range(4):\n    f(i)"],
)
def test_the_lint_lets_pass(text):
    assert lint(text) == []


def test_12_runs_unmodified_against_another_nki(monkeypatch):
    """A stub package that records the names of calls, and passes each on to the simulator."""
    from nki_paged_attn._paged import backends
    from nki_paged_attn.sim import language
    from nki_paged_attn.sim.simulator import jit, simulate

    from .._cases import make_case

    calls = []

    class Recording(types.ModuleType):
        def __getattr__(self, name):
            found = getattr(isa, name)
            if not isinstance(found, types.FunctionType):
                return found

            def call(*arguments, **options):
                calls.append(name)
                return found(*arguments, **options)

            return call

    nki = types.ModuleType("nki")
    nki.isa, nki.language, nki.jit = Recording("nki.isa"), language, jit
    # AWS's does not ask whether outputs are written as a whole
    nki.simulate = functools.partial(simulate, strict=False)
    for name, module in {"nki": nki, "nki.isa": nki.isa, "nki.language": language}.items():
        monkeypatch.setitem(sys.modules, name, module)
    modules = [n for n in sys.modules if n.startswith("nki_paged_attn._kernels")]
    for name in modules:
        monkeypatch.delitem(sys.modules, name)
    case = make_case([70, 1], [40, 200])
    expected = case.run()[0]
    got = case.run(backend="nki-sim")[0]
    assert (got == expected).all()
    kernel = importlib.import_module("nki_paged_attn._kernels.form")
    assert kernel.nisa is nki.isa
    for name in [n for n in sys.modules if n.startswith("nki_paged_attn._kernels.")]:
        monkeypatch.delitem(sys.modules, name)
    log = simulate(backends.simulated_kernel()).trace
    assert log.instructions == []
    assert calls.count("nc_matmul") > 10
    assert set(calls) >= {"dma_copy", "nc_transpose", "activation", "range_select"}


def test_the_loader_leaves_other_modules_alone():
    code = (
        "import sys, builtins; before = builtins.__import__;"
        "from nki_paged_attn._paged.backends import simulated_kernel; simulated_kernel();"
        "assert builtins.__import__ is before;"
        "assert not [n for n in sys.modules if n == 'nki' or n.startswith('nki.')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_loader_knows_what_it_does_not_model(tmp_path):
    from nki_paged_attn.sim import load

    (tmp_path / "a.py").write_text("import nki.compiler\n")
    with pytest.raises(ImportError, match=r"nki.compiler is not modelled"):
        load(tmp_path / "a.py")
    (tmp_path / "b.py").write_text("import math\nfrom . import c\nfrom .c import x\ny = c.x + x\n")
    (tmp_path / "c.py").write_text(
        "from nki import language\nfrom nki.language import float32\nx = 2\n"
    )
    assert load(tmp_path / "b.py").y == 4
