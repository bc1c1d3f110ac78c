"""What ci/mutations.py makes of a kernel, and that ci/mutants.py knows tests for every file."""

import ast
import json
import sys

import pytest

from .conftest import ROOT

sys.path.insert(0, str(ROOT / "ci"))
import mutants
import mutations

KERNEL = '''
import triton
import triton.language as tl


@triton.jit
def helper(x):
    """Not a statement that could be dropped: 1 + 1."""
    return x * 2


@triton.jit
def kernel(x_ptr, n, LEFT: tl.constexpr):
    tl.static_assert(n > 1)
    at = (tl.program_id(0)) * 16 + tl.arange(0, 16)
    inside = at < n
    if LEFT:
        inside &= at >= 3
    s = tl.load(x_ptr + at, mask=inside, other=0.0, cache_modifier=".cg")
    s = tl.where(inside, s, -1.5)
    tl.debug_barrier()
    tl.store(x_ptr + at, tl.maximum(s, 0), mask=inside)


def on_the_host(a):
    return a + 1
'''
# one of each kind, as "right -> wrong" in a line
EXPECTED = {
    "* -> + in return x * 2",
    "2 -> 3 in return x * 2",
    "* -> + in at = (tl.program_id(0)) * 16 + tl.arange(0, 16)",
    "< -> <= in inside = at < n",
    "LEFT -> not LEFT in if LEFT:",
    "inside &= at >= 3 -> pass in inside &= at >= 3",
    "s, -1.5 -> -1.5, s in s = tl.where(inside, s, -1.5)",
    "tl.debug_barrier() -> pass in tl.debug_barrier()",
    "maximum -> minimum in tl.store(x_ptr + at, tl.maximum(s, 0), mask=inside)",
    "inside -> (inside) | True in tl.store(x_ptr + at, tl.maximum(s, 0), mask=inside)",
}


@pytest.fixture
def found(tmp_path):
    path = tmp_path / "kernel.py"
    path.write_text(KERNEL)
    return mutations.mutations_of(path, "kernel.py")


def test_kinds(found):
    names = {mutation.name.partition(": ")[2] for mutation in found}
    assert names >= EXPECTED
    # neither on the host, nor of hints, nor of text
    told = " ".join(mutation.text for mutation in found)
    assert "a + 1" not in told
    assert "static_assert" not in told
    assert "Not a statement" not in told
    assert '".cg"' not in {mutation.right for mutation in found}


def test_each_changes_one_place(found):
    source = KERNEL.encode()
    texts = {mutation.applied(source) for mutation in found}
    assert len(texts) == len(found)
    assert source not in texts
    for mutation in found:
        assert source[mutation.begin : mutation.end].decode() == mutation.right
        ast.parse(mutation.applied(source))
        ast.parse(mutation.probed(source))
        assert b"_this_place_is_run_" in mutation.probed(source)


def test_samples_repeat(found):
    first, second = (list(mutations.sample(found, 3)) for _ in range(2))
    assert first == second
    assert sorted(m.begin for m in first) == sorted(m.begin for m in found)
    assert first != list(mutations.sample(found, 4))


def test_every_file_has_tests():
    for package in mutants.TESTS:
        for file in mutants.files_of(package):
            for name in mutants.tests_of(package, file):
                file, _, test = name.partition("::")
                (path,) = (ROOT / "packages" / package / "tests").rglob(file)
                text = path.read_text()
                assert f"def {test.partition('[')[0]}" in text, name


def test_all_of_a_package():
    found = mutants.all_mutations("lightning-attn")
    assert len(found) > 1000
    assert len({mutation.kind for mutation in found}) == 7


def test_what_is_explained_is_a_mutant():
    """A reason whose line has changed says nothing any more."""
    told = json.loads(mutants.SURVIVORS.read_text())
    assert told.keys() <= mutants.TESTS.keys()
    for package in told:
        names = {mutation.name for mutation in mutants.all_mutations(package)}
        assert set(mutants.explained(package)) <= names, package


def test_the_tree_is_as_before(tmp_path):
    tree = mutants.Tree("lightning-attn", tmp_path)
    path = tree.source / "lightning_attn" / "_linear" / "portable" / "walk.py"
    right, time = path.read_bytes(), path.stat().st_mtime
    with tree.changed("_linear/portable/walk.py", b"wrong"):
        assert path.read_bytes() == b"wrong"
        assert path.stat().st_mtime != time
    assert path.read_bytes() == right
    assert path.stat().st_mtime == time


def test_a_run_that_is_ended_leaves_what_it_found(tmp_path, monkeypatch):
    def tell(done, _):
        if len(done) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(mutants, "_prepare", lambda: None)
    monkeypatch.setattr(mutants, "_time_without", lambda *_: 0.0)
    monkeypatch.setattr(mutants, "outcome_of", lambda *_: mutants.SURVIVED)
    monkeypatch.setattr(mutants, "_tell", tell)
    path = tmp_path / "mutants.json"
    monkeypatch.setattr(sys, "argv", ["mutants.py", "lightning-attn", "--json", str(path)])
    with pytest.raises(KeyboardInterrupt):
        mutants.main()
    told = json.loads(path.read_text())
    assert told["tried"] == told["survived"] == len(told["survivors"]) == 2
