"""What builds may spill: the files of the packages, the comparison, and what writes them."""

import json
import sys

import pytest

from .conftest import ROOT

sys.path.insert(0, str(ROOT / "ci"))
sys.path.insert(0, str(ROOT / "linked"))
import spills
from testing.gpus import Build
from testing.spills import most_spilled

FILES = sorted(ROOT.glob("packages/*/tests/spills.json"))
KNOWN = {
    "triton": ["3.6.0", "3.9.0"],
    "reasons": {"gpu *": "why not"},
    "bounds": {"gpu d64* walk": [16, 24], "gpu d64-full walk": [40, 8]},
    "spills": {"gpu d64 walk": [8, None], "gpu d128 walk": [0, 16]},
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parts[-3])
def test_files_are_in_order(path, noxfile):
    known = json.loads(path.read_text())
    assert path.read_text() == spills.text_of(known)
    assert known["triton"] == [noxfile.OLDEST_TRITON, noxfile.NEWEST_TRITON]
    assert list(known["spills"]) == sorted(known["spills"])
    assert not spills.unexplained(known)
    for pattern in known["reasons"] if "bounds" not in known else ():
        assert any(spills.is_fit(name, {pattern: ""}) for name in known["spills"]), pattern


@pytest.mark.parametrize(
    ("name", "version", "most"),
    [
        ("gpu d64 walk", "3.6.0", 8),
        ("gpu d64 walk", "3.9.0", 24),  # not measured
        ("gpu d64-full walk", "3.6.0", 40),
        ("gpu d64-full walk", "3.9.0", 24),
        ("gpu d128 walk", "3.6.0", 0),
        ("gpu d128 walk", "3.9.0", 16),
        ("gpu d128 walk", "3.7.1", 16),
        ("gpu d256 walk", "3.9.0", 0),
    ],
)
def test_most_that_may_be_spilled(name, version, most):
    assert most_spilled(name, KNOWN, version) == most


def line(build: str, spilled: int, triton: str = "3.9.0") -> dict[str, object]:
    return {"build": build, "triton": triton, "spilled": spilled}


def test_a_report_replaces_what_it_has():
    report = [line("gpu d64 walk", 0), line("gpu d128 walk", 0), line("gpu d256 walk", 4, "3.6.0")]
    assert spills.merge(KNOWN, report, False)["spills"] == {
        "gpu d256 walk": [4, 0],
        "gpu d64 walk": [8, 0],
    }
    # a bound fits: that nothing is spilled has to be said
    found = spills.merge(KNOWN, [line("gpu d64-full walk", 0)], False)["spills"]
    assert found["gpu d64-full walk"] == [None, 0]


def test_a_report_of_everything_leaves_nothing_else():
    report = [line("gpu d64 walk", 4), line("gpu d256 walk", 0), line("gpu d64 walk", 0, "3.6.0")]
    found = spills.merge(KNOWN, report, True)
    assert found["spills"] == {"gpu d64 walk": [0, 4]}
    assert "bounds" not in json.loads(spills.text_of(found))


def test_names_are_of_one_build():
    with pytest.raises(ValueError, match="two builds are called gpu d64 walk"):
        spills.merge(KNOWN, [line("gpu d64 walk", 4), line("gpu d64 walk", 8)], False)


def test_what_spills_has_a_reason():
    assert not spills.unexplained(KNOWN)
    assert spills.unexplained({**KNOWN, "reasons": {"gpu d64*": ""}}) == ["gpu d128 walk"]


def test_builds_are_held_to_the_file(monkeypatch, tmp_path):
    from testing import spills as checks

    known = {**KNOWN, "spills": {"nvidia:sm_90 d64 walk 2": [16, 16]}}
    monkeypatch.setattr(checks, "measured", lambda: known)
    one, two = (Build("walk", 0, 128, spilled) for spilled in (0, 16))
    checks.check_builds("nvidia:sm_90", "d64", [one, two])
    with pytest.raises(AssertionError, match="d64 walk: walk: 128 registers, 16 spilled"):
        checks.check_builds("nvidia:sm_90", "d64", [two, one])
    with pytest.raises(AssertionError, match="512 KiB"):
        checks.check_builds("nvidia:sm_90", "d64", [Build("walk", 512 * 1024, 128, 0)])
    monkeypatch.setenv("ATTN_AOT_REPORT", str(tmp_path / "report"))
    checks.check_builds("nvidia:sm_90", "d64", [two, one])
    told = [json.loads(x) for x in (tmp_path / "report").read_text().splitlines()]
    assert [(x["build"], x["spilled"]) for x in told] == [
        ("nvidia:sm_90 d64 walk", 16),
        ("nvidia:sm_90 d64 walk 2", 0),
    ]
