"""What of the benchmark needs no GPU: its cases, its arbiter, its files, and the documents."""

from __future__ import annotations

import importlib
import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "benchmarks"
NAMES = ("cases", "checks", "providers", "rivals", "documents", "shapes", "bench_flash_attn")
# of the harness, which is linked
HARNESS = ("report", "results", "timing", "plot")
SHAPE = "d192:128-h16:4-9x2205r831-packed-causal-w1023"


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    """Return a module that holds those of the benchmark, which are imported as scripts are."""
    path = str(FOLDER)
    sys.path.insert(0, path)
    try:
        held = ModuleType("bench")
        for name in NAMES:
            setattr(held, name, importlib.import_module(name))
        for name in HARNESS:
            setattr(held, name, importlib.import_module(f"_linked.{name}"))
        held.marked = importlib.import_module("_linked.documents")
        held.drawing = importlib.import_module("_linked.shapes")
        held.select = importlib.import_module("_linked.cases").select
        held.BENCH = held.bench_flash_attn.BENCH
        yield held
    finally:
        sys.path.remove(path)
        for name in list(sys.modules):
            if name in NAMES or name.split(".")[0] == "_linked":
                sys.modules.pop(name)


def small(problem, head_dim=16):
    """Return a problem of the same kind for the CPU."""
    values = head_dim // 2 if problem.values else 0
    return replace(problem.shrunk(), head_dim=head_dim, values=values)


def one_of_each(bench):
    """Return a problem of each family, and of each feature."""
    kinds = {}
    for problem in bench.cases.PROBLEMS:
        kind = problem.family, problem.causal, problem.bias, problem.alibi, problem.values
        kinds.setdefault(kind, problem)
    for name in (SHAPE, "d64-h5:1-3x4096r7-packed-full", "d64-h2:2-2x4096-causal-w255"):
        kinds[name] = bench.shapes.named(name)
    return [small(problem) for problem in kinds.values()]


# ---- cases


def test_cases_have_names_of_their_own_and_providers(bench):
    names = [p.case(one) for p in bench.cases.PROBLEMS for one in p.passes]
    assert len(set(names)) == len(names)
    drawn = bench.drawing.FAMILY
    assert {drawn, *(p.family for p in bench.cases.PROBLEMS)} == set(bench.cases.FAMILIES)
    assert next(iter(bench.cases.FAMILIES)) == drawn
    for providers in bench.cases.FAMILIES.values():
        assert set(providers) <= set(bench.rivals.PROVIDERS)


def test_families_and_filters_choose(bench):
    given = bench.cases.PROBLEMS, bench.BENCH.specials
    everything, host = bench.select(*given, [], [])
    assert [p for p, _ in everything] == list(bench.cases.PROBLEMS)
    assert host == list(bench.BENCH.specials)
    problems, host = bench.select(*given, ["bwd"], ["dropout", "host"])
    assert {p.family for p, _ in problems} == {"dropout"}
    assert {passes for _, passes in problems} == {("bwd",)}
    assert host == ["host-bwd"]
    assert bench.select(*given, [], ["dropout"])[1] == []
    problems, host = bench.select(*given, [], [], bench.cases.QUICK)
    assert {p.name for p, _ in problems} == bench.cases.QUICK
    assert host == []


def visible(problem):
    """Count visible pairs one by one, those on the diagonal as a half."""
    count = 0.0
    for number, length in enumerate(problem.lengths):
        prompt = problem.lengths[0] if problem.tree and number else 0
        for i in range(problem.queries or length):
            for j in range(length):
                if problem.window and j < i - problem.window:
                    continue
                count += (0.5 if i == j else j < i) if problem.causal else 1.0
            count += prompt
    return count


def test_work_is_that_of_the_visible_pairs(bench):
    for problem in one_of_each(bench):
        assert problem.pairs == visible(problem), problem
        d, dv = problem.head_dim, problem.head_dim_v
        pairs = visible(problem) * problem.heads_q
        # q k^T and p v; besides, dout v^T, p^T dout, ds k and ds^T q
        assert problem.flops("fwd") == 2 * pairs * (d + dv)
        assert problem.flops("bwd") == 2 * pairs * (3 * d + 2 * dv)


def test_bytes_are_those_of_the_tensors(bench):
    for problem in one_of_each(bench):
        inputs = bench.checks.make_inputs(problem, "cpu")
        sizes = {name: t.nbytes for name, t in vars(inputs).items() if isinstance(t, torch.Tensor)}
        lse = 4 * problem.tokens_q * problem.heads_q
        q, k, v, out = (sizes[name] for name in ("q", "k", "v", "dout"))
        bias = sizes.get("bias", 0)
        share = 0.5 if problem.dtype == "fp8" else 1.0
        assert problem.bytes("fwd") == share * (q + k + v) + out + lse + bias
        gradients = q + k + v + (bias if problem.learned else 0)
        assert problem.bytes("bwd") == q + k + v + 2 * out + lse + bias + gradients


# ---- shapes


def shapes_of(bench, seed, count):
    stream = bench.drawing.drawn(bench.shapes.roll, seed)
    return list(itertools.islice(stream, count))


def test_a_seed_draws_the_same_shapes_and_names_tell_them(bench):
    every = shapes_of(bench, 7, 400)
    assert shapes_of(bench, 7, 20) == every[:20] != shapes_of(bench, 8, 20)
    # a change of the draw would compare other shapes under the same seed
    assert every[0].name == "d40-h14:2-26x162-full"
    assert len({p.name for p in every}) == len(every)
    for problem in every:
        assert bench.shapes.named(problem.name) == problem
        assert bench.shapes.named(problem.case("bwd")) == problem
        assert 2**9 <= problem.tokens <= 2**15
        assert problem.bytes("bwd") <= 2**31
    dims = {(p.head_dim, p.head_dim_v) for p in every}
    assert dims >= {(d, d) for d in (40, 64, 72, 80, 96, 112, 128, 160, 192, 256)} | {(192, 128)}
    assert {p.heads_q // p.heads_k for p in every} == {1, 2, 4, 5, 7, 8, 16}
    assert {p.heads_k for p in every} >= {1, 3, 16}
    masks = {(p.packed, p.causal, bool(p.window)) for p in every}
    assert masks == {(x, c, w) for x in (False, True) for c, w in ((0, 0), (1, 0), (1, 1))}
    assert any(0 in p.lengths for p in every)
    assert bench.shapes.named("dense-d64-s1024-full") is None


def test_shapes_are_chosen_by_family_or_by_their_whole_name(bench, monkeypatch):
    def chosen(*arguments):
        monkeypatch.setattr(sys, "argv", ["bench", "--shapes", "5", *arguments])
        return [p.name for p, _ in bench.BENCH.chosen(bench.BENCH.parse())[0]]

    drawn = [p.name for p in shapes_of(bench, 3, 5)]
    assert chosen("--seed", "3", "--family", "shapes") == drawn
    assert chosen("--seed", "3")[:6] == [*drawn, bench.cases.PROBLEMS[0].name]
    assert chosen("--cases", SHAPE) == [SHAPE]
    assert all(bench.shapes.named(name) is None for name in chosen("--cases", "packed"))
    assert chosen("--quick")[0] in bench.cases.QUICK


@pytest.mark.aot  # as below
def test_a_window_is_the_definitions(bench):
    problem = bench.shapes.named("d16-h2:1-3x70r5-packed-causal-w9")
    inputs = bench.checks.make_inputs(problem, "cpu")
    found = bench.checks.reference(problem, inputs, ("bwd",))
    whole = bench.checks.CHUNK_SCORES
    try:
        bench.checks.CHUNK_SCORES = 2 * 16 * problem.max_seqlen
        cut = bench.checks.reference(problem, inputs, ("bwd",))
    finally:
        bench.checks.CHUNK_SCORES = whole
    for name, tensor in found.items():
        torch.testing.assert_close(cut[name], tensor)
    prepared = bench.rivals.PROVIDERS["ours"].prepare(problem, inputs, problem.passes)
    got = {"out": prepared.calls["fwd"]()}
    got |= dict(zip(("dq", "dk", "dv"), prepared.calls["bwd"](), strict=True))
    assert bench.checks.judge(got, found, problem)[0]
    wide = replace(problem, window=10)
    assert not bench.checks.judge(got, bench.checks.reference(wide, inputs, ("bwd",)), wide)[0]


def test_shapes_are_summed_up_by_length_and_pass(bench, tmp_path):
    rows = []
    for i, (ours, rival) in enumerate([(1.0, 2.0), (1.0, 0.5), (0.1, 0.3), (1.0, None)]):
        for one in ("fwd", "bwd"):
            row = {"case": f"d64-h1:1-1x{600 + i}-full-{one}", "family": "shapes", "pass": one}
            rows.append({**row, "provider": "ours", "status": "ok", "ms": ours})
            rival_row = {**row, "provider": "fa3", "status": "ok", "ms": rival}
            rows.append(rival_row if rival else {**row, "provider": "fa3", "status": "failed"})
    machine = {"device": "G", "torch": "0", "triton": "0"}
    found = {"machine": machine, "runs": {"2026-01-01 0": {}}, "results": rows, "host": []}
    text = bench.BENCH.summary(found)
    for word in ("forward", "backward"):
        assert f"| over 0.2 ms | {word} | 1.000 | 0.500 | 2 |" in text
        assert f"| up to 0.2 ms, host-bound | {word} | 3.000 | 3.000 | 1 |" in text
        assert f"| d64-h1:1-1x601-full | {word} | over 0.2 ms | 0.500 |" in text
    assert "Passes without the rival: 2." in text
    pytest.importorskip("matplotlib")
    (path,) = bench.BENCH.plot(found, tmp_path / "x.png")
    assert path.name == "x-shapes.png"
    assert path.exists()


# ---- the arbiter


@pytest.mark.aot  # interpreted, the kernels would take minutes
def test_the_arbiter_agrees_with_the_definition(bench):
    """Every kind of problem as the benchmark measures it, with our function on the CPU."""
    timer = bench.timing.Timer("cpu", 0.0, 0.0)
    for problem in one_of_each(bench):
        rows = bench.BENCH.measure(problem, problem.passes, ["ours", "base"], timer, 1)
        assert {row["status"] for row in rows} <= {"ok", "skipped"}, rows
        assert any(row["status"] == "ok" for row in rows)


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_the_arbiter_sees_a_wrong_tile(bench, name):
    problem = small(replace(bench.cases.PROBLEMS[0], lengths=(8192,)))
    problem = replace(problem, lengths=(256,), heads_q=1, heads_k=1)
    inputs = bench.checks.make_inputs(problem, "cpu")
    right = bench.checks.reference(problem, inputs, ("bwd",))
    assert bench.checks.judge(right, right, problem)[0]
    wrong = {**right, name: right[name].clone()}
    wrong[name][64:128] *= 1.1
    assert not bench.checks.judge(wrong, right, problem)[0]
    wrong[name][64] = math.nan
    assert not bench.checks.judge(wrong, right, problem)[0]


@pytest.mark.parametrize(
    ("probability", "scale", "right"),
    [(0.1, 1.0, True), (0.1, 0.9, False), (0.3, 1.0, False), (0.0, 1.0, False)],
)
def test_the_arbiter_wants_as_much_dropout_as_was_asked_for(bench, probability, scale, right):
    problem = small(next(p for p in bench.cases.PROBLEMS if p.dropout))
    problem = replace(problem, lengths=(16384,))
    torch.manual_seed(0)
    expected = {"out": torch.randn(16384, 4, 16)}
    kept = (torch.rand(16384, 4, 16) >= probability) / (1.0 - probability)
    got = {"out": expected["out"] * kept * scale}
    assert bench.checks.judge(got, expected, problem)[0] == right
    got["out"][64:128, 0] = 0.0
    assert not bench.checks.judge(got, expected, problem)[0]


# ---- providers


def test_what_is_not_there_is_skipped_with_a_message(bench, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "fa3", None)  # its import fails
    kept = bench.BENCH.available(list(bench.rivals.PROVIDERS), "cpu")
    said = capsys.readouterr().out
    for name in ("fa3", "fa3-repeats", "cudnn"):
        assert name not in kept
        assert f"provider {name} skipped: needs a CUDA device" in said
    assert "cannot import fa3" in bench.rivals.Fa3().unavailable("cuda")


@pytest.mark.parametrize(
    ("provider", "feature"),
    [("fa3", "dropout"), ("cudnn", "alibi"), ("fa2", "tree"), ("flex", "bias"), ("cudnn", "dtype")],
)
def test_what_a_rival_does_not_offer_is_refused(bench, monkeypatch, provider, feature):
    monkeypatch.setitem(sys.modules, "fa3", ModuleType("fa3"))
    plain = "bf16" if feature == "dtype" else type(getattr(bench.cases.PROBLEMS[0], feature))()
    problem = next(p for p in bench.cases.PROBLEMS if getattr(p, feature) != plain)
    inputs = bench.checks.make_inputs(small(problem), "cpu")
    with pytest.raises(bench.rivals.UnsupportedError, match="FP8" if plain == "bf16" else feature):
        bench.rivals.PROVIDERS[provider].prepare(small(problem), inputs, ("fwd",))


def test_flash_attention_3_gets_the_window_and_the_lengths(bench, monkeypatch):
    given = {}
    fake = ModuleType("fa3")
    fake.fwd = lambda q, k, v, **options: given.update(options) or (q, None)
    monkeypatch.setitem(sys.modules, "fa3", fake)
    problem = small(bench.shapes.named(SHAPE))
    inputs = bench.checks.make_inputs(problem, "cpu")
    bench.rivals.Fa3().prepare(problem, inputs, ("fwd",)).calls["fwd"]()
    assert (given["causal"], given["window"]) == (True, (problem.window, 0))
    assert given["cu_q"].diff().tolist() == list(problem.lengths)


# ---- the file


def run_of(began: str, *cases: str, commit: str = "abc", speed: float = 1.0) -> dict[str, Any]:
    rows = [
        {"case": case, "family": "grid", "provider": "ours", "run": began, "tflops": speed}
        for case in cases
    ]
    runs = {began: {"settings": {}, "ceilings": {}}}
    return {"machine": {"device": "G", "commit": commit}, "runs": runs, "results": rows, "host": []}


def test_a_run_replaces_the_cases_that_it_measured(bench):
    first, second = run_of("1", "a", "b"), run_of("2", "b", "c", speed=2.0)
    merged = bench.results.merge(first, second)
    found = {row["case"]: (row["run"], row["tflops"]) for row in merged["results"]}
    assert found == {"a": ("1", 1.0), "b": ("2", 2.0), "c": ("2", 2.0)}
    assert list(merged["runs"]) == ["1", "2"]
    # a run of which nothing is left is forgotten
    assert list(bench.results.merge(merged, run_of("3", "a"))["runs"]) == ["2", "3"]
    assert bench.results.merge(None, first) == first


def test_results_of_another_commit_are_refused(bench):
    with pytest.raises(ValueError, match="commit abc, this is def"):
        bench.results.merge(run_of("1", "a"), run_of("2", "b", commit="def"))


def test_a_file_is_read_as_it_was_written(bench, tmp_path):
    results = run_of("1", "a", "b")
    bench.results.write(results, tmp_path / "x.json")
    assert bench.results.read(tmp_path / "x.json") == results


# ---- tables


def case_rows(**speeds: float) -> list[dict[str, Any]]:
    case = "dense-d128-s4096-full-fwd"
    row = {"case": case, "family": "grid", "pass": "fwd", "status": "ok"}
    return [{**row, "provider": name, "tflops": speed} for name, speed in speeds.items()]


@pytest.mark.parametrize(
    ("speed", "verdict"), [(110.0, "goal"), (101.0, "gate"), (99.0, "**missed**")]
)
def test_an_aim_is_judged_by_its_ratio(bench, speed, verdict):
    found = {"results": case_rows(ours=speed, fa3=100.0), "host": []}
    line = bench.documents.aims(bench.BENCH, found).splitlines()[2]
    assert line.split("|")[-3:-1] == [f" {speed / 100:.2f} ", f" {verdict} "]


@pytest.mark.parametrize(
    ("ours", "verdict"), [(90.0, "goal"), (120.0, "gate"), (130.0, "**missed**")]
)
def test_of_times_less_is_better(bench, ours, verdict):
    rows = [
        {"case": case, "provider": name, "status": "ok", "median_us": t}
        for case, t_ours in (("host-step", 900.0), ("host-small-step", ours))
        for name, t in (("ours", t_ours), ("fa2", 100.0))
    ]
    line = bench.documents.aims(bench.BENCH, {"results": [], "host": rows}).splitlines()[2]
    assert line.split("|")[-2].strip() == verdict


def test_a_table_goes_where_its_name_stands(bench):
    text = "ahead\n<!-- table: x -->\nold\n<!-- end of table -->\nbetween\n"
    text += "<!-- table: y -->\n<!-- end of table -->\n"
    once = bench.marked.filled(text, {"x": "1", "y": "2"})
    assert once.index("1") < once.index("between") < once.index("2")
    assert "old" not in once
    assert bench.marked.filled(once, {"x": "1", "y": "2"}) == once
    with pytest.raises(KeyError):
        bench.marked.filled(text, {"x": "1"})


def test_the_documents_hold_what_was_measured(bench):
    if not bench.bench_flash_attn.RESULTS.exists():
        pytest.skip("an sdist has no results")
    made = bench.BENCH.tables(bench.results.read(bench.bench_flash_attn.RESULTS))
    shown = []
    for path in bench.BENCH.written:
        text = path.read_text(encoding="utf-8")
        assert bench.marked.filled(text, made) == text, f"{path}: run --documents"
        shown += [name for name in made if f"<!-- table: {name} -->" in text]
    assert set(shown) == set(made)
