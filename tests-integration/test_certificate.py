"""The cases of sanitizers and errors, what is read of a sanitizer, and the certificate."""

import json
import sys

import pytest

from .conftest import ROOT

sys.path.insert(0, str(ROOT / "ci"))
import certificate
import device_cases
import errors
import sanitize
from device_cases import ALGEBRA, CASES


def test_every_kernel_package_has_cases(noxfile):
    assert {case.package for case in CASES.values()} == set(noxfile.KERNEL_PACKAGES)
    assert len(CASES) > 80


@pytest.mark.parametrize(
    "name",
    [
        "prefix-prefill/decode/d64/splits",
        "prefix-prefill/latent fp8/d576:512/decode",
        "flash-attn-triton/forward/d64/few queries",
        "lightning-attn/walk/d64:64/sequential",
    ],
)
def test_a_case_is_within_its_bound(name):
    found = errors.measure(CASES[name], "cpu")
    assert errors.is_right(found)
    for told in found.values():
        assert "over_bound" in told
        told["relative"] = float("inf")
        told.pop("over_bound", None)
    assert not errors.is_right(found)


RIGHT = {"out": {"relative": 0.001}}
CONSAN = "kernel.py:7: f: block: [0,0,0] Assertion `Buffer being accessed has writes` failed.\n"
MEMCHECK = "========= Invalid __global__ read of size 4 bytes\n=========   at kernel+0x10\n"


@pytest.mark.parametrize(
    ("status", "text", "outcome"),
    [
        (0, "", "clean"),
        (0, CONSAN * 3, "finding"),
        (99, MEMCHECK, "finding"),
        (1, "Traceback\nRuntimeError: no", "failed"),
    ],
)
def test_what_is_read_of_a_tool(status, text, outcome):
    line = "" if outcome == "failed" else sanitize.RESULT + json.dumps({"results": RIGHT})
    told = sanitize.outcome_of(status, f"{text}{line}\n")
    assert told["outcome"] == outcome
    if text == CONSAN * 3:
        assert told["findings"] == {"kernel.py:7: Buffer being accessed has writes": 3}


def test_results_beyond_their_bound_are_wrong():
    told = {"results": {"out": {"relative": 0.001, "over_bound": {"1.0": 1.5}}}}
    assert sanitize.outcome_of(0, sanitize.RESULT + json.dumps(told))["outcome"] == "wrong"


def test_the_certificate_is_of_the_committed_results():
    written = (ROOT / "docs" / "certificate.md").read_text()
    assert written == certificate.text(ROOT / "docs" / "certificate")


def test_mutants_of_one_name_are_explained_each():
    told = {"package": "lightning-attn", "mutations": 9, "tried": 3, "caught": 0, "hung": 0,
            "survived": 3, "not run": 0, "score": 0.0, "commit": "0"}  # fmt: skip
    known = next(iter(certificate.explained("lightning-attn")))
    told["survivors"] = [{"mutant": name} for name in (known, known, "other")]
    page = "\n".join(certificate.mutants([told]))
    assert "| 3, 2 explained |" in page
    assert page.count("| not explained |") == 1


def test_what_was_not_run_is_said(tmp_path):
    assert "not run" in certificate.text(tmp_path)
    told = {"tool": "consan", "commit": "abc", "triton": "3.6.0", "device": "H200", "cases": {}}
    name = "prefix-prefill/decode/d64/splits"
    told["cases"][name] = {"outcome": "finding", "findings": {"a race": 2}}
    (tmp_path / "sanitize-consan.json").write_text(json.dumps(told))
    text = certificate.text(tmp_path)
    assert "a race" in text
    assert "abc" in text


@pytest.mark.parametrize("name", [name for name in ALGEBRA if "d64" in name])
def test_what_fpsan_compares_is_a_forward_without_a_mask(name, monkeypatch):
    monkeypatch.setattr(device_cases, "TILES", 32)  # the interpreter is slow
    case = ALGEBRA[name]
    assert case.switch == f"{case.package.upper().replace('-', '_')}_HOPPER"
    out = case.run("cpu")
    assert out.isfinite().all()
    assert "causal" not in case.options
    assert "window_size" not in case.options
    assert case.exact().numel() == out.numel()
    assert case.exact().dtype == out.dtype


def told(launched, results, outcome="clean"):
    return {"outcome": outcome, "launched": launched, "results": results, "exact": "1"}


@pytest.mark.parametrize(
    ("hopper", "portable", "outcome"),
    [
        (told(["a"], "1"), told(["b"], "1"), "clean"),
        (told(["a"], "1"), told(["b"], "2"), "finding"),
        (told(["a"], "2"), told(["b"], "2"), "finding"),
        (told(["a"], "1"), told(["a"], "1"), "failed"),
        (told(["a"], "1"), told(["b"], "1", "timeout"), "timeout"),
        (told(["a"], "1", "failed"), told(["b"], "1"), "failed"),
    ],
)
def test_two_kernels_are_compared(hopper, portable, outcome):
    found = sanitize.compared(hopper, portable)
    assert found["outcome"] == outcome
    differ = [f"{x['launched'][0]}: not" for x in (hopper, portable) if x["results"] != "1"]
    assert [line[:6] for line in found.get("findings", ())] == differ


def test_a_case_of_fpsan_gives_a_hash():
    line = sanitize.RESULT + json.dumps({"results": "abc", "launched": []})
    assert sanitize.outcome_of(0, line)["outcome"] == "clean"


def test_a_triton_without_fpsan_is_said(monkeypatch):
    monkeypatch.setattr(sanitize, "has_fpsan", lambda: False)
    found = sanitize.sanitize("fpsan", list(ALGEBRA), "cpu", 1, 60, 60)
    assert {x["outcome"] for x in found.values()} == {"not run"}
    assert found.keys() == ALGEBRA.keys()


NAMES = list(CASES)[:5]
OF_ONE = {"tool": "memcheck", "torch": "2.11.0", "triton": "3.6.0", "device": "H100"}


def file_of(commit, outcomes, **changes):
    """What one call wrote: cases by their numbers, each with its outcome."""
    cases = {NAMES[i]: {"outcome": outcome} for i, outcome in outcomes.items()}
    return {**OF_ONE, "commit": commit, "cases": cases, **changes}


def test_files_are_merged_and_cases_keep_their_commit(monkeypatch, tmp_path, capsys):
    first = file_of("a", {4: "clean", 3: "clean", 0: "timeout", 1: "clean", 2: "clean"})
    first["cases"]["gone"] = {"outcome": "finding"}
    second = file_of("b", {0: "clean", 1: "not run", 2: "finding"})
    # nothing was run, so nothing is known of the machine
    nothing = {"tool": "memcheck", "commit": "c", "cases": {NAMES[3]: {"outcome": "not run"}}}
    paths = [tmp_path / name for name in ("out.json", "second.json", "nothing.json")]
    # the first one is written anew
    for path, told in zip(paths, (first, second, nothing), strict=True):
        path.write_text(json.dumps(told))
    arguments = [str(paths[0]), *map(str, paths)]
    monkeypatch.setattr(sys, "argv", ["sanitize.py", "--merge", *arguments])
    sanitize.main()
    found = json.loads(paths[0].read_text())
    outcomes = ["clean b", "clean a", "finding b", "clean a", "clean a"]
    said = {name: f"{told['outcome']} {told['commit']}" for name, told in found["cases"].items()}
    assert list(said.items()) == list(zip(NAMES, outcomes, strict=True))
    head = {**OF_ONE, "commit": "a, 2 of them b", "counts": {"clean": 4, "finding": 1}}
    assert json.loads(capsys.readouterr().out) == head
    assert {key: value for key, value in found.items() if key != "cases"} == head
    # what was merged can be merged again
    again = sanitize.merged([found, file_of("c", {0: "clean"})])
    assert [told["commit"] for told in again["cases"].values()] == ["c", "a", "b", "a", "a"]


@pytest.mark.parametrize("key", OF_ONE)
def test_files_to_merge_are_of_one_machine(key):
    files = [file_of("a", {0: "clean"}), file_of("b", {0: "clean"}, **{key: "fpsan"})]
    with pytest.raises(ValueError, match=f"{key} must be the same in files to merge, got .* and"):
        sanitize.merged(files)
