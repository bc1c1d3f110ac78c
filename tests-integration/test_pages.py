"""The documentation as a site: pages, their links, and the figures of what was measured."""

import json
import sys

import pytest


@pytest.fixture
def pages(root, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(root / "ci"))
    for name in ("pages", "dashboard"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import pages

    monkeypatch.setattr(pages, "STAGE", tmp_path)
    return pages


def test_every_document_is_a_page_and_every_link_leads_somewhere(pages, noxfile, tmp_path):
    found = {str(path) for path in pages.stage("")}
    for package in noxfile.PACKAGES:
        expected = {"README.md", "CHANGELOG.md", "docs/tutorial.md", "docs/reference.md"}
        assert {f"packages/{package}/{name}" for name in expected} <= found
    assert {"README.md", "docs/numerics.md", "dashboard/index.md"} <= found
    for name in found:
        assert (tmp_path / "docs" / name).is_file()


def test_navigation_holds_every_page_once(pages):
    def leaves(entry):
        if isinstance(entry, str):
            return [entry]
        values = entry.values() if isinstance(entry, dict) else entry
        return [leaf for value in values for leaf in leaves(value)]

    found = pages.stage("")
    assert sorted(leaves(pages.navigation(found))) == sorted(map(str, found))


@pytest.mark.parametrize(
    ("text", "repository", "expected"),
    [
        ("[a](b.md#c)", "", "[a](b.md#c)"),
        ("[a](../linked)", "", "[a](../linked/README.md)"),
        ("[a](../noxfile.py)", "", "a"),
        ("[a](../noxfile.py)", "https://host/r", "[a](https://host/r/blob/HEAD/noxfile.py)"),
        ("[a](https://host/x.md)", "", "[a](https://host/x.md)"),
        ("[a](#c)", "", "[a](#c)"),
        ("```\n[a](nowhere.md)\n```", "", "```\n[a](nowhere.md)\n```"),
        ("Words:\n- one\n- two", "", "Words:\n\n- one\n- two"),
    ],
)
def test_links_lead_to_pages_or_to_the_repository(pages, text, repository, expected):
    staged = {pages.Path(name) for name in ("docs/b.md", "linked/README.md")}
    assert pages.rewrite(text, pages.Path("docs/a.md"), staged, repository) == expected


def test_a_link_that_leads_nowhere_is_an_error(pages):
    with pytest.raises(ValueError, match=r"docs/a.md: the link to nowhere.md leads nowhere"):
        pages.rewrite("[a](nowhere.md)", pages.Path("docs/a.md"), set(), "")


def test_docstrings_are_markdown(pages):
    text = "As :func:`attend` and :class:`~a.B` do::\n\n    a::b"
    assert pages.markdown(text) == "As `attend` and `a.B` do:\n\n    a::b"


def test_ratios_are_geometric_means_over_cases_that_both_ran(pages):
    def row(case, provider, ms):
        return {"case": case, "family": "grid", "pass": "fwd", "provider": provider, "ms": ms}

    rows = [row("a", "ours", 1.0), row("a", "fa3", 2.0), row("b", "ours", 2.0)]
    rows += [row("b", "fa3", 1.0), row("c", "ours", 1.0), row("d", "fa3", 9.0)]
    assert pages.dashboard.ratios(rows, "fa3") == {"grid forward": pytest.approx(1.0)}
    rows[1]["ms"] = 8.0
    assert pages.dashboard.ratios(rows, "fa3") == {"grid forward": pytest.approx(2.0)}


def test_every_plot_of_a_page_has_a_figure(pages, root):
    files = pages.dashboard.pages(root)
    for name, text in files.items():
        if name.endswith(".md") and name != "index.md":
            figures = json.loads(files[name.replace(".md", ".json")])
            asked = [part.split('"')[0] for part in text.split('data-name="')[1:]]
            assert asked
            assert sorted(asked) == sorted(figures)
            assert all(trace["y"] for figure in figures.values() for trace in figure["data"])
    assert "repeats-cost" in json.loads(files["blocksparse-attn.json"])


def test_every_committed_result_is_drawn(pages, root):
    """Each row that was right and timed is a point of a plot, and says of which file it is."""
    files = pages.dashboard.pages(root)
    for folder in sorted(root.glob("packages/*/benchmarks/results")):
        figures = json.loads(files[f"{folder.parts[-3]}.json"]).values()
        for path in folder.glob("*.json"):
            own = [figure for figure in figures if figure.get("of") == path.name]
            points = sum(y is not None for f in own for trace in f["data"] for y in trace["y"])
            data = json.loads(path.read_text())
            rows = pages.dashboard._rows(data)
            twice = sum("fwd" in row and "bwd" in row for row in rows)
            assert own, path
            assert points == len(rows) + twice or "computed, not measured" in data, path


def test_what_repeating_costs_is_drawn_where_it_was_measured(pages):
    def row(provider, ms):
        return {"case": "a", "family": "repeats", "provider": provider, "ms": ms}

    assert pages.dashboard._repeats([row("ours", 2.0)]) is None
    figure = pages.dashboard._repeats([row("ours", 2.0), row("base", 1.5)])
    assert [trace["y"] for trace in figure["data"]] == [[0.75]]
